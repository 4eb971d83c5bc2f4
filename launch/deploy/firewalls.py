"""The hosts' own firewalls, ufw and firewalld, opened to the other hosts of the inventory, and closed again.

What is to be changed is found out from the hosts' facts (`unsettled`, pure); the hosts' half is muster_firewalls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keeper import MASTER_PORTS
from launch.cli import exits
from launch.cli.output import Phases
from launch.cli.refusal import Problem, Refusal
from launch.hosts import clustermap, hostcall, ssh
from launch.hosts.connection import ANSWER_SECONDS, LINK_ERRORS, Machine
from launch.hosts.inventory import Host
from launch.network import choose

CHANGE_SECONDS, ADDRESS_SECONDS = 60.0, 10.0  # how long a change may take, and for each address that is let in

Ports = dict[str, list[tuple[int, int]]]

_FIX = (
    "see what it says on the host, then `make deploy` again; or open the ports that the README lists by hand and set "
    "`firewall: false` for this host"
)


def ports(has_vpn: bool) -> Ports:
    """What the other hosts call, beside the ephemeral range, which each host knows itself. Pure."""
    udp = [clustermap.REACH_PORTS, *([(clustermap.VPN_PORT, clustermap.VPN_PORT)] if has_vpn else [])]
    return {"tcp": [clustermap.REACH_PORTS, MASTER_PORTS], "udp": udp}


def unsettled(
    hosts: Sequence[Host], facts: Mapping[str, Mapping[str, Any]], vpn: Mapping[str, str] | None = None
) -> dict[str, list[str]]:
    """Host -> all addresses that its firewalls are to let in, of the hosts where they do not do just that. Pure.

    A host with `firewall: false` lets nobody in by rules of ours, and one without root cannot be asked for any.
    vpn: the hosts' addresses in the VPN, if any.
    """
    usable = {host.name: [end.address for end in choose.candidates(facts[host.name], {})] for host in hosts}
    for name, address in (vpn or {}).items():
        usable[name].append(address)
    found = {}
    for host in (one for one in hosts if not one.target.rootless):
        others = sorted({one for name, own in usable.items() for one in own if name != host.name})
        wanted = dict.fromkeys(others, True) if host.settings.get("firewall", True) else {}
        opened = facts[host.name]["firewalls"] or {}
        if any(one != wanted and (wanted or one) for one in opened.values()):
            found[host.name] = list(wanted)
    return found


def open_to_peers(
    machines: Sequence[Machine],
    sources: Mapping[str, Sequence[str]],
    peers: Sequence[str],
    asked: Ports,
    phases: Phases,
) -> None:
    """Have the firewalls of the hosts in `sources` let in these addresses alone, on these ports (asked). peers: all.

    Raises Refusal, naming each host where that failed, or that cannot be logged in to any more.
    """
    theirs = [machine for machine in machines if machine.name in sources]
    for name, changed in _settle(theirs, sources, asked).items():
        others = ", ".join(peer for peer in peers if peer != name)
        what = f"opened to {others}" if sources[name] else "has no rule of ours any more"
        for firewall in changed:
            phases.say(f"{name}: {firewall} {what}")


def close(machines: Sequence[Machine]) -> None:
    """Take all rules of ours out of the hosts' firewalls, active or not. Raises Refusal as `open_to_peers` does."""
    those = [machine for machine in machines if not machine.target.rootless]
    _settle(those, {machine.name: [] for machine in those}, ports(has_vpn=False))


def _settle(machines: Sequence[Machine], sources: Mapping[str, Sequence[str]], asked: Ports) -> dict[str, list[str]]:
    """Host -> names of the firewalls that were changed."""

    def one(machine: Machine) -> list[str]:
        own = list(sources[machine.name])
        options = {"sources": own, "ports": asked}
        said = hostcall.say_to(machine, "muster_firewalls", options, CHANGE_SECONDS + ADDRESS_SECONDS * len(own))
        if said["undo"]:
            machine.reconnect()  # or it takes the change back
            machine.answer(f"rm -r {said['undo']}", ANSWER_SECONDS)
        return list(said["changed"])

    results = dict(zip((machine.name for machine in machines), ssh.in_parallel(one, machines), strict=True))
    problems = []
    for name, result in results.items():
        if isinstance(result, (RuntimeError, *LINK_ERRORS)):
            problems.append(Problem(f"host {name}", str(result), _FIX))
        elif isinstance(result, BaseException):
            raise result
    if problems:
        raise Refusal(problems, exits.DEPLOY_FAILED)
    return {name: result for name, result in results.items() if isinstance(result, list)}
