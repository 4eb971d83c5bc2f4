"""How this room runs commands: Podman as root, output followed line by line, one error shape.

Not for deciding what a machine's Podman needs (runtime, ulimits): that is in its
/etc/containers/containers.conf.d, written by `make deploy`'s role `engine`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

REPOSITORY = Path(__file__).resolve().parent.parent
BUILD = REPOSITORY / "build"
TAIL_LINES = 15
# Bounds, so that a command that hangs ends with a message that names it; not what anything should take.
COMMAND_SECONDS = 600.0
BUILD_SECONDS = 3600.0
LOCK_SECONDS = 1800.0
ENDING_SECONDS = 30.0  # for a command under way when we are interrupted

Progress = Callable[[str], None]


class ContainersError(Exception):
    """What went wrong, where, and what to do about it: one message for the user."""

    def __init__(self, what: str, where: str, mend: str) -> None:
        super().__init__(f"{what}\n  where: {where}\n  do: {mend}")
        self.what, self.where, self.mend = what, where, mend


class CommandFailed(Exception):
    """A command ended with a status other than 0; `tail` holds its last lines."""

    def __init__(self, command: Sequence[str], status: int, tail: str) -> None:
        super().__init__(f"`{' '.join(command)}` ended with status {status}:\n{tail}")
        self.command, self.status, self.tail = list(command), status, tail


@cache
def as_root() -> tuple[str, ...]:
    """What to put before a command so that it runs as root: nothing, or sudo without a password.

    Raises:
        ContainersError: neither root nor passwordless sudo.
    """
    if os.geteuid() == 0:
        return ()
    sudo = shutil.which("sudo")
    if sudo and subprocess.run([sudo, "-n", "true"], capture_output=True, timeout=ENDING_SECONDS).returncode == 0:
        return (sudo, "-n")
    raise ContainersError(
        "building images and the lab need root, or sudo without a password, on this machine",
        "the control machine",
        "run it as root, or allow this user passwordless sudo; `make local` trains without either",
    )


def tool(name: str) -> str:
    """Path of a program, also looked for in the sbin folders, which a user's PATH may lack.

    Raises:
        ContainersError: it is not installed.
    """
    path = shutil.which(name, path=os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin")
    if path is None:
        raise ContainersError(
            f"`{name}` is not installed",
            "the control machine",
            f"`make deploy` and `make lab` install it as root; by hand: apt-get install {name}",
        )
    return path


def root_command(name: str, *arguments: str, env: Mapping[str, str] | None = None) -> list[str]:
    """`name arguments` as a command line that runs as root, with `env` added to its environment."""
    settings = [f"{key}={value}" for key, value in (env or {}).items()]
    return [*as_root(), *(["env", *settings] if settings else []), tool(name), *arguments]


def podman(*arguments: str, stdin: str = "") -> str:
    """Output of `podman arguments`; raises CommandFailed."""
    return output(root_command("podman", *arguments), stdin=stdin)


def image_label(reference: str, label: str) -> str | None:
    """Value of an image's label; None if there is no such image or label."""
    try:
        value = podman("image", "inspect", "--format", f'{{{{index .Labels "{label}"}}}}', reference).strip()
    except CommandFailed:
        return None
    return value or None


def output(command: Sequence[str], stdin: str = "") -> str:
    """Standard output of a short command; raises CommandFailed with the end of what it said.

    The command is not in our process group and is let end when we are interrupted: a `podman run` that Ctrl-C cuts off
    in the middle leaves a network namespace and a reserved address that no Podman command can remove.
    """
    with subprocess.Popen(
        command, text=True, process_group=0,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            said, complaint = process.communicate(stdin, timeout=COMMAND_SECONDS)
        except subprocess.TimeoutExpired as late:
            process.kill()
            raise CommandFailed(command, 124, f"it did not end within {COMMAND_SECONDS:.0f} s") from late
        except BaseException:
            _let_end(process)
            raise
    if process.returncode != 0:
        raise CommandFailed(command, process.returncode, last_lines(complaint or said))
    return said


def follow(command: Sequence[str], on_line: Callable[[str], None] = lambda line: None, cwd: Path | None = None) -> str:
    """Run a long command and hand on each line that it prints; return the last ones.

    Raises:
        CommandFailed: it ended with a status other than 0, or not at all.
    """
    tail: deque[str] = deque(maxlen=200)
    process = subprocess.Popen(
        command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    deadline = time.monotonic() + BUILD_SECONDS
    try:
        for line in _lines(process, deadline):
            tail.append(line)
            on_line(line)
        status = process.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired as late:
        tail.append("it did not end in time and was stopped")
        raise CommandFailed(command, 124, last_lines("\n".join(tail))) from late
    finally:
        if process.poll() is None:
            process.terminate()
            _let_end(process)
    if status != 0:
        raise CommandFailed(command, status, last_lines("\n".join(tail)))
    return "\n".join(tail)


def _lines(process: subprocess.Popen[bytes], deadline: float) -> Iterator[str]:
    """Lines that a process prints until it ends; a child that it leaves behind may hold its output open for ever.

    Raises:
        subprocess.TimeoutExpired: after the deadline.
    """
    assert process.stdout is not None
    pending = b""
    while time.monotonic() < deadline:
        if select.select([process.stdout], [], [], 1.0)[0]:
            chunk = os.read(process.stdout.fileno(), 65536)
            *lines, pending = (pending + chunk).split(b"\n")
            yield from (line.decode(errors="replace").rstrip() for line in lines)
            if chunk:
                continue
        elif process.poll() is None:
            continue
        if pending:
            yield pending.decode(errors="replace").rstrip()
        return
    raise subprocess.TimeoutExpired(process.args, BUILD_SECONDS)


def _let_end(process: subprocess.Popen[Any]) -> None:
    """Wait a while for a process, then kill it."""
    try:
        process.wait(ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(ENDING_SECONDS)


def last_lines(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-TAIL_LINES:])


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`; it is let go also when this process is killed.

    Raises:
        ContainersError: another process holds it for too long.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + LOCK_SECONDS
    with path.open("a") as file:
        while not _try_lock(file):
            if time.monotonic() > deadline:
                raise ContainersError(
                    f"another command of Muster has been at work for {LOCK_SECONDS / 60:.0f} minutes; waited in vain",
                    f"the control machine, {path}",
                    f"see what holds it (`fuser -v {path}`), end that, then run it again",
                )
            time.sleep(0.05)
        yield


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
