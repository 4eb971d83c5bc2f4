"""Promises of --shares and --gpu0-batch: every sample is somebody's, in the proportion that was asked for."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.train.parallel_models import CPU, data, network
from tests.train.parallel_ranks import run
from train.model.precision import Precision
from train.parallel import make
from train.parallel.dp import UnevenDataParallel, chunk_sizes
from train.parallel.shares import cut_by, parse_shares, settled, split
from train.settings import Settings, SettingsError
from train.start.group import Place

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=9)


def test_shares_are_read_rank_by_rank() -> None:
    assert parse_shares("3, 1,0.5", 3) == [3.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3,x", "numbers with commas"),
        ("", "numbers with commas"),
        ("3,0", "0 is no share"),
        ("3,-1", "-1 is no share"),
        ("3,inf", "inf is no share"),
        ("3,nan", "nan is no share"),
        ("3,1,1", r"3 shares for 2 rank\(s\)"),
    ],
)
def test_wrong_shares_are_refused(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=f"--shares {text}: .*{message}"):
        parse_shares(text, 2)


@given(st.integers(0, 500), WEIGHTS)
def test_shares_follow_the_weights(samples: int, weights: list[float]) -> None:
    edges = split(samples, weights)
    sizes = [end - start for start, end in pairwise(edges)]
    assert edges[0] == 0 and edges[-1] == samples and len(sizes) == len(weights)
    assert min(sizes) >= (1 if samples >= len(weights) else 0)
    exact = [samples * weight / sum(weights) for weight in weights]
    if min(exact) >= 1:  # nobody had to be helped
        assert all(abs(size - wish) < 1 + 1e-9 for size, wish in zip(sizes, exact, strict=True))


@given(st.integers(0, 200), st.integers(1, 8))
def test_equal_weights_give_sizes_that_differ_by_one_at_most(samples: int, ranks: int) -> None:
    sizes = [end - start for start, end in pairwise(cut_by([1.0] * ranks)(samples))]
    assert max(sizes) - min(sizes) <= 1


def test_speeds_that_are_alike_give_equal_shares() -> None:
    assert settled([100.0, 104.0, 101.0]) == [1.0, 1.0, 1.0]
    assert settled([100.0, 301.0]) == [1.0, 3.01]


@pytest.mark.slow
def test_what_is_measured_is_what_trains_and_no_rank_waits_for_another(tmp_path: Path) -> None:
    """In the precision of --amp. SyncBatchNorm, which raises on the CPU, is a BatchNorm meanwhile; and where ranks
    waited for each other all would be as fast."""
    for found in run("parallel_gradients", "measured", tmp_path, 2).values():
        assert found["off"][0] == found["bf16"][1] == 1.0
        assert min(found["off"][1], found["bf16"][0]) > 1.5
        assert found["off unchanged"] and found["bf16 unchanged"]


@given(st.integers(1, 300), st.integers(1, 9), st.none() | st.floats(0, 1))
def test_chunks_of_gpus_add_up_and_none_is_too_small(samples: int, devices: int, part: float | None) -> None:
    sizes = chunk_sizes(samples, devices, part)
    assert sum(sizes) == samples and len(sizes) == devices
    used = [size for size in sizes if size]
    assert sizes[: len(used)] == used
    assert min(used) >= min(2, samples)
    assert max(used[1:], default=0) - min(used[1:], default=0) <= 1


@pytest.mark.parametrize(
    ("samples", "part", "sizes"),
    [
        (100, 0.1, [10, 45, 45]),
        (50, 0.1, [5, 22, 23]),
        (7, 0.1, [2, 2, 3]),
        (100, None, [34, 33, 33]),
        (3, 0.1, [3, 0, 0]),
    ],
)
def test_gpu_0s_share_of_a_micro_batch_is_in_proportion(samples: int, part: float | None, sizes: list[int]) -> None:
    assert chunk_sizes(samples, 3, part) == sizes


def in_threads(replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any, devices: Any) -> list[Any]:
    """As torch's parallel_apply, which needs GPUs: what it hands on of autocast is whether it is on."""
    enabled = torch.is_autocast_enabled("cpu")

    def work(replica: Any, each: Any, named: Any) -> Any:
        with torch.autocast("cpu", enabled=enabled):
            return replica(*each, **named)

    with ThreadPoolExecutor(len(replicas)) as threads:
        return list(threads.map(work, replicas, inputs, kwargs))


class OnCpu(UnevenDataParallel):
    """As on three GPUs, but for what only CUDA can do: copying the model, gathering."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, [0, 1, 2], lambda samples: chunk_sizes(samples, 3, 0.2))
        devices: list[Any] = [CPU] * 3
        self.device_ids, self.output_device, self.src_device_obj = devices, 0, CPU
        self.seen: list[list[int]] = []

    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[nn.Module]:
        return [module] * len(device_ids)

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        self.seen.append([len(each[0]) for each in inputs])
        with mock.patch("torch.nn.parallel.data_parallel.parallel_apply", in_threads):
            return super().parallel_apply(replicas, inputs, kwargs)

    def gather(self, outputs: Any, output_device: int | torch.device) -> Tensor:
        return torch.cat(outputs)


def test_scattered_passes_add_up_to_the_gradient_of_the_whole_batch() -> None:
    images, labels = data()
    uneven, plain = OnCpu(network()), network()
    for part in (slice(0, 20), slice(20, 39), slice(39, 40)):  # two micro-batches and a leftover
        loss = nn.functional.cross_entropy(uneven(images[part]), labels[part], reduction="sum")
        (loss / 40).backward()
    nn.functional.cross_entropy(plain(images), labels).backward()
    assert uneven.seen == [[4, 8, 8], [4, 7, 8], [1]]
    for ours, theirs in zip(uneven.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize(("amp", "dtype"), [("off", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_all_gpus_of_dp_compute_in_the_precision_that_was_asked_for(amp: str, dtype: torch.dtype) -> None:
    """Autocast's precision belongs to a thread; in a new one on the CPU it is bf16, on GPUs fp16."""
    uneven, images = OnCpu(network()), data()[0]
    with Precision(Settings(amp=amp), CPU).autocast():
        assert uneven(images).dtype == dtype


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="this machine has GPUs for dp")
def test_dp_without_gpus_falls_back_and_says_so() -> None:
    strategy = make(Settings(parallel="dp", gpu0_batch=8), network(), Place(), CPU)
    assert strategy.module is strategy.network
    assert "no GPU is visible" in strategy.note and "--gpu0-batch 8 has no effect" in strategy.note
