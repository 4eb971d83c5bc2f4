"""Makes `import torchvision` work with a CPU-only torch, for every script of this Python.

torchvision from the Python registry is built for CUDA torch. With a CPU-only torch its compiled library
does not load and importing it stops with "operator torchvision::nms does not exist", although models,
datasets and transforms need none of that library. What is missing is two operator schemas; this declares them
just before torchvision asks for them. `torchvision.ops.nms` and similar operators still cannot run, and raise
torchvision's own error when called.

    python -m train.model.torchvision_cpu --install     copies this file and a .pth that loads it into site-packages

Does nothing where torchvision's own operators load or torch has CUDA. Runs at the start of every interpreter:
standard library only, nothing imported at the top but sys.
"""

from __future__ import annotations

import sys

MISSING = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
# By then torchvision has imported torch and tried to load its library, but not yet asked for the operators.
MOMENT = "torchvision._meta_registrations"
INSTALLED_AS = "muster_torchvision_cpu"
PTH = f"import {INSTALLED_AS}; {INSTALLED_AS}.watch()\n"


class Watcher:
    """A finder that finds nothing: it sees torchvision's import come by, once."""

    muster_torchvision_cpu = True

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == MOMENT:
            sys.meta_path.remove(self)
            declare_missing_operators()


def watch() -> None:
    """Declares what is missing once torchvision is imported; imports nothing now. May be called again."""
    if not any(getattr(finder, "muster_torchvision_cpu", False) for finder in sys.meta_path):
        sys.meta_path.insert(0, Watcher())


def declare_missing_operators() -> None:
    """To be called while torchvision is being imported, after its own attempt to load its operators."""
    import torch

    extension = sys.modules.get("torchvision.extension")
    if extension is None or extension._has_ops() or torch.version.cuda or getattr(torch.version, "hip", None):
        return
    for name, schema in MISSING.items():
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", schema)


def install(folder: str | None = None) -> list[str]:
    """Writes module and .pth into `folder` (default: this Python's site-packages). Returns what it wrote."""
    import sysconfig
    from pathlib import Path

    from train.whole_files import write_file

    target = Path(folder or sysconfig.get_path("purelib"))
    wanted = {f"{INSTALLED_AS}.py": Path(__file__).read_text(encoding="utf-8"), f"{INSTALLED_AS}.pth": PTH}
    changed = []
    for name, text in wanted.items():  # the .pth last: it needs the module
        path = target / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            write_file(path, text.encode())
            changed.append(str(path))
    return changed


def main(arguments: list[str]) -> int:
    if arguments != ["--install"] and not (len(arguments) == 2 and arguments[0] == "--install"):
        print("usage: python -m train.model.torchvision_cpu --install [FOLDER]", file=sys.stderr)
        return 2
    try:
        changed = install(*arguments[1:])
    except OSError as error:
        print(
            f"cannot install the torchvision shim: {error}; run it as the owner of that folder",
            file=sys.stderr,
        )
        return 1
    done = "`import torchvision` now works beside a CPU-only torch, too (a hook, without effect beside a CUDA torch): "
    print(done + ", ".join(changed) if changed else "the torchvision shim is in place already")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
