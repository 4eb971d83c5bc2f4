"""Promises of train.checkpoints.agree: all hosts go on from the same intact step, real ranks over gloo."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.train import checkpoints_ranks
from tests.train.checkpoints_ranks import CASES, put
from train.checkpoints import CheckpointError, StartPoint, files, newest_common, resolve
from train.start.group import Place

pytestmark = pytest.mark.slow
Answers = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hosts")
    checkpoints_ranks.run(out)
    return out


@pytest.fixture(scope="module")
def answers(folder: Path) -> Answers:
    """Of each case the answers of all ranks."""
    names = [prepare.__name__ for prepare in CASES]
    return {
        name: [json.loads(path.read_text()) for path in sorted((folder / name).glob("[0-9].json"))] for name in names
    }


def is_whole(path: Path) -> bool:
    return bool(files.verify(path, 20))


def test_all_ranks_get_the_same_answer(answers: Answers) -> None:
    for name, ranks in answers.items():
        assert len(ranks) > 1
        for rank in ranks:
            assert {**rank, "path": 0} == {**ranks[0], "path": 0}, name


def test_what_all_hosts_hold_is_taken_and_nothing_is_said(answers: Answers) -> None:
    assert answers["all_hold_the_newest"][0] == {"step": 20, "notes": [], "value": [20.0]}


def test_hosts_that_lack_it_or_hold_it_corrupt_are_given_it(answers: Answers, folder: Path) -> None:
    answer = answers["lacking_flipped_and_none"][1]
    assert (answer["step"], answer["value"]) == (20, [20.0])
    hosts = [folder / "lacking_flipped_and_none" / f"host{number}" / "checkpoints" for number in range(3)]
    assert len({(host / "step-20.pt").read_bytes() for host in hosts}) == 1
    assert all(is_whole(host) for host in hosts)
    assert not [*folder.glob("*/*/checkpoints/.*")]  # no draft stays, in no case


def test_a_corrupt_copy_is_named_with_host_file_and_reason(answers: Answers) -> None:
    notes = answers["lacking_flipped_and_none"][0]["notes"]
    assert [n for n in notes if "(rank 1)" in n and "host1/checkpoints/step-20.pt was altered" in n]
    assert len([n for n in notes if "was given step-20.pt" in n and "by" in n and "(rank 2)" in n]) == 2


def test_a_host_with_nothing_is_given_the_newest(answers: Answers) -> None:
    ranks = answers["a_new_host"]
    assert [rank["value"] for rank in ranks] == [[20.0]] * 4
    assert [Path(rank["path"]).parts[-3] for rank in ranks] == ["host0", "host0", "host1", "host1"]


def test_on_a_slow_link_all_ranks_wait_as_long_as_it_takes(answers: Answers) -> None:
    assert [rank["value"] for rank in answers["a_slow_link"]] == [[20.0]] * 4


def test_ranks_that_neither_send_nor_receive_enter_no_collective_of_gpus(answers: Answers) -> None:
    assert [rank["value"] for rank in answers["bound_to_gpus"]] == [[20.0]] * 4


def test_many_hosts_are_given_it_at_once(answers: Answers) -> None:
    assert [rank["value"] for rank in answers["many_new_hosts"]] == [[20.0]] * 6


def test_a_step_that_is_corrupt_everywhere_is_passed_over_and_no_longer_counts(answers: Answers, folder: Path) -> None:
    answer = answers["newest_corrupt_everywhere"][0]
    assert (answer["step"], answer["value"]) == (10, [10.0])
    assert len([note for note in answer["notes"] if "altered" in note and "passed over" in note]) == 2
    assert files.saved_steps(folder / "newest_corrupt_everywhere" / "host1" / "checkpoints") == [10]


def test_without_any_checkpoint_training_begins_anew(answers: Answers) -> None:
    assert answers["nothing_anywhere"][1] == {"step": None, "notes": [], "path": "None"}


def test_of_different_copies_the_lowest_ranks_is_taken(answers: Answers) -> None:
    assert [rank["value"] for rank in answers["different_copies"]] == [[20.0], [20.0]]


def test_hosts_may_share_a_folder(answers: Answers) -> None:
    assert [rank["value"] for rank in answers["one_shared_folder"]] == [[20.0]] * 3


def test_a_host_that_cannot_write_is_named_on_all_ranks(answers: Answers) -> None:
    assert all("rank 1: cannot write" in rank["error"] for rank in answers["no_room"])


def test_resume_from_a_run_that_one_host_has(answers: Answers, folder: Path) -> None:
    ranks = answers["from_elsewhere"]
    assert [rank["value"] for rank in ranks] == [[55.0]] * 4
    case = folder / "from_elsewhere"
    assert ranks[0]["path"] == ranks[1]["path"] == str(case / "host0" / "checkpoints" / "step-5.pt")
    assert ranks[3]["path"] == str(case / "other1" / "checkpoints" / "step-5.pt")
    assert files.saved_steps(case / "host0" / "checkpoints") == [5]  # its step 20 belongs to another line


def test_resume_from_an_older_one_leaves_the_newer_behind(answers: Answers, folder: Path) -> None:
    assert answers["from_an_older_one"][0]["value"] == [10.0]
    assert files.saved_steps(folder / "from_an_older_one" / "host1" / "checkpoints") == [10]
    assert (folder / "from_an_older_one" / "host1" / "checkpoints" / "left-step-20.pt").is_file()


def test_resume_none_begins_anew(answers: Answers, folder: Path) -> None:
    assert answers["anew"][0]["step"] is None
    assert files.saved_steps(folder / "anew" / "host0" / "checkpoints") == []


def test_a_path_that_no_host_has_is_an_error_and_changes_nothing(answers: Answers, folder: Path) -> None:
    assert "nowhere: no host has an intact checkpoint there" in answers["absent_path"][0]["error"]
    assert files.saved_steps(folder / "absent_path" / "host0" / "checkpoints") == [10, 20]


def test_one_process_needs_no_process_group(tmp_path: Path) -> None:
    put(tmp_path, 10)
    assert newest_common(tmp_path, Place()) == (10, [])
    assert resolve("auto", tmp_path, Place()) == StartPoint(tmp_path / "step-10.pt", 10, [])


def test_a_file_of_another_name_is_refused_with_the_option_that_loads_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--init-from"):
        resolve(str(tmp_path / "resnet50.pt"), tmp_path, Place())


def test_a_folder_that_cannot_be_read_is_said_to_be_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(folder: Path) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", folder)

    monkeypatch.setattr(os, "listdir", closed)
    place = Place(0, 0, 1, 1)
    with pytest.raises(CheckpointError, match=f"no host has an intact checkpoint there; .*{tmp_path} cannot be read"):
        resolve(str(tmp_path), tmp_path / "own", place)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"no host has an intact checkpoint there$"):
        resolve(str(tmp_path), tmp_path / "own", place)
