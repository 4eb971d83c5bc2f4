"""Promise: one line says how far a run is, how fast, and which host holds it up."""

from __future__ import annotations

from typing import Any

from launch.run.progress import Progress, behind, position, who_is_slow


def state(*ranks: dict[str, Any], status: str = "running") -> dict[str, Any]:
    return {"status": status, "ranks": {str(number): {"state": "running", **rank} for number, rank in enumerate(ranks)}}


def test_the_position_is_that_of_the_slowest_rank() -> None:
    fast = {"phase": "training", "step": 514, "steps": 2000, "epoch": 3, "epochs": 90}
    assert position([state(fast), state({**fast, "step": 512})]) == "epoch 3/90, step 512/2000, training"


def test_what_is_not_known_is_not_said() -> None:
    assert position([{}]) == "starting" and position([state(status="starting")]) == "starting"
    assert position([state({"phase": "training", "step": 7})]) == "step 7, training"
    assert position([state({"phase": "saving", "step": 7}, status="ending")]) == "step 7, saving, ending"


def test_between_two_attempts_no_phase_of_the_one_that_ended_is_shown() -> None:
    waits = {"waiting": "attempt 2 to begin: the ranks of h2 have not ended; that may take 30 s at most"}
    rank = {"phase": "training", "step": 7, "steps": 90}
    over = {**state({**rank, "state": "failed"}, {**rank, "state": "ended"}, status="ended"), **waits}
    assert position([over]) == "step 7/90, ended; the next attempt has not begun"
    saving = state({**rank, "phase": "saving"}, status="ending")
    assert position([over, saving]) == "step 7/90, saving, ending"


def test_the_line_has_figures_and_the_time_that_is_left() -> None:
    progress, rank = Progress(), {"phase": "training", "steps": 1000, "loss": 0.51234, "rate": 523.4}
    first = progress.line({"h1": state({**rank, "step": 100})}, 10.0)
    assert first == "step 100/1000 | loss 0.5123 | 523 images/s"
    assert progress.line({"h1": state({**rank, "step": 110})}, 15.0).endswith("523 images/s | 7 min left")
    assert progress.line({"h1": state({**rank, "step": 990})}, 20.0).endswith("| 0 s left")


def test_the_speed_is_of_late_and_begins_anew_with_another_phase() -> None:
    progress = Progress()
    for second in range(200):
        line = progress.line(
            {"h1": state({"step": second if second < 100 else 100 + 10 * (second - 100), "steps": 10**6})}, second
        )
    assert "1.1 days" in line or "27." in line, line  # ten steps a second, not five
    assert "left" not in progress.line({"h1": state({"step": 3, "steps": 10})}, 300.0)


def test_a_host_that_is_behind_is_named() -> None:
    def at(**steps: int) -> dict[str, Any]:
        return {host: state({"phase": "training", "step": step}) for host, step in steps.items()}

    assert behind(at(h1=500, h2=490, h3=501), speed=1.0) == ["h2 is 11 steps behind"]
    assert behind(at(h1=500, h2=490), speed=10.0) == []  # a second is ten steps, and states are a second old
    assert behind(at(h1=500), speed=1.0) == []


def test_who_holds_up_the_others_is_named_as_its_keeper_says() -> None:
    def at(host: str, rank: int | None, times: float) -> dict[str, Any]:
        even = {name: {**state({"phase": "training", "step": 500}), "slow": None} for name in ("h1", "h2", "h3")}
        return even | {host: even[host] | {"slow": {"host": host, "rank": rank, "times": times}}}

    assert who_is_slow(at("h2", None, 2.06)) == ["slow: h2 2.1x"]
    assert who_is_slow(at("h2", 3, 1.5)) == ["slow: h2 rank 3 1.5x"]
    assert who_is_slow(at("h1", None, 1.5) | {"h9": at("h2", None, 3.0)["h2"]}) == ["slow: h9 3.0x"]
    assert who_is_slow({"h1": state({"step": 3})}) == [] and who_is_slow({}) == []
    assert Progress().line(at("h2", None, 2.0), 1.0) == "step 500 | slow: h2 2.0x"
