"""A host's datasets, /var/lib/muster/data/<name>/<version>/: what is there, what a new version lacks, how it comes.

A version is named by its manifest, the first VERSION_DIGITS digits of its SHA-256: one line for each file, by path,
    bytes, SHA-256 (hexadecimal), path
and "0 - path/" for a folder with nothing in it. Beside the tree lie <version>.manifest (compressed with zlib) and
<version>.json, what `brought` says. Until a version is whole, its tree is `.<version>.draft`, in which unchanged files
are hard links to those of another version, and what is on its way is in `.<version>.parts`. used.json names the version
that runs see, unless the inventory sets data_dir: {"name", "version", "at"}.

A part is what travels: one file, or several small ones, one after another. A file gets its name when its SHA-256 is
right. All is done as the owner of Muster's folder, the SSH user. Standard library alone, Python 3.8 and later.
"""

from __future__ import annotations

import array
import base64
import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
import zlib
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

from ansible.module_utils import muster_distribution, muster_relay
from ansible.module_utils.muster_host import disk, existing, read, write_atomically
from ansible.module_utils.muster_image import SLACK_BYTES, gib
from ansible.module_utils.muster_survey import DATASETS as ROOT
from ansible.module_utils.muster_survey import fingerprint, used_dataset

VERSION_DIGITS = 16
GONE = ".gone-"  # begins the names of what is to be removed
DISK_BLOCK_BYTES = 4096  # of a file system: what a file takes is a multiple of it
SPARE_FILES = 1000  # left free on a file system that has a limit
READ_BYTES = 1 << 20  # bytes
STILL_AT_WORK_SECONDS = 2.0  # between two signs of a host that reads or removes

Say = Callable[[Any], None]
Places = List[List[Tuple[int, int]]]  # of each place of a part: the first and the last of lines that follow each other


class Manifest:
    """The lines of a manifest, by number, without an object for each: there may be millions."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._ends = array.array("Q")
        end = data.find(b"\n")
        while end >= 0:
            self._ends.append(end)
            end = data.find(b"\n", end + 1)

    def __len__(self) -> int:
        return len(self._ends)

    def raw(self, number: int) -> bytes:
        return self.data[self._ends[number - 1] + 1 if number else 0 : self._ends[number]]

    def line(self, number: int) -> tuple[int, str, str]:
        """(bytes, SHA-256 or "-", path). Raises RuntimeError for a path that leads out of the folder."""
        size, digest, name = self.raw(number).split(b" ", 2)
        path = os.fsdecode(name)
        if path.startswith("/") or ".." in path.split("/"):
            raise RuntimeError(f"the manifest names a file outside the dataset: {path}")
        return int(size), digest.decode(), path


def path_of(line: bytes) -> bytes:
    """Of a manifest's line."""
    return line.split(b" ", 2)[2]


def same_lines(new: Manifest, old: Manifest) -> Iterator[int]:
    """Numbers of the lines of `new` that `old` has too. Pure."""
    at = 0
    for number in range(len(new)):
        line = new.raw(number)
        path = path_of(line)
        while at < len(old) and path_of(old.raw(at)) < path:
            at += 1
        if at < len(old) and old.raw(at) == line:
            yield number


