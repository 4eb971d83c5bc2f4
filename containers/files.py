"""Files and folders that are there whole or not at all, and locks between processes.

What this room writes where another process may read it, or where a killed process may leave a part of it, is written
through these functions. They know nothing of containers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from containers.engine import ContainersError

LOCK_SECONDS = 1800.0


def write_whole(path: Path, text: str) -> None:
    """Write a text file, with the permissions of the user's umask, and make its folder.

    Raises OSError when it cannot be written whole; an older file is then still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name cannot be known beforehand, so nobody can put a link in its place.
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with draft.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def drafted(folder: Path) -> Iterator[Path]:
    """A folder to fill. It becomes `folder` if nothing fails, and is removed otherwise.

    The caller holds a lock for all folders of this kind (`wheels-...`): what killed calls have left of them is removed.
    """
    for leftover in folder.parent.glob(f".{folder.name.partition('-')[0]}-*"):
        shutil.rmtree(leftover)
    draft = folder.with_name(f".{folder.name}")
    draft.mkdir(parents=True)
    try:
        yield draft
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextlib.contextmanager
def scratch(parent: Path, prefix: str) -> Iterator[Path]:
    """A temporary folder in `parent`.

    The caller holds a lock for all folders with this prefix: what killed calls have left of them is removed.
    """
    for leftover in parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as name:
        yield Path(name)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, which is made if needed. The end of this process releases it, too.

    Raises ContainersError if another process has held the lock for LOCK_SECONDS.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + LOCK_SECONDS
    with path.open("a") as file:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline:
                raise ContainersError(
                    f"another command of Muster has held a lock for {LOCK_SECONDS / 60:.0f} minutes",
                    f"the control machine, {path}",
                    f"find the process that holds it (`fuser -v '{path}'`), end it, then run this command again",
                )
            time.sleep(0.05)
        yield
