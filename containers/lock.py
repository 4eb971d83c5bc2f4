"""`make lock`: writes the locks of the training image's wheels (wheels.py says what they are). Installs nothing.

uv resolves pyproject.toml's group `train` against one index, for Linux on x86-64 and aarch64, and writes the SHA-256 of
every file that the index has of each version. What is locked stays as far as pyproject.toml allows: for newer versions
of what pyproject.toml does not name, remove the locks first.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from containers.base import PYTHON
from containers.engine import REPOSITORY, ContainersError, follow, output
from containers.wheels import GROUP, PIP, lock_path, pins_of, torch_build, training_requirements

UV = (sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--system-certs")
WORDS = (
    f"--group={REPOSITORY / 'pyproject.toml'}:{GROUP}", f"--python-version={PYTHON}", "--only-binary=:all:",
    "--universal", "--fork-strategy=fewest", "--generate-hashes", "--no-annotate", "--custom-compile-command=make lock",
)  # fmt: skip


def main() -> int:
    """Write the lock for the registry's torch, and that for the build of torch that pip takes here, if it is another.

    Returns 0, or 1 after one message.
    """
    try:
        for build in sorted({"", torch_build(training_requirements())}):
            _write(build)
            print(f"muster: wrote {lock_path(build).relative_to(REPOSITORY)}")
    except ContainersError as error:
        print(f"muster: {error}", file=sys.stderr)
        return 1
    return 0


def pip_setting(listed: str, name: str) -> list[str]:
    """The values of a setting of pip, from what `pip config list` prints; one of the environment takes precedence."""
    found = re.findall(rf"^(?:global|:env:)\.{name}='(.*)'$", listed, re.MULTILINE)
    return found[-1].replace("\\n", " ").split() if found else []


def _write(build: str) -> None:
    listed = output([*PIP, "config", "list"])
    words = [f"--default-index={url}" for url in pip_setting(listed, "index-url")]
    with tempfile.TemporaryDirectory() as name:
        if build:  # a folder, or a page of links, that has this build of torch
            override = Path(name) / "torch.txt"
            override.write_text(f"torch=={pins_of(training_requirements())['torch']}+{build}\n")
            words += [f"--overrides={override}", *(f"--find-links={url}" for url in pip_setting(listed, "find-links"))]
        follow([*UV, *WORDS, *words, f"--output-file={lock_path(build)}"])


if __name__ == "__main__":
    sys.exit(main())
