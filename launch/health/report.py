"""A check's document (launch.health.records.document) as a page, as a picture for a mail, and in the terminal.

The page is one file without scripts, fonts or pictures from elsewhere, and follows the reader's light or dark setting.
Parts that the check left out are None in the document; their place says how to get them. Judges nothing: what is slow
or odd is decided by launch.health.link_checks and whoever made the document.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median_high, median_low
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.files import write_whole
from launch.health import link_checks
from launch.health.link_checks import Pair
from launch.health.records import links_of, moment_of
from launch.health.verdicts import ERROR, HEALTHY, INCOMPLETE, LEVELS, WARNING
from launch.network.links import Link

Document = Mapping[str, Any]

#: What stands in the place of a part that was left out.
LEFT_OUT = {
    "links": "Not measured: there is one host, or no pair could be tested. `make check` measures all pairs.",
    "bandwidth": "Not measured, connection and round trip only. `make check` measures it when no run is in progress.",
    "sameness": "Not compared. `make check` compares image, versions and data of all hosts.",
    "allreduce": "Not measured. `make check` in its full form runs a short all-reduce on the real backend.",
    "forecast": "Not made. `make check` with ARGS as for `make train` foretells the speed of that training.",
}
#: A sign and a colour in the terminal for each level; the sign also stands on the page.
SIGNS = {HEALTHY: ("✓", "green"), WARNING: ("!", "yellow"), INCOMPLETE: ("?", "magenta"), ERROR: ("✗", "bold red")}
#: Hosts up to which the terminal shows the sameness matrix whole, and not only who differs.
SAMENESS_HOSTS = 5
#: Numbers of hosts up to which the terminal shows the forecast whole.
FORECAST_COUNTS = 8

#: Classes of the heat maps against the median, from bad to good: class, words, background and ink in light and in dark.
#: Orange to blue, which is told apart by the colour-blind too; every figure has a contrast of 4.5 or more.
SCALE = (
    ("q0", "#b3401b", "#ffffff", "#e0693f", "#14100e"),
    ("q1", "#f0a375", "#2b1206", "#a4542f", "#ffffff"),
    ("q2", "#f8dcc8", "#2b1206", "#5c3a2a", "#ffe9dd"),
    ("q3", "#e9edf1", "#1b2530", "#2c3640", "#e6ecf2"),
    ("q4", "#a9cdea", "#0b2237", "#1f4f78", "#e8f3fc"),
    ("qx", "#2b2b2b", "#ffffff", "#f2f2f2", "#7d0000"),
)
BANDWIDTH_WORDS = ("below 1/4 of the median", "below 1/2", "below 3/4", "about the median", "above 5/4", "broken")
LATENCY_WORDS = ("above 10 x the median", "above 3 x", "above 1.5 x", "about the median", "below 2/3", "broken")

#: Lines of the chart, in light and dark (Okabe and Ito's colours, two of them darkened or lightened for contrast).
LINES = (
    ("#0072b2", "#56b4e9"),
    ("#c04f00", "#ff9a57"),
    ("#00785a", "#35c79c"),
    ("#a8447f", "#e79bc6"),
    ("#806600", "#e6c229"),
    ("#5b4bb7", "#a99df5"),
)
DASHES = ("", "7 3", "2 3", "9 3 2 3")


# The terminal


def terminal(document: Document, console: Console) -> None:
    """Print verdicts (the graver with their fixes), tables, and the recommendation."""
    hosts, links = hosts_of(document), links_of(document)
    console.print(Text(_title(document), style="bold"))
    console.print(_verdict_table(document))
    if links:
        if link_checks.bandwidths(links):
            console.print(link_checks.bandwidth_table(links, hosts))
        else:
            console.print(Text(LEFT_OUT["bandwidth"], style="dim"))
        console.print(link_checks.latency_table(links, hosts))
    parts: tuple[tuple[str, Callable[[Mapping[str, Any]], Table]], ...] = (
        ("sameness", _sameness_table),
        ("allreduce", _allreduce_table),
        ("forecast", _forecast_table),
    )
    for key, table in parts:
        if document.get(key):
            console.print(table(document[key]))
            if document[key].get("note"):
                console.print(Text(str(document[key]["note"]), style="dim"))
        else:
            console.print(Text(f"{key}: {LEFT_OUT[key]}", style="dim"))
    advice = (document.get("forecast") or {}).get("recommendation")
    if advice:
        console.print(Text(str(advice), style="bold"))


def _title(document: Document) -> str:
    words = f"Check of {document.get('inventory', 'the cluster')}, {moment_of(document['when'])}"
    return f"{words}, network {document['network']}: {level_of(document)}"


def level_of(document: Document) -> str:
    """The gravest level of the document's verdicts; incomplete when it has none, for then nothing was checked."""
    return max((entry["level"] for entry in document.get("verdicts") or []), key=LEVELS.index, default=INCOMPLETE)


