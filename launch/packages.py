"""What a project's requirements.txt asks for, installed beside .venv for `make local`, which stays as it is.

In build/projects/ is an environment for each content of a requirements.txt. It sees the packages of .venv, so pip
installs there what .venv lacks alone, or has in another version; torch and torchvision cannot be replaced. The same on
the hosts: containers/wheels.py.
"""

from __future__ import annotations

import hashlib
import json
import site
import sys
import sysconfig
import tempfile
import venv
from importlib.metadata import distributions
from pathlib import Path

from containers.engine import CommandFailed, ContainersError, follow
from containers.files import drafted, locked
from containers.pip import PIP
from containers.wheels import FIXED, requirements_texts
from containers.workload_image import image_name
from launch.cli import exits
from launch.cli.refusal import refuse
from launch.files import build_dir, shown


def folder_of(project: Path) -> Path | None:
    """The folder with the packages of a project, for PYTHONPATH; None where it has no requirements.txt.

    They are installed once for each content of that file and of .venv.
    Raises Refusal, with pip's last lines, where they cannot be.
    """
    requirements = project / "requirements.txt"
    if not requirements.is_file():
        return None
    here = {one.name: one.version for one in distributions(path=site.getsitepackages())}
    fixed = {name: here[name] for name in FIXED if name in here}
    folders = build_dir() / "projects"
    try:
        texts = requirements_texts(requirements)
        key = json.dumps([sys.version, sysconfig.get_platform(), sorted(here.items()), texts])
        folder = folders / f"{image_name(project.name)}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        with locked(build_dir() / "projects.lock"):
            if not folder.exists():
                print(f"packages of {shown(requirements)}: installing", flush=True)
                _install(folder, requirements, fixed)
    except CommandFailed as failure:
        versions = ", ".join(f"{name} {version}" for name, version in fixed.items())
        what = f"pip could not install what the project asks for. Its last lines:\n{failure.tail}"
        fix = f"fix the line that pip names; there is {versions}, which a project cannot replace"
        raise refuse(str(requirements), what, fix, exits.DEPLOY_FAILED) from None
    except ContainersError as error:
        raise refuse(error.where, error.what, error.fix, exits.DEPLOY_FAILED) from None
    except OSError as error:
        what = f"cannot be written: {error.strerror}"
        raise refuse(shown(folders), what, "make room, or let it be written") from None
    return _packages(folder)


def _packages(environment: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(environment), "platbase": str(environment)}))


def _install(folder: Path, requirements: Path, fixed: dict[str, str]) -> None:
    """Make an environment that sees this one's packages, and install into it. Raises CommandFailed."""
    with drafted(folder) as draft, tempfile.TemporaryDirectory() as scratch:
        venv.create(draft, with_pip=False)
        (_packages(draft) / "these.pth").write_text("".join(f"{path}\n" for path in site.getsitepackages()))
        constraints = Path(scratch) / "constraints.txt"
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in fixed.items()))
        words = ["install", "--quiet", f"--requirement={requirements}", f"--constraint={constraints}"]
        follow([*PIP, f"--python={draft / 'bin' / 'python'}", *words])
