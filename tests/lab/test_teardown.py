"""Promise: teardown takes Muster off the hosts, all but the packages; twice is once; with these a host is what it was
before the first deploy; a deploy brings it back, also one that takes up what an interrupted one has left."""

from __future__ import annotations

import difflib
import os
import signal
import subprocess

import pytest

from tests.lab.conftest import HOSTS, Lab, wait_for
from tests.lab.test_endings import read_until
from tests.lab.test_path import recaps

pytestmark = pytest.mark.lab


def test_teardown_leaves_nothing_and_deploy_brings_it_back(lab: Lab) -> None:
    nothing: dict[str, list[str]] = {host: [] for host in lab.bare}
    try:
        # An image of which somebody has removed the name is Muster's all the same.
        lab.on("h2", f"{lab.engine('h2').name} rmi localhost/muster/train:latest")
        first = lab.fab("teardown")
        assert first.returncode == 0, first.stdout
        for host in HOSTS:
            engine = lab.engine(host).name
            assert lab.on(host, f"{engine} images --quiet; {engine} ps --all --quiet") == ""
            assert lab.on(host, "ls -A /var/lib/muster") == "packages.json"
        words = ["podman", "images", "--quiet", "--filter", "reference=localhost/muster/workload-*"]
        assert subprocess.run(words, capture_output=True, text=True, check=True, timeout=300).stdout == ""
        second = lab.fab("teardown")
        assert second.returncode == 0 and {changed for _, changed in recaps(second.stdout)} == {0}, second.stdout
        lab.on("h2", f"{lab.engine('h2').name} volume create somebodys")
        whole = lab.fab("teardown", PACKAGES=1)
        assert whole.returncode == 4 and "has volumes that are not Muster's" in whole.stdout, whole.stdout
        lab.on("h2", f"{lab.engine('h2').name} volume rm somebodys")
        whole = lab.fab("teardown", PACKAGES=1)
        assert whole.returncode == 0, whole.stdout
        assert {host: differences(bare, lab.everything(host)) for host, bare in lab.bare.items()} == nothing
        looked = lab.play("provision", "--check")
        assert looked.returncode == 0 and sorted(recaps(looked.stdout)) == [(host, 1) for host in HOSTS], looked.stdout
        assert {host: differences(bare, lab.everything(host)) for host, bare in lab.bare.items()} == nothing
        refused = lab.fab("train")
        assert refused.returncode == 2 and f"make deploy INVENTORY={lab.inventory}" in refused.stdout, refused.stdout
    finally:
        interrupted = deploy_and_interrupt(lab)
        again = lab.fab("deploy", 900)
    assert interrupted == 130
    assert again.returncode == 0, again.stdout
    done = lab.train("reduce.py", NODES=2)
    assert done.returncode == 0, done.stdout


def differences(before: str, after: str) -> list[str]:
    """The lines that have gone and come."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def deploy_and_interrupt(lab: Lab) -> int | None:
    """Ctrl-C while layers are on their way."""
    process = lab.start("deploy")
    read_until(process, "Distributing the image")
    arriving = "find /var/lib/muster/images/oci/blobs -type f -size +20M"
    wait_for(lambda: lab.on("h2", arriving, check=False), "a large layer on its way")
    os.killpg(process.pid, signal.SIGINT)
    print(process.communicate(timeout=120)[0])
    return process.returncode
