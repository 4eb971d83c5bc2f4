"""What Muster reads of ufw's and firewalld's rules, and what it asks them for: their programs are stand-ins here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils import muster_firewalls

PORTS = {"tcp": [[29400, 29415], [29500, 29599]], "udp": [[29400, 29415]]}
#: As ufw 0.36 and firewalld 1.3 print them.
ADDED = """\
Added user rules (see 'ufw status' for running firewall):
ufw allow 22/tcp
ufw allow from 10.0.0.2 to any port 29400:29415 proto udp comment 'muster'
ufw allow from 10.0.0.2 to any port 29400:29415,29500:29599,32768:60999 proto tcp comment 'muster'
ufw allow from fd00::5 to any port 443 proto tcp comment 'not muster'
ufw allow from fd00::5 to any port 29400:29415 proto udp comment 'muster'
"""
ZONES = """\
docker (active)
  target: ACCEPT
  interfaces: docker0
  rich rules: 

internal (active)
  target: default
  interfaces: 
  sources: 10.0.0.0/24
  rich rules: 
	rule priority="5" family="ipv4" source address="10.0.0.9" accept

public
  target: default
  interfaces: 
  rich rules: 
	rule priority="29400" family="ipv4" source address="10.0.0.2" port port="29400-29415" protocol="udp" accept

work
  target: default
  interfaces: 
  rich rules: 
