"""The training image, a workload's image and their export: names without Podman, then the real thing."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from containers import engine, image, sbom, workload_image
from containers.engine import ContainersError
from containers.files import locked
from containers.image import Image, OciExport
from keeper import PROJECT_DIR

QUIET = lambda line: None  # noqa: E731


def test_the_code_hash_sees_names_and_contents_but_no_caches(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("x = 1\n")
    before = image.code_hash(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "model.cpython-311.pyc").write_bytes(b"cache")
    assert image.code_hash(tmp_path) == before
    (tmp_path / "model.py").rename(tmp_path / "net.py")
    renamed = image.code_hash(tmp_path)
    (tmp_path / "net.py").write_text("x = 2\n")
    assert len({before, renamed, image.code_hash(tmp_path)}) == 3


@pytest.mark.parametrize(("folder", "name"), [("My Project_2", "my-project-2"), ("gpt", "gpt"), ("日本", "workload")])
def test_a_folders_name_makes_a_valid_reference(folder: str, name: str) -> None:
    assert workload_image.image_name(folder) == name


def test_the_blobs_of_an_entry_are_its_manifest_config_and_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = {
        "config": {"digest": "sha256:c", "size": 2},
        "layers": [{"digest": "sha256:l1", "size": 30}, {"digest": "sha256:l2", "size": 4}],
    }
    monkeypatch.setattr(image, "BLOBS", tmp_path)
    (tmp_path / "m").write_text(json.dumps(manifest))
    assert image.blob_sizes({"digest": "sha256:m", "size": 1}) == {"m": 1, "c": 2, "l1": 30, "l2": 4}


def test_only_the_latest_images_of_workloads_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []
    monkeypatch.setattr(image, "_remove", removed.append)
    workloads = [f"{image.WORKLOAD_REPOSITORY}w{number}:latest" for number in range(image.KEPT_WORKLOADS + 2)]
    references = [*workloads[:3], image.TRAIN_REFERENCE, *workloads[3:], image.HOROVOD_REFERENCE]
    kept = image._without_old_workloads([{"annotations": {image.REF_NAME: reference}} for reference in references])
    assert removed == workloads[-2:]
    assert [entry["annotations"][image.REF_NAME] for entry in kept] == [r for r in references if r not in removed]


def test_a_full_disk_is_named_as_such() -> None:
    failure = engine.CommandFailed(["podman"], 125, "write /var/tmp/x: no space left on device")
    assert "disk is full" in engine.fix_of(failure)


def test_a_wheel_that_has_changed_since_it_was_fetched_is_named_as_such() -> None:
    hashes = "\n".join(f"        Expected     or {number:064}" for number in range(99))
    said = (
        f"ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM ...\n  tiny==1:\n{hashes}\n             Got        {1:064}"
    )
    failure = engine.CommandFailed(["podman"], 1, engine.last_lines(said))
    assert "tiny==1" in failure.tail and "has changed" in engine.fix_of(failure)


def test_without_root_there_is_one_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    engine.as_root.cache_clear()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda name, **_: None)
    try:
        with pytest.raises(engine.ContainersError, match=r"need root.*\n.*\n.*make local"):
            engine.as_root()
    finally:
        engine.as_root.cache_clear()


def test_a_workload_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContainersError, match="not a folder"):
        workload_image.build_on(Image("x", "0" * 64, 0), tmp_path / "missing", QUIET)


# From here on with Podman.


@pytest.fixture(scope="session")
def training(container_engine: None) -> Image:
    return image.build_training_image(QUIET)


@pytest.fixture
def changed_code(training: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Image]:
    """The training image under another name, with one file of train/ changed."""
    shutil.copytree(engine.REPOSITORY / "train", tmp_path / "train")
    with (tmp_path / "train" / "settings.py").open("a") as file:
        file.write(f"\n# {time.time()}\n")
    monkeypatch.setattr(image, "CODE", (tmp_path / "train", *image.CODE[1:]))
    monkeypatch.setattr(image, "TRAIN_REFERENCE", f"localhost/muster/train-test-{os.getpid()}:latest")
    changed = image.build_training_image(QUIET)
    assert changed.id != training.id  # or the other tests would lose theirs
    yield changed
    engine.podman("rmi", "--force", changed.id)
    image.export_oci(training, QUIET)  # prunes what the test added


def run_in(ref: str, *command: str) -> str:
    return engine.podman("run", "--rm", "--network=none", ref, *command)


def run_project(ref: str, *command: str) -> str:
    """In the project as a workload's image holds it; in a run its keeper copies it from there."""
    return run_in(ref, "sh", "-c", f"cd {PROJECT_DIR} && exec {shlex.join(command)}")


