"""Promise: a check's page is one well-formed file that needs nothing else, shows every figure, and is readable."""

from __future__ import annotations

import io
import math
import re
import subprocess
import sys
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from launch.health import records, report
from launch.health.verdicts import ERROR, HEALTHY, INCOMPLETE, WARNING, Verdict
from tests.launch.health.test_link_checks import AB, H3, links, names

DIGEST = "sha256:" + "ab12" * 16
SAMENESS = {
    "hosts": H3,
    "rows": [
        {"property": "image", "values": [DIGEST] * 3, "odd": [], "majority": DIGEST},
        {"property": "torch", "values": ["2.13.0", "2.12.1", "2.13.0"], "odd": ["h2"], "majority": "2.13.0"},
        {"property": "driver", "values": [None, None, None], "odd": [], "majority": None},
    ],
}
ALLREDUCE = {
    "rows": [
        {"megabytes": 1, "seconds": 0.0091, "busbw_gbytes_per_second": 0.11, "correct": True},
        {"megabytes": 128, "seconds": 1.16, "busbw_gbytes_per_second": 0.11, "correct": False},
    ],
    "note": "gloo over 10.78.0.0/24",
}


def forecast(counts: list[int], options: tuple[str, ...] = ("ddp", "powersgd")) -> dict[str, Any]:
    rows = [
        {
            "nodes": n,
            "option": option,
            "step_seconds": 0.5,
            "images_per_second": 128.0 * n * (0.9 - 0.2 * k if n > 1 else 1),
            "speedup": n * 0.9,
            "efficiency": 0.9,
        }
        for n in counts
        for k, option in enumerate(options)
    ]
    return {"rows": rows, "recommendation": "Take powersgd on 3 hosts."}


def document(**changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "kind": records.FULL,
        "inventory": "inventory/hosts.yml",
        "network": "10.78.0.0/24",
        "hosts": H3,
        "links": links(H3, {AB: 94}, error={("h3", "h2"): "timed out"}),
        "verdicts": [
            Verdict("links", "cluster", HEALTHY, "5 of 6 pairs work"),
            Verdict("bandwidth", "h1 -> h2", WARNING, "94 Mbit/s", "look at the cable"),
            Verdict("reach", "h3 -> h2", ERROR, "timed out", "open the port"),
            Verdict("xid", "host h1", INCOMPLETE, "no kernel log", "run as root"),
        ],
        "when": datetime(2026, 8, 1, 12, 0, tzinfo=UTC),
        "sameness": SAMENESS,
        "allreduce": ALLREDUCE,
        "forecast": forecast([1, 2, 3]),
    }
    return records.document(**(made | changes))


VOID = {"meta", "br", "hr", "img", "link", "input"}


