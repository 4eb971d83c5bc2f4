"""Changes of weights in few bits (`--compress` with --sync-every): float32 values to bytes and back, on the CPU.

int8 and int4 cut the values into blocks, each with one float32 scale: its largest value, divided by the largest number
of the code, to which the others are rounded. So a block's error is at most half a scale for each value, wherever its
values lie, and what a value lost goes into the next exchange (train.parallel.exchange: error feedback).

A pass works on SLICE values at a time: they stay in a core's cache, and torch starts no threads for so few, which the
training beside it has.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SLICE = 32768
BLOCK = {8: 256, 4: 128}  # values with one scale, by the bits of a value
FLOATS = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Floats:
    """Values in another floating-point type; float32 loses nothing."""

    dtype: torch.dtype
    block: int = 1

    @property
    def is_exact(self) -> bool:
        return self.dtype == torch.float32

    def size(self, count: int) -> int:
        """Bytes of so many values."""
        return count * self.dtype.itemsize

    def encode(self, values: Tensor) -> Tensor:
        """values: float32 [n]. Returns uint8 [size(n)]."""
        return values.to(self.dtype).view(torch.uint8)

    def decode(self, code: Tensor) -> Tensor:
        """The reverse, float32 [n]; may be the same memory where nothing is lost."""
        return code.view(self.dtype).float()


@dataclass(frozen=True)
class Blocks:
    """Values of `bits` bits, 8 or 4, in blocks. `encode` and `decode` take multiples of `block` values, and at the end
    of a tensor any number, which is filled up with zeros."""

    bits: int
    is_exact: bool = False

    @property
    def block(self) -> int:
        return BLOCK[self.bits]

    @property
    def row(self) -> int:
        """Bytes of a block, without its scale."""
        return self.block * self.bits // 8

    @property
    def largest(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def size(self, count: int) -> int:
        """Bytes of so many values: the scales, then the values."""
        blocks = -(-count // self.block)
        return blocks * (4 + self.row)

    def encode(self, values: Tensor) -> Tensor:
        """values: float32 [n]; those that are not finite make their block so. Returns uint8 [size(n)]."""
        count = len(values)
        blocks = -(-count // self.block)
        code = torch.empty(self.size(count), dtype=torch.uint8)
        scales, numbers = code[: blocks * 4].view(torch.float32), code[blocks * 4 :].view(blocks, self.row)
        step = SLICE // self.block
        for first in range(0, blocks, step):
            rows = filled(values[first * self.block : (first + step) * self.block], self.block)
            scale = torch.linalg.vector_norm(rows, torch.inf, dim=1).div_(self.largest)
            scales[first : first + step] = scale
            scale = scale.masked_fill_(scale == 0, 1)
            numbers[first : first + step] = self.packed(rows.div(scale[:, None]).round_().to(torch.int8))
        return code

    def decode(self, code: Tensor) -> Tensor:
        """The reverse, float32, as many values as whole blocks have."""
        blocks = len(code) // (4 + self.row)
        scales, numbers = code[: blocks * 4].view(torch.float32), code[blocks * 4 :].view(blocks, self.row)
        values = torch.empty(blocks, self.block)
        step = SLICE // self.block
        for first in range(0, blocks, step):
            part = slice(first, first + step)
            torch.mul(self.unpacked(numbers[part]), scales[part, None], out=values[part])
        return values.view(-1)

    def packed(self, numbers: Tensor) -> Tensor:
        """int8 [blocks, block] -> uint8 [blocks, block * bits / 8]"""
        if self.bits == 8:
            return numbers.view(torch.uint8)
        half = self.block // 2
        return (numbers[:, :half] & 15 | numbers[:, half:] << 4).view(torch.uint8)

    def unpacked(self, packed: Tensor) -> Tensor:
        """The reverse, int8."""
        numbers = packed.view(torch.int8)
        if self.bits == 8:
            return numbers
        return torch.cat([numbers << 4 >> 4, numbers >> 4], dim=1)  # shifts to the right keep the sign


Codec = Floats | Blocks


def codec_of(kind: str) -> Codec:
    """kind: of train.settings.Compression."""
    return Floats(FLOATS[kind]) if kind in FLOATS else Blocks({"int8": 8, "int4": 4}[kind])


def filled(values: Tensor, block: int) -> Tensor:
    """Rows of `block` values, the last one filled up with zeros."""
    if lacking := -len(values) % block:
        values = torch.cat([values, values.new_zeros(lacking)])
    return values.view(-1, block)
