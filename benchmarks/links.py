"""`make bench-links`: what the options for slow links bring in speed, on a lab of three hosts, and cost in accuracy.

OPTIONS is the table of what is compared: plain DDP; exact options, which change a result by rounding only; approximate
ones, which change what is learned from.

Speed: `make train` on 1, 2 and 3 hosts that have a quota of CPUS cores each, for each speed of the links (the same lab
with another rate limit), model and option. Each host has the same batch in each case, as when a cluster grows: so the
ideal is as many times the images/s of one host as there are hosts. A single host sends nothing; it runs again for each
speed of the links, just before the runs that are compared with it, as a machine's speed differs from hour to hour. The
models' gradients are of 45, 94 and 531 MB, and the batch of VGG-11 is so small that plain DDP loses a third and more at
1 Gbit/s. The optimizer is SGD without momentum, the one with the least memory and the least time between exchanges. The
pictures are noise (links_project/noise_images.py): an epoch is as long as a case needs.

A rate is of whole periods: images of --sync-every's steps with the exchange that belongs to them, divided by their
time, never a median step. Where gradients go in every step, a period is some steps (Work.period). The first period does
not count: memory is new then, DDP sorts its buckets, PowerSGD still sends whole gradients, and what starts a run
shares a host's quota of CPUS with it. The faster one of the next two is taken, since a shared machine is slowed down
for seconds at a time; a period of at least LONG steps is measured once. Exchanges in every step at first
(--sync-warmup) are left out. Checkpoints and evaluations come after the last step.
`forecast` is that of `make check`, of the same training on the same hosts; its error: |forecast - measured| / measured.

Accuracy: `python -m train --spawn 3` on this machine, where each rank trains as a host of its own would: the digits,
and the pictures of links_project/made_images.py, where a plain training ends between 70 and 95 %. A loss is the mean
accuracy of plain DDP, in percent of held-out images, less the option's, over SEEDS. There is one evaluation, the last:
each would make the hosts exchange. Digits' accuracies are multiples of 0.28 points.

VGG-11 takes 4 GB of memory on each host (3 GB without --sync-every), three hosts 12 GB. The whole takes hours. Each
result is kept in build/bench-links.jsonl as soon as it is there, and is not measured again while the arguments are the
same. After a change of the trainer remove the file, or give --again. Needs an otherwise idle machine: `load` is the
machine's load average after a case, of which the hosts themselves cause up to 3.
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
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import FAB, close, environment, fab, lab, take_data_network
from launch.health import ways

NAME = "bench-links"
PROJECT = Path("benchmarks/links_project")
RESULTS = Path("build/bench-links.jsonl")
HOSTS = 3
CPUS = 0.4
LIMIT_SECONDS = 1200
LINKS = ("1gbit", "200mbit")
PARTS = ("speed", "accuracy")
SEEDS = (0, 1, 2)
LONG = 32  # steps of a period that is measured once; shorter ones are measured twice
PLAIN, EXACT, APPROXIMATE = "plain", "exact", "approximate"

Record = dict[str, Any]


@dataclass(frozen=True)
class Option:
    """A way to use a slow link. kind: PLAIN, EXACT or APPROXIMATE."""

    kind: str
    arguments: str = ""

    def number(self, flag: str) -> int:
        """What is given with this flag; 0: nothing."""
        given = re.search(rf"{flag} (\d+)", self.arguments)
        return int(given[1]) if given else 0

    @property
    def sync_every(self) -> int:
        """Steps between exchanges; 0: gradients go in every step."""
        return self.number("--sync-every")


OPTIONS = {
    "plain": Option(PLAIN),
    "bf16": Option(EXACT, "--compress bf16"),
    "powersgd": Option(APPROXIMATE, "--compress powersgd:4"),
    "sync16": Option(APPROXIMATE, "--sync-every 16 --compress int8"),
    "stream32": Option(APPROXIMATE, "--sync-every 32 --stream 4 --compress int8"),
}


@dataclass(frozen=True)
class Work:
    """A model whose speed is measured. batch_size: of each host. period: steps, where an option has none."""

    model: str
    image_size: int
    batch_size: int
    period: int
    classes: int = 10

    def period_of(self, option: Option) -> int:
        return option.sync_every or self.period

    def steps(self, option: Option) -> int:
        """Of a run; its first period does not count."""
        period = self.period_of(option)
        return period * (2 if period >= LONG else 3)

    def arguments(self, option: Option, nodes: int) -> list[str]:
        batch_size = self.batch_size * nodes
        images = self.steps(option) * batch_size
        return [
            *("--model", self.model, "--dataset", f"noise_images:of_{images}_{self.image_size}", "--workers", "0"),
            *("--classes", str(self.classes), "--batch-size", str(batch_size), "--epochs", "1"),
            *("--optimizer", "sgd", "--lr", "0.001"),
            *("--blocking-checkpoints", "--loggers=none", *shlex.split(option.arguments)),
            *(("--sync-warmup", "0") if option.sync_every else ()),
        ]


WORKS = (
    Work("resnet18", 32, 64, period=24),
    Work("resnet50", 32, 32, period=16),
    Work("vgg11", 32, 32, period=6, classes=1000),
)


@dataclass(frozen=True)
class Learning:
    """A training whose accuracy is measured."""

    dataset: str
    words: str

    def arguments(self, option: Option, seed: int) -> list[str]:
        words = [*shlex.split(self.words), *shlex.split(option.arguments)]
        return [*words, "--seed", str(seed), "--eval-every", "1000", "--resume", "none", "--loggers", "none"]


LEARNINGS = (
    Learning("digits", "--model resnet18 --dataset digits --epochs 12 --batch-size 60"),
    Learning(
        "made",
        f"--project {PROJECT} --model made_images:net --dataset made_images:dataset --workers 0 --epochs 36 "
        "--batch-size 60 --optimizer sgd --momentum 0.9 --lr 0.1 --weight-decay 0.0005",
    ),
)


@dataclass(frozen=True)
class Case:
    """One run. about: what of it the record holds, beside the figure."""

    part: str
    about: Record
    arguments: list[str]

    @property
    def key(self) -> str:
        """What the figure depends on: it is another case when the table has other arguments."""
        words = [self.part, *(str(self.about[name]) for name in ("link", "nodes") if name in self.about)]
        return " ".join([*words, shlex.join(self.arguments)])


class RunFailed(Exception):
    """A run that gave no figure."""


# -- the cases ---------------------------------------------------------------------------------------------------------


def speed_cases(links: Sequence[str], works: Sequence[Work], options: Sequence[str], nodes: int) -> Iterator[Case]:
    """Link by link, as the lab has one at a time. Of each model one host alone comes first, then for each number of
    hosts the forecast, then the runs that it is of."""
    for link in links:
        for work in works:
            yield speed_case(link, work, "plain", 1)
            for count in range(2, nodes + 1):
                about = {"link": link, "model": work.model, "nodes": count}
                yield Case("forecast", about, work.arguments(OPTIONS["plain"], count))
                yield from (speed_case(link, work, option, count) for option in options)


def speed_case(link: str, work: Work, option: str, nodes: int) -> Case:
    about = {"link": link, "model": work.model, "option": option, "nodes": nodes}
    return Case("speed", about, work.arguments(option_of(option), nodes))


def option_of(name: str) -> Option:
    """Of the table; or --bucket-mb, which a forecast chooses and which is named by its arguments."""
    return OPTIONS.get(name) or Option(EXACT, name)


def accuracy_cases(options: Sequence[str]) -> Iterator[Case]:
    for learning in LEARNINGS:
        for seed in SEEDS:
            for option in options:
                about = {"dataset": learning.dataset, "option": option, "seed": seed}
                yield Case("accuracy", about, learning.arguments(OPTIONS[option], seed))


# -- one run -----------------------------------------------------------------------------------------------------------


def measure_speed(name: str, case: Case) -> Record:
    """Raises RunFailed."""
    nodes, option = case.about["nodes"], option_of(case.about["option"])
    work = next(work for work in WORKS if work.model == case.about["model"])
    variables = {"NODES": nodes, "ARGS": shlex.join(case.arguments), "PROJECT": PROJECT, "SKIP_CHECK": 1}
    printed = output_of([str(FAB), "train"], environment(name, KEEP_RUNS=1, **variables))
    said = re.search(r"^muster \| run (\S+): ", printed, re.MULTILINE)
    if said is None:
        raise RunFailed(printed)
    folder = Path("runs") / said[1]
    period = work.period_of(option)
    rate = steady_rate(events_of(folder, "step"), period, period)
    shutil.rmtree(folder)
    return {"rate": round(rate, 2), "load": round(os.getloadavg()[0], 1)}


def measure_forecast(name: str, case: Case) -> Record:
    """The images/s that `make check` expects, of each option and of plain DDP with the buckets that it would choose.
    Raises RunFailed."""
    variables = {"NODES": case.about["nodes"], "ARGS": shlex.join(case.arguments), "PROJECT": PROJECT, "JSON": 1}
    printed = output_of([str(FAB), "check"], environment(name, **variables))
    document = json.loads(next(line for line in printed.splitlines() if line.startswith('{"schema"')))
    named = {option.arguments or str(ways.PLAIN): name for name, option in OPTIONS.items()}
    rates = {
        named.get(way, way): round(row["images_per_second"], 2)
        for row in document["forecast"]["rows"]
        if row["nodes"] == case.about["nodes"]
        and ((way := row["option"].removesuffix(" *")) in named or way.startswith("--bucket-mb"))
    }
    if not rates:
        raise RunFailed(printed)
    return {"rates": rates, "load": round(os.getloadavg()[0], 1)}


def steady_rate(steps: Sequence[Record], first: int, period: int) -> float:
    """Images/s of the fastest whole period after the first steps, from the metrics of a run of one epoch. Pure."""
    ends = range(first - 1, len(steps), period)
    return max(
        sum(step["images"] for step in steps[before + 1 : end + 1]) / (steps[end]["seconds"] - steps[before]["seconds"])
        for before, end in pairwise(ends)
    )


def measure_accuracy(case: Case) -> Record:
    """Raises RunFailed."""
    with tempfile.TemporaryDirectory(prefix="bench-links-") as folder:
        words = ["--spawn", str(HOSTS), "--run-dir", folder, *case.arguments]
        output_of([sys.executable, "-m", "train", *words], dict(os.environ))
        accuracy = events_of(Path(folder), "epoch")[-1]["test_accuracy"]
    return {"accuracy": round(100 * accuracy, 3), "load": round(os.getloadavg()[0], 1)}


def events_of(folder: Path, kind: str) -> list[Record]:
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == kind]


def output_of(command: list[str], variables: dict[str, str]) -> str:
    """What a command printed. Raises RunFailed."""
    try:
        done = subprocess.run(
            command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            timeout=LIMIT_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"it took more than {LIMIT_SECONDS} s") from error
    if done.returncode != 0:
        raise RunFailed(done.stdout)
    return done.stdout


# -- results, which outlive the benchmark ------------------------------------------------------------------------------


def read_results(path: Path) -> dict[str, Record]:
    """Records by the keys of their cases, the newest of each. What was cut off while it was written is left out."""
    found: dict[str, Record] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
            found[record["case"]] = record
        except (ValueError, KeyError, TypeError):
            print(f"benchmark: {path} has a line that is no result: {line[:60]}", flush=True)
    return found


def measured(case: Case, measure: Callable[[Case], Record], path: Path) -> Record | None:
    """A new result, which is kept in the file; None, and why, where the run failed."""
    try:
        found = measure(case)
    except RunFailed as error:
        print(f"benchmark: no result of {case.key}:\n{error}", flush=True)
        return None
    record = {"case": case.key, **case.about, **found}
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(f"{json.dumps(record)}\n")
    print(json.dumps(case.about | found), flush=True)
    return record


def missing(cases: Iterable[Case], results: dict[str, Record]) -> list[Case]:
    return [case for case in cases if case.key not in results]


# -- figures -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speeds:
    """Images/s of the cases that were measured."""

    rates: dict[tuple[str, str, str, int], float]  # by link, model, option and hosts

    @staticmethod
    def of(records: Iterable[Record]) -> Speeds:
        found = {(one["link"], one["model"], one["option"], one["nodes"]): one["rate"] for one in records}
        return Speeds(found)

    def best(self, link: str, model: str, nodes: int, kind: str) -> float | None:
        """Of the options of this kind."""
        keys = [(link, model, option, nodes) for option, each in OPTIONS.items() if each.kind == kind]
        return max((self.rates[key] for key in keys if key in self.rates), default=None)

    def over_one_host(self, link: str, nodes: int, kind: str) -> float | None:
        """The worst model's best option, in times of one host's images/s."""
        return self.worst(link, nodes, kind, lambda model: self.rates.get((link, model, "plain", 1)))

    def over_plain(self, link: str, nodes: int, kind: str) -> float | None:
        """The same in times of plain DDP's."""
        return self.worst(link, nodes, kind, lambda model: self.rates.get((link, model, "plain", nodes)))

    def worst(self, link: str, nodes: int, kind: str, reference: Callable[[str], float | None]) -> float | None:
        pairs = [(self.best(link, work.model, nodes, kind), reference(work.model)) for work in WORKS]
        ratios = [rate / other for rate, other in pairs if rate and other]
        return round(min(ratios), 3) if ratios else None


