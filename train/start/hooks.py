"""What the agent changes in torchrun: ranks' arguments, where their output goes, and what the keeper learns at once.

All of it is in one place of torch's, `start_processes` as its elastic agent calls it, and in ProcessFailure, which is
made the moment torchrun sees that a rank has failed, before it ends the others. Imports torch.

Where MUSTER_PIPES names a folder, stdout and stderr of each rank both go to the FIFO rank-<rank> there, which keeps
their order. Where MUSTER_KEEPER names a datagram socket, the keeper is told there (keeper/ranks.py):

    {"agent": "started", "pids": {"<rank>": pid}}
    {"agent": "failed", "failure": one failure as in failure.json, its texts cut off where they are long}
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from contextlib import suppress
from typing import Any

from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, PContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from train.start.failures import Failure, describe
from train.start.placeholders import fill

DATAGRAM_BYTES = 4096  # the most that the keeper reads of one


class Pipes(LogsSpecs):
    """As `specs` says, but that both streams of each rank go to a FIFO."""

    def __init__(self, specs: LogsSpecs, folder: str) -> None:
        super().__init__()
        self.specs = specs
        self.folder = folder

    @property
    def root_log_dir(self) -> str:
        return self.specs.root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """envs: local rank -> that rank's variables. The FIFOs are there, and somebody reads them."""
        fifos = {local_rank: f"{self.folder}/rank-{env['RANK']}" for local_rank, env in envs.items()}
        return dataclasses.replace(self.specs.reify(envs), stdouts=fifos, stderrs=fifos)


def install(to_fill: int = 0) -> None:
    """`to_fill`: how many of the last words of a rank's command may hold placeholders, to be filled in for that rank.

    Raises RuntimeError or KeyError for a torch that this was not written for."""
    if vars(local_elastic_agent)["start_processes"] is not multiprocessing.start_processes:
        raise RuntimeError("torch's elastic agent does not start its processes as torch 2.13 does")
    ranks: dict[int, int] = {}

    def start_processes(
        *, args: dict[int, tuple[str, ...]], envs: dict[int, dict[str, str]], logs_specs: LogsSpecs, **others: Any
    ) -> PContext:
        ranks.update({local_rank: int(env["RANK"]) for local_rank, env in envs.items()})
        args = {rank: with_values(words, to_fill, os.environ | envs[rank]) for rank, words in args.items()}
        if folder := os.environ.get("MUSTER_PIPES"):
            logs_specs = Pipes(logs_specs, folder)
        context = multiprocessing.start_processes(args=args, envs=envs, logs_specs=logs_specs, **others)
        tell({"agent": "started", "pids": {str(ranks[local]): pid for local, pid in context.pids().items()}})
        return context

    vars(local_elastic_agent)["start_processes"] = start_processes
    made = ProcessFailure.__post_init__

    def note(self: Any) -> None:
        self.noticed = time.time()  # torch keeps whole seconds, too coarse to know which rank failed first
        made(self)
        tell_failure(describe(ranks.get(self.local_rank), self))

    ProcessFailure.__post_init__ = note  # type: ignore[method-assign]


def with_values(words: tuple[str, ...], to_fill: int, environment: dict[str, str]) -> tuple[str, ...]:
    """A rank's command with the placeholders of its last words filled in."""
    fixed = len(words) - to_fill
    return (*words[:fixed], *fill(words[fixed:], environment))


def tell_failure(failure: Failure) -> None:
    """Tells the keeper of a failure: its exception from the beginning, its traceback to the end, as far as they fit."""
    kept = DATAGRAM_BYTES
    while True:
        cut = {"exception": failure["exception"][:kept], "traceback": failure["traceback"][-kept:]}
        words = {"agent": "failed", "failure": failure | cut}
        if len(encoded(words)) <= DATAGRAM_BYTES:
            return tell(words)
        kept //= 2


def tell(words: dict[str, Any]) -> None:
    """Sends the keeper one datagram, if there is a keeper. Nothing holds up training: one that cannot go is lost."""
    if path := os.environ.get("MUSTER_KEEPER"):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(encoded(words), socket.MSG_DONTWAIT, path)


def encoded(words: dict[str, Any]) -> bytes:
    return json.dumps(words, ensure_ascii=False).encode(errors="replace")
