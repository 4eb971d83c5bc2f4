"""Everything that happened in a run on one time line: what each host did, causes of failures, attempts, stops, epochs,
checkpoints. Pure, but that it names shapes and colours of launch.page.

Hosts' clocks differ, so each host's events are placed by the time since its own first one: hosts start together. What
the trainer wrote on a host is placed by that host's clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from launch.cli.units import size
from launch.job.outcome import number, reached
from launch.page.colours import variable
from launch.page.drawing import SHAPES, Figure, Key, Spec, digits, zoomed
from launch.report.documents import HostPart, Metrics, Run, Words
from launch.report.words import duration, event_in_words

TRAINING = "training"  # the row of what the trainer wrote
ROW_PIXELS = 30
LEAST_ROW_PIXELS = 16  # of many rows
DENSE_ROWS = 16

#: What spans show: name in the key, colour.
SPANS = {
    "epoch": ("an epoch", "l2"),
    "starting": ("starts, or waits", "faint"),
    "running": ("ranks run", "l0"),
    "ending": ("is being ended", "warning"),
}
#: What marks show: name in the key, colour, shape.
MARKS = {
    "failure": ("failure", "error", "cross"),
    "notice": ("notice", "warning", "dot"),
    "slow": ("slow", "warning", "triangle"),
    "stop": ("stop", "warning", "square"),
    "attempt": ("new attempt", "ink", "triangle"),
    "checkpoint": ("checkpoint", "l3", "diamond"),
    "end": ("end", "ink", "tick"),
}
#: Which span begins with an event; "": none goes on.
_BEGINS = {
    "attempt": "starting",
    "returned": "starting",
    "started": "running",
    "failed": "ending",
    "stop": "ending",
    "ranks_ended": "starting",
    "ended": "",
}


@dataclass(frozen=True)
class Span:
    """From `start` to `end`, in seconds since the run's start."""

    row: str
    start: float
    end: float
    kind: str  # of SPANS
    what: str


@dataclass(frozen=True)
class Mark:
    """Something at one moment, in seconds since the run's start."""

    row: str
    at: float
    kind: str  # of MARKS
    what: str


@dataclass(frozen=True)
class Line:
    """One line of the list of events."""

    at: float
    host: str
    attempt: int
    what: str


@dataclass
class TimeLine:
    rows: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    attempts: dict[int, float] = field(default_factory=dict)  # when each began, in seconds since the run's start

    @property
    def seconds(self) -> float:
        return max((0.0, *(span.end for span in self.spans), *(mark.at for mark in self.marks)))


def of_run(run: Run) -> TimeLine:
    """The time line of a run; without rows where nothing is known of its course."""
    made = TimeLine()
    _add_training(made, run)
    for part in run.hosts:
        if part.events:
            made.rows.append(part.host)
            _add_host(made, part, bool(run.summary))
    made.marks = _once(made.marks, made.rows)
    made.lines.sort(key=lambda line: line.at)
    return made


def moments(events: Sequence[Words]) -> list[float]:
    """When each event of a host was, in seconds since its first one.

    By the keeper's own clock, which no correction of the host's moves; by the host's after a keeper was started anew.
    """
    found: list[float] = []
    for event in events:
        by_keeper = event["after"] - events[0]["after"]
        is_steady = by_keeper >= (found[-1] if found else 0.0)
        found.append(by_keeper if is_steady else max(found[-1], event["time"] - events[0]["time"]))
    return found


def _add_host(made: TimeLine, part: HostPart, over: bool) -> None:
    """A host's row: what it did, and what it said."""
    at = moments(part.events)
    kind, since, attempt = "starting", at[0], 1
    for moment, event in zip(at, part.events, strict=True):
        began, attempt = attempt, int(number(event.get("attempt")) or 1)
        made.lines.append(Line(moment, part.host, attempt, event_in_words(event)))
        made.marks += _marks(part.host, moment, event)
        made.attempts[attempt] = min(moment, made.attempts.get(attempt, moment))
        after = _BEGINS.get(str(event.get("event")))
        if after is None or after == kind or (after == "ending" and not kind):
            continue
        if kind and moment > since:
            made.spans.append(Span(part.host, since, moment, kind, f"{SPANS[kind][0]}, attempt {began}"))
        kind, since = after, moment
    last = at[-1] if part.exit else max(at[-1], _last_state(part))
    if kind and last > since:
        made.spans.append(Span(part.host, since, last, kind, f"{SPANS[kind][0]}, attempt {attempt}"))
    if over and not part.exit:
        made.marks.append(Mark(part.host, last, "notice", "nothing came from its keeper after this"))


