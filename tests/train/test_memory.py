"""Promise: what a step on the CPU frees is kept for the next one, large blocks too, where the host has the room."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.train.resume_ranks import SETTINGS, train
from train.start import memory

FAULTS = """
import resource, sys, torch
from train.start import memory

memory.available_memory = lambda: int(sys.argv[1]) << 20
memory.keep_freed_memory()

def step():
    "As the activations of a step, which it takes and frees: 480 MB."
    blocks = [torch.ones(40 << 18) for _ in range(12)]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

step()
memory.keep_large_blocks(2, torch.device(sys.argv[2]))
step()
print(min(faults() for _ in range(3)))
"""


def faults_of_a_step(available_mb: int, device: str) -> int:
    command = [sys.executable, "-c", FAULTS, str(available_mb), device]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_large_blocks_are_kept_where_the_host_has_as_much_memory_left_as_its_ranks_have_taken() -> None:
    """Two ranks, each with about 700 MB: without keeping, all pages of all blocks are faulted in anew in each step, 240
    huge pages or 122880 small ones."""
    assert faults_of_a_step(64_000, "cpu") < 24
    assert faults_of_a_step(500, "cpu") >= 240
    assert faults_of_a_step(64_000, "cuda") >= 240


def test_what_a_process_has_taken_is_in_bytes() -> None:
    block = torch.ones(300 << 18)
    everything = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert block.nbytes <= memory.most_taken() <= everything
    assert 0 < memory.available_memory() <= everything


@pytest.mark.parametrize("blocking", [False, True])
def test_the_trainer_keeps_them_from_its_first_step_on_and_asks_once(tmp_path: Path, blocking: bool) -> None:
    def noted(local_world_size: int, device: torch.device) -> None:
        with (tmp_path / "noted").open("a") as file:
            file.write(f"{local_world_size} {device.type}\n")

    settings = dataclasses.replace(SETTINGS, run_dir=tmp_path / "run", blocking_checkpoints=blocking)
    statuses = train(1, settings, changes={0: lambda: noting(noted)})
    assert statuses == [0] and (tmp_path / "noted").read_text() == "1 cpu\n"


def noting(noted: object) -> None:
    mock.patch.object(memory, "keep_large_blocks", noted).start()
