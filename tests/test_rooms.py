"""Promises: imports go down from room to room, never back up or in a circle, and each folder uses its own packages."""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from benchmarks.faults import FAULTS, SLOW_HOSTS, SURVIVED
from containers.pip import group_requirements

ROOT = Path(__file__).resolve().parent.parent

Rows = tuple[tuple[str, ...], ...]

#: The packages and flat files of launch/ and train/, from the bottom up. A room imports itself and what stands in rows
#: below its own, and none of its neighbours in the row.
ROWS: dict[str, Rows] = {
    "launch": (
        *(("files",), ("cli",), ("page", "hosts"), ("network", "job"), ("health",), ("report", "deploy"), ("run",)),
        ("packages",),
        ("local", "horovod", "demo", "tensorboard"),
    ),
    "train": (
        ("names",),
        ("settings", "order", "whole_files", "generators", "torch_versions"),
        ("own_parts",),
        ("start", "model", "losses", "optim"),
        ("datasets", "checkpoints", "parallel"),
        ("inference", "evaluate", "step", "trial"),
        *(("session",), ("resume", "reporting"), ("trainer", "forecast"), ("run",), ("__main__",)),
    ),
}
#: Alone in its folder: it runs before anything is installed.
ALONE = "launch.bootstrap"

#: keeper/ and playbooks/ also run with a host's own Python.
OLDEST_PYTHON = (3, 8)

#: What the distributions of pyproject.toml are called in an import, where the name differs.
MODULES = {
    "scikit-learn": "sklearn",
    "pyyaml": "yaml",
    "torchvision": "torchvision PIL",
    "vl-convert-python": "vl_convert",
}
#: The groups of pyproject.toml, and the folders of ours, whose modules a folder may import.
MAY = {
    "launch": ({"control"}, {"launch", "containers", "keeper"}),
    "containers": ({"control"}, {"containers"}),
    "train": ({"train", "horovod"}, {"train", "keeper"}),
}


def name_of(file: Path) -> str:
    """train/start/group.py -> train.start.group, train/start/__init__.py -> train.start"""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def sources(folder: str) -> dict[str, Path]:
    """Module name -> file, for all files of a folder."""
    return {name_of(file): file for file in sorted((ROOT / folder).rglob("*.py"))}


def imports(node: ast.AST) -> Iterator[str]:
    """Full names of all that is imported, inside functions too, but for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0 and child.module, "relative import: write the full name"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        yield from imports(child)


@functools.cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def imported(file: Path) -> frozenset[str]:
    return frozenset(imports(tree(file)))


def graph(folder: str) -> dict[str, set[str]]:
    """Module -> the modules of the same folder that it imports; `from a.b import name` is a.b."""
    modules = sources(folder)
    return {
        module: {name if name in modules else name.rpartition(".")[0] for name in imported(file)} & set(modules)
        for module, file in modules.items()
    }


def upward(edges: dict[str, set[str]], rows: Rows) -> list[str]:
    """The imports that run up, or to a neighbour of the same row."""
    height = {room: number for number, row in enumerate(rows) for room in row}

    def room_of(name: str) -> str:
        return name.split(".")[1]

    return [
        f"{source} imports {target}"
        for source, targets in edges.items()
        for target in targets
        if room_of(target) != room_of(source) and height[room_of(target)] >= height[room_of(source)]
    ]


@pytest.mark.parametrize("folder", sorted(ROWS))
def test_no_import_runs_up_or_to_a_neighbour(folder: str) -> None:
    edges = {source: targets - {folder} for source, targets in graph(folder).items() if source not in (folder, ALONE)}
    assert {module.split(".")[1] for module in edges} == {room for row in ROWS[folder] for room in row}
    assert upward(edges, ROWS[folder]) == []


@pytest.mark.parametrize("folder", ["launch", "train", "containers", "keeper"])
def test_files_do_not_import_each_other_in_a_circle(folder: str) -> None:
    TopologicalSorter(graph(folder)).prepare()  # raises CycleError, naming the files


def packages(groups: set[str]) -> set[str]:
    """What the distributions of these groups of pyproject.toml are called in an import."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    entries = [entry for group in groups for entry in group_requirements(listed, group)]
    pinned = [entry.split("==")[0] for entry in entries]
    return set(" ".join(MODULES.get(name, name) for name in pinned).split())


