"""Which wheels are fetched for an image, and that only locked ones are: with the real pip, from a folder of wheels."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from containers import lock, wheels
from containers.engine import ContainersError
from containers.pip import HERE, cross_arguments, group_requirements, own_cross, pinned
from tests.wheels import write_wheel

QUIET = lambda line: None  # noqa: E731


def test_included_groups_are_resolved() -> None:
    groups = {"train": ["torch==2.13.0"], "test": [{"include-group": "train"}, "pytest"]}
    assert group_requirements(groups, "test") == ["torch==2.13.0", "pytest"]


def test_pins_are_exact_builds_under_normalized_names() -> None:
    files = ["torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl", "Typing_Extensions-4.16.0-py3-none-any.whl"]
    assert pinned(files) == {"torch": "2.13.0+cpu", "typing-extensions": "4.16.0"}


def test_a_control_machine_like_the_image_lets_pip_choose() -> None:
    assert cross_arguments((3, 11), ("glibc", "2.36"), "x86_64") == []


@pytest.mark.parametrize(
    ("python", "libc"), [((3, 13), ("glibc", "2.36")), ((3, 11), ("glibc", "2.41")), ((3, 11), ("", ""))]
)
def test_another_python_or_a_newer_libc_asks_for_the_images(python: tuple[int, int], libc: tuple[str, str]) -> None:
    arguments = cross_arguments(python, libc, "x86_64")
    assert "--python-version=3.11" in arguments
    assert "--platform=manylinux_2_28_x86_64" in arguments
    assert "--platform=manylinux_2_37_x86_64" not in arguments


def test_for_a_host_of_another_architecture_its_wheels_are_chosen_whatever_this_machine_is() -> None:
    assert "--platform=manylinux_2_28_sparc64" in own_cross("sparc64")
    assert own_cross(HERE) == own_cross()


def test_a_changed_requirement_in_an_included_file_is_another_set_of_wheels(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("-r more.txt\neinops\n")
    (tmp_path / "more.txt").write_text("tqdm==4.66\n")
    before = wheels.requirements_texts(tmp_path / "requirements.txt")
    (tmp_path / "more.txt").write_text("tqdm==4.67\n")
    assert wheels.requirements_texts(tmp_path / "requirements.txt") != before


@pytest.mark.parametrize("path", sorted(lock.LOCKS.glob("*.lock")), ids=lambda path: path.stem)
def test_a_lock_in_the_repository_is_of_pyproject_and_has_a_hash_of_everything(path: Path) -> None:
    assert lock.lock_of(lock.training_requirements(), path.stem.partition("-")[2]) == path
    entries = re.findall(r"^\w.*(?:\n +.*)*", path.read_text(), re.MULTILINE)
    assert len(entries) == len(lock.pins_of(entries)) > 30
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []


def test_the_lock_of_the_registrys_torch_is_for_both_kinds_of_machine() -> None:
    """SHA-256 of the registry's two wheels for Linux and CPython 3.11, and what only the CUDA build needs."""
    text = lock.lock_path("").read_text()
    assert "60fcdcb2f3876e21146cb4524ef06397d727ca9ad5f020818547e25075fe3cb7" in text  # x86_64
    assert "092790c696a760c729fd5722835f50b9d81fd7c8f141571f3f3cf4081a8f664c" in text  # aarch64
    assert "nvidia-nccl-cu13" in lock.pins_of([text])
    assert not [name for name in lock.pins_of([lock.lock_path("cpu").read_text()]) if name.startswith("nvidia")]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all that pip finds; locks and build/ are folders of the test."""
    for name in ("index", "locks", "build"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    for module in (lock, wheels):
        monkeypatch.setattr(module, "LOCKS", tmp_path / "locks")
    monkeypatch.setattr(wheels, "BUILD", tmp_path / "build")
    monkeypatch.setattr(wheels, "training_requirements", lambda: ["torch==2.13.0", "tiny==1"])
    write_wheel(tmp_path / "index", "torch", "2.13.0+cpu")
    write_wheel(tmp_path / "index", "torch", "2.14.0")
    write_wheel(tmp_path / "index", "tiny")
    return tmp_path / "index"


def write_lock(index: Path, torch: str = "2.13.0+cpu") -> Path:
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in index.glob("*.whl")}
    locked = lock.lock_path("cpu")
    locked.write_text(
        f"torch=={torch} \\\n    --hash=sha256:{'0' * 64} \\\n"
        f"    --hash=sha256:{hashes['torch-2.13.0+cpu-py3-none-any.whl']}\n"
        f"tiny==1 --hash=sha256:{hashes['tiny-1-py3-none-any.whl']}\n"
        f"elsewhere==1 ; sys_platform == 'win32' --hash=sha256:{'0' * 64}\n"
    )
    return locked


@pytest.mark.slow
def test_locked_wheels_are_fetched_with_their_lock(index: Path) -> None:
    lock = write_lock(index)
    folder = wheels.training_wheels(QUIET)
    assert sorted(path.name for path in folder.iterdir()) == [
        "requirements.lock",
        "tiny-1-py3-none-any.whl",
        "torch-2.13.0+cpu-py3-none-any.whl",
    ]
    assert (folder / "requirements.lock").read_text() == lock.read_text()
    before = wheels.content_hash(folder)
    lock.write_text(lock.read_text() + f"    --hash=sha256:{'1' * 64}\n")
    assert (again := wheels.training_wheels(QUIET)) != folder
    assert wheels.content_hash(again) != before


@pytest.mark.slow
def test_a_wheel_that_is_not_the_locked_one_is_refused_by_name(index: Path) -> None:
    lock = write_lock(index)
    (index / "tiny-1-py3-none-any.whl").write_bytes((index / "torch-2.14.0-py3-none-any.whl").read_bytes())
    with pytest.raises(ContainersError) as caught:
        wheels.training_wheels(QUIET)
    assert re.search(
        r"SHA-256 that is not locked: tiny==1 \(\S+/tiny-1-py3-none-any.whl\), has [0-9a-f]{64}$", caught.value.what
    )
    assert caught.value.where == str(lock) and "make lock" in caught.value.fix
    assert not list((index.parent / "build").glob("*wheels-*"))


@pytest.mark.slow
def test_a_build_of_torch_without_a_lock_is_refused(index: Path) -> None:
    with pytest.raises(ContainersError, match=r"torch \.\.\.\+cpu.*\n.*requirements-cpu.lock\n.*make lock"):
        wheels.training_wheels(QUIET)


@pytest.mark.slow
def test_a_lock_of_another_pyproject_is_refused(index: Path) -> None:
    write_lock(index, torch="2.12.0+cpu")
    with pytest.raises(ContainersError, match=r"asks for torch 2\.13\.0, but torch 2\.12\.0\+cpu is locked"):
        wheels.training_wheels(QUIET)


@pytest.mark.slow
def test_the_build_of_torch_is_the_one_that_pip_prefers(index: Path) -> None:
    assert lock.torch_build(["torch==2.13.0"]) == "cpu"
    assert lock.torch_build(["torch==2.14.0"]) == ""
    with pytest.raises(ContainersError, match=r"pip finds no torch 2\.12\.0 .*, only 2\.14\.0, 2\.13\.0\+cpu"):
        lock.torch_build(["torch==2.12.0"])


def test_uv_is_told_what_pip_is_set_to() -> None:
    listed = "global.find-links='/a'\nglobal.index-url='https://one/simple'\n:env:.find-links='/b /c'\n"
    assert lock.pip_setting(listed, "index-url") == ["https://one/simple"]
    assert lock.pip_setting(listed, "find-links") == ["/b", "/c"]
    assert lock.pip_setting(listed, "extra-index-url") == []


@pytest.mark.slow
def test_a_hash_in_a_users_own_requirements_is_enforced(index: Path, tmp_path: Path) -> None:
    digest = hashlib.sha256((index / "tiny-1-py3-none-any.whl").read_bytes()).hexdigest()
    train, asked = tmp_path / "train", tmp_path / "workload" / "requirements.txt"
    write_wheel(train, "torch", "2.13.0+cpu")
    asked.parent.mkdir()
    asked.write_text(f"tiny==1 --hash=sha256:{digest}\n")
    folder = wheels.workload_wheels(asked.parent, train, QUIET)
    assert folder and [path.name for path in folder.glob("*.whl")] == ["tiny-1-py3-none-any.whl"]
    asked.write_text(f"tiny==1 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(ContainersError, match=r"DO NOT MATCH THE HASHES[\s\S]*tiny==1") as caught:
        wheels.workload_wheels(asked.parent, train, QUIET)
    assert caught.value.where == str(asked)
