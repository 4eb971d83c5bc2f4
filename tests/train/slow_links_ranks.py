"""Run by test_slow_links.py on real ranks: exchanges of a small network, without a training."""

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.checkpoints import files, own
from train.parallel import make
from train.parallel.codecs import SLICE
from train.parallel.compress import Bucket, Compressed
from train.parallel.ddp import have_equal_weights
from train.parallel.exchange import make_exchange
from train.parallel.members import find_members
from train.settings import Settings, compression
from train.start.group import Place, from_all_ranks

STEPS, SIZE = 60, 700
BYTES_SENT = 200  # where Linux's struct tcp_info has it


def changes_of(rank: int) -> Tensor:
    """What a rank adds to its weights in each step: of very different sizes."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(SIZE, generator=generator) * torch.logspace(-4, 0, SIZE)


def exchanged(place: Place, **given: Any) -> tuple[Tensor, Tensor, float]:
    """(weights after STEPS steps, those without any loss, a step of the code at the largest change)"""
    network = nn.ParameterDict({"a": torch.zeros(300), "b": torch.zeros(SIZE - 300)})
    exchange = make_exchange(Settings(**given), network, find_members(place))
    parts = [rank + 1 for rank in range(place.world_size)]
    mine = changes_of(place.rank).split([300, SIZE - 300])
    for step in range(1, STEPS + 1):
        with torch.no_grad():
            network["a"].add_(mine[0])
            network["b"].add_(mine[1])
        exchange.after_step(step, parts)
    exchange.settle()
    exchange.close()
    weights = torch.cat([network["a"].detach(), network["b"].detach()])
    terms = torch.stack([part * changes_of(rank) for rank, part in enumerate(parts)])
    exact = STEPS * terms.sum(0) / sum(parts)
    largest = max(changes_of(rank).abs().max().item() for rank in range(place.world_size))
    return weights, exact, given["sync_every"] * largest / 7


def feedback(place: Place, out: Path) -> Any:
    return exchanged(place, sync_every=4, compress="int4")


def streamed_feedback(place: Place, out: Path) -> Any:
    return exchanged(place, sync_every=4, stream=2, compress="int4")


def streamed(place: Place, out: Path) -> Any:
    return exchanged(place, sync_every=6, stream=2)


def steered(place: Place, out: Path) -> Any:
    """For some periods: (momentum of SGD after 19 steps, what it would be by the promise), of two parameters, of which
    the second has twice the learning rate."""
    return [
        with_momentum(place, [(0, 0), (0, 0)], sync_every=1),
        with_momentum(place, [(0, 0), (0, 0)], sync_every=4),
        with_momentum(place, [(2, 2), (0, 2)], sync_every=4, stream=2),
    ]


def with_momentum(place: Place, times: list[tuple[int, int]], **given: Any) -> list[tuple[Tensor, Tensor]]:
    """times: of each parameter (the step in the period in which it leaves, and how many steps later it is there)."""
    network = nn.ParameterDict({"a": torch.zeros(5), "b": torch.zeros(5)})
    groups: list[dict[str, Any]] = [{"params": [network["a"]]}, {"params": [network["b"]], "lr_factor": 2.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    every, parts = given["sync_every"], [rank + 1 for rank in range(place.world_size)]
    exchange = make_exchange(Settings(optimizer="sgd", **given), network, find_members(place), optimizer=optimizer)
    for step in range(1, 20):
        for group in optimizer.param_groups:
            group["lr"] = step / 50 * group.get("lr_factor", 1.0)
        for parameter in network.values():
            parameter.grad = gradient_of(place.rank, step)
        optimizer.step()
        exchange.after_step(step, parts)
    exchange.close()
    return [
        (optimizer.state[parameter]["momentum_buffer"], promised(parts, place.rank, every, *when))
        for parameter, when in zip(network.values(), times, strict=True)
    ]


def gradient_of(rank: int, step: int) -> Tensor:
    return torch.randn(5, generator=torch.Generator().manual_seed(100 * rank + step))


def promised(parts: list[int], rank: int, every: int, leaves: int, later: int) -> Tensor:
    """This rank's momentum when after each exchange it begins with the mean of all ranks' steps in the period, each
    weighted by its learning rate."""
    own = [torch.zeros(5) for _ in parts]
    walked, rates, mean = [torch.zeros(5) for _ in parts], 0.0, torch.zeros(5)
    for step in range(1, 20):
        own = [0.9 * each + gradient_of(number, step) for number, each in enumerate(own)]
        walked = [before + each * step / 50 for before, each in zip(walked, own, strict=True)]
        rates += step / 50
        took = (step - later) % every == leaves and step - later > 0
        if took and later:
            own = [mean] * len(parts)
        if step % every == leaves:
            mean = torch.stack([part * each for part, each in zip(parts, walked, strict=True)]).sum(0)
            mean = mean / sum(parts) / rates
            walked, rates = [torch.zeros(5) for _ in parts], 0.0
        if took and not later:
            own = [mean] * len(parts)
    return own[rank]


def rounded(place: Place, out: Path) -> Any:
    """For buckets, all but the last under way together: (the mean in bf16, each rank's gradients)."""
    hook = Compressed(compression("bf16"), find_members(place), torch.device("cpu"), 60.0, 0)
    sizes = [(1, torch.float32), (SLICE, torch.float64), (0, torch.float32), (40 * SLICE + 5, torch.float32)]
    sizes.append((3 * SLICE + 7, torch.float32))
    every = [[gradients(rank, *size) for rank in range(place.world_size)] for size in sizes]
    mine = [ranks[place.rank].clone() for ranks in every]
    works = []
    for number, values in enumerate(mine[:-1]):
        works.append(hook.start(Bucket(values, [values], number, False)))
        time.sleep(0.05 * place.rank)
    for work in works:
        work.wait()
    assert hook.all_reduce is not None and hook.all_reduce.moved > 0
    memory = hook.code.data_ptr(), hook.all_reduce.inbox.data_ptr()
    hook.start(Bucket(mine[-1], [mine[-1]], len(mine), False)).wait()
    assert (hook.code.data_ptr(), hook.all_reduce.inbox.data_ptr()) == memory  # large enough: used again
    hook.close()
    return list(zip(mine, every, strict=True))


def gradients(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank), dtype=dtype)


