"""--parallel dp: all GPUs of this host in one process, by torch's DataParallel.

For users who are used to it: each pass copies the model to all GPUs and gathers the outputs on the first one, so
ddp is faster even on one host. The first GPU holds the gathered outputs, the loss and the optimizer's state as well;
`--gpu0-batch` gives it fewer samples (what BalancedDataParallel does). It counts in samples of the whole --batch-size:
a micro-batch, or a short last batch, is cut in the same proportion.

Batch statistics are those of the first GPU's samples: torch keeps only its replica's buffers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from train.order import LEAST
from train.parallel.single import Single
from train.settings import SettingsError

Sizes = Callable[[int], Sequence[int]]  # samples of a pass -> samples for each GPU, the used ones first


class UnevenDataParallel(nn.DataParallel[nn.Module]):
    """DataParallel whose chunks have the sizes that `sizes` says. Inputs are tensors of one length."""

    def __init__(self, network: nn.Module, device_ids: Sequence[int], sizes: Sizes) -> None:
        super().__init__(network, device_ids=device_ids)
        self.sizes = sizes

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]) -> Any:
        """(inputs of each used GPU, keywords of each); unused GPUs, at the end, get nothing and no replica."""
        pieces = [cut(each, self.sizes(len(each)), device_ids) for each in inputs]
        chunks = list(zip(*pieces, strict=True))
        return chunks, [kwargs or {} for _ in chunks]

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """torch tells the replicas' threads that autocast is on, but not in which precision: all would take fp16."""
        kind = self.src_device_obj.type
        precision = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        calls: list[Any] = [under_autocast(replica, *precision) for replica in replicas]
        outputs: list[Any] = super().parallel_apply(calls, inputs, kwargs)
        return outputs


def under_autocast(replica: nn.Module, kind: str, dtype: torch.dtype, enabled: bool) -> Callable[..., Any]:
    def compute(*inputs: Any, **named: Any) -> Any:
        with torch.autocast(kind, dtype, enabled):
            return replica(*inputs, **named)

    return compute


def cut(tensor: Tensor, sizes: Sequence[int], devices: Sequence[Any]) -> list[Tensor]:
    """The tensor's rows for each device with any. From pinned memory or another GPU the copies overlap."""
    rows = tensor.split([size for size in sizes if size])
    return [part.to(device, non_blocking=True) for part, device in zip(rows, devices, strict=False)]


def chunk_sizes(samples: int, devices: int, gpu0_part: float | None = None) -> list[int]:
    """Samples for each of the devices, used ones first: they add up, and no used device has fewer than LEAST if
    there are that many at all.

    gpu0_part: the first device's part of any pass, 0 to 1; None: like the others'. The rest is cut evenly.
    """
    used = min(devices, max(1, samples // LEAST))
    if used == 1:
        return [samples] + [0] * (devices - 1)
    others = used - 1
    first = -(-samples // used) if gpu0_part is None else round(samples * gpu0_part)
    first = min(max(first, LEAST), samples - LEAST * others)
    rest = samples - first
    return [first] + [(i + 1) * rest // others - i * rest // others for i in range(others)] + [0] * (devices - used)


def make_dp(network: nn.Module, device: torch.device, batch_size: int, gpu0_batch: int) -> Single:
    """Over all visible GPUs; with one or none the plain model, which `note` says. Raises SettingsError."""
    strategy = Single(network, device)
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if gpus < 2:
        found = "no GPU" if gpus == 0 else "only one GPU"
        ignored = f"; --gpu0-batch {gpu0_batch} has no effect here" if gpu0_batch else ""
        strategy.note = f"--parallel dp: {found} is visible, so the model trains there as with --parallel none{ignored}"
        return strategy
    if gpu0_batch and not 0 < gpu0_batch <= batch_size - LEAST * (gpus - 1):
        raise SettingsError(
            f"--gpu0-batch {gpu0_batch}: of --batch-size {batch_size} the other {gpus - 1} GPU(s) need {LEAST} samples "
            f"each: at most {batch_size - LEAST * (gpus - 1)}"
        )
    part = gpu0_batch / batch_size if gpu0_batch else None
    strategy.module = UnevenDataParallel(
        strategy.network, list(range(gpus)), lambda samples: chunk_sizes(samples, gpus, part)
    )
    shares = "+".join(map(str, chunk_sizes(batch_size, gpus, part)))
    strategy.note = f"--parallel dp: {gpus} GPUs in one process, {shares} samples of a whole batch"
    return strategy
