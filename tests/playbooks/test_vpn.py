"""The host's end of the VPN: what it reads, and what it asks wg and wg-quick for, which are stand-ins here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils import muster_vpn


def test_routes_are_those_to_elsewhere() -> None:
    routes = [
        {"dst": "default", "gateway": "10.0.0.1", "dev": "eno1"},
        {"dst": "10.0.0.0/24", "dev": "eno1"},
        {"type": "local", "dst": "10.0.0.5", "dev": "eno1"},
        {"dst": "10.213.0.0/24", "dev": "muster0"},
        {"dst": "fd00::/64", "dev": "eno1"},
        {},
    ]
    assert muster_vpn.parse_routes(json.dumps(routes)) == ["10.0.0.0/24", "10.0.0.5"]
    assert muster_vpn.parse_routes("") == []


WG = """case $1 in
genkey) echo secret;;
pubkey) tr a-z A-Z;;
show) printf 'MET\\t1700000000\\n'; [ ! -e "$(dirname "$0")/late" ] || printf 'LATE\\t0\\n';;
esac"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with WireGuard, all in a folder; `calls` has what was asked of wg-quick."""
    links = tmp_path / "net"
    links.mkdir()
    for name, folder in (("FOLDER", tmp_path), ("LINKS", links), ("SOCKETS", tmp_path / "run")):
        monkeypatch.setattr(muster_vpn, name, folder)
    monkeypatch.setattr(muster_vpn, "SETTINGS", tmp_path / "muster0.conf")
    monkeypatch.setattr(muster_vpn, "KEY", tmp_path / "muster0.key")
    monkeypatch.setattr(muster_vpn, "_unit", lambda verb: None)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    quick = f'echo "$*" >>{tmp_path}/calls; [ "$1" = up ] && mkdir {links}/$2 || rmdir {links}/$2'
    for name, script in (("wg", WG), ("wg-quick", quick)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def ask(settings: str | None) -> dict[str, Any]:
    said: list[dict[str, Any]] = []
    muster_vpn.run({"settings": settings}, said.append)
    return said[0]


def test_the_key_is_made_once_and_is_roots_alone(host: Path) -> None:
    assert ask(None) == ask(None) == {"public_key": "SECRET", "unmet": []}
    assert (host / "muster0.key").stat().st_mode & 0o777 == 0o600
    assert muster_vpn.about()["public_key"] == "SECRET" and not muster_vpn.about()["up"]


def test_it_comes_up_is_changed_and_goes_with_its_key(host: Path) -> None:
    for settings in ("[Interface]\nfirst", "[Interface]\nsecond"):
        assert ask(settings)["unmet"] == []
        found = muster_vpn.about()
        assert found["settings"] == settings and found["up"]
    assert ask("") == ask("") == {"public_key": "", "unmet": []}
    assert (host / "calls").read_text().split("\n")[:-1] == ["up muster0", "down muster0", "up muster0", "down muster0"]
    assert not list(host.glob("muster0*")) and not muster_vpn.about()["up"]


def test_it_waits_for_those_that_do_not_answer_and_names_them(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (host / "late").touch()
    monkeypatch.setattr(muster_vpn, "GREETING_SECONDS", 0.3)
    assert ask("[Interface]")["unmet"] == ["LATE"]
    monkeypatch.setattr(muster_vpn, "GREETING_SECONDS", 60.0)
    monkeypatch.setattr(muster_vpn.time, "sleep", lambda seconds: (host / "late").unlink(missing_ok=True))
    assert ask("[Interface]")["unmet"] == []


def test_it_goes_down_and_keeps_its_key_and_settings(host: Path) -> None:
    ask("[Interface]")
    assert ask(None)["public_key"] == "SECRET"
    assert not muster_vpn.about()["up"] and muster_vpn.about()["settings"] == "[Interface]"


def test_why_it_does_not_come_up_is_said_without_what_was_tried(host: Path) -> None:
    (host / "wg-quick").write_text("#!/bin/sh\necho '[#] ip link add' >&2\necho 'RTNETLINK: no' >&2\nexit 1\n")
    said: list[dict[str, Any]] = []
    with pytest.raises(SystemExit):
        muster_vpn.run({"settings": "[Interface]"}, said.append)
    assert said == [{"error": "`wg-quick up muster0`: RTNETLINK: no"}]
