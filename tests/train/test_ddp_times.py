"""Promise: a plain script's steps under DDP are timed and told to the keeper, without a word of the script."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from train.start import ddp_times, faster_import

SCRIPT = """
import os, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

class Slow(torch.utils.data.Dataset):
    def __len__(self): return 24
    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.ones(4)

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
for batch in DataLoader(Slow()):  # an evaluation: no step of it
    with torch.no_grad():
        model(batch)
for batch in DataLoader(Slow()):
    model(batch).sum().backward()
os._exit(0)  # gloo's threads may abort an ordinary end: hooks.py is what sees to that in a run
"""


@pytest.mark.slow
def test_a_script_under_ddp_tells_its_work(tmp_path: Path) -> None:
    for name, module in (("muster_ddp_times", ddp_times), ("sitecustomize", faster_import)):
        (tmp_path / f"{name}.py").symlink_to(str(module.__file__))
    (tmp_path / "script.py").write_text(SCRIPT)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as keeper, socket.create_server(("127.0.0.1", 0)) as free:
        keeper.bind(str(tmp_path / "keeper"))
        port = free.getsockname()[1]
        free.close()
        group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ours = {"MUSTER_KEEPER": str(tmp_path / "keeper"), "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, tmp_path / "script.py"], env={**os.environ, **group, **ours},
                              capture_output=True, text=True, timeout=300)  # fmt: skip
        assert done.returncode == 0, done.stderr
        keeper.setblocking(False)
        told = []
        while True:
            try:
                told.append(json.loads(keeper.recv(4096)))
            except BlockingIOError:
                break
    assert {words["rank"] for words in told} == {0} and all("phase" not in words for words in told)
    works = [words["work"] for words in told]
    assert works == sorted(works) and 1 < len(works) < 24  # ten a second at most, of fifty steps a second
    steps, timed, computed, waited = works[-1]
    assert 10 < steps <= 24 and steps - 2 <= timed < steps and 0 < computed < 1.0
    assert 0.02 * steps <= waited < 0.02 * 24 + 5.0


def test_a_keeper_that_is_gone_does_not_end_a_training(tmp_path: Path) -> None:
    class Torch:
        """As much of torch as is used."""

        @staticmethod
        def is_grad_enabled() -> bool:
            return True

        class compiler:
            @staticmethod
            def is_compiling() -> bool:
                return False

        class nn:
            class parallel:
                class DistributedDataParallel:
                    require_backward_grad_sync = True

                    def __init__(self) -> None:
                        self.hooks: list[Any] = []

                    def parameters(self) -> list[Any]:
                        return []

                    def register_forward_pre_hook(self, hook: Any) -> None:
                        self.hooks.append(hook)

                    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
                        self.rate = rate

                    def _get_ddp_logging_data(self) -> dict[str, int]:
                        return {"forward_compute_time": 5, "forward_compute_time_start": 1}

    from torch.utils.data.dataloader import _BaseDataLoaderIter as Batches

    before = Batches.__next__
    try:
        ddp_times.watch(Torch, str(tmp_path / "nobody"), 0)  # type: ignore[arg-type]
        module = Torch.nn.parallel.DistributedDataParallel()
        assert module.rate == 1
        [hook] = module.hooks
        hook(module, ())
    finally:
        Batches.__next__ = before  # type: ignore[method-assign]


def test_a_step_counts_once_however_often_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as keeper:
        keeper.bind(str(tmp_path / "keeper"))
        told = ddp_times.Watch(str(tmp_path / "keeper"), 3)
        for start in (1, 1, 2):
            told.step({"forward_compute_time": 2e9, "backward_compute_time": 1e9, "forward_compute_time_start": start})
        assert (told.steps, told.timed, told.computed) == (3, 2, 6.0)
        assert json.loads(keeper.recv(4096))["work"] == [1, 1, 3.0, 0.0]
        told.socket.close()
