"""The files that a keeper writes into its run's folder (their schemas: keeper/__init__.py).

A full disk is what a run often ends of, and then its last words are needed most: room for them is kept from the start.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import Any, Dict, List, Mapping

from keeper.host import write_document

RESERVED_BYTES = 262144  # in each file that keeps room
RESERVED_FILES = 4  # all but one are given up for events; the last one for exit.json


class Documents:
    """The run's folder, for its keeper. For several threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._reserved: List[Path] = []

    def reserve(self) -> None:
        """Keep room. Raises OSError where there is none."""
        for number in range(RESERVED_FILES):
            path = self._folder / f".room-{number}"
            self._reserved.append(path)
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, RESERVED_BYTES)

    def note(self, event: Mapping[str, Any]) -> None:
        """Add a line to events.jsonl; it is lost only where the disk is full and the room for events is used up."""
        line = json.dumps(event).encode() + b"\n"
        with self._lock:
            while not self._add(line) and len(self._reserved) > 1:
                self._give_room()

    def write(self, name: str, document: Mapping[str, Any]) -> None:
        """Write a document whole, or leave the one before."""
        draft = self._folder / f".{name}.draft"
        with contextlib.suppress(OSError):
            draft.write_text(json.dumps(document))
            os.replace(draft, self._folder / name)

    def keep(self, name: str, document: Mapping[str, Any]) -> None:
        """Write a document whole, and to the disk. Where that fails, also in the reserved room, there is none."""
        with self._lock:
            while not self._is_kept(name, document):
                if len(self._reserved) <= 1:
                    with contextlib.suppress(OSError):
                        (self._folder / name).unlink()
                    return
                self._give_room()

    def read(self, name: str) -> Dict[str, Any]:
        """A JSON object, or {} where there is none."""
        return read(self._folder / name)

    def release(self) -> None:
        """Give up all room, for what is written last."""
        with self._lock:
            while self._reserved:
                self._give_room()

    def _is_kept(self, name: str, document: Mapping[str, Any]) -> bool:
        try:
            write_document(self._folder / name, document)
            folder = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(folder)  # its new name, too
            finally:
                os.close(folder)
        except OSError:
            return False
        return True

    def _give_room(self) -> None:
        with contextlib.suppress(OSError):
            self._reserved.pop().unlink()

    def _add(self, line: bytes) -> bool:
        """Whether all of the line was written; else nothing of it stays."""
        try:
            file = os.open(self._folder / "events.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError:
            return False
        try:
            size = os.fstat(file).st_size
            with contextlib.suppress(OSError):
                if os.write(file, line) == len(line):
                    return True
            with contextlib.suppress(OSError):
                os.ftruncate(file, size)
            return False
        finally:
            os.close(file)


def read(path: Path) -> Dict[str, Any]:
    """A JSON object, or {} where there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
