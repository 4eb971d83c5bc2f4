"""Promises of train.model.prepare, precision and recompute: what changes speed and memory keeps the training."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.train import model_ranks
from train.model import torchvision_cpu
from train.model.precision import Precision
from train.model.prepare import prepare
from train.model.recompute import blocks, checkpoint_blocks
from train.parallel.single import Single
from train.settings import Settings, SettingsError

torchvision_cpu.watch()

ROOT = Path(__file__).resolve().parents[2]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two_losses(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return model_ranks.run(tmp_path_factory.mktemp("ranks"), "two_losses", 2)


@pytest.fixture(scope="module")
def overflow(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return model_ranks.run(tmp_path_factory.mktemp("ranks"), "overflow", 2)


WAYS = ["one_pass", "two_passes", "separate", "sharded"]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_checkpointing_with_two_losses_gives_the_plain_gradients_on_all_ranks(two_losses: Results, way: str) -> None:
    """Under DDP: one pass for both losses; a pass for each, summed; a backward for each, the first in no_sync. Under
    fsdp (sharded): one pass for both."""
    for rank in two_losses:
        plain = rank[way]["plain_gradients"]
        assert plain.keys() == rank[way]["gradients"].keys()
        for name, gradient in rank[way]["gradients"].items():
            torch.testing.assert_close(gradient, plain[name], rtol=1e-5, atol=1e-6)
            assert gradient.equal(two_losses[0][way]["gradients"][name]), f"replicas differ in {name}"


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_batch_statistics_see_each_batch_once_on_every_rank(two_losses: Results, way: str) -> None:
    for rank in two_losses:
        assert len(rank[way]["plain_buffers"]) == 24
        for name, buffer in rank[way]["plain_buffers"].items():
            assert buffer.equal(rank[way]["buffers"][name]), name


def vision_transformer(dropout: float = 0.3) -> nn.Module:
    from torchvision.models import VisionTransformer

    torch.manual_seed(3)
    return VisionTransformer(8, 4, 4, 2, 8, 16, dropout=dropout, num_classes=3)


def residual() -> nn.Module:
    from torchvision.models.resnet import BasicBlock

    torch.manual_seed(3)
    stage = nn.Sequential(*(BasicBlock(4, 4) for _ in range(5)))
    return nn.Sequential(nn.Conv2d(3, 4, 1), stage, nn.Flatten(), nn.Linear(4 * 8 * 8, 3))


def trained(network: nn.Module, images: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients and buffers after two passes in training mode."""
    for step in range(2):
        torch.manual_seed(step)
        network(images).square().sum().backward()
    gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    return gradients, dict(network.named_buffers())


@pytest.mark.slow
@pytest.mark.parametrize("make", [vision_transformer, residual])
def test_dropout_and_batch_statistics_are_those_of_the_plain_model_bit_by_bit(make: Any) -> None:
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    plain, ours = make(), make()
    prepare(ours, Settings(activation_checkpointing=True), CPU, 1)
    for mine, theirs in zip(trained(ours, images), trained(plain, images), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(mine[name].equal(theirs[name]) for name in mine)


@pytest.mark.slow
def test_names_stay_plain_and_activations_are_computed_twice() -> None:
    plain, ours = residual(), residual()
    images = torch.randn(4, 3, 8, 8)
    assert checkpoint_blocks(ours) == [f"1.{n}" for n in range(5)]
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in plain.named_modules()]
    ours.load_state_dict(plain.state_dict())
    calls = []
    ours.get_submodule("1.2.conv1").register_forward_pre_hook(lambda *_: calls.append(1))
    ours(images).sum().backward()
    assert len(calls) == 2
    with torch.no_grad():
        ours(images)
    assert len(calls) == 3


