"""The lab: containers on this machine that serve as hosts, reached over SSH like any other host.

Each host is bare (sshd, sudo, Python). It has a management NIC and a data NIC, whose names differ from host to host,
and decoys: addresses and NICs that a launcher must not choose. Its host key, machine-id and storage are its own, and so
are its cores if there are enough; otherwise several hosts share a core. Not for provisioning: `make deploy` does that,
as on any host. What concerns one host alone is in lab_host.py.

    python -m containers.lab up --name lab --hosts 3 [--link 1gbit] [--cpus 0.4] [--os debian,ubuntu]
    python -m containers.lab status
    python -m containers.lab down --name lab

Exit status: 0 done, 1 failed (one message says why), 2 a bad argument, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, NoReturn

import yaml
from rich.console import Console
from rich.table import Table

from containers import lab_host, lab_plan
from containers.engine import (
    BUILD,
    REPOSITORY,
    CommandFailed,
    ContainersError,
    Progress,
    as_root,
    output,
    podman,
    root_command,
    tool,
)
from containers.files import locked, write_whole
from containers.lab_host import HOST_LABEL, LABEL, SYSTEM_LABEL, Host

INVENTORIES = REPOSITORY / "inventory"
MARK = "# Written by `make lab`; `make lab-down` removes it.\n"
UNDO_SECONDS = 20.0  # until everything that a failed call created must be removed
HOSTS_AT_ONCE = 4
NEIGHBOURS = Path("/proc/sys/net/ipv4/neigh/default")


@dataclass
class Created:
    """What one call of up() has created: a failure or an interrupt removes that and no more."""

    containers: list[str] = field(default_factory=list)
    volumes: list[str] = field(default_factory=list)
    networks: list[str] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)

    def undo(self) -> None:
        """Remove it. Podman may refuse at first, while it is busy with what was interrupted, so it is tried repeatedly.

        Raises:
            ContainersError: some of it could not be removed within UNDO_SECONDS.
        """
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)
        deadline = time.monotonic() + UNDO_SECONDS
        while left := self.left():
            for remove, name in left:
                _quietly(*remove, name)
            if time.monotonic() > deadline:
                names = ", ".join(name for _, name in left)
                raise ContainersError(f"could not be removed: {names}", "the control machine", "run `make lab-down`")
            time.sleep(0.1)

    def left(self) -> list[tuple[tuple[str, ...], str]]:
        """What still exists of it, in the order of removal, as (Podman's words that remove it, name).

        A volume goes without --force: it locks the volume before its containers, `podman run` the other way round, and
        both then wait for ever, as every later Podman command does (podman issue 23613).
        """
        kinds = (
            (self.containers, ("ps", "--all", "--format={{.Names}}"), ("rm", "--force", "--time=0")),
            (self.volumes, ("volume", "ls", "--quiet"), ("volume", "rm")),
            (self.networks, ("network", "ls", "--quiet"), ("network", "rm", "--force")),
        )
        made = ((sorted(set(names) & set(podman(*ask).split())), remove) for names, ask, remove in kinds if names)
        return [(remove, name) for names, remove in made for name in names]


def up(
    name: str,
    hosts: int,
    link: str | None = None,
    progress: Progress = lambda line: None,
    cpus: float | None = None,
    systems: Sequence[str] = (),
    disk: Path | None = None,
    create: Callable[[Host, str, Path | None], None] = lab_host.create,
) -> list[Host]:
    """Bring up a lab of `hosts` hosts; return when sshd answers on each.

    Safe to repeat: existing hosts stay, stopped ones are started, others are added or removed. If it fails or is
    interrupted, what this call has created is removed again.

    Args:
        link: rate of the data NICs in both directions, such as 1gbit; None: not limited.
        cpus: computing time of each host, in cores; None: all that its cores give. Where the quotas of hosts that share
            a core add up to one core at most, each has the same speed whatever the others do.
        systems: what the hosts run, in turn (lab_plan.SYSTEMS); none: existing hosts keep theirs, others get Debian.
        disk: an absolute folder for what new hosts store; it is left there when they are removed. None: Podman's own.
        create: makes a new host, given its image and `disk`; a test may start it from a snapshot instead.

    Raises ContainersError if the lab could not be brought up.
    """
    as_root()
    _refuse_too_many_cpus(hosts, cpus)
    rate = lab_plan.link_rate(link) if link else None
    folder = INVENTORIES / name
    _refuse_foreign_inventory(folder)
    # SIGTERM, too, raises KeyboardInterrupt, so that what was created is removed.
    with locked(BUILD / "lab.lock"), _handled(signal.SIGTERM, signal.default_int_handler):
        there = {entry["Labels"][HOST_LABEL]: entry for entry in _containers(name)}
        chosen = _systems(systems, hosts, there)
        new = [system for index, system in enumerate(chosen) if f"h{index + 1}" not in there]
        images = {system: lab_host.ensure_image(progress, system) for system in dict.fromkeys(new)}
        created = Created()
        try:
            plan = _plan(name, chosen, _ensure_networks(name, created))
            _make_room_for_neighbours(len(plan), progress)
            surplus = sorted(set(there) - {host.name for host in plan})
            if surplus:
                progress(f"removing {', '.join(surplus)}")
                podman("rm", "--force", "--time=0", *(there.pop(host)["Names"][0] for host in surplus))
            kept = {entry["Names"][0] for entry in there.values()}
            # A new host starts with empty storage, so the volumes of hosts whose container is gone are removed.
            if stray := [volume for volume in _labelled("volume", name) if volume.rpartition("-")[0] not in kept]:
                podman("volume", "rm", *stray)
            key = _ensure_key(folder, created)

            def ensure(host: Host) -> None:
                if host.name not in there:
                    progress(f"{host.name}: creating")
                    created.volumes += host.volumes
                    created.containers.append(host.container)
                    create(host, images[host.system], disk)
                elif there[host.name]["State"] != "running":
                    progress(f"{host.name}: starting")
                    podman("start", host.container)

            _each(plan, ensure)
            _each(plan, lambda host: lab_host.furnish(host, key, rate, cpus))
            progress("waiting for sshd")
            _each(plan, lab_host.wait_for_ssh)
            _write_inventory(folder, plan, progress)
        except BaseException:
            with _handled(signal.SIGINT, signal.SIG_IGN):  # a second Ctrl-C does not stop the removal
                created.undo()
            raise
    return plan


def down(name: str, progress: Progress = lambda line: None) -> bool:
    """Remove all of a lab: containers, networks, volumes, inventory. Returns whether there was anything to remove.

    Raises ContainersError if Podman could not remove something.
    """
    as_root()
    folder = INVENTORIES / name
    with locked(BUILD / "lab.lock"):
        containers = [entry["Names"][0] for entry in _containers(name)]
        volumes = _labelled("volume", name)
        networks = _labelled("network", name)
        if containers:
            progress(f"removing {len(containers)} hosts")
            podman("rm", "--force", "--time=0", *containers)
        if volumes:
            podman("volume", "rm", *volumes)
        if networks:
            podman("network", "rm", *networks)
        written = _is_ours(folder)
        if written or containers:  # else an inventory of the user's own may have this name
            (BUILD / name / "cluster.json").unlink(missing_ok=True)  # what a deploy knew of these hosts
        if written:
            shutil.rmtree(folder)
    return bool(containers or volumes or networks or written)


def labs() -> dict[str, list[dict[str, Any]]]:
    """Lab -> its hosts in order, as `podman ps` describes their containers; of all labs on this machine."""
    result: dict[str, list[dict[str, Any]]] = {}
    for entry in _containers(None):
        result.setdefault(entry["Labels"][LABEL], []).append(entry)
    for entries in result.values():
        entries.sort(key=lambda entry: int(entry["Labels"][HOST_LABEL][1:]))
    return result


def inventory_text(hosts: list[Host]) -> str:
    """The lab's inventory: hosts in order, reached by their management address with the lab's own key."""
    return _text({host.name: str(host.management) for host in hosts})


def _text(hosts: Mapping[str, str]) -> str:
    """hosts: name -> address."""
    key = '"{{ inventory_dir }}/id_ed25519"'
    lines = ["all:", "  vars:", "    ansible_user: muster", f"    ansible_ssh_private_key_file: {key}", "  hosts:"]
    for name, address in hosts.items():
        lines += [f"    {name}:", f"      ansible_host: {address}"]
    return MARK + "\n".join(lines) + "\n"


def _write_inventory(folder: Path, hosts: list[Host], progress: Progress) -> None:
    """Write hosts.yml, unless it names these hosts: a newer file would need another `make deploy`.

    One into which somebody has written settings is kept under build/, where Ansible does not read it.
    """
    path, wanted = folder / "hosts.yml", {host.name: str(host.management) for host in hosts}
    before = path.read_text()
    known = addresses(before)
    if known == wanted:
        return
    if before not in (MARK, _text(known)):
        kept = BUILD / folder.name / f"hosts-{time.strftime('%Y%m%d-%H%M%S')}.yml"
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, before)
        progress(f"the lab's hosts are others now: {path} is written anew, and what you had set there kept in {kept}")
    write_whole(path, inventory_text(hosts))


def addresses(text: str) -> dict[str, str]:
    """Host -> address, of an inventory in YAML; empty where that cannot be read."""
    try:
        return _addresses((yaml.safe_load(text) or {}).get("all"))
    except (yaml.YAMLError, AttributeError):
        return {}


def _addresses(group: Any) -> dict[str, str]:
    found = {name: (of or {}).get("ansible_host", "") for name, of in ((group or {}).get("hosts") or {}).items()}
    for child in ((group or {}).get("children") or {}).values():
        found |= {name: address or found.get(name, "") for name, address in _addresses(child).items()}
    return found


def _plan(name: str, systems: Sequence[str], subnets: tuple[IPv4Network, IPv4Network]) -> list[Host]:
    """systems: of each host."""
    cores = lab_plan.cpusets(sorted(os.sched_getaffinity(0)), len(systems))
    management, data = ([str(lab_plan.address(subnet, index)) for index in range(len(systems))] for subnet in subnets)
    return [
        Host(name, index, management[index], data[index], cores[index], systems[index]) for index in range(len(systems))
    ]


def _systems(wanted: Sequence[str], hosts: int, there: Mapping[str, dict[str, Any]]) -> list[str]:
    """The system of each host. Raises ContainersError where an existing host would have to get another one."""
    names = [f"h{index + 1}" for index in range(hosts)]
    found = [there[name]["Labels"].get(SYSTEM_LABEL, lab_plan.SYSTEMS[0]) if name in there else None for name in names]
    chosen = lab_plan.system_of_each(wanted, found)
    others = [
        f"{name} has {is_}, not {to_be}"
        for name, is_, to_be in zip(names, found, chosen, strict=True)
        if is_ not in (None, to_be)
    ]
    if others:
        lab = next(iter(there.values()))["Labels"][LABEL]
        fix = f"leave OS out, or remove the lab with all that is on its hosts first (`make lab-down LAB={lab}`)"
        raise ContainersError(f"a host keeps its system: {', '.join(others)}", f"lab {lab}", fix)
    return chosen


def _refuse_too_many_cpus(hosts: int, cpus: float | None) -> None:
    cores = min(len(each.split(",")) for each in lab_plan.cpusets(sorted(os.sched_getaffinity(0)), hosts))
    if cpus is not None and cpus > cores:
        what = f"CPUS={cpus:g}: a host of a lab of {hosts} has {cores} core{'s' if cores > 1 else ''} of this machine"
        raise ContainersError(what, "the control machine", f"give CPUS={cores} or less, or leave it out")


def _ensure_networks(name: str, created: Created) -> tuple[IPv4Network, IPv4Network]:
    """The lab's two networks: management, which leads out, and data, which only connects the hosts (no gateway)."""
    there = podman("network", "ls", "--quiet").split()
    entries: list[dict[str, Any]] = json.loads(podman("network", "inspect", *there)) if there else []
    existing = {entry["name"]: IPv4Network(entry["subnets"][0]["subnet"]) for entry in entries if entry.get("subnets")}
    names = (f"muster-{name}-management", f"muster-{name}-data")
    if all(network in existing for network in names):
        return existing[names[0]], existing[names[1]]
    for network in names:
        if network in existing:
            podman("network", "rm", "--force", network)
    complaint, words = "", ["network", "create", f"--label={LABEL}={name}", "--disable-dns"]
    for pair in lab_plan.free_subnets([*existing.values(), *_routes()]):
        try:
            for network, subnet, options in zip(names, pair, ([], ["--internal"]), strict=True):
                created.networks.append(network)
                podman(*words, f"--subnet={subnet}", *options, network)
            return pair
        except CommandFailed as failure:  # another lab has just taken one of them: try the next pair
            complaint = failure.tail
            _quietly("network", "rm", *created.networks)
            created.networks.clear()
    raise ContainersError(
        f"no pair of networks is free in 10.77.0.0/16 and 10.78.0.0/16 {complaint}".strip(),
        "the control machine (`ip route`, `podman network ls`)",
        "remove labs that are no longer needed (`make lab-down LAB=name`)",
    )


def _make_room_for_neighbours(hosts: int, progress: Progress) -> None:
    """This machine's kernel keeps the MAC addresses that all hosts know in one table, which many hosts overflow: then
    some do not reach each other. The wider table stays until the machine restarts."""
    room = lab_plan.neighbours(hosts)
    most = NEIGHBOURS / "gc_thresh3"
    if not most.exists() or int(most.read_text()) >= room:  # within a container the kernel does not show it
        return
    progress(f"this machine's kernel has room for {room} neighbours from now on (net.ipv4.neigh.default.gc_thresh3)")
    for name in ("gc_thresh3", "gc_thresh2", "gc_thresh1"):
        output(root_command("tee", str(NEIGHBOURS / name)), stdin=str(room))


def _ensure_key(folder: Path, created: Created) -> str:
    """Make the lab's inventory folder and its SSH key in it, unless they exist; return the public key."""
    if not folder.exists():
        folder.mkdir(parents=True)
        created.folders.append(folder)
    (folder / ".gitignore").write_text("*\n")
    if not (folder / "hosts.yml").exists():
        write_whole(folder / "hosts.yml", MARK)
    private = folder / "id_ed25519"
    if not private.exists():
        comment = f"muster lab {folder.name}"
        output([tool("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(private)])
    private.chmod(0o600)
    return private.with_suffix(".pub").read_text()


def _containers(lab: str | None) -> list[dict[str, Any]]:
    chosen = LABEL if lab is None else f"{LABEL}={lab}"
    entries: list[dict[str, Any]] = json.loads(podman("ps", "--all", f"--filter=label={chosen}", "--format=json"))
    return entries


def _labelled(kind: str, lab: str) -> list[str]:
    return podman(kind, "ls", "--quiet", f"--filter=label={LABEL}={lab}").split()


def _routes() -> list[IPv4Network]:
    """Networks to which this machine has a route, in any routing table."""
    routes = json.loads(output([tool("ip"), "-json", "-4", "route", "show", "table", "all"]))
    return [IPv4Network(entry["dst"], strict=False) for entry in routes if entry["dst"] != "default"]


def _each(hosts: list[Host], work: Callable[[Host], None]) -> None:
    """Do `work` for all hosts, a few at a time. A failure is raised when those that were begun have ended."""
    with ThreadPoolExecutor(HOSTS_AT_ONCE) as pool:
        try:
            with _interrupted_later():  # a pool does not await a thread whose start was interrupted
                futures = [pool.submit(work, host) for host in hosts]
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


def _refuse_foreign_inventory(folder: Path) -> None:
    """Also a file beside it, inventory/<name>.yml: what is known of its hosts has the same place in build/."""
    for other in sorted(folder.parent.glob(f"{folder.name}.*")):
        what = f"what is known of its hosts would have the same place as that of a lab named {folder.name}"
        raise BadOption(what, str(other.relative_to(REPOSITORY)), "choose another name (LAB=name)")
    if folder.exists() and any(folder.iterdir()) and not _is_ours(folder):
        what = "this inventory was not written by `make lab` and is left unchanged"
        raise BadOption(what, str(folder.relative_to(REPOSITORY)), "choose another name (LAB=name)")


@contextlib.contextmanager
def _handled(number: int, handler: Any) -> Iterator[None]:
    """Set a signal's handler for a while."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextlib.contextmanager
def _interrupted_later() -> Iterator[None]:
    """Let an interrupt wait until the end of this block."""
    came: list[int] = []

    def note(number: int, _frame: Any) -> None:
        came.append(number)

    with _handled(signal.SIGINT, note), _handled(signal.SIGTERM, note):
        yield
    for number in came[:1]:
        signal.raise_signal(number)


class BadOption(ContainersError):
    """What the user gave to a lab; `where` is the variable of make."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadOption(message, self.prog, f"`{self.prog} --help` names what there is")


def _lab_name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,30}", text):
        what = f"{text!r} is no name of a lab"
        raise BadOption(what, "LAB", "use at most 31 lower-case letters, digits and hyphens, such as LAB=lab")
    return text


def _host_count(text: str) -> int:
    if not re.fullmatch(r"\d+", text) or not 1 <= int(text) <= lab_plan.MAX_HOSTS:
        what = f"{text!r} is not a whole number from 1 to {lab_plan.MAX_HOSTS}"
        raise BadOption(what, "HOSTS", "give one, such as HOSTS=2")
    return int(text)


def _link(text: str) -> str | None:
    try:
        lab_plan.link_rate(text) if text else None
    except ValueError as error:
        raise BadOption(str(error), "LINK", "give one, such as LINK=1gbit, or none for no limit") from error
    return text or None


def _cpus(text: str) -> float | None:
    try:
        return lab_plan.cpu_quota(text) if text else None
    except ValueError as error:
        raise BadOption(str(error), "CPUS", "give one, such as CPUS=0.4, or none for all of a core") from error


def _os(text: str) -> tuple[str, ...]:
    try:
        return lab_plan.systems(text) if text else ()
    except ValueError as error:
        raise BadOption(str(error), "OS", "give one of them, or several with commas: OS=debian,ubuntu") from error


def _processors(cores: str, cpus: float | None) -> str:
    """cores: as Podman writes them, "0" or "0,1"."""
    known = f"core{'s' if ',' in cores else ''} {cores}"
    return known if cpus is None else f"{cpus:g} of {known}"


def _advice(name: str, hosts: list[Host], link: str | None) -> Iterator[str]:
    """What to do about the network, in sentences."""
    network, variables = IPv4Network(f"{hosts[0].data}/24", strict=False), f"inventory/{name}/group_vars"
    if link and not (INVENTORIES / name / "group_vars" / "all.yml").exists():
        yield (
            f"The data NICs are limited to {link}, the management NICs are not; a deploy chooses the faster ones. To "
            f"train over the data NICs: mkdir -p {variables} && echo 'train_network: {network}' > {variables}/all.yml"
        )
    if (BUILD / name / "cluster.json").exists():
        yield (
            "An earlier deploy has measured the links of this lab. After a change of LINK or CPUS, `make deploy "
            f"MEASURE=1 INVENTORY=inventory/{name}` measures them again. `make check` compares with earlier checks: "
            f"`rm -r build/{name}/checks` forgets them."
        )


def _show(console: Console, name: str, hosts: list[Host], cpus: float | None) -> None:
    table = Table(title=f"lab {name}")
    for column in ("host", "system", "management", "data", "processors"):
        table.add_column(column)
    for host in hosts:
        management = f"{host.management} ({host.nics.management})"
        data = f"{host.data} ({host.nics.data})"
        table.add_row(host.name, host.system, management, data, _processors(host.cores, cpus))
    console.print(table)


def _show_status(console: Console) -> None:
    found = labs()
    if not found:
        console.print("there is no lab on this machine; `make lab` makes one")
    for name, entries in sorted(found.items()):
        states = {entry["Labels"][HOST_LABEL]: entry["State"] for entry in entries}
        down = [f"{host} {state}" for host, state in states.items() if state != "running"]
        again = f"`make lab LAB={name} HOSTS={len(entries)}` starts them"
        stopped = f"; not running: {', '.join(down)} ({again})" if down else ""
        console.print(f"lab {name}: {len(entries)} hosts, INVENTORY=inventory/{name}{stopped}", soft_wrap=True)


def parse(arguments: list[str]) -> argparse.Namespace:
    """What `run` takes. Raises BadOption."""
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
            sub.add_argument("--os", type=_os, default=(), help="systems of the hosts, in turn (OS=debian,ubuntu)")
            sub.add_argument("--disk", type=Path, default=None, help="folder for what new hosts store; it stays there")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    """One command; returns the exit status. Raises ContainersError."""
    console = Console(highlight=False)
    say = Console(stderr=True, highlight=False)
    started = time.monotonic()
    try:
        if options.command == "up":
            with say.status(f"lab {options.name}") as status:
                progress = _progress(say, status.update)
                hosts = up(options.name, options.hosts, options.link, progress, options.cpus, options.os, options.disk)
            _show(console, options.name, hosts, options.cpus)
            seconds = time.monotonic() - started
            console.print(f"{len(hosts)} hosts are up after {seconds:.1f} s: INVENTORY=inventory/{options.name}")
            for line in _advice(options.name, hosts, options.link):
                console.print(line, soft_wrap=True)
        elif options.command == "down":
            there = down(options.name, _progress(say))
            console.print(f"lab {options.name} is removed" if there else f"there is no lab {options.name}")
        else:
            _show_status(console)
    except KeyboardInterrupt:
        say.print("interrupted; what this command had created is removed")
        return 130
    return 0


def main(arguments: list[str]) -> int:
    """Command line; see the top of this file."""
    try:
        return run(parse(arguments))
    except ContainersError as error:
        Console(stderr=True, highlight=False).print(str(error), markup=False, soft_wrap=True)
        return 2 if isinstance(error, BadOption) else 1


def _progress(say: Console, update: Progress = lambda line: None) -> Progress:
    def progress(line: str) -> None:
        update(line)
        say.print(line, markup=False, soft_wrap=True)

    return progress


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
