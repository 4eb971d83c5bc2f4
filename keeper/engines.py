"""Container engines: how each of them is asked, and what its answers mean. The one place that knows their differences.

Podman from 3.4 and Docker from 20.10. Nothing here starts a program: an engine gives the words of a command and reads
what it has printed. That is so for the door and the keeper (keeper/host.py), for the control machine, and for what
Ansible and a deploy do on a host, which find this file as ansible.module_utils.muster_engines.

An image's id is the SHA-256 of its config, the same with both engines. Docker with containerd's image store knows
images by their manifests instead, so with Docker an image has a second name, NAMED_BY_ID and its id.

Standard library alone, Python 3.8 and later.
"""

from __future__ import annotations

import abc
import json
import os
import re
from datetime import datetime
from pathlib import Path
from typing import Any, Callable, Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Tuple, Type


class Place(NamedTuple):
    """Where Muster keeps what it has on a host."""

    folder: str
    private: str  # in the host's memory: keys and secrets of runs

    @property
    def runs(self) -> str:
        return f"{self.folder}/runs"

    @property
    def lease(self) -> str:
        return f"{self.folder}/lease"


#: Root's. A user who has no root there has a place of the user's own: `place`.
ROOTS = Place("/var/lib/muster", "/run/muster")
#: Set where Muster works without root, in the user namespace of a user's Podman (launch/hosts/ssh.py): root there is
#: that user, and the users of containers are the user's subordinate ones.
ROOTLESS = "MUSTER_ROOTLESS"
#: Which engine a host's runs are started with; written by a deploy, gone with a teardown. Without it: Podman.
NOTE = f"{ROOTS.folder}/engine"

RUN_LABEL, OWNER_LABEL = "muster.run", "muster.owner"
IMAGE_PREFIX = "localhost/muster/"  # of Muster's images
NAMED_BY_ID = f"{IMAGE_PREFIX}by-id:"
#: States of a container that lives.
LIVING = ("running", "paused", "stopping", "restarting")


class Container(NamedTuple):
    """A container of a run."""

    name: str
    state: str  # one of LIVING, or "created", "exited", "removing" ...
    run: str
    owner: str
    created: Optional[float]  # unix seconds; None: the engine does not say


class Images(NamedTuple):
    """An engine's images."""

    names: Dict[str, str]  # name -> id
    ids: Dict[str, int]  # id -> how many names it has
    by_id: FrozenSet[str] = frozenset()  # ids that Muster has made a name of: the image is its own


class About(NamedTuple):
    """An engine as it answers itself."""

    version: str
    storage_driver: str
    storage: str  # the folder
    copies: int  # how often it keeps a layer
    controllers: Optional[List[str]] = None  # the cgroups by which it can limit containers; None: all


class Engine(abc.ABC):
    """What both have in common; `name` is also that of the program."""

    name: str
    program: str  # that shows that it is installed: Podman has a package for the command `docker`, without a daemon
    gpu_tool: str  # of NVIDIA's container toolkit, without which containers get no NVIDIA GPUs
    by_cdi: bool  # and those only as a CDI specification describes them
    service: str  # that has to be running; empty: none
    storage: str  # the usual folder of its images
    configuration: str  # the file that may name another one
    temporary: str  # the folder in which a layer lies while it is unpacked; empty: in that of the images
    group: str  # that its packages make, and leave; empty: none
    folders: Tuple[str, ...]  # and files, of what is left when its packages are purged
    about_words: Tuple[str, ...]
    version_words: Tuple[str, ...]
    image_words: Tuple[str, ...]

    @abc.abstractmethod
    def containers(self, label: str = RUN_LABEL) -> List[str]:
        """Asks for all containers with a label, such as muster.run or muster.run=<id>, ended ones too."""

    @abc.abstractmethod
    def read_containers(self, printed: str) -> List[Container]:
        """What the command of `containers` printed."""

    @abc.abstractmethod
    def read_images(self, printed: str) -> Images:
        """What `image_words` printed. Raises ValueError."""

    @abc.abstractmethod
    def read_about(self, printed: str) -> About:
        """What `about_words` printed. Raises ValueError, KeyError."""

    def read_version(self, printed: str) -> str:
        """What `version_words` printed; empty where there is none in it."""
        found = re.search(r"\d+\.\d+\S*", printed)
        return found.group(0) if found else ""

    @abc.abstractmethod
    def read_storage(self, configuration: str) -> str:
        """The folder of images, if the configuration names one."""

    @abc.abstractmethod
    def image(self, identity: str) -> str:
        """The name under which an image with this id is started and inspected."""

    @abc.abstractmethod
    def all_names(self, identity: str, images: Images) -> List[str]:
        """The names without which an image is gone, so that `rmi` with them removes it."""

    @abc.abstractmethod
    def find_image(self, identity: str) -> str:
        """A shell's command: prints image=yes where the image is there, and exits with 1 if the engine fails."""

    def state(self, container: str) -> List[str]:
        """Prints a container's State as JSON; both engines have Status, Running, OOMKilled, ExitCode, Error in it."""
        return [self.name, "inspect", "--type", "container", "--format", "{{json .State}}", "--", container]

    def is_absent(self, complaint: str) -> bool:
        """Whether a command failed as there is no such container or image."""
        return "no such" in complaint.lower()

    def last_line(self, container: str) -> List[str]:
        return [self.name, "logs", "--tail", "1", container]

    def kill(self, names: Sequence[str]) -> List[str]:
        return [self.name, "kill", "--", *names]

    def stop(self, names: Sequence[str], seconds: int) -> List[str]:
        """They are killed after `seconds`."""
        return [self.name, "stop", "-t", str(seconds), "--", *names]

    def remove(self, names: Sequence[str]) -> List[str]:
        """Running ones are killed."""
        return [self.name, "rm", "--force", "--", *names]

    @abc.abstractmethod
    def run_words(self, gpus: Sequence[int]) -> List[str]:
        """The options of `run` that are not the same with both: the log, and the NVIDIA GPUs, by their index."""

    @abc.abstractmethod
    def has_gpus(self, command: Sequence[str]) -> bool:
        """Whether a command that starts a container gives it NVIDIA GPUs."""


