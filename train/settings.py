"""The trainer's settings: what they are, how flags and a YAML file give them, and what is wrong with them.

One field of `Settings` is one setting: its flag, its help and its key in a --config file come from here. Not
here: anything that needs torch. What only a built model or a loaded dataset shows is refused there.
"""

import argparse
import dataclasses
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from train.names import DATASETS, LOSSES, MODELS, OWN, is_own

EXIT_REFUSED = 2
EXIT_STOPPED = 75  # sysexits.h's EX_TEMPFAIL: asked to stop, checkpoint written, continue later
HANDWRITING = ("digits", "mnist")  # they have changes of their own: small turns, shifts and zooms
POLICIES = ("trivial", "rand")
PARALLEL_NAMES = ("ddp", "dp", "fsdp", "horovod", "none")
COMPRESSIONS = ("none", "bf16", "fp16", "powersgd", "int8", "int4")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
LOGGER_NAMES = ("tensorboard", "mlflow", "wandb")
CONFIGS = Path(__file__).resolve().parent / "configs"

GROUPS = {
    "what to train": "the model and what it learns from",
    "how to train": "what decides the result",
    "speed": "what changes the speed, and results by rounding at most",
    "ranks": "how the work is spread over processes",
    "slow links": "what hosts send each other, for networks that hold up training: docs/slow-links.md",
    "checkpoints": "what is kept, and from where training continues",
    "the run": "",
}


class SettingsError(Exception):
    """Settings that cannot be trained with. Refused before training; exit status 2."""


def setting(default: Any, text: str, choices: tuple[str, ...] = (), metavar: str | None = None, *, group: str) -> Any:
    """A field of Settings. metavar: what --help calls the value; group: the heading under which --help lists it."""
    return dataclasses.field(
        default=default, metadata={"group": group, "help": text, "choices": choices, "metavar": metavar}
    )


what = partial(setting, group="what to train")
how = partial(setting, group="how to train")
speed = partial(setting, group="speed")
ranks = partial(setting, group="ranks")
links = partial(setting, group="slow links")
keeps = partial(setting, group="checkpoints")
the_run = partial(setting, group="the run")


