"""Drawings as Vega-Lite specifications: dictionaries that a page draws in the reader's browser, or that become SVG.

Pure, but for `library` and `picture`, which import vl_convert. Vega-Lite: https://vega.github.io/vega-lite/docs/.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from launch.files import build_dir, write_whole
from launch.page.colours import LIGHT, variable

Spec = dict[str, Any]
Point = tuple[float, float]

#: Of a line: more are averaged, as no screen could show them.
DRAWN_POINTS = 400
#: A line of so many points or fewer has a dot at each.
DOTTED = 40
MOST_TICKS = 12  # of an axis on which each whole number has one
TICKS = 5  # of y's axis, about
LOG_MARGIN = 1.15  # times beyond the figures that a logarithmic axis goes
DIGITS = 5  # significant, of a figure in a drawing
FIGURE = ",.6~g"  # how d3-format writes one for the pointer
VEGA_LITE = "https://vega.github.io/schema/vega-lite/v6.json"  # its name: nothing is fetched from there

#: Shapes of marks as SVG paths within -1..1.
SHAPES = {
    "dot": "M-.8,0A.8,.8 0 1 0 .8,0A.8,.8 0 1 0 -.8,0Z",
    "cross": "M-1,-.62L-.62,-1L0,-.38L.62,-1L1,-.62L.38,0L1,.62L.62,1L0,.38L-.62,1L-1,.62L-.38,0Z",
    "diamond": "M0,-1L.8,0L0,1L-.8,0Z",
    "square": "M-.75,-.75H.75V.75H-.75Z",
    "triangle": "M-.7,-.9L.9,0L-.7,.9Z",
    "bar": "M-1,-.5H1V.5H-1Z",
    "tick": "M-.3,-1H.3V1H-.3Z",
    "line": "M-1,-.15H1V.15H-1Z",
    "dashes": "M-1,-.15H-.2V.15H-1ZM.2,-.15H1V.15H.2Z",
}


@dataclass(frozen=True)
class Key:
    """One entry of the key above a drawing."""

    name: str
    colour: str  # a name of launch.page.colours
    shape: str = "line"  # of SHAPES


@dataclass(frozen=True)
class Figure:
    """A drawing in a page: its heading, its key, and the specification without size and look."""

    title: str
    spec: Spec
    height: int  # pixels of the plot
    key: Sequence[Key] = ()
    note: str = ""  # one line below it; `text` between backticks becomes code
    is_headed: bool = True  # by its title; else it only stands for the drawing where that is not seen

    @property
    def whole_spec(self) -> Spec:
        """What the page hands to Vega-Lite. It is as wide as the page lets it be."""
        return whole(self.spec) | {"width": "container", "height": self.height}


@dataclass(frozen=True)
class Line:
    """One line of a plot; `points` in order of x."""

    name: str
    colour: str  # a name of launch.page.colours
    points: Sequence[Point]
    wide: bool = True
    dashed: bool = False

    def key(self) -> Key:
        return Key(self.name, self.colour, "dashes" if self.dashed else "line")


def whole(spec: Spec) -> Spec:
    """A specification with the look that all drawings share."""
    quiet, line = variable("quiet"), variable("line")
    axis = {
        "labelColor": quiet,
        "titleColor": quiet,
        "gridColor": line,
        "domainColor": line,
        "tickColor": line,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelOverlap": True,
    }
    config = {
        "font": "system-ui, sans-serif",
        "view": {"stroke": None},
        "axis": axis,
        # Above the plot, where it takes no width of a narrow screen.
        "axisY": {
            "titleAngle": 0,
            "titleAlign": "left",
            "titleAnchor": "end",
            "titleX": 0,
            "titleY": -9,
            "domain": False,
        },
        "axisX": {"grid": False},
        "text": {"color": variable("ink")},
    }
    autosize = {"type": "fit-x", "contains": "padding"}
    padding = {"left": 0, "right": 8, "top": 4, "bottom": 2}
    return {
        "$schema": VEGA_LITE,
        "background": None,
        "autosize": autosize,
        "padding": padding,
        "config": config,
        **spec,
    }


def lines(
    drawn: Sequence[Line],
    x: str,
    y: str,
    *,
    log: bool = False,
    zero: bool = False,
    marked: Sequence[float] = (),
    **axis: Any,
) -> Spec:
    """A plot of lines over x. x, y: the axes' titles, with their units. log: of y. zero: whether y begins at 0.

    marked: places on x with an upright line. axis: more of y's axis. Each point says its figures to the pointer.
    """
    values = [
        {"line": one.name, "x": digits(at), "y": digits(value)} for one in drawn for at, value in averaged(one.points)
    ]
    names = [one.name for one in drawn]
    colour = {"domain": names, "range": [variable(one.colour) for one in drawn]}
    narrow, dashed = [one.name for one in drawn if not one.wide], [one.name for one in drawn if one.dashed]
    heights = [digits(value) for one in drawn for _, value in one.points]
    scale: Spec = {"zero": zero, "nice": TICKS}
    if log:
        scale = {"type": "log", "nice": False, "domain": [min(heights) / LOG_MARGIN, max(heights) * LOG_MARGIN]}
    encoding = {
        "x": {
            "field": "x",
            "type": "quantitative",
            "title": x,
            "scale": {"zero": False, "nice": False, "padding": 5},
            "axis": {"tickCount": 8, "format": ",~r", **whole_ticks(drawn)},
        },
        "y": {"field": "y", "type": "quantitative", "title": y, "scale": scale, "axis": {"tickCount": TICKS, **axis}},
        "color": {"field": "line", "type": "nominal", "scale": colour, "legend": None},
    }
    tooltip = [
        {"field": "line", "title": "line"},
        {"field": "x", "title": x, "type": "quantitative", "format": FIGURE},
        {"field": "y", "title": y, "type": "quantitative", "format": axis.get("format", FIGURE)},
    ]
    shown = {"condition": {"param": "near", "empty": False, "value": 1}, "value": 0}
    near = {"name": "near", "select": {"type": "point", "nearest": True, "on": "pointerover", "clear": "pointerout"}}
    dotted = [one.name for one in drawn if len(one.points) <= DOTTED]
    return {
        "data": {"values": values},
        "encoding": encoding,
        "layer": [
            {
                "mark": {"type": "line", "clip": True},
                "params": [zoomed()],
                "encoding": {
                    "strokeWidth": _for_lines(narrow, 1, 2),
                    "strokeDash": _for_lines(dashed, [5, 4], [1, 0]),
                },
            },
            *([_dots(dotted)] if dotted else []),
            *([_upright(marked)] if marked else []),
            {
                "mark": {"type": "point", "filled": True, "size": 70, "clip": True},
                "params": [near],
                "encoding": {"opacity": shown, "tooltip": tooltip},
            },
        ],
    }


def _for_lines(names: Sequence[str], value: Any, other: Any) -> Spec:
    """One value for these lines, and another for all others."""
    return {"condition": {"test": {"field": "line", "oneOf": names}, "value": value}, "value": other}


def _dots(names: Sequence[str]) -> Spec:
    """A dot at each point of these lines."""
    mark = {"type": "point", "filled": True, "size": 24, "opacity": 1, "clip": True}
    return {"transform": [{"filter": {"field": "line", "oneOf": names}}], "mark": mark}


def _upright(places: Sequence[float]) -> Spec:
    """Broken lines at these places on x."""
    return {
        "data": {"values": [{"x": digits(at)} for at in places]},
        "mark": {"type": "rule", "strokeDash": [4, 3], "clip": True},
        "encoding": {"x": {"field": "x"}, "y": None, "color": {"value": variable("quiet")}},
    }


def whole_ticks(drawn: Iterable[Line]) -> Spec:
    """The ticks of an axis of a few whole numbers (epochs, hosts), which have nothing between them."""
    places = {at for one in drawn for at, _ in one.points}
    if not places or max(places) - min(places) > MOST_TICKS or not all(float(at).is_integer() for at in places):
        return {}
    return {"values": list(range(int(min(places)), int(max(places)) + 1))}


def zoomed() -> Spec:
    """A parameter to look closer along x: Shift and the wheel; dragging moves, and a double click shows all again.

    The wheel alone, and a finger, move the page.
    """
    select = {
        "type": "interval",
        "encodings": ["x"],
        "zoom": "wheel![event.shiftKey]",
        "translate": "[mousedown, window:mouseup] > window:mousemove!",
    }
    return {"name": "zoomed", "select": select, "bind": "scales"}


def averaged(points: Sequence[Point], most: int = DRAWN_POINTS) -> Sequence[Point]:
    """Neighbouring points averaged to one, where there are more than `most`."""
    size = -(-len(points) // most)
    if size <= 1:
        return points
    pieces = (points[start : start + size] for start in range(0, len(points), size))
    return [(sum(x for x, _ in piece) / len(piece), sum(y for _, y in piece) / len(piece)) for piece in pieces]


def digits(value: float) -> float:
    """A figure in DIGITS significant digits."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else 0.0


def picture(spec: Spec) -> str:
    """A drawing as an SVG file of its own, in the light colours. `spec`: with width and height."""
    import vl_convert

    text = json.dumps(whole(spec) | {"background": LIGHT["page"], "padding": 12})
    light = re.sub(r"var\(--(\w+)\)", lambda found: LIGHT[found[1]], text)
    svg: str = vl_convert.vegalite_to_svg(light, vl_version="6.4")
    return svg


@functools.cache
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one program for a page, which then has the function vegaEmbed.

    To put it together takes a second or two, so it is kept in build/.
    """
    kept = build_dir() / "page" / f"vega-{version('vl-convert-python')}.js"
    with contextlib.suppress(OSError):
        return kept.read_text(encoding="utf-8")
    import vl_convert

    made: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    with contextlib.suppress(OSError):  # a page does not fail for want of it
        write_whole(kept, made)
    return made
