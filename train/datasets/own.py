"""Datasets of the user's own, and built-in ones with a transform of the user's own: torch's map-style interface.

A sample is (input, target): tensors, numbers, or tuples, lists and dicts of them. What a user's code draws from the
global random generators is a function of (seed, epoch, sample number): see `Reader`. docs/own-parts.md has the
contract.
"""

import copy
import hashlib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import default_collate

from train import generators, own_parts
from train.datasets.base import ArraySource, DataError, Dataset, Source, data_dir_of, numbered
from train.datasets.decode import opened, undecodable
from train.names import is_own
from train.order import Ints, random_words
from train.settings import Settings, SettingsError

# First coordinate of the random words here, apart from all others.
OWN_STREAM = 0x6F776E0000000000
HASHED_SAMPLES = 16  # of each part
NAMED_SAMPLES = 5  # sample numbers in a message
WHOLE = 1 << 30  # more pixels than an edge has: decoded in full size
SPLITS = ("train", "val")


class OwnTransform:
    """What `--transform module:function` returns for a split. That is often a function within a function, which cannot
    be sent to a worker: the worker calls module:function itself. Raises SettingsError."""

    def __init__(self, name: str, split: str) -> None:
        self.name, self.split = name, split
        with generators.kept():
            generators.seed(0)
            self.function = own_parts.call("--transform", name, object, split=split)
        wrong = f"a {type(self.function).__name__}"
        if callable(self.function):
            unfit = own_parts.misfit(self.function, 2)
            if not unfit:
                return
            wrong = f"a function that does not take two arguments ({unfit})"
        raise SettingsError(
            f"--transform {name}: for split {split!r} it returned {wrong}, and a function is needed, "
            "(input, target) -> (input, target), such as a torchvision.transforms.v2.Compose"
        )

    def __call__(self, value: Any, target: Any) -> Any:
        return self.function(value, target)

    def __reduce__(self) -> Any:
        return OwnTransform, (self.name, self.split)


@dataclass(frozen=True)
class OwnSource:
    """One part of a dataset, read sample by sample.

    samples: has len() and [number] -> (input, target). stored: the part of a built-in dataset that `samples` reads.
    """

    name: str  # as messages call the dataset
    split: str
    samples: Any
    transform: OwnTransform | None = None
    stored: Source | None = None

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def labels(self) -> Ints:
        raise NotImplementedError("the targets of a dataset of the user's own come with its samples")

    def manifest(self) -> tuple[int, str]:
        """(0, SHA-256), of what the dataset itself calls its fingerprint, else of its length and a few samples.

        Floats count with the mean of each tensor in four digits: another processor may round a resize otherwise.
        """
        if self.stored is not None:
            return self.stored.manifest()
        own = getattr(self.samples, "fingerprint", None)
        if callable(own):
            try:
                return 0, hashlib.sha256(str(own()).encode()).hexdigest()
            except Exception as error:
                raise DataError(f"dataset {self.name}: fingerprint() failed: {own_parts.said(error)}") from error
        digest = hashlib.sha256(f"{len(self)}".encode())
        reader = Reader(untransformed(self), 0)
        for number in np.linspace(0, len(self) - 1, min(len(self), HASHED_SAMPLES)).astype(np.int64):
            for leaf in tree_leaves(reader.batch(None, np.array([number]))):
                digest.update(described(leaf))
        return 0, digest.hexdigest()


def untransformed(source: OwnSource) -> OwnSource:
    """For a look from outside. A copy, so that what the dataset keeps of its first reading, an open file, is not sent
    to the workers with it."""
    samples = source.samples
    with suppress(Exception):
        samples = copy.copy(samples)
    return replace(source, samples=samples, transform=None)


def described(leaf: Any) -> bytes:
    if not isinstance(leaf, Tensor):
        return repr(leaf).encode()
    head = f"{leaf.dtype}{list(leaf.shape)}".encode()
    if leaf.dtype.is_floating_point:
        return head + f"{leaf.double().mean().item():.4g}".encode()
    return head + leaf.contiguous().numpy().tobytes()


