"""Promise: a host that is not ready for a run is named before the start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from launch.cli import exits
from launch.cli.refusal import Refusal
from launch.job import readiness
from tests.launch.samples import cluster

LOST = "sudo: a password is required"


def test_readiness_names_a_silent_host() -> None:
    def answer(command: str, timeout: float = 0) -> str:
        raise RuntimeError(LOST)

    silent: Any = SimpleNamespace(name="h2", target=SimpleNamespace(python="python3"), answer=answer)
    known = cluster(1, 1).hosts[1:]
    with pytest.raises(Refusal, match=f"host h2: did not answer: {LOST}") as refused:
        readiness.check([silent], known, "ab" * 32)
    assert refused.value.status == exits.UNREACHABLE
