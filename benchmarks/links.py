"""`make bench-links`: what the options for slow links bring in speed, on a lab of three hosts, and cost in accuracy.

OPTIONS is the table of what is compared: plain DDP; exact options, which change a result by rounding only; approximate
ones, which change what is learned from, of which --communication auto takes those that cost little; and one that has
to be asked for.

Speed: `make train` on 2 and 3 hosts that have a quota of CPUS cores each, for each speed of the links (the same lab
with another rate limit), model and option. Three have a smaller quota: on a machine of two processors two of them share
one, and with 0.4 cores each they were up to 14 % apart, and a ratio changed by a fifth from run to run
(benchmarks/RESULTS.md, 2026-11-27, tenth and eleventh entry). A host with less of a processor computes for longer
between two exchanges, so that the figures of two and of three hosts are no series.
Each host has the same batch in each case, as when a cluster grows: so the ideal is as many times the images/s of one
host as there are hosts. One host's rate is a host's share of what the same hosts make while each trains for itself and
sends no more than the sums of a step's loss, in a run before and another one after the one that is compared with it
(`apart` in the record, of all hosts). The sums are awaited some steps later, so that it is the slowest host's rate. In
both all hosts compute: on one machine they share its caches and its memory's bandwidth, which real hosts do not. (A
host that trains beside a run, of which it is no part, is slowed down by what that run sends:
benchmarks/RESULTS.md, 2026-11-27.) The models' gradients are of 45, 94 and 515 MB, and plain DDP loses a third and more
with two of them at 1 Gbit/s. The optimizer is SGD with momentum. The pictures are noise
(links_project/noise_images.py): an epoch is as long as a case needs.

A rate is of PERIODS whole periods: images of --sync-every's steps with the exchange that belongs to them, divided by
their time, never a median step. Where gradients go in every step, a period is some steps (Work.period). The first
period does not count: memory is new then, DDP sorts its buckets, PowerSGD still sends whole gradients, and what starts
a run shares a host's quota of CPUS with it. The first part of a run, in which exchanges are more frequent
(--sync-warmup), is left out. Checkpoints and evaluations come after the last step.
`forecast` is that of `make check`, of the same training on the same hosts, in a run's steady state; its error:
|forecast - measured| / measured, both in times of one host's images/s, which are measured before and after it, too.

Accuracy: `python -m train --spawn 3` on this machine, where each rank trains as a host of its own would: the digits,
and the pictures of links_project/made_images.py, where a plain training ends between 70 and 95 %. A loss is the mean
accuracy of plain DDP, in percent of held-out images, less the option's, over SEEDS. There is one evaluation, the last:
each would make the hosts exchange. Digits' accuracies are multiples of 0.28 points.

VGG-11 takes 4 GB of memory on each host (3 GB without --sync-every). The whole takes hours. Each result is kept in
build/bench-links.jsonl as soon as it is there, and is not measured again while the arguments are the same: after a
change of the trainer remove the file. What two hosts of one machine make apart changes by some percent from minute to
minute. With `--turns 3` each speed is measured until there are three results, in turns with the other options, and the
middle one counts (by its ratio; `ratios` has all). Needs an otherwise idle machine, whose processors are kept awake
where each host can have one (`benchmarks.common.awake`): `load` is its load average after a case, of which the
benchmark causes up to 4 and one for each processor that is kept awake.
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import FAB, awake, close, environment, fab, lab, run_in, take_data_network
from launch.health import ways

NAME = "bench-links"
PROJECT = Path("benchmarks/links_project")
RESULTS = Path("build/bench-links.jsonl")
HOSTS = 3
CPUS = {2: 0.4, 3: 0.25}  # of each host, by their number
LIMIT_SECONDS = 2400
RECENT_SECONDS = 60  # what the hosts make apart is measured anew after that
LINKS = ("1gbit", "200mbit")
PARTS = ("speed", "accuracy")
SEEDS = (0, 1, 2)
PERIODS = 2  # that count
PLAIN, EXACT, APPROXIMATE, ASKED = "plain", "exact", "approximate", "asked for"

Record = dict[str, Any]


@dataclass(frozen=True)
class Option:
    """A way to use a slow link. kind: PLAIN, EXACT, APPROXIMATE or ASKED, which no figure counts."""

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


#: Each host for itself: the exchange would come after the end.
APART = Option("apart", "--sync-every 100000")
OPTIONS = {
    "plain": Option(PLAIN),
    "bf16": Option(EXACT, "--compress bf16"),
    "powersgd": Option(APPROXIMATE, "--compress powersgd:4"),
    "sync16": Option(APPROXIMATE, "--sync-every 16 --compress int8"),
    "sync32": Option(APPROXIMATE, "--sync-every 32 --compress int8"),
    "stream16": Option(ASKED, "--sync-every 16 --stream 4 --compress int8"),
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
        """Apart it is longer than plain's: how fast a host is changes by a tenth for some seconds at a time."""
        return 2 * self.period if option is APART else option.sync_every or self.period

    def steps(self, option: Option) -> int:
        """Of a run; its first period does not count."""
        return self.period_of(option) * (1 + PERIODS)

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
    Work("resnet18", 32, 64, period=16),
    Work("resnet50", 32, 16, period=16),
    Work("vgg11", 32, 96, period=6, classes=1000),
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
        words = [self.part, *(str(self.about[name]) for name in ("link", "nodes", "cpus") if name in self.about)]
        return " ".join([*words, shlex.join(self.arguments)])


