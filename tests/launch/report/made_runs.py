"""Folders of runs as they come from hosts. data/ holds what keepers and ranks really wrote in a few epochs of digits:
on two hosts with three ranks, and on three hosts of which h2 was killed and the others went on. More is made of it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from launch import files
from launch.health import records
from launch.hosts import clustermap
from launch.job import outcome, plan
from launch.job.outcome import Failure, Verdict
from tests.launch import samples
from tests.launch.fake_hosts import cause, exit_words, ports
from tests.launch.health.test_page import document as check_document

DATA = Path(__file__).parent / "data"
TWO_HOSTS, RESTARTED_HOSTS = DATA / "two_hosts", DATA / "restarted"
NASTY = "</td><script>alert('1')</script>\"&\x00 {{ 7 * 7 }} \ud800"

Words = dict[str, Any]


def lines(events: Iterable[Words]) -> str:
    return "".join(f"{json.dumps(event)}\n" for event in events)


def read_lines(path: Path) -> list[Words]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def began(data: Path) -> datetime:
    """When a run of data/ began, by the clock of its first host."""
    return datetime.fromtimestamp(read_lines(data / "logs" / "h1" / "events.jsonl")[0]["time"], UTC)


def write_plan(folder: Path, *nprocs: int, created: datetime | None = None, **options: Any) -> plan.Plan:
    """The plan of a run with so many ranks on each host."""
    given = {"args": ("--config", "digits", "--epochs", "3"), **options}
    created = created or CREATED
    made = plan.make_plan(
        samples.cluster(*nprocs), plan.Options(**given), folder.name, ports(len(nprocs)), "ada@lab", created.isoformat()
    )
    files.write_json(folder / "plan.json", plan.document(made))
    return made


def write_summary(folder: Path, made: plan.Plan, verdict: Verdict, missing: Iterable[str] = ()) -> None:
    result = files.read_json(folder / "result.json") if verdict.status == "succeeded" else {}
    where = (made.run, len(made.hosts), made.world_size, made.master_addr)
    files.write_json(folder / "summary.json", outcome.summary(*where, verdict, result, missing=list(missing)))


def succeeded(folder: Path) -> Path:
    """The real one."""
    shutil.copytree(TWO_HOSTS, folder)
    write_summary(folder, write_plan(folder, 1, 2), Verdict("succeeded"))
    return folder


def write_manifests(folder: Path, *kept: tuple[int, float]) -> None:
    """Only these checkpoints: (step, seconds since the start)."""
    shutil.rmtree(folder / "checkpoints")
    for step, seconds in kept:
        manifest = {"step": step, "bytes": 134_000_000, "time": CREATED.timestamp() + seconds}
        files.write_json(folder / "checkpoints" / f"step-{step}.json", manifest)


def write_host(folder: Path, host: str, events: list[Words], end: Words | None) -> None:
    logs = folder / "logs" / host
    logs.mkdir(parents=True, exist_ok=True)
    (logs / "events.jsonl").write_text(lines(events), encoding="utf-8")
    if end:
        files.write_json(logs / "exit.json", end)


def events_of(zero: float, *listed: tuple[float, int, str, Words]) -> list[Words]:
    """Events of a keeper whose clock was `zero` at its start: (seconds, attempt, name, more)."""
    return [
        {"time": zero + after, "after": after, "attempt": number, "event": name, **more}
        for after, number, name, more in listed
    ]


def restarted(folder: Path) -> Path:
    """The real one in which h2 was killed in the second epoch. The clock of h3 is 20 s ahead."""
    shutil.copytree(RESTARTED_HOSTS, folder)
    made = write_plan(folder, 1, 1, 1, created=began(RESTARTED_HOSTS), max_restarts=3)
    attempts = files.read_json(folder / "logs" / "h1" / "exit.json")["attempts"]
    write_summary(folder, made, Verdict("succeeded", attempts=attempts, restarts=1), ["h2"])
    return folder


def failed(folder: Path, reason: str = "ValueError: the labels do not fit (exit 1)") -> Path:
    """Rank 2 fails in the second epoch; h1 could not be gathered whole."""
    shutil.copytree(TWO_HOSTS, folder)
    made = write_plan(folder, 1, 2)
    zero = CREATED.timestamp()
    last = ["Traceback (most recent call last):", '  File "train.py", line 3, in <module>', reason]
    found = cause("h2", rank=2, reason=reason, lines=last)
    follows = cause("h1", rank=0, reason="connection closed by peer (exit 1)", consequence=True)
    for host in ("h1", "h2"):
        pids = {"0": 71} if host == "h1" else {"1": 81, "2": 82}
        course = events_of(
            zero,
            *((0.01, 1, "lease", {}), (2.1, 1, "started", {"pids": pids}), (17.1, 1, "failed", found)),
            *((17.3, 1, "failed", follows), (17.9, 1, "ended", {"status": 1}), (18.0, 1, "exit", {"status": "failed"})),
        )
        write_host(folder, host, course, exit_words("failed", found, follows, seconds=18.0))
    metrics = read_lines(folder / "metrics.jsonl")
    (folder / "metrics.jsonl").write_text(lines(metrics[:19]), encoding="utf-8")
    (folder / "result.json").unlink()
    write_manifests(folder, (12, 13.1), (15, 15.1))
    write_summary(folder, made, Verdict("failed", Failure("h2", 2, reason), found, reason), ["h1"])
    return folder


def script(folder: Path) -> Path:
    """A user's own script, stopped. It has left files under names that our trainer gives, with other things in them."""
    folder.mkdir(parents=True)
    made = write_plan(folder, 1, script="main.py", args=("--epochs", "90"))
    (folder / "metrics.jsonl").write_text('{"event": "step", "step": "first"}\nno JSON\n[1]\n')
    files.write_json(folder / "settings.json", {"model": NASTY})
    (folder / "workload").mkdir()
    (folder / "workload" / "weights.pt").write_text("weights")
    asked = {"by": "`make stop` by ada", "grace": 30.0}
    course = events_of(
        CREATED.timestamp(),
        *((0.01, 1, "lease", {}), (2.1, 1, "started", {"pids": {"0": 71}}), (4000.0, 1, "stop", asked)),
        *((4008.0, 1, "ended", {"status": 75}), (4008.1, 1, "exit", {"status": "stopped"})),
    )
    write_host(folder, "h1", course, exit_words("stopped", stop={**asked, "killed": False}, seconds=4008.1))
    write_summary(folder, made, Verdict("stopped", reason="`make stop` by ada"))
    return folder


