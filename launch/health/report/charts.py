"""The drawings of a check: the heat map of the links, a picture that can be sent by mail, and the forecast's chart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from launch.cli.units import gbits, rate
from launch.health.link_statistics import Pair, Slow, bandwidths, ends, grouped, slow
from launch.health.records import links_of, moment_of
from launch.health.report.contents import Document, brief, describe
from launch.network.links import Link
from launch.page import drawing
from launch.page.colours import LIGHT_LINES, SCALE, variable
from launch.page.drawing import Figure, Line, Spec

BANDWIDTH_WORDS = ("below 1/4 of the median", "below 1/2", "below 3/4", "about the median", "above 5/4", "broken")
CELL = (54, 24)  # pixels, wide and high
#: With more hosts than this, cells have no figures, and are small; and the page has no heat map.
FIGURES_HOSTS = 64
SMALL_CELL = (12, 12)
CHART_PIXELS = 260
OPTION_CHARACTERS = 48


def bandwidth_class(mbits: float, usual: float) -> str:
    """The colour class of a bandwidth against the typical one."""
    part = mbits / usual if usual else 1.0
    return "q0" if part < 0.25 else "q1" if part < 0.5 else "q2" if part < 0.75 else "q3" if part <= 1.25 else "q4"


def heatmap_svg(document: Document) -> str | None:
    """The bandwidth heat map as a picture by itself on white; None without bandwidths."""
    spec = heatmap(document)
    return None if spec is None else drawing.picture(spec)


def heatmap(document: Document) -> Spec | None:
    """The heat map as a drawing of its own; None without bandwidths."""
    links, hosts = links_of(document), [plain(host) for host in document["hosts"]]
    values = bandwidths(links)
    found = slow(values)
    if found.typical is None:
        return None
    words = dict(zip(SCALE, BANDWIDTH_WORDS, strict=True))
    title = f"Bandwidth in Gbit/s, {document['inventory']}, {moment_of(document['when'])}"
    under = f"from the row's host to the column's; median {rate(found.typical)}; bold: slow"
    axis = {"title": None, "domain": False, "ticks": False, "labelColor": variable("ink"), "labelLimit": 0}
    x = {"field": "to", "type": "nominal", "sort": None, "scale": {"domain": hosts}}
    y = {"field": "from", "type": "nominal", "sort": None, "scale": {"domain": hosts}, "axis": axis}
    classes = {"field": "class", "type": "nominal", "sort": None}
    colours = {"domain": list(words.values()), "range": [variable(name) for name in words]}
    inks = {"domain": list(words.values()), "range": [variable(f"{name}i") for name in words]}
    legend = {
        "orient": "bottom",
        "title": None,
        "columns": 3,
        "symbolType": "square",
        "symbolSize": 160,
        "labelLimit": 0,
    }
    legend |= {"labelColor": variable("ink"), "labelFontSize": 12, "columnPadding": 24}

    has_figures = len(hosts) <= FIGURES_HOSTS
    wide, high = CELL if has_figures else SMALL_CELL

    def figures(bold: bool) -> Spec:
        mark = {"type": "text", "fontSize": 12, "fontWeight": "bold" if bold else "normal"}
        ink = {**classes, "scale": inks, "legend": None}
        return {
            "transform": [{"filter": f"{'' if bold else '!'}datum.bad"}],
            "mark": mark,
            "encoding": {"text": {"field": "text"}, "color": ink},
        }

    return {
        "title": {"text": plain(title), "subtitle": plain(under), "anchor": "start", "frame": "bounds"},
        "data": {"values": cells(links, values, found, words, has_figures)},
        "width": {"step": wide},
        "height": {"step": high},
        "encoding": {"x": {**x, "axis": {**axis, "orient": "top", "labelAngle": -90}}, "y": y},
        "layer": [
            {
                "mark": {
                    **{"type": "rect", "stroke": variable("page"), "strokeWidth": high / 12},
                    **({} if has_figures else {"aria": False}),
                },
                "encoding": {
                    "color": {**classes, "scale": colours, "legend": legend},
                    **({"description": {"field": "what"}} if has_figures else {}),
                },
            },
            *([figures(False), figures(True)] if has_figures else []),
        ],
        "resolve": {"scale": {"color": "independent"}},
    }


def cells(
    links: Sequence[Link], values: Mapping[Pair, float], found: Slow, words: Mapping[str, str], has_figures: bool
) -> list[dict[str, Any]]:
    """A cell for each measured pair: its ends and class in words; its figure, whether it is slow, and all that is known
    where cells have figures."""
    marked = set(found.pairs)
    names, made = {host: plain(host) for link in links for host in ends(link)}, []
    for link in links:
        pair = ends(link)
        text, colour = ("broken", "qx") if link.error is not None else ("?", "q3")
        if pair in values:
            text, colour = gbits(values[pair]), bandwidth_class(values[pair], found.typical or 0)
        cell = {"from": names[pair[0]], "to": names[pair[1]], "class": words[colour]}
        more = {"text": text, "bad": pair in marked, "what": plain(describe(link))} if has_figures else {}
        made.append({**cell, **more})
    return made


def plain(words: str) -> str:
    """Without the control characters that XML cannot contain."""
    return "".join(c if c >= " " and c not in "\x7f\ufffe\uffff" else " " for c in words)


def forecast(rows: Iterable[Mapping[str, Any]]) -> Figure | None:
    """Images/s against the number of hosts, a line per option and the ideal line; None for one number of hosts.

    The ideal line is the best speed of the fewest hosts, in proportion to the number of hosts.
    """
    by_option = grouped((row["option"], (float(row["nodes"]), row["images_per_second"])) for row in rows)
    points = [point for line in by_option.values() for point in line]
    counts = sorted({nodes for nodes, _ in points})
    if len(counts) < 2 or max(speed for _, speed in points) <= 0:
        return None
    one = max(speed for nodes, speed in points if nodes == counts[0]) / counts[0]
    drawn = [Line("ideal", "quiet", [(nodes, one * nodes) for nodes in counts], wide=False, dashed=True)]
    best_last = sorted(by_option.items(), key=lambda item: -item[1][-1][1])
    for number, (option, line) in enumerate(best_last):
        again, colour = divmod(number, len(LIGHT_LINES))
        drawn.append(Line(brief(plain(option), OPTION_CHARACTERS), f"l{colour}", sorted(line), dashed=again > 0))
    spec = drawing.lines(drawn, "hosts", "images/s", zero=True)
    return Figure("Speed by the number of hosts", spec, CHART_PIXELS, [line.key() for line in drawn])