class RunFailed(Exception):
    """A run that gave no figure."""


# -- the cases ---------------------------------------------------------------------------------------------------------


def speed_cases(
    links: Sequence[str], works: Sequence[Work], options: Sequence[str], nodes: int, turns: int = 1
) -> Iterator[Case]:
    """Link by link, as the lab has one at a time. Of each model and number of hosts the forecast comes first, then the
    runs that it is of, as often as there are turns."""
    for link in links:
        for work in works:
            for count in range(2, nodes + 1):
                about = {"link": link, "model": work.model, "nodes": count, "cpus": CPUS[count]}
                yield Case("forecast", about, work.arguments(OPTIONS["plain"], count))
                yield from (speed_case(link, work, option, count) for _ in range(turns) for option in options)


def speed_case(link: str, work: Work, option: str, nodes: int) -> Case:
    about = {"link": link, "model": work.model, "option": option, "nodes": nodes, "cpus": CPUS[nodes]}
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


@dataclass
class Hosts:
    """Of a lab. apart: what they made last while each trained for itself: of what case, when, and the images/s."""

    name: str
    apart: tuple[Any, float, float] = (None, 0.0, 0.0)

    def measure(self, case: Case) -> Record:
        """The images/s of a run, or the forecasts, and what one of the hosts makes. Raises RunFailed."""
        what, at, before = self.apart
        if what != self.same(case) or time.monotonic() - at > RECENT_SECONDS:
            before = self.measure_apart(case)
        is_run = case.part == "speed"
        found = {"rate": round(rate_of_run(self.name, case), 2)} if is_run else forecast_of(self.name, case)
        apart = [before, self.measure_apart(case)]
        return {
            **found,
            "alone": round(statistics.fmean(apart) / case.about["nodes"], 2),
            "apart": [round(each, 2) for each in apart],
            "load": round(os.getloadavg()[0], 1),
        }

    def measure_apart(self, case: Case) -> float:
        """Of all hosts together."""
        work, nodes = work_of(case), case.about["nodes"]
        found = rate_of(self.name, nodes, work.arguments(APART, nodes), work.period_of(APART))
        self.apart = self.same(case), time.monotonic(), found
        return found

    def same(self, case: Case) -> tuple[str, int]:
        """The cases with which it may be compared."""
        return case.about["model"], case.about["nodes"]


def rate_of_run(name: str, case: Case) -> float:
    """Images/s. Raises RunFailed."""
    period = work_of(case).period_of(option_of(case.about["option"]))
    return rate_of(name, case.about["nodes"], case.arguments, period)


def rate_of(name: str, nodes: int, arguments: Sequence[str], period: int) -> float:
    """Images/s of a run after its first period, from its metrics. Raises RunFailed."""
    given = {"ARGS": shlex.join(arguments), "PROJECT": PROJECT, "SKIP_CHECK": 1, "KEEP_RUNS": 1}
    printed = output_of([str(FAB), "train"], environment(name, NODES=nodes, **given))
    run = run_in(printed)
    if run is None:
        raise RunFailed(printed)
    return rate(steps_of(run)[period - 1 :])


def work_of(case: Case) -> Work:
    return next(work for work in WORKS if work.model == case.about["model"])


def steps_of(run: str) -> list[Record]:
    """From the metrics of a run that was gathered; its folder is removed. Raises RunFailed."""
    folder = Path("runs") / run
    if not (folder / "metrics.jsonl").is_file():
        raise RunFailed(f"run {run} has no metrics")
    steps = events_of(folder, "step")
    shutil.rmtree(folder)
    return steps


def rate(window: Sequence[Record]) -> float:
    """Images/s after the first of these steps of one epoch. Pure."""
    return sum(step["images"] for step in window[1:]) / (window[-1]["seconds"] - window[0]["seconds"])


