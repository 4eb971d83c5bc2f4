"""Promise: the heat map is a whole picture of its own with a figure for each pair, and the forecast a line for each
option."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.health.report import charts, page
from launch.health.report.charts import BANDWIDTH_WORDS, FIGURES_HOSTS
from tests.launch.health.test_link_checks import AB, links, names
from tests.launch.health.test_page import document, forecast

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.slow
def test_the_picture_is_a_whole_svg_with_a_figure_for_each_pair_and_needs_no_page() -> None:
    hosts = names(32)
    picture = charts.heatmap_svg(document(hosts=hosts, links=links(hosts, error={AB: "refused"})))
    assert picture
    root = ElementTree.fromstring(picture)
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert words.count("0.941") == 32 * 31 - 1 and words.count("broken") == 2  # a cell, and the legend
    assert {"h1", "h32", *BANDWIDTH_WORDS} <= set(words)
    assert "Bandwidth in Gbit/s, inventory/hosts.yml, 2026-08-01 12:00 UTC" in words
    assert "var(" not in picture and "#ffffff" in picture  # its own colours, on white


@pytest.mark.slow
def test_a_slow_pair_is_bold_and_of_the_colour_of_its_class() -> None:
    root = ElementTree.fromstring(charts.heatmap_svg(document()) or "")
    bold = [text.text for text in root.iter(f"{SVG}text") if text.get("font-weight") == "bold"]
    assert "0.094" in bold and "0.941" not in bold
    labelled = {path.get("aria-label"): path.get("fill") for path in root.iter(f"{SVG}path") if path.get("aria-label")}
    title = "h1 -> h2: 0.094 Gbit/s, round trip 0.20 ms, path MTU 1500 bytes"
    assert labelled[title] == "#b3401b"


@pytest.mark.slow
def test_with_very_many_hosts_cells_have_no_figures_and_are_still_all_there() -> None:
    hosts = names(FIGURES_HOSTS + 1)
    picture = charts.heatmap_svg(document(hosts=hosts, links=links(hosts)))
    assert picture and "0.941<" not in picture and f"h{FIGURES_HOSTS + 1}" in picture
    assert len(re.findall(r'<path d="M\d+,\d+h12v12h-12Z"', picture)) == len(hosts) * (len(hosts) - 1)


def test_the_chart_has_a_line_for_each_option_and_the_ideal_over_all_of_them() -> None:
    figure = charts.forecast(forecast([1, 2, 3])["rows"])
    assert figure and [entry.name for entry in figure.key] == ["ideal", "ddp", "powersgd"]
    values = figure.spec["data"]["values"]
    by_line = {name: [v["y"] for v in values if v["line"] == name] for name in ("ideal", "ddp", "powersgd")}
    assert by_line == {"ideal": [128, 256, 384], "ddp": [128, 230.4, 345.6], "powersgd": [128, 179.2, 268.8]}
    assert figure.spec["encoding"]["x"]["axis"]["values"] == [1, 2, 3]
    assert "images/s" in str(figure.spec["encoding"]["y"]) and figure.spec["encoding"]["x"]["title"] == "hosts"


def test_one_number_of_hosts_has_no_chart() -> None:
    assert charts.forecast(forecast([3])["rows"]) is None and charts.forecast([]) is None


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "nodes": st.integers(1, 40),
                "option": st.sampled_from(("a", "b", "<c>", "\x00")),
                "images_per_second": st.floats(0, 1e9),
            }
        )
    )
)
def test_a_chart_is_made_of_whatever_figures(rows: list[dict[str, float]]) -> None:
    figure = charts.forecast(rows)
    if figure is not None:
        assert len(figure.key) == len({row["option"] for row in rows}) + 1


@pytest.mark.parametrize(
    ("mbits", "wanted"),
    [(100, "q0"), (300, "q1"), (600, "q2"), (1000, "q3"), (1250, "q3"), (1300, "q4"), (0, "q0")],
)
def test_bandwidths_are_coloured_against_the_median(mbits: float, wanted: str) -> None:
    assert charts.bandwidth_class(mbits, 1000) == wanted


@pytest.mark.parametrize(("ms", "wanted"), [(0.1, "q4"), (0.2, "q3"), (0.4, "q2"), (1, "q1"), (3, "q0")])
def test_round_trips_are_coloured_against_the_median(ms: float, wanted: str) -> None:
    assert page.latency_class(ms, 0.2) == wanted
