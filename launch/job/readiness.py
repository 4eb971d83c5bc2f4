"""Whether every host is ready for a run: image, data, free ports, something to continue from. Starts nothing.

Not for whether a host is free: that is asked for in the queue (queue.py), where one waits for it too.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from keeper import MASTER_PORTS, USER_ID, engines, ports
from launch.cli import exits
from launch.cli.refusal import Problem, Refusal
from launch.hosts import ssh
from launch.hosts.clustermap import REACH_PORTS, VPN_INTERFACE, MapHost, no_data
from launch.hosts.connection import Machine
from launch.job import resume as resuming
from launch.job.plan import Ports

NO_ANSWER_FIX = (
    "log in and try `sudo -n podman ps`, or docker: Muster needs root and a container engine there; then run this again"
)
NO_IMAGE = "does not hold image"
_BRING_UP_VPN = f"[ -e /sys/class/net/{VPN_INTERFACE} ] || wg-quick up {VPN_INTERFACE} >/dev/null 2>&1"
#: Whether the ranks can read a folder. From inside: what stands above it on the host is not above it in the container.
_LOOK_AT_DATA = (
    f"(cd {{}} 2>/dev/null && echo data=closed && setpriv --reuid {USER_ID} --regid {USER_ID} --clear-groups "
    "sh -c 'test -r . && test -x .' && echo data=readable)"
)


class ImageLacking(Refusal):
    """Not all hosts hold the run's image; what else is wrong, `others`, is named too."""

    def __init__(self, problems: Sequence[Problem], others: Sequence[Problem] = ()) -> None:
        super().__init__(problems)
        self.others = tuple(others)


@dataclass(frozen=True)
class Readiness:
    """What one host has of what a start needs."""

    has_image: bool
    data_dir: str  # "" where there is none; "readable" by the ranks, or "closed" to them
    keeper_ports: list[int]  # two that are free, or fewer: the keeper's, and one over which the quick check is made
    master_ports: list[int]  # two that are free on the first host, or fewer
    keeper_held: str = ""  # who has these ports, where too few are free
    master_held: str = ""
    has_resume: bool = False  # something to continue from; only asked with RESUME


def check(
    machines: Sequence[Machine], hosts: Sequence[MapHost], image: str, earlier: resuming.Earlier | None = None
) -> Ports:
    """Ask all hosts at once, before anything is started; returns free ports.

    `earlier`: the run to continue; one host that holds a checkpoint of it is enough.
    Raises Refusal, naming every host that is not ready, and why; with UNREACHABLE where one did not answer.
    ImageLacking where all answered, and not all have the image.
    """

    def ask_one(pair: tuple[Machine, MapHost]) -> Readiness:
        machine, host = pair
        resume = resuming.has_checkpoint_command(earlier, host) if earlier else None
        return ask(machine, image, host.data_dir, host.address, 2 if host is hosts[0] else 0, resume, host.interface)

    results = ssh.in_parallel(ask_one, zip(machines, hosts, strict=True))
    ready = [readiness for readiness in results if isinstance(readiness, Readiness)]
    problems: list[Problem] = []
    for host, readiness in zip(hosts, results, strict=True):
        if isinstance(readiness, BaseException):
            problems.append(Problem(f"host {host.name}", f"did not answer: {readiness}", NO_ANSWER_FIX))
        else:
            problems += problems_of(host, readiness, image, is_master=host is hosts[0])
    if earlier and not any(readiness.has_resume for readiness in ready):
        problems += resuming.refusal_of_nothing(earlier, [host.name for host in hosts]).problems
    if problems:
        if len(ready) < len(hosts):
            raise Refusal(problems, exits.UNREACHABLE)
        others = [problem for problem in problems if not problem.what.startswith(NO_IMAGE)]
        raise Refusal(problems) if len(others) == len(problems) else ImageLacking(problems, others)
    master, free = ready[0].master_ports
    return Ports(master, free, tuple(readiness.keeper_ports[0] for readiness in ready))


def ask(
    machine: Machine,
    image: str,
    data_dir: str | None = None,
    address: str | None = None,
    master_ports: int = 0,
    resume: str | None = None,
    interface: str | None = None,
) -> Readiness:
    """One host's readiness, in one call.

    `image` is an id, `address` the one on which its keeper would listen (None: no port is wanted), `master_ports` how
    many free ones are wanted, and `resume` a shell command that succeeds where there is something to continue from.
    `interface`: of the training network; the VPN's comes back with the host only where that has systemd.
    Raises as `Machine.answer`; also when the container engine does not answer, or sudo asks for a password.
    """
    wanted = [
        *([("keeper", address, *REACH_PORTS, 2)] if address else []),  # one for the quick check
        *([("master", "", *MASTER_PORTS, master_ports)] if master_ports else []),
    ]
    script = [
        # First: where the engine does not answer, the call must fail.
        engines.on_host(lambda engine: engine.find_image(image)),
        _LOOK_AT_DATA.format(shlex.quote(data_dir)) if data_dir else "echo data=readable",
        *([_BRING_UP_VPN] if interface == VPN_INTERFACE else []),
        *([f"{resume} && echo resume=yes"] if resume else []),
        shlex.join([machine.target.python, "-c", Path(ports.__file__).read_text(), json.dumps(wanted)]),
    ]
    return parse(machine.answer("; ".join(script)))


def parse(answer: str) -> Readiness:
    """The answer to `ask`'s script. Pure."""
    found = dict(line.split("=", 1) for line in answer.splitlines() if "=" in line)
    keeper, master = ([int(port) for port in found.get(name, "").split()] for name in ("keeper", "master"))
    held = (found.get("keeper_held", ""), found.get("master_held", ""))
    return Readiness("image" in found, found.get("data", ""), keeper, master, *held, "resume" in found)


def problems_of(host: MapHost, readiness: Readiness, image: str, is_master: bool) -> list[Problem]:
    """What keeps a run from starting on a host."""
    where, problems = f"host {host.name}", []
    if not readiness.has_image:
        problems.append(Problem(where, f"{NO_IMAGE} {image[:12]}", "run `make deploy`"))
    if not readiness.data_dir:
        problems.append(Problem(where, *no_data(host.data_dir)))
    if readiness.data_dir == "closed":
        what = f"its folder {host.data_dir} (data_dir) is closed to ranks, which run as a user that no host has"
        problems.append(Problem(where, what, f"there: sudo chmod -R o+rX {shlex.quote(str(host.data_dir))}"))
    for few, (first, last), held in (
        (len(readiness.keeper_ports) < 2, REACH_PORTS, readiness.keeper_held),
        (is_master and len(readiness.master_ports) < 2, MASTER_PORTS, readiness.master_held),
    ):
        if few:
            what = f"of its ports from {first} to {last} fewer than two are free"
            what += f"; they are held by {held}" if held else ""
            problems.append(Problem(where, what, "end what listens there; `ss -ltnp` shows it"))
    return problems
