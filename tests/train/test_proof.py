"""Promise: ranks that differ do not train; the one that differs is named with its host, its value and the fix."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Forked
from train.start import proof
from train.start.proof import Claim, difference

ROOT = Path(__file__).resolve().parents[2]
GOOD, BAD = "ab" * 32, "cd" * 32


def on(host: str, **more: Any) -> dict[str, Any]:
    return {"environment": {"MUSTER_HOST": host, "MUSTER_IMAGE": GOOD, "MUSTER_PLAN_SHA256": GOOD, **more}}


CASES = {
    "alone": [on("h1")],
    "equal": [on("h1"), on("h2"), on("h2")],
    "image": [on("h1"), on("h2"), on("h3", MUSTER_IMAGE=BAD)],
    "two": [on("h1"), on("h2", MUSTER_IMAGE=BAD)],
    "plan-and-data": [on("h1", MUSTER_PLAN_SHA256=BAD), on("h2"), on("h3") | {"data": "4 samples", "seed": 7}],
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each real rank of each case said."""
    folder = tmp_path_factory.mktemp("proof")
    (folder / "cases.json").write_text(json.dumps(CASES))
    process = Forked("tests.train.proof_ranks", [str(folder / "cases.json"), str(folder)], ROOT, os.environ)
    assert process.wait() == 0, process.errors()
    return {
        name: [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(len(case))]
        for name, case in CASES.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", ["alone", "equal"])
def test_equal_ranks_pass_and_what_they_are_can_be_kept(said: dict[str, list[dict[str, Any]]], case: str) -> None:
    for answer in said[case]:
        facts = answer["facts"]
        assert (facts["image"], facts["plan"], facts["--seed"], facts["data"]) == (GOOD, GOOD, "0", "5 samples")
        assert len(facts["code"]) == 64 and {"torch", "torchvision", "NCCL", "CUDA", "Python"} <= set(facts)
        assert "--run-dir" not in facts


@pytest.mark.slow
def test_a_host_with_another_image_is_named_by_every_rank(said: dict[str, list[dict[str, Any]]]) -> None:
    messages = {answer["error"] for answer in said["image"]}
    assert messages == {
        "the ranks do not agree, so nothing was trained. h3 (rank 2): image is cdcdcdcdcdcd, not abababababab. "
        "Fix: make deploy, then start the run again"
    }


@pytest.mark.slow
def test_of_two_hosts_the_one_without_rank_0_is_called_odd(said: dict[str, list[dict[str, Any]]]) -> None:
    assert all("h2 (rank 1): image is cdcdcdcdcdcd" in answer["error"] for answer in said["two"])


@pytest.mark.slow
def test_all_that_differs_is_named_at_once(said: dict[str, list[dict[str, Any]]]) -> None:
    message = said["plan-and-data"][1]["error"]
    assert "h1 (rank 0): plan is cdcdcdcdcdcd" in message
    assert "h3 (rank 2): --seed is 7, not 0; h3 (rank 2): data is 4 samples, not 5 samples" in message
    assert "make train" in message and "data_dir" in message


def claims(*hosts: tuple[str, str]) -> list[Claim]:
    return [Claim(rank, host, {"image": value}) for rank, (host, value) in enumerate(hosts)]


def test_hosts_are_counted_before_ranks() -> None:
    message = difference(claims(("h1", "new"), ("h1", "new"), ("h1", "new"), ("h2", "old"), ("h3", "old")))
    assert "h1 (ranks 0, 1, 2): image is new, not old" in message


def test_a_host_with_other_files_of_the_user_is_named() -> None:
    message = difference([Claim(rank, f"h{rank}", {"project": BAD if rank == 2 else GOOD}) for rank in range(3)])
    assert "h2 (rank 2): project is cdcdcdcdcdcd, not abababababab" in message
    assert message.endswith("Fix: start all hosts with one command: make train")


def test_a_rank_that_does_not_know_a_field_is_odd() -> None:
    message = difference([Claim(0, "h1", {"a": "1"}), Claim(1, "h2", {"a": "1"}), Claim(2, "h3", {})])
    assert "h3 (rank 2): a is none, not 1" in message


def test_hashes_that_begin_alike_are_shown_in_full() -> None:
    one, two = "ab" * 31 + "00", "ab" * 31 + "11"
    assert one in difference(claims(("h1", two), ("h2", two), ("h3", one)))


def test_the_code_hash_sees_sources_alone(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "a.py").write_text("1")
    first = proof.code_hash(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_text("x")
    assert proof.code_hash(tmp_path) == first
    (tmp_path / "part" / "a.py").write_text("2")
    assert proof.code_hash(tmp_path) != first
