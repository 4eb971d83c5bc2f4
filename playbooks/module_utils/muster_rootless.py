"""A host on which Muster has no root: what lacks there for the SSH user's own Podman, making it ready, removing it.

In the place of Ansible, which the other hosts are made ready with: nothing is installed. `look` runs as the SSH user,
the rest in the user namespace of that user's Podman (is_rootless of muster_engines).
Standard library alone, Python 3.8 and later.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Tuple

from ansible.module_utils.muster_engines import NOTE, ROOTS, RootlessPodman, noted, place
from ansible.module_utils.muster_host import existing, read, too_old
from ansible.module_utils.muster_host import run as call
from ansible.module_utils.muster_podman import DROP_IN, STORAGE_HEADER, USERS_STORAGE, prefer_overlay, text_of
from ansible.module_utils.muster_ready import FAMILIES, INSTALL, Packages, Wanted, ensure, family, missing_packages
from ansible.module_utils.muster_ready import remove_all as remove_images

OLDEST_PODMAN = (4, 0)
IDS = 65536  # subordinate users and groups that an image's files may belong to, and ranks be
FIRST_ID = 100000  # of such ranges, as useradd gives them
#: Upon them Podman cannot store images, and several hosts may share them.
NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "afs", "lustre", "ceph", "beegfs", "gpfs", "fuse.sshfs", "9p")
#: Only root can close ports.
NEEDLESS = ("nft",)
#: What the user may have in Podman's storage.
USES = (["podman", "ps", "-aq"], ["podman", "images", "-q"], ["podman", "volume", "ls", "-q"])
RESET_SECONDS = 120.0

Lack = Tuple[str, str]  # what lacks, and what to do about it


def typed(command: str) -> str:
    """What an administrator has to type, in words."""
    return f"as root there: `{command}`"


def run(options: Dict[str, Any], say: Callable[[Any], None]) -> None:
    """options: do, one of look, ready, remove. For look: packages, as in muster_ready, and more: by family what this
    needs besides; for ready: wanted, as Wanted there.

    Says {"lacks": [[what, fix]]}, {}, or {"removed": [in words]}; or {"error": why}, with exit status 1.
    """
    try:
        if options["do"] == "look":
            say({"lacks": look(options["packages"], options["more"])})
        elif options["do"] == "ready":
            ensure(Wanted(**options["wanted"]), check_mode=False)
            say({})
        else:
            say({"removed": remove()})
    except (RuntimeError, OSError) as error:
        say({"error": str(error)})
        sys.exit(1)


def look(packages: Packages, more: Dict[str, Dict[str, str]]) -> List[Lack]:
    """What lacks on this host. Where the user's Podman has no storage yet, it gets one that does not copy layers."""
    user = pwd.getpwuid(os.getuid())
    if user.pw_uid == 0:
        return [("the SSH user is root", "log in as a user (ansible_user), or leave `rootless` out")]
    lacks = [*_of_root(), *_programs(packages, more), *_ids(user), *_after_logout(user), *_on_network(user.pw_dir)]
    if not lacks:
        prefer_overlay()
    return lacks


def _of_root() -> Iterable[Lack]:
    """This user's Muster as it was with root: only root can remove its runs and datasets, which may be wanted."""
    if os.path.exists(NOTE) and os.stat(ROOTS.folder).st_uid == os.getuid():
        fix = "take `rootless` out, run `make teardown`, and set it again"
        yield f"what Muster had there as root is still there, in {ROOTS.folder}", fix


def _programs(packages: Packages, more: Dict[str, Dict[str, str]]) -> Iterable[Lack]:
    kind = family(read("/etc/os-release") or "")
    own = packages[kind or FAMILIES[0]]
    wanted = {**own["all"], **own["podman"], **more[kind or FAMILIES[0]]}
    names = missing_packages({name: command for name, command in wanted.items() if command not in NEEDLESS})
    if names:
        said = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not installed"
        yield said, typed(f"{INSTALL[kind]} {' '.join(names)}") if kind else "install there what its system calls these"
    if old := too_old(call(["podman", "--version"]).out, OLDEST_PODMAN):
        oldest = ".".join(map(str, OLDEST_PODMAN))
        yield f"its Podman is too old: {old}", f"install {oldest} or newer there, or leave `rootless` out"