def _last_state(part: HostPart) -> float:
    """When a host's keeper last wrote how things stood, in seconds since its first event."""
    when = number(part.state.get("time"))
    return 0.0 if when is None else when - part.events[0]["time"]


def _marks(host: str, moment: float, event: Words) -> Iterator[Mark]:
    name, what = event.get("event"), event_in_words(event)
    if name == "failed":
        at = max(0.0, moment - (number(event.get("age")) or 0.0))
        named = [str(one) for one in (event.get("host"), event.get("other")) if one]
        kind = "notice" if event.get("consequence") else "failure"
        yield from (Mark(one, at, kind, what) for one in named or [host])
    elif name == "slow":
        yield Mark(host, moment, "notice" if event.get("over") else "slow", what)
    elif name in ("stop", "attempt"):
        yield Mark(host, moment, str(name), what)
    elif name in ("returned", "interface", "killed", "left", "output_failed", "given_up"):
        yield Mark(host, moment, "notice", what)
    elif name == "exit":
        yield Mark(host, moment, "end", what)


def _once(marks: Sequence[Mark], rows: Sequence[str]) -> list[Mark]:
    """Each cause and each stop once, when it was first known: every keeper that learns of it notes it."""
    kept: dict[tuple[str, ...], Mark] = {}
    for mark in sorted(marks, key=lambda mark: mark.at):
        same = (mark.kind, mark.row, mark.what) if mark.kind != "stop" else (mark.kind, mark.what)
        again = mark.kind in ("failure", "notice", "stop") and same in kept
        if mark.row in rows and not again:
            kept[same if mark.kind in ("failure", "notice", "stop") else (*same, str(mark.at))] = mark
    return list(kept.values())


def _add_training(made: TimeLine, run: Run) -> None:
    """The first row: epochs and checkpoints, as the trainer wrote them on the last master."""
    metrics = run.metrics
    if metrics is None or not metrics.starts:
        return
    # Its clock is that of the host whose metrics were gathered, the last master; of older runs the first host's.
    writer = metrics.starts[-1].get("host") or (run.hosts[0].host if run.hosts else None)
    first = next((part.events[0] for part in run.hosts if part.events and part.host == writer), metrics.starts[-1])
    zero = first["time"]
    begun = [event for event in (*metrics.starts, *metrics.epochs) if event["time"] >= zero]  # not the continued run's
    last = max(metrics.steps["time"], default=0.0)
    events = [*sorted(begun, key=lambda event: float(event["time"])), {"event": "last", "time": last}]
    for before, event in pairwise(events):
        since, at, what = before["time"] - zero, event["time"] - zero, _epoch_in_words(event)
        if event["event"] != "epoch":
            at = _last_step(metrics, before["time"], event["time"]) - zero
            what = "an epoch that was not finished"
        if at > since:
            made.spans.append(Span(TRAINING, since, at, "epoch", what))
    for step, when in sorted(checkpoint_times(run).items()):
        if when >= zero:
            made.marks.append(Mark(TRAINING, when - zero, "checkpoint", _checkpoint_in_words(run, step)))
            made.lines.append(Line(when - zero, TRAINING, 1, _checkpoint_in_words(run, step)))
    if made.spans or made.marks:
        made.rows.append(TRAINING)


def _last_step(metrics: Metrics, after: float, before: float) -> float:
    """When the last step between two moments was noted, in unix seconds; 0 where none was."""
    times = metrics.steps["time"]
    place = bisect_right(times, before) - 1
    return times[place] if place >= 0 and times[place] > after else 0.0


def checkpoint_times(run: Run) -> dict[int, float]:
    """When there was a checkpoint of each step, in unix seconds: as the trainer said, else as its manifest does."""
    manifests = {int(one["step"]): float(one["time"]) for one in run.checkpoints}
    said = {int(one["step"]): float(one["time"]) for one in (run.metrics.checkpoints if run.metrics else ())}
    return manifests | said


def _checkpoint_in_words(run: Run, step: int) -> str:
    kept = next((one for one in run.checkpoints if one["step"] == step), None)
    taken = size(number(kept.get("bytes")) or 0) if kept else "no longer kept"
    return f"checkpoint of step {step}, {taken}"


def _epoch_in_words(event: Words) -> str:
    parts = [f"epoch {event.get('epoch', 0):.0f}"]
    parts.append(" ".join(reached(event)).strip())
    if (rate := number(event.get("images_per_second"))) is not None:
        parts.append(f"{rate:.0f} images/s")
    return ", ".join(filter(None, parts))


