"""Promise: the first deploy brings three bare hosts to the same image, sent once, on the right network."""

from __future__ import annotations

import json
import shlex

import pytest

from tests.lab.conftest import HOSTS, Lab
from tests.lab.test_path import recaps

pytestmark = pytest.mark.lab


def test_the_first_deploy_ends_with_every_host_and_the_same_image(first: Lab) -> None:
    assert all(changed > 0 for host, changed in recaps(first.first_deploy) if host in HOSTS)
    assert "Deployed in" in first.first_deploy
    wanted = first.cluster["image"]["id"]
    for host in HOSTS:
        listed = first.on(host, shlex.join(first.engine(host).image_words))
        assert first.engine(host).read_images(listed).names["localhost/muster/train:latest"] == wanted


def test_the_data_network_is_chosen_and_decoys_are_refused(first: Lab) -> None:
    network = first.cluster["network"]
    addresses = [host["address"] for host in first.cluster["hosts"]]
    names = [host["interface"] for host in first.cluster["hosts"]]
    assert all(address.startswith("10.78.") for address in addresses) and len(set(names)) == len(HOSTS)
    refused = json.dumps(network["refused"])
    assert "docker0" in refused and "172.17" not in network["name"]


def test_the_image_is_sent_once_to_three_bare_hosts(first: Lab) -> None:
    image_bytes = first.first_hosts["h1"]["bytes_sent"]
    assert image_bytes > 50e6
    # A host that lags behind its source gets pieces which that one compresses once more, faster and so less.
    assert all(image_bytes <= host["bytes_sent"] < 1.2 * image_bytes for host in first.first_hosts.values())
    assert [host["control_bytes"] for host in first.first_hosts.values()] == [image_bytes, 0, 0]
    assert image_bytes < first.first_sent < 1.9 * image_bytes, first.first_sent  # with the packages of three hosts
