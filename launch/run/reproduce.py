"""`make reproduce RUN=<id>`: the same run once more: same hosts, image, arguments. Says what differs when it cannot be.

The plan of a run holds all that was asked for. From it and the hosts as they are now the plan is made once more, with
the same run id and ports; what of the two plans differs, and of image, code, hardware and data, is a difference. What
came of both runs is compared at the end (compare.py).
"""

from __future__ import annotations

import datetime
import itertools
import json
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from launch.cli import exits
from launch.cli.output import say
from launch.cli.refusal import Problem, Refusal, refuse
from launch.cli.units import some
from launch.files import ROOT, read_json, runs_dir, shown
from launch.health import sameness
from launch.hosts import clustermap, ssh
from launch.hosts.clustermap import ClusterMap
from launch.hosts.connection import Machine, machines
from launch.hosts.inventory import build_name
from launch.job import plan as plans
from launch.job import readiness
from launch.job import resume as resuming
from launch.job.container import LIMITS
from launch.job.plan import CONTAINER_DATA_DIR, HostPlan, Options, Plan, Ports
from launch.job.project import parted
from launch.report import documents
from launch.run import keep, origin, private
from launch.run.begin import Asked, built_before
from launch.run.origin import Origin
from launch.run.train import Shown, begin_and_watch, parse_view

if TYPE_CHECKING:
    from containers.image import Image

#: Variables of `make train` that are the run's own.
OF_THE_RUN = (
    *("NODES", "ARGS", "WORKLOAD", "SCRIPT", "PROJECT", "RESUME", "GRACE", "LAUNCHER"),
    *("MAX_RESTARTS", "MIN_NODES", "MAX_HOST_FAILURES"),
)
NAMED_FILES = 5  # of the code that changed

#: Of a host's environment what follows from its address, interface and image, which are compared themselves.
_FOLLOWS = frozenset(
    ("MUSTER_PLAN_SHA256", "MUSTER_IMAGE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY")
)


@dataclass(frozen=True)
class Request:
    """`make reproduce` as typed."""

    inventory: Path
    run: str
    given: Mapping[str, str]  # variables of OF_THE_RUN
    anyway: bool = False
    secrets: str = ""
    keep_runs: str = ""
    view: str = ""
    wait: bool = False
    detach: bool = False
    dry_run: bool = False
    skip_check: bool = False


def reproduce(request: Request, console: Console) -> int:
    """Start the same run once more and watch it; returns the exit status.

    Raises Refusal, before anything starts, with each difference from the run, unless `anyway`; and for all that
    prevents a start.
    """
    view = Shown(parse_view(request.view), keep.parse(request.keep_runs), request.detach)
    plan = plan_of(request)
    cluster = hosts_again(plan, clustermap.read(request.inventory))
    begun_from, secrets = origin.read(runs_dir() / plan.run), private.read(request.secrets, say)
    options = options_of(plan, cluster)
    found = [*plan_differences(plan, again(plan, cluster, options)), *_secret_differences(begun_from, secrets)]
    with machines(cluster, cluster.hosts) as opened:
        try:
            image = _image(plan, begun_from, cluster, opened)
        except Refusal as refusal:  # whatever was asked for, it cannot start: what differs besides is said with it
            raise Refusal([*found, *refusal.problems], refusal.status) from None
        found += [*image.differences, *_host_differences(begun_from, cluster, opened, request.skip_check)]
        if found and not request.anyway:
            raise refusal_of(plan.run, found)
        for one in found:
            say(f"not as in run {plan.run}: {one.where}: {one.what}")
        if not found:
            say(f"as far as can be known before the start, this is run {plan.run} once more")
        if request.dry_run:
            say("dry run: nothing was started")
            return exits.SUCCEEDED
        differences = [f"{one.where}: {one.what}" for one in found]
        asked = Asked(
            plans.new_run_id(),
            ssh.local_user(),
            datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            cluster,
            cluster.hosts,
            replace(options, image=image.id),
            request.inventory,
            image.workload,
            request.wait,
            request.skip_check,
            earlier_of(plan),
            Origin(origin.commit_here(), _workload(begun_from), sorted(secrets), {}, plan.run, differences),
        )
        built: Future[Image | None] | None = None
        if image.workload:
            built = Future()
            built.set_result(image.built)
        return begin_and_watch(asked, opened, built, secrets, view, console)


