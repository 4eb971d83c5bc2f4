"""The user's own parts, named package.module:function: found without importing them, imported, called, hashed.

--check-settings uses `problems`, which needs neither torch nor the user's packages; the ranks use `call`. What may go
wrong in the user's code ends as one SettingsError with file and line. What the functions take and return:
docs/own-parts.md.
"""

import ast
import hashlib
import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from train.names import is_own
from train.settings import Settings, SettingsError, flag, loggers_of

PARTS = ("model", "dataset", "loss", "transform")
HASHED = (".py", ".pyi", ".yaml", ".yml", ".json", ".txt", ".toml", ".cfg", ".ini")
HASHED_BYTES = 4 << 20  # a larger file is data, not code
LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (sysconfig.get_path("stdlib"), Path(__file__).resolve().parent))


def use(project: Path | None) -> None:
    """Makes the folder's modules importable, in this process and in those that it starts.

    It comes last: a file of the user's called types.py or train.py must not take the place of Python's or ours.
    """
    if project is None:
        return
    folder = str(project.resolve())
    if folder not in sys.path:
        sys.path.append(folder)
    listed = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    if folder not in listed:
        os.environ["PYTHONPATH"] = os.pathsep.join([*listed, folder])


def problems(settings: Settings) -> list[str]:
    """What is wrong with the names of own parts, one clause each. Reads files, imports nothing."""
    project = settings.project
    if project is not None and not project.is_dir():
        return [f"--project {project}: there is no such folder"]
    named = [(flag(name), getattr(settings, name)) for name in PARTS]
    named += [("--loggers", name) for name in loggers_of(settings.loggers)]
    found = dict[str, list[str]]()  # what is wrong with a file is wrong for all of its functions
    for option, name in named:
        if is_own(name) and (wrong := problem(name, project)):
            found.setdefault(wrong, []).append(f"{option} {name}")
    return [f"{', '.join(options)}: {wrong}" for wrong, options in found.items()]


def problem(name: str, project: Path | None) -> str:
    """What is wrong with this name, or nothing. A module of a package that the project's requirements.txt may bring
    cannot be known here."""
    module, _, function = name.partition(":")
    folder = [str(project.resolve())] if project else []
    importlib.invalidate_caches()  # the user may just have written the file
    theirs, found = file_of(module, folder), file_of(module, [*sys.path, *folder])
    if theirs and theirs != found:
        return f"another module is called {module.partition('.')[0]}: give {theirs} another name"
    if found is None:
        return "" if may_be_installed(module, project) else not_found(module, project)
    if found.suffix != ".py":
        return ""
    try:
        known = set(names(ast.parse(found.read_bytes(), str(found))))
    except SyntaxError as error:
        return f"{found}, line {error.lineno}: {error.msg}"
    if function in known or known & {"*", "__getattr__"}:
        return ""
    return f"{found} has no {function}{near(function, sorted(known))}"


def file_of(module: str, path: list[str]) -> Path | None:
    """The file that an import would read, None where there is none."""
    spec = None
    for part in module.split("."):
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return Path(spec.origin).resolve() if spec and spec.origin else None


def may_be_installed(module: str, project: Path | None) -> bool:
    """Whether only an import can tell: another machine has the package, or it is installed in a way of its own (as by
    `pip install -e`)."""
    top = module.partition(".")[0]
    if PathFinder.find_spec(top, [*sys.path, *([str(project)] if project else [])]) is not None:
        return False
    return find_spec(top) is not None or (project is not None and (project / "requirements.txt").is_file())


def not_found(module: str, project: Path | None) -> str:
    if project is None:
        return f"there is no module {module}: name its folder with PROJECT=dir (python -m train: --project DIR)"
    files = (file.relative_to(project).with_suffix("") for file in hashed_files(project) if file.suffix == ".py")
    return f"{project} has no module {module}{near(module, ['.'.join(file.parts) for file in files])}"