class StoredImages:
    """(uint8 [3, H, W], class number) of each image of a built-in dataset, as it is stored."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        """Raises DataError for a file that cannot be decoded."""
        source, label = self.source, int(self.source.labels[number])
        if isinstance(source, ArraySource):
            image = torch.from_numpy(np.array(source.images[number]))
            return (image.transpose(1, 2) if source.transposed else image).expand(3, -1, -1).contiguous(), label
        path = source.path(number)  # type: ignore[attr-defined]
        with opened(path, WHOLE) as file:
            try:
                pixels = np.array(file.convert("RGB"))
            except Exception as error:
                raise undecodable(path, error) from error
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), label


def unequal(numbers: Ints, samples: Sequence[Any]) -> tuple[Ints, str] | None:
    """A usual sample and the first that has another form, and their forms; None where all have the same."""
    forms = [shown(sample) for sample in samples]
    usual = Counter(forms).most_common(1)[0][0]
    other = next((form for form in forms if form != usual), None)
    return (numbers[[forms.index(usual), forms.index(other)]], f"{usual}; {other}") if other else None


def shown(value: Any) -> str:
    """ "float32 [2, 3, 8, 8]"; of structures part by part."""
    if isinstance(value, Tensor | np.ndarray):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {shown(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(shown, value))})"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


class Reader:
    """Batches of samples of one part; small, so that it can be sent to workers."""

    def __init__(self, source: OwnSource, seed: int) -> None:
        self.source, self.seed = source, seed

    def batch(self, epoch: int | None, numbers: Ints) -> Any:
        """(inputs, targets) as torch's default_collate makes them; epoch None: of evaluation, always the same.

        Before each sample the global generators are seeded by (seed, epoch, its number), so that it has the same
        random changes in any batch, rank and worker; afterwards they are as before. Raises DataError.
        """
        words = random_words(OWN_STREAM, self.seed, 0 if epoch is None else epoch + 1, numbers)
        with generators.kept():
            samples = [self.sample(*each) for each in zip(numbers.tolist(), words.tolist(), strict=True)]
        try:
            return tuple(default_collate(samples))
        except Exception as error:
            named, why = unequal(numbers, samples) or (numbers, " ".join(str(error).split()))
            more = ", ..." if len(named) > NAMED_SAMPLES else ""
            raise DataError(
                f"dataset {self.source.name}: samples {', '.join(map(str, named[:NAMED_SAMPLES].tolist()))}{more} of "
                f"{self.source.split} do not fit into one batch ({why}): all samples need the same structure and sizes"
            ) from error

    def sample(self, number: int, word: int) -> tuple[Any, Any]:
        generators.seed(word)
        source, doing = self.source, "reading"
        try:
            pair = source.samples[number]
            check_pair(pair)
            if source.transform is not None:
                doing = "transforming"
                pair = source.transform(*pair)
                check_pair(pair)
            return as_input(pair[0]), as_target(pair[1])
        except DataError:
            raise
        except Exception as error:
            where = f"sample {number} of {source.split}"
            raise DataError(f"dataset {source.name}: {doing} {where} failed: {own_parts.said(error)}") from error


def check_pair(pair: Any) -> None:
    if not (isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2):
        size = f" of {len(pair)}" if isinstance(pair, Sequence) else ""
        raise TypeError(f"a sample is (input, target), and this one is a {type(pair).__name__}{size}")


def as_input(value: Any) -> Any:
    """Images as tutorials have them, PIL's and uint8 arrays [H, W] or [H, W, C], become float32 [C, H, W] of 0 .. 1, as
    by torchvision's ToTensor."""
    return tree_map(lambda leaf: scaled(leaf) if is_image(leaf) else as_tensor(leaf), value)


def as_target(value: Any) -> Any:
    """A mask as tutorials have it, an image of PIL's whose pixels are class numbers, becomes int64 [H, W]."""
    return tree_map(lambda leaf: as_tensor(np.array(leaf) if isinstance(leaf, Image.Image) else leaf), value)


def is_image(leaf: Any) -> bool:
    is_array = isinstance(leaf, np.ndarray) and leaf.dtype == np.uint8 and leaf.ndim in (2, 3)
    return is_array or isinstance(leaf, Image.Image)


def scaled(image: Any) -> Tensor:
    pixels = torch.from_numpy(np.array(image))
    planes = pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)
    return planes.contiguous().float() / 255


def as_tensor(leaf: Any) -> Any:
    """What torch's default_collate stacks; a number with a point as float32, as losses want it, and whole numbers of
    pixels as int64."""
    if isinstance(leaf, Tensor):
        return leaf.as_subclass(Tensor)
    if isinstance(leaf, float):
        return torch.tensor(leaf)
    if isinstance(leaf, np.ndarray):
        whole = leaf.dtype.kind in "iu"
        return torch.from_numpy(np.array(leaf, dtype=np.int64 if whole else leaf.dtype))
    if isinstance(leaf, bool | int | np.number | np.bool_):
        return leaf
    raise TypeError(f"a {type(leaf).__name__} cannot go into a batch: tensors, numbers, or tuples and dicts of them")


