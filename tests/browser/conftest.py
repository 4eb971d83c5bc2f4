"""Debian's Chromium without a screen, installed where it is missing, and the pages that Muster writes.

Needs root, or sudo without a password, for the installation alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from launch import files
from launch.deploy import control
from launch.health.report import page as check_page
from launch.report import __main__ as reporting
from launch.report import about
from tests.browser.chromium import Chromium
from tests.conftest import cannot_run, installing
from tests.launch.health.test_link_checks import links, names, of
from tests.launch.health.test_page import document, forecast
from tests.launch.report import made_runs

PROGRAMS = ("chromium", "chromedriver")
PACKAGES = ("chromium", "chromium-driver")
APT_SECONDS = 900


def _missing() -> list[str]:
    return [program for program in PROGRAMS if not shutil.which(program)]


def _install() -> None:
    """Install Chromium from Debian's packages; another worker of this session may be at it, too."""
    prefix = [] if os.getuid() == 0 else ["sudo", "-n"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
    with installing():
        for words in (["update", "-qq"], install) if _missing() else ():
            subprocess.run([*prefix, "apt-get", *words], env=environment, check=False, timeout=APT_SECONDS)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """One browser for all tests of a session, ended with all of its processes."""
    if _missing():
        if not (shutil.which("apt-get") and control.has_root()):
            cannot_run(f"{', '.join(_missing())}: not installed, and only root can install Debian's packages")
        _install()
        if _missing():
            cannot_run(f"{', '.join(_missing())}: apt-get could not install {' '.join(PACKAGES)}")
    made = Chromium(tmp_path_factory.mktemp("chromium"))
    try:
        yield made
    finally:
        made.end()


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every kind of page, by a name for it."""
    project = tmp_path_factory.mktemp("project")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "ROOT", project)
        patch.setattr(about, "ROOT", project)
        made_runs.all_of_them(with_large=True)
        written = {"runs": reporting.write_all()}
        written |= {name: files.runs_dir() / run / "report.html" for name, run in made_runs.NAMES.items()}
        hosts, options = names(16), ("--parallel ddp", "--parallel ddp --shares auto", "--parallel fsdp")
        many = links(hosts, of("h7", 16, 94.0), error=dict.fromkeys(of("h9", 16, 0), "timed out"))
        when = datetime(2026, 8, 1, 12, 0, tzinfo=UTC)
        for name, made in (
            ("check", document(forecast=forecast([1, 2, 3], options), when=when)),
            ("check of 16 hosts", document(hosts=hosts, links=many, sameness=None, forecast=forecast([1, 2, 4, 16]))),
        ):
            written[name], *_ = check_page.write_html(project / name / "report.html", made)
    return written
