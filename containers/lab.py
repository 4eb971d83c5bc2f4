"""The lab: containers as hosts on this machine, reached over SSH like any others.

Each host is bare (sshd, sudo, Python), has a management and a data NIC whose names differ from host to host, decoys
that a launcher must not fall for, its own host key, machine-id, storage, and its own cores as long as there are enough:
with more hosts than cores, several share one. Not for provisioning: `make deploy` does that, as on any host.

    python -m containers.lab up --name lab --hosts 3 [--link 1gbit] [--cpus 0.4]
    python -m containers.lab status | down --name lab

Exit status: 0 done, 1 it could not be done (one message says why), 2 a bad argument.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from containers import net
from containers.base import RECIPE_LABEL, apt_proxies, apt_settings, ensure_base
from containers.engine import (
    BUILD,
    COMMAND_SECONDS,
    REPOSITORY,
    CommandFailed,
    ContainersError,
    Progress,
    as_root,
    follow,
    image_label,
    locked,
    output,
    podman,
    root_command,
    tool,
)

LABEL = "muster.lab"
IMAGE = "localhost/muster/lab-host:latest"
ROOM = Path(__file__).parent / "lab"
INVENTORIES = REPOSITORY / "inventory"
MARK = "# Written by `make lab`; `make lab-down` removes it.\n"
VOLUMES = {"storage": "/var/lib/containers", "muster": "/var/lib/muster"}
SSH_TIMEOUT = 30.0  # seconds until sshd must answer
UNDO_SECONDS = 20.0  # until what an interrupted call made must be gone
WORKERS = 4
APT_SETTINGS = re.compile(r"^Acquire::(?:https?::(?:\S+::)?Proxy|Check-Valid-Until|Check-Date)\b.*$", re.MULTILINE)


class LabError(ContainersError):
    """The lab could not be brought up or taken down."""


@dataclass(frozen=True)
class Host:
    """One host of a lab, by its place (from 0)."""

    lab: str
    index: int
    management: str  # address
    data: str  # address
    cores: str

    @property
    def name(self) -> str:
        return f"h{self.index + 1}"

    @property
    def container(self) -> str:
        return f"muster-{self.lab}-{self.name}"

    @property
    def nics(self) -> net.Nics:
        return net.nics(self.index)

    def mac(self, network: int) -> str:
        """Fixed, so that nobody's neighbour table goes stale when the host restarts."""
        return net.mac(f"{self.lab}/{self.name}/{network}")


@dataclass
class Created:
    """What this call has made, so that a failure or an interrupt takes away that and no more."""

    containers: list[str] = field(default_factory=list)
    volumes: list[str] = field(default_factory=list)
    networks: list[str] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)

    def undo(self) -> None:
        """Take it away; again where Podman, busy with what was interrupted, refuses at first.

        Raises:
            LabError: some of it stays.
        """
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)
        deadline = time.monotonic() + UNDO_SECONDS
        while left := self.left():
            for kind, command in (("container", ("rm", "--force", "--time=0")), ("volume", ("volume", "rm", "--force")),
                                  ("network", ("network", "rm", "--force"))):  # fmt: skip
                for name in left.get(kind, ()):
                    _quietly(*command, name)
            if time.monotonic() > deadline:
                names = ", ".join(name for names in left.values() for name in names)
                raise LabError(f"not all of it could be taken away: {names}", "the control machine", "`make lab-down`")
            time.sleep(0.1)

    def left(self) -> dict[str, list[str]]:
        """What there still is of it, by kind."""
        there = {
            "container": (self.containers, ("ps", "--all", "--format={{.Names}}")),
            "volume": (self.volumes, ("volume", "ls", "--quiet")),
            "network": (self.networks, ("network", "ls", "--quiet")),
        }
        found = {kind: sorted(set(made) & set(podman(*ask).split())) for kind, (made, ask) in there.items() if made}
        return {kind: names for kind, names in found.items() if names}


