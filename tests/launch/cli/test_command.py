"""Promise: a program of this machine that hangs ends a command with one message that names it, not with a traceback."""

from __future__ import annotations

import subprocess

import pytest

from launch.cli import command, exits


def test_a_program_that_hangs_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        return subprocess.run(["sleep", "1000"], timeout=0.2, check=False).returncode

    assert command.run(work) == exits.FAILED
    assert capsys.readouterr().err == (
        "muster: failed:\n  this machine: `sleep 1000` had not ended after 0.2 s\n"
        "      fix: see what keeps it busy, then try again\n"
    )