@dataclass(frozen=True)
class Settings:
    model: str = what("resnet18", "any torchvision classification model, or your own: module:function")
    dataset: str = what("digits", f"{', '.join(DATASETS)}, or your own: module:function")
    classes: int = what(0, "classes, or outputs, of your own dataset (0: as it says)", metavar="N")
    project: Path | None = what(
        None, "folder of your own model, dataset, loss and transform: docs/own-parts.md", metavar="DIR"
    )
    data_dir: Path | None = what(
        None, "folder of the datasets on this host (default: MUSTER_DATA_DIR, else /data, else ./data)"
    )
    download: bool = what(False, "fetch a missing dataset, one rank per host")
    image_size: int = what(0, "the model's input (0: what suits the dataset)", metavar="PIXELS")
    init_from: Path | None = what(None, "start from the weights in this file (.pt, .pth, .safetensors)", metavar="FILE")
    weights: str = what("", "start from torchvision's, such as IMAGENET1K_V2 (default: random)", metavar="NAME")

    epochs: int = how(9, "passes over the training part")
    batch_size: int = how(120, "samples of one optimizer step, of all ranks together", metavar="N")
    loss: str = how("cross-entropy", "cross-entropy, or your own: module:function")
    transform: str = how(
        "", "of each sample, your own: module:function (default: the dataset's)", metavar="MODULE:FUNCTION"
    )
    lr: float = how(0.002, "highest learning rate")
    head_lr: float = how(0.0, "highest learning rate of the last layer (0: --lr)", metavar="LR")
    freeze: str = how("", "parameters to leave as they are: conv1.*,layer1.* (default: none)", metavar="PATTERNS")
    scale_lr: int = how(0, "--lr is meant for this batch size: multiply it by batch size / N (0: off)", metavar="N")
    optimizer: str = how("adamw", "how gradients become updates", ("adamw", "sgd"))
    momentum: float = how(0.9, "of SGD")
    nesterov: bool = how(False, "SGD with Nesterov's momentum")
    weight_decay: float = how(0.05, "of weights; norms and biases have none")
    schedule: str = how("cosine", "of the learning rate, after the warm-up", ("cosine", "step", "constant"))
    warmup: float = how(0.2, "linear warm-up, as a part of all steps", metavar="PART")
    step_every: int = how(30, "epochs between steps of the step schedule", metavar="EPOCHS")
    step_gamma: float = how(0.1, "what each step multiplies the learning rate by")
    label_smoothing: float = how(0.0, "part of the label's weight that goes to all classes")
    mixup: float = how(0.0, "alpha of mixup (0: off)", metavar="ALPHA")
    cutmix: float = how(0.0, "alpha of CutMix (0: off)", metavar="ALPHA")
    clip: float = how(0.0, "largest norm of the gradient (0: off)", metavar="NORM")
    ema: float = how(0.0, "decay of averaged weights, used for evaluation (0: off)", metavar="DECAY")
    eval_every: int = how(1, "epochs from evaluation to evaluation; the last epoch always has one", metavar="EPOCHS")
    early_stop: int = how(0, "end the run after so many evaluations without a better one (0: off)", metavar="N")
    augment: str = how(
        "standard",
        "random changes of training images: those usual for the dataset; trivial (TrivialAugment) and rand "
        "(RandAugment): a policy after them, not for handwriting",
        ("standard", "none", "trivial", "rand"),
    )
    random_erasing: float = how(0.0, "probability that a part of a training image is erased (0: off)", metavar="P")
    bad_samples: str = how(
        "stop", "an image that cannot be decoded stops the run, or is left out and named (skip)", ("stop", "skip")
    )
    seed: int = how(0, "same seed: same order, augmentation, weights")

    micro_batch: int = speed(0, "most samples of one rank at a time; gradients accumulate (0: no limit)", metavar="N")
    amp: str = speed("off", "mixed precision", ("off", "bf16", "fp16"))
    channels_last: bool = speed(False, "NHWC memory layout")
    compile: bool = speed(False, "torch.compile")
    compile_mode: str = speed("default", "torch.compile's mode; goes with --compile", COMPILE_MODES)
    tf32: bool = speed(False, "GPUs: float32 convolutions and matrix products in TF32: faster, 10 bits of precision")
    activation_checkpointing: bool = speed(False, "recompute activations: less memory, a third more work")
    sync_bn: bool = speed(False, "batch statistics over all ranks (GPUs)")
    workers: int = speed(-1, "processes that decode images, per rank (-1: by the cores)", metavar="N")
    memory: str = speed("auto", "where the dataset lives", ("auto", "ram", "gpu", "disk"))
    deterministic: bool = speed(False, "only GPU kernels that give the same bits every time")

    parallel: str = ranks(
        "ddp", "ddp: a replica on every rank; fsdp: model in pieces; dp: all GPUs in one process", PARALLEL_NAMES
    )
    backend: str = ranks(
        "auto", "of the process group (auto: NCCL for GPUs, else gloo)", ("auto", "nccl", "gloo", "mpi")
    )
    init: str = ranks("env://", "how ranks find each other: env://, tcp://host:port, file:///path", metavar="URL")
    timeout: float = ranks(300.0, "longest wait of a rank for the others, in seconds", metavar="S")
    spawn: int = ranks(0, "start so many ranks on this machine, without torchrun", metavar="N")
    shares: str = ranks(
        "", "parts of the batch, rank by rank: 3,1, or auto: by measured speed (default: equal)", metavar="3,1"
    )
    gpu0_batch: int = ranks(0, "dp: samples for the first GPU, which has more to do (0: equal)", metavar="N")
    find_unused_parameters: bool = ranks(False, "ddp: some parameters get no gradient in some steps")
    static_graph: bool = ranks(False, "ddp: the same parameters get gradients in every step")

    communication: str = links(
        "as-given", "auto: `make train` chooses --compress bf16 or --bucket-mb from a forecast for these hosts, with "
        "--allow-approximate powersgd or --sync-every, too", ("as-given", "auto"),
    )  # fmt: skip
    allow_approximate: bool = links(False, "with --communication auto: also what may cost accuracy")
    compress: str = links(
        "none", "gradients in fewer bits: bf16, fp16, or powersgd[:RANK], which keeps a part of them (ranks 3 to 32, "
        "default 4); with --sync-every, changes of weights: bf16, fp16, int8, int4", metavar="HOW",
    )  # fmt: skip
    bucket_mb: int = links(
        25, "ddp: gradients that are sent together, in MiB; fewer begin earlier and end sooner after backward, "
        "and cost more messages", metavar="MIB",
    )  # fmt: skip
    sync_every: int = links(
        0, "each host trains alone for so many steps, then their weights are averaged (0: gradients, in every step)",
        metavar="STEPS",
    )  # fmt: skip
    sync_warmup: float = links(
        0.4, "with --sync-every: average more often in this part of the run at its beginning: every step, then every "
        "second, fourth, ...", metavar="PART",
    )  # fmt: skip
    stream: int = links(
        0, "with --sync-every: average the model in so many pieces, in turn, while training goes on (0: all at once, "
        "and wait for it)", metavar="PIECES",
    )  # fmt: skip
    outer_lr: float = links(
        1.0, "with --sync-every: how far the common weights follow the average change", metavar="LR"
    )  # fmt: skip
    outer_momentum: float = links(
        0.0, "with --sync-every: Nesterov momentum of the common weights (DiLoCo: 0.9); each host "
        "keeps that of its own steps then", metavar="PART"
    )  # fmt: skip

    resume: str = keeps(
        "auto", "auto: the run folder's newest; none: afresh; or a checkpoint or run folder", metavar="PATH"
    )
    keep: int = keeps(2, "checkpoints to keep, in addition to the best one", metavar="K")
    checkpoint_every: str = keeps("epoch", "epoch, steps (500), or seconds (30s)", metavar="WHEN")
    blocking_checkpoints: bool = keeps(False, "wait until a checkpoint is on the disk")

    run_dir: Path = the_run(Path("runs"), "folder to write to (default: MUSTER_RUN_DIR, else runs/<time>)")
    loggers: str = the_run(
        "tensorboard", "where figures go besides metrics.jsonl: tensorboard, mlflow, wandb, package.module:function, "
        "several with commas, or none", metavar="NAMES"
    )  # fmt: skip
    profile: int = the_run(0, "trace so many steps with torch.profiler, soon after the start (0: off)", metavar="STEPS")