def forecast_of(name: str, case: Case) -> Record:
    """The images/s that `make check` expects: "rates" of each option and of plain DDP with the buckets that it would
    choose. Raises RunFailed."""
    variables = {"NODES": case.about["nodes"], "ARGS": shlex.join(case.arguments), "PROJECT": PROJECT, "JSON": 1}
    printed = output_of([str(FAB), "check"], environment(name, **variables))
    document = json.loads(next(line for line in printed.splitlines() if line.startswith('{"schema"')))
    named = {option.arguments or str(ways.PLAIN): name for name, option in OPTIONS.items()}
    rows = document["forecast"]["rows"]
    rates = {
        named.get(way, way): round(row["steady_images_per_second"], 2)
        for row in rows
        if row["nodes"] == case.about["nodes"]
        and ((way := row["option"].removesuffix(" *")) in named or way.startswith("--bucket-mb"))
    }
    if not rates:
        raise RunFailed(printed)
    return {"rates": rates}


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


def read_results(path: Path) -> dict[str, list[Record]]:
    """Records by the keys of their cases. What was cut off while it was written is left out."""
    found: dict[str, list[Record]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
            found.setdefault(record["case"], []).append(record)
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


def missing(cases: Iterable[Case], results: dict[str, list[Record]]) -> list[Case]:
    """A case that is there more than once needs as many results."""
    known = Counter({key: len(found) for key, found in results.items()})
    left = []
    for case in cases:
        known[case.key] -= 1
        if known[case.key] < 0:
            left.append(case)
    return left


def middle(found: Sequence[Record]) -> Record:
    """Of the results of one case the one with the middle ratio; of what has no ratio the last."""
    if len(found) == 1 or "rate" not in found[0]:
        return found[-1]
    ordered = sorted(found, key=lambda one: one["rate"] / one["alone"])
    return ordered[(len(ordered) - 1) // 2] | {"ratios": [round(one["rate"] / one["alone"], 3) for one in found]}


# -- figures -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speeds:
    """What was measured, in times of one host's images/s."""

    times: dict[tuple[str, str, str, int], float]  # by link, model, option and hosts

    @staticmethod
    def of(records: Iterable[Record]) -> Speeds:
        return Speeds({key_of(one): one["rate"] / one["alone"] for one in records if "rate" in one})

    def best(self, link: str, model: str, nodes: int, kind: str) -> float | None:
        """Of the options of this kind."""
        keys = [(link, model, option, nodes) for option, each in OPTIONS.items() if each.kind == kind]
        return max((self.times[key] for key in keys if key in self.times), default=None)

    def worst(self, link: str, nodes: int, kind: str) -> float | None:
        """The worst model's best option."""
        found = [self.best(link, work.model, nodes, kind) for work in WORKS]
        return min((round(times, 3) for times in found if times), default=None)

    def worst_over_plain(self, link: str, nodes: int, kind: str) -> float | None:
        """The same in times of plain DDP's."""
        pairs = [[self.best(link, work.model, nodes, each) for each in (kind, PLAIN)] for work in WORKS]
        return min((round(times / plain, 3) for times, plain in pairs if times and plain), default=None)


def key_of(record: Record) -> tuple[str, str, str, int]:
    return record["link"], record["model"], record["option"], record["nodes"]


def losses(records: Iterable[Record]) -> dict[tuple[str, str], float]:
    """Points of accuracy that each option loses on each dataset, over the seeds that it and plain DDP both have."""
    known = {(one["dataset"], one["option"], one["seed"]): one["accuracy"] for one in records}
    lost: dict[tuple[str, str], list[float]] = {}
    for (dataset, option, seed), accuracy in known.items():
        if OPTIONS[option].kind != PLAIN and (dataset, "plain", seed) in known:
            lost.setdefault((dataset, option), []).append(known[dataset, "plain", seed] - accuracy)
    return {key: round(statistics.fmean(points), 3) for key, points in lost.items()}


def worst_loss(records: Iterable[Record], *kinds: str) -> float | None:
    """Points of accuracy, of the options of these kinds."""
    lost = losses(one for one in records if "accuracy" in one)
    return max((points for (_, option), points in lost.items() if OPTIONS[option].kind in kinds), default=None)


def forecasts(records: Iterable[Record]) -> dict[tuple[str, str, str, int], float]:
    """In times of one host's images/s; by link, model, option and hosts."""
    return {
        (one["link"], one["model"], option, one["nodes"]): rate / one["alone"]
        for one in records
        if "rates" in one
        for option, rate in one["rates"].items()
    }


def errors(records: Sequence[Record]) -> list[float]:
    """Of the forecasts whose runs were measured."""
    expected, measured = forecasts(records), Speeds.of(records).times
    return [round(abs(expected[key] - measured[key]) / measured[key], 3) for key in expected if key in measured]


def figures(records: Sequence[Record]) -> dict[str, float | None]:
    """The benchmark's figures; None where nothing was measured."""
    speeds = Speeds.of(records)
    return {
        "two_hosts_1gbit_exact": speeds.worst("1gbit", 2, EXACT),
        "two_hosts_1gbit_approximate": speeds.worst("1gbit", 2, APPROXIMATE),
        "two_hosts_200mbit_approximate": speeds.worst("200mbit", 2, APPROXIMATE),
        "three_hosts_1gbit_approximate": speeds.worst("1gbit", 3, APPROXIMATE),
        "exact_over_plain": speeds.worst_over_plain("1gbit", 2, EXACT),
        "accuracy_loss_points": worst_loss(records, EXACT, APPROXIMATE),
        "accuracy_loss_points_asked_for": worst_loss(records, ASKED),
        "worst_forecast_error": max(errors(records), default=None),
    }


def speed_rows(records: Sequence[Record]) -> Iterator[str]:
    """A table: images/s, one host's, their ratio, as measured and as in the forecast."""
    expected = forecasts(records)
    yield f"{'link':8} {'model':9} {'option':9} hosts  images/s  one host  ratio  forecast"
    for one in (one for one in records if "rate" in one):
        forecast = f"{expected[key_of(one)]:.2f}" if key_of(one) in expected else ""
        yield (
            f"{one['link']:8} {one['model']:9} {one['option']:9} {one['nodes']:5}  {one['rate']:8.1f}  "
            f"{one['alone']:8.1f}  {one['rate'] / one['alone']:5.2f}  {forecast:>8}"
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
    parser.add_argument("--nodes", type=int, choices=range(2, HOSTS + 1), default=HOSTS, help="the most hosts")
    parser.add_argument("--turns", type=int, default=1, help="results of each speed, of which the middle one counts")
    parser.add_argument("--there", action="store_true", help=f"use an existing lab {NAME}, and keep it")
    given = parser.parse_args(arguments)
    if given.turns < 1:
        parser.error("--turns: 1 or more")
    for what, known in lists.items():
        setattr(given, what, chosen(getattr(given, what), known, what))
    given.options = [name for name in OPTIONS if name in given.options or name == "plain"]  # all is compared with it
    return given


def cases_of(given: argparse.Namespace) -> list[Case]:
    works = [work for work in WORKS if work.model in given.models]
    speed = speed_cases(given.links, works, given.options, given.nodes, given.turns) if "speed" in given.parts else ()
    accuracy = accuracy_cases(given.options) if "accuracy" in given.parts else ()
    return [*speed, *accuracy]


def run_speed(cases: Sequence[Case], there: bool, path: Path) -> Iterator[Record | None]:
    """The results of these cases, on a lab that is there only for them."""
    with nullcontext() if there else lab(NAME, HOSTS):
        if not there:
            take_data_network(NAME)
            fab(NAME, "deploy")
        hosts, limits = Hosts(NAME), (None, None)
        for case in cases:
            cpus, link = wanted = case.about["cpus"], case.about["link"]
            if limits != wanted:
                limits = wanted
                fab(NAME, "lab", HOSTS=HOSTS, CPUS=cpus, LINK=link)
            with awake(case.about["nodes"]):
                found = measured(case, hosts.measure, path)
            yield found


def main() -> None:
    """Measure all cases that are not known, and print them all."""
    given = parse()
    begun, cases = time.monotonic(), cases_of(given)
    to_do = missing(cases, read_results(RESULTS))
    accuracy = [case for case in to_do if case.part == "accuracy"]
    on_hosts = [case for case in to_do if case.part != "accuracy"]
    found = list(run_speed(on_hosts, given.there, RESULTS)) if on_hosts else []
    found += [measured(case, measure_accuracy, RESULTS) for case in accuracy]
    results = read_results(RESULTS)
    records = [middle(results[key]) for key in dict.fromkeys(case.key for case in cases) if key in results]
    for part, rows in zip(PARTS, (speed_rows, accuracy_rows), strict=True):
        if part in given.parts:
            print("\n".join(rows(records)))
    close(
        {
            **figures(records),
            "cases": records,
            "failed": found.count(None),
            "minutes": round((time.monotonic() - begun) / 60, 1),
            "reference": "images/s of one of the hosts that train apart; of plain DDP on them; accuracy of plain DDP",
        }
    )


if __name__ == "__main__":
    main()
