"""`make check`: measure the cluster and say what a run will be like; in its quick form before every `make train`.

One SSH call per host surveys it and measures its links; verdicts are pure functions of the answers. The full form then
runs a short all-reduce in the training image, with the plan's own environment, and what a forecast needs to know.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from launch.cli import exits
from launch.cli.make_variables import name_inventory
from launch.cli.output import say
from launch.cli.refusal import Problem, Refusal, refuse
from launch.files import shown
from launch.health import host_checks, link_checks, sameness
from launch.health.verdicts import ERROR, HEALTHY, INCOMPLETE, WARNING, Verdict, worst
from launch.hosts import clustermap, hostcall, ssh
from launch.hosts.clustermap import ClusterMap, MapHost
from launch.hosts.hostcall import Answer
from launch.hosts.machine import Machine, machines
from launch.job import plan as plans
from launch.job import trainer_arguments
from launch.network import choose, measure
from launch.network.links import Link

SURVEY_SECONDS = 30.0  # of a host for its facts; the data set's fingerprint is in it
ALLREDUCE_SECONDS = 3.0
#: An all-reduce gets this part of a link at least, where the link and not the processors is the limit.
ALLREDUCE_PART = 0.5
#: Optimizer state beside the weights: AdamW keeps two numbers for each.
STATE_PER_PARAMETER = 3
#: What ranks say of the image that they run in.
INSIDE = ("torch", "cuda", "nccl", "code")


@dataclass(frozen=True)
class Request:
    """`make check` as typed."""

    inventory: Path
    nodes: str = ""
    args: str = ""
    forecast: str = "1"
    as_json: bool = False


@dataclass(frozen=True)
class Seen:
    """What the hosts answered to the first call."""

    answers: dict[str, Answer | BaseException]
    links: list[Link]

    def facts(self, host: str) -> dict[str, Any] | None:
        answer = self.answers[host]
        return answer.survey if isinstance(answer, Answer) else None


def check(request: Request, console: Console) -> int:
    """Check the hosts of a deployed inventory; print, write and keep what was found. Returns the exit status.

    Raises:
        Refusal: when there is no cluster map, or a host cannot be reached.
    """
    from launch.health import (
        records,
        report,  # here: the quick form has to start fast
    )

    cluster = clustermap.read(request.inventory)
    hosts = plans.chosen_hosts(cluster, plans.parse_nodes(request.nodes))
    world_size = sum(host.nproc_per_node for host in hosts)
    arguments = _trainer_arguments(request.args, world_size) if wants_forecast(request.forecast) else None
    progress = Console(stderr=True, soft_wrap=True) if request.as_json else console
    with machines(cluster, hosts) as opened:
        document = examine(cluster, hosts, opened, arguments, progress)
    folder = clustermap.path_of(request.inventory).parent / "checks"
    records.save(folder, document)
    written = report.write_html(folder / "report.html", document)
    if request.as_json:
        print(json.dumps(document))
    else:
        report.terminal(document, console)
        console.print(f"Report: {', '.join(map(shown, written))}", highlight=False)
    return exits.REFUSED if report.level_of(document) in (ERROR, INCOMPLETE) else exits.SUCCEEDED


def wants_forecast(text: str) -> bool:
    """FORECAST as typed. Raises Refusal."""
    if text not in ("0", "no", "false", "1", "yes", "true"):
        raise refuse("FORECAST", f"FORECAST={text} is neither yes nor no", "give FORECAST=0 to leave the forecast out")
    return text in ("1", "yes", "true")


def _trainer_arguments(text: str, world_size: int) -> list[str]:
    """ARGS as the trainer gets them. Raises Refusal for what the trainer would refuse."""
    arguments = trainer_arguments.inline(trainer_arguments.split(text))
    trainer_arguments.check(arguments, world_size)
    return list(arguments)


def examine(
    cluster: ClusterMap,
    hosts: Sequence[MapHost],
    machines: Sequence[Machine],
    arguments: Sequence[str] | None,
    console: Console,
) -> dict[str, Any]:
    """The full check as a document (launch.health.records).

    `arguments`: of the training to forecast; None: no forecast.
    """
    from launch.health import records  # here: the quick form has to start fast

    names = [host.name for host in hosts]
    busy = running(machines)
    each = 0 if busy else measure.BANDWIDTH_SECONDS
    seconds = measure.expected_seconds(len(hosts), 1, each) if len(hosts) > 1 else 0.0
    with _phase(console, f"Surveying {len(hosts)} hosts and measuring their links (about {2 + seconds:.0f} s)"):
        seen = look(
            hosts, machines, each, True, lambda text: console.print(f"    {text}", style="dim", highlight=False)
        )
    verdicts = link_verdicts(hosts, seen)
    if busy and len(hosts) > 1:
        what = f"not measured: a run is in progress on {', '.join(busy)}, which that would slow down"
        verdicts.append(Verdict("bandwidth", "cluster", INCOMPLETE, what, "check again when it has ended"))
    allreduce = predicted = None
    inside = _inside(cluster, hosts, seen)
    blocked = _stands_in_the_way(cluster, hosts, seen, verdicts)
    if blocked:
        allreduce, predicted = {"rows": [], "note": blocked}, {"rows": [], "recommendation": blocked}
    elif sum(host.nproc_per_node for host in hosts) > 1:
        with _phase(console, "A short all-reduce, as a run makes it"):
            summed = all_reduce(cluster, hosts, machines, seen.links)
        allreduce = summed.report
        verdicts += summed.verdicts
        inside = {host: known and {**known, **summed.inside.get(host, {})} for host, known in inside.items()}
    checkpoint = None
    if arguments is not None and not blocked and worst(verdicts) != ERROR:
        with _phase(console, "A few steps on every host, and sums of their gradients, for the forecast"):
            predicted, checkpoint, said = foretell(cluster, hosts, machines, arguments, seen.links)
            verdicts += said
    alike = same(hosts, seen, inside)
    verdicts = named([*host_verdicts(hosts, seen, checkpoint), *alike.verdicts, *verdicts], cluster)
    folder = clustermap.path_of(Path(cluster.inventory)).parent / "checks"
    if before := records.previous(folder, records.FULL, cluster.network.name):
        verdicts += records.drift(seen.links, records.links_of(before), before["when"])
    return records.document(
        kind=records.FULL,
        inventory=cluster.inventory,
        network=cluster.network.name,
        hosts=names,
        links=seen.links,
        verdicts=verdicts,
        sameness=alike.report,
        allreduce=allreduce,
        forecast=predicted,
    )


def quick(
    cluster: ClusterMap, hosts: Sequence[MapHost], machines: Sequence[Machine], podman: bool = True
) -> list[Verdict]:
    """What can be told within a second or two: facts, whether every pair still connects and carries data, sameness.

    `podman`: images and runs too; false where somebody else looks at them.
    """
    seen = look(hosts, machines, 0, False, say, podman)
    verdicts = same(hosts, seen, _inside(cluster, hosts, seen)).verdicts
    return named([*host_verdicts(hosts, seen, None), *verdicts, *link_verdicts(hosts, seen)], cluster)


def named(verdicts: Sequence[Verdict], cluster: ClusterMap) -> list[Verdict]:
    """With the inventory in the commands that they tell to type."""
    return [replace(verdict, fix=name_inventory(verdict.fix, Path(cluster.inventory))) for verdict in verdicts]


def refuse_errors(verdicts: Sequence[Verdict], leave_out: Sequence[str] = ()) -> list[str]:
    """Warnings as lines for the user; checks in `leave_out` are somebody else's.

    Raises:
        Refusal: naming every error.
    """
    told = [verdict for verdict in verdicts if verdict.check not in leave_out]
    problems = [Problem(v.where, v.what, v.fix) for v in told if v.level == ERROR]
    if problems:
        raise Refusal(problems)
    return [
        f"{v.level}: {v.where}: {v.what}" + (f"; fix: {v.fix}" if v.fix else "")
        for v in told
        if v.level in (WARNING, INCOMPLETE)
    ]


@contextmanager
def _phase(console: Console, what: str) -> Iterator[None]:
    begun = time.monotonic()
    console.print(f"==> {what}", style="bold", highlight=False)
    yield
    console.print(f"    {time.monotonic() - begun:.1f} s", style="dim", highlight=False)


def running(machines: Sequence[Machine]) -> list[str]:
    """The hosts on which a run is in progress, as far as they answer."""
    asked = "podman ps --quiet --filter label=muster.run"
    answers = ssh.in_parallel(lambda machine: machine.root(asked).stdout.split(), machines)
    return [machine.name for machine, found in zip(machines, answers, strict=True) if isinstance(found, list) and found]


# -- asking the hosts ---------------------------------------------------------------------------------------------


def look(
    hosts: Sequence[MapHost],
    machines: Sequence[Machine],
    seconds: int,
    full: bool,
    say: Callable[[str], None],
    podman: bool = True,
) -> Seen:
    """One call per host: its facts, and its links to the others on the training network. say: for progress."""
    names = [host.name for host in hosts]
    field = measure.Field(
        "training", {host.name: host.address for host in hosts}, {host.name: mtu_of(host) for host in hosts}
    )
    fields = [field] if len(hosts) > 1 else []
    asked = measure.options(names, fields, seconds)
    options = {
        host.name: {
            "survey": {
                "train_interface": host.interface,
                "data_dir": host.data_dir,
                "full": full,
                "podman": podman,
            },
            **(asked[host.name] if fields else {}),
        }
        for host in hosts
    }
    limit = SURVEY_SECONDS + measure.longest_seconds(len(hosts), len(fields), seconds)
    answers = hostcall.ask_all(machines, options, limit, say)
    return Seen(answers, measure.links(names, fields, answers).get(field.name, []))


def nic_of(host: MapHost, facts: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """The NIC that holds the training address, by these facts of the host; without any, as the last deploy found it."""
    nics: list[dict[str, Any]] = (host.facts if facts is None else facts).get("nics", [])
    return next((nic for nic in nics if nic["name"] == host.interface), {})


def mtu_of(host: MapHost) -> int:
    """Bytes."""
    return int(nic_of(host).get("mtu") or 1500)


# -- verdicts -----------------------------------------------------------------------------------------------------


def asked_of(host: MapHost, answer: Answer | BaseException, checkpoint: int | None) -> host_checks.Asked:
    """What a run asks of a host. An empty list of GPUs is the user's word only where there are some."""
    some = host.gpus or host.facts.get("gpus") or host.facts.get("gpu_problem")
    return host_checks.Asked(
        gpus=host.gpus if some else None,
        ranks=host.nproc_per_node,
        checkpoint_bytes=checkpoint,
        clock_offset=answer.clock_offset if isinstance(answer, Answer) else None,
        clock_uncertainty=answer.clock_error if isinstance(answer, Answer) else 0.0,
        data_dir=host.data_dir,
    )


