"""Losses of single samples; mixup and CutMix as functions of (seed, step) and the place in the global batch."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from train.order import random_words, uniform

# Weights of the auxiliary heads' losses, by the field of torchvision's named tuples: GoogLeNet's (Szegedy et al. 2014,
# 5) and what is usual for Inception v3.
AUXILIARY = {"aux_logits1": 0.3, "aux_logits2": 0.3, "aux_logits": 0.4}
# First coordinate of the random numbers here: apart from order's (seed, epoch, ...) and dropout's (seed, step, rank).
STREAM = 0x6D69785F00000000
CHOICE, LAM, ROW, COLUMN = range(4)
GRID = 2.0**-20


def logits(outputs: Any) -> Tensor:
    """[n, classes]: the model's answer, without the auxiliary heads that GoogLeNet and Inception have in training."""
    answer: Tensor = outputs.logits if hasattr(outputs, "logits") else outputs
    return answer


def right(outputs: Tensor, targets: Tensor) -> Tensor | None:
    """Which answers are right, bool [n], for outputs [n, classes] and int64 targets [n]; None for anything else, of
    which there is no accuracy. outputs: as `logits` gives them.
    """
    if not is_classification(outputs, targets):
        return None
    return outputs.argmax(1) == targets


def right_among_five(outputs: Tensor, targets: Tensor) -> Tensor | None:
    """Whether the target is among the five best answers, bool [n]; None where `right` is, and for five classes or
    fewer, of which that says nothing."""
    if not is_classification(outputs, targets) or outputs.shape[1] <= 5:
        return None
    return (outputs.topk(5, dim=1).indices == targets[:, None]).any(1)


def is_classification(outputs: Tensor, targets: Tensor) -> bool:
    return outputs.dim() == 2 and targets.dim() == 1 and targets.dtype == torch.int64


def per_sample(outputs: Any, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross entropy of each sample, float32 [n], also under autocast; auxiliary heads count with AUXILIARY's weights.

    outputs: [n, classes], or torchvision's GoogLeNetOutputs or InceptionOutputs. labels: int64 [n]. smoothing: the part
    of a label's weight that goes to all classes alike. Raises TypeError for other outputs.
    """
    if isinstance(outputs, Tensor):
        return functional.cross_entropy(outputs.float(), labels, reduction="none", label_smoothing=smoothing)
    if not hasattr(outputs, "logits"):
        raise TypeError(f"the model returned {type(outputs).__name__}; a classifier returns logits, [n, classes]")
    loss = per_sample(outputs.logits, labels, smoothing)
    for name, weight in AUXILIARY.items():
        head = getattr(outputs, name, None)
        if head is not None:
            loss = loss + weight * per_sample(head, labels, smoothing)
    return loss


def mixed(outputs: Any, labels: Tensor, partners: Tensor, lam: float, smoothing: float = 0.0) -> Tensor:
    """Losses of mixed samples, float32 [n]: `lam` of the own label's, 1 - lam of the partner's."""
    if lam == 1.0:
        return per_sample(outputs, labels, smoothing)
    return lam * per_sample(outputs, labels, smoothing) + (1 - lam) * per_sample(outputs, partners, smoothing)


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

    def apply(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
        """images [n + 1, C, H, W] and labels [n + 1], the last one being the last sample's partner.

        Returns (images [n, C, H, W], labels [n], partners' labels [n], lam): lam is the own image's real part.
        """
        own, partner = images[:-1], images[1:]
        if self.cuts:
            height, width = images.shape[-2:]
            rows, columns = self.box(height, width)
            area = (rows.stop - rows.start) * (columns.stop - columns.start)
            lam, result = 1 - area / (height * width), own.clone()
            result[..., rows, columns] = partner[..., rows, columns]
        else:
            # Two products and a sum, each rounded on its own: a fused one may differ between a vector and its tail.
            lam, result = self.drawn, own.mul(self.drawn).add_(partner.mul(1 - self.drawn))
        return result, labels[:-1], labels[1:], lam

    def _uniform(self, axis: int) -> float:
        return float(uniform(STREAM, self.seed, self.step, axis)[0])
