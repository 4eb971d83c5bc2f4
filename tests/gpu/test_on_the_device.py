"""Promises of the trainer's parts where their tensors lie on a GPU: copies, figures, arithmetic, which device it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.train.parallel_models import data, network
from train.checkpoints import Writer, load
from train.checkpoints.snapshot import Snapshot
from train.model.precision import Precision
from train.model.prepare import prepare
from train.parallel import make
from train.reporting.metrics import peak_memory
from train.reporting.step_stats import StepStats
from train.settings import Settings, SettingsError
from train.start.group import SHARED_GPUS, Place, device_of

SLEEP_CYCLES = 2_000_000_000  # about a second


def later(device: torch.device, cycles: int = SLEEP_CYCLES // 10) -> None:
    """What comes after this on the device's stream is done much later than the host has asked for it."""
    if device.type == "cuda":
        torch.cuda._sleep(cycles)


def some_state(device: torch.device, value: float) -> dict[str, object]:
    """Tensors of the kinds that a state has, in other types, layouts and sizes."""
    images = torch.full((2, 3, 4, 5), value, device=device).to(memory_format=torch.channels_last)
    big = torch.full((1 << 20,), value, device=device, dtype=torch.bfloat16)
    return {"model": {"a": images, "b": big}, "optimizer": [torch.full((), value, device=device), 3, "x"]}


def test_a_snapshot_holds_what_was_there_when_it_was_taken(device: torch.device) -> None:
    """Kernels that are still to come have their part in it; those that come after it have not, whatever they do to the
    tensors. The second one uses the first one's memory."""
    snapshot = Snapshot()
    state = some_state(device, 1.0)
    tensors = [state["model"]["a"], state["model"]["b"], state["optimizer"][0]]  # type: ignore[index]
    for turn in (2.0, 3.0):
        later(device)
        for tensor in tensors:
            tensor.fill_(turn)
        copied = snapshot.take(state)
        snapshot.finish()
        for tensor in tensors:
            tensor.fill_(-turn)
        copies: list[Tensor] = [copied["model"]["a"], copied["model"]["b"], copied["optimizer"][0]]
        for copy, tensor in zip(copies, tensors, strict=True):
            assert copy.device.type == "cpu" and copy.is_pinned() == tensor.is_cuda
            assert copy.dtype == tensor.dtype and copy.stride() == tensor.stride()
            assert bool((copy == turn).all())


def test_a_checkpoint_that_is_written_while_training_goes_on_is_of_its_step(
    device: torch.device, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(300, 300, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    writer, wanted = Writer(tmp_path, keep=5), dict[int, Tensor]()
    writer.guard(optimizer)
    for step in range(1, 13):
        model(torch.ones(4, 300, device=device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "position": {"step": step}}
            wanted[step] = model.weight.detach().clone()
            writer.save(step, state)
    writer.close()
    for step, weight in wanted.items():
        assert load(tmp_path, step)["model"]["weight"].equal(weight.cpu())


@pytest.mark.gpu
def test_adding_a_step_waits_for_nothing_of_it(device: torch.device) -> None:
    watch, finite = StepStats(1, 0, device), torch.tensor(True, device=device)
    one = torch.ones((), device=device)
    watch.add(1, 1, one, one, finite, 1)
    torch.cuda.synchronize()
    before, after = torch.cuda.Event(), torch.cuda.Event()
    torch.cuda._sleep(SLEEP_CYCLES)
    before.record()
    watch.add(2, 1, one * 2, one, finite, 1)  # reads step 1, done long ago
    after.record()
    assert not before.query()
    (record,) = watch.flush()
    assert before.query()
    assert record.loss == 2.0


@pytest.mark.slow
@pytest.mark.parametrize("amp", ["bf16", pytest.param("fp16", marks=pytest.mark.gpu)])
def test_mixed_precision_checkpointing_and_channels_last(device: torch.device, amp: str) -> None:
    from torchvision.models.resnet import BasicBlock

    torch.manual_seed(3)
    stage = nn.Sequential(*[BasicBlock(8, 8) for _ in range(5)])
    settings = Settings(amp=amp, channels_last=True, activation_checkpointing=True)
    residual = prepare(nn.Sequential(nn.Conv2d(3, 8, 3), stage), settings, device, 1).to(device)
    precision = Precision(settings, device)
    optimizer = torch.optim.AdamW(residual.parameters(), lr=0.01, fused=True)
    images = torch.randn(4, 3, 8, 8, device=device).to(memory_format=torch.channels_last)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        with precision.autocast():
            loss = residual(images).float().square().mean()
        precision.backward(loss)
        precision.unscale(optimizer)
        precision.step(optimizer)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert int(residual.get_buffer("1.0.bn1.num_batches_tracked")) == 10


@pytest.mark.gpu
def test_peak_memory_is_that_of_the_gpu(device: torch.device) -> None:
    torch.zeros(1 << 20, device=device)
    assert (peak_memory(device)["peak_gpu_bytes"] or 0) >= 4 << 20


@pytest.mark.gpu
def test_ranks_share_a_gpu_only_where_that_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = torch.cuda.device_count()
    last = Place(gpus, gpus, gpus + 1, gpus + 1)
    with pytest.raises(SettingsError, match="start at most one rank per GPU"):
        device_of(last)
    monkeypatch.setenv(SHARED_GPUS, "1")
    assert device_of(last) == torch.device("cuda", 0)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_dp_on_gpus_gives_the_gradient_of_one(device: torch.device) -> None:
    strategy = make(Settings(parallel="dp", batch_size=40, gpu0_batch=8), network(), Place(), device)
    images, labels = (tensor.to(device) for tensor in data())
    plain = network().to(device)
    for model in (strategy.module, plain):
        nn.functional.cross_entropy(model(images), labels).backward()
    for ours, theirs in zip(strategy.network.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)
