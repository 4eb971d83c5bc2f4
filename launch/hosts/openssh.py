"""What Ansible, rsync, `make trust` and the way through jump hosts tell OpenSSH. Not for Fabric's connections: ssh.py.

All of them get one configuration file: `ssh -J` passes nothing else on to the ssh that logs in to the jump host, whose
key has to be checked against the inventory's known_hosts as well.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import random
import re
import shlex
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from launch.hosts.inventory import Target

CONNECT_SECONDS = 10
#: sshd drops logins at random when ten are under way (MaxStartups 10:30:100), and others use a jump host too.
LOGINS_AT_ONCE = 5
#: So it does where others log in to a host: a login that it has dropped is tried again after so many seconds, about.
PAUSES_SECONDS = (0.5, 1.0, 2.0)
DROPPED_FIX = (
    "too many logins are under way there (MaxStartups in its sshd_config), or a rule keeps this machine out "
    "(PerSourcePenalties, fail2ban, hosts.deny)"
)

_jump_logins = threading.BoundedSemaphore(LOGINS_AT_ONCE)


def through_jump_host(target: Target) -> bool:
    """Whether something stands between this machine and a host."""
    return bool(target.jump or target.proxy_command)


def login_slot(target: Target) -> contextlib.AbstractContextManager[object]:
    """Held while a host is logged in to: through jump hosts LOGINS_AT_ONCE logins are under way at most."""
    return _jump_logins if through_jump_host(target) else contextlib.nullcontext()


def pauses() -> Iterator[float]:
    """The seconds to wait after each login that was dropped; no two callers wait equally long."""
    return (random.uniform(0.5, 1.5) * seconds for seconds in PAUSES_SECONDS)


def dropped(said: str) -> bool:
    """Whether ssh says (in `reason`'s words) that an sshd hung up on it before it could log in. Pure."""
    return bool(re.match(r"(kex_exchange_identification: |Connection (closed|reset) by \S+ port )", said))


def write_config(path: Path, options: Mapping[str, object]) -> Path:
    """Write an ssh_config of these options, which win over the user's and the system's own, read after them."""
    lines = [
        *(f"{key} {value}" for key, value in options.items()),
        "Include ~/.ssh/config",
        "Include /etc/ssh/ssh_config",
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def options(known_hosts: Path) -> list[str]:
    """The options with which ssh checks the keys of hosts and jump hosts against `known_hosts`, and asks nothing."""
    config, wanted = _config(known_hosts.resolve())
    # Once more as options: an inventory may set the same ones in ansible_ssh_common_args, and the first one wins.
    return ["-F", str(config), *(word for key, value in wanted.items() for word in ("-o", f"{key}={value}"))]


@functools.cache
def _config(known_hosts: Path) -> tuple[Path, dict[str, object]]:
    # OpenSSH puts the path of the file unquoted into a jump host's command, and Ansible and rsync split what they are
    # given at spaces. So neither path may contain one, wherever the clone lies: a folder of this process in /tmp.
    folder = Path(tempfile.mkdtemp(prefix="muster-ssh-", dir="/tmp"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "known_hosts").symlink_to(known_hosts)
    wanted: dict[str, object] = {
        "UserKnownHostsFile": folder / "known_hosts",
        "StrictHostKeyChecking": "yes",
        "ConnectTimeout": CONNECT_SECONDS,
        "BatchMode": "yes",
        "ForwardAgent": "no",  # root of a host could log in elsewhere with the user's keys
        "LogLevel": "ERROR",  # not the banner of a jump host, which would be taken for the reason of a failure
        "ServerAliveInterval": 5,
        "ServerAliveCountMax": 3,
    }
    return write_config(folder / "config", wanted), wanted


def login_words(target: Target) -> list[str]:
    """How ssh finds a host and logs in to it: all of its command line but the options, the address and a command."""
    words = ["-p", str(target.port)]
    words += ["-l", target.user] if target.user else []
    words += ["-i", target.key_file] if target.key_file else []
    words += ["-J", target.jump] if target.jump else []
    words += ["-o", f"ProxyCommand={target.proxy_command}"] if target.proxy_command else []
    return words


def proxy_words(target: Target, host: str, known_hosts: Path) -> list[str]:
    """The command whose standard input and output are a connection to a host's sshd; empty where none is needed.

    host: the host's name or address as the last jump host finds it.
    """
    if target.jump:
        *before, last = target.jump.split(",")
        hop = re.fullmatch(r"(?:(.+)@)?\[?(.+?)\]?(?::(\d+))?", last)
        assert hop is not None, last
        user, name, port = hop.groups()
        words = ["ssh", *options(known_hosts), *(["-J", ",".join(before)] if before else [])]
        words += [*(["-l", user] if user else []), *(["-p", port] if port else [])]
        return [*words, "-W", f"[{host}]:{target.port}", name]
    if target.proxy_command:
        tokens = {"%h": host, "%p": str(target.port), "%r": target.user or "", "%n": target.address, "%%": "%"}
        filled = re.sub("%[hprn%]", lambda found: shlex.quote(tokens[found[0]]), target.proxy_command)
        return ["sh", "-c", f"exec {filled}"]
    return []


#: What ssh prints beside the reason, or only because of it.
_NO_REASON = ("UNKNOWN port", "stdio forwarding failed", "kex_exchange_identification")


def reason(said: str) -> str:
    """Why ssh failed, from what it printed, in one line. Pure."""
    lines = [line.strip().rstrip(".") for line in said.splitlines() if line.strip()]
    return "; ".join([line for line in lines if not any(text in line for text in _NO_REASON)] or lines)


def rsync_shell(target: Target, known_hosts: Path) -> str:
    """The `-e` argument with which rsync logs in to a host."""
    return shlex.join(["ssh", *options(known_hosts), *login_words(target)])


def rsync_source(target: Target, path: str) -> str:
    """host:path as rsync writes it."""
    host = f"[{target.address}]" if ":" in target.address else target.address
    return f"{target.user + '@' if target.user else ''}{host}:{path}"