def losses(records: Iterable[Record]) -> dict[tuple[str, str], float]:
    """Points of accuracy that each option loses on each dataset, over the seeds that it and plain DDP both have."""
    known = {(one["dataset"], one["option"], one["seed"]): one["accuracy"] for one in records}
    lost: dict[tuple[str, str], list[float]] = {}
    for (dataset, option, seed), accuracy in known.items():
        if OPTIONS[option].kind != PLAIN and (dataset, "plain", seed) in known:
            lost.setdefault((dataset, option), []).append(known[dataset, "plain", seed] - accuracy)
    return {key: round(statistics.fmean(points), 3) for key, points in lost.items()}


def forecasts(records: Iterable[Record]) -> dict[tuple[str, str, str, int], float]:
    """Images/s by link, model, option and hosts."""
    return {
        (one["link"], one["model"], option, one["nodes"]): rate
        for one in records
        if "rates" in one
        for option, rate in one["rates"].items()
    }


def errors(records: Sequence[Record]) -> list[float]:
    """Of the forecasts whose runs were measured."""
    expected, measured = forecasts(records), Speeds.of(one for one in records if "rate" in one).rates
    return [round(abs(expected[key] - measured[key]) / measured[key], 3) for key in expected if key in measured]


def figures(records: Sequence[Record]) -> dict[str, float | None]:
    """The benchmark's figures; None where nothing was measured."""
    speeds = Speeds.of(one for one in records if "rate" in one)
    return {
        "two_hosts_1gbit_exact": speeds.over_one_host("1gbit", 2, EXACT),
        "two_hosts_1gbit_approximate": speeds.over_one_host("1gbit", 2, APPROXIMATE),
        "two_hosts_200mbit_approximate": speeds.over_one_host("200mbit", 2, APPROXIMATE),
        "three_hosts_1gbit_approximate": speeds.over_one_host("1gbit", 3, APPROXIMATE),
        "exact_over_plain": speeds.over_plain("1gbit", 2, EXACT),
        "accuracy_loss_points": max(losses(one for one in records if "accuracy" in one).values(), default=None),
        "worst_forecast_error": max(errors(records), default=None),
    }


