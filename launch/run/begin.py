"""From a request that was checked to a run that has started: what is asked of its hosts before, all at once."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from launch.cli.output import say
from launch.cli.refusal import Refusal, refuse
from launch.cli.signals import undisturbed
from launch.deploy import workload as workloads
from launch.files import runs_dir, shown, write_json
from launch.hosts.clustermap import ClusterMap, MapHost
from launch.hosts.connection import Machine
from launch.hosts.door import Door
from launch.job import plan as plans
from launch.job import project, queue, readiness, trainer_arguments
from launch.job import resume as resuming
from launch.job.plan import Plan, Ports, document
from launch.job.start import doors_of, start
from launch.run import origin
from launch.run.origin import Origin

if TYPE_CHECKING:
    from containers.image import Image


@dataclass(frozen=True)
class Asked:
    """What a run is started from."""

    run: str
    owner: str
    created: str
    cluster: ClusterMap
    hosts: Sequence[MapHost]
    options: plans.Options
    inventory: Path
    workload: str = ""  # the user's own folder, of a script or a project
    wait: bool = False
    skip_check: bool = False
    earlier: resuming.Earlier | None = None
    origin: Origin = field(default_factory=Origin)


def begin(
    asked: Asked,
    machines: Sequence[Machine],
    built: Future[Image | None] | None,
    secrets: dict[str, bytes],
    console: Console,
) -> Plan:
    """Start a run on its hosts, once it is its turn there and nothing speaks against it; returns its plan.

    built: the workload's image, where it was built before from the same; under way since before the hosts were reached.
    Raises Refusal, naming everything that prevents the start; nothing is left then on the hosts.
    """
    started: list[Plan] = []

    def once(asked: Asked) -> None:
        with _doors(asked, machines) as doors, _turn_and_ports(asked, machines) as ports:
            plan = plans.make_plan(asked.cluster, asked.options, asked.run, ports, asked.owner, asked.created)
            _announce(plan, asked)
            # A container that is just being created cannot be stopped: a signal waits until all exist.
            with undisturbed(), _kept(plan, asked.origin):
                start(machines, plan, secrets, lambda: quick_check(asked, machines), doors)
                started.append(plan)

    try:
        if trainer_arguments.may_leave_communication_open(asked.options.args, asked.options.script):
            asked, built = _with_way(asked, machines, built, console), None
        if built is None:
            once(asked)
        elif asked.wait or not _begun_with(built.result(), asked, once):
            once(_with_image(asked, _ship_workload(asked, machines, built.result(), console)))
    except KeyboardInterrupt:
        if not started:
            raise KeyboardInterrupt("interrupted; nothing was started") from None
    return started[0]


def _begun_with(image: Image | None, asked: Asked, once: Callable[[Asked], None]) -> bool:
    """Start with an image that was built before. Most often all hosts hold it: so that is asked with all the rest."""
    try:
        if image:
            once(_with_image(asked, image))
        return image is not None
    except readiness.ImageLacking:
        return False


def _with_image(asked: Asked, image: Image) -> Asked:
    """The same with this image, not the deployed one."""
    return replace(asked, options=replace(asked.options, image=image.id))


def _with_way(asked: Asked, machines: Sequence[Machine], built: Future[Image | None] | None, console: Console) -> Asked:
    """The same with its --communication auto settled, on an image that the hosts have. Raises Refusal."""
    from launch.health import communication  # here: starting must be fast without it

    if built is not None:
        asked = _with_image(asked, _ship_workload(asked, machines, built.result(), console))
    settings = check_settings(asked.options, asked.cluster, asked.workload)
    if not settings and "auto" in " ".join(asked.options.args):
        what = (
            "--communication auto: what else is set stands where only the hosts can read it, so nothing can be chosen"
        )
        raise refuse("ARGS", what, "give --compress or --sync-every instead (docs/slow-links.md)")
    if settings.get("communication") != "auto":
        return asked
    if not asked.wait:  # what speaks against the run is better said before its hosts are measured
        check_before_start(asked, machines)
        quick_check(asked, machines)
    names = {host.name for host in plans.chosen_hosts(asked.cluster, asked.options.nodes)}
    pairs = [pair for pair in zip(asked.hosts, machines, strict=True) if pair[0].name in names]
    hosts, members = [host for host, _ in pairs], [machine for _, machine in pairs]
    cluster, options = asked.cluster, asked.options
    if options.image:
        cluster = replace(cluster, image=replace(cluster.image, id=options.image))
    own = project.IN_CONTAINER if options.project else ()
    args = communication.settled(settings, (*own, *options.args), cluster, hosts, members, say, asked.wait)
    return replace(asked, options=replace(options, args=args[len(own) :]))


def _doors(asked: Asked, machines: Sequence[Machine]) -> AbstractContextManager[Sequence[Future[Door]]]:
    """The doors for the start, early; whoever waits calls them at its turn."""
    return nullcontext(()) if asked.wait else doors_of(machines)


@contextmanager
def _turn_and_ports(asked: Asked, machines: Sequence[Machine]) -> Iterator[Ports]:
    """The run's turn on all hosts, and free ports of theirs, once they are ready. Whoever waits asks that after it."""
    with ThreadPoolExecutor(1) as pool:
        ready = None if asked.wait else pool.submit(check_before_start, asked, machines)
        with queue.turn(machines, asked.run, asked.owner, asked.wait, say):
            yield (ready or pool.submit(check_before_start, asked, machines)).result()


