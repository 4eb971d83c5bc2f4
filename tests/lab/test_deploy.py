"""Promise: a deploy disturbs neither a run nor another deploy, from whatever machine these are."""

from __future__ import annotations

import re

import pytest

from tests.lab.conftest import WORKLOAD, Lab, wait_for

pytestmark = pytest.mark.lab


def test_a_deploy_beside_a_run_measures_nothing_and_of_two_deploys_the_second_is_refused(lab: Lab) -> None:
    run = lab.start("train", WORKLOAD=WORKLOAD, SCRIPT="faults.py", ARGS="silent", NODES=2)
    wait_for(lambda: len(lab.containers()) == 2, "two containers")
    first = lab.start("deploy")
    wait_for(lambda: lab.on("h1", "cat /run/muster/.deploy/lease", check=False), "the first deploy's word on h1")
    second = lab.fab("deploy")
    said, _ = first.communicate(timeout=300)
    assert first.returncode == 0 and re.search(r"run \S+ of \S+ is not disturbed", said), said
    assert second.returncode == 2 and "host h1: a deploy of " in second.stdout, second.stdout
    assert "TASK" not in second.stdout  # refused before anything was done

    measuring = lab.fab("deploy", MEASURE=1)
    assert measuring.returncode == 2 and "measuring the links would disturb it" in measuring.stdout, measuring.stdout
    assert len(lab.containers()) == 2

    [name] = set(re.findall(r"run (\S+) of \S+ is not disturbed", said))
    stopped = lab.fab("stop", RUN=name, GRACE=1)
    assert stopped.returncode == 0, stopped.stdout
    run.communicate(timeout=300)