class Scale:
    """Normalises images of a built-in dataset that a transform has left in bytes, by the mean and deviation of all."""

    def __init__(self, dataset: Dataset, device: torch.device) -> None:
        self.mean = (torch.tensor(dataset.mean) * 255).view(3, 1, 1).to(device)
        self.factor = (1 / (torch.tensor(dataset.std) * 255)).view(3, 1, 1).to(device)

    def __call__(self, inputs: Any) -> Any:
        """float32 of uint8 [n, 3 or 1, H, W]; anything else as it is."""
        is_bytes = isinstance(inputs, Tensor) and inputs.dtype == torch.uint8
        return (inputs.float() - self.mean) * self.factor if is_bytes else inputs


# -- how a dataset is made of the user's functions ---------------------------------------------------------------------


def read(settings: Settings) -> Dataset:
    """The dataset that `--dataset module:function` makes. Raises SettingsError, DataError."""
    name, root = settings.dataset, data_dir_of(settings.data_dir)
    parts = [OwnSource(name, split, samples_of(name, split, root)) for split in SPLITS]
    names = class_names(settings, parts[0].samples)
    return Dataset(name, names, parts[0], parts[1], mean=(0.0,) * 3, std=(1.0,) * 3, image_size=0)


def samples_of(name: str, split: str, root: Path) -> Any:
    with generators.kept():
        generators.seed(0)  # a random split comes out the same on all ranks, and for all seeds
        samples = own_parts.call("--dataset", name, object, split=split, data_dir=root)
    missing = [method for method in ("__len__", "__getitem__") if not hasattr(samples, method)]
    if missing or isinstance(samples, torch.utils.data.IterableDataset):
        raise SettingsError(
            f"--dataset {name}: for split {split!r} it returned a {type(samples).__name__} without "
            f"{' and '.join(missing) or 'random access'}: a map-style dataset is needed, with len() and [number], so "
            "that every sample is seen exactly once in an order that any number of ranks agrees on"
        )
    try:
        count = len(samples)
    except Exception as error:
        raise SettingsError(f"--dataset {name}: len() of split {split!r}: {own_parts.said(error)}") from error
    if count < 1:
        raise SettingsError(f"--dataset {name}: split {split!r} has no samples")
    return samples


def class_names(settings: Settings, samples: Any) -> tuple[str, ...]:
    """By --classes, else the dataset's `classes` (names) or `num_classes`. Raises SettingsError."""
    names, count = getattr(samples, "classes", None), getattr(samples, "num_classes", None)
    if settings.classes:
        known = count if isinstance(count, int) else len(names) if isinstance(names, Sequence) else 0
        if settings.classes < known:
            raise SettingsError(f"--classes {settings.classes}: the dataset says that it has {known}: leave it out")
        return numbered(settings.classes)
    if isinstance(names, Sequence) and not isinstance(names, str) and names:
        return tuple(map(str, names))
    if isinstance(count, int) and count > 0:
        return numbered(count)
    raise SettingsError(
        f"--dataset {settings.dataset}: how many classes, or outputs of the model? Give --classes N, or the dataset "
        "an attribute `classes` (their names) or `num_classes`"
    )


def finished(dataset: Dataset, settings: Settings) -> Dataset:
    """The dataset with the user's transform, if there is one, and with the size of its first input as its image size
    (0 unless that is a square image). Raises SettingsError, DataError."""
    if not (is_own(settings.transform) or is_own(settings.dataset)):
        return dataset
    given = zip(SPLITS, (dataset.train, dataset.test), strict=True)
    parts = [
        part if isinstance(part, OwnSource) else OwnSource(dataset.name, split, StoredImages(part), stored=part)
        for split, part in given
    ]
    if is_own(settings.transform):
        parts = [replace(part, transform=OwnTransform(settings.transform, part.split)) for part in parts]
    looked_at = replace(untransformed(parts[0]), transform=parts[0].transform)
    first, _ = Reader(looked_at, settings.seed).batch(0, np.zeros(1, dtype=np.int64))
    shape = list(first.shape[1:]) if isinstance(first, Tensor) else []
    size = int(shape[-1]) if len(shape) == 3 and shape[-1] == shape[-2] else 0
    if settings.image_size and settings.image_size != size:
        made = f"your own dataset or transform makes inputs of {shape}" if shape else "your own inputs are no images"
        raise SettingsError(
            f"--image-size {settings.image_size}: {made}: leave it out (--image-size 0), or change the transform"
        )
    return replace(dataset, train=parts[0], test=parts[1], image_size=size)
