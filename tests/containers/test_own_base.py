"""A base image of the user's own: what is refused, what Muster adds, and that a run can start on it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from containers import engine, image, own_base, sbom, wheels, workload_image
from containers.base import ensure_base
from containers.engine import REPOSITORY, ContainersError
from containers.pip import Target
from keeper import PROJECT_DIR
from tests.wheels import write_wheel

QUIET = lambda line: None  # noqa: E731
RIGHT: dict[str, Any] = {
    "python": "3.12.3",
    "libc": ["glibc", "2.39"],
    "torch": "2.12.0+cu130",
    "gloo": True,
    "hip": "",
}


def test_a_python_and_a_torch_that_muster_runs_on_are_taken() -> None:
    assert own_base.problem_of(RIGHT, "3.11") is None
    assert own_base.problem_of({**RIGHT, "torch": "2.13.0a0+5228986c39.nv26.06"}, "3.11") is None


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"python": "3.9.2"}, "it has Python 3.9.2: Muster needs Python 3.11 or newer and torch 2.11 to 2.13"),
        ({"torch": "2.8.0"}, "it has torch 2.8.0: Muster needs Python 3.11 or newer and torch 2.11 to 2.13"),
        ({"torch": "2.14.0"}, "it has torch 2.14.0"),
        ({"torch": None, "error": "ModuleNotFoundError: No module named 'torch'"}, "cannot import torch (ModuleNot"),
        ({"gloo": False}, "built without torch.distributed's gloo"),
        ({"libc": ["", ""]}, "need glibc"),
    ],
)
def test_another_one_is_refused_with_both_versions(found: dict[str, Any], said: str) -> None:
    assert said in (own_base.problem_of({**RIGHT, **found}, "3.11") or "")


def test_the_range_of_torch_is_the_trainers() -> None:
    said = f"{own_base.text(own_base.OLDEST_TORCH)} to {own_base.text(own_base.NEWEST_TORCH)}"
    assert said in (REPOSITORY / "train" / "torch_versions.py").read_text().splitlines()[0]


def test_an_archive_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContainersError, match=r"cannot be read: No such file.*\n.*base_image /.*/missing.tar"):
        own_base.archive_state(str(tmp_path / "missing.tar"))


@pytest.mark.slow
def test_what_an_image_has_is_not_fetched_for_a_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index has the same torch; what stands for that of the image is taken in its place, and then left out."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setattr(wheels, "BUILD", tmp_path / "build")
    for name in ("torch", "other"):
        write_wheel(tmp_path / "index", name, "2.13.0")
    (tmp_path / "requirements.txt").write_text("torch\nother\nodd-name\n")
    target = Target("3.12", (2, 39))
    there = wheels.stand_ins({"torch": "2.13.0", "odd-name": "1.0+x.1", "broken": "not a version"}, target)
    folder = wheels.workload_wheels(tmp_path, there, QUIET, target)
    assert folder and [path.name for path in folder.glob("*.whl")] == ["other-2.13.0-py3-none-any.whl"]


def test_a_torch_without_a_torchvision_that_fits_is_refused() -> None:
    with pytest.raises(ContainersError, match=r"torch 2\.12\.0, but no torchvision.*for torch 2\.13\.0\n.*the place"):
        wheels.added_wheels({"torch": "2.12.0"}, Target("3.11", (2, 36)), "the place", QUIET)


@pytest.mark.parametrize("hip", ["", "7.1.25424"])
def test_whether_its_torch_is_for_rocm_is_noted_with_a_base(
    hip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, ran = tmp_path / "rocm.tar", list[str]()
    archive.write_text("x")

    def podman(*words: str, **more: Any) -> str:
        ran.append(more["stdin"])
        return json.dumps({**RIGHT, "hip": hip, "packages": {"torch": "2.12.0"}})

    monkeypatch.setattr(own_base, "podman", podman)
    monkeypatch.setattr(own_base, "_load", lambda setting: "ab" * 32)
    monkeypatch.setattr(own_base, "inspect_image", lambda name, words: "ab" * 32)
    said: list[str] = []
    assert own_base.own_base(str(archive), said.append).hip == hip and ("ROCm" in said[-1]) is bool(hip)
    assert own_base.own_base(str(archive), said.append).hip == hip and len(ran) == 1
    notes = json.loads(own_base.NOTES.read_text())
    del notes[str(archive)]["base"]["hip"]  # as an earlier version of Muster has noted it
    own_base.NOTES.write_text(json.dumps(notes))
    assert own_base.own_base(str(archive), said.append).hip == hip and len(ran) == 2


def test_a_base_for_rocm_needs_its_own_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    base = own_base.Base("ab", "3.12", (2, 39), {"torch": "2.13.0+rocm7.1"}, "7.1.25424")
    monkeypatch.setattr(image, "own_base", lambda setting, progress: base)
    monkeypatch.setattr(image, "as_root", lambda: ())
    with pytest.raises(
        ContainersError, match=r"built for ROCm, and Muster's own torchvision is not\n.*\n.*in the base image"
    ):
        image.build_training_image(QUIET, base_image="/rocm.tar")


@pytest.mark.parametrize("hip", ["", "7.1.25424"])
def test_the_training_image_is_for_the_gpus_of_its_base(
    hip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = own_base.Base("ab", "3.12", (2, 39), {"torch": "2.13.0", "torchvision": "0.28.0"}, hip)
    monkeypatch.setattr(image, "own_base", lambda setting, progress: base)
    monkeypatch.setattr(image, "as_root", lambda: ())
    monkeypatch.setattr(image, "added_wheels", lambda *words: tmp_path)
    monkeypatch.setattr(image, "inspect_image", lambda name, words: "cd")  # it is built
    monkeypatch.setattr(image, "_train_on", lambda *words: image.Image("x", "cd", 1))
    assert image.build_training_image(QUIET, base_image="/own.tar").hip == hip


# From here on with Podman.

FAKE_TORCH = (
    "mkdir -p {site}/torch; echo '__version__ = \"2.8.0\"' >{site}/torch/__init__.py; touch {site}/torch/distributed.py"
)
WRONG = {
    "torch 2.8.0: Muster needs": FAKE_TORCH.format(site="/usr/local/lib/python3.11/dist-packages"),
    "python3 does not run in it": "rm /usr/bin/python3",
}
#: A base image as others make them: another user, another folder, an entry point, torch, but not all that we need.
OTHERS = """
FROM {training}
RUN rm -r /usr/local/lib/python3.11/dist-packages/tensorboard* && useradd somebody && mkdir /somewhere
USER somebody
WORKDIR /somewhere
ENV PYTHONPATH=/somewhere
ENTRYPOINT ["/bin/false"]
"""


@pytest.fixture(autouse=True)
def _notes_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_base, "NOTES", tmp_path / "notes" / "bases.json")


def made(folder: Path, containerfile: str) -> str:
    """An image of these lines."""
    folder.mkdir()
    (folder / "Containerfile").write_text(containerfile)
    words = ["build", "--quiet", "--network=none", "--timestamp=0", f"--file={folder}/Containerfile"]
    return engine.podman(*words, str(folder)).strip()


def saved(identity: str, folder: Path, archive_format: str) -> Path:
    """An archive of an image."""
    archive = folder / "image.tar"
    engine.podman("save", "--quiet", f"--format={archive_format}", f"--output={archive}", identity)
    return archive


@pytest.mark.lab
@pytest.mark.parametrize("said", WRONG)
def test_an_image_that_muster_does_not_run_on_is_refused_before_anything_is_built(said: str, tmp_path: Path) -> None:
    lines = f"FROM {ensure_base(QUIET)}\nRUN {WRONG[said]}\n"
    identity = made(tmp_path / "wrong", lines)
    archive = saved(identity, tmp_path / "wrong", "oci-archive")
    try:
        with pytest.raises(ContainersError, match=said) as caught:
            image.build_training_image(QUIET, base_image=str(archive))
        assert caught.value.where == f"the inventory's base_image {archive}"
        assert not own_base.NOTES.exists()
        assert engine.inspect_image(image.own_reference(str(archive)), "{{.Id}}") is None
    finally:
        engine.podman("rmi", "--force", identity)


@pytest.mark.lab
def test_a_reference_that_cannot_be_pulled_and_horovod_are_refused() -> None:
    with pytest.raises(ContainersError, match=r"cannot pull localhost:1/none:1: .*connection refused\n.*\n.*archive"):
        image.build_training_image(QUIET, base_image="localhost:1/none:1")
    with pytest.raises(ContainersError, match="HOROVOD"):
        image.build_training_image(QUIET, horovod=True, base_image="localhost:1/none:1")


class Registry(BaseHTTPRequestHandler):
    """As much of a registry as a pull needs: the image `own`, from a folder of `podman save`."""

    folder: Path
    tag = "1"

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        index = json.loads((self.folder / "index.json").read_text())["manifests"][0]["digest"]
        digest = (index if name == self.tag else name).partition(":")[2]
        file = self.folder / "blobs" / "sha256" / digest
        content = file.read_bytes() if digest and file.is_file() else b""
        self.send_response(200 if content or not name else 404)
        if "/manifests/" in self.path:
            self.send_header("Content-Type", "application/vnd.oci.image.manifest.v1+json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, format: str, *values: object) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path, settings: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a registry that has the image in `folder`, without TLS."""
    Registry.folder = folder
    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        address = f"127.0.0.1:{server.server_port}"
        settings.write_text(f'[[registry]]\nlocation = "{address}"\ninsecure = true\n')
        monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", str(settings))
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield address
        server.shutdown()


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a registry that has an image which is not here."""
    lines = f"FROM {ensure_base(QUIET)}\nLABEL test={os.getpid()}\n"
    identity = made(tmp_path / "served", lines)
    saved(identity, tmp_path / "served", "oci-dir")
    engine.podman("rmi", identity)
    with served(tmp_path / "served" / "image.tar", tmp_path / "registries.conf", monkeypatch) as address:
        yield address


@pytest.mark.lab
def test_an_image_is_pulled_once_and_noted_by_its_digest(registry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_base, "PROBE", f"print({json.dumps({**RIGHT, 'packages': {}})!r})")
    said: list[str] = []
    pulled = own_base.own_base(f"{registry}/own:1", said.append)
    try:
        assert pulled.python == "3.12"
        digest = json.loads((Registry.folder / "index.json").read_text())["manifests"][0]["digest"]
        note = json.loads(own_base.NOTES.read_text())[f"{registry}/own:1"]
        assert note["pulled"] == f"{registry}/own@{digest}" and note["pulled"] in said[-1]
        assert own_base.own_base(f"{registry}/own:1", said.append) == pulled
        assert len([line for line in said if line.endswith(": pulling")]) == 1
        engine.podman("rmi", "--force", pulled.id)
        monkeypatch.setattr(Registry, "tag", "2")  # the name stands for another image by then
        assert own_base.own_base(f"{registry}/own:1", said.append) == pulled
    finally:
        engine.podman("rmi", "--force", pulled.id)


@pytest.fixture(params=["registry", pytest.param("archive", marks=pytest.mark.long)])
def others(
    request: pytest.FixtureRequest, container_engine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """`base_image` for an image that Muster can build on, which is no longer in Podman's storage."""
    folder, training = tmp_path / "image", image.build_training_image(QUIET)
    identity = made(folder, OTHERS.format(training=training.id))
    with contextlib.ExitStack() as stack:
        if request.param == "archive":
            setting = str(saved(identity, folder, "docker-archive"))
        else:
            image.export_oci(training, QUIET)  # so that only what is new has to be written
            entry, _ = image._export(image.Image("own", identity, 0))
            (folder / "index.json").write_text(json.dumps({"manifests": [entry]}))
            (folder / "blobs").symlink_to(image.POOL / "blobs")
            setting = f"{stack.enter_context(served(folder, tmp_path / 'registries.conf', monkeypatch))}/own:1"
        engine.podman("rmi", "--force", identity)
        yield setting
    named = ["podman", "rmi", "--force", image.own_reference(setting), identity]
    subprocess.run(named, capture_output=True, check=False, timeout=300)