def plan_of(request: Request) -> Plan:
    """The plan of the run. Raises Refusal where it cannot be repeated on this inventory by this Muster."""
    folder = documents.find(request.run) if request.run else None
    if folder is None:
        known = ", ".join(one.name for one in documents.folders()[:5]) or "none yet"
        raise refuse("RUN", "which run?", f"give RUN=<id>; the newest in {shown(runs_dir())}: {known}")
    found = read_json(folder / "plan.json")
    if not found:
        what = f"run {request.run} has no plan: it was made by `make local`"
        raise refuse("RUN", what, "repeat it with `make local`, same seed and ARGS, which are in its settings.json")
    then = origin.read(folder)
    try:
        plan = plans.received(found, request.run)
    except ValueError as error:
        commit = f", `git checkout {then.commit.removesuffix(origin.CHANGED)}`" if then and then.commit else ""
        raise refuse("RUN", f"run {request.run}: {error}", f"use the version of Muster that made it{commit}") from None
    if build_name(ROOT / plan.inventory) != build_name(request.inventory):
        fix = f"name its inventory: INVENTORY={plan.inventory}"
        raise refuse("RUN", f"run {request.run} was on another inventory, {plan.inventory}", fix)
    if given := [f"{name}={value}" for name, value in request.given.items() if value]:
        fix = f"leave that out; or start another run with it: `make train {shlex.join(given)}`"
        raise Refusal([Problem(name.split("=")[0], "it is taken from the run", fix) for name in given])
    return plan


def hosts_again(plan: Plan, cluster: ClusterMap) -> ClusterMap:
    """The cluster map with the hosts of a plan alone, as far as it has them, in the plan's order. Pure.

    Raises Refusal where none is left of those that trained.
    """
    known = {host.name: host for host in cluster.hosts}
    hosts = [replace(known[one.host], spare=not one.ranks) for one in plan.hosts if one.host in known]
    if all(host.spare for host in hosts):
        names = ", ".join(one.host for one in plan.hosts if one.ranks)
        raise refuse("RUN", f"{cluster.inventory} has none of {names} any more", "add them, and run `make deploy`")
    return replace(cluster, hosts=hosts)


def options_of(plan: Plan, cluster: ClusterMap) -> Options:
    """What was asked for with the run of this plan, for the hosts of `hosts_again`. Pure."""
    members = sum(not host.spare for host in cluster.hosts)
    has_project, args = parted(plan.script, plan.args)
    return Options(
        nodes=members,
        args=args,
        script=plan.script,
        project=has_project,
        image=plan.image,
        resume=plan.resume,
        grace=plan.grace,
        launcher="horovod" if plan.script and plans.HOROVOD_SCRIPT[-1] in plan.ranks_command else "torchrun",
        direct=plan.direct,
        max_restarts=plan.max_restarts,
        min_nodes=min(plan.min_nodes, members),
        max_host_failures=plan.max_host_failures,
    )


def again(plan: Plan, cluster: ClusterMap, options: Options) -> Plan:
    """The plan that the same run would have on these hosts as they are now. Pure."""
    keepers = {one.host: one.keeper_port for one in plan.hosts}
    ports = Ports(plan.master_port, plan.free_port, tuple(keepers[host.name] for host in cluster.hosts))
    return plans.make_plan(cluster, options, plan.run, ports, plan.owner, plan.created)


