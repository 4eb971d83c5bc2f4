"""Promise: pictures are whole SVG files whose figures are readable, in light and in dark."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.health.report import charts, page
from tests.launch.health.test_link_checks import AB, links, names
from tests.launch.health.test_page import document, forecast


def test_the_picture_is_a_whole_svg_with_a_cell_for_each_pair() -> None:
    hosts = names(32)
    picture = charts.heatmap_svg(document(hosts=hosts, links=links(hosts, error={AB: "refused"})))
    assert picture
    root = ElementTree.fromstring(picture)
    space = {"s": "http://www.w3.org/2000/svg"}
    assert len(root.findall("s:g", space)) == 32 * 31
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("0.941") == 32 * 31 - 1 and words.count("broken") == 2  # a cell, and the legend
    assert {"h1", "h32"} <= set(words)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert 0 <= float(box.get("x", "0")) <= width - float(box.attrib["width"])
        assert 0 <= float(box.get("y", "0")) <= height - float(box.attrib["height"])


def chart(rows: list[dict[str, Any]]) -> ElementTree.Element:
    return ElementTree.fromstring(charts.forecast_svg(rows))


def test_the_chart_has_a_line_for_each_option_and_the_ideal() -> None:
    root = chart(forecast([1, 2, 3])["rows"])
    flat = [{"nodes": n, "option": "ddp", "images_per_second": 128.0} for n in (1, 8)]
    assert all(float(e.attrib["y2"]) >= 0 for e in chart(flat).iter("{http://www.w3.org/2000/svg}line"))
    space = "{http://www.w3.org/2000/svg}"
    lines = [
        [tuple(map(float, p.split(","))) for p in e.attrib["points"].split()] for e in root.iter(f"{space}polyline")
    ]
    assert len(lines) == 2 and all(len(line) == 3 for line in lines)
    (ideal,) = [e for e in root.iter(f"{space}line") if e.get("class") == "ideal" and len(e)]
    assert 0 <= float(ideal.attrib["y2"]) <= min(y for line in lines for _, y in line)  # nothing is above it at the end
    assert "ddp, 2 hosts: 230 images/s" in [e.text for e in root.iter(f"{space}title")]


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "nodes": st.integers(1, 40),
                "option": st.sampled_from(("a", "b", "<c>")),
                "images_per_second": st.floats(0, 1e9),
            }
        )
    )
)
def test_the_chart_stays_in_its_frame_whatever_the_figures(rows: list[dict[str, Any]]) -> None:
    svg = charts.forecast_svg(rows)
    if not svg:
        return
    root = ElementTree.fromstring(svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for dot in root.iter("{http://www.w3.org/2000/svg}circle"):
        assert 0 <= float(dot.attrib["cx"]) <= width and 0 <= float(dot.attrib["cy"]) <= height


def contrast(one: str, other: str) -> float:
    """The contrast of two colours as WCAG 2 defines it (relative luminance of sRGB)."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("entry", charts.SCALE, ids=lambda entry: entry[0])
def test_figures_are_readable_on_every_colour_in_light_and_dark(entry: tuple[str, str, str, str, str]) -> None:
    _, light, ink, dark, dark_ink = entry
    assert contrast(light, ink) >= 4.5 and contrast(dark, dark_ink) >= 4.5


@pytest.mark.parametrize("pair", charts.LINES)
def test_lines_stand_out_in_light_and_dark(pair: tuple[str, str]) -> None:
    assert contrast(pair[0], "#ffffff") >= 3 and contrast(pair[1], "#14191e") >= 3


@pytest.mark.parametrize(
    ("mbits", "wanted"),
    [(100, "q0"), (300, "q1"), (600, "q2"), (1000, "q3"), (1250, "q3"), (1300, "q4"), (0, "q0")],
)
def test_bandwidths_are_coloured_against_the_median(mbits: float, wanted: str) -> None:
    assert charts.bandwidth_class(mbits, 1000) == wanted


@pytest.mark.parametrize(("ms", "wanted"), [(0.1, "q4"), (0.2, "q3"), (0.4, "q2"), (1, "q1"), (3, "q0")])
def test_round_trips_are_coloured_against_the_median(ms: float, wanted: str) -> None:
    assert page.latency_class(ms, 0.2) == wanted
