"""Promise: imports go down from room to room, never back up, and no file needs a late import to break a circle."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: The rooms of launch/ from the bottom up. A room imports itself and those before it.
LAUNCH = ("files", "cli", "hosts", "network", "job", "health", "deploy", "run", "local", "horovod", "demo")
#: What each top folder may import of the others. Nothing imports fabfile.py, tests or benchmarks.
FOLDERS = {"launch": {"containers"}, "containers": set(), "train": set(), "playbooks": set()}
#: Packages that a folder must never import, at any place.
FORBIDDEN = {"launch": {"torch", "torchvision", "numpy", "ansible"}, "train": {"ansible", "fabric", "invoke"}}


def sources(folder: str) -> dict[str, Path]:
    """Module name -> file, for all files of a folder."""
    found = {}
    for file in sorted((ROOT / folder).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(file: Path) -> Iterator[str]:
    """What a file imports anywhere, also inside functions, but for what only a type checker reads."""
    waiting: list[ast.AST] = [ast.parse(file.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def graph(folder: str) -> dict[str, set[str]]:
    """Module -> the modules of the same folder that it imports."""
    modules = sources(folder)

    def module_of(name: str) -> str:
        return name if name in modules else name.rpartition(".")[0]

    return {
        module: {module_of(name) for name in imports(file)} & set(modules) - {module}
        for module, file in modules.items()
    }


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; empty where there is none."""
    done: set[str] = set()

    def walk(module: str, way: list[str]) -> list[str]:
        if module in way:
            return [*way[way.index(module) :], module]
        if module not in done:
            for target in sorted(edges[module]):
                if found := walk(target, [*way, module]):
                    return found
            done.add(module)
        return []

    return next((found for module in edges if (found := walk(module, []))), [])


def upward(edges: dict[str, set[str]], order: tuple[str, ...]) -> list[str]:
    """The imports that go up, given the rooms from the bottom up."""
    height = {room: number for number, room in enumerate(order)}
    return [
        f"{source} imports {target}"
        for source, targets in edges.items()
        for target in targets
        if height[target.split(".")[1]] > height[source.split(".")[1]]
    ]


def test_no_import_of_launch_goes_up() -> None:
    edges = graph("launch")
    rooms = {module: targets for module, targets in edges.items() if module not in ("launch", "launch.bootstrap")}
    assert {module.split(".")[1] for module in rooms} == set(LAUNCH)
    assert upward(rooms, LAUNCH) == []
    assert edges["launch.bootstrap"] == set(), "it runs before anything is installed"


@pytest.mark.parametrize("folder", ["launch", "containers"])
def test_no_files_import_each_other_in_a_circle(folder: str) -> None:
    assert circle(graph(folder)) == []


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_a_folder_imports_no_other_but_those_that_it_may(folder: str) -> None:
    ours = {"launch", "containers", "train", "playbooks", "benchmarks", "tests", "fabfile"} - FOLDERS[folder] - {folder}
    for file in sources(folder).values():
        found = {name.split(".")[0] for name in imports(file)}
        assert not found & (ours | FORBIDDEN.get(folder, set())), file


def test_what_runs_on_bare_hosts_needs_the_standard_library_alone() -> None:
    for file in [*(ROOT / "playbooks/library").glob("*.py"), *(ROOT / "playbooks/module_utils").glob("*.py")]:
        assert {name.split(".")[0] for name in imports(file)} <= {*sys.stdlib_module_names, "ansible"}, file


def test_every_room_says_what_it_is() -> None:
    for file in (ROOT / "launch").glob("*/__init__.py"):
        said = ast.get_docstring(ast.parse(file.read_text())) or ""
        assert len(said.splitlines()) >= 4 and "Imports" in said and "ocument" in said, file


def test_a_wrong_import_is_seen() -> None:
    """What the tests above look for is found where it is."""
    edges = {"launch.hosts.a": {"launch.run.b"}, "launch.run.b": {"launch.cli.c"}, "launch.cli.c": set[str]()}
    assert upward(edges, LAUNCH) == ["launch.hosts.a imports launch.run.b"]
    assert circle(edges) == [] and circle(edges | {"launch.cli.c": {"launch.hosts.a"}})
