"""Where a lab host's Ubuntu comes from: its sources, its archive's keys, and an archive that is not as it should be."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from containers import base, ubuntu
from containers.engine import ContainersError
from containers.lab_plan import SYSTEMS

NOBLE, JAMMY = ubuntu.RELEASES["ubuntu24.04"], ubuntu.RELEASES["ubuntu22.04"]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "apt_proxies", dict)
    monkeypatch.delenv("UBUNTU_MIRROR", raising=False)


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """(its URL, its folder): an archive with something else in the place of the keys."""
    package = tmp_path / "archive" / ubuntu.KEYRING
    package.parent.mkdir(parents=True)
    package.write_bytes(b"not the keys")
    serve = functools.partial(Quiet, directory=str(tmp_path / "archive"))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", tmp_path / "archive"
        server.shutdown()


def test_every_system_of_a_lab_but_debian_has_a_release() -> None:
    assert set(ubuntu.RELEASES) == set(SYSTEMS) - {"debian"}


def test_a_release_comes_with_its_updates_and_with_universe() -> None:
    lines = ubuntu.sources_of(NOBLE).splitlines()
    assert [line.split()[2] for line in lines] == ["noble", "noble-updates", "noble-security"]
    assert all(line.startswith(f"deb {ubuntu.ARCHIVE} ") and line.endswith(" main universe") for line in lines)


def test_a_mirror_takes_the_place_of_the_archive_and_makes_another_image(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ubuntu.recipe_hash(NOBLE, ubuntu.sources_of(NOBLE))
    monkeypatch.setenv("UBUNTU_MIRROR", "http://mirror.example/ubuntu/")
    sources = ubuntu.sources_of(NOBLE)
    assert {line.split()[1] for line in sources.splitlines()} == {"http://mirror.example/ubuntu"}
    recipes = {own, ubuntu.recipe_hash(NOBLE, sources), ubuntu.recipe_hash(JAMMY, ubuntu.sources_of(JAMMY))}
    assert len(recipes) == 3


def test_other_keys_than_ubuntus_are_refused(archive: tuple[str, Path], tmp_path: Path) -> None:
    url, _ = archive
    with pytest.raises(ContainersError, match="not the package with the keys") as refused:
        ubuntu.fetch_keys(url, tmp_path)
    assert hashlib.sha256(b"not the keys").hexdigest() in refused.value.what
    assert refused.value.where == f"{url}/{ubuntu.KEYRING}"
    assert not (tmp_path / "keys.deb").exists()


def test_an_archive_that_lacks_the_keys_or_does_not_answer_is_named(archive: tuple[str, Path], tmp_path: Path) -> None:
    url, folder = archive
    (folder / ubuntu.KEYRING).unlink()
    for bad, words in ((url, "404"), ("http://127.0.0.1:1", "refused"), ("mirror", "unknown url type")):
        with pytest.raises(ContainersError, match=words) as refused:
            ubuntu.fetch_keys(bad, tmp_path)
        assert "cannot be reached" in refused.value.what and refused.value.where.startswith(f"{bad}/{ubuntu.KEYRING} ")
        assert "UBUNTU_MIRROR" in refused.value.fix and "OS=debian" in refused.value.fix