class Parser(argparse.ArgumentParser):
    """Raises instead of exiting: under torchrun only rank 0 prints, and all ranks must end together."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message} (see python -m train --help)")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def kind_of(field: dataclasses.Field[Any]) -> type:
    """int, float, bool, str or Path: the type of a field's values."""
    return Path if "Path" in str(field.type) else type(field.default)


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m train",
        usage="python -m train [setting ...]   (also: python -m train export|predict|verify-data --help)",
        description="Trains a torchvision classification model, data-parallel: one process per rank under torchrun, "
        "with --spawn N, or alone. Uses the GPUs (NCCL) where there are any, else the CPU (gloo).",
        epilog=f"Exit status: 0 trained; 1 failed; 2 wrong settings, nothing was started; {EXIT_STOPPED} stopped by "
        "SIGTERM or Ctrl-C after writing a checkpoint; 130 stopped before the first step.",
        allow_abbrev=False,
    )
    p.add_argument(
        "--config",
        metavar="FILE",
        help=f"settings as YAML; flags win. Ready ones: {', '.join(sorted(f.stem for f in CONFIGS.glob('*.yaml')))}",
    )
    groups = {title: p.add_argument_group(title, text) for title, text in GROUPS.items()}
    for field in dataclasses.fields(Settings):
        add_flag(groups[field.metadata["group"]], field)
    return p


