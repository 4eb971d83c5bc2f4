"""Promise: a group is installed anew only when versions change; what cannot work is said first."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from pathlib import Path

import pytest

from launch import bootstrap


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a pyproject.toml and a .venv in which the group `control` is installed."""
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "VENV", tmp_path / ".venv")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".control").write_text(hashlib.sha256(b"[project]\n").hexdigest())
    return tmp_path


def test_an_installed_group_is_left_alone(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "_pip", lambda *words: pytest.fail("pip was run"))
    assert bootstrap.main(["control"]) == 0


@pytest.mark.slow
def test_make_asks_again_only_after_a_change_of_the_file_with_the_versions(checkout: Path) -> None:
    """make compares times: a checkout that leaves the content as it was must not be asked about for ever."""
    stamp, versions = checkout / ".venv" / ".control", checkout / "pyproject.toml"
    (checkout / "launch").mkdir()
    (checkout / "launch" / "bootstrap.py").write_text(
        "import pathlib, sys\nprint('asked', *sys.argv[1:])\npathlib.Path('.venv/.control').touch()\n"
    )
    makefile = str(Path(__file__).parents[2] / "Makefile")

    def make() -> str:
        words = ["make", "-f", makefile, "BIN=/bin", ".venv/.control"]
        return subprocess.run(words, cwd=checkout, capture_output=True, text=True, check=True).stdout

    os.utime(stamp, (time.time() - 10,) * 2)
    assert "asked control" in make() and "asked" not in make()
    os.utime(stamp, (time.time() - 10,) * 2)
    assert bootstrap.main(["control"]) == 0 and stamp.stat().st_mtime > versions.stat().st_mtime
    stamp.unlink()
    assert "asked control" in make()


def test_a_change_of_versions_installs_anew_and_a_failure_leaves_no_stamp(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("python", "pip"):
        (checkout / ".venv" / "bin").mkdir(exist_ok=True)
        (checkout / ".venv" / "bin" / name).write_text("")
    (checkout / "pyproject.toml").write_text("[project]\nname = 'new'\n")
    asked: list[tuple[str, ...]] = []
    answers = [1, 0]

    def pip(*words: str) -> int:
        asked.append(words)
        return answers[len(asked) - 1]

    monkeypatch.setattr(bootstrap, "_pip", pip)
    assert bootstrap.main(["control"]) == 1
    assert (
        asked == [("install", "--no-compile", "--group", "control")]
        and "pip could not install" in capsys.readouterr().err
    )
    assert bootstrap.main(["control"]) == 0 and bootstrap.main(["control"]) == 0
    assert len(asked) == 2


def test_without_root_a_target_that_needs_it_points_to_make_local(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.getuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(bootstrap, "_pip", lambda *words: pytest.fail("pip was run"))
    assert bootstrap.main(["--root", "control"]) == 1
    assert "needs root" in (said := capsys.readouterr().err) and "make local" in said


def test_python_without_venv_is_one_message_where_nobody_can_install_it(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("os.getuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert bootstrap.main(["train"]) == 1
    assert "apt-get install python3" in capsys.readouterr().err
