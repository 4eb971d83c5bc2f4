"""Promise: a password for sudo, and SECRETS, stand nowhere but where they have to, whatever is said or fails."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.conftest import HOSTS, WORKLOAD, Lab, must, summary_of
from tests.lab.test_endings import read_until

pytestmark = pytest.mark.lab

SUDO, SECRET = "c4nary-of-sudo", "c4nary-of-secrets"
#: What prints on a host where a canary is found; a pattern that does not find itself.
FIND = """
grep -lsra 'c4nar[y]' /proc/[0-9]*/cmdline /proc/[0-9]*/environ /var/lib/muster /var/log /tmp /home /etc
ENGINE inspect $(ENGINE ps --quiet) | grep 'c4nar[y]'
ENGINE history --no-trunc $(ENGINE images --quiet) | grep 'c4nar[y]'
"""
#: An engine, as it is where it does not work.
BROKEN = """
printf '#!/bin/sh\\necho it is broken >&2\\nexit 1\\n' >/usr/local/sbin/ENGINE
chmod 755 /usr/local/sbin/ENGINE
"""


def find(lab: Lab, host: str) -> str:
    return FIND.replace("ENGINE", lab.engine(host).name)


@pytest.fixture
def copy(lab: Lab, tmp_path: Path) -> Iterator[Path]:
    """The lab's inventory, where h2's user needs a password for sudo, which is vaulted."""
    user = f"useradd -m -s /bin/bash asks && echo asks:{SUDO} | chpasswd && cp -r /home/muster/.ssh /home/asks/"
    may = "chown -R asks: /home/asks/.ssh && echo 'asks ALL=(ALL) ALL' > /etc/sudoers.d/asks"
    lab.on("h2", f"{user} && {may}")
    folder = tmp_path / "copy-with-vault"
    shutil.copytree(lab.inventory, folder)
    (tmp_path / "vault").write_text("the vault's own")
    (folder / "host_vars").mkdir()
    own = folder / "host_vars" / "h2.yml"
    own.write_text(f"ansible_user: asks\nansible_become_password: {SUDO}\n")
    vault: list[str | Path] = [
        Path(sys.executable).with_name("ansible-vault"),
        "encrypt",
        "--vault-password-file",
        tmp_path / "vault",
        own,
    ]
    subprocess.run(vault, check=True, capture_output=True, timeout=60)
    assert SUDO not in own.read_text()
    yield folder
    must(lab.fab("deploy"))  # what that user had becomes muster's again
    assert lab.on("h2", "find /var/lib/muster -path '*/runs/*' -prune -o -user asks -print") == ""
    lab.remove_user("h2", "asks")
    for made in Path("build").glob("copy-with-vault-*"):
        shutil.rmtree(made, ignore_errors=True)


def test_a_canary_is_found_nowhere(lab: Lab, copy: Path, tmp_path: Path) -> None:
    vaulted: dict[str, Any] = {
        "INVENTORY": copy,
        "ANSIBLE_VAULT_PASSWORD_FILE": tmp_path / "vault",
        "ANSIBLE_VERBOSITY": 3,
    }
    lab.on("h2", BROKEN.replace("ENGINE", lab.engine("h2").name))
    try:
        failed = lab.fab("deploy", **vaulted)
    finally:
        lab.on("h2", f"rm /usr/local/sbin/{lab.engine('h2').name}")
    assert failed.returncode == 4 and "it is broken" in failed.stdout and "<" in failed.stdout, failed.stdout
    deployed = lab.fab("deploy", **vaulted)
    assert deployed.returncode == 0, deployed.stdout

    planted = lab.on("h1", f"echo {SECRET} >/tmp/planted; {find(lab, 'h1')}rm /tmp/planted", check=False).splitlines()
    assert len(planted) == 2 and "/tmp/planted" in planted  # and the shell's own command line
    (tmp_path / "secrets").mkdir()
    secret = tmp_path / "secrets" / "TOKEN"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    job = {"WORKLOAD": WORKLOAD, "SCRIPT": "ticks.py", "ARGS": 3000}
    run = lab.start("train", NODES=2, SECRETS=secret.parent, **job, **vaulted)
    said = read_until(run, "tick 5")
    found = {host: lab.on(host, find(lab, host), check=False) for host in HOSTS}
    there = lab.on("h2", "cat /run/muster/*/secrets/TOKEN; stat --format %a /run/muster/*/secrets/TOKEN")
    stopped = lab.fab("stop", RUN=said.split("muster | run ")[1].split(":")[0], GRACE=1, **vaulted)
    said += run.communicate(timeout=120)[0]
    assert (stopped.returncode, run.returncode, there) == (0, 130, f"{SECRET}400"), stopped.stdout + said
    assert found == dict.fromkeys(HOSTS, "")
    assert lab.on("h2", "ls -A /run/muster") == ".deploy"

    folder, _ = summary_of(said)
    ours = [folder, *Path("build").glob("copy-with-vault*")]
    done = subprocess.run(["grep", "-lra", "c4nar[y]", *ours], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == ""
    assert not [text for text in (failed.stdout, deployed.stdout, said, stopped.stdout) if "c4nary" in text]