def check_before_start(asked: Asked, machines: Sequence[Machine]) -> Ports:
    """All that is asked before containers start; returns free ports of the hosts.

    Raises Refusal, naming everything that prevents the start: what the quick check finds, too.
    """
    image = asked.options.image or asked.cluster.image.id
    with ThreadPoolExecutor() as pool:
        jobs: list[Future[Any]] = [
            pool.submit(check_settings, asked.options, asked.cluster, asked.workload),
            pool.submit(readiness.check, machines, asked.hosts, image, asked.earlier),
        ]
        if not any(job.exception() for job in jobs):
            ports: Ports = jobs[1].result()
            return ports
        jobs.append(pool.submit(quick_check, asked, machines))
    errors = [error for job in jobs if (error := job.exception())]
    refusals = [error for error in errors if isinstance(error, Refusal)]
    if len(refusals) < len(errors):
        raise next(error for error in errors if error not in refusals)
    if asked.workload:  # its image is brought to hosts that lack it, once nothing else is in the way
        in_the_way = [one for one in refusals if not (isinstance(one, readiness.ImageLacking) and not one.others)]
        refusals = [_without_image(one) for one in in_the_way] or refusals
    if len(refusals) == 1:
        raise refusals[0]
    problems = list(dict.fromkeys(problem for refusal in refusals for problem in refusal.problems))
    raise Refusal(problems, max(refusal.status for refusal in refusals))


def _without_image(refusal: Refusal) -> Refusal:
    """What else is wrong than that a host lacks the image."""
    return Refusal(refusal.others) if isinstance(refusal, readiness.ImageLacking) else refusal


def quick_check(asked: Asked, machines: Sequence[Machine]) -> None:
    """The quick form of `make check`; says its warnings. Raises Refusal for its errors."""
    if asked.skip_check:
        return
    from launch.health import check  # here: its modules load while the hosts answer

    # readiness.check asks for the image, which is this run's own; runs in progress are the queue's.
    def note(found: check.OwnFacts) -> None:
        with suppress(OSError):  # a run does not depend on it
            origin.note_hosts(runs_dir() / asked.run, found)

    verdicts = check.quick(asked.cluster, asked.hosts, machines, engine=False, note=note)
    for line in check.refuse_errors(verdicts, leave_out=("image", "runs")):
        say(f"check: {line}")


def check_settings(options: plans.Options, cluster: ClusterMap, workload: str) -> dict[str, Any]:
    """Let our own trainer check its arguments, and say what they mean; a user's script has none that we know: {}.

    Those of a project whose folder is not here name parts of an image that has run with them: they are not checked.
    """
    if options.script is None and (workload or not options.project):
        world_size = sum(host.nproc_per_node for host in plans.chosen_hosts(cluster, options.nodes))
        return trainer_arguments.check(options.args, world_size, Path(workload) if options.project else None)
    return {}


def _ship_workload(asked: Asked, machines: Sequence[Machine], image: Image | None, console: Console) -> Image:
    """Bring the workload's image to the hosts that lack it; build it unless given.

    For settings that the trainer refuses nothing is built.
    """
    check_settings(asked.options, asked.cluster, asked.workload)
    return workloads.bring(Path(asked.workload), asked.cluster, machines, console, image)


def built_before(asked: Asked) -> Image | None:
    """The workload's image, if it was built before from the same."""
    return workloads.built_before(Path(asked.workload), asked.cluster)


@contextmanager
def _kept(plan: Plan, begun_from: Origin) -> Iterator[None]:
    """Plan and origin are in runs/<id>/ before anything starts, and not there when nothing has started."""
    folder = runs_dir() / plan.run
    try:
        write_json(folder / "plan.json", document(plan))
        origin.write(folder, begun_from)
    except OSError as error:
        raise refuse(shown(folder), f"cannot be written: {error.strerror}", "make room, or let it be written") from None
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _announce(plan: Plan, asked: Asked) -> None:
    ranks = "ranks" if plan.world_size > 1 else "rank"
    members = ", ".join(host_plan.host for host_plan in plan.hosts if host_plan.ranks)
    spares = ", ".join(host_plan.host for host_plan in plan.hosts if not host_plan.ranks)
    say(
        f"run {plan.run}: {plan.world_size} {ranks} on {members}{f', spare: {spares}' if spares else ''}; "
        f"master {plan.master_addr}:{plan.master_port}; {shown(runs_dir() / plan.run)}"
    )
    if plan.resume:
        say(f"continuing run {plan.resume}: {plan.script or 'python -m train'} {shlex.join(plan.args)}")
    if (earlier := asked.earlier) and earlier.project and earlier.image not in ("", plan.image):
        own = shown(Path(asked.workload))
        say(f"{own}, or what its image is built on, has changed since then: the run goes on with what is there now")
