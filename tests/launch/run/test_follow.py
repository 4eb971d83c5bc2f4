"""Promise: every line of every rank is shown once, whole, with host and rank before it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.hosts.ssh import LineSink
from launch.job import container
from launch.job.plan import HostPlan, Options, make_plan
from launch.run.follow import DRAIN_SECONDS, Follower, Labeller, split_label
from tests.launch.samples import cluster


def test_lines_carry_host_and_rank() -> None:
    labeller = Labeller(make_plan(cluster(1, 2), Options(), "r", 29500, "me", "now").hosts, colour=False)
    assert labeller.label("h2", "[rank1]:loss 0.5") == "h2 rank 2 | loss 0.5".replace("rank 2", "rank 1")
    assert labeller.label("h2", "torchrun says") == "h2        | torchrun says"
    assert split_label("h1", "[rank12]:x") == ("h1 rank 12", "x")
    assert split_label("h1", "[rank1]:[rank1]: Traceback") == ("h1 rank 1", "[rank1]: Traceback")
    assert split_label("h1", "[rank1]: 9% [rank2]:[rank1]:done[rank1]:") == ("h1 rank 1", " 9% [rank2]:done")


@given(
    lines=st.lists(st.text(st.characters(exclude_characters="\n\r"), max_size=8), max_size=8),
    cuts=st.lists(st.integers(0, 60), max_size=8),
)
def test_chunks_of_any_size_give_the_same_lines(lines: list[str], cuts: list[int]) -> None:
    text = "".join(f"{line}\n" for line in lines)
    got: list[str] = []
    sink = LineSink(got.append)
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    for begin, end in itertools.pairwise(edges):
        sink.write(text[begin:end])
    sink.finish()
    assert got == lines


@given(total=st.integers(0, 6), cut=st.integers(0, 30))
def test_a_dropped_connection_neither_loses_nor_repeats_a_line(total: int, cut: int) -> None:
    lines = [f"line {i}" for i in range(total)]
    text = "".join(f"{line}\n" for line in lines)
    got: list[str] = []
    sink = LineSink(got.append)
    sink.write(text[:cut])
    sink.restart()
    sink.write(text)
    sink.finish()
    assert got == lines


def test_a_log_that_cannot_be_written_is_no_lost_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Host:
        """Its connection holds: what is done over it is done once."""

        def through_drops(self, work: Callable[[], object]) -> None:
            work()

    def stream(machine: Host, host_plan: HostPlan, sink: LineSink) -> None:
        (tmp_path / "h1.log").mkdir()  # as a full disk: no line can be written there
        sink.write("[rank0]:one\n[rank0]:two\n")

    monkeypatch.setattr(container, "stream_output", stream)
    host_plan = make_plan(cluster(1), Options(), "r", 29500, "me", "now").hosts[0]
    follower = Follower.__new__(Follower)
    follower._labeller = Labeller([host_plan], colour=False)
    follower._read(Host(), host_plan, tmp_path)  # type: ignore[arg-type]
    out, err = capsys.readouterr()
    assert err.count("lacks lines from here on") == 1
    assert out == "h1 rank 0 | one\nh1 rank 0 | two\n"


def test_the_last_lines_of_many_hosts_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reader:
        def join(self, timeout: float) -> None:
            waited.append(timeout)
            now[0] += timeout

    waited: list[float] = []
    now = [100.0]
    monkeypatch.setattr("launch.run.follow.time.monotonic", lambda: now[0])
    follower = Follower.__new__(Follower)
    follower._readers = [Reader() for _ in range(64)]  # type: ignore[misc]
    follower.drain()
    assert len(waited) == 64 and sum(waited) == DRAIN_SECONDS
