"""Plants faults in copies of the tree, one at a time, and runs the tests that reach each. Results: results.json."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tests import sweep
from tests.planted import plugin
from tests.planted.faults import CannotPlaceError, Fault, Source, place, planted
from tests.planted.reach import FOLDER, ROOT, TESTS, Map

ENDING_SECONDS = 30  # for pytest to clear away
COLLECT_SECONDS = 600
DEPLOY_SECONDS = 900
SENT = ("keeper/", "train/")  # in the training image, so a change reaches the hosts by a deploy

FOUND = "found"

Result = dict[str, Any]


class Tree:
    """A copy of the working tree with a git repository of its own; with a lab's inventory it has lab faults."""

    def __init__(self, name: str, lab: str = "", lab_tree: Path = ROOT) -> None:
        self.folder, self.lab, self.built = FOLDER / name, lab, lab_tree / "build"
        self.events, self.log, self.words = (FOLDER / f"{name}.{kind}" for kind in ("events", "log", "words"))
        shutil.rmtree(self.folder, ignore_errors=True)
        listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, check=True, stdout=-1)
        for file in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / file).is_file():
                (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, self.folder / file)
        self._git("init", "-q")
        self._git("add", "--all", "--force")
        self._git("-c", "user.name=planted", "-c", "user.email=planted@localhost", "commit", "-qm", "The tree")
        (self.folder / ".venv").symlink_to((ROOT / ".venv").resolve())
        for part in ("inventory", "build") if lab else ():
            shutil.copytree(lab_tree / part / lab, self.folder / part / lab)
        self.reset()

    def _git(self, *words: str) -> None:
        subprocess.run(["git", *words], cwd=self.folder, check=True)

    def reset(self) -> None:
        """Remove the fault, bytecode and what tests left. build/ has links to what is built once for a checkout."""
        kept = (".venv", f"inventory/{self.lab}", "build") if self.lab else (".venv",)
        self._git("checkout", "-qf", ".")
        self._git("clean", "-qffdx", *(f"--exclude=/{name}" for name in kept))
        (self.folder / "build").mkdir(exist_ok=True)
        for made in self.built.glob("*"):
            link = self.folder / "build" / made.name
            is_there = link.exists() or link.is_symlink()
            if made.name != FOLDER.name and not (made / "cluster.json").exists() and not is_there:
                link.symlink_to(made)
        if self.lab and not self.deploy():
            raise SystemExit(f"the lab cannot be deployed: {self.log}")

    def plant(self, fault: Fault) -> str:
        """Returns where it is now, as file:line. Raises CannotPlaceError."""
        path = self.folder / fault.file
        if not path.exists():
            raise CannotPlaceError(f"there is no {fault.file}")
        text = path.read_text()
        path.write_text(planted(text, fault))
        return f"{fault.file}:{Source(text).line(place(Source(text), fault)[0])}"

    def call(self, program: str, words: Sequence[str], limit: float, **variables: str) -> int | None:
        """A program of .venv, with its output in `log`; returns its exit status, None at the time limit.

        No variable leads it to another tree: imports begin at the working directory.
        """
        unset = ("COVERAGE_", "PYTEST_", "PYTHON", "CI")
        kept = {name: text for name, text in os.environ.items() if not name.startswith(unset)}
        command, status = [str(self.folder / ".venv" / "bin" / program), *words], None
        with self.log.open("w") as log:
            process = subprocess.Popen(command, cwd=self.folder, env=kept | variables, stdout=log, stderr=log)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        _end_processes(process.pid)
        return status

    def pytest(self, words: Sequence[str], limit: float) -> tuple[int | None, list[Result]]:
        """Exit status and events of plugin.py."""
        self.words.write_text("\n".join(words))  # more than a command line can have
        self.events.write_text("")
        options = ("-p", "tests.planted.plugin", "-p", "no:cacheprovider", "--hypothesis-seed=0", f"@{self.words}")
        variables = {plugin.EVENTS: str(self.events), plugin.KNOWN: str(TESTS)}
        variables |= {"MUSTER_TEST_LAB": self.lab} if self.lab else {}
        deadline = time.time() + limit
        status = self.call("python", ["-m", "pytest", *options], limit, **variables)
        events: list[Result] = [json.loads(line) for line in self.events.read_text().splitlines()]
        return status, [event for event in events if event["time"] < deadline]  # what an interrupt fails says nothing

    def collected(self) -> set[str]:
        """All tests that there are."""
        if self.pytest(["--collect-only", "-q"], COLLECT_SECONDS)[0] != 0:
            raise SystemExit(f"the tests cannot be collected: {self.log}")
        return {line for line in self.log.read_text().splitlines() if line.startswith("tests/") and "::" in line}

    def deploy(self) -> bool:
        """Bring the tree's code to the lab's hosts."""
        return self.call("fab", ["deploy"], DEPLOY_SECONDS, INVENTORY=f"inventory/{self.lab}") == 0

    def try_fault(self, fault: Fault, tests: Sequence[str], limit: float) -> Result:
        """Plant a fault, run tests until one finds it, and remove it."""
        try:
            result = {"where": self.plant(fault), "kind": fault.kind, "tests": len(tests)}
            begun, events = time.monotonic(), list[Result]()
            status: int | None = 0
            if self.lab and fault.file.startswith(SENT) and not self.deploy():
                events = [{"outcome": "failed", "test": "deploy of the lab"}]
            elif tests:
                status, events = self.pytest(["-x", *tests], limit)
            result["seconds"] = round(time.monotonic() - begun)
        except CannotPlaceError as error:
            return {"status": f"cannot be placed: {error}"}
        finally:
            self.reset()
        failed = [event["test"] for event in events if event["outcome"] == "failed"]
        if failed or status not in (0, None):  # or the fault has ended pytest itself
            started = [event["test"] for event in events if event["outcome"] == "started"]
            return result | {"status": FOUND, "by": (failed or started[-1:] or ["pytest"])[0]}
        return result | {"status": "not found" if status == 0 else "time limit"}


