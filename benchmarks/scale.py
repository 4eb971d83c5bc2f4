"""`make bench-scale`: the start of a run on 32 hosts, and the plan of one on 10,000. Needs root and Podman.

The hosts are one container of this machine with an sshd for each address (scale_hosts/): keepers, doors, heartbeats and
SSH are the real ones, and so is the control side, `make train` without the quick check. In the place of Podman and
torchrun stand the cheapest processes, so that what is measured is Muster's own part.

The seconds follow each other and count from the start of the command: interpreter and imports (load), logins (connect),
turn, readiness and plan (ready), all containers with their keepers (start), the first state of every host in which its
rank is in training (first status), their sum (total), and from Ctrl-C to the end on all hosts (stop). Medians of RUNS.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import close
from keeper import engines
from launch.files import ROOT, read_json, runs_dir
from launch.hosts import clustermap, inventory
from launch.hosts.clustermap import ClusterMap, MapHost, MapImage, Network

NAME = "bench-scale"
CONTAINER = f"muster-{NAME}"
NETWORK = "127.0.9"  # of loopback: every host an address of its own
HOSTS = 32
MANY = 10_000
RUNS = 3
LIMIT_SECONDS = 180
HERE = Path(__file__).parent / "scale_hosts"


def cluster_map(hosts: int, folder: Path, sha256: str = "") -> ClusterMap:
    """A map of so many hosts with one rank each, as a deploy of the inventory `folder` would write it."""
    return ClusterMap(
        schema=clustermap.SCHEMA,
        created="2026-01-01T00:00:00+00:00",
        inventory=str(folder),
        inventory_sha256=sha256,
        known_hosts=str(folder / "known_hosts"),
        hosts=[
            MapHost(
                name=f"h{number}",
                ssh={
                    **{"address": f"{NETWORK}.{number}", "port": 22, "user": "muster", "key_file": str(folder / "key")},
                    **{"jump": None, "proxy_command": None, "python": "python3", "needs_sudo_password": False},
                },
                address=f"{NETWORK}.{number}",
                interface="lo",
                nproc_per_node=1,
                gpus=[],
                cpus=1,
                data_dir=None,
                facts={"place": engines.ROOTS._asdict()},
                firewall=False,  # all of them are one container
            )
            for number in range(1, hosts + 1)
        ],
        network=Network(f"{NETWORK}.0/24", "loopback", []),
        image=MapImage("localhost/muster/train:latest", "ab" * 32, 1),
        measured={},
        measured_at="2026-01-01T00:00:00+00:00",
        measured_key="",
    )


def plan_seconds(hosts: int) -> float:
    """Seconds to make the plan of a run on so many hosts, and its document."""
    from launch.job import plan as plans

    cluster = cluster_map(hosts, Path(NAME))
    begun = time.monotonic()
    ports = plans.Ports(29500, 29501, (29400,) * hosts)
    plans.document(plans.make_plan(cluster, plans.Options(), "20260101-000000-abcd", ports, "me@here", "now"))
    return time.monotonic() - begun


@contextlib.contextmanager
def many_hosts() -> Iterator[Path]:
    """The hosts, with an inventory and a cluster map, which is yielded; all of it is removed at the end."""
    from containers import lab_host

    image = lab_host.ensure_image(print)
    with tempfile.TemporaryDirectory(prefix=f"{NAME}-") as made:
        folder = Path(made)
        key = folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        listed = "".join(f"    h{number}: {{ansible_host: {NETWORK}.{number}}}\n" for number in range(1, HOSTS + 1))
        login = f"  vars: {{ansible_user: muster, ansible_ssh_private_key_file: {key}}}\n"
        (folder / "hosts.yml").write_text(f"all:\n{login}  hosts:\n{listed}")
        built = clustermap.path_of(folder)
        clustermap.write(built, cluster_map(HOSTS, folder, inventory.digest(folder)))
        _remove_container()
        try:
            _start_container(image, key.with_suffix(".pub").read_text())
            host_key = podman("exec", CONTAINER, "cat", "/etc/ssh/ssh_host_ed25519_key.pub")
            names = ",".join(f"{NETWORK}.{number}" for number in range(1, HOSTS + 1))
            (folder / "known_hosts").write_text(f"{names} {host_key}")
            clustermap.write(built, cluster_map(HOSTS, folder, inventory.digest(folder)))
            yield folder
        finally:
            _remove_container()
            shutil.rmtree(built.parent)


def podman(*words: str) -> str:
    """What a command of Podman prints; raises CalledProcessError."""
    return subprocess.run(["podman", *words], check=True, stdout=subprocess.PIPE, text=True).stdout


def _remove_container() -> None:
    podman("rm", "--force", "--ignore", "--time", "0", CONTAINER)


def _start_container(image: str, public_key: str) -> None:
    volumes = [f"--volume={HERE}:/scale/hosts:ro", f"--volume={ROOT / 'keeper'}:/scale/keeper:ro"]
    boot = ["--entrypoint", "/scale/hosts/boot", image, NETWORK, str(HOSTS), public_key.strip()]
    podman("run", "--detach", "--name", CONTAINER, "--privileged", "--network", "host", *volumes, *boot)
    deadline = time.monotonic() + LIMIT_SECONDS
    while podman("top", CONTAINER, "comm").split().count("sshd") < HOSTS:
        if time.monotonic() > deadline:
            raise SystemExit(f"benchmark: not all of {HOSTS} hosts are up")
        time.sleep(0.5)


def one_start(folder: Path) -> dict[str, float]:
    """Start a run with the hosts of an inventory, and end it; seconds of each part."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        begun = time.monotonic()
        process = subprocess.run(
            [sys.executable, "-m", "benchmarks.scale", str(folder), answer.name, str(begun)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_SECONDS, check=False,
        )  # fmt: skip
        told = answer.read()
    if not told:
        raise SystemExit(f"benchmark: the start ended with {process.returncode}:\n{process.stdout}")
    seconds: dict[str, float] = json.loads(told)
    return seconds


def start_and_tell(folder: Path, answer: Path, begun: float) -> None:
    """`make train` in this process until all ranks are in training, and its end; writes the seconds, and leaves."""
    from fabfile import CONSOLE
    from launch.cli.command import run as run_command
    from launch.hosts import ssh
    from launch.job.follow import View
    from launch.run import begin, train

    times: dict[str, float] = {}
    views: list[View] = []
    connections, start, make_view = ssh.connections, vars(begin)["start"], View.__init__

    @contextlib.contextmanager
    def timed_connections(*arguments: Any) -> Iterator[Any]:
        times["load"] = time.monotonic()
        with connections(*arguments) as opened:
            times["connect"] = time.monotonic()
            yield opened

    def timed_start(*arguments: Any) -> None:
        times["ready"] = time.monotonic()
        start(*arguments)
        times["start"] = time.monotonic()

    def noted_view(view: View, *arguments: Any) -> None:
        make_view(view, *arguments)
        views.append(view)

    def wait() -> None:
        while len(views) < HOSTS or not all(_in_training(view.state) for view in views):
            time.sleep(0.02)
        times["first_status"] = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)
        while not all(view.ended for view in views):
            time.sleep(0.02)
        times["stop"] = time.monotonic()
        ends = [begun, *times.values()]
        seconds = {name: at - before for before, (name, at) in zip(ends[:-1], times.items(), strict=True)}
        answer.write_text(json.dumps({**seconds, "total": times["first_status"] - begun}))
        os._exit(0)  # the hosts have no rsync to gather with

    for place, name, timed in (
        (ssh, "connections", timed_connections),
        (begin, "start", timed_start),
        (View, "__init__", noted_view),
    ):
        setattr(place, name, timed)
    threading.Thread(target=wait, daemon=True).start()
    run_command(lambda: train.train(train.Request(folder, skip_check=True), CONSOLE))


def _in_training(state: dict[str, Any]) -> bool:
    ranks = (state.get("ranks") or {}).values()
    return bool(ranks) and all(rank.get("phase") == "training" for rank in ranks)


def main() -> None:
    """Measure and print."""
    plan = statistics.median(plan_seconds(MANY) for _ in range(RUNS))
    before = set(runs_dir().glob("*"))
    with many_hosts() as folder:
        starts = []
        for turn in range(RUNS):
            starts.append(one_start(folder))
            print(f"turn {turn}: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in starts[-1].items()))
    for made in set(runs_dir().glob("*")) - before:
        if read_json(made / "plan.json").get("inventory") == str(folder):
            shutil.rmtree(made)
    medians = {f"{name}_seconds": round(statistics.median(one[name] for one in starts), 2) for name in starts[0]}
    close({f"plan_{MANY}_seconds": round(plan, 3), **medians, "hosts": HOSTS})


if __name__ == "__main__":
    if len(sys.argv) > 1:
        start_and_tell(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
    else:
        main()
