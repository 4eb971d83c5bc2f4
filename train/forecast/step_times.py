"""What a forecast needs to know of a training: the time of a host's steps and of the all-reduces that go with them.

Measured with the real settings, dataset, loader, model, precision and `optimizer_step`, in rounds: in the round of k
hosts the first k do a few steps of the share that they would have among k, each rank for itself, under a DDP without
peers. The other hosts wait, as they do not take part in a run of k hosts. A last round, in which
all hosts take half of the least share, shows how a step's time depends on its samples. Then the ranks of the first k
hosts sum up buffers of the very sizes of DDP's buckets. The document (all times in seconds, all sizes in bytes):

    settings: {"model", "dataset", "batch_size", "parallel", "shares", "amp", "micro_batch"}, samples: of the training
        part; gradient_bytes; threads
    buckets: sizes of DDP's buckets in the order in which it sends them off; gradients: sizes of the parameters'
        gradients, of which other buckets could be made
    capacity: [cores' worth of computing time that each rank can use, or null on a GPU]
    steps: for each rank [{"samples", "seconds": a whole step, "backward": from its begin to the last backward's,
        "update": from the last backward's end to the step's, "ready": of each bucket, to be sent off, from the last
        backward's begin, "gradients": when each was there, likewise, "cores": computing time per second}]
    without_ddp: [part of its step's time that a rank takes without DDP, as it trains between exchanges of weights; 1.0
        where none was measured]
    shares: [{"nodes", "world_size", "equal": samples of each rank, "auto": the same with --shares auto}] for all
        numbers of hosts from 1
    communication: [{"nodes", "world_size", "seconds": of each bucket's all-reduce alone, "cpu_seconds": the most that a
        rank computes for it, "busy_seconds": of each bucket's all-reduce while the cores compute something else, on
        GPUs the same as alone}] for the rounds with two ranks or more; of the options for slow links what
        train/forecast/link_options.py says
    cold: for each rank the seconds that its first steps took longer than later ones
    run: of the whole training; see there, too
"""

import dataclasses
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Size, Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from train import order, own_parts, session
from train.datasets import FETCH_SECONDS, DataError, load
from train.forecast import link_options
from train.forecast.communication import all_reduces, merged, spin, time_all
from train.model.build import build as build_model
from train.model.precision import Precision
from train.parallel import shares
from train.parallel.ddp import bucket_cap
from train.parallel.single import Single
from train.reporting.step_stats import StepStats
from train.session import Session
from train.settings import LINKS_OFF, Settings, SettingsError
from train.start import group, memory
from train.start.group import Place, from_all_ranks
from train.step import optimizer_step
from train.torch_versions import OWN_BUFFERS
from train.trial import trial

Wrong = (SettingsError, DataError)
SWEEPS = 3  # over all rounds
WARM_UP_STEPS, LEAST_STEPS, MOST_STEPS = 2, 2, 20  # of a round: not timed; timed, at least and at most
STEPS_SECONDS = 0.8  # of timed steps in a round, unless LEAST_STEPS take longer
REST_SECONDS = 0.25  # at most, between two repeats
EVERY_UP_TO = 4  # hosts: rounds of all numbers of hosts up to here, then of doubled ones


def rounds(hosts: int) -> list[int]:
    """Numbers of hosts that are measured: each up to EVERY_UP_TO, then each power of two, and all."""
    powers = [2**power for power in range(2, hosts.bit_length()) if 2**power <= hosts]
    return sorted({*range(1, min(hosts, EVERY_UP_TO) + 1), *powers, hosts})


def ends_of_hosts(names: list[str]) -> list[int]:
    """Ranks on the first 1, 2, ... hosts, from each rank's host."""
    sizes = [len(list(ranks)) for _, ranks in groupby(names)]
    return [sum(sizes[: index + 1]) for index in range(len(sizes))]


