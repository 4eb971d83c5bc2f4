"""Arrays whose images are changed by a policy: what a worker process does for them, or this one where there are none.

A policy takes a tenth to half a millisecond for an image: too long for one process in front of a GPU.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from train.datasets.augment import shifts
from train.datasets.base import ArraySource, Augmentation
from train.datasets.decode import Bad, Task
from train.datasets.policy import Policy
from train.datasets.transform import Form, Store, crop
from train.order import Ints


@dataclass(frozen=True)
class ArrayJob:
    """train, test: uint8 [N, C, H, W], or [N, C, W, H] where transposed."""

    train: Tensor
    test: Tensor
    transposed: bool
    augmentation: Augmentation
    seed: int
    size: int
    channels_last: bool
    policy: Policy

    @staticmethod
    def of(
        train: ArraySource, test: ArraySource, change: Augmentation, size: int, channels_last: bool, policy: Policy
    ) -> "ArrayJob":
        images = torch.from_numpy(train.images), torch.from_numpy(test.images)
        return ArrayJob(*images, train.transposed, change, policy.seed, size, channels_last, policy)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of one sample."""
        return (self.size, self.size, 3) if self.channels_last else (3, self.size, self.size)

    def for_workers(self) -> "ArrayJob":
        """With the images in shared memory."""
        return replace(self, train=self.train.clone().share_memory_(), test=self.test.clone().share_memory_())

    def task(self, indices: Ints, epoch: int | None) -> Task:
        return Task(indices, epoch)

    def into(self, out: Tensor, task: Task) -> list[Bad]:
        """out: uint8 [n, *shape]. Resize, crop and mirror, then the policy. No sample of an array is bad."""
        stored = self.test if task.epoch is None else self.train
        form = Form(self.size, self.channels_last, torch.device("cpu"))
        images = Store(stored, self.transposed, form).sized(task.indices)
        if task.epoch is not None:
            zoom = self.size / stored.shape[-1]
            change = shifts(self.augmentation, zoom, self.seed, task.epoch, task.indices)
            images = crop(images, np.arange(len(images), dtype=np.int64), change)
        planes = out.permute(0, 3, 1, 2) if self.channels_last else out
        planes.copy_(images.expand_as(planes))
        if task.epoch is not None:
            self.policy.change(planes, task.epoch, task.indices)
        return []
