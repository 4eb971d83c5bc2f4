"""A check's document as a page: one file without scripts, fonts or pictures from elsewhere.

It follows the reader's light or dark setting. Parts that the check left out are None in the document; in their places
the page says how to get them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median_low
from typing import Any

from launch.cli.units import gbits, milliseconds, number, rate
from launch.files import write_whole
from launch.health import link_statistics as stats
from launch.health.link_statistics import Pair
from launch.health.records import links_of
from launch.health.report import contents
from launch.health.report.charts import BANDWIDTH_WORDS, LINES, SCALE, bandwidth_class, forecast_svg, heatmap_svg
from launch.health.report.contents import Document
from launch.health.verdicts import HEALTHY
from launch.network.links import Link

LATENCY_WORDS = ("above 10 x the median", "above 3 x", "above 1.5 x", "about the median", "below 2/3", "broken")
#: With more hosts than this the names above columns are vertical.
UPRIGHT_HOSTS = 12


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
    level = contents.level_of(document)
    title = f"Check of {document['inventory']}"
    sections = [
        ("What is wrong", _problems_html(document)),
        ("What is right", _healthy_html(document)),
        ("Bandwidth", _bandwidth_html(document)),
        ("Round trip", _latency_html(document)),
        ("Sameness", _part(document, "sameness", _sameness_html)),
        ("All-reduce", _part(document, "allreduce", _all_reduce_html)),
        ("Forecast", _part(document, "forecast", _forecast_html)),
    ]
    body = "\n".join(f"<section>\n<h2>{escape(name)}</h2>\n{html}\n</section>" for name, html in sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}: {escape(level)}</title>
<style>
{_style()}
</style>
</head>
<body>
<header>
<h1>{escape(title)} {_badge(level)}</h1>
<p class="quiet">{escape(contents.about(document, " · "))}</p>
</header>
{body}
</body>
</html>
"""


def _style() -> str:
    def colours(mode: int) -> str:
        heat = "".join(f"--{q[0]}:{q[1 + 2 * mode]};--{q[0]}i:{q[2 + 2 * mode]};" for q in SCALE)
        return heat + "".join(f"--l{n}:{pair[mode]};" for n, pair in enumerate(LINES))

    light = "--page:#ffffff;--ink:#1b2530;--quiet:#5a6672;--line:#d5dbe1;--band:#f4f6f8;"
    dark = "--page:#14191e;--ink:#e4e9ee;--quiet:#9aa7b3;--line:#38424c;--band:#1e252c;"
    light += "--healthy:#1d7a3e;--warning:#8a5a00;--incomplete:#7a3fa0;--error:#b3261e;"
    dark += "--healthy:#5cc98a;--warning:#f0b64a;--incomplete:#c99af0;--error:#ff8a80;"
    heat = "\n".join(f".{q[0]} {{ background: var(--{q[0]}); color: var(--{q[0]}i); }}" for q in SCALE)
    lines = "\n".join(f".l{n} {{ stroke: var(--l{n}); fill: var(--l{n}); }}" for n in range(len(LINES)))
    return f""":root {{ color-scheme: light dark; {light}{colours(0)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {dark}{colours(1)} }} }}
body {{ background: var(--page); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto;
  padding: 0 1rem; max-width: 96rem; }}
h1 {{ font-size: 1.5rem; margin: 0; }} h2 {{ font-size: 1.15rem; margin: 2rem 0 .5rem; }}
p {{ margin: .4rem 0; max-width: 70ch; }} .quiet, caption, .same {{ color: var(--quiet); }}
code {{ font-family: ui-monospace, monospace; font-size: .93em; }}
.badge {{ border: 1.5px solid currentColor; border-radius: .4em; padding: .05em .5em; font-size: .85em;
  font-weight: 600; white-space: nowrap; }}
.healthy {{ color: var(--healthy); }} .warning {{ color: var(--warning); }}
.incomplete {{ color: var(--incomplete); }} .error {{ color: var(--error); }}
.scroll {{ overflow: auto; max-height: 92vh; max-width: 100%; border: 1px solid var(--line); width: fit-content; }}
table {{ border-collapse: separate; border-spacing: 0; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .25rem .55rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }}
th {{ background: var(--band); font-weight: 600; }}
thead th {{ position: sticky; top: 0; z-index: 2; vertical-align: bottom; }}
tbody th, thead th:first-child {{ position: sticky; left: 0; z-index: 1; white-space: nowrap; }}
thead th:first-child {{ z-index: 3; }} .figures td, .figures thead th {{ text-align: right; }}
.scroll .figures :is(td, th):nth-child(2) {{ text-align: left; }} .where {{ white-space: nowrap; }}
.fix {{ display: block; color: var(--quiet); }}
.heat td {{ text-align: right; min-width: 2.6em; padding: .25rem .35rem; border-right: 1px solid var(--page); }}
.heat thead th {{ text-align: right; }} .many {{ font-size: .8rem; }} .many td {{ padding: .2rem .25rem; }}
.many thead th {{ text-align: center; }}
.upright {{ writing-mode: vertical-rl; transform: rotate(180deg); white-space: nowrap; }}
.bad {{ font-weight: 700; text-decoration: underline; text-underline-offset: 2px; }} .odd {{ font-weight: 700; }}
.legend {{ display: flex; flex-wrap: wrap; gap: .35rem; margin: .5rem 0; padding: 0; list-style: none;
  font-size: .9em; }}
.legend li {{ padding: .1rem .5rem; border-radius: .25rem; }} .advice {{ font-weight: 600; }}
svg {{ max-width: 100%; height: auto; display: block; }}
svg text {{ fill: var(--ink); font: 12px system-ui, sans-serif; }} svg .axis {{ stroke: var(--line); }}
svg .ideal {{ stroke: var(--quiet); }} svg .line {{ fill: none; }}
{heat}
{lines}
@media print {{ .scroll {{ max-height: none; overflow: visible; }} td, th {{ print-color-adjust: exact; }} }}"""