def plan_differences(then: Plan, now: Plan) -> list[Problem]:
    """What is not the same in two plans of one run, made at two times. Pure."""
    by_name = {one.host: one for one in now.hosts}
    found = []
    for one in then.hosts:
        where = f"host {one.host}"
        if one.host not in by_name:
            found.append(Problem(where, "is not in the inventory any more", "add it, and run `make deploy`"))
            continue
        before, after = _described(one), _described(by_name[one.host])
        for name in dict.fromkeys([*before, *after]):
            if before.get(name) != after.get(name):
                what = f"{name}: {before.get(name, 'not set')} then, {after.get(name, 'not set')} now"
                found.append(Problem(where, what, "put it back, and run `make deploy`"))
        old, new = _container_words(one), _container_words(by_name[one.host])
        if old != new:
            lost, come = (shlex.join(w for w in these if w not in those) for these, those in ((old, new), (new, old)))
            what = f"its container is started otherwise: {lost or 'nothing'} then, {come or 'nothing'} now"
            found.append(Problem(where, what, "use the version of Muster that made the run"))
    for old, new in ((then.agent, now.agent), (then.ranks_command, now.ranks_command)):
        if old != new:
            what = f"it started the ranks by `{shlex.join(old)}` then, and does by `{shlex.join(new)}` now"
            found.append(Problem("Muster", what, "use the version of Muster that made the run"))
    if then.world_size != now.world_size:
        found.append(Problem("the run", f"{then.world_size} ranks then, {now.world_size} now", "see the hosts above"))
    return found


def _described(one: HostPlan) -> dict[str, str]:
    """What of a host's part is the same in the same run, by name."""
    pairs = list(itertools.pairwise(one.command))
    mounted = [value for flag, value in pairs if flag == "--volume" and _is_data(value)]
    return {
        "address": one.address,
        "interface": one.interface,
        "number of ranks": str(one.nproc_per_node),
        "GPUs": ", ".join(value for flag, value in pairs if flag == "--device" and "/dev/" not in value) or "none",
        "data_dir": mounted[0].partition(f":{CONTAINER_DATA_DIR}:")[0] if mounted else "none",
        "RDMA ports": json.dumps(one.rdma),
        **{f"variable {name}": value for name, value in one.environment.items() if name not in _FOLLOWS},
    }


def _container_words(one: HostPlan) -> list[str]:
    """The command that starts a host's container, without what `_described` has, the image, how much of the host it may
    take, and the host's place."""
    own = {one.container, f"muster.node_rank={one.node_rank}", one.environment.get("MUSTER_IMAGE")}
    words, found = iter(one.command[:-1]), list[str]()
    for word in words:
        if word in ("--env", "--device", "--volume", *LIMITS):
            value = next(words)
            found += [word, value] if word == "--volume" and not _is_data(value) else []
        elif word not in own:
            found.append(word)
    return found


def _is_data(mount: str) -> bool:
    return f":{CONTAINER_DATA_DIR}:" in mount


def _secret_differences(then: Origin | None, secrets: Mapping[str, bytes]) -> list[Problem]:
    before, now = sorted(then.secrets) if then else sorted(secrets), sorted(secrets)
    if before == now:
        return []
    what = f"{', '.join(before) or 'none'} then, {', '.join(now) or 'none'} now"
    return [Problem("SECRETS", what, "give the same with SECRETS=..., whose content is not kept")]


@dataclass(frozen=True)
class _Image:
    """The image to run: an id; or, where a workload's has to be brought to the hosts, the folder of which it is."""

    id: str | None = None  # None: the one that is deployed, or that of `workload`
    workload: str = ""
    built: Image | None = None  # of the workload, where it was built before
    differences: Sequence[Problem] = ()


def _image(plan: Plan, then: Origin | None, cluster: ClusterMap, opened: Sequence[Machine]) -> _Image:
    """The run's own image where all hosts have it, or can be brought it; else what there is. Raises Refusal."""
    answers = ssh.in_parallel(lambda machine: readiness.ask(machine, plan.image), opened)
    if failed := [(one, answer) for one, answer in zip(opened, answers, strict=True) if isinstance(answer, Exception)]:
        silent = [Problem(f"host {one.name}", f"did not answer: {why}", readiness.NO_ANSWER_FIX) for one, why in failed]
        raise Refusal(silent, exits.UNREACHABLE)
    lacking = [
        machine.name
        for machine, answer in zip(opened, answers, strict=True)
        if isinstance(answer, readiness.Readiness) and not answer.has_image
    ]
    if not lacking:
        return _Image(plan.image)
    gone = f"{', '.join(lacking)} {'does' if len(lacking) == 1 else 'do'} not have the run's image, {plan.image[:12]}"
    folder = ROOT / _workload(then) if _workload(then) else None
    has_project, _ = parted(plan.script, plan.args)
    if plan.image == cluster.image.id:
        raise refuse("image", f"{gone}, which is the deployed one", "run `make deploy`")
    if not (plan.script or has_project):
        what = f"{gone}, but {cluster.image.id[:12]}, which was deployed since"
        code, fix = _code(then)
        return _Image(None, "", None, [Problem("image", what + code, fix), *_torch(plan)])
    if folder is None or not folder.is_dir():
        where = f"its folder, {shown(folder)}, is gone" if folder else "its folder is not noted here"
        own = "PROJECT=..." if has_project else "WORKLOAD=... SCRIPT=..."
        fix = f"put the folder back, or start it anew: `make train {own} ARGS=...`"
        raise refuse(own.partition("=")[0], f"{gone}, and {where}", fix)
    asked = Asked("", "", "", cluster, cluster.hosts, Options(), Path(cluster.inventory), str(folder))
    built = built_before(asked)
    if built and built.id == plan.image:
        return _Image(None, str(folder), built)
    what = f"{gone}; {shown(folder)}, or what its image is built on, has changed since"
    code, fix = _code(then)
    name = "PROJECT" if has_project else "WORKLOAD"
    return _Image(None, str(folder), built, [Problem(name, what + code, f"put it back as it was; {fix}")])


