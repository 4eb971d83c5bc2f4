"""Promises of train.model.torchvision_cpu: any script of this Python can import torchvision beside a CPU-only torch."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from train.model import torchvision_cpu

# -S leaves out site-packages' own .pth files, so that what is tested is the copy in the folder.
SCRIPT = """
import sys, site
sys.path.append(sys.argv[1])
site.addsitedir(sys.argv[2])
assert "torch" not in sys.modules and "torchvision" not in sys.modules, "must cost nothing at the start"
import torchvision
from torchvision import datasets, models
from torchvision.transforms import v2
import torch
assert models.resnet18(num_classes=3).eval()(v2.Resize(64)(torch.rand(1, 3, 8, 8))).shape == (1, 3)
if torch.version.cuda is None and not torchvision.extension._has_ops():
    try:
        torchvision.ops.nms(torch.rand(2, 4), torch.rand(2), 0.5)
    except RuntimeError as error:
        assert "custom C++ ops" in str(error), error
    else:
        raise AssertionError("nms ran without its library")
torchvision.extension  # still the real one
print("works")
"""


@pytest.mark.slow
def test_a_script_imports_torchvision(tmp_path: Path) -> None:
    torchvision_cpu.install(str(tmp_path))
    packages = sysconfig.get_path("purelib")
    command = [sys.executable, "-S", "-c", SCRIPT, packages, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "works\n", done.stderr


def test_installing_twice_changes_nothing_the_second_time(tmp_path: Path) -> None:
    assert len(torchvision_cpu.install(str(tmp_path))) == 2
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    assert torchvision_cpu.install(str(tmp_path)) == []
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == before
    assert sorted(before) == ["muster_torchvision_cpu.pth", "muster_torchvision_cpu.py"]
