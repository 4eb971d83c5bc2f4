"""Whether every host can be provisioned, before Ansible touches one: login, host key, python3, root."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import paramiko

from launch.cli import exits
from launch.cli.refusal import Problem, Refusal
from launch.hosts import rootless, ssh
from launch.hosts.connection import Machine
from launch.hosts.inventory import Target

PREFLIGHT_SECONDS = 15
OLDEST_PYTHON = (3, 8)  # what ansible-core's modules run on

#: Prints `key=value` lines. With a sudo password, that comes on standard input (sudo -S reads it there).
_SCRIPT = """
echo "python=$(PYTHON -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)"
if reason=$(SUDO true 2>&1); then echo root=yes
elif ! command -v sudo >/dev/null; then echo root=sudo is not installed
else echo "root=$(echo "$reason" | tail -n 1)"; fi
"""


def look_at(machine: Machine) -> list[Problem]:
    """What keeps Muster from provisioning a host. Raises Unreachable when the connection breaks."""
    target = machine.target
    script = _SCRIPT.replace("SUDO ", ssh.sudo_prefix(target))
    script = script.replace("PYTHON", shlex.quote(target.python))
    stdin = ssh.Input(f"{target.sudo_password}\n") if target.sudo_password else None
    try:
        if target.rootless and (problems := rootless.problems_of(machine)):
            return problems
        result = machine.user(f"sh -c {shlex.quote(script)}", PREFLIGHT_SECONDS, stdin)
        if result.exited < 0:  # the connection ended before the command did
            raise EOFError
    except TimeoutError as error:
        return [Problem(f"host {target.name}", str(error), "log in by hand and see what the host is busy with")]
    except (OSError, EOFError, paramiko.SSHException) as error:
        what, fix = "the SSH connection was lost while it answered", "check that the host is up, and try again"
        raise ssh.Unreachable(Problem(f"host {target.name}", what, fix)) from error
    return problems_in(target, result.stdout)


def problems_in(target: Target, answer: str) -> list[Problem]:
    """The problems that the answer of `_SCRIPT` shows. Pure."""
    found = dict(line.split("=", 1) for line in answer.splitlines() if "=" in line)
    where, problems = f"host {target.name}", []
    python, root = found.get("python", ""), found.get("root", "no answer")
    if not python and target.python != "python3":
        fix = "correct ansible_python_interpreter, or leave it out: python3 is taken then"
        problems.append(Problem(where, f"SSH works, but {target.python} is no Python, which Ansible needs", fix))
    elif not python:
        fix = "install it there: `apt-get install python3`, or what the host's system calls it"
        problems.append(Problem(where, "SSH works, but there is no python3, which Ansible needs", fix))
    elif tuple(map(int, python.split("."))) < OLDEST_PYTHON:
        what = f"python3 is {python}; Ansible needs {'.'.join(map(str, OLDEST_PYTHON))} or newer"
        problems.append(Problem(where, what, "install a newer python3, or set ansible_python_interpreter"))
    if root != "yes":
        who = target.user or "the login user"
        if target.rootless:
            fix = "see what `podman info` says there, as this user"
            return [*problems, Problem(where, f"{who} cannot use Podman without root: {root}", fix)]
        fix = f"allow it: `echo '{who} ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/muster`, or set a right "
        fix += "ansible_become_password"
        problems.append(Problem(where, f"{who} cannot become root by sudo: {root}", fix))
    return problems


@contextmanager
def checked(targets: Sequence[Target], known_hosts: Path) -> Iterator[list[Machine]]:
    """Connections to hosts that can be provisioned, looked at in parallel, one try each, and closed at the end.

    Raises Refusal, naming every problem on every host.
    """
    opened: list[Machine] = []

    def one(target: Target) -> list[Problem]:
        machine = Machine(target, known_hosts, ssh.connect(target, known_hosts))
        opened.append(machine)
        return look_at(machine)

    try:
        problems: list[Problem] = []
        status = exits.REFUSED
        for result in ssh.in_parallel(one, targets):
            if isinstance(result, ssh.Unreachable):
                problems.append(result.problem)
                status = exits.UNREACHABLE
            elif isinstance(result, BaseException):
                raise result
            else:
                problems += result
        if problems:
            raise Refusal(problems, status)
        by_name = {machine.name: machine for machine in opened}
        yield [by_name[target.name] for target in targets]
    finally:
        for machine in opened:
            machine.close()
