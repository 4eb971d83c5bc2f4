"""`make local`: trains on this machine alone. No inventory, no containers, no root.

    python -m launch.local [--nproc N] [the trainer's options, see python -m train --help]

Starts the same trainer under the same agent as on a cluster, in a folder runs/<id>/ of its own, and always
leaves summary.json there. Exit statuses: launch/cli/exits.py. Never imports torch.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from launch.cli import exits
from launch.cli.make_variables import refuse_unknown_variables
from launch.cli.refusal import Refusal

ROOT = Path(__file__).resolve().parent.parent
MASTER_ADDRESS = "127.0.0.1"
WITHOUT_GPUS = 2
# Ranks that are told to stop get this long, in seconds, to finish a step and save; only then the agent is ended itself.
GRACE_SECONDS = 30
PATIENCE_BEYOND = 10.0


class Refused(Exception):
    """Bad input: one message, nothing started."""


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        refuse_unknown_variables(os.environ.get("MAKEFLAGS", ""))
        options, training = parse([*given_by_make(), *sys.argv[1:]] if arguments is None else list(arguments))
        nproc, patience = number_of_ranks(options.nproc, gpus_here()), grace() + PATIENCE_BEYOND
        folder = make_run_folder(Path(options.runs), time.strftime("%Y%m%d-%H%M%S-local"))
    except (Refused, Refusal) as refused:
        print(f"make local: {refused}", file=sys.stderr)
        return exits.REFUSED
    print(f"run {folder.name}: {nproc} process(es) on this machine", flush=True)
    status, stopped = follow(command(nproc, folder, training), environment(nproc, folder), folder.name, patience)
    flatten_logs(folder / "logs")
    summary = summarise(folder, nproc, status, stopped)
    write_json(folder / "summary.json", summary)
    print(closing(summary, folder), flush=True)
    return int(summary["exit_status"])


def given_by_make() -> list[str]:
    """The words of ARGS, which make hands on in the environment."""
    try:
        return shlex.split(os.environ.get("ARGS", ""))
    except ValueError as error:
        raise Refused(f"ARGS={os.environ['ARGS']}: {error}; close the quotation") from None


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(our options, the trainer's arguments)"""
    parser = argparse.ArgumentParser(
        prog="python -m launch.local",
        description="Trains on this machine alone. Options not listed here go to the trainer: see "
        "python -m train --help",
        allow_abbrev=False,
    )
    parser.add_argument("--nproc", help="processes (default: NPROC, else one per GPU, else 2)")
    parser.add_argument("--runs", default="runs", help="where the run's folder is made (default: runs)")
    options, training = parser.parse_known_args(arguments)
    if any(argument.split("=")[0] == "--run-dir" for argument in training):
        raise Refused("--run-dir is chosen here: every run gets its own folder in runs/ (see --runs)")
    return options, training


def number_of_ranks(wanted: str | None, gpus: int) -> int:
    """From --nproc or NPROC, else one per GPU, else two."""
    text = wanted or os.environ.get("NPROC") or ""
    if not text:
        return gpus or WITHOUT_GPUS
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise Refused(f"NPROC={text}: the number of processes is a whole number, 1 or more")
    if gpus and int(text) > gpus:
        raise Refused(f"NPROC={text}: this machine has {gpus} GPU(s), and each process takes one")
    return int(text)


def gpus_here() -> int:
    """NVIDIA GPUs that torch would see: none is a normal answer."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return len([part for part in hidden.split(",") if part.strip() not in ("", "-1")])
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines()) if listing.returncode == 0 else 0


def make_run_folder(runs: Path, name: str) -> Path:
    """A new folder `name`, or name-2, name-3 ... where runs start in the same second."""
    for number in range(1, 1000):
        folder = (runs / (name if number == 1 else f"{name}-{number}")).resolve()
        try:
            (folder / "logs").mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise Refused(
                f"cannot make the run's folder {folder}: {error.strerror}; choose another with --runs"
            ) from error
    raise Refused(f"no free name for a run in {runs}: clear it")


def command(nproc: int, folder: Path, training: list[str]) -> list[str]:
    agent = [sys.executable, "-P", "-m", "train.start.agent", "--standalone", f"--nproc-per-node={nproc}"]
    # The address is given: torchrun's default is this machine's own name, which need not resolve.
    return [
        *agent,
        f"--local-addr={MASTER_ADDRESS}",
        f"--log-dir={folder / 'logs'}",
        "--tee=3",
        "-m",
        "train",
        *training,
    ]


def environment(nproc: int, folder: Path) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    ours = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(grace()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // nproc)),
        "GLOO_SOCKET_IFNAME": "lo",
        "MUSTER_RUN_ID": folder.name,
        "MUSTER_HOST": "local",
        "MUSTER_RUN_DIR": str(folder),
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] ",
    }
    return {**os.environ, **ours}


def grace() -> int:
    """GRACE, in seconds."""
    text = os.environ.get("GRACE") or str(GRACE_SECONDS)
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 3600):
        raise Refused(f"GRACE={text}: a whole number of seconds from 1 to 3600")
    return int(text)


class Stop(Exception):
    """A signal asked us to stop."""


def follow(arguments: list[str], env: dict[str, str], run: str, patience: float) -> tuple[int, bool]:
    """Runs the agent to its end with its output shown live. Returns (its status as subprocess gives it, was
    it stopped).

    On SIGINT, SIGTERM or SIGHUP the agent ends its ranks, which may save a checkpoint first; what is left of the run
    after `patience` seconds is killed.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise Stop

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    stopped = False
    agent = None
    try:
        agent = subprocess.Popen(arguments, env=env, start_new_session=True)
        agent.wait()
    except Stop:
        stopped = True
        for number in previous:
            signal.signal(number, signal.SIG_IGN)
        print("\nstopping the run ...", file=sys.stderr, flush=True)
        if agent is not None:
            end(agent, patience)
    finally:
        kill_what_is_left(run)
        for number, handler in previous.items():
            signal.signal(number, handler)
    return (agent.returncode if agent is not None else 1), stopped


