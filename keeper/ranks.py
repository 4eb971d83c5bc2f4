"""The run's processes on this host, below the keeper: torchrun, what it starts, what they print, and their memory."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set

from keeper.output import Reader, Writer

PIPE_BYTES = 1 << 20  # of each rank's pipe: so much may be printed while the disk is slow
CHUNK_BYTES = 1 << 18
DRAIN_SECONDS = 0.5  # for what an ended rank has printed to be read
OUTPUT_SECONDS = 30.0  # the same at the end of the run, when nothing else waits for it: a disk may be slow
KILLED_SECONDS = 5.0  # for killed processes to be gone: one that waits for a disk takes its time
PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h

LAUNCHER = "torchrun"  # the stream of torchrun itself


class Outputs:
    """Everything that ranks and torchrun print, from their pipes to files; a thread of its own copies it."""

    def __init__(self, folder: Path, ranks: Sequence[int], failed: Callable[[OSError], None], attempt: int = 1) -> None:
        """failed: called once, from the thread, when the files cannot be written (a full disk). attempt: a later one
        begins in each rank's output with a line that says so."""
        folder.mkdir(mode=0o700, exist_ok=True)
        for stream in (*(f"rank-{rank}" for rank in ranks), LAUNCHER):
            (folder / f"{stream}.log").touch()  # a rank that prints nothing has a file, too
            if attempt > 1 and stream != LAUNCHER:
                with contextlib.suppress(OSError), contextlib.closing(Writer(folder, stream)) as writer:
                    _, last = Reader(folder).read(stream, max(0, writer.end - 1), 1)
                    line = b"" if last in (b"", b"\n") else b"\n"  # a killed rank may have been in the midst of one
                    writer.append(line + f"-- attempt {attempt} --\n".encode())
        self.pipes = Path(tempfile.mkdtemp(prefix="muster-pipes-"))
        self._failed: Optional[Callable[[OSError], None]] = failed
        self._writers: Dict[int, Writer] = {}  # by file descriptor
        self._by_stream: Dict[str, Writer] = {}
        self._selector = selectors.DefaultSelector()
        self._idle = threading.Event()
        self._ending = False
        for rank in ranks:
            path = self.pipes / f"rank-{rank}"
            os.mkfifo(path, 0o600)
            self._add(os.open(path, os.O_RDWR | os.O_NONBLOCK), Writer(folder, f"rank-{rank}"), f"rank-{rank}")
        reading, self.launcher_pipe = os.pipe()
        os.set_blocking(reading, False)
        self._add(reading, Writer(folder, LAUNCHER), LAUNCHER)
        self._thread = threading.Thread(target=self._copy, daemon=True, name="output")
        self._thread.start()

    def _add(self, descriptor: int, writer: Writer, stream: str) -> None:
        with contextlib.suppress(OSError):  # more than this user may have
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._writers[descriptor] = writer
        self._by_stream[stream] = writer
        self._selector.register(descriptor, selectors.EVENT_READ)

    def last_lines(self, stream: str, count: int) -> List[str]:
        """What a stream said last."""
        return self._by_stream[stream].last_lines(count)

    def drain(self, seconds: float = DRAIN_SECONDS) -> bool:
        """Wait until all that ended processes have printed is read, so long at most; whether it is."""
        deadline, is_read = time.monotonic() + seconds, False
        for _ in range(2):  # the first time may be of a look that began before
            self._idle.clear()
            is_read = self._idle.wait(max(0.0, deadline - time.monotonic()))
        return is_read

    def close(self) -> None:
        """After the last process: read the rest, close the files."""
        if not self.drain(OUTPUT_SECONDS):
            self._lose(TimeoutError(f"the disk has not taken it within {OUTPUT_SECONDS:.0f} s"))
        self._ending = True
        self._thread.join(DRAIN_SECONDS)
        for writer in self._writers.values():
            with contextlib.suppress(OSError):
                writer.close()
        shutil.rmtree(self.pipes, ignore_errors=True)

    def _copy(self) -> None:
        while not self._ending:
            ready = self._selector.select(0.05)
            if not ready:
                self._idle.set()
            for chosen, _ in ready:
                with contextlib.suppress(BlockingIOError):
                    data = os.read(chosen.fd, CHUNK_BYTES)
                    if data:
                        self._keep(self._writers[chosen.fd], data)
                    else:
                        self._selector.unregister(chosen.fd)

    def _keep(self, writer: Writer, data: bytes) -> None:
        try:
            writer.append(data)
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        if self._failed is not None:
            failed, self._failed = self._failed, None
            failed(error)