def _by_gravity(document: Document) -> list[dict[str, Any]]:
    return sorted(document.get("verdicts") or [], key=lambda entry: -LEVELS.index(entry["level"]))


def hosts_of(document: Document) -> list[str]:
    """The hosts in inventory order; those of the links where the document names none."""
    links = document.get("links") or []
    return list(document.get("hosts") or dict.fromkeys(link[end] for link in links for end in ("source", "target")))


def _verdict_table(document: Document) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", max_width=24)
    table.add_column(overflow="fold", ratio=1)
    for entry in _by_gravity(document):
        sign, style = SIGNS[entry["level"]]
        what = Text(entry["what"])
        if entry["fix"] and entry["level"] != HEALTHY:
            what.append(f"\nfix: {entry['fix']}", style="dim")
        level = sign if entry["level"] == HEALTHY else f"{sign} {entry['level']}"
        table.add_row(Text(level, style=style), Text(entry["check"]), Text(entry["where"]), what)
    return table


def _sameness_table(part: Mapping[str, Any]) -> Table:
    """All hosts' values for few hosts; for many, the value of most hosts and who differs."""
    hosts = part["hosts"]
    table = Table(title="Sameness (* differs)", title_justify="left")
    table.add_column("property", style="bold")
    whole = len(hosts) <= SAMENESS_HOSTS
    for column in hosts if whole else ("most hosts", "hosts that differ"):
        table.add_column(Text(str(column)), overflow="fold")
    for row in part["rows"]:
        odd = set(row["odd"])
        values = {
            host: Text(f"{brief(value)}*", style="bold yellow") if host in odd else Text(brief(value))
            for host, value in zip(hosts, row["values"], strict=False)
        }
        if whole:
            table.add_row(Text(row["property"]), *(values.get(host, Text("?")) for host in hosts))
        else:
            differ = [Text.assemble(f"{host}: ", values[host]) for host in hosts if host in odd and host in values]
            table.add_row(Text(row["property"]), Text(brief(row["majority"])), Text("\n").join(differ))
    return table


def _allreduce_table(part: Mapping[str, Any]) -> Table:
    table = Table(title="All-reduce on the real backend", title_justify="left")
    for name in _ALLREDUCE:
        table.add_column(name, justify="right")
    for row in part["rows"]:
        *figures, checked = _allreduce_cells(row)
        table.add_row(*figures, Text(checked, style="bold red" if checked == "WRONG" else ""))
    return table


def _forecast_table(part: Mapping[str, Any]) -> Table:
    """All rows for few hosts; for many, those of 1, 2, 4, ... and all hosts."""
    counts = sorted({row["nodes"] for row in part["rows"]})
    if len(counts) > FORECAST_COUNTS:
        counts = [n for n in counts if n & (n - 1) == 0 or n == counts[-1]]
    table = Table(title="Forecast", title_justify="left")
    for name in _FORECAST:
        table.add_column(name, justify="left" if name == "option" else "right")
    for row in part["rows"]:
        if row["nodes"] in counts:
            table.add_row(*map(Text, _forecast_cells(row)))
    return table


