"""The lab: its inventory and command line, then real hosts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from containers import engine, lab, lab_host, lab_plan
from containers.lab_host import LABEL, SYSTEM_LABEL, Host
from tests import sweep
from tests.sweep import lab_name

FIRST, SECOND = lab_name("a"), lab_name("b")


def hosts_of(name: str, count: int) -> list[Host]:
    return [Host(name, index, f"10.77.0.{11 + index}", f"10.78.0.{11 + index}", "0") for index in range(count)]


@pytest.mark.slow
def test_ansible_reads_the_inventory_in_order(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text(lab.inventory_text(hosts_of("lab", 12)))
    ansible = Path(sys.executable).with_name("ansible-inventory")
    said = subprocess.run(
        [ansible, "-i", tmp_path / "hosts.yml", "--list"], capture_output=True, text=True, check=True, timeout=300
    )
    read = json.loads(said.stdout)
    assert list(read["ungrouped"]["hosts"]) == [f"h{number}" for number in range(1, 13)]
    assert read["_meta"]["hostvars"]["h2"] == {
        "ansible_host": "10.77.0.12",
        "ansible_user": "muster",
        "ansible_ssh_private_key_file": "{{ inventory_dir }}/id_ed25519",
    }


def test_what_to_do_about_a_slow_network_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "BUILD", tmp_path)
    monkeypatch.setattr(lab, "INVENTORIES", tmp_path / "inventory")
    hosts = hosts_of("slow", 2)
    assert list(lab._advice("slow", hosts, None)) == []
    (limited,) = lab._advice("slow", hosts, "1gbit")
    folder = "inventory/slow/group_vars"
    assert f"mkdir -p {folder} && echo 'train_network: 10.78.0.0/24' > {folder}/all.yml" in limited
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "cluster.json").write_text("{}")
    for link in (None, "1gbit"):
        assert "make deploy MEASURE=1 INVENTORY=inventory/slow" in list(lab._advice("slow", hosts, link))[-1]
    settings = tmp_path / "inventory" / "slow" / "group_vars" / "all.yml"
    settings.parent.mkdir(parents=True)
    settings.write_text("train_network: 10.78.0.0/24")
    assert len(list(lab._advice("slow", hosts, "1gbit"))) == 1  # the network is chosen already


def test_more_processor_time_than_a_hosts_cores_give_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    lab._refuse_too_many_cpus(1, 2.0)
    lab._refuse_too_many_cpus(3, None)
    with pytest.raises(engine.ContainersError, match=r"CPUS=1\.5: a host of a lab of 2 has 1 core of this machine"):
        lab._refuse_too_many_cpus(2, 1.5)


def test_a_host_that_exists_keeps_its_system_and_another_one_is_refused() -> None:
    there = {
        "h1": {"Labels": {LABEL: "mixed"}},  # made before labs had systems
        "h2": {"Labels": {LABEL: "mixed", SYSTEM_LABEL: "ubuntu24.04"}},
    }
    assert lab._systems((), 3, there) == ["debian", "ubuntu24.04", "debian"]
    assert lab._systems(("debian", "ubuntu24.04"), 2, there) == ["debian", "ubuntu24.04"]
    assert lab._systems(("debian",), 1, there) == ["debian"]  # h2 is not one of them any more
    with pytest.raises(engine.ContainersError, match=r"h2 has ubuntu24\.04, not debian") as refused:
        lab._systems(("debian",), 2, there)
    assert "h1" not in refused.value.what and "make lab-down LAB=mixed" in refused.value.fix


def test_a_hosts_part_of_its_cores_is_shown() -> None:
    assert [lab._processors("0", None), lab._processors("0,1", None)] == ["core 0", "cores 0,1"]
    assert lab._processors("1", 0.25) == "0.25 of core 1"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--hosts", "0"),
        ("--hosts", "two"),
        ("--hosts", "-1"),
        ("--hosts", "1000"),
        ("--link", "fast"),
        ("--cpus", "half"),
        ("--os", "windows"),
        ("--name", "My Lab"),
        ("--name", "../etc"),
        ("--speed", "1"),
    ],
)
def test_a_bad_argument_gives_one_message_and_status_2(
    arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert lab.main(["up", *arguments]) == 2
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 3 and "fix: " in said.err and arguments[1] in said.err
    assert said.out == ""


def test_settings_in_a_labs_inventory_are_never_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "BUILD", tmp_path / "build")
    path, two, three, said = tmp_path / "hosts.yml", hosts_of("lab", 2), hosts_of("lab", 3), list[str]()
    for start in (lab.MARK, lab.inventory_text(two)):  # as a lab wrote it
        path.write_text(start)
        lab._write_inventory(tmp_path, three, said.append)
        assert path.read_text() == lab.inventory_text(three) and not said
    own = lab.inventory_text(two).replace("    h2:\n", "    h2:\n      container_engine: docker\n")
    path.write_text(own)
    lab._write_inventory(tmp_path, two, said.append)  # the same hosts
    assert path.read_text() == own and not said
    lab._write_inventory(tmp_path, three, said.append)
    [kept] = (tmp_path / "build" / tmp_path.name).iterdir()
    assert kept.read_text() == own and path.read_text() == lab.inventory_text(three)
    assert len(said) == 1 and kept.name in said[0]


def test_an_inventory_in_which_hosts_are_spares_is_read() -> None:
    text = "all:\n  hosts:\n    h1: {ansible_host: 10.0.0.1}\n    h2: {ansible_host: 10.0.0.2}\n"
    spares = text + "  children: {spares: {hosts: {h2: }}}\n"
    assert lab.addresses(spares) == {"h1": "10.0.0.1", "h2": "10.0.0.2"}
    assert lab.addresses("all: [") == lab.addresses("- a list\n") == {}


def test_an_inventory_that_is_not_a_labs_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "INVENTORIES", tmp_path / "inventory")
    monkeypatch.setattr(lab, "REPOSITORY", tmp_path)
    monkeypatch.setattr(lab, "as_root", lambda: ())
    mine = tmp_path / "inventory" / "rack" / "hosts.yml"
    mine.parent.mkdir(parents=True)
    mine.write_text("all: {hosts: {a: {}}}\n")
    with pytest.raises(engine.ContainersError, match="not written by `make lab`"):
        lab.up("rack", 1)
    assert mine.read_text() == "all: {hosts: {a: {}}}\n"


def test_what_is_known_of_an_inventory_of_the_labs_name_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """build/rack is the place of inventory/rack.yml, too."""
    monkeypatch.setattr(lab, "INVENTORIES", tmp_path / "inventory")
    monkeypatch.setattr(lab, "BUILD", tmp_path / "build")
    monkeypatch.setattr(lab, "REPOSITORY", tmp_path)
    monkeypatch.setattr(lab, "as_root", lambda: ())
    monkeypatch.setattr(lab, "_containers", lambda name: [])
    monkeypatch.setattr(lab, "_labelled", lambda kind, name: [])
    known = tmp_path / "build" / "rack" / "cluster.json"
    for path in (known, tmp_path / "inventory" / "rack.yml"):
        path.parent.mkdir(parents=True)
        path.write_text("{}\n")
    assert not lab.down("rack") and known.exists()
    with pytest.raises(engine.ContainersError, match="the same place") as refused:
        lab.up("rack", 1)
    assert refused.value.where == "inventory/rack.yml"


# From here on with containers.


def left_of(*names: str) -> list[str]:
    """Whatever Podman and the inventory still hold of labs."""
    found = []
    for name in names:
        found += engine.podman("ps", "--all", "--quiet", f"--filter=label={LABEL}={name}").split()
        for kind in ("volume", "network"):
            found += [entry for entry in engine.podman(kind, "ls", "--quiet").split() if f"muster-{name}-" in entry]
        found += [str(path) for path in (lab.INVENTORIES / name,) if path.exists()]
    return found


def on(host: Host, script: str) -> str:
    """Output of a shell line on a host, over SSH, as its user."""
    key = lab.INVENTORIES / host.lab / "id_ed25519"
    trust = [f"-oUserKnownHostsFile={key.with_name('known_hosts')}", "-oStrictHostKeyChecking=accept-new"]
    return engine.output(["ssh", "-oBatchMode=yes", *trust, f"-i{key}", f"muster@{host.management}", script])


def inside(host: Host, *arguments: str) -> str:
    """Output of this machine's own command in the network namespace of a host."""
    pid = engine.podman("inspect", "--format={{.State.Pid}}", host.container).strip()
    return engine.output(engine.root_command("nsenter", f"--net=/proc/{pid}/ns/net", *arguments))


