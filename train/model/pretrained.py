"""--weights: torchvision's pretrained weights of a built-in model: their names, and where their file is."""

import hashlib
import re
from difflib import get_close_matches
from pathlib import Path

import torch
import torchvision

from train.settings import SettingsError

HASH = re.compile(r"-([0-9a-f]{8,})\.")  # of its content, in the name of each file of torchvision


def url_of(model: str, name: str) -> str:
    """Where torchvision has the weights of this name. Raises SettingsError, with near names."""
    known = torchvision.models.get_model_weights(model).__members__
    if name not in known:
        close = get_close_matches(name.upper(), known) or list(known)
        said = f"; {model} has {' and '.join(close)}" if close else f"; torchvision has none for {model}"
        raise SettingsError(f"--weights {name}: torchvision has no such weights{said}")
    return str(known[name].url)


def places(url: str, folder: Path) -> list[Path]:
    """Where the file may be: in `folder`, where --download puts it, or in torch.hub's cache."""
    file = url.rpartition("/")[2]
    return [folder / file, Path(torch.hub.get_dir()) / "checkpoints" / file]


def find(model: str, name: str, folder: Path) -> Path:
    """The file of the weights, its content compared with the hash in its name. Raises SettingsError."""
    url = url_of(model, name)
    paths = places(url, folder)
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise SettingsError(
            f"--weights {name}: there is no {paths[0]} (nor {paths[1]}). Run once with --download, or fetch {url} and "
            "put the file there on every host"
        )
    expected = HASH.search(path.name)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if expected and not found.startswith(expected[1]):
        raise SettingsError(f"--weights {name}: {path} is torn or another file (its SHA-256 is {found}): remove it")
    return path


def fetch(model: str, name: str, folder: Path) -> None:
    """Fetches the file where it is missing. Raises SettingsError."""
    url = url_of(model, name)
    if any(path.is_file() for path in places(url, folder)):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.hub.load_state_dict_from_url(url, str(folder), "cpu", progress=False, check_hash=True, weights_only=True)
    except Exception as error:  # what urllib raises, torch's own for a wrong hash, the system's
        raise SettingsError(
            f"--weights {name}: {url} cannot be fetched to {folder} ({type(error).__name__}: {error}). Check this "
            "host's way to the internet and the free disk, or put the file there on every host"
        ) from error
