"""The host's own firewall, ufw or firewalld, where it is active: opened to the other hosts of the cluster, no further.

Rules that allow are added, and later removed, by the firewall's own commands; they last over a reboot. They come after
the user's own, so that what he denies stays denied, and can be told: ufw's have the comment `muster`, those of
firewalld (rich rules, in the default zone and in those that are in use) the priority 29400. No rule of anybody else is
touched, and firewalld is never loaded anew, which would take away what was opened for the moment alone.

`ufw delete` loads the user's rules anew: while that fails, SSH could be shut out. So what was there before is kept, and
comes back by itself unless somebody who has logged in after the change removes what is kept.

All usable addresses of the other hosts are let in, and not on the chosen network alone: each deploy tries all networks,
and behind each address is the same machine.

For muster_survey (`opened`), and sent to the host's own Python like muster_answer (`run`). Standard library alone,
Python 3.8 and later.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

from ansible.module_utils.muster_host import find_command, read
from ansible.module_utils.muster_host import run as call

COMMENT = "muster"  # of rules of ufw
PRIORITY = 29400  # of rules of firewalld
COMMAND_SECONDS, RULE_SECONDS = 30.0, 2.0  # for a command, and for each rule that it is given
RETURN_SECONDS = 60  # after which what was there before comes back
KEPT = Path("/var/lib/muster")  # a folder in it holds that until then
UFW_RULES = tuple(Path("/etc/ufw", name) for name in ("user.rules", "user6.rules"))

#: Whom it allows, and what the firewall's commands take.
Rule = Tuple[str, ...]
#: Protocol -> ranges of ports, first and last one.
Ports = Mapping[str, Sequence[Sequence[int]]]


def with_ephemeral(ports: Ports, text: str) -> Dict[str, List[Tuple[int, int]]]:
    """The ports and those that the kernel gives to whoever asks for any, for TCP. Ranges that touch are one. Pure.

    text: of ip_local_port_range.
    """
    low, high = (int(word) for word in text.split())
    merged: Dict[str, List[Tuple[int, int]]] = {}
    for protocol, ranges in ports.items():
        own = merged.setdefault(protocol, [])
        for first, last in sorted([*map(tuple, ranges), *([(low, high)] if protocol == "tcp" else [])]):
            if own and first <= own[-1][1] + 1:
                own[-1] = (own[-1][0], max(last, own[-1][1]))
            else:
                own.append((first, last))
    return merged


class Ufw:
    """Rules: (source, the words after `ufw allow`)."""

    name, program = "ufw", "ufw"

    def is_active(self) -> bool:
        return call(["ufw", "status"]).out.startswith("Status: active")

    def wanted(self, source: str, ports: Ports) -> Set[Rule]:
        if ":" in source and "IPV6=yes" not in (read("/etc/default/ufw") or ""):
            return set()  # it leaves IPv6 alone
        listed = {
            protocol: ",".join(str(low) if low == high else f"{low}:{high}" for low, high in ranges)
            for protocol, ranges in ports.items()
        }
        return {(source, f"from {source} to any port {listed[protocol]} proto {protocol}") for protocol in listed}

    def there(self) -> Set[Rule]:
        return self.parse(call(["ufw", "show", "added"]).checked("ufw show added"))

    @staticmethod
    def parse(added: str) -> Set[Rule]:
        """Of `ufw show added`. Pure."""
        found = re.findall(rf"^ufw allow (from (\S+) .*) comment '{COMMENT}'$", added, re.MULTILINE)
        return {(source, words) for words, source in found}

    def change(self, add: Iterable[Rule], remove: Iterable[Rule]) -> None:
        try:
            for _, words in sorted(add):
                self._call("allow", *words.split(), "comment", COMMENT)
            for _, words in sorted(remove):
                self._call("delete", "allow", *words.split())
        except RuntimeError:
            call(["ufw", "reload"], COMMAND_SECONDS)  # a change that failed midway leaves the user's rules out
            raise

    def _call(self, *words: str) -> None:
        call(["ufw", *words], COMMAND_SECONDS).checked(f"ufw {' '.join(words)}")


class Firewalld:
    """Rules: (source, a key of COMMANDS, zone, rich rule)."""

    name, program = "firewalld", "firewall-cmd"
    COMMANDS: Mapping[str, Sequence[str]] = {
        "now": ["firewall-cmd"],
        "permanent": ["firewall-cmd", "--permanent"],
        "stopped": ["firewall-offline-cmd"],  # what is kept, while it does not run
    }

    def is_active(self) -> bool:
        return call(["firewall-cmd", "--state"]).rc == 0

    def wanted(self, source: str, ports: Ports) -> Set[Rule]:
        family = "ipv6" if ":" in source else "ipv4"
        texts = [
            f'rule priority="{PRIORITY}" family="{family}" source address="{source}"'
            f' port port="{low if low == high else f"{low}-{high}"}" protocol="{protocol}" accept'
            for protocol, ranges in ports.items()
            for low, high in ranges
        ]
        return {(source, when, zone, text) for when in ("now", "permanent") for zone in self._zones() for text in texts}

    @functools.lru_cache(maxsize=1)  # noqa: B019  it lives as long as one question
    def _zones(self) -> List[str]:
        """Those that decide about calls from outside and do not let everything in."""
        default = call(["firewall-cmd", "--get-default-zone"]).checked("firewall-cmd --get-default-zone").strip()
        return self.in_use(self._listed("now"), default)

    @staticmethod
    def in_use(listed: str, default: str) -> List[str]:
        """The zones that rules go to, of `--list-all-zones`. Pure."""
        found = re.findall(r"^(\S+)( \(.*\))?\n  target: (\S+)", listed, re.MULTILINE)
        return [name for name, flags, target in found if (name == default or "active" in flags) and target != "ACCEPT"]

    def there(self) -> Set[Rule]:
        kinds = ("now", "permanent") if self.is_active() else ("stopped",)
        return {(source, kind, *rest) for kind in kinds for source, *rest in self.parse(self._listed(kind))}

    def _listed(self, kind: str) -> str:
        words = [*self.COMMANDS[kind], "--list-all-zones"]
        return call(words).checked(" ".join(words))

    @staticmethod
    def parse(listed: str) -> Set[Tuple[str, str, str]]:
        """(source, zone, rich rule) of `--list-all-zones`. Pure."""
        found, zone = set(), ""
        for line in listed.splitlines():
            if line and not line[0].isspace():
                zone = line.split()[0]
            source = re.search(r'source address="(\S+?)"', line)
            if source and line.strip().startswith(f'rule priority="{PRIORITY}" '):
                found.add((source.group(1), zone, line.strip()))
        return found

    def change(self, add: Iterable[Rule], remove: Iterable[Rule]) -> None:
        asked: Dict[Tuple[str, str, str], List[str]] = {}
        for verb, rules in (("add", add), ("remove", remove)):
            for _, kind, zone, text in sorted(rules):
                asked.setdefault((verb, kind, zone), []).append(text)
        for (verb, kind, zone), texts in asked.items():
            words = [*self.COMMANDS[kind], f"--zone={zone}", *(f"--{verb}-rich-rule={text}" for text in texts)]
            done = call(words, COMMAND_SECONDS + RULE_SECONDS * len(texts))
            done.checked(" ".join([*self.COMMANDS[kind], f"--zone={zone}", f"--{verb}-rich-rule=..."]))


KINDS = (Ufw, Firewalld)


def _ports(ports: Ports) -> Ports:
    return with_ephemeral(ports, read("/proc/sys/net/ipv4/ip_local_port_range") or "32768 60999")


def opened(ports: Ports) -> Dict[str, Optional[Dict[str, bool]]]:
    """Active firewall -> address that Muster lets in -> whether by all rules that it takes, and no others; None for a
    firewall that does not say what it has."""
    found: Dict[str, Optional[Dict[str, bool]]] = {}
    for kind in KINDS:
        firewall = kind()
        if find_command(firewall.program) and firewall.is_active():
            try:
                there, every = firewall.there(), _ports(ports)
                own = {one: {rule for rule in there if rule[0] == one} for one in sorted({rule[0] for rule in there})}
                found[firewall.name] = {one: rules == firewall.wanted(one, every) for one, rules in own.items()}
            except RuntimeError:
                found[firewall.name] = None
    return found


def run(options: Dict[str, Any], say: Callable[[Any], None]) -> None:
    """Let in these addresses and no others of ours.

    options: sources [addresses; with none also firewalls that are not active lose our rules], ports (as `opened` takes
    them). Says {"changed": [names of firewalls], "undo": a folder to be removed by who has logged in anew, or null}.
    A failure is {"error": why}, with exit status 1.
    """
    try:
        say(_settle([str(ipaddress.ip_address(one)) for one in options["sources"]], _ports(options["ports"])))
    except (RuntimeError, OSError, ValueError) as error:
        say({"error": str(error)})
        sys.exit(1)


def _settle(sources: Sequence[str], ports: Ports) -> Dict[str, Any]:
    changed: List[str] = []
    undo = None
    for kind in KINDS:
        firewall = kind()
        if not find_command(firewall.program) or (sources and not firewall.is_active()):
            continue
        wanted = {rule for source in sources for rule in firewall.wanted(source, ports)}
        there = firewall.there()
        if wanted == there:
            continue
        if firewall.name == Ufw.name and there - wanted and firewall.is_active():
            undo = _arm()
        try:
            firewall.change(wanted - there, there - wanted)
        except RuntimeError as error:
            raise RuntimeError(f"{firewall.name} could not be changed: {error}") from None
        changed.append(firewall.name)
    return {"changed": changed, "undo": undo}


def _arm() -> str:
    """Have ufw's rules come back as they are now in RETURN_SECONDS, if the folder returned is still there then."""
    KEPT.mkdir(mode=0o755, parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="firewall-", dir=str(KEPT))
    for file in UFW_RULES:
        if file.exists():
            shutil.copy2(file, folder)
    wait = f"for second in $(seq {RETURN_SECONDS}); do sleep 1; [ -d {folder} ] || exit 0; done"
    script = f"{wait}; cp -p {folder}/*.rules {UFW_RULES[0].parent}/ && ufw reload; rm -rf {folder}"
    subprocess.Popen(
        ["sh", "-c", script], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True, cwd="/",
    )  # fmt: skip
    return folder
