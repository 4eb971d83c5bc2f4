"""What page, pictures and terminal share: levels, the places of parts that were left out, and rows of figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from launch.cli.units import milliseconds, rate
from launch.health.link_statistics import arrow, ends
from launch.health.records import moment_of
from launch.health.verdicts import ERROR, HEALTHY, INCOMPLETE, LEVELS, WARNING
from launch.network.links import Link

Document = Mapping[str, Any]

#: What stands in the place of a part that was left out.
LEFT_OUT = {
    "links": "Not measured: there is one host, or no pair could be tested. `make check` measures all pairs.",
    "bandwidth": "Not measured, connection and round trip only. `make check` measures it when no run is in progress.",
    "sameness": "Not compared. `make check` compares image, versions and data of all hosts.",
    "allreduce": "Not measured. `make check` runs a short all-reduce when there are two ranks or more.",
    "forecast": "Not made. `make check` with ARGS as for `make train` forecasts the speed of that training.",
}
#: A sign for each level, and its colour in the terminal.
SIGNS = {HEALTHY: ("✓", "green"), WARNING: ("!", "yellow"), INCOMPLETE: ("?", "magenta"), ERROR: ("✗", "bold red")}

FORECAST_COLUMNS = ("hosts", "option", "step s", "images/s", "speed-up", "efficiency")


def level_of(document: Document) -> str:
    """The gravest level of the document's verdicts; incomplete when it has none, for then nothing was checked."""
    return max((entry["level"] for entry in document["verdicts"]), key=LEVELS.index, default=INCOMPLETE)


def by_gravity(document: Document) -> list[dict[str, Any]]:
    """The document's verdicts that are not healthy, the gravest first."""
    wrong = (entry for entry in document["verdicts"] if entry["level"] != HEALTHY)
    return sorted(wrong, key=lambda entry: -LEVELS.index(entry["level"]))


def about(document: Document, separator: str) -> str:
    """When the check was made, on which network and of how many hosts."""
    network, count = document["network"], len(document["hosts"])
    return separator.join((moment_of(document["when"]), f"network {network}", f"{count} hosts"))


def describe(link: Link) -> str:
    """All that is known of a pair, in one line."""
    parts = [] if link.error is None else [f"broken: {link.error}"]
    if link.mbits is not None:
        parts.append(rate(link.mbits))
    if link.rtt_ms is not None:
        parts.append(f"round trip {milliseconds(link.rtt_ms)}")
    if link.path_mtu is not None:
        parts.append(f"path MTU {link.path_mtu} bytes")
    return f"{arrow(ends(link))}: {', '.join(parts) or 'not measured'}"


def forecast_cells(row: Mapping[str, Any]) -> list[str]:
    """A row's figures under FORECAST_COLUMNS."""
    step, speed = figure(row["step_seconds"]), figure(row["images_per_second"])
    return [str(row["nodes"]), row["option"], step, speed, f"{row['speedup']:.2f} x", f"{row['efficiency']:.0%}"]


def figure(value: float) -> str:
    """A figure in three significant digits without an exponent."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text and float(text).is_integer() else text


def brief(text: str, most: int = 24) -> str:
    """A text in a cell: a long one (a digest) without its middle."""
    return text if len(text) <= most else f"{text[: most - 8]}…{text[-7:]}"
