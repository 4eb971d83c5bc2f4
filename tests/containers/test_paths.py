"""Promise: a clone in a path with spaces works whole, whatever the working directory is.

pip and ssh-keygen are the real ones. Podman and mmdebstrap are programs that write down how they were called, so that
neither root nor an image is needed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from containers import horovod_wheel
from containers.engine import REPOSITORY
from tests.wheels import write_wheel

RECORDER = """#!/usr/bin/env python3
import hashlib, json, os, sys
words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
with open(os.environ["COMMANDS"], "a") as file:
    file.write(json.dumps(words) + "\\n")
for name, _, value in (word.partition("=") for word in words):
    if name == "--iidfile":
        with open(value, "w") as file:
            file.write("sha256:" + 64 * "a")
    if name == "--output":  # of `podman save`: an image whose manifest names no layer
        manifest = json.dumps({"config": {"digest": "sha256:" + 64 * "a", "size": 0}, "layers": []})
        digest = hashlib.sha256(manifest.encode()).hexdigest()
        with open(f"{value}/blobs/sha256/{digest}", "w") as file:
            file.write(manifest)
        with open(f"{value}/index.json", "w") as file:
            json.dump({"manifests": [{"digest": "sha256:" + digest, "size": len(manifest)}]}, file)
if {"--format={{.Size}}", "--format={{.Id}}"} & set(words):
    print(1)
elif "inspect" in words:
    sys.exit("no such image")
"""

BUILD_EVERYTHING = """
from pathlib import Path
from containers import engine, image, lab, lab_host, workload_image
quiet = lambda line: None
training = image.build_training_image(quiet)
workload = workload_image.build_on(training, engine.REPOSITORY / "my workload", quiet)
image.BLOBS.mkdir(parents=True)
(image.BLOBS / ("a" * 64)).touch()  # the config that the recorded manifest names
print(image.export_oci(workload, quiet).path)
lab_host.ensure_image(quiet)
print(lab._ensure_key(lab.INVENTORIES / "lab", lab.Created()))
"""


@pytest.mark.slow
def test_images_and_lab_of_a_clone_in_a_path_with_spaces(tmp_path: Path) -> None:
    clone, programs, index = tmp_path / "my own clone", tmp_path / "programs", tmp_path / "index"
    for folder in (programs, index, clone / "my workload"):
        folder.mkdir(parents=True)
    for name in ("containers", "train"):
        shutil.copytree(REPOSITORY / name, clone / name)
    (clone / "pyproject.toml").write_text('[dependency-groups]\ntrain = ["tiny==1"]\n')
    (clone / "my workload" / "requirements.txt").write_text("tiny\nother\n")
    for name in ("tiny", "other"):
        write_wheel(index, name)
    digest = hashlib.sha256((index / "tiny-1-py3-none-any.whl").read_bytes()).hexdigest()
    (clone / "containers" / "train" / "requirements.lock").write_text(f"tiny==1 --hash=sha256:{digest}\n")
    for name, text in (("podman", RECORDER), ("mmdebstrap", RECORDER), ("sudo", '#!/bin/sh\nshift\nexec "$@"\n')):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", BUILD_EVERYTHING], cwd="/", capture_output=True, text=True, timeout=300, check=False,
        env={
            **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(clone),
            "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "COMMANDS": str(tmp_path / "commands"),
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pool, key = done.stdout.strip().splitlines()
    assert pool == str(clone / "build" / "images" / "oci") and key.startswith("ssh-ed25519 ")
    commands = [json.loads(line) for line in (tmp_path / "commands").read_text().splitlines()]
    called = [words[1] for words in commands if words[0] == "podman" and words[1] != "image"]
    assert called == ["build", "build", "build", "save", "run", "build", "build"]
    named = [word for words in commands for word in words if "clone" in word]
    assert len(named) > 15 and all(str(clone) in word for word in named), named  # no word was split at a space
    assert [path.name for path in (clone / "build").glob("wheels-*/other*.whl")] == ["other-1-py3-none-any.whl"]


def test_horovods_compiler_is_called_right_in_a_path_with_spaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my own clone"
    folder.mkdir()
    compiler = folder / "g++"
    compiler.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(compiler))
    script = horovod_wheel._build_environment(folder, folder / "horovod-1")["CXX"]
    done = subprocess.run([script, "-Wl,-rpath,/x", "-c", "a file.cc"], capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert said[:4] == ["-c", "a file.cc", "-std=c++17", "-g0"] and len(said) == 6
    assert said[4] == f"-ffile-prefix-map={folder / 'horovod-1'}=horovod"