def up(
    name: str,
    hosts: int,
    link: str | None = None,
    progress: Progress = lambda line: None,
    cpus: float | None = None,
) -> list[Host]:
    """Bring up a lab of `hosts` hosts; return when sshd answers on each.

    Safe to repeat: hosts that are there stay, stopped ones are started, others are added or removed. If it fails or is
    interrupted, what this call created is taken away again.

    Args:
        link: rate of the data NICs in both directions, such as 1gbit; None leaves them unshaped.
        cpus: computing time of each host, in cores; None: all that its cores give. Hosts that share cores and have a
            quota that fits have the same speed whatever the others do.

    Raises:
        LabError, ContainersError: with what is missing, where, and what to do.
    """
    as_root()
    rate = net.link_rate(link) if link else None
    folder = INVENTORIES / name
    _refuse_foreign_folder(folder)
    with locked(BUILD / "lab.lock"), _terminable():
        image = _ensure_image(progress)
        created = Created()
        try:
            plan = _plan(name, hosts, _ensure_networks(name, created))
            there = {entry["Labels"][f"{LABEL}.host"]: entry for entry in _containers(name)}
            surplus = sorted(set(there) - {host.name for host in plan})
            if surplus:
                progress(f"removing {', '.join(surplus)}")
                _remove_hosts(name, surplus)
            _remove_stray_volumes(name, {entry["Names"][0] for entry in there.values()})
            key = _ensure_key(folder, created)
            _each(plan, lambda host: _ensure_host(host, there.get(host.name), image, created, progress))
            pids = _pids(plan)
            _each(plan, lambda host: _dress(host, pids[host.container], key, rate, cpus))
            progress("waiting for sshd")
            _each(plan, lambda host: _wait_for_ssh(host, time.monotonic() + SSH_TIMEOUT))
            _write_inventory(folder / "hosts.yml", inventory_text(plan))
        except BaseException as failure:
            with _uninterrupted():
                created.undo()
            if not isinstance(failure, CommandFailed):
                raise
            raise LabError(
                f"the lab could not be brought up: {failure}",
                "the control machine",
                "check that `podman run` works here, then run it again",
            ) from failure
    return plan


def down(name: str, progress: Progress = lambda line: None) -> bool:
    """Remove all of a lab: containers, networks, volumes, inventory. Returns whether there was anything."""
    as_root()
    folder = INVENTORIES / name
    with locked(BUILD / "lab.lock"):
        containers = [entry["Names"][0] for entry in _containers(name)]
        volumes = _labelled("volume", name)
        networks = _labelled("network", name)
        try:
            if containers:
                progress(f"removing {len(containers)} hosts")
                podman("rm", "--force", "--time=0", *containers)
            if volumes:
                podman("volume", "rm", "--force", *volumes)
            if networks:
                podman("network", "rm", *networks)
        except CommandFailed as failure:
            raise LabError(
                f"the lab could not be removed: {failure}", "the control machine", "run it again"
            ) from failure
        written = _is_ours(folder)
        if written:
            shutil.rmtree(folder)
    return bool(containers or volumes or networks or written)


def labs() -> dict[str, list[dict[str, Any]]]:
    """Containers of every lab on this machine, as `podman ps` describes them, hosts in order."""
    result: dict[str, list[dict[str, Any]]] = {}
    for entry in _containers(None):
        result.setdefault(entry["Labels"][LABEL], []).append(entry)
    for entries in result.values():
        entries.sort(key=lambda entry: int(entry["Labels"][f"{LABEL}.host"][1:]))
    return result


def inventory_text(hosts: list[Host]) -> str:
    """The lab's inventory: hosts in order, reached by their management address with the lab's own key."""
    lines = [
        MARK + "all:",
        "  vars:",
        "    ansible_user: muster",
        '    ansible_ssh_private_key_file: "{{ inventory_dir }}/id_ed25519"',
        "  hosts:",
    ]
    for host in hosts:
        lines += [f"    {host.name}:", f"      ansible_host: {host.management}"]
    return "\n".join(lines) + "\n"


def _plan(name: str, hosts: int, subnets: tuple[IPv4Network, IPv4Network]) -> list[Host]:
    cores = net.cpusets(sorted(os.sched_getaffinity(0)), hosts)
    management, data = subnets
    return [
        Host(name, index, str(net.address(management, index)), str(net.address(data, index)), cores[index])
        for index in range(hosts)
    ]


def _ensure_image(progress: Progress) -> str:
    base = ensure_base(progress)
    parts = [image_label(base, RECIPE_LABEL) or "", *(path.read_text() for path in sorted(ROOM.iterdir()))]
    recipe = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    with locked(BUILD / "images" / "lab.lock"):
        if image_label(IMAGE, RECIPE_LABEL) == recipe:
            return IMAGE
        progress("lab host image: Debian with sshd and sudo (once; about 15 s)")
        try:
            follow(
                root_command(
                    "podman", "build", "--network=host", "--timestamp=0", f"--build-arg=BASE={base}", f"--tag={IMAGE}",
                    f"--label={RECIPE_LABEL}={recipe}", f"--file={ROOM / 'Containerfile'}", str(ROOM),
                    env=apt_proxies(),  # Podman hands them on to the build
                )
            )  # fmt: skip
        except CommandFailed as failure:
            raise LabError(
                f"the image of the lab's hosts could not be built. Its last lines:\n{failure.tail}",
                "the control machine, containers/lab/Containerfile",
                "check that `apt-get update` works here (network, proxy), then run it again",
            ) from failure
    return IMAGE


