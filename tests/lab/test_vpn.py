"""Promise: with `train_vpn` nothing of a run goes in the clear between hosts; without it nothing is left of that."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import pytest

from tests.lab.conftest import HOSTS, Lab, must

pytestmark = pytest.mark.lab

#: Prints what goes by a NIC to and from an address until it is stopped, but ICMP: [[protocol, the lower port], ...].
SNIFF = """
import json, signal, socket, sys
nic, peer = sys.argv[1], socket.inet_aton(sys.argv[2])
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
taken = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))
taken.bind((nic, 0x0800))
seen = set()
try:
    while True:
        packet = taken.recv(65535)
        if peer in (packet[12:16], packet[16:20]) and packet[9] != socket.IPPROTO_ICMP:
            ports = packet[(packet[0] & 15) * 4:][:4]
            seen.add((packet[9], min(int.from_bytes(ports[:2], "big"), int.from_bytes(ports[2:], "big"))))
finally:
    print(json.dumps(sorted(seen)))
"""
UDP, VPN_PORT = 17, 51820


@contextlib.contextmanager
def hidden(lab: Lab) -> Iterator[tuple[str, str]]:
    """The lab with a VPN for training. Yields h1's NIC, and h2's address, of the network below it."""
    hosts = lab.inventory / "hosts.yml"
    text = hosts.read_text()
    below = {host["name"]: host for host in lab.cluster["hosts"]}
    try:
        hosts.write_text(text.replace("  vars:\n", "  vars:\n    train_vpn: wireguard\n"))
        said = must(lab.fab("deploy"))
        assert "Bringing up the VPN that training goes through, as h1, h2, h3 need it" in said
        assert "Network 10.213.0.0/24: a VPN (WireGuard)" in said
        assert {host["interface"] for host in lab.cluster["hosts"]} == {"muster0"}
        yield below["h1"]["interface"], below["h2"]["address"]
    finally:
        hosts.write_text(text)
        assert "Removing the VPN from h1, h2, h3" in must(lab.fab("deploy"))


def test_a_run_goes_through_the_vpn_alone_also_after_a_restart_of_it(lab: Lab) -> None:
    with hidden(lab) as (nic, peer):
        lab.on("h2", "wg-quick down muster0")  # as after a restart of a host without systemd
        lab.on("h1", f"cat >/run/test-sniff.py <<'END'\n{SNIFF}\nEND")
        lab.on("h1", f"(python3 /run/test-sniff.py {nic} {peer} >/run/test-sniff.json & echo $! >/run/test-sniff.pid)")
        try:
            must(lab.train("reduce.py", NODES=2))
            lab.on("h1", "pid=$(cat /run/test-sniff.pid); kill $pid; while kill -0 $pid; do sleep 0.1; done")
            seen = lab.on("h1", "cat /run/test-sniff.json")
        finally:
            lab.on("h1", "kill $(cat /run/test-sniff.pid); rm -f /run/test-sniff.*", check=False)
        assert json.loads(seen) == [[UDP, VPN_PORT]]
        assert all(lab.on(host, "stat -c '%a %U' /etc/wireguard/muster0.key") == "600 root" for host in HOSTS)
    for host in HOSTS:
        left = "ls -d /sys/class/net/muster0 /etc/wireguard/muster0.* /run/wireguard 2>/dev/null"
        assert lab.on(host, left, check=False) == ""
