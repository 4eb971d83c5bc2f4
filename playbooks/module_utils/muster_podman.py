"""Makes Podman run on this machine: which packages are missing, which settings it needs here; writes only those.

The answer comes from really running a container (`podman run --rootfs` on a tree of empty folders with the
machine's own /usr mounted read-only: no image is needed). A machine whose Podman works as it is gets no setting.
For Ansible (library/muster_engine.py), which changes what has to be, and for the survey, which asks whether there is
anything. Standard library alone, Python 3.8 and later.

The part for NVIDIA GPUs (CDI through nvidia-ctk) follows the tool's documentation and was not tried on a real GPU.
"""

from __future__ import annotations

import os
import pwd
import resource
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils import muster_packages
from ansible.module_utils.muster_gpus import nvidia_devices
from ansible.module_utils.muster_host import Result, find_command, parse_os_release, read, run, write_atomically

ROOT = Path("/var/lib/muster")  # Muster's folder; the SSH user gets it, so that rsync needs no sudo
PACKAGES = ROOT / "packages.json"  # what was installed here: module_utils/muster_packages.py
DROP_IN = Path("/etc/containers/containers.conf.d/50-muster.conf")
CDI = Path("/etc/cdi/nvidia.yaml")
CDI_HEADER = "# Written by Muster (make deploy) with nvidia-ctk; make teardown removes it.\n"
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


def ensure(packages: dict[str, str], check_mode: bool, strict: bool = False) -> dict[str, Any]:
    """Makes the engine ready: {"changed", "missing": packages to be installed first, with which nothing was done}.

    packages: Debian's name -> the command that proves that it is there. strict: no package may be missing any more.
    Raises RuntimeError with a message for the user.
    """
    missing = missing_packages(packages)
    if missing:
        system = parse_os_release(read("/etc/os-release") or "")
        names = ", ".join(missing)
        if system["id"] != "debian" and "debian" not in system["like"]:
            raise RuntimeError(
                f"This host runs {system['id'] or 'an unknown system'} {system['version']}, and Muster installs "
                f"packages on Debian and Ubuntu only. Fix: install by hand what those call {names}, then make deploy"
            )
        if strict:
            by_hand = f"`apt-get install {' '.join(missing)}` by hand"
            raise RuntimeError(f"Still missing after packages were installed: {names}. Fix: {by_hand}")
        if not check_mode:
            muster_packages.note_begin(PACKAGES)
        return {"changed": False, "missing": missing}
    owner = os.environ.get("SUDO_USER") or pwd.getpwuid(os.getuid()).pw_name
    changed = [muster_packages.note_end(PACKAGES, check_mode)]
    changed += [settle(check_mode), make_folders(ROOT, owner, check_mode), make_cdi(check_mode)]
    return {"changed": any(changed), "missing": []}


def is_ready(packages: dict[str, str]) -> bool:
    """Whether `ensure` has nothing to do."""
    try:
        found = ensure(packages, check_mode=True)
    except RuntimeError:
        return False
    return not (found["changed"] or found["missing"])
