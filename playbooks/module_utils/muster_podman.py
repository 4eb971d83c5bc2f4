"""Podman on this machine: which settings it needs here, of which only those are written, and how it gets an image.

The answer comes from really running a container (`podman run --rootfs` on a tree of empty folders with the
machine's own /usr mounted read-only: no image is needed). A machine whose Podman works as it is gets no setting.
Standard library alone, Python 3.8 and later.

The part for NVIDIA GPUs (CDI through nvidia-ctk) follows the tool's documentation and was not tried on a real GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ansible.module_utils.muster_engines import Podman, is_rootless, place
from ansible.module_utils.muster_gpus import nvidia_devices
from ansible.module_utils.muster_host import Result, find_command, read, run, too_old, write_atomically

USERS_SETTINGS = Path(os.path.expanduser("~"), ".config", "containers")
DROP_IN = (USERS_SETTINGS if is_rootless() else Path("/etc/containers")) / "containers.conf.d" / "50-muster.conf"
USERS_STORAGE = USERS_SETTINGS / "storage.conf"
STORAGE_HEADER = "# Written by Muster (make deploy): Podman would copy every layer of an image.\n"
CDI = Path("/etc/cdi/nvidia.yaml")
OLDEST = (3, 4)
CDI_HEADER = "# Written by Muster (make deploy) with nvidia-ctk; make teardown removes it.\n"
# Far more than a training process needs, and low enough that a session with lower limits can still grant them.
ULIMIT_CAPS = {"nofile": 65536, "nproc": 32768}
TRIAL_SECONDS = 60.0
PULL_SECONDS = 1800.0


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


def version_problem(printed: str) -> str:
    """Why this Podman may not be used; empty where it may. printed: what `podman --version` prints. Pure."""
    version = too_old(printed, OLDEST)
    if not version:
        return ""
    oldest = ".".join(map(str, OLDEST))
    return (
        f"Podman cannot be used on this host: it is version {version}, and Muster needs {oldest} or later. "
        "Fix: install a newer Podman, or set container_engine: docker for this host"
    )


def settle(check_mode: bool) -> bool:
    """Finds settings with which a container runs and leaves them written. Returns whether it changed any.

    Raises RuntimeError where Podman is too old, and with every attempt's complaint if there are none; the drop-in is
    then as it was before.
    """
    if problem := version_problem(run(Podman.version_words).out):
        raise RuntimeError(problem)
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


def prefer_overlay() -> None:
    """Lets the storage of this user's Podman be on overlay, where there is none yet: without fuse-overlayfs Debian's
    Podman takes vfs, and holds to what it has begun with."""
    home = Path(os.path.expanduser("~"))
    storage = home / ".local/share/containers/storage"
    words = (storage / "libpod", storage / "db.sql")  # in which Podman, and that from release 5 on, has its driver
    begun = any(path.exists() for path in (USERS_STORAGE, *words)) or any(storage.glob("*-images"))
    if not begun and not find_command("fuse-overlayfs") and not Path("/etc/containers/storage.conf").exists():
        USERS_STORAGE.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(USERS_STORAGE, f'{STORAGE_HEADER}[storage]\ndriver = "overlay"\n')
        if run(["podman", "info"], timeout=TRIAL_SECONDS).rc != 0:  # not upon this file system, or by this kernel
            USERS_STORAGE.unlink()
            for path in words:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def text_of(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def put_drop_in(text: str | None) -> None:
    """Writes the drop-in, or removes it."""
    if text is None:
        DROP_IN.unlink(missing_ok=True)
    else:
        write_atomically(DROP_IN, text)


def make_cdi(check_mode: bool) -> bool:
    """Describes NVIDIA GPUs to Podman (CDI), where there are some and nvidia-ctk is. Returns whether it changed."""
    before = text_of(CDI)
    if is_rootless() or not nvidia_devices() or (before is not None and not before.startswith(CDI_HEADER)):
        return False
    result = run(["nvidia-ctk", "cdi", "generate"], timeout=60.0)
    if result.rc != 0 or CDI_HEADER + result.out == before:
        return False
    if not check_mode:
        write_atomically(CDI, CDI_HEADER + result.out)
    return True


def pull(layout: Path, identity: str, index: str) -> None:
    """Lets Podman read the image that an index.json names from the pool. Raises RuntimeError with what Podman said."""
    write_atomically(layout / "oci-layout", '{"imageLayoutVersion": "1.0.0"}')
    write_atomically(layout / "index.json", index)
    layout = _plain_name(layout)
    pulled = run(["podman", "pull", "--quiet", f"oci:{layout}"], timeout=PULL_SECONDS)
    if pulled.rc != 0:
        raise RuntimeError(pulled.complaint)
    got = pulled.out.split()[-1].split(":")[-1]
    # Podman names an image after the folder it was read from.
    run(["podman", "untag", got, f"localhost{layout}:latest"])
    if got != identity:
        raise RuntimeError(f"it made image {got} out of layers of {identity}")


def _plain_name(layout: Path) -> Path:
    """A path to this folder of which Podman can make a name: not every folder in a user's home is such a one."""
    if not is_rootless():
        return layout
    link = Path(place().private, "oci")
    link.parent.mkdir(mode=0o700, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(layout)
    return link


def layers(storage: str) -> set[str]:
    """Digests of the layers that are unpacked in Podman's storage."""
    known: set[str] = set()
    for path in Path(storage).glob("*-layers/layers.json"):
        with contextlib.suppress(ValueError):
            known |= {str(layer.get("diff-digest", "")).split(":")[-1] for layer in json.loads(read(path) or "[]")}
    return known
