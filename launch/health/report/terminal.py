"""A check's document in the terminal, short enough for a screen: what is wrong first, then what is right, then figures.

Whatever is left out here, or counted instead of named, is on the page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from statistics import median_low
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from launch.cli.units import gbits, number, some
from launch.health import link_statistics as stats
from launch.health.records import links_of
from launch.health.report import contents
from launch.health.report.contents import Document
from launch.health.verdicts import HEALTHY
from launch.network.links import Link

Values = Mapping[stats.Pair, float]
Write = Callable[[float], str]

#: Up to so many hosts all pairs are shown, and beyond that the extremes.
MATRIX_HOSTS = 8
#: Extremes, and verdicts with the same fix, that are shown one by one.
SHOWN = 3


def show(document: Document, console: Console) -> None:
    """Print the document."""
    title = f"Check of {document['inventory']}, {contents.about(document, ', ')}: {contents.level_of(document)}"
    console.print(Text(title, style="bold"))
    console.print(_problems(document))
    for line in _healthy(document):
        console.print(Text.assemble(("✓ ", "green"), line))
    _show_links(document, console)
    for line in _differences(document["sameness"] or {"rows": []}):
        console.print(Text(line))
    for key, title in (("allreduce", "All-reduce"), ("forecast", "Forecast")):
        part = document[key]
        if part is None:
            console.print(Text(f"{title}: {contents.LEFT_OUT[key]}", style="dim"))
        elif not part["rows"]:
            console.print(Text(f"{title}: {part.get('note') or part.get('recommendation')}"))
    if (forecast := document["forecast"]) and forecast["rows"]:
        console.print(_forecast_table(forecast["rows"]))
        console.print(Text(forecast["note"], style="dim"))
        console.print(Text(forecast["recommendation"], style="bold"))


def _problems(document: Document) -> Table:
    """Errors, incomplete checks and warnings. Those of several hosts, or pairs, with the same fix stand together."""
    wrong = contents.by_gravity(document)
    groups = stats.grouped(((entry["level"], entry["check"], _fix_of_anyone(entry)), entry) for entry in wrong)
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for entries in groups.values():
        first = entries[0]
        sign, style = contents.SIGNS[first["level"]]
        where, lines = first["where"], [first["what"]]
        if len(entries) > 1:
            names = [entry["where"].removeprefix("host ") for entry in entries]
            where = f"{len(names)} {'pairs' if ' -> ' in where else 'hosts'}"
            if len({entry["what"] for entry in entries}) == 1:
                lines = [f"{some(names, 12)}: {first['what']}"]
            else:
                shown = list(zip(names, entries, strict=True))[:SHOWN]
                lines = [e["what"] if f"{name} -> " in e["what"] else f"{name}: {e['what']}" for name, e in shown]
                lines += [f"{len(names) - SHOWN} more: {some(names[SHOWN:])}"] if names[SHOWN:] else []
        place = first["check"] if where == "cluster" else f"{first['check']}, {where}"
        what = Text(f"{place}: " + "\n".join(lines))
        if first["fix"]:
            same = all(entry["fix"] == first["fix"] for entry in entries)
            what.append(f"\nfix: {first['fix']}{'' if same else '; the others likewise'}", style="dim")
        table.add_row(Text(f"{sign} {first['level']}", style=style), what)
    return table


def _fix_of_anyone(entry: Mapping[str, Any]) -> str:
    """A verdict's fix without the names of its hosts, so that the same fix of several hosts is found."""
    names = re.split(" -> |, ", entry["where"].removeprefix("host "))
    return re.sub("|".join(rf"\b{re.escape(name)}\b" for name in names), "", entry["fix"])


def _healthy(document: Document) -> Iterator[str]:
    """One line with the checks that are healthy on all hosts, and a line for each healthy check of the cluster."""
    hosts = document["hosts"]
    healthy = [entry for entry in document["verdicts"] if entry["level"] == HEALTHY]
    places = stats.grouped((e["check"], e["where"]) for e in healthy if e["where"].startswith("host "))
    wrong = {entry["check"] for entry in contents.by_gravity(document)}
    checks = [check for check, own in places.items() if len(set(own)) == len(hosts) and check not in wrong]
    if checks:
        where = f"on all {len(hosts)} hosts" if len(hosts) > 1 else f"on {hosts[0]}"
        yield f"healthy {where}: {', '.join(checks)}"
    for entry in healthy:
        if entry["where"] == "cluster":
            yield f"{entry['check']}: {entry['what']}"


