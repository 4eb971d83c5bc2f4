"""Promises of the playbooks as a whole that a reader of one task could break without noticing."""

from __future__ import annotations

import configparser
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parents[2]
PLAYBOOKS = sorted((REPOSITORY / "playbooks").glob("*.yml"))


def tasks_of(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tasks with those inside blocks."""
    found = []
    for entry in entries:
        found += tasks_of(entry["block"]) if "block" in entry else [entry]
    return found


def test_host_keys_are_checked_by_every_way_to_a_host() -> None:
    config = configparser.ConfigParser()
    config.read(REPOSITORY / "ansible.cfg")
    assert config.getboolean("defaults", "host_key_checking")
    assert "StrictHostKeyChecking=yes" in config["ssh_connection"]["ssh_args"]
    for path in PLAYBOOKS:
        for play in yaml.safe_load(path.read_text()):
            for task in tasks_of(play.get("tasks", [])):
                assert "ansible.posix.synchronize" not in task, path  # it turns host-key checking off


def test_no_play_gathers_ansibles_own_facts_and_plays_of_hosts_leave_the_control_machine_alone() -> None:
    for path in PLAYBOOKS:
        for play in yaml.safe_load(path.read_text()):
            assert play["gather_facts"] is False
            assert play["hosts"] == ("localhost" if path.stem == "control" else "all:!localhost")


def test_no_task_reboots_a_host() -> None:
    for path in (REPOSITORY / "playbooks").glob("roles/*/tasks/*.yml"):
        for task in tasks_of(yaml.safe_load(path.read_text())):
            assert not {"ansible.builtin.reboot", "ansible.builtin.shell"} & set(task), path
            assert "reboot" not in str(task.get("ansible.builtin.command", "")), path
