"""Gradients in fewer bits between hosts (`--compress`): communication hooks of torch's DDP, in two stages.

Within a host gradients are summed whole, the host's first rank exchanges the sum with the other hosts', in bf16, in
fp16 or as matrices of low rank (PowerSGD, Vogels et al. 2019, arXiv 1905.13727), and hands the result out. So one rank
of a host sends, and error feedback is the host's.

These exchanges are torch's own hooks, but for bf16 and fp16 on CPUs: there torch turns a whole bucket into the other
type before the first byte leaves, and gloo adds up in it. With train.parallel.coded_all_reduce processor and link work
at the same time, gradients are added up in their own type, and it takes no more computing time (benchmarks/RESULTS.md,
2026-11-26, sixth entry).

PowerSGD's ranks begin at 3: for 1 and 2 torch orthogonalises by Gram-Schmidt, which gives 0 / 0 for a gradient of a
lower rank, such as that of a small layer; with an epsilon, columns that were 0 once stay so. From 3 on it takes QR.

PowerSGD's hook makes three all-reduces in a row for each bucket, the later ones from callbacks. With gloo those of two
buckets would go out in another order on each host, and the messages of train.parallel.coded_all_reduce are told apart
by their order; so on CPUs a thread of its own takes one bucket after the other, with a process group of its own, while
backward goes on. On GPUs a stream does.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

from train.parallel.codecs import Codec, codec_of
from train.parallel.coded_all_reduce import CodedAllReduce, keep_to_one_thread, room_for
from train.parallel.members import Members, group_between, group_within
from train.settings import Compression

WHOLE_STEPS = 0.1  # part of a run before PowerSGD begins, as torch advises: the first gradients matter most
LEAST_WHOLE = 2  # DDP sorts its buckets anew after the first step; PowerSGD's memory is by bucket
DICTS = ("error_dict", "p_memory_dict", "q_memory_dict")  # of PowerSGDState, by the number of a bucket


@dataclass(frozen=True)
class Bucket:
    """What the hooks read of torch's GradBucket, which is only there while DDP calls."""

    values: Tensor
    views: list[Tensor]  # of them, in the parameters' shapes
    number: int
    last: bool

    @staticmethod
    def of(bucket: Any) -> "Bucket":
        return Bucket(bucket.buffer(), bucket.gradients(), bucket.index(), bucket.is_last())

    def buffer(self) -> Tensor:
        return self.values

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return self.last

    def gradients(self) -> list[Tensor]:
        return self.views


@dataclass(frozen=True)
class Gradients:
    """A bucket's, which become the mean of so many members; for the all-reduce."""

    values: Tensor
    codec: Codec
    members: int

    def encode_own(self, part: slice, code: Tensor) -> None:
        self.codec.encode_slice(self.values[part], code)

    def encode_mean(self, part: slice, code: Tensor, received: Mapping[int, Tensor]) -> None:
        total = self.values[part]
        theirs = torch.empty_like(total)
        for code_of_it in received.values():
            self.codec.decode_slice(code_of_it, theirs)
            total.add_(theirs)
        self.codec.encode_slice(total.div_(self.members), code)
        self.codec.decode_slice(code, total)  # what the others get

    def take_mean(self, part: slice, code: Tensor) -> None:
        self.codec.decode_slice(code, self.values[part])


def whole_steps(steps: int) -> int:
    """Steps at the begin of a run, of so many, in which PowerSGD sends whole gradients."""
    return max(LEAST_WHOLE, round(WHOLE_STEPS * steps))


