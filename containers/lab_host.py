"""One host of a lab: its image, its container, and what it gets from outside each time it starts.

Not for what belongs to a lab as a whole (networks, key, inventory): see lab.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from containers import lab_plan, ubuntu
from containers.base import RECIPE_LABEL, apt_proxies, apt_settings, ensure_base
from containers.engine import (
    BUILD,
    COMMAND_SECONDS,
    CommandFailed,
    ContainersError,
    Progress,
    build_image,
    image_label,
    output,
    podman,
    root_command,
    tool,
)
from containers.files import locked

LABEL = "muster.lab"  # of everything in Podman that belongs to a lab; its value is the lab's name
HOST_LABEL = f"{LABEL}.host"
SYSTEM_LABEL = f"{LABEL}.system"
IMAGE = "localhost/muster/lab-host"
ROOM = Path(__file__).parent / "lab"
VOLUMES = {  # kind -> where a host has it
    "storage": "/var/lib/containers",
    "docker": "/var/lib/docker",
    "muster": "/var/lib/muster",
}
SSH_SECONDS = 30.0  # until sshd must answer
APT_SETTINGS = re.compile(r"^Acquire::(?:https?::(?:\S+::)?Proxy|Check-Valid-Until|Check-Date)\b.*$", re.MULTILINE)


@dataclass(frozen=True)
class Host:
    """One host of a lab."""

    lab: str
    index: int  # its place in the lab, from 0
    management: str  # address
    data: str  # address
    cores: str  # as Podman writes them, such as 0,1
    system: str = lab_plan.SYSTEMS[0]

    @property
    def name(self) -> str:
        return f"h{self.index + 1}"

    @property
    def container(self) -> str:
        return f"muster-{self.lab}-{self.name}"

    @property
    def volumes(self) -> dict[str, str]:
        """Name of each volume -> where the host has it."""
        return {f"{self.container}-{kind}": target for kind, target in VOLUMES.items()}

    @property
    def nics(self) -> lab_plan.Nics:
        return lab_plan.nics(self.index)

    def mac(self, network: int) -> str:
        """Hardware address on a network (0: management, 1: data). It stays the same when the host restarts, so that the
        neighbour tables of other hosts stay right."""
        return lab_plan.mac(f"{self.lab}/{self.name}/{network}")


def ensure_image(progress: Progress, system: str = lab_plan.SYSTEMS[0]) -> str:
    """Build the image of lab hosts with a system unless there is one of this recipe; return its reference.

    Raises ContainersError if this user is not root, a tool is missing, or the build failed.
    """
    release = ubuntu.RELEASES.get(system)
    base = ubuntu.ensure_base(release, progress) if release else ensure_base(progress)
    image = f"{IMAGE}:{system if release else 'latest'}"
    parts = [image_label(base, RECIPE_LABEL) or "", *(path.read_text() for path in sorted(ROOM.iterdir()))]
    recipe = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    with locked(BUILD / "images" / "lab.lock"):
        if image_label(image, RECIPE_LABEL) == recipe:
            return image
        progress(f"image of lab hosts: adding sshd and sudo to {base} (only once; about 15 s)")
        build_image(
            image, ROOM / "Containerfile", ROOM,
            "--network=host", f"--build-arg=BASE={base}", f"--label={RECIPE_LABEL}={recipe}",
            where="the control machine, containers/lab/Containerfile (`apt-get update` has to work here)",
            env=apt_proxies(),  # Podman passes them on to the build
        )  # fmt: skip
    return image


def create(host: Host, image: str, disk: Path | None = None, fill: Callable[[Host], None] = lambda host: None) -> None:
    """Make a host's volumes, in a folder `disk` if given, and start its container.

    fill: puts content into the new volumes before the host starts.

    Raises CommandFailed.
    """
    for volume in host.volumes:
        options = []
        if disk:
            (disk / volume).mkdir()
            options = ["--opt=type=none", "--opt=o=bind", f"--opt=device={disk / volume}"]
        podman("volume", "create", f"--label={LABEL}={host.lab}", *options, volume)
    fill(host)
    temporary = []
    if disk:  # where an engine lays down the layers that it unpacks: more than all that it keeps
        folder = disk / f"{host.container}-temporary"
        folder.mkdir()
        folder.chmod(0o1777)
        temporary = [f"--volume={folder}:/var/tmp"]
    half_of_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # bytes
    podman(
        "run", "--detach", f"--name={host.container}", f"--hostname={host.name}", f"--label={LABEL}={host.lab}",
        f"--label={HOST_LABEL}={host.name}", f"--label={SYSTEM_LABEL}={host.system}",
        "--privileged", "--no-hosts", "--pids-limit=0",
        "--tmpfs=/run:rw,exec,nosuid,nodev,mode=755",  # as on any host: empty after a restart
        f"--shm-size={half_of_memory}", f"--cpuset-cpus={host.cores}",
        *(f"--volume={volume}:{target}" for volume, target in host.volumes.items()), *temporary,
        f"--network=muster-{host.lab}-management:ip={host.management},mac={host.mac(0)},interface_name={host.nics.management}",
        f"--network=muster-{host.lab}-data:ip={host.data},mac={host.mac(1)},interface_name={host.nics.data}",
        image,
    )  # fmt: skip


def furnish(host: Host, key: str, rate: int | None, cpus: float | None) -> None:
    """Give a running host what a restart takes away (decoys, link rate, cores and computing time), and what may have
    changed on this machine (the lab's key, apt's settings). It is done from outside: a bare host has neither ip nor tc.

    key: the public key that may log in. rate: of the data NIC, in bits per second; None: not limited. cpus: computing
    time, in cores; None: all that the host's cores give.

    Raises CommandFailed if one of the commands failed.
    """
    pid = podman("inspect", "--format={{.State.Pid}}", host.container).strip()
    quota = lab_plan.quota_options(cpus, len(os.sched_getaffinity(0)))
    podman("update", f"--cpuset-cpus={host.cores}", *quota, host.container)
    inside = root_command("nsenter", f"--net=/proc/{pid}/ns/net", "--")
    links = {entry["ifname"]: entry for entry in json.loads(output([*inside, tool("ip"), "-json", "link"]))}
    if host.nics.down not in links:
        decoys = lab_plan.decoy_lines(host.nics, host.index, "docker0" in links)
        output([*inside, tool("ip"), "-batch", "-"], stdin="\n".join(decoys) + "\n")
    index = links[host.nics.data]["link_index"]  # of this machine's end of the NIC
    outer = next(
        link["ifname"] for link in json.loads(output([tool("ip"), "-json", "link"])) if link["ifindex"] == index
    )
    _shape([*inside, tool("tc")], host.nics.data, rate)
    _shape(root_command("tc"), outer, rate)
    apt = "".join(f"{line}\n" for line in APT_SETTINGS.findall(apt_settings()))
    script = (
        "install -m 0600 -o muster -g muster /dev/null /home/muster/.ssh/authorized_keys\n"
        f"printf %s '{key}' >/home/muster/.ssh/authorized_keys\n"
        f"cat >/etc/apt/apt.conf.d/90muster-lab <<'END'\n{apt}END\n"
    )
    podman("exec", "--interactive", host.container, "sh", "-eu", stdin=script)


def wait_for_ssh(host: Host) -> None:
    """Wait until a host's sshd answers.

    Raises ContainersError if it did not answer within SSH_SECONDS.
    """
    deadline = time.monotonic() + SSH_SECONDS
    while True:
        try:
            with socket.create_connection((host.management, 22), timeout=2) as connection:
                connection.settimeout(5)
                if connection.recv(64).startswith(b"SSH-"):
                    return
        except OSError:
            pass
        if time.monotonic() > deadline:
            what, where = f"sshd of {host.name} did not answer within {SSH_SECONDS:.0f} s", f"{host.management}:22"
            fix = f"see `podman logs {host.container}`; a firewall on this machine may block Podman's networks"
            raise ContainersError(what, f"{where} (container {host.container})", fix)
        time.sleep(0.05)


def _shape(tc: list[str], device: str, rate: int | None) -> None:
    done = subprocess.run(
        [*tc, "-force", "-batch", "-"], input="\n".join(lab_plan.shape_lines(device, rate)) + "\n",
        text=True, capture_output=True, timeout=COMMAND_SECONDS,
    )  # fmt: skip
    if rate is not None and done.returncode != 0:
        raise CommandFailed([*tc, "qdisc"], done.returncode, done.stderr.strip())
