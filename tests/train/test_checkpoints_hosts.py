"""Promises of several hosts' checkpoints: of one step they are the same to the byte, and none is sent to another."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.resume_ranks import CRASH, Change, crash_in_step, in_order, own_host, train
from tests.train.test_resume import RICH, settings_in
from train.checkpoints import files

pytestmark = pytest.mark.slow


def saved(folder: Path) -> dict[int, str]:
    """The SHA-256 of each checkpoint of a host, by step."""
    checkpoints = folder / "checkpoints"
    return {step: files.verify(checkpoints, step)["sha256"] for step in files.saved_steps(checkpoints)}


def started(folder: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "start"]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="plain", marks=pytest.mark.long),
        pytest.param(RICH, id="rich"),
        pytest.param({"parallel": "fsdp", "ema": 0.9}, id="fsdp"),
    ],
)
def test_hosts_have_the_same_bytes_also_after_a_resumption_which_sends_nothing(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    hosts = [tmp_path / "h1", tmp_path / "h2"]
    settings = settings_in(tmp_path, keep=20, blocking_checkpoints=True, **changes)

    def attempt(*more: Change) -> list[int]:
        return train(2, settings, changes={rank: in_order(own_host(host), *more) for rank, host in enumerate(hosts)})

    for host in hosts:
        host.mkdir()
    assert attempt(crash_in_step(8)) == [CRASH] * 2
    assert [*saved(hosts[0])] == [2, 4, 6] and saved(hosts[0]) == saved(hosts[1])
    assert attempt() == [0, 0]
    assert [*saved(hosts[0])] == [2, 4, 6, 8, 10, 12] and saved(hosts[0]) == saved(hosts[1])
    resumed = started(hosts[0])[-1]
    assert resumed["resumed_from"] == 6
    assert not [note for note in resumed["notes"] if "was given" in note]


def test_the_run_s_time_goes_on_after_a_resumption(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, keep=20)
    train(2, settings, changes=dict.fromkeys(range(2), crash_in_step(7)))
    assert train(2, settings) == [0, 0]
    folder = tmp_path / "checkpoints"
    times = {step: files.load(folder, step)["position"] for step in files.saved_steps(folder)}
    assert times[2]["seconds"] > 0 and times[2]["train_seconds"] == 0
    assert times[4]["seconds"] > times[2]["seconds"]  # an epoch's checkpoint precedes its evaluation and its end
    assert times[6]["train_seconds"] >= times[4]["seconds"]
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    second = [event["seconds"] for event in events if event["event"] == "step" and event["epoch"] == 2]
    assert second == sorted(second)  # the epoch that was broken off counts on from where its checkpoint was made
    seconds = [event["seconds"] for event in events if event["event"] == "epoch"]
    assert times[12]["train_seconds"] + times[12]["seconds"] == pytest.approx(sum(seconds))
