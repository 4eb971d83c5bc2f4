"""Detection: what every host is, which networks connect them, how fast these are, and which one is chosen."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from containers.pip import HERE
from keeper import engines
from launch.cli import exits
from launch.cli.output import detail
from launch.cli.refusal import Problem, Refusal, refuse
from launch.deploy import firewalls
from launch.files import read_json
from launch.health import gpu_checks
from launch.health.host_checks import RUNNING
from launch.hosts import hostcall, rootless
from launch.hosts.clustermap import NVIDIA
from launch.hosts.connection import Machine
from launch.hosts.inventory import Host, Inventory, known_hosts_path
from launch.network import choose, measure
from launch.network.links import Link

SURVEY_SECONDS = 60  # the engine's answers are awaited for 20 s, nvidia-smi's for 30 s
REACH_SECONDS = hostcall.MEET_SECONDS + 15
REMEASURE_SECONDS = 12 * 3600  # after this time a deploy measures again, on the same networks too

_VFS = (
    "{} stores images with vfs there: every layer is a full copy, slow and large. Fix: put {} on ext4, xfs or btrfs "
    "(not on another overlay), or install fuse-overlayfs"
)


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the hosts said of themselves, and the networks on which all of them reach each other."""

    hosts: dict[str, dict[str, Any]]  # all that playbooks/module_utils/muster_survey.py says, by host
    networks: choose.WorkingNetworks


Answers = dict[str, hostcall.Answer | BaseException]


def ask(inv: Inventory, machines: Sequence[Machine], console: Console) -> Answers:
    """What hosts say of themselves."""
    ports = firewalls.ports(bool(inv.train_vpn))

    def asked(host: Host) -> dict[str, Any]:
        chosen = {key: host.settings.get(key) for key in ("train_interface", "train_network")}
        needed = wanted(host, host.name == inv.build_on)
        return {"survey": {"full": True, "wanted": needed, "ports": ports, **chosen}}

    options = {host.name: asked(host) for host in inv.hosts}
    return hostcall.call_hosts(machines, options, SURVEY_SECONDS, detail(console))


def wanted(host: Host, builds: bool = False) -> dict[str, Any]:
    """What a host is to have, as playbooks/module_utils/muster_ready.py takes it. builds: it builds images, too."""
    own, defaults = host.settings, rootless.defaults()
    packages, builders = defaults["engine_packages"], defaults["engine_builder_packages"]
    if builds:
        packages = {kind: {**them, "all": them["all"] | builders[kind]["all"]} for kind, them in packages.items()}
    return {
        "packages": packages,
        "engine": own.get("container_engine", "auto"),
        "gpus": own.get("gpus") != [],
        "builds": builds,
        "driver": own.get("install_driver", False),
        "vpn": "train_vpn" in own,
    }


def not_ready(answers: Answers) -> list[str]:
    """The hosts whose engine is not as Muster needs it: as they say, or as they lack what it takes to say it. Pure."""
    surveys = {name: None if isinstance(one, BaseException) else one.survey for name, one in answers.items()}
    return [name for name, survey in surveys.items() if not (survey and survey["ready"])]


def changes_of_engine(answers: Answers) -> list[str]:
    """In words, the hosts that are about to take another engine than the last deploy took. Pure."""
    surveys = {name: one.survey for name, one in answers.items() if not isinstance(one, BaseException) and one.survey}
    changes = {name: survey["engine_change"] for name, survey in surveys.items() if survey["engine_change"]}
    return [f"{name}: from {old} to {new}; what Muster had in {old} is removed" for name, (old, new) in changes.items()]


def facts_of(inv: Inventory, answers: Answers, console: Console) -> dict[str, dict[str, Any]]:
    """What all hosts have said. Raises Refusal when a host did not answer, or when the facts forbid to train."""
    facts = _facts(answers, console)
    check_facts(inv.hosts, facts, None if inv.base_image else NVIDIA)
    return facts


def networks_of(
    inv: Inventory, machines: Sequence[Machine], facts: dict[str, dict[str, Any]], console: Console
) -> Facts:
    """The facts, and which addresses of each other the hosts reach, which all try at once.

    Raises Refusal when no network connects all hosts.
    """
    settings = {host.name: host.settings for host in inv.hosts}
    addresses = {n: [end.address for end in choose.candidates(facts[n], settings[n])] for n in facts}
    return Facts(facts, choose.working(facts, settings, reach(machines, addresses, console)))


def _facts(answers: Mapping[str, hostcall.Answer | BaseException], console: Console) -> dict[str, dict[str, Any]]:
    """Every host's facts."""
    facts = {name: answer.survey or {} for name, answer in _all_answers(answers).items()}
    if bare := [name for name, known in facts.items() if "engine" not in known]:
        what = "lacks packages that Muster needs, although it was provisioned"
        fix = "see above what Ansible did there, and run `make deploy` again"
        raise Refusal([Problem(f"host {name}", what, fix) for name in bare], exits.DEPLOY_FAILED)
    for name, known in facts.items():
        if known["engine"] and known["engine"]["storage_driver"] == "vfs":
            engine = engines.engine(known["engine"]["name"])
            console.print(f"    {name}: {_VFS.format(engine.name, engine.storage)}", style="yellow", highlight=False)
    return facts


