"""Promise: a check's page is one well-formed file that needs nothing else, and shows every figure."""

from __future__ import annotations

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

from launch.health import records
from launch.health.report import charts, contents
from launch.health.report import page as pages
from launch.health.report.charts import FIGURES_HOSTS
from launch.health.verdicts import ERROR, HEALTHY, INCOMPLETE, WARNING, Verdict
from launch.page import drawing
from tests.launch.health.test_link_checks import AB, H3, links, names, of

DIGEST = "sha256:" + "ab12" * 16
SAMENESS = {
    "hosts": H3,
    "rows": [
        {"property": "image", "values": [DIGEST] * 3, "odd": [], "level": HEALTHY, "majority": DIGEST},
        {
            "property": "torch",
            "values": ["2.13.0", "2.12.1", "2.13.0"],
            "odd": ["h2"],
            "level": ERROR,
            "majority": "2.13.0",
        },
        {"property": "driver", "values": ["?", "?", "?"], "odd": [], "level": HEALTHY, "majority": "?"},
    ],
}
ALLREDUCE = {
    "rows": [
        {"bytes": 2**20, "seconds": 0.0091, "bus_mbits": 922.0},
        {"bytes": 2**27, "seconds": 1.16, "bus_mbits": 926.0},
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
    return {"rows": rows, "recommendation": "Take powersgd on 3 hosts.", "note": "Without evaluation."}


def document(**changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "inventory": "inventory/hosts.yml",
        "network": "10.78.0.0/24",
        "hosts": H3,
        "links": links(H3, {AB: 94}, error={("h3", "h2"): "timed out"}),
        "verdicts": [
            Verdict("links", "cluster", HEALTHY, "5 of 6 pairs work"),
            Verdict("bandwidth", "h1 -> h2", WARNING, "0.094 Gbit/s", "check the cable"),
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
        if {"style", "script"} & set(self.open):
            return
        self.text.append(data)
        if "h2" in self.open:
            self.heading += data
        elif self.open and ("td" in self.open or "th" in self.open):
            self.rows[self.heading][-1][-1] += data


def outline(made: dict[str, Any]) -> Outline:
    return parse(pages.page(made))


def parse(html: str) -> Outline:
    """The outline of a page whose elements are closed in order."""
    parsed = Outline()
    parsed.feed(html)
    parsed.close()
    assert parsed.open == []
    return parsed


def test_the_page_shows_every_figure_in_its_place() -> None:
    rows = outline(document()).rows
    wrong = rows["What is wrong"]
    assert [row[0] for row in wrong[1:]] == ["✗ error", "? incomplete", "! warning"]
    assert wrong[1][3] == "timed outfix: open the port" and wrong[1][2] == "h3 -> h2"
    assert rows["What is right"][1:] == [["links", "5 of 6 pairs work"]]
    assert rows["Bandwidth"] == [
        ["from \\ to", "h1", "h2", "h3"],
        ["h1", "-", "0.094", "0.941"],
        ["h2", "0.941", "-", "0.941"],
        ["h3", "0.941", "broken", "-"],
    ]
    assert rows["Round trip"][1] == ["h1", "-", "0.20", "0.20"]
    assert rows["Sameness"][2] == ["torch", "2.13.0", "=", "≠ 2.12.1", "="]
    assert rows["All-reduce"][1:] == [["1", "0.00910", "0.922"], ["128", "1.16", "0.926"]]
    assert rows["Forecast"][1] == ["1", "ddp", "0.500", "128", "0.90 x", "90%"]


def test_slow_and_broken_cells_are_marked_and_titled() -> None:
    html = pages.page(document())
    title = "h1 -&gt; h2: 0.094 Gbit/s, round trip 0.20 ms, path MTU 1500 bytes"
    assert (
        f'<td class="q0 bad" title="{title}">0.094</td>' in html and f'<td class="q3" title="{title}">0.20</td>' in html
    )
    assert html.count('<td class="qx" title="h3 -&gt; h2: broken: timed out">broken</td>') == 2


def test_the_page_needs_nothing_from_elsewhere() -> None:
    html = pages.page(document())
    assert_self_contained(html)


def assert_self_contained(html: str) -> None:
    """Nothing in a page leads out of it but links that a reader may follow to the run's own files."""
    parsed = parse(html)
    assert {tag for tag, _ in parsed.tags}.isdisjoint({"img", "iframe", "object", "embed", "base", "form"})
    for tag, attributes in parsed.tags:
        assert not {"src", "srcset", "onclick", "onload", "onerror"} & set(attributes)
        assert not re.match(r"[a-z]+:|/", attributes.get("href") or "") or (tag, attributes["href"]) == (
            "link",
            "data:,",
        )
    ours = re.sub(
        r"<script>\(\(\) => .*?</script>", "", html, flags=re.DOTALL
    )  # without Vega, whose own names they are
    assert "url(" not in ours and "@import" not in ours and "fetch(" not in ours
    assert set(re.findall(r"https?://[^\"'<\s]+", ours)) <= {drawing.VEGA_LITE}


def tags(html: str) -> list[str]:
    return [tag for tag, _ in parse(html).tags]


NASTY = "</td><script>alert('1')</script>\"&\x00"


def test_everything_is_escaped() -> None:
    hosts = ["h1", NASTY]
    same = {
        "hosts": hosts,
        "rows": [{"property": NASTY, "values": [NASTY, "1"], "odd": [NASTY], "level": ERROR, "majority": NASTY}],
    }
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
    html = pages.page(made)
    assert tags(html) == tags(pages.page(made | {"inventory": "plain"})) and "<script>alert" not in html
    assert "&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;" in html and "\\u003cscript\\u003e" in html
    picture = charts.heatmap_svg(made)
    assert picture and "script" not in {e.tag.rpartition("}")[2] for e in ElementTree.fromstring(picture).iter()}


@given(st.dictionaries(st.sampled_from(("sameness", "allreduce", "forecast", "links", "verdicts")), st.just(None)))
def test_every_part_may_be_left_out(left: dict[str, None]) -> None:
    made = document() | {key: [] if key in ("links", "verdicts") else None for key in left}
    text = "".join(outline(made).text)
    for key in left:
        if key in contents.LEFT_OUT:
            assert contents.LEFT_OUT[key].replace("`", "") in text
    assert contents.level_of(made) == (INCOMPLETE if "verdicts" in left else ERROR)


def test_without_bandwidths_there_are_round_trips_and_words_how_to_get_bandwidths() -> None:
    made = document(links=links(H3, usual=None))
    parsed = outline(made)
    assert contents.LEFT_OUT["bandwidth"].replace("`", "") in "".join(parsed.text) and charts.heatmap_svg(made) is None
    assert parsed.rows["Round trip"][1] == ["h1", "-", "0.20", "0.20"]


def test_what_is_healthy_on_many_hosts_is_one_row_for_each_check() -> None:
    hosts = names(30)
    clocks = [Verdict("clock", f"host {host}", HEALTHY, "clock within 0.01 s of this machine's") for host in hosts]
    disks = [Verdict("disk", f"host {host}", HEALTHY, f"{n} GiB free") for n, host in enumerate(hosts)]
    rows = outline(document(verdicts=[*clocks, *disks])).rows
    assert "What is wrong" not in rows and [row[0] for row in rows["What is right"][1:]] == ["clock", "disk"]
    assert "h30" in rows["What is right"][1][1] and "29 GiB free (h30)" in rows["What is right"][2][1]


@pytest.mark.slow
def test_the_links_of_256_hosts_are_drawn_in_linear_time() -> None:
    """65,280 pairs: work that grows with the square of their number would take many minutes."""
    hosts = names(256)
    many = links(hosts, of("h7", 256, 94.0), error=dict.fromkeys(of("h200", 256, 0), "timed out"))
    made = document(hosts=hosts, links=many, sameness=None, forecast=None)
    assert len(pages.page(made)) < 1_000_000
    spec = charts.heatmap(made)
    assert spec and len(spec["data"]["values"]) == 256 * 255


@pytest.mark.slow
@pytest.mark.parametrize("count", [FIGURES_HOSTS, FIGURES_HOSTS + 1])
def test_of_very_many_hosts_the_worst_pairs_are_listed_and_every_host_has_a_row(count: int) -> None:
    hosts = names(count)
    many = links(hosts, of("h7", count, 94.0, out=False), {AB: 9.0}, error={("h9", "h8"): "timed out"})
    sameness = {
        "hosts": hosts,
        "rows": [{"property": "torch", "values": ["1"] * count, "odd": ["h3"], "level": ERROR, "majority": "2"}],
    }
    rows = outline(document(hosts=hosts, links=many, sameness=sameness)).rows
    if count <= FIGURES_HOSTS:
        assert len(rows["Bandwidth"]) == count + 1 and len(rows["Bandwidth"][1]) == count + 1
        assert len(rows["Sameness"][0]) == 2 + count
        return
    bandwidth, trips = rows["Bandwidth"], rows["Round trip"]
    assert bandwidth[1] == ["h9 -> h8", "broken: timed out"] and bandwidth[2][1].startswith("0.094 Gbit/s, ")
    assert [row[0] for row in trips[1:3]] == ["h9 -> h8", "h1 -> h2"] and "round trip 9.0 ms" in trips[2][1]
    own = bandwidth[2 + pages.LISTED_PAIRS :]
    assert own[0] == ["h7", "0.941", "0.094"] and {row[0] for row in own} == set(hosts)
    assert rows["Sameness"] == [["property", "most hosts", "h3"], ["torch", "2", "≠ 1"]]
    text = "".join(outline(document(hosts=hosts, links=many, sameness=sameness)).text)
    assert f"{count * (count - 1) - pages.LISTED_PAIRS} more pairs are in the record" in text
    assert f"Of {count} hosts, 1 differ" in text


def test_of_very_many_hosts_not_everything_healthy_is_a_line() -> None:
    hosts = names(FIGURES_HOSTS + 1)
    disks = [Verdict("disk", f"host {host}", HEALTHY, f"{n} GiB free") for n, host in enumerate(hosts)]
    clocks = [Verdict("clock", f"host {host}", HEALTHY, "in time") for host in hosts]
    clock, disk = outline(document(hosts=hosts, links=[], verdicts=[*clocks, *disks], sameness=None)).rows[
        "What is right"
    ][1:]
    assert f"h{pages.HEALTHY_HOSTS} and {len(hosts) - pages.HEALTHY_HOSTS} more" in clock[1]
    assert f"and so on {len(hosts) - pages.HEALTHY_LINES} more hosts" in disk[1] and "64 GiB" not in disk[1]


def test_files_are_written_and_an_old_picture_does_not_stay(tmp_path: Path) -> None:
    page, picture = tmp_path / "deep" / "report.html", tmp_path / "deep" / "heatmap.svg"
    assert pages.write_html(page, document()) == [page, picture]
    assert ElementTree.parse(picture)
    assert pages.write_html(page, document(links=links(H3, usual=None))) == [page]
    assert sorted(path.name for path in page.parent.iterdir()) == ["report.html"]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(0, "0"), (16, "16"), (0.00912, "0.00912"),
     (23456.7, "23457"), (1.5, "1.50"), (999.9, "1000")],
)  # fmt: skip
def test_figures_have_three_digits_and_no_exponent(value: float, wanted: str) -> None:
    assert contents.figure(value) == wanted


def test_the_control_machine_needs_neither_torch_nor_matplotlib_and_draws_only_when_asked() -> None:
    heavy = "('torch', 'matplotlib', 'numpy', 'vl_convert')"
    code = f"import sys, launch.health.report.page; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"