BLOCKS = {
    "resnet18": 8,
    "resnet50": 16,
    "vit_b_16": 12,
    "swin_t": 15,
    "convnext_tiny": 18,
    "efficientnet_b0": 16,
    "densenet121": 42,
    "googlenet": 12,
    "inception_v3": 16,
    "mobilenet_v3_small": 11,
    "shufflenet_v2_x1_0": 16,
    "squeezenet1_0": 8,
    "maxvit_t": 8,
    "vgg11": 0,
    "alexnet": 0,
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_found_in_every_family_of_models(name: str) -> None:
    import torchvision

    options = {"aux_logits": False, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
    with torch.device("meta"):
        network = torchvision.models.get_model(name, weights=None, **options)
    found = blocks(network)
    assert len(found) == BLOCKS[name]
    assert not any(one.startswith(other + ".") for one in found for other in found)


def test_a_plain_chain_cannot_be_checkpointed_and_that_is_said() -> None:
    chain = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    with pytest.raises(SettingsError, match="vgg11 is a plain chain of layers"):
        prepare(chain, Settings(model="vgg11", activation_checkpointing=True), CPU, 1)


def test_without_anything_asked_the_network_is_left_alone() -> None:
    network = residual()
    assert prepare(network, Settings(), CPU, 4) is network
    assert type(network.get_submodule("1.0")).__name__ == "BasicBlock"


def test_channels_last_changes_the_layout_of_convolutions() -> None:
    network = prepare(residual(), Settings(channels_last=True), CPU, 1)
    weight = network.get_parameter("1.0.conv1.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()


def test_sync_bn_needs_gpus_with_a_rank_each() -> None:
    with pytest.raises(SettingsError, match="--sync-bn: torch's SyncBatchNorm needs GPUs"):
        prepare(residual(), Settings(sync_bn=True), CPU, 2)
    with pytest.raises(SettingsError, match="--parallel ddp instead of dp"):
        prepare(residual(), Settings(sync_bn=True, parallel="dp"), GPU, 1)
    converted = prepare(residual(), Settings(sync_bn=True), GPU, 2)
    assert isinstance(converted.get_submodule("1.0.bn1"), nn.SyncBatchNorm)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_compiled_model_keeps_names_gradients_and_statistics(checkpointing: bool) -> None:
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    plain, ours = residual(), residual()
    settings = Settings(activation_checkpointing=checkpointing)
    Single(prepare(ours, settings, CPU, 1), CPU).compile()
    for mine, theirs in zip(trained(ours, images), trained(plain, images), strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("amp", "dtype"), [("off", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_forward_pass_computes_in_what_amp_says_and_weights_stay_float32(amp: str, dtype: torch.dtype) -> None:
    layer, precision = nn.Linear(4, 2), Precision(Settings(amp=amp), CPU)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with precision.autocast():
        outputs = layer(torch.ones(3, 4))
    before = layer.weight.detach().clone()
    precision.backward(outputs.float().mean())
    precision.unscale(optimizer)
    assert outputs.dtype == dtype
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, torch.full((2, 4), 0.5), rtol=1e-2, atol=0)
    precision.step(optimizer)
    assert not layer.weight.equal(before)
    assert (precision.scaler is None, precision.state() is None) == (amp != "fp16", amp != "fp16")


def test_the_scaler_goes_on_where_it_was() -> None:
    first, second = (Precision(Settings(amp="fp16"), CPU) for _ in range(2))
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    for loss in (layer(torch.ones(1)).sum() * float("inf"), layer(torch.ones(1)).sum()):
        first.backward(loss)
        first.step(optimizer)
        optimizer.zero_grad()
    second.load(first.state())
    state = second.state()
    assert state == first.state()
    assert state is not None and (state["scale"], state["_growth_tracker"]) == (32768.0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp sgd", "ddp adamw", "fsdp sgd", "fsdp adamw"])
def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(overflow: Results, way: str) -> None:
    for rank in overflow:
        assert rank[way]["changed"] == [False, True]
        assert rank[way]["scales"] == [32768.0, 32768.0]
        for mine, first in zip(rank[way]["weights"], overflow[0][way]["weights"], strict=True):
            assert mine.equal(first)
            assert mine.abs().max() < 1  # no trace of the step that overflowed


KERNELS = """
import os, sys, torch
from train.model.prepare import choose_kernels
from train.settings import parse
# Each line of arguments in a process of its own, which has torch already.
for arguments in sys.argv[1:]:
    if os.fork() == 0:
        break
    os.wait()
else:
    sys.exit()
choose_kernels(parse(arguments.split()))
print(torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic,
      os.environ.get('CUBLAS_WORKSPACE_CONFIG'), torch.backends.cudnn.benchmark, flush=True)
print(torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
"""


@pytest.mark.slow
def test_kernels_are_the_fastest_exact_ones_unless_others_are_asked_for() -> None:
    cases = {
        "": ("False False None True", "highest False False"),
        "--deterministic": ("True True :4096:8 False", "highest False False"),
        "--tf32": ("False False None True", "high True True"),
    }
    environment = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    command = [sys.executable, "-c", KERNELS, *cases]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=300)
    assert done.stdout.splitlines() == [line for lines in cases.values() for line in lines]
