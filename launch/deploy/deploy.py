"""`make deploy`: validate, log in, provision (Ansible), detect, choose the network, build, distribute, write the map.

Nothing is touched before the inventory is valid and every host lets us in; the image is built while the hosts are
provisioned; the cluster map is written last, so an interrupted deploy leaves the old one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from containers import engine, own_base
from containers import image as images
from keeper import engines
from launch.cli import exits
from launch.cli.make_variables import naming
from launch.cli.output import Phases, detail
from launch.cli.refusal import Problem, Refusal, refuse
from launch.cli.units import size
from launch.deploy import build_host, control, data, detect, distribution, firewalls, package_proxy, playbook, vpn
from launch.deploy.alone import alone
from launch.files import stored, write_json
from launch.health import gpu_checks
from launch.hosts import clustermap, door, inventory, preflight, rootless, ssh
from launch.hosts.connection import Machine, revive
from launch.network import choose

ABORT_SECONDS = 30  # for Podman to clear away a build that is ended before its time

Built = tuple[images.Image, images.OciExport]


@contextmanager
def image_build(build: Callable[[], Built], end: Callable[[], None] = engine.abort) -> Iterator[Future[Built]]:
    """The training image and its export, built in a thread while the hosts are worked on. end: what ends `build`."""
    built: Future[Built] = Future()

    def work() -> None:
        try:
            built.set_result(build())
        except BaseException as error:
            built.set_exception(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield built
    finally:
        if thread.is_alive():  # nobody waits for it any more, as the deploy has failed or was interrupted
            end()
            thread.join(ABORT_SECONDS)


def built_here(progress: Callable[[str], None], horovod: bool, base_image: str) -> Built:
    """The training image and its export, of this machine's Podman. Raises ContainersError."""
    image = images.build_training_image(progress, horovod, base_image)
    return image, images.export_oci(image, progress)


def image_refusal(error: engine.ContainersError) -> Refusal:
    """An image that could not be built, as a refusal."""
    return refuse(error.where, error.what, error.fix, exits.DEPLOY_FAILED)


def refuse_missing_archive(inv: inventory.Inventory) -> None:
    """Raises Refusal where `base_image` is an archive that is not there."""
    try:
        own_base.archive_state(inv.base_image)
    except engine.ContainersError as error:
        raise refuse(error.where, error.what, error.fix) from None


def deploy(path: Path, console: Console, horovod: bool = False, remeasure: bool = False) -> int:
    """Bring every host of an inventory to the state that `make train` needs; safe to repeat.

    horovod: with the image for `--parallel horovod`. remeasure: measure also the links that the last deploy measured.
    Raises Refusal when something stands in the way; the cluster map is then left as it was.
    """
    begun = time.monotonic()
    phases = Phases(console)
    with phases.phase("inventory", f"Reading {path}"):
        inv = inventory.read(path)
        console.print(f"    {len(inv.hosts)} hosts: {', '.join(host.name for host in inv.hosts)}")
        if not inv.build_on:
            refuse_missing_archive(inv)
    with phases.phase("control", "This machine"):
        control.ensure_reaching() if inv.build_on else control.ensure_ready(console)
    with ExitStack() as held:
        with phases.phase("login", "Logging in to every host"):
            targets = [host.target for host in inv.hosts]
            machines = held.enter_context(preflight.checked(targets, inventory.known_hosts_path(path)))
            held.enter_context(alone(machines, "deploy"))
        cluster, placed = _work(inv, machines, phases, console, horovod, remeasure)
    phases.seconds["total"] = round(time.monotonic() - begun, 2)
    # Where the time and the bytes of this deploy went; benchmarks/deploy.py reads it.
    write_json(clustermap.path_of(path).with_name("deploy.json"), {"seconds": phases.seconds, "hosts": placed})
    console.print(_table(cluster, placed))
    console.print(f"Network [bold]{cluster.network.name}[/bold]: {cluster.network.reason}", highlight=False)
    if without := [host.name for host in inv.hosts if host.target.rootless and "firewall" not in host.settings]:
        what = "without root the ports of runs stay open to other machines (`firewall: false` says that they may)"
        console.print(f"    {', '.join(without)}: {what}", style="yellow", highlight=False)
    for entry in cluster.network.refused:
        phases.say(f"not {entry['network']}: {entry['reason']}")
    if not {"provision", "firewalls", "vpn", "distribute"} & phases.seconds.keys():
        console.print("Nothing had to be changed on the hosts.")
    nodes = sum(not host.spare for host in inv.hosts)
    console.print(
        f"Deployed in {phases.seconds['total']:.1f} s. Next: `make train NODES={nodes} "
        f"{naming(path)}` (`make check {naming(path)}` says what it will be worth).",
        highlight=False,
    )
    return exits.SUCCEEDED


