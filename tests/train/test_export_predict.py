"""Promises: exported weights are plain torchvision weights; predict sees what evaluation saw, on the devices named."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from train.model import torchvision_cpu

torchvision_cpu.watch()

import torchvision  # noqa: E402

from train import datasets  # noqa: E402
from train.checkpoints import files  # noqa: E402
from train.checkpoints.files import CheckpointError  # noqa: E402
from train.datasets.base import Dataset  # noqa: E402
from train.datasets.loader import Loader  # noqa: E402
from train.datasets.transform import Normaliser  # noqa: E402
from train.inference import classify, export, predict, recipe, weights  # noqa: E402
from train.settings import EXIT_REFUSED, Settings  # noqa: E402
from train.start import devices  # noqa: E402
from train.start.group import Place  # noqa: E402

pytestmark = pytest.mark.slow  # nearly every test reads or writes a model

MODEL, NAMES = "shufflenet_v2_x0_5", ["cat", "dog", "deer"]
DATA = {"name": "fake", "class_names": NAMES, "mean": [0.5] * 3, "std": [0.25] * 3, "preparation": "resized"}
CONFIG = {"model": MODEL, "dataset": "fake", "image_size": 32, "data": DATA}


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    made: nn.Module = torchvision.models.get_model(MODEL, weights=None, num_classes=len(NAMES))
    return made.eval()


def state(seed: int = 0, **more: Any) -> dict[str, Any]:
    return {"model": network(seed).state_dict(), "config": CONFIG, "position": {"step": 5}, **more}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with one checkpoint."""
    files.write(tmp_path / "run" / "checkpoints", 5, state())
    return tmp_path / "run"


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(tensor.equal(other[name]) for name, tensor in one.items())


