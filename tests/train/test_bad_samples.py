"""--bad-samples skip: images that cannot be decoded do not count, are named, and any number of ranks does the same."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.train import dataset_files as disk
from tests.train.resume_ranks import SETTINGS, crash_in_step, train
from train.checkpoints import load as load_checkpoint
from train.datasets import load
from train.datasets.base import BadSample
from train.datasets.loader import Loader
from train.losses import Mix, per_sample
from train.model.precision import Precision
from train.order import equally, step_of
from train.parallel.single import Single
from train.settings import Settings
from train.start.group import Place
from train.step import optimizer_step

CPU = torch.device("cpu")
BAD = ("train/cat/0.JPEG", "train/cat/more/1.JPEG", "train/dog/5.png", "val/dog/0.JPEG")


def spoil(root: Path, *names: str) -> None:
    """Cuts files off, one to nothing."""
    for number, name in enumerate(names):
        path = root / name
        path.write_bytes(path.read_bytes()[: 300 * (number != 1)])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    disk.write_imagefolder(tmp_path / "data", per_class=10)
    return tmp_path / "data"


def settings_in(root: Path, **options: Any) -> Settings:
    return Settings(
        **{"dataset": "imagefolder", "data_dir": root, "image_size": 8, "workers": 0, "bad_samples": "skip", **options}
    )


def loader_of(root: Path, **options: Any) -> Loader:
    settings = settings_in(root, **options)
    return Loader(load(settings, Place()), settings, CPU, Place())


# -- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"memory": "ram"}, {"channels_last": True, "random_erasing": 0.5}])
def test_a_batch_says_which_samples_are_good_and_the_others_do_not_change(root: Path, options: dict[str, Any]) -> None:
    samples = np.arange(20, dtype=np.int64)
    loader = loader_of(root, **options)
    names = [loader.maker.train.name(k) for k in range(20)]  # type: ignore[attr-defined]
    whole = next(loader.training([samples], 2))
    assert whole[2].all() and loader.bad == {}
    spoil(root, *BAD)
    images, labels, good = next(loader_of(root, **options).training([samples], 2))
    assert good.tolist() == [name not in BAD for name in names] and labels.equal(whole[1])
    assert images[good].equal(whole[0][good])
    assert good.tolist()[:2] == [False, True]
    if not options.get("random_erasing"):
        assert images[0].equal(images[1])  # its neighbour's: batch statistics are those of real images


@pytest.mark.parametrize("memory", ["disk", "ram"])
def test_bad_files_are_named_with_their_reasons_in_every_epoch(root: Path, memory: str) -> None:
    spoil(root, *BAD)
    loader = loader_of(root, memory=memory)
    everything = [np.arange(20, dtype=np.int64)]
    for _ in range(2):
        assert [int(good.sum()) for _, _, good in loader.training(everything, 0)] == [17]
        assert [int(good.sum()) for _, _, good in loader.held_out(everything)] == [19]
    assert tuple(sorted(loader.bad)) == BAD
    assert loader.bad["train/cat/more/1.JPEG"] == "cannot identify image file '1.JPEG'"


def test_without_skip_a_bad_file_stops_and_batches_are_pairs(root: Path) -> None:
    everything = [np.arange(20, dtype=np.int64)]
    assert len(next(loader_of(root, bad_samples="stop").training(everything, 0))) == 2
    spoil(root, BAD[0])
    with pytest.raises(BadSample, match=r"cat/0.JPEG is no image .* or give --bad-samples skip"):
        next(loader_of(root, bad_samples="stop").training(everything, 0))


@pytest.mark.slow
def test_workers_report_the_same(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spoil(root, *BAD)
    requests = [np.arange(4, dtype=np.int64), np.arange(4, 20, dtype=np.int64)]
    with loader_of(root, workers=2, batch_size=6) as workers:
        theirs = [[tensor.clone() for tensor in batch] for batch in workers.training(requests, 1)]
    assert capfd.readouterr().err == ""
    loader = loader_of(root)
    for ours, other in zip(loader.training(requests, 1), theirs, strict=True):
        assert all(one.equal(two) for one, two in zip(ours, other, strict=True))
    assert loader.bad == workers.bad and len(loader.bad) == 3


# -- one step --------------------------------------------------------------------------------------------------------


def images_and_labels(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, 4, 4, generator=generator), torch.arange(count) % 5


def small_network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 5))


LOSS = partial(per_sample, smoothing=0.1)


def updated(batches: list[tuple[Tensor, ...]], count: int, micro_batch: int = 0, mix: Mix | None = None) -> Any:
    """(weights after one step of SGD, its figures)"""
    network = small_network()
    step = step_of(np.arange(count, dtype=np.int64), equally(1), 0, micro_batch, mix is not None)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    precision = Precision(Settings(), CPU)
    sums = optimizer_step(Single(network, CPU), optimizer, precision, iter(batches), step, mix, LOSS, 0.5)
    return nn.utils.parameters_to_vector(network.parameters()).detach(), sums


GOOD = torch.tensor([True, False, True, True, False, True])


@pytest.mark.parametrize("micro_batch", [0, 2, 3])
def test_the_update_is_that_of_the_mean_over_the_good_samples(micro_batch: int) -> None:
    images, labels = images_and_labels(6)
    expected, figures = updated([(images[GOOD], labels[GOOD])], 4)
    pieces = [slice(k, k + (micro_batch or 6)) for k in range(0, 6, micro_batch or 6)]
    ours, sums = updated([(images[piece], labels[piece], GOOD[piece]) for piece in pieces], 6, micro_batch)
    torch.testing.assert_close(ours, expected)
    assert sums.images == 4 and sums.correct == figures.correct
    torch.testing.assert_close(sums.loss, figures.loss)


@pytest.mark.parametrize("alphas", [(0.4, 0.0), (0.0, 1.0)], ids=["mixup", "cutmix"])
def test_a_sample_whose_partner_is_bad_is_not_mixed(alphas: tuple[float, float]) -> None:
    images, labels = images_and_labels(6)
    mix = Mix(0, 3, *alphas)
    places = (torch.arange(7) % 6).tolist()
    known = images[GOOD]
    assert mix.drawn < 1
    ours, sums = updated([(images[places], labels[places], GOOD[places])], 6, mix=mix)
    # Of places 0, 2, 3, 5 the partners are 1 (bad), 3, 4 (bad), 0.
    pairs = {0: 0, 2: 3, 3: 3, 5: 0}
    mixed, _, _, lam = mix.apply(images[places], labels[places])
    network = small_network()
    loss = torch.zeros(())
    for own, partner in pairs.items():
        image = images[own] if own == partner else mixed[own]
        each = nn.functional.cross_entropy(network(image[None]), labels[own : own + 1], label_smoothing=0.1)
        other = nn.functional.cross_entropy(network(image[None]), labels[partner : partner + 1], label_smoothing=0.1)
        loss = loss + lam * each + (1 - lam) * other
    (loss / len(known)).backward()
    nn.utils.clip_grad_norm_(network.parameters(), 0.5)
    torch.optim.SGD(network.parameters(), lr=1.0).step()
    torch.testing.assert_close(ours, nn.utils.parameters_to_vector(network.parameters()).detach())
    assert sums.images == 4


def test_where_all_are_good_the_bits_are_those_of_a_step_without_the_option() -> None:
    images, labels = images_and_labels(6)
    plain, _ = updated([(images, labels)], 6)
    ours, sums = updated([(images, labels, torch.ones(6, dtype=torch.bool))], 6)
    assert ours.equal(plain) and sums.images == 6


def test_a_step_without_a_good_sample_has_no_gradient() -> None:
    images, labels = images_and_labels(2)
    ours, sums = updated([(images, labels, torch.zeros(2, dtype=torch.bool))], 2)
    assert ours.equal(nn.utils.parameters_to_vector(small_network().parameters()).detach())
    assert sums.images == 0 and sums.loss == 0


# -- whole runs ------------------------------------------------------------------------------------------------------


def run_settings(root: Path, folder: Path, **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "dataset": "imagefolder", "data_dir": root, "workers": 0, "bad_samples": "skip", "batch_size": 7, "epochs": 2,
        "optimizer": "sgd", "lr": 0.1, "checkpoint_every": "2", "run_dir": folder,
    }  # fmt: skip
    return dataclasses.replace(SETTINGS, **values | changes)


def run(root: Path, folder: Path, world_size: int, status: int = 0, **changes: Any) -> None:
    settings = run_settings(root, folder, **changes)
    assert train(world_size, settings, normalised=False) == [status] * world_size


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def weights(folder: Path, step: int = 6) -> dict[str, Tensor]:
    model: dict[str, Tensor] = load_checkpoint(folder / "checkpoints", step)["model"]
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "mixing",
    [
        pytest.param({}, id="plain", marks=pytest.mark.long),
        pytest.param({"mixup": 0.4, "cutmix": 1.0, "clip": 0.5}, id="mixed"),
    ],
)
def test_any_number_of_ranks_leaves_out_the_same(root: Path, mixing: dict[str, Any], tmp_path: Path) -> None:
    spoil(root, *BAD)
    run(root, tmp_path / "alone", 1, parallel="none", **mixing)
    expected, figures = weights(tmp_path / "alone"), events(tmp_path / "alone", "epoch")
    spread: list[tuple[int, dict[str, Any]]] = [
        (3, {"micro_batch": 2}), (2, {"parallel": "fsdp"}), (2, {"shares": "3,1"})
    ]  # fmt: skip
    for number, (world_size, changes) in enumerate(spread):
        folder = tmp_path / str(number)
        run(root, folder, world_size, **changes, **mixing)
        for name, ours in weights(folder).items():
            torch.testing.assert_close(ours, expected[name], rtol=1e-4, atol=1e-5)
        for epoch, theirs in zip(events(folder, "epoch"), figures, strict=True):
            assert epoch["test_accuracy"] == theirs["test_accuracy"]
            assert epoch["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-4)
            assert epoch["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-4)
        assert [event["images"] for event in events(folder, "step")] == [
            event["images"] for event in events(tmp_path / "alone", "step")
        ]
        assert tuple(line.split("\t")[0] for line in (folder / "bad-samples.txt").read_text().splitlines()) == BAD
    counted = [event["images"] for event in events(tmp_path / "alone", "step")]
    assert sum(counted) == 2 * (20 - 3) and max(counted) == 7
    assert json.loads((tmp_path / "alone" / "result.json").read_text())["bad_samples"] == 4


@pytest.mark.slow
def test_the_option_alone_changes_no_bit(root: Path, tmp_path: Path) -> None:
    for option in ("stop", "skip"):
        run(root, tmp_path / option, 2, bad_samples=option)
    stop, skip = weights(tmp_path / "stop"), weights(tmp_path / "skip")
    assert all(tensor.equal(skip[name]) for name, tensor in stop.items())
    assert not (tmp_path / "skip" / "bad-samples.txt").exists()


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits_and_knows_all_names(root: Path, tmp_path: Path) -> None:
    spoil(root, *BAD)
    run(root, tmp_path / "whole", 2)
    settings = run_settings(root, tmp_path / "broken")
    assert 0 not in train(2, settings, normalised=False, changes=dict.fromkeys(range(2), crash_in_step(6)))
    run(root, tmp_path / "broken", 2)
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "broken")
    assert all(tensor.equal(resumed[name]) for name, tensor in whole.items())
    assert (tmp_path / "broken/bad-samples.txt").read_text() == (tmp_path / "whole/bad-samples.txt").read_text()
    named = [name for event in events(tmp_path / "broken", "bad_samples") for name in event["samples"]]
    assert sorted(named) == list(BAD)


@pytest.mark.slow
def test_the_first_names_are_said(root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spoil(root, *BAD)
    run(root, tmp_path / "run", 1, epochs=1, checkpoint_every="epoch")
    said = capfd.readouterr().out.splitlines()
    assert f"3 images cannot be decoded and are left out: {', '.join(BAD[:3])}" in said  # found by the training
    assert f"1 image cannot be decoded and is left out: {BAD[3]}" in said  # by the evaluation
    assert "4 images could not be decoded and did not count; see bad-samples.txt" in said


@pytest.mark.slow
@pytest.mark.parametrize(("part", "called"), [("train", "training"), ("val", "held-out")])
def test_a_part_without_a_good_image_ends_with_a_clear_word(
    part: str, called: str, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in (root / part).rglob("[0-9]*"):
        path.write_bytes(b"")
    run(root, tmp_path / "run", 2, status=1, epochs=1)
    assert (
        f"DataError: no {called} image can be decoded: `python -m train verify-data` says why" in capfd.readouterr().err
    )