def _badge(level: str) -> str:
    return f'<span class="badge {escape(level)}">{contents.SIGNS[level][0]} {escape(level)}</span>'


def _part(document: Document, key: str, show: Callable[[Mapping[str, Any]], str]) -> str:
    return show(document[key]) if document[key] else _left_out(key)


def _left_out(key: str) -> str:
    return f'<p class="quiet">{_with_code(contents.LEFT_OUT[key])}</p>'


def _with_code(words: str) -> str:
    """Escaped for HTML; text between pairs of backticks becomes code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(words))


def _note(part: Mapping[str, Any]) -> str:
    return f'<p class="quiet">{escape(part["note"])}</p>' if part.get("note") else ""


def _problems_html(document: Document) -> str:
    rows = []
    for entry in contents.by_gravity(document):
        where = escape(entry["where"]).replace(", ", "<br>")
        cells = f'<td>{escape(entry["check"])}</td><td class="where">{where}</td>'
        fix = f'<span class="fix">fix: {_with_code(entry["fix"])}</span>' if entry["fix"] else ""
        rows.append(f"<tr><td>{_badge(entry['level'])}</td>{cells}<td>{escape(entry['what'])}{fix}</td></tr>")
    if not rows:
        return f'<p class="quiet">{"Nothing." if document["verdicts"] else "Nothing was checked."}</p>'
    return _table(("level", "check", "where", "what, and what to do"), rows)


def _healthy_html(document: Document) -> str:
    """What is said of the cluster, then one row for each check with what it says of every host."""
    checks = stats.grouped((entry["check"], entry) for entry in document["verdicts"] if entry["level"] == HEALTHY)
    if not checks:
        return '<p class="quiet">Nothing.</p>'
    rows = []
    for check, entries in sorted(checks.items(), key=lambda item: item[1][0]["where"] != "cluster"):
        hosts = stats.grouped((entry["what"], entry["where"].removeprefix("host ")) for entry in entries)
        lines = "<br>".join(
            escape(what) + (f' <span class="quiet">({escape(", ".join(where))})</span>' if where != ["cluster"] else "")
            for what, where in hosts.items()
        )
        rows.append(f"<tr><td>{escape(check)}</td><td>{lines}</td></tr>")
    return _table(("check", "what"), rows)


def _table(columns: Iterable[str], rows: Iterable[str], classes: str = "", hosts: Sequence[str] = ()) -> str:
    """`rows`: as HTML. `hosts`: one more column each; the names of many hosts are vertical."""
    upright = ' class="upright"' if len(hosts) > UPRIGHT_HOSTS else ""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    head += "".join(f"<th><span{upright}>{escape(host)}</span></th>" for host in hosts)
    attribute = f' class="{classes}"' if classes else ""
    return f"<table{attribute}><thead><tr>{head}</tr></thead><tbody>\n{chr(10).join(rows)}\n</tbody></table>"


def latency_class(ms: float, usual: float) -> str:
    """The colour class of a round trip against the typical one."""
    part = ms / usual if usual else 1.0
    return "q0" if part > 10 else "q1" if part > 3 else "q2" if part > 1.5 else "q3" if part >= 2 / 3 else "q4"


def _bandwidth_html(document: Document) -> str:
    links, hosts = links_of(document), document["hosts"]
    values, found = stats.bandwidths(links), stats.slow(links)
    if found.typical is None:
        return _left_out("bandwidth" if links else "links")
    cells = {pair: (gbits(mbits), bandwidth_class(mbits, found.typical)) for pair, mbits in values.items()}
    usual = rate(found.typical)
    words = f"Gbit/s from the row's host to the column's (row -> column); median {usual}. Underlined: slow."
    return f"<p>{escape(words)}</p>{_legend(BANDWIDTH_WORDS)}{_heat(links, hosts, cells, set(found.pairs))}"


def _latency_html(document: Document) -> str:
    links, hosts = links_of(document), document["hosts"]
    values = stats.round_trips(links)
    usual = stats.typical(values, median_low)
    if usual is None:
        return '<p class="quiet">No pair answered.</p>' + _heat(links, hosts, {}, ()) if links else _left_out("links")
    cells = {pair: (number(ms), latency_class(ms, usual)) for pair, ms in values.items()}
    words = f"Milliseconds there and back, on a connection that the row's host opened; median {milliseconds(usual)}."
    heat = _heat(links, hosts, cells, set(stats.high_latency_pairs(links)))
    return f"<p>{escape(words)} Underlined: high latency.</p>{_legend(LATENCY_WORDS)}{heat}"


def _legend(words: Sequence[str]) -> str:
    entries = "".join(f'<li class="{q[0]}">{escape(text)}</li>' for q, text in zip(SCALE, words, strict=True))
    return f'<ul class="legend">{entries}</ul>'


def _heat(
    links: Sequence[Link], hosts: Sequence[str], cells: Mapping[Pair, tuple[str, str]], bad: Collection[Pair]
) -> str:
    """A heat map as a table whose headers stay in sight; `cells`: figure and colour class of the pairs that work."""
    known = {stats.ends(link): link for link in links}

    def cell(pair: Pair) -> str:
        if pair[0] == pair[1]:
            return "<td>-</td>"
        if pair not in known:
            return f'<td title="{escape(stats.arrow(pair))}: not measured">?</td>'
        text, colour = cells.get(pair, ("broken", "qx") if known[pair].error is not None else ("?", ""))
        classes = f"{colour} bad" if pair in bad else colour
        return f'<td class="{classes}" title="{escape(contents.describe(known[pair]))}">{escape(text)}</td>'

    rows = [f"<tr><th>{escape(a)}</th>{''.join(cell((a, b)) for b in hosts)}</tr>" for a in hosts]
    table = _table(["from \\ to"], rows, "heat many" if len(hosts) > UPRIGHT_HOSTS else "heat", hosts)
    return f'<div class="scroll">{table}</div>'


def _sameness_html(part: Mapping[str, Any]) -> str:
    """What most hosts have, and in each host's column `=` or the value that differs."""
    hosts = part["hosts"]
    rows = []
    for row in part["rows"]:
        cells = []
        for host, value in zip(hosts, row["values"], strict=False):
            title = f'title="{escape(f"{host}: {value}")}"'
            if host in row["odd"]:
                cells.append(f'<td class="odd {row["level"]}" {title}>≠ {escape(contents.brief(value))}</td>')
            elif value == row["majority"]:
                cells.append(f'<td class="same" {title}>=</td>')
            else:
                cells.append(f"<td {title}>{escape(contents.brief(value))}</td>")
        most = f'<td title="{escape(row["majority"])}">{escape(contents.brief(row["majority"]))}</td>'
        rows.append(f"<tr><th>{escape(row['property'])}</th>{most}{''.join(cells)}</tr>")
    table = _table(("property", "most hosts"), rows, hosts=hosts)
    return f'<div class="scroll">{table}</div>{_note(part)}'


def _figures(columns: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return _table(columns, [f"<tr>{row}</tr>" for row in cells], "figures")


def _all_reduce_html(part: Mapping[str, Any]) -> str:
    if not part["rows"]:
        return _note(part)
    rows = (
        (contents.figure(row["bytes"] / 2**20), contents.figure(row["seconds"]), gbits(row["bus_mbits"]))
        for row in part["rows"]
    )
    return _figures(("size MiB", "seconds", "bus bandwidth Gbit/s"), rows) + _note(part)


def _forecast_html(part: Mapping[str, Any]) -> str:
    words = f'<p class="advice">{escape(part["recommendation"])}</p>'
    if not part["rows"]:
        return words
    table = _figures(contents.FORECAST_COLUMNS, map(contents.forecast_cells, part["rows"]))
    return f'{words}{forecast_svg(part["rows"])}<div class="scroll">{table}</div>{_note(part)}'