def _end_processes(session: int) -> None:
    """End what a test session has left running; each process has its mark. conmon goes with its container."""
    mark = f"\0{sweep.SESSION}={session}\0".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in b"\0" + (folder / "environ").read_bytes() and (folder / "comm").read_text() != "conmon\n":
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:
            continue


def run(faults: Sequence[Fault], trees: Sequence[Tree], limit: float, known: Map) -> Iterator[tuple[Fault, Result]]:
    """Try faults, as many at once as there are trees; at the end again those whose finder also fails without them."""
    present = trees[0].collected()
    free = queue.SimpleQueue[Tree]()
    for tree in trees:
        free.put(tree)

    def work(fault: Fault, tests: Sequence[str]) -> Result:
        tree = free.get()
        try:
            return tree.try_fault(fault, tests, limit)
        finally:
            free.put(tree)

    found = defaultdict[str, list[tuple[Fault, Result]]](list)
    with ThreadPoolExecutor(len(trees)) as pool:
        started = {}
        for fault in faults:
            tests = [test for test in known.reaching(fault) if test in present]
            started[pool.submit(work, fault, tests)] = fault
        try:
            for done in as_completed(started):
                yield started[done], (result := done.result())
                found[result.get("by", "")].append((started[done], result))
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C
    finders = [test for test in found if test in present]
    if finders:
        _, events = trees[0].pytest(finders, limit + 60 * len(finders))
        for test in {event["test"] for event in events if event["outcome"] == "failed"}:
            yield from ((fault, result | {"status": "not reliable, but found"}) for fault, result in found[test])


def line(fault_id: str, result: Result) -> str:
    """A result for people."""
    how = result["status"]
    if how == "not found":
        how += f" by {result['tests']} tests"
    elif "by" in result:
        how += f" by {result['by']} after {result['seconds']} s"
    return f"{fault_id}  {result.get('where', '')}  {result.get('kind', '')}  {how}"


def lost(old: Mapping[str, Result], new: Mapping[str, Result]) -> list[str]:
    """Faults that were found before and are not any more."""
    return [each for each in old if old[each]["status"] == FOUND and new.get(each, {}).get("status") != FOUND]