def add_flag(group: Any, field: dataclasses.Field[Any]) -> None:
    text, kind = field.metadata["help"], kind_of(field)
    if not re.search(r"default:|\(0: |\(-1: ", text) and kind is not bool and field.default is not None:
        text = f"{text} (default: {field.default})"
    options: dict[str, Any] = {"help": text, "default": argparse.SUPPRESS}
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options |= {"type": kind, "choices": field.metadata["choices"] or None, "metavar": field.metadata["metavar"]}
    group.add_argument(flag(field.name), **options)


def parse(arguments: list[str]) -> Settings:
    """Settings from flags, then the --config file, then defaults. Raises SettingsError for what cannot be read."""
    flags = vars(parser().parse_args(arguments))
    config = flags.pop("config", None)
    given = (read_config(config) if config else {}) | flags
    given["run_dir"] = given.get("run_dir") or default_run_dir()
    return Settings(**given)


def read_config(name: str) -> dict[str, Any]:
    """The settings in a YAML file, in the ready one of this name, or in `{...}`, YAML itself. Raises SettingsError."""
    import yaml  # a tenth of a second, only where there is a file

    path, text = Path(name), None
    if name.startswith("{"):
        name, text = "{...}", name
    elif not path.is_file() and (CONFIGS / f"{name}.yaml").is_file():
        path = CONFIGS / f"{name}.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8") if text is None else text)
    except (OSError, UnicodeDecodeError) as error:
        ready = ", ".join(sorted(f.stem for f in CONFIGS.glob("*.yaml")))
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(f"--config {name}: cannot be read ({reason}); ready ones are {ready}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"--config {name}: not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"--config {name}: expected lines like `epochs: 90`, found {type(content).__name__}")
    return dict(checked(name, str(key), value) for key, value in content.items())


def checked(name: str, key: str, value: Any) -> tuple[str, Any]:
    """(field name, value) of one line of a config. Raises SettingsError for an unknown key or a wrong type."""
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    field = fields.get(key.replace("-", "_"))
    if field is None:
        from difflib import get_close_matches

        close = get_close_matches(key, fields)
        raise SettingsError(f"--config {name}: {key}: no such setting{f'; {close[0]}?' if close else ''}")
    kind = kind_of(field)
    value = as_meant(kind, value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise SettingsError(f"--config {name}: {key}: {value!r} is no {kind.__name__}")
    if field.metadata["choices"] and value not in field.metadata["choices"]:
        raise SettingsError(f"--config {name}: {key}: {value!r} is none of {', '.join(field.metadata['choices'])}")
    return field.name, value


def as_meant(kind: type, value: Any) -> Any:
    """YAML reads `1e-3` as text, `off` as false, `[3, 1]` as a list, and knows no paths."""
    number = isinstance(value, int) and not isinstance(value, bool)
    if kind is float and (number or isinstance(value, str)):
        with suppress(ValueError):
            return float(value)
    if kind is str and number:
        return str(value)  # checkpoint_every: 500
    if kind is str and isinstance(value, list):
        return ",".join(map(str, value))
    if kind is str and value is False:
        return "off"
    return Path(value) if kind is Path and isinstance(value, str) else value


def default_run_dir() -> Path:
    given = os.environ.get("MUSTER_RUN_DIR")
    return Path(given) if given else Path("runs") / time.strftime("%Y%m%d-%H%M%S-train")


def as_document(settings: Settings) -> dict[str, Any]:
    """The settings as plain values, in the order of the fields: for checkpoints, metrics and settings.json."""
    values = dataclasses.asdict(settings)
    return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}


