"""How this room runs commands: Podman as root, output followed line by line, one kind of error.

Not for deciding what a machine's Podman needs (runtime, ulimits): that is in its
/etc/containers/containers.conf.d, written by `make deploy`'s role `engine`.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from containers.guard import TERMINATE_SECONDS, end

REPOSITORY = Path(__file__).resolve().parent.parent
BUILD = REPOSITORY / "build"
TAIL_LINES = 15
EXPECTED = re.compile(r"\s+Expected +\w+ [0-9a-f]{64}$")
# A command that hangs ends after these, with a message that names it. No command is expected to take so long.
COMMAND_SECONDS = 600.0
BUILD_SECONDS = 3600.0
FINISH_SECONDS = 30.0  # how long a short command may go on after an interrupt
GUARD = (sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")))

Progress = Callable[[str], None]

_under_way: set[subprocess.Popen[bytes]] = set()


class ContainersError(Exception):
    """What went wrong, where, and what to do about it: one message for the user."""

    def __init__(self, what: str, where: str, fix: str) -> None:
        super().__init__(f"{what}\n  where: {where}\n  fix: {fix}")
        self.what, self.where, self.fix = what, where, fix


class CommandFailed(ContainersError):
    """A command ended with a status other than 0; `tail` holds the last lines that it printed."""

    def __init__(self, command: Sequence[str], status: int, tail: str) -> None:
        what, fix = f"`{shlex.join(command)}` ended with status {status}:\n{tail}", "fix what it says, then try again"
        super().__init__(what, "the control machine", fix)
        self.command, self.status, self.tail = list(command), status, tail


@cache
def as_root() -> tuple[str, ...]:
    """What to put before a command so that it runs as root: nothing, or sudo without a password.

    Raises ContainersError if this user is not root and cannot use sudo without a password.
    """
    if os.geteuid() == 0:
        return ()
    sudo = shutil.which("sudo")
    if sudo and subprocess.run([sudo, "-n", "true"], capture_output=True, timeout=FINISH_SECONDS).returncode == 0:
        return (sudo, "-n")
    what = "building images and making a lab need root, or sudo without a password, on this machine"
    fix = "run it as root, or allow this user passwordless sudo; `make local` trains without either"
    raise ContainersError(what, "the control machine", fix)


def tool(name: str) -> str:
    """Path of a program, searched for in the sbin folders too, which a user's PATH may lack.

    Raises ContainersError if it is not installed.
    """
    path = shutil.which(name, path=os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin")
    if path is None:
        fix = f"`make deploy` and `make lab` install it as root; by hand: apt-get install {name}"
        raise ContainersError(f"`{name}` is not installed", "the control machine", fix)
    return path


def root_command(name: str, *arguments: str, env: Mapping[str, str] | None = None) -> list[str]:
    """`name arguments` as a command line that runs as root, with `env` added to its environment."""
    settings = [f"{key}={value}" for key, value in (env or {}).items()]
    return [*as_root(), *(["env", *settings] if settings else []), tool(name), *arguments]


def podman(*arguments: str, stdin: str = "") -> str:
    """Standard output of the short command `podman arguments`; raises CommandFailed."""
    return output(root_command("podman", *arguments), stdin=stdin)


def inspect_image(reference: str, template: str) -> str | None:
    """What a template of `podman image inspect` gives for an image; None if there is no such image, or it is empty."""
    try:
        return podman("image", "inspect", "--format", template, reference).strip() or None
    except CommandFailed:
        return None


def image_label(reference: str, label: str) -> str | None:
    """Value of an image's label; None if there is no such image or label."""
    return inspect_image(reference, f'{{{{index .Labels "{label}"}}}}')


