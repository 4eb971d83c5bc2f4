"""What the agent changes in torchrun: ranks' arguments, where their output goes, what the keeper learns at once, and
ranks that are forked.

It is done in five places of torch's: `start_processes` and `get_subprocess_handler`, as its elastic agent calls them;
ProcessFailure, which is made the moment torchrun sees that a rank has failed, before it ends the others;
`_exit_barrier`, in which torchrun, whose ranks have all ended well, waits for those of the other hosts; and the store
that it makes on the first host, for all ranks. Imports torch.

Where MUSTER_PIPES names a folder, stdout and stderr of each rank both go to the FIFO rank-<rank> there, which keeps
their order. Where MUSTER_KEEPER names a datagram socket, the keeper is told there (keeper/ranks.py):

    {"agent": "started", "pids": {"<rank>": pid}}
    {"agent": "failed", "failure": one failure as in failure.json, its texts cut off where they are long}
    {"agent": "rank_ended", "rank": n}    with status 0, and not because torchrun ended it
    {"agent": "ended"}                    so have all ranks of this host
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, api, subprocess_handler
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

from keeper.placeholders import fill, names
from train.start import one_address
from train.start.failures import Failure, describe
from train.start.forked import Handler, Rank

DATAGRAM_BYTES = 4096  # the most that the keeper reads of one
OTHERS_WAIT_SECONDS = 20 * 86400  # for the ranks of other hosts (torch counts milliseconds in 31 bits)


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


def install(
    own_words: int, filling: bool = False, forked: Sequence[Rank] = (), ended: Callable[[], object] = lambda: None
) -> None:
    """`own_words`: how many of the last words of a rank's command are the script's or module's own arguments.
    `filling`: whether placeholders in these are filled in, for each rank.
    `forked`: processes that wait to be the ranks, by local rank; none where torchrun shall start the processes.
    `ended`: called when all ranks of this host have ended well.

    Raises RuntimeError or KeyError for a torch that this was not written for.
    """
    socket.getfqdn = lambda name="": name or socket.gethostname()  # torch asks the name server for each of its events
    ranks: dict[int, int] = {}

    def start_processes(
        *, args: dict[int, tuple[str, ...]], envs: dict[int, dict[str, str]], logs_specs: LogsSpecs, **others: Any
    ) -> Any:
        ranks.update({local_rank: int(env["RANK"]) for local_rank, env in envs.items()})
        if filling and any("free_port" in names(words[len(words) - own_words :]) for words in args.values()):
            for env in envs.values():  # else torch takes torchrun's store to be at the script's own tcp:// address, too
                env["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        if filling:
            args = {rank: with_values(words, own_words, os.environ | envs[rank]) for rank, words in args.items()}
        if folder := os.environ.get("MUSTER_PIPES"):
            logs_specs = Pipes(logs_specs, folder)
        context: Any = multiprocessing.start_processes(args=args, envs=envs, logs_specs=logs_specs, **others)
        for local, handler in context.subprocess_handlers.items():
            _tell_of_end(handler, ranks[local])
        tell({"agent": "started", "pids": {str(ranks[local]): pid for local, pid in context.pids().items()}})
        return context

    def get_subprocess_handler(
        *, args: tuple[str, ...], env: dict[str, str], stdout: str, stderr: str, local_rank_id: int, **others: Any
    ) -> Any:
        if local_rank_id >= len(forked) or forked[local_rank_id].started:
            return torchs_handler(
                args=args, env=env, stdout=stdout, stderr=stderr, local_rank_id=local_rank_id, **others
            )
        rank = forked[local_rank_id]
        rank.start(list(args[len(args) - own_words :]), os.environ | env, stdout, stderr)
        return Handler(rank)

    torchs_handler = replace(
        api, "get_subprocess_handler", subprocess_handler.get_subprocess_handler, get_subprocess_handler
    )
    replace(static_tcp_rendezvous, "TCPStore", TCPStore, one_address.store)
    replace(local_elastic_agent, "start_processes", multiprocessing.start_processes, start_processes)
    _hook_exit_barrier(ended)
    made = ProcessFailure.__post_init__

    def note(self: Any) -> None:
        self.noticed = time.time()  # torch keeps whole seconds, too coarse to know which rank failed first
        made(self)
        tell_failure(describe(ranks.get(self.local_rank), self))

    ProcessFailure.__post_init__ = note  # type: ignore[method-assign]


def _tell_of_end(handler: Any, rank: int) -> None:
    """Have the keeper told when torchrun, which asks for it all the time, sees that a rank has ended with status 0."""
    poll, close = handler.proc.poll, handler.close
    to_tell = [rank]

    def polled() -> Any:
        status = poll()
        if status == 0 and to_tell:
            tell({"agent": "rank_ended", "rank": to_tell.pop()})
        return status

    def closed(*signals: Any, **more: Any) -> Any:
        to_tell.clear()
        return close(*signals, **more)

    handler.proc.poll, handler.close = polled, closed


def _hook_exit_barrier(ended: Callable[[], object]) -> None:
    """Have torchrun say that its ranks have ended, and then wait as long as those of other hosts go on: the first
    host's torchrun holds the store that they use."""
    torchs_barrier = SimpleElasticAgent._exit_barrier

    def exit_barrier(agent: Any) -> None:
        tell({"agent": "ended"})
        ended()
        if "MUSTER_KEEPER" in os.environ:
            agent._exit_barrier_timeout = OTHERS_WAIT_SECONDS
        torchs_barrier(agent)

    SimpleElasticAgent._exit_barrier = exit_barrier  # type: ignore[method-assign]


def replace(module: Any, name: str, torchs: Any, ours: Any) -> Any:
    """Puts a function of ours in the place of torch's, which is returned."""
    if vars(module)[name] is not torchs:
        raise RuntimeError(f"torch does not start its processes as torch 2.11 to 2.13 do: {module.__name__}.{name}")
    setattr(module, name, ours)
    return torchs


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
