"""The host's end of the VPN that training goes through, where the inventory has `train_vpn`: WireGuard, by wg-quick.

wg-quick takes the kernel's WireGuard, or where that has none the program wireguard-go. The private key is made here, is
root's alone and leaves this host never. Where there is systemd the interface comes back with the host, elsewhere with
the next run or deploy.

For muster_survey (`about`), and sent to the host's own Python like muster_answer (`run`). Standard library alone,
Python 3.8 and later.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

from ansible.module_utils.muster_host import read
from ansible.module_utils.muster_host import run as call

INTERFACE = "muster0"
FOLDER = Path("/etc/wireguard")
SETTINGS, KEY = FOLDER / f"{INTERFACE}.conf", FOLDER / f"{INTERFACE}.key"
LINKS = Path("/sys/class/net")
SOCKETS = Path("/run/wireguard")  # of wireguard-go
UP_SECONDS = 30.0
GREETING_SECONDS, LOOK_SECONDS = 20.0, 0.1  # a greeting that got lost is sent again after 5 s


def about() -> Dict[str, Any]:
    """{"settings": of wg-quick, or "", "public_key": or "", "up": whether the interface is there, "routes": [networks
    that this host has a way to, but for the default one and what goes by the VPN itself]}."""
    return {
        "settings": read(SETTINGS) or "",
        "public_key": _public_key(),
        "up": (LINKS / INTERFACE).exists(),
        "routes": parse_routes(call(["ip", "-j", "route", "show", "table", "all"]).out),
    }


def parse_routes(ip_json: str) -> List[str]:
    """Of `ip -j route show table all`: networks and addresses of IPv4. Pure."""
    routes = json.loads(ip_json or "[]")
    known = {one["dst"] for one in routes if one.get("dst") and one.get("dev") != INTERFACE}
    return sorted(one for one in known if one != "default" and ":" not in one)


def _public_key() -> str:
    return call(["sh", "-c", f"[ ! -e {KEY} ] || wg pubkey <{KEY}"]).out.strip()


def run(options: Dict[str, Any], say: Callable[[Any], None]) -> None:
    """Make the key, and bring the interface to what it is to be.

    options: settings, of wg-quick without the key: null: make the key, and take the interface down; "": the interface
    and all of it go. Says {"public_key", "unmet": [public keys of those that do not answer it, once it is up]}. A
    failure is {"error": why}, with exit status 1.
    """
    try:
        if options["settings"] == "":
            _remove()
            say({"public_key": "", "unmet": []})
            return
        _make_key()
        _down()
        if options["settings"]:
            _bring_up(options["settings"])
        say({"public_key": _public_key(), "unmet": _unmet() if options["settings"] else []})
    except (RuntimeError, OSError) as error:
        say({"error": str(error)})
        sys.exit(1)


def _make_key() -> None:
    if read(KEY):
        return
    text = call(["wg", "genkey"]).checked("wg genkey")
    FOLDER.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write(KEY, text)


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".new")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
        file.write(text)
    temporary.replace(path)


def _bring_up(settings: str) -> None:
    _write(SETTINGS, settings)
    done = call(["wg-quick", "up", INTERFACE], UP_SECONDS)
    if done.rc != 0:
        raise RuntimeError(f"`wg-quick up {INTERFACE}`: {_reason(done.err)}")
    _unit("enable")


def _reason(said: str) -> str:
    """What failed, of what wg-quick says, which notes each command that it runs and those that undo them. Pure."""
    lines = [line for line in said.splitlines() if line and not line.startswith(("[#]", "[!]"))]
    return "; ".join(dict.fromkeys(lines)) or "it failed without a word"


def _unmet() -> List[str]:
    """Waits for the other hosts, which come up at the same time."""
    until = time.monotonic() + GREETING_SECONDS
    while True:
        unmet = parse_unmet(call(["wg", "show", INTERFACE, "latest-handshakes"]).checked("wg show"))
        if not unmet or time.monotonic() >= until:
            return unmet
        time.sleep(LOOK_SECONDS)


def parse_unmet(handshakes: str) -> List[str]:
    """Of `wg show muster0 latest-handshakes`: the keys of those with whom there was none yet. Pure."""
    pairs = [line.split() for line in handshakes.splitlines()]
    return [pair[0] for pair in pairs if pair[1:] == ["0"]]


def _down() -> None:
    if not (LINKS / INTERFACE).exists():
        return
    if call(["wg-quick", "down", INTERFACE], UP_SECONDS).rc != 0:  # its settings may have gone
        call(["ip", "link", "delete", "dev", INTERFACE]).checked(f"ip link delete dev {INTERFACE}")


def _remove() -> None:
    if SETTINGS.exists():
        _unit("disable")
    _down()
    for path in (SETTINGS, KEY):
        if path.exists():
            path.unlink()
    with contextlib.suppress(OSError):  # another interface has its socket there, or there is none
        SOCKETS.rmdir()


def _unit(verb: str) -> None:
    if Path("/run/systemd/system").is_dir():
        call(["systemctl", verb, f"wg-quick@{INTERFACE}"]).checked(f"systemctl {verb} wg-quick@{INTERFACE}")
