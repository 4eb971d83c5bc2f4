"""`make data`: a folder of this machine on every host, from host to host; what is there is listed, used, removed.

The dataset is read here (dataset.py), each host says what it lacks, that travels like the layers of an image
(distribution.py), and when all hosts have all of it, runs see it: the cluster map names its folder as `data_dir` where
the inventory names none. Until then they see what they saw before. On the hosts: playbooks/module_utils/muster_data.py.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from launch.cli import exits
from launch.cli.make_variables import naming
from launch.cli.output import Phases
from launch.cli.refusal import Problem, Refusal, refuse
from launch.cli.units import age, size
from launch.deploy import dataset, distribution
from launch.deploy.alone import alone
from launch.files import write_whole
from launch.hosts import clustermap, door, hostcall, ssh
from launch.hosts.connection import LINK_ERRORS, Machine, machines
from launch.hosts.door import Call
from launch.network.links import of_deploy

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
Answers = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Request:
    """What the user asks for, as typed."""

    inventory: Path
    src: str = ""
    name: str = ""
    verify: bool = False
    remove: bool = False


def data(request: Request, console: Console) -> int:
    """Do what is asked. Raises Refusal."""
    _refuse_bad(request)
    cluster = clustermap.read(request.inventory)
    if request.src:
        return _bring(request, cluster, console)
    with machines(cluster, cluster.hosts) as opened:
        if not request.name:
            return _list(ask(opened, {"do": "tell"}), cluster, console)
        with alone(opened, "data transfer"):
            return (_remove if request.remove else _use)(request, cluster, opened, console)


def _refuse_bad(request: Request) -> None:
    problems = []
    if request.name and not NAME.fullmatch(request.name):
        what = f"`{request.name}` is no name of a dataset"
        problems.append(Problem("NAME", what, "take letters, digits, - and _, 64 at most: NAME=stl10"))
    if request.src and not request.name:
        problems.append(Problem("SRC", "the dataset has no name", "give it one: NAME=stl10"))
    if request.src and not Path(request.src).expanduser().is_dir():
        problems.append(Problem("SRC", f"there is no folder {request.src}", "name the folder that ranks shall see"))
    if request.remove and (request.src or not request.name):
        problems.append(Problem("REMOVE", "it takes the name of a dataset alone", "`make data NAME=stl10 REMOVE=1`"))
    if request.verify and not request.src:
        problems.append(Problem("VERIFY", "what is there is compared with a folder", "name it: SRC=..."))
    if problems:
        raise Refusal(problems)


def _bring(request: Request, cluster: clustermap.ClusterMap, console: Console) -> int:
    begun, phases = time.monotonic(), Phases(console)
    kept = clustermap.path_of(request.inventory).with_name("data")
    folder = Path(request.src).expanduser().resolve()
    seen = kept / f"{hashlib.sha256(bytes(folder)).hexdigest()[:16]}.seen"
    with phases.phase("read", f"Reading {request.src}"):
        found = dataset.read(folder, seen, request.verify, phases.say)
        phases.say(f"{found}, version {found.version}")
    with machines(cluster, cluster.hosts) as opened, alone(opened, "data transfer"):
        with phases.phase("compare", "Asking the hosts what they lack"):
            told = ask(opened, {"do": "tell"}, phases.say)
            lacking = _compare(request, found, told, opened, phases.say)
        placed: Mapping[str, Any] = {}
        if lacking:
            numbers = sorted({number for some in lacking.values() for number in dataset.numbers_of(some)})
            parts = found.parts(numbers)
            whole = size(sum(found.files[number].size for number in numbers))
            with phases.phase("distribute", f"Distributing {len(numbers)} files, {whole}; a host gets what it lacks"):
                placed = _distribute(request, found, parts, lacking, cluster, opened, phases.say)
        prints = {name: _of(words, request.name, found.version).get("fingerprint") for name, words in told.items()}
        _refuse_different(prints | {name: host["id"] for name, host in placed.items()})
        _have_used(request, found.version, cluster, opened, phases.say)
    write_whole(kept / f"{request.name}.manifest", found.manifest.decode("latin-1"))
    if placed:
        for name, host in placed.items():
            phases.say(f"{name}: {size(host['bytes_sent'])} came, {size(host['control_bytes'])} from this machine")
    else:
        console.print("Nothing had to be sent: all hosts have it.")
    _say_next(request, cluster, console, f"{found} on {len(cluster.hosts)} hosts in {time.monotonic() - begun:.1f} s")
    return exits.SUCCEEDED


def _compare(
    request: Request,
    found: dataset.Dataset,
    told: Answers,
    opened: Sequence[Machine],
    say: Callable[[str], None],
) -> dict[str, dataset.Ranges]:
    """The line numbers that each host without this version lacks; nothing is sent before every host has room."""
    having = {name for name, words in told.items() if _of(words, request.name, found.version)}
    without = [machine for machine in opened if request.verify or machine.name not in having]
    if not without:
        return {}
    manifest = base64.b64encode(found.packed_manifest).decode()
    question = {"do": "compare", "name": request.name, "version": found.version, "manifest": manifest}
    answers = ask(without, {**question, "check": request.verify}, say)
    return {name: words["lacking"] for name, words in answers.items() if not words["whole"]}


def _of(told: Mapping[str, Any], name: str, version: str) -> dict[str, Any]:
    """What a host says of a version; {}: it has none."""
    return next((one for one in told["datasets"] if (one["name"], one["version"]) == (name, version)), {})


def _distribute(
    request: Request,
    found: dataset.Dataset,
    parts: dict[str, dataset.Part],
    lacking: Iterable[str],
    cluster: clustermap.ClusterMap,
    opened: Sequence[Machine],
    say: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    options = {
        **{"do": "bring", "name": request.name, "version": found.version},
        "parts": {digest: [part.size, part.places] for digest, part in parts.items()},
    }
    blobs = distribution.Blobs({digest: part.size for digest, part in parts.items()}, found.reader(parts))
    wanted = set(lacking)
    to = [machine for machine in opened if machine.name in wanted]
    addresses = {host.name: host.address for host in cluster.hosts}
    links = of_deploy(cluster.measured, cluster.network.name)
    return distribution.pass_on(to, addresses, "muster_data", options, blobs, say, links, "files")


def _refuse_different(prints: Mapping[str, Any]) -> None:
    """Raises Refusal unless all hosts have read back the same from their disks. prints: fingerprints by host."""
    if len(set(prints.values())) > 1:
        what = f"hosts hold different files: {', '.join(f'{host} {found[:12]}' for host, found in prints.items())}"
        raise refuse("the hosts", what, "`make data VERIFY=1` with the same SRC and NAME", exits.DEPLOY_FAILED)


def _have_used(
    request: Request,
    version: str,
    cluster: clustermap.ClusterMap,
    opened: Sequence[Machine],
    say: Callable[[str], None],
) -> None:
    """Let runs see this version, and remove older ones, unless a run in progress may read them."""
    runs = _runs(opened)
    question = {"do": "use", "name": request.name, "version": version, "keep": bool(runs)}
    left = {one for words in ask(opened, question, say).values() for one in words["left"]}
    if left:
        say(f"run {', '.join(runs)} is in progress: the versions before stay until `make data` is run after it")
    hosts = [
        dataclasses.replace(host, data_dir=clustermap.dataset_dir(host.place, request.name, version))
        if host.data_dir is None or clustermap.dataset_in(host.data_dir)
        else host
        for host in cluster.hosts
    ]
    clustermap.write(clustermap.path_of(request.inventory), dataclasses.replace(cluster, hosts=hosts))


def _runs(opened: Sequence[Machine]) -> list[str]:
    """The runs in progress on any of the hosts. Raises Refusal where a host does not say."""
    answers = ssh.in_parallel(lambda machine: door.ask(machine, "runs", {}), opened)
    _refuse_failed({machine.name: answer for machine, answer in zip(opened, answers, strict=True)})
    entries = [entry for answer in answers if isinstance(answer, dict) for entry in answer["runs"]]
    return sorted({entry["run"] for entry in entries if entry["status"] in ("starting", "running")})


def _use(request: Request, cluster: clustermap.ClusterMap, opened: Sequence[Machine], console: Console) -> int:
    """NAME alone: a dataset that is on all hosts is what runs see from now on."""
    told = ask(opened, {"do": "tell"})
    having = {
        name: {one["version"]: one for one in words["datasets"] if one["name"] == request.name}
        for name, words in told.items()
    }
    shared = set.intersection(*(set(versions) for versions in having.values()))
    bring = f"bring it: `make data SRC=<folder> NAME={request.name}`"
    if not shared:
        lacking = [name for name, versions in having.items() if not versions]
        what = f"has no dataset {request.name}" if lacking else f"has another version of {request.name} than others"
        raise Refusal([Problem(f"host {name}", what, bring) for name in lacking or having])
    latest = max(shared, key=lambda version: max(float(one[version]["at"]) for one in having.values()))
    _have_used(request, latest, cluster, opened, Phases(console).say)
    _say_next(request, cluster, console, f"version {latest}")
    return exits.SUCCEEDED


def _remove(request: Request, cluster: clustermap.ClusterMap, opened: Sequence[Machine], console: Console) -> int:
    if runs := _runs(opened):
        what, fix = f"run {', '.join(runs)} is in progress and may read it", "`make stop RUN=<id>` first, or wait"
        raise refuse(f"dataset {request.name}", what, fix)
    if not any(one["removed"] for one in ask(opened, {"do": "remove", "name": request.name}).values()):
        raise refuse(f"dataset {request.name}", "no host has it", "`make data` lists what is there")
    hosts = [
        dataclasses.replace(host, data_dir=None) if clustermap.dataset_in(host.data_dir) == request.name else host
        for host in cluster.hosts
    ]
    clustermap.write(clustermap.path_of(request.inventory), dataclasses.replace(cluster, hosts=hosts))
    console.print(f"Removed the dataset {request.name} from {len(cluster.hosts)} hosts.", highlight=False)
    return exits.SUCCEEDED


def _list(told: Answers, cluster: clustermap.ClusterMap, console: Console) -> int:
    table = Table()
    for column in ("host", "dataset", "version", "files", "size", "fingerprint", "brought", "free disk"):
        table.add_column(column, justify="right" if column in ("files", "size") else "left")
    for host in cluster.hosts:
        words = told[host.name]
        for one in words["datasets"] or [None]:
            if one is None:
                table.add_row(host.name, *[""] * 6, size(words["free"]))
                continue
            mark = (
                " (/data)" if host.data_dir == clustermap.dataset_dir(host.place, one["name"], one["version"]) else ""
            )
            about = (one["version"], str(one["files"]), size(one["bytes"]), one["fingerprint"][:12])
            since = f"{age(max(0.0, time.time() - one['at']))} ago"
            table.add_row(host.name, f"{one['name']}{mark}", *about, since, size(words["free"]))
    console.print(table)
    return exits.SUCCEEDED


def _say_next(request: Request, cluster: clustermap.ClusterMap, console: Console, what: str) -> None:
    own = [host for host in cluster.hosts if host.data_dir and not clustermap.dataset_in(host.data_dir)]
    for host in own:
        console.print(f"{host.name} keeps {host.data_dir}, its `data_dir` of the inventory, as /data.", highlight=False)
    seen = (
        "" if len(own) == len(cluster.hosts) else f" Next: `make train {naming(request.inventory)}` sees it as /data."
    )
    console.print(f"Dataset [bold]{request.name}[/bold]: {what}.{seen}", highlight=False)


def held(opened: Sequence[Machine]) -> list[str]:
    """The datasets on the hosts, in words: what a teardown would remove. A host that cannot be asked has none."""
    found: dict[str, int] = {}
    for answer in ssh.in_parallel(lambda machine: _ask_one(machine, {"do": "tell"}, lambda text: None), opened):
        for one in answer["datasets"] if isinstance(answer, dict) else ():
            found[one["name"]] = max(one["bytes"], found.get(one["name"], 0))
    return [f"{name} ({size(bytes_)})" for name, bytes_ in sorted(found.items())]


def ask(
    opened: Sequence[Machine], options: Mapping[str, Any], say: Callable[[str], None] = lambda text: None
) -> Answers:
    """What each host says to a question of muster_data. Raises one Refusal for all that fail."""
    answers = ssh.in_parallel(lambda machine: _ask_one(machine, options, say), opened)
    by_host = {machine.name: answer for machine, answer in zip(opened, answers, strict=True)}
    _refuse_failed(by_host)
    return {name: answer for name, answer in by_host.items() if isinstance(answer, dict)}


def _refuse_failed(answers: Mapping[str, Any]) -> None:
    failed = {name: error for name, error in answers.items() if isinstance(error, BaseException)}
    if failed:
        fix = "fix what it names and run the same command again: it goes on where it stopped"
        problems = [Problem(f"host {name}", str(error) or type(error).__name__, fix) for name, error in failed.items()]
        lost = all(isinstance(error, LINK_ERRORS) for error in failed.values())
        raise Refusal(problems, exits.UNREACHABLE if lost else exits.REFUSED)


def _ask_one(machine: Machine, options: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Raises DoorError with the host's own words, TimeoutError and LINK_ERRORS."""
    said, answer = time.monotonic(), None
    question = hostcall.program(options).encode()
    with Call(machine, hostcall.command(machine.target.python, "muster_data"), question) as call:
        for frame in call.frames(distribution.HOST_SECONDS):
            if "waiting" not in frame.words:
                answer = frame.words
            elif time.monotonic() - said > distribution.PROGRESS_SECONDS:
                said = time.monotonic()
                say(f"{machine.name}: {frame.words['waiting']}")
    if answer is None:
        raise door.DoorError("it ended without an answer", {})
    return answer
