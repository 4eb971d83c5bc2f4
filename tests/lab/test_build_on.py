"""Promise: who has neither root nor a container engine trusts, deploys, checks and trains, as a host builds images."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from containers import base, image, wheels
from containers.engine import podman
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
        with (self.clone / "train" / "names.py").open("a") as source:
            source.write("# One more layer for every host.\n")
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
        begun = time.monotonic()
        env = {**os.environ, "HOME": str(self._home), "PATH": str(self._programs), "PYTHONUNBUFFERED": "1"}
        done = subprocess.run(
            [*AS_USER, "make", "-s", "PYTHON=true", "INVENTORY=inventory/laptop", *words],
            cwd=self.clone, env=env, text=True, timeout=540, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        print(f"{' '.join(words)}: {time.monotonic() - begun:.0f} s")
        assert done.returncode == 0, done.stdout
        return done.stdout


def write_blob(layout: Path, content: Any) -> dict[str, Any]:
    """The descriptor of a new blob of an OCI layout."""
    text = json.dumps(content).encode()
    digest = hashlib.sha256(text).hexdigest()
    (layout / "blobs" / "sha256" / digest).write_bytes(text)
    return {"digest": f"sha256:{digest}", "size": len(text)}


def read_blob(descriptor: dict[str, Any]) -> Any:
    return json.loads((image.BLOBS / descriptor["digest"].removeprefix("sha256:")).read_text())


def hand_over_wheels(lab: Lab) -> None:
    """Fill the build cache of h1, so that it builds only our code. That saves two minutes of CPU time.

    h1 has all layers of the image already. Podman reuses the result of a build step if it finds an image that ends with
    this step, so it gets one image for each step up to the wheels. The layers also go into the export folder.
    """
    [entry] = [
        one for one in json.loads((image.POOL / "index.json").read_text())["manifests"]
        if one["annotations"][image.REF_NAME] == image.TRAIN_REFERENCE
    ]  # fmt: skip
    manifest = read_blob(entry)
    config = read_blob(manifest["config"])
    steps = config["history"]
    wheels_step = max(number for number, step in enumerate(steps) if "/wheels/requirements.lock" in step["created_by"])
    first_step = int(podman("image", "inspect", "--format={{len .History}}", base.REFERENCE))

    cache = "/var/lib/muster/build/cache/images"
    names = " ".join(layer["digest"].removeprefix("sha256:") for layer in manifest["layers"])
    for blobs in (f"{cache}/oci/blobs/sha256", f"{cache}/handed/blobs/sha256"):
        lab.on("h1", f"mkdir -p {blobs} && cd /var/lib/muster/images/oci/blobs/sha256 && ln {names} {blobs}")
    layout = lab.path("h1", f"{cache}/handed")
    manifests = []
    for end in range(first_step + 1, wheels_step + 2):
        layers = sum(not step.get("empty_layer") for step in steps[:end])
        rootfs = {**config["rootfs"], "diff_ids": config["rootfs"]["diff_ids"][:layers]}
        blob = manifest["config"] | write_blob(layout, {**config, "history": steps[:end], "rootfs": rootfs})
        descriptor = write_blob(layout, {**manifest, "config": blob, "layers": manifest["layers"][:layers]})
        named = {"annotations": {image.REF_NAME: f"step-{end}"}, "mediaType": manifest["mediaType"]}
        manifests.append({**descriptor, **named})
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}))
    # Each pull takes the name from the image before. A teardown removes images without a name.
    pull = (
        f"for step in $(seq {first_step + 1} {wheels_step + 1}); do id=$(podman pull -q oci:{cache}/handed:step-$step)"
    )
    lab.in_container("h1", f"{pull}; done && podman untag $id && rm -r {cache}/handed")


@pytest.fixture(params=["our code", pytest.param("all", marks=pytest.mark.long)])
def laptop(request: pytest.FixtureRequest, lab: Lab) -> Iterator[Laptop]:
    """What h1 has to build: all, or all but the wheels. It has the Debian of this machine's base image already, which
    would take half a minute to be assembled there."""
    remove = ["userdel", "--force", "--remove", USER]  # by force: a connection kept open may still be that user's
    subprocess.run(remove, capture_output=True, check=False)  # of a session that was killed
    shutil.rmtree(Path("/home") / USER, ignore_errors=True)
    subprocess.run(["useradd", "--create-home", USER], check=True, capture_output=True)
    try:
        base.ensure_base(lambda line: None)
        hand_over = f"podman save {base.REFERENCE} | podman exec --interactive muster-{lab.name}-h1 podman load"
        subprocess.run(["sh", "-c", hand_over], check=True, capture_output=True, timeout=300)
        if request.param != "all":
            hand_over_wheels(lab)
        yield Laptop(lab, Path("/home") / USER)
    finally:
        lab.on("h1", "podman rmi --force localhost/muster/base:bookworm; rm -rf /var/lib/muster/build", check=False)
        for host, engine in ENGINES.items():
            lab.on(host, f"{engine} rmi --force localhost/muster/workload-job:latest", check=False)
        subprocess.run(remove, capture_output=True, check=True)
        must(lab.fab("deploy"))


@pytest.mark.timeout(900)
def test_without_root_and_engine_a_host_builds(lab: Lab, laptop: Laptop) -> None:
    assert f"{len(HOSTS)} new" in laptop.make("trust", "YES=1")
    said = laptop.make("deploy")
    assert "image: localhost/muster/train:latest: step" in said and "Deployed in" in said, said
    build = laptop.clone / "build"
    sent = json.loads((build / "laptop" / "deploy.json").read_text())["hosts"]
    assert [sent[host]["control_bytes"] for host in HOSTS] == [0] * len(HOSTS), sent
    assert all(sent[host]["bytes_sent"] > 0 for host in HOSTS[1:]), sent
    assert (build / "images" / "sbom-train.json").stat().st_size > 10_000
    assert "h2" in laptop.make("check", "FORECAST=0", "NODES=2")
    ran = laptop.make("train", "NODES=2", "WORKLOAD=job", "SCRIPT=reduce.py")
    assert "image: localhost/muster/workload-job:latest" in ran and "succeeded" in ran, ran
    again = laptop.make("train", "NODES=2", "WORKLOAD=job", "SCRIPT=ticks.py", "ARGS=1")
    assert "image: localhost" not in again and "succeeded" in again, again  # it is known that nothing has changed
