"""Promise: a script's image is built again when anything that it is made of has changed, and else is not."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from containers import engine, image, workload_image
from containers.engine import ContainersError
from containers.workload_image import as_built, folder_state

QUIET = lambda line: None  # noqa: E731


def test_a_folders_state_changes_with_its_files_and_not_with_caches(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("one")
    (tmp_path / "data").mkdir()

    def changed(work: Callable[[], object]) -> bool:
        before = folder_state(tmp_path)
        work()
        return folder_state(tmp_path) != before

    def same_size_and_time() -> None:
        times = (tmp_path / "main.py").stat()
        (tmp_path / "main.py").write_text("two")
        os.utime(tmp_path / "main.py", ns=(times.st_atime_ns, times.st_mtime_ns))

    assert not changed(lambda: None)
    assert changed(same_size_and_time)
    assert changed(lambda: (tmp_path / "main.py").chmod(0o755))
    assert changed(lambda: (tmp_path / "data" / "more.txt").write_text(""))
    assert changed(lambda: (tmp_path / "link").symlink_to("main.py"))
    assert changed(lambda: (tmp_path / "empty").mkdir())
    assert changed(lambda: (tmp_path / "main.py").rename(tmp_path / "other.py"))
    assert not changed(lambda: (tmp_path / "__pycache__").mkdir())
    assert not changed(lambda: (tmp_path / "__pycache__" / "main.pyc").write_text("cache"))
    assert not changed(lambda: (tmp_path / "data" / "old.pyc").write_text("cache"))


def test_what_an_image_is_made_from_is_more_than_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, more = tmp_path / "project", tmp_path / "more.txt"
    project.mkdir()
    more.write_text("einops==0.8.0\n")
    (project / "requirements.txt").write_text("-r ../more.txt\n")
    build = tmp_path / "build"
    (build / "wheels-1").mkdir(parents=True)
    monkeypatch.setattr(workload_image, "BUILD", build)
    known = workload_image.state_of(project, False)
    assert workload_image.state_of(project, False) == known != workload_image.state_of(project, True)
    more.write_text("einops==0.8.1\n")
    assert (asked := workload_image.state_of(project, False)) != known
    (build / "wheels-1").rmdir()
    assert (without := workload_image.state_of(project, False)) != asked
    monkeypatch.setattr(workload_image, "own_sources", lambda: {"muster.list": "deb other\n"})
    assert workload_image.state_of(project, False) != without


def test_without_podman_or_a_note_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "project"
    project.mkdir()

    def no_podman(*words: str) -> str:
        raise ContainersError("`podman` is not installed", "here", "install it")

    monkeypatch.setattr(workload_image, "BUILT", tmp_path / "built.json")
    monkeypatch.setattr(workload_image, "podman", no_podman)
    assert as_built(project, False) is None
    reference, state = workload_image.reference_of(project), workload_image.state_of(project, False)
    workload_image._write_note(reference, {"state": state, "ids": {reference: "ab"}})
    assert as_built(project, False) is None
    monkeypatch.setattr(workload_image, "podman", lambda *words: "ab 17\n")
    assert as_built(project, False) == image.Image(reference, "ab", 17)
    monkeypatch.setattr(workload_image, "podman", lambda *words: "cd 17\n")
    assert as_built(project, False) is None
    (tmp_path / "built.json").write_text("{")
    assert as_built(project, False) is None


# With Podman.


@pytest.fixture
def workload(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / f"Kept {os.getpid()}"
    folder.mkdir()
    yield folder
    command = ["podman", "rmi", "--force", workload_image.reference_of(folder)]
    subprocess.run(command, capture_output=True, check=False, timeout=300)


@pytest.mark.lab
def test_a_workload_is_built_again_when_a_file_or_its_image_has_changed(workload: Path) -> None:
    def build() -> image.Image:
        assert as_built(workload, False) is None
        return workload_image.build(workload, False, QUIET)

    (workload / "main.py").write_text("print('one')\n")
    first = build()
    assert as_built(workload, False) == first and as_built(workload, True) is None
    (workload / "main.py").write_text("print('two')\n")
    second = build()
    assert as_built(workload, False) == second and second.id != first.id
    (workload / ".dockerignore").write_text("main.py\n")
    assert build().id not in (first.id, second.id)
    (workload / ".dockerignore").unlink()
    assert build() == second
    engine.podman("rmi", "--force", second.ref)
    assert build() == second