def output(command: Sequence[str], stdin: str = "") -> str:
    """Standard output of a short command; raises CommandFailed with the last lines that it printed.

    An interrupt does not cut the command off: it has a process group of its own, and this function waits for its end.
    A `podman run` that Ctrl-C ends in the middle leaves a network namespace and a reserved address that no Podman
    command can remove.
    """
    with subprocess.Popen(
        command, text=True, process_group=0,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            printed, complaint = process.communicate(stdin, timeout=COMMAND_SECONDS)
        except subprocess.TimeoutExpired as expired:
            end(process)
            raise CommandFailed(command, 124, f"it did not end within {COMMAND_SECONDS:.0f} s") from expired
        except BaseException:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(FINISH_SECONDS)
            end(process)
            raise
    if process.returncode != 0:
        raise CommandFailed(command, process.returncode, last_lines(complaint or printed))
    return printed


def follow(command: Sequence[str], on_line: Callable[[str], None] = lambda line: None) -> None:
    """Run a long command and call `on_line` with each line that it prints.

    The command and its children are ended when this function is interrupted, when another thread calls abort(), and
    when this process dies.

    Raises CommandFailed if it ended with a status other than 0, or did not end within BUILD_SECONDS.
    """
    tail: deque[str] = deque(maxlen=200)
    process = subprocess.Popen(
        [*GUARD, *command], process_group=0,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    _under_way.add(process)
    deadline = time.monotonic() + BUILD_SECONDS
    try:
        for line in _lines(process, deadline):
            tail.append(line)
            on_line(line)
        status = process.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired as expired:
        tail.append(f"it did not end within {BUILD_SECONDS:.0f} s and was stopped")
        raise CommandFailed(command, 124, last_lines("\n".join(tail))) from expired
    finally:
        _release(process)
        _under_way.discard(process)
    if status != 0:
        raise CommandFailed(command, status, last_lines("\n".join(tail)))


def build_image(
    reference: str, containerfile: Path, context: Path, *options: str, where: str,
    env: Mapping[str, str] | None = None, on_line: Callable[[str], None] = lambda line: None,
) -> None:  # fmt: skip
    """`podman build`: an image named `reference`, with all times in it set to 0.

    Raises ContainersError if the build failed; `where` names it.
    """
    words = ["--timestamp=0", f"--tag={reference}", f"--file={containerfile}", *options, str(context)]
    try:
        follow(root_command("podman", "build", *words, env=env), on_line)
    except CommandFailed as failure:
        what = f"the image {reference} could not be built. The last lines of the build:\n{failure.tail}"
        raise ContainersError(what, where, fix_of(failure)) from failure


def fix_of(failure: CommandFailed) -> str:
    """What to do about a failed command that builds an image, or writes much to the disk."""
    if "no space left on device" in failure.tail.lower():
        return "the disk is full: free some gigabytes (`df -h`, `podman system df`), then run it again"
    if "DO NOT MATCH THE HASHES" in failure.tail:
        return "the wheel that pip names has changed since it was fetched: remove build/wheels-*, then run it again"
    return "fix what the last lines name, then run it again"


def abort() -> None:
    """End every long command that this process has under way; follow() then raises CommandFailed in its thread.

    Takes at most about TERMINATE_SECONDS for each of them. Commands that are started later are not affected.
    """
    for process in list(_under_way):
        _release(process)


def _release(process: subprocess.Popen[bytes]) -> None:
    """Let guard.py end its command, unless that has ended, and wait for it."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(2 * TERMINATE_SECONDS)
    except subprocess.TimeoutExpired:
        end(process, 0)


def _lines(process: subprocess.Popen[bytes], deadline: float) -> Iterator[str]:
    """Lines that a process prints until it ends. A child that outlives it may keep its output open, and is not awaited.

    Raises:
        subprocess.TimeoutExpired: after the deadline.
    """
    assert process.stdout is not None
    pending = b""
    with process.stdout:
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


def last_lines(text: str) -> str:
    """The last lines of a text, at most TAIL_LINES, without empty ones and pip's lists of the hashes of a lock."""
    lines = [line for line in text.splitlines() if line.strip() and not EXPECTED.match(line)]
    return "\n".join(lines[-TAIL_LINES:])
