#!/usr/bin/python3
"""Podman on this machine: which packages are missing, which settings it needs here (module_utils/muster_podman.py); and
how all of Muster is removed.

Not for installing packages (the role `engine` does, with apt) and not for images (muster_image).

state=present returns `missing`, the Debian packages to be installed first; nothing was probed if there are any.
state=absent returns `removed`, what it has removed in words, and `packages`, which are to be removed after that. The
options stand in main.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from ansible.module_utils import muster_packages
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.muster_host import find_command, read, run
from ansible.module_utils.muster_podman import CDI, CDI_HEADER, DROP_IN, PACKAGES, ROOT, ensure, text_of

#: What an engine has left when its packages are purged.
ENGINE_FOLDERS = ("/var/lib/containers", "/run/containers", "/run/libpod", "/run/runc", "/run/crun")
PRIVATE = Path("/run/muster")  # keys and secrets of runs
CNI = Path("/etc/cni/net.d")  # Podman has a lock there
LOCKS = (CNI / "cni.lock", Path("/run/lock/podman-cni.lock"))  # the second one: Podman 4 with CNI, as of Ubuntu 24.04
TABLE = ("inet", "muster")  # of nftables, made at the start of a run (keeper/firewall.py)


def remove(check_mode: bool) -> list[str]:
    """Removes Muster's containers (by label), images (by name), folders and settings. Returns what it removed."""
    removed = []
    if find_command("podman"):
        containers = run(["podman", "ps", "--all", "--quiet", "--filter", "label=muster.run"]).out.split()
        named = ["--filter", "reference=localhost/muster/*"]
        images = run(["podman", "images", "--quiet", "--no-trunc", *named]).out.split()
        ledger = json.loads(read(ROOT / "images" / "ledger.json") or "{}")
        images += [image for image in ledger.get("stale", []) if run(["podman", "image", "exists", image]).rc == 0]
        for what, command, names in (
            ("container", ["podman", "rm", "--force", "--time", "5"], containers),
            ("image", ["podman", "rmi", "--force"], list(dict.fromkeys(images))),
        ):
            for name in names:
                result = None if check_mode else run([*command, name], timeout=120.0)
                if result and result.rc != 0:
                    problem = f"{what} {name} cannot be removed: {result.complaint}"
                    raise RuntimeError(f"{problem}. Fix: stop what uses it, then again")
                removed.append(f"{what} {name}")
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
    engine_is_gone = find_command("podman") is None and "podman" in muster_packages.installed(PACKAGES)
    left = [Path(name) for name in ENGINE_FOLDERS] if engine_is_gone else []
    for folder in [] if check_mode else left:
        unmount_below(folder)
    removed = remove_paths([*left, *LOCKS, ROOT], check_mode)
    remove_paths([PRIVATE], check_mode)  # there again at each deploy and teardown
    for folder in (DROP_IN.parent, DROP_IN.parent.parent, CNI, CNI.parent):  # others may have put something there
        if not check_mode and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    if not check_mode and ROOT.is_dir():  # a disk is mounted there
        os.chown(ROOT, 0, 0)
    return removed


def unmount_below(folder: Path) -> None:
    """Podman mounts its storage upon itself."""
    points = (line.split()[1] for line in (read("/proc/self/mounts") or "").splitlines())
    for point in sorted((point for point in points if point.startswith(f"{folder}/")), reverse=True):
        run(["umount", point])


def packages_to_remove() -> list[str]:
    """Raises RuntimeError with words for the user where somebody else uses the engine that Muster has installed."""
    names = muster_packages.removable(PACKAGES)
    if "podman" in names:
        for what, listing in (
            ("containers", "ps --all --quiet"), ("images", "images --quiet"), ("volumes", "volume ls --quiet")
        ):  # fmt: skip
            if run(["podman", *listing.split()]).out.strip():
                fix = f"remove them (`podman {listing}`), or leave the packages there (without PACKAGES=1)"
                raise RuntimeError(f"Podman, which Muster has installed, has {what} that are not Muster's. Fix: {fix}")
    return names


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            # present: probe the engine and write what it needs. absent: remove Muster's containers, images, folders and
            # settings; packages stay.
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            # What must be there, as Debian package and the command that proves it, whatever installed it.
            "packages": {"type": "dict", "default": {}},
            # For state absent. keep: packages stay. list: say which ones Muster has installed and can be removed.
            # forget: they are gone, and what they have left shall go, too.
            "packages_installed": {"type": "str", "choices": ["keep", "list", "forget"], "default": "keep"},
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
            removed = forget(module.check_mode) if wanted == "forget" else remove(module.check_mode)
            packages = packages_to_remove() if wanted == "list" else []
            module.exit_json(changed=bool(removed), removed=removed, packages=packages)
        module.exit_json(**ensure(module.params["packages"], module.check_mode, module.params["strict"]))
    except RuntimeError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
