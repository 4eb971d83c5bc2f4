#!/usr/bin/python3
"""The container engine of this machine: which one, which packages are missing, which settings it needs here
(module_utils/muster_ready.py); and how all of Muster is removed.

Not for installing packages (the role `engine` does) and not for images (muster_image).

state=present returns what muster_ready.ensure does: among others `missing`, the packages to be installed first, and
`service`, the one to be started then. state=absent returns `removed`, what it has removed in words, `packages`, which
are to be removed after that, and `services`, to be stopped before. The options stand in main.
"""

from __future__ import annotations

import os
from pathlib import Path

from ansible.module_utils import muster_packages
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.muster_docker import remove_rules
from ansible.module_utils.muster_driver import apt_files
from ansible.module_utils.muster_engines import ENGINES, Engine, engine
from ansible.module_utils.muster_host import find_command, read, run
from ansible.module_utils.muster_podman import CDI, CDI_HEADER, DROP_IN, text_of
from ansible.module_utils.muster_ready import PACKAGES, ROOT, Wanted, ensure, remove_all

PRIVATE = Path("/run/muster")  # keys and secrets of runs
CNI = Path("/etc/cni/net.d")  # Podman has a lock there
LOCKS = (CNI / "cni.lock", Path("/run/lock/podman-cni.lock"))  # the second one: Podman 4 with CNI, as of Ubuntu 24.04
TABLE = ("inet", "muster")  # of nftables, made at the start of a run (keeper/firewall.py)


def remove(check_mode: bool) -> list[str]:
    """Removes Muster's containers (by label), images (by name), folders and settings. Returns what it removed."""
    removed = [one for name in ENGINES for one in remove_all(engine(name), check_mode)]
    if run(["nft", "list", "table", *TABLE]).rc == 0:
        removed.append(f"nftables table {' '.join(TABLE)}")
        if not check_mode:
            run(["nft", "delete", "table", *TABLE])
    ours = (text_of(CDI) or "").startswith(CDI_HEADER)
    private = [path for path in PRIVATE.glob("*") if not path.name.startswith(".")]  # not the word of this teardown
    return removed + remove_paths([*private, ROOT, DROP_IN, *([CDI] if ours else [])], check_mode, PACKAGES)


def remove_paths(paths: list[Path], check_mode: bool, kept: Path | None = None) -> list[str]:
    """Removes files and folders, but for one file in them. Returns those that were there."""
    there = [path for path in paths if path.is_file() or (path.is_dir() and _is_removable(path, kept))]
    for path in [] if check_mode else there:
        _remove_tree(path, kept) if path.is_dir() else path.unlink()
    return [str(path) for path in there]


def _is_removable(folder: Path, kept: Path | None) -> bool:
    """Whether there is something to remove: a folder may stay as it is, as a disk is mounted or a file of it kept."""
    entries = set(folder.iterdir())
    return bool(entries - {kept}) or not (entries or os.path.ismount(folder))


def _remove_tree(path: Path, kept: Path | None = None) -> None:
    """Remove a folder; one on which a disk of its own is mounted, or in which something is kept, stays."""
    for entry in path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            _remove_tree(entry, kept)
        elif entry != kept:
            entry.unlink()
    if not os.path.ismount(path) and not any(path.iterdir()):
        path.rmdir()


def forget(check_mode: bool) -> list[str]:
    """Removes the rest, when the packages are gone: what their engine has left, and that they were ours."""
    gone = [kind for kind in ENGINES.values() if find_command(kind.program) is None and _is_ours(kind)]
    left = [Path(folder) for kind in gone for folder in kind.folders]
    for folder in [] if check_mode else left:
        unmount_below(folder)
    groups = [kind.group for kind in gone if kind.group and run(["getent", "group", kind.group]).out.endswith(":\n")]
    for group in [] if check_mode else groups:  # without members
        run(["groupdel", group])
    removed = [f"group {group}" for group in groups] + remove_paths([*left, *LOCKS, *apt_files(), ROOT], check_mode)
    remove_paths([PRIVATE], check_mode)  # there again at each deploy and teardown
    for folder in (DROP_IN.parent, DROP_IN.parent.parent, CNI, CNI.parent):  # others may have put something there
        if not check_mode and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    for folder in [] if check_mode else [ROOT, *left]:
        if folder.is_dir():  # a disk is mounted there
            os.chown(folder, 0, 0)
            folder.chmod(0o755)
    return removed