def host_verdicts(hosts: Sequence[MapHost], seen: Seen, checkpoint: int | None) -> list[Verdict]:
    found = []
    for host in hosts:
        answer = seen.answers[host.name]
        if isinstance(answer, BaseException):
            fix = "see what the host is busy with, and check again"
            found.append(Verdict("survey", f"host {host.name}", INCOMPLETE, f"did not answer: {answer}", fix))
        else:
            found += host_checks.judge(host.name, answer.survey, asked_of(host, answer, checkpoint))
    return found


def link_verdicts(hosts: Sequence[MapHost], seen: Seen) -> list[Verdict]:
    """By what the NICs are now, where the host answered; else by what they were at the last deploy."""
    if len(hosts) == 1:
        return []
    answers = {name: answer.survey or {} for name, answer in seen.answers.items() if isinstance(answer, Answer)}
    nics = {host.name: nic_of(host, answers.get(host.name)) or nic_of(host) for host in hosts}
    speeds = {name: nic.get("speed_mbits") for name, nic in nics.items()}
    return link_checks.verdicts(seen.links, speeds, {name: nic.get("mtu") for name, nic in nics.items()})


Inside = dict[str, Mapping[str, str | None] | None]


@dataclass(frozen=True)
class Sameness:
    """The matrix for the report, and what it means."""

    report: dict[str, Any]
    verdicts: list[Verdict]