def test_exported_files_are_plain_torchvision_weights(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export.main([str(run / "checkpoints" / "step-5.pt")]) == 0
    pt, safe, beside = (Path(text) for text in capsys.readouterr().out.split())
    assert pt == run / "export" / f"{MODEL}.pt"
    plain = torch.load(pt, weights_only=True)
    network(1).load_state_dict(plain)  # strict
    assert equal(plain, network(0).state_dict())
    from safetensors import safe_open
    from safetensors.torch import load_file

    assert equal(load_file(safe), plain)
    with safe_open(safe, framework="pt") as file:
        known = file.metadata()
    assert (known["model"], json.loads(known["class_names"]), json.loads(known["mean"])) == (MODEL, NAMES, [0.5] * 3)
    assert (json.loads(known["std"]), known["image_size"]) == ([0.25] * 3, "32")
    assert json.loads(beside.read_text())["class_names"] == NAMES


def test_export_takes_averaged_weights_and_statistics(tmp_path: Path) -> None:
    """Of the network itself are only the counts of batches."""
    ema = {name: tensor for name, tensor in network(2).state_dict().items() if tensor.is_floating_point()}
    ema = {name: tensor + 1 if "running" in name else tensor for name, tensor in ema.items()}
    files.write(tmp_path, 5, state(ema=ema))
    found = weights.read(tmp_path / "step-5.pt", ema=True).weights
    assert equal(found, network(0).state_dict() | ema)
    assert any("running" in name for name in ema)


def test_export_takes_older_checkpoints_averaged_weights_and_the_networks_own_buffers(tmp_path: Path) -> None:
    ema = {name: parameter.detach().double() for name, parameter in network(2).named_parameters()}
    files.write(tmp_path, 5, state(ema=ema))
    trained = weights.read(tmp_path / "step-5.pt", ema=True)
    own, averaged = network(0).state_dict(), network(2)
    parameters = dict(averaged.named_parameters())
    for name, tensor in trained.weights.items():
        assert tensor.dtype == own[name].dtype and tensor.equal(parameters[name] if name in parameters else own[name])


def test_without_averaged_weights_ema_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export.main([str(run), "--ema"]) == EXIT_REFUSED
    assert "was trained without --ema" in capsys.readouterr().err


def test_older_checkpoints_and_wrapped_names_are_read(tmp_path: Path) -> None:
    old = {f"module.{name}": tensor for name, tensor in network(3).state_dict().items()}
    files.write(tmp_path, 5, {"weights": old, "config": CONFIG, "position": {"step": 5}})
    assert equal(weights.read(tmp_path).weights, network(3).state_dict())


def test_of_a_run_the_newest_intact_checkpoint_is_taken(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = files.write(run / "checkpoints", 9, state(seed=4))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert export.main([str(run), "--out", str(run / "plain.v1")]) == 0
    captured = capsys.readouterr()
    assert "step-9.pt was altered" in captured.err and "passed over" in captured.err
    assert captured.out.split()[0] == str(run / "plain.v1.pt")
    assert equal(torch.load(run / "plain.v1.pt", weights_only=True), network(0).state_dict())


class Payload:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("content", ["pickle", "text"])
def test_a_file_that_could_run_code_is_refused_and_does_not_run(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("evil.pt").write_bytes(pickle.dumps(Payload()) if content == "pickle" else b"not weights")
    assert export.main(["evil.pt"]) == EXIT_REFUSED
    assert "refused" in capsys.readouterr().err and not Path("ran").exists() and not Path("export").exists()


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no"):
        weights.read(tmp_path / "absent.pt")
    with pytest.raises(CheckpointError, match="holds no intact checkpoint"):
        weights.read(tmp_path)
    bare = {key: value for key, value in CONFIG.items() if key != "data"}
    files.write(tmp_path, 5, state() | {"config": bare})
    with pytest.raises(CheckpointError, match="does not say: mean, std"):
        weights.read(tmp_path)


# -- preparing images ------------------------------------------------------------------------------------------------


def held_out(dataset: Dataset, settings: Settings, count: int) -> Tensor:
    with Loader(dataset, settings, torch.device("cpu"), Place()) as loader:
        (images, _), *_ = loader.held_out([np.arange(count, dtype=np.int64)])
    return images


def prepared(dataset: Dataset, settings: Settings, paths: list[Path]) -> Tensor:
    data = recipe.data_config(dataset, settings)
    known = recipe.of_config({"model": MODEL, "channels_last": settings.channels_last, "data": data}, 0, None)
    prepare = classify.Preparation(known, torch.device("cpu"))
    return torch.cat([prepare(path) for path in paths])


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("name", "size"), [("digits", 0), ("digits", 48), ("fake", 0), ("fake", 48), ("fake", 20)])
def test_images_are_prepared_bit_by_bit_as_evaluation_does(
    name: str, size: int, channels_last: bool, tmp_path: Path
) -> None:
    settings = Settings(dataset=name, image_size=size, channels_last=channels_last)
    dataset = datasets.load(settings, Place())
    images, paths = dataset.test.images[:4].transpose(0, 2, 3, 1), []  # type: ignore[attr-defined]
    for number, pixels in enumerate(images):
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(pixels.squeeze()).save(paths[-1])
    assert prepared(dataset, settings, paths).equal(held_out(dataset, settings, 4))


def test_image_files_are_prepared_bit_by_bit_as_evaluation_does(tmp_path: Path) -> None:
    paths = []
    for number, size in enumerate([(50, 70), (400, 300), (24, 24)]):
        for part in ("train", "val"):
            paths.append(tmp_path / part / "cat" / f"{number}.{'jpg' if number == 1 else 'png'}")
            paths[-1].parent.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(number).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
            Image.fromarray(pixels).save(paths[-1])
    settings = Settings(dataset="imagefolder", data_dir=tmp_path, image_size=24, workers=0)
    dataset = datasets.load(settings, Place())
    assert prepared(dataset, settings, paths[1::2]).equal(held_out(dataset, settings, 3))


def test_what_a_device_needs_to_prepare_images_is_made_once(
    run: Path, images: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, init = [], Normaliser.__init__

    def counting(self: Normaliser, *arguments: Any) -> None:
        made.append(arguments)
        init(self, *arguments)

    monkeypatch.setattr(Normaliser, "__init__", counting)
    _, lines, _ = predictions(capsys, "--checkpoint", run, "--devices", "cpu,cpu", images, "--batch-size", 2)
    assert len(lines) == 7 and len(made) == 2


@pytest.mark.parametrize("preparation", recipe.PREPARATIONS)
def test_images_of_16_bits_are_prepared_as_those_of_8(preparation: str, tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 255, (40, 40), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "8.png")
    Image.fromarray(pixels.astype(np.uint16) << 8).save(tmp_path / "16.png")
    known = recipe.of_config({"model": MODEL, "data": DATA | {"image_size": 32, "preparation": preparation}}, 3, None)
    prepare = classify.Preparation(known, torch.device("cpu"))
    assert prepare(tmp_path / "16.png").equal(prepare(tmp_path / "8.png"))


# -- predict ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of 7 images, in a folder of their own 2 of them, and a text file."""
    folder = tmp_path / "images"
    (folder / "more").mkdir(parents=True)
    for number in range(7):
        pixels = np.random.default_rng(number).integers(0, 255, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save((folder / "more" if number > 4 else folder) / f"{number}.png")
    (folder / "notes.txt").write_text("not an image")
    return folder


def predictions(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str], str]:
    status = predict.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out.splitlines(), captured.err


def test_each_image_is_classified_in_order_and_what_is_none_is_named(
    run: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = images / "absent.png"
    status, lines, said = predictions(capsys, "--checkpoint", run, "--device", "cpu", absent, images, "--batch-size", 2)
    assert status == predict.EXIT_SKIPPED
    assert (
        f"{images / 'notes.txt'}: not an image in a format that Pillow knows; skipped" in said
        and f"{absent}: there is no such file; skipped" in said
    )
    assert [Path(line.split("\t")[0]).stem for line in lines] == [str(number) for number in range(7)]
    model = network(0)
    for number, line in enumerate(lines):
        pixels = np.random.default_rng(number).integers(0, 255, (32, 32, 3), dtype=np.uint8)
        inputs = (torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255 - 0.5) / 0.25
        with torch.no_grad():
            probabilities = model(inputs).softmax(1)[0]
        _, name, shown = line.split("\t")
        assert name == NAMES[int(probabilities.argmax())]
        assert float(shown) == pytest.approx(float(probabilities.max()), abs=1e-3)


def test_json_and_the_likeliest_classes(run: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--checkpoint", run, "--device", "cpu", images / "0.png", "--top", 2)
    status, lines, _ = predictions(capsys, *arguments, "--json")
    (answer,) = (json.loads(line) for line in lines)
    assert status == 0 and answer["path"] == str(images / "0.png") and len(answer["top"]) == 2
    assert answer["class"] == answer["top"][0]["class"] == NAMES[answer["index"]]
    assert 1 >= answer["top"][0]["probability"] >= answer["top"][1]["probability"] > 0
    (line,) = predictions(capsys, *arguments)[1]
    assert line.split("\t")[1::2] == [each["class"] for each in answer["top"]]


def test_several_devices_answer_as_one_and_in_order(
    run: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = predictions(capsys, "--checkpoint", run, "--device", "cpu", images, "--batch-size", 1)
    two = predictions(capsys, "--checkpoint", run, "--devices", "cpu,cpu", images, "--batch-size", 1)
    assert one[:2] == two[:2] and len(one[1]) == 7


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_exported_files_predict_the_same(
    run: Path, images: Path, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    export.main([str(run), "--out", str(run / "plain")])
    capsys.readouterr()
    exported = predictions(capsys, "--checkpoint", run / f"plain{ending}", images / "0.png", "--device", "cpu")
    assert exported[:2] == predictions(capsys, "--checkpoint", run, images / "0.png", "--device", "cpu")[:2]


def test_a_pt_without_its_metadata_is_refused(run: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(network(0).state_dict(), run / "bare.pt")
    status, _, said = predictions(capsys, "--checkpoint", run / "bare.pt", images / "0.png")
    assert status == EXIT_REFUSED and "bare.json" in said and "export it anew" in said


def test_a_device_that_does_not_exist_gets_one_clear_line(
    run: Path, images: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "gpus_here", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    status, lines, said = predictions(capsys, "--checkpoint", run, "--device", "cuda:3", images)
    assert (status, lines) == (EXIT_REFUSED, [])
    assert said == (
        "predict: --device cuda:3: there is no such device. There is cuda:0 (GPU 3 of this machine, "
        "CUDA_VISIBLE_DEVICES=3), and cpu. CUDA_VISIBLE_DEVICES numbers the GPUs that it leaves visible from 0.\n"
    )


# -- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "hidden", "shown"),
    [
        ("cuda:0", "3", "cuda:0 (GPU 3 of this machine, CUDA_VISIBLE_DEVICES=3)"),
        ("cuda:1", "3, 1", "cuda:1 (GPU 1 of this machine, CUDA_VISIBLE_DEVICES=3, 1)"),
        ("cuda:0", "GPU-8a56", "cuda:0 (GPU-8a56, CUDA_VISIBLE_DEVICES=GPU-8a56)"),
        ("cuda:0", None, "cuda:0"),
        ("cpu", "3", "cpu"),
    ],
)
def test_renumbered_gpus_are_explained(device: str, hidden: str | None, shown: str) -> None:
    environment = {} if hidden is None else {"CUDA_VISIBLE_DEVICES": hidden}
    assert devices.describe(torch.device(device), environment) == shown


def test_devices_are_read_as_people_type_them() -> None:
    read = devices.parse(["cuda", "1", "cuda:2", "CPU"], 3, "--devices", {})
    assert [str(device) for device in read] == ["cuda:0", "cuda:1", "cuda:2", "cpu"]


@pytest.mark.parametrize(
    ("words", "gpus", "said"),
    [
        (["cuda:0"], 0, "Here is no GPU to use"),
        (["2", "7"], 2, "--devices 2, 7: there is no such device. There are cuda:0, cuda:1, and cpu."),
        (["mps"], 1, "--devices mps: there is no such device"),
        ([""], 1, "there is no such device"),
        (["0", "cuda"], 1, "cuda:0 is named twice"),
    ],
)
def test_wrong_devices_are_refused_together(words: list[str], gpus: int, said: str) -> None:
    with pytest.raises(devices.DeviceError, match=said):
        devices.parse(words, gpus, "--devices", {})
