"""What the hosts say of themselves and of the links between them, asked in one SSH call per host.

Not for what that means: see check.py and the checks that it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keeper import engines
from launch.health.host_checks import RUNNING
from launch.hosts import hostcall, ssh
from launch.hosts.clustermap import ClusterMap, MapHost
from launch.hosts.connection import Machine
from launch.hosts.hostcall import Answer
from launch.network import measure
from launch.network.links import Link

FACTS_SECONDS = 30.0  # the longest that a host may take for its facts, the data set's fingerprint included

#: By host what its training image says of itself, each value by its name in sameness.PROPERTIES; None: not known.
Inside = dict[str, Mapping[str, str | None] | None]


@dataclass(frozen=True)
class Survey:
    """The hosts' answers, and the links between them on the training network."""

    answers: dict[str, Answer | BaseException]
    links: list[Link]
    sampled: bool = False  # links of some pairs alone

    def facts(self, host: str) -> Mapping[str, Any]:
        """{} where the host did not answer."""
        answer = self.answers[host]
        return answer.survey or {} if isinstance(answer, Answer) else {}

    def running(self) -> list[str]:
        """The hosts on which a run is in progress."""
        runs = {host: self.facts(host).get("runs") or [] for host in self.answers}
        return [host for host, entries in runs.items() if any(entry.get("state") in RUNNING for entry in entries)]


def ask_hosts(
    hosts: Sequence[MapHost],
    machines: Sequence[Machine],
    bandwidth_seconds: int,
    full: bool,
    say: Callable[[str], None],
    engine: bool = True,
) -> Survey:
    """Ask every host at once for its facts and for its links to the others.

    `bandwidth_seconds`: how long the bandwidth of each pair is measured; 0: not at all. `full`: the facts that take
    longer, too (muster_survey.survey), and the links of all pairs, however many hosts there are; else of many hosts a
    sample of them (launch.network.measure). `engine`: images and runs, too. `say` shows a line of progress.
    """
    sample = not full and len(hosts) > measure.EVERY_PAIR_HOSTS
    names = [host.name for host in hosts]
    # Bytes, as the last deploy found them.
    mtus = {host.name: int(nic_of(host, host.facts).get("mtu") or 1500) for host in hosts}
    network = measure.NetworkAddresses("training", {host.name: host.address for host in hosts}, mtus)
    networks = [network] if len(hosts) > 1 else []
    asked = measure.options(names, networks, bandwidth_seconds, sample) if networks else {}
    options = {
        host.name: {
            "survey": {"train_interface": host.interface, "data_dir": host.data_dir, "full": full, "engine": engine},
            **asked.get(host.name, {}),
        }
        for host in hosts
    }
    limit = FACTS_SECONDS + measure.longest_seconds(len(hosts), len(networks), bandwidth_seconds, sample)
    answers = hostcall.call_hosts(machines, options, limit, say)
    measured = measure.links(names, networks, answers, measure.asked_pairs(asked))
    return Survey(answers, measured.get(network.name, []), sample)


def hosts_with_a_run(machines: Sequence[Machine]) -> list[str]:
    """The hosts on which a run is in progress. Hosts that do not answer are left out."""
    command = engines.on_host(lambda engine: f"{engine.name} ps --quiet --filter label={engines.RUN_LABEL}")
    answers = ssh.in_parallel(lambda machine: machine.answer(command).split(), machines)
    return [machine.name for machine, ids in zip(machines, answers, strict=True) if isinstance(ids, list) and ids]


def nic_of(host: MapHost, facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """The training NIC of a host by these facts; {} where they do not have it."""
    nics: list[dict[str, Any]] = facts.get("nics") or []
    return next((nic for nic in nics if nic["name"] == host.interface), {})


def images_of(cluster: ClusterMap, survey: Survey) -> Inside:
    """The id of the training image that each host holds now. It determines torch, NCCL, CUDA and the code within."""
    images = {host: survey.facts(host).get("images") for host in survey.answers}
    ref = cluster.image.ref
    return {host: None if own is None else {"image": own.get(ref, "none")} for host, own in images.items()}