def same(hosts: Sequence[MapHost], seen: Seen, inside: Inside) -> Sameness:
    """What the hosts have in common and what not."""
    facts = {host.name: seen.facts(host.name) for host in hosts}
    wanted = {host.name: host.gpus for host in hosts}
    rows = sameness.compare(facts, inside, wanted)
    verdicts = sameness.verdicts(rows, on_gpus=all(host.gpus for host in hosts))
    return Sameness(_sameness_document(list(facts), rows), [*verdicts, *sameness.old_drivers(facts, inside)])


def _inside(cluster: ClusterMap, hosts: Sequence[MapHost], seen: Seen) -> Inside:
    """The training image that each host holds now. Its id fixes torch, NCCL, CUDA and the code within."""
    found: Inside = {}
    for host in hosts:
        facts = seen.facts(host.name)
        known = facts and facts["images"] is not None
        found[host.name] = {"image": facts["images"].get(cluster.image.ref, "none")} if facts and known else None
    return found


def _sameness_document(names: Sequence[str], rows: Sequence[sameness.Row]) -> dict[str, Any]:
    return {
        "hosts": list(names),
        "rows": [
            {
                "property": row.property.label,
                "values": [sameness.shown(value) for value in row.values.values()],
                "odd": list(row.odd),
                "majority": sameness.shown(row.majority),
            }
            for row in rows
        ],
    }


