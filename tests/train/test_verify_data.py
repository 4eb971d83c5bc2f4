"""python -m train verify-data: names every bad file of a folder, with training's own decoding, and says how it is."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.train import dataset_files as disk
from train.datasets import verify
from train.datasets.decode import Job
from train.datasets.folder import FolderSource

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "train", "verify-data"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    disk.write_imagefolder(tmp_path / "data")
    return tmp_path / "data"


def spoilt(root: Path) -> dict[Path, str]:
    """path -> what its reason says"""
    cut, empty, floats = root / "train/cat/0.JPEG", root / "train/dog/more/1.JPEG", root / "val/dog/9.tif"
    cut.write_bytes(cut.read_bytes()[:300])
    empty.write_bytes(b"")
    Image.fromarray(np.ones((9, 9), np.float32)).save(floats)
    return {cut: "Truncated File Read", empty: "cannot identify image file", floats: "Pillow's mode F"}


@pytest.mark.slow
def test_good_files_are_counted_and_json_has_a_line_for_each_bad_one(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify.main(["--data-dir", str(root)]) == 0
    assert capsys.readouterr().out == "imagefolder: 16 images read, none bad\n"
    bad = spoilt(root)
    assert verify.main(["--data-dir", str(root), "--json"]) == 1
    *found, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert [Path(each["path"]) for each in found] == list(bad) and all(each["reason"] for each in found)
    assert last == {"dataset": "imagefolder", "images": 17, "bad": 3}


@pytest.mark.slow
def test_every_bad_file_is_named_with_its_reason_while_a_terminal_shows_a_bar(root: Path) -> None:
    """The list reaches its file."""
    bad = spoilt(root)
    ours, theirs = pty.openpty()
    command = [*COMMAND, "--data-dir", str(root), "--workers", "2"]
    environment = os.environ | {"TERM": "xterm"}  # in a dumb one there is no bar
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 1 << 16):
                shown += piece
        except OSError:  # Linux's word for the end of a terminal
            pass
        assert process.stdout is not None
        listed = process.stdout.read().decode()
    os.close(ours)
    *lines, last = listed.splitlines()
    assert process.returncode == 1 and "17/17" in shown.decode()
    assert last == "imagefolder: 17 images read, 3 bad"
    assert [line.split(": ")[0] for line in lines] == list(map(str, bad))
    assert all(said in line for line, said in zip(lines, bad.values(), strict=True))


@pytest.mark.parametrize("name", [name for name in disk.WRITERS if name != "imagefolder"])
def test_other_datasets_are_read_whole(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk.WRITERS[name](tmp_path)
    assert verify.main(["--dataset", name, "--data-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"{name}: ")


def test_a_dataset_that_is_wrong_as_a_whole_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk.write_mnist(tmp_path)
    path = tmp_path / "MNIST/raw/t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    for name, said in (("mnist", "after its header"), ("imagefolder", "train and ")):
        assert verify.main(["--dataset", name, "--data-dir", str(tmp_path)]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("verify-data: dataset") and said in captured.err and not captured.out


def test_plain_lines_say_how_far_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "LINE_SECONDS", 0.0)
    lines = verify.Lines(1000)
    lines.at(64, 2)
    assert capsys.readouterr().err.startswith("verify-data: 64 of 1000 images, 2 bad, ")


def test_few_tasks_wait_however_many_files_there_are() -> None:
    """Made one by one: a million names are held once, as in training, and a task holds 64 of them."""
    count = 1_000_000
    names = np.full(count, b"class/0123456789.jpg")
    numbers = np.zeros(count, dtype=np.int64)
    source, none = FolderSource(Path("train"), names, numbers, numbers), np.zeros(0, dtype=np.int64)
    job = Job(source, FolderSource(Path("val"), names[:1], none, none), None, 0, 224, False)
    coming = verify.tasks(job)
    assert iter(coming) is coming
    first, held_out = next(coming)
    assert (len(first), held_out) == (verify.FILES, False)


def test_the_command_stands_in_the_help() -> None:
    from train.settings import parser

    assert "verify-data" in parser().format_usage()