def end(agent: subprocess.Popen[bytes], patience: float) -> None:
    agent.terminate()
    try:
        agent.wait(patience)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()


def kill_what_is_left(run: str) -> None:
    """Ranks that outlived their agent. They are known by the run's id in their environment, not by a name."""
    label = f"MUSTER_RUN_ID={run}".encode()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            if label in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:
            continue  # ended meanwhile, or another user's


def flatten_logs(logs: Path) -> None:
    """torchrun's <id>/attempt_0/<local rank>/stdout.log as rank-<rank>.out and rank-<rank>.err."""
    for kind, suffix in (("stdout.log", "out"), ("stderr.log", "err")):
        for file in sorted(logs.glob(f"*/attempt_*/*/{kind}")):
            file.rename(logs / f"rank-{file.parent.name}.{suffix}")
    for folder in [path for path in logs.iterdir() if path.is_dir()] if logs.is_dir() else []:
        shutil.rmtree(folder)


def summarise(folder: Path, nproc: int, status: int, stopped: bool) -> dict[str, Any]:
    """summary.json's content, from what the trainer and the agent left in the folder."""
    result = read_json(folder / "result.json")
    failures = read_json(folder / "failure.json").get("failures", [])
    cause = failures[0] if failures else {}
    rank, reason = cause.get("rank"), cause.get("exception")
    if stopped or status == exits.STOPPED:
        to = "make local" if stopped else "a rank"
        outcome, exit_status, rank, reason = "stopped", exits.INTERRUPTED, None, f"stopped by a signal to {to}"
    elif status == 0 and result:
        outcome, exit_status = "succeeded", exits.SUCCEEDED
    else:
        refused = cause.get("exitcode") == exits.REFUSED and not (folder / "metrics.jsonl").exists()
        outcome, exit_status = "failed", exits.REFUSED if refused else exits.FAILED
        reason = reason or agent_reason(status)
    return {
        "run": folder.name,
        "status": outcome,
        "exit_status": exit_status,
        "nodes": 1,
        "world_size": nproc,
        "master_addr": MASTER_ADDRESS,
        "test_accuracy": result.get("test_accuracy"),
        "images_per_second": result.get("images_per_second"),
        "train_seconds": result.get("train_seconds"),
        "failed_rank": rank,
        "failed_host": "localhost" if outcome == "failed" else None,
        "reason": reason,
    }


def agent_reason(status: int) -> str:
    if status < 0:
        return f"torchrun was killed by {signal.Signals(-status).name}"
    return "the trainer left no result" if status == 0 else f"torchrun ended with status {status}"


def closing(summary: dict[str, Any], folder: Path) -> str:
    """What is printed last."""
    shown = Path(os.path.relpath(folder))
    if summary["status"] == "stopped":
        return f"stopped; what there is of the run is in {shown}"
    if summary["status"] == "failed":
        who = "the run" if summary["failed_rank"] is None else f"rank {summary['failed_rank']}"
        return f"run and logs of each rank: {shown} and {shown / 'logs'}\n{who} failed: {summary['reason']}"
    return (
        f"\n  test accuracy   {summary['test_accuracy']:.2%}\n"
        f"  speed           {summary['images_per_second']:.0f} images/s\n"
        f"  training time   {summary['train_seconds']:.1f} s\n"
        f"  run             {shown}\n"
        f"  curves          {shown / 'curves.png'}"
    )


def read_json(path: Path) -> dict[str, Any]:
    """The document, or {} where there is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def write_json(path: Path, document: dict[str, Any]) -> None:
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    draft.replace(path)


if __name__ == "__main__":
    sys.exit(main())
