"""The sessions of `make test`, `make test-all` and `make test-fast` leave no test out."""

from __future__ import annotations

from pathlib import Path

from tests import suite


def test_every_lab_test_is_in_the_lab_session() -> None:
    ((lab, unit),) = suite.phases("")
    folders = [word for word in lab.words if word.startswith("tests/")]
    marked = [path for path in Path("tests").rglob("test_*.py") if "mark.lab\n" in path.read_text()]
    assert marked and [path for path in marked if not str(path).startswith(tuple(folders))] == []
    assert (lab.chosen, unit.chosen) == ("lab and not long", "not lab and not long")


def test_the_whole_suite_has_the_long_tests_too_and_hosts_with_docker_alone() -> None:
    first, (docker,) = suite.phases("all")
    assert [session.chosen for session in first] == ["lab", "not lab"]
    assert all(Path(word).is_file() for word in docker.words if word.startswith("tests/"))
    assert set(docker.environment["MUSTER_TEST_ENGINES"].split(",")) == {"docker"}


def test_the_fast_sessions_share_the_folders_out() -> None:
    ((*parts, others),) = suite.phases("fast")
    folders = [folder for part in parts for folder in part.words]
    assert {f"--ignore={folder}" for folder in folders} == set(others.words) and len(set(folders)) == len(folders)
    assert all(Path(folder).is_dir() for folder in folders)
    assert len({session.chosen for session in (*parts, others)}) == 1
