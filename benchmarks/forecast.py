"""`make bench-forecast`: the forecast speed of a run against its measured speed, on a lab of three hosts.

For each speed of the links (the same lab with another rate limit) and each model, all hosts are probed once and a
forecast is made from that, as `make check` does. Then `make train` runs with NODES=1, 2 and 3 and the same ARGS. The
error of a case is |forecast - measured| / measured, of images/s. One model has large gradients (45 MB, and 0.4 s of
computing in each step), the other has small ones (1.4 MB). The dataset is a real one, digits. Each option for slow
links has one case: two hosts, 1 Gbit/s, a training of `make bench-links`, whose rates they are.

Both figures are of the steady state, but in the part `whole`: there of short runs from their first step to their last
one, as `make check` forecasts them, beside whose steps checkpoints are written; all else is said of the other parts.
Measured is the median step, without the first one, of the fastest epoch after the first. By then every page of memory
has been used once and DDP has sorted its buckets. It is the fastest epoch because a shared machine is slowed down for
seconds at a time; the probe takes the fastest of its sweeps for the same reason.
Checkpoints are written between the epochs (--blocking-checkpoints), not beside the steps. Starting, evaluation and
checkpoints are not in the forecast. A single host sends nothing, so NODES=1 runs once for each model and is compared
with the forecast for each link.

The hosts share the machine's cores, so each has a quota of CPUS cores in forecast and run alike. Three such hosts leave
some time of two cores unused, so that the speed of one does not depend on whether the others compute. The kernel
enforces a quota by stopping a host for some milliseconds at a time, and two hosts that exchange many small messages may
wait for each other: up to 0.05 s in each step, in some runs and not in others. The batches are so large that a step
takes 0.3 s or more, and this matters little. Real hosts have no quota. Needs an otherwise idle machine, whose
processors are kept awake where each host can have one (`benchmarks.common.awake`): `load` of a case is the machine's
load average after it, of which the benchmark causes up to 3 and one for each processor that is kept awake.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import links
from benchmarks.common import FAB, awake, close, environment, fab, lab, run_in, take_data_network
from launch.health import forecast, run_probe, ways
from launch.hosts import clustermap
from launch.hosts.connection import machines
from launch.job import trainer_arguments

NAME = "bench-forecast"
HOSTS = 3
CPUS = 0.4


@dataclass(frozen=True)
class Work:
    """A model and the trainer's arguments."""

    model: str
    batch_size: int
    epochs: int
    waits: bool = True  # for checkpoints

    @property
    def arguments(self) -> list[str]:
        return [
            *("--model", self.model, "--dataset", "digits", "--image-size", "32", "--batch-size", str(self.batch_size)),
            *("--epochs", str(self.epochs), "--loggers=none", *(["--blocking-checkpoints"] if self.waits else [])),
        ]


MODELS = (Work("resnet18", 160, 4), Work("shufflenet_v2_x0_5", 240, 8))
LINKS = ("", "1gbit", "200mbit")  # "": unshaped
SHORT = tuple(Work("resnet18", 120, epochs, waits=False) for epochs in (2, 10))  # of 12 steps each
WHOLE = ((1, "plain"), (2, "plain"), (2, "bf16"), (2, "sync16"))  # hosts, option


def outlooks(name: str, work: Work) -> list[forecast.Outlook]:
    """What is forecast for all hosts of the lab, whose advice is printed."""
    cluster = clustermap.read(Path(f"inventory/{name}"))
    with machines(cluster, cluster.hosts) as opened:
        arguments = ["--forecast", "--", *trainer_arguments.inline(tuple(work.arguments))]
        document = run_probe.run(cluster, cluster.hosts, opened, arguments)["forecast"]
    print(forecast.recommend(document), flush=True)
    return forecast.outlooks(document)


def events_of_run(name: str, arguments: list[str], nodes: int) -> list[dict[str, Any]]:
    """All events of the metrics of a run, whose folder is removed. Raises links.RunFailed."""
    printed = links.output_of([str(FAB), "train"], environment(name, NODES=nodes, ARGS=shlex.join(arguments)))
    run = run_in(printed)
    if run is None:
        raise links.RunFailed(printed)
    folder = Path("runs") / run
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(folder)
    return events


def whole_rate(events: list[dict[str, Any]]) -> float:
    """Images/s of all steps, from a run's metrics. Pure."""
    images = sum(event["images"] for event in events if event["event"] == "step")
    return images / sum(event["seconds"] for event in events if event["event"] == "epoch")


