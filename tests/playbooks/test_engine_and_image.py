"""Decisions of muster_ready, muster_podman and muster_image: which engine, which settings, what fits, what goes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from ansible.module_utils import muster_image, muster_podman, muster_ready
from ansible.module_utils.muster_engines import ENGINES, Docker, Podman
from ansible.module_utils.muster_podman import Settings

ROLE = Path(__file__).parents[2] / "playbooks" / "roles" / "engine"
LIMITS = {"nofile": 20000, "nproc": -1}
ULIMITS = (("nofile", 20000), ("nproc", 32768))


def test_settings_are_tried_from_none_to_all() -> None:
    tried = muster_podman.candidates(LIMITS, ["runc"])
    assert tried == [Settings(), Settings("runc"), Settings(None, ULIMITS), Settings("runc", ULIMITS)]


def test_a_machine_that_needs_nothing_gets_no_file() -> None:
    assert muster_podman.render(Settings(), "") is None


def test_the_file_says_why_it_is_there_and_sets_no_more_than_needed() -> None:
    text = muster_podman.render(Settings(None, ULIMITS), "setrlimit RLIMIT_NOFILE: Operation not permitted") or ""
    assert "#   setrlimit RLIMIT_NOFILE" in text
    assert 'default_ulimits = ["nofile=20000:20000", "nproc=32768:32768"]' in text
    assert "[engine]" not in text
    assert '[engine]\nruntime = "runc"' in (muster_podman.render(Settings("runc"), "") or "")


@pytest.mark.parametrize(
    ("complaint", "words"),
    [
        ("Error: 'overlay' is not supported over overlayfs, a mount_program is required", "fuse-overlayfs"),
        ("OCI runtime error: crun: cgroups in hybrid mode not supported", "runc"),
        ("error setting rlimit type 7: operation not permitted", "privileged"),
        ("write /run/x: no space left on device", "free disk"),
        ("something else", "by hand"),
    ],
)
def test_what_podman_says_comes_with_a_fix(complaint: str, words: str) -> None:
    assert words in muster_podman.fix(complaint)


def test_the_probes_tree_follows_the_machines_own_layout(tmp_path: Path) -> None:
    merged, tree = tmp_path / "root", tmp_path / "tree"
    (merged / "usr").mkdir(parents=True)
    (merged / "bin").symlink_to("usr/bin")
    (merged / "lib").mkdir()
    tree.mkdir()
    options = muster_podman.probe_tree(tree, merged)
    assert options == ["--volume", f"{merged}/usr:/usr:ro", "--volume", f"{merged}/lib:/lib:ro"]
    assert (tree / "bin").is_symlink() and (tree / "proc").is_dir()


def test_a_package_is_there_when_its_command_is_whoever_installed_it() -> None:
    assert muster_ready.missing_packages({"shell": "sh", "nothing": "no-such-command"}) == ["nothing"]


def test_folders_are_made_once_and_owned_by_the_ssh_user(tmp_path: Path) -> None:
    owner = tmp_path.owner()
    root = tmp_path / "lib" / "muster"
    assert muster_ready.make_folders(root, owner, check_mode=True)
    assert not root.exists()
    assert muster_ready.make_folders(root, owner, check_mode=False)
    assert (root / "images" / "oci" / "blobs" / "sha256").owner() == (root / "runs").owner() == owner
    assert not muster_ready.make_folders(root, owner, check_mode=False)


@pytest.mark.skipif(os.getuid() != 0, reason="it gives files to another user")
def test_what_another_ssh_user_had_is_taken_over(tmp_path: Path) -> None:
    owner = tmp_path.owner()
    kept = tmp_path / "data" / "stl10" / "one.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    (kept.parent / "elsewhere").symlink_to(tmp_path)
    muster_ready.make_folders(tmp_path, owner, check_mode=False)
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.lchown(path, 4711, 4711)
    assert muster_ready.make_folders(tmp_path, owner, check_mode=True)
    assert kept.stat().st_uid == 4711
    assert muster_ready.make_folders(tmp_path, owner, check_mode=False)
    assert {path.lstat().st_uid for path in tmp_path.rglob("*")} == {os.getuid()}
    assert not muster_ready.make_folders(tmp_path, owner, check_mode=False)


def test_a_blob_that_was_cut_counts_as_missing(tmp_path: Path) -> None:
    (tmp_path / "aa").write_bytes(b"x" * 10)
    (tmp_path / "bb").write_bytes(b"x" * 7)
    assert muster_image.missing_blobs(tmp_path, {"aa": 10, "bb": 20, "cc": 5}) == ["bb", "cc"]


def test_an_image_that_fits_is_no_problem() -> None:
    states = {"/pool": (1, 500), "/storage": (1, 500)}
    assert muster_image.disk_problems([("/pool", 100), ("/storage", 300)], states, slack=100) == []


def test_folders_on_one_disk_share_its_space() -> None:
    states = {"/pool": (1, 500), "/storage": (1, 500)}
    problems = muster_image.disk_problems([("/pool", 200), ("/storage", 300)], states, slack=100)
    assert len(problems) == 1 and "/pool, /storage" in problems[0]
    apart = {"/pool": (1, 500), "/storage": (2, 500)}
    assert muster_image.disk_problems([("/pool", 200), ("/storage", 300)], apart, slack=100) == []


def test_a_disk_that_gets_nothing_may_be_full() -> None:
    assert muster_image.disk_problems([("/pool", 0)], {"/pool": (1, 0)}, slack=100) == []


def test_blobs_of_any_image_stay_and_all_else_goes() -> None:
    ledger = {"images": {"a": {"id": "1", "blobs": ["x", "y"]}, "b": {"id": "2", "blobs": ["y", "z"]}}, "stale": []}
    assert muster_image.unneeded_blobs(ledger, ["x", "y", "z", "old", ".partial", ".x.part"]) == [
        "old",
        ".partial",
        ".x.part",
    ]


def test_a_digest_is_that_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    assert muster_image.digest_of(tmp_path / "file").startswith("ba7816bf8f01cfea")


@pytest.mark.parametrize(
    ("wanted", "noted", "there", "gives_gpus", "chosen"),
    [
        ("auto", "", [], [], "podman"),  # a bare host
        ("auto", "", ["docker"], ["docker"], "docker"),
        ("auto", "", ["podman", "docker"], ["podman", "docker"], "podman"),
        ("auto", "", ["podman", "docker"], ["docker"], "docker"),  # it alone has what gives GPUs
        ("auto", "", ["docker"], [], "docker"),  # said later, with what is missing
        ("auto", "docker", ["podman", "docker"], ["podman", "docker"], "docker"),  # as the last deploy took it
        ("auto", "docker", ["podman"], ["podman"], "podman"),  # it is gone
        ("podman", "docker", ["docker"], ["docker"], "podman"),
        ("docker", "podman", ["podman"], ["podman"], "docker"),
    ],
)
def test_the_engine_is_what_is_wanted_or_noted_or_there(
    wanted: str, noted: str, there: list[str], gives_gpus: list[str], chosen: str
) -> None:
    assert muster_ready.choose(wanted, noted, there, gives_gpus) == chosen


@pytest.mark.parametrize(
    ("os_release", "family"),
    [
        ("ID=debian\nVERSION_ID=12\n", "debian"),
        ('ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\n', "debian"),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.4"\n', "rhel"),
        ('ID="rhel"\nID_LIKE="fedora"\n', "rhel"),
        ("ID=arch\n", ""),
        ("", ""),
    ],
)
def test_a_system_s_family_says_whose_packages_it_takes(os_release: str, family: str) -> None:
    assert muster_ready.family(os_release) == family


def test_each_family_has_packages_of_all_engines_for_the_same_commands() -> None:
    """And a system of no known family is asked for the same commands."""
    packages = yaml.safe_load((ROLE / "defaults" / "main.yml").read_text())["engine_packages"]
    assert set(packages) == set(muster_ready.FAMILIES) == set(muster_ready.INSTALL)
    for own in packages.values():
        assert {"all", "vpn", *ENGINES} <= set(own) <= {"all", "vpn", "vpn_program", *ENGINES}
        assert set(own["all"].values()) == set(packages["debian"]["all"].values())
        assert all(ENGINES[name].program in own[name].values() for name in ENGINES)


@pytest.mark.parametrize(
    ("printed", "refused"),
    [
        ("NVIDIA Container Toolkit CLI version 1.17.7\ncommit: abc\n", True),
        ("NVIDIA Container Toolkit CLI version 1.9.0\n", True),
        ("NVIDIA Container Toolkit CLI version 1.17.8\ncommit: abc\n", False),
        ("NVIDIA Container Toolkit CLI version 1.18.0-rc.1\n", False),
        ("", False),  # not there: the GPUs' own check says so
    ],
)
def test_a_toolkit_with_a_known_escape_is_refused(printed: str, refused: bool) -> None:
    problem = muster_ready.toolkit_problem(printed)
    assert ("CVE-2025-23266" in problem and "Fix: install 1.17.8" in problem) if refused else problem == ""


@pytest.mark.parametrize(
    ("printed", "refused"),
    [
        ("podman version 3.0.1\n", True),
        ("podman version 3.4.4\n", False),
        ("podman version 4.3.1\n", False),
        ("podman version 10.0.0\n", False),
        ("", False),
    ],
)
def test_a_podman_that_is_too_old_is_refused(printed: str, refused: bool) -> None:
    said = muster_podman.version_problem(printed)
    assert bool(said) is refused and ("version 3.0.1, and Muster needs 3.4" in said) is refused


@pytest.fixture
def engines_of_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Podman and Docker as scripts that note their calls, and a note that stands elsewhere."""
    for name, listed in (("podman", "echo []"), ("docker", "cat here/$1 2>/dev/null")):
        listed = listed.replace("here", str(tmp_path))
        answers = f'case $1 in ps|images) {listed};; *) echo "{name} $*" >> {tmp_path}/calls;; esac'
        (tmp_path / name).write_text(f"#!/bin/sh\n[ -e {tmp_path}/no-{name} ] && exit 1\n{answers}\nexit 0\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "dockerd").symlink_to("docker")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(muster_ready, "NOTE", str(tmp_path / "note"))
    (tmp_path / "ps").write_text("muster-r1-0\texited\tr1\tann\t2026-11-28 03:32:37 +0000 UTC\n")
    train, by_id = "localhost/muster/train:latest", f"localhost/muster/by-id:{'a' * 64}"
    images = {train: "b" * 64, by_id: "b" * 64, "somebodys:1": "c" * 64}
    (tmp_path / "images").write_text("".join(f"{name}\tsha256:{own}\n" for name, own in images.items()))
    return tmp_path


def test_what_an_engine_has_of_muster_goes_and_nothing_else(engines_of_a_host: Path) -> None:
    found = muster_ready.remove_all(Docker(), check_mode=True)
    assert found == ["container muster-r1-0", f"image {'a' * 64}"] and not (engines_of_a_host / "calls").exists()
    assert muster_ready.remove_all(Docker(), check_mode=False) == found
    named = f"localhost/muster/train:latest localhost/muster/by-id:{'a' * 64}"
    assert (engines_of_a_host / "calls").read_text().splitlines() == [
        "docker rm --force muster-r1-0",
        f"docker rmi --force {named}",
    ]


def test_an_engine_that_does_not_answer_matters_where_it_is_the_host_s(engines_of_a_host: Path) -> None:
    (engines_of_a_host / "no-docker").touch()
    assert muster_ready.remove_all(Docker(), check_mode=False) == []  # somebody's, stopped
    (engines_of_a_host / "note").write_text("docker\n")
    with pytest.raises(RuntimeError, match="docker does not answer"):
        muster_ready.remove_all(Docker(), check_mode=False)


def test_another_engine_takes_over_when_no_run_is_in_progress(engines_of_a_host: Path) -> None:
    note = engines_of_a_host / "note"
    assert muster_ready.change_of_engine(muster_ready.Wanted({}, "podman", False)) == []  # none was deployed before
    note.write_text("docker\n")
    assert muster_ready.change_of_engine(muster_ready.Wanted({}, "podman", False)) == ["docker", "podman"]
    assert muster_ready.change_of_engine(muster_ready.Wanted({}, "auto", False)) == []
    (engines_of_a_host / "ps").write_text("muster-r1-0\tpaused\tr1\tann\t?\n")
    with pytest.raises(RuntimeError, match="run r1 of ann is in progress in docker"):
        muster_ready.take(Podman(), check_mode=False)
    assert note.read_text() == "docker\n" and not (engines_of_a_host / "calls").exists()
    (engines_of_a_host / "ps").write_text("")
    assert muster_ready.take(Podman(), check_mode=True) and note.read_text() == "docker\n"
    assert muster_ready.take(Podman(), check_mode=False) and note.read_text() == "podman\n"
    assert "docker rmi" in (engines_of_a_host / "calls").read_text()
    assert not muster_ready.take(Podman(), check_mode=False)