_ALLREDUCE = ("size MB", "seconds", "bus bandwidth GB/s", "values")
_FORECAST = ("hosts", "option", "step s", "images/s", "speed-up", "efficiency")


def _allreduce_cells(row: Mapping[str, Any]) -> list[str]:
    checked = {True: "right", False: "WRONG"}.get(row.get("correct"), "not checked")  # type: ignore[arg-type]
    figures = (figure(row.get(key)) for key in ("megabytes", "seconds", "busbw_gbytes_per_second"))
    return [*figures, checked]


def _forecast_cells(row: Mapping[str, Any]) -> list[str]:
    speedup, efficiency = finite(row.get("speedup")), finite(row.get("efficiency"))
    return [
        str(row.get("nodes", "?")),
        str(row.get("option", "?")),
        figure(row.get("step_seconds")),
        figure(row.get("images_per_second")),
        "-" if speedup is None else f"{speedup:.2f} x",
        "-" if efficiency is None else f"{efficiency:.0%}",
    ]


def finite(value: object) -> float | None:
    """A figure as a float; None for anything else, infinity and NaN included."""
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable else None  # type: ignore[arg-type]


def figure(value: object) -> str:
    """A figure in three significant digits without an exponent, `-` for none."""
    number = finite(value)
    if number is None:
        return "-"
    if number == 0 or abs(number) >= 1000:
        return f"{number:.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(number))))
    text = f"{number:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text and float(text).is_integer() else text


def brief(value: object, most: int = 24) -> str:
    """A value in a cell: long ones (digests) without their middle."""
    if value is None or value == "":
        return "?"
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 8]}…{text[-7:]}"


# The page


def write_html(path: Path, document: Document) -> list[Path]:
    """Write the page to `path`, and beside it heatmap.svg where bandwidths were measured.

    Returns the files written, the page first.

    Raises:
        OSError: when they cannot be written.
    """
    written = [path]
    picture = heatmap_svg(document)
    beside = path.with_name("heatmap.svg")
    if picture:
        write_whole(beside, picture)
        written.append(beside)
    else:
        beside.unlink(missing_ok=True)  # an older check's would be taken for this one's
    write_whole(path, page(document))
    return written