def near(name: str, known: list[str]) -> str:
    close = get_close_matches(name, known)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def names(node: ast.AST) -> Iterator[str]:
    """What a module defines, assigns or imports at its top, also within if and try."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child.name
        elif isinstance(child, ast.alias):
            yield (child.asname or child.name).partition(".")[0]
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        elif not isinstance(child, ast.Lambda):
            yield from names(child)


def load(option: str, name: str) -> Callable[..., Any]:
    """The function of this name. Raises SettingsError."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if module == error.name or module.startswith(f"{error.name}."):
            raise SettingsError(f"{option} {name}: {not_found(module, None)}") from error
        fix = (
            f"{error.name} is not installed here: put it into the project's requirements.txt, which `make local` and "
            "`make train` install; for `python -m train` by hand: pip install -r requirements.txt"
        )
        raise SettingsError(f"{option} {name}: {where(error)}: {fix}") from error
    except (Exception, SystemExit) as error:  # a script without `if __name__ == "__main__"` may end itself
        raise SettingsError(f"{option} {name}: importing {module} failed: {said(error)}") from error
    if not callable(found):
        raise SettingsError(f"{option} {name}: that is a {type(found).__name__}, and a function is needed")
    return found


def call(option: str, name: str, kind: type, **arguments: Any) -> Any:
    """What the function returns for these arguments, in their order; it must be of this kind. Raises SettingsError."""
    function = load(option, name)
    expected = f"it is called as {name.partition(':')[2]}({', '.join(map(repr, arguments.values()))})"
    unfit = misfit(function, len(arguments))
    if unfit:
        raise SettingsError(f"{option} {name}: {unfit}: {expected}, with ({', '.join(arguments)})")
    try:
        result = function(*arguments.values())
    except Exception as error:
        raise SettingsError(f"{option} {name}: {said(error)}; {expected}") from error
    if not isinstance(result, kind):
        wanted = f"{kind.__module__.partition('.')[0]}'s {kind.__name__}" if kind is not object else "something"
        raise SettingsError(
            f"{option} {name}: it returned a {type(result).__name__}, and {wanted} is needed; {expected}"
        )
    return result


def misfit(function: Callable[..., Any], count: int) -> str:
    """Why it cannot be called with so many arguments; empty where it can, or where its signature cannot be known."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError as error:
        return str(error)
    except ValueError:
        pass
    return ""


def said(error: BaseException) -> str:
    """ "ValueError: no such file (parts.py, line 7)": the exception, and where in the user's code it happened."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{f': {text}' if text else ''} ({where(error)})"


def where(error: BaseException) -> str:
    """The last line that is the user's, neither a library's nor ours; else the last line."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not is_library(frame.filename)]
    chosen = (users or frames)[-1]
    return f"{chosen.filename}, line {chosen.lineno}"


def is_library(file: str) -> bool:
    return "-packages" in file or file.startswith(("<frozen", *LIBRARIES))


def project_hash(project: Path | None, run_dir: Path | None = None) -> str:
    """SHA-256 over names and contents of the folder's code and settings, in hexadecimal; "none" without a folder.

    Left out: folders whose names begin with a dot, __pycache__, virtual environments, files above HASHED_BYTES, and the
    folder of runs, in which other processes write, where it lies within the project.
    """
    if project is None:
        return "none"
    total = hashlib.sha256()
    for path in sorted(hashed_files(project, run_dir)):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(project).as_posix()}\0{content}\n".encode())
    return total.hexdigest()


def hashed_files(project: Path, run_dir: Path | None = None) -> Iterator[Path]:
    around_runs = {run_dir.resolve(), *run_dir.resolve().parents} - {project.resolve()} if run_dir else set[Path]()
    for folder, folders, files in os.walk(project):
        inside = [Path(folder, name) for name in folders]
        folders[:] = [each.name for each in inside if is_source_folder(each) and each.resolve() not in around_runs]
        for path in (Path(folder, name) for name in files if not name.startswith(".")):
            # is_file: not a link that leads nowhere
            if path.suffix in HASHED and path.is_file() and path.stat().st_size <= HASHED_BYTES:
                yield path


def is_source_folder(path: Path) -> bool:
    return not path.name.startswith(".") and path.name != "__pycache__" and not (path / "pyvenv.cfg").exists()