def addresses(host: Host) -> dict[str, tuple[str, str]]:
    """NIC -> (state, first IPv4 address)."""
    entries = json.loads(inside(host, "ip", "-json", "-4", "addr"))
    return {entry["ifname"]: (entry["operstate"], entry["addr_info"][0]["local"]) for entry in entries}


@pytest.fixture(scope="module")
def pair(container_engine: None) -> Iterator[list[Host]]:
    """A lab of two hosts; nothing is left of it afterwards."""
    try:
        hosts = lab.up(FIRST, 2)
        yield hosts
    finally:
        lab.down(FIRST)
        lab.down(SECOND)
    assert left_of(FIRST, SECOND) == []
    gone = {IPv4Network(f"{address}/24", strict=False) for address in (hosts[0].management, hosts[0].data)}
    assert gone.isdisjoint(lab._routes())


@pytest.mark.lab
def test_a_host_is_bare(pair: list[Host]) -> None:
    for tool in ("podman", "runc", "rsync", "ip", "pip", "gcc", "curl"):
        assert on(pair[0], f"command -v {tool} || true") == "", tool
    assert on(pair[0], "python3 -c 'import sys; print(sys.version_info[:2])'").strip() == "(3, 11)"


@pytest.mark.lab
def test_the_user_is_not_root_but_may_become_it(pair: list[Host]) -> None:
    assert on(pair[0], "id -un; sudo -n id -un").split() == ["muster", "root"]


