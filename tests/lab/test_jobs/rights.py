"""Says what a rank may do on its host, then stays until it is stopped. As JSON, by rank, in $MUSTER_RUN_DIR.

rights.py ADDRESS: of a machine that is not in the run, and has an sshd.
"""

import getpass
import json
import os
import socket
import sys
import time
from pathlib import Path

import torch.distributed as dist

PLACES = ("/", "/etc", "/opt/muster", "/muster", "/muster/lease", "/muster/private", "/workload", "/tmp", "/muster/run")


def may_write(folder: str) -> bool:
    try:
        path = Path(folder, f"new-{os.getpid()}")  # other ranks of the host try, too
        path.write_text("")
        path.unlink()
    except OSError:
        return False
    return True


def reaches(address: str) -> dict[str, bool]:
    """Whether a rank itself may call others."""
    reached = {}
    for name, kind in (("tcp", socket.SOCK_STREAM), ("udp", socket.SOCK_DGRAM)):
        with socket.socket(socket.AF_INET, kind) as end:
            end.settimeout(5)
            try:
                end.connect((address, 22))
                reached[name] = end.send(b"\n") == 1
            except OSError:
                reached[name] = False
    return reached


def status() -> dict[str, str]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def limit(*names: str) -> int:
    """The container's, in version 2 of control groups or version 1."""
    found = (Path("/sys/fs/cgroup", name) for name in names)
    return int(next(path for path in found if path.exists()).read_text())


dist.init_process_group("gloo")
found = {
    "ids": [os.getuid(), os.getgid(), *os.getgroups()],
    "name": getpass.getuser(),
    "capabilities": [status()[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")],
    "no_new_privileges": status()["NoNewPrivs"],
    "writes": [folder for folder in PLACES if may_write(folder)],
    "reaches": reaches(sys.argv[1]),
    "key": bool(Path("/muster/private/key").read_text()),
    "memory": limit("memory.max", "memory/memory.limit_in_bytes"),
    "threads": limit("pids.max", "pids/pids.max"),
    "shm": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize,
}
Path(os.environ["MUSTER_RUN_DIR"], f"rights-{dist.get_rank()}.json").write_text(json.dumps(found))
dist.barrier()
print("all have said it", flush=True)
time.sleep(600)
