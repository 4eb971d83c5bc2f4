"""Promise: SECRETS reach the ranks as files and are named, never shown; what is no secret is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.cli.refusal import Refusal
from launch.run import private


def read(path: Path) -> tuple[dict[str, bytes], str]:
    said: list[str] = []
    return private.read(str(path), said.append), "\n".join(said)


def closed(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    path.chmod(0o600)
    return path


def test_a_file_of_lines_is_a_secret_for_each_name(tmp_path: Path) -> None:
    text = b"# of the tracker\n\nWANDB_API_KEY=s3cret=\nexport TOKEN='two words'\nEMPTY=\n"
    found, said = read(closed(tmp_path / "secrets.env", text))
    assert found == {"WANDB_API_KEY": b"s3cret=", "TOKEN": b"two words", "EMPTY": b""}
    assert said == "secrets for the ranks, in /muster/private/secrets: WANDB_API_KEY, TOKEN, EMPTY"


@pytest.mark.parametrize(
    "content", [b"hf_abcdef\n", b"dGVzdA==\n", b'{"key": "A=1"}', b"\xff\x00A=1\n", b"A=1\nno line\n"]
)
def test_any_other_file_is_one_secret(content: bytes, tmp_path: Path) -> None:
    assert read(closed(tmp_path / "token", content))[0] == {"token": content}


def test_each_file_of_a_folder_is_a_secret(tmp_path: Path) -> None:
    for name, content in (("a", b"A=1"), ("b.json", b"{}")):
        closed(tmp_path / name, content)
    (tmp_path / "folder").mkdir()
    assert read(tmp_path)[0] == {"a": b"A=1", "b.json": b"{}"}


def test_a_file_that_others_can_read_is_said(tmp_path: Path) -> None:
    path = closed(tmp_path / "token", b"x")
    path.chmod(0o644)
    assert f"others on this machine can read {path}; `chmod 600` closes it" in read(path)[1]


def test_what_cannot_be_a_secret_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    closed(tmp_path / "odd" / "a name", b"")
    for path, said in (
        (tmp_path / "absent", "cannot be read: No such file"),
        (tmp_path / "empty", "there is no file"),
        (tmp_path / "odd", "'a name' is no name"),
        (closed(tmp_path / "large", b"x" * (private.LIMIT_BYTES + 1)), "1048577 bytes"),
    ):
        with pytest.raises(Refusal, match=f"SECRETS: .*{said}"):
            read(path)
    assert private.read("", print) == {}
