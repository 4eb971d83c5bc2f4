"""Changes of weights in few bits (`--compress` with --sync-every), and gradients in bf16 and fp16: floats to bytes and
back, on the CPU.

int8 and int4 cut the values into blocks, each with one float32 scale: its largest value, divided by the largest number
of the code, to which the others are rounded. So a block's error is at most half a scale for each value, wherever its
values lie, and what a value lost goes into the next exchange (train.parallel.exchange: error feedback).

All works on slices of SLICE values, each coded by itself: so many that the calls of torch cost little beside the work,
and so few that they stay in a core's cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

SLICE = 130048  # a multiple of each BLOCK
BLOCK = {8: 256, 4: 128}  # values with one scale, by the bits of a value
LEAST_SCALE = 1e-30  # far smaller values become 0
FLOATS = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Floats:
    """Values in another floating-point type; float32 loses nothing."""

    dtype: torch.dtype

    @property
    def is_exact(self) -> bool:
        return self.dtype == torch.float32

    def size(self, count: int) -> int:
        """Bytes of so many values."""
        return count * self.dtype.itemsize

    def encode_slice(self, values: Tensor, code: Tensor, lost: Tensor | None = None) -> None:
        """lost: gets values less what their code says."""
        coded = code.view(self.dtype).copy_(values)
        if lost is not None:
            torch.sub(values, coded, out=lost)

    def decode_slice(self, code: Tensor, values: Tensor) -> None:
        values.copy_(code.view(self.dtype))


@dataclass(frozen=True)
class Blocks:
    """Values of `bits` bits, 8 or 4, in blocks; the last one is filled up with zeros. The code of a slice is the scales
    of its blocks, then their values. What is not finite makes its block so."""

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
        """Bytes of so many values."""
        return -(-count // self.block) * (4 + self.row)

    def parts(self, code: Tensor) -> tuple[Tensor, Tensor]:
        """Views of a slice's code: scales, float32 [blocks]; values, int8 [blocks, row]."""
        blocks = len(code) // (4 + self.row)
        return code[: blocks * 4].view(torch.float32), code[blocks * 4 :].view(torch.int8).view(blocks, self.row)

    def encode_slice(self, values: Tensor, code: Tensor, lost: Tensor | None = None) -> None:
        """lost: gets values less what their code says."""
        rows, (scales, numbers) = filled(values, self.block), self.parts(code)
        rounded = rows.abs()
        torch.amax(rounded, 1, out=scales)
        factors = scales.div_(self.largest).clamp(min=LEAST_SCALE).reciprocal_()
        torch.mul(rows, factors[:, None], out=rounded)
        rounded.round_()
        numbers.copy_(rounded if self.bits == 8 else self.packed(rounded.to(torch.int8)))
        if lost is not None:
            torch.sub(values, rounded.mul_(scales[:, None]).view(-1)[: len(values)], out=lost)

    def decode_slice(self, code: Tensor, values: Tensor) -> None:
        scales, numbers = self.parts(code)
        numbers = numbers if self.bits == 8 else self.unpacked(numbers)
        if len(values) == numbers.numel():
            torch.mul(numbers, scales[:, None], out=values.view(numbers.shape))
        else:
            values.copy_((numbers * scales[:, None]).view(-1)[: len(values)])

    def packed(self, numbers: Tensor) -> Tensor:
        """Pairs of 4 bits: int8 [blocks, block] -> int8 [blocks, block / 2]"""
        half = self.block // 2
        return numbers[:, :half] & 15 | numbers[:, half:] << 4

    def unpacked(self, packed: Tensor) -> Tensor:
        """The reverse."""
        return torch.cat([packed << 4 >> 4, packed >> 4], dim=1)  # shifts to the right keep the sign


Codec = Floats | Blocks


def codec_of(kind: str) -> Codec:
    """kind: of train.settings.Compression."""
    return Floats(FLOATS[kind]) if kind in FLOATS else Blocks({"int8": 8, "int4": 4}[kind])


def slices(codec: Codec, start: int, end: int) -> Iterator[tuple[slice, slice]]:
    """(values, bytes of their code) of each slice of the values from start, which is a multiple of SLICE, to end."""
    for first in range(start, end, SLICE):
        last = min(first + SLICE, end)
        yield slice(first, last), slice(codec.size(first), codec.size(last))


def encode(codec: Codec, values: Tensor) -> Tensor:
    """values: float32 [n]. Returns uint8 [codec.size(n)]."""
    code = torch.empty(codec.size(len(values)), dtype=torch.uint8)
    for part, place in slices(codec, 0, len(values)):
        codec.encode_slice(values[part], code[place])
    return code


def decode(codec: Codec, code: Tensor, values: Tensor) -> Tensor:
    """The reverse, into values, float32 [n]."""
    for part, place in slices(codec, 0, len(values)):
        codec.decode_slice(code[place], values[part])
    return values


def filled(values: Tensor, block: int) -> Tensor:
    """Rows of `block` values, the last one filled up with zeros."""
    if lacking := -len(values) % block:
        values = torch.cat([values, values.new_zeros(lacking)])
    return values.view(-1, block)
