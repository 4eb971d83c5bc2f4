"""`make horovod`: builds Horovod for .venv's torch, once, and installs it there for `--parallel horovod`.

Not for the training image: `make deploy HOROVOD=1`. Never imports torch.
"""

from __future__ import annotations

import subprocess
import sys

from containers.engine import ContainersError
from containers.horovod_wheel import horovod_wheels, wheel_of
from launch.cli import command, exits
from launch.cli.refusal import refuse

CHECK = "import horovod.torch as hvd; assert hvd.gloo_built()"


def main() -> int:
    """Run `make horovod`; returns the exit status."""
    return command.run(build)


def build() -> int:
    """Build Horovod and install it into .venv; returns the exit status. Raises Refusal when it cannot be built."""
    try:
        folder = horovod_wheels(lambda line: print(line, flush=True))
    except ContainersError as error:
        raise refuse(error.where, error.what, error.fix, exits.DEPLOY_FAILED) from None
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", f"--find-links={folder}"]
    subprocess.run([*pip, str(wheel_of(folder))], check=True)
    if subprocess.run([sys.executable, "-c", CHECK], check=False).returncode != 0:
        print("make horovod: it cannot be imported; see Python's message above", file=sys.stderr)
        return exits.FAILED
    print("horovod: installed; train with `make local ARGS='--parallel horovod'`")
    return exits.SUCCEEDED


if __name__ == "__main__":
    raise SystemExit(main())