def steady_rate(events: list[dict[str, Any]]) -> float:
    """Images/s of the median step of the fastest epoch after the first, from a run's metrics. Pure."""
    rates = dict[int, list[float]]()
    for last, step in pairwise(event for event in events if event["event"] == "step"):
        if step["epoch"] == last["epoch"] > 1:
            rates.setdefault(step["epoch"], []).append(step["images"] / (step["seconds"] - last["seconds"]))
    return max(statistics.median(epoch) for epoch in rates.values())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--links", default=",".join(link or "unshaped" for link in LINKS), help="which links, separated by commas"
    )
    parser.add_argument(
        "--models", default=",".join(work.model for work in MODELS), help="which models, separated by commas"
    )
    parser.add_argument("--parts", default="models,options,whole", help="which parts, separated by commas")
    parser.add_argument("--nodes", type=int, default=HOSTS, help="the largest number of hosts")
    parser.add_argument("--there", action="store_true", help=f"use an existing lab {NAME}, and keep it")
    return parser.parse_args()


def cases(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    alone: dict[str, float] = {}
    for link in options.links.split(","):
        fab(name, "lab", HOSTS=HOSTS, CPUS=CPUS, LINK="" if link == "unshaped" else link)
        for work in (work for work in MODELS if work.model in options.models.split(",")):
            plain = [one for one in outlooks(name, work) if one.option == str(ways.PLAIN)]
            rates = {one.nodes: one.steady_images_per_second for one in plain}
            for nodes in range(1, options.nodes + 1):
                if nodes > 1 or work.model not in alone:
                    measured = steady_rate(events_of_run(name, work.arguments, nodes))
                if nodes == 1:
                    measured = alone.setdefault(work.model, measured)
                found.append({"link": link, "model": work.model, "nodes": nodes} | compared(rates[nodes], measured))
                print(json.dumps(found[-1]), flush=True)
    return found


def option_cases(name: str) -> list[dict[str, Any]]:
    """One for each option for slow links, and for the buckets that the forecast would choose, if it would."""
    fab(name, "lab", HOSTS=HOSTS, CPUS=CPUS, LINK="1gbit")
    about, work = {"link": "1gbit", "model": links.WORKS[0].model, "nodes": 2}, links.WORKS[0]
    expected, found = dict[str, float](), []
    asked_for = [option for option, each in links.OPTIONS.items() if each.kind == links.ASKED]
    for option in (*asked_for, "plain"):  # each forecast has all that need not be asked for
        case = links.Case("forecast", about, work.arguments(links.OPTIONS[option], 2))
        expected |= links.forecast_of(name, case)["rates"]
    for option in (option for option in expected if links.option_of(option).kind != links.PLAIN):
        measured = links.rate_of_run(name, links.speed_case("1gbit", work, option, 2))
        found.append(about | {"option": option} | compared(expected[option], measured))
        print(json.dumps(found[-1]), flush=True)
    return found


def whole_cases(name: str) -> list[dict[str, Any]]:
    """Short runs from begin to end, as the forecast has them."""
    fab(name, "lab", HOSTS=HOSTS, CPUS=CPUS, LINK="1gbit")
    found = []
    for work in SHORT:
        expected = {(one.nodes, one.way.links): one.images_per_second for one in outlooks(name, work)}
        for nodes, option in WHOLE:
            given = links.OPTIONS[option].arguments
            events = events_of_run(name, [*work.arguments, *given.split()], nodes)
            about = {"link": "1gbit", "model": work.model, "nodes": nodes, "option": option, "epochs": work.epochs}
            found.append(about | compared(expected[nodes, given], whole_rate(events)))
            print(json.dumps(found[-1]), flush=True)
    return found


def compared(expected: float, measured: float) -> dict[str, float]:
    error, load = abs(expected - measured) / measured, os.getloadavg()[0]
    return {
        "forecast": round(expected, 1),
        "measured": round(measured, 1),
        "error": round(error, 3),
        "load": round(load, 1),
    }


def all_cases(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    parts = {
        "models": (lambda: cases(name, options), HOSTS),
        "options": (lambda: option_cases(name), 2),
        "whole": (lambda: whole_cases(name), 2),
    }
    found = []
    for part in options.parts.split(","):
        measure_part, hosts = parts[part]
        with awake(hosts):
            found += measure_part()
    return found


def main() -> None:
    """Measure all cases and print them."""
    options = parse()
    begun = time.monotonic()
    with nullcontext() if options.there else lab(NAME, HOSTS):
        if not options.there:
            take_data_network(NAME)
            fab(NAME, "deploy")
        found = all_cases(NAME, options)
    errors = [case["error"] for case in found]
    close(
        {
            "median_error": round(statistics.median(errors), 3),
            "worst_error": max(errors),
            "cases": found,
            "cpus": CPUS,
            "minutes": round((time.monotonic() - begun) / 60, 1),
            "reference": "images/s of `make train` on the same hosts",
        }
    )


if __name__ == "__main__":
    main()
