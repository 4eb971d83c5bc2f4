"""`make horovod`: builds Horovod for .venv's torch, once, and installs it there for `--parallel horovod`.

Not for the training image: `make deploy HOROVOD=1`. Never imports torch.
"""

from __future__ import annotations

import os
import subprocess
import sys

from containers.engine import ContainersError
from containers.horovod_wheel import horovod_wheels, wheel_of
from launch.cli import exits
from launch.cli.make_variables import refuse_unknown_variables
from launch.cli.refusal import Refusal

CHECK = "import horovod.torch as hvd; assert hvd.gloo_built()"


def main() -> int:
    try:
        refuse_unknown_variables(os.environ.get("MAKEFLAGS", ""))
        folder = horovod_wheels(lambda line: print(line, flush=True))
    except (ContainersError, Refusal) as error:
        print(f"make horovod: {error}", file=sys.stderr)
        return exits.REFUSED if isinstance(error, Refusal) else exits.DEPLOY_FAILED
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", f"--find-links={folder}"]
    subprocess.run([*pip, str(wheel_of(folder))], check=True)
    if subprocess.run([sys.executable, "-c", CHECK], check=False).returncode != 0:
        print("make horovod: it does not load; Python's own words stand above", file=sys.stderr)
        return exits.FAILED
    print("horovod: installed; train with `make local ARGS='--parallel horovod'`")
    return exits.SUCCEEDED


if __name__ == "__main__":
    raise SystemExit(main())