def reach(
    machines: Sequence[Machine], addresses: Mapping[str, Sequence[str]], console: Console
) -> dict[str, list[dict[str, Any]]]:
    """Which of these addresses of the others each host reaches, as choose.working takes it."""
    meetings = hostcall.meetings(addresses)
    asked = {
        name: {"meeting": meetings[name], "reach": {peer: addresses[peer] for peer in addresses if peer != name}}
        for name in addresses
    }
    answers = _all_answers(hostcall.call_hosts(machines, asked, REACH_SECONDS, detail(console)))
    return {name: answer.reach or [] for name, answer in answers.items()}


def _all_answers(answers: Mapping[str, hostcall.Answer | BaseException]) -> dict[str, hostcall.Answer]:
    """Raises Refusal, naming every host that did not answer and why."""
    fix = "log in there and see what is wrong, then run `make deploy` again"
    problems = [
        Problem(f"host {name}", f"did not answer: {answer}", fix)
        for name, answer in answers.items()
        if isinstance(answer, BaseException)
    ]
    if problems:
        raise Refusal(problems, exits.DEPLOY_FAILED)
    return {name: answer for name, answer in answers.items() if isinstance(answer, hostcall.Answer)}


def check_architecture(inv: Inventory, facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises Refusal where a host has another architecture than the machine that builds: the image would not run."""
    where, builds = (f"host {inv.build_on}", facts[inv.build_on]["arch"]) if inv.build_on else ("this machine", HERE)
    others = sorted(name for name, known in facts.items() if known["arch"] != builds)
    if others:
        found = ", ".join(sorted({facts[name]["arch"] for name in others}))
        what = f"it builds images for {builds}, and {', '.join(others)} {'is' if len(others) == 1 else 'are'} {found}"
        fix = "name a host of their architecture: `build_on: <host>` in the inventory; hosts of one make a cluster"
        raise refuse(where, what, fix)


def choose_network(
    inv: Inventory, machines: Sequence[Machine], facts: Facts, last_map: Path | None, console: Console
) -> tuple[choose.Choice, Measured]:
    """Measure the networks that connect all hosts, or take the figures of `last_map`, and choose one.

    Raises Refusal when every network has a link that failed in all measurements, and where it would have to measure
    beside a run.
    """
    measured = measure_links(inv, machines, facts.networks.working, last_map, console, runs_in_progress(facts.hosts))
    addresses = {host.name: host.target.address for host in inv.hosts}
    kept = _chosen_before(last_map, facts.networks.working) if last_map else ""
    return choose.choose(facts.hosts, addresses, facts.networks, measured.measurements, kept), measured


def _chosen_before(last_map: Path, working: Sequence[choose.Working]) -> str:
    """The label of the network that the last deploy chose, on the same NICs of the hosts it knew; "" for none."""
    known = read_json(last_map)
    try:
        if below := known["network"].get("below"):
            return below if any(one.label == below for one in working) else ""
        name, nics = known["network"]["name"], {host["name"]: host["interface"] for host in known["hosts"]}
    except (KeyError, TypeError):
        return ""
    for network in (one for one in working if one.name == name):
        if all(nics.get(host, end.interface) == end.interface for host, end in network.endpoints.items()):
            return network.label
    return ""


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured, when (ISO 8601, UTC), and between what."""

    measurements: choose.Measurements
    when: str
    key: str


def measure_links(
    inv: Inventory,
    machines: Sequence[Machine],
    working: Sequence[choose.Working],
    last_map: Path | None,
    console: Console,
    runs: Mapping[str, str] | None = None,
) -> Measured:
    """Every pair of hosts on every network that works; the figures of the last map where they still hold.

    runs: those in progress, and whose they are: nothing is measured beside them. Raises Refusal where it would have to
    be.
    """
    networks = [addresses_of(one) for one in working]
    file = known_hosts_path(inv.path)  # other machines may come to have the same names and addresses
    known_hosts = sorted(file.read_text().splitlines()) if file.exists() else []
    described = [dataclasses.asdict(network) for network in networks]
    key = hashlib.sha256(json.dumps([described, known_hosts]).encode()).hexdigest()
    now = datetime.datetime.now(datetime.UTC)
    if len(inv.hosts) == 1:
        return Measured(choose.Measurements(), now.isoformat(timespec="seconds"), key)
    known = recall(last_map, key, now, bool(runs)) if last_map else None
    beside = ", ".join(f"run {run} of {owner}" for run, owner in (runs or {}).items())
    if known:
        again = f"{beside} is not disturbed" if runs else "MEASURE=1 measures them again"
        console.print(f"    measured {known.when[:16]} UTC on the same networks; {again}")
        return known
    if runs:
        what = f"{beside} is in progress, and measuring the links would disturb it"
        again = "make deploy" if last_map else "make deploy MEASURE=1"
        raise refuse("the hosts", what, f"run `{again}` when it has ended; `make stop RUN={next(iter(runs))}` ends it")
    measurements, asked, begin = choose.Measurements(), networks, "measuring"
    pairs, seconds = len(inv.hosts) * (len(inv.hosts) - 1), measure.BANDWIDTH_SECONDS
    while asked:
        names = ", ".join(network.name for network in asked)
        expected = measure.expected_seconds(len(inv.hosts), len(asked), seconds)
        console.print(f"    {begin} {pairs} ordered pairs of hosts on {names}: about {expected:.0f} s")
        links, busy = measure.measure(machines, asked, seconds, detail(console))
        if busy:
            console.print(f"    the processors of {', '.join(busy)} were busy: the links may be faster than that")
        measurements = measurements.with_round(links, busy)
        asked = [network for network in networks if network.name in choose.contested(measurements)]
        begin = "the result is not clear yet, so measuring again:"
    return Measured(measurements, now.isoformat(timespec="seconds"), key)


def addresses_of(network: choose.Working) -> measure.NetworkAddresses:
    """A network as measuring takes it."""
    ends = network.endpoints
    addresses, mtus = ({host: getattr(ends[host], name) for host in ends} for name in ("address", "mtu"))
    return measure.NetworkAddresses(network.label, addresses, mtus)


def runs_in_progress(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Run -> owner, of all that the hosts' facts say. Pure."""
    entries = (entry for known in facts.values() for entry in known.get("runs") or ())
    return {one["run"]: one["owner"] or "an unknown user" for one in entries if one["state"] in RUNNING}


def recall(last_map: Path, key: str, now: datetime.datetime, however_old: bool = False) -> Measured | None:
    """What the last deploy measured, if that was on the same networks, not long ago, and of every pair."""
    try:
        known = json.loads(last_map.read_text())
        age = now - datetime.datetime.fromisoformat(known["measured_at"])
        measured = known["measured"]
        links = {name: [Link(**entry) for entry in entries] for name, entries in measured["links"].items()}
        measurements = choose.Measurements(links, measured["speeds"], measured["failures"], measured["busy"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_old = not (however_old or 0 <= age.total_seconds() < REMEASURE_SECONDS)
    if known["measured_key"] != key or is_old:
        return None
    if measurements.failures or any(link.mbits is None for entries in links.values() for link in entries):
        return None
    return Measured(measurements, known["measured_at"], key)


def check_facts(hosts: Sequence[Host], facts: Mapping[str, Mapping[str, Any]], gpu_vendor: str | None = NVIDIA) -> None:
    """Raises Refusal for one machine under two names, and for GPUs that are absent, broken or cut into slices. Pure.

    gpu_vendor: as in clustermap.MapHost; None: the image is not known yet, and GPUs are left aside.
    """
    problems: list[Problem] = []
    owners: dict[str, str] = {}
    for host in hosts:
        where, known = f"host {host.name}", facts[host.name]
        for mac in (nic["mac"] for nic in known["nics"] if nic["mac"] and not nic["refused"]):
            if owners.setdefault(mac, host.name) != host.name:
                what = f"is the same machine as {owners[mac]} (both have the NIC with MAC address {mac})"
                problems.append(Problem(where, what, "list each machine once"))
                break
    problems += _gpu_problems(hosts, facts, gpu_vendor) if gpu_vendor else []
    if problems:
        raise Refusal(problems)


def _gpu_problems(hosts: Sequence[Host], facts: Mapping[str, Mapping[str, Any]], vendor: str) -> list[Problem]:
    """What prevents the hosts from training on the GPUs that the inventory sets; of several vendors in one message."""
    wanted = {host.name: host.settings.get("gpus") for host in hosts}
    mixed = gpu_checks.mixed({host.name: facts[host.name] for host in hosts}, wanted, vendor)
    problems = [Problem("the hosts", *mixed)] if mixed else []
    for name, gpus in wanted.items():
        if not (mixed and gpu_checks.strangers(facts[name], gpus, vendor)):
            problems += [Problem(f"host {name}", *one) for one in gpu_checks.gpu_obstacles(facts[name], gpus, vendor)]
    return problems


def unused_gpus(hosts: Sequence[Host], facts: Mapping[str, Mapping[str, Any]], gpu_vendor: str) -> list[str]:
    """In words, GPUs of which the training image's torch makes no use. Pure."""
    found = {host.name: gpu_checks.strangers(facts[host.name], host.settings.get("gpus"), gpu_vendor) for host in hosts}
    return [f"host {name}: {one[0]}; fix: {one[1]}" for name, one in found.items() if one]