def ranges(numbers: list[int]) -> list[list[int]]:
    """Ascending numbers as pairs of the first and last of those that follow each other. Pure."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


class Version:
    """The files of one version of a dataset on this host."""

    def __init__(self, name: str, version: str) -> None:
        self.folder = ROOT / name
        self.version = version
        self.tree = self.folder / version
        self.draft = self.folder / f".{version}.draft"
        self.parts = self.folder / f".{version}.parts"
        self.manifest_file = self.folder / f"{version}.manifest"
        self.note = self.folder / f"{version}.json"

    def is_whole(self) -> bool:
        return self.tree.is_dir() and self.note.is_file() and self.manifest_file.is_file()

    def manifest(self) -> Manifest:
        """Raises RuntimeError where it is not what its name says."""
        try:
            data = zlib.decompress(self.manifest_file.read_bytes())
        except (OSError, zlib.error) as error:
            raise RuntimeError(f"cannot read {self.manifest_file}: {error}. Fix: remove it") from None
        if not hashlib.sha256(data).hexdigest().startswith(self.version):
            raise RuntimeError(f"{self.manifest_file} is damaged. Fix: remove it")
        return Manifest(data)


class Sign:
    """A word now and then while a host is busy."""

    def __init__(self, say: Say) -> None:
        self._say, self._said = say, time.monotonic()

    def __call__(self, what: str) -> None:
        if time.monotonic() - self._said > STILL_AT_WORK_SECONDS:
            self._said = time.monotonic()
            self._say({"waiting": what})


class Tree(muster_relay.Store):
    """The parts of a version. What has arrived lies in the draft's files, from which it is passed on, too."""

    def __init__(self, version: Version, places: dict[str, Places], sizes: dict[str, int], secret: bytes) -> None:
        self._version, self._places, self._manifest = version, places, version.manifest()
        super().__init__(version.parts, sizes, secret)

    def is_whole(self, digest: str) -> bool:
        """A file has its name only when it is right, so its size says enough."""
        return all(
            size_of(self._version.draft / path) == size
            for place in self._places[digest]
            for size, _, path in self._lines(place)
        )

    def keep(self, digest: str, found: str) -> bool:
        """Give the files of a part their names, where all are right."""
        part, places = self.draft(digest), self._places[digest]
        first = list(self._lines(places[0]))
        if len(first) == 1:
            if found != first[0][1]:
                return False
            part.replace(self._version.draft / first[0][2])
        elif not self._unpack(part, first):
            return False
        for place in places[1:]:
            for (_, _, there), (_, _, path) in zip(first, self._lines(place)):
                link(self._version.draft / there, self._version.draft / path)
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
        return True

    def _unpack(self, part: Path, lines: list[tuple[int, str, str]]) -> bool:
        fresh = self.pool / ".file"
        with open(part, "rb") as file:
            for size, digest, path in lines:
                data = file.read(size)
                if hashlib.sha256(data).hexdigest() != digest:
                    return False
                if size_of(self._version.draft / path) != size:
                    fresh.write_bytes(data)
                    fresh.replace(self._version.draft / path)
        return True

    def read(self, digest: str, offset: int, length: int) -> bytes:
        with contextlib.suppress(FileNotFoundError), open(self.draft(digest), "rb", buffering=0) as part:
            return os.pread(part.fileno(), length, offset)
        found, at = b"", 0
        for size, _, path in self._lines(self._places[digest][0]):
            begin = max(offset - at, 0)
            if begin < size and len(found) < length:
                with self._open(path) as file:
                    found += os.pread(file.fileno(), min(size - begin, length - len(found)), begin)
            at += size
            if len(found) == length:
                break
        return found

    def _open(self, path: str) -> Any:
        with contextlib.suppress(FileNotFoundError):
            return open(self._version.draft / path, "rb", buffering=0)
        return open(self._version.tree / path, "rb", buffering=0)  # the version has become whole meanwhile

    def _lines(self, place: list[tuple[int, int]]) -> Iterator[tuple[int, str, str]]:
        for first, last in place:
            for number in range(first, last + 1):
                yield self._manifest.line(number)


def run(options: dict[str, Any], say: Say) -> None:
    """Do what is asked of this host's datasets.

    options: do, one of DO, and what that takes. Words in between are {"waiting": for what}; a failure is
    {"error": why}, with exit status 1.
    """
    try:
        if options["do"] == "tell" and not ROOT.is_dir():  # to ask changes nothing
            return say({"datasets": [], "used": None, "free": disk(ROOT)[0]})
        if not ROOT.parent.is_dir():
            raise RuntimeError(f"{ROOT.parent} is missing on this host. Fix: run make deploy")
        owner = ROOT.parent.stat()
        ROOT.mkdir(mode=0o755, exist_ok=True)
        os.chown(ROOT, owner.st_uid, owner.st_gid)
        muster_distribution.give_up_root(ROOT.parent)
        with contextlib.ExitStack() as after, muster_distribution.alone(ROOT / ".lock", say):
            DO[options["do"]](options, say, after)
    except (RuntimeError, OSError) as error:
        say({"error": str(error)})
        sys.exit(1)


def brought() -> list[dict[str, Any]]:
    """The whole versions: name, version, files, bytes, fingerprint (of muster_survey, of all files), at (when)."""
    notes = sorted(ROOT.glob("*/*.json")) if ROOT.is_dir() else []
    found = [json.loads(read(note) or "{}") for note in notes if not note.parent.name.startswith(".")]
    return [one for one in found if one and Version(one["name"], one["version"]).is_whole()]


def tell(options: dict[str, Any], say: Say, after: contextlib.ExitStack) -> None:
    """{} -> {"datasets": `brought`, "used", "free": bytes}"""
    say({"datasets": brought(), "used": used_dataset(), "free": disk(ROOT)[0]})