def _work(
    inv: inventory.Inventory,
    machines: Sequence[Machine],
    phases: Phases,
    console: Console,
    horovod: bool,
    remeasure: bool,
) -> tuple[clustermap.ClusterMap, dict[str, Any]]:
    """What changes the hosts; returns the cluster map, and of each host what it was sent."""
    last_map = None if remeasure else clustermap.path_of(inv.path)
    progress = detail(console, "image: ")
    builder = next((machine for machine in machines if machine.name == inv.build_on), None)
    there = build_host.looked_at(builder, progress) if builder else None
    with ExitStack() as held:
        if not there:
            built = held.enter_context(image_build(lambda: built_here(progress, horovod, inv.base_image)))
        with phases.phase("ask", "Asking the hosts what they are, and what they lack"):
            answers = detect.ask(inv, machines, console)
        for change in detect.changes_of_engine(answers):
            phases.say(change)
        if bare := detect.not_ready(answers):
            those = [machine for machine in machines if machine.name in bare]
            how = "" if all(machine.target.rootless for machine in those) else " (Ansible)"
            with phases.phase("provision", f"Provisioning {', '.join(bare)}{how}"):
                _provision(inv, those)
                revive(machines)
                answers |= detect.ask(inv, [machine for machine in machines if machine.name in bare], console)
        known = detect.facts_of(inv, answers, console)
        detect.check_architecture(inv, known)
        if there:  # it is provisioned now
            settings = next(host.settings for host in inv.hosts if host.name == inv.build_on)
            there.environment = held.enter_context(package_proxy.environment(there.machine, settings))
            built = held.enter_context(image_build(lambda: there.build(horovod, inv.base_image), there.end))
        through = vpn.addresses(known) if inv.train_vpn and len(known) > 1 else {}
        own = {name: str(one.ip) for name, one in through.items()}
        if former := [] if through else vpn.left_over(known):
            vpn.refuse_runs(known)
        if shut := firewalls.unsettled(inv.hosts, known, own):
            with phases.phase("firewalls", f"Changing the firewalls of {', '.join(shut)}"):
                firewalls.open_to_peers(machines, shut, list(known), firewalls.ports(bool(through)), phases)
        with phases.phase("detect", "Asking the hosts whom they reach"):
            facts = detect.networks_of(inv, machines, known, console)
        with phases.phase("image", "Waiting for the training image"):
            try:
                image, export = built.result()
            except engine.ContainersError as error:
                raise image_refusal(error) from None
    vendor = clustermap.AMD if image.hip else clustermap.NVIDIA
    detect.check_facts(inv.hosts, facts.hosts, vendor)
    for line in detect.unused_gpus(inv.hosts, facts.hosts, vendor):
        console.print(f"    {line}", style="yellow", highlight=False)
    # After the build: where hosts and control machine are one, it would slow the measurement down.
    with phases.phase("measure", "Measuring the links between all hosts"):
        revive(machines)
        choice, measured = detect.choose_network(inv, machines, facts, last_map, console)
    below = choice  # which layers of the image take, too: they are no secret, and a VPN in user space is slow
    if through:
        choice, measured = _through_vpn(machines, facts, below, measured, phases, console)
    elif former:
        with phases.phase("vpn", f"Removing the VPN from {', '.join(former)}"):
            vpn.remove([machine for machine in machines if machine.name in former])
            measured = vpn.forget(measured)
    placed = _place(machines, facts, image, export, below, builder, phases)
    cluster = _cluster_map(inv, facts, choice, image, export, measured, vendor)
    clustermap.write(clustermap.path_of(inv.path), cluster)
    return cluster, placed


def _through_vpn(
    machines: Sequence[Machine],
    facts: detect.Facts,
    below: choose.Choice,
    measured: detect.Measured,
    phases: Phases,
    console: Console,
) -> tuple[choose.Choice, detect.Measured]:
    """Have training go through the VPN, over the network `below`; what is then chosen, and measured there, too."""
    if changed := vpn.to_change(facts.hosts, below):
        with phases.phase("vpn", f"Bringing up the VPN that training goes through, as {', '.join(changed)} need it"):
            vpn.refuse_runs(facts.hosts)
            vpn.bring_up(machines, facts.hosts, below)
    with phases.phase("through", "Asking the hosts what comes through the VPN"):
        return vpn.choose_it(machines, facts.hosts, below, measured, bool(changed), console)


