"""The SBOM of an image: what stands in it. That it is in the image: test_image.py."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from containers import sbom
from tests.wheels import write_wheel


def test_a_package_is_named_as_the_specifications_do() -> None:
    assert sbom.python_purl("Typing_Extensions", "4.16.0") == "pkg:pypi/typing-extensions@4.16.0"
    assert sbom.python_purl("torch", "2.13.0+cpu") == "pkg:pypi/torch@2.13.0%2Bcpu"
    [entry] = sbom.debian_packages("libstdc++6 1:12.2 amd64\n", {"ID": "debian", "VERSION_ID": "12"})
    assert entry["purl"] == "pkg:deb/debian/libstdc%2B%2B6@1%3A12.2?arch=amd64&distro=debian-12"


def test_a_wheels_hash_stays_in_the_document_of_the_image_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sbom, "PLACE", tmp_path / "share" / "sbom.json")
    pytest_purl = sbom.python_purl("pytest", pytest.__version__)
    write_wheel(tmp_path / "wheels", "pytest", pytest.__version__)
    [wheel] = (tmp_path / "wheels").iterdir()
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (tmp_path / "none").mkdir()
    sbom.main("muster/train", str(tmp_path / "wheels"))
    first = sbom.PLACE.read_text()
    sbom.main("muster/train", str(tmp_path / "none"))
    assert sbom.PLACE.read_text() == first  # nothing in it is new each time
    entries = {entry["purl"]: entry for entry in json.loads(first)["components"]}
    assert entries[pytest_purl]["hashes"] == [{"alg": "SHA-256", "content": digest}]
    assert [purl for purl, entry in entries.items() if "hashes" in entry] == [pytest_purl]