def loggers_of(text: str) -> list[str]:
    """The names in --loggers, each once."""
    names = [name for part in text.split(",") if (name := part.strip())]
    return [] if names == ["none"] else list(dict.fromkeys(names))


@dataclass(frozen=True)
class Every:
    """How often to write a checkpoint. At the end of an epoch it is written in any case."""

    steps: int | None = None
    seconds: float | None = None


def every(text: str) -> Every:
    """`epoch`, `500` or `30s`. Raises ValueError."""
    if text == "epoch":
        return Every()
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)s", text):
        if float(match[1]) > 0:
            return Every(seconds=float(match[1]))
    elif text.isascii() and text.isdigit() and int(text) > 0:
        return Every(steps=int(text))
    raise ValueError(text)


def problems(settings: Settings, world_size: int) -> list[str]:
    """All that is wrong with the settings for this many ranks, one clause each; empty if nothing is."""
    return [
        *ranges(settings),
        *strangers(settings),
        *contradictions(settings, world_size),
        *slow_links(settings),
        *own_parts(settings),
    ]


POSITIVE = ("epochs", "keep", "step_every", "eval_every", "bucket_mb")
POSITIVE_NUMBERS = ("lr", "timeout", "step_gamma", "outer_lr")
NOT_NEGATIVE = (
    *("seed", "image_size", "scale_lr", "micro_batch", "spawn", "gpu0_batch", "classes", "early_stop", "profile"),
    *("sync_every", "stream"),
)
NOT_NEGATIVE_NUMBERS = ("weight_decay", "mixup", "cutmix", "clip", "head_lr")
PARTS = ("momentum", "warmup", "label_smoothing", "ema", "outer_momentum", "sync_warmup")


def ranges(settings: Settings) -> Iterator[str]:
    values = dataclasses.asdict(settings)
    wanted = (
        (POSITIVE, lambda v: v >= 1, "at least 1"),
        (POSITIVE_NUMBERS, lambda v: math.isfinite(v) and v > 0, "a number above 0"),
        (NOT_NEGATIVE, lambda v: v >= 0, "0 or more"),
        (NOT_NEGATIVE_NUMBERS, lambda v: math.isfinite(v) and v >= 0, "a number, 0 or more"),
        (PARTS, lambda v: 0 <= v < 1, "at least 0 and below 1"),
        (("random_erasing",), lambda v: 0 <= v <= 1, "from 0 to 1"),
        (("workers",), lambda v: v >= -1, "0 or more, or -1: by the cores"),
    )
    for names, right, text in wanted:
        yield from (f"{flag(name)} {values[name]}: {text}" for name in names if not right(values[name]))
    yield from (
        f"--loggers {name}: none of {', '.join(LOGGER_NAMES)}, package.module:function, none"
        for name in loggers_of(settings.loggers)
        if name not in LOGGER_NAMES and not re.fullmatch(r"[\w.]+:\w+", name)
    )
    try:
        every(settings.checkpoint_every)
    except ValueError:
        yield f"--checkpoint-every {settings.checkpoint_every}: epoch, a number of steps (500) or seconds (30s)"