def compare(options: dict[str, Any], say: Say, after: contextlib.ExitStack) -> None:
    """Begin a version: take from others what they have.

    {name, version, manifest: compressed, base64; check: read also what is there}
    -> {"lacking": ranges of line numbers, "whole": whether the version is there and nothing is to be done}

    Raises RuntimeError where what is lacking does not fit.
    """
    version, sign = Version(options["name"], options["version"]), Sign(say)
    had = version.draft.is_dir()
    for folder in (version.draft, version.parts):
        folder.mkdir(parents=True, exist_ok=True)
    write_bytes(version.manifest_file, base64.b64decode(options["manifest"]))
    manifest = version.manifest()
    make_folders(version.draft, manifest)
    lacking = set(range(len(manifest)))
    for one in brought():
        if one["name"] == options["name"]:
            other = Version(one["name"], one["version"])
            for number in same_lines(manifest, other.manifest()):
                size, digest, path = manifest.line(number)
                sign(f"comparing {path}")
                if number not in lacking or size_of(other.tree / path) != size:
                    continue
                if not options["check"] or sha256_of(other.tree / path, sign) == digest:
                    link(other.tree / path, version.draft / path)
                    lacking.discard(number)
    for number in sorted(lacking):
        size, digest, path = manifest.line(number)
        if not size:
            lacking.discard(number)
            if not path.endswith("/"):
                write_bytes(version.draft / path, b"")
        elif had and size_of(version.draft / path) == size and sha256_of(version.draft / path, sign) == digest:
            lacking.discard(number)
    refuse_too_little(sum(-(-manifest.line(number)[0] // DISK_BLOCK_BYTES) for number in lacking), len(lacking))
    whole = not lacking and version.is_whole() and is_as_brought(version)
    for folder in (version.draft, version.parts) if whole else ():
        remove_tree(folder, sign)
    say({"lacking": ranges(sorted(lacking)), "whole": whole})


def is_as_brought(version: Version) -> bool:
    """Whether there is no file more than were brought, either."""
    return bool(fingerprint(version.tree, float("inf"))["sha256"] == noted(version)["fingerprint"])


def noted(version: Version) -> dict[str, Any]:
    """Of a whole version, as `brought`."""
    return dict(json.loads(version.note.read_text()))


def refuse_too_little(blocks: int, files: int) -> None:
    """Raises RuntimeError where so much does not fit."""
    state, needed = os.statvfs(existing(ROOT)), blocks * DISK_BLOCK_BYTES + SLACK_BYTES
    fix = f"Fix: free space there, or mount a larger disk at {ROOT}"
    if blocks and disk(ROOT)[0] < needed:
        raise RuntimeError(f"too little disk under {ROOT}: {gib(needed)} needed, {gib(disk(ROOT)[0])} free. {fix}")
    if files and state.f_files and state.f_favail < files + SPARE_FILES:
        raise RuntimeError(f"{ROOT} has room for {state.f_favail} more files (`df -i`), {files} are to come. {fix}")


def bring(options: dict[str, Any], say: Say, after: contextlib.ExitStack) -> None:
    """Get what `compare` found lacking, and make the version whole.

    {name, version, parts: digest -> [bytes, Places], relay: as of muster_distribution.run}; what is said is said there,
    at last {"holds": the fingerprint of all files as they lie on the disk, "seconds"}.
    A part that is one file has its digest, another one the SHA-256 of those of its files, one after another.
    """
    version, begun = Version(options["name"], options["version"]), time.monotonic()
    sizes = {digest: size for digest, (size, _) in options["parts"].items()}
    places: Dict[str, Places] = {digest: found for digest, (_, found) in options["parts"].items()}
    is_begun = version.draft.is_dir()  # else it has become whole in a call before, whose connection broke
    lacks = Tree(version, places, sizes, b"").lacks() if is_begun else 0
    needed = "nothing" if not is_begun else "pull" if lacks else "name"
    say({"needed": needed, "lacks": lacks, "bz2": muster_relay.bz2 is not None})
    if not muster_distribution.may_begin():
        return
    if needed == "pull":

        def make(pool: Path, sizes: dict[str, int], secret: bytes) -> muster_relay.Store:
            return Tree(version, places, sizes, secret)

        serving = muster_distribution.relay(version.parts, make, sizes, options["relay"], say)
        after.callback(os.waitpid, serving, 0)
    if is_begun:
        finish(options["name"], version, Sign(say))
    say({"holds": noted(version)["fingerprint"], "seconds": round(time.monotonic() - begun, 2)})


def finish(name: str, version: Version, sign: Sign) -> None:
    """Make a draft the version. Raises RuntimeError where a file of it is not there."""
    manifest, count, total = version.manifest(), 0, 0
    for number in range(len(manifest)):
        size, digest, path = manifest.line(number)
        sign(f"looking at {path}")
        if digest != "-":
            if size_of(version.draft / path) != size:
                raise RuntimeError(f"{version.draft / path} is not there, or not whole. Fix: run make data again")
            count, total = count + 1, total + size
    found = fingerprint(version.draft, float("inf"))
    if found["sha256"] is None or found["closed"]:
        raise RuntimeError(f"{version.draft} cannot be read by all. Fix: remove it and run make data again")
    os.sync()
    if version.tree.is_dir():  # with files that had to be fetched again
        version.tree.rename(version.folder / f"{GONE}{time.time_ns()}")
    version.draft.rename(version.tree)
    note = {"name": name, "version": version.version, "files": count, "bytes": total, "fingerprint": found["sha256"]}
    write_atomically(version.note, json.dumps({**note, "at": time.time()}) + "\n")


def use(options: dict[str, Any], say: Say, after: contextlib.ExitStack) -> None:
    """Have runs see a version, and remove what is not whole and, unless `keep`, other versions of the same name.

    {name, version, keep: bool, as a run may read them} -> {"used", "left": versions that were kept}
    """
    name, version = options["name"], options["version"]
    write_atomically(ROOT / "used.json", json.dumps({"name": name, "version": version, "at": time.time()}) + "\n")
    sign, left = Sign(say), []
    for entry in sorted((ROOT / name).iterdir()):
        if entry.is_dir() and not entry.name.startswith(".") and options["keep"] and entry.name != version:
            left.append(entry.name)
    for entry in sorted((ROOT / name).iterdir()):
        is_read = options["keep"] and entry.name.startswith(GONE)
        if not is_read and entry.name.partition(".")[0] not in (version, *left):
            remove_tree(entry, sign)
    say({"used": used_dataset(), "left": left})


def remove(options: dict[str, Any], say: Say, after: contextlib.ExitStack) -> None:
    """Remove a dataset with all versions: {name} -> {"removed": whether it was there}"""
    folder, known = ROOT / options["name"], used_dataset()
    was_there = folder.is_dir()
    if known and known["name"] == options["name"]:
        (ROOT / "used.json").unlink()
    if was_there:
        folder.replace(ROOT / f"{GONE}{time.time_ns()}")
    for gone in ROOT.glob(f"{GONE}*"):
        remove_tree(gone, Sign(say))
    say({"removed": was_there})


DO = {"tell": tell, "compare": compare, "bring": bring, "use": use, "remove": remove}


def make_folders(root: Path, manifest: Manifest) -> None:
    """All folders of a tree."""
    last = ""
    for number in range(len(manifest)):
        folder = manifest.line(number)[2].rpartition("/")[0]
        if folder != last:
            os.makedirs(root / folder, exist_ok=True)
            last = folder


def link(there: Path, path: Path) -> None:
    """One more name for a file; a copy where the file system gives no more."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    try:
        os.link(there, path)
    except OSError:
        shutil.copyfile(there, path)


def size_of(path: Path) -> int:
    """-1: there is no such file."""
    try:
        return os.lstat(path).st_size if path.is_file() else -1
    except OSError:
        return -1


def sha256_of(path: Path, sign: Sign) -> str:
    """Hexadecimal."""
    state = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        for block in iter(lambda: file.read(READ_BYTES), b""):
            state.update(block)
            sign(f"reading {path}")
    return state.hexdigest()


def write_bytes(path: Path, data: bytes) -> None:
    """In a file of its own: what is there may have another name in another version."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_bytes(data)
    fresh.replace(path)


def remove_tree(path: Path, sign: Sign) -> None:
    """Remove a file or a folder, which may hold millions of files."""
    if not path.is_dir() or path.is_symlink():
        path.unlink()
        return
    for folder, folders, names in os.walk(path, topdown=False):
        for name in names:
            os.unlink(os.path.join(folder, name))
            sign(f"removing {path.name}")
        for name in folders:
            os.rmdir(os.path.join(folder, name))
    path.rmdir()
