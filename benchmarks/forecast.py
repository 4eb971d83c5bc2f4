"""`make bench-forecast`: what a run was forecast to be like, against the run, on a lab of three hosts.

For each speed of the link (the same lab, shaped anew) and each model: one probe of all hosts and the forecast from it,
as `make check` does; then `make train` with NODES=1, 2 and 3 and the same ARGS. The error of a case is |forecast -
measured| / measured, of images/s. The models: one with large gradients (45 MB for 0.4 s of computing a step) and a
light one (1.4 MB). The dataset is a real one, digits.

Steady state is held against steady state: measured is the median time of a step, without the first SKIP steps of the
run, in which DDP sorts its buckets anew and memory for checkpoints is made ready in the background. A run is one epoch,
as a checkpoint is written beside the first steps of the next one. Starting, evaluation and checkpoints are not in the
forecast.

The hosts share the machine's cores, so each has a quota, CPUS cores' worth, in forecast and run alike: three of them
leave room on two cores, and one host's speed does not hang on whether the others compute. Needs an otherwise idle
machine: `others` says how many cores anything outside the lab took on average, and disturbed figures count for nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import FAB, close, environment, fab, lab
from launch import clustermap, config, forecast, probe, run

NAME = "bench-forecast"
HOSTS = 3
CPUS = 0.4
SKIP = 6
LIMIT_SECONDS = 600


@dataclass(frozen=True)
class Work:
    """A model and the trainer's arguments."""

    model: str
    batch_size: int

    @property
    def arguments(self) -> list[str]:
        return [
            *("--model", self.model, "--dataset", "digits", "--image-size", "32", "--batch-size", str(self.batch_size)),
            *("--epochs", "1", "--no-tensorboard"),
        ]


MODELS = (Work("resnet18", 96), Work("shufflenet_v2_x0_5", 96))
LINKS = ("", "1gbit", "200mbit")  # "": unshaped


def foretell(name: str, work: Work) -> dict[int, float]:
    """Number of hosts -> images/s, forecast."""
    cluster = clustermap.read(Path(f"inventory/{name}"))
    with run.machines(cluster, cluster.hosts) as machines:
        arguments = ["--forecast", "--", *config.inline(tuple(work.arguments))]
        document = probe.run(cluster, cluster.hosts, machines, arguments)["forecast"]
    found = [one for one in forecast.outlooks(document) if one.option == "--parallel ddp"]
    print(forecast.recommend(document), flush=True)
    return {one.nodes: one.images_per_second for one in found}


def measure(name: str, work: Work, nodes: int) -> float:
    """Images/s of a run's steady state.

    Raises:
        SystemExit: when the run fails.
    """
    done = subprocess.run(
        [FAB, "train"], env=environment(name, NODES=nodes, ARGS=shlex.join(work.arguments)), check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_SECONDS,
    )  # fmt: skip
    said = re.search(r"^muster \| run (\S+): ", done.stdout, re.MULTILINE)
    if done.returncode != 0 or said is None:
        raise SystemExit(f"benchmark: the run failed:\n{done.stdout}")
    folder = Path("runs") / said.group(1)
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(folder)
    return steady_rate([event for event in events if event["event"] == "step"])


def steady_rate(steps: list[dict[str, Any]]) -> float:
    """Images/s of the median step after the first SKIP, from a run's metrics. Pure."""
    return statistics.median(
        step["images"] / (step["seconds"] - before["seconds"])
        for before, step in zip(steps[SKIP:], steps[SKIP + 1 :], strict=False)
    )


def computing_time() -> tuple[float, float]:
    """(seconds of wall time, seconds of computing on all cores of this machine), from some points in the past."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    user, nice, system, _idle, _wait, hard, soft = fields[:7]
    return time.monotonic(), (user + nice + system + hard + soft) / os.sysconf("SC_CLK_TCK")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--links", default=",".join(link or "unshaped" for link in LINKS), help="some of the links")
    parser.add_argument("--models", default=",".join(work.model for work in MODELS), help="some of the models")
    parser.add_argument("--nodes", type=int, default=HOSTS, help="at most so many hosts")
    parser.add_argument("--there", action="store_true", help=f"use a lab {NAME} that is there, and leave it")
    return parser.parse_args()


def cases(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for link in options.links.split(","):
        fab(name, "lab", HOSTS=HOSTS, CPUS=CPUS, LINK="" if link == "unshaped" else link)
        for work in (work for work in MODELS if work.model in options.models.split(",")):
            told = foretell(name, work)
            for nodes in range(1, options.nodes + 1):
                seen = measure(name, work, nodes)
                case = {"link": link, "model": work.model, "nodes": nodes, "forecast": round(told[nodes], 1),
                        "measured": round(seen, 1), "error": round(abs(told[nodes] - seen) / seen, 3)}  # fmt: skip
                print(json.dumps(case), flush=True)
                found.append(case)
    return found


def main() -> None:
    """Measure all cases and print them."""
    options = parse()
    begun = time.monotonic()
    if options.there:
        found = cases(NAME, options)
    else:
        with lab(NAME, HOSTS) as name:
            fab(name, "deploy")
            found = cases(name, options)
    errors = [case["error"] for case in found]
    close(
        {
            "median_error": round(statistics.median(errors), 3),
            "worst_error": max(errors),
            "cases": found,
            "cpus": CPUS,
            "minutes": round((time.monotonic() - begun) / 60, 1),
            "reference": "images/s of `make train` in its steady state on the same hosts",
        }
    )


if __name__ == "__main__":
    main()