def _stands_in_the_way(
    cluster: ClusterMap, hosts: Sequence[MapHost], seen: Seen, links: Sequence[Verdict]
) -> str | None:
    """Why ranks cannot be started for a measurement; None if they can."""
    busy = [host.name for host in hosts for one in (seen.facts(host.name) or {}).get("runs") or [] if _runs(one)]
    if busy:
        return f"left out: a run is in progress on {', '.join(dict.fromkeys(busy))}"
    if any(isinstance(answer, BaseException) for answer in seen.answers.values()) or worst(links) == ERROR:
        return "left out: fix the errors above first"
    lacking = [
        host.name
        for host in hosts
        if cluster.image.id not in ((seen.facts(host.name) or {}).get("images") or {}).values()
    ]
    return f"left out: {', '.join(lacking)} lack the training image; run `make deploy`" if lacking else None


def _runs(entry: Mapping[str, Any]) -> bool:
    return entry.get("state") in host_checks.RUNNING


# -- in the training image ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summed:
    """What a short all-reduce told: rows for the report, verdicts, and each host's image from within."""

    report: dict[str, Any] | None
    verdicts: list[Verdict]
    inside: dict[str, dict[str, str]]


def all_reduce(
    cluster: ClusterMap, hosts: Sequence[MapHost], machines: Sequence[Machine], links: Sequence[Link]
) -> Summed:
    """A short all-reduce of all ranks; the values are checked on every rank."""
    from launch.health import probe  # here: the quick form has to start fast

    try:
        document = probe.run(cluster, hosts, machines, ["--seconds", str(ALLREDUCE_SECONDS)])
    except Refusal as refusal:
        return Summed(None, [Verdict("all-reduce", p.where, ERROR, p.what, p.fix) for p in refusal.problems], {})
    found = document["all_reduce"]
    rows = [
        {
            "megabytes": entry["bytes"] / 2**20,
            "seconds": entry["seconds"],
            "busbw_gbytes_per_second": entry["bus_bytes_per_second"] / 1e9,
            "correct": True,  # a wrong value ends the probe
        }
        for entry in found["sizes"]
    ]
    inside = {rank["host"]: {key: rank[key] for key in INSIDE} for rank in document["ranks"]}
    return Summed({"rows": rows, "note": "; ".join(found["notes"])}, judge_all_reduce(found["sizes"], links), inside)


def judge_all_reduce(sizes: Sequence[Mapping[str, Any]], links: Sequence[Link]) -> list[Verdict]:
    """The largest sum against the slowest link. Pure."""
    if not sizes:
        return [Verdict("all-reduce", "cluster", INCOMPLETE, "no size was measured in time", "look at the links")]
    largest = max(sizes, key=lambda entry: entry["bytes"])
    mbits, slowest = largest["bus_bytes_per_second"] * 8 / 1e6, choose.slowest(links)
    what = (
        f"{largest['bytes'] / 2**20:.0f} MiB in {largest['seconds']:.3g} s, values right: "
        f"{choose.rate(mbits)} of bus bandwidth"
    )
    if 0 < slowest < choose.ONE_STREAM and mbits < ALLREDUCE_PART * slowest:
        what += f", {mbits / slowest:.0%} of what the slowest link carries ({choose.rate(slowest)})"
        return [Verdict("all-reduce", "cluster", WARNING, what, "see whether the hosts' processors are busy (top)")]
    return [Verdict("all-reduce", "cluster", HEALTHY, what)]


def foretell(
    cluster: ClusterMap,
    hosts: Sequence[MapHost],
    machines: Sequence[Machine],
    arguments: Sequence[str],
    links: Sequence[Link],
) -> tuple[dict[str, Any] | None, int | None, list[Verdict]]:
    """(rows and recommendation for the report, bytes of a checkpoint, verdicts)"""
    from launch.health import (
        forecast,  # here: the quick form has to start fast
        probe,
    )

    try:
        found = probe.run(cluster, hosts, machines, ["--forecast", "--", *arguments])["forecast"]
    except Refusal as refusal:
        return None, None, [Verdict("forecast", p.where, ERROR, p.what, p.fix) for p in refusal.problems]
    rows = [
        {
            "nodes": one.nodes,
            "option": one.option + ("" if one.verified else " *"),
            "step_seconds": one.step_seconds,
            "images_per_second": one.images_per_second,
            "speedup": one.speed_up,
            "efficiency": one.efficiency,
        }
        for one in forecast.outlooks(found)
    ]
    slowest = choose.slowest(links)
    advice = forecast.recommend(found, f"{choose.rate(slowest)} link" if slowest else "link")
    note = forecast.MEANING
    if any("*" in str(row["option"]) for row in rows):
        note += " * reckoned only: this option's forecast has not been compared with runs."
    return {"rows": rows, "recommendation": advice, "note": note}, checkpoint_bytes(found), []


def checkpoint_bytes(found: Mapping[str, Any]) -> int | None:
    """Of one checkpoint: weights and optimizer state. None where the probe does not tell."""
    size = found.get("gradient_bytes")
    return int(size) * STATE_PER_PARAMETER if size else None
