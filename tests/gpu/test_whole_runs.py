"""Promises of whole trainings on a GPU: the CPU's figures, bits that come back, faults that are named at once.

Without a GPU those are made on the CPU that show something there, and all of them with MUSTER_TEST_DEVICE=cpu. What
tests/train shows of the CPU too is long.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu import rank, runs
from tests.gpu.conftest import kind_of_device

pytestmark = pytest.mark.slow  # each starts processes that load torch

CPU = torch.device("cpu")
# From the fault to the end of all ranks, with the cause. The promise is the first one; without a GPU these tests run
# beside others on a few cores.
FAULT_SECONDS = {"cuda": 5.0, "cpu": 30.0}
on_a_gpu = pytest.mark.gpu
# On the CPU it would show what tests/train shows: it is made there to try the test itself.
rather_on_a_gpu = pytest.mark.skipif(
    kind_of_device() == "cpu" and "MUSTER_TEST_DEVICE" not in os.environ, reason="MUSTER_TEST_DEVICE=cpu runs it here"
)


def same_bits(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.equal(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same_bits(mine, theirs) for mine, theirs in zip(one, other, strict=True))
    return bool(one == other)


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> runs.Ended:
    """The same training without a GPU: what the others' figures are compared with."""
    return runs.train(CPU, tmp_path_factory.mktemp("cpu") / "run")


@pytest.mark.long
def test_one_rank_trains_as_on_the_cpu(device: torch.device, tmp_path: Path, on_the_cpu: runs.Ended) -> None:
    """On a GPU with NCCL, also alone; nobody asks for a backend."""
    ended = runs.train(device, tmp_path / "run", "--parallel", "ddp", cases=("tiny", "curves"))
    assert ended.status == on_the_cpu.status == 0, ended.said + on_the_cpu.said
    seen = ended.document("seen-0.json")
    assert seen["device"] == str(device)
    assert ("nccl" in seen["backend"]) == (device.type == "cuda"), seen
    assert ended.losses[0] == pytest.approx(on_the_cpu.losses[0], rel=1e-3)
    assert ended.losses == pytest.approx(on_the_cpu.losses, rel=0.05)
    result = ended.document("result.json")
    assert result["steps"] == 2 * runs.STEPS and (result["peak_gpu_bytes"] is not None) == (device.type == "cuda")
    assert (ended.folder / "curves.png").exists()