def speed_rows(records: Sequence[Record]) -> Iterator[str]:
    """A table: images/s, in times of one host's, forecast."""
    found = [one for one in records if "rate" in one]
    alone = {(one["link"], one["model"]): one["rate"] for one in found if one["nodes"] == 1}
    expected = forecasts(records)
    yield f"{'link':8} {'model':9} {'option':9} hosts  images/s  of one  forecast"
    for one in found:
        place = one["link"], one["model"]
        times = f"{one['rate'] / alone[place]:.2f}" if place in alone else ""
        key = (one["link"], one["model"], one["option"], one["nodes"])
        forecast = f"{expected[key]:.1f}" if key in expected else ""
        yield (
            f"{one['link']:8} {one['model']:9} {one['option']:9} {one['nodes']:5}  {one['rate']:8.1f}  "
            f"{times:>6}  {forecast:>8}"
        ).rstrip()


def accuracy_rows(records: Sequence[Record]) -> Iterator[str]:
    """A table: mean accuracy in percent, and what is lost of plain DDP's, in points."""
    found = [one for one in records if "accuracy" in one]
    lost = losses(found)
    yield f"{'dataset':8} {'option':9} seeds  accuracy  points lost"
    for dataset, option in dict.fromkeys((one["dataset"], one["option"]) for one in found):
        points = [one["accuracy"] for one in found if (one["dataset"], one["option"]) == (dataset, option)]
        less = f"{lost[dataset, option]:.2f}" if (dataset, option) in lost else ""
        yield f"{dataset:8} {option:9} {len(points):5}  {statistics.fmean(points):8.2f}  {less:>11}".rstrip()


