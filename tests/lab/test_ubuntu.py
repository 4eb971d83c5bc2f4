"""Promise: a host with Ubuntu is a host like any other: deployed, trained on beside another system, and torn down to
what it was."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from containers import ubuntu
from containers.engine import ContainersError
from tests.lab.conftest import SMALL, Lab, must, removed_at_the_end, summary_of
from tests.lab.test_teardown import differences
from tests.sweep import lab_name

pytestmark = [pytest.mark.lab, pytest.mark.long]

# A login leaves its mark (pam_motd), and a package that has had files in /bin a folder, which dpkg does not remove.
UBUNTUS_OWN = re.compile(r"\+/(home/muster/\.cache|s?bin\.usr-is-merged|lib\.usr-is-merged)\b")
SYSTEMS = {"h1": "ubuntu 24.04", "h2": "ubuntu 22.04"}


@pytest.fixture
def mixed() -> Iterator[Lab]:
    """A bare lab of two systems. Without Ubuntu's archive, on which no other test counts, skipped, CI or not."""
    try:
        ubuntu.fetch(f"{ubuntu.mirror()}/dists/noble/Release")
    except ContainersError as error:
        pytest.skip(f"{error.what} ({error.where})")
    with removed_at_the_end(Lab(lab_name("u"))) as made:
        must(made.fab("lab", 900, LAB=made.name, HOSTS=len(SYSTEMS), OS="ubuntu,ubuntu22.04"))
        yield made


@pytest.mark.timeout(1800)  # images of two more systems may have to be made first
def test_hosts_of_two_systems_train_together_and_are_as_they_were_after_a_teardown(mixed: Lab) -> None:
    bare = {host: mixed.everything(host) for host in SYSTEMS}
    must(mixed.fab("trust", YES=1))
    deployed = must(mixed.fab("deploy", 900))
    assert all(f"{system}, podman " in deployed for system in SYSTEMS.values()), deployed
    assert "not measured" not in deployed, deployed
    _, summary = summary_of(must(mixed.fab("train", ARGS=f"--epochs 1 {SMALL}")))
    assert (summary["status"], summary["nodes"], summary["world_size"]) == ("succeeded", 2, 2)
    must(mixed.fab("teardown", PACKAGES=1))
    for host in SYSTEMS:
        new = [line for line in differences(bare[host], mixed.everything(host)) if not UBUNTUS_OWN.match(line)]
        assert new == [], host