def _ensure_networks(name: str, created: Created) -> tuple[IPv4Network, IPv4Network]:
    """Two networks of the lab: management with a way out, data between the hosts alone, without a gateway."""
    existing = {
        entry["name"]: IPv4Network(entry["subnets"][0]["subnet"]) for entry in _networks() if entry.get("subnets")
    }
    names = (f"muster-{name}-management", f"muster-{name}-data")
    if all(network in existing for network in names):
        return existing[names[0]], existing[names[1]]
    for network in names:
        if network in existing:
            podman("network", "rm", "--force", network)
    taken = [*existing.values(), *_routes()]
    said = ""
    for pair in net.free_subnets(taken):
        try:
            for network, subnet, options in zip(
                names, pair, (["--disable-dns"], ["--disable-dns", "--internal"]), strict=True
            ):
                created.networks.append(network)
                podman("network", "create", f"--label={LABEL}={name}", f"--subnet={subnet}", *options, network)
            return pair
        except CommandFailed as failure:  # another lab took it just now: the next one
            said = failure.tail
            _quietly("network", "rm", *created.networks)
            created.networks.clear()
    raise LabError(
        f"no free pair of networks among 10.77.0.0/16 and 10.78.0.0/16 {said}".strip(),
        "the control machine (`ip route`, `podman network ls`)",
        "remove labs that are no longer needed (`make lab-down LAB=name`)",
    )


