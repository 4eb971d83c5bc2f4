"""A user's own folder on the hosts: its image, built where it was not before, and sent to those that lack it.

The folder is that of a script (WORKLOAD) or of a project (PROJECT): of both the image is made in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from launch.cli.output import detail
from launch.files import ROOT
from launch.hosts import inventory, ssh
from launch.hosts.clustermap import ClusterMap
from launch.hosts.connection import Machine
from launch.hosts.connection import machines as connected_to
from launch.job import readiness
from launch.network.links import of_deploy

if TYPE_CHECKING:
    from containers.image import Image, OciExport


def built_before(folder: Path, cluster: ClusterMap) -> Image | None:
    """The folder's image, if it was built before from the same."""
    from containers import workload_image  # here: starting must be fast, also where there is no such folder

    kind = (folder, has_horovod(cluster), cluster.image.base_image)
    if host := cluster.image.build_on:
        return workload_image.built_elsewhere(*kind, host)
    return workload_image.as_built(*kind)


def bring(
    folder: Path, cluster: ClusterMap, machines: Sequence[Machine], console: Console, image: Image | None = None
) -> Image:
    """Bring the folder's image to the hosts that lack it; build it, on the kind that is deployed, unless given.

    Raises Refusal where the image cannot be built or sent.
    """
    from containers.engine import ContainersError  # here: only this path builds, and starting must be fast
    from launch.deploy import deploy, distribution

    progress = detail(console, "image: ")
    try:
        with _origin(cluster, machines) as origin:
            with _build(folder, cluster, origin, progress, console, image) as building:
                image, export = building.result()
            identity = image.id
            answers = ssh.in_parallel(lambda machine: readiness.ask(machine, identity), machines)
            having = [isinstance(answer, readiness.Readiness) and answer.has_image for answer in answers]
            if lacking := [machine for machine, has in zip(machines, having, strict=True) if not has]:
                addresses = {host.name: host.address for host in cluster.hosts}
                links = of_deploy(cluster.measured, cluster.network.name)
                distribution.distribute(lacking, addresses, image, export, detail(console), links, origin)
    except ContainersError as error:
        raise deploy.image_refusal(error) from None
    return image


@contextmanager
def _origin(cluster: ClusterMap, machines: Sequence[Machine]) -> Iterator[Machine | None]:
    """The host that builds, which need not be one of the run's; None: this machine does."""
    name = cluster.image.build_on
    known = next((machine for machine in machines if machine.name == name), None)
    if known or not name:
        yield known
        return
    with connected_to(cluster, [host for host in cluster.hosts if host.name == name]) as opened:
        yield opened[0]


@contextmanager
def _build(
    folder: Path,
    cluster: ClusterMap,
    origin: Machine | None,
    progress: Callable[[str], None],
    console: Console,
    image: Image | None,
) -> Iterator[Future[tuple[Image, OciExport]]]:
    """The image and its export, under way. image: where it was built before."""
    from containers import image as images
    from containers import workload_image
    from containers.engine import ContainersError
    from launch.deploy import build_host, control, deploy, package_proxy

    horovod, base_image = has_horovod(cluster), cluster.image.base_image
    if not origin:
        control.ensure_ready(console)

        def build() -> tuple[Image, OciExport]:
            made = image or workload_image.build(folder, horovod, progress, base_image)
            return made, images.export_oci(made, progress)

        with deploy.image_build(build) as building:
            yield building
        return
    control.ensure_reaching()
    there = build_host.looked_at(origin, progress)
    # What the image stands on has been fetched by the deploy; where it was removed since, it is fetched as it was then.
    settings = next(
        host.settings for host in inventory.read(ROOT / cluster.inventory).hosts if host.name == origin.name
    )
    state = ""
    with suppress(ContainersError):  # an archive as base is there, not here
        state = workload_image.state_before(folder, horovod, base_image)
    with (
        package_proxy.environment(origin, settings) as there.environment,
        deploy.image_build(lambda: there.build(horovod, base_image, folder), there.end) as building,
    ):
        yield building
        if state:
            workload_image.note_elsewhere(folder, state, building.result()[0], origin.name)


def has_horovod(cluster: ClusterMap) -> bool:
    """Whether the deployed image has Horovod."""
    from containers.image import HOROVOD_REFERENCE  # here: starting must be fast

    return cluster.image.ref == HOROVOD_REFERENCE
