"""A base image of the user's own (inventory: `base_image`): fetched once, and tried before anything is built on it.

It is a reference, which Podman pulls, or an archive that `podman save` or `docker save` has written. What it was then
is noted with its id, so that the same image stays in use until the archive changes, or the note is removed. Not for
building on it: image.py.
"""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from containers.engine import (
    BUILD,
    REPOSITORY,
    CommandFailed,
    ContainersError,
    Progress,
    fix_of,
    follow,
    inspect_image,
    podman,
    root_command,
)
from containers.files import locked, write_whole
from containers.pip import Target, normal

NOTES = BUILD / "images" / "bases.json"  # {setting: {"state": of the archive, "pulled": by digest, "base": Base}}
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 13)  # train/torch_versions.py
USER = "61000"  # keeper/__init__.py
#: As a run starts its container, without the host's network.
CONFINED = (
    "run", "--rm", "--interactive", "--network=none", "--read-only", f"--user={USER}:{USER}", "--cap-drop=all",
    "--security-opt=no-new-privileges", "--pull=never",
)  # fmt: skip
LOADED = re.compile(r"Loaded image(?:\(s\))?: (\S+)$")
IDENTITY = re.compile(r"(?:sha256:)?([0-9a-f]{64})$")
#: Prints what Python and torch an image has. For Pythons that are too old for Muster, too.
PROBE = """
import json, platform
found = {"python": platform.python_version(), "libc": platform.libc_ver(), "machine": platform.machine()}
try:
    import importlib.metadata
    named = ((one.metadata["Name"], one.version) for one in importlib.metadata.distributions())
    found["packages"] = {name: version for name, version in named if name and version}
    import torch, torch.distributed
    found["torch"] = str(torch.__version__)
    found["hip"] = torch.version.hip or ""
    found["gloo"] = torch.distributed.is_available() and torch.distributed.is_gloo_available()
except Exception as error:
    found["error"] = "%s: %s" % (type(error).__name__, error)
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Base:
    """What an image of the user's own is."""

    id: str
    python: str  # such as 3.12
    glibc: tuple[int, int]
    packages: dict[str, str]  # normalized name -> version, of what its Python finds
    hip: str  # the version of HIP, where its torch is built for ROCm; empty: it is not

    @property
    def target(self) -> Target:
        """What wheels for it must fit."""
        return Target(self.python, self.glibc)


def own_base(setting: str, progress: Progress) -> Base:
    """The image that `setting` names, fetched unless it is here, and tried unless it has been.

    Raises ContainersError if it cannot be fetched, does not run here, or has a Python or torch that Muster does not
    run on.
    """
    with locked(NOTES.with_name("bases.lock")):
        notes = _notes()
        note = notes.get(setting, {})
        state = archive_state(setting)
        known = note and note["state"] == state and {field.name for field in fields(Base)} == set(note["base"])
        here = known and inspect_image(note["base"]["id"], "{{.Id}}")
        if not here:
            progress(f"base image {setting}: {'loading' if state else 'pulling'}")
            identity = _load(setting) if state else _pull(setting, note.get("pulled") or setting)
            pulled = "" if state else inspect_image(identity, "{{index .RepoDigests 0}}") or ""
            base = _tried(setting, identity)
            progress(
                f"base image {setting}: {pulled or identity[:12]}, Python {base.python}, torch {base.packages['torch']}"
                f"{f' for ROCm (HIP {base.hip})' if base.hip else ''}"
            )
            note = {"state": state, "pulled": pulled, "base": asdict(base)}
            write_whole(NOTES, json.dumps({**notes, setting: note}, indent=1))
    found = note["base"]
    return Base(found["id"], found["python"], (found["glibc"][0], found["glibc"][1]), found["packages"], found["hip"])


def archive_state(setting: str) -> list[int]:
    """What changes with an archive; empty for a reference. Raises ContainersError where there is no such file."""
    if not setting.startswith("/"):
        return []
    try:
        found = Path(setting).stat()
    except OSError as error:
        fix = "give the path of an archive on this machine, as `podman save` or `docker save` writes it, or a reference"
        raise ContainersError(f"the archive cannot be read: {error.strerror}", where_of(setting), fix) from None
    return [found.st_size, found.st_mtime_ns]


