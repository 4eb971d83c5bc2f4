"""A convolutional network that takes almost no time at 224 pixels, so that the input limits the training's speed.

Importing this module registers it as "small_net" for `torchvision.models.get_model`. torchvision's own models are too
slow on a CPU: the fastest, shufflenet_v2_x0_5, takes several times as long for an image as decoding and resizing it.
"""

from typing import Any

from torch import Tensor, nn
from torchvision.models._api import register_model


class Thinned(nn.Module):
    """Every 16th pixel of every 16th row. A strided convolution or pool would take longer than all other layers."""

    def forward(self, images: Tensor) -> Tensor:
        return images[..., ::16, ::16]


def small_net(weights: None = None, num_classes: int = 10, **_: Any) -> nn.Module:
    """Two convolutions on 14 x 14 of 224 x 224 pixels."""
    return nn.Sequential(
        Thinned(),
        nn.Conv2d(3, 16, 3),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, num_classes),
    )


small_net.__module__ = "torchvision.models.small_net"  # the trainer accepts only torchvision's models
register_model()(small_net)
