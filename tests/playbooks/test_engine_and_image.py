"""Decisions of muster_podman and muster_image: which settings are tried, what is said, what fits, what is removed."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible.module_utils import muster_image, muster_podman
from ansible.module_utils.muster_podman import Settings

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
    assert muster_podman.missing_packages({"shell": "sh", "nothing": "no-such-command"}) == ["nothing"]


def test_folders_are_made_once_and_owned_by_the_ssh_user(tmp_path: Path) -> None:
    owner = tmp_path.owner()
    root = tmp_path / "lib" / "muster"
    assert muster_podman.make_folders(root, owner, check_mode=True)
    assert not root.exists()
    assert muster_podman.make_folders(root, owner, check_mode=False)
    assert (root / "images" / "oci" / "blobs" / "sha256").owner() == (root / "runs").owner() == owner
    assert not muster_podman.make_folders(root, owner, check_mode=False)


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