def page(document: Document) -> str:
    """The whole page."""
    level = level_of(document)
    title = f"Check of {document.get('inventory', 'the cluster')}"
    about = f"{moment_of(document['when'])} · network {document['network']} · {len(hosts_of(document))} hosts"
    form = f" · {document['kind']} form" if document.get("kind") else ""
    sections = [
        ("Verdicts", _verdicts_html(document)),
        ("Bandwidth", _bandwidth_html(document)),
        ("Round trip", _latency_html(document)),
        ("Sameness", _part(document, "sameness", _sameness_html)),
        ("All-reduce", _part(document, "allreduce", _allreduce_html)),
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
<p class="quiet">{escape(about + form)}</p>
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
h1 {{ font-size: 1.5rem; margin: 0; }}
h2 {{ font-size: 1.15rem; margin: 2rem 0 .5rem; }}
p {{ margin: .4rem 0; max-width: 70ch; }}
.quiet, caption, .same {{ color: var(--quiet); }}
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
thead th:first-child {{ z-index: 3; }}
.figures td, .figures thead th {{ text-align: right; }}
.where {{ min-width: 8em; }}
.fix {{ display: block; color: var(--quiet); }}
.heat td {{ text-align: right; min-width: 2.6em; padding: .25rem .35rem; border-right: 1px solid var(--page); }}
.heat thead th {{ text-align: right; }}
.many {{ font-size: .8rem; }} .many td {{ padding: .2rem .25rem; }} .many thead th {{ text-align: center; }}
.upright {{ writing-mode: vertical-rl; transform: rotate(180deg); white-space: nowrap; }}
.bad {{ font-weight: 700; text-decoration: underline; text-underline-offset: 2px; }}
.odd {{ color: var(--error); font-weight: 700; }}
.legend {{ display: flex; flex-wrap: wrap; gap: .35rem; margin: .5rem 0; padding: 0; list-style: none;
  font-size: .9em; }}
.legend li {{ padding: .1rem .5rem; border-radius: .25rem; }}
.advice {{ font-weight: 600; }}
svg {{ max-width: 100%; height: auto; display: block; }}
svg text {{ fill: var(--ink); font: 12px system-ui, sans-serif; }}
svg .axis {{ stroke: var(--line); }} svg .ideal {{ stroke: var(--quiet); }} svg .line {{ fill: none; }}
{heat}
{lines}
@media print {{ .scroll {{ max-height: none; overflow: visible; }} td, th {{ print-color-adjust: exact; }} }}"""


def _badge(level: str) -> str:
    return f'<span class="badge {escape(level)}">{SIGNS[level][0]} {escape(level)}</span>'


def _part(document: Document, key: str, show: Callable[[Mapping[str, Any]], str]) -> str:
    part = document.get(key)
    return show(part) if part else _left_out(key)


def _left_out(key: str) -> str:
    return f'<p class="quiet">{_with_code(LEFT_OUT[key])}</p>'


def _with_code(words: str) -> str:
    """Escaped, with what stands between backticks set as code."""
    pieces = escape(words).split("`")
    if len(pieces) % 2 == 0:
        return escape(words)
    return "".join(f"<code>{piece}</code>" if n % 2 else piece for n, piece in enumerate(pieces))


def _note(part: Mapping[str, Any]) -> str:
    return f'<p class="quiet">{escape(str(part["note"]))}</p>' if part.get("note") else ""


def _verdicts_html(document: Document) -> str:
    rows = []
    for entry in _by_gravity(document):
        fix = f'<span class="fix">{_with_code(entry["fix"])}</span>' if entry["fix"] else ""
        cells = f'<td>{escape(entry["check"])}</td><td class="where">{escape(entry["where"])}</td>'
        rows.append(f"<tr><td>{_badge(entry['level'])}</td>{cells}<td>{escape(entry['what'])}{fix}</td></tr>")
    if not rows:
        return '<p class="quiet">Nothing was checked.</p>'
    head = "".join(f"<th>{name}</th>" for name in ("level", "check", "where", "what, and what to do"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{chr(10).join(rows)}\n</tbody></table>"


# Heat maps


def bandwidth_class(mbits: float, usual: float) -> str:
    """The colour class of a bandwidth against the typical one."""
    part = mbits / usual if usual else 1.0
    return "q0" if part < 0.25 else "q1" if part < 0.5 else "q2" if part < 0.75 else "q3" if part <= 1.25 else "q4"


def latency_class(ms: float, usual: float) -> str:
    """The colour class of a round trip against the typical one."""
    part = ms / usual if usual else 1.0
    return "q0" if part > 10 else "q1" if part > 3 else "q2" if part > 1.5 else "q3" if part >= 2 / 3 else "q4"


def _bandwidth_html(document: Document) -> str:
    links, hosts = links_of(document), hosts_of(document)
    if not links:
        return _left_out("links")
    values, found = link_checks.bandwidths(links), link_checks.slow(links)
    if found.typical is None:
        return _left_out("bandwidth")
    usual = found.typical
    name, scale = link_checks.unit(usual)
    cells = {pair: (link_checks.cell(mbits, scale), bandwidth_class(mbits, usual)) for pair, mbits in values.items()}
    words = f"{name}, from the row's host to the column's; median {link_checks.rate(usual)}. Underlined: slow."
    return f"<p>{escape(words)}</p>{_legend(BANDWIDTH_WORDS)}{_heat(links, hosts, cells, set(found.pairs))}"


def _latency_html(document: Document) -> str:
    links, hosts = links_of(document), hosts_of(document)
    if not links:
        return _left_out("links")
    values = link_checks.round_trips(links)
    usual = link_checks.typical(values, median_low)
    if usual is None:
        return '<p class="quiet">No pair answered.</p>' + _heat(links, hosts, {}, set())
    cells = {pair: (link_checks.number(ms), latency_class(ms, usual)) for pair, ms in values.items()}
    median = link_checks.milliseconds(usual)
    words = f"Milliseconds, connection opened by the row's host; median {median}. Underlined: high latency."
    return f"<p>{escape(words)}</p>{_legend(LATENCY_WORDS)}{_heat(links, hosts, cells, set(link_checks.late(links)))}"


def _legend(words: Sequence[str]) -> str:
    entries = "".join(f'<li class="{q[0]}">{escape(text)}</li>' for q, text in zip(SCALE, words, strict=True))
    return f'<ul class="legend">{entries}</ul>'


def _heat(
    links: Sequence[Link], hosts: Sequence[str], cells: Mapping[Pair, tuple[str, str]], bad: Collection[Pair]
) -> str:
    """A heat map as a table whose headers stay in sight; `cells`: figure and colour class of the pairs that work."""
    known = {(link.source, link.target): link for link in links}
    upright = ' class="upright"' if len(hosts) > link_checks.MATRIX_HOSTS else ""
    head = "".join(f"<th><span{upright}>{escape(host)}</span></th>" for host in hosts)
    rows = []
    for source in hosts:
        row = []
        for target in hosts:
            pair = (source, target)
            if source == target:
                row.append("<td>-</td>")
            elif pair not in known:
                row.append(f'<td title="{escape(link_checks.arrow(pair))}: not measured">?</td>')
            else:
                text, colour = cells.get(pair, ("broken", "qx") if known[pair].error is not None else ("?", ""))
                classes = f"{colour} bad" if pair in bad else colour
                row.append(f'<td class="{classes}" title="{escape(describe(known[pair]))}">{escape(text)}</td>')
        rows.append(f"<tr><th>{escape(source)}</th>{''.join(row)}</tr>")
    many = " many" if upright else ""
    return (
        f'<div class="scroll"><table class="heat{many}"><thead><tr><th>from \\ to</th>{head}</tr></thead>'
        f"<tbody>\n{chr(10).join(rows)}\n</tbody></table></div>"
    )


def describe(link: Link) -> str:
    """All that is known of a pair in one line, for its hover title."""
    parts = [] if link.error is None else [f"broken: {link.error}"]
    if link.mbits is not None:
        parts.append(link_checks.rate(link.mbits))
    if link.rtt_ms is not None:
        parts.append(f"round trip {link_checks.milliseconds(link.rtt_ms)}")
    if link.path_mtu is not None:
        parts.append(f"path MTU {link.path_mtu}")
    return f"{link.source} -> {link.target}: {', '.join(parts) or 'not measured'}"


def heatmap_svg(document: Document) -> str | None:
    """The bandwidth heat map as a picture by itself, on white, for a mail; None without bandwidths."""
    links, hosts = links_of(document), hosts_of(document)
    values = link_checks.bandwidths(links)
    usual = link_checks.typical(values, median_high)
    if usual is None:
        return None
    name, scale = link_checks.unit(usual)
    errors = {(link.source, link.target): link for link in links}
    slow = set(link_checks.slow(links).pairs)
    colours = {q[0]: (q[1], q[2]) for q in SCALE}
    wide, high = 54, 24
    left = 20 + 7 * max(map(len, hosts))
    top, swatches = 52 + left, (190, 100, 100, 130, 100, 90)
    width = max(left + wide * len(hosts), sum(swatches)) + 20
    height = top + high * len(hosts) + 50
    title = f"Bandwidth in {name}, {document.get('inventory', '')}, {moment_of(document['when'])}"
    under = f"from the row's host to the column's; median {link_checks.rate(usual)}; bold: slow"
    parts = [
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _svg_text(10, 22, title, 'font-size="15" font-weight="bold"'),
        _svg_text(10, 40, under, 'fill="#5a6672"'),
    ]
    for n, host in enumerate(hosts):
        x, y = left + wide * n + wide // 2 + 4, top - 6
        parts.append(_svg_text(x, y, host, f'transform="rotate(-90 {x} {y})"'))
        parts.append(_svg_text(left - 6, top + high * n + 16, host, 'text-anchor="end"'))
    for row, source in enumerate(hosts):
        for column, target in enumerate(hosts):
            pair = (source, target)
            if source == target or pair not in errors:
                continue
            text, colour = "?", "q3"
            if errors[pair].error is not None:
                text, colour = "broken", "qx"
            elif pair in values:
                text, colour = link_checks.cell(values[pair], scale), bandwidth_class(values[pair], usual)
            fill, ink = colours[colour]
            weight = ' font-weight="bold"' if pair in slow else ""
            x, y = left + wide * column, top + high * row
            parts.append(
                f"<g><title>{_xml(describe(errors[pair]))}</title>"
                f'<rect x="{x}" y="{y}" width="{wide - 2}" height="{high - 2}" fill="{fill}"/>'
                + _svg_text(x + wide - 8, y + 15, text, f'text-anchor="end" fill="{ink}"{weight}')
                + "</g>"
            )
    x, y = 10, height - 32
    for (_, fill, ink, *_), words, space in zip(SCALE, BANDWIDTH_WORDS, swatches, strict=True):
        parts.append(f'<rect x="{x}" y="{y}" width="{space - 6}" height="20" fill="{fill}"/>')
        parts.append(_svg_text(x + 6, y + 14, words, f'fill="{ink}"'))
        x += space
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12">\n<title>{_xml(title)}</title>\n{inside}\n</svg>\n'
    )


def _svg_text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {more}>{_xml(words)}</text>'


def _xml(words: str) -> str:
    """Escaped, without the control characters that XML knows no way to write."""
    return escape("".join(c if c >= " " and c not in "\x7f\ufffe\uffff" else " " for c in words))


# The other parts


def _sameness_html(part: Mapping[str, Any]) -> str:
    """What most hosts have, and in each host's column `=` or the value that differs."""
    hosts = part["hosts"]
    upright = ' class="upright"' if len(hosts) > link_checks.MATRIX_HOSTS else ""
    head = "".join(f"<th><span{upright}>{escape(str(host))}</span></th>" for host in hosts)
    rows = []
    for row in part["rows"]:
        cells = []
        for host, value in zip(hosts, row["values"], strict=False):
            title = f'title="{escape(f"{host}: {value}")}"'
            if host in row["odd"]:
                cells.append(f'<td class="odd" {title}>≠ {escape(brief(value))}</td>')
            elif value == row["majority"]:
                cells.append(f'<td class="same" {title}>=</td>')
            else:
                cells.append(f"<td {title}>{escape(brief(value))}</td>")
        most = f'<td title="{escape(str(row["majority"]))}">{escape(brief(row["majority"]))}</td>'
        rows.append(f"<tr><th>{escape(row['property'])}</th>{most}{''.join(cells)}</tr>")
    table = (
        f"<table><thead><tr><th>property</th><th>most hosts</th>{head}</tr></thead>"
        f"<tbody>\n{chr(10).join(rows)}\n</tbody></table>"
    )
    return f'<div class="scroll">{table}</div>{_note(part)}'


def _plain_table(columns: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<table class="figures"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>'


def _allreduce_html(part: Mapping[str, Any]) -> str:
    table = _plain_table(_ALLREDUCE, [_allreduce_cells(row) for row in part["rows"]])
    return table.replace("<td>WRONG</td>", '<td class="odd">WRONG</td>') + _note(part)


def _forecast_html(part: Mapping[str, Any]) -> str:
    advice = part.get("recommendation")
    words = f'<p class="advice">{escape(str(advice))}</p>' if advice else ""
    table = _plain_table(_FORECAST, [_forecast_cells(row) for row in part["rows"]])
    return f'{words}{forecast_svg(part["rows"])}<div class="scroll">{table}</div>{_note(part)}'


def curves(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """By option its points (hosts, images/s), in order of hosts; rows without figures are left out."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        nodes, speed = finite(row.get("nodes")), finite(row.get("images_per_second"))
        if nodes is not None and nodes >= 1 and speed is not None and speed >= 0:
            found.setdefault(str(row.get("option", "?")), []).append((int(nodes), speed))
    return {option: sorted(points) for option, points in found.items()}


def nice_step(top: float, steps: int = 5) -> float:
    """A round distance (1, 2 or 5 times a power of ten) that divides 0..top into at most about `steps`."""
    raw = top / steps
    power = 10.0 ** math.floor(math.log10(raw))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))


def forecast_svg(rows: Iterable[Mapping[str, Any]]) -> str:
    """Images/s against the number of hosts, a line per option and the ideal one; empty without two numbers of hosts.

    Ideal is so many times the best speed of the fewest hosts.
    """
    lines = curves(rows)
    points = [point for line in lines.values() for point in line]
    counts = sorted({nodes for nodes, _ in points})
    top = max((speed for _, speed in points), default=0.0)
    if len(counts) < 2 or top < 1e-6:
        return ""
    first, last = counts[0], counts[-1]
    one = max(speed for nodes, speed in points if nodes == first) / first
    top = max(top, one * last)
    step = nice_step(top)
    top = step * math.ceil(top / step - 1e-9)
    left, right, above, below, wide, high = 70, 190, 30, 40, 440, 240

    def x(nodes: float) -> float:
        return round(left + wide * (nodes - first) / (last - first), 1)

    def y(speed: float) -> float:
        return round(above + high * (1 - speed / top), 1)

    parts = []
    for n in range(round(top / step) + 1):
        level = y(n * step)
        parts.append(f'<line class="axis" x1="{left}" y1="{level}" x2="{left + wide}" y2="{level}"/>')
        parts.append(_svg_text(left - 8, level + 4, figure(n * step), 'text-anchor="end"'))
    ticks = [n for n in counts if len(counts) <= 12 or n in (first, last) or n % 4 == 0]
    parts += [_svg_text(x(nodes), above + high + 18, str(nodes), 'text-anchor="middle"') for nodes in ticks]
    parts.append(_svg_text(left + wide / 2, above + high + 36, "hosts", 'text-anchor="middle"'))
    parts.append(_svg_text(left - 8, 14, "images/s", 'text-anchor="end"'))
    parts.append(
        f'<line class="ideal" stroke-dasharray="3 4" x1="{x(first)}" y1="{y(one * first)}" '
        f'x2="{x(last)}" y2="{y(one * last)}"><title>ideal: {figure(one)} images/s a host</title></line>'
    )
    key = [("ideal", 'class="ideal" stroke-dasharray="3 4"')]
    for n, (option, line) in enumerate(sorted(lines.items(), key=lambda item: -item[1][-1][1])):
        look = f'class="l{n % len(LINES)} line" stroke-width="2" stroke-dasharray="{DASHES[n % len(DASHES)]}"'
        path = " ".join(f"{x(nodes)},{y(speed)}" for nodes, speed in line)
        parts.append(f"<polyline {look} points={chr(34)}{path}{chr(34)}/>")
        for nodes, speed in line:
            words = f"{option}, {nodes} hosts: {figure(speed)} images/s"
            dot = f'class="l{n % len(LINES)}" cx="{x(nodes)}" cy="{y(speed)}" r="3.5"'
            parts.append(f"<circle {dot}><title>{_xml(words)}</title></circle>")
        key.append((option, look))
    for n, (option, look) in enumerate(key):
        at = above + 10 + 20 * n
        parts.append(f'<line {look} x1="{left + wide + 14}" y1="{at}" x2="{left + wide + 44}" y2="{at}"/>')
        parts.append(_svg_text(left + wide + 50, at + 4, brief(option, 20)))
    width, height = left + wide + right, max(above + high + below, above + 20 * len(key) + 10)
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="Forecast images per second by number of hosts">\n{inside}\n</svg>\n'
    )
