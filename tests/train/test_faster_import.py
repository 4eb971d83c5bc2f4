"""Promises: a rank loads torch without the collector, and has it as before after that; what torch made is left out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from train.start import faster_import

MODULE = Path(faster_import.__file__)
BEGIN = f"import gc, runpy\nruntime = runpy.run_path({str(MODULE)!r})\n"


def python(folder: Path, torch: str, script: str) -> str:
    """What a script prints in a rank, with this in the place of torch."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(torch)
    environment = {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-S", "-c", BEGIN + script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_while_torch_is_loaded_and_is_as_before_then(tmp_path: Path, enabled: bool) -> None:
    torch = "import gc\nduring = gc.isenabled()\nmade = [[] for _ in range(1000)]\n"
    script = (
        f"gc.enable() if {enabled} else gc.disable()\nfrozen = gc.get_freeze_count()\nimport torch\n"
        "print(torch.during, gc.isenabled(), gc.get_freeze_count() > frozen + 1000)\n"
        "import importlib, sys\nimportlib.reload(torch)\n"
        "print(torch.__spec__.name, torch.__file__.endswith('torch/__init__.py'), torch.during, len(sys.meta_path))\n"
    )
    first, second = python(tmp_path, torch, script).splitlines()
    assert first == f"False {enabled} True"
    assert second.startswith("torch True") and second.endswith(" 3")  # as many finders as Python has without


def test_a_torch_that_does_not_load_says_so_and_leaves_the_collector_on(tmp_path: Path) -> None:
    script = "try:\n    import torch\nexcept OSError as error:\n    print(error, gc.isenabled())\n"
    assert python(tmp_path, "raise OSError('libcudart.so: no such file')\n", script) == (
        "libcudart.so: no such file True\n"
    )
