"""From stored uint8 images to normalised float batches: resize, crop, mirror, normalise, in that order.

The resize is torch's uint8 kernel, which torchvision.transforms.v2 uses too (on a GPU it works on floats);
normalising is fused with the conversion to floats. On the CPU a batch is made in blocks that stay in the cache.
Every step works on each sample, or each pixel, for itself and without reordering sums: a sample's bits are the same
whatever batch it is in.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from train.datasets.augment import Shifts
from train.datasets.base import Triple
from train.datasets.memory import Kept, Recycler
from train.order import Ints

PREPARE_BLOCK = 1 << 19  # bytes of uint8 pixels that are prepared at a time on the CPU
NORMALISE_BLOCK = 1 << 18  # floats normalised at a time: they stay in the second-level cache


@dataclass(frozen=True)
class Form:
    """The form of a batch: float32 [N, 3, size, size] on `device`, in NHWC memory where channels_last."""

    size: int
    channels_last: bool
    device: torch.device
    recycler: Recycler = field(default_factory=Recycler)

    @property
    def on_gpu(self) -> bool:
        return self.device.type != "cpu"

    def layout(self, channels: int) -> torch.memory_format:
        return torch.channels_last if self.channels_last and channels == 3 else torch.contiguous_format

    def empty(self, count: int) -> Tensor:
        shape = count, 3, self.size, self.size
        if self.on_gpu:
            return torch.empty(shape, device=self.device, memory_format=self.layout(3))
        flat = self.recycler.empty(3 * count * self.size**2)
        if self.channels_last:
            return flat.view(count, self.size, self.size, 3).permute(0, 3, 1, 2)
        return flat.view(shape)


class Normaliser:
    """(value / 255 - mean) / std for each colour."""

    def __init__(self, mean: Triple, std: Triple, form: Form) -> None:
        self.form = form
        self.mean = (torch.tensor(mean) * 255).to(form.device)
        self.factor = (1 / (torch.tensor(std) * 255)).to(form.device)
        self.mean_row, self.factor_row = self.mean.repeat(form.size), self.factor.repeat(form.size)

    def __call__(self, images: Tensor) -> Tensor:
        """images: uint8, or float32 of 0 .. 255, [N, 1 or 3, size, size]."""
        out = self.form.empty(len(images))
        self.into(out, images)
        return out

    def into(self, out: Tensor, images: Tensor) -> None:
        step = len(images)
        if not self.form.on_gpu:
            step = max(1, NORMALISE_BLOCK // (3 * self.form.size**2))
        for start in range(0, len(images), step):
            self._block(out[start : start + step], images[start : start + step])

    def _block(self, out: Tensor, images: Tensor) -> None:
        mean, factor = self.mean.view(3, 1, 1), self.factor.view(3, 1, 1)
        if self.form.channels_last and images.shape[1] == 3:  # whole rows: three values are too short a loop
            mean, factor = self.mean_row, self.factor_row
            rows = -1, self.form.size, 3 * self.form.size
            out, images = out.permute(0, 2, 3, 1).view(rows), images.permute(0, 2, 3, 1).reshape(rows)
        out.copy_(images).sub_(mean).mul_(factor)


def resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear, antialiased where it shrinks; uint8 stays uint8 on the CPU and becomes float32 on a GPU."""
    if tuple(images.shape[-2:]) == size:
        return images
    if images.device.type != "cpu":
        images = images.float()
    return functional.interpolate(images, size=size, mode="bilinear", antialias=True)


def crop(images: Tensor, chosen: Ints, change: Shifts, scratch: Tensor | None = None) -> Tensor:
    """On the CPU: images[chosen], cut to their own size at the places of `change`, and mirrored; outside is black.

    scratch: where they are put, of a crop before this one that is no longer needed; None: in memory of their own.
    """
    if scratch is None or len(scratch) < len(chosen):
        scratch = torch.empty_like(images[:1].expand(len(chosen), -1, -1, -1), memory_format=layout_of(images))
    out = scratch[: len(chosen)]
    source, target, (height, width) = images.numpy(), out.numpy(), images.shape[2:]
    places = zip(*(each.tolist() for each in (chosen, change.rows, change.columns, change.mirror)), strict=True)
    for k, (sample, y, x, mirror) in enumerate(places):
        top, bottom, left, right = max(0, -y), height - max(0, y), max(0, -x), width - max(0, x)
        part = source[sample, :, top + y : bottom + y, left + x : right + x]
        if bottom - top != height or right - left != width:
            target[k] = 0
        if mirror:  # NumPy takes several times as long
            part, left, right = torch.from_numpy(part).flip(2).numpy(), width - right, width - left
        target[k, :, top:bottom, left:right] = part
    return out


def select(images: Tensor, chosen: Ints) -> Tensor:
    if layout_of(images) == torch.channels_last:  # index_select alone would change the layout, slowly
        return select(images.permute(0, 2, 3, 1), chosen).permute(0, 3, 1, 2)
    return images.index_select(0, torch.from_numpy(chosen))


