"""The ways in which hosts can exchange what they learned, that a forecast compares; as arguments of the trainer.

Exact ones change a result by rounding; approximate ones are another training, which may end less accurate. Nothing
chooses those for a user who did not ask for it (--allow-approximate).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

BUCKET_MB = 25  # of gradients that DDP sends together, where nothing else is asked for; the first MiB goes alone then


@dataclass(frozen=True)
class Way:
    """Settings of the trainer (train/settings.py)."""

    parallel: str = "ddp"
    shares: str = ""
    compress: str = "none"
    sync_every: int = 0
    stream: int = 0
    bucket_mb: int = BUCKET_MB

    @property
    def links(self) -> str:
        """The arguments of the options for slow links; "" for plain data parallelism."""
        given = [f"--sync-every {self.sync_every}"] if self.sync_every else []
        given += [f"--stream {self.stream}"] if self.stream else []
        given += [f"--compress {self.compress}"] if self.compress != "none" else []
        given += [f"--bucket-mb {self.bucket_mb}"] if self.bucket_mb != BUCKET_MB else []
        return " ".join(given)

    def __str__(self) -> str:
        given = ["" if self.links else f"--parallel {self.parallel}", self.links]
        return " ".join(filter(None, [*given, f"--shares {self.shares}" if self.shares else ""]))

    @property
    def is_approximate(self) -> bool:
        return self.sync_every > 0 or self.compress.startswith("powersgd")

    @property
    def is_verified(self) -> bool:
        """`make bench-forecast` compares forecasts of its steady state with real runs."""
        usual = replace(self, bucket_mb=BUCKET_MB)
        return usual in (PLAIN, Way("none"), *FOR_SLOW_LINKS, STREAMED)

    @property
    def sends_buckets(self) -> bool:
        """Whether what hosts send in a step is as many bytes with buckets of any size."""
        return self.parallel == "ddp" and not self.sync_every and not self.compress.startswith("powersgd")


PLAIN = Way()
#: What is compared where the network holds up training.
FOR_SLOW_LINKS = (
    Way(compress="bf16"),
    Way(compress="powersgd:4"),
    Way(sync_every=16, compress="int8"),
    Way(sync_every=32, compress="int8"),
)
#: `make bench-forecast` compares it with real runs, too. What it gains beside the same without --stream is not measured
#: yet, so that it has to be asked for.
STREAMED = Way(sync_every=16, stream=4, compress="int8")


#: Points of accuracy that the approximate ones lost on made pictures, by --optimizer (benchmarks/RESULTS.md), in a
#: training of LOST_IN steps: with sgd the mean of three seeds, with adamw one seed.
LOST: Mapping[str, Mapping[str, float]] = {
    "--compress powersgd:4": {"sgd": 0.4, "adamw": 3.3},
    "--sync-every 16 --compress int8": {"sgd": 0.1, "adamw": 9.0},
    "--sync-every 32 --compress int8": {"sgd": 0.4},
}
LOST_IN: Mapping[str, int] = {"sgd": 1800, "adamw": 600}  # steps; a shorter training loses more
MOST_LOST = 0.5  # points; what lost more, or is not known, has to be asked for by its own name


@dataclass(frozen=True)
class Training:
    """What the loss of an approximate way depends on."""

    optimizer: str
    steps: int  # of the whole run

    @property
    def is_short(self) -> bool:
        """Shorter than the one in which losses were measured."""
        return self.steps < LOST_IN.get(self.optimizer, 0)


def lost(way: Way, optimizer: str) -> float | None:
    """Points of accuracy; None: not measured with this optimizer."""
    usual = replace(way, bucket_mb=BUCKET_MB)
    return LOST.get(usual.links, {}).get(optimizer) if way.is_approximate else 0.0


def is_advised(way: Way, training: Training) -> bool:
    points = lost(way, training.optimizer)
    return points is not None and points <= MOST_LOST and not (way.is_approximate and training.is_short)


def cost(way: Way, training: Training) -> str:
    """What it lost with this optimizer, where that was measured."""
    points, steps = lost(way, training.optimizer), LOST_IN[training.optimizer]
    return f"{points} points of accuracy with {training.optimizer} in the {steps} steps of our table"


def training_of(document: Mapping[str, Any]) -> Training:
    """document: the probe's."""
    return Training(document["settings"]["optimizer"], document["run"]["steps"])


def asked_for(settings: Mapping[str, Any]) -> Way:
    """settings: of the probe's document."""
    names = ("parallel", "shares", "compress", "sync_every", "stream", "bucket_mb")
    return Way(**{name: settings[name] for name in names if name in settings})


def without_links(way: Way) -> Way:
    """The same without options for slow links."""
    return replace(way, compress="none", sync_every=0, stream=0)


def measured(way: Way, entry: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a round of the probe's document has of this way's exchanges; None: it was not measured."""
    kinds = entry.get("exchange", {}) if way.sync_every else entry.get("compress", {}) | {"none": entry}
    found: Mapping[str, Any] | None = kinds.get(way.compress)
    return found


def compared(document: Mapping[str, Any], share: Mapping[str, Any]) -> list[Way]:
    """The ways that make sense for this number of hosts, the one that was asked for first.

    `--shares auto` only where the shares would differ; the options for slow links with the shares that were asked for,
    and DDP with the size of buckets that was measured.
    """
    asked = asked_for(document["settings"])
    if share["world_size"] == 1:
        return [asked]
    ways = [asked, without_links(asked)]
    if asked.shares in ("", "auto"):  # else `equal` holds the shares that were asked for
        ways.append(replace(PLAIN, bucket_mb=asked.bucket_mb))
    if share["auto"] != share["equal"]:
        ways.append(Way(shares="auto", bucket_mb=asked.bucket_mb))
    if asked.parallel == "ddp" and share["nodes"] > 1:
        rounds = document["communication"]
        known = [way for way in FOR_SLOW_LINKS if any(measured(way, entry) for entry in rounds)]
        ways += [replace(way, shares=asked.shares, bucket_mb=asked.bucket_mb) for way in known]
    return list(dict.fromkeys([*ways, Way("fsdp")]))
