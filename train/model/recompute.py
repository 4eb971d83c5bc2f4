"""Activation checkpointing: a block keeps its input only, and computes its activations again in the backward pass.

torch.utils.checkpoint without reentrance, which works under DDP, with several losses and with several backward passes.
A block becomes an instance of a subclass of its own class (as fully_shard does it), not a child of a wrapper: names of
parameters, buffers and modules stay as they are.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

LARGEST_PART = 4  # a block holds at most one in so many of the network's layers


def layers(module: nn.Module) -> int:
    """Modules without children."""
    return sum(1 for part in module.modules() if next(part.children(), None) is None)


def blocks(network: nn.Module) -> list[str]:
    """Names of the blocks, in order: the outermost modules that are more than a chain (nn.Sequential, nn.ModuleList)
    and hold at most a quarter of the network's layers. ResNet's BasicBlock, ViT's EncoderBlock, EfficientNet's MBConv;
    none in AlexNet and VGG, which are chains of single layers.
    """
    found, most = [], layers(network) / LARGEST_PART

    def search(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            is_chain = isinstance(child, nn.Sequential | nn.ModuleList)
            if next(child.children(), None) is not None and not is_chain and layers(child) <= most:
                found.append(prefix + name)
            else:
                search(child, f"{prefix}{name}.")

    search(network, "")
    return found


def checkpoint_blocks(network: nn.Module) -> list[str]:
    """Makes every block recompute its activations, in place. Returns the blocks' names, none for a plain chain."""
    names = blocks(network)
    for name in names:
        block = network.get_submodule(name)
        block.__class__ = recomputed(type(block))  # type: ignore[arg-type]  # mypy: a class has no __hash__
    return names


@cache
def recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    """The subclass of `kind` whose forward pass is recomputed in the backward pass."""

    def forward(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        run = partial(kind.forward, self)
        if not torch.is_grad_enabled():
            return run(*arguments, **named)
        if torch.compiler.is_compiling():  # the compiler updates buffers once, and takes no contexts
            return checkpoint(run, *arguments, use_reentrant=False, **named)
        return checkpoint(run, *arguments, use_reentrant=False, context_fn=partial(contexts, self), **named)

    return type(f"Recomputed{kind.__name__}", (kind,), {"forward": forward, "__module__": kind.__module__})


def contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around the forward pass, and around its recomputation."""
    return nullcontext(), buffers_kept(block)


@contextmanager
def buffers_kept(block: nn.Module) -> Iterator[None]:
    """Inside, the block works on copies of its buffers: batch statistics would otherwise see each batch twice.

    The copies hold what the forward pass left. In training, batch normalisation does not read it, so the recomputed
    activations are the same.
    """
    held = [(module, name, buffer) for module in block.modules() for name, buffer in module._buffers.items()]
    for module, name, buffer in held:
        module._buffers[name] = buffer if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for module, name, buffer in held:
            module._buffers[name] = buffer