def _ids(user: pwd.struct_passwd) -> Iterable[Lack]:
    texts = {name: read(f"/etc/{name}") or "" for name in ("subuid", "subgid")}
    # Of another source than the files (sssd), where there is one.
    asked = {"subuid": ["getsubids", user.pw_name], "subgid": ["getsubids", "-g", user.pw_name]}
    lacking = [
        name for name, text in texts.items() if not has_ids(text, user) and not has_ids(call(asked[name]).out, user)
    ]
    if lacking:
        first = free_id(texts.values())
        ids = f"{first}-{first + IDS - 1}"
        options = " ".join(f"--add-{name}s {ids}" for name in lacking)
        files = " and ".join(f"/etc/{name}" for name in lacking)
        yield f"{user.pw_name} has no {IDS} subordinate ids in {files}", typed(f"usermod {options} {user.pw_name}")


def has_ids(text: str, user: pwd.struct_passwd) -> bool:
    """Whether lines such as `ann:100000:65536` give a user enough of them; getsubids prints a number before. Pure."""
    lines = (re.sub(r"^\d+: (\S+) (\d+) (\d+)$", r"\1:\2:\3", line).split(":") for line in text.splitlines())
    own = [line[2] for line in lines if len(line) == 3 and line[0] in (user.pw_name, str(user.pw_uid))]
    return sum(int(count) for count in own if count.isdigit()) >= IDS


def free_id(texts: Iterable[str]) -> int:
    """The first id after all ranges that are given away. Pure."""
    lines = (line.split(":") for text in texts for line in text.splitlines())
    ranges = (line for line in lines if len(line) == 3 and line[1].isdigit() and line[2].isdigit())
    return max((int(start) + int(count) for _, start, count in ranges), default=FIRST_ID)


def _after_logout(user: pwd.struct_passwd) -> Iterable[Lack]:
    """Containers shall live on when the SSH session ends, and their secrets be in memory."""
    folder = Path(f"/run/user/{user.pw_uid}")
    if Path("/run/systemd/system").is_dir():
        if not Path("/var/lib/systemd/linger", user.pw_name).exists():
            yield f"containers of {user.pw_name} end with the login", typed(f"loginctl enable-linger {user.pw_name}")
    elif not folder.is_dir() or folder.stat().st_uid != user.pw_uid:
        made = f"install -d -m 0700 -o {user.pw_name} -g {user.pw_gid} {folder}"
        yield f"{user.pw_name} has no {folder}", typed(made)


def _on_network(home: str) -> Iterable[Lack]:
    own = RootlessPodman()
    storage = own.read_storage(read(own.configuration) or "") or own.storage
    mounts = (read("/proc/self/mounts") or "").splitlines()
    for folder, fix in (
        (f"{home}/.local/share/muster", "make it a link to a folder of a local disk"),
        (storage, f'name a folder of a local disk in {own.configuration}: `graphroot = "..."` below `[storage]`'),
    ):
        kind = file_system(os.path.realpath(existing(folder)), mounts)
        if kind in NETWORK_FILE_SYSTEMS:
            yield f"{folder} would lie on a network file system ({kind})", fix


def file_system(folder: str, mounts: List[str]) -> str:
    """The kind of the file system that holds a folder, of the lines of /proc/mounts. Pure."""
    points = [(line.split()[1], line.split()[2]) for line in mounts]
    above = [one for one in points if f"{folder}/".startswith(one[0].rstrip("/") + "/")]
    return max(above, key=lambda one: len(one[0]), default=("", ""))[1]


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def remove() -> List[str]:
    """Removes containers, images, folders and settings; Podman's storage, too, if Muster has made it and nobody uses
    it. Returns what it removed, in words."""
    removed, here = remove_images(noted(), check_mode=False), place()
    for entry in Path(here.private).glob("*"):
        if not entry.name.startswith("."):  # not the word of this teardown
            _remove(entry)
    if os.path.isdir(here.folder):
        removed.append(here.folder)
        for path in Path(here.folder).iterdir():
            _remove(path)
        if not os.path.ismount(here.folder):
            os.rmdir(here.folder)
    if (text_of(USERS_STORAGE) or "").startswith(STORAGE_HEADER) and not any(call(one).out.strip() for one in USES):
        call(["podman", "system", "reset", "--force"], RESET_SECONDS)
        USERS_STORAGE.unlink(missing_ok=True)
        shutil.rmtree(noted().storage, ignore_errors=True)  # a reset leaves empty folders
        removed.append("Podman's storage, which was empty")
    if DROP_IN.exists():
        DROP_IN.unlink()
        removed.append(str(DROP_IN))
    return removed