class Outline(HTMLParser):
    """Checks that elements are closed in order, and collects tags, text and tables' cells by heading."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.rows: dict[str, list[list[str]]] = {}
        self.heading = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), (tag, attrs)
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "h2":
            self.heading = ""
        if tag == "tr":
            self.rows.setdefault(self.heading, []).append([])
        if tag in ("td", "th"):
            self.rows[self.heading][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert "svg" in self.open
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, (tag, self.open)
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.text.append(data)
        if "h2" in self.open:
            self.heading += data
        elif self.open and ("td" in self.open or "th" in self.open):
            self.rows[self.heading][-1][-1] += data


def outline(made: dict[str, Any]) -> Outline:
    parsed = Outline()
    parsed.feed(report.page(made))
    parsed.close()
    assert parsed.open == []
    return parsed


def test_the_page_shows_every_figure_in_its_place() -> None:
    rows = outline(document()).rows
    assert [row[0] for row in rows["Verdicts"][1:]] == ["✗ error", "? incomplete", "! warning", "✓ healthy"]
    assert rows["Verdicts"][1][3] == "timed outopen the port"
    assert rows["Bandwidth"] == [
        ["from \\ to", "h1", "h2", "h3"],
        ["h1", "-", "94", "941"],
        ["h2", "941", "-", "941"],
        ["h3", "941", "broken", "-"],
    ]
    assert rows["Round trip"][1] == ["h1", "-", "0.20", "0.20"]
    assert rows["Sameness"][2] == ["torch", "2.13.0", "=", "≠ 2.12.1", "="]
    assert rows["All-reduce"][1:] == [["1", "0.00910", "0.110", "right"], ["128", "1.16", "0.110", "WRONG"]]
    assert rows["Forecast"][1] == ["1", "ddp", "0.500", "128", "0.90 x", "90%"]


def test_slow_and_broken_cells_are_marked_and_titled() -> None:
    html = report.page(document())
    title = "h1 -&gt; h2: 94 Mbit/s, round trip 0.20 ms, path MTU 1500"
    assert f'<td class="q0 bad" title="{title}">94</td>' in html and f'<td class="q3" title="{title}">0.20</td>' in html
    assert html.count('<td class="qx" title="h3 -&gt; h2: broken: timed out">broken</td>') == 2


def test_the_page_needs_nothing_from_elsewhere() -> None:
    parsed = outline(document())
    assert {tag for tag, _ in parsed.tags}.isdisjoint({"script", "link", "img", "iframe", "object"})
    for _, attributes in parsed.tags:
        assert not {"src", "href", "onclick", "onload"} & set(attributes)
    html = report.page(document())
    assert "url(" not in html and "@import" not in html
    assert set(re.findall(r"https?://[^\"'<\s]+", html)) <= {"http://www.w3.org/2000/svg"}


NASTY = "</td><script>alert('1')</script>\"&\x00"


def test_everything_is_escaped() -> None:
    hosts = ["h1", NASTY]
    same = {"hosts": hosts, "rows": [{"property": NASTY, "values": [NASTY, 1], "odd": [NASTY], "majority": NASTY}]}
    made = document(
        hosts=hosts,
        inventory=NASTY,
        network=NASTY,
        links=links(hosts, error={("h1", NASTY): NASTY}),
        verdicts=[Verdict(NASTY, NASTY, WARNING, NASTY, NASTY)],
        sameness=same,
        allreduce=ALLREDUCE | {"note": NASTY},
        forecast=forecast([1, 2], (NASTY,)) | {"recommendation": NASTY},
    )
    assert "script" not in {tag for tag, _ in outline(made).tags}
    picture = report.heatmap_svg(made)
    assert picture and "script" not in {e.tag.rpartition("}")[2] for e in ElementTree.fromstring(picture).iter()}
    console = Console(file=io.StringIO(), width=120)
    report.terminal(made, console)


def test_terminal_markup_in_a_message_is_shown_as_it_is() -> None:
    text = printed(document(verdicts=[Verdict("x", "h1", ERROR, "bad [red]key[/red] [/]", "do [this]")]))
    assert "bad [red]key[/red] [/]" in text and "do [this]" in text


@given(st.dictionaries(st.sampled_from(("sameness", "allreduce", "forecast", "links", "verdicts")), st.just(None)))
def test_every_part_may_be_left_out(left: dict[str, None]) -> None:
    made = document() | {key: [] if key in ("links", "verdicts") else None for key in left}
    text = "".join(outline(made).text)
    for key in left:
        if key in report.LEFT_OUT:
            assert report.LEFT_OUT[key].replace("`", "") in text
    assert report.level_of(made) == (INCOMPLETE if "verdicts" in left else ERROR)
    assert printed(made)


def test_without_bandwidths_there_are_round_trips_and_how_to_get_bandwidth() -> None:
    made = document(links=links(H3, usual=None), sameness=None, allreduce=None, forecast=None)
    text = "".join(outline(made).text)
    assert report.LEFT_OUT["bandwidth"].replace("`", "") in text and report.heatmap_svg(made) is None
    assert "0.20" in printed(made)


def test_the_picture_is_a_whole_svg_with_a_cell_for_each_pair() -> None:
    hosts = names(32)
    picture = report.heatmap_svg(document(hosts=hosts, links=links(hosts, error={AB: "refused"})))
    assert picture
    root = ElementTree.fromstring(picture)
    space = {"s": "http://www.w3.org/2000/svg"}
    assert len(root.findall("s:g", space)) == 32 * 31
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("941") == 32 * 31 - 1 and words.count("broken") == 2  # a cell, and the legend
    assert {"h1", "h32"} <= set(words)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert 0 <= float(box.get("x", "0")) <= width - float(box.attrib["width"])
        assert 0 <= float(box.get("y", "0")) <= height - float(box.attrib["height"])


def charts(rows: list[dict[str, Any]]) -> ElementTree.Element:
    return ElementTree.fromstring(report.forecast_svg(rows))


def test_the_chart_has_a_line_for_each_option_and_the_ideal() -> None:
    root = charts(forecast([1, 2, 3])["rows"])
    flat = [{"nodes": n, "option": "ddp", "images_per_second": 128.0} for n in (1, 8)]
    assert all(float(e.attrib["y2"]) >= 0 for e in charts(flat).iter("{http://www.w3.org/2000/svg}line"))
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
                "images_per_second": st.one_of(
                    st.floats(0, 1e300), st.sampled_from((None, "?", math.nan, math.inf, -1.0))
                ),
            }
        )
    )
)
def test_the_chart_stands_any_figures_and_stays_in_its_frame(rows: list[dict[str, Any]]) -> None:
    svg = report.forecast_svg(rows)
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


@pytest.mark.parametrize("entry", report.SCALE, ids=lambda entry: entry[0])
def test_figures_are_readable_on_every_colour_in_light_and_dark(entry: tuple[str, str, str, str, str]) -> None:
    _, light, ink, dark, dark_ink = entry
    assert contrast(light, ink) >= 4.5 and contrast(dark, dark_ink) >= 4.5


@pytest.mark.parametrize("pair", report.LINES)
def test_lines_stand_out_in_light_and_dark(pair: tuple[str, str]) -> None:
    assert contrast(pair[0], "#ffffff") >= 3 and contrast(pair[1], "#14191e") >= 3


@pytest.mark.parametrize(
    ("mbits", "wanted"),
    [(100, "q0"), (300, "q1"), (600, "q2"), (1000, "q3"), (1250, "q3"), (1300, "q4"), (0, "q0")],
)
def test_bandwidths_are_coloured_against_the_median(mbits: float, wanted: str) -> None:
    assert report.bandwidth_class(mbits, 1000) == wanted


@pytest.mark.parametrize(("ms", "wanted"), [(0.1, "q4"), (0.2, "q3"), (0.4, "q2"), (1, "q1"), (3, "q0")])
def test_round_trips_are_coloured_against_the_median(ms: float, wanted: str) -> None:
    assert report.latency_class(ms, 0.2) == wanted


def test_files_are_written_and_an_old_picture_does_not_stay(tmp_path: Path) -> None:
    page, picture = tmp_path / "deep" / "report.html", tmp_path / "deep" / "heatmap.svg"
    assert report.write_html(page, document()) == [page, picture]
    assert ElementTree.parse(picture)
    assert report.write_html(page, document(links=links(H3, usual=None))) == [page]
    assert sorted(path.name for path in page.parent.iterdir()) == ["report.html"]


def printed(made: dict[str, Any], width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width)
    report.terminal(made, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_terminal_shows_the_graver_first_then_tables_then_advice() -> None:
    text = printed(document())
    order: tuple[str, ...] = (
        "✗ error",
        "fix: open the port",
        "? incomplete",
        "! warning",
        "✓",
        "Bandwidth",
        "Round trip",
    )
    order += ("Sameness", "2.12.1*", "All-reduce", "WRONG", "gloo over", "Forecast", "Take powersgd on 3 hosts.")
    places = [text.index(words) for words in order]
    assert places == sorted(places)


def test_the_terminal_sums_up_many_hosts() -> None:
    hosts = names(20)
    same = {
        "hosts": hosts,
        "rows": [{"property": "torch", "values": ["2.12", *["2.13"] * 19], "odd": ["h1"], "majority": "2.13"}],
    }
    text = printed(document(hosts=hosts, links=links(hosts), sameness=same, forecast=forecast(list(range(1, 21)))))
    assert "h1: 2.12*" in text and "worst partner" in text
    ours = text[text.index("Forecast") :]
    assert [int(n) for n in re.findall(r"^│ +(\d+) │ ddp", ours, re.M)] == [1, 2, 4, 8, 16, 20]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(None, "-"), (float("nan"), "-"), (True, "-"), ("7", "-"), (0, "0"), (16, "16"), (0.00912, "0.00912"),
     (23456.7, "23457"), (1.5, "1.50"), (999.9, "1000")],
)  # fmt: skip
def test_figures_have_three_digits_and_no_exponent(value: object, wanted: str) -> None:
    assert report.figure(value) == wanted


def test_the_control_machine_needs_neither_torch_nor_matplotlib() -> None:
    code = "import sys, launch.health.report; print([m for m in ('torch', 'matplotlib', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
