"""Promise: every line of every rank is shown once, whole, with host and rank before it, in few writes."""

from __future__ import annotations

import io
import itertools
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.run.display import FOLDED_LINES, PART_BYTES, Display, Folder, Part, folded, label, whole_lines


def shown_in(pieces: list[bytes]) -> list[bytes]:
    """The lines that come of these pieces of a stream, its last one complete."""
    part, lines = Part(), b""
    for piece in pieces:
        lines += whole_lines(part, piece, 0.0)
    return (lines + whole_lines(part, b"\n" if part.data else b"", 0.0)).split(b"\n")[:-1]


def test_labels() -> None:
    assert [label("h2", stream) for stream in ("rank-12", "torchrun")] == ["h2 rank 12", "h2"]


@given(
    lines=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=8), max_size=8),
    cuts=st.lists(st.integers(0, 60), max_size=8),
)
def test_pieces_of_any_size_give_the_same_lines(lines: list[str], cuts: list[int]) -> None:
    data = "".join(f"{line}\n" for line in lines).encode()
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    assert shown_in([data[a:b] for a, b in itertools.pairwise(edges)]) == [line.encode() for line in lines]


@given(cuts=st.lists(st.integers(0, 40), max_size=6))
def test_of_a_progress_bar_its_last_form_is_a_line(cuts: list[int]) -> None:
    data = b"begin\r\n\r 5%\r 50%\r 100%\r\nend\n"
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    found = [line for line in shown_in([data[a:b] for a, b in itertools.pairwise(edges)]) if line]
    assert found == [b"begin", b" 100%", b"end"]


def test_a_bar_that_goes_on_is_shown_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(["h1"], 9, terminal=False)
    for number in range(50):
        display.show("h1", "rank-0", b"\r%d%%" % number)
    assert capsys.readouterr().out == ""
    display.show_parts(0.0)
    assert capsys.readouterr().out == "h1 rank 0 | 49%\n"


TRACE = b"Traceback (most recent call last):\n  File x\nValueError: peer\n"


def test_a_traceback_waits_for_the_cause_and_what_only_follows_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(["h1", "h2"], 9, terminal=False)
    display.show("h1", "rank-0", b"step 1\n[rank0]: " + TRACE)
    display.failing()
    display.show_parts(0.0)
    display.told()
    display.say("rank 1 on h2 failed")
    display.show("h1", "rank-0", b"more of it\n" + TRACE)
    display.show("h2", "rank-1", b"its own words\n")
    display.release()
    said = ["h1 rank 0 | step 1", "muster | rank 1 on h2 failed", "h2 rank 1 | its own words"]
    assert capsys.readouterr().out.splitlines() == said


def test_a_traceback_of_a_run_that_goes_on_or_has_no_cause_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.run.display.HOLD_SECONDS", 0.0)
    display = Display(["h1"], 9, terminal=False)
    display.show("h1", "rank-0", TRACE)
    display.show_parts()
    assert capsys.readouterr().out.count("h1 rank 0 | ") == 3
    display.failing()
    display.show("h1", "rank-0", TRACE + b"and then\n")
    display.show_parts()
    assert capsys.readouterr().out == ""
    display.release()
    assert capsys.readouterr().out.endswith("h1 rank 0 | and then\n")


def test_a_line_without_an_end_is_shown_after_a_while_and_goes_on_as_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = Display(["h1"], 9, terminal=False)
    display.show("h1", "rank-0", b"waiting ...")
    display.show_parts(60.0)
    assert capsys.readouterr().out == ""
    display.show_parts(0.0)
    display.show("h1", "rank-0", b"\nthere\n")  # the end of the line that was shown is no empty line
    assert capsys.readouterr().out == "h1 rank 0 | waiting ...\nh1 rank 0 | there\n"


def test_a_line_without_an_end_does_not_fill_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    part = Part()
    assert sum(len(whole_lines(part, b"x" * 1000, 0.0)) for _ in range(1000)) > 900_000
    assert len(part.data) <= PART_BYTES