# -- the command -------------------------------------------------------------------------------------------------------


def chosen(text: str, known: Iterable[str], what: str) -> list[str]:
    """The names in a list with commas, each once, in the order of `known`. Raises SystemExit for another name."""
    names, known = [name.strip() for name in text.split(",") if name.strip()], list(known)
    for name in names:
        if name not in known:
            raise SystemExit(f"--{what} {name}: it is none of {', '.join(known)}")
    if not names:
        raise SystemExit(f"--{what}: give some of {', '.join(known)}")
    return [name for name in known if name in names]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Raises SystemExit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    lists = {"links": LINKS, "models": [work.model for work in WORKS], "options": list(OPTIONS), "parts": PARTS}
    for what, known in lists.items():
        parser.add_argument(f"--{what}", default=",".join(known), help=f"which {what}, separated by commas")
    parser.add_argument("--nodes", type=int, choices=range(1, HOSTS + 1), default=HOSTS, help="the most hosts")
    parser.add_argument("--again", action="store_true", help=f"measure anew what is in {RESULTS} already")
    parser.add_argument("--there", action="store_true", help=f"use an existing lab {NAME}, and keep it")
    given = parser.parse_args(arguments)
    for what, known in lists.items():
        setattr(given, what, chosen(getattr(given, what), known, what))
    given.options = [name for name in OPTIONS if name in given.options or name == "plain"]  # all is compared with it
    return given