def figure(made: TimeLine) -> Figure:
    """The time line as a drawing."""
    name, divisor = unit(made.seconds)
    x = {
        "type": "quantitative",
        "title": f"{name} since the start",
        "axis": {"tickCount": 10, "format": ",~r"},
        "scale": {"domain": [0, digits(made.seconds / divisor)], "nice": False, "padding": 8},
    }
    y = {
        "field": "row",
        "type": "nominal",
        "title": None,
        "sort": None,
        "scale": {"domain": made.rows},
        "axis": {"grid": True, "tickBand": "extent", "ticks": False, "labelColor": variable("ink")},
    }
    attempts = sorted({digits(one.at / divisor) for one in made.marks if one.kind == "attempt"})
    upright: Spec = {
        "data": {"values": [{"at": at} for at in attempts]},
        "mark": {"type": "rule", "strokeDash": [3, 3], "color": variable("quiet"), "clip": True},
        "encoding": {"x": {"field": "at", **x}},
    }
    spec: Spec = {
        "layer": [_spans(made.spans, x, y, divisor), upright, _marks_layer(made.marks, x, y, divisor)],
        "resolve": {"scale": {"color": "independent", "shape": "independent"}},
    }
    key = [Key(SPANS[kind][0], SPANS[kind][1], "bar") for kind in kinds(SPANS, made.spans)]
    key += [Key(*MARKS[kind]) for kind in kinds(MARKS, made.marks)]
    how = (
        "Clocks differ, so each host's row begins with its own first event. Shift and the wheel look closer, dragging "
        "moves; a double click shows the whole again."
    )
    pixels = LEAST_ROW_PIXELS if len(made.rows) > DENSE_ROWS else ROW_PIXELS
    return Figure("What happened when", spec, pixels * len(made.rows), key, how, is_headed=False)


def kinds(known: Iterable[str], drawn: Sequence[Span] | Sequence[Mark]) -> list[str]:
    """Those of the known kinds that there are."""
    return [kind for kind in known if any(one.kind == kind for one in drawn)]


def _spans(spans: Sequence[Span], x: Spec, y: Spec, divisor: float) -> Spec:
    """A bar for each span. divisor: seconds of the unit of x."""
    values = [
        {"row": one.row, "from": digits(one.start / divisor), "to": digits(one.end / divisor), "kind": one.kind}
        | {"what": one.what, "lasted": duration(one.end - one.start)}
        for one in spans
    ]
    found, outline = kinds(SPANS, spans), {"stroke": variable("page"), "strokeWidth": 1}
    return {
        "data": {"values": values},
        "mark": {"type": "bar", "height": {"band": 0.55}, "clip": True, **outline},
        "params": [zoomed()],
        "encoding": {
            "x": {"field": "from", **x},
            "x2": {"field": "to"},
            "y": y,
            "color": _choice(found, [variable(SPANS[kind][1]) for kind in found]),
            "tooltip": [
                {"field": "what", "title": "what"},
                {"field": "from", "title": x["title"]},
                {"field": "lasted", "title": "lasted"},
            ],
        },
    }


def _marks_layer(marks: Sequence[Mark], x: Spec, y: Spec, divisor: float) -> Spec:
    """A mark for each moment. divisor: seconds of the unit of x."""
    values = [{"row": one.row, "at": digits(one.at / divisor), "kind": one.kind, "what": one.what} for one in marks]
    found, outline = kinds(MARKS, marks), {"stroke": variable("page"), "strokeWidth": 1}
    return {
        "data": {"values": values},
        "mark": {"type": "point", "filled": True, "opacity": 1, "size": 110, "clip": True, **outline},
        "encoding": {
            "x": {"field": "at", **x},
            "y": y,
            "color": _choice(found, [variable(MARKS[kind][1]) for kind in found]),
            "shape": _choice(found, [SHAPES[MARKS[kind][2]] for kind in found]),
            "tooltip": [{"field": "what", "title": "what"}, {"field": "at", "title": x["title"]}],
        },
    }


def _choice(found: Sequence[str], values: Sequence[str]) -> Spec:
    return {"field": "kind", "type": "nominal", "scale": {"domain": found, "range": values}, "legend": None}


def unit(seconds: float) -> tuple[str, float]:
    """The unit of an axis that is so long: its name, and its seconds."""
    return ("seconds", 1.0) if seconds <= 180 else ("minutes", 60.0) if seconds <= 3 * 3600 else ("hours", 3600.0)
