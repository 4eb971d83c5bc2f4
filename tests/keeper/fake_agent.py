"""Stands for torchrun in tests of the keeper: starts processes of `program`, reports as train/start/agent.py does.

python fake_agent.py <torchrun's arguments> -- PROGRAM [ARGUMENT ...]

Its ranks are those for which the keeper has made pipes.

As torchrun does, it waits after its own ranks have ended well for those of other hosts, where FAKE_OTHERS names a file
that is there when they have.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any


def tell(words: dict[str, Any]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.sendto(json.dumps(words).encode(), os.environ["MUSTER_KEEPER"])


def main() -> int:
    program = sys.argv[sys.argv.index("--") + 1 :]
    numbers = sorted(int(name.removeprefix("rank-")) for name in os.listdir(os.environ["MUSTER_PIPES"]))
    ranks = {}
    for rank in numbers:
        pipe = open(f"{os.environ['MUSTER_PIPES']}/rank-{rank}", "w")  # noqa: SIM115
        env = {**os.environ, "RANK": str(rank), "PYTHONUNBUFFERED": "1"}
        ranks[rank] = subprocess.Popen([sys.executable, *program], env=env, stdout=pipe, stderr=pipe)
    tell({"agent": "started", "pids": {rank: process.pid for rank, process in ranks.items()}})
    print("the launcher runs", flush=True)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    failed, well = False, set[int]()
    alive = True
    while alive:
        alive = any(process.poll() is None for process in ranks.values())
        for rank, process in ranks.items():
            if process.poll() == 0 and not asked and rank not in well:
                well.add(rank)
                tell({"agent": "rank_ended", "rank": rank})
            if process.poll() and not failed and not asked:
                failed = True
                signalled = signal.Signals(-process.returncode).name if process.returncode < 0 else None
                said = f"killed by {signalled}" if signalled else f"exit status {process.returncode}"
                failure = {"rank": rank, "local_rank": rank - numbers[0], "pid": process.pid, "time": time.time()}
                more = {"exitcode": process.returncode, "signal": signalled, "exception": said, "traceback": ""}
                tell({"agent": "failed", "failure": {**failure, **more, "consequence": False}})
        if (failed or asked) and asked != [0]:
            asked[:] = [0]
            for process in ranks.values():
                if process.poll() is None:
                    process.terminate()
        time.sleep(0.02)
    if not failed and not asked:
        tell({"agent": "ended"})
        while "FAKE_OTHERS" in os.environ and not asked and not os.path.exists(os.environ["FAKE_OTHERS"]):
            time.sleep(0.02)
    return 1 if failed else 128 + signal.SIGTERM if asked else 0


if __name__ == "__main__":
    sys.exit(main())