@pytest.mark.lab
def test_passwords_do_not_open_the_door(pair: list[Host]) -> None:
    with pytest.raises(engine.CommandFailed, match=r"Permission denied \(publickey\)"):
        engine.output(
            [
                "ssh",
                "-oPubkeyAuthentication=no",
                "-oPreferredAuthentications=password,keyboard-interactive",
                "-oBatchMode=yes",
                f"-oUserKnownHostsFile={lab.INVENTORIES / FIRST / 'known_hosts'}",
                "-oStrictHostKeyChecking=accept-new",
                f"muster@{pair[0].management}",
                "true",
            ]
        )


@pytest.mark.lab
def test_each_host_has_its_own_name_keys_and_machine_id(pair: list[Host]) -> None:
    assert [on(host, "hostname").strip() for host in pair] == ["h1", "h2"]
    for file in ("/etc/machine-id", "/etc/ssh/ssh_host_ed25519_key.pub"):
        contents = [on(host, f"cat {file}") for host in pair]
        assert all(contents)
        assert contents[0] != contents[1], file


@pytest.mark.lab
def test_a_hosts_own_name_means_loopback_as_on_debian(pair: list[Host]) -> None:
    look_up = "python3 -c 'import socket; print(socket.gethostbyname(socket.gethostname()))'"
    assert {on(host, look_up).strip() for host in pair} == {"127.0.1.1"}


@pytest.mark.lab
def test_nics_are_named_differently_and_only_management_leads_out(pair: list[Host]) -> None:
    for host in pair:
        found = addresses(host)
        assert found[host.nics.management] == ("UP", host.management)
        assert found[host.nics.data] == ("UP", host.data)
        routes = json.loads(inside(host, "ip", "-json", "route", "show", "default"))
        assert [route["dev"] for route in routes] == [host.nics.management]
    assert not {pair[0].nics.management, pair[0].nics.data} & {pair[1].nics.management, pair[1].nics.data}


@pytest.mark.lab
def test_every_host_has_the_decoys(pair: list[Host]) -> None:
    first, second = (addresses(host) for host in pair)
    assert first["docker0"] == second["docker0"] == ("UP", "172.17.0.1")
    assert ("UP", "10.200.0.1") in first.values()
    assert ("UP", "10.200.0.1") in second.values()
    assert first[pair[0].nics.down] == ("DOWN", "10.201.0.11")
    assert second[pair[1].nics.down] == ("DOWN", "10.201.0.12")


@pytest.mark.lab
def test_hosts_reach_each_other_over_the_data_network(pair: list[Host]) -> None:
    reach = f"import socket; socket.create_connection(('{pair[1].data}', 22), 5, ('{pair[0].data}', 0)); print('ok')"
    assert on(pair[0], f'python3 -c "{reach}"').strip() == "ok"