@pytest.mark.lab
def test_a_run_can_start_on_an_image_of_ones_own(others: str, tmp_path: Path) -> None:
    said: list[str] = []
    built = image.build_training_image(said.append, base_image=others)
    base = own_base.own_base(others, QUIET)
    assert {"torch", "numpy"} <= set(base.packages) and "tensorboard" not in base.packages
    below = engine.podman("image", "inspect", "--format={{json .RootFS.Layers}}", base.id)
    above = engine.podman("image", "inspect", "--format={{json .RootFS.Layers}}", built.id)
    count = len(json.loads(below))
    assert json.loads(above)[:count] == json.loads(below) and len(json.loads(above)) == count + 2

    helped = engine.podman(*own_base.CONFINED, built.id, "python3", "-P", "-m", "train", "--help")
    assert "--dataset" in helped
    trained = engine.podman(
        *own_base.CONFINED, "--env=MUSTER_RUN_DIR=/tmp/run", built.id, *("python3", "-P", "-m", "train"),
        *("--dataset", "digits", "--model", "shufflenet_v2_x0_5", "--epochs", "1"),
    )  # fmt: skip
    assert "accuracy" in trained
    assert image.build_training_image(said.append, base_image=others) == built
    assert len([line for line in said if line.endswith((": loading", ": pulling"))]) == 1

    listed = json.loads(engine.podman(*own_base.CONFINED, "--entrypoint=cat", built.id, str(sbom.PLACE)))
    assert {"torch", "tensorboard", "libc6"} <= {entry["name"] for entry in listed["components"]}

    folder = tmp_path / f"Own {os.getpid()}"
    folder.mkdir()
    (folder / "requirements.txt").write_text("torch\nnumpy\neinops\n")
    (folder / "main.py").write_text("import einops, rich, torch; print(torch.__version__)\n")
    try:
        assert workload_image.as_built(folder, False, others) is None
        workload_image.build(folder, False, QUIET, others)
        workload = workload_image.build(folder, False, QUIET, others)  # now with the wheels that it had fetched
        assert workload_image.as_built(folder, False, others) == workload
        assert workload_image.as_built(folder, False) is None
        ran = engine.podman(*own_base.CONFINED, workload.id, "python3", f"{PROJECT_DIR}/main.py")
        assert ran.strip() == base.packages["torch"]
        assert workload.layers_bytes - built.layers_bytes < 5e6
    finally:
        subprocess.run(
            ["podman", "rmi", "--force", workload_image.reference_of(folder)], capture_output=True, check=False
        )