def _differences(sameness: Mapping[str, Any]) -> Iterator[str]:
    """A line for each property in which hosts differ."""
    for row in sameness["rows"]:
        of_hosts = zip(sameness["hosts"], row["values"], strict=True)
        values = stats.grouped((contents.brief(value), host) for host, value in of_hosts if host in row["odd"])
        if values:
            odd = "; ".join(f"{value} on {some(hosts, SHOWN)}" for value, hosts in values.items())
            yield f"differs: {row['property']}: {odd}; {contents.brief(row['majority'])} on the other hosts"


def _show_links(document: Document, console: Console) -> None:
    """Bandwidths and round trips: all pairs where that fits, else the extremes."""
    links, hosts = links_of(document), document["hosts"]
    if not links:
        return

    def show_pairs(
        values: Values, bad: Sequence[stats.Pair], blamed: stats.Blame, write: Write, title: str, extremes: str
    ) -> None:
        if len(hosts) <= MATRIX_HOSTS:
            table = _link_table(links, hosts, values, set(bad), write)
            wanted = Measurement.get(console, console.options.update(max_width=1000), table).maximum
            if wanted <= console.width:
                console.print(Text(title, style="italic"), table, sep="\n")
                return
        explained = {pair for pairs in blamed.explained.values() for pair in pairs}  # of these hosts all has been said
        rest = [pair for pair in values if pair not in explained]
        few = sorted(rest, key=values.__getitem__, reverse=extremes.startswith("longest"))[:SHOWN]
        console.print(Text(f"{extremes}: {', '.join(f'{stats.arrow(pair)} {write(values[pair])}' for pair in few)}"))

    values = stats.bandwidths(links)
    found = stats.slow(values)
    if found.typical is None:
        console.print(Text(f"Bandwidth: {contents.LEFT_OUT['bandwidth']}", style="dim"))
    else:
        usual = gbits(found.typical)
        title = f"Bandwidth in Gbit/s from row to column, median {usual} (* slow)"
        extremes = f"slowest pairs in Gbit/s (median {usual})"
        show_pairs(values, found.pairs, found.blame, gbits, title, extremes)
    trips = stats.round_trips(links)
    high = stats.high_latency_pairs(trips)
    if trips:
        usual = number(stats.typical(trips, median_low) or 0)
        title = f"Round trip in ms, opened by the row's host, median {usual} (* high latency)"
        extremes = f"longest round trips in ms (median {usual})"
        show_pairs(trips, high, stats.blame(high, list(trips)), number, title, extremes)


def _link_table(
    links: Sequence[Link], hosts: Sequence[str], values: Values, marked: Collection[stats.Pair], write: Write
) -> Table:
    """All pairs' figures, from the row's host to the column's; marked ones with a star as well as by colour."""
    errors = {stats.ends(link) for link in links if link.error is not None}

    def cell(pair: stats.Pair) -> Text:
        if pair in values:
            text = write(values[pair])
            return Text(f"{text}*", style="bold yellow") if pair in marked else Text(text)
        return Text("broken", style="bold red") if pair in errors else Text("?", style="dim")

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", style="bold")
    for host in hosts:
        table.add_column(Text(host), justify="right", min_width=6)
    for source in hosts:
        cells = (Text("-", style="dim") if source == target else cell((source, target)) for target in hosts)
        table.add_row(Text(source), *cells)
    return table


def _forecast_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The option asked for on 1, 2, 4, ... and all hosts, and the other options on all hosts."""
    counts, asked = {row["nodes"] for row in rows}, rows[0]["option"].removesuffix(" *")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in contents.FORECAST_COLUMNS:
        table.add_column(name, justify="left" if name == "option" else "right")
    for row in rows:
        listed = len(counts) <= SHOWN or row["nodes"].bit_count() == 1
        if row["nodes"] == max(counts) or (listed and row["option"].removesuffix(" *") == asked):
            table.add_row(*map(Text, contents.forecast_cells(row)))
    return table