@pytest.mark.lab
def test_hosts_have_cores_of_their_own(pair: list[Host]) -> None:
    affinity = "python3 -c 'import os; print(*os.sched_getaffinity(0))'"
    shares = [set(map(int, on(host, affinity).split())) for host in pair]
    assert [",".join(map(str, sorted(share))) for share in shares] == lab_plan.cpusets(
        sorted(os.sched_getaffinity(0)), 2
    )


@pytest.mark.lab
def test_packages_can_be_installed(pair: list[Host]) -> None:
    on(pair[0], "sudo apt-get update -qq")
    assert "rsync" in on(pair[0], "apt-cache show rsync")


@pytest.mark.lab
def test_orphans_are_reaped(pair: list[Host]) -> None:
    on(pair[0], "sh -c '(sleep 0.2 &)'")
    while any(word in on(pair[0], "ps ax") for word in ("sleep 0.2", "defunct")):  # as long as the test may take
        time.sleep(0.1)


@pytest.mark.lab
def test_up_again_starts_what_was_stopped_and_creates_nothing(pair: list[Host]) -> None:
    identity = on(pair[1], "cat /etc/machine-id")
    engine.podman("stop", "--time=0", pair[1].container)
    inventory = lab.INVENTORIES / FIRST / "hosts.yml"
    written = inventory.stat().st_mtime_ns
    said: list[str] = []
    assert lab.up(FIRST, 2, progress=said.append) == pair
    assert said == ["h2: starting", "waiting for sshd"]
    assert inventory.stat().st_mtime_ns == written
    assert on(pair[1], "cat /etc/machine-id") == identity
    while addresses(pair[1])["docker0"] != ("UP", "172.17.0.1"):  # the kernel reports a new bridge's state later
        time.sleep(0.1)


@pytest.mark.lab
def test_link_shapes_the_data_nic_both_ways_and_no_other(pair: list[Host]) -> None:
    def shaped(said: str) -> list[str]:
        return [entry["dev"] for entry in json.loads(said) if entry["kind"] == "tbf"]

    def on_this_machine() -> set[str]:
        return set(shaped(engine.output(engine.root_command("tc", "-json", "qdisc"))))

    before = on_this_machine()
    lab.up(FIRST, 2, "100mbit")
    try:
        assert [shaped(inside(host, "tc", "-json", "qdisc")) for host in pair] == [[host.nics.data] for host in pair]
        assert len(on_this_machine() - before) == 2
    finally:
        lab.up(FIRST, 2)
    assert [shaped(inside(host, "tc", "-json", "qdisc")) for host in pair] == [[], []]
    assert on_this_machine() == before


@pytest.mark.lab
def test_a_quota_limits_the_computing_time_and_is_lifted_again(pair: list[Host]) -> None:
    """A busy machine can only give the host less than its quota, and sooner or later it gives more than that."""
    spin = "import time; e = time.monotonic() + 2\nwhile time.monotonic() < e: pass\nprint(time.process_time() / 2)"
    lab.up(FIRST, 2, cpus=0.2)
    try:
        assert float(on(pair[0], f"python3 -c '{spin}'")) < 0.25
    finally:
        lab.up(FIRST, 2)
    assert any(float(on(pair[0], f"python3 -c '{spin}'")) > 0.25 for _ in range(60))


@pytest.mark.lab
def test_another_number_of_hosts_adds_and_removes(pair: list[Host]) -> None:
    identity = on(pair[0], "cat /etc/machine-id")
    try:
        three = lab.up(FIRST, 3)
        assert on(three[2], "hostname").strip() == "h3"
        one = lab.up(FIRST, 1)
        assert on(one[0], "cat /etc/machine-id") == identity
        assert on(one[0], "nproc").strip() == str(len(os.sched_getaffinity(0)))
        assert "h2" not in (lab.INVENTORIES / FIRST / "hosts.yml").read_text()
        assert not [volume for volume in lab._labelled("volume", FIRST) if "-h1-" not in volume]
    finally:
        lab.up(FIRST, 2)


