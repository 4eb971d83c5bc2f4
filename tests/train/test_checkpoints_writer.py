"""Promises of train.checkpoints.Writer: what is written is what the state was when save() was called, whatever
follows; errors of the background are reported; and a writer killed at any moment leaves an intact checkpoint.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.checkpoints_disk import largest_file
from train.checkpoints import CheckpointError, Writer, load, saved_steps

ROOT = Path(__file__).resolve().parents[2]


def training(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 200))
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(network.parameters())
    network(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    return network, optimizer


def state_of(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": network.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": None,
        "shares": [3, 1],
        "window": network.get_parameter("3.weight").detach()[10:20, ::2],  # a view with gaps
        "half": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
        "empty": torch.zeros(0, 3),
        "position": {"epoch": 1, "step": 7, "pair": (1, "two")},
        "metric": 0.5,
    }


@pytest.fixture(params=[False, True], ids=["background", "blocking"])
def writer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Writer]:
    writer = Writer(tmp_path / "checkpoints", keep=2, blocking=request.param)
    yield writer
    writer.background.shutdown()


def test_background_and_blocking_write_the_same_bytes_though_the_tensors_change(tmp_path: Path) -> None:
    network, optimizer = training()
    plain = Writer(tmp_path / "blocking", blocking=True)
    beside = Writer(tmp_path / "background")
    beside.reserve(state_of(network, optimizer))
    for step in (1, 2, 3):  # in fresh memory and in used one
        plain.save(step, state_of(network, optimizer))
        beside.save(step, state_of(network, optimizer))
        with torch.no_grad():
            for tensor in [*network.parameters(), *network.buffers()]:
                tensor.add_(1)
        optimizer.state.clear()
        network(torch.randn(2, 3, 8, 8)).sum().backward()
        optimizer.step()
        plain.wait()
        beside.wait()
        one, other = (tmp_path / name / f"step-{step}.pt" for name in ("blocking", "background"))
        assert one.read_bytes() == other.read_bytes()
    plain.close()
    beside.close()


def test_equal_states_are_equal_files_whatever_texts_are_one_object(tmp_path: Path) -> None:
    text = "a text with blanks, of which Python makes a new object each time"
    once, anew = ({"config": {"model": text}, other: 1} for other in (text, text[:1] + text[1:]))
    assert once == anew
    for name, state in (("once", once), ("anew", anew)):
        writer = Writer(tmp_path / name)
        writer.save(1, state)
        writer.close()
    assert (tmp_path / "once" / "step-1.pt").read_bytes() == (tmp_path / "anew" / "step-1.pt").read_bytes()


def test_a_guarded_optimizer_waits_for_the_copy(tmp_path: Path) -> None:
    """The background copies the weights while the next step runs, as they were before it."""
    network, optimizer = training()
    plain, beside = Writer(tmp_path / "blocking", keep=9, blocking=True), Writer(tmp_path / "background", keep=9)
    beside.guard(optimizer)
    for step in range(5):
        plain.save(step, state_of(network, optimizer))
        beside.save(step, state_of(network, optimizer))
        optimizer.zero_grad()
        network(torch.randn(2, 3, 8, 8)).sum().backward()  # changes the batch statistics
        optimizer.step()
    plain.close()
    beside.close()
    for step in range(5):
        one, other = (tmp_path / name / f"step-{step}.pt" for name in ("blocking", "background"))
        assert one.read_bytes() == other.read_bytes()


def test_a_guarded_weight_that_changes_nevertheless_is_reported(tmp_path: Path) -> None:
    network, optimizer = training()
    writer = Writer(tmp_path)
    writer.guard(optimizer)
    hold = threading.Event()
    writer.background.submit(hold.wait)  # the background is late
    writer.save(1, state_of(network, optimizer))
    with torch.no_grad():
        network.get_parameter("3.weight").zero_()
    hold.set()
    with pytest.raises(CheckpointError, match="settle"):
        writer.close()
    assert saved_steps(tmp_path) == []


def test_what_was_saved_is_loaded_bit_by_bit(writer: Writer) -> None:
    network, optimizer = training()
    saved = state_of(network, optimizer)
    writer.save(7, saved, 0.5)
    writer.wait()
    found = load(writer.folder, 7)
    for name in ("model", "optimizer", "window", "half", "empty"):
        torch.testing.assert_close(found[name], saved[name], rtol=0, atol=0)
    assert all(found[name] == saved[name] for name in ("scaler", "shares", "position", "metric"))
    assert found["model"]["0.weight"].stride() == saved["model"]["0.weight"].stride()  # still channels_last
    fresh_network, fresh_optimizer = training(seed=1)
    fresh_network.load_state_dict(found["model"])
    fresh_optimizer.load_state_dict(found["optimizer"])


def test_the_file_holds_no_more_than_the_tensors(writer: Writer) -> None:
    """A view does not drag the whole of its storage along."""
    whole = torch.zeros(1_000_000)
    writer.save(1, {"model": {"w": whole[:10]}})
    writer.wait()
    assert (writer.folder / "step-1.pt").stat().st_size < 10_000


def test_a_second_save_waits_and_none_is_dropped(tmp_path: Path) -> None:
    writer = Writer(tmp_path, keep=100)
    for step in range(20):
        writer.save(step, {"model": {"w": torch.full((1000,), float(step))}})
    writer.wait()
    assert saved_steps(tmp_path) == list(range(20))
    assert all(load(tmp_path, step)["model"]["w"].eq(step).all() for step in range(20))
    assert writer.lost > 0
    writer.close()


def test_the_newest_and_the_best_stay(writer: Writer) -> None:
    for step, metric in ((1, 0.1), (2, 0.9), (3, 0.5), (4, None), (5, 0.4)):
        writer.save(step, {"model": {}}, metric)
    writer.wait()
    assert saved_steps(writer.folder) == [2, 4, 5]


def test_an_error_of_the_background_is_reported_at_the_next_call_and_once(tmp_path: Path) -> None:
    state = {"model": {"w": torch.zeros(100_000)}}
    writer = Writer(tmp_path)
    writer.save(1, state)
    writer.wait()
    for report in (writer.wait, lambda: writer.save(3, state)):
        with largest_file(1000):
            writer.save(2, state)
            assert writer.pending is not None and isinstance(writer.pending.exception(), CheckpointError)
        with pytest.raises(CheckpointError, match=r"cannot write.*step-2.*make room"):
            report()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1.json", "step-1.pt"]
    writer.save(3, state)
    writer.close()
    assert saved_steps(tmp_path) == [1, 3]


@pytest.mark.parametrize("value", [Path("x"), {1}, torch.zeros(2).to_sparse(), lambda: 0])
def test_what_could_not_be_loaded_is_refused_when_saved_and_named(writer: Writer, value: object) -> None:
    with pytest.raises(CheckpointError, match=r"state\['config'\]\[1\] is a"):
        writer.save(1, {"model": {}, "config": [0, value]})
    assert saved_steps(writer.folder) == []


@pytest.mark.slow
@pytest.mark.parametrize("kills", [20, pytest.param(100, marks=pytest.mark.long)])
def test_a_writer_killed_at_random_moments_leaves_an_intact_checkpoint(kills: int, tmp_path: Path) -> None:
    """As many resumes as kills: none finds a torn state, none loses a checkpoint that wait() had promised."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.checkpoints_kill", str(tmp_path), str(kills)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["resumes"] == kills
    assert report["torn"] == report["lost"] == 0
    assert report["killed_while_writing"] >= kills / 2
    assert report["drafts_left"] <= 2  # of the last one killed: a draft, and the lock that it held
