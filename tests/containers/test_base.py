"""Which packages' sources the base image is made from, and what names its content."""

from __future__ import annotations

import pytest

from containers import base

DEB822 = """
Types: deb
# http://snapshot.example/archive
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/debian
Suites: trixie
Components: main
"""


def test_the_machines_own_mirror_is_used_in_either_format() -> None:
    found = base.bookworm_sources(
        {
            "debian.sources": DEB822,
            "sources.list": "# deb http://old.example/debian bookworm main\n"
            "deb [arch=amd64] http://mirror.example/security bookworm-security main\n"
            "deb-src http://mirror.example/debian bookworm main\n",
        }
    )
    assert found["muster.list"] == "deb [arch=amd64] http://mirror.example/security bookworm-security main\n"
    assert "URIs: http://mirror.example/debian" in found["muster.sources"]
    assert "trixie" not in found["muster.sources"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cloud.list", "deb https://packages.example/apt cloud-sdk-bookworm main"),
        ("node.sources", "Types: deb\nURIs: https://node.example\nSuites: nodistro\nComponents: main"),
        ("docker.list", "deb [signed-by=/etc/apt/keyrings/docker.asc] https://docker.example bookworm stable"),
        ("off.sources", "Enabled: no\nTypes: deb\nURIs: http://off.example\nSuites: bookworm\nComponents: main"),
        ("empty.list", "# nothing\n"),
    ],
)
def test_third_parties_and_disabled_sources_are_left_out(name: str, text: str) -> None:
    assert base.bookworm_sources({name: text}) == {}


def test_another_mirror_makes_another_base() -> None:
    one, other = ({"muster.list": f"deb http://{name}.example/debian bookworm main\n"} for name in ("a", "b"))
    assert base.recipe_hash(one) == base.recipe_hash(dict(one)) != base.recipe_hash(other)


def test_apts_proxy_reaches_the_build_unless_the_environment_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(base, "apt_settings", lambda: 'Acquire::http::Proxy "http://cache.example:3142";\n')
    assert base.apt_proxies() == {"http_proxy": "http://cache.example:3142"}
    monkeypatch.setenv("http_proxy", "http://mine.example:8080")
    assert base.apt_proxies() == {"http_proxy": "http://mine.example:8080"}
