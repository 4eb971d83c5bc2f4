"""Files of images for the benchmarks, written by themselves, as nothing can be downloaded: STL-10's, and JPEGs."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from PIL import Image

SIZE = 96  # pixels of STL-10's images
CLASSES = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
JPEG_SIZE = (500, 375)  # pixels: the commonest size of ImageNet's files, which have 110 KB on average
DISTINCT = 200  # JPEGs that are made; the others are further names of theirs, decoded all the same


def write_stl10(root: Path, images: int, held_out: int = 8) -> None:
    """Write STL-10's binary files: smooth colours with noise, column by column; labels count from 1."""
    folder = root / "stl10_binary"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for part, count in (("train", images), ("test", held_out)):
        coarse = random.integers(0, 200, (count, 3, SIZE // 8, SIZE // 8), np.uint8)
        pixels = coarse.repeat(8, 2).repeat(8, 3) + random.integers(0, 56, (count, 3, SIZE, SIZE), np.uint8)
        pixels.tofile(folder / f"{part}_X.bin")
        (np.arange(count, dtype=np.uint8) % len(CLASSES) + 1).tofile(folder / f"{part}_y.bin")
    (folder / "class_names.txt").write_text("\n".join(CLASSES) + "\n")


def write_jpegs(root: Path, images: int, held_out: int = 20, distinct: int = DISTINCT) -> int:
    """Write root/train and root/val with a folder for each of ten classes; return the mean bytes of a file.

    Smooth shapes with a little noise, so that a file has about as many bytes as a photograph of its size.
    """
    random = np.random.default_rng(0)
    made = list[Path]()
    for part, count in (("train", images), ("val", max(held_out, len(CLASSES)))):
        for number in range(count):
            path = root / part / CLASSES[number % len(CLASSES)] / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            if len(made) < distinct:
                coarse = Image.fromarray(random.integers(0, 256, (24, 32, 3), np.uint8))
                smooth = np.asarray(coarse.resize(JPEG_SIZE, Image.Resampling.BICUBIC), np.int16)
                noisy = smooth + random.integers(-28, 29, smooth.shape, np.int16)
                Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=90)
                made.append(path)
            else:
                os.link(made[number % len(made)], path)
    return sum(path.stat().st_size for path in made) // len(made)
