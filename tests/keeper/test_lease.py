"""Promises: one process at a time has a host's lease, the kernel frees it, and who looks at it disturbs nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keeper import lease
from tests.conftest import ROOT, cannot_run

#: Takes the lease when a line comes, says whether it got it, and has it until its input ends.
TAKER = """
import sys
from keeper import lease
print("ready", flush=True)
sys.stdin.readline()
try:
    taken = lease.take(sys.argv[1], {"run": sys.argv[2], "owner": "ann@laptop"})
    print("taken", flush=True)
except lease.Busy as busy:
    print("busy", busy.holder["run"], flush=True)
sys.stdin.read()
"""

#: Takes the lease again and again, has it for a moment and releases it; alone, so each failure is somebody's fault.
TAKES = """
import sys, time
from keeper import lease
failed = 0
for count in range(1500):
    name = "r%d" % (count % 7)
    try:
        with lease.take(sys.argv[1], {"run": name, "owner": name * (1 + 300 * (count % 3))}):
            time.sleep(0.0005 * (count % 2))
    except lease.Busy:
        failed += 1
print(failed)
"""

#: Looks all the time until its input ends. Each holder that it sees must be a whole one.
LOOKS = """
import select, sys
from keeper import lease
seen, wrong = 0, []
while not select.select([sys.stdin], [], [], 0)[0]:
    words = lease.holder(sys.argv[1])
    if words:
        seen += 1
        if words["owner"] not in [words["run"] * n for n in (1, 301, 601)]:
            wrong.append(words)
print(seen, wrong)
"""


@contextmanager
def process(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-S", "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def line(started: subprocess.Popen[str]) -> str:
    assert started.stdout
    return started.stdout.readline().strip()


def go(started: subprocess.Popen[str]) -> None:
    assert started.stdin
    started.stdin.write("\n")
    started.stdin.flush()


@pytest.mark.slow
def test_of_processes_that_take_it_at_the_same_moment_one_gets_it_and_its_death_frees_it(tmp_path: Path) -> None:
    for number in range(5):
        with process(TAKER, tmp_path, "a") as a, process(TAKER, tmp_path, "b") as b, process(TAKER, tmp_path, "c") as c:
            takers = {"a": a, "b": b, "c": c}
            assert [line(taker) for taker in takers.values()] == ["ready"] * 3
            for taker in takers.values():
                go(taker)
            said = {name: line(taker) for name, taker in takers.items()}
            winner = next(name for name, words in said.items() if words == "taken")
            assert sorted(said.values()) == [f"busy {winner}"] * 2 + ["taken"], number
            found = lease.holder(str(tmp_path))
            assert found and found["run"] == winner and 0 <= found["seconds"] < 60
            takers[winner].kill()
            takers[winner].wait()
            assert lease.holder(str(tmp_path)) is None
        lease.take(str(tmp_path), {"run": "next", "owner": "o"}).release()


def test_a_lease_that_was_released_or_never_taken_has_no_holder(tmp_path: Path) -> None:
    folder = str(tmp_path / "new" / "lease")
    assert lease.holder(folder) is None
    with lease.take(folder, {"run": "a", "owner": "o", "time": 1.0, "host": "h1"}) as taken:
        found = lease.holder(folder)
        assert found and {"run": "a", "owner": "o", "time": 1.0, "host": "h1"}.items() <= found.items()
        with pytest.raises(lease.Busy, match="run a of o"):
            lease.take(folder, {"run": "b", "owner": "o"})
        taken.release()
        assert lease.holder(folder) is None


def test_a_child_of_the_holder_does_not_keep_it(tmp_path: Path) -> None:
    taken = lease.take(str(tmp_path), {"run": "a", "owner": "o"})
    with process("import sys; sys.stdin.read()"):
        taken.release()
        assert lease.holder(str(tmp_path)) is None


@pytest.mark.slow
def test_looking_never_makes_a_take_fail_and_never_shows_words_of_an_earlier_holder_in_part(tmp_path: Path) -> None:
    with process(LOOKS, tmp_path) as first, process(LOOKS, tmp_path) as second, process(TAKES, tmp_path) as taker:
        assert line(taker) == "0"
        looks = [one.communicate(timeout=300)[0].split(maxsplit=1) for one in (first, second)]
    assert sum(int(seen) for seen, _wrong in looks) > 20
    assert [wrong.strip() for _seen, wrong in looks] == ["[]", "[]"]


@pytest.mark.slow
def test_a_holder_that_has_not_written_its_words_is_unknown_and_not_the_one_before(tmp_path: Path) -> None:
    lease.take(str(tmp_path), {"run": "before", "owner": "o"}).release()
    with open(tmp_path / "lease", "r+b") as held:
        assert lease.lock(held.fileno(), 0)
        found = lease.holder(str(tmp_path))
    assert found and found["run"] == "?"


def test_it_is_the_same_lease_behind_a_bind_mount(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        cannot_run("a mount needs root")
    (tmp_path / "host").mkdir()
    (tmp_path / "container").mkdir()
    mounted = 'mount --bind "$1/host" "$1/container" && cd "$2" && exec "$3" -S -c "$4" "$1/container" inside'
    with lease.take(str(tmp_path / "host"), {"run": "outside", "owner": "o"}):
        words = ["sh", "-c", mounted, "sh", str(tmp_path), str(ROOT), sys.executable, TAKER]
        done = subprocess.run(["unshare", "-m", *words], input="\n", capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["ready", "busy", "outside"], done.stderr
