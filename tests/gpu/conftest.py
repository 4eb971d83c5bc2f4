"""What the tests of all that one GPU can show share. Where torch sees no GPU they run on the CPU, as far as they can.

MUSTER_TEST_DEVICE=cuda: an error where there is no GPU (`make test-gpu`). MUSTER_TEST_DEVICE=cpu: on the CPU in any
case. Imports nothing but pytest, torch and the trainer: a machine with a GPU need not have more.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def kind_of_device() -> str:
    """cuda or cpu. Raises pytest.UsageError."""
    found = "cuda" if torch.cuda.is_available() else "cpu"
    wanted = os.environ.get("MUSTER_TEST_DEVICE") or found
    if wanted not in ("cpu", "cuda"):
        raise pytest.UsageError(f"MUSTER_TEST_DEVICE={wanted} is neither cuda nor cpu")
    if wanted == "cuda" and found == "cpu":
        raise pytest.UsageError(
            f"torch {torch.__version__} sees no GPU here. MUSTER_TEST_DEVICE=cpu runs what the CPU can show"
        )
    return wanted


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    kind = kind_of_device()
    for item in items:
        if kind == "cpu" and item.get_closest_marker("gpu") and item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skip(reason="these tests run on the CPU"))


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """cuda:0, or the CPU."""
    return torch.device("cuda", 0) if kind_of_device() == "cuda" else torch.device("cpu")
