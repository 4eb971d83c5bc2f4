"""`make check`: measure the cluster and say what a run will be like; in its quick form before every `make train`.

One SSH call per host asks for its facts and measures its links (survey.py); verdicts are pure functions of the answers.
The full form then measures a short all-reduce and what a forecast needs, in the training image (rank_measurements.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from launch.cli import exits
from launch.cli.make_variables import name_inventory
from launch.cli.output import Phases, say, to_stderr
from launch.cli.refusal import Problem, Refusal, refuse
from launch.cli.units import some
from launch.files import ROOT, shown
from launch.health import gpu_checks, host_checks, link_checks, link_statistics, sameness
from launch.health.survey import Inside, Survey, ask_hosts, hosts_with_a_run, images_of, nic_of
from launch.health.verdicts import ERROR, INCOMPLETE, WARNING, Asked, Verdict, of_host, worst
from launch.hosts import clustermap
from launch.hosts.clustermap import ClusterMap, MapHost
from launch.hosts.connection import Machine, machines
from launch.hosts.hostcall import Answer
from launch.job import plan as plans
from launch.job import project, trainer_arguments
from launch.network import measure
from launch.network.links import Link, with_shortest_trips

if TYPE_CHECKING:
    from containers.image import Image

OwnFacts = Mapping[str, Mapping[str, str]]  # host -> sameness.own
#: launch.deploy.workload.bring: folder, cluster map, connections, where progress is shown -> the folder's image
Bring = Callable[[Path, ClusterMap, Sequence[Machine], Console], "Image"]

WARNINGS_SHOWN = 2  # of one kind, where there are more than one more
FACTS_EXPECTED_SECONDS = 2.0  # of the survey without its links


@dataclass(frozen=True)
class Request:
    """`make check` as typed."""

    inventory: Path
    nodes: str = ""
    args: str = ""
    project: str = ""
    forecast: str = "1"
    as_json: bool = False


def check(request: Request, console: Console, bring: Bring) -> int:
    """Check the hosts of a deployed inventory; print, write and keep the result. Returns the exit status.

    `bring`: what brings a project's image to the hosts, where there is one: deploying is not for this room to know.

    Raises:
        Refusal: when there is no cluster map, a host cannot be reached, the trainer would refuse ARGS, or the image of
            the project cannot be built or sent.
    """
    from launch.health import records  # here: the quick form has to start fast
    from launch.health.report import contents, page, terminal

    cluster = clustermap.read(request.inventory)
    hosts = plans.chosen_hosts(cluster, plans.parse_nodes(request.nodes))
    own, arguments = project.folder_of(request.project), None
    if wants_forecast(request.forecast):
        arguments = trainer_arguments.inline(trainer_arguments.split(request.args))
        trainer_arguments.check(arguments, sum(host.nproc_per_node for host in hosts), own)
    progress = Console(stderr=True, soft_wrap=True) if request.as_json else console
    with machines(cluster, hosts) as opened:
        image = None
        if own and arguments is not None:
            with to_stderr() if request.as_json else nullcontext():  # Ansible prints where this process does
                found = bring(own, cluster, opened, progress)
            image = clustermap.MapImage(found.ref, found.id, found.layers_bytes)
            arguments = (*project.IN_CONTAINER, *arguments)
        document = examine(cluster, hosts, opened, arguments, progress, image)
    folder = clustermap.path_of(request.inventory).parent / "checks"
    records.save(folder, document)
    written = page.write_html(folder / "report.html", document)
    if request.as_json:
        print(json.dumps(document))
    else:
        terminal.show(document, console)
        console.print(f"Report: {', '.join(map(shown, written))}", highlight=False)
    return exits.REFUSED if contents.level_of(document) in (ERROR, INCOMPLETE) else exits.SUCCEEDED


def wants_forecast(text: str) -> bool:
    """FORECAST as typed. Raises Refusal."""
    if text not in ("0", "no", "false", "1", "yes", "true"):
        raise refuse("FORECAST", f"FORECAST={text} is neither yes nor no", "give FORECAST=0 to leave the forecast out")
    return text in ("1", "yes", "true")


def examine(
    cluster: ClusterMap,
    hosts: Sequence[MapHost],
    machines: Sequence[Machine],
    arguments: Sequence[str] | None,
    console: Console,
    image: clustermap.MapImage | None = None,
) -> dict[str, Any]:
    """The full check as a document (launch.health.records).

    `arguments`: of the training to forecast; None: no forecast. `image`: in which it would run; None: the deployed one.
    """
    from launch.health import drift, rank_measurements, records  # here: the quick form has to start fast

    phases, count = Phases(console), len(hosts)
    busy = hosts_with_a_run(machines)
    each = 0 if busy else measure.BANDWIDTH_SECONDS
    expected = FACTS_EXPECTED_SECONDS + (measure.expected_seconds(count, 1, each) if count > 1 else 0.0)
    with phases.phase("survey", f"Surveying {count} hosts and measuring their links", expected):
        survey = ask_hosts(hosts, machines, each, True, phases.say)
    links = usable_links(hosts, survey)
    verdicts = link_verdicts(hosts, survey, links)
    if busy and count > 1:
        what = f"not measured: a run is in progress on {', '.join(busy)}, which the measurement would slow down"
        verdicts.append(Verdict("bandwidth", "cluster", INCOMPLETE, what, "check again when it has ended"))
    allreduce = forecast = checkpoint_bytes = None
    inside = images_of(cluster, survey)
    obstacle = obstacle_to_ranks(cluster, hosts, survey, verdicts)
    if obstacle:
        allreduce, forecast = {"rows": [], "note": obstacle}, {"rows": [], "recommendation": obstacle, "note": ""}
    elif sum(host.nproc_per_node for host in hosts) > 1:
        expected = rank_measurements.all_reduce_seconds(count, links)
        with phases.phase("all-reduce", "Running a short all-reduce on all ranks", expected):
            summed = rank_measurements.all_reduce(cluster, hosts, machines, links)
        allreduce = summed.report
        verdicts += summed.verdicts
        inside = {host: known and {**known, **summed.inside.get(host, {})} for host, known in inside.items()}
    if arguments is not None and not obstacle and worst(verdicts) != ERROR:
        expected = rank_measurements.forecast_seconds(count, links)
        what = "Measuring steps and their communication for the forecast; a model larger than resnet18 takes longer"
        with phases.phase("forecast", what, expected):
            trained = replace(cluster, image=image) if image else cluster
            outlook = rank_measurements.make_forecast(trained, hosts, machines, arguments, links)
        forecast, checkpoint_bytes = outlook.report, outlook.checkpoint_bytes
        verdicts += outlook.verdicts
    rows, differences = compare_hosts(hosts, survey, inside)
    verdicts = [*host_verdicts(hosts, survey, checkpoint_bytes), *differences, *verdicts]
    folder = clustermap.path_of(ROOT / cluster.inventory).parent / "checks"
    if before := records.previous(folder, cluster.network.name):
        verdicts += drift.drift(links, records.links_of(before), before["when"])
    return records.document(
        inventory=cluster.inventory,
        network=cluster.network.name,
        hosts=[host.name for host in hosts],
        links=survey.links,
        verdicts=with_inventory(verdicts, cluster),
        sameness=sameness.document([host.name for host in hosts], rows),
        allreduce=allreduce,
        forecast=forecast,
    )


def quick(
    cluster: ClusterMap,
    hosts: Sequence[MapHost],
    machines: Sequence[Machine],
    engine: bool = True,
    note: Callable[[OwnFacts], object] = lambda found: None,
) -> list[Verdict]:
    """What can be known within a few seconds: facts, whether pairs connect and carry data, and sameness.

    Of more than measure.EVERY_PAIR_HOSTS hosts a sample of the pairs is checked, and what is said of them says so.
    `engine`: images and runs too; false where the caller asks for these itself. `note` is given the hosts' own facts.
    """
    survey = ask_hosts(hosts, machines, 0, False, say, engine)
    note(_own_facts(hosts, survey))
    # Hosts that are starting containers answer late; that is no detour on the way.
    links = with_shortest_trips(usable_links(hosts, survey), cluster.measured, cluster.network.name)
    verdicts = [
        *host_verdicts(hosts, survey, None),
        *compare_hosts(hosts, survey, images_of(cluster, survey))[1],
        *link_verdicts(hosts, survey, links),
    ]
    return with_inventory(verdicts, cluster)


def own_facts(hosts: Sequence[MapHost], machines: Sequence[Machine]) -> OwnFacts:
    """What of each host itself changes what a run computes (sameness.own); {} for one that does not answer."""
    return _own_facts(hosts, ask_hosts(hosts, machines, 0, False, say, engine=False))


def _own_facts(hosts: Sequence[MapHost], survey: Survey) -> OwnFacts:
    return {host.name: sameness.own(survey.facts(host.name), host.gpus, host.gpu_vendor) for host in hosts}


def with_inventory(verdicts: Sequence[Verdict], cluster: ClusterMap) -> list[Verdict]:
    """The verdicts, with the inventory named in the commands of their fixes."""
    return [replace(verdict, fix=name_inventory(verdict.fix, Path(cluster.inventory))) for verdict in verdicts]


def refuse_errors(verdicts: Sequence[Verdict], leave_out: Sequence[str] = ()) -> list[str]:
    """Warnings as lines for the user, of many likewise the first ones; `leave_out`: checks of the caller's own.

    Raises Refusal, naming every error.
    """
    kept = [verdict for verdict in verdicts if verdict.check not in leave_out]
    problems = [Problem(v.where, v.what, v.fix) for v in kept if v.level == ERROR]
    if problems:
        raise Refusal(problems)
    groups = link_statistics.grouped(((v.level, v.check), v) for v in kept if v.level in (WARNING, INCOMPLETE))
    lines = []
    for (level, what), found in groups.items():
        more = found[WARNINGS_SHOWN:] if len(found) > WARNINGS_SHOWN + 1 else []
        of_one = found[: len(found) - len(more)]
        lines += [f"{level}: {v.where}: {v.what}" + (f"; fix: {v.fix}" if v.fix else "") for v in of_one]
        names = some([v.where.removeprefix("host ") for v in more])
        lines += [f"{level}: {what} of {len(more)} more: {names}; `make check` says all"] if more else []
    return lines


# -- from answers to verdicts -------------------------------------------------------------------------------------


def asked_of(host: MapHost, answer: Answer, checkpoint_bytes: int | None, alone: bool = False) -> Asked:
    """What a run asks of a host; `alone`: it has no other host to talk to.

    An empty list of GPUs means that the user wants none only where the host has some.
    """
    has_some = host.gpus or host.facts.get("gpus") or host.facts.get("gpu_problem")
    return Asked(
        gpus=host.gpus if has_some else None,
        gpu_vendor=host.gpu_vendor,
        gpu_access=gpu_checks.access(host.facts, host.gpus, host.gpu_vendor) if host.gpus else None,
        ranks=host.nproc_per_node,
        checkpoint_bytes=checkpoint_bytes,
        clock_offset=answer.clock_offset,
        clock_uncertainty=answer.clock_error,
        data_dir=host.data_dir,
        interface=None if alone else host.interface,
        address=host.address,
    )


def host_verdicts(hosts: Sequence[MapHost], survey: Survey, checkpoint_bytes: int | None) -> list[Verdict]:
    """What is to be said of each host by itself. `checkpoint_bytes`: of one checkpoint; None: not known."""
    result, fix = [], "see what the host is busy with, and check again"
    for host in hosts:
        answer = survey.answers[host.name]
        if isinstance(answer, BaseException):
            result.append(of_host("survey", host.name, INCOMPLETE, f"did not answer: {answer}", fix))
        else:
            asked = asked_of(host, answer, checkpoint_bytes, alone=len(hosts) == 1)
            result += host_checks.check_host(host.name, answer.survey or {}, asked)
    return result


def usable_links(hosts: Sequence[MapHost], survey: Survey) -> list[Link]:
    """The links without those of hosts whose training NIC is down or lost its address: that is said of the NIC."""
    broken = set()
    for host in hosts:
        facts, asked = survey.facts(host.name), Asked(interface=host.interface, address=host.address)
        if facts.get("nics") and host_checks.training_nic(host.name, facts, asked):
            broken.add(host.name)
    return [link for link in survey.links if not {link.source, link.target} & broken]


def link_verdicts(hosts: Sequence[MapHost], survey: Survey, links: Sequence[Link]) -> list[Verdict]:
    """By what the NICs are now, where the host answered; else by what they were at the last deploy."""
    nics = {host.name: nic_of(host, survey.facts(host.name)) or nic_of(host, host.facts) for host in hosts}
    speeds = {name: nic.get("speed_mbits") for name, nic in nics.items()}
    mtus = {name: nic.get("mtu") for name, nic in nics.items()}
    return link_checks.verdicts(links, speeds, mtus, survey.sampled)


def compare_hosts(hosts: Sequence[MapHost], survey: Survey, inside: Inside) -> tuple[list[sameness.Row], list[Verdict]]:
    """The matrix of what the hosts have in common, what is to be said of it, and of drivers too old for the image."""
    facts = {host.name: survey.facts(host.name) for host in hosts}
    rows = sameness.compare(facts, inside, {host.name: host.gpus for host in hosts}, hosts[0].gpu_vendor)
    on_gpus = all(host.gpus for host in hosts)
    return rows, [*sameness.verdicts(rows, on_gpus), *sameness.old_drivers(facts, inside)]


def obstacle_to_ranks(
    cluster: ClusterMap, hosts: Sequence[MapHost], survey: Survey, verdicts: Sequence[Verdict]
) -> str | None:
    """Why ranks cannot be started for a measurement; None if they can. `verdicts`: those on links."""
    if busy := survey.running():
        return f"left out: a run is in progress on {', '.join(busy)}"
    silent = any(isinstance(answer, BaseException) for answer in survey.answers.values())
    if silent or worst(verdicts) == ERROR or len(usable_links(hosts, survey)) < len(survey.links):
        return "left out: fix the errors first"
    images = {host.name: survey.facts(host.name).get("images") or {} for host in hosts}
    lacking = [host for host, own in images.items() if cluster.image.id not in own.values()]
    return f"left out: {', '.join(lacking)} lack the training image; run `make deploy`" if lacking else None