@rather_on_a_gpu
def test_a_model_of_torchvision_trains_under_torchrun(device: torch.device, tmp_path: Path) -> None:
    """By the command of a cluster's hosts, whose ranks are forked from the agent before CUDA is used."""
    agent = ["train.start.agent", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=1", "-m", "train"]
    words = ["--model", "shufflenet_v2_x0_5", *runs.DATA, "--epochs", "1", "--run-dir", str(tmp_path / "run")]
    ended = runs.start(device, tmp_path / "run", [*agent, *words, "--lr", "0.0001"])
    assert ended.status == 0, ended.said
    assert ended.events("start")[0]["device"] == str(device)


@rather_on_a_gpu
@pytest.mark.parametrize(
    "words",
    [
        "--amp bf16 --channels-last --ema 0.9",
        pytest.param("--amp fp16 --clip 1 --channels-last", marks=on_a_gpu),
    ],
)
def test_other_arithmetic_keeps_the_course(
    device: torch.device, tmp_path: Path, on_the_cpu: runs.Ended, words: str
) -> None:
    ended = runs.train(device, tmp_path / "run", *words.split())
    assert ended.status == 0, ended.said
    assert ended.losses[0] == pytest.approx(on_the_cpu.losses[0], rel=0.02)
    assert ended.losses == pytest.approx(on_the_cpu.losses, rel=0.2)


@pytest.mark.long
@pytest.mark.parametrize(
    "words", ["--parallel ddp", pytest.param("--parallel none --amp bf16 --channels-last", marks=on_a_gpu)]
)
def test_nothing_is_compiled_again_after_the_first_epoch(
    device: torch.device, tmp_path: Path, on_the_cpu: runs.Ended, words: str
) -> None:
    """Though the last batch of each epoch is short, and the held-out part is of another size again."""
    ended = runs.train(device, tmp_path / "run", "--compile", "--epochs", "3", *words.split())
    assert ended.status == 0, ended.said
    graphs = ended.document("seen-0.json")["graphs"]
    assert len(graphs) == 3 and graphs[0] > 0
    assert graphs[1:] == graphs[:1] * 2
    assert ended.losses[0] == pytest.approx(on_the_cpu.losses[0], rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize("words", ["", pytest.param("--amp fp16 --channels-last --ema 0.9", marks=rather_on_a_gpu)])
def test_a_resumed_run_has_the_bits_of_the_unbroken_one(device: torch.device, tmp_path: Path, words: str) -> None:
    """Weights, momentum, batch statistics, scaler and average, as they come from the device and go back to it."""
    how = ["--deterministic", "--checkpoint-every", "3", *words.split()]
    unbroken = runs.train(device, tmp_path / "unbroken", *how)
    assert unbroken.status == 0, unbroken.said
    broken = runs.train(device, tmp_path / "broken", *how, cases=("tiny", "crash=6"))
    assert broken.status == rank.CRASH, broken.said
    resumed = runs.train(device, tmp_path / "broken", *how)
    assert resumed.status == 0 and "going on from step-" in resumed.said, resumed.said
    one, other = (ended.state(2 * runs.STEPS) for ended in (unbroken, resumed))
    for part in ("model", "optimizer", "rank_buffers", "scaler", "ema", "ema_rank_buffers"):
        assert same_bits(one[part], other[part]), part
    assert resumed.losses == unbroken.losses


@rather_on_a_gpu
def test_where_the_data_lives_changes_no_bit(device: torch.device, tmp_path: Path) -> None:
    kinds = ("gpu", "ram", "disk") if device.type == "cuda" else ("ram", "disk")
    ended = {kind: runs.train(device, tmp_path / kind, "--deterministic", "--memory", kind) for kind in kinds}
    assert [run.status for run in ended.values()] == [0] * len(kinds), [run.said for run in ended.values()]
    assert len({tuple(run.losses) for run in ended.values()}) == 1


@rather_on_a_gpu
@pytest.mark.parametrize(
    "words",
    ["--micro-batch 20 --channels-last", pytest.param("", marks=on_a_gpu), pytest.param("--amp fp16", marks=on_a_gpu)],
)
def test_two_ranks_on_one_gpu_train_as_one(device: torch.device, tmp_path: Path, words: str) -> None:
    """Over gloo, with the tensors of the GPU. SGD without dropout's noise: so that their losses can be compared."""
    how = ["--optimizer", "sgd", "--lr", "0.01", "--epochs", "1", *words.split()]
    alone = runs.train(device, tmp_path / "alone", *how)
    ended = runs.under_the_agent(device, tmp_path / "two", 2, *how)
    assert ended.status == alone.status == 0, ended.said + alone.said
    assert [ended.document(f"seen-{rank}.json")["device"] for rank in range(2)] == [str(device)] * 2
    assert "gloo" in ended.document("seen-0.json")["backend"]
    assert ended.events("start")[0]["world_size"] == 2
    # Batch statistics are each rank's own, and so is dropout.
    assert ended.losses == pytest.approx(alone.losses, rel=0.1)


@rather_on_a_gpu
def test_ranks_that_one_command_spawns_share_a_gpu(device: torch.device, tmp_path: Path) -> None:
    words = ["train", "--spawn", "2", "--backend", "gloo", "--model", "shufflenet_v2_x0_5", *runs.DATA]
    more = {"MUSTER_SHARED_GPUS": "1"}
    ended = runs.start(device, tmp_path / "run", [*words, "--epochs", "1", "--run-dir", str(tmp_path / "run")], **more)
    assert ended.status == 0, ended.said
    assert ended.events("start")[0]["world_size"] == 2


@pytest.mark.gpu
def test_two_ranks_on_one_gpu_are_refused_unless_that_is_meant(tmp_path: Path) -> None:
    words = ["train", "--spawn", "8", *runs.DATA, "--run-dir", str(tmp_path / "run")]
    visible = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    ended = runs.start(torch.device("cuda", 0), tmp_path / "run", words, **visible)
    assert ended.status == 2 and "start at most one rank per GPU" in ended.said


@pytest.mark.long
def test_dp_takes_what_gpus_there_are(device: torch.device, tmp_path: Path) -> None:
    ended = runs.train(device, tmp_path / "run", "--parallel", "dp", "--amp", "bf16")
    assert ended.status == 0, ended.said
    if device.type == "cpu":
        assert "--parallel dp: no GPU is visible" in ended.said
    elif torch.cuda.device_count() == 1:
        assert "--parallel dp: only one GPU is visible" in ended.said


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        pytest.param("raise", 2, marks=pytest.mark.long),
        pytest.param("memory", 1, marks=pytest.mark.long),
        pytest.param("raise", 1, marks=rather_on_a_gpu),
        pytest.param("memory", 2, marks=rather_on_a_gpu),
    ],
)
def test_a_fault_is_reported_at_once_with_its_cause(
    device: torch.device, tmp_path: Path, kind: str, ranks: int
) -> None:
    """One rank under NCCL; of two ranks the other one waits in a collective, and is not to blame."""
    at_fault = ranks - 1
    words = ["--epochs", "5", "--timeout", "100"]
    ended = runs.under_the_agent(device, tmp_path, ranks, *words, cases=("tiny", f"{kind}=3:{at_fault}"))
    took = time.time() - float((tmp_path / "fault").read_text())
    assert ended.status == 1, ended.said
    failure = ended.document("failure.json")["failures"][0]
    causes = {
        "raise": "ValueError: a fault in the third step",
        "memory": "out of memory" if device.type == "cuda" else "can't allocate memory",
    }
    assert failure["rank"] == at_fault and not failure["consequence"], ended.said
    assert causes[kind] in failure["exception"]
    assert took <= FAULT_SECONDS[device.type]


