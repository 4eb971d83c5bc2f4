"""Makes a host ready for runs: its container engine chosen and able to run containers, packages, Muster's folders.

For Ansible (library/muster_engine.py), which changes what has to be, and for the survey, which asks whether there is
anything. What one engine alone needs is in muster_podman and muster_docker.
Standard library alone, Python 3.8 and later.
"""

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

from ansible.module_utils import muster_docker, muster_driver, muster_packages, muster_podman
from ansible.module_utils.muster_engines import (
    ENGINES,
    IMAGE_PREFIX,
    LIVING,
    NOTE,
    Engine,
    engine,
    is_rootless,
    noted,
    place,
)
from ansible.module_utils.muster_gpus import nvidia_devices
from ansible.module_utils.muster_host import find_command, parse_os_release, read, run, too_old, write_atomically

ROOT = Path(place().folder)  # Muster's folder; the SSH user gets it, so that rsync needs no sudo
PACKAGES = ROOT / "packages.json"  # what was installed here: module_utils/muster_packages.py
LEDGER = ROOT / "images" / "ledger.json"  # which image each name stands for: library/muster_image.py
FAMILIES = ("debian", "rhel")  # as os-release writes them
INSTALL = {"debian": "apt-get install", "rhel": "dnf install"}
#: Of NVIDIA's container toolkit: from older ones a container can get at its host (CVE-2025-23266).
OLDEST_TOOLKIT = (1, 17, 8)

#: family -> "all", engine, "vpn" or "vpn_program" -> package -> the command that proves it, whatever installed it.
Packages = Dict[str, Dict[str, Dict[str, str]]]


class Wanted(NamedTuple):
    """What is to be there."""

    packages: Packages
    engine: str = "auto"  # or the name of one
    gpus: bool = True  # ranks may use this host's GPUs
    builds: bool = False  # it builds images, with Podman, whatever its engine is
    driver: bool = False  # NVIDIA's driver and container toolkit are to be installed where they are lacking
    vpn: bool = False  # training goes through a VPN


def family(os_release: str) -> str:
    """Whose packages this machine takes, one of FAMILIES; empty for others. Pure."""
    system = parse_os_release(os_release)
    return next((name for name in FAMILIES if name in (system["id"], *system["like"].split())), "")


def choose(wanted: str, noted: str, there: List[str], gives_gpus: List[str]) -> str:
    """The engine: what the user wants, what the last deploy took, what is there and can give GPUs; else Podman. Pure.

    wanted: "auto", or a name. noted: a name, or empty. there: names of engines that are installed; gives_gpus: those
    that can give this host's GPUs to containers, all where it has none.
    """
    if wanted in ENGINES:
        return wanted
    if noted in there:
        return noted
    return next((name for name in ENGINES if name in there and name in gives_gpus), (there or ["podman"])[0])


def change_of_engine(wanted: Wanted) -> List[str]:
    """[from, to], where a deploy takes another engine than the last one did; else empty."""
    noted, chosen = (read(NOTE) or "").strip(), _chosen(wanted).name
    return [noted, chosen] if noted and noted != chosen else []


def _chosen(wanted: Wanted) -> Engine:
    if is_rootless():
        return noted()
    there = [name for name, kind in ENGINES.items() if find_command(kind.program)]
    needed = wanted.gpus and nvidia_devices()
    gives = [name for name in there if not needed or find_command(ENGINES[name].gpu_tool)]
    return engine(choose(wanted.engine, (read(NOTE) or "").strip(), there, gives))


def missing_packages(packages: Dict[str, str]) -> List[str]:
    """Packages whose command is not there. Asking for commands leaves a host's own builds (Docker's runc) in place."""
    return [package for package, command in packages.items() if find_command(command) is None]