class Compressed:
    """The state of the hook `compressed`. The mean that it gives is over the members, not over the ranks:
    a rank's loss is scaled for that (`Ddp.scale`)."""

    def __init__(self, how: Compression, members: Members, device: torch.device, timeout: float, steps: int) -> None:
        """steps: of the whole run. timeout: of a collective, in seconds. Collective."""
        self.members, self.device, self.how = members, device, how
        self.within = group_within(members, device, timeout)
        self.between = group_between(members, device, timeout)
        self.power: PowerSGDState | None = None
        self.all_reduce: CodedAllReduce | None = None
        self.code = torch.empty(0, dtype=torch.uint8)  # of a bucket; memory that is used again
        if how.kind != "powersgd" and device.type == "cpu":
            self.all_reduce = CodedAllReduce(self.between, members, codec_of(how.kind))
        if how.kind == "powersgd":
            self.power = PowerSGDState(self.between, how.rank, start_powerSGD_iter=whole_steps(steps))
        self.thread = ThreadPoolExecutor(1, "compress") if device.type == "cpu" else None
        if self.thread is not None and self.all_reduce is not None:
            keep_to_one_thread(self.thread)  # backward has the others
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, bucket: Any) -> Future[Tensor]:
        copy = Bucket.of(bucket)
        if self.thread is not None:
            done: Future[Tensor] = Future()
            self.thread.submit(self.settle, done, copy)
            return done
        assert self.stream is not None
        done = Future(devices=[self.device])
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            copy.buffer().record_stream(self.stream)
            done.set_result(self.mean(copy))
        return done

    def settle(self, done: Future[Tensor], bucket: Bucket) -> None:
        try:
            done.set_result(self.mean(bucket))
        except Exception as error:
            done.set_exception(error)  # type: ignore[arg-type]  # torch's own annotation is wrong

    @torch.no_grad()
    def mean(self, bucket: Bucket) -> Tensor:
        """The bucket's buffer, with the sum of all ranks divided by the number of members."""
        buffer, leader = bucket.buffer(), self.members.here.start
        if self.within is not None:
            dist.reduce(buffer, leader, group=self.within)
        if self.members.leads and self.all_reduce is not None:
            codec, count = self.all_reduce.codec, len(buffer)
            gradients = Gradients(buffer, codec, len(self.members.ranks))
            self.code = room_for(codec.size(count), self.code)
            self.all_reduce.run(gradients, count, self.code[: codec.size(count)])
        elif self.members.leads:
            result = self.hook()(bucket).wait()
            if result.data_ptr() != buffer.data_ptr():
                buffer.copy_(result)
        if self.within is not None:
            dist.broadcast(buffer, leader, group=self.within)
        return buffer

    def hook(self) -> Callable[[Any], Future[Tensor]]:
        if self.power is not None:
            power = self.power
            return lambda bucket: powerSGD_hook(power, bucket)
        made = default_hooks.bf16_compress_hook if self.how.kind == "bf16" else default_hooks.fp16_compress_hook
        between = self.between
        assert between is not None
        return lambda bucket: made(between, bucket)

    def state(self) -> dict[str, Any] | None:
        """For this member's own checkpoint: PowerSGD's errors and matrices by bucket; None where there is nothing."""
        if self.power is None or not self.members.leads:
            return None
        state: Any = self.power.rng.get_state(legacy=True)
        kind, words, *rest = state
        kept = {name: dict(getattr(self.power, name)) for name in DICTS}
        random = [str(kind), torch.from_numpy(words.astype(np.int64)), *rest]
        return {"iter": self.power.iter, "whole": self.power.start_powerSGD_iter, "random": random, **kept}

    def load(self, state: dict[str, Any]) -> None:
        """The reverse, on as many ranks as then and after the first backward, which changes the state."""
        if self.power is None or not self.members.leads:
            return
        self.power.iter, self.power.start_powerSGD_iter = state["iter"], state["whole"]
        kind, words, *rest = state["random"]
        self.power.rng.set_state((kind, words.numpy().astype(np.uint32), *rest))
        for name in DICTS:
            setattr(self.power, name, {number: each.to(self.device) for number, each in state[name].items()})

    def begin_at(self, step: int) -> None:
        """Without a state to go on with: errors begin at nothing, and whole gradients end where they would have."""
        if self.power is not None:
            self.power.iter = min(step, max(0, self.power.start_powerSGD_iter - LEAST_WHOLE))

    def close(self) -> None:
        if self.thread is not None:
            self.thread.shutdown()


def compressed(state: Compressed, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """For `register_comm_hook`: DDP calls it for each bucket whose gradients are there, on all ranks in one order."""
    return state.start(bucket)
