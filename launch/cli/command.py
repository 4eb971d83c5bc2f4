"""One command from its start to its exit status: a refusal, or an interrupt, becomes one message."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from launch.cli import exits
from launch.cli.make_variables import name_inventory, refuse_unknown_variables
from launch.cli.output import patient_output
from launch.cli.refusal import Problem, Refusal
from launch.cli.signals import exit_now, interrupts_as_exceptions


def run(command: Callable[[], int], inventory: Path | None = None, after_interrupt: str = "") -> int:
    """Run a command and return its exit status.

    Messages that name another command name the `inventory` too; `after_interrupt` is printed after an interrupt for
    which the command itself has no message.
    """
    with patient_output():
        try:
            refuse_unknown_variables(os.environ.get("MAKEFLAGS", ""))
            with interrupts_as_exceptions():
                return command()
        except Refusal as refusal:
            print(f"muster: refused:\n{name_inventory(str(refusal), inventory)}", file=sys.stderr, flush=True)
            return refusal.status
        except subprocess.TimeoutExpired as error:  # a program of this machine that answers at once where all is well
            what = f"`{shlex.join(map(str, error.cmd))[:100]}` had not ended after {round(error.timeout, 1):g} s"
            problem = Problem("this machine", what, "see what keeps it busy, then try again")
            print(f"muster: failed:\n{problem}", file=sys.stderr, flush=True)
            return exits.FAILED
        except KeyboardInterrupt as interrupt:
            message = str(interrupt) or "; ".join(filter(None, ("interrupted", after_interrupt)))
            exit_now(f"muster: {name_inventory(message, inventory)}")