def cases_of(given: argparse.Namespace) -> list[Case]:
    works = [work for work in WORKS if work.model in given.models]
    speed = speed_cases(given.links, works, given.options, given.nodes) if "speed" in given.parts else ()
    accuracy = accuracy_cases(given.options) if "accuracy" in given.parts else ()
    return [*speed, *accuracy]


def run_speed(cases: Sequence[Case], there: bool, path: Path) -> Iterator[Record | None]:
    """The results of these cases, on a lab that is there only for them."""
    with nullcontext(NAME) if there else lab(NAME, HOSTS) as name:
        if not there:
            take_data_network(name)
            fab(name, "deploy")
        link = None
        for case in cases:
            if case.about["link"] != link:
                link = case.about["link"]
                fab(name, "lab", HOSTS=HOSTS, CPUS=CPUS, LINK=link)
            measure = measure_speed if case.part == "speed" else measure_forecast
            yield measured(case, partial(measure, name), path)


def main() -> None:
    """Measure all cases that are not known, and print them all."""
    given = parse()
    begun, cases, results = time.monotonic(), cases_of(given), read_results(RESULTS)
    to_do = missing(cases, {} if given.again else results)
    accuracy = [case for case in to_do if case.part == "accuracy"]
    on_hosts = [case for case in to_do if case.part != "accuracy"]
    found = list(run_speed(on_hosts, given.there, RESULTS)) if on_hosts else []
    found += [measured(case, measure_accuracy, RESULTS) for case in accuracy]
    results = read_results(RESULTS)
    records = [results[case.key] for case in cases if case.key in results]
    for part, rows in zip(PARTS, (speed_rows, accuracy_rows), strict=True):
        if part in given.parts:
            print("\n".join(rows(records)))
    close(
        {
            **figures(records),
            "cases": records,
            "failed": found.count(None),
            "cpus": CPUS,
            "minutes": round((time.monotonic() - begun) / 60, 1),
            "reference": "images/s of one host, and of plain DDP on the same hosts; accuracy of plain DDP",
        }
    )


if __name__ == "__main__":
    main()
