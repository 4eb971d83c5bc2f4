#!/usr/bin/python3
"""Makes Podman run on this machine: which packages are missing, which settings it needs here; writes only those.

The answer comes from really running a container (`podman run --rootfs` on a tree of empty folders with the
machine's own /usr mounted read-only: no image is needed). A machine whose Podman works as it is gets no setting.
Not for installing packages (the role `engine` does, with apt) and not for images (muster_image).

The part for NVIDIA GPUs (CDI through nvidia-ctk) follows the tool's documentation and was not tried on a real GPU.

state=present returns `missing`, the Debian packages to be installed first; nothing was probed if there are any.
state=absent returns `removed`, what it has removed in words, and `packages`, which are to be removed after that. The
options stand in main.
"""

from __future__ import annotations

import json
import os
import pwd
import resource
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils import muster_packages
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.muster_gpus import nvidia_devices
from ansible.module_utils.muster_host import Result, find_command, parse_os_release, read, run, write_atomically

ROOT = Path("/var/lib/muster")  # Muster's folder; the SSH user gets it, so that rsync needs no sudo
PACKAGES = ROOT / "packages.json"  # what was installed here: module_utils/muster_packages.py
#: What an engine has left when its packages are purged.
ENGINE_FOLDERS = ("/var/lib/containers", "/run/containers", "/run/libpod", "/run/runc", "/run/crun")
DROP_IN = Path("/etc/containers/containers.conf.d/50-muster.conf")
CDI = Path("/etc/cdi/nvidia.yaml")
CDI_HEADER = "# Written by Muster (make deploy) with nvidia-ctk; make teardown removes it.\n"
TABLE = ("inet", "muster")  # of nftables, made at the start of a run (keeper/firewall.py)
# Far more than a training process needs, and low enough that a session with lower limits can still grant them.
ULIMIT_CAPS = {"nofile": 65536, "nproc": 32768}
TRIAL_SECONDS = 60.0


@dataclass(frozen=True)
class Settings:
    """The settings that Podman may need on a machine; on most it needs none."""

    runtime: str | None = None
    ulimits: tuple[tuple[str, int], ...] = ()


def candidates(hard_limits: dict[str, int], runtimes: list[str]) -> list[Settings]:
    """Settings to try, from none to all: a machine gets no setting that it can do without.

    hard_limits: hard limit by name (nofile, nproc) of this session, -1 for unlimited.
    """
    ulimits = tuple(
        (name, cap if hard < 0 else min(hard, cap)) for name, cap in ULIMIT_CAPS.items() for hard in [hard_limits[name]]
    )
    return [Settings(runtime, limits) for limits in ((), ulimits) for runtime in [None, *runtimes]]


def render(settings: Settings, complaint: str) -> str | None:
    """The drop-in for containers.conf.d; None if there is nothing to set. `complaint`: what Podman said without it."""
    if settings == Settings():
        return None
    lines = [
        "# Written by Muster (make deploy) because Podman could not run a container on this machine without it:",
        f"#   {complaint}",
        "# make teardown removes this file.",
    ]
    if settings.ulimits:
        values = ", ".join(f'"{name}={value}:{value}"' for name, value in settings.ulimits)
        lines += ["[containers]", f"default_ulimits = [{values}]"]
    if settings.runtime:
        lines += ["[engine]", f'runtime = "{settings.runtime}"']
    return "\n".join(lines) + "\n"


def fix(complaint: str) -> str:
    """What to do about a complaint that no setting of ours answers."""
    text = complaint.lower()
    if "overlay" in text:
        storage = "put /var/lib/containers on ext4, xfs or btrfs (not on another overlay)"
        return f"Podman's storage needs overlay: {storage}, or install fuse-overlayfs"
    if "no space left" in text:
        return "free disk space under /var/lib/containers and /run"
    if "cgroup" in text:
        return "install runc (crun refuses a hybrid cgroup mount), or boot with one cgroup version"
    if "operation not permitted" in text or "permission denied" in text:
        return "the machine forbids root to make containers; if it is a container itself, it must be privileged"
    return "try `sudo podman run` by hand on that machine; Muster needs it to work"


def probe_tree(folder: Path, root: Path = Path("/")) -> list[str]:
    """Makes a root file system out of the machine's own programs in `folder`; returns podman's options for it."""
    options = []
    for name in ("usr", "bin", "sbin", "lib", "lib64"):
        source = root / name
        if source.is_symlink():
            (folder / name).symlink_to(os.readlink(source))
        elif source.is_dir():
            (folder / name).mkdir()
            options += ["--volume", f"{source}:/{name}:ro"]
    for name in ("dev", "etc", "proc", "run", "sys", "tmp", "var"):
        (folder / name).mkdir()
    return options


