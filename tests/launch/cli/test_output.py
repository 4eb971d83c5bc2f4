"""Promise: a long phase says how long it is expected to take, and a few lines while it lasts show that it goes on."""

from __future__ import annotations

import io
import subprocess
import threading
from types import SimpleNamespace

import pytest
from rich.console import Console

from launch.cli.output import Phases, to_stderr


class Waited(threading.Event):
    """An event whose waits move the clock and end at once; it records for how many seconds each was to last."""

    now: float
    intervals: list[float]
    reported = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.intervals.append(timeout or 0.0)
        if len(self.intervals) > 3:
            self.reported.set()
            return super().wait()
        Waited.now += timeout or 0.0
        return False


@pytest.mark.parametrize(("expected_seconds", "interval_seconds"), [(80.0, 20.0), (12.0, 10.0)])
def test_a_long_phase_shows_its_progress_in_few_lines(
    monkeypatch: pytest.MonkeyPatch, expected_seconds: float, interval_seconds: float
) -> None:
    console = Console(file=io.StringIO(), width=100)
    monkeypatch.setattr(Waited, "now", 100.0, raising=False)
    monkeypatch.setattr(Waited, "intervals", [], raising=False)
    monkeypatch.setattr(Waited, "reported", threading.Event())
    monkeypatch.setattr("launch.cli.output.Event", Waited)
    monkeypatch.setattr("launch.cli.output.time", SimpleNamespace(monotonic=lambda: Waited.now))
    phases = Phases(console)
    with phases.phase("sum", "Summing", expected_seconds):
        assert Waited.reported.wait(300)
    assert isinstance(console.file, io.StringIO)
    first, *progress, last = console.file.getvalue().splitlines()
    assert first == f"==> Summing (about {expected_seconds:.0f} s)"
    lasted = [interval_seconds * count for count in (1, 2, 3)]
    assert progress == [f"    {seconds:.0f} s of about {expected_seconds:.0f} s" for seconds in lasted]
    assert last == f"    took {lasted[-1]:.0f} s" and phases.seconds == {"sum": lasted[-1]}
    assert set(Waited.intervals) == {interval_seconds}


def test_a_phase_without_an_estimate_is_one_line() -> None:
    console = Console(file=io.StringIO(), width=100)
    with Phases(console).phase("inventory", "Reading"):
        pass
    assert isinstance(console.file, io.StringIO) and console.file.getvalue() == "==> Reading\n"


def test_stdout_can_be_kept_free_for_a_document(capfd: pytest.CaptureFixture[str]) -> None:
    with to_stderr():
        print("ours")
        subprocess.run(["echo", "a command's"], check=True, timeout=300)
    print("{}")
    out, err = capfd.readouterr()
    assert out == "{}\n" and sorted(err.splitlines()) == ["a command's", "ours"]