def _place(
    machines: Sequence[Machine],
    facts: detect.Facts,
    image: images.Image,
    export: images.OciExport,
    below: choose.Choice,
    builder: Machine | None,
    phases: Phases,
) -> dict[str, Any]:
    """Bring the image to the hosts that lack it; returns what each host was sent."""
    lacking = [name for name, known in facts.hosts.items() if (known["images"] or {}).get(image.ref) != image.id]
    kept = {"bytes_sent": 0, "control_bytes": 0, "changed": False, "seconds": 0.0}
    placed: dict[str, Any] = {name: {**kept, "id": image.id} for name in facts.hosts if name not in lacking}
    if lacking:
        whole = size(sum(export.blobs.values()))
        addresses = {name: end.address for name, end in below.endpoints.items()}
        with phases.phase(
            "distribute", f"Distributing the image ({whole} unpacked, sent compressed; a host gets what it lacks)"
        ):
            to = [machine for machine in machines if machine.name in lacking]
            placed |= distribution.distribute(to, addresses, image, export, phases.say, below.links, builder)
    return placed


def _provision(inv: inventory.Inventory, machines: Sequence[Machine]) -> None:
    """Make hosts ready for runs: with Ansible, but those on which nothing is done as root. Raises Refusal."""
    for machine, host in [(one, host) for one in machines for host in inv.hosts if host.name == one.name]:
        if machine.target.rootless:
            try:
                rootless.ask(machine, "ready", rootless.ROOTLESS_READY_SECONDS, wanted=detect.wanted(host))
            except RuntimeError as error:
                fix = "fix what it names and run the same command again"
                raise refuse(f"host {machine.name}", str(error), fix, exits.DEPLOY_FAILED) from None
    if by_ansible := [machine for machine in machines if not machine.target.rootless]:
        names = [machine.name for machine in by_ansible]
        fenced = {host.name for host in inv.hosts if host.settings.get("airgap")} & set(names)
        with package_proxy.for_hosts([machine for machine in by_ansible if machine.name in fenced]) as more:
            playbook.run("provision", inv, names, more)


def teardown(path: Path, console: Console, also_running: bool = False, packages: bool = False) -> int:
    """Remove what Muster left on the hosts, and workloads' images here; on demand also the packages that it installed.

    Raises Refusal if that fails, and when a run is in progress or there are datasets, unless these shall go, too
    (`also_running`).
    """
    inv, known_hosts = inventory.read(path), inventory.known_hosts_path(path)
    targets = [host.target for host in inv.hosts]
    with preflight.checked(targets, known_hosts) as machines, alone(machines, "teardown"):
        if not also_running:
            refuse_running(ssh.in_parallel(lambda machine: door.ask(machine, "runs", {}), machines))
            refuse_datasets(data.held(machines))
        firewalls.close(machines)
        vpn.remove([machine for machine in machines if not machine.target.rootless])
        _remove_without_root([machine for machine in machines if machine.target.rootless])
        names = [machine.name for machine in machines if not machine.target.rootless]
        words = ["ansible-playbook", str(playbook.path("teardown")), "-i", str(path)]
        words += ["--limit", ",".join([*names, "localhost"])]
        words += ["--extra-vars", json.dumps({"muster_packages": True})] if packages else []
        if names and playbook.run_bounded(words, playbook.environment(inv)) != 0:
            what, fix = "failed; the task and the host stand above", "fix what it names and run `make teardown` again"
            raise refuse("playbooks/teardown.yml", what, fix, exits.DEPLOY_FAILED)
    with contextlib.suppress(engine.ContainersError):  # without Podman here there are none
        images.remove_workloads()
    clustermap.path_of(path).unlink(missing_ok=True)
    rest = "" if packages else " The packages that it installed stay (PACKAGES=1 removes them, too)."
    again = f"`make deploy {naming(path)}` brings it back."
    console.print(f"Removed Muster from {len(inv.hosts)} hosts; {again}{rest}", highlight=False)
    return exits.SUCCEEDED


def _remove_without_root(machines: Sequence[Machine]) -> None:
    """Raises Refusal, naming the hosts where it failed."""
    results = ssh.in_parallel(lambda one: rootless.ask(one, "remove", rootless.ROOTLESS_REMOVE_SECONDS), machines)
    fix = "fix what it names and run `make teardown` again"
    problems = [
        Problem(f"host {machine.name}", str(result), fix)
        for machine, result in zip(machines, results, strict=True)
        if isinstance(result, BaseException)
    ]
    if problems:
        raise Refusal(problems, exits.DEPLOY_FAILED)


