"""Promise: RESUME names an earlier run of this inventory that some host can continue, or is refused with the fix."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from launch import files
from launch.cli.refusal import Refusal
from launch.hosts import connection
from launch.hosts.inventory import Target
from launch.job import readiness, resume
from launch.job.plan import Options, Ports, make_plan
from launch.job.resume import Earlier
from tests.launch.fake_hosts import ports
from tests.launch.samples import cluster


def plan(name: str, inventory: str = "inventory/lab", script: str | None = None) -> dict[str, Any]:
    options = Options(args=("--epochs", "90"), script=script)
    made = make_plan(replace(cluster(1, 1), inventory=inventory), options, name, ports(2), "me@here", f"2026-01-{name}")
    return dict(json.loads(json.dumps(asdict(made))))


PLANS = {
    "01": plan("01"),
    "03": plan("03"),
    "05": plan("05", "inventory/other.yml"),
    "02": plan("02", script="main.py"),
    "09-local": {},
}


def refusal(word: str, plans: dict[str, Any] = PLANS) -> str:
    with pytest.raises(Refusal) as caught:
        resume.select(word, "lab", plans)
    assert all(problem.where and problem.what and problem.fix for problem in caught.value.problems)
    return str(caught.value)


def test_last_is_the_newest_run_of_this_inventory() -> None:
    last = Earlier("03", None, ("--epochs", "90"), ("h1", "h2"), image="ab" * 32)
    assert resume.select("last", "lab", PLANS) == last
    assert resume.select("last", "other", PLANS).run == "05"


def test_the_working_directory_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    held = files.stored(Path("inventory/lab"))
    monkeypatch.chdir("/")
    assert files.stored(files.ROOT / "inventory/lab") == held == "inventory/lab"
    assert resume.select("last", "lab", {"01": plan("01", held)}).run == "01"


def test_a_run_is_found_by_its_id() -> None:
    assert resume.select("01", "lab", PLANS).run == "01"


def test_an_unknown_id_is_refused_with_the_known_ones() -> None:
    said = refusal("77")
    assert "there is no run 77" in said and "03, 02, 01" in said and "05" not in said


def test_no_run_at_all() -> None:
    assert "no run of this inventory" in refusal("last", {})


def test_a_run_on_another_inventory_is_refused() -> None:
    said = refusal("05")
    assert "another inventory (inventory/other.yml)" in said and "INVENTORY=" in said


def test_a_run_on_this_machine_is_refused() -> None:
    assert "was not made by `make train`" in refusal("09-local")


def test_plans_are_read_from_the_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ROOT", tmp_path)
    for name, content in PLANS.items():
        (tmp_path / "runs" / name).mkdir(parents=True)
        if content:
            (tmp_path / "runs" / name / "plan.json").write_text(json.dumps(content))
    assert resume.find("last", Path("inventory/lab")).run == "03"


EARLIER = Earlier("03", None, ("--epochs", "90"), ("h1", "h2"))


def test_last_is_no_run_whose_settings_were_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ROOT", tmp_path)
    for run, status in (("01", 130), ("03", 2)):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "plan.json").write_text(json.dumps(PLANS[run]))
        (tmp_path / "runs" / run / "summary.json").write_text(json.dumps({"exit_status": status}))
    inventory = Path("inventory/lab")
    assert resume.find("last", inventory).run == "01" and resume.find("03", inventory).run == "03"


def test_without_args_the_earlier_runs_arguments_count() -> None:
    assert resume.continued(Options(nodes=1), EARLIER) == Options(nodes=1, args=("--epochs", "90"), resume="03")


def test_new_settings_win_over_the_earlier_runs_and_a_scripts_arguments_replace_them() -> None:
    assert resume.continued(Options(args=("--seed", "2")), EARLIER).args == ("--epochs", "90", "--seed", "2")
    script = replace(EARLIER, script="main.py")
    assert resume.continued(Options(args=("5",), script="main.py"), script).args == ("5",)
    assert resume.continued(Options(script="main.py"), script).args == ("--epochs", "90")


def test_communication_is_not_chosen_again_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("--compress", "bf16", "--seed", "2")
    assert resume.continued(Options(args=settings), EARLIER).args == (*EARLIER.args, *settings)
    assert not capsys.readouterr().out
    again = ("--communication", "auto", "--seed", "2")
    assert resume.continued(Options(args=again), EARLIER).args == (*EARLIER.args, "--seed", "2")
    assert "communication: nothing is chosen for a run that continues another" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("now", "before", "said"),
    [
        ("main.py", None, "ran Muster's own trainer, not main.py"),
        (None, "main.py", "ran main.py, not Muster's own trainer"),
        ("other.py", "main.py", "ran main.py, not other.py"),
    ],
)
def test_a_run_of_something_else_is_refused(now: str | None, before: str | None, said: str) -> None:
    with pytest.raises(Refusal, match=said):
        resume.continued(Options(script=now), replace(EARLIER, script=before))


class Host(connection.Machine):
    """A host that is ready, with a checkpoint or without."""

    target = Target("h1", "10.77.0.11")

    def __init__(self, has_checkpoint: bool) -> None:
        self.has_checkpoint = has_checkpoint

    def answer(self, command: str, timeout: float = 0) -> str:
        assert "/var/lib/muster/runs/03/checkpoints/step-*.json" in command
        assert "create_server" in command
        free = "keeper=29403 29404\n" + ("master=29500 29507\n" if "master" in command else "")
        return f"image=yes\ndata=yes\n{free}" + ("resume=yes\n" if self.has_checkpoint else "")


def test_one_host_with_a_checkpoint_is_enough() -> None:
    hosts = cluster(1, 1).hosts
    assert readiness.check([Host(False), Host(True)], hosts, "ab" * 32, EARLIER) == Ports(29500, 29507, (29403, 29403))


def test_a_run_that_left_nothing_on_any_host_is_refused() -> None:
    hosts = cluster(1).hosts
    with pytest.raises(Refusal) as caught:
        readiness.check([Host(False)], hosts, "ab" * 32, EARLIER)
    assert "run 03 left no checkpoint on h1; it ran on h1, h2" in str(caught.value)
    assert "let one of h2 take part (NODES), or train without RESUME" in str(caught.value)


def test_a_run_that_ended_before_its_first_checkpoint_points_to_the_one_that_it_continued() -> None:
    said = str(resume.refusal_of_nothing(replace(EARLIER, resumed="01"), ["h1", "h2"]))
    assert "continue what it continued: RESUME=01, or train without RESUME" in said
    continued = PLANS["03"] | {"resume": "01"}
    assert resume.select("03", "lab", PLANS | {"03": continued}).resumed == "01"


def test_a_hosts_answer_is_read() -> None:
    assert readiness.parse("image=yes\nresume=yes\n").has_resume
    assert not readiness.parse("image=yes\n").has_resume