@pytest.mark.parametrize("folder", sorted(MAY))
def test_a_folder_imports_its_own_packages_alone(folder: str) -> None:
    groups, ours = MAY[folder]
    # Of the control machine's packages launch uses Ansible only as a command; invoke comes with Fabric, MarkupSafe with
    # Jinja2.
    may = (packages(groups) | ours | {"invoke", "markupsafe"}) - {"ansible"} | set(sys.stdlib_module_names)
    for file in sources(folder).values():
        assert {name.split(".")[0] for name in imported(file)} <= may, file


def test_what_runs_before_anything_is_installed_and_on_bare_hosts_needs_the_standard_library_alone() -> None:
    for folder in ("playbooks/library", "playbooks/module_utils"):
        for file in (ROOT / folder).glob("*.py"):
            assert {name.split(".")[0] for name in imported(file)} <= {*sys.stdlib_module_names, "ansible"}, file
            ast.parse(file.read_text(encoding="utf-8"), feature_version=OLDEST_PYTHON)
    assert {name.split(".")[0] for name in imported(sources("launch")[ALONE])} <= set(sys.stdlib_module_names)
    for file in sources("keeper").values():
        assert {name.split(".")[0] for name in imported(file)} <= {*sys.stdlib_module_names, "keeper"}, file
        ast.parse(file.read_text(encoding="utf-8"), feature_version=OLDEST_PYTHON)


@pytest.mark.parametrize("folder", sorted(ROWS))
def test_every_room_says_what_it_is_and_what_it_may_import(folder: str) -> None:
    for file in (ROOT / folder).glob("*/__init__.py"):
        said = (ast.get_docstring(ast.parse(file.read_text())) or "").lower()
        assert "import" in said and ("writ" in said or "puts" in said), file


def test_a_wrong_import_is_seen() -> None:
    """What the tests above look for is found where it is."""
    edges = {"launch.hosts.a": {"launch.run.b"}, "launch.run.b": {"launch.cli.c"}, "launch.cli.c": set[str]()}
    assert upward(edges, ROWS["launch"]) == ["launch.hosts.a imports launch.run.b"]
    with pytest.raises(CycleError):
        TopologicalSorter(edges | {"launch.cli.c": {"launch.hosts.a"}}).prepare()


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "README.md", "docs/faults.md"])
def test_every_file_that_the_documents_name_exists(page: str) -> None:
    tracked = {file.name for folder in (*ROWS, "playbooks", "tests") for file in (ROOT / folder).rglob("*.py")}
    for name in re.findall(r"`([\w/.-]+\.(?:py|yml))`", (ROOT / page).read_text(encoding="utf-8")):
        if name not in ("main.py", "my.yaml"):  # a user's own
            assert (ROOT / name).exists() if "/" in name else name in tracked | {"fabfile.py"}, name


def test_every_drill_has_a_row_and_every_row_that_names_one_has_it() -> None:
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    named = {
        name for row in re.findall(r"^\|.*FAULT=.*$", page, re.M) for name in re.findall(r"`(?:[^`]*=)?(\w+)`", row)
    }
    assert named - {"progress()"} >= {*FAULTS, *SURVIVED, *SLOW_HOSTS}
    assert set(re.findall(r"FAULT=(\w+)", page)) <= {*FAULTS, *SURVIVED, *SLOW_HOSTS}


def test_a_number_with_a_name_has_one_value_everywhere() -> None:
    values: dict[str, dict[float, str]] = {}
    for folder in ("launch", "train", "keeper", "containers", "playbooks"):
        for name, file in sources(folder).items():
            for constant, number in numbers(tree(file)):
                values.setdefault(constant, {})[number] = name
    assert {constant: places for constant, places in values.items() if len(places) > 1} == {}


def numbers(module: ast.Module) -> Iterator[tuple[str, float]]:
    """The numeric constants at the top of a file: name and value."""
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with contextlib.suppress(ValueError):  # an expression of other names
                value = ast.literal_eval(node.value)
                if isinstance(value, int | float):
                    yield node.targets[0].id, value
