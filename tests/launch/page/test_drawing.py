"""Promises: a drawing shows what it is given, and no more points than a screen can; its program comes with the page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch import files
from launch.page import drawing
from launch.page.drawing import DRAWN_POINTS, Line, averaged, lines, whole_ticks

POINTS = [(1.0, 0.5), (2.0, 0.75)]


def test_a_point_is_drawn_where_it_lies_in_its_own_lines_colour() -> None:
    spec = lines([Line("training", "l0", POINTS), Line("held out", "l1", [(1.0, 123456.789)])], "epoch", "loss")
    assert spec["data"]["values"][1] == {"line": "training", "x": 2.0, "y": 0.75}
    assert spec["data"]["values"][2]["y"] == 123460.0  # five digits
    colour = spec["encoding"]["color"]["scale"]
    assert dict(zip(colour["domain"], colour["range"], strict=True)) == {
        "training": "var(--l0)",
        "held out": "var(--l1)",
    }


def test_long_lines_are_averaged_and_short_ones_are_left() -> None:
    long = averaged([(float(n), 1.0) for n in range(100_000)])
    assert len(long) == DRAWN_POINTS and long[0][0] == pytest.approx(124.5)
    assert averaged(POINTS) == POINTS


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1e6, 1e6)), max_size=3000))
def test_the_mean_of_a_line_survives_averaging_by_whole_pieces(points: list[tuple[float, float]]) -> None:
    found = averaged(points, 100)
    assert len(found) <= max(100, len(points) // 2 + 1)
    if points:
        assert min(y for _, y in points) <= min(y for _, y in found) + 1e-6


def test_an_axis_of_few_whole_numbers_has_nothing_between_them() -> None:
    assert whole_ticks([Line("", "l0", [(1.0, 0.0), (3.0, 0.0)])]) == {"values": [1, 2, 3]}
    assert whole_ticks([Line("", "l0", [(0.5, 0.0), (3.0, 0.0)])]) == {}
    assert whole_ticks([Line("", "l0", [(0.0, 0.0), (300.0, 0.0)])]) == {}


def test_what_is_no_number_does_not_break_the_drawing() -> None:
    spec = lines([Line("loss", "l0", [(1.0, float("nan")), (2.0, float("inf"))])], "step", "loss")
    json.loads(json.dumps(spec), parse_constant=pytest.fail)


def drawn(spec: dict[str, Any]) -> ElementTree.Element:
    return ElementTree.fromstring(drawing.picture(spec | {"width": 300, "height": 100}))


@pytest.mark.parametrize("options", [{}, {"log": True}, {"zero": True, "format": ".0~%"}, {"marked": [1.5]}])
def test_vega_lite_understands_every_way_of_drawing_lines(options: dict[str, Any]) -> None:
    root = drawn(
        lines(
            [Line("a line", "l0", POINTS), Line("ideal", "l1", POINTS, wide=False, dashed=True)],
            "epoch",
            "y",
            **options,
        )
    )
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"epoch", "y"} <= set(words)
    groups = [group for group in root.iter() if "mark-line" in (group.get("class") or "")]
    paths = [path for group in groups for path in group]
    assert [(path.get("stroke-width"), path.get("stroke-dasharray")) for path in paths] == [("2", "1,0"), ("1", "5,4")]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Another folder in the place of the project's, in which no program of the drawings is kept."""
    monkeypatch.setattr(files, "ROOT", tmp_path)
    drawing.library.cache_clear()
    yield tmp_path
    drawing.library.cache_clear()


@pytest.mark.slow
def test_the_program_of_the_drawings_is_put_together_once(elsewhere: Path) -> None:
    made = drawing.library()
    (kept,) = (elsewhere / "build" / "page").iterdir()
    assert kept.read_text() == made and "vegaEmbed" in made and "</script" not in made
    kept.write_text("kept")
    drawing.library.cache_clear()
    assert drawing.library() == "kept"


@pytest.mark.slow
def test_a_build_folder_that_cannot_be_written_does_not_matter(elsewhere: Path) -> None:
    (elsewhere / "build").write_text("a file")
    assert "vegaEmbed" in drawing.library()
