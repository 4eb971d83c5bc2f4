"""Promises: a run starts on a host as a whole or leaves nothing, and what was started is undone whole."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from keeper import USER_ID, firewall
from tests.keeper import fake_host
from tests.keeper.fake_host import LEASE, SECONDS, Host

host = fake_host.host


def test_a_start_makes_what_the_container_needs_for_its_user_alone(host: Host) -> None:
    host.when_podman_runs(f"{LEASE.format(host.runs)}; echo 4711abc")
    call = host.start(plan=host.plan("r1", script="main.py", resume="r0"))
    assert next(call.frames())[0] == {"started": "4711abc"}
    assert host.podman() == ["run --detach --name muster-r1-1 image", "nft"]
    assert host.files() == {
        "var/lib/muster/runs/r0": "0o700",
        "var/lib/muster/runs/r1": "0o700",
        "var/lib/muster/runs/r1/.tmp": "0o700",
        "var/lib/muster/runs/r1/events.jsonl": "0o644",
        "var/lib/muster/runs/r1/host.json": "0o600",
        "var/lib/muster/runs/r1/plan.json": "0o600",
        "var/lib/muster/runs/r1/workload": "0o700",
        "run/muster/r1": "0o700",
        "run/muster/r1/hold": "0o400",
        "run/muster/r1/key": "0o400",
        "run/muster/r1/secrets": "0o700",
        "run/muster/r1/secrets/token": "0o400",
    }
    assert (host.private / "r1/key").read_text() == "ab12"
    assert (host.private / "r1/secrets/token").read_bytes() == b"\x00secret"
    assert json.loads((host.runs / "r1/plan.json").read_text())["script"] == "main.py"
    assert Path(host.lease).stat().st_mode & 0o777 == 0o700
    own = {Path(host.lease) / "lease", *(path for path in host.root.rglob("*") if {"r0", "r1"} & set(path.parts))}
    ids = {(path.stat().st_uid, path.stat().st_gid) for path in own if path.name != "events.jsonl"}
    assert ids == {(USER_ID, USER_ID) if os.geteuid() == 0 else (os.geteuid(), os.getegid())}


def test_ranks_wait_until_the_caller_lets_them_go(host: Host) -> None:
    host.when_podman_runs(f"{LEASE.format(host.runs)}; echo 4711abc")
    call, hold = host.start(), host.private / "r1/hold"
    words = next(call.frames())[0]
    assert "started" in words and hold.exists()
    call.stdin.write(b'{"go": true}\n')
    assert call.answer() == {"went": True} and not hold.exists()
    assert host.podman() == ["run --detach --name muster-r1-1 image", "nft"] and (host.runs / "r1").exists()


@pytest.mark.parametrize("taken_back", [True, False])
def test_a_start_that_is_not_let_go_leaves_nothing(host: Host, taken_back: bool) -> None:
    host.when_podman_runs(f"{LEASE.format(host.runs)}; echo 4711abc")
    call = host.start()
    if taken_back:
        call.started(go=False)
        assert call.answer() == {"error": "the control machine took it back"}
    else:
        next(call.frames())
        call.hang_up()
        assert call.process.wait(SECONDS) == 1
    assert host.files() == {} and host.podman()[-1] == "rm --force --ignore -- muster-r1-1"


def test_a_run_answers_its_own_hosts_alone_from_the_moment_it_has_the_lease(host: Host) -> None:
    host.when_podman_runs(f"{LEASE.format(host.runs)}; echo 4711abc")
    call = host.start()
    next(call.frames())
    assert host.podman() == ["run --detach --name muster-r1-1 image", "nft"]
    assert "{ type ipv4_addr; elements = { 10.78.0.11, 10.78.0.12 }; }" in host.rules
    assert "{ type ipv6_addr; elements = { fd00::11 }; }" in host.rules
    assert host.rules == firewall.rules(["10.78.0.12", "fd00::11", "10.78.0.11", "10.78.0.12"])


@pytest.mark.slow
def test_a_host_whose_ports_stay_open_starts_nothing_unless_the_user_wants_that(host: Host) -> None:
    host.when_podman_runs(f"{LEASE.format(host.runs)}; echo 4711abc")
    host.when_nft("echo 'Error: Operation not supported' >&2; exit 1")
    said = host.start().answer()["error"]
    assert said.startswith("its ports cannot be closed to other machines: ") and "Operation not supported" in said
    assert "`firewall: false`" in said and len(said) < 300 and host.files() == {}
    plan = host.plan("r1")
    plan["hosts"][1]["firewall"] = False
    host.when_nft("exit 0")
    assert "started" in next(host.start(plan=plan).frames())[0]
    assert host.rules == "table inet muster\ndelete table inet muster"  # of an earlier run


def exits(host: Host, **cause: Any) -> str:
    """A keeper that ends at once."""
    words = {"status": "failed", "cause": {"kind": "start", "reason": "no port is free", **cause}}
    return f"echo '{json.dumps(words)}' > {host.runs}/r1/exit.json; echo 4711abc"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runs", "why"),
    [
        ("echo 'Error: no such image' >&2; exit 125", "`podman run`: Error: no such image"),
        ("keeper", "no port is free"),
        ("echo 4711abc", "the keeper ended without a word of its own: ImportError: no module"),
    ],
)
def test_a_start_that_fails_says_why_and_leaves_nothing(host: Host, runs: str, why: str) -> None:
    host.when_podman_runs(exits(host) if runs == "keeper" else runs)
    assert host.start(plan=host.plan("r1", resume="r0")).answer() == {"error": why}
    assert host.files() == {}
    assert "rm --force --ignore -- muster-r1-1" in host.podman()


def test_a_start_names_the_run_that_has_the_lease(host: Host) -> None:
    host.when_podman_runs(exits(host, kind="lease", reason="run r0 of bob@desk is in progress there"))
    with host.taken_by("r0"):
        answer = host.start().answer()
    assert answer["error"] == "run r0 of bob@desk is in progress there"
    assert (answer["lease"]["run"], answer["lease"]["owner"]) == ("r0", "bob@desk")
    assert host.files() == {}


@pytest.mark.parametrize("runs", ["sleep 500", "echo 4711abc"])
def test_a_start_whose_caller_goes_away_leaves_nothing(host: Host, runs: str) -> None:
    """While Podman starts the container, or while the keeper has not taken the lease."""
    host.when_podman_runs(f"touch {host.engine}/begun; {runs}")
    host.containers("r1", "running")
    call = host.start()
    while not (host.engine / "begun").exists():
        time.sleep(0.01)
    call.hang_up()
    assert call.process.wait(SECONDS) == 1
    assert host.files() == {} and host.podman()[-1] == "rm --force --ignore -- muster-r1-1"


def test_a_second_start_of_a_run_does_not_touch_the_first(host: Host) -> None:
    host.has_run("r1")
    before = host.files()
    assert host.start().answer() == {"error": "run r1 is on this host already"}
    assert host.files() == before and host.podman() == []


@pytest.mark.parametrize("more", [{"secrets": {"../key": ""}}, {"plan": {"run": "../../x", "hosts": [{}, {}]}}])
def test_no_name_leads_out_of_the_hosts_folders(host: Host, more: dict[str, Any]) -> None:
    assert "is no " in host.start(**more).answer()["error"]
    assert host.files() == {}


@pytest.mark.slow
def test_a_start_is_undone_whole(host: Host) -> None:
    host.when_podman_runs(f"{LEASE.format(host.runs)}; echo 4711abc")
    call = host.start()
    assert call.started(go=True) == "4711abc" and call.process.wait(SECONDS) == 0
    host.containers("r1", "running")
    (host.runs / "r1/probe.json").write_text('{"ranks": 2}')
    dropped = host.ask("drop", run="r1", files=["probe.json", "other.json", "../x"])
    assert dropped == {"dropped": True, "documents": {"probe.json": {"ranks": 2}}}
    assert host.files() == {} and host.podman()[-1] == "rm --force --ignore -- muster-r1-0"
    assert host.ask("drop", run="r1") == {"dropped": False, "documents": {}}