class Podman(Engine):
    name = program = "podman"
    gpu_tool = "nvidia-ctk"
    by_cdi = True
    service = ""
    storage = "/var/lib/containers/storage"
    configuration = "/etc/containers/storage.conf"
    temporary = "/var/tmp"
    group = ""
    folders = ("/var/lib/containers", "/run/containers", "/run/libpod", "/run/runc", "/run/crun")
    about_words = ("podman", "info", "--format", "json")
    version_words = ("podman", "--version")
    image_words = ("podman", "images", "--no-trunc", "--format", "json")

    def containers(self, label: str = RUN_LABEL) -> List[str]:
        return ["podman", "ps", "--all", "--filter", f"label={label}", "--format", "json"]

    def read_containers(self, printed: str) -> List[Container]:
        found = []
        for one in json.loads(printed.strip() or "[]") or []:
            labels, created = one.get("Labels") or {}, one.get("Created")
            known = float(created) if isinstance(created, (int, float)) and created > 0 else None
            words = (labels.get(RUN_LABEL, ""), labels.get(OWNER_LABEL, ""))
            found.append(Container(one["Names"][0], one["State"], *words, known))
        return found

    def read_images(self, printed: str) -> Images:
        names: Dict[str, str] = {}
        ids: Dict[str, int] = {}
        for image in json.loads(printed or "[]") or []:
            identity, own = image["Id"].split(":")[-1], image.get("Names") or []
            ids[identity] = len(own)
            names.update(dict.fromkeys(own, identity))
        return Images(names, ids)

    def read_about(self, printed: str) -> About:
        said = json.loads(printed)
        store = said["store"]
        controllers = (said["host"].get("cgroupControllers") or []) if is_rootless() else None
        return About(said["version"]["Version"], store["graphDriverName"], store["graphRoot"], 1, controllers)

    def read_storage(self, configuration: str) -> str:
        named = re.search(r'^\s*graphroot\s*=\s*"([^"]+)"', configuration, re.MULTILINE)
        return named.group(1) if named else ""

    def image(self, identity: str) -> str:
        return identity

    def all_names(self, identity: str, images: Images) -> List[str]:
        return [identity]

    def find_image(self, identity: str) -> str:
        return f"podman image exists {identity}; case $? in 0) echo image=yes;; 1) ;; *) exit 1;; esac"

    def remove(self, names: Sequence[str]) -> List[str]:
        return ["podman", "rm", "--force", "--ignore", "--", *names]

    def stop(self, names: Sequence[str], seconds: int) -> List[str]:
        return ["podman", "stop", "--ignore", "-t", str(seconds), "--", *names]

    def run_words(self, gpus: Sequence[int]) -> List[str]:
        devices = (word for gpu in gpus for word in ("--device", f"nvidia.com/gpu={gpu}"))
        return ["--log-driver", "k8s-file", "--log-opt", "max-size=1mb", *devices]

    def has_gpus(self, command: Sequence[str]) -> bool:
        return any(str(word).startswith("nvidia.com/gpu=") for word in command)


class RootlessPodman(Podman):
    """A user's own, as it is found on the host itself."""

    def __init__(self) -> None:
        home = os.path.expanduser("~")
        self.storage = f"{home}/.local/share/containers/storage"
        self.configuration = f"{home}/.config/containers/storage.conf"


