"""Promise: where ufw and firewalld rule, a deploy opens them to the other hosts and no further, and takes that back."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from launch.hosts import inventory
from tests.lab.conftest import Lab, must

pytestmark = pytest.mark.lab

PORT = 29401
INSTALL = "export DEBIAN_FRONTEND=noninteractive; apt-get update -qq; apt-get install -y -qq --no-install-recommends"
PACKAGES = "ufw firewalld dbus"
#: Both at once, so that what one of them drops is dropped. There is no systemd here.
START = """\
mkdir -p /run/dbus && dbus-daemon --system --fork --nopidfile --print-pid >/run/test-dbus.pid
setsid firewalld --nofork --nopid >/dev/null 2>&1 </dev/null &
echo $! >/run/test-firewalld.pid
for again in $(seq 100); do firewall-cmd --state >/dev/null 2>&1 && break; sleep 0.2; done
firewall-cmd --state && ufw allow 22/tcp && ufw default deny incoming && ufw --force enable
"""
RULES = "ufw show added; firewall-cmd --list-all-zones; firewall-cmd --permanent --list-all-zones"
END = f"""\
ufw --force disable
kill $(cat /run/test-firewalld.pid /run/test-dbus.pid)
apt-get purge -y -qq {PACKAGES}
rm -rf /etc/firewalld /etc/ufw /run/test-*.pid
nft delete table inet firewalld
"""


@pytest.fixture
def walled(lab: Lab) -> Iterator[Lab]:
    """The lab with ufw and firewalld on h1, which let SSH in alone."""
    hosts = lab.inventory / "hosts.yml"
    text = hosts.read_text()
    try:
        lab.on("h1", f"{INSTALL} {PACKAGES} >/dev/null")
        lab.on("h1", START)
        yield lab
    finally:
        hosts.write_text(text)
        lab.on("h1", END, check=False)
        if lab.cluster["inventory_sha256"] != inventory.digest(lab.inventory):  # a deploy that was to fail has not
            must(lab.fab("deploy"))


def test_both_firewalls_are_opened_to_the_other_hosts_and_closed_again(walled: Lab) -> None:
    before = walled.on("h1", RULES)
    first = must(walled.fab("deploy"))
    assert "h1: ufw opened to h2, h3" in first and "h1: firewalld opened to h2, h3" in first
    own = walled.cluster["hosts"][0]["ssh"]["address"]
    walled.on("h1", f"(python3 -m http.server {PORT} >/dev/null 2>&1 & echo $! >/run/test-http.pid); sleep 1")
    try:
        assert walled.on("h2", f"python3 -c 'import socket; socket.create_connection((\"{own}\", {PORT}), 10)'") == ""
        with pytest.raises(OSError):  # this machine is no host of the cluster
            socket.create_connection((own, PORT), 2)
    finally:
        walled.on("h1", "kill $(cat /run/test-http.pid)")
    assert "Nothing had to be changed" in must(walled.fab("deploy"))
    must(walled.train("reduce.py", NODES=2))
    hosts = walled.inventory / "hosts.yml"
    hosts.write_text(hosts.read_text().replace("    h1:\n", "    h1:\n      firewall: false\n"))
    last = walled.fab("deploy")
    assert last.returncode == 2 and "h1: ufw has no rule of ours any more" in last.stdout, last.stdout
    assert "h2 does not reach h1" in last.stdout  # they drop again what they dropped before
    assert walled.on("h1", RULES) == before
