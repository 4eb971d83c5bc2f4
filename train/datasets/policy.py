"""Changes of training images beyond the usual ones: torchvision's policies, and erasing a part of the image.

They draw from torch's generator of the CPU alone, which is seeded for each sample by (seed, epoch, sample number) and
is afterwards as it was before. So a sample gets the same changes in any batch, rank and worker, and after a resume.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from train.model import torchvision_cpu
from train.order import Ints, random_words

POLICY_AXIS, ERASING_AXIS = 64, 65  # of the random numbers; augment.py has the axes below
POLICIES = {"trivial": "TrivialAugmentWide", "rand": "RandAugment"}


@cache
def transform(name: str, **options: Any) -> Any:
    """A transform of torchvision.transforms.v2, which takes a second to import: only where one is asked for."""
    torchvision_cpu.watch()
    from torchvision.transforms import v2

    return getattr(v2, name)(**options)


@contextmanager
def seeded() -> Iterator[Callable[[int], torch.Generator]]:
    """The function that seeds the CPU's generator; those of GPUs are left alone."""
    before = torch.get_rng_state()
    try:
        yield torch.default_generator.manual_seed
    finally:
        torch.set_rng_state(before)


@dataclass(frozen=True)
class Policy:
    """TrivialAugmentWide (Mueller, Hutter 2021) or RandAugment (Cubuk et al. 2020), with torchvision's defaults.

    They work on Pillow's images: twice as fast as on tensors, and the same bits for any number of threads.
    """

    name: str
    seed: int

    def change(self, images: Tensor, epoch: int, indices: Ints) -> None:
        """images: uint8 [n, 3, H, W] on the CPU, in any layout, changed in place."""
        policy = transform(POLICIES[self.name])
        words = random_words(self.seed, epoch, indices, POLICY_AXIS).tolist()
        pixels = images.permute(0, 2, 3, 1).numpy()
        with seeded() as seed:
            for image, word in zip(pixels, words, strict=True):
                seed(word)
                image[:] = np.asarray(policy(Image.fromarray(image)))


@dataclass(frozen=True)
class Erasing:
    """Random erasing (Zhong et al. 2020), with torchvision's defaults: with probability `part` a rectangle becomes 0,
    the mean colour of normalised images.
    """

    part: float
    seed: int

    def change(self, images: Tensor, epoch: int, indices: Ints) -> None:
        """images: floats [n, 3, H, W] on any device, changed in place. Waits for no device."""
        eraser = transform("RandomErasing", p=self.part)
        words = random_words(self.seed, epoch, indices, ERASING_AXIS).tolist()
        with seeded() as seed:
            for image, word in zip(images, words, strict=True):
                seed(word)
                if torch.rand(1) >= self.part:  # as the transform itself draws, which would copy the image
                    continue
                box = eraser.make_params([image])
                if box["v"] is not None:
                    image[:, box["i"] : box["i"] + box["h"], box["j"] : box["j"] + box["w"]] = 0.0
