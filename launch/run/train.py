"""`make train`: from the request as typed to a plan whose hosts are ready, its start, and a view of it (watch.py)."""

from __future__ import annotations

import datetime
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from launch.cli import exits, signals
from launch.cli.output import detail, say
from launch.cli.refusal import Refusal, refuse
from launch.cli.signals import undisturbed
from launch.files import runs_dir, shown, write_json
from launch.hosts import clustermap, inventory, ssh
from launch.hosts.connection import Machine, machines
from launch.job import placeholders, queue, readiness, trainer_arguments
from launch.job import plan as plans
from launch.job import resume as resuming
from launch.job.follow import View
from launch.job.plan import Plan, Ports, document
from launch.job.start import start
from launch.run import keep, private
from launch.run.display import Display
from launch.run.watch import Watch


@dataclass(frozen=True)
class Request:
    """`make train` as typed."""

    inventory: Path
    nodes: str = ""
    args: str = ""
    workload: str = ""
    script: str = ""
    resume: str = ""
    grace: str = ""
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
    if earlier:
        options = resuming.continued(options, earlier)
    _check_horovod(options.launcher, cluster.image.ref)
    hosts = plans.chosen_hosts(cluster, options.nodes)
    run, created = plans.new_run_id(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    owner = ssh.local_user()
    if request.dry_run:
        _check_settings(options, hosts)
        if request.workload:
            from containers import image as images

            options = replace(options, image=images.workload_reference(Path(request.workload)))
        first, reach = clustermap.MASTER_PORTS, clustermap.REACH_PORTS
        some = Ports(first[0], first[0] + 1, (reach[0],) * len(hosts))
        print(plans.describe(plans.make_plan(cluster, options, run, some, owner, created)))
        chosen = "from {} to {} on {}, and from {} to {} on each host".format(*first, hosts[0].name, *reach)
        print(f"\nDry run: nothing was started. The start picks free ports {chosen}.")
        return exits.SUCCEEDED
    with machines(cluster, hosts) as opened:
        started = False
        try:
            if request.workload:
                options = replace(options, image=_ship_workload(request, opened, console, cluster.image.ref))

            def check() -> Ports:
                return check_before_start(request, cluster, hosts, opened, options, earlier)

            with _turn_and_ports(opened, run, owner, request.wait, check) as ports:
                plan = plans.make_plan(cluster, options, run, ports, owner, created)
                _announce(plan)
                # A container that is just being created cannot be stopped: a signal waits until all exist.
                with undisturbed(), _kept(plan):
                    start(opened, plan, secrets)
                    started = True
        except KeyboardInterrupt:
            if not started:
                raise KeyboardInterrupt("interrupted; nothing was started") from None
        watch = Watch(plan, [View(m.target, m.known_hosts, m) for m in opened], display_of(plan, plain), kept_runs)
        if request.detach and not signals.first_signal():
            say(watch.goes_on())
            return exits.SUCCEEDED
        return watch.run()


@contextmanager
def _turn_and_ports(
    opened: Sequence[Machine], run: str, owner: str, wait: bool, check: Callable[[], Ports]
) -> Iterator[Ports]:
    """The run's turn on all hosts, and free ports of theirs, once all was checked. Whoever waits checks after that."""
    with ThreadPoolExecutor(1) as pool:
        checking = None if wait else pool.submit(check)
        with queue.turn(opened, run, owner, wait, say):
            yield (checking or pool.submit(check)).result()


@contextmanager
def _kept(plan: Plan) -> Iterator[None]:
    """The plan is in runs/<id>/ before anything starts, and not there when nothing has started."""
    folder = runs_dir() / plan.run
    try:
        write_json(folder / "plan.json", document(plan))
    except OSError as error:
        raise refuse(shown(folder), f"cannot be written: {error.strerror}", "make room, or let it be written") from None
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _announce(plan: Plan) -> None:
    ranks = "ranks" if plan.world_size > 1 else "rank"
    say(
        f"run {plan.run}: {plan.world_size} {ranks} on {', '.join(host_plan.host for host_plan in plan.hosts)}; "
        f"master {plan.master_addr}:{plan.master_port}; {shown(runs_dir() / plan.run)}"
    )
    if plan.resume:
        say(f"continuing run {plan.resume}: {plan.script or 'python -m train'} {shlex.join(plan.args)}")


def parse_view(text: str) -> bool:
    """VIEW as typed: whether the output is to be plain lines on a terminal too. Raises Refusal."""
    if text not in ("", "live", "plain"):
        raise refuse("VIEW", f"VIEW={text} is not known", "give VIEW=plain, or leave it out")
    return text == "plain"


def display_of(plan: Plan, plain: bool = False) -> Display:
    """What shows a plan's run; `plain`: as lines alone, on a terminal too."""
    hosts = [host_plan.host for host_plan in plan.hosts]
    width = max(len(f"{one.host} rank {max(one.ranks)}") for one in plan.hosts)
    return Display(hosts, width, False if plain else None)


def parse_options(request: Request) -> plans.Options:
    """The options of a request, checked. Raises Refusal for a bad NODES, GRACE, ARGS, WORKLOAD or SCRIPT."""
    nodes, grace = plans.parse_nodes(request.nodes), plans.parse_grace(request.grace)
    args = tuple(trainer_arguments.split(request.args))
    if request.script:
        placeholders.check(args)
    script = _check_workload(request.workload, request.script) if request.workload or request.script else None
    launcher = _check_launcher(request.launcher, script)
    words = args if script else trainer_arguments.inline(args)
    return plans.Options(nodes, words, script, grace=grace, launcher=launcher)


def _check_launcher(launcher: str, script: str | None) -> str:
    """LAUNCHER as typed; empty means torchrun. Raises Refusal for another, and for Horovod without a script."""
    if launcher and launcher not in plans.LAUNCHERS:
        raise refuse("LAUNCHER", f"LAUNCHER={launcher} is unknown", f"give one of {', '.join(plans.LAUNCHERS)}")
    if launcher == "horovod" and script is None:
        fix = 'for our own trainer: ARGS="--parallel horovod"'
        raise refuse("LAUNCHER", "LAUNCHER=horovod is for a script of your own", fix)
    return launcher or "torchrun"


def _check_horovod(launcher: str, deployed: str) -> None:
    """Raises Refusal where a script that needs Horovod would find an image without it."""
    if launcher != "horovod":
        return
    from containers.image import HOROVOD_REFERENCE  # here: starting must be fast

    if deployed != HOROVOD_REFERENCE:
        raise refuse("LAUNCHER", "the deployed image has no Horovod", "run `make deploy HOROVOD=1`")


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


def check_before_start(
    request: Request,
    cluster: clustermap.ClusterMap,
    hosts: Sequence[clustermap.MapHost],
    opened: Sequence[Machine],
    options: plans.Options,
    earlier: resuming.Earlier | None,
) -> Ports:
    """The quick form of `make check`, and at the same time all else that is asked before a start.

    Returns free ports of the hosts. Raises Refusal, naming everything that prevents the start.
    """

    def ready() -> Ports:
        return readiness.check(opened, hosts, options.image or cluster.image.id, earlier)

    def quick() -> list[str]:
        if request.skip_check:
            return []
        from launch.health import check  # here: its modules load while the hosts answer

        # readiness.check asks for the image, which is this run's own; runs in progress are the queue's.
        verdicts = check.quick(cluster, hosts, opened, podman=False)
        return check.refuse_errors(verdicts, leave_out=("image", "runs"))

    with ThreadPoolExecutor() as pool:
        settings, ports, warnings = pool.submit(_check_settings, options, hosts), pool.submit(ready), pool.submit(quick)
    errors = (job.exception() for job in (settings, ports, warnings))
    if refusals := [error for error in errors if isinstance(error, Refusal)]:
        problems = [problem for refusal in refusals for problem in refusal.problems]
        raise Refusal(problems, max(refusal.status for refusal in refusals))
    settings.result()
    for line in warnings.result():
        say(f"check: {line}")
    return ports.result()


def _check_settings(options: plans.Options, hosts: Sequence[clustermap.MapHost]) -> None:
    """Let our own trainer check its arguments; a user's script has none that we know."""
    if options.script is None:
        trainer_arguments.check(options.args, sum(host.nproc_per_node for host in hosts))


def _ship_workload(request: Request, opened: Sequence[Machine], console: Console, deployed: str) -> str:
    """Build the workload's image on the kind that is `deployed`, bring it to the hosts that lack it; returns its id."""
    from containers import image as images  # here: only this path builds, and starting must be fast
    from containers.engine import ContainersError
    from launch.deploy import control, deploy, distribution

    control.ensure_ready(console)
    progress = detail(console, "image: ")
    try:
        training = images.build_training_image(progress, horovod=deployed == images.HOROVOD_REFERENCE)
        image = images.build_workload_image(training, Path(request.workload), progress)
        answers = ssh.in_parallel(lambda machine: readiness.ask(machine, image.id), opened)
        having = [isinstance(answer, readiness.Readiness) and answer.has_image for answer in answers]
        if lacking := [machine.name for machine, has in zip(opened, having, strict=True) if not has]:
            export = images.export_oci(image, progress)
            distribution.distribute(inventory.read(request.inventory), image, export, detail(console), lacking)
    except ContainersError as error:
        raise deploy.image_refusal(error) from None
    return image.id
