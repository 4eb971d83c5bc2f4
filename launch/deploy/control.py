"""Makes the control machine ready: Podman and the tools that build images, through playbooks/control.yml.

Where a host builds them (`build_on`), ssh and rsync are all that is needed here, and nothing is installed.

Done once per machine (a stamp under build/ says so); not for the hosts of the inventory.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rich.console import Console

from containers.engine import ContainersError, as_root
from launch.cli import exits
from launch.cli.refusal import refuse
from launch.deploy import playbook
from launch.files import build_dir, write_whole
from launch.hosts import inventory

TOOLS = ("podman", "runc", "rsync", "mmdebstrap", "ssh", "ip", "tc")
REACHING = ("ssh", "rsync")


def ensure_reaching() -> None:
    """Raises Refusal where this machine lacks what it takes to have a host build images."""
    if missing := [tool for tool in REACHING if not shutil.which(tool)]:
        what = f"lacks {' and '.join(missing)}"
        raise refuse(
            "this machine", what, "install them: the packages openssh-client and rsync, on a Mac `brew install rsync`"
        )


def ensure_ready(console: Console) -> None:
    """Install what is missing on this machine. Raises Refusal when there is no root for that, or it fails."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [tool for tool in TOOLS if not shutil.which(tool, path=path)]
    stamp = build_dir() / "control-ready"
    if not missing and stamp.exists() and stamp.read_text() == _identity():
        return
    if not has_root():
        lacking = f" (missing: {', '.join(missing)})" if missing else ""
        what = f"needs root to set up Podman here{lacking}"
        fix = (
            "run it as root, or allow passwordless sudo; or have a host of the inventory build the images: `build_on: "
        )
        fix += "<host>` in it. `make local` trains on this machine without root"
        raise refuse("this machine", what, fix)
    console.print("Setting up this machine" + (f": {', '.join(missing)} to install" if missing else ""))
    env = inventory.ansible_environment() | {"ANSIBLE_LOCALHOST_WARNING": "false"}
    if playbook.run_bounded(["ansible-playbook", str(playbook.path("control"))], env) != 0:
        fix = "see the task that failed above; `make deploy` goes on where it stopped"
        raise refuse("this machine", "playbooks/control.yml failed", fix, exits.DEPLOY_FAILED)
    write_whole(stamp, _identity())


def has_root() -> bool:
    """Whether this user is root or becomes it by sudo without a password."""
    try:
        as_root()
    except ContainersError:
        return False
    return True


def _identity() -> str:
    """What the stamp must match: a copied checkout on another machine is set up anew."""
    machine = Path("/etc/machine-id")
    engine = shutil.which("podman") or ""
    changed = os.stat(engine).st_mtime_ns if engine else 0
    return f"{machine.read_text().strip() if machine.exists() else ''} {engine} {changed}\n"