def _ensure_key(folder: Path, created: Created) -> str:
    """The lab's SSH key in its inventory folder; returns the public half."""
    if not folder.exists():
        folder.mkdir(parents=True)
        created.folders.append(folder)
    (folder / ".gitignore").write_text("*\n")
    if not (folder / "hosts.yml").exists():
        (folder / "hosts.yml").write_text(MARK)
    private = folder / "id_ed25519"
    if not private.exists():
        comment = f"muster lab {folder.name}"
        output([tool("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(private)])
    private.chmod(0o600)
    return private.with_suffix(".pub").read_text()


def _write_inventory(path: Path, text: str) -> None:
    """Leave an unchanged inventory untouched: a newer one would ask for another `make deploy`."""
    if path.read_text() != text:
        path.write_text(text)


def _ensure_host(host: Host, there: dict[str, Any] | None, image: str, created: Created, progress: Progress) -> None:
    if there is not None:
        if there["State"] != "running":
            progress(f"{host.name}: starting")
            podman("start", host.container)
        return
    progress(f"{host.name}: creating")
    mounts = []
    for kind, target in VOLUMES.items():
        volume = f"{host.container}-{kind}"
        created.volumes.append(volume)
        podman("volume", "create", f"--label={LABEL}={host.lab}", volume)
        mounts.append(f"--volume={volume}:{target}")
    created.containers.append(host.container)
    half_of_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    podman(
        "run", "--detach", f"--name={host.container}", f"--hostname={host.name}", f"--label={LABEL}={host.lab}",
        f"--label={LABEL}.host={host.name}", "--privileged", "--no-hosts", "--pids-limit=0",
        "--tmpfs=/run:rw,exec,nosuid,nodev,mode=755",  # as on any host: empty after a restart
        f"--shm-size={half_of_memory}", f"--cpuset-cpus={host.cores}", *mounts,
        f"--network=muster-{host.lab}-management:ip={host.management},mac={host.mac(0)},interface_name={host.nics.management}",
        f"--network=muster-{host.lab}-data:ip={host.data},mac={host.mac(1)},interface_name={host.nics.data}",
        image,
    )  # fmt: skip


def _dress(host: Host, pid: int, key: str, rate: int | None, cpus: float | None) -> None:
    """Give a running host what does not outlive a restart (decoys, link rate, its share of cores and their time) and
    what this machine may have changed (key, apt's settings). Done from outside: a bare host has neither ip nor tc."""
    quota = net.quota_options(cpus, len(os.sched_getaffinity(0)))
    podman("update", f"--cpuset-cpus={host.cores}", *quota, host.container)
    inside = root_command("nsenter", f"--net=/proc/{pid}/ns/net", "--")
    links = {entry["ifname"]: entry for entry in json.loads(output([*inside, tool("ip"), "-json", "link"]))}
    if "docker0" not in links:
        output([*inside, tool("ip"), "-batch", "-"], stdin="\n".join(net.decoy_lines(host.nics, host.index)) + "\n")
    outer = _outer_link(links[host.nics.data]["link_index"])
    _shape([*inside, tool("tc")], host.nics.data, rate)
    _shape(root_command("tc"), outer, rate)
    apt = "".join(f"{line}\n" for line in APT_SETTINGS.findall(apt_settings()))
    script = (
        "install -m 0600 -o muster -g muster /dev/null /home/muster/.ssh/authorized_keys\n"
        f"printf %s '{key}' >/home/muster/.ssh/authorized_keys\n"
        f"cat >/etc/apt/apt.conf.d/90muster-lab <<'END'\n{apt}END\n"
    )
    podman("exec", "--interactive", host.container, "sh", "-eu", stdin=script)


def _shape(tc: list[str], device: str, rate: int | None) -> None:
    done = subprocess.run(
        [*tc, "-force", "-batch", "-"], input="\n".join(net.shape_lines(device, rate)) + "\n",
        text=True, capture_output=True, timeout=COMMAND_SECONDS,
    )  # fmt: skip
    if rate is not None and done.returncode != 0:
        raise CommandFailed([*tc, "qdisc"], done.returncode, done.stderr.strip())


def _outer_link(index: int) -> str:
    """Name of this machine's end of a host's NIC."""
    links = json.loads(output([tool("ip"), "-json", "link"]))
    return next(str(entry["ifname"]) for entry in links if entry["ifindex"] == index)


def _wait_for_ssh(host: Host, deadline: float) -> None:
    while True:
        try:
            with socket.create_connection((host.management, 22), timeout=2) as connection:
                connection.settimeout(5)
                if connection.recv(64).startswith(b"SSH-"):
                    return
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise LabError(
                f"sshd of {host.name} did not answer within {SSH_TIMEOUT:.0f} s",
                f"{host.management}:22 (container {host.container})",
                f"see `podman logs {host.container}`; a firewall on this machine may block Podman's networks",
            )
        time.sleep(0.05)


def _remove_hosts(lab: str, names: list[str]) -> None:
    containers = [f"muster-{lab}-{name}" for name in names]
    podman("rm", "--force", "--time=0", *containers)
    podman("volume", "rm", "--force", *(f"{container}-{kind}" for container in containers for kind in VOLUMES))


def _remove_stray_volumes(lab: str, containers: set[str]) -> None:
    """A host that is made anew starts with empty storage, also when its container was removed by other means."""
    stray = [volume for volume in _labelled("volume", lab) if volume.rpartition("-")[0] not in containers]
    if stray:
        podman("volume", "rm", "--force", *stray)


def _containers(lab: str | None) -> list[dict[str, Any]]:
    chosen = LABEL if lab is None else f"{LABEL}={lab}"
    entries: list[dict[str, Any]] = json.loads(podman("ps", "--all", f"--filter=label={chosen}", "--format=json"))
    return entries


def _labelled(kind: str, lab: str) -> list[str]:
    return podman(kind, "ls", "--quiet", f"--filter=label={LABEL}={lab}").split()


def _networks() -> list[dict[str, Any]]:
    names = podman("network", "ls", "--quiet").split()
    entries: list[dict[str, Any]] = json.loads(podman("network", "inspect", *names)) if names else []
    return entries


def _routes() -> list[IPv4Network]:
    """Networks that this machine has a route to, in whatever table."""
    routes = json.loads(output([tool("ip"), "-json", "-4", "route", "show", "table", "all"]))
    return [IPv4Network(entry["dst"], strict=False) for entry in routes if entry["dst"] != "default"]


def _pids(hosts: list[Host]) -> dict[str, int]:
    lines = podman("inspect", "--format={{.Name}} {{.State.Pid}}", *(host.container for host in hosts)).split("\n")
    return {name: int(pid) for name, pid in (line.split() for line in lines if line)}


def _each(hosts: list[Host], work: Any) -> None:
    """Do `work` for all hosts, a few at a time; raises the first failure after those under way have ended."""
    with ThreadPoolExecutor(WORKERS) as pool:
        futures = [pool.submit(work, host) for host in hosts]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _quietly(*arguments: str) -> None:
    with contextlib.suppress(CommandFailed):
        podman(*arguments)


def _is_ours(folder: Path) -> bool:
    hosts = folder / "hosts.yml"
    return hosts.is_file() and hosts.read_text().startswith(MARK)


def _refuse_foreign_folder(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()) and not _is_ours(folder):
        raise LabError(
            "this inventory was not made by `make lab`; it is left alone",
            str(folder.relative_to(REPOSITORY)),
            "choose another name (LAB=name)",
        )


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind like an interrupt, so that what was created is taken away."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let a second Ctrl-C not stop the clearing away that the first one began."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)


def _lab_name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,30}", text):
        raise argparse.ArgumentTypeError(f"LAB={text}: a name is lower-case letters, digits and -, at most 31")
    return text


def _host_count(text: str) -> int:
    if not re.fullmatch(r"\d+", text) or not 1 <= int(text) <= net.MAX_HOSTS:
        raise argparse.ArgumentTypeError(f"HOSTS={text}: give a number from 1 to {net.MAX_HOSTS}")
    return int(text)


def _link(text: str) -> str | None:
    try:
        net.link_rate(text) if text else None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"LINK: {error}") from error
    return text or None


