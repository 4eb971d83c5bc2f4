"""Promises of --weights, --freeze and --head-lr: what is pretrained is taken, what is frozen stays, the head has a
learning rate of its own.
"""

import dataclasses
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.resume_ranks import CRASH, SETTINGS, crash_in_step, network, train
from tests.train.test_resume import assert_equal
from train.checkpoints import load, saved_steps
from train.model import pretrained, torchvision_cpu
from train.model.freeze import freeze, trained
from train.model.prepare import prepare
from train.optim import Schedule, make_groups, make_optimizer
from train.run import gather
from train.session import head
from train.settings import Settings, SettingsError
from train.start.group import Place

torchvision_cpu.watch()

CPU = torch.device("cpu")
FROZEN: dict[str, Any] = {"freeze": "0.*,1.*", "head_lr": 0.05, "optimizer": "sgd"}
NET = "shufflenet_v2_x0_5"


# -- what is frozen ----------------------------------------------------------------------------------------------------


def test_frozen_parameters_and_their_statistics_stay_in_training() -> None:
    net = network(normalised=True)
    freeze(net, "0.weight, 1.*")
    assert [name for name, each in net.named_parameters() if not each.requires_grad] == [
        "0.weight",
        "1.weight",
        "1.bias",
    ]
    assert list(net.state_dict()) == list(network(normalised=True).state_dict())
    norm, dropout = net.get_submodule("1"), net.get_submodule("4")
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    net.train()
    assert net.training and dropout.training and not norm.training
    net(torch.randn(4, 3, 8, 8))
    assert_equal(dict(norm.state_dict()), before)
    assert trained(net) == "5 of 8 parameters are trained (3,648 of 3,822 values)"


def test_a_norm_that_is_partly_trained_goes_on_with_its_statistics() -> None:
    net = network(normalised=True)
    freeze(net, "1.weight")
    net.train()
    net(torch.randn(4, 3, 8, 8))
    norm = net.get_submodule("1")
    assert norm.training and norm.num_batches_tracked == 1


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("backbone", r"--freeze backbone: no parameter has such a name; there are 0\.\*, "),
        ("1", r"--freeze 1: no parameter has such a name; did you mean 1\.\*\?"),
        ("1.wight", r"did you mean (.* or )?1\.weight"),
        ("*", r"--freeze \*: nothing is left to train"),
    ],
)
def test_a_pattern_that_freezes_nothing_or_all_is_refused(pattern: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        prepare(network(normalised=True), Settings(freeze=pattern), CPU, 1)


MORE: dict[str, Any] = {"channels_last": True, "activation_checkpointing": False, "ema": 0.9}


def last(folder: Path) -> dict[str, Any]:
    return load(folder / "checkpoints", saved_steps(folder / "checkpoints")[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "parallel", "more"),
    [
        (1, "dp", {}),
        (2, "fsdp", MORE),
        *(pytest.param(*where, MORE, marks=pytest.mark.long) for where in ((1, "none"), (1, "dp"), (2, "ddp"))),
        *(pytest.param(*where, {}, marks=pytest.mark.long) for where in ((1, "none"), (2, "ddp"), (2, "fsdp"))),
    ],
    ids=str,
)
def test_frozen_parameters_stay_and_a_broken_run_ends_with_the_same_bits(
    world_size: int, parallel: str, more: dict[str, Any], tmp_path: Path
) -> None:
    settings = dataclasses.replace(SETTINGS, parallel=parallel, epochs=2, blocking_checkpoints=True, **FROZEN, **more)
    whole, broken = (dataclasses.replace(settings, run_dir=tmp_path / name) for name in ("whole", "broken"))
    assert train(world_size, whole) == [0] * world_size
    crash = dict.fromkeys(range(world_size), crash_in_step(7))
    assert train(world_size, broken, changes=crash) == [CRASH] * world_size
    assert train(world_size, broken) == [0] * world_size
    ends, start = (last(tmp_path / "whole"), last(tmp_path / "broken")), network(normalised=True).state_dict()
    for part in ("model", "optimizer", "rank_buffers"):
        assert_equal(ends[1][part], ends[0][part], part)
    changed = {name for name, value in ends[0]["model"].items() if not value.equal(start[name])}
    assert changed == {"5.weight", "5.bias", "7.weight", "7.bias"}


# -- the head ----------------------------------------------------------------------------------------------------------


def test_the_head_has_groups_of_its_own_in_proportion_to_the_schedule() -> None:
    net = network(normalised=False)
    settings = Settings(lr=0.1, head_lr=0.5, warmup=0.5, schedule="cosine")
    optimizer = make_optimizer(settings, make_groups(net, 0.05, *head(settings, net)), CPU)
    names = [group["param_names"] for group in optimizer.param_groups]
    assert names == [["0.weight", "4.weight"], ["0.bias", "4.bias"], ["6.weight"], ["6.bias"]]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.05, 0.0, 0.05, 0.0]
    schedule = Schedule(settings, 10, 20)
    for step in (0, 9, 15):
        lr = schedule.set(optimizer, step)
        assert [group["lr"] for group in optimizer.param_groups] == [
            lr,
            lr,
            pytest.approx(5 * lr),
            pytest.approx(5 * lr),
        ]


