"""Promise: where a user has no root, `rootless: true` has that host take part beside others, and see what it can."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.hosts import inventory
from tests.lab.conftest import Lab, must, wait_for
from tests.lab.test_refusals import keep_only, spoil

pytestmark = pytest.mark.lab

OWNER = "owner"
HOME = f"/var/lib/docker/{OWNER}"  # where a host with Podman has a disk: overlay does not lie on overlay


@pytest.fixture
def copy(lab: Lab) -> Iterator[Path]:
    """The lab's inventory, in which h1 is a user's who has no sudo there."""
    folder = Path(tempfile.mkdtemp(prefix="rootless-")) / "rootless"
    shutil.copytree(lab.inventory, folder)
    spoil(folder, "h1", ansible_user=OWNER, rootless=True)
    user = f"useradd -m -s /bin/bash -d {HOME} {OWNER} && cp -r /home/muster/.ssh {HOME}/ && chown -R {OWNER}: {HOME}"
    lab.on("h1", f"{user} && sed -i /^{OWNER}:/d /etc/subgid")
    yield folder
    lab.on("h1", f"su {OWNER} -c 'podman system migrate'; rm -rf /run/user", check=False)
    lab.remove_user("h1", OWNER)
    lab.on("h1", f"rm -rf {HOME}; apt-get purge --yes uidmap")
    shutil.rmtree(folder.parent)
    for made in Path("build").glob("rootless-*"):
        shutil.rmtree(made, ignore_errors=True)


def test_a_user_without_root_takes_part(lab: Lab, copy: Path) -> None:
    refused = lab.fab("deploy", INVENTORY=copy)
    assert refused.returncode == 2 and "uidmap is not installed" in refused.stdout
    for line in refused.stdout.splitlines():
        if "as root there: `" in line:
            lab.on("h1", line.split("`")[1].replace("apt-get install", "apt-get install --yes"))
    deployed = must(lab.fab("deploy", INVENTORY=copy))
    assert "h1: without root the ports of runs stay open" in deployed
    assert "Nothing had to be changed" in must(lab.fab("deploy", INVENTORY=copy))

    started = must(lab.train("ticks.py", "3000", INVENTORY=copy, NODES=2, DETACH=1))
    [run] = set(re.findall(r"\d{8}-\d{6}-[0-9a-f]{4}", started))
    folder = f"{HOME}/.local/share/muster/runs/{run}"
    uid = int(lab.on("h1", f"stat --format %u {folder}"))
    assert uid > 100000 and lab.on("h1", f"stat --format %a {folder}") == "700"  # neither root nor the user

    # Root's run on the same host does not begin beside it, whoever logs in; nor does it hang.
    beside = lab.train("ticks.py", NODES=1)
    assert beside.returncode != 0 and "another user's is in progress" in beside.stdout

    wait_for(lambda: run in must(lab.fab("status", INVENTORY=copy)), "the run in the list")
    must(lab.fab("stop", INVENTORY=copy, RUN=run))
    gathered = must(lab.fab("gather", INVENTORY=copy, RUN=run))
    assert run in gathered and "could not" not in gathered
    assert list(Path("runs", run).glob("logs/h1/rank-0.log"))
    assert lab.on("h1", f"su {OWNER} -c 'XDG_RUNTIME_DIR=/run/user/$(id -u) podman ps -aq'") == ""

    keep_only(copy, "h1")
    must(lab.fab("teardown", INVENTORY=copy))
    left = lab.on("h1", f"find {HOME} /run/user -name '*muster*' -not -path '*/.deploy*'")
    assert left == "/run/user/" + lab.on("h1", f"id -u {OWNER}") + "/muster"


@pytest.mark.long
def test_two_users_of_a_host_see_each_others_runs(lab: Lab, tmp_path: Path) -> None:
    """Each with a login and sudo of their own: what Muster has there is root's."""
    name = f"another-{tmp_path.name}"
    folder, built = tmp_path / name, Path("build")
    shutil.copytree(lab.inventory, folder)
    spoil(folder, "h1", ansible_user="second")
    user = (
        "useradd -m -s /bin/bash second && cp -r /home/muster/.ssh /home/second/ && chown -R second: /home/second/.ssh"
    )
    lab.on("h1", f"{user} && echo 'second ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/second")
    try:
        started = must(lab.train("ticks.py", "3000", NODES=1, DETACH=1))
        [run] = set(re.findall(r"\d{8}-\d{6}-[0-9a-f]{4}", started))
        seconds = inventory.build_name(folder)
        (built / seconds).mkdir()
        known = lab.cluster
        known["hosts"][0]["ssh"]["user"] = "second"
        (built / seconds / "cluster.json").write_text(json.dumps({**known, "inventory": str(folder)}))
        assert run in must(lab.fab("status", INVENTORY=folder))
        must(lab.fab("stop", INVENTORY=folder, RUN=run))
        must(lab.fab("gather", RUN=run))
    finally:
        lab.remove_user("h1", "second")
        for made in built.glob("another-*"):
            shutil.rmtree(made)
