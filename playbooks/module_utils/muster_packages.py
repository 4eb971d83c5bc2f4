"""Which packages Muster has installed on a host, so that a teardown can take back these and no other.

A ledger in Muster's folder: {"before": names of what was installed before an installation that has begun, or null,
"installed": names that came by installations since the first one, with all that they brought}. Debian and its kin;
elsewhere there is no ledger. Standard library alone.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ansible.module_utils.muster_driver import in_use
from ansible.module_utils.muster_host import read, run, write_atomically

APT_SECONDS = 120.0
_REMOVED = re.compile(r"^(?:Remv|Purg) (\S+)", re.MULTILINE)  # with an architecture that is not the host's
_NEEDED = re.compile(r"([^\s:]+)(?::\S+)?$", re.MULTILINE)  # without the architecture


def note_begin(ledger: Path) -> None:
    """Before packages are installed. What an installation that was broken off has begun with stays."""
    known, there = _read(ledger), _installed()
    if there is not None and known["before"] is None:
        _write(ledger, {**known, "before": sorted(there)})


def note_end(ledger: Path, check_mode: bool = False) -> bool:
    """After packages were installed; otherwise it does nothing. Returns whether there was something to note."""
    known = _read(ledger)
    if known["before"] is not None and not check_mode:
        come = (_installed() or set()) - set(known["before"])
        _write(ledger, {"before": None, "installed": sorted(come | set(known["installed"]))})
    return known["before"] is not None


def removable(ledger: Path) -> list[str]:
    """Those of the ledger that are there and can be removed without anything else; no driver of GPUs that is in use,
    nor what that needs. Raises RuntimeError with words."""
    ours = set(_read(ledger)["installed"]) & (_installed() or set())
    ours -= in_use(ours)
    while others := _removed_with(ours) - ours:  # somebody has built on some of them
        ours -= (_needed_by(others) & ours) or ours  # nothing is removed where apt takes more than it says
    return sorted(ours)


def installed(ledger: Path) -> list[str]:
    """What the ledger names."""
    return list(_read(ledger)["installed"])


def _removed_with(names: set[str]) -> set[str]:
    """What apt would remove with these packages."""
    if not names:
        return set()
    done = run(["apt-get", "--simulate", "purge", *sorted(names)], timeout=APT_SECONDS)
    if done.rc != 0:
        raise RuntimeError(f"apt cannot remove what Muster has installed: {done.complaint}. Fix: see `apt-get check`")
    return set(_REMOVED.findall(done.out))


def _needed_by(names: set[str]) -> set[str]:
    """What these need, and what that needs, with all of what any one of would do."""
    words = ["apt-cache", "depends", "--recurse", "--important", "--installed", *sorted(names)]
    done = run(words, timeout=APT_SECONDS)
    if done.rc != 0:
        raise RuntimeError(f"apt does not say what {', '.join(sorted(names))} need: {done.complaint}")
    return set(_NEEDED.findall(done.out))


def _installed() -> set[str] | None:
    """The names of all installed packages; None where there is no dpkg."""
    done = run(["dpkg-query", "--show", "--showformat=${db:Status-Status} ${Package}\\n"])
    pairs = (line.split() for line in done.out.splitlines())
    return {name for state, name in pairs if state == "installed"} if done.rc == 0 else None


def _read(ledger: Path) -> dict[str, Any]:
    known: dict[str, Any] = json.loads(read(ledger) or "{}")
    return {"before": None, "installed": [], **known}


def _write(ledger: Path, known: dict[str, Any]) -> None:
    ledger.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    write_atomically(ledger, json.dumps(known, indent=1) + "\n")