def measure(
    settings: Settings, arguments: list[str], place: Place, device: torch.device, of_all: bool = False
) -> dict[str, Any]:
    """The document's forecast (collective). Raises one of Wrong, on all ranks alike.

    of_all: only one host and all hosts count; other numbers are not measured.
    """
    worlds = ends_of_hosts(from_all_ranks(os.environ.get("MUSTER_HOST", "this host"), place))
    made, ddp = build(settings, place, device)
    try:
        batch = min(settings.batch_size, made.samples)
        capacity = spin(place) if device.type == "cpu" else None
        among = {nodes: worlds[nodes - 1] for nodes in (sorted({1, len(worlds)}) if of_all else rounds(len(worlds)))}
        every = from_all_ranks(own_steps(made, ddp, place, batch, list(among.values()), settings), place)
        sizes = from_all_ranks(ddp.bytes, place)[0]
        rest = min(REST_SECONDS, min(step["seconds"] for step in every[place.rank]))
        communication = list[dict[str, Any]]()
        for nodes, world in among.items():
            group_of = dist.new_group(list(range(world)))
            dist.barrier()
            if place.rank < world and world > 1:
                figures = time_all(all_reduces(sizes, group_of, device), group_of, place, device, rest)
                communication.append({"nodes": nodes, "world_size": world, **figures})
        dist.barrier()
        communication = merged(from_all_ranks(communication, place))
        alone = 1.0
        if len(worlds) > 1:
            step = max(step["seconds"] for step in every[0])
            kinds = link_options.kinds_of(settings, sum(communication[-1]["seconds"]), step)
            shapes = from_all_ranks(ddp.shapes, place)[0]
            options = link_options.Options(settings, kinds, shapes, ddp.network, place, device, rest)
            communication = options.added_to(communication, worlds)
            if kinds[1]:
                alone = without_ddp(made, ddp, equal(settings, batch, place.world_size)[place.rank])
        speeds = [speed(steps, batch / place.world_size) for steps in every]
        return {
            "arguments": arguments,
            "settings": {name: getattr(settings, name) for name in KEPT_SETTINGS},
            "samples": made.samples,
            "gradient_bytes": sum(sizes),
            "buckets": sizes,
            "gradients": [parameter.nbytes for parameter in ddp.trained],
            "capacity": from_all_ranks(capacity, place),
            "steps": every,
            "without_ddp": from_all_ranks(alone, place),
            "shares": [cuts(settings, batch, nodes, world, speeds) for nodes, world in enumerate(worlds, 1)],
            "communication": communication,
            "cold": from_all_ranks(ddp.cold, place),
            "run": link_options.whole_run(settings, made.total_steps, evaluated(settings, made)),
        }
    finally:
        made.close()


def evaluated(settings: Settings, made: Session) -> list[int]:
    """The steps after which an evaluation is due, counted from 1."""
    per_epoch = made.total_steps // settings.epochs
    return [epoch * per_epoch for epoch in range(1, settings.epochs + 1) if session.is_evaluated(settings, epoch)]


KEPT_SETTINGS = (
    *("model", "dataset", "batch_size", "parallel", "shares", "amp", "micro_batch", "optimizer"),
    *("compress", "sync_every", "stream", "bucket_mb"),
)


def build(settings: Settings, place: Place, device: torch.device) -> tuple[Session, "TimedDdp"]:
    """A session of this rank alone, with the strategy that watches its gradients (collective). Raises one of Wrong."""
    complaint, found = "", None
    try:
        own_parts.use(settings.project)
        dataset = load(settings, place, lambda done: group.wait_for_all(done, "fetching", FETCH_SECONDS, place))
        size = settings.image_size or dataset.image_size
        settings = dataclasses.replace(settings, image_size=size, parallel="none", shares="", **LINKS_OFF)
        found = dataset, build_model(settings.model, dataset.classes, size, settings.seed)
        trial(settings, *found)
    except Wrong as error:
        complaint = str(error)
    if complaint := group.first_complaint(complaint, place):
        raise SettingsError(complaint)
    assert found is not None
    alone = dataclasses.replace(place, rank=0, world_size=1)
    made = session.build(settings, alone, device, *found)
    ddp = TimedDdp(settings, made.strategy.network, place, device)
    made.strategy = ddp
    made.precision = TimedPrecision(settings, device, ddp.clock)
    return made, ddp