"""


def test_ports_are_the_contracts_and_those_that_the_kernel_gives_out() -> None:
    assert muster_firewalls.with_ephemeral(PORTS, "32768\t60999") == {
        "tcp": [(29400, 29415), (29500, 29599), (32768, 60999)],
        "udp": [(29400, 29415)],
    }
    assert muster_firewalls.with_ephemeral(PORTS, "29410 61000")["tcp"] == [(29400, 61000)]
    assert muster_firewalls.with_ephemeral(PORTS, "29416 29499")["tcp"] == [(29400, 29599)]


def test_rules_of_others_are_not_ours() -> None:
    assert muster_firewalls.Ufw.parse(ADDED) == {
        ("10.0.0.2", "from 10.0.0.2 to any port 29400:29415 proto udp"),
        ("10.0.0.2", "from 10.0.0.2 to any port 29400:29415,29500:29599,32768:60999 proto tcp"),
        ("fd00::5", "from fd00::5 to any port 29400:29415 proto udp"),
    }
    ((source, zone, text),) = muster_firewalls.Firewalld.parse(ZONES)
    assert (source, zone) == ("10.0.0.2", "public") and text.startswith('rule priority="29400" ')


def test_rules_go_to_the_zones_that_decide() -> None:
    assert muster_firewalls.Firewalld.in_use(ZONES, "public") == ["internal", "public"]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the only programs that the module finds; each notes how it was called in `calls`."""
    monkeypatch.setattr(muster_firewalls, "find_command", lambda name: (tmp_path / name).exists() or None)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(muster_firewalls, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(muster_firewalls, "UFW_RULES", (tmp_path / "user.rules",))
    monkeypatch.setattr(muster_firewalls, "_ports", lambda ports: muster_firewalls.with_ephemeral(ports, "32768 60999"))
    return tmp_path


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >>{folder}/calls\n{script}\n')
    (folder / name).chmod(0o755)


def settle(sources: list[str]) -> dict[str, Any]:
    said: list[Any] = []
    muster_firewalls.run({"sources": sources, "ports": PORTS}, said.append)
    (answer,) = said
    return dict(answer)


def changes(folder: Path) -> list[str]:
    return [line for line in (folder / "calls").read_text().splitlines() if "status" not in line and "show" not in line]


def ufw(folder: Path, *, active: bool = True, fails: str = "") -> None:
    (folder / "added").write_text(ADDED)
    status = f"status) echo 'Status: {'active' if active else 'inactive'}';; show) cat {folder}/added;;"
    program(folder, "ufw", f'case "$1" in {status} {fails or "none"}) echo "ERROR: it is broken" >&2; exit 1;; esac')


def test_no_firewall_no_rules(programs: Path) -> None:
    assert muster_firewalls.opened(PORTS) == {} and settle(["10.0.0.2"]) == {"changed": [], "undo": None}
    ufw(programs, active=False)
    assert muster_firewalls.opened(PORTS) == {} and settle(["10.0.0.2"]) == {"changed": [], "undo": None}
    assert changes(programs) == []


def test_an_address_is_let_in_by_all_rules_or_not_whole(programs: Path) -> None:
    ufw(programs)
    assert muster_firewalls.opened(PORTS) == {"ufw": {"10.0.0.2": True, "fd00::5": False}}


def test_what_is_there_already_is_not_added_and_what_is_removed_comes_back_unless_somebody_logs_in(
    programs: Path,
) -> None:
    ufw(programs)
    (programs / "user.rules").write_text("as it was")
    said = settle(["10.0.0.2", "10.0.0.3"])
    assert said["changed"] == ["ufw"] and (Path(said["undo"]) / "user.rules").read_text() == "as it was"
    Path(said["undo"], "user.rules").unlink()
    Path(said["undo"]).rmdir()  # which ends the process that waits
    assert changes(programs) == [
        "ufw allow from 10.0.0.3 to any port 29400:29415 proto udp comment muster",
        "ufw allow from 10.0.0.3 to any port 29400:29415,29500:29599,32768:60999 proto tcp comment muster",
        "ufw delete allow from fd00::5 to any port 29400:29415 proto udp",
    ]


@pytest.mark.slow
def test_a_change_comes_back_by_itself(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ufw(programs)
    (programs / "user.rules").write_text("as it was")
    monkeypatch.setattr(muster_firewalls, "RETURN_SECONDS", 1)
    started: list[Any] = []
    begin = muster_firewalls.subprocess.Popen
    monkeypatch.setattr(
        muster_firewalls.subprocess, "Popen", lambda *words, **how: started.append(begin(*words, **how))
    )
    folder = muster_firewalls._arm()
    (programs / "user.rules").write_text("changed")
    assert started[0].wait(timeout=60) == 0
    assert (programs / "user.rules").read_text() == "as it was" and not Path(folder).exists()
    assert changes(programs) == ["ufw reload"]


def test_what_fails_is_said_and_the_users_rules_are_loaded_again(programs: Path) -> None:
    ufw(programs, fails="allow")
    said: list[Any] = []
    with pytest.raises(SystemExit):
        muster_firewalls.run({"sources": ["10.0.0.2", "10.0.0.3", "fd00::5"], "ports": PORTS}, said.append)
    assert "ufw could not be changed" in said[0]["error"] and "ERROR: it is broken" in said[0]["error"]
    assert changes(programs)[-1] == "ufw reload"


def firewalld(folder: Path, *, running: bool = True) -> None:
    (folder / "zones").write_text(ZONES)
    script = f"""case "$*" in
        --state) exit {0 if running else 252};;
        --get-default-zone) echo public;;
        *--list-all-zones) cat {folder}/zones;;
    esac"""
    for name in ("firewall-cmd", "firewall-offline-cmd"):
        program(folder, name, script)


def test_firewalld_gets_rules_now_and_for_good_and_is_not_loaded_anew(programs: Path) -> None:
    firewalld(programs)
    assert muster_firewalls.opened(PORTS) == {"firewalld": {"10.0.0.2": False}}
    assert settle(["10.0.0.2"]) == {"changed": ["firewalld"], "undo": None}
    called = [line for line in changes(programs) if "--add" in line]
    assert sorted(line.split(" --add")[0] for line in called) == [
        "firewall-cmd --permanent --zone=internal",
        "firewall-cmd --permanent --zone=public",
        "firewall-cmd --zone=internal",
        "firewall-cmd --zone=public",
    ]
    assert "--reload" not in (programs / "calls").read_text()


def test_a_firewalld_that_does_not_run_loses_what_it_has_kept_of_ours(programs: Path) -> None:
    firewalld(programs, running=False)
    assert settle(["10.0.0.2"]) == {"changed": [], "undo": None}
    assert settle([]) == {"changed": ["firewalld"], "undo": None}
    assert changes(programs)[-1].startswith("firewall-offline-cmd --zone=public --remove-rich-rule=rule priority")
