"""One image file to uint8 pixels of the wanted size: what a worker process does for imagefolder.

JPEGs much larger than needed are decoded at a half, a quarter or an eighth (Pillow's draft), by a rule that depends
on the file and the size alone. EXIF orientation is not applied, and transparency is dropped: the colours below it are
seen, as in torchvision. CMYK becomes red, green, blue by the plain formula, without a colour profile. Of 16 bits the
upper 8 are taken, grey or in colour.

Pillow and not torchvision.io: what the latter is made of does not load beside a torch for CPUs, so hosts would decode
with different libraries; both are libjpeg-turbo; and it cannot decode a JPEG at a part of its size.
"""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from train.datasets.augment import BOX_AXES, Box, box_draws, resized_crop
from train.datasets.base import Augmentation, BadSample, Bytes
from train.datasets.folder import FolderSource
from train.datasets.policy import Policy
from train.datasets.transform import resize
from train.order import Ints

DRAFT = 2  # decoded edges are at least this many times the wanted size
SHORTER_SIDE = 256 / 224  # of a held-out image, relative to the centre crop that is taken of it


Bad = tuple[int, str]  # of a sample that cannot be decoded: its place in the request, and why


@dataclass(frozen=True)
class Task:
    """indices: int64 [n], sample numbers of the training part where epoch is not None, else of the held-out one.

    names: of their files, for a worker, which has no list of all files.
    """

    indices: Ints
    epoch: int | None
    names: npt.NDArray[np.bytes_] | None = None


@dataclass(frozen=True)
class Job:
    """All that a worker has to know. skip: a sample that cannot be decoded is reported, and no error."""

    train: FolderSource
    test: FolderSource
    augmentation: Augmentation | None
    seed: int
    size: int
    channels_last: bool
    policy: Policy | None = None
    skip: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of one decoded sample."""
        return (self.size, self.size, 3) if self.channels_last else (3, self.size, self.size)

    def for_workers(self) -> "Job":
        """The same without the lists of files, which may have millions of names: tasks carry those they need."""
        return replace(self, train=self.train.bare(), test=self.test.bare())

    def task(self, indices: Ints, epoch: int | None) -> Task:
        """For a worker."""
        return Task(indices, epoch, (self.test if epoch is None else self.train).names[indices])

    def into(self, out: Tensor, task: Task) -> list[Bad]:
        """out: uint8 [n, *shape]. Returns, with `skip`, the samples that cannot be decoded; their rows are undefined.

        Raises BadSample, without `skip`, that names the file.
        """
        source = self.test if task.epoch is None else self.train
        names = source.names[task.indices] if task.names is None else task.names
        draws: npt.NDArray[np.float64] | None = None
        if task.epoch is not None and self.augmentation is not None and self.augmentation.resized_crop:
            draws = box_draws(self.seed, task.epoch, task.indices)
        planes, bad = out.permute(0, 3, 1, 2) if self.channels_last else out, list[Bad]()
        for place, name in enumerate(names):
            path = source.path_of(name)
            try:
                planes[place].copy_(centre(path, self.size) if draws is None else self._random(path, draws[place]))
            except BadSample as error:
                if not self.skip:
                    raise
                bad.append((place, error.reason))
                planes[place].zero_()
        if self.policy and task.epoch is not None:
            self.policy.change(planes, task.epoch, task.indices)
        return bad

    def check(self, name: bytes, held_out: bool) -> str:
        """Decodes a file as `into` does. Returns why it cannot be decoded; empty if it can."""
        path = (self.test if held_out else self.train).path_of(name)
        try:
            with opened(path, DRAFT * self.size) as image:
                tensor_of(path, image, (0, 0, *image.size))
        except BadSample as error:
            return error.reason
        return ""

    def _random(self, path: Path, draws: npt.NDArray[np.float64]) -> Tensor:
        assert self.augmentation is not None and self.augmentation.resized_crop is not None
        with opened(path, DRAFT * self.size) as image:
            box = resized_crop(draws, *image.size, self.augmentation.resized_crop)
            pixels = resize(tensor_of(path, image, box), (self.size, self.size))[0]
        if self.augmentation.mirror and draws[BOX_AXES - 1] < 0.5:
            pixels = pixels.flip(2)
        return pixels


def centre(path: Path, size: int) -> Tensor:
    """uint8 [3, size, size]: torchvision's Resize(shorter side), CenterCrop(size). Raises BadSample."""
    with opened(path, DRAFT * size) as image:
        width, height = image.size
        short = round(size * SHORTER_SIDE)
        long = int(short * max(width, height) / min(width, height))
        shape = (short, long) if height <= width else (long, short)
        pixels = resize(tensor_of(path, image, (0, 0, width, height)), shape)[0]
    top, left = (round((edge - size) / 2) for edge in shape)
    return pixels[:, top : top + size, left : left + size]


def opened(path: Path, least: int | None = None) -> Image.Image:
    """The image, its pixels not yet decoded. Its edges are smaller than the file's, but not than `least` pixels, where
    the format can do that.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(path)
        if least:
            image.draft(image.mode, (least, least))
    except Exception as error:
        raise undecodable(path, error) from error
    return image


def tensor_of(path: Path, image: Image.Image, box: Box) -> Tensor:
    """uint8 [1, 3, height, width] of the box, in NHWC memory."""
    try:
        cut: Bytes = np.array(as_rgb(image).crop(box))
    except Exception as error:
        raise undecodable(path, error) from error
    return torch.from_numpy(cut).permute(2, 0, 1)[None]


def as_rgb(image: Image.Image) -> Image.Image:
    """8 bits each of red, green, blue. Raises ValueError for a mode that has no white to scale by.

    Pillow reads 16 bits in colour as 8, but cuts off grey ones above 255: almost all of them become white.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(
            f"its pixels have 32 bits, Pillow's mode {image.mode}, and nothing says which value is white; "
            "save it with 8 or 16 bits for each colour"
        )
    image.info.pop("transparency", None)  # Pillow warns that it will be dropped
    return image.convert("RGB")


def undecodable(path: Path, error: Exception) -> BadSample:
    if isinstance(error, MemoryError):
        raise error  # not the file's fault
    reason = " ".join(str(error).replace(str(path), path.name).split()) or type(error).__name__
    return BadSample(
        f"dataset imagefolder: {path} is no image that can be decoded ({error}). Replace or remove that file on every "
        "host, or give --bad-samples skip; `python -m train verify-data` finds all such files",
        reason.encode(errors="backslashreplace").decode(),
    )
