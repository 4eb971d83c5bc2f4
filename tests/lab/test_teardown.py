"""Promise: teardown takes Muster off the hosts, all but the packages; twice is once; with these a host is what it was
before the first deploy; a deploy brings it back, also one that takes up what an interrupted one has left."""

from __future__ import annotations

import difflib
import os
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.hosts import inventory
from tests.lab.conftest import HOSTS, Lab, must, wait_for
from tests.lab.test_endings import read_until
from tests.lab.test_path import recaps
from tests.lab.test_refusals import keep_only

pytestmark = pytest.mark.lab

WORKLOADS = ("podman", "images", "--quiet", "--filter", "reference=localhost/muster/workload-*")


@pytest.fixture
def own_images(tmp_path: Path) -> dict[str, Any]:
    """Variables for a Podman with images of its own on this machine, where another test may use the usual ones."""
    settings = tmp_path / "storage.conf"
    places = {"driver": "vfs", "graphroot": str(tmp_path / "images"), "runroot": str(tmp_path / "run")}
    settings.write_text("[storage]\n" + "".join(f'{name} = "{value}"\n' for name, value in places.items()))
    variables = {"CONTAINERS_STORAGE_CONF": str(settings)}
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    words = ["podman", "import", "--quiet", str(tmp_path / "empty.tar"), "localhost/muster/workload-somebodys:latest"]
    subprocess.run(words, env=os.environ | variables, capture_output=True, check=True, timeout=300)
    return variables


@pytest.fixture
def only_h2(lab: Lab, tmp_path: Path) -> Iterator[Path]:
    """The lab's inventory without the other hosts."""
    folder = tmp_path / "only-h2"
    shutil.copytree(lab.inventory, folder)
    keep_only(folder, "h2")
    yield folder
    shutil.rmtree(Path("build") / inventory.build_name(folder), ignore_errors=True)


def test_teardown_leaves_nothing_and_deploy_brings_it_back(lab: Lab, own_images: dict[str, Any], only_h2: Path) -> None:
    """Leaves a lab of this session's without Muster: it is the last test of its worker."""
    # An image that somebody has untagged is still Muster's.
    lab.on("h2", f"{lab.engine('h2').name} rmi localhost/muster/train:latest")
    assert workloads(own_images) != ""
    must(lab.fab("teardown", **own_images))
    for host in HOSTS:
        engine = lab.engine(host).name
        assert lab.on(host, f"{engine} images --quiet; {engine} ps --all --quiet") == ""
        assert lab.on(host, "ls -A /var/lib/muster") == "packages.json"
    assert workloads(own_images) == ""
    assert {changed for _, changed in recaps(must(lab.fab("teardown", **own_images)))} == {0}

    # Loading the image into the other two engines would take a minute and a half of CPU time.
    assert deploy_and_interrupt(lab, INVENTORY=only_h2) == 130
    must(lab.fab("deploy", 900, INVENTORY=only_h2))
    must(lab.train("reduce.py", INVENTORY=only_h2))

    lab.on("h2", f"{lab.engine('h2').name} volume create somebodys")
    whole = lab.fab("teardown", PACKAGES=1, **own_images)
    assert whole.returncode == 4 and "has volumes that are not Muster's" in whole.stdout, whole.stdout
    lab.on("h2", f"{lab.engine('h2').name} volume rm somebodys")
    must(lab.fab("teardown", PACKAGES=1, **own_images))
    nothing: dict[str, list[str]] = {host: [] for host in lab.bare}
    assert {host: differences(bare, lab.everything(host)) for host, bare in lab.bare.items()} == nothing
    looked = lab.play("provision", "--check")
    assert looked.returncode == 0 and sorted(recaps(looked.stdout)) == [(host, 1) for host in HOSTS], looked.stdout
    assert {host: differences(bare, lab.everything(host)) for host, bare in lab.bare.items()} == nothing
    refused = lab.fab("train")
    assert refused.returncode == 2 and f"make deploy INVENTORY={lab.inventory}" in refused.stdout, refused.stdout
    if os.environ.get("MUSTER_TEST_LAB"):
        must(lab.fab("deploy", 900))


def workloads(variables: dict[str, Any]) -> str:
    """Ids of the images of workloads on this machine."""
    environment = os.environ | variables
    return subprocess.run(WORKLOADS, env=environment, capture_output=True, text=True, check=True, timeout=300).stdout


def differences(before: str, after: str) -> list[str]:
    """The lines that have gone and come."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def deploy_and_interrupt(lab: Lab, **variables: object) -> int | None:
    """Ctrl-C while layers are on their way to h2."""
    process = lab.start("deploy", **variables)
    read_until(process, "Distributing the image")
    arriving = "find /var/lib/muster/images/oci/blobs -type f -size +20M"
    wait_for(lambda: lab.on("h2", arriving, check=False), "a large layer on its way")
    os.killpg(process.pid, signal.SIGINT)
    print(process.communicate(timeout=120)[0])
    return process.returncode
