"""Promises: a keeper that is gone is started again with what another host gives, and never where it must not be."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.keeper import fake_host
from tests.keeper.fake_host import EXIT, Host

host = fake_host.host

GIVEN = {"key": "ab12", "secrets": {"token": "AHNlY3JldA=="}}  # as `start` has put it there in fake_host.py
PROMISES: dict[str, Any] = {"votes": []}

#: A keeper that takes the lease, and keeps it for a while.
TAKES = """
{python} -c "
import sys, time
sys.path.insert(0, '{root}')
from keeper import lease
held = lease.take('{lease}', {{'run': 'r1', 'owner': 'ann@laptop'}})
print('taken', flush=True)
time.sleep(20)" > {engine}/keeper &
echo $! > {engine}/pid
echo 4711abc
"""


def takes_the_lease(host: Host) -> str:
    root = Path(__file__).parents[2]
    return TAKES.format(python=sys.executable, root=root, lease=host.lease, engine=host.engine)


def private_of(host: Host) -> dict[str, str]:
    """The names and contents of the run's private files."""
    folder = host.private / "r1"
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_what_a_host_has_in_its_memory_is_given_while_the_run_goes_on(host: Host) -> None:
    host.has_run("r1")
    (host.private / "r1/secrets").mkdir(parents=True)
    (host.private / "r1/key").write_text("ab12")
    (host.private / "r1/secrets/token").write_bytes(b"\x00secret")
    with host.taken_by("r1"):
        assert host.ask("private", run="r1") == GIVEN
        (host.private / "r1/stop.json").write_text("{}")
        assert host.ask("private", run="r1") == {"error": "the run ends here"}
    assert host.ask("private", run="r1") == {"error": "the run ends here"}


@pytest.mark.slow
def test_a_keeper_is_started_again_with_its_private_files_and_without_the_container_before(host: Host) -> None:
    host.has_run("r1", promises=PROMISES)
    (host.private / "r1").mkdir(parents=True)
    (host.private / "r1/key").write_text("an old one")
    host.containers("r1")
    host.when_podman_runs(takes_the_lease(host))
    try:
        assert host.ask("rejoin", run="r1", **GIVEN) == {"rejoined": "4711abc"}
    finally:
        os.kill(int((host.engine / "pid").read_text()), 9)
    assert private_of(host) == {
        "key": "ab12",
        "secrets/token": "\x00secret",
    }  # and no file `hold`: nothing is held back
    verbs = [call.split()[0] for call in host.podman()]
    assert verbs == ["ps", "stop", "rm", "run", "nft"] and (host.runs / "r1/promises.json").exists()


@pytest.mark.parametrize(
    ("documents", "holder", "why"),
    [
        ({"promises": PROMISES, "exit": EXIT}, None, "the run has ended there"),
        ({"promises": PROMISES, "gathered": {"by": "ann"}}, None, "the run has ended there"),
        ({}, None, "its keeper has not kept what it had agreed to: the disk was full, or nothing may be restarted"),
        ({"promises": PROMISES}, "r1", "run r1 of bob@desk is in progress there"),
        ({"promises": PROMISES}, "r2", "run r2 of bob@desk is in progress there"),
    ],
)
def test_a_keeper_is_not_started_again_where_it_must_not_be(
    host: Host, documents: dict[str, Any], holder: str | None, why: str
) -> None:
    host.has_run("r1", **documents)
    taken = host.taken_by(holder) if holder else None
    assert host.ask("rejoin", run="r1", **GIVEN) == {"error": why}
    assert host.podman() == [] and not host.private.exists()
    if taken:
        taken.release()


@pytest.mark.slow
def test_a_keeper_that_ends_again_is_reported_with_its_last_words(host: Host) -> None:
    host.has_run("r1", promises=PROMISES)
    host.when_podman_runs("echo 4711abc")
    why = "the keeper ended without a word of its own: ImportError: no module"
    assert host.ask("rejoin", run="r1", **GIVEN) == {"error": why}
    assert json.loads((host.runs / "r1/promises.json").read_text()) == PROMISES
