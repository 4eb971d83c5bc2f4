"""Promises: a run's page shows what its folder holds, says what it lacks and what to do next, and believes nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from launch import files
from launch.page import render
from launch.report import about, advice, curves, documents, ending, ranks, run_page, timeline
from launch.report.documents import Metrics
from tests.keeper.simulation import search
from tests.launch.health.test_page import assert_self_contained, parse, tags
from tests.launch.report import made_runs
from tests.launch.report.made_runs import FAILED, LOCAL, NASTY, RESTARTED, SCRIPT, SUCCEEDED


def content(folder: Path) -> dict[str, Any]:
    return run_page.content(documents.read(folder))


def page(folder: Path) -> str:
    return run_page.write(folder).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", made_runs.KINDS)
def test_every_kind_of_run_has_a_well_formed_page_that_needs_nothing_else(runs: Path, name: str) -> None:
    html = page(runs / name)
    assert_self_contained(html)
    assert html.count("<figure>") == html.count('type="application/json"') and len(html) < 2_000_000


def test_the_page_of_the_real_run_has_its_figures_in_their_places(runs: Path) -> None:
    shown = content(runs / SUCCEEDED)
    assert [tile[:2] for tile in shown["tiles"][:3]] == [
        ("test accuracy", "94.99%"),
        ("images/s", "280"),
        ("steps", "36"),
    ]
    assert [figure.title for figure in shown["curves"]] == ["Loss", "Accuracy", "Speed", "Learning rate", "Waiting"]
    assert ("torch", "2.13.0+cpu") in shown["versions"] and ("epochs", "3") in shown["settings"]
    assert ("master", "h1 at 10.78.0.11:29500") in shown["plan"] and "podman run" in shown["commands"]
    assert [row[0] for row in shown["hosts"]] == ["host", "h1", "h2"] and "NVIDIA H200" in shown["hosts"][1][3]
    assert shown["check"].level == "error" and shown["check"].before == "12 min"
    assert shown["missing"] == [] and not shown["failure"] and not shown["attempts"]


def test_loss_and_speed_are_drawn_over_epochs_and_the_last_point_is_the_last_epochs(runs: Path) -> None:
    metrics = documents.read(runs / SUCCEEDED).metrics
    assert metrics
    loss, _, speed, *_ = curves.figures(metrics)
    values = loss.spec["data"]["values"]
    assert [value["x"] for value in values if value["line"] == "held out"] == [1, 2, 3]
    assert [value["x"] for value in values if value["line"] == "each step"][-1] == 3
    steps = [value["y"] for value in speed.spec["data"]["values"] if value["line"] == "steps"]
    assert len(steps) == 36 - 3 and 150 < min(steps) < max(steps) < 700  # the first step of an epoch has none before it


@pytest.mark.slow
def test_the_speed_is_that_of_steps_of_one_epoch_alone(project: Path) -> None:
    run = documents.read(made_runs.large(files.runs_dir() / made_runs.LARGE, hosts=2, ranks=1, steps=3000))
    assert run.metrics
    assert [rate for _, rate in curves.rates(run.metrics)] == pytest.approx([16384.0] * 200)


def test_a_run_that_was_continued_has_a_mark_where(runs: Path) -> None:
    metrics = documents.read(runs / RESTARTED).metrics
    assert metrics and curves.continued(metrics) == [16]
    assert "continued from a checkpoint" in [entry.name for entry in curves.figures(metrics)[0].key]


def test_before_the_end_of_an_epoch_curves_are_over_steps() -> None:
    metrics = Metrics()
    metrics.add({"event": "start", "time": 1.0})
    for step in (1, 2, 3):
        words = {"epoch": 1, "step": step, "loss": 1.0, "lr": 0.1, "images": 10, "seconds": 0.1 * step}
        metrics.add({"event": "step", "time": 1.0 + step, **words})
    assert [figure.title for figure in curves.figures(metrics)] == ["Loss", "Speed", "Learning rate"]
    assert curves.figures(metrics)[0].spec["encoding"]["x"]["title"] == "step"


# -- ranks -----------------------------------------------------------------------------------------------------------


def test_the_rank_for_which_the_others_wait_is_named(runs: Path) -> None:
    assert ranks.slowest(ranks.times(documents.read(runs / SUCCEEDED))) == ""
    with_times(runs / SUCCEEDED, computing=[0.21, 0.2, 0.45], waiting=[0.26, 0.27, 0.02])
    known = ranks.times(documents.read(runs / SUCCEEDED))
    assert [one.name for one in known] == ["rank 0, h1", "rank 1, h2", "rank 2, h2"]
    assert ranks.slowest(known) == "The others wait for rank 2, h2: it computes 2.2 times as long as they do."


def with_times(folder: Path, **times: list[float | None]) -> None:
    """Put these in the place of what ranks have timed."""
    events = made_runs.read_lines(folder / "metrics.jsonl")
    changed = ({**event, **(times if "computing" in event else {})} for event in events)
    (folder / "metrics.jsonl").write_text(made_runs.lines(changed))


def test_after_a_restart_the_ranks_are_those_of_the_last_attempt_on_its_hosts(runs: Path) -> None:
    assert [one.name for one in ranks.times(documents.read(runs / RESTARTED))] == ["rank 0, h1", "rank 1, h3"]
    for name, is_last in ((RESTARTED, True), (SUCCEEDED, False)):
        notes = [figure.note for figure in ranks.figures(documents.read(runs / name))]
        assert len(notes) == 2 and all(note.startswith("Of the last attempt alone. ") is is_last for note in notes)


def test_a_spare_host_has_no_ranks_until_it_steps_in(project: Path) -> None:
    folder = made_runs.restarted(files.runs_dir() / RESTARTED)
    plan = files.read_json(folder / "plan.json")
    plan["hosts"][2]["ranks"] = []
    files.write_json(folder / "plan.json", plan)
    shown = content(folder)
    assert shown["hosts"][3][1] == "spare" and "3 ranks on 2 hosts and 1 spare" in shown["about"]
    assert documents.read(folder).host_of == {0: "h1", 1: "h3"}


@pytest.mark.slow
def test_each_attempt_has_a_row_with_its_hosts_its_last_step_and_why_it_ended(runs: Path) -> None:
    first, second = content(runs / RESTARTED)["attempts"]
    assert first == [
        "1",
        "h1, h2, h3",
        "22",
        "27.8 s",
        "h2: its keeper is gone: the container was ended, not by its run",
    ]
    assert second == ["2", "h1, h3", "60", "36.1 s", ""]
    assert ("attempts", "2", "") in content(runs / RESTARTED)["tiles"]
    summary = files.read_json(runs / FAILED / "summary.json")
    files.write_json(runs / FAILED / "summary.json", summary | {"given_up": "three attempts made no new step"})
    assert "It was not started again: three attempts made no new step" in page(runs / FAILED)


@pytest.mark.slow
def test_of_many_ranks_each_host_has_a_bar_and_the_slowest_and_fastest_a_line(project: Path) -> None:
    run = documents.read(made_runs.large(files.runs_dir() / made_runs.LARGE, hosts=10, ranks=8, steps=2000))
    bars, lines = ranks.figures(run)
    assert len({value["rank"] for value in bars.spec["data"]["values"]}) == 10
    assert [entry.name for entry in lines.key] == ["slowest rank", "median", "fastest rank"]


def test_a_rank_that_timed_no_step_has_no_time(runs: Path) -> None:
    folder = runs / SUCCEEDED
    with_times(folder, computing=[0.2, None, 0.2], waiting=[0.1, None, 0.1])
    assert [one.rank for one in ranks.times(documents.read(folder))] == [0, 2]


def changed(folder: Path, change: Any) -> None:
    """metrics.jsonl, result.json and summary.json after `change` of each of their objects."""
    events = made_runs.read_lines(folder / "metrics.jsonl")
    for event in events:
        change(event)
    (folder / "metrics.jsonl").write_text(made_runs.lines(events), encoding="utf-8")
    for name in ("result.json", "summary.json"):
        document = files.read_json(folder / name)
        change(document)
        files.write_json(folder / name, document)


def test_of_a_run_without_an_accuracy_the_loss_is_shown(runs: Path) -> None:
    def change(one: dict[str, Any]) -> None:
        one |= {name: None for name in one if "accuracy" in name}
        if "status" in one or "best_accuracy" in one:
            one |= {"test_loss": 0.25, "best_loss": 0.125}

    folder = runs / SUCCEEDED
    changed(folder, change)
    shown = content(folder)
    assert ("test loss", "0.25", "lowest 0.125") in shown["tiles"]
    assert not any("accuracy" in name for name, _, _ in shown["tiles"])
    assert [one.title for one in shown["curves"]][:2] == ["Loss", "Speed"]
    assert "accuracy" not in page(folder).partition("<script")[0].lower().replace("best_accuracy", "")
    spans = timeline.of_run(documents.read(folder)).spans
    assert any(span.what.startswith("epoch 3, test loss 0.1413, ") for span in spans)


def test_an_epoch_without_an_evaluation_leaves_the_figures_of_the_last_one(runs: Path) -> None:
    folder = runs / SUCCEEDED
    changed(folder, lambda one: one.pop("test_accuracy", None))
    events = made_runs.read_lines(folder / "metrics.jsonl")
    for event in events:
        if event["event"] == "epoch":
            tested = event["epoch"] == 2
            event |= {"test_accuracy": 0.5 if tested else None, "test_top5": 0.9 if tested else None}
            event |= {} if tested else {"test_loss": None}
    (folder / "metrics.jsonl").write_text(made_runs.lines(events), encoding="utf-8")
    tiles = {name: (figure, note) for name, figure, note in content(folder)["tiles"]}
    assert tiles["test accuracy"][0] == "50.00%" and tiles["test top-5"][0] == "90.00%"


@pytest.mark.slow
def test_gradients_are_drawn_where_steps_have_their_norm_and_top5_beside_the_accuracy(runs: Path) -> None:
    folder = runs / SUCCEEDED

    def change(one: dict[str, Any]) -> None:
        if one.get("event") == "step":
            one["grad_norm"] = float("nan") if one["step"] == 2 else 1.5
        if one.get("event") == "epoch":
            one["test_top5"] = 0.99

    before = [one.title for one in content(folder)["curves"]]
    changed(folder, change)
    drawn = {one.title: one for one in content(folder)["curves"]}
    assert "Gradients" not in before and len(drawn["Gradients"].spec["data"]["values"]) == 35
    assert [one.name for one in drawn["Accuracy"].key] == ["training", "held out", "among the first five"]


def test_the_page_says_that_a_run_ended_early_and_names_its_traces(runs: Path) -> None:
    folder = runs / SUCCEEDED
    changed(folder, lambda one: one.update(early_stop=3))
    (folder / "profile").mkdir()
    shown = content(folder)
    assert "ended by --early-stop after epoch 3" in shown["about"]
    assert any("profile/" in paths for name, paths in shown["files"] if name == "folders")


# -- what to do next -------------------------------------------------------------------------------------------------


def commands(folder: Path) -> list[str]:
    return [step.command for step in advice.steps(documents.read(folder))]


def test_a_run_that_succeeded_can_be_used_and_trained_on(runs: Path) -> None:
    (runs / SUCCEEDED / "tensorboard").mkdir()
    folder = files.shown(runs / SUCCEEDED)
    assert commands(runs / SUCCEEDED) == [
        f".venv/bin/python -m train predict --checkpoint {folder} IMAGES",
        f".venv/bin/python -m train export {folder}",
        f'make train RESUME={SUCCEEDED} ARGS="--epochs 6" INVENTORY=inventory/lab',
        f"make tensorboard RUN={SUCCEEDED}",
    ]
    assert f'make local ARGS="--resume {files.shown(runs / LOCAL)} --epochs 6 ..."' in commands(runs / LOCAL)


@pytest.mark.parametrize("part", ["dataset", "transform", "model", "loss"])
def test_what_is_offered_fits_a_run_with_own_parts(part: str, runs: Path) -> None:
    settings = files.read_json(runs / LOCAL / "settings.json")
    files.write_json(runs / LOCAL / "settings.json", {**settings, part: "mine:part"})
    steps = advice.steps(documents.read(runs / LOCAL))
    said = " ".join(f"{step.command} {step.what}" for step in steps)
    assert ("predict" in said) == (part in ("model", "loss"))
    assert "export" in said and ("torchvision" in said) == (part != "model")


def test_a_run_on_this_machine_goes_on_with_its_project(runs: Path, tmp_path: Path) -> None:
    own = tmp_path / "my own"
    settings = files.read_json(runs / LOCAL / "settings.json")
    files.write_json(runs / LOCAL / "settings.json", {**settings, "project": str(own)})
    began = f"make local PROJECT='{files.shown(own)}' ARGS=\"--resume {files.shown(runs / LOCAL)} "
    assert [one for one in commands(runs / LOCAL) if one.startswith(began)]
    assert any(f"predict --project '{files.shown(own)}' --checkpoint" in one for one in commands(runs / LOCAL))


def test_a_run_that_failed_goes_on_from_its_checkpoint_and_what_is_missing_is_fetched(runs: Path) -> None:
    assert commands(runs / FAILED) == [
        f"make train RESUME={FAILED} INVENTORY=inventory/lab",
        f"make gather RUN={FAILED} INVENTORY=inventory/lab",
    ]
    run = documents.read(runs / FAILED)
    assert advice.steps(run)[0].what == "goes on from its last checkpoint, of step 15, with the same settings"
    assert advice.fix(run) == f"All that the rank printed is in `{files.shown(run.folder)}/logs/h2/`."
    html = page(runs / FAILED)
    assert "rank 2 on h2: ValueError: the labels do not fit (exit 1)" in html and "Traceback (most recent" in html


def test_a_stopped_script_is_started_anew(runs: Path) -> None:
    assert commands(runs / SCRIPT) == [
        f"make train RESUME={SCRIPT} WORKLOAD=... SCRIPT=main.py INVENTORY=inventory/lab"
    ]
    assert advice.fix(documents.read(runs / SCRIPT)) == ""


def test_without_a_checkpoint_nothing_is_said_of_resuming(runs: Path) -> None:
    for manifest in (runs / FAILED / "checkpoints").iterdir():
        manifest.unlink()
    assert commands(runs / FAILED) == [f"make gather RUN={FAILED} INVENTORY=inventory/lab"]


def test_a_run_that_is_not_gathered_is_watched_or_fetched(project: Path) -> None:
    folder = files.runs_dir() / "some-run"
    made_runs.write_plan(folder, 1)
    assert [command.split()[1] for command in commands(folder)] == ["attach", "gather"]
    assert "unknown" in page(folder)


@pytest.mark.parametrize("kind", ["rank", "launcher", "host_lost", "cut", "hang", "start", "lease"])
def test_every_kind_of_cause_has_an_advice(runs: Path, kind: str) -> None:
    summary = files.read_json(runs / FAILED / "summary.json")
    files.write_json(runs / FAILED / "summary.json", summary | {"cause": {**summary["cause"], "kind": kind}})
    assert advice.fix(documents.read(runs / FAILED)).endswith((".", "turn."))


# -- what there is not -----------------------------------------------------------------------------------------------


def test_what_a_run_lacks_is_left_out_and_said(runs: Path) -> None:
    shown = content(runs / SCRIPT)
    assert shown["curves"] == [] and shown["by_rank"] == [] and shown["settings"] == []
    assert any("a script of one's own" in line for line in shown["missing"])
    local = content(runs / LOCAL)
    assert local["plan"] == [] and local["hosts"] == [] and local["check"] is None
    assert any("on this machine alone" in line for line in local["missing"])
    assert "h2>Hosts" not in page(runs / LOCAL)


def test_a_script_that_leaves_files_under_our_names_is_not_believed(runs: Path) -> None:
    run = documents.read(runs / SCRIPT)
    assert run.metrics is None and run.settings == {} and run_page.what_ran(run) == "main.py"


def test_another_control_machine_knows_neither_hardware_nor_check(project: Path) -> None:
    folder = made_runs.succeeded(files.runs_dir() / SUCCEEDED)
    shown = content(folder)
    assert shown["check"] is None and shown["hosts"][0] == ["host", "ranks", "training network", "ended"]
    assert "None is kept on this machine" in page(folder) and "no cluster map" in page(folder)


def test_only_a_check_before_the_run_is_shown(runs: Path) -> None:
    folder = runs / SUCCEEDED
    plan = files.read_json(folder / "plan.json")
    files.write_json(folder / "plan.json", plan | {"created": "2020-01-01T00:00:00+00:00"})
    assert about.check_before(documents.read(folder)) is None


def test_a_plan_of_another_version_is_shown_without_its_commands(runs: Path) -> None:
    plan = files.read_json(runs / SUCCEEDED / "plan.json")
    files.write_json(runs / SUCCEEDED / "plan.json", plan | {"schema": "muster.plan/99"})
    shown = content(runs / SUCCEEDED)
    assert shown["commands"] == "" and shown["plan"]


# -- what is not to be believed --------------------------------------------------------------------------------------


def test_everything_is_escaped(runs: Path) -> None:
    folder = runs / FAILED
    usual = tags(page(folder))
    summary = files.read_json(folder / "summary.json")
    cause = {**summary["cause"], "reason": NASTY, "lines": [NASTY]}
    files.write_json(folder / "summary.json", summary | {"reason": NASTY, "cause": cause})
    settings = files.read_json(folder / "settings.json")
    files.write_json(folder / "settings.json", settings | {"model": NASTY})
    for host in ("h1", "h2"):
        file = folder / "logs" / host / "events.jsonl"
        events = [{**event, "reason": NASTY} for event in made_runs.read_lines(file)]
        file.write_text(made_runs.lines(events))
    html = page(folder)
    assert NASTY[:20] not in html and "<script>alert" not in html
    assert (
        "&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;" in html and "{{ 7 * 7 }}" in html and "49" not in cells(html)
    )
    assert [tag for tag in tags(html) if tag not in ("pre", "br")] == [tag for tag in usual if tag not in ("pre", "br")]


def cells(html: str) -> set[str]:
    return {text.strip() for text in parse(html).text}


WORDS = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
EVENTS = ["lease", "heard", "started", "failed", "stop", "attempt", "killed", "left", "exit", "step", "epoch", "start"]
FIELDS = [
    "time",
    "after",
    "attempt",
    "host",
    "rank",
    "pids",
    "hosts",
    "left_out",
    "because",
    "age",
    "computing",
    "step",
]


@search(
    15,
    200,
    st.lists(
        st.dictionaries(st.sampled_from(FIELDS), WORDS).flatmap(
            lambda words: st.sampled_from(EVENTS).map(lambda name: {"time": 1.0, "after": 1.0, **words, "event": name})
        )
    ),
)
def test_events_and_metrics_of_any_shape_make_a_page(events: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        made_runs.write_plan(folder, 1)
        made_runs.write_host(folder, "h1", events, {})
        (folder / "metrics.jsonl").write_text(made_runs.lines(events))
        render.page(run_page.TEMPLATE, content(folder))


@pytest.mark.parametrize(
    "document", ["summary.json", "settings.json", "result.json", "logs/h1/exit.json", "checkpoints/step-36.json"]
)
@pytest.mark.parametrize(
    "words", ["", "[1]", '{"attempts": 3, "cause": "none", "status": 7, "step": "36", "seconds": []}']
)
def test_a_document_that_is_torn_or_something_else_does_not_end_the_page(runs: Path, document: str, words: str) -> None:
    (runs / SUCCEEDED / document).write_text(words)
    said: list[str] = []
    assert ending.write(runs / SUCCEEDED, said.append) and said == []


def test_a_page_that_cannot_be_written_is_one_line(runs: Path) -> None:
    (runs / SUCCEEDED / "report.html").mkdir()
    said: list[str] = []
    assert ending.write(runs / SUCCEEDED, said.append) is None
    assert re.match(rf"no report: .*; `make report RUN={SUCCEEDED}` tries again", said[0])


def test_what_nobody_thought_of_is_one_line_too(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "read", lambda folder: {"something": 1}["nothing"])
    said: list[str] = []
    assert ending.write(runs / SUCCEEDED, said.append) is None and said[0].startswith("no report: KeyError: 'nothing';")


@pytest.mark.slow
def test_many_steps_are_kept_and_drawn_in_little_memory(project: Path) -> None:
    """Of each step seven numbers are kept, and a line has 400 points whatever its length."""
    run = documents.read(made_runs.large(files.runs_dir() / made_runs.LARGE, hosts=2, ranks=1, steps=20_000))
    assert run.metrics and all(column.itemsize == 8 for column in run.metrics.steps.values())
    assert len(json.dumps([figure.spec for figure in curves.figures(run.metrics)])) < 150_000


@pytest.mark.slow
def test_a_command_that_writes_no_page_imports_nothing_that_draws() -> None:
    code = (
        "import sys, launch.run.train, launch.local; print([m for m in ('jinja2', 'vl_convert') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"