def _is_ours(kind: type[Engine]) -> bool:
    """Whether Muster has installed it."""
    return bool({kind.name, f"{kind.name}.io"} & set(muster_packages.installed(PACKAGES)))


def unmount_below(folder: Path) -> None:
    """Podman mounts its storage upon itself."""
    points = (line.split()[1] for line in (read("/proc/self/mounts") or "").splitlines())
    for point in sorted((point for point in points if point.startswith(f"{folder}/")), reverse=True):
        run(["umount", point])


def packages_to_remove() -> tuple[list[str], list[str]]:
    """(packages, services to be stopped first).

    Raises RuntimeError with words for the user where somebody else uses an engine that Muster has installed.
    """
    names, services = muster_packages.removable(PACKAGES), []
    for kind in ENGINES.values():
        if {kind.name, f"{kind.name}.io"} & set(names):
            _refuse_used(kind.name)
            services += [kind.service] if kind.service else []
    return names, services


def _refuse_used(name: str) -> None:
    for what, listing in (
        ("containers", "ps --all --quiet"), ("images", "images --quiet"), ("volumes", "volume ls --quiet")
    ):  # fmt: skip
        if run([name, *listing.split()]).out.strip():
            fix = f"remove them (`{name} {listing}`), or leave the packages there (without PACKAGES=1)"
            raise RuntimeError(f"{name}, which Muster has installed, has {what} that are not Muster's. Fix: {fix}")


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            # present: probe the engine and write what it needs. absent: remove Muster's containers, images, folders and
            # settings; packages stay.
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            # What must be there, by family and engine: see muster_ready.Packages.
            "packages": {"type": "dict", "default": {}},
            # auto, or the engine that the user wants.
            "engine": {"type": "str", "choices": ["auto", *ENGINES], "default": "auto"},
            # The GPUs that ranks may use; empty: none.
            "gpus": {"type": "list", "elements": "int"},
            # Whether training goes through a VPN, which takes packages, too.
            "vpn": {"type": "bool", "default": False},
            # This host builds images, with Podman, whatever its engine is.
            "builds": {"type": "bool", "default": False},
            # For state absent. keep: packages stay. list: say which ones Muster has installed and can be removed.
            # stopped: the services that `list` has named are, and what they have left in the kernel shall go.
            # forget: the packages are gone, and what they have left shall go, too.
            "packages_installed": {"type": "str", "choices": ["keep", "list", "stopped", "forget"], "default": "keep"},
            # Fail when a package is missing instead of returning its name.
            "strict": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    if os.getuid() != 0:
        module.fail_json(
            msg="The container engine needs root on this host. Fix: give the SSH user sudo (become) in the inventory"
        )
    try:
        if module.params["state"] == "absent":
            wanted = module.params["packages_installed"]
            removed = {"forget": forget, "stopped": remove_rules}.get(wanted, remove)(module.check_mode)
            packages, services = packages_to_remove() if wanted == "list" else ([], [])
            module.exit_json(changed=bool(removed), removed=removed, packages=packages, services=services)
        given = module.params
        parts = {name: given[name] for name in ("packages", "engine", "builds", "vpn")}
        asked = Wanted(gpus=given["gpus"] != [], **parts)
        module.exit_json(**ensure(asked, module.check_mode, module.params["strict"]))
    except RuntimeError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
