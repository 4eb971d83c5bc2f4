"""Promise: from an inventory to a trained model on real hosts, over real SSH, in the commands that the README gives."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from containers import engine
from containers.workload_image import reference_of
from keeper import PROJECT_DIR
from tests.lab.conftest import HOSTS, Lab, summary_of

pytestmark = pytest.mark.lab


def recaps(output: str) -> list[tuple[str, int]]:
    """(host, changed) of every line of Ansible's recaps."""
    return [(m[1], int(m[2])) for m in re.finditer(r"^(\S+)\s+: ok=\d+\s+changed=(\d+)", output, re.MULTILINE)]


def test_a_second_deploy_has_nothing_to_do_and_a_play_of_its_own_changes_nothing(lab: Lab) -> None:
    done = lab.fab("deploy")
    assert done.returncode == 0 and "TASK" not in done.stdout, done.stdout
    done = lab.play("provision")
    assert done.returncode == 0 and sorted(recaps(done.stdout)) == [(host, 0) for host in HOSTS], done.stdout


def test_training_on_two_hosts_leaves_everything_here_and_can_be_repeated_to_the_bit(lab: Lab) -> None:
    done = lab.fab("train", NODES=2, ARGS="--epochs 1 --image-size 16")
    assert done.returncode == 0, done.stdout
    first, summary = summary_of(done.stdout)
    assert (summary["status"], summary["exit_status"], summary["failed_rank"]) == ("succeeded", 0, None)
    assert (summary["nodes"], summary["world_size"]) == (2, 2)
    assert summary["master_addr"] == lab.cluster["hosts"][0]["address"]
    assert summary["test_accuracy"] > 0.3 and summary["images_per_second"] > 0 and summary["train_seconds"] > 0
    written = ("plan.json", "metrics.jsonl", "result.json", "curves.png", "report.html")
    for name in (*written, "logs/h1/rank-0.log", "logs/h2/rank-1.log"):
        assert (first / name).is_file(), name
    assert list((first / "checkpoints").glob("*.pt")) and list((first / "checkpoints").glob("*.json"))
    assert "h1 rank 0 | " in done.stdout and done.stdout.strip().splitlines()[-1].endswith("succeeded")

    done = lab.fab("reproduce", RUN=first.name)
    assert done.returncode == 0, done.stdout
    folder, summary = summary_of(done.stdout)
    assert folder != first
    assert (summary["reproduces"]["run"], summary["reproduces"]["same"]) == (first.name, True), done.stdout
    assert "tensors of the checkpoint" in done.stdout
    refused = lab.fab("reproduce", RUN=first.name, NODES=1)
    assert refused.returncode == 2 and "NODES: it is taken from the run" in refused.stdout


def test_a_users_own_script_runs_on_all_hosts_with_unequal_ranks(lab: Lab) -> None:
    done = lab.train("reduce.py", "--model resnet18 --word 'two words'")
    assert done.returncode == 0, done.stdout
    said = {int(m[1]): m[0] for m in re.finditer(r"rank=(\d+) world=4 .*", done.stdout)}
    assert sorted(said) == [0, 1, 2, 3]
    assert all("sum=10" in line and "word=two words tabulate=tabulate" in line for line in said.values())
    names = {host["name"]: host["interface"] for host in lab.cluster["hosts"]}
    for rank, host in enumerate(("h1", "h2", "h3", "h3")):
        assert f"{host} rank {rank} | rank={rank}" in done.stdout and f"ifname={names[host]}" in said[rank]
    folder, _ = summary_of(done.stdout)
    written = Path("workload") / "written-by-the-script.txt"
    assert (folder / written).read_text() == "rank 0\n"
    assert (folder / "hosts" / "h2" / written).read_text() == "rank 1\n"  # with another content: it is not lost


PARTS = """
from pathlib import Path

import tabulate
import torch
from torch import nn
from torch.utils.data import TensorDataset

from words import WORD

print(f"{WORD} with {tabulate.__name__}", flush=True)


def net(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))


def dots(split: str, data_dir: Path) -> TensorDataset:
    images = torch.rand(240, 1, 8, 8, generator=torch.Generator().manual_seed(len(split)))
    return TensorDataset(images, (images.mean((1, 2, 3)) > 0.5).long())
"""


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A user's own model and dataset for our trainer, in two files, and a package that the image lacks."""
    folder = tmp_path / "test project"
    folder.mkdir()
    for name, text in (("parts.py", PARTS), ("words.py", 'WORD = "first"'), ("requirements.txt", "tabulate\n")):
        (folder / name).write_text(text)
    yield folder
    subprocess.run(["podman", "rmi", "--force", reference_of(folder)], capture_output=True, check=False, timeout=300)


def test_a_users_own_model_and_data_train_on_two_hosts_and_go_on_with_a_changed_file(lab: Lab, project: Path) -> None:
    def trained(word: str, **variables: Any) -> tuple[Path, str]:
        done = lab.fab("train", NODES=2, **variables)
        assert done.returncode == 0, done.stdout
        folder, summary = summary_of(done.stdout)
        assert (summary["status"], summary["world_size"]) == ("succeeded", 2)
        assert all(f"{host} rank {rank} | {word} with tabulate" in done.stdout for host, rank in (("h1", 0), ("h2", 1)))
        plan = json.loads((folder / "plan.json").read_text())
        assert plan["script"] is None and plan["args"][:2] == ["--project", PROJECT_DIR]
        assert plan["image"] == engine.podman("image", "inspect", "--format={{.Id}}", reference_of(project)).strip()
        assert list((folder / "checkpoints").glob("*.pt")) and not (folder / "workload").exists()
        return folder, plan["image"]

    named = "--model parts:net --dataset parts:dots --classes 2"
    first, image = trained("first", PROJECT=project, ARGS=f"{named} --epochs 1")
    (project / "words.py").write_text('WORD = "second"')
    second, changed = trained("second", RESUME=first.name, ARGS="--epochs 2")
    assert changed != image
    settings = json.loads((second / "settings.json").read_text())
    assert (settings["model"], settings["epochs"], settings["project"]) == ("parts:net", 2, PROJECT_DIR)


def test_a_dry_run_prints_every_hosts_command_and_starts_nothing(lab: Lab) -> None:
    before = lab.runs()
    done = lab.fab("train", NODES=2, DRY_RUN=1)
    assert done.returncode == 0 and lab.runs() == before
    for host in lab.cluster["hosts"][:2]:
        assert f"GLOO_SOCKET_IFNAME={host['interface']}" in done.stdout
    assert (
        all(f"$ sudo {lab.engine(host).name} run" in done.stdout for host in HOSTS[:2])
        and "--node-rank 1" in done.stdout
    )
