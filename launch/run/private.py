"""SECRETS: files that a run's ranks may read at /muster/private/secrets/<name>, and that stand nowhere else.

They travel over SSH to a file system in each host's memory, mode 0400, and go with the run. Never in a command, the
environment, a label, the plan or a log.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from pathlib import Path

from keeper import PRIVATE_DIR
from launch.cli.refusal import Problem, Refusal, refuse

LIMIT_BYTES = 2**20  # of all of them together

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # what the hosts take as the name of a file
_LINE = re.compile(r"(?:export\s+)?([A-Z_][A-Z0-9_]*)=(.*)")


def read(text: str, say: Callable[[str], None]) -> dict[str, bytes]:
    """The secrets that SECRETS names, by name: a folder's files, a file's lines NAME=value, else the file itself.

    Says under which names ranks find them, and warns of files that others here can read. Raises Refusal for what cannot
    be read, is too large, or has a name that is none.
    """
    if not text:
        return {}
    path = Path(text)
    try:
        files = sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path]
        contents = {file: file.read_bytes() for file in files}
        open_to_all = [str(file) for file in files if file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)]
    except OSError as error:
        raise refuse("SECRETS", f"{text} cannot be read: {error.strerror}", "name a file or a folder") from None
    size = sum(map(len, contents.values()))
    if size > LIMIT_BYTES:
        raise refuse(
            "SECRETS", f"{text} has {size} bytes", f"secrets are {LIMIT_BYTES} bytes at most; data is no secret"
        )
    found = {file.name: content for file, content in contents.items()}
    if not path.is_dir():
        found = lines_of(contents[path]) or found
    wrong = [name for name in found if not _NAME.fullmatch(name)]
    if wrong or not found:
        problems = [
            Problem("SECRETS", f"{name!r} is no name for a secret", "use letters, digits, _ . -") for name in wrong
        ]
        raise Refusal(problems or [Problem("SECRETS", f"there is no file in {text}", "put one there for each secret")])
    if open_to_all:
        say(f"warning: others on this machine can read {', '.join(open_to_all)}; `chmod 600` closes it")
    say(f"secrets for the ranks, in {PRIVATE_DIR}/secrets: {', '.join(found)}")
    return found


def lines_of(content: bytes) -> dict[str, bytes]:
    """The secrets of a file with lines NAME=value, or none where it is something else. Pure.

    Names are those of environment variables, in capitals; comments and empty lines count for nothing, a pair of
    quotation marks around a value goes.
    """
    try:
        lines = [line.strip() for line in content.decode().splitlines()]
    except UnicodeDecodeError:
        return {}
    matches = [_LINE.fullmatch(line) for line in lines if line and not line.startswith("#")]
    found: dict[str, bytes] = {}
    for match in matches:
        if match is None:
            return {}
        value = match[2]
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        found[match[1]] = value.encode()
    return found