class Docker(Engine):
    name = "docker"
    program = "dockerd"
    gpu_tool = "nvidia-container-runtime-hook"
    by_cdi = False
    service = "docker"
    storage = "/var/lib/docker"
    configuration = "/etc/docker/daemon.json"
    temporary = ""
    group = "docker"
    folders = (
        "/var/lib/docker",
        "/var/lib/containerd",
        "/opt/containerd",
        "/run/docker",
        "/run/containerd",
        "/etc/docker",
        "/var/log/docker.log",  # without systemd
    )
    about_words = ("docker", "info", "--format", "{{json .}}")
    version_words = ("docker", "version", "--format", "{{.Server.Version}}")
    image_words = ("docker", "images", "--no-trunc", "--format", "{{.Repository}}:{{.Tag}}\t{{.ID}}")

    def containers(self, label: str = RUN_LABEL) -> List[str]:
        columns = ["{{.Names}}", "{{.State}}", *(f'{{{{.Label "{one}"}}}}' for one in (RUN_LABEL, OWNER_LABEL))]
        columns += ["{{.CreatedAt}}"]
        return ["docker", "ps", "--all", "--no-trunc", "--filter", f"label={label}", "--format", "\t".join(columns)]

    def read_containers(self, printed: str) -> List[Container]:
        found = []
        for line in printed.splitlines():
            name, state, run, owner, created = line.split("\t")
            found.append(Container(name, state, run, owner, _unix_seconds(created)))
        return found

    def read_images(self, printed: str) -> Images:
        listed = [line.split("\t") for line in printed.splitlines()]
        known = {own: name[len(NAMED_BY_ID) :] for name, own in listed if name.startswith(NAMED_BY_ID)}
        names: Dict[str, str] = {}
        ids: Dict[str, int] = {}
        for name, own in listed:
            identity = known.get(own, own.split(":")[-1])
            ids.setdefault(identity, 0)
            if not name.startswith(NAMED_BY_ID) and not name.endswith(":<none>"):
                ids[identity] += 1
                names[name] = identity
        return Images(names, ids, frozenset(known.values()))

    def read_about(self, printed: str) -> About:
        said = json.loads(printed)
        if not said.get("ServerVersion"):
            raise ValueError("; ".join(said.get("ServerErrors") or ["its daemon does not answer"]))
        by_containerd = any("containerd.snapshotter" in " ".join(map(str, pair)) for pair in said["DriverStatus"] or [])
        copies = 2 if by_containerd else 1
        return About(said["ServerVersion"], said["Driver"], said["DockerRootDir"], copies)

    def read_storage(self, configuration: str) -> str:
        named = re.search(r'"data-root"\s*:\s*"([^"]+)"', configuration)
        return named.group(1) if named else ""

    def image(self, identity: str) -> str:
        return NAMED_BY_ID + identity

    def all_names(self, identity: str, images: Images) -> List[str]:
        return [*(name for name, own in images.names.items() if own == identity), self.image(identity)]

    def find_image(self, identity: str) -> str:
        asked = f"docker image inspect {self.image(identity)} >/dev/null 2>&1 && echo image=yes"
        return f"docker version >/dev/null || exit 1; {asked}"

    def run_words(self, gpus: Sequence[int]) -> List[str]:
        # One word of CSV: the quotation marks keep the list of devices together.
        devices = ("--gpus", f'"device={",".join(map(str, gpus))}"') if gpus else ()
        # Where the daemon gives containers users of their own, files of a run would not be the ranks'.
        return ["--userns", "host", "--log-driver", "json-file", "--log-opt", "max-size=1m", *devices]

    def has_gpus(self, command: Sequence[str]) -> bool:
        return "--gpus" in command


def _unix_seconds(text: str) -> Optional[float]:
    """Docker's times: 2026-11-28 03:12:10 +0000 UTC."""
    try:
        return datetime.strptime(" ".join(text.split()[:3]), "%Y-%m-%d %H:%M:%S %z").timestamp()
    except ValueError:
        return None


ENGINES: Dict[str, Type[Engine]] = {"podman": Podman, "docker": Docker}


def engine(name: Any) -> Engine:
    """The engine of this name; Podman for any other word."""
    return ENGINES.get(str(name), Podman)()


def on_host(command: Callable[[Engine], str]) -> str:
    """A shell's command for the engine of the host on which it runs. Pure."""
    others = "".join(f"{name}) {command(kind())};; " for name, kind in ENGINES.items() if kind is not Podman)
    return f'case "${{{ROOTLESS}:-$(cat {NOTE} 2>/dev/null)}}" in {others}*) {command(Podman())};; esac'


def noted(root: str = "") -> Engine:
    """The engine of this host."""
    if is_rootless():
        return RootlessPodman()
    try:
        return engine(Path(root + NOTE).read_text(encoding="utf-8").strip())
    except OSError:
        return Podman()


def is_rootless() -> bool:
    """Whether this process works without root, for a user's own Podman."""
    return ROOTLESS in os.environ


def place() -> Place:
    """Where Muster keeps what it has on this host."""
    if not is_rootless():
        return ROOTS
    folder = os.path.realpath(os.path.expanduser("~/.local/share/muster"))  # may be a link to a larger disk
    return Place(folder, f"{os.environ['XDG_RUNTIME_DIR']}/muster")
