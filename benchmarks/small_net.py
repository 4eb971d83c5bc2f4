"""A convolutional network that takes almost no time at 224 pixels, so that the input limits the training's speed.

The trainer takes it as --model benchmarks.small_net:small_net. torchvision's own models are too slow on a CPU: the
fastest, shufflenet_v2_x0_5, takes several times as long for an image as decoding and resizing it.
"""

from torch import Tensor, nn


class Thinned(nn.Module):
    """Every 16th pixel of every 16th row. A strided convolution or pool would take longer than all other layers."""

    def forward(self, images: Tensor) -> Tensor:
        return images[..., ::16, ::16]


def small_net(num_classes: int = 10) -> nn.Module:
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