@rather_on_a_gpu
def test_predictions_are_those_of_the_cpu(device: torch.device, tmp_path: Path) -> None:
    from PIL import Image

    words = ["--model", "shufflenet_v2_x0_5", *runs.DATA, "--epochs", "1", "--run-dir", str(tmp_path / "run")]
    trained = runs.start(device, tmp_path / "run", ["train", *words])
    assert trained.status == 0, trained.said
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(3):
        pixels = torch.randint(256, (40, 32 + number, 3), generator=torch.Generator().manual_seed(number))
        Image.fromarray(pixels.to(torch.uint8).numpy()).save(folder / f"{number}.png")
    words = ["train", "predict", "--checkpoint", str(tmp_path / "run"), "--device"]
    one, other = (runs.start(device, folder, [*words, name, str(folder)]) for name in (str(device), "cpu"))
    assert one.status == other.status == 0, one.said + other.said
    rows = [[line.split("\t") for line in ended.said.splitlines() if ".png" in line] for ended in (one, other)]
    assert len(rows[0]) == 3
    for mine, theirs in zip(*rows, strict=True):
        assert mine[:2] == theirs[:2]
        assert float(mine[2]) == pytest.approx(float(theirs[2]), abs=2e-2)


def test_what_a_machine_lacks_is_said_and_done_without(device: torch.device, tmp_path: Path) -> None:
    """matplotlib, TensorBoard, rich, scikit-learn, PyYAML, safetensors: none of them is needed to train."""
    missing = "without=matplotlib,tensorboard,rich,sklearn,yaml,safetensors"
    ended = runs.train(device, tmp_path / "run", "--loggers", "tensorboard", cases=("tiny", missing))
    assert ended.status == 0, ended.said
    assert "curves.png is not drawn: No module named 'matplotlib'" in ended.said
    assert "--loggers tensorboard: it ends here (" in ended.said
    assert "Traceback" not in ended.said
    assert ended.document("result.json")["steps"] == 2 * runs.STEPS
    assert not (ended.folder / "curves.png").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param("--config {}", "train: yaml is not installed", marks=pytest.mark.long),
        ("--dataset digits", "scikit-learn, which is not installed"),
    ],
)
def test_what_is_asked_for_and_missing_is_refused(device: torch.device, tmp_path: Path, words: str, said: str) -> None:
    ended = runs.train(device, tmp_path / "run", *words.split(), cases=("tiny", "without=sklearn,yaml"))
    assert ended.status == 2 and said in ended.said, ended.said
    assert "Traceback" not in ended.said
