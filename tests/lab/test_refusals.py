"""Promise: bad input is refused in one message that names the host, what is wrong and the fix; nothing is started.

Every test uses its own copy of the lab's inventory, so the lab itself stays as it is.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.hosts import inventory, openssh, ssh, trust
from tests.lab.conftest import HOSTS, Lab, wait_for

pytestmark = pytest.mark.lab


@pytest.fixture
def copy(lab: Lab, tmp_path: Path) -> Iterator[Path]:
    """A copy of the lab's inventory folder that a test may spoil."""
    folder = tmp_path / "copy"
    shutil.copytree(lab.inventory, folder)
    yield folder
    for made in Path("build").glob("copy-*"):
        shutil.rmtree(made, ignore_errors=True)


def spoil(folder: Path, host: str, **variables: object) -> None:
    """Set variables of one host in a copied inventory; a host that is not there is added."""
    path = folder / "hosts.yml"
    document = yaml.safe_load(path.read_text())
    document["all"]["hosts"].setdefault(host, {}).update(variables)
    path.write_text(yaml.safe_dump(document, sort_keys=False))


def keep_only(folder: Path, host: str) -> None:
    """Take all other hosts out of a copied inventory."""
    path = folder / "hosts.yml"
    document = yaml.safe_load(path.read_text())
    document["all"]["hosts"] = {host: document["all"]["hosts"][host]}
    path.write_text(yaml.safe_dump(document))


def refused(lab: Lab, folder: Path, status: int, *said: str, task: str = "deploy", **variables: Any) -> str:
    """The command ends with this status, says all that, and never came as far as Ansible."""
    given: dict[str, Any] = {"INVENTORY": folder} | variables
    done = lab.fab(task, **given)
    assert done.returncode == status, done.stdout
    for text in (*said, "fix:"):
        assert text in done.stdout, f"{text!r} is not in:\n{done.stdout}"
    assert "Traceback" not in done.stdout and done.stdout.count("muster: refused") == 1
    return done.stdout


