"""What all tests share: the rule that with CI=true a test that cannot run fails instead of being skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from launch.makevars import KNOWN  # noqa: E402

os.environ.pop("MAKEFLAGS", None)  # of the `make test` that runs us: not meant for the commands that the tests start


def cannot_run(reason: str) -> NoReturn:
    """Skip, or fail where everything has to run."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"cannot run here, and with CI=true that is a failure: {reason}")
    pytest.skip(reason)


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of Muster are typed at the top of the checkout; variables of the caller's make must not leak in."""
    monkeypatch.chdir(ROOT)
    for name in KNOWN:
        monkeypatch.delenv(name, raising=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first; GPU tests are skipped, also in CI, where there is no GPU."""
    has_gpu = bool(shutil.which("nvidia-smi")) and subprocess.run(
        ["nvidia-smi", "-L"], capture_output=True, check=False
    ).stdout.startswith(b"GPU")
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))
    items.sort(key=lambda item: bool(item.get_closest_marker("lab")))
