"""`make local`: trains on this machine alone. No inventory, no containers, no root.

    python -m launch.local [--nproc N] [the trainer's options, see python -m train --help]

Starts the same trainer under the same agent as on a cluster, in a folder runs/<id>/ of its own, and always
leaves summary.json there. PROJECT=dir: with a model, dataset, loss or transform of the user's own, and what its
requirements.txt asks for (packages.py). Exit statuses: launch/cli/exits.py. Never imports torch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keeper import causes
from launch import packages
from launch.cli import command, exits
from launch.cli.refusal import refuse
from launch.cli.signals import undisturbed
from launch.files import ROOT, read_json, runs_dir, shown, write_json
from launch.job import outcome, plan, project, trainer_arguments
from launch.job.container import stop_seconds
from launch.job.outcome import Failure, Verdict
from launch.report import ending
from launch.report.documents import PAGE

MASTER_ADDRESS = "127.0.0.1"
WITHOUT_GPUS = 2  # ranks
HOST = "localhost"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `make local`, whose ARGS come first; returns the exit status."""
    return command.run(lambda: train(sys.argv[1:] if arguments is None else arguments))


def train(arguments: Sequence[str]) -> int:
    """Train in a folder of its own; returns the exit status. Raises Refusal when nothing was started."""
    options, training = parse([*trainer_arguments.split(os.environ.get("ARGS", "")), *arguments])
    nproc = number_of_ranks(options.nproc, gpus_here())
    grace_seconds = plan.parse_grace(os.environ.get("GRACE", ""))
    refuse_others()
    own = project.folder_of(os.environ.get("PROJECT", ""))
    trainer_arguments.check(trainer_arguments.inline(training), nproc, own)
    beside = packages.folder_of(own) if own else None
    training += ["--project", str(own)] if own else []
    folder = make_run_folder(Path(options.runs))
    print(f"run {folder.name}: {nproc} process(es) on this machine", flush=True)
    words, env = torchrun(nproc, folder, training), environment(nproc, folder, grace_seconds, beside)
    begun = time.monotonic()
    status, stopped = follow(words, env, folder, stop_seconds(grace_seconds))
    seconds = round(time.monotonic() - begun, 1)
    flatten(folder / "logs", nproc)
    summary = summarise(folder, nproc, status, stopped) | {"run_seconds": seconds}
    write_json(folder / "summary.json", summary)
    ending.write(folder, print)
    print(closing(summary, folder), flush=True)
    return int(summary["exit_status"])


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """(our options, the trainer's arguments). Raises Refusal for --run-dir."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.local",
        description="Trains on this machine alone. Options not listed here go to the trainer: see "
        "python -m train --help",
        allow_abbrev=False,
    )
    parser.add_argument("--nproc", help="processes (default: NPROC, else one per GPU, else 2)")
    parser.add_argument("--runs", default=runs_dir(), help="where the run's folder is made (default: runs)")
    options, training = parser.parse_known_args(arguments)
    if any(argument.split("=")[0] == "--run-dir" for argument in training):
        raise refuse("ARGS", "--run-dir: every run gets a folder of its own in runs/", "leave it out, or give --runs")
    return options, training


def refuse_others() -> None:
    """Raises Refusal for variables of `make train` that would be ignored here."""
    fixes = {
        "RESUME": 'go on with ARGS="--resume runs/<id>"',
        "SCRIPT": "run a script of your own with torchrun, or with make train",
        "WORKLOAD": "run a script of your own with torchrun, or with make train",
        "LAUNCHER": "leave it out: it chooses how make train starts its ranks",
    }
    given = [name for name in fixes if os.environ.get(name)]
    if given:
        what = f"{given[0]}={os.environ[given[0]]} is for make train; make local trains here, with our trainer"
        raise refuse(given[0], what, fixes[given[0]])


def number_of_ranks(wanted: str | None, gpus: int) -> int:
    """From --nproc or NPROC, else one per GPU, else two. Raises Refusal when so many cannot run here."""
    text = wanted or os.environ.get("NPROC") or ""
    if not text:
        return gpus or WITHOUT_GPUS
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise refuse("NPROC", f"NPROC={text} is no number of processes", "give a whole number, 1 or more")
    if gpus and int(text) > gpus:
        raise refuse("NPROC", f"NPROC={text}, but this machine has {gpus} GPU(s)", "give one process per GPU, or fewer")
    return int(text)


def gpus_here() -> int:
    """How many NVIDIA GPUs torch would see: none is a normal answer."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return len([part for part in hidden.split(",") if part.strip() not in ("", "-1")])
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines()) if listing.returncode == 0 else 0


def make_run_folder(runs: Path) -> Path:
    """A new folder, named by the run's id. Raises Refusal when it cannot be made."""
    folder = (runs / f"{plan.new_run_id()}-local").resolve()
    try:
        (folder / "logs").mkdir(parents=True)
    except OSError as error:
        what = f"cannot make the folder {folder}: {error.strerror}"
        raise refuse("runs", what, "choose another with --runs") from error
    return folder


