"""The map: which tests reach which line, and how long each takes. A coverage database and tests.json in build/planted/.

Next to it are the sources as they were, so that a fault finds its line in them although the tree has changed since.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import coverage

from tests.planted import plugin
from tests.planted.faults import PACKAGES, Fault, Source, place

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "planted"
MAP, TESTS, SOURCES, EVENTS, RAW = (FOLDER / name for name in ("map", "tests.json", "sources", "events", "raw"))

UNFIT = "tests/lab/test_teardown.py"  # it takes the lab apart
CLONE = "*/clone of it"  # of tests/clone.py
#: A context: a test and its phase, as pytest writes them into PYTEST_CURRENT_TEST, or pytest-cov or plugin.py.
CONTEXT = re.compile(r"(tests/[^|]*?\.py::.*?)(?:\|| \()(setup|run|call|teardown)\b")
DURATION = re.compile(r"^([\d.]+)s (?:call|setup|teardown) +(tests/.*?)\s*$", re.MULTILINE)
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", re.MULTILINE)

#: In pytest itself, plugin.py sets the context; another process takes pytest's variable when it starts.
CONFIGURATION = """[run]
include = {include}
parallel = true
core = ctrace
data_file = {data}
context = ${{PYTEST_CURRENT_TEST-none}}
patch = _exit,fork
disable_warnings = no-data-collected,module-not-measured,module-not-imported,no-ctracer,trace-changed,couldnt-parse
"""

Figures = tuple[dict[str, float], set[str]]  # seconds of each test, and the tests that failed


def sources(root: Path) -> Iterator[str]:
    """The files of all packages."""
    for name in PACKAGES:
        found = [root / name] if name.endswith(".py") else sorted((root / name).rglob("*.py"))
        yield from (str(path.relative_to(root)) for path in found)


def measure(lab: bool, words: Sequence[str]) -> Figures:
    """Run tests under coverage; the data is in RAW."""
    shutil.rmtree(RAW, ignore_errors=True)
    RAW.mkdir(parents=True)
    EVENTS.unlink(missing_ok=True)
    settings = FOLDER / "coverage.rc"
    files = [name if name.endswith(".py") else f"{name}/*" for name in PACKAGES]
    include = ",".join(f"{tree}/{name}" for tree in (ROOT, CLONE) for name in files)
    settings.write_text(CONFIGURATION.format(include=include, data=RAW / "data"))
    environment = os.environ | {"COVERAGE_PROCESS_START": str(settings), plugin.EVENTS: str(EVENTS)}
    chosen = ["-m", "lab and not long"] if lab else ["-m", "not lab and not long", "-n", "2", "--dist", "worksteal"]
    command = [sys.executable, "-m", "pytest", "-p", "tests.planted.plugin", "-p", "no:cacheprovider"]
    subprocess.run([*command, "-o", "session_timeout=7200", *chosen, *words], cwd=ROOT, env=environment, check=False)
    seconds, failed = defaultdict[str, float](float), set[str]()
    for event in map(json.loads, EVENTS.read_text().splitlines()):
        seconds[event["test"]] += event["seconds"]
        if event["outcome"] == "failed":
            failed.add(event["test"])
    return seconds, failed


def logged(log: str) -> Figures:
    """The same from what pytest printed, with --durations=0."""
    seconds = defaultdict[str, float](float)
    for each, test in DURATION.findall(log):
        seconds[test] += float(each)
    return seconds, set(FAILED.findall(log))


def fresh(root: Path) -> None:
    """Begin a new map."""
    for path in (SOURCES, MAP, TESTS):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for file in sources(root):
        (SOURCES / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / file, SOURCES / file)


def add(data: Path, root: Path, lab: bool, figures: Figures) -> None:
    """Add a folder of coverage's data, measured in `root`, to the map. What failed says nothing, so it is left out."""
    settings = FOLDER / "combine.rc"
    settings.write_text(f"[paths]\nsource =\n    {ROOT}\n    {root}\n    {CLONE}\n")
    combined = coverage.Coverage(data_file=str(MAP), config_file=str(settings))
    combined.load()
    combined.combine([str(path) for path in data.iterdir()], keep=True)
    seconds, failed = figures
    tests = json.loads(TESTS.read_text()) if TESTS.exists() else {}
    for test in {match[1] for match in map(CONTEXT.search, combined.get_data().measured_contexts()) if match}:
        if test not in failed and test not in tests:
            tests[test] = {"seconds": round(seconds.get(test, 0.0), 3), "lab": lab}
    combined.save()
    TESTS.write_text(json.dumps(tests, indent=0, sort_keys=True))


class Map:
    """The map in build/planted."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, float]] = json.loads(TESTS.read_text())
        self._data = coverage.CoverageData(str(MAP))
        self._data.read()
        self._files: dict[str, tuple[Source, dict[int, set[str]]]] = {}
        self._of_file = defaultdict[str, set[str]](set)
        for test in self.tests:
            self._of_file[test.split("::")[0]].add(test)

    def reaching(self, fault: Fault) -> list[str]:
        """The tests that reach a fault, quickest first: lab tests for a lab fault, and else the others."""
        if named := [test for test in fault.tests if "::" in test]:  # the map does not have them
            return named
        source, lines = self._file(fault.file)
        start, end = (source.line(offset) for offset in place(source, fault))
        found = {test for line in range(start, end + 1) for test in lines.get(line, ())}
        if fault.tests:
            found = {test for file in fault.tests for test in self._of_file[file]}
        found = {test for test in found if self.tests[test]["lab"] == fault.lab and not test.startswith(UNFIT)}
        return sorted(found, key=lambda test: (self.tests[test]["seconds"], test))

    def _file(self, file: str) -> tuple[Source, dict[int, set[str]]]:
        if file not in self._files:
            source = Source((SOURCES / file).read_text())
            lines = self._data.contexts_by_lineno(str(ROOT / file)).items()
            self._files[file] = source, {line: self._reached_in(contexts) for line, contexts in lines}
        return self._files[file]

    def _reached_in(self, contexts: Sequence[str]) -> set[str]:
        """The tests of some contexts.

        What is done while a fixture is made belongs to every test of its file, as tests of a module share fixtures;
        but nobody makes a lab again for one fault.
        """
        phases = {match.groups() for match in map(CONTEXT.search, contexts) if match and match[1] in self.tests}
        shared = {test.split("::")[0] for test, phase in phases if phase == "setup" and not self.tests[test]["lab"]}
        own = {test for test, phase in phases if phase in ("run", "call") or not self.tests[test]["lab"]}
        return own.union(*(self._of_file[file] for file in shared))
