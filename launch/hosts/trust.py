"""`make trust`: collect the keys of hosts and jump hosts, show fingerprints, ask, write the inventory's known_hosts.

From then on Ansible, rsync and Fabric refuse unknown and changed keys. Nothing else writes that file.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from paramiko.hostkeys import HostKeyEntry, InvalidHostKey
from rich.console import Console
from rich.table import Table

from launch.cli import exits
from launch.cli.make_variables import naming
from launch.cli.refusal import Problem, Refusal, refuse
from launch.files import write_whole
from launch.hosts import inventory, openssh, ssh


def collect_keys(target: inventory.Target) -> list[str]:
    """The known_hosts lines of a host and, before it, of its jump hosts, got by an SSH handshake without a login there.

    The jump hosts are logged in to: only through them is there a way to the host.
    Raises Unreachable when no key comes within the time limit.
    """
    # In /tmp, as openssh.py says.
    with tempfile.TemporaryDirectory(prefix="muster-ssh-", dir="/tmp") as folder, openssh.login_slot(target):
        jumps, file = Path(folder) / "jumps", Path(folder) / "host"
        options = {
            "BatchMode": "yes",
            "LogLevel": "ERROR",
            "StrictHostKeyChecking": "accept-new",  # into these throw-away files only: the user decides below
            "UserKnownHostsFile": jumps,
            "GlobalKnownHostsFile": "/dev/null",
            "HashKnownHosts": "no",
            "CheckHostIP": "no",
            "ControlPath": "none",  # a connection that stands already would show no key
            "ConnectTimeout": openssh.CONNECT_SECONDS,
        }
        config = openssh.write_config(Path(folder) / "config", options)
        words = ["ssh", "-F", str(config), "-o", f"UserKnownHostsFile={file}", "-o", "PreferredAuthentications=none"]
        words += [*openssh.login_words(target), target.address, "true"]
        limit = 2 * openssh.CONNECT_SECONDS
        reason = f"no answer within {limit} s"
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit, check=False
            )
            reason = openssh.reason(done.stderr) or f"ssh ended with {done.returncode}"
        if not file.exists():
            where = f"host {target.name} ({target.address}:{target.port})"
            if openssh.dropped(reason):
                raise ssh.Dropped(
                    Problem(where, f"sshd hung up before it showed its key: {reason}", openssh.DROPPED_FIX)
                )
            if openssh.through_jump_host(target):
                raise ssh.Unreachable(ssh.jump_problem(where, reason))
            fix = "check that the host is up, its address and port, and that sshd runs"
            raise ssh.Unreachable(Problem(where, reason, fix))
        return [*(jumps.read_text().splitlines() if jumps.exists() else []), file.read_text().splitlines()[0]]


def name_keys(keys: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Name -> known_hosts line, from what `collect_keys` returned for each host; each jump host once. Pure.

    A jump host that is a host of the inventory as well has that host's name.
    """
    offered = {name: lines[-1] for name, lines in keys.items()}
    places = {line.split()[0] for line in offered.values()}
    jumps = {line.split()[0]: line for lines in keys.values() for line in lines[:-1]}
    return {f"{place} (jump host)": line for place, line in jumps.items() if place not in places} | offered


def entry_fingerprint(line: str) -> str:
    """The SHA-256 fingerprint of a known_hosts line."""
    with contextlib.suppress(InvalidHostKey):
        if (entry := HostKeyEntry.from_line(line)) and entry.key is not None:
            return ssh.fingerprint(entry.key)
    return "(an unreadable line)"


def sort_keys(known: list[str], offered: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split offered keys (host name -> known_hosts line) into new ones and changed ones (name -> old line). Pure."""
    new, changed = {}, {}
    for name, line in offered.items():
        old = [k for k in known if k.split()[:1] == line.split()[:1]]
        if not old:
            new[name] = line
        elif not any(k.split()[1:3] == line.split()[1:3] for k in old):
            changed[name] = old[0]
    return new, changed


def trust(path: Path, assume_yes: bool, console: Console) -> int:
    """Collect all host keys, show them, ask the user, and write the inventory's known_hosts.

    Raises Refusal for a bad inventory, unreachable hosts, or a changed key under YES=1.
    """
    inv = inventory.read(path)
    file = inventory.known_hosts_path(path)
    results = ssh.in_parallel(lambda host: ssh.patiently(lambda: collect_keys(host.target)), inv.hosts)
    ssh.refuse_unreachable(results)
    keys = {host.name: lines for host, lines in zip(inv.hosts, results, strict=True) if isinstance(lines, list)}
    offered = name_keys(keys)
    known = file.read_text().splitlines() if file.exists() else []
    new, changed = sort_keys(known, offered)
    console.print(_table(offered, new, changed))
    if not new and not changed:
        console.print(f"All {len(offered)} host keys are in {file} already.")
        return exits.SUCCEEDED
    if changed and assume_yes:
        raise Refusal(
            Problem(
                f"host {name}",
                f"its key has CHANGED: {entry_fingerprint(old)} -> {entry_fingerprint(offered[name])}",
                "find out why; if the host was reinstalled, run `make trust` without YES=1 and confirm",
            )
            for name, old in changed.items()
        )
    question = f"Trust {'the NEW and the CHANGED keys' if changed else 'these keys'}? Type yes: "
    if not assume_yes and _ask(question) != "yes":
        raise refuse(str(file), "not confirmed, nothing written", "type yes, or give YES=1")
    replaced = {offered[name].split()[0] for name in changed}
    kept = [line for line in known if not line.split() or line.split()[0] not in replaced]
    write_whole(file, "\n".join([*kept, *(offered[name] for name in (*new, *changed))]) + "\n")
    console.print(f"Wrote {file}: {len(new)} new, {len(changed)} changed. Next: `make deploy {naming(path)}`.")
    return exits.SUCCEEDED


def _ask(question: str) -> str:
    try:
        return input(question).strip().lower()
    except EOFError:
        print()  # the question stands alone in its line
        return ""


def _table(offered: dict[str, str], new: dict[str, str], changed: dict[str, str]) -> Table:
    table = Table(title="Host keys: compare with `ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub` on each host")
    for column in ("host", "address", "type", "fingerprint", ""):
        table.add_column(column, overflow="fold")
    for name, line in offered.items():
        place, kind = line.split()[:2]
        note = "new" if name in new else "known"
        if name in changed:
            note = f"CHANGED, was {entry_fingerprint(changed[name])}"
        table.add_row(name, place, kind, entry_fingerprint(line), note)
    return table
