"""Promise: a request to end has one effect, however many signals it arrives as; a closed pipe ends nothing."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from launch.cli import exits, output, signals

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signals._received.first, signals._received.raised = None, False


def come(number: signal.Signals) -> None:
    """A signal to this process, as another one sends it; its handler has run when this returns."""
    os.kill(os.getpid(), number)
    time.sleep(0.01)


@pytest.mark.parametrize("number", ENDING)
def test_signals_of_the_same_request_do_not_disturb_the_end(number: signal.Signals) -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt), signals.interrupts_as_exceptions():
        try:
            come(number)
        finally:
            come(number)  # before any other word of the ending: make has handed it on
            come(signal.SIGTERM)
            steps.append("ended")
    come(number)  # and while the last words are said
    assert steps == ["ended"]


def test_a_later_ctrl_c_is_a_second_request_and_a_later_sigterm_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt), signals.interrupts_as_exceptions():
        with pytest.raises(KeyboardInterrupt):
            come(signal.SIGTERM)
        monkeypatch.setattr(signals, "LATER_SECONDS", 0.0)
        come(signal.SIGTERM)
        come(signal.SIGINT)
        pytest.fail("the second Ctrl-C was lost")


def test_an_interrupt_of_what_must_not_be_cut_comes_after_it() -> None:
    steps = []
    with signals.interrupts_as_exceptions():
        with pytest.raises(KeyboardInterrupt), signals.undisturbed(then_interrupt=True):
            come(signal.SIGTERM)
            come(signal.SIGTERM)
            steps.append("whole")
        with signals.undisturbed(then_interrupt=True):  # it has been raised: once is enough
            come(signal.SIGTERM)
    assert steps == ["whole"]


def test_without_an_interrupt_the_handlers_are_as_before() -> None:
    before = [signal.getsignal(number) for number in ENDING]
    with signals.interrupts_as_exceptions(), signals.undisturbed():
        come(signal.SIGTERM)
    assert [signal.getsignal(number) for number in ENDING] == before


WAITING = """
import sys, time
from launch.cli import signals
signals.LATER_SECONDS = 300.0
with signals.interrupts_as_exceptions():
    try:
        print("ready", flush=True)
        time.sleep(600)
    except KeyboardInterrupt:
        with signals.undisturbed("last words"):
            print("ending", flush=True)
            sys.stdin.readline()
            signals.LATER_SECONDS = 0.0  # whatever comes now comes later
            print("later", flush=True)
            time.sleep(600)
"""


@pytest.mark.slow
def test_a_user_who_does_not_wait_for_the_end_hears_the_last_words() -> None:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", WAITING], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdin is not None and process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "ending\n"
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)  # at once: the same request
    process.stdin.write("go on\n")
    process.stdin.flush()
    assert process.stdout.readline() == "later\n"
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (exits.INTERRUPTED, "last words\n")


@pytest.mark.slow
def test_leaving_waits_for_no_thread() -> None:
    script = (
        "import time, threading; from launch.cli import signals\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "import atexit; atexit.register(print, 'cleared away', flush=True)\nsignals.exit_now('gone')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (exits.INTERRUPTED, "cleared away\n", "gone\n")


PRINTING = """
import sys
from rich.console import Console
from launch.cli import output
with output.patient_output():
    for number in range(20000):
        print("line", number, flush=True)
    Console().print("a table")
    known = output.nobody_reads()
sys.stderr.write(f"whole {known}")
"""


@pytest.mark.slow
def test_output_that_nobody_reads_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PRINTING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "line 0\n"
    process.stdout.close()
    assert process.stderr.read() == "whole True"
    assert process.wait(timeout=300) == 0


def test_other_errors_of_writing_are_not_hidden() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        output.PatientOutput(Full()).write("a line\n")


COMMAND = """
import os, signal, sys, time
import fabfile
def interrupted():
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)
fabfile._end(interrupted, fabfile.Path("inventory/lab"), fabfile.RUNS_GO_ON)
"""


@pytest.mark.slow
def test_the_last_words_of_an_interrupted_command_claim_no_more_than_it_knows() -> None:
    done = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == exits.INTERRUPTED, done.stderr
    assert done.stderr == (
        "muster: interrupted; `make status INVENTORY=inventory/lab` shows what still runs on the hosts, "
        "and `make stop RUN=<id> INVENTORY=inventory/lab` ends it\n"
    )