def test_a_head_that_is_frozen_or_not_there_has_no_learning_rate() -> None:
    net = network(normalised=False)
    freeze(net, "6.*")
    with pytest.raises(SettingsError, match=r"--head-lr 0\.5: 6 is frozen"):
        head(Settings(head_lr=0.5), net)
    with pytest.raises(SettingsError, match=r"--head-lr 0\.5: resnet18 has no linear or convolutional layer"):
        head(Settings(head_lr=0.5), nn.BatchNorm2d(3))


# -- pretrained weights ------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What torchvision's server would send: weights for 1000 classes, their hash in the name."""
    import torchvision

    path = tmp_path / "server" / "net.pth"
    path.parent.mkdir()
    torch.manual_seed(5)
    torch.save(torchvision.models.get_model(NET, num_classes=1000).state_dict(), path)
    named = path.with_name(f"net-{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}.pth")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr(pretrained, "url_of", lambda model, name: f"http://127.0.0.1:9/{named.name}")
    return path.rename(named)


def settings_in(folder: Path, **more: Any) -> Settings:
    data: dict[str, Any] = {"model": NET, "weights": "IMAGENET1K_V1", "dataset": "fake", "data_dir": folder / "data"}
    return Settings(**data | {"run_dir": folder / "run", **more})


def test_names_of_weights_are_torchvisions() -> None:
    assert pretrained.url_of("resnet18", "IMAGENET1K_V1").endswith("/resnet18-f37072fd.pth")
    assert pretrained.url_of("resnet50", "DEFAULT") == pretrained.url_of("resnet50", "IMAGENET1K_V2")
    with pytest.raises(
        SettingsError, match=r"--weights imagenet1k_v3: .*; resnet50 has IMAGENET1K_V\d and IMAGENET1K_V"
    ):
        pretrained.url_of("resnet50", "imagenet1k_v3")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["data/weights", "hub/hub/checkpoints"])
def test_weights_are_taken_but_for_a_head_of_other_classes(place: str, file: Path, tmp_path: Path) -> None:
    (tmp_path / place).mkdir(parents=True)
    file.rename(tmp_path / place / file.name)
    notes = list[str]()
    _, net, _ = gather(settings_in(tmp_path), Place(), notes)
    assert notes == ["--weights: fc: left at random, the file's is for 1000 classes and this network has 10"]
    theirs = torch.load(tmp_path / place / file.name)
    differ = [name for name, value in net.state_dict().items() if not value.equal(theirs[name])]
    assert differ == ["fc.weight", "fc.bias"]


@pytest.mark.slow
def test_a_file_that_is_not_there_or_torn_is_refused_with_where_to_put_it(file: Path, tmp_path: Path) -> None:
    expected = tmp_path / "data" / "weights" / file.name
    with pytest.raises(
        SettingsError, match=rf"there is no {expected} \(nor .*/hub/checkpoints/.*--download, or fetch http"
    ):
        gather(settings_in(tmp_path), Place(), [])
    expected.parent.mkdir(parents=True)
    expected.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SettingsError, match=f"{expected} is torn or another file"):
        gather(settings_in(tmp_path), Place(), [])


@pytest.fixture
def server(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    handler = partial(SimpleHTTPRequestHandler, directory=str(file.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(pretrained, "url_of", lambda model, name: f"{url}/{file.name}")
        yield url
        server.shutdown()


@pytest.mark.slow
def test_missing_weights_are_fetched_and_compared_with_their_hash(server: str, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "weights"
    pretrained.fetch(NET, "IMAGENET1K_V1", folder)
    assert (folder / file.name).read_bytes() == file.read_bytes()
    (folder / file.name).unlink()
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(SettingsError, match=r"cannot be fetched .* hash"):
        pretrained.fetch(NET, "IMAGENET1K_V1", folder)
    assert not list(folder.iterdir())


def test_a_rank_that_cannot_fetch_still_waits_for_the_others(file: Path, tmp_path: Path) -> None:
    from unittest import mock

    def waits(done: Callable[[], bool], *_: object) -> bool:
        while not done():
            time.sleep(0.01)
        return True

    wait = mock.patch("train.start.group.wait_for_all", side_effect=waits)
    with wait as waited, pytest.raises(SettingsError, match="cannot be fetched"):
        gather(settings_in(tmp_path, download=True), Place(local_world_size=2, world_size=2), [])
    waited.assert_called_once()
