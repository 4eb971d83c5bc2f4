"""Promises: a rank that the kernel killed for want of memory is said to be that, with the limit and what was used; what
ranks have printed is kept, though the disk is slow."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from keeper import ranks
from keeper.output import Writer
from keeper.ranks import Memory, Outputs

GIB = 2**30
NO_LIMIT = str(2**63 - 4096)  # what version 1 has where there is none
#: Version of control groups -> files of (events, limit, peak), as the kernel names them.
FILES = {
    2: ("memory.events", "memory.max", "memory.peak"),
    1: ("memory/memory.oom_control", "memory/memory.limit_in_bytes", "memory/memory.max_usage_in_bytes"),
}
EVENTS = {
    2: "low 0\nhigh 0\nmax 41\noom 3\noom_kill {}\noom_group_kill 0\n",
    1: "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n",
}


def group(root: Path, version: int, kills: int, limit: str, peak: int | None) -> Path:
    """A control group's files of memory."""
    events, limits, peaks = (root / name for name in FILES[version])
    events.parent.mkdir(exist_ok=True)
    events.write_text(EVENTS[version].format(kills))
    limits.write_text(f"{limit}\n")
    if peak is not None:
        peaks.write_text(f"{peak}\n")
    return root


@pytest.mark.parametrize("version", [1, 2])
def test_a_kill_is_said_with_limit_and_peak(tmp_path: Path, version: int) -> None:
    limit = "1073741824"
    memory = Memory(group(tmp_path, version, 1, limit, GIB))  # one was killed before
    assert memory.out_of_memory() is None
    group(tmp_path, version, 2, limit, GIB)
    assert memory.out_of_memory() == "out of memory: killed by the kernel (limit 1.0 GiB, peak 1.0 GiB)"


@pytest.mark.parametrize(("version", "none"), [(1, NO_LIMIT), (2, "max")])
def test_without_a_limit_it_is_the_hosts_memory_that_was_full(tmp_path: Path, version: int, none: str) -> None:
    memory = Memory(group(tmp_path, version, 0, none, GIB // 1024))
    group(tmp_path, version, 1, none, GIB // 1024)
    said = memory.out_of_memory()
    assert said is not None and "limit 8589934592" not in said and "peak 0.0 GiB; something else was full" in said


def test_a_kernel_that_keeps_no_peak_is_not_said_to_have_had_room(tmp_path: Path) -> None:
    memory = Memory(group(tmp_path, 2, 0, "1073741824", None))
    group(tmp_path, 2, 1, "1073741824", None)
    assert memory.out_of_memory() == "out of memory: killed by the kernel (limit 1.0 GiB)"


def test_no_control_group_says_nothing(tmp_path: Path) -> None:
    assert Memory(tmp_path).out_of_memory() is None


@pytest.mark.parametrize(("before", "between"), [(b"", b""), (b"one\n", b""), (b"one\nin the mi", b"\n")])
def test_a_later_attempt_begins_with_a_line_of_its_own(tmp_path: Path, before: bytes, between: bytes) -> None:
    folder = tmp_path / "output"
    folder.mkdir()
    (folder / "rank-0.log").write_bytes(before)
    Outputs(folder, [0], lambda error: None, attempt=2).close()
    assert (folder / "rank-0.log").read_bytes() == before + between + b"-- attempt 2 --\n"


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [60.0, 0.2])
def test_what_was_printed_last_is_kept_though_the_disk_is_slow_or_its_loss_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    append, said = Writer.append, list[OSError]()

    def slowly(writer: Writer, data: bytes) -> None:
        time.sleep(0.7)
        append(writer, data)

    monkeypatch.setattr(ranks, "OUTPUT_SECONDS", seconds)
    monkeypatch.setattr(Writer, "append", slowly)
    outputs = Outputs(tmp_path / "output", [0], said.append)
    pipe = os.open(outputs.pipes / "rank-0", os.O_WRONLY)
    os.write(pipe, b"x" * 3 * ranks.CHUNK_BYTES)
    os.close(pipe)
    outputs.close()
    is_whole = (tmp_path / "output" / "rank-0.log").stat().st_size == 3 * ranks.CHUNK_BYTES
    assert is_whole == (not said) == (seconds == 60.0)
