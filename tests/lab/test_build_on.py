"""Promise: who has neither root nor a container engine trusts, deploys, checks and trains, as a host builds images."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from containers import base, wheels
from tests.clone import copy_clone
from tests.lab.conftest import ENGINES, HOSTS, WORKLOAD, Lab, must

USER = "muster-laptop"
#: All that a control machine needs beside .venv, and what make, git and Python's own modules call.
PROGRAMS = ("ssh", "ssh-keyscan", "ssh-keygen", "rsync", "make", "git", "python3", "sh", "env", "id", "uname", "true")
#: That user may read all files, as the Python of .venv may lie in a home folder, and do nothing else.
AS_USER = (
    str(shutil.which("setpriv")), f"--reuid={USER}", f"--regid={USER}", "--clear-groups",
    "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search",
)  # fmt: skip

pytestmark = pytest.mark.lab


class Laptop:
    """A user of this machine with a clone, and the lab's inventory with `build_on: h1` in it."""

    def __init__(self, lab: Lab, home: Path) -> None:
        self.clone, self._home = copy_clone(home), home
        self._programs = home / "programs"
        self._programs.mkdir()
        for name in PROGRAMS:
            (self._programs / name).symlink_to(str(shutil.which(name)))
        own = self.clone / "inventory" / "laptop"
        own.mkdir()
        text = (lab.inventory / "hosts.yml").read_text()
        (own / "hosts.yml").write_text(text.replace("  vars:\n", "  vars:\n    build_on: h1\n", 1))
        for name in ("host_vars", "group_vars"):
            if (lab.inventory / name).is_dir():
                shutil.copytree(lab.inventory / name, own / name)
        shutil.copy(lab.inventory / "id_ed25519", own)
        shutil.copytree(WORKLOAD, self.clone / "job")
        fetched = wheels.training_wheels(lambda line: None)  # not once more from the index
        shutil.copytree(fetched, self.clone / "build" / fetched.name)
        subprocess.run(["chown", "-R", "--no-dereference", f"{USER}:", home], check=True)

    def make(self, *words: str) -> str:
        """What a command printed, which must have succeeded."""
        env = {**os.environ, "HOME": str(self._home), "PATH": str(self._programs), "PYTHONUNBUFFERED": "1"}
        done = subprocess.run(
            [*AS_USER, "make", "-s", "PYTHON=true", "INVENTORY=inventory/laptop", *words],
            cwd=self.clone, env=env, text=True, timeout=540, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout


@pytest.fixture
def laptop(lab: Lab) -> Iterator[Laptop]:
    """h1 has the Debian of this machine's base image already, which would take half a minute to be assembled there."""
    remove = ["userdel", "--force", "--remove", USER]  # by force: a connection kept open may still be that user's
    subprocess.run(remove, capture_output=True, check=False)  # of a session that was killed
    subprocess.run(["useradd", "--create-home", USER], check=True, capture_output=True)
    try:
        base.ensure_base(lambda line: None)
        hand_over = f"podman save {base.REFERENCE} | podman exec --interactive muster-{lab.name}-h1 podman load"
        subprocess.run(["sh", "-c", hand_over], check=True, capture_output=True, timeout=300)
        yield Laptop(lab, Path("/home") / USER)
    finally:
        subprocess.run(remove, capture_output=True, check=True)
        lab.on("h1", "podman rmi --force localhost/muster/base:bookworm; rm -rf /var/lib/muster/build", check=False)
        for host, engine in ENGINES.items():
            lab.on(host, f"{engine} rmi --force localhost/muster/workload-job:latest", check=False)
        must(lab.fab("deploy"))


@pytest.mark.timeout(900)
def test_without_root_and_engine_a_host_builds(lab: Lab, laptop: Laptop) -> None:
    assert f"{len(HOSTS)} new" in laptop.make("trust", "YES=1")
    said = laptop.make("deploy")
    assert "image: localhost/muster/train:latest: step" in said and "Deployed in" in said, said
    build = laptop.clone / "build"
    sent = json.loads((build / "laptop" / "deploy.json").read_text())["hosts"]
    assert [sent[host]["control_bytes"] for host in HOSTS] == [0] * len(HOSTS), sent
    assert (build / "images" / "sbom-train.json").stat().st_size > 10_000
    assert "h2" in laptop.make("check", "FORECAST=0", "NODES=2")
    ran = laptop.make("train", "NODES=2", "WORKLOAD=job", "SCRIPT=reduce.py")
    assert "image: localhost/muster/workload-job:latest" in ran and "succeeded" in ran, ran
    again = laptop.make("train", "NODES=2", "WORKLOAD=job", "SCRIPT=ticks.py", "ARGS=1")
    assert "image: localhost" not in again and "succeeded" in again, again  # it is known that nothing has changed
