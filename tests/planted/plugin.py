"""pytest's side: which test runs is coverage's context, and every result is a line of a file. For __main__.py."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import coverage
import pytest

EVENTS, KNOWN = "MUSTER_PLANTED_EVENTS", "MUSTER_PLANTED_KNOWN"  # paths
HANG_SECONDS, HANG_FACTOR = 60, 3  # a test hangs after this, and so many times what it took before


def _note(test: str, outcome: str, seconds: float = 0.0) -> None:
    if (path := os.environ.get(EVENTS)) and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(path, "a") as file:
            file.write(json.dumps({"test": test, "outcome": outcome, "seconds": seconds, "time": time.time()}) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _note(nodeid, "started")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note(report.nodeid, report.outcome, report.duration)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _note(f"collection of {report.nodeid or 'tests'}", report.outcome)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that takes far longer than it did hangs, which is a failure. Others keep their own limit."""
    if path := os.environ.get(KNOWN):
        known = json.loads(Path(path).read_text())
        for item in items:
            if test := known.get(item.nodeid):
                item.add_marker(pytest.mark.timeout(HANG_SECONDS + HANG_FACTOR * test["seconds"]), append=False)


def _context(item: pytest.Item, phase: str) -> None:
    if (measured := coverage.Coverage.current()) and os.environ.get("COVERAGE_PROCESS_START"):
        measured.switch_context(f"{item.nodeid}|{phase}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _context(item, "setup")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    _context(item, "run")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    _context(item, "teardown")
