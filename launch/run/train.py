"""`make train`: from the request as typed to a plan whose hosts are ready, its start, and a view of it (watch.py)."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from keeper import MASTER_PORTS
from launch.cli import exits, signals
from launch.cli.output import say
from launch.cli.refusal import refuse
from launch.deploy.workload import has_horovod
from launch.files import stored
from launch.hosts import clustermap, ssh
from launch.hosts.connection import Machine, machines
from launch.job import placeholders, project, trainer_arguments
from launch.job import plan as plans
from launch.job import resume as resuming
from launch.job.follow import View
from launch.job.plan import Plan, Ports
from launch.run import keep, private
from launch.run.begin import Asked, begin, built_before, check_settings
from launch.run.display import Display
from launch.run.origin import Origin, commit_here, project_of
from launch.run.watch import Watch

if TYPE_CHECKING:
    from containers.image import Image


@dataclass(frozen=True)
class Request:
    """`make train` as typed."""

    inventory: Path
    nodes: str = ""
    args: str = ""
    workload: str = ""
    script: str = ""
    project: str = ""
    resume: str = ""
    grace: str = ""
    max_restarts: str = ""
    min_nodes: str = ""
    max_host_failures: str = ""
    keep_runs: str = ""
    dry_run: bool = False
    skip_check: bool = False
    secrets: str = ""
    launcher: str = ""
    view: str = ""
    wait: bool = False
    detach: bool = False


def train(request: Request, console: Console) -> int:
    """Run a training job; returns the exit status. Raises Refusal when nothing was started."""
    options, kept_runs, plain = parse_options(request), keep.parse(request.keep_runs), parse_view(request.view)
    secrets = private.read(request.secrets, say)
    cluster = clustermap.read(request.inventory)
    earlier = resuming.find(request.resume, request.inventory) if request.resume else None
    workload = request.workload or request.project
    if earlier:
        options = resuming.continued(options, earlier)
        workload = workload or (project_of(earlier.run) if earlier.project else "")
    _check_horovod(options.launcher, cluster)
    hosts = plans.hosts_of_run(cluster, options)
    members = plans.chosen_hosts(cluster, options.nodes)
    options = replace(options, min_nodes=plans.parse_min_nodes(request.min_nodes, len(members)))
    run, created = plans.new_run_id(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    owner = ssh.local_user()
    if request.dry_run:
        settings = check_settings(options, cluster, workload)
        if workload:
            from containers.workload_image import reference_of

            options = replace(options, image=reference_of(Path(workload)))
        first, reach = MASTER_PORTS, clustermap.REACH_PORTS
        some = Ports(first[0], first[0] + 1, (reach[0],) * len(hosts))
        print(plans.describe(plans.make_plan(cluster, options, run, some, owner, created)))
        chosen = "from {} to {} on {}, and from {} to {} on each host".format(*first, hosts[0].name, *reach)
        print(f"\nDry run: nothing was started. The start picks free ports {chosen}.")
        if settings.get("communication") == "auto" and len(members) > 1:
            print("It measures the hosts first, where --communication auto is to choose.")
        return exits.SUCCEEDED
    begun_from = Origin(commit_here(), stored(Path(workload)) if workload else "", sorted(secrets))
    asked = Asked(
        run, owner, created, cluster, hosts, options, request.inventory, workload, request.wait,
        request.skip_check, earlier, begun_from,
    )  # fmt: skip
    shown = Shown(plain, kept_runs, request.detach)
    with ThreadPoolExecutor(1) as pool:
        built = pool.submit(built_before, asked) if workload else None
        with machines(cluster, hosts) as opened:
            return begin_and_watch(asked, opened, built, secrets, shown, console)


@dataclass(frozen=True)
class Shown:
    """How a run that starts is shown, and what is kept of it."""

    plain: bool  # as `parse_view`
    kept_runs: int  # KEEP_RUNS
    detach: bool  # not at all


def begin_and_watch(
    asked: Asked,
    opened: Sequence[Machine],
    built: Future[Image | None] | None,
    secrets: dict[str, bytes],
    shown: Shown,
    console: Console,
) -> int:
    """Start a run on its hosts, over these connections, and watch it; returns the exit status. Raises as `begin`."""
    plan = begin(asked, opened, built, secrets, console)
    views = [View(machine.target, machine.known_hosts, machine) for machine in opened]
    watch = Watch(plan, views, display_of(plan, shown.plain), shown.kept_runs)
    if shown.detach and not signals.first_signal():
        say(watch.goes_on())
        return exits.SUCCEEDED
    return watch.run()


def parse_view(text: str) -> bool:
    """VIEW as typed: whether the output is to be plain lines on a terminal too. Raises Refusal."""
    if text not in ("", "live", "plain"):
        raise refuse("VIEW", f"VIEW={text} is not known", "give VIEW=plain, or leave it out")
    return text == "plain"


def display_of(plan: Plan, plain: bool = False) -> Display:
    """What shows a plan's run; `plain`: as lines alone, on a terminal too."""
    hosts = [host_plan.host for host_plan in plan.hosts]
    width = max(len(f"{one.host} rank {plan.world_size - 1}") for one in plan.hosts)
    return Display(hosts, width, False if plain else None)


