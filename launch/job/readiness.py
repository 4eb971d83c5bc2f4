"""Whether every host is ready for a run: image, data, no other run, a free port on the first one. Starts nothing."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from launch import files
from launch.cli import exits
from launch.cli.refusal import Problem, Refusal
from launch.hosts import ssh
from launch.hosts.clustermap import MASTER_PORTS, MapHost
from launch.hosts.connection import Machine
from launch.job import resume as resuming

NO_ANSWER_FIX = "log in and try `sudo -n podman ps`: Muster needs root and Podman there; then run this command again"

#: Tries the ports of a range on all addresses (torch's TCPStore listens on all) and prints the first free one.
_FREE_PORT = """
import random, socket
ports = list(range({first}, {last} + 1))
random.shuffle(ports)
both = socket.has_dualstack_ipv6()
for port in ports:
    try:
        if both:
            socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True).close()
        else:
            socket.create_server(("0.0.0.0", port)).close()
    except OSError:
        continue
    print("port=%d" % port)
    break
"""


@dataclass(frozen=True)
class Readiness:
    """What one host has of what a start needs."""

    has_image: bool
    has_data_dir: bool
    runs: list[dict[str, str]]  # running containers of Muster: {"run", "owner", "age"}
    port: int | None  # a free rendezvous port; only asked of the first host
    has_resume: bool = False  # something to continue from; only asked with RESUME


def check(
    machines: Sequence[Machine], hosts: Sequence[MapHost], image: str, earlier: resuming.Earlier | None = None
) -> int:
    """Ask all hosts at once, before anything is started; returns a free port on the first one.

    `earlier`: the run to continue; one host that holds a checkpoint of it is enough.
    Raises Refusal, naming every host that is not ready, and why; with UNREACHABLE where one did not answer.
    """
    resume = resuming.has_checkpoint_command(earlier) if earlier else None

    def ask_one(pair: tuple[Machine, MapHost]) -> Readiness:
        machine, host = pair
        return ask(machine, image, host.data_dir, MASTER_PORTS if host is hosts[0] else None, resume)

    results = ssh.in_parallel(ask_one, zip(machines, hosts, strict=True))
    problems: list[Problem] = []
    for host, readiness in zip(hosts, results, strict=True):
        if isinstance(readiness, BaseException):
            problems.append(Problem(f"host {host.name}", f"did not answer: {readiness}", NO_ANSWER_FIX))
        else:
            problems += problems_of(host, readiness, image, needs_port=host is hosts[0])
    if earlier and not any(isinstance(readiness, Readiness) and readiness.has_resume for readiness in results):
        problems += resuming.refusal_of_nothing(earlier, [host.name for host in hosts]).problems
    if problems:
        answered = all(isinstance(readiness, Readiness) for readiness in results)
        raise Refusal(problems, exits.REFUSED if answered else exits.UNREACHABLE)
    first = results[0]
    assert isinstance(first, Readiness) and first.port is not None
    return first.port


def ask(
    machine: Machine,
    image: str,
    data_dir: str | None = None,
    ports: tuple[int, int] | None = None,
    resume: str | None = None,
) -> Readiness:
    """One host's readiness, in one call.

    `image` is an id, `ports` the first and the last of the range in which a free one is wanted, and `resume` a shell
    command that succeeds where there is something to continue from.
    Raises as `Machine.answer`; also when the container engine does not answer, or sudo asks for a password.
    """
    script = [
        # First, because the rest needs the engine too: without it, or without sudo, the call must fail.
        "runs=$(podman ps --filter label=muster.run --format json) || exit",
        "printf 'ps=%s\\n' \"$(printf %s \"$runs\" | tr -d '\\n')\"",
        f"podman image exists {image} && echo image=yes",
        f"test -d {shlex.quote(data_dir)} && echo data=yes" if data_dir else "echo data=yes",
    ]
    if resume:
        script.append(f"{resume} && echo resume=yes")
    if ports:
        code = _FREE_PORT.format(first=ports[0], last=ports[1])
        script.append(f"{shlex.quote(machine.target.python)} -c {shlex.quote(code)}")
    return parse(machine.answer("; ".join([*script, "true"])))


def parse(answer: str) -> Readiness:
    """The answer to `ask`'s script. Pure."""
    found = dict(line.split("=", 1) for line in answer.splitlines() if "=" in line)
    runs = [
        {
            "run": entry["Labels"].get("muster.run", "?"),
            "owner": entry["Labels"].get("muster.owner", "?"),
            "age": entry.get("Status") or entry.get("CreatedAt", "?"),
        }
        for entry in json.loads(found.get("ps") or "[]")
    ]
    port = found.get("port")
    return Readiness("image" in found, "data" in found, runs, int(port) if port else None, "resume" in found)


def problems_of(host: MapHost, readiness: Readiness, image: str, needs_port: bool) -> list[Problem]:
    """What keeps a run from starting on a host."""
    where, problems = f"host {host.name}", []
    if not readiness.has_image:
        problems.append(Problem(where, f"does not hold image {image[:12]}", "run `make deploy`"))
    if not readiness.has_data_dir:
        problems.append(Problem(where, f"has no folder {host.data_dir} (data_dir)", "create it, or correct data_dir"))
    for other in {entry["run"]: entry for entry in readiness.runs}.values():
        what = f"run {other['run']} of {other['owner']} is in progress ({other['age']})"
        fix = f"wait for it (`make status`), or end it with `make stop RUN={other['run']}`"
        if (files.runs_dir() / other["run"] / "summary.json").exists():
            what = f"a container is left over from run {other['run']}, which has ended ({other['age']})"
            fix = f"remove it with `make stop RUN={other['run']}`"
        problems.append(Problem(where, what, fix))
    if needs_port and readiness.port is None:
        first, last = MASTER_PORTS
        problems.append(Problem(where, f"no port from {first} to {last} is free", "see who holds them: `ss -ltnp`"))
    return problems
