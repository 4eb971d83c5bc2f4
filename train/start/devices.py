"""Devices as a user types them and as messages show them: which of the machine's GPUs is called cuda:0.

CUDA_VISIBLE_DEVICES hides GPUs and renumbers the others from 0: with CUDA_VISIBLE_DEVICES=3 the one GPU
that a program sees is called cuda:0.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

VARIABLE = "CUDA_VISIBLE_DEVICES"


class DeviceError(Exception):
    """A device that does not exist; the message says which do."""


def gpus_here() -> int:
    """How many GPUs this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def visible(environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """The entries of CUDA_VISIBLE_DEVICES, in the order of the new numbers; None where it is not set."""
    text = environment.get(VARIABLE)
    return None if text is None else [entry.strip() for entry in text.split(",") if entry.strip()]


def describe(device: torch.device, environment: Mapping[str, str] = os.environ) -> str:
    """ "cuda:0 (GPU 3 of this machine, CUDA_VISIBLE_DEVICES=3)"; "cuda:0" and "cpu" where nothing is renumbered.

    GPUs of the machine are numbered as CUDA does (nvidia-smi's numbers with CUDA_DEVICE_ORDER=PCI_BUS_ID).
    """
    entries = visible(environment)
    index = device.index or 0
    if device.type != "cuda" or entries is None or index >= len(entries):
        return str(device)
    which = f"GPU {entries[index]} of this machine" if entries[index].isdigit() else entries[index]
    return f"{device} ({which}, {VARIABLE}={environment[VARIABLE]})"


def parse(
    words: Sequence[str], gpus: int, flag: str, environment: Mapping[str, str] = os.environ
) -> list[torch.device]:
    """Devices from words such as cpu, cuda, cuda:3 or 3, of which this process sees `gpus`.

    Raises DeviceError, one message for all that do not exist, or are named twice.
    """
    devices, wrong = list[torch.device](), list[str]()
    for word in words:
        name = word.strip().lower()
        index = "0" if name in ("cuda", "gpu") else name.removeprefix("cuda:")
        if name == "cpu":
            devices.append(torch.device("cpu"))
        elif index.isascii() and index.isdigit() and int(index) < gpus:
            devices.append(torch.device("cuda", int(index)))
        else:
            wrong.append(word.strip() or "(nothing)")
    if wrong or not devices:
        what = ", ".join(wrong) or "(nothing)"
        raise DeviceError(f"{flag} {what}: there is no such device. {available(gpus, environment)}")
    twice = sorted({str(device) for device in devices if device.type == "cuda" and devices.count(device) > 1})
    if twice:
        raise DeviceError(f"{flag}: {', '.join(twice)} is named twice; name each GPU once")
    return devices


def available(gpus: int, environment: Mapping[str, str] = os.environ) -> str:
    """What may be typed, and why not more."""
    hidden = environment.get(VARIABLE)
    if not gpus:
        built = torch.version.cuda or torch.version.hip
        why = "torch finds no GPU and driver" if built else "this torch was built without CUDA"
        if built and hidden is not None:
            why = f"{VARIABLE}={hidden} leaves none that exists"
        return f"Here is no GPU to use ({why}): use cpu"
    names = ", ".join(describe(torch.device("cuda", index), environment) for index in range(gpus))
    more = f" {VARIABLE} numbers the GPUs that it leaves visible from 0." if hidden is not None else ""
    return f"There {'is' if gpus == 1 else 'are'} {names}, and cpu.{more}"
