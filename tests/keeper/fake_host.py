"""A host for tests of the door: folders of its own, a Podman that is a script and records its calls.

The door runs as it does on a host, as a process of its own.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keeper import lease
from keeper.engines import ROOTS
from launch.hosts import door
from launch.job.start import pack

SECONDS = 60  # more than a busy machine needs

#: Answers from files beside it.
PODMAN = """#!/bin/sh
here=$(dirname "$0")
echo "$*" >> "$here/calls"
case "$1" in
    run) . "$here/run" ;;
    kill) [ -e "$here/kill" ] && . "$here/kill" ;;
    ps) cat "$here/ps" 2>/dev/null || echo '[]' ;;
    inspect) cat "$here/state" 2>/dev/null || { echo "Error: no such container x" >&2; exit 125; } ;;
    rm) rm -f "$here/ps" "$here/state" ;;
    logs) echo "ImportError: no module" ;;
esac
"""


class Call:
    """One verb in a process of its own."""

    def __init__(self, verb: str, options: dict[str, Any], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            door.command(sys.executable),
            shell=True,
            cwd="/",
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        assert self.process.stdin and self.process.stdout
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.stdin.write(door.question(verb, options))

    def frames(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        output = os.fdopen(os.dup(self.stdout.fileno()), "rb")
        while line := output.readline():
            if line.startswith(b"muster:"):
                words = json.loads(line[7:])
                yield words, output.read(words.get("bytes", 0))

    def answer(self) -> dict[str, Any]:
        *_, (words, _) = self.frames()
        assert self.process.wait(SECONDS) == ("error" in words)
        return words

    def started(self, **then: Any) -> str:
        """The container's id, once it has started; `then` is said after that."""
        words, _ = next(self.frames())
        self.stdin.write(json.dumps(then).encode() + b"\n")
        return str(words["started"])

    def hang_up(self) -> None:
        self.stdin.close()
        self.stdout.close()


class Host:
    """A host whose folders are below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs, self.private = Path(f"{root}{ROOTS.runs}"), Path(f"{root}{ROOTS.private}")
        self.lease = f"{root}{ROOTS.lease}"
        self.engine = root / "engine"
        self.engine.mkdir()
        (self.engine / "podman").write_text(PODMAN)
        (self.engine / "podman").chmod(0o755)
        self.when_nft("exit 0")
        self.environment = {**os.environ, "PATH": f"{self.engine}:{os.environ['PATH']}"}
        self.opened: list[Call] = []

    def call(self, verb: str, **options: Any) -> Call:
        made = Call(verb, {**options, "root": str(self.root)}, self.environment)
        self.opened.append(made)
        return made

    def ask(self, verb: str, **options: Any) -> dict[str, Any]:
        return self.call(verb, **options).answer()

    def podman(self) -> list[str]:
        """Podman's calls so far."""
        calls = self.engine / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def when_nft(self, script: str) -> None:
        """What nft does, after it was noted among Podman's calls that it was called."""
        (self.engine / "nft").write_text(
            f'#!/bin/sh\necho nft >> {self.engine}/calls\nprintf %s "$2" > {self.engine}/rules\n{script}\n'
        )
        (self.engine / "nft").chmod(0o755)

    @property
    def rules(self) -> str:
        """What nft was given last."""
        file = self.engine / "rules"
        return file.read_text() if file.exists() else ""

    def when_podman_runs(self, script: str) -> None:
        (self.engine / "run").write_text(script)

    def when_podman_kills(self, script: str) -> None:
        (self.engine / "kill").write_text(script)

    def containers(self, run: str, state: str = "exited", **more: Any) -> None:
        """What Podman says of the run's container."""
        (self.engine / "ps").write_text(json.dumps([{"Names": [f"muster-{run}-0"], "State": state}]))
        (self.engine / "state").write_text(json.dumps({"Running": state == "running", **more}))

    def plan(self, run: str, **more: Any) -> dict[str, Any]:
        command = ["podman", "run", "--detach", "--name", f"muster-{run}-1", "image"]
        closed = {"firewall": True, "addresses": ["10.78.0.12"]}
        hosts = [
            {"host": "h1", "firewall": True, "addresses": ["10.78.0.11", "fd00::11"]},
            {"host": "h2", "container": f"muster-{run}-1", "command": command, **closed},
        ]
        return {
            "run": run,
            "owner": "ann@laptop",
            "created": "today",
            "script": None,
            "resume": None,
            "hosts": hosts,
        } | more

    def has_run(self, run: str, age: float = 10_000, plan: Any = None, **documents: Any) -> Path:
        """A run's folder, from a start `age` seconds ago."""
        folder = self.runs / run
        (folder / "output").mkdir(parents=True)
        for name, words in {"plan": plan or self.plan(run), "host": {"node_rank": 1}, **documents}.items():
            (folder / f"{name}.json").write_text(json.dumps(words))
        os.utime(folder / "plan.json", (time.time() - age,) * 2)
        (folder / "events.jsonl").write_text('{"event": "lease"}\n')
        return folder

    def taken_by(self, run: str) -> lease.Lease:
        return lease.take(self.lease, {"run": run, "owner": "bob@desk"})

    def start(self, **more: Any) -> Call:
        secrets = {"token": base64.b64encode(b"\x00secret").decode()}
        asked = {"plan": self.plan("r1"), "node_rank": 1, "key": "ab12", "secrets": secrets} | more
        call = self.call("start")
        words = {"node_rank": asked.pop("node_rank"), "packed": pack(asked)}
        call.stdin.write(json.dumps(words).encode() + b"\n")
        return call

    def files(self) -> dict[str, str]:
        """All that is below the host's folders but the lease's, and its mode."""
        found = [path for folder in (self.runs, self.private) for path in sorted(folder.rglob("*"))]
        return {str(path.relative_to(self.root)): oct(path.stat().st_mode & 0o777) for path in found}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    for call in made.opened:
        call.process.kill()
        call.process.wait()


#: What a keeper does first, in a folder of runs.
LEASE = 'echo \'{{"event": "lease"}}\' > {}/r1/events.jsonl'
EXIT = {"status": "succeeded", "exit_status": 0, "cause": None}
