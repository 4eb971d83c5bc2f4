"""Loads torch in a rank without looking for garbage in it, which takes a seventh of the time until the first step.

What torch makes when it is imported stays. Python looks through all of it again and again while more is made, and once
more whenever later imports (DDP and optimizers load torch's compiler) make more. So this turns the collector off while
`import torch` goes on, and leaves what is there by then out of all later collections (gc.freeze).

When torch is there, it has the steps of its DistributedDataParallel timed (ddp_times.py).

In the training image it is the top-level module `muster_faster_import`; a .pth file loads it in the ranks of a run, and
nowhere else. Runs before anything of the script: standard library only.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.machinery
import os
import sys
from types import ModuleType


class Finder:
    """Finds torch where Python would have found it, once, and wraps its loading."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                enabled = gc.isenabled()
                gc.disable()
                try:
                    load(module)
                    gc.freeze()
                finally:
                    if enabled:
                        gc.enable()
                with contextlib.suppress(Exception):  # whatever another torch lacks for it: the script runs
                    times = importlib.import_module("muster_ddp_times")
                    times.watch(module, os.environ["MUSTER_KEEPER"], int(os.environ["RANK"]))

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