def local(folder: Path) -> Path:
    """A run of `make local`, which has neither plan nor keepers."""
    shutil.copytree(TWO_HOSTS, folder)
    shutil.rmtree(folder / "logs")
    (folder / "logs").mkdir()
    (folder / "logs" / "rank-0.out").write_text("epoch 1/3\n")
    where = (folder.name, 1, 2, "127.0.0.1")
    result = files.read_json(folder / "result.json") | {"test_accuracy": 0.9}
    files.write_json(folder / "summary.json", outcome.summary(*where, Verdict("succeeded"), result))
    return folder


def large(folder: Path, hosts: int = 32, ranks: int = 8, steps: int = 20_000) -> Path:
    """Many hosts with long names, and many steps."""
    folder.mkdir(parents=True)
    made = write_plan(folder, *[ranks] * hosts)
    named = [replace(one, host=f"gpu-node-{number:03}.cluster") for number, one in enumerate(made.hosts)]
    files.write_json(folder / "plan.json", plan.document(replace(made, hosts=named)))
    zero, end = CREATED.timestamp(), steps * 0.5 + 60.0
    for one in named:
        course = events_of(
            zero,
            *((0.01, 1, "lease", {}), *((0.3, 1, "heard", {"host": other.host}) for other in named if other != one)),
            *(
                (2.1, 1, "started", {"pids": dict.fromkeys(map(str, one.ranks), 7)}),
                (end, 1, "exit", {"status": "succeeded"}),
            ),
        )
        write_host(folder, one.host, course, exit_words(seconds=end))
    per_epoch, world = 1000, hosts * ranks
    template = {"world_size": world, "device": "cuda:0", "resumed_from": None, "versions": {"torch": "2.13.0"}}
    events: list[Words] = [{"event": "start", "time": zero + 10.0, **template}]
    for step in range(1, steps + 1):
        epoch = (step - 1) // per_epoch + 1
        event: Words = {
            "event": "step",
            "time": zero + 10.0 + step * 0.5,
            "epoch": epoch,
            "step": step,
            "lr": 0.1 / epoch,
        }
        event |= {
            "images": 8192,
            "loss": 7.0 / (1 + step / 2000),
            "accuracy": 0.5,
            "seconds": ((step - 1) % per_epoch + 1) * 0.5,
        }
        if step % 100 == 0:
            event |= {"computing": [0.3 + 0.001 * (rank % 7) for rank in range(world)], "waiting": [0.1] * world}
        events.append(event)
        if step % per_epoch == 0:
            figures = {"train_loss": 7.0 / epoch, "test_loss": 7.5 / epoch, "train_accuracy": 1 - 1 / (epoch + 1)}
            figures |= {
                "test_accuracy": 1 - 1 / (epoch + 1),
                "images_per_second": 16384.0,
                "data_wait": 0.02,
                "comm": 0.11,
            }
            time = event["time"] + 0.4
            events.append({"event": "epoch", "time": time, "epoch": epoch, "step": step, "seconds": 500.0, **figures})
            events.append({"event": "checkpoint", "time": time + 0.1, "step": step, "seconds": 0.05})
    (folder / "metrics.jsonl").write_text(lines(events), encoding="utf-8")
    files.write_json(folder / "settings.json", {"model": "resnet50", "dataset": "folder", "epochs": steps // per_epoch})
    figures = {"test_accuracy": 0.7631, "images_per_second": 16384.0, "train_seconds": steps * 0.5}
    files.write_json(folder / "result.json", figures)
    write_summary(folder, made, Verdict("succeeded"))
    return folder


CREATED = began(TWO_HOSTS)

#: The names of the runs, the newest first.
SUCCEEDED, RESTARTED, FAILED, SCRIPT, LOCAL, LARGE = (
    *("20261123-061500-3fa2", "20261122-101500-77aa", "20261121-143005-0c1d", "20261120-080000-5e5e"),
    *("20261119-120000-abcd-local", "20261118-200000-2222"),
)
NAMES = {
    "succeeded": SUCCEEDED,
    "restarted": RESTARTED,
    "failed": FAILED,
    "script": SCRIPT,
    "local": LOCAL,
    "large": LARGE,
}
KINDS: dict[str, Callable[[Path], Path]] = {
    SUCCEEDED: succeeded,
    RESTARTED: restarted,
    FAILED: failed,
    SCRIPT: script,
    LOCAL: local,
}

FACTS = {
    "kernel": "6.1.0-28-amd64",
    "os": {"id": "debian", "version": "12"},
    "cpus": 16,
    "cpu_model": "AMD EPYC 9354P 32-Core Processor",
    "memory_bytes": 64 * 2**30,
    "engine": {"name": "podman", "version": "4.3.1", "storage_driver": "overlay"},
    "gpus": [{"name": "NVIDIA H200"}] * 2,
}


def all_of_them(with_large: bool) -> None:
    """Every kind of run in runs/, and in build/ the cluster map and a check made before them."""
    write_map_and_check()
    for name, make in (KINDS | ({LARGE: large} if with_large else {})).items():
        make(files.runs_dir() / name)


def write_map_and_check() -> None:
    made = samples.cluster(1, 1, 1)
    inventory = files.ROOT / made.inventory
    hosts = [replace(host, facts=FACTS) for host in made.hosts]
    path = clustermap.path_of(inventory)
    files.write_json(path, asdict(replace(made, hosts=hosts)))
    check = check_document(inventory=made.inventory, when=CREATED - timedelta(minutes=12))
    records.save(path.parent / "checks", check)
