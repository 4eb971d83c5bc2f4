"""Makes .venv and installs the groups of pyproject.toml that a make target needs. Standard library alone.

Run by the system's own python3, before anything is installed: `python3 -m launch.bootstrap train control`. With --root
it first checks that this user can become root, so that nobody waits for an installation only to be refused.
For each group a file in .venv holds a digest of pyproject.toml, so a group is installed again when versions change.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PIP = "pip==26.3"  # installed first: Debian 12's own pip knows no dependency groups


def main(groups: list[str]) -> int:
    """Install what is missing; returns 0, or 1 after one message that says what to do."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this file runs on the system's own python3
        return _fail(
            f"python3 is {sys.version.split()[0]}; Muster needs 3.11 or newer (make PYTHON=/path/to/python3.11 ...)"
        )
    if "--root" in groups and not _has_root():
        return _fail(
            "this makes containers with addresses of their own, which needs root (or sudo without a password); "
            "`make local` trains on this machine without root"
        )
    groups = [group for group in groups if group != "--root"]
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    stamps = {group: VENV / f".{group}" for group in groups}
    missing = [group for group, stamp in stamps.items() if not (stamp.exists() and stamp.read_text() == wanted)]
    if not missing:
        for stamp in stamps.values():
            stamp.touch()  # make compares its time with pyproject.toml's
        return 0
    whole = (VENV / "bin" / "python").exists() and (VENV / "bin" / "pip").exists()
    if not whole and (problem := _ensure_venv_module() or _make_venv()):
        return _fail(problem)
    # Python compiles what it imports; compiling all of it here would take three times as long as the rest.
    arguments = ["--no-compile", *(word for group in missing for word in ("--group", group))]
    print(f"muster: installing {', '.join(missing)} into .venv (versions: pyproject.toml)", flush=True)
    if _pip("install", *arguments) != 0:
        return _fail("pip could not install; see its own message above. Run the same command again when it is fixed")
    if "train" in missing or "test" in missing:
        subprocess.run(
            [VENV / "bin" / "python", "-m", "train.model.torchvision_cpu", "--install"], cwd=ROOT, check=True
        )
    for group in missing:
        stamps[group].write_text(wanted)
    return 0


def _has_root() -> bool:
    return os.getuid() == 0 or (
        shutil.which("sudo") is not None
        and subprocess.run(["sudo", "-n", "true"], capture_output=True, check=False).returncode == 0
    )


def _ensure_venv_module() -> str:
    """Debian keeps a part of venv in a package of its own; returns a problem, or ''."""
    if importlib.util.find_spec("ensurepip") is not None:
        return ""
    package = f"python3.{sys.version_info.minor}-venv"
    prefix = [] if os.getuid() == 0 else ["sudo", "-n"]
    if shutil.which("apt-get") and (not prefix or shutil.which("sudo")):
        print(f"muster: installing {package}, which python3 needs to make .venv", flush=True)
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", package]):
            if subprocess.run([*prefix, "apt-get", *words], env=environment, check=False).returncode != 0:
                break
        else:
            return ""
    return f"python3 here cannot make virtual environments. Ask root for: apt-get install {package}"


def _make_venv() -> str:
    print("muster: making .venv", flush=True)
    shutil.rmtree(VENV, ignore_errors=True)
    if subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=False).returncode != 0:
        return f"python3 -m venv {VENV} failed; see its own message above"
    if _pip("install", "-q", PIP) != 0:
        return "pip could not reach a package registry; see its own message above"
    return ""


def _pip(*words: str) -> int:
    return subprocess.run([VENV / "bin" / "python", "-m", "pip", *words], cwd=ROOT, check=False).returncode


def _fail(problem: str) -> int:
    print(f"muster: {problem}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