def contradictions(settings: Settings, world_size: int) -> Iterator[str]:
    if settings.batch_size < world_size or settings.batch_size < 1:
        yield (
            f"--batch-size {settings.batch_size}: it counts the samples of all ranks together, "
            f"so at least one for each of the {world_size} ranks"
        )
    if settings.parallel in ("dp", "none") and world_size > 1:
        yield (
            f"--parallel {settings.parallel}: it is one process, and these are {world_size} ranks: "
            "NPROC=1 on one host, or --parallel ddp"
        )
    if settings.shares and settings.parallel not in ("ddp", "horovod"):
        yield f"--shares {settings.shares}: goes with --parallel ddp or horovod, not with {settings.parallel}"
    if settings.gpu0_batch and settings.parallel != "dp":
        yield f"--gpu0-batch {settings.gpu0_batch}: goes with --parallel dp"
    if settings.compile_mode != "default" and not settings.compile:
        yield f"--compile-mode {settings.compile_mode}: goes with --compile"
    if settings.compile and settings.parallel == "dp":
        yield "--compile: dp copies the model anew for each pass, which cannot be compiled: --parallel ddp"
    if settings.find_unused_parameters and settings.static_graph:
        yield "--find-unused-parameters --static-graph: the graph is either the same in every step or not"
    if settings.nesterov and (settings.optimizer != "sgd" or settings.momentum == 0):
        yield "--nesterov: goes with --optimizer sgd and a --momentum above 0"
    own = next((name for name in ("dataset", "transform") if is_own(getattr(settings, name))), "")
    theirs = {"augment": settings.augment in POLICIES, "random_erasing": settings.random_erasing > 0}
    for name in [name for name, given in theirs.items() if given and own]:
        yield f"{flag(name)} {getattr(settings, name)}: it changes images of built-in datasets: do it in your --{own}"
    if settings.bad_samples == "skip" and own:
        yield f"--bad-samples skip: it does not go with a --{own} of your own: take bad samples out of the data"
    if settings.augment in POLICIES and settings.dataset in HANDWRITING:
        yield (
            f"--augment {settings.augment}: it is made for photographs; --dataset {settings.dataset} is handwriting, "
            "with small turns, shifts and zooms of its own: --augment standard"
        )
    if settings.augment in POLICIES and settings.memory == "gpu":
        yield f"--memory gpu: --augment {settings.augment} changes images in the CPU's memory: leave one of the two out"
    if settings.spawn and "RANK" in os.environ:
        yield f"--spawn {settings.spawn}: torchrun has started this rank already; leave one of the two out"


@dataclass(frozen=True)
class Compression:
    """What --compress says. rank: of powersgd's matrices."""

    kind: str = "none"
    rank: int = 0


RANKS = range(3, 33)  # of powersgd: train.parallel.compress says why


def compression(text: str) -> Compression:
    """`powersgd:4` -> Compression("powersgd", 4). Raises ValueError."""
    kind, colon, rank = text.partition(":")
    if kind == "powersgd":
        chosen = int(rank) if colon else 4
        if chosen in RANKS:
            return Compression(kind, chosen)
    elif kind in COMPRESSIONS and not colon:
        return Compression(kind)
    raise ValueError(text)


OF_EXCHANGES = ("sync_warmup", "stream", "outer_lr", "outer_momentum")
LINKS_OFF = {name: getattr(Settings, name) for name in ("compress", "sync_every", *OF_EXCHANGES)}


def slow_links(settings: Settings) -> Iterator[str]:
    """What is wrong with the settings of that group."""
    given = f"--compress {settings.compress}"
    try:
        kind = compression(settings.compress).kind
    except ValueError:
        yield (
            f"--compress {settings.compress!r}: it has to be none, bf16, fp16 or powersgd, which may have a rank from "
            f"{RANKS[0]} to {RANKS[-1]} (powersgd:4); with --sync-every none, bf16, fp16, int8 or int4"
        )
        return
    yield from automatic(settings)
    every_step = settings.sync_every <= 0
    if kind != "none" and settings.parallel != "ddp":
        yield f"{given}: goes with --parallel ddp, not with {settings.parallel}"
    if settings.bucket_mb != Settings.bucket_mb and settings.parallel != "ddp":
        yield f"--bucket-mb {settings.bucket_mb}: goes with --parallel ddp, not with {settings.parallel}"
    if kind in ("int8", "int4") and every_step and settings.parallel == "ddp":
        yield f"{given}: it is for changes of weights over many steps: give --sync-every 16, or --compress bf16"
    if kind == "powersgd" and not every_step:
        yield f"{given}: it is for gradients; with --sync-every, which sends none: --compress int8"
    if every_step:
        is_chosen = settings.communication == "auto"
        fix = "--communication auto chooses that itself: leave this one out" if is_chosen else "give --sync-every 16"
        for name in OF_EXCHANGES:
            if getattr(settings, name) != getattr(Settings, name):
                yield f"{flag(name)} {getattr(settings, name)}: goes with --sync-every: {fix}"
        return
    given = f"--sync-every {settings.sync_every}"
    if settings.stream > settings.sync_every:
        yield f"--stream {settings.stream}: at most one piece in each of --sync-every's {settings.sync_every} steps"
    if settings.parallel != "ddp":
        yield f"{given}: goes with --parallel ddp, not with {settings.parallel}"
    if settings.ema:
        yield f"{given}: hosts' weights differ between exchanges, so that --ema has none to average: leave one out"
    if settings.sync_bn:
        yield f"{given}: --sync-bn makes hosts wait for each other in every layer: leave one out"
    if settings.bad_samples == "skip":
        yield f"{given}: --bad-samples skip counts the good samples of all hosts in every step: leave one out"