def refuse_running(answers: Sequence[Any]) -> None:
    """Raises Refusal for runs in progress. `answers`: what each host's door says of its runs, or its exception."""
    entries = [entry for answer in answers if isinstance(answer, dict) for entry in answer["runs"]]
    runs = {entry["run"]: entry["owner"] for entry in entries if entry["status"] in ("starting", "running")}
    if runs:
        what = f"{', '.join(f'run {run} of {owner}' for run, owner in runs.items())} is in progress"
        fix = "`make stop RUN=<id>` first, or end it and lose what it has on the hosts: `make teardown YES=1`"
        raise refuse("the hosts", what, fix)


def refuse_datasets(held: Sequence[str]) -> None:
    """Raises Refusal for datasets on the hosts. `held`: in words."""
    if held:
        fix = "`make data NAME=<name> REMOVE=1` removes one, `make teardown YES=1` all of them with Muster"
        raise refuse("the hosts", f"they hold datasets that `make data` has brought: {', '.join(held)}", fix)


def ranks_and_gpus(
    host: inventory.Host, facts: Mapping[str, Any], gpu_vendor: str = clustermap.NVIDIA
) -> tuple[int, list[int]]:
    """Ranks on a host, and the GPUs they use: one rank per usable GPU, or nproc_per_node on the CPU. Pure."""
    gpus = gpu_checks.usable_gpus(facts, host.settings.get("gpus"), gpu_vendor)
    return host.settings.get("nproc_per_node", len(gpus) or 1), gpus


def dataset_dirs(facts: detect.Facts) -> dict[str, str | None]:
    """By host the folder of the dataset that `make data` has brought last to any of them; None: none was. Pure."""
    known = [found for host in facts.hosts.values() if (found := host.get("dataset"))]
    latest = max(known, key=lambda found: float(found["at"]), default=None)
    return {
        name: clustermap.dataset_dir(engines.Place(**host["place"]), latest["name"], latest["version"])
        if latest
        else None
        for name, host in facts.hosts.items()
    }


def _cluster_map(
    inv: inventory.Inventory,
    facts: detect.Facts,
    choice: choose.Choice,
    image: images.Image,
    export: images.OciExport,
    measured: detect.Measured,
    gpu_vendor: str,
) -> clustermap.ClusterMap:
    hosts, brought = [], dataset_dirs(facts)
    for host in inv.hosts:
        nproc, gpus = ranks_and_gpus(host, facts.hosts[host.name], gpu_vendor)
        end = choice.endpoints[host.name]
        hosts.append(
            clustermap.MapHost(
                name=host.name,
                ssh=clustermap.ssh_fields(host.target),
                address=end.address,
                interface=end.interface,
                nproc_per_node=nproc,
                gpus=gpus,
                cpus=facts.hosts[host.name]["cpus"],
                data_dir=host.settings.get("data_dir", brought[host.name]),
                firewall=host.settings.get("firewall", not host.target.rootless),
                facts=facts.hosts[host.name],
                spare=host.spare,
                gpu_vendor=gpu_vendor,
            )
        )
    return clustermap.ClusterMap(
        schema=clustermap.SCHEMA,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        inventory=stored(inv.path),
        inventory_sha256=inv.sha256,
        known_hosts=stored(inventory.known_hosts_path(inv.path)),
        hosts=hosts,
        network=choice.network,
        image=clustermap.MapImage(image.ref, image.id, sum(export.blobs.values()), inv.base_image, inv.build_on),
        measured=dataclasses.asdict(measured.measurements),
        measured_at=measured.when,
        measured_key=measured.key,
    )


def _table(cluster: clustermap.ClusterMap, placed: Mapping[str, Any]) -> Table:
    table = Table(title=f"{len(cluster.hosts)} hosts, image {cluster.image.id[:12]} on all of them")
    for column in ("host", "training address", "ranks", "GPUs", "cores", "memory", "free disk", "system", "sent"):
        table.add_column(column, justify="right" if column in ("ranks", "cores", "memory", "sent") else "left")
    for host in cluster.hosts:
        facts = host.facts
        used = [gpu for gpu in gpu_checks.gpus_of(facts, host.gpu_vendor) if gpu["index"] in host.gpus]
        table.add_row(
            f"{host.name} (spare)" if host.spare else host.name,
            f"{host.address} ({host.interface})",
            str(host.nproc_per_node),
            gpu_checks.models(used) or "none",
            str(host.cpus),
            size(facts["memory_bytes"]),
            size(facts["disk_free_bytes"]),
            f"{facts['os']['id']} {facts['os']['version']}, {facts['engine']['name']} {facts['engine']['version']}",
            size(placed[host.name]["bytes_sent"]),
        )
    return table
