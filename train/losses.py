"""Losses of single samples, and which answers are right; mixup and CutMix as functions of (seed, step) and the place in
the global batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from train import own_parts
from train.names import is_own
from train.order import random_words, uniform
from train.settings import Settings

Loss = Callable[[Any, Any], Tensor]  # (outputs, targets) -> a loss for each sample, [n]

# Weights of the auxiliary heads' losses, by the field of torchvision's named tuples: GoogLeNet's (Szegedy et al. 2014,
# 5) and what is usual for Inception v3; by the key in its segmentation models' dicts as in torchvision's references.
AUXILIARY = {"aux_logits1": 0.3, "aux_logits2": 0.3, "aux_logits": 0.4, "aux": 0.5}
NOT_COUNTED = -100  # a pixel of this class: cross entropy's own default
# First coordinate of the random numbers here: apart from order's (seed, epoch, ...) and dropout's (seed, step, rank).
STREAM = 0x6D69785F00000000
CHOICE, LAM, ROW, COLUMN = range(4)
GRID = 2.0**-20


def logits(outputs: Any) -> Any:
    """The model's answer, without the auxiliary heads that torchvision's models have in training: GoogLeNet and
    Inception return it as `logits`, those for segmentation as `out`. Of other models all that they return.
    """
    if isinstance(outputs, dict):
        return outputs.get("out", outputs)
    return getattr(outputs, "logits", outputs)


def make(settings: Settings, smoothing: bool = True) -> Loss:
    """The loss of `settings`; smoothing: with its label smoothing, as in training. Raises SettingsError."""
    if is_own(settings.loss):
        return partial(checked, own_parts.load("--loss", settings.loss))
    return partial(per_sample, smoothing=settings.label_smoothing if smoothing else 0.0)


class LossError(Exception):
    """A loss that is not one value for each sample; the message says what came instead."""


def checked(loss: Loss, outputs: Any, targets: Any) -> Tensor:
    """The losses of the user's own function, float32. Raises LossError unless they are [n], for n samples."""
    losses, count = loss(outputs, targets), len(tree_leaves(targets)[0])
    if isinstance(losses, Tensor) and losses.shape == (count,) and losses.dtype.is_floating_point:
        return losses.float()
    is_tensor = isinstance(losses, Tensor)
    got = (
        f"{str(losses.dtype).removeprefix('torch.')} {list(losses.shape)}"
        if is_tensor
        else f"a {type(losses).__name__}"
    )
    why = ""
    if is_tensor and losses.ndim == 0:
        why = (
            ". One value of the whole batch would weight samples wrongly where ranks have different shares of it, and "
            'where a batch is short or padded: use reduction="none", and a mean over what belongs to one sample'
        )
    raise LossError(f"it returned {got} for {count} samples, and [{count}] is needed, one loss for each sample{why}")