class Launcher:
    """torchrun as a child of this process, and all that it starts."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], outputs: Outputs) -> None:
        """Raises OSError where the command cannot be started."""
        become_reaper()
        # A session of its own: what it starts gets no signal that was meant for this process's group.
        self._process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=outputs.launcher_pipe,
            stderr=outputs.launcher_pipe,
            start_new_session=True,
        )
        self.ended: Optional[int] = None

    def reap(self) -> Optional[int]:
        """Take leave of ended children, orphans too. torchrun's status when it has just ended (128 + n: signal n)."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return None
            if pid == 0:
                return None
            if pid == self._process.pid and self.ended is None:
                code = os.waitstatus_to_exitcode(status)
                self._process.returncode = code
                self.ended = code if code >= 0 else 128 - code
                return self.ended

    def terminate(self) -> None:
        """SIGTERM to torchrun alone: it passes it on."""
        if self.ended is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)

    def kill(self) -> List[int]:
        """SIGKILL to every process below this one, until none is left; those that do not end in time are returned."""
        deadline = time.monotonic() + KILLED_SECONDS
        while True:
            left = descendants(os.getpid())
            if not left or time.monotonic() > deadline:
                return sorted(left)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def become_reaper() -> None:
    """Make orphans children of this process, as they are of a container's first process anyway."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> Set[int]:
    """Living processes below `root` (those that have ended and wait to be reaped do not count)."""
    parents: Dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (found := process_state(int(name))) is not None and found[0] not in "ZX":
            parents[int(name)] = found[1]
    below: Set[int] = set()
    while True:
        more = {pid for pid, parent in parents.items() if (parent == root or parent in below) and pid not in below}
        if not more:
            return below
        below |= more


def process_state(pid: int) -> Optional[tuple[str, int]]:
    """(state letter, parent) of a process as /proc says it; None: there is none."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return after_name[0].decode(), int(after_name[1])


class Reports:
    """The Unix datagram socket on which ranks and torchrun's agent report; a thread hands each report on."""

    def __init__(self, take: Callable[[Mapping[str, Any]], None]) -> None:
        self.path = str(Path(tempfile.mkdtemp(prefix="muster-keeper-")) / "socket")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._take = take
        threading.Thread(target=self._receive, daemon=True, name="reports").start()

    def close(self) -> None:
        """Leave no file behind."""
        shutil.rmtree(Path(self.path).parent, ignore_errors=True)

    def _receive(self) -> None:
        while True:
            data = self._socket.recv(65536)
            try:
                words = json.loads(data)
            except ValueError:
                continue
            if isinstance(words, dict):
                self._take(words)


class Memory:
    """The container's memory as its control group counts it (version 2, or version 1)."""

    def __init__(self, root: Path = Path("/sys/fs/cgroup")) -> None:
        two = (root / "memory.events", root / "memory.max", root / "memory.peak")
        one = tuple(
            root / "memory" / f"memory.{name}" for name in ("oom_control", "limit_in_bytes", "max_usage_in_bytes")
        )
        self._events, self._limit, self._peak = two if two[0].exists() else one
        self._killed_before = self._killed()

    def _killed(self) -> int:
        """How many processes the kernel has killed here for want of memory."""
        for line in _text(self._events).splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
        return 0

    def out_of_memory(self) -> Optional[str]:
        """What to say of it, if the kernel has killed a process of this container since the start."""
        if self._killed() <= self._killed_before:
            return None
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = _text(self._limit)
        size = min(int(limit), total) if limit.isdigit() else total
        figures = f"limit {size / 2**30:.1f} GiB"
        if (peak := _text(self._peak)).isdigit():  # Linux before 5.19 has none in version 2
            figures += f", peak {int(peak) / 2**30:.1f} GiB"
            if int(peak) < size / 2:
                figures += "; something else was full: the host itself, or a limit around the container"
        return f"out of memory: killed by the kernel ({figures})"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