def _cpus(text: str) -> float | None:
    try:
        return net.cpu_quota(text) if text else None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"CPUS: {error}") from error


def _show(console: Console, name: str, hosts: list[Host]) -> None:
    table = Table(title=f"lab {name}")
    for column in ("host", "management", "data", "cores"):
        table.add_column(column)
    for host in hosts:
        management = f"{host.management} ({host.nics.management})"
        table.add_row(host.name, management, f"{host.data} ({host.nics.data})", host.cores)
    console.print(table)


def _show_status(console: Console) -> None:
    found = labs()
    if not found:
        console.print("no lab on this machine; `make lab` makes one")
    for name, entries in sorted(found.items()):
        states = {entry["Labels"][f"{LABEL}.host"]: entry["State"] for entry in entries}
        down = [f"{host} {state}" for host, state in states.items() if state != "running"]
        mend = f"; not running: {', '.join(down)} (`make lab LAB={name}` starts them)" if down else ""
        console.print(f"lab {name}: {len(entries)} hosts, INVENTORY=inventory/{name}{mend}", soft_wrap=True)


def main(arguments: list[str]) -> int:
    """Command line; see the top of this file."""
    parser = _Parser(prog="python -m containers.lab", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    for command in ("up", "down", "status"):
        sub = commands.add_parser(command)
        if command != "status":
            sub.add_argument("--name", type=_lab_name, default="lab", help="name of the lab (LAB=)")
        if command == "up":
            sub.add_argument("--hosts", type=_host_count, default=2, help="how many hosts (HOSTS=)")
            sub.add_argument("--link", type=_link, default=None, help="rate of the data NICs, e.g. 1gbit (LINK=)")
            sub.add_argument("--cpus", type=_cpus, default=None, help="each host's computing time in cores (CPUS=)")
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    say = Console(stderr=True, highlight=False)
    started = time.monotonic()
    try:
        if options.command == "up":
            with say.status(f"lab {options.name}") as status:
                hosts = up(options.name, options.hosts, options.link, _progress(say, status.update), options.cpus)
            _show(console, options.name, hosts)
            seconds = time.monotonic() - started
            console.print(f"{len(hosts)} hosts up after {seconds:.1f} s; INVENTORY=inventory/{options.name}")
            if options.link:
                network = IPv4Network(f"{hosts[0].data}/24", strict=False)
                console.print(
                    f"The data NICs carry {options.link}, the management NICs more; a deploy takes the faster ones. "
                    f"To train over the data NICs: `train_network: {network}` in "
                    f"inventory/{options.name}/group_vars/all.yml",
                    soft_wrap=True,
                )
        elif options.command == "down":
            there = down(options.name, _progress(say))
            console.print(f"lab {options.name} removed" if there else f"there is no lab {options.name}")
        else:
            _show_status(console)
    except ContainersError as error:
        say.print(str(error), markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        say.print("interrupted; what this call had created is removed")
        return 130
    return 0


def _progress(say: Console, update: Progress = lambda line: None) -> Progress:
    def progress(line: str) -> None:
        update(line)
        say.print(line, markup=False, soft_wrap=True)

    return progress


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