@pytest.mark.lab
def test_two_labs_stand_side_by_side(pair: list[Host]) -> None:
    other = lab.up(SECOND, 1)
    assert {other[0].management, other[0].data}.isdisjoint(
        {found for host in pair for _, found in addresses(host).values()}
    )
    assert on(other[0], "hostname").strip() == "h1"
    assert lab.down(SECOND)
    assert left_of(SECOND) == []
    assert on(pair[0], "hostname").strip() == "h1"
    assert not lab.down(SECOND)


class BusyPodman:
    """Holds two volumes; refuses to remove anything `refusals` times."""

    def __init__(self, refusals: int) -> None:
        self.volumes, self.refusals = ["v1", "v2", "another"], refusals

    def __call__(self, *arguments: str) -> str:
        if arguments[:2] == ("volume", "ls"):
            return "\n".join(self.volumes)
        assert arguments[:2] == ("volume", "rm")
        self.refusals -= 1
        if self.refusals >= 0:
            raise engine.CommandFailed(["podman", *arguments], 125, "busy")
        self.volumes.remove(arguments[2])
        return ""


def test_the_removal_goes_on_while_podman_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = BusyPodman(refusals=3)
    monkeypatch.setattr(lab, "podman", busy)
    lab.Created(volumes=["v1", "v2", "never-made"]).undo()
    assert busy.volumes == ["another"]


def test_what_could_not_be_removed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "podman", BusyPodman(refusals=10_000))
    monkeypatch.setattr(lab, "UNDO_SECONDS", 0.2)
    with pytest.raises(engine.ContainersError, match="v1, v2"):
        lab.Created(volumes=["v1", "v2"]).undo()


def test_an_interrupt_while_threads_start_waits_for_what_was_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = set[str](), set[str]()
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        signal.raise_signal(signal.SIGINT)

    def work(host: Host) -> None:
        begun.add(host.name)
        time.sleep(0.2)
        ended.add(host.name)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lab._each(hosts_of(FIRST, 2), work)
    assert ended == begun


@pytest.mark.lab
def test_sessions_see_labs_that_are_up_and_leave_them_alone(pair: list[Host]) -> None:
    for host in pair:  # so that networks and volumes alone must give the name away
        engine.podman("stop", "--time=0", host.container)
    try:
        assert FIRST in sweep._lab_names()
        assert list(sweep.sweep()) == []
    finally:
        assert lab.up(FIRST, 2) == pair


@pytest.mark.lab
def test_a_failure_on_the_way_up_removes_what_it_created(pair: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(host: Host) -> None:
        raise engine.ContainersError(f"sshd of {host.name} did not answer", host.management, "see its log")

    monkeypatch.setattr(lab_host, "wait_for_ssh", refuse)
    with pytest.raises(engine.ContainersError, match="did not answer"):
        lab.up(SECOND, 1)
    assert left_of(SECOND) == []
    with pytest.raises(engine.ContainersError):
        lab.up(FIRST, 3)
    assert [entry["State"] for entry in lab._containers(FIRST)] == ["running", "running"]


@pytest.mark.lab
@pytest.mark.parametrize(("number", "moment"), [(signal.SIGTERM, 0), (signal.SIGINT, 0.3)])
def test_an_interrupt_on_the_way_up_removes_what_it_created(pair: list[Host], number: int, moment: float) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "containers.lab", "up", "--name", SECOND, "--hosts", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "creating" in line:
                break
        time.sleep(moment)
        os.killpg(process.pid, number)
        rest = process.communicate(timeout=300)[1]
    finally:  # otherwise it would hold the lock of the labs, and later tests would wait for it
        process.kill()
        process.wait(60)
    assert process.returncode == 130, rest
    assert "interrupted" in rest
    assert "Traceback" not in rest
    assert left_of(SECOND) == []
    deadline = time.monotonic() + 30  # another worker's lab may have a namespace of which no container is known yet
    while (left := unused_namespaces()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == set()


def unused_namespaces() -> set[str]:
    """Network namespaces that Podman has made, and that no container has."""
    there = {f"/run/netns/{name}" for name in os.listdir("/run/netns")}
    used = set()
    for container in engine.podman("ps", "--all", "--quiet").split():
        with contextlib.suppress(engine.CommandFailed):  # it has gone by now
            used.add(engine.podman("inspect", "--format={{.NetworkSettings.SandboxKey}}", container).strip())
    return there - used