def starts(place: Place, out: Path) -> Any:
    """(weights equal before; after the start; bytes that it sent) for equal and for unequal weights, each."""
    equal, after, sent = [], [], []
    for seed in (0, place.rank):
        torch.manual_seed(seed)
        network = nn.Linear(300, 100)
        equal.append(have_equal_weights(network, place))
        before = bytes_sent()
        make(Settings(), network, place, torch.device("cpu"))
        sent.append(max(from_all_ranks(bytes_sent() - before, place)))
        after.append(have_equal_weights(network, place))
    return equal, after, sent


def low_rank(place: Place, out: Path) -> Any:
    """(the gradient that PowerSGD of rank 3 gives after one that was 0, the mean of the ranks'): it has rank 1."""
    torch.manual_seed(0)
    network = nn.Linear(64, 64, bias=False)
    inputs = torch.randn(1, 64)
    strategy = make(Settings(compress="powersgd:3"), network, place, torch.device("cpu"), 10)
    for step in range(5):
        network.weight.grad = None
        with strategy.passes(last=True):
            (strategy.module(inputs) * (step != 3)).sum().backward()
    strategy.close()
    assert network.weight.grad is not None
    return network.weight.grad, torch.ones(64, 1) @ inputs


def bytes_sent() -> int:
    """By this process, over its TCP connections of now: gloo's and the rendezvous's."""
    return sum(sent_through(int(path.name)) for path in Path("/proc/self/fd").iterdir())


def sent_through(descriptor: int) -> int:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            content = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_SENT + 8)
    except OSError:  # no TCP, or gone meanwhile
        return 0
    return int.from_bytes(content[BYTES_SENT : BYTES_SENT + 8], sys.byteorder)


def mean_of_members(place: Place, out: Path) -> Any:
    """Two members' files, which all hosts see; member 0 had three quarters of the samples."""
    path = files.path_of(out, 4)
    if place.rank == 0:
        for member, (part, change) in enumerate([(0.75, 1.0), (0.25, 5.0)]):
            momentum = {"exp_avg": torch.full((2,), change + 1), "step": torch.tensor(7.0)}
            state = {
                "part": part,
                "model": {"w": torch.full((2,), 10 + change)},
                "optimizer": {"state": {"w": momentum}, "groups": [{"lr": 0.1, "names": ["w"]}]},
                "scaler": {"scale": 4.0},
            }
            files.write(out, 4, state, member=member, members=2)
    dist.barrier()
    read, number, _ = own.read_any(path, 2, place)
    return *own.mean(read, {"w": torch.full((2,), 10.0)}, place), number
