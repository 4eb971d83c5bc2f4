"""The pictures of a check as SVG: the heat map of the links, which can be sent by mail, and the forecast's chart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from launch.cli.units import gbits, rate
from launch.health.link_statistics import bandwidths, ends, grouped, slow
from launch.health.records import links_of, moment_of
from launch.health.report.contents import Document, brief, describe, figure

#: Classes of the heat maps against the median, from bad to good: class, background and ink in light, the same in dark.
#: Orange to blue, which colour-blind readers can distinguish; every figure has a contrast of 4.5 or more.
SCALE = (
    ("q0", "#b3401b", "#ffffff", "#e0693f", "#14100e"),
    ("q1", "#f0a375", "#2b1206", "#a4542f", "#ffffff"),
    ("q2", "#f8dcc8", "#2b1206", "#5c3a2a", "#ffe9dd"),
    ("q3", "#e9edf1", "#1b2530", "#2c3640", "#e6ecf2"),
    ("q4", "#a9cdea", "#0b2237", "#1f4f78", "#e8f3fc"),
    ("qx", "#2b2b2b", "#ffffff", "#f2f2f2", "#7d0000"),
)
BANDWIDTH_WORDS = ("below 1/4 of the median", "below 1/2", "below 3/4", "about the median", "above 5/4", "broken")
#: Lines of the chart, in light and dark (Okabe and Ito's colours, two of them darkened or lightened for contrast).
LIGHT_LINES = ("#0072b2", "#c04f00", "#00785a", "#a8447f", "#806600", "#5b4bb7")
DARK_LINES = ("#56b4e9", "#ff9a57", "#35c79c", "#e79bc6", "#e6c229", "#a99df5")
LINES = tuple(zip(LIGHT_LINES, DARK_LINES, strict=True))
DASHES = ("", "7 3", "2 3", "9 3 2 3")


def bandwidth_class(mbits: float, usual: float) -> str:
    """The colour class of a bandwidth against the typical one."""
    part = mbits / usual if usual else 1.0
    return "q0" if part < 0.25 else "q1" if part < 0.5 else "q2" if part < 0.75 else "q3" if part <= 1.25 else "q4"


def heatmap_svg(document: Document) -> str | None:
    """The bandwidth heat map as a picture by itself on white; None without bandwidths."""
    links, hosts = links_of(document), document["hosts"]
    values, found = bandwidths(links), slow(links)
    usual = found.typical
    if usual is None:
        return None
    known = {ends(link): link for link in links}
    marked = set(found.pairs)
    colours = {q[0]: (q[1], q[2]) for q in SCALE}
    wide, high = 54, 24
    left = 20 + 7 * max(map(len, hosts))
    top, swatches = 52 + left, (190, 100, 100, 130, 100, 90)
    width = max(left + wide * len(hosts), sum(swatches)) + 20
    height = top + high * len(hosts) + 50
    title = f"Bandwidth in Gbit/s, {document['inventory']}, {moment_of(document['when'])}"
    under = f"from the row's host to the column's; median {rate(usual)}; bold: slow"
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
            if source == target or pair not in known:
                continue
            text, colour = ("broken", "qx") if known[pair].error is not None else ("?", "q3")
            if pair in values:
                text, colour = gbits(values[pair]), bandwidth_class(values[pair], usual)
            fill, ink = colours[colour]
            weight = ' font-weight="bold"' if pair in marked else ""
            x, y = left + wide * column, top + high * row
            parts.append(
                f"<g><title>{_xml(describe(known[pair]))}</title>"
                f'<rect x="{x}" y="{y}" width="{wide - 2}" height="{high - 2}" fill="{fill}"/>'
                + _svg_text(x + wide - 8, y + 15, text, f'text-anchor="end" fill="{ink}"{weight}')
                + "</g>"
            )
    x, y = 10, height - 32
    for (_, fill, ink, *_), words, space in zip(SCALE, BANDWIDTH_WORDS, swatches, strict=True):
        parts.append(f'<rect x="{x}" y="{y}" width="{space - 6}" height="20" fill="{fill}"/>')
        parts.append(_svg_text(x + 6, y + 14, words, f'fill="{ink}"'))
        x += space
    return _svg(width, height, 'font-family="sans-serif" font-size="12"', [f"<title>{_xml(title)}</title>", *parts])


def _svg(width: int, height: int, attributes: str, parts: Iterable[str]) -> str:
    frame = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {frame} {attributes}>', *parts, "</svg>\n"])


def _svg_text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {more}>{_xml(words)}</text>'


def _xml(words: str) -> str:
    """Escaped, without the control characters that XML cannot contain."""
    return escape("".join(c if c >= " " and c not in "\x7f\ufffe\uffff" else " " for c in words))


def forecast_svg(rows: Iterable[Mapping[str, Any]]) -> str:
    """Images/s against the number of hosts, a line per option and the ideal line; empty for one number of hosts.

    The ideal line is the best speed of the fewest hosts, in proportion to the number of hosts.
    """
    lines = grouped((row["option"], (row["nodes"], row["images_per_second"])) for row in rows)  # in order of hosts
    points = [point for line in lines.values() for point in line]
    counts = sorted({nodes for nodes, _ in points})
    top = max((speed for _, speed in points), default=0.0)
    if len(counts) < 2 or top < 1e-6:
        return ""
    first, last = counts[0], counts[-1]
    one = max(speed for nodes, speed in points if nodes == first) / first
    top = max(top, one * last)
    # A round distance (1, 2 or 5 times a power of ten) that divides 0..top into about five steps or fewer.
    power = 10.0 ** math.floor(math.log10(top / 5))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= top / 5 * (1 - 1e-9))
    top = step * math.ceil(top / step - 1e-9)
    left, right, above, below, wide, high = 70, 250, 30, 40, 440, 240

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
        style = f'class="l{n % len(LINES)} line" stroke-width="2" stroke-dasharray="{DASHES[n % len(DASHES)]}"'
        path = " ".join(f"{x(nodes)},{y(speed)}" for nodes, speed in line)
        parts.append(f"<polyline {style} points={chr(34)}{path}{chr(34)}/>")
        for nodes, speed in line:
            words = f"{option}, {nodes} hosts: {figure(speed)} images/s"
            dot = f'class="l{n % len(LINES)}" cx="{x(nodes)}" cy="{y(speed)}" r="3.5"'
            parts.append(f"<circle {dot}><title>{_xml(words)}</title></circle>")
        key.append((option, style))
    for n, (option, style) in enumerate(key):
        at = above + 10 + 20 * n
        parts.append(f'<line {style} x1="{left + wide + 14}" y1="{at}" x2="{left + wide + 44}" y2="{at}"/>')
        parts.append(_svg_text(left + wide + 50, at + 4, brief(option, 32)))
    width, height = left + wide + right, max(above + high + below, above + 20 * len(key) + 10)
    return _svg(width, height, 'role="img" aria-label="Forecast images per second by number of hosts"', parts)
