"""Runs Muster's playbooks with Ansible: host keys checked, bounded, ended whole on Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.cli import exits
from launch.cli.refusal import refuse
from launch.files import ROOT
from launch.hosts import openssh
from launch.hosts.inventory import Inventory, ansible_environment, known_hosts_path

PLAYBOOK_SECONDS = 3600  # for one playbook on all hosts


def run(name: str, inv: Inventory, hosts: Sequence[str], more: Mapping[str, str] | None = None) -> None:
    """Run playbooks/<name>.yml on these hosts. more: of the environment. Raises Refusal when it fails."""
    words = ["ansible-playbook", str(path(name)), "-i", str(inv.path), "--limit", ",".join([*hosts, "localhost"])]
    status = run_bounded(words, environment(inv) | dict(more or {}))
    if status != 0:
        unreachable = status == 4
        mirror = "; a host that reaches no package mirror needs `airgap: true` or `package_proxy` in the inventory"
        raise refuse(
            f"playbooks/{name}.yml",
            "a host became unreachable" if unreachable else "failed; the task and the host stand above",
            "fix what it names and run the same command again: it goes on where it stopped" + mirror,
            exits.UNREACHABLE if unreachable else exits.DEPLOY_FAILED,
        )


def path(name: str) -> Path:
    """Where a playbook lies."""
    return ROOT / "playbooks" / f"{name}.yml"


def environment(inv: Inventory) -> dict[str, str]:
    """Ansible's environment: host keys checked, all hosts at once, but behind a jump host as many as it lets in."""
    options = shlex.join(openssh.options(known_hosts_path(inv.path)))
    jump = any(openssh.through_jump_host(host.target) for host in inv.hosts)
    return ansible_environment() | {
        "ANSIBLE_SSH_ARGS": f"-o ControlMaster=auto -o ControlPersist=60s {options}",
        "ANSIBLE_FORKS": str(openssh.LOGINS_AT_ONCE if jump else max(5, len(inv.hosts))),
    }


def run_bounded(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command in its own process group; on Ctrl-C or past the limit, that group is ended and waited for.

    Raises Refusal when it has not ended after PLAYBOOK_SECONDS.
    """
    process = subprocess.Popen(words, env=dict(environment), start_new_session=True)
    try:
        return process.wait(PLAYBOOK_SECONDS)
    except BaseException as error:
        for number, patience in ((signal.SIGINT, 5), (signal.SIGTERM, 3), (signal.SIGKILL, 5)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
                break
        with contextlib.suppress(ProcessLookupError):  # what has outlived the command that we waited for
            os.killpg(process.pid, signal.SIGKILL)
        if isinstance(error, subprocess.TimeoutExpired):
            fix = "see on which host the last task above hangs; the same command again goes on where it stopped"
            raise refuse(words[1], f"had not ended after {PLAYBOOK_SECONDS} s", fix, exits.DEPLOY_FAILED) from None
        raise
