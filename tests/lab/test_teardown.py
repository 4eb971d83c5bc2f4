"""Promise: teardown takes Muster off the hosts, all but the packages; twice is once; a deploy brings it back."""

from __future__ import annotations

import subprocess

import pytest

from tests.lab.conftest import HOSTS, Lab
from tests.lab.test_path import recaps

pytestmark = pytest.mark.lab


def test_teardown_leaves_nothing_and_deploy_brings_it_back(lab: Lab) -> None:
    try:
        first = lab.fab("teardown")
        assert first.returncode == 0, first.stdout
        for host in HOSTS:
            assert lab.on(host, "podman images --quiet; podman ps --all --quiet; ls -A /var/lib/muster") == ""
        words = ["podman", "images", "--quiet", "--filter", "reference=localhost/muster/workload-*"]
        assert subprocess.run(words, capture_output=True, text=True, check=True, timeout=300).stdout == ""
        second = lab.fab("teardown")
        assert second.returncode == 0 and {changed for _, changed in recaps(second.stdout)} == {0}, second.stdout
        refused = lab.fab("train")
        assert refused.returncode == 2 and f"make deploy INVENTORY={lab.inventory}" in refused.stdout, refused.stdout
    finally:
        again = lab.fab("deploy", 900)
        assert again.returncode == 0, again.stdout
