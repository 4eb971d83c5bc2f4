"""Promise: where a host's own network is the reason for a silence, that is what is said of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from keeper import causes


@pytest.mark.parametrize("state", ["up", "unknown"])
def test_a_network_that_may_work_is_not_blamed(tmp_path: Path, state: str) -> None:
    (tmp_path / "eno2").mkdir()
    (tmp_path / "eno2" / "operstate").write_text(f"{state}\n")
    assert causes.interface_problem("eno2", tmp_path) == ""
    assert causes.interface_problem("lo") == ""  # of this machine: its state is unknown


@pytest.mark.parametrize("state", ["down", "lowerlayerdown", "notpresent"])
def test_an_interface_that_is_down_or_gone_is_named(tmp_path: Path, state: str) -> None:
    (tmp_path / "eno2").mkdir()
    (tmp_path / "eno2" / "operstate").write_text(f"{state}\n")
    assert causes.interface_problem("eno2", tmp_path) == "its network interface eno2 is down"
    assert causes.interface_problem("ens9", tmp_path) == "its network interface ens9 is gone"
