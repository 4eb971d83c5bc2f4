"""Networks as labs and machine rooms have them, as data: what is done to the lab's hosts, and what must be chosen.

Each host of the lab has a management and a data NIC with names of its own, docker0 with the same address everywhere,
container veths, a NIC that is down, and `127.0.1.1 hostname` in /etc/hosts. Both NICs have the same rate
(conftest.RATE). A scenario adds to that.

A step is (host, command): the command runs in the host's network namespace. Words in braces are filled in: {data},
{mgmt} are the host's NICs; {data.h1}, {mgmt.h1} addresses of the named host; {net.data}, {net.mgmt} the networks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Step = tuple[str, str]
ALL = ("h1", "h2", "h3")
PAIR = ("h1", "h2")


@dataclass(frozen=True)
class Scenario:
    name: str
    expect: str  # the network chosen ("data", "mgmt", or its beginning), or "refused"
    hosts: tuple[str, ...] = PAIR
    do: tuple[Step, ...] = ()
    undo: tuple[Step, ...] = ()  # beside what is always put right: firewalls, shaping, links down, MTUs
    settings: dict[str, str] = field(default_factory=dict)  # of all hosts, or by "h1.train_interface"
    long: bool = False  # left to `make test-all`
    reasons: tuple[str, ...] = ()  # words that must stand in the choice's explanations, or in the refusal


def everywhere(command: str, hosts: tuple[str, ...] = PAIR) -> tuple[Step, ...]:
    return tuple((host, command) for host in hosts)


SHAPE = "tc qdisc replace dev {nic} root tbf rate {rate} burst 256kb latency 50ms"
DATA_SLOW = SHAPE.format(nic="{data}", rate="200mbit")
MGMT_SLOW = SHAPE.format(nic="{mgmt}", rate="94mbit")
CONTRACT = "-p tcp --dport 29400:29415"
LONG = "-m length --length 1401:65535"

SCENARIOS = (
    Scenario("as the lab comes: names differ, decoys everywhere", "data", ALL, reasons=("carries SSH", "docker0")),
    Scenario(
        "the data network is slower in truth",
        "mgmt",
        do=everywhere(DATA_SLOW),
        reasons=("Gbit/s measured on the slowest pair", "also carries SSH"),
    ),
    Scenario(
        "the management network is slower", "data", do=everywhere(MGMT_SLOW), reasons=("Gbit/s measured",), long=True
    ),
    Scenario(
        "one host of three is slow on the data network",
        "mgmt",
        ALL,
        do=(("h3", DATA_SLOW),),
        reasons=("h3 -> h",),
        long=True,
    ),
    Scenario("one direction of one pair is slow", "mgmt", do=(("h2", DATA_SLOW),), reasons=("(h2 -> h1)",), long=True),
    Scenario(
        "a data NIC is down",
        "mgmt",
        do=(("h2", "ip link set {data} down"),),
        reasons=("h2 has no address on it",),
        long=True,
    ),
    Scenario(
        "on the fast network one host does not reach another",
        "mgmt",
        ALL,
        do=(
            ("h3", "iptables -A INPUT -i {data} -s {data.h1} -j DROP"),
            ("h3", "iptables -A OUTPUT -o {data} -d {data.h1} -j DROP"),
        ),
        reasons=("h1 does not reach h3", "h3 does not reach h1"),
    ),
    Scenario(
        "one direction blocked: h1 may not call h2",
        "mgmt",
        do=(("h2", f"iptables -A INPUT -i {{data}} -s {{data.h1}} {CONTRACT} --syn -j DROP"),),
        reasons=("h1 does not reach h2",),
        long=True,
    ),
    Scenario(
        "a firewall rejects the contract's ports",
        "mgmt",
        do=(("h2", f"iptables -A INPUT -i {{data}} {CONTRACT} -j REJECT --reject-with tcp-reset"),),
        reasons=("refused: a firewall rejects it",),
    ),
    Scenario(
        "an MTU black hole on the data network",
        "mgmt",
        do=(("h2", f"iptables -A INPUT -i {{data}} {LONG} -j DROP"),),
        reasons=("MTU black hole", "packets above 1400 bytes vanish"),
    ),
    Scenario(
        "an MTU black hole on every network, but not for SSH",
        "refused",
        do=(("h2", "iptables -A INPUT -p tcp --dport 22 -j ACCEPT"), ("h2", f"iptables -A INPUT {LONG} -j DROP")),
        reasons=("MTU black hole", "fix:"),
        long=True,
    ),
    Scenario("MTUs differ, and packets fit", "data", do=(("h1", "ip link set {data} mtu 1400"),), long=True),
    Scenario(
        "every network is blocked",
        "refused",
        do=(("h2", f"iptables -A INPUT {CONTRACT} -j DROP"),),
        reasons=("h1 does not reach h2 at {data.h2}", "h1 does not reach h2 at {mgmt.h2}", "open TCP"),
        long=True,
    ),
    Scenario(
        "the user insists on docker0",
        "refused",
        settings={"train_interface": "docker0"},
        reasons=("h1 does not reach h2 at 172.17.0.1", "same address"),
    ),
    Scenario("the user chooses the management network", "mgmt", settings={"train_network": "{net.mgmt}"}, long=True),
    Scenario(
        "the user chooses NICs, host by host",
        "mgmt",
        settings={"h1.train_interface": "{mgmt}", "h2.train_interface": "{mgmt}"},
    ),
    Scenario(
        "the user's network does not work",
        "refused",
        do=(("h2", f"iptables -A INPUT -i {{data}} {CONTRACT} -j DROP"),),
        settings={"train_network": "{net.data}"},
        reasons=("h1 does not reach h2 at {data.h2}", "within 1.5 s"),
        long=True,
    ),
    Scenario(
        "the user's network is not there",
        "refused",
        settings={"train_network": "10.9.0.0/16"},
        reasons=("no usable address that fits train_network=10.9.0.0/16", "the host has"),
        long=True,
    ),
    Scenario(
        "two NICs in one subnet",
        "data",
        do=(
            ("h1", "ip link add second0 type vxlan id 78 dev {data} remote {data.h2} dstport 4790"),
            ("h1", "ip link set second0 up"),
            ("h1", "ip addr add {data.h1+100}/24 dev second0 noprefixroute"),
        ),
        undo=(("h1", "ip link del second0"),),
        settings={"h2.train_network": "{net.data}"},
    ),
    Scenario(
        "a VPN between the hosts that works",
        "data",
        do=(
            ("h1", "ip link add tailscale0 type vxlan id 42 dev {mgmt} remote {mgmt.h2} dstport 4791"),
            ("h2", "ip link add tailscale0 type vxlan id 42 dev {mgmt} remote {mgmt.h1} dstport 4791"),
            *everywhere("ip link set tailscale0 up"),
            ("h1", "ip addr add 100.64.0.1/24 dev tailscale0"),
            ("h2", "ip addr add 100.64.0.2/24 dev tailscale0"),
        ),
        undo=everywhere("ip link del tailscale0"),
        reasons=("tailscale0", "VPN or tunnel"),
    ),
    Scenario(
        "the same address on all hosts, on a NIC that looks like any other",
        "data",
        do=everywhere("ip addr add 192.168.50.1/24 dev {mgmt}"),
        undo=everywhere("ip addr del 192.168.50.1/24 dev {mgmt}"),
        reasons=("192.168.50.0/24", "have the same address"),
        long=True,
    ),
    Scenario(
        "two of three hosts have the same address on a network",
        "data",
        ALL,
        do=(
            ("h1", "ip addr add 10.99.0.5/24 dev {mgmt}"),
            ("h2", "ip addr add 10.99.0.5/24 dev {mgmt}"),
            ("h3", "ip addr add 10.99.0.6/24 dev {mgmt}"),
        ),
        undo=(
            ("h1", "ip addr del 10.99.0.5/24 dev {mgmt}"),
            ("h2", "ip addr del 10.99.0.5/24 dev {mgmt}"),
            ("h3", "ip addr del 10.99.0.6/24 dev {mgmt}"),
        ),
        reasons=("10.99.0.0/24", "have the same address"),
    ),
    Scenario(
        "IPv6 alone",
        "fd00:78::/64",
        do=(
            ("h1", "ip addr add fd00:78::1/64 dev {data} nodad"),
            ("h2", "ip addr add fd00:78::2/64 dev {data} nodad"),
            *everywhere(f"iptables -A INPUT {CONTRACT} -j DROP"),
        ),
        undo=(
            ("h1", "ip addr del fd00:78::1/64 dev {data}"),
            ("h2", "ip addr del fd00:78::2/64 dev {data}"),
        ),
    ),
    Scenario(
        "IPv6 beside IPv4 on one NIC",
        "data",
        do=(
            ("h1", "ip addr add fd00:78::1/64 dev {data} nodad"),
            ("h2", "ip addr add fd00:78::2/64 dev {data} nodad"),
        ),
        undo=(
            ("h1", "ip addr del fd00:78::1/64 dev {data}"),
            ("h2", "ip addr del fd00:78::2/64 dev {data}"),
        ),
        reasons=("fd00:78::/64",),
        long=True,
    ),
    Scenario("a single host", "", ("h1",), reasons=("one host only",), long=True),
)
