"""The precision that a network computes in (`--amp`)."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from train.settings import Settings, SettingsError


class Precision:
    """Mixed precision: autocast around the forward pass, and with fp16 a scaler of the loss.

    Weights, gradients and the optimizer stay float32. fp16 works on the CPU, too, but without its instructions is 20
    times slower there than float32: for tests. A step whose gradients overflowed is skipped on all ranks or on none:
    ddp and horovod sum gradients first, so an infinity of one rank is everyone's; where gradients are sharded (fsdp)
    torch takes the worst verdict of all ranks.
    """

    DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}

    def __init__(self, settings: Settings, device: torch.device) -> None:
        """Raises SettingsError."""
        self.device, self.dtype = device, self.DTYPES.get(settings.amp)
        if self.dtype is torch.bfloat16 and device.type == "cuda" and not torch.cuda.is_bf16_supported(False):
            raise SettingsError(
                f"--amp bf16: {torch.cuda.get_device_name(device)} cannot compute in it: use --amp fp16"
            )
        self.scaler = torch.amp.GradScaler(device.type) if self.dtype is torch.float16 else None

    def autocast(self) -> AbstractContextManager[Any]:
        """Around forward pass and loss, not around backward."""
        return torch.autocast(self.device.type, self.dtype) if self.dtype else nullcontext()

    def backward(self, loss: Tensor) -> None:
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    @property
    def skips_overflow(self) -> bool:
        """Whether a step whose gradients are not finite changes no weight."""
        return self.scaler is not None

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients in their own size, for their norm: once, after a step's last backward and its synchronising."""
        if self.scaler:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's step, or none where gradients overflowed; then the scale of the next one."""
        if self.scaler:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()

    def state(self) -> dict[str, Any] | None:
        """For a checkpoint: scale and its growth; waits for the GPU. None without a scaler."""
        return self.scaler.state_dict() if self.scaler else None

    def load(self, state: dict[str, Any] | None) -> None:
        """A state of another --amp is ignored."""
        if self.scaler and state:
            self.scaler.load_state_dict(state)
