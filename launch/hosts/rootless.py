"""Hosts on which nothing is done as root (`rootless: true`), through playbooks/module_utils/muster_rootless.py."""

from __future__ import annotations

from typing import Any

import yaml

from launch.cli.refusal import Problem
from launch.files import ROOT
from launch.hosts import hostcall
from launch.hosts.connection import Machine

#: The packages that each host needs.
ENGINE_DEFAULTS = ROOT / "playbooks" / "roles" / "engine" / "defaults" / "main.yml"
ROOTLESS_LOOK_SECONDS = 30
ROOTLESS_READY_SECONDS = 300  # Podman is tried with several settings
ROOTLESS_REMOVE_SECONDS = 600


def defaults() -> dict[str, Any]:
    """Of the role that installs engines."""
    found: dict[str, Any] = yaml.safe_load(ENGINE_DEFAULTS.read_text())
    return found


def problems_of(machine: Machine) -> list[Problem]:
    """What an administrator of a host has to do before its user can run Muster there; nothing where it does not say,
    as it has no Python. Raises as Machine.user."""
    try:
        named = {"packages": defaults()["engine_packages"], "more": defaults()["engine_rootless_packages"]}
        lacks = ask(machine, "look", ROOTLESS_LOOK_SECONDS, **named)["lacks"]
    except RuntimeError as error:
        lacks = [] if "not found" in str(error) else [(str(error), "see what its python3 says there")]
    where = f"host {machine.name}"
    return [Problem(where, f"`rootless: true`: {what}", fix) for what, fix in lacks]


def ask(machine: Machine, do: str, seconds: float, **options: Any) -> dict[str, Any]:
    """What a host says that does this. Raises RuntimeError with its words when it fails, and as Machine.user."""
    return hostcall.say_to(machine, "muster_rootless", {"do": do, **options}, seconds, root=do != "look")