def torchrun(nproc: int, folder: Path, training: Sequence[str]) -> list[str]:
    """The command of the agent, which starts the ranks."""
    return [
        *(sys.executable, "-P", "-m", "train.start.agent", "--standalone", f"--nproc-per-node={nproc}"),
        f"--local-addr={MASTER_ADDRESS}",  # torchrun's default is this machine's own name, which need not resolve
        *(f"--log-dir={folder / 'logs'}", "--tee=3", "-m", "train", *training),
    ]


def environment(nproc: int, folder: Path, grace_seconds: int, beside: Path | None = None) -> dict[str, str]:
    """The environment of the agent and its ranks: this process's own, and what they need.

    beside: a folder of packages that are found before those of .venv.
    """
    cores = len(os.sched_getaffinity(0))
    search = (str(ROOT), str(beside or ""), os.environ.get("PYTHONPATH"))
    ours = {
        "PYTHONPATH": os.pathsep.join(filter(None, search)),
        "PYTHONUNBUFFERED": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(grace_seconds),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // nproc)),
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),  # train/start/memory.py
        "GLOO_SOCKET_IFNAME": "lo",
        "MUSTER_RUN_ID": folder.name,
        "MUSTER_HOST": "local",
        "MUSTER_RUN_DIR": str(folder),
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] ",
    }
    return {**os.environ, **ours}


def follow(words: Sequence[str], env: Mapping[str, str], folder: Path, stop_seconds: float) -> tuple[int, bool]:
    """Run the agent to its end, its output shown live. Returns (its exit status, whether a signal stopped it).

    After an interrupt the agent ends its ranks, which may save a checkpoint first; what is left of the run after
    `stop_seconds` is killed.
    """
    agent = None
    try:
        with undisturbed(then_interrupt=True):  # while it is being started it cannot be stopped
            agent = subprocess.Popen(words, env=env, start_new_session=True)
        status, stopped = agent.wait(), False
    except KeyboardInterrupt:
        if agent is None:
            raise
        with undisturbed():
            print("\nstopping the run ...", file=sys.stderr, flush=True)
            agent.terminate()
            try:
                status = agent.wait(stop_seconds)
            except subprocess.TimeoutExpired:
                agent.kill()
                status = agent.wait()
        stopped = True
    finally:
        kill_what_is_left(folder)
    return (status if status >= 0 else 128 - status), stopped


def kill_what_is_left(folder: Path) -> None:
    """Kill the ranks that outlived their agent: this user's processes whose environment names the run's own folder."""
    label = f"MUSTER_RUN_DIR={folder}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            ours = process.stat().st_uid == os.getuid() and int(process.name) != os.getpid()
            if ours and label in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:
            continue  # it has just ended


def flatten(logs: Path, nproc: int) -> None:
    """Rename torchrun's <id>/attempt_0/<rank>/stdout.log and stderr.log to rank-<rank>.out and rank-<rank>.err."""
    for rank in range(nproc):
        for kind, suffix in (("stdout.log", "out"), ("stderr.log", "err")):
            for file in sorted(logs.glob(f"*/attempt_*/{rank}/{kind}")):
                file.rename(logs / f"rank-{rank}.{suffix}")
    for attempt in logs.glob("*/attempt_*/"):
        shutil.rmtree(attempt.parent, ignore_errors=True)


def summarise(folder: Path, nproc: int, status: int, stopped: bool) -> dict[str, Any]:
    """The content of summary.json, from what the trainer and the agent left in the folder."""
    where = (folder.name, 1, nproc, MASTER_ADDRESS)
    if stopped or status == exits.STOPPED:
        reason = f"stopped by a signal to {'make local' if stopped else 'a rank'}"
        return outcome.summary(*where, Verdict("stopped", reason=reason))
    result, failures = read_json(folder / "result.json"), read_json(folder / "failure.json").get("failures") or []
    if status == 0 and result:
        return outcome.summary(*where, Verdict("succeeded"), result)
    failure = Failure(
        HOST, None, outcome.describe_status(status, "torchrun") if status else "the trainer left no result"
    )
    if failures:  # the agent puts the cause first
        failure = Failure(HOST, failures[0]["rank"], causes.described(failures[0]))
    ended = Verdict("failed", failure, reason=failure.reason)
    return outcome.summary(*where, ended, refused=outcome.refused_its_settings(failures, folder))


def closing(summary: Mapping[str, Any], folder: Path) -> str:
    """The last message."""
    path = Path(shown(folder))
    page = f"\nreport: {path / PAGE}" if (folder / PAGE).exists() else ""
    if summary["status"] == "stopped":
        return f"stopped; what there is of the run is in {path}{page}"
    if summary["status"] == "failed":
        who = "the run" if summary["failed_rank"] is None else f"rank {summary['failed_rank']}"
        return f"run and logs of each rank: {path} and {path / 'logs'}{page}\n{who} failed: {summary['reason']}"
    what, figure = outcome.reached(summary)
    return (
        f"\n  {what or 'test accuracy':<15} {figure or 'unknown'}\n"
        f"  speed           {summary['images_per_second']:.0f} images/s\n"
        f"  training time   {summary['train_seconds']:.1f} s\n"
        f"  run             {path}\n"
        f"  curves          {path / 'curves.png'}" + (f"\n  report          {path / PAGE}" if page else "")
    )


if __name__ == "__main__":
    sys.exit(main())
