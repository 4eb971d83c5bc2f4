"""Processes that a test started, or their children."""

from pathlib import Path

GUARD_SECONDS = 300.0  # no promise: what hangs fails the test, and a busy machine does not


def running(pid: int | str) -> bool:
    """One that has ended but was not yet waited for does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):  # the second: it was waited for between opening and reading
        return False
