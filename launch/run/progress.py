"""How far a run is, in words, from the states of its hosts (state.json of keeper/__init__.py)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from keeper.course import BETWEEN
from launch.cli import units

WINDOW_SECONDS = 60.0  # over which the speed of the steps is taken
BEHIND_SECONDS = 2.0  # states are a second old: a rank that is further behind than they explain is named

State = Mapping[str, Any]


def position(states: Sequence[State]) -> str:
    """Where the ranks of a run are: `epoch 3/90, step 512/2000, training`. Pure."""
    parts = []
    if (slowest := _slowest(states)) is not None:
        for name, many in (("epoch", "epochs"), ("step", "steps")):
            if slowest.get(name) is not None:
                parts.append(f"{name} {slowest[name]}" + (f"/{slowest[many]}" if slowest.get(many) else ""))
    attempt = max((int(state.get("attempt") or 1) for state in states), default=1)
    parts += [f"attempt {attempt}"] if attempt > 1 else []
    at_work = [rank for rank in _ranks(states) if rank.get("state") not in ("ended", "failed")]
    between = any(BETWEEN in str(state.get("waiting") or "") for state in states)
    if between and not at_work:
        return ", ".join([*parts, "ended; the next attempt has not begun"])
    phases = list(dict.fromkeys(str(rank["phase"]) for rank in at_work if rank.get("phase")))
    standing = {str(state["status"]) for state in states if state.get("status")}
    parts += phases or sorted(standing)
    if "ending" in standing and phases:
        parts.append("ending")
    return ", ".join(parts) or "starting"


class Progress:
    """One line for a run that is watched: position, loss, images/s, what is left of the time, who is behind."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque()  # (monotonic clock, the slowest rank's step)

    def line(self, states: Mapping[str, State], now: float) -> str:
        """states: by host. now: the monotonic clock."""
        known = list(states.values())
        parts, slowest = [position(known)], _slowest(known)
        if slowest is None:
            return parts[0]
        step, speed = int(slowest["step"]), self._speed(int(slowest["step"]), now)
        figures = next((rank for rank in _ranks(known) if rank.get("rate") is not None), {})
        losses = [float(rank["loss"]) for rank in _ranks(known) if rank.get("loss") is not None]
        if losses:
            parts.append(f"loss {losses[0]:.4g}")
        if figures:
            parts.append(f"{float(figures['rate']):.0f} images/s")
        parts += behind(states, speed) or who_is_slow(states)
        if speed and slowest.get("steps") and int(slowest["steps"]) > step:
            parts.append(f"{units.age((int(slowest['steps']) - step) / speed)} left")
        return " | ".join([parts[0].removesuffix(", training"), *parts[1:]])  # a narrow terminal shows 80 characters

    def _speed(self, step: int, now: float) -> float:
        """Steps a second, of late; 0: not known."""
        if self._steps and step < self._steps[-1][1]:
            self._steps.clear()  # another phase counts its own
        if not self._steps or step > self._steps[-1][1]:
            self._steps.append((now, step))
        while len(self._steps) > 2 and now - self._steps[1][0] > WINDOW_SECONDS:
            self._steps.popleft()
        (begun, first), (ended, last) = self._steps[0], self._steps[-1]
        return (last - first) / (ended - begun) if ended > begun else 0.0


def behind(states: Mapping[str, State], speed: float) -> list[str]:
    """The slowest host, where it is further behind than the age of the states explains. Pure."""
    steps = {
        host: min(int(rank["step"]) for rank in _training([state]))
        for host, state in states.items()
        if _training([state])
    }
    if len(steps) < 2:
        return []
    slowest = min(steps, key=lambda host: steps[host])
    gap = max(steps.values()) - steps[slowest]
    return [f"{slowest} is {gap} steps behind"] if gap > max(1.0, BEHIND_SECONDS * speed) else []


def who_is_slow(states: Mapping[str, State]) -> list[str]:
    """The host or rank for which the others wait, as its keeper says, and how many times as long its steps take."""
    found = [(host, state["slow"]) for host, state in states.items() if state.get("slow")]
    if not found:
        return []
    host, slow = max(found, key=lambda one: float(one[1]["times"]))
    rank = "" if slow.get("rank") is None else f" rank {slow['rank']}"
    return [f"slow: {host}{rank} {float(slow['times']):.1f}x"]


def _ranks(states: Sequence[State]) -> list[Mapping[str, Any]]:
    return [words for state in states for words in (state.get("ranks") or {}).values()]


def _training(states: Sequence[State]) -> list[Mapping[str, Any]]:
    """The ranks that count steps of the run; in an evaluation steps are that one's own."""
    ranks = [rank for rank in _ranks(states) if rank.get("step") is not None]
    return [rank for rank in ranks if rank.get("phase") == "training"] or ranks


def _slowest(states: Sequence[State]) -> Mapping[str, Any] | None:
    return min(_training(states), key=lambda rank: int(rank["step"]), default=None)
