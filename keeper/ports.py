"""Free TCP ports of this machine, and who has the others. Standard library alone.

As a program, which a control machine sends to a host before anything is installed there: `python3 -c THIS_FILE WANTED`,
where WANTED is a JSON list of [name, address, first, last, count]. Prints a line `name=port port ...` for each, and,
where they are too few, `name_held="program",pid=number, ...`.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import subprocess
import sys
from typing import List

HOLDERS = 5  # that are named
HOLDERS_SECONDS = 10.0


def free_ports(address: str, first: int, last: int, count: int) -> List[int]:
    """So many ports from `first` to `last` on which nobody listens, or fewer where there are fewer.

    address: on which somebody will listen; "": on all of them, as torch's store does.
    """
    ports, found = list(range(first, last + 1)), []
    random.shuffle(ports)
    for port in ports:
        with contextlib.suppress(OSError):
            _listen(address, port).close()
            found.append(port)
        if len(found) == count:
            break
    return found


def _listen(address: str, port: int) -> socket.socket:
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", port))


def holders(first: int, last: int) -> List[str]:
    """Who listens on ports from `first` to `last`, as `ss` says it; empty where it cannot be asked."""
    asked = ["ss", "-Hltnp", "sport >= :%d and sport <= :%d" % (first, last)]
    try:
        done = subprocess.run(asked, stdout=subprocess.PIPE, timeout=HOLDERS_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return sorted(set(re.findall(r'"[^"]+",pid=[0-9]+', done.stdout.decode())))[:HOLDERS]


if __name__ == "__main__":
    for name, address, first, last, count in json.loads(sys.argv[1]):
        found = free_ports(address, first, last, count)
        print(f"{name}={' '.join(map(str, found))}")
        if len(found) < count and (held := holders(first, last)):
            print(f"{name}_held={', '.join(held)}")
