"""`make bench-forecast`: what a run was forecast to be like, against the run, on a lab of three hosts.

For each speed of the link (the same lab, shaped anew) and each model: one probe of all hosts and the forecast from it,
as `make check` does; then `make train` with NODES=1, 2 and 3 and the same ARGS. The error of a case is |forecast -
measured| / measured, of images/s. The models: one with large gradients (45 MB for 0.4 s of computing a step) and a
light one (1.4 MB). The dataset is a real one, digits.

Steady state is held against steady state: measured is the median time of a step, the first not counted, of the fastest
of a run's epochs after the first. By then every page of memory has been touched and DDP has sorted its buckets; what
slows a shared machine down lasts for seconds, and the probe likewise takes the fastest of its sweeps. Checkpoints are
written between the epochs (--blocking-checkpoints), not beside the steps. Starting, evaluation and checkpoints are not
in the forecast. A host alone sends nothing: NODES=1 is run once for each model and held against each link's forecast.

The hosts share the machine's cores, so each has a quota, CPUS cores' worth, in forecast and run alike: three of them
leave room on two cores, and one host's speed does not hang on whether the others compute. The kernel keeps a quota by
letting a host stand still for some milliseconds at a time, and two hosts that exchange many small messages may wait for
each other's turns: up to 0.05 s a step, in some runs and not in others. Batches are such that a step takes 0.3 s or
more, where that counts for little; hosts of one's own have no quota. Needs an otherwise idle machine: `load` of a case
is the machine's load average after it, of which the hosts themselves make up to 3.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import FAB, close, environment, fab, lab
from launch.health import forecast, probe
from launch.hosts import clustermap
from launch.hosts.machine import machines
from launch.job import trainer_arguments

NAME = "bench-forecast"
HOSTS = 3
CPUS = 0.4
LIMIT_SECONDS = 600


@dataclass(frozen=True)
class Work:
    """A model and the trainer's arguments."""

    model: str
    batch_size: int
    epochs: int

    @property
    def arguments(self) -> list[str]:
        return [
            *("--model", self.model, "--dataset", "digits", "--image-size", "32", "--batch-size", str(self.batch_size)),
            *("--epochs", str(self.epochs), "--blocking-checkpoints", "--no-tensorboard"),
        ]


MODELS = (Work("resnet18", 160, 4), Work("shufflenet_v2_x0_5", 240, 8))
LINKS = ("", "1gbit", "200mbit")  # "": unshaped


def take_data_network(name: str) -> None:
    """The network that LINK shapes, whatever the deploy measures: the lab writes hosts.yml anew, but not this file."""
    folder = Path("inventory") / name
    address = re.search(r"ansible_host: 10\.77\.(\d+)\.", (folder / "hosts.yml").read_text())
    assert address is not None
    (folder / "group_vars").mkdir()
    (folder / "group_vars" / "all.yml").write_text(f"train_network: 10.78.{address[1]}.0/24\n")


def foretell(name: str, work: Work) -> dict[int, float]:
    """Number of hosts -> images/s, forecast."""
    cluster = clustermap.read(Path(f"inventory/{name}"))
    with machines(cluster, cluster.hosts) as opened:
        arguments = ["--forecast", "--", *trainer_arguments.inline(tuple(work.arguments))]
        document = probe.run(cluster, cluster.hosts, opened, arguments)["forecast"]
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
    """Images/s of the median step of the fastest epoch after the first, from a run's metrics. Pure."""
    rates = dict[int, list[float]]()
    for last, step in pairwise(steps):
        if step["epoch"] == last["epoch"] > 1:
            rates.setdefault(step["epoch"], []).append(step["images"] / (step["seconds"] - last["seconds"]))
    return max(statistics.median(epoch) for epoch in rates.values())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--links", default=",".join(link or "unshaped" for link in LINKS), help="some of the links")
    parser.add_argument("--models", default=",".join(work.model for work in MODELS), help="some of the models")
    parser.add_argument("--nodes", type=int, default=HOSTS, help="at most so many hosts")
    parser.add_argument("--there", action="store_true", help=f"use a lab {NAME} that is there, and leave it")
    return parser.parse_args()


def cases(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    alone: dict[str, float] = {}
    for link in options.links.split(","):
        fab(name, "lab", HOSTS=HOSTS, CPUS=CPUS, LINK="" if link == "unshaped" else link)
        for work in (work for work in MODELS if work.model in options.models.split(",")):
            told = foretell(name, work)
            for nodes in range(1, options.nodes + 1):
                if nodes > 1 or work.model not in alone:
                    seen = measure(name, work, nodes)
                if nodes == 1:
                    seen = alone.setdefault(work.model, seen)
                found.append({"link": link, "model": work.model, "nodes": nodes} | compared(told[nodes], seen))
                print(json.dumps(found[-1]), flush=True)
    return found


def compared(told: float, seen: float) -> dict[str, float]:
    error, load = abs(told - seen) / seen, os.getloadavg()[0]
    return {"forecast": round(told, 1), "measured": round(seen, 1), "error": round(error, 3), "load": round(load, 1)}


def main() -> None:
    """Measure all cases and print them."""
    options = parse()
    begun = time.monotonic()
    if options.there:
        found = cases(NAME, options)
    else:
        with lab(NAME, HOSTS) as name:
            take_data_network(name)
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