def test_lines_of_several_streams_do_not_mix(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(["h1", "h2"], 9, terminal=False)
    display.show("h1", "rank-0", b"a ")
    display.show("h2", "rank-1", b"b\nc\n\n")
    display.show("h1", "rank-0", b"line\n")
    display.show("h2", "torchrun", b"says\n")
    assert capsys.readouterr().out == (
        "h2 rank 1 | b\nh2 rank 1 | c\nh2 rank 1 | \nh1 rank 0 | a line\nh2        | says\n"
    )


class Counting(io.StringIO):
    writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        return super().write(text)


def test_a_chatty_rank_costs_a_write_a_piece_and_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    out, pieces = Counting(), [f"line {number}\n".encode() * 5000 for number in range(20)]
    monkeypatch.setattr(sys, "stdout", out)
    display = Display(["h1"], 9, terminal=False)
    for piece in pieces:
        display.show("h1", "rank-0", piece)
    assert out.writes == len(pieces)
    assert out.getvalue() == "".join(f"h1 rank 0 | line {number}\n" * 5000 for number in range(20))
    assert all(not part.data for part in display._parts.values())


def test_what_is_no_text_is_shown_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    Display(["h1"], 9, terminal=False).show("h1", "rank-0", b"\xff\xfe ok\n")
    assert capsys.readouterr().out == "h1 rank 0 | �� ok\n"


def test_on_a_terminal_the_state_stays_below_the_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    display = Display(["h1"], 9, terminal=True)
    display.status("step 1 of 10, and more than fits")
    display.show("h1", "rank-0", b"text\n")
    display.show_parts(0.0)
    display.status("")
    clear = "\r\x1b[2K"
    status = "step 1 of 10, and m"
    assert capsys.readouterr().out == f"{clear}{status}{clear}\x1b[36mh1 rank 0\x1b[0m | text\n{status}{clear}"


def test_what_several_ranks_say_at_once_is_one_line_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(["h1", "h2"], 9, terminal=True)
    for host, rank in (("h1", 0), ("h2", 1), ("h2", 2), ("h2", 4)):
        display.show(host, f"rank-{rank}", b"begin\nready\n" + f"mine is {rank}\n".encode())
    assert capsys.readouterr().out == ""
    display.say("a word of Muster")  # stands behind what came before it
    lines = re.sub("\r|\x1b\\[[0-9]*[Km]", "", capsys.readouterr().out).splitlines()
    assert lines == [
        *("h1 rank 0, h2 rank 1-2,4 | begin", "h1 rank 0, h2 rank 1-2,4 | ready"),
        *("h1 rank 0 | mine is 0", "h2 rank 1 | mine is 1", "h2 rank 2 | mine is 2", "h2 rank 4 | mine is 4"),
        "muster | a word of Muster",
    ]


def test_without_a_terminal_lines_are_not_folded(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(["h1"], 9, terminal=False)
    for rank in (0, 1):
        display.show("h1", f"rank-{rank}", b"same\n")
    assert capsys.readouterr().out == "h1 rank 0 | same\nh1 rank 1 | same\n"


def test_who_says_the_same() -> None:
    ranks = [("h1", "rank-0"), ("h2", "rank-3"), ("h2", "rank-1"), ("h2", "rank-2"), ("h3", "torchrun")]
    assert folded(ranks) == "h1 rank 0, h2 rank 1-3, h3"


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("ab")), max_size=30))
def test_folding_loses_no_line_and_keeps_the_order_of_each_rank(said: list[tuple[int, str]]) -> None:
    folder = Folder()
    for rank, line in said:
        folder.add(("h1", f"rank-{rank}"), line, 0.0)
    lines = folder.take()
    for rank in range(4):
        assert [line for line, who in lines for one in who if one[1] == f"rank-{rank}"] == [
            line for own, line in said if own == rank
        ]
    assert len(folder) == 0


def test_many_lines_at_once_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(["h1"], 9, terminal=True)
    display.show("h1", "rank-0", b"first\n")
    display.show("h1", "rank-1", b"x\n" * (FOLDED_LINES + 1))
    out = capsys.readouterr().out
    assert out.count("| x\n") == FOLDED_LINES + 1 and out.index("first") < out.index("| x")