def blobs_of(export: OciExport) -> set[str]:
    entry = json.loads(export.index)["manifests"][0]
    return set(image.blob_sizes(entry))


def layers(ref: str) -> list[str]:
    found: list[str] = json.loads(engine.podman("image", "inspect", ref))[0]["RootFS"]["Layers"]
    return found


@pytest.mark.lab
def test_the_same_sources_give_the_same_image_without_a_step_done_again(
    training: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[str] = []

    def follow(command: list[str], on_line: Callable[[str], None]) -> None:
        def note(line: str) -> None:
            printed.append(line)
            on_line(line)

        original(command, note)

    first, original = image.build_training_image(QUIET), engine.follow
    monkeypatch.setattr(engine, "follow", follow)
    assert image.build_training_image(QUIET) == first
    steps = [line for line in printed if image.STEP.match(line)]
    assert steps and len([line for line in printed if "Using cache" in line]) >= len(steps), printed


@pytest.mark.lab
def test_a_code_change_makes_one_new_small_layer_which_the_pool_forgets(training: Image, changed_code: Image) -> None:
    old, new = layers(training.id), layers(changed_code.id)
    assert len(old) == len(new)
    assert [one == other for one, other in zip(old, new, strict=True)] == [True] * (len(old) - 1) + [False]
    kept, changed = (blobs_of(image.export_oci(one, QUIET)) for one in (training, changed_code))
    own, pool = changed - kept, image.POOL / "blobs" / "sha256"
    assert len(own) == 3  # manifest, config, one layer
    assert sum((pool / name).stat().st_size for name in own) < 4e6

    engine.podman("untag", changed_code.ref)
    image.export_oci(training, QUIET)
    assert own <= set(os.listdir(pool))  # they may be on their way to a host
    for name in own:
        os.utime(pool / name, (0, 0))
    image.export_oci(training, QUIET)
    assert own.isdisjoint(os.listdir(pool))
    assert kept <= set(os.listdir(pool))


@pytest.mark.lab
def test_an_export_survives_a_kill_and_a_torn_blob(
    training: Image, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    image.export_oci(training, QUIET)
    own = engine.BUILD / f"test-export-{os.getpid()}"  # as other workers send what is in the pool to hosts
    request.addfinalizer(lambda: shutil.rmtree(own))
    shutil.copytree(image.POOL, own / "oci", copy_function=os.link)
    monkeypatch.setattr(image, "IMAGES", own)
    monkeypatch.setattr(image, "POOL", own / "oci")
    monkeypatch.setattr(image, "BLOBS", own / "oci" / "blobs" / "sha256")
    export = image.export_oci(training, QUIET)
    (image.IMAGES / "export-killed" / "blobs").mkdir(parents=True)
    blobs = export.path / "blobs" / "sha256"
    whole = {name: (blobs / name).stat().st_size for name in blobs_of(export)}
    base_layer = layers(training.id)[0].removeprefix("sha256:")
    for name in (training.id, base_layer):
        shutil.copy2(blobs / name, own / "torn")
        os.truncate(own / "torn", whole[name] - 1)
        os.replace(own / "torn", blobs / name)
    again = image.export_oci(training, QUIET)
    assert again.index == export.index
    assert {name: (blobs / name).stat().st_size for name in whole} == whole
    assert not list(image.IMAGES.glob("export-*"))


@pytest.mark.lab
def test_python_starts_from_compiled_files(training: Image) -> None:
    modules = "torch, torchvision, matplotlib.pyplot, sklearn.datasets, train.settings"
    said = engine.podman(
        "run", "--rm", "--network=none", training.ref, "sh", "-c", f"python3 -v -c 'import {modules}' 2>&1"
    )
    assert "wrote '" not in said
    assert ".pyc" in said


@pytest.mark.lab
def test_the_image_carries_its_codes_hash_and_runs_torchrun(training: Image) -> None:
    fresh = image.build_training_image(QUIET)
    assert engine.image_label(fresh.id, "muster.code") == image.code_hash(*image.CODE)
    assert "usage: torchrun" in run_in(training.ref, "torchrun", "--help")


def packages(text: str) -> set[tuple[str, str]]:
    """Names and versions of an SBOM."""
    return {(entry["name"], entry["version"]) for entry in json.loads(text)["components"]}


@pytest.mark.lab
def test_an_image_lists_its_packages_inside_and_beside_its_export(training: Image) -> None:
    inside = run_in(training.id, "cat", str(sbom.PLACE))
    image.export_oci(training, QUIET)
    assert image.sbom_path(training.ref).read_text() == inside
    asked = "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()))"
    python = {tuple(line.split("==")) for line in run_in(training.id, "python3", "-c", asked).split()}
    listed = run_in(training.id, "dpkg-query", "-W", "-f", "${Package} ${Version}\n")
    debian = {tuple(line.split()) for line in listed.splitlines()}
    assert packages(inside) == python | debian and len(python) > 30 and len(debian) > 90
    hashed = {entry["name"] for entry in json.loads(inside)["components"] if "hashes" in entry}
    assert hashed == {name for name, _ in python}


@pytest.fixture
def workload(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / f"Project {os.getpid()}"
    folder.mkdir()
    yield folder
    reference = f"{image.WORKLOAD_REPOSITORY}{workload_image.image_name(folder.name)}:latest"
    subprocess.run(["podman", "rmi", "--force", reference], capture_output=True, check=False, timeout=300)


@pytest.mark.lab
def test_a_workload_needs_nothing_of_ours(training: Image, workload: Path) -> None:
    (workload / "main.py").write_text("import helper, torchvision; print(torchvision.models.resnet18().fc)\n")
    (workload / "helper.py").write_text("")
    (workload / ".git").mkdir()
    (workload / ".git" / "secret").write_text("")
    (workload / "data.bin").write_text("")
    (workload / ".dockerignore").write_text("data.bin\n")
    built = workload_image.build_on(training, workload, QUIET)
    assert "Linear(in_features=512" in run_project(built.ref, "python", "main.py")
    assert sorted(run_project(built.ref, "ls", "-A").split()) == [".dockerignore", "helper.py", "main.py"]


@pytest.mark.lab
def test_a_workloads_requirements_are_added_and_torch_stays(training: Image, workload: Path) -> None:
    (workload / "requirements.txt").write_text("torch>=2.0\nnumpy\ntorchvision\neinops\n")
    (workload / "main.py").write_text("import einops, torch, torchvision; print(torch.__version__)\n")
    built = workload_image.build_on(training, workload, QUIET)
    assert layers(built.id)[: len(layers(training.id))] == layers(training.id)
    assert run_project(built.ref, "python", "main.py") == run_in(
        training.ref, "python", "-c", "import torch; print(torch.__version__)"
    )
    assert built.layers_bytes - training.layers_bytes < 5e6  # no second numpy
    listed = [packages(run_in(one.id, "cat", str(sbom.PLACE))) for one in (training, built)]
    assert [name for name, _ in listed[1] - listed[0]] == ["einops"] and not listed[0] - listed[1]
    assert workload_image.build_on(training, workload, QUIET).id == built.id


@pytest.mark.lab
def test_a_workload_that_wants_another_torch_is_refused(training: Image, workload: Path) -> None:
    (workload / "requirements.txt").write_text("torch==2.1.0\n")
    with pytest.raises(ContainersError) as caught:
        workload_image.build_on(training, workload, QUIET)
    assert str(workload / "requirements.txt") in caught.value.where
    assert "torch 2.13.0" in caught.value.fix
    with locked(engine.BUILD / "wheels.lock"):  # other workers fetch wheels, too
        assert not list(engine.BUILD.glob(".wheels-*"))


@pytest.mark.lab
def test_a_failing_build_gives_its_last_lines_and_leaves_nothing(
    training: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "Containerfile").write_text("ARG BASE\nFROM ${BASE}\nRUN echo about to fail; exit 3\n")
    monkeypatch.setattr(image, "ROOM", tmp_path)
    monkeypatch.setattr(image, "TRAIN_REFERENCE", f"localhost/muster/broken-{os.getpid()}:latest")
    with pytest.raises(ContainersError) as caught:
        image.build_training_image(QUIET)
    assert "about to fail" in caught.value.what
    assert "Containerfile" in caught.value.where
    assert engine.inspect_image(image.TRAIN_REFERENCE, "{{.Id}}") is None
    with locked(image.IMAGES / "build.lock"):  # other workers build, too
        assert not list(image.IMAGES.glob("build-*"))
