"""Promise: what Muster has installed is known, whatever broke off, and is removed only where nothing else needs it."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible.module_utils import muster_driver, muster_packages
from ansible.module_utils.muster_host import Result


class Machine:
    """The packages of a machine, and which of them need which."""

    def __init__(self, *names: str, **needs: str) -> None:
        self.names, self.needs = set(names), needs

    def run(self, words: list[str], timeout: float = 0) -> Result:
        if words[0] == "dpkg-query":
            removed = "config-files removed-once\n"
            return Result(0, removed + "".join(f"installed {name}\n" for name in sorted(self.names)), "")
        if words[0] == "apt-cache":
            return Result(0, "".join(self.depends(name) for name in words[5:]), "")
        asked = set(words[3:])
        gone = asked | {name for name, needed in self.needs.items() if needed in asked and name in self.names}
        return Result(0, "".join(f"Purg {name} [1.0]\n" for name in gone), "")

    def depends(self, name: str) -> str:
        """As `apt-cache depends --recurse` prints it."""
        needed = self.needs.get(name)
        return f"{name}\n" + (f"  Depends: {needed}\n{self.depends(needed)}" if needed else "")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine("bash", "dpkg")
    monkeypatch.setattr(muster_packages, "run", made.run)
    return made


def test_what_came_with_a_package_is_ours_as_well(machine: Machine, tmp_path: Path) -> None:
    ledger = tmp_path / "muster" / "packages.json"
    muster_packages.note_begin(ledger)
    machine.names |= {"podman", "conmon"}
    muster_packages.note_end(ledger)
    machine.names.add("editor")  # by somebody else, later
    muster_packages.note_end(ledger)
    assert muster_packages.removable(ledger) == ["conmon", "podman"]


def test_an_installation_that_was_broken_off_is_not_forgotten(machine: Machine, tmp_path: Path) -> None:
    ledger = tmp_path / "packages.json"
    muster_packages.note_begin(ledger)
    machine.names.add("conmon")  # and then the network went
    muster_packages.note_begin(ledger)
    machine.names.add("podman")
    muster_packages.note_end(ledger)
    muster_packages.note_begin(ledger)  # another version of Muster wants more
    machine.names.add("nftables")
    muster_packages.note_end(ledger)
    assert muster_packages.removable(ledger) == ["conmon", "nftables", "podman"]


@pytest.fixture
def built_on(machine: Machine, tmp_path: Path) -> Path:
    """The ledger of podman and conmon, of which somebody's buildah needs the second."""
    ledger = tmp_path / "packages.json"
    muster_packages.note_begin(ledger)
    machine.names |= {"podman", "conmon"}
    muster_packages.note_end(ledger)
    machine.names |= {"buildah", "toolbox"}
    machine.needs |= {"buildah": "conmon", "toolbox": "bash"}
    return ledger


def test_what_somebody_has_built_on_stays(built_on: Path) -> None:
    assert muster_packages.removable(built_on) == ["podman"]


@pytest.mark.parametrize("printed", ["conmon:i386", " |Depends: conmon", "  Depends: <runtime>\n    conmon:amd64"])
def test_what_one_of_several_would_do_for_stays(machine: Machine, built_on: Path, printed: str) -> None:
    """Lines as apt 2.6 prints them."""
    machine.depends = lambda name: f"buildah\n{printed}\n"  # type: ignore[method-assign]
    assert muster_packages.removable(built_on) == ["podman"]


def test_nothing_is_removed_where_apt_removes_more_than_it_says(machine: Machine, built_on: Path) -> None:
    machine.depends = lambda name: f"{name}\n"  # type: ignore[method-assign]
    assert muster_packages.removable(built_on) == []


def test_what_is_gone_already_is_not_removed(machine: Machine, tmp_path: Path) -> None:
    ledger = tmp_path / "packages.json"
    muster_packages.note_begin(ledger)
    machine.names.add("podman")
    muster_packages.note_end(ledger)
    machine.names.discard("podman")
    assert muster_packages.removable(ledger) == [] and muster_packages.installed(ledger) == ["podman"]


def test_without_a_ledger_nothing_is_ours(machine: Machine, tmp_path: Path) -> None:
    assert muster_packages.removable(tmp_path / "none.json") == []


def test_a_driver_in_use_stays_with_what_it_needs(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, ledger = tmp_path / "nvidia", tmp_path / "packages.json"
    monkeypatch.setattr(muster_driver, "MODULE", module)
    muster_packages.note_begin(ledger)
    machine.names |= {"nvidia-kernel-open-dkms", "dkms", "gcc", "nvidia-container-toolkit", "podman"}
    machine.needs |= {"dkms": "gcc", "nvidia-kernel-open-dkms": "dkms"}
    muster_packages.note_end(ledger)
    assert "nvidia-kernel-open-dkms" in muster_packages.removable(ledger)
    module.mkdir()
    assert muster_packages.removable(ledger) == ["nvidia-container-toolkit", "podman"]