def make_folders(root: Path, owner: str, check_mode: bool) -> bool:
    """Makes Muster's folders for the SSH user, who then sends files without sudo. Returns whether it changed any.

    Of another user, who was the SSH user before, images and datasets are taken over with all that is in them.
    """
    user = pwd.getpwnam(owner)
    wanted = (user.pw_uid, user.pw_gid)
    names = ["", "images", "images/oci", "images/oci/blobs", "images/oci/blobs/sha256", "runs"]
    names += ["data"] if (root / "data").is_dir() else []
    states = {root / name: (root / name).stat() if (root / name).exists() else None for name in names}
    wrong = [folder for folder, state in states.items() if state is None or (state.st_uid, state.st_gid) != wanted]
    for folder in [] if check_mode else wrong:
        folder.mkdir(mode=0o700 if is_rootless() else 0o755, parents=True, exist_ok=True)
        if folder in (root / "images", root / "data"):
            _take_over(folder, wanted)  # first, so that one who is killed here leaves the folder wrong
        os.chown(folder, *wanted)
    return bool(wrong)


def _take_over(folder: Path, owner: Tuple[int, int]) -> None:
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            os.lchown(os.path.join(parent, name), *owner)


def lacking(wanted: Wanted) -> List[str]:
    """The packages that are missing."""
    return _missing(wanted, _chosen(wanted), family(read("/etc/os-release") or ""))


def _missing(wanted: Wanted, chosen: Engine, kind: str) -> List[str]:
    if is_rootless():
        return []  # muster_rootless has looked
    own = wanted.packages.get(kind or FAMILIES[0], {})
    parts = ["all", chosen.name, *(["vpn"] if wanted.vpn else [])]
    parts += ["vpn_program"] if wanted.vpn and not _kernel_has_wireguard() else []
    return missing_packages({name: command for part in parts for name, command in own.get(part, {}).items()})


def _kernel_has_wireguard() -> bool:
    return Path("/sys/module/wireguard").exists() or run(["modprobe", "--dry-run", "--quiet", "wireguard"]).rc == 0


def toolkit_problem(version: str) -> str:
    """Why this toolkit may not be used; empty where it may. version: what `nvidia-ctk --version` prints. Pure."""
    old = too_old(version, OLDEST_TOOLKIT)
    if not old:
        return ""
    oldest = ".".join(map(str, OLDEST_TOOLKIT))
    return (
        f"NVIDIA's container toolkit is version {old}, from which a container can get at its host"
        f" (CVE-2025-23266). Fix: install {oldest} or later there, or leave the GPUs out with `gpus: []`"
    )


def take(chosen: Engine, check_mode: bool) -> bool:
    """Notes this host's engine; what another one has of Muster goes. Returns whether it changed anything.

    Raises RuntimeError where a run is in progress there.
    """
    known = read(NOTE)
    if is_rootless() or known == chosen.name:
        return False
    if not check_mode:
        former = engine(known)
        if former.name != chosen.name:  # Podman was the only one before there was a note
            leave(former)
        write_atomically(Path(NOTE), chosen.name + "\n")
    return True


def leave(former: Engine) -> None:
    """Removes Muster's containers and images of the engine that was used until now."""
    listed = run(former.containers())
    living = [one for one in former.read_containers(listed.out) if one.state in LIVING] if listed.rc == 0 else []
    if living:
        what = f"run {living[0].run} of {living[0].owner} is in progress in {former.name}"
        raise RuntimeError(f"{what}. Fix: change container_engine when it has ended (`make stop RUN={living[0].run}`)")
    remove_all(former, check_mode=False)


