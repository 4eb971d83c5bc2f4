"""Promise: on each network of scenarios.py the right one is chosen, or the refusal names what is wrong. 0 wrong."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from launch.cli.refusal import Refusal
from launch.deploy import detect
from launch.hosts import inventory
from launch.hosts.connection import connected
from launch.network.choose import Choice
from tests.lab.conftest import HOSTS, Lab, summary_of
from tests.lab.scenarios import SCENARIOS, Scenario, Step

pytestmark = pytest.mark.lab


@dataclass(frozen=True)
class Names:
    """NICs and addresses of the lab's hosts, to fill in the words of scenarios."""

    nics: dict[str, dict[str, str]]  # host: {"data": NIC, "mgmt": NIC}
    addresses: dict[str, dict[str, str]]  # "data": {host: address}
    networks: dict[str, str]

    def fill(self, text: str, host: str = "h1") -> str:
        def word(found: re.Match[str]) -> str:
            name, _, rest = found[1].partition(".")
            if name == "net":
                return self.networks[rest]
            if not rest:
                return self.nics[host][name]
            owner, _, more = rest.partition("+")
            head, _, tail = self.addresses[name][owner].rpartition(".")
            return f"{head}.{int(tail) + int(more or 0)}"

        return re.sub(r"\{([^}]+)\}", word, text)


@pytest.fixture(scope="module")
def names(lab: Lab) -> Names:
    nics: dict[str, dict[str, str]] = {}
    addresses: dict[str, dict[str, str]] = {"data": {}, "mgmt": {}}
    for host in lab.cluster["hosts"]:
        for nic in host["facts"]["nics"]:
            for entry in nic["addresses"]:
                for kind, beginning in (("data", "10.78."), ("mgmt", "10.77.")):
                    if entry["address"].startswith(beginning):
                        nics.setdefault(host["name"], {})[kind] = nic["name"]
                        addresses[kind][host["name"]] = entry["address"]
    networks = {kind: f"{by_host['h1'].rpartition('.')[0]}.0/24" for kind, by_host in addresses.items()}
    return Names(nics, addresses, networks)


@pytest.fixture
def changed_network(lab: Lab, names: Names) -> Iterator[list[Step]]:
    """Steps that are undone afterwards; firewalls, shaping, downed links and MTUs are put right in any case."""
    undo: list[Step] = []
    lab.shape()
    yield undo
    for host, command in undo:
        lab.nsenter(host, *names.fill(command, host).split())
    for host in HOSTS:
        lab.nsenter(host, "iptables", "-F")
        for kind in ("data", "mgmt"):
            lab.nsenter(host, *f"ip link set {names.nics[host][kind]} up mtu 1500".split())
    lab.shape()


def write_inventory(folder: Path, lab: Lab, names: Names, scenario: Scenario) -> Path:
    """The lab's inventory cut down to the scenario's hosts, with its settings; trusted by the same known_hosts."""
    loaded: dict[str, Any] = yaml.safe_load((lab.inventory / "hosts.yml").read_text())["all"]
    hosts = {name: dict(loaded["hosts"][name]) for name in scenario.hosts}
    for key, value in scenario.settings.items():
        owner, _, variable = key.rpartition(".")
        for host in [owner] if owner else list(hosts):
            hosts[host][variable] = names.fill(value, host)
    common = loaded["vars"] | {"ansible_ssh_private_key_file": str((lab.inventory / "id_ed25519").resolve())}
    path = folder / "hosts.yml"
    path.write_text(yaml.safe_dump({"all": {"vars": common, "hosts": hosts}}, sort_keys=False))
    shutil.copy(lab.inventory / "known_hosts", folder / "known_hosts")
    return path


def detected(inv: inventory.Inventory) -> Choice:
    console = Console(stderr=True)
    with connected([host.target for host in inv.hosts], inventory.known_hosts_path(inv.path)) as machines:
        known = detect.facts_of(inv, detect.ask(inv, machines, console), console)
        facts = detect.networks_of(inv, machines, known, console)
        return detect.choose_network(inv, machines, facts, None, console)[0]


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(one, marks=[pytest.mark.long] if one.long else []) for one in SCENARIOS],
    ids=lambda scenario: scenario.name.replace(" ", "-"),
)
def test_the_right_network_is_chosen_or_refused(
    lab: Lab, names: Names, changed_network: list[Step], scenario: Scenario, tmp_path: Path
) -> None:
    inv = inventory.read(write_inventory(tmp_path, lab, names, scenario))
    changed_network += scenario.undo
    for host, command in scenario.do:
        lab.nsenter(host, *names.fill(command, host).split())
    said = ""
    try:
        if scenario.expect == "refused":
            with pytest.raises(Refusal) as caught:
                detected(inv)
            said = str(caught.value)
        else:
            choice = detected(inv)
            said = "\n".join(
                [choice.network.reason, *(f"{one['network']}: {one['reason']}" for one in choice.network.refused)]
            )
            wanted = names.networks.get(scenario.expect, scenario.expect)
            assert choice.network.name.startswith(wanted), said
            for host, end in choice.endpoints.items():
                if kind := {"data": "data", "mgmt": "mgmt", "fd00:78::/64": "data"}.get(scenario.expect):
                    assert end.interface == names.nics[host][kind], said
    finally:
        shutil.rmtree(Path("build") / inventory.build_name(inv.path), ignore_errors=True)
    for reason in scenario.reasons:
        assert names.fill(reason) in said


def test_a_run_goes_over_ipv6_with_dead_dns(
    lab: Lab, names: Names, changed_network: list[Step], tmp_path: Path
) -> None:
    scenario = next(one for one in SCENARIOS if one.name == "IPv6 beside IPv4 on one NIC")
    only = dataclasses.replace(scenario, settings={"train_network": "fd00:78::/64"})
    path = write_inventory(tmp_path, lab, names, only)
    resolvers = {host: lab.on(host, "cat /etc/resolv.conf") for host in only.hosts}
    changed_network += only.undo
    try:
        for host, command in only.do:
            lab.nsenter(host, *names.fill(command, host).split())
        for host in only.hosts:
            lab.on(host, "echo nameserver 192.0.2.1 > /etc/resolv.conf")
        done = lab.fab("deploy", INVENTORY=path)
        assert done.returncode == 0, done.stdout
        done = lab.train("reduce.py", INVENTORY=path)
        assert done.returncode == 0, done.stdout
        assert summary_of(done.stdout)[1]["master_addr"] == "fd00:78::1"
    finally:
        for host, text in resolvers.items():
            lab.on(host, f"printf '%s\\n' '{text}' > /etc/resolv.conf")
        shutil.rmtree(Path("build") / inventory.build_name(path), ignore_errors=True)
