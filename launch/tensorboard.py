"""`make tensorboard`: the curves of all runs here, or of RUN=<id>, in TensorBoard, for this machine alone.

    python -m launch.tensorboard

It ends with Ctrl-C, which is its ordinary end: exit status 0.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path

from launch.cli import command, exits
from launch.cli.refusal import refuse
from launch.cli.signals import first_signal, undisturbed
from launch.files import ROOT, runs_dir, shown
from launch.report import documents

COMMAND = ("-m", "tensorboard.main")  # of this Python
SERVER_END_SECONDS = 10.0  # that TensorBoard gets to end by itself
EVENT_FILES = "**/events.out.tfevents.*"
SERVER_LINES = 10  # of TensorBoard's own, shown when it ends by itself


def main() -> int:
    """Run `make tensorboard`; returns the exit status."""
    return command.run(lambda: serve(documents.find(run) if (run := os.environ.get("RUN", "").strip()) else runs_dir()))


def serve(folder: Path) -> int:
    """Show the curves below `folder` until Ctrl-C. Raises Refusal without curves, or when it ends by itself."""
    if not any(folder.glob(EVENT_FILES)):
        fix = "Muster's trainer writes them unless --loggers leaves them out; a script of your own writes its own"
        raise refuse("RUN", f"there are no curves of TensorBoard in {shown(folder)}", fix)
    words = [sys.executable, *COMMAND, "--logdir", str(folder), "--host", "127.0.0.1"]
    with undisturbed(then_interrupt=True):  # while it is being started it cannot be ended
        # A session of its own: a terminal's Ctrl-C comes here alone, and it is ended from here.
        server = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        return _follow(server, folder)
    except KeyboardInterrupt:
        print("\nTensorBoard has ended", flush=True)
        return exits.SUCCEEDED if first_signal() == signal.SIGINT else 128 + first_signal()
    finally:
        with undisturbed():
            _end(server)


def _follow(server: subprocess.Popen[str], folder: Path) -> int:
    """Say where TensorBoard is to be seen, and wait for its end. Raises Refusal when it ends by itself."""
    said: deque[str] = deque(maxlen=SERVER_LINES)
    for line in server.stderr or ():
        said.append(line.rstrip())
        if found := re.search(r"http://\S+", line):
            print(f"TensorBoard of {shown(folder)}: {found[0]}  (Ctrl-C ends it)", flush=True)
    ended = f"TensorBoard ended with status {server.wait()}: {'; '.join(filter(None, said))}"
    raise refuse("this machine", ended, "see its own words, then try again", exits.FAILED)


def _end(server: subprocess.Popen[str]) -> None:
    """End TensorBoard and the process that reads event files for it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if server.poll() is None:
            os.killpg(server.pid, number)
            try:
                server.wait(SERVER_END_SECONDS)
            except subprocess.TimeoutExpired:
                continue


if __name__ == "__main__":
    sys.exit(main())
