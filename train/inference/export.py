"""python -m train export CHECKPOINT: the weights alone, for other programs.

Writes NAME.pt, a plain state_dict of the torchvision model; NAME.safetensors, the same weights with what is known of
them as metadata; NAME.json, that metadata for the .pt. What is known: model, class names, mean, std, image size and how
images are prepared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from train.names import is_own
from train.settings import EXIT_REFUSED

if TYPE_CHECKING:  # it imports torch
    from train.inference.weights import Trained


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m train export",
        description="Writes the weights of a checkpoint as a plain torchvision state_dict (.pt) and as .safetensors.",
        epilog="Exit status: 0 written; 2 refused, nothing was written.",
    )
    p.add_argument("checkpoint", type=Path, help="step-<n>.pt, or a run's folder: its newest intact checkpoint")
    p.add_argument("--out", type=Path, help="name of the files, without ending (default: MODEL in the run's export/)")
    p.add_argument("--ema", action="store_true", help="the averaged weights, of a run with --ema")
    p.add_argument("--project", type=Path, metavar="DIR", help="folder of the module of a model of your own")
    return p


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)

    from train.model import torchvision_cpu

    torchvision_cpu.watch()
    from train import own_parts
    from train.checkpoints.files import CheckpointError
    from train.inference import weights

    own_parts.use(options.project)
    try:
        trained = weights.read(options.checkpoint, options.ema, say)
        weights.network_of(trained)  # refuses weights that do not fit
        stem = options.out or default_stem(trained)
        written = write(trained, stem)
    except CheckpointError as error:
        say(str(error))
        return EXIT_REFUSED
    except OSError as error:
        say(f"cannot write {error.filename or options.out}: {error.strerror or error}; choose another place with --out")
        return EXIT_REFUSED
    for path in written:
        print(path)
    say(f"to use it: {usage(trained, written[0])}")
    return 0


def say(text: str) -> None:
    print(f"export: {text}", file=sys.stderr, flush=True)


def default_stem(trained: Trained) -> Path:
    """<run>/export/<model> for <run>/checkpoints/step-<n>.pt; beside any other file. A model of the user's own is
    called as its function."""
    home = trained.path.parent
    return (home.parent if home.name == "checkpoints" else home) / "export" / trained.recipe.model.rpartition(":")[2]


def with_ending(stem: Path, ending: str) -> Path:
    """A stem may hold dots: resnet18-0.97."""
    return stem.with_name(stem.name + ending)


def write(trained: Trained, stem: Path) -> list[Path]:
    """Each file whole or not at all. Returns their paths, the .pt first. Raises OSError."""
    import torch
    from safetensors.torch import save

    from train.whole_files import Draft, write_file, write_json

    if stem.suffix in (".pt", ".safetensors"):
        stem = stem.with_suffix("")
    # Copies: safetensors takes neither views nor tensors that share memory.
    tensors = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in trained.weights.items()
    }
    pt, safe, beside = (with_ending(stem, ending) for ending in (".pt", ".safetensors", ".json"))
    pt.parent.mkdir(parents=True, exist_ok=True)
    with Draft(pt) as draft:
        torch.save(tensors, cast(IO[bytes], draft))  # torch needs write() and flush()
        draft.commit()
    write_file(safe, save(tensors, {"format": "pt", **trained.recipe.as_text()}))
    write_json(beside, trained.recipe.as_json())
    return [pt, safe, beside]


def usage(trained: Trained, path: Path) -> str:
    recipe = trained.recipe
    if is_own(recipe.model):
        module, _, function = recipe.model.partition(":")
        made = f"{function}({len(recipe.class_names)})"
        return f'from {module} import {function}; {made}.load_state_dict(torch.load("{path}"))'
    more = ", aux_logits=False, init_weights=False" if recipe.model in ("googlenet", "inception_v3") else ""
    if recipe.model.startswith("vit_"):
        more = f", image_size={recipe.image_size}"
    made = f'torchvision.models.get_model("{recipe.model}", num_classes={len(recipe.class_names)}{more})'
    return f'{made}.load_state_dict(torch.load("{path}"))'


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