def parse_options(request: Request) -> plans.Options:
    """The options of a request, checked. Raises Refusal for a bad one, but for MIN_NODES."""
    nodes, grace = plans.parse_nodes(request.nodes), plans.parse_grace(request.grace)
    args = tuple(trainer_arguments.split(request.args))
    if request.script:
        placeholders.check(args)
    own_script = request.workload or request.script
    if own_script and request.project:
        fix = "PROJECT for parts of our trainer, or WORKLOAD and SCRIPT for a script of your own: leave the other out"
        raise refuse("PROJECT", f"PROJECT={request.project} together with WORKLOAD or SCRIPT", fix)
    script = _check_workload(request.workload, request.script) if own_script else None
    has_project = project.folder_of(request.project) is not None
    launcher = _check_launcher(request.launcher, script)
    words = args if script else trainer_arguments.inline(args)
    restarts = plans.parse_max_restarts(request.max_restarts, bool(script))
    failures = plans.parse_max_host_failures(request.max_host_failures)
    return plans.Options(
        nodes, words, script, has_project,
        grace=grace, launcher=launcher, max_restarts=restarts, max_host_failures=failures,
    )  # fmt: skip


def _check_launcher(launcher: str, script: str | None) -> str:
    """LAUNCHER as typed; empty means torchrun. Raises Refusal for another, and for Horovod without a script."""
    if launcher and launcher not in plans.LAUNCHERS:
        raise refuse("LAUNCHER", f"LAUNCHER={launcher} is unknown", f"give one of {', '.join(plans.LAUNCHERS)}")
    if launcher == "horovod" and script is None:
        fix = 'for our own trainer: ARGS="--parallel horovod"'
        raise refuse("LAUNCHER", "LAUNCHER=horovod is for a script of your own", fix)
    return launcher or "torchrun"


def _check_horovod(launcher: str, cluster: clustermap.ClusterMap) -> None:
    """Raises Refusal where a script that needs Horovod would find an image without it."""
    if launcher != "horovod":
        return
    if not has_horovod(cluster):
        fix = "deploy without base_image" if cluster.image.base_image else "run `make deploy HOROVOD=1`"
        raise refuse("LAUNCHER", "the deployed image has no Horovod", fix)


def _check_workload(workload: str, script: str) -> str:
    """The script's path inside its workload; SCRIPT may also be given as a path from where make is typed."""
    folder = Path(workload)
    if not workload:
        raise refuse("SCRIPT", f"SCRIPT={script} without WORKLOAD", "name the script's folder with WORKLOAD=path")
    if not folder.is_dir():
        raise refuse("WORKLOAD", f"{workload} is not a folder", "give the folder that holds your script")
    scripts = ", ".join(sorted(file.name for file in folder.glob("*.py"))[:10]) or "no .py file"
    if not script:
        raise refuse("SCRIPT", f"WORKLOAD={workload} without SCRIPT", f"name the script to run; there is: {scripts}")
    inside = (folder / script).resolve()
    if not inside.is_file() and Path(script).is_file():
        inside = Path(script).resolve()
    if not inside.is_file() or not inside.is_relative_to(folder.resolve()):
        what = f"there is no {script} in {workload}"
        raise refuse("SCRIPT", what, f"name a file of that folder; there is: {scripts}")
    return str(inside.relative_to(folder.resolve()))