def layout_of(images: Tensor) -> torch.memory_format:
    nhwc = images.shape[1] > 1 and images.stride(1) == 1
    return torch.channels_last if nhwc else torch.contiguous_format


def crop_on_gpu(images: Tensor, change: Shifts) -> Tensor:
    """The same for all images, by one gather for the whole batch."""
    count, channels, height, width = images.shape
    y = torch.arange(height)[None] + torch.from_numpy(change.rows)[:, None]
    x = torch.arange(width)[None] + torch.from_numpy(change.columns)[:, None]
    x = torch.where(torch.from_numpy(change.mirror)[:, None], x.flip(1), x)
    y, x = (to_device(one, images.device) for one in (y, x))
    inside = ((y >= 0) & (y < height))[:, None, :, None] & ((x >= 0) & (x < width))[:, None, None, :]
    sample = torch.arange(count, device=images.device)[:, None, None, None]
    channel = torch.arange(channels, device=images.device)[None, :, None, None]
    row, column = y.clamp(0, height - 1)[:, None, :, None], x.clamp(0, width - 1)[:, None, None, :]
    return images[sample, channel, row, column] * inside


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """To a GPU without waiting for it: by way of pinned memory."""
    if device.type == "cpu" or tensor.device == device:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class Store:
    """Images of one size. images: uint8 [N, C, H, W] ([N, C, W, H] where transposed), on the form's device or on the
    CPU. kept: their resized copies, if they are kept.
    """

    images: Tensor
    transposed: bool
    form: Form
    kept: Kept | None = None

    def sized(self, indices: Ints) -> Tensor:
        """[n, C, size, size] in the form's layout, on its device; float32 if it is a GPU, else uint8."""
        chosen = to_device(torch.from_numpy(indices), self.images.device)
        images = to_device(self.images.index_select(0, chosen), self.form.device)
        if self.transposed:
            images = images.transpose(2, 3)
        images = images.contiguous(memory_format=self.form.layout(images.shape[1]))
        return resize(images, (self.form.size, self.form.size))

    def ready(self, indices: Ints) -> tuple[Tensor, Ints]:
        """On the CPU: images of which these are at the places returned. Fills what is kept."""
        if self.kept is None:
            return self.sized(indices), np.arange(len(indices), dtype=np.int64)
        missing = self.kept.missing(indices)
        nhwc = self.form.layout(self.images.shape[1]) == torch.channels_last
        if len(missing):
            images = self.sized(missing).numpy()
            self.kept.fill(missing, images.transpose(0, 2, 3, 1) if nhwc else images)
        kept = torch.from_numpy(self.kept.images)
        return kept.permute(0, 3, 1, 2) if nhwc else kept, indices


def cropped_batch(normalise: Normaliser, store: Store, indices: Ints, change: Shifts | None) -> Tensor:
    """A batch by resize, crop and mirror. change: one for each index, or None."""
    form = normalise.form
    if form.on_gpu:
        images = store.sized(indices)
        return normalise(images if change is None else crop_on_gpu(images, change))
    out, cropped = form.empty(len(indices)), None
    step = max(1, PREPARE_BLOCK // (3 * form.size**2))
    for start in range(0, len(indices), step):
        piece = slice(start, start + step)
        images, places = store.ready(indices[piece])
        if change is not None:
            part = Shifts(change.rows[piece], change.columns[piece], change.mirror[piece])
            images = cropped = crop(images, places, part, cropped)
        elif store.kept is not None:
            images = select(images, places)
        normalise.into(out[piece], images)
    return out


def affine_batch(normalise: Normaliser, store: Store, indices: Ints, maps: npt.NDArray[np.float32]) -> Tensor:
    """A batch by one resampling (bilinear, edges continued) that resizes and augments small images at once.

    maps: [n, 2, 3], see augment.affine_maps. torch's affine_grid is not used: its matrix product may round otherwise
    in batches of another size.
    """
    form = normalise.form
    chosen = to_device(torch.from_numpy(indices), store.images.device)
    images = to_device(store.images.index_select(0, chosen), form.device)
    mean, factor = (one[: images.shape[1], None, None] for one in (normalise.mean, normalise.factor))
    centres = (torch.arange(form.size, device=form.device) * 2 + 1) / form.size - 1
    a = to_device(torch.from_numpy(maps), form.device)[..., None, None]
    x, y = centres[None, None, :], centres[None, :, None]
    grid = torch.stack([a[:, axis, 0] * x + a[:, axis, 1] * y + a[:, axis, 2] for axis in (0, 1)], -1)
    floats = (images - mean) * factor
    floats = functional.grid_sample(floats, grid, padding_mode="border", align_corners=False)
    out = form.empty(len(indices))
    return out.copy_(floats.expand_as(out))
