"""A check's document as a page (templates/check.html), and its heat map as a picture.

Parts that the check left out are None in the document; in their places the page says how to get them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, median_low
from typing import Any

from launch.cli.units import gbits, milliseconds, number, rate, some
from launch.files import write_whole
from launch.health import link_statistics as stats
from launch.health.link_statistics import Pair
from launch.health.records import links_of
from launch.health.report import contents
from launch.health.report.charts import BANDWIDTH_WORDS, FIGURES_HOSTS, bandwidth_class, forecast, heatmap_svg
from launch.health.report.contents import Document
from launch.health.verdicts import HEALTHY
from launch.network.links import Link
from launch.page import render

TEMPLATE = Path(__file__).parent / "templates" / "check.html"
LATENCY_WORDS = ("above 10 x the median", "above 3 x", "above 1.5 x", "about the median", "below 2/3", "broken")
#: With more hosts than this the names above columns are vertical.
UPRIGHT_HOSTS = 12
#: Pairs that are listed where there are too many hosts for a heat map.
LISTED_PAIRS = 100
#: In how many lines so many hosts are said to be healthy in one respect, and how many of them a line names.
HEALTHY_LINES, HEALTHY_HOSTS = 8, 12


@dataclass(frozen=True)
class Cell:
    """One figure of a heat map, with its class of colour and all that is known of the pair."""

    text: str
    classes: str = ""
    title: str = ""


@dataclass(frozen=True)
class Heat:
    """A heat map as a table: rows of cells, from the row's host to the column's."""

    about: str  # the unit, and what is typical
    words: Sequence[str]  # what the classes of colour mean
    rows: Sequence[tuple[str, Sequence[Cell]]]


@dataclass(frozen=True)
class Extremes:
    """What stands in the place of a heat map of more than FIGURES_HOSTS hosts."""

    about: str  # the unit, and what is typical
    pairs: Sequence[tuple[str, str]]  # pair, all that is known of it; some broken ones first, then the worst
    left_out: int  # pairs that are not listed
    hosts: Sequence[tuple[str, str, str]]  # host, median of the pairs on which it is the first, and the second; sorted


def write_html(path: Path, document: Document) -> list[Path]:
    """Write the page to `path`, and beside it heatmap.svg where bandwidths were measured.

    Returns the files written, the page first. Raises OSError when they cannot be written.
    """
    beside, picture = path.with_name("heatmap.svg"), heatmap_svg(document)
    if picture:
        write_whole(beside, picture)
    else:
        beside.unlink(missing_ok=True)  # that of an older check would be mistaken for this one's
    write_whole(path, page(document))
    return [path, beside] if picture else [path]


def page(document: Document) -> str:
    """The whole page."""
    chart = forecast(document["forecast"]["rows"]) if document["forecast"] else None
    links = links_of(document)
    return render.page(
        TEMPLATE,
        {
            "document": document,
            "level": contents.level_of(document),
            "signs": {level: sign for level, (sign, _) in contents.SIGNS.items()},
            "about": contents.about(document, " · "),
            "wrong": contents.by_gravity(document),
            "right": _healthy(document),
            "bandwidth": _bandwidths(links, document["hosts"]),
            "round_trip": _round_trips(links, document["hosts"]),
            "sameness": _sameness(document["sameness"]) if document["sameness"] else None,
            "allreduce": _all_reduce(document["allreduce"]) if document["allreduce"] else None,
            "forecast": document["forecast"],
            "forecast_columns": contents.FORECAST_COLUMNS,
            "forecast_rows": [contents.forecast_cells(row) for row in (document["forecast"] or {"rows": ()})["rows"]],
            "chart": chart,
            "left_out": contents.LEFT_OUT,
            "upright": len(document["hosts"]) > UPRIGHT_HOSTS,
            "drawings": chart is not None,
        },
    )


def _healthy(document: Document) -> list[tuple[str, list[tuple[str, str]]]]:
    """What is said of the cluster, then for each check what it says of which hosts."""
    checks = stats.grouped((entry["check"], entry) for entry in document["verdicts"] if entry["level"] == HEALTHY)
    many, rows = len(document["hosts"]) > FIGURES_HOSTS, []
    for check, entries in sorted(checks.items(), key=lambda item: item[1][0]["where"] != "cluster"):
        hosts = stats.grouped((entry["what"], entry["where"].removeprefix("host ")) for entry in entries)
        named = HEALTHY_HOSTS if many else len(entries)
        said = [(what, "" if where == ["cluster"] else some(where, named)) for what, where in hosts.items()]
        if many and len(said) > HEALTHY_LINES:
            more = sum(map(len, list(hosts.values())[HEALTHY_LINES:]))
            said = [*said[:HEALTHY_LINES], (f"and so on {more} more hosts", "")]
        rows.append((check, said))
    return rows


def latency_class(ms: float, usual: float) -> str:
    """The colour class of a round trip against the typical one."""
    part = ms / usual if usual else 1.0
    return "q0" if part > 10 else "q1" if part > 3 else "q2" if part > 1.5 else "q3" if part >= 2 / 3 else "q4"


def _bandwidths(links: Sequence[Link], hosts: Sequence[str]) -> Heat | Extremes | str:
    """The bandwidths, or why there are none."""
    values = stats.bandwidths(links)
    found = stats.slow(values)
    if found.typical is None:
        return contents.LEFT_OUT["bandwidth" if links else "links"]
    if len(hosts) > FIGURES_HOSTS:
        return _extremes(f"Gbit/s; median {rate(found.typical)}.", links, values, gbits, lowest_first=True)
    cells = {pair: (gbits(mbits), bandwidth_class(mbits, found.typical)) for pair, mbits in values.items()}
    usual = rate(found.typical)
    words = f"Gbit/s from the row's host to the column's (row -> column); median {usual}. Underlined: slow."
    return Heat(words, BANDWIDTH_WORDS, _rows(links, hosts, cells, set(found.pairs)))


def _round_trips(links: Sequence[Link], hosts: Sequence[str]) -> Heat | Extremes | str:
    """The round trips, or why there are none."""
    values = stats.round_trips(links)
    usual = stats.typical(values, median_low)
    if not links:
        return contents.LEFT_OUT["links"]
    if len(hosts) > FIGURES_HOSTS:
        about = f"Milliseconds there and back; median {milliseconds(usual or 0)}."
        return _extremes(about, links, values, number, lowest_first=False)
    if usual is None:
        return Heat("No pair answered.", (), _rows(links, hosts, {}, ()))
    cells = {pair: (number(ms), latency_class(ms, usual)) for pair, ms in values.items()}
    words = f"Milliseconds there and back, on a connection that the row's host opened; median {milliseconds(usual)}."
    rows = _rows(links, hosts, cells, set(stats.high_latency_pairs(values)))
    return Heat(f"{words} Underlined: high latency.", LATENCY_WORDS, rows)


def _extremes(
    about: str, links: Sequence[Link], values: Mapping[Pair, float], write: Callable[[float], str], lowest_first: bool
) -> Extremes:
    """The worst pairs, and before them some that are broken; every host's medians, the worst first."""
    known = {stats.ends(link): link for link in links}
    broken = [pair for pair, link in known.items() if link.error is not None]
    worst = sorted(values, key=values.__getitem__, reverse=not lowest_first)
    listed = [*broken[: LISTED_PAIRS // 2], *worst][:LISTED_PAIRS]
    first, second = (stats.grouped((pair[end], value) for pair, value in values.items()) for end in (0, 1))

    def worse(host: str) -> float:
        medians = [median(own[host]) for own in (first, second) if host in own]
        return min(medians) if lowest_first else -max(medians)

    hosts = sorted(first.keys() | second.keys(), key=lambda host: (worse(host), host))
    rows = [(host, *(write(median(own[host])) if host in own else "?" for own in (first, second))) for host in hosts]
    pairs = [(stats.arrow(pair), contents.describe(known[pair]).partition(": ")[2]) for pair in listed]
    return Extremes(about, pairs, len(known) - len(listed), [(host, one, two) for host, one, two in rows])


def _rows(
    links: Sequence[Link], hosts: Sequence[str], cells: Mapping[Pair, tuple[str, str]], bad: Collection[Pair]
) -> list[tuple[str, list[Cell]]]:
    """`cells`: figure and colour class of the pairs that work."""
    known = {stats.ends(link): link for link in links}

    def cell(pair: Pair) -> Cell:
        if pair[0] == pair[1]:
            return Cell("-")
        if pair not in known:
            return Cell("?", title=f"{stats.arrow(pair)}: not measured")
        text, colour = cells.get(pair, ("broken", "qx") if known[pair].error is not None else ("?", ""))
        return Cell(text, f"{colour} bad" if pair in bad else colour, contents.describe(known[pair]))

    return [(source, [cell((source, target)) for target in hosts]) for source in hosts]


def _sameness(part: Mapping[str, Any]) -> dict[str, Any]:
    """What most hosts have, and in each host's column `=` or the value that differs. Of many hosts, of those alone that
    differ somewhere."""
    hosts, rows = part["hosts"], []
    odd = {host for row in part["rows"] for host in row["odd"]}
    shown = [host for host in hosts if len(hosts) <= FIGURES_HOSTS or host in odd]
    for row in part["rows"]:
        cells = []
        for host, value in zip(hosts, row["values"], strict=False):
            if len(hosts) > FIGURES_HOSTS and host not in odd:
                continue
            text, classes = contents.brief(value), ""
            if host in row["odd"]:
                text, classes = f"≠ {text}", f"odd {row['level']}"
            elif value == row["majority"]:
                text, classes = "=", "same"
            cells.append(Cell(text, classes, f"{host}: {value}"))
        most = Cell(contents.brief(row["majority"]), title=row["majority"])
        rows.append((row["property"], [most, *cells]))
    note = f"Of {len(hosts)} hosts, {len(shown)} differ." if len(shown) < len(hosts) else part.get("note")
    return {"hosts": shown, "rows": rows, "note": note}


def _all_reduce(part: Mapping[str, Any]) -> dict[str, Any]:
    rows = [
        (contents.figure(row["bytes"] / 2**20), contents.figure(row["seconds"]), gbits(row["bus_mbits"]))
        for row in part["rows"]
    ]
    return {"rows": rows, "note": part.get("note")}