def where_of(setting: str) -> str:
    return f"the inventory's base_image {setting}"


def problem_of(found: dict[str, Any], oldest_python: str) -> str | None:
    """Why Muster cannot run on what PROBE has found; None if it can. oldest_python: such as 3.11."""
    python, torch, libc = found["python"], found.get("torch"), found["libc"]
    needed = f"Muster needs Python {oldest_python} or newer and torch {text(OLDEST_TORCH)} to {text(NEWEST_TORCH)}"
    if version(python) < version(oldest_python):
        return f"it has Python {python}: {needed}"
    if torch is None:
        return f"its Python {python} cannot import torch ({found['error']}): {needed}"
    if not OLDEST_TORCH <= version(torch) <= NEWEST_TORCH:
        return f"it has torch {torch}: {needed}"
    if not found["gloo"]:
        return f"its torch {torch} is built without torch.distributed's gloo, which Muster needs"
    if libc[0] != "glibc":
        return f"its Python {python} is built for {libc[0] or 'another C library'}: Muster's wheels need glibc"
    return None


def version(words: str) -> tuple[int, int]:
    """The first two numbers of a version."""
    numbers = [int(number) for number in re.findall(r"\d+", words)[:2]]
    return numbers[0], numbers[1]


def text(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


def _tried(setting: str, identity: str) -> Base:
    """Run the image's Python and torch in it, as the user and with the rights of a run."""
    try:
        said = podman(*CONFINED, "--entrypoint=python3", identity, "-", stdin=PROBE)
        found = json.loads(said.splitlines()[-1])
    except (CommandFailed, ValueError, IndexError) as error:
        tail = error.tail if isinstance(error, CommandFailed) else "it printed nothing that can be read"
        what = f"python3 does not run in it as user {USER}, read-only. The last lines:\n{tail}"
        raise ContainersError(
            what, where_of(setting), "take an image for this kind of machine that has python3"
        ) from error
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    if problem := problem_of(found, project["requires-python"].removeprefix(">=")):
        raise ContainersError(problem, where_of(setting), "take an image that has them, or build one")
    packages = {normal(name): one for name, one in found["packages"].items()}
    packages.setdefault("torch", found["torch"])
    return Base(identity, text(version(found["python"])), version(found["libc"][1]), packages, found["hip"])


def _load(setting: str) -> str:
    """Load an archive; returns the id of its image."""
    names: list[str] = []

    def on_line(line: str) -> None:
        if match := LOADED.match(line):
            names.extend(match.group(1).split(","))

    try:
        follow(root_command("podman", "load", "--quiet", f"--input={setting}"), on_line)
    except CommandFailed as failure:
        what = f"Podman cannot load the archive. Its last lines:\n{failure.tail}"
        raise ContainersError(what, where_of(setting), fix_of(failure)) from failure
    identities = {inspect_image(name, "{{.Id}}") for name in names}
    if len(identities) != 1 or None in identities:
        what = f"the archive holds {len(identities)} images: {', '.join(names)}"
        raise ContainersError(what, where_of(setting), "save one image alone into it")
    return str(identities.pop())


def _pull(setting: str, reference: str) -> str:
    """Pull an image; returns its id. reference: as set, or by the digest that it had when it was pulled before."""
    identity = ""

    def on_line(line: str) -> None:
        nonlocal identity
        if match := IDENTITY.match(line):
            identity = match.group(1)

    try:
        follow(root_command("podman", "pull", "--quiet", reference), on_line)
    except CommandFailed as failure:
        what = f"Podman cannot pull {reference}: {failure.tail.splitlines()[-1].removeprefix('Error: ')}"
        fix = (
            "check the name, the network and `podman login` on this machine; without a registry, give the absolute "
            "path of an archive that `podman save` or `docker save` has written"
        )
        raise ContainersError(what, where_of(setting), fix) from failure
    return identity


def _notes() -> dict[str, Any]:
    with contextlib.suppress(FileNotFoundError, ValueError):
        found: dict[str, Any] = json.loads(NOTES.read_text())
        return found
    return {}
