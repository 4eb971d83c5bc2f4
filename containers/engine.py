"""How this room runs commands: Podman as root, output followed line by line, one error shape.

Not for deciding what a machine's Podman needs (runtime, ulimits): that is in its
/etc/containers/containers.conf.d, written by `make deploy`'s role `engine`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
BUILD = REPOSITORY / "build"
TAIL_LINES = 15

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
    if sudo and subprocess.run([sudo, "-n", "true"], capture_output=True).returncode == 0:
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
    """Standard output of a short command; raises CommandFailed with the end of what it said."""
    done = subprocess.run(command, capture_output=True, text=True, input=stdin, check=False)
    if done.returncode != 0:
        raise CommandFailed(command, done.returncode, last_lines(done.stderr or done.stdout))
    return done.stdout


def follow(command: Sequence[str], on_line: Callable[[str], None] = lambda line: None, cwd: Path | None = None) -> str:
    """Run a long command and hand on each line that it prints; return the last ones.

    Raises:
        CommandFailed: it ended with a status other than 0.
    """
    tail: deque[str] = deque(maxlen=200)
    process = subprocess.Popen(
        command, cwd=cwd, text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for line in process.stdout:
            tail.append(line.rstrip())
            on_line(line.rstrip())
        status = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if status != 0:
        raise CommandFailed(command, status, last_lines("\n".join(tail)))
    return "\n".join(tail)


def last_lines(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-TAIL_LINES:])


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`; it is let go also when this process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
