"""Builds images on a host (inventory: `build_on`), so that this machine needs neither root nor a container engine.

Wheels are fetched here, where pip's settings hold, and brought there with the sources, by rsync: only what is lacking.
The base comes from the host's own package mirror. The layers stay there, and other hosts take them from there
(distribution.py). What runs on the host: containers/there.py.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from containers import engine
from containers import image as images
from containers.engine import CommandFailed, ContainersError
from containers.own_base import Base, where_of
from containers.pip import Target, pip_folder
from containers.wheels import added_wheels, training_wheels, workload_wheels
from containers.workload_image import IGNORED, wheels_on
from launch.cli.refusal import refuse
from launch.deploy.distribution import HOST_SECONDS, SIGN_OF_LIFE_SECONDS
from launch.files import ROOT, write_whole
from launch.hosts import openssh, ssh
from launch.hosts.connection import LINK_ERRORS, Machine
from launch.hosts.door import Call, DoorError

FOLDER = PurePosixPath(
    "/var/lib/muster/build"
)  # what all control machines' builds share: `cache`; the rest is one's own
SOURCES = ("containers", "train", "keeper", "pyproject.toml")
SILENCE_SECONDS = 60  # of rsync, after which it has failed
OLDEST_PYTHON = (3, 11)  # that containers/ runs on: requires-python of pyproject.toml
LOOK = "import platform, sys; print(*sys.version_info[:2], platform.machine())"


@dataclass
class BuildHost:
    """A host that builds. environment: what its package manager and Podman need to fetch, such as http_proxy."""

    machine: Machine
    arch: str
    progress: Callable[[str], None]
    environment: Mapping[str, str] = field(default_factory=dict)
    _call: Call | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def _own(self) -> PurePosixPath:
        """This clone's folder there."""
        return FOLDER / hashlib.sha256(f"{ssh.local_user()} {ROOT}".encode()).hexdigest()[:12]

    def build(
        self, horovod: bool, base_image: str, workload: Path | None = None
    ) -> tuple[images.Image, images.OciExport]:
        """The training image, or that of a user's own folder, and its layers, which are on that host.

        Raises ContainersError.
        """
        self._send_sources()
        asked = {"horovod": horovod, "base_image": base_image, "horovod_wheels": "", "workload": ""}
        if workload is None:
            folders = self._wheels(horovod, base_image)
        else:
            asked["workload"] = self._send_workload(workload)
            folders = self._wheels(horovod, base_image, workload)
        self._send_wheels(folders)
        if horovod:
            asked["horovod_wheels"] = next(one.name for one in folders if one.name.startswith("horovod-"))
        said = self._ask(asked)
        image = images.Image(**said["image"])
        write_whole(images.sbom_path(image.ref), said["sbom"])
        return image, images.OciExport(Path(said["pool"]), said["index"], said["blobs"])

    def end(self) -> None:
        """End what is under way, here and there."""
        self._ended.set()
        engine.abort()
        if self._call:
            self._call.close()

    def _wheels(self, horovod: bool, base_image: str, workload: Path | None = None) -> list[Path]:
        """The folders of wheels that the build needs, fetched here."""
        if base_image:
            if horovod:
                images.refuse_horovod_on(base_image)
            said = self._ask({"look": True, "base_image": base_image})["base"]
            base = Base(said["id"], said["python"], (said["glibc"][0], said["glibc"][1]), said["packages"])
            target = Target(base.python, base.glibc, self.arch)
            first = added_wheels(base.packages, target, where_of(base_image), self.progress)
            more = wheels_on(base.packages, target, first, workload, self.progress) if workload else None
        else:
            first = training_wheels(self.progress, self.arch)
            more = workload_wheels(workload, first, self.progress, machine=self.arch) if workload else None
        compiled = images.compiled_horovod(first, self.progress, self.arch) if horovod else None
        return [folder for folder in (first, more, compiled) if folder]

    def _send_sources(self) -> None:
        own = shlex.quote(str(self._own))
        shared = shlex.quote(str(FOLDER))
        made = f"mkdir -p {shared}/cache {own}/tools {own}/arriving {own}/workloads && ln -sfn ../cache {own}/build"
        self._as_root(
            f"{made} && chown --reference={shared}/.. {shared} {own} {own}/tools {own}/arriving {own}/workloads"
        )
        self._send([str(ROOT / name) for name in SOURCES], self._own, "--delete", "--exclude=__pycache__")
        self._send([str(pip_folder())], self._own / "tools", "--delete", "--exclude=__pycache__")

    def _send_workload(self, workload: Path) -> str:
        """Bring a user's own folder there, without what never is in an image; returns where it is then."""
        if not workload.is_dir():
            fix = "give the folder of your own code: of a script with WORKLOAD, of parts for our trainer with PROJECT"
            raise ContainersError("the workload is not a folder", str(workload), fix)
        folder = workload.resolve()
        place = self._own / "workloads" / folder.name
        self._send([f"{folder}/"], place, "--delete", *(f"--exclude={name}" for name in left_out(folder)))
        return str(place)

    def _send_wheels(self, folders: Sequence[Path]) -> None:
        """Bring folders of wheels there that it lacks; each is there whole or not at all."""
        cache, arriving = FOLDER / "cache", self._own / "arriving"
        there = set(self._as_root(f"ls {shlex.quote(str(cache))}").split())
        for folder in folders:
            if folder.name in there:
                continue
            size = sum(path.stat().st_size for path in folder.iterdir())
            self.progress(f"sending {folder.name} to {self.machine.name}: {size / 2**20:.0f} MiB")
            self._send([str(folder)], arriving, "--delete")
            moved, place = shlex.quote(str(arriving / folder.name)), shlex.quote(str(cache / folder.name))
            self._as_root(f"test -d {place} && rm -r {moved} || mv -T {moved} {place}")

    def _send(self, sources: Sequence[str], into: PurePosixPath, *options: str) -> None:
        """rsync to the host, ended by `end`. The options are those that rsync 2.6.9 has."""
        shell = openssh.rsync_shell(self.machine.target, Path(self.machine.known_hosts))
        words = ["rsync", "-rlpt", f"--timeout={SILENCE_SECONDS}", "--partial", *options, "-e", shell]
        place = openssh.rsync_source(self.machine.target, f"{into}/")
        self._refuse_ended()
        try:
            with openssh.login_slot(self.machine.target):
                engine.follow([*words, *sources, place])
        except CommandFailed as failure:
            what = f"rsync could not bring what the build needs; its last lines:\n{failure.tail}"
            fix = "see that the host is up and has room in /var/lib/muster, then run the same command again"
            raise ContainersError(what, f"host {self.machine.name}", fix) from failure

    def _as_root(self, command: str) -> str:
        self._refuse_ended()
        try:
            return self.machine.answer(command)
        except (*LINK_ERRORS, RuntimeError) as error:
            raise self._lost(error) from error

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The last words of the program there. Raises ContainersError."""
        self._refuse_ended()
        own, python = shlex.quote(str(self._own)), shlex.quote(self.machine.target.python)
        command = f"cd {own} && PYTHONPATH={own}/tools exec {python} -u -B -m containers.there"
        question = f"muster:{json.dumps({**request, 'environment': dict(self.environment)})}\n".encode()
        try:
            with Call(self.machine, f"sh -c {shlex.quote(command)}", question) as call:
                self._call = call
                threading.Thread(target=self._ping, args=(call,), daemon=True).start()
                words: dict[str, Any] = {}
                for frame in call.frames(HOST_SECONDS):
                    words = frame.words
                    if "progress" in words:
                        self.progress(words["progress"])
                return words
        except DoorError as error:
            raise self._failed(error) from error
        except LINK_ERRORS as error:
            raise self._lost(error) from error
        finally:
            self._call = None

    def _ping(self, call: Call) -> None:
        with suppress(*LINK_ERRORS):  # what ends the call says why
            while call.is_open and not self._ended.wait(SIGN_OF_LIFE_SECONDS):
                call.send({"ping": True})

    def _refuse_ended(self) -> None:
        if self._ended.is_set():
            raise ContainersError("the build was ended", f"host {self.machine.name}", "run the same command again")

    def _failed(self, error: DoorError) -> ContainersError:
        """What the program there says of itself, where `the control machine` is that host."""
        where, fix = (str(error.words.get(key, "")) for key in ("where", "fix"))
        name = f"host {self.machine.name} (build_on)"
        what, where = (text.replace("the control machine", name) for text in (str(error), where))
        return ContainersError(what, where or name, fix or "see what it says, then run the same command again")

    def _lost(self, error: BaseException) -> ContainersError:
        what = f"the build on it has ended: {error or type(error).__name__}"
        fix = "see that the host is up, then run the same command again: it goes on where it stopped"
        return ContainersError(what, f"host {self.machine.name} (build_on)", fix)


def left_out(folder: Path) -> list[str]:
    """What of a user's own folder is not brought, as rsync's patterns: what never is in an image, and what the folder's
    own .containerignore or .dockerignore names; where that makes exceptions, only Podman there can say it."""
    names = [line.removeprefix("**/") for line in _lines(IGNORED)]
    own = next((folder / name for name in (".containerignore", ".dockerignore") if (folder / name).is_file()), None)
    lines = _lines(own) if own else []
    if any(line.startswith("!") for line in lines):
        return names
    return names + [line.removeprefix("**/") if line.startswith("**/") else f"/{line.lstrip('/')}" for line in lines]


def _lines(path: Path) -> list[str]:
    lines = (line.strip() for line in path.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def looked_at(machine: Machine, progress: Callable[[str], None]) -> BuildHost:
    """A host that can build. Raises Refusal where its Python is too old."""
    where, python = f"host {machine.name} (build_on)", machine.target.python
    said = machine.answer(f"{shlex.quote(python)} -c {shlex.quote(LOOK)}").split()
    version, arch = (int(said[0]), int(said[1])), said[2]
    if version < OLDEST_PYTHON:
        oldest, found = (".".join(map(str, numbers)) for numbers in (OLDEST_PYTHON, version))
        what = f"its {python} is {found}, and building images needs {oldest} or newer"
        fix = "name another host in build_on, or a newer Python of this one in ansible_python_interpreter"
        raise refuse(where, what, fix)
    return BuildHost(machine, arch, progress)
