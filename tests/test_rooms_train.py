"""Promises of the rooms in train/: no import runs up or in a circle, and none leaves the trainer's own packages."""

import ast
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Packages and flat files of train/, from the bottom up. A room imports from rows below its own and from itself, not
# from its neighbours in the row.
ROWS = (
    ("settings", "order", "durable"),
    ("start", "model", "losses", "optim"),
    ("datasets", "checkpoints", "parallel"),
    ("inference", "evaluate", "step"),
    ("session",),
    ("reporting",),
    ("trainer", "forecast"),
    ("run",),
    ("__main__",),
)
HEIGHT = {room: height for height, row in enumerate(ROWS) for room in row}

# What a distribution's module is called where its name differs; Pillow comes with torchvision.
MODULES = {"scikit-learn": "sklearn", "pyyaml": "yaml", "torchvision": "torchvision PIL"}


def name_of(path: Path) -> str:
    """train/start/group.py -> train.start.group, train/start/__init__.py -> train.start"""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {name_of(path): path for path in sorted((ROOT / "train").rglob("*.py"))}


def imports(node: ast.AST) -> Iterator[str]:
    """Full names of all that is imported, inside functions too, but for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "relative import: write the full name"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        yield from imports(child)


def imported(name: str) -> set[str]:
    return set(imports(ast.parse(FILES[name].read_text(encoding="utf-8"))))


def files_imported(name: str) -> set[str]:
    """The files of train/ that this one names: `from train.start.group import Place` is train.start.group."""
    named = {one for one in imported(name) if one.split(".")[0] == "train"}
    return {one if one in FILES else one.rpartition(".")[0] for one in named}


def room_of(name: str) -> str:
    """train.start.group -> start; train itself -> empty"""
    return f"{name}.".split(".")[1]


def test_no_import_runs_up_or_to_a_neighbour() -> None:
    wrong = [
        f"{name} imports {target}"
        for name in FILES
        for target in files_imported(name)
        if room_of(target) != room_of(name) and HEIGHT[room_of(target)] >= HEIGHT[room_of(name)]
    ]
    assert not wrong


def test_files_do_not_import_each_other_in_a_circle() -> None:
    TopologicalSorter({name: files_imported(name) for name in FILES}).prepare()  # raises CycleError, naming the files


@pytest.mark.parametrize("name", FILES)
def test_only_the_trainers_own_packages_are_imported(name: str) -> None:
    """Neither launch, containers nor ansible, nor what only the control machine has installed."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    lines = groups["train"] + (groups["horovod"] if name.startswith("train.parallel.horovod") else [])
    pinned = " ".join(MODULES.get(one, one) for one in (line.split("==")[0] for line in lines)).split()
    assert {one.split(".")[0] for one in imported(name)} <= {"train", *sys.stdlib_module_names, *pinned}
