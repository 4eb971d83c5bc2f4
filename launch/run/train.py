"""`make train`: from the request as typed to a plan whose hosts are ready, and then its run (launch.run.lifecycle)."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from launch.cli import exits
from launch.cli.output import detail, say
from launch.cli.refusal import Refusal, refuse
from launch.hosts import clustermap, inventory, ssh
from launch.hosts.connection import Machine, machines
from launch.job import plan as plans
from launch.job import readiness, trainer_arguments
from launch.job import resume as resuming
from launch.run.lifecycle import Run


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
    dry_run: bool = False
    skip_check: bool = False


def train(request: Request, console: Console) -> int:
    """Run a training job; returns the exit status. Raises Refusal when nothing was started."""
    options = parse_options(request)
    cluster = clustermap.read(request.inventory)
    earlier = resuming.find(request.resume, request.inventory) if request.resume else None
    if earlier:
        options = resuming.continued(options, earlier)
    hosts = plans.chosen_hosts(cluster, options.nodes)
    run, created = plans.new_run_id(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    owner = ssh.local_user()
    if request.dry_run:
        _check_settings(options, hosts)
        if request.workload:
            from containers import image as images

            options = replace(options, image=images.workload_reference(Path(request.workload)))
        plan = plans.make_plan(cluster, options, run, clustermap.MASTER_PORTS[0], owner, created)
        print(plans.describe(plan))
        ports = "{} to {}".format(*clustermap.MASTER_PORTS)
        print(f"\nDry run: nothing was started. The start picks a free port from {ports} on {plan.master_host}.")
        return exits.SUCCEEDED
    with machines(cluster, hosts, say) as opened:
        if request.workload:
            options = replace(options, image=_ship_workload(request, opened, console, cluster.image.ref))
        port = check_before_start(request, cluster, hosts, opened, options, earlier)
        plan = plans.make_plan(cluster, options, run, port, owner, created)
        return Run(plan, opened).run()


def parse_options(request: Request) -> plans.Options:
    """The options of a request, checked. Raises Refusal for a bad NODES, GRACE, ARGS, WORKLOAD or SCRIPT."""
    nodes, grace = plans.parse_nodes(request.nodes), plans.parse_grace(request.grace)
    args = tuple(trainer_arguments.split(request.args))
    script = _check_workload(request.workload, request.script) if request.workload or request.script else None
    return plans.Options(nodes, args if script else trainer_arguments.inline(args), script, grace=grace)


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
) -> int:
    """The quick form of `make check`, and at the same time all else that is asked before a start.

    Returns a free port on the first host. Raises Refusal, naming everything that prevents the start.
    """

    def ready() -> int:
        return readiness.check(opened, hosts, options.image or cluster.image.id, earlier)

    def quick() -> list[str]:
        if request.skip_check:
            return []
        from launch.health import check  # here: its modules load while the hosts answer

        # readiness.check asks for the image, which is this run's own, and for runs in progress.
        verdicts = check.quick(cluster, hosts, opened, podman=False)
        return check.refuse_errors(verdicts, leave_out=("image", "runs"))

    with ThreadPoolExecutor() as pool:
        settings, port, warnings = pool.submit(_check_settings, options, hosts), pool.submit(ready), pool.submit(quick)
    errors = (job.exception() for job in (settings, port, warnings))
    if refusals := [error for error in errors if isinstance(error, Refusal)]:
        problems = [problem for refusal in refusals for problem in refusal.problems]
        raise Refusal(problems, max(refusal.status for refusal in refusals))
    settings.result()
    for line in warnings.result():
        say(f"check: {line}")
    return port.result()


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
