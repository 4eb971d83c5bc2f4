"""Promises of --compile: one graph for each size of batch, made in the first epoch and never again."""

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.train.parallel_models import SIZE, network
from tests.train.resume_ranks import SETTINGS, train
from train import run, trainer
from train.parallel.single import Single
from train.settings import Settings, parse, problems


def noting_graphs(file: Path) -> None:
    """From now on models are compiled by a backend that runs the graphs as they are. Writes down the graphs' inputs,
    and after each epoch a line."""
    compiled, ended = Single.compile, trainer.Training.end_epoch

    def note(words: Any) -> None:
        with file.open("a") as lines:
            lines.write(json.dumps(words) + "\n")

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        varying = [str(size) for each in inputs for size in getattr(each, "shape", [each]) if not isinstance(size, int)]
        (images,) = (each for each in inputs if getattr(each, "shape", ())[1:] == (3, SIZE, SIZE))
        note({"batch": int(images.shape[0]), "varying": varying, "training": torch.is_grad_enabled()})
        return graph.forward

    def compile(self: Single, **options: Any) -> None:
        note({"options": options})
        compiled(self, **options | {"backend": backend})

    def end_epoch(self: trainer.Training) -> Any:
        score = ended(self)
        note("epoch")
        return score

    mock.patch.object(run, "build_model", lambda *arguments: network()).start()
    mock.patch.object(Single, "compile", compile).start()
    mock.patch.object(trainer.Training, "end_epoch", end_epoch).start()


@pytest.mark.slow
def test_a_short_last_batch_gets_a_graph_of_its_own_and_later_epochs_compile_nothing(tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, run_dir=tmp_path, compile=True)
    file = tmp_path / "graphs"
    assert train(1, settings, normalised=False, changes={0: lambda: noting_graphs(file)}) == [0]
    options, *said = [json.loads(line) for line in file.read_text().splitlines()]
    first = said.index("epoch")
    assert said[first:] == ["epoch"] * 3
    assert not [graph for graph in said[:first] if graph["varying"]]
    assert sorted(graph["batch"] for graph in said[:first] if graph["training"]) == [125, 130]
    assert options == {"options": {"mode": "default", "dynamic": False}}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--compile-mode", "max-autotune"], "--compile-mode max-autotune: goes with --compile"),
        (["--compile", "--parallel", "dp"], "--compile: dp copies the model anew for each pass"),
    ],
)
def test_what_compiling_does_not_go_with_is_refused(arguments: list[str], complaint: str) -> None:
    (found,) = problems(parse(arguments), 1)
    assert found.startswith(complaint)
    assert problems(parse(["--compile", "--compile-mode", "max-autotune"]), 1) == []
    assert Settings().compile_mode == "default"