def _workload(then: Origin | None) -> str:
    return then.workload if then else ""


def _code(then: Origin | None) -> tuple[str, str]:
    """What of Muster's code changed since a run, as the end of a sentence; and how to have it back."""
    if not (then and then.commit):
        return "; of which code it was is not noted", "deploy the version of Muster that made it"
    commit = then.commit.removesuffix(origin.CHANGED)
    more = ", with changes that no commit holds" if then.commit != commit else ""
    names = origin.changed_since(commit)
    changed = f"; changed since: {some(names, NAMED_FILES)}" if names else ""
    code = f"; it was of commit {commit[:12]}{more}{changed}"
    return code, f"`git checkout {commit[:12]}`, then `make deploy`, builds it again from the same packages"


def _torch(plan: Plan) -> list[Problem]:
    """That the run had another torch than Muster's image has now."""
    run = documents.read(runs_dir() / plan.run)
    said = run.metrics.starts[-1].get("versions") if run.metrics and run.metrics.starts else None
    before = str(said.get("torch") or "") if isinstance(said, dict) else ""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["train"]
    now = next((str(one).removeprefix("torch==") for one in listed if str(one).startswith("torch==")), "")
    if not before or not now or before.partition("+")[0] == now:
        return []
    return [Problem("torch", f"{before} then, {now} now", "see the image")]


def _host_differences(then: Origin | None, cluster: ClusterMap, opened: Sequence[Machine], skip: bool) -> list[Problem]:
    """What of hardware and data differs, where it is known of then."""
    if skip or not (then and then.hosts):
        why = "SKIP_CHECK=1" if skip else "what they were at its start is not noted here"
        say(f"data, drivers and CPU features of the hosts are not compared: {why}")
        return []
    from launch.health import check  # here: its modules load while the hosts are asked

    return fact_differences(then.hosts, check.own_facts(cluster.hosts, opened))


def fact_differences(then: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]) -> list[Problem]:
    """What of the hosts' own facts (launch.health.check.own_facts) is known and not the same. Pure."""
    return [
        Problem(
            f"host {host}",
            f"{label}: {sameness.shown(then[host][label])} then, {sameness.shown(value)} now",
            "put it back" if label == "data" else "none, if the host itself has changed",
        )
        for host, values in now.items()
        for label, value in values.items()
        if then.get(host, {}).get(label, value) != value
    ]


def earlier_of(plan: Plan) -> resuming.Earlier | None:
    """The run that this one continued."""
    if plan.resume is None:
        return None
    has_project, args = parted(plan.script, plan.args)
    hosts = tuple(one.host for one in plan.hosts)
    return resuming.Earlier(plan.resume, plan.script, args, hosts, project=has_project)


def refusal_of(run: str, found: Sequence[Problem]) -> Refusal:
    """The refusal of a run that would not be the same."""
    count = f"{len(found)} {'difference' if len(found) == 1 else 'differences'}"
    fix = "ANYWAY=1 starts it all the same, with what is there now"
    return Refusal([*found, Problem("RUN", f"this would not be run {run} again: {count}", fix)])
