"""The random changes of training images, as pure functions of (seed, epoch, sample number). NumPy only.

The last coordinate of every draw is its axis: 0, 1, ... one for each number that a sample needs.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from train.datasets.base import Augmentation
from train.order import Ints, uniform

MIRROR_AXIS = 4
TRIES = 10  # of torchvision's RandomResizedCrop, before it takes the centre
RATIOS = (3 / 4, 4 / 3)
BOX_AXES = 2 * TRIES + 3

Box = tuple[int, int, int, int]  # left, top, right, bottom


@dataclass(frozen=True)
class Shifts:
    """Where each crop begins, relative to its image (negative: outside, black), and whether it is mirrored."""

    rows: Ints
    columns: Ints
    mirror: npt.NDArray[np.bool_]


def mirrored(augmentation: Augmentation, seed: int, epoch: int, indices: Ints) -> npt.NDArray[np.bool_]:
    if not augmentation.mirror:
        return np.zeros(len(indices), dtype=np.bool_)
    return uniform(seed, epoch, indices, MIRROR_AXIS) < 0.5


def shifts(augmentation: Augmentation, zoom: float, seed: int, epoch: int, indices: Ints) -> Shifts:
    """Crops as of torchvision's RandomCrop(size, padding), each place equally likely, of images that were resized to
    `zoom` times their stored size.
    """
    reach = round(augmentation.padding * zoom)
    rows, columns = (
        (uniform(seed, epoch, indices, axis) * (2 * reach + 1)).astype(np.int64) - reach for axis in (0, 1)
    )
    return Shifts(rows, columns, mirrored(augmentation, seed, epoch, indices))


def affine_maps(augmentation: Augmentation, seed: int, epoch: int, indices: Ints) -> npt.NDArray[np.float32]:
    """[N, 2, 3]: the map of each sample from output to input, in the convention of torch's affine_grid."""
    draw = [uniform(seed, epoch, indices, axis) * 2 - 1 for axis in range(4)]
    angle = np.deg2rad(augmentation.degrees) * draw[0]
    zoom = 1 + augmentation.scale * draw[1]
    side = np.where(mirrored(augmentation, seed, epoch, indices), -1.0, 1.0)
    shift = 2 * augmentation.shift
    rows = [
        [zoom * np.cos(angle) * side, -zoom * np.sin(angle), shift * draw[2]],
        [zoom * np.sin(angle) * side, zoom * np.cos(angle), shift * draw[3]],
    ]
    return np.ascontiguousarray(np.array(rows, dtype=np.float32).transpose(2, 0, 1))


def identity_maps(count: int) -> npt.NDArray[np.float32]:
    return np.tile(np.array([[1, 0, 0], [0, 1, 0]], dtype=np.float32), (count, 1, 1))


def box_draws(seed: int, epoch: int, indices: Ints) -> npt.NDArray[np.float64]:
    """[N, BOX_AXES]: what `resized_crop` and the mirror of each sample are made of. The last is the mirror's."""
    return uniform(seed, epoch, indices[:, None], np.arange(BOX_AXES, dtype=np.int64)[None])


def resized_crop(draws: npt.NDArray[np.float64], width: int, height: int, areas: tuple[float, float]) -> Box:
    """The box of torchvision's RandomResizedCrop, from random numbers in [0, 1) instead of a generator."""
    area = width * height * (areas[0] + (areas[1] - areas[0]) * draws[:TRIES])
    ratio = np.exp(np.log(RATIOS[0]) + np.log(RATIOS[1] / RATIOS[0]) * draws[TRIES : 2 * TRIES])
    widths, heights = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
    fits = np.flatnonzero((widths >= 1) & (widths <= width) & (heights >= 1) & (heights <= height))
    if len(fits):
        w, h = int(widths[fits[0]]), int(heights[fits[0]])
        left = int(draws[2 * TRIES] * (width - w + 1))
        top = int(draws[2 * TRIES + 1] * (height - h + 1))
        return left, top, left + w, top + h
    w = min(width, round(height * RATIOS[1]))
    h = min(height, round(width / RATIOS[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h
