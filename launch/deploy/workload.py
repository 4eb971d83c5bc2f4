"""A user's own folder on the hosts: its image, built where it was not before, and sent to those that lack it.

The folder is that of a script (WORKLOAD) or of a project (PROJECT): of both the image is made in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from launch.cli.output import detail
from launch.hosts import ssh
from launch.hosts.clustermap import ClusterMap
from launch.hosts.connection import Machine
from launch.job import readiness
from launch.network.links import of_deploy

if TYPE_CHECKING:
    from containers.image import Image


def built_before(folder: Path, cluster: ClusterMap) -> Image | None:
    """The folder's image, if it was built before from the same."""
    from containers import workload_image  # here: starting must be fast, also where there is no such folder

    return workload_image.as_built(folder, has_horovod(cluster), cluster.image.base_image)


def bring(
    folder: Path, cluster: ClusterMap, machines: Sequence[Machine], console: Console, image: Image | None = None
) -> Image:
    """Bring the folder's image to the hosts that lack it; build it, on the kind that is deployed, unless given.

    Raises Refusal where the image cannot be built or sent.
    """
    from containers import workload_image  # here: only this path builds, and starting must be fast
    from containers.engine import ContainersError
    from containers.image import export_oci
    from launch.deploy import control, deploy, distribution

    control.ensure_ready(console)
    progress = detail(console, "image: ")
    try:
        kind = (has_horovod(cluster), progress, cluster.image.base_image)
        image = image or workload_image.build(folder, *kind)
        identity = image.id
        answers = ssh.in_parallel(lambda machine: readiness.ask(machine, identity), machines)
        having = [isinstance(answer, readiness.Readiness) and answer.has_image for answer in answers]
        if lacking := [machine for machine, has in zip(machines, having, strict=True) if not has]:
            export, addresses = export_oci(image, progress), {host.name: host.address for host in cluster.hosts}
            links = of_deploy(cluster.measured, cluster.network.name)
            distribution.distribute(lacking, addresses, image, export, detail(console), links)
    except ContainersError as error:
        raise deploy.image_refusal(error) from None
    return image


def has_horovod(cluster: ClusterMap) -> bool:
    """Whether the deployed image has Horovod."""
    from containers.image import HOROVOD_REFERENCE  # here: starting must be fast

    return cluster.image.ref == HOROVOD_REFERENCE