def remove_all(of: Engine, check_mode: bool) -> List[str]:
    """Removes an engine's containers of runs (by label) and Muster's images (by name). Returns what it removed.

    Raises RuntimeError with words for the user.
    """
    if not find_command(of.program):
        return []
    listed, images = run(of.containers()), run(of.image_words)
    if listed.rc != 0 or images.rc != 0:
        if is_rootless() or engine(read(NOTE)).name == of.name:
            said = (listed if listed.rc else images).complaint
            raise RuntimeError(f"{of.name} does not answer: {said}. Fix: see that `{of.name} ps` works there")
        return []
    known = of.read_images(images.out)
    wanted = [known.names[name] for name in known.names if name.startswith(IMAGE_PREFIX)]
    stale = json.loads(read(LEDGER) or "{}").get("stale", [])
    wanted += [one for one in (*stale, *sorted(known.by_id)) if one in known.ids]
    removed = []
    for what, command, names in (
        ("container", ["rm", "--force"], [one.name for one in of.read_containers(listed.out)]),
        ("image", ["rmi", "--force"], list(dict.fromkeys(wanted))),
    ):
        for name in names:
            words = [name] if what == "container" else of.all_names(name, known)
            result = None if check_mode else run([of.name, *command, *words], timeout=120.0)
            if result and result.rc != 0:
                problem = f"{what} {name} cannot be removed: {result.complaint}"
                raise RuntimeError(f"{problem}. Fix: stop what uses it, then again")
            removed.append(f"{what} {name}")
    return removed


def _settle_docker(check_mode: bool) -> bool:
    said = muster_docker.complaint()
    if said:
        raise RuntimeError(f"Docker cannot be used on this host: {said}. Fix: {muster_docker.fix(said)}")
    return False


SETTLE: Dict[str, Callable[[bool], bool]] = {
    "podman": lambda check_mode: muster_podman.settle(check_mode) | muster_podman.make_cdi(check_mode),
    "docker": _settle_docker,
}


def ensure(wanted: Wanted, check_mode: bool, strict: bool = False) -> Dict[str, Any]:
    """Makes the engine ready: {"changed", "family", "missing": packages to be installed first,
    "service": the one to be started after that, or empty}; nothing was done where one of the last two is not empty.

    strict: nothing may be missing any more. Raises RuntimeError with a message for the user.
    """
    chosen, kind = _chosen(wanted), family(read("/etc/os-release") or "")
    missing = _missing(wanted, chosen, kind)
    stopped = chosen.service if chosen.service and not missing and run(chosen.version_words).rc != 0 else ""
    found = {"changed": False, "family": kind, "missing": missing, "service": stopped}
    if missing:
        _refuse_missing(missing, kind, strict)
        if not check_mode:
            muster_packages.note_begin(PACKAGES)
            if wanted.builds:  # before Podman comes: a host keeps the engine that it has
                take(chosen, check_mode)
        return {**found, "service": chosen.service}
    if stopped and not strict:
        return found
    if wanted.gpus and nvidia_devices() and (problem := toolkit_problem(run(["nvidia-ctk", "--version"]).out)):
        raise RuntimeError(problem)
    owner = os.environ.get("SUDO_USER") or pwd.getpwuid(os.getuid()).pw_name
    changed = [muster_packages.note_end(PACKAGES, check_mode), SETTLE[chosen.name](check_mode)]
    if wanted.builds and chosen.name != "podman":
        changed.append(muster_podman.settle(check_mode))
    changed += [make_folders(ROOT, owner, check_mode), take(chosen, check_mode)]
    return {**found, "changed": any(changed), "service": ""}


def _refuse_missing(missing: List[str], kind: str, strict: bool) -> None:
    names = ", ".join(missing)
    if not kind:
        system = parse_os_release(read("/etc/os-release") or "")
        raise RuntimeError(
            f"This host runs {system['id'] or 'an unknown system'} {system['version']}, and Muster installs packages "
            f"on Debian, Ubuntu and kin of RHEL only. Fix: install by hand what those call {names}, then make deploy"
        )
    if strict:
        by_hand = f"`{INSTALL[kind]} {' '.join(missing)}` by hand"
        raise RuntimeError(f"Still missing after packages were installed: {names}. Fix: {by_hand}")


def is_ready(wanted: Wanted) -> bool:
    """Whether `ensure` has nothing to do, and no driver is to be installed."""
    if wanted.driver and wanted.gpus and muster_driver.lacking(muster_driver.look()):
        return False
    try:
        found = ensure(wanted, check_mode=True)
    except RuntimeError:
        return False
    return not (found["changed"] or found["missing"] or found["service"])