def automatic(settings: Settings) -> Iterator[str]:
    """What is wrong with --communication auto."""
    if settings.communication != "auto":
        if settings.allow_approximate:
            yield "--allow-approximate: goes with --communication auto"
        return
    chosen = [flag(name) for name in ("compress", "sync_every") if getattr(settings, name) != getattr(Settings, name)]
    if chosen:
        yield f"--communication auto: it chooses {' and '.join(chosen)} itself: leave one of the two out"
    if settings.parallel != "ddp":
        yield f"--communication auto: goes with --parallel ddp, not with {settings.parallel}"


def strangers(settings: Settings) -> Iterator[str]:
    """Names that are neither built in nor written as names of the user's own parts, with near ones."""
    built_in = {
        "model": (MODELS, "torchvision has no such model"),
        "dataset": (DATASETS, "there is no such dataset"),
        "loss": (LOSSES, "there is no such loss"),
        "transform": (("",), "it is your own"),
    }
    for name, (known, text) in built_in.items():
        value = getattr(settings, name)
        if value in known or OWN.fullmatch(value):
            continue
        from difflib import get_close_matches  # only for this message

        near = ", ".join(filter(None, get_close_matches(value, known)))
        hint = f"did you mean {near}?" if near else "your own is written package.module:function"
        yield f"{flag(name)} {value}: {text}; {hint}"


def own_parts(settings: Settings) -> Iterator[str]:
    """What does not go with parts of the user's own, or with pretrained weights."""
    own_data = is_own(settings.dataset) or is_own(settings.transform)
    if settings.label_smoothing and is_own(settings.loss):
        yield f"--label-smoothing {settings.label_smoothing}: goes with --loss cross-entropy, not with your own"
    if settings.memory in ("ram", "gpu") and own_data:
        yield f"--memory {settings.memory}: nothing is kept of a dataset or transform of your own: leave it out"
    if settings.classes and not is_own(settings.dataset):
        yield f"--classes {settings.classes}: goes with a dataset of your own; {settings.dataset} knows its classes"
    if settings.weights and is_own(settings.model):
        yield f"--weights {settings.weights}: torchvision has none for a model of your own: --init-from FILE"
    if settings.weights and settings.init_from:
        yield f"--weights {settings.weights} --init-from {settings.init_from}: two starts; leave one of the two out"


def refuse(complaint: str, shown: bool = True) -> int:
    """Prints the complaint if `shown`, and returns the exit status. Each rank reports it to torchrun: any may be the
    first to end.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        said = {
            "message": f"exit status {EXIT_REFUSED}: train: {complaint}",
            "extraInfo": {"py_callstack": "", "timestamp": str(int(time.time()))},
        }
        Path(file).write_text(json.dumps({"message": said}), encoding="utf-8")
    if shown:
        print(f"train: {complaint}", file=sys.stderr, flush=True)
    return EXIT_REFUSED
