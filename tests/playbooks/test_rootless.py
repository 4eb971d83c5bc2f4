"""Promise: what lacks for a user's own Podman is found, and what an administrator types for it is right."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest
from ansible.module_utils import muster_podman, muster_rootless
from ansible.module_utils.muster_engines import Place
from ansible.module_utils.muster_host import Result

ANN = pwd.struct_passwd(("ann", "x", 1001, 1001, "", "/home/ann", "/bin/sh"))


@pytest.mark.parametrize(
    ("text", "enough"),
    [
        ("bob:100000:65536\nann:165536:65536\n", True),
        ("1001:165536:65536\n", True),
        ("ann:100000:30000\nann:200000:40000\n", True),
        ("0: ann 100000 65536\n", True),  # as getsubids prints it
        ("ann:100000:1000\n", False),
        ("anna:100000:65536\n", False),
        ("", False),
    ],
)
def test_a_users_subordinate_ids(text: str, enough: bool) -> None:
    assert muster_rootless.has_ids(text, ANN) is enough


def test_new_ids_are_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert muster_rootless.free_id(["bob:100000:65536\n", "bob:100000:65536\neve:231072:65536\n"]) == 296608
    assert muster_rootless.free_id(["", "# none\n"]) == muster_rootless.FIRST_ID
    files = {"/etc/subuid": "ann:165536:65536\n", "/etc/subgid": "bob:100000:65536\n"}
    monkeypatch.setattr(muster_rootless, "read", files.get)
    [(what, fix)] = muster_rootless._ids(ANN)
    assert "/etc/subgid" in what and "/etc/subuid" not in what
    assert fix == "as root there: `usermod --add-subgids 231072-296607 ann`"


def test_the_file_system_of_a_folder_is_that_of_the_nearest_mount() -> None:
    mounts = ["/dev/sda1 / ext4 rw 0 0", "server:/home /home nfs4 rw 0 0", "/dev/sdb1 /home/ann/disk xfs rw 0 0"]
    kinds = [muster_rootless.file_system(folder, mounts) for folder in ("/home/ann", "/home/ann/disk/x", "/homes")]
    assert kinds == ["nfs4", "xfs", "ext4"]


def test_what_the_same_user_had_there_as_root_comes_off_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    note = tmp_path / "engine"
    monkeypatch.setattr(muster_rootless, "NOTE", str(note))
    monkeypatch.setattr(muster_rootless, "ROOTS", Place(str(tmp_path), ""))
    assert list(muster_rootless._of_root()) == []
    note.write_text("podman\n")
    [(what, fix)] = muster_rootless._of_root()
    assert str(tmp_path) in what and "make teardown" in fix
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert list(muster_rootless._of_root()) == []  # another user's is none of this one's


def test_overlay_is_chosen_only_where_podman_has_no_storage_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(muster_podman, "USERS_STORAGE", tmp_path / ".config/containers/storage.conf")
    monkeypatch.setattr(muster_podman, "find_command", lambda name: None)
    monkeypatch.setattr(muster_podman.Path, "exists", lambda path: os.path.exists(path) and tmp_path in path.parents)
    (tmp_path / ".local/share/containers/storage/libpod").mkdir(parents=True)
    muster_podman.prefer_overlay()
    assert not muster_podman.USERS_STORAGE.exists()
    (tmp_path / ".local/share/containers/storage/libpod").rmdir()
    monkeypatch.setattr(muster_podman, "run", lambda words, timeout: Result(125, "", "'overlay' is not supported"))
    muster_podman.prefer_overlay()
    assert not muster_podman.USERS_STORAGE.exists()
    monkeypatch.setattr(muster_podman, "run", lambda words, timeout: Result(0, "", ""))
    muster_podman.prefer_overlay()
    assert 'driver = "overlay"' in muster_podman.USERS_STORAGE.read_text()
