"""Promises of --parallel horovod: it gives what one process gives, with accumulation and a batch too short for all too.

The long tests build Horovod as `make horovod` builds it, and install it into a folder that only their ranks see.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from containers.engine import ContainersError
from containers.horovod_wheel import horovod_wheels
from launch.job.plan import HOROVOD_SCRIPT
from tests.conftest import cannot_run
from train.parallel import horovod, horovod_start
from train.settings import SettingsError
from train.start.group import Place

ROOT = Path(__file__).resolve().parents[2]
RANKS = "tests.train.horovod_ranks"
SECONDS = 300


def test_a_missing_horovod_is_one_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(SettingsError, match=r"make horovod.*make deploy HOROVOD=1"):
        horovod_start.module()


def test_hosts_with_different_numbers_of_ranks_are_described_in_horovods_terms() -> None:
    local_ranks = [0, 1, 0, 0, 1, 2]  # hosts with 2, 1 and 3 ranks
    where = [
        horovod_start.variables(Place(rank, local_rank, 6, size), local_ranks, "eth0", ("192.0.2.7", 4711))
        for rank, (local_rank, size) in enumerate(zip(local_ranks, [2, 2, 1, 3, 3, 3], strict=True))
    ]
    assert [one["HOROVOD_HOSTNAME"] for one in where] == ["host-0", "host-0", "host-1", "host-2", "host-2", "host-2"]
    cross = [(int(one["HOROVOD_CROSS_RANK"]), int(one["HOROVOD_CROSS_SIZE"])) for one in where]
    assert cross == [(0, 3), (0, 2), (1, 3), (2, 3), (1, 2), (0, 1)]


@pytest.mark.parametrize(("timeout", "seconds"), [(0.2, "1"), (20.5, "21"), (300.0, "300")])
def test_horovods_whole_seconds_are_never_none(timeout: float, seconds: str) -> None:
    assert horovod_start.limits(timeout)["HOROVOD_GLOO_TIMEOUT_SECONDS"] == seconds


def test_groups_hold_every_trained_parameter_once_and_are_cut_where_they_are_full() -> None:
    network = torch.nn.Sequential(*(torch.nn.Linear(10, 10) for _ in range(5)))  # 440 bytes each
    network[0].requires_grad_(False)
    groups = horovod.fixed_groups(network, 880)
    trained = [p for p in reversed(list(network.parameters())) if p.requires_grad]
    assert [id(p) for group in groups for p in group] == [id(p) for p in trained]
    assert len(groups) == 2 and all(sum(4 * p.numel() for p in group) <= 880 for group in groups)
    assert [len(group) for group in horovod.fixed_groups(network, 1)] == [1] * 8


NEIGHBOURS = {"train.py": "WORD = 'my train'", "keeper.py": "WORD = 'my keeper'", "beside.py": "WORD = 'beside'"}
SCRIPT_WITH_NEIGHBOURS = """
import sys
import beside, keeper, train
print([beside.WORD, keeper.WORD, train.WORD], sys.argv, __name__)
"""
WITHOUT_HOROVOD = """
import sys
from train.parallel import horovod_script
horovod_script.prepare = lambda place, held: None
sys.exit(horovod_script.main(sys.argv[1:]))
"""


def in_a_users_folder(folder: Path, start: list[str]) -> subprocess.CompletedProcess[str]:
    """`start`, then main.py and its arguments, typed in a folder whose modules have the names of our packages."""
    for name, text in {**NEIGHBOURS, "main.py": SCRIPT_WITH_NEIGHBOURS}.items():
        (folder / name).write_text(text)
    elsewhere = folder / "site"
    elsewhere.mkdir()
    (elsewhere / "horovod.py").write_text("raise ImportError('none here')")
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [*start, "main.py", "two words"], cwd=folder, env={**alone, "PYTHONPATH": f"{elsewhere}:{ROOT}"},
        timeout=SECONDS, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_users_own_train_py_does_not_hide_the_wrapper_of_a_horovod_script(tmp_path: Path) -> None:
    """It comes as far as our complaint that there is no Horovod."""
    python, *words = HOROVOD_SCRIPT
    done = in_a_users_folder(tmp_path, [sys.executable, *words])
    assert python == "python3" and done.returncode == 2, done.stderr
    assert "Horovod cannot be loaded here (none here)" in done.stderr, done.stderr


@pytest.mark.slow
def test_a_horovod_script_imports_what_lies_beside_it_under_whatever_name(tmp_path: Path) -> None:
    done = in_a_users_folder(tmp_path, [sys.executable, "-P", "-c", WITHOUT_HOROVOD])
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['beside', 'my keeper', 'my train'] ['main.py', 'two words'] __main__\n"


# From here on with Horovod.


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a process that sees Horovod."""
    try:
        wheels = horovod_wheels(lambda line: None)
    except ContainersError as error:
        cannot_run(str(error))
    site = tmp_path_factory.mktemp("horovod")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", f"--target={site}"]
    subprocess.run([*pip, *map(str, wheels.glob("*.whl"))], check=True, timeout=SECONDS)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    return {**kept, "PYTHONPATH": f"{site}:{ROOT}", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def torchrun(ranks: int, how: str = "-m") -> list[str]:
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    return [*agent, f"--nproc-per-node={ranks}", how]


def run(start: list[str], environment: dict[str, str], *arguments: str) -> None:
    done = subprocess.run(
        [*start, RANKS, *arguments],
        cwd=ROOT, env=environment, timeout=SECONDS, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]


Results = dict[tuple[str, int], dict[str, Any]]  # (name, rank) -> what tests.train.horovod_ranks saved


@pytest.fixture(scope="module")
def results(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Results:
    out = tmp_path_factory.mktemp("ranks")
    run([sys.executable, "-m"], environment, str(out), "none", "0")
    run(torchrun(2), environment, str(out), "horovod", "0")
    run(torchrun(2), environment, str(out), "horovod", "3")
    return {(path.stem[:-2], int(path.stem[-1])): torch.load(path) for path in out.glob("*.pt")}


@pytest.mark.long
@pytest.mark.parametrize("name", ["horovod-2-0", "horovod-2-3"])
def test_gradients_and_weights_are_those_of_one_process(results: Results, name: str) -> None:
    """In whole batches and in passes of 3 samples; the last of the three batches has a sample for one rank only."""
    alone = results["none-1-0", 0]
    for rank in (0, 1):
        ours = results[name, rank]
        for step in range(3):
            torch.testing.assert_close(ours["gradients"][step], alone["gradients"][step], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(ours["norms"][step], alone["norms"][step], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours["model"], alone["model"], rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", ["horovod-2-0", "horovod-2-3"])
def test_replicas_are_equal_bit_by_bit(results: Results, name: str) -> None:
    same(results[name, 1]["model"], results[name, 0]["model"])
    same(results[name, 1]["optimizer"], results[name, 0]["optimizer"])


@pytest.mark.long
def test_states_have_plain_names_and_fit_the_other_ways(results: Results) -> None:
    ours, alone = results["horovod-2-0", 0], results["none-1-0", 0]
    assert ours["model"].keys() == alone["model"].keys()
    assert ours["optimizer"]["state"].keys() == alone["optimizer"]["state"].keys()
    assert ours["optimizer"]["groups"] == alone["optimizer"]["groups"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["horovod-2-0", "horovod-2-3"])
def test_a_loaded_state_goes_on_to_the_same_bits(results: Results, name: str) -> None:
    for rank in (0, 1):
        one = results[name, rank]
        same(one["resumed"], [one["model"], one["optimizer"]])


@pytest.mark.long
def test_three_ranks_sum_in_the_same_order_every_time(environment: dict[str, str], tmp_path: Path) -> None:
    run(torchrun(3), environment, str(tmp_path), "horovod", "3", "again")
    first = torch.load(tmp_path / "horovod-3-3-0.pt")
    for other in first["again"]:
        same(other, first["model"])


@pytest.mark.long
def test_horovodrun_starts_it_too(environment: dict[str, str], results: Results, tmp_path: Path) -> None:
    """There is no torchrun then, and the ranks of torch.distributed meet through Horovod's own server."""
    without = {name: value for name, value in environment.items() if name != "GLOO_SOCKET_IFNAME"}
    start = [sys.executable, "-m", "horovod.runner.launch", "-np", "2", sys.executable, "-m"]
    run(start, without, str(tmp_path), "horovod", "3")
    for rank in (0, 1):
        same(torch.load(tmp_path / f"horovod-2-3-{rank}.pt")["model"], results["horovod-2-3", rank]["model"])


USERS_SCRIPT = """
import sys
import horovod.torch as hvd
import torch

import beside
hvd.init()
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum, name="sum")
open(f"{sys.argv[1]}/{hvd.rank()}", "w").write(f"{hvd.size()} {int(total)} {sys.argv[2]} {beside.WORD}")
"""


@pytest.mark.long
def test_a_users_own_horovod_script_runs_under_torchrun(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(USERS_SCRIPT)
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    (tmp_path / "train.py").write_text("raise SystemExit('nobody asked for this')")
    words = [sys.executable, *HOROVOD_SCRIPT[1:], "main.py", str(tmp_path), "two words"]
    command = [*torchrun(2, "--no-python"), "--", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, timeout=SECONDS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["2 3 two words found"] * 2


@pytest.mark.long
@pytest.mark.parametrize("how", ["busy", "frozen"])
def test_a_step_that_a_rank_stays_away_from_ends_in_an_error(
    environment: dict[str, str], tmp_path: Path, how: str
) -> None:
    """Within --timeout, here 10 s: Horovod by itself waits for a busy one for ever. The process then ends, too."""
    command = [*torchrun(2), RANKS, str(tmp_path), "horovod", "0", how]
    subprocess.run(command, cwd=ROOT, env=environment, timeout=SECONDS, capture_output=True, check=False)
    end = torch.load(tmp_path / "horovod-2-0-0.pt")
    assert "did not come to this step within 10 s" in end["error"] and end["seconds"] > 5


def same(ours: Any, theirs: Any) -> None:
    """Equal to the last bit, whatever they are nested in."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        ours, theirs = list(ours.values()), [theirs[key] for key in ours]
    if isinstance(ours, list):
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)
    else:
        assert ours.equal(theirs) if isinstance(ours, torch.Tensor) else ours == theirs