# -- shares ------------------------------------------------------------------------------------------------------------


def sizes_of(edges: Sequence[int]) -> list[int]:
    return [int(end - start) for start, end in pairwise(edges)]


def equal(settings: Settings, batch: int, world: int) -> list[int]:
    """Samples of each rank: equal parts, or those of --shares where it names so many ranks."""
    if settings.shares not in ("", "auto"):
        try:
            return sizes_of(shares.split(batch, shares.parse_shares(settings.shares, world)))
        except SettingsError:  # it is meant for another number of ranks
            pass
    return sizes_of(order.equally(world)(batch))


def cuts(settings: Settings, batch: int, nodes: int, world: int, speeds: list[float]) -> dict[str, Any]:
    auto = sizes_of(shares.split(batch, shares.settled(speeds[:world])))
    return {"nodes": nodes, "world_size": world, "equal": equal(settings, batch, world), "auto": auto}


def speed(steps: list[dict[str, Any]], samples: float) -> float:
    """Samples/s of a rank at the share next to `samples`, as --shares auto would find."""
    near = min(steps, key=lambda step: abs(step["samples"] - samples))
    return float(near["samples"] / near["seconds"])


# -- a host's own steps ------------------------------------------------------------------------------------------------


def own_steps(
    made: Session, ddp: "TimedDdp", place: Place, batch: int, worlds: list[int], settings: Settings
) -> list[dict[str, Any]]:
    """The document's steps of this rank, in sweeps over all rounds; of each number of samples the fastest sweep.

    What slows a machine down, another program or a virtual machine's neighbour, lasts for seconds: longer than a
    round, shorter than all sweeps.
    """
    found: dict[int, dict[str, Any]] = {}
    least = max(order.LEAST, batch // worlds[-1] // 2)
    for sweep in range(SWEEPS):
        for world in (*worlds, 0):  # 0: all hosts, half of the least share
            dist.barrier()
            if world and place.rank >= world:
                continue
            count = equal(settings, batch, world)[place.rank] if world else least
            entry = ddp.measure(made, count, first=sweep == 0)
            if count not in found or entry["seconds"] < found[count]["seconds"]:
                found[count] = entry
    return [found[count] for count in sorted(found)]


def without_ddp(made: Session, ddp: "TimedDdp", count: int) -> float:
    """Time of this rank's steps of `count` samples without DDP's work on gradients, as a part of that with it."""
    found = dict[bool, list[float]]({False: [], True: []})
    for ddp.quiet in (False, True) * SWEEPS:
        found[ddp.quiet].append(ddp.measure(made, count, first=False)["seconds"])
    ddp.quiet = False
    return min(1.0, min(found[True]) / min(found[False]))


class Clock:
    """Points in time of the device: CUDA's own events, or the processor's clock."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, since: Any, until: Any) -> float:
        """Waits for the device."""
        if not self.cuda:
            return float(until - since)
        until.synchronize()
        return float(since.elapsed_time(until)) / 1e3


class TimedPrecision(Precision):
    """Knows when the last backward began and ended."""

    def __init__(self, settings: Settings, device: torch.device, clock: Clock) -> None:
        super().__init__(settings, device)
        self.clock = clock

    def backward(self, loss: Tensor) -> None:
        self.begun = self.clock.now()
        super().backward(loss)
        self.ended = self.clock.now()


class TimedDdp(Single):
    """--parallel ddp with this rank alone: all of DDP's own work, and the time when each bucket could be sent.

    DDP's switches are those of train/parallel/ddp.py, except that a static graph is measured like one with unused
    parameters.
    """

    def __init__(self, settings: Settings, network: nn.Module, place: Place, device: torch.device) -> None:
        super().__init__(network, device)
        self.clock, self.quiet = Clock(device), False  # quiet: gradients are left where they are
        self.cold: float | None = None  # see the document
        self.bytes, self.ready, self.shapes = list[int](), list[Any](), list[list[Size]]()
        self.ddp = DistributedDataParallel(
            self.network,
            device_ids=[device.index] if device.type == "cuda" else None,
            process_group=dist.new_group([place.rank], use_local_synchronization=True),
            **OWN_BUFFERS,
            gradient_as_bucket_view=True,
            find_unused_parameters=settings.find_unused_parameters or settings.static_graph,
            bucket_cap_mb=bucket_cap(settings.bucket_mb),
        )
        self.ddp.register_comm_hook(place.world_size, self.note_bucket)
        self.module = self.ddp
        self.trained = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        self.there = dict[int, Any]()  # when the gradient of a parameter was
        for number, parameter in enumerate(self.trained):
            parameter.register_post_accumulate_grad_hook(partial(self.note_gradient, number))

    def note_gradient(self, number: int, parameter: Tensor) -> None:
        self.there[number] = self.clock.now()

    def note_bucket(self, world: int, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        self.bytes.append(bucket.buffer().nbytes)
        self.shapes.append([gradient.shape for gradient in bucket.gradients()])
        buffer = bucket.buffer().div_(world)  # as DDP does without a hook
        self.ready.append(self.clock.now())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    @contextmanager
    def passes(self, last: bool) -> Iterator[None]:
        with nullcontext() if last and not self.quiet else self.ddp.no_sync():
            yield

    def measure(self, made: Session, count: int, first: bool) -> dict[str, Any]:
        """The document's entry for steps of `count` samples; `first`: the device is cold, more steps to warm up."""
        batch = np.arange(min(made.settings.batch_size, made.samples), dtype=np.int64)
        step = order.step_of(batch, lambda samples: [0, count], 0, made.settings.micro_batch, made.mixes)
        batches = made.loader.training(
            (piece.indices for _ in range(MOST_STEPS + WARM_UP_STEPS) for piece in step.passes), 0
        )
        stats = StepStats(1, 0, self.device)
        self.network.train()

        def once() -> dict[str, Any]:
            """As train.trainer does it."""
            self.bytes, self.ready, self.shapes, self.there = [], [], [], {}
            begun, cpu = self.clock.now(), time.process_time()
            made.schedule.set(made.optimizer, 0)
            torch.manual_seed(order.word(made.settings.seed, 0, 0))
            sums = optimizer_step(
                self, made.optimizer, made.precision, batches, step, made.mix(),
                made.loss, made.settings.clip,
            )  # fmt: skip
            if made.ema:
                made.ema.update(1)
            stats.add(1, 1, sums.loss, sums.correct, sums.finite, step.global_count)
            return self.entry(made.precision, begun, time.process_time() - cpu)

        warm_up = list[float]()
        for _ in range(WARM_UP_STEPS if first else 1):
            warm_up.append(once()["seconds"])
            memory.keep_large_blocks(made.place.local_world_size, self.device)
        done, until = list[dict[str, Any]](), time.perf_counter() + STEPS_SECONDS
        while len(done) < MOST_STEPS and (len(done) < LEAST_STEPS or time.perf_counter() < until):
            done.append(once())
        found = medians(done)
        if self.cold is None:
            self.cold = max(0.0, sum(warm_up) - len(warm_up) * found["seconds"])
        return {"samples": count, **found}

    def entry(self, precision: Any, begun: Any, cpu: float) -> dict[str, Any]:
        ended, seconds = self.clock.now(), self.clock.seconds
        whole = seconds(begun, ended)
        return {
            "seconds": whole,
            "backward": seconds(begun, precision.begun),
            "update": seconds(precision.ended, ended),
            "ready": [seconds(precision.begun, ready) for ready in self.ready],
            "gradients": [
                seconds(precision.begun, self.there.get(number, precision.ended)) for number in range(len(self.trained))
            ],
            "cores": cpu / whole,
        }


def medians(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each figure of the steps; of lists, place by place."""

    def middle(values: list[Any]) -> Any:
        if isinstance(values[0], list):
            return [statistics.median(column) for column in zip(*values, strict=True)]
        return statistics.median(values)

    return {name: middle([entry[name] for entry in entries]) for name in entries[0]}
