"""Promises: a host that cannot build is refused, what never is in an image is not brought to it, and a build on it ends
with the command that wanted it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from containers.pip import HERE
from launch.cli.refusal import Refusal
from launch.deploy import build_host, detect
from launch.files import ROOT
from launch.hosts.connection import Machine
from tests.processes import GUARD_SECONDS


def machine(answer: str) -> Machine:
    target = SimpleNamespace(python="/usr/bin/python3")
    return cast(Machine, SimpleNamespace(name="h1", target=target, answer=lambda command: answer))


def test_a_host_builds_whose_python_is_new_enough() -> None:
    assert build_host.looked_at(machine("3 11 aarch64\n"), print).arch == "aarch64"
    with pytest.raises(Refusal, match=r"host h1 \(build_on\): its /usr/bin/python3 is 3\.10, .* needs 3\.11 or newer"):
        build_host.looked_at(machine("3 10 x86_64\n"), print)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=" + ".".join(map(str, build_host.OLDEST_PYTHON))


def test_hosts_of_another_architecture_than_the_machine_that_builds_are_refused() -> None:
    facts = {"a": {"arch": HERE}, "b": {"arch": "sparc64"}}

    def check(build_on: str) -> None:
        detect.check_architecture(cast(Any, SimpleNamespace(build_on=build_on)), facts)

    with pytest.raises(
        Refusal, match=f"this machine: it builds images for {HERE}, and b is sparc64\n.*build_on: <host>"
    ):
        check("")
    with pytest.raises(Refusal, match=f"host b: it builds images for sparc64, and a is {HERE}"):
        check("b")
    del facts["a"]
    check("b")


@pytest.mark.parametrize(
    ("ignored", "brought"),
    [
        ("", {"main.py", "data/big", "deep/data", "deep/notes.md"}),
        ("# large\n/data\n**/*.md\n", {"main.py", "deep/data"}),
        ("*\n!main.py\n", {"main.py", "data/big", "deep/data", "deep/notes.md"}),  # Podman alone can say it
    ],
)
def test_what_never_is_in_an_image_is_not_brought(tmp_path: Path, ignored: str, brought: set[str]) -> None:
    folder, there = tmp_path / "own", tmp_path / "there"
    for name in ("main.py", "data/big", "deep/data", "deep/notes.md", "__pycache__/main.pyc", "deep/.git/HEAD"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    (folder / ".dockerignore").write_text(ignored)
    words = [f"--exclude={name}" for name in build_host.left_out(folder)]
    subprocess.run(["rsync", "-rlpt", *words, f"{folder}/", f"{there}/"], check=True)
    found = {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()}
    assert found - {".dockerignore"} == brought


#: The program there, with a build that prints the id of a process and waits for its end.
THERE = """
from containers import engine, there
there._work = lambda request: engine.follow(["sh", "-c", "echo $$; exec sleep 600"], there._progress)
there.main()
"""


@pytest.mark.slow
def test_a_build_ends_when_nobody_listens_any_more() -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", THERE], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert program.stdin and program.stdout
    with program:
        print("a password of sudo's", 'muster:{"environment": {}}', sep="\n", file=program.stdin, flush=True)
        pid = int(json.loads(program.stdout.readline().removeprefix("muster:"))["progress"])
        program.stdin.close()
        program.wait(30)
    deadline = time.monotonic() + GUARD_SECONDS
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.1)
        pytest.fail("the build goes on")