def probe() -> Result:
    """Runs /bin/true in a container with the settings that Podman has now."""
    with tempfile.TemporaryDirectory(prefix="muster-probe-") as name:
        mounts = probe_tree(Path(name))
        words = ["podman", "run", "--rm", "--network", "host", *mounts, "--rootfs", name, "/bin/true"]
        return run(words, timeout=TRIAL_SECONDS)


def settle(check_mode: bool) -> bool:
    """Finds settings with which a container runs and leaves them written. Returns whether it changed any.

    Raises RuntimeError with every attempt's complaint if there are none; the drop-in is then as it was before.
    """
    before = text_of(DROP_IN)
    first = probe()
    if first.rc == 0 or check_mode:
        return first.rc != 0
    hard = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1] for name in ULIMIT_CAPS}
    plain_complaint, complaints = first.complaint, [first.complaint]
    for settings in candidates(hard, [name for name in ("runc", "crun") if find_command(name)]):
        text = render(settings, plain_complaint)
        if text == before:
            continue
        put_drop_in(text)
        result = probe()
        if result.rc == 0:
            return True
        complaints.append(result.complaint)
        if settings == Settings():
            plain_complaint = result.complaint
    put_drop_in(before)
    said = "; ".join(dict.fromkeys(complaints))
    raise RuntimeError(f"Podman cannot run a container on this host. It said: {said}. Fix: {fix(said)}")


def text_of(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def put_drop_in(text: str | None) -> None:
    """Writes the drop-in, or removes it."""
    if text is None:
        DROP_IN.unlink(missing_ok=True)
    else:
        write_atomically(DROP_IN, text)


def missing_packages(packages: dict[str, str]) -> list[str]:
    """Packages whose command is not there. Asking for commands leaves a host's own builds (Docker's runc) in place."""
    return [package for package, command in packages.items() if find_command(command) is None]


def make_folders(root: Path, owner: str, check_mode: bool) -> bool:
    """Makes Muster's folders for the SSH user, who then sends files without sudo. Returns whether it changed any."""
    user = pwd.getpwnam(owner)
    wanted = (user.pw_uid, user.pw_gid)
    names = ("", "images", "images/oci", "images/oci/blobs", "images/oci/blobs/sha256", "runs")
    states = {root / name: (root / name).stat() if (root / name).exists() else None for name in names}
    wrong = [folder for folder, state in states.items() if state is None or (state.st_uid, state.st_gid) != wanted]
    for folder in [] if check_mode else wrong:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        os.chown(folder, *wanted)
    return bool(wrong)


def make_cdi(check_mode: bool) -> bool:
    """Describes NVIDIA GPUs to Podman (CDI), where there are some and nvidia-ctk is. Returns whether it changed."""
    before = text_of(CDI)
    if not nvidia_devices() or (before is not None and not before.startswith(CDI_HEADER)):
        return False
    result = run(["nvidia-ctk", "cdi", "generate"], timeout=60.0)
    if result.rc != 0 or CDI_HEADER + result.out == before:
        return False
    if not check_mode:
        write_atomically(CDI, CDI_HEADER + result.out)
    return True


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
    return removed + remove_paths([ROOT, DROP_IN, *([CDI] if ours else [])], check_mode, PACKAGES)


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
    removed = remove_paths([*left, ROOT, Path("/run/muster")], check_mode)
    for folder in (DROP_IN.parent, DROP_IN.parent.parent):  # others may have put something there
        if not check_mode and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
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


def ensure(module: AnsibleModule) -> dict[str, Any]:
    """state: present. Returns the module's result; raises RuntimeError with a message for the user."""
    missing = missing_packages(module.params["packages"])
    if missing:
        system = parse_os_release(read("/etc/os-release") or "")
        names = ", ".join(missing)
        if system["id"] != "debian" and "debian" not in system["like"]:
            raise RuntimeError(
                f"This host runs {system['id'] or 'an unknown system'} {system['version']}, and Muster installs "
                f"packages on Debian and Ubuntu only. Fix: install by hand what those call {names}, then make deploy"
            )
        if module.params["strict"]:
            by_hand = f"`apt-get install {' '.join(missing)}` by hand"
            raise RuntimeError(f"Still missing after packages were installed: {names}. Fix: {by_hand}")
        if not module.check_mode:
            muster_packages.note_begin(PACKAGES)
        return {"changed": False, "missing": missing}
    owner = os.environ.get("SUDO_USER") or pwd.getpwuid(os.getuid()).pw_name
    check = module.check_mode
    if not check:
        muster_packages.note_end(PACKAGES)
    changed = [settle(check), make_folders(ROOT, owner, check), make_cdi(check)]
    return {"changed": any(changed), "missing": []}


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
        module.exit_json(**ensure(module))
    except RuntimeError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