def per_sample(outputs: Any, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross entropy of each sample, float32 [n], also under autocast; auxiliary heads count with AUXILIARY's weights.

    outputs: [n, classes] or, for class numbers of pixels, [n, classes, ...]; or torchvision's GoogLeNetOutputs,
    InceptionOutputs, or dict of a model for segmentation. targets: whole numbers, [n] or [n, ...]; of pixels a sample's
    loss is the mean, without those of class NOT_COUNTED. smoothing: the part of a label's weight that goes to all
    classes alike. Raises TypeError for other outputs.
    """
    if isinstance(outputs, Tensor):
        targets = targets if targets.dtype.is_floating_point else targets.long()
        losses = functional.cross_entropy(outputs.float(), targets, reduction="none", label_smoothing=smoothing)
        return losses if losses.ndim < 2 else mean_of_pixels(losses, targets)
    answer = logits(outputs)
    if not isinstance(answer, Tensor):
        raise TypeError(f"the model returned {type(outputs).__name__}; a classifier returns logits, [n, classes]")
    loss = per_sample(answer, targets, smoothing)
    for name, weight in AUXILIARY.items():
        head = outputs.get(name) if isinstance(outputs, dict) else getattr(outputs, name, None)
        if head is not None:
            loss = loss + weight * per_sample(head, targets, smoothing)
    return loss


def mean_of_pixels(values: Tensor, targets: Tensor) -> Tensor:
    """Of values [n, ...] the mean of each sample, [n], over the pixels that count."""
    counted = (targets != NOT_COUNTED).flatten(1)
    return (values.flatten(1) * counted).sum(1) / counted.sum(1).clamp(min=1)


def right(outputs: Any, targets: Any) -> Tensor | None:
    """Which samples are answered right, bool [n], for outputs [n, classes] and whole numbers [n]; for those of pixels,
    [n, classes, ...] and [n, ...], the part of a sample's pixels that are, float32 [n]. None where there is no such
    thing: regression, structures of the user's own. outputs: as the model returned them.
    """
    outputs = logits(outputs)
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)) or not is_class_number(targets):
        return None
    if outputs.ndim < 2 or outputs.shape[1] < 2 or targets.shape != (outputs.shape[0], *outputs.shape[2:]):
        return None
    equal = outputs.argmax(1) == targets
    return equal if equal.ndim == 1 else mean_of_pixels(equal.float(), targets)


def right_among_five(outputs: Any, targets: Any) -> Tensor | None:
    """Whether the target is among the five best answers, bool [n], for outputs [n, classes] and whole numbers [n]; None
    for anything else, and for five classes or fewer, of which it says nothing."""
    outputs = logits(outputs)
    if right(outputs, targets) is None or outputs.ndim != 2 or outputs.shape[1] <= 5:
        return None
    return (outputs.topk(5, dim=1).indices == targets[:, None]).any(1)


def is_class_number(targets: Tensor) -> bool:
    return not (targets.dtype.is_floating_point or targets.dtype.is_complex or targets.dtype == torch.bool)


def mixed(outputs: Any, labels: Tensor, partners: Tensor, lam: float, loss: Loss = per_sample) -> Tensor:
    """Losses of mixed samples, [n]: `lam` of the own label's, 1 - lam of the partner's."""
    if lam == 1.0:
        return loss(outputs, labels)
    return lam * loss(outputs, labels) + (1 - lam) * loss(outputs, partners)


def beta(alpha: float, key: int) -> float:
    """A number of Beta(alpha, alpha), a function of the key; in steps of GRID, so that the last bits of another
    processor's exp and log do not show."""
    drawn = np.random.Generator(np.random.Philox(key=key)).beta(alpha, alpha)
    return float(np.round(drawn / GRID) * GRID)


@dataclass(frozen=True)
class Mix:
    """Mixup (Zhang et al. 2017) or CutMix (Yun et al. 2019) of one optimizer step.

    The partner of the sample at place p of the global batch is the one at place p + 1, cyclically, so that any cut into
    ranks and passes gives the same images. mixup, cutmix: alpha of each one's Beta distribution, 0: off; where both are
    on, a coin is tossed for each step.
    """

    seed: int
    step: int
    mixup: float
    cutmix: float

    @property
    def cuts(self) -> bool:
        """CutMix in this step."""
        if not (self.mixup and self.cutmix):
            return self.cutmix > 0
        return bool(self._uniform(CHOICE) < 0.5)

    @cached_property
    def drawn(self) -> float:
        """The part of the own image, before a box is cut off at the border."""
        alpha = self.cutmix if self.cuts else self.mixup
        return beta(alpha, int(random_words(STREAM, self.seed, self.step, LAM)[0])) if alpha else 1.0

    def box(self, height: int, width: int) -> tuple[slice, slice]:
        """Rows and columns that CutMix takes from the partner: of area 1 - lam, cut off at the image's border."""
        half = 0.5 * (1 - self.drawn) ** 0.5
        row, column = self._uniform(ROW) * height, self._uniform(COLUMN) * width
        rows = slice(max(0, int(row - half * height)), min(height, int(row + half * height)))
        columns = slice(max(0, int(column - half * width)), min(width, int(column + half * width)))
        return rows, columns

    def apply(self, images: Tensor, labels: Tensor, good: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, float]:
        """images [n + 1, C, H, W] and labels [n + 1], the last one being the last sample's partner.

        good: bool [n + 1], or None: all are. A sample whose partner is bad is mixed with itself, so it stays as it is;
        that does not depend on the cut into ranks.
        Returns (images [n, C, H, W], labels [n], partners' labels [n], lam): lam is the own image's real part.
        """
        own, partner, partners = images[:-1], images[1:], labels[1:]
        if good is not None:
            known = good[1:].to(images.device)
            partner, partners = partner.where(known[:, None, None, None], own), partners.where(known, labels[:-1])
        if self.cuts:
            height, width = images.shape[-2:]
            rows, columns = self.box(height, width)
            area = (rows.stop - rows.start) * (columns.stop - columns.start)
            lam, result = 1 - area / (height * width), own.clone()
            result[..., rows, columns] = partner[..., rows, columns]
        else:
            # Two products and a sum, each rounded on its own: a fused one may differ between a vector and its tail.
            lam, result = self.drawn, own.mul(self.drawn).add_(partner.mul(1 - self.drawn))
        return result, labels[:-1], partners, lam

    def _uniform(self, axis: int) -> float:
        return float(uniform(STREAM, self.seed, self.step, axis)[0])