def test_all_hosts_that_let_us_not_in_stand_in_one_report(lab: Lab, copy: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", copy / "id_wrong"], check=True, timeout=60)
    address = lab.cluster["hosts"][0]["ssh"]["address"]
    down = address.rsplit(".", 1)[0] + ".250"  # nobody has it
    (copy / "known_hosts").write_text(
        (copy / "known_hosts").read_text()
        + f"{down} {(copy / 'known_hosts').read_text().splitlines()[0].split(' ', 1)[1]}\n"
    )
    spoil(copy, "h1", ansible_user="nobody-of-that-name")
    spoil(copy, "h2", ansible_ssh_private_key_file=str(copy / "id_wrong"))
    spoil(copy, "h4", ansible_host=down)
    said = refused(lab, copy, 3, "host h1 ", "host h2 ", "login refused", "host h4 ", "no SSH connection")
    assert "PLAY" not in said


def only_login(address: str) -> socket.socket | None:
    """A login under way to a host whose sshd drops another one beside it; None where it does not, or not yet."""
    with contextlib.suppress(OSError):
        first = socket.create_connection((address, 22), timeout=10)
        with socket.create_connection((address, 22), timeout=10) as second:
            if first.recv(64).startswith(b"SSH-") and not second.recv(64).startswith(b"SSH-"):
                return first
        first.close()
    return None


def test_logins_that_a_host_s_own_sshd_drops_are_tried_again_and_then_explained(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = inventory.read(lab.inventory).hosts[0].target
    known_hosts = inventory.known_hosts_path(lab.inventory)
    attempts: list[Callable[[], object]] = [
        lambda: ssh.connect(target, known_hosts).close(),
        lambda: ssh.patiently(lambda: trust.collect_keys(target)),
    ]
    others = contextlib.ExitStack()

    def pauses(and_then: Callable[[], object]) -> Iterator[float]:
        yield 0.1
        and_then()
        yield from (0.5, 1.0, 2.0)  # sshd needs a moment to notice that a login has gone

    settings = "/etc/ssh/sshd_config.d/one-login.conf"
    one_login = f"echo MaxStartups 1:100:1 >{settings} && kill -HUP $(cat /run/sshd.pid)"
    lab.on("h1", one_login)
    try:
        for attempt in attempts:
            with others:
                others.enter_context(
                    wait_for(lambda: only_login(target.address), "the one login that may be under way")
                )
                monkeypatch.setattr(openssh, "pauses", lambda: pauses(lambda: None))
                with pytest.raises(ssh.Dropped) as refused:
                    attempt()
                assert "hung up" in refused.value.problem.what and "MaxStartups" in refused.value.problem.fix
                monkeypatch.setattr(openssh, "pauses", lambda: pauses(others.close))
                attempt()
    finally:
        lab.on("h1", f"rm {settings} && kill -HUP $(cat /run/sshd.pid)")


def test_unknown_host_key(lab: Lab, copy: Path) -> None:
    (copy / "known_hosts").unlink()
    said = refused(lab, copy, 3, "host key SHA256:", f"run `make trust INVENTORY={copy}`")
    assert all(f"host {host} " in said for host in HOSTS) and "PLAY" not in said


def test_changed_host_key_is_shown_with_both_fingerprints_and_yes_does_not_accept_it(lab: Lab, copy: Path) -> None:
    lines = (copy / "known_hosts").read_text().splitlines()
    first, second = lines[0].split(" ", 1), lines[1].split(" ", 1)
    (copy / "known_hosts").write_text("\n".join([f"{first[0]} {second[1]}", *lines[1:]]) + "\n")
    said = refused(lab, copy, 3, "CHANGED")
    assert said.count("SHA256:") >= 2
    before = (copy / "known_hosts").read_text()
    refused(lab, copy, 2, "CHANGED", task="trust", YES=1)
    assert (copy / "known_hosts").read_text() == before


def test_trust_asks_and_writes_nothing_without_a_yes(lab: Lab, copy: Path) -> None:
    (copy / "known_hosts").unlink()
    refused(lab, copy, 2, "not confirmed", task="trust")
    assert not (copy / "known_hosts").exists()
    done = lab.fab("trust", INVENTORY=copy, YES=1)
    assert done.returncode == 0 and (copy / "known_hosts").exists(), done.stdout


def test_no_sudo(lab: Lab, copy: Path) -> None:
    lab.on("h2", "useradd -m plain && cp -r /home/muster/.ssh /home/plain/ && chown -R plain: /home/plain/.ssh")
    try:
        spoil(copy, "h2", ansible_user="plain")
        said = refused(lab, copy, 2, "host h2", "cannot become root by sudo", "NOPASSWD")
    finally:
        lab.remove_user("h2", "plain")
    assert "PLAY" not in said


def test_a_wrong_sudo_password_is_refused(lab: Lab, copy: Path) -> None:
    """A right one is used in test_secrets.py."""
    lab.on(
        "h2",
        "useradd -m -s /bin/bash asks && echo asks:right | chpasswd && echo 'asks ALL=(ALL) ALL' > /etc/sudoers.d/asks"
        " && cp -r /home/muster/.ssh /home/asks/ && chown -R asks: /home/asks/.ssh",
    )
    try:
        spoil(copy, "h2", ansible_user="asks", ansible_become_password="wrong")
        refused(lab, copy, 2, "host h2", "cannot become root by sudo")
    finally:
        lab.remove_user("h2", "asks")


def test_no_python3(lab: Lab, copy: Path) -> None:
    lab.on("h3", "mv /usr/bin/python3 /usr/bin/python3.aside")
    try:
        said = refused(lab, copy, 2, "host h3", "no python3")
    finally:
        lab.on("h3", "mv /usr/bin/python3.aside /usr/bin/python3")
    assert "PLAY" not in said


def test_no_network_on_which_hosts_reach_each_other(lab: Lab, copy: Path) -> None:
    others = [lab.cluster["hosts"][1][key] for key in ("address",)] + [lab.cluster["hosts"][1]["ssh"]["address"]]
    for address in others:
        lab.nsenter("h1", "ip", "route", "add", "blackhole", f"{address}/32")
    try:
        done = lab.fab("deploy", INVENTORY=copy)
    finally:
        for address in others:
            lab.nsenter("h1", "ip", "route", "del", "blackhole", f"{address}/32")
    assert done.returncode == 2, done.stdout
    assert all(f"at {address}" in done.stdout for address in others) and "fix: open TCP" in done.stdout
    assert not list(Path("build").glob("copy-*/cluster.json"))


def forget(lab: Lab, host: str, image: str) -> str:
    """The command that removes an image, with all of its names."""
    engine = lab.engine(host)
    known = engine.read_images(lab.on(host, shlex.join(engine.image_words)))
    return shlex.join([engine.name, "rmi", "--force", *engine.all_names(image, known)])


def test_a_host_without_the_image_is_named_and_one_with_too_small_a_disk_for_it(lab: Lab, copy: Path) -> None:
    image = lab.cluster["image"]["id"]
    lab.on("h3", f"mount -t tmpfs -o size=50m tmpfs /var/lib/muster/images && {forget(lab, 'h3', image)}")
    try:
        refused(lab, lab.inventory, 2, "host h3", "does not hold image", task="train")
        done = lab.fab("deploy", INVENTORY=copy)
        assert done.returncode == 4, done.stdout
        assert "h3" in done.stdout and "free" in done.stdout and "/var/lib/muster" in done.stdout
        assert not list(Path("build").glob("copy-*/cluster.json"))
    finally:
        lab.on("h3", "umount /var/lib/muster/images")
    again = lab.fab("deploy")
    assert again.returncode == 0, again.stdout


def test_image_build_fails(lab: Lab, tmp_path: Path) -> None:
    workload = tmp_path / "broken"
    workload.mkdir()
    (workload / "main.py").write_text("")
    (workload / "requirements.txt").write_text("no-such-package-of-muster==1.2.3\n")
    before = lab.runs()
    done = lab.fab("train", WORKLOAD=workload, SCRIPT="main.py", NODES=1)
    assert done.returncode == 4, done.stdout
    assert "no-such-package-of-muster" in done.stdout and "requirements.txt" in done.stdout and "fix:" in done.stdout
    assert lab.runs() == before


def test_bad_nodes(lab: Lab) -> None:
    refused(lab, lab.inventory, 2, "NODES=5", task="train", NODES=5)


def test_missing_script(lab: Lab) -> None:
    refused(lab, lab.inventory, 2, "absent.py", task="train", WORKLOAD="tests/lab/test_jobs", SCRIPT="absent.py")


def test_no_cluster_map_yet_and_one_older_than_its_inventory(lab: Lab, copy: Path) -> None:
    refused(lab, copy, 2, "no cluster map", "make deploy", task="train")
    hosts = lab.inventory / "hosts.yml"
    text = hosts.read_text()
    hosts.write_text(text + "# changed\n")
    try:
        refused(lab, lab.inventory, 2, "older than", "make deploy", task="train")
    finally:
        hosts.write_text(text)


def test_a_host_that_went_down_since_the_deploy(lab: Lab) -> None:
    subprocess.run(["podman", "pause", f"muster-{lab.name}-h2"], check=True, capture_output=True, timeout=120)
    try:
        refused(lab, lab.inventory, 3, "host h2", task="train", NODES=2)
    finally:
        subprocess.run(["podman", "unpause", f"muster-{lab.name}-h2"], check=True, capture_output=True, timeout=120)
    wait_for(lambda: lab.on("h2", "true", check=False) == "", "h2 to be back")
