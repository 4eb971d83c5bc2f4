"""Promise: a fault in a run ends it everywhere, and the first line that is said of it names host and cause.

These are the short ones of benchmarks/faults.py, which measures each fault (here its figure is printed, and the machine
may be a busy one: the bars are those of `make bench-faults`); the long ones are drills
(`make drill FAULT=name`): power_loss, master_loss, network_cut_master, network_cut_two, hang_stopped, hang_held,
ctrl_c. What is promised of other faults is tested elsewhere:

    a rank that raises or exits; Ctrl-C twice; one host that cannot start   test_endings.py
    SSH drops in a run; a full disk under a run, and under a checkpoint     test_endings.py
    Ctrl-C and SSH that drops while hosts start; ports that others hold     test_starting.py
    two starts at once, the lease           test_starting.py, tests/keeper/test_lease.py, test_queue.py
    Ctrl-C while provisioning, and while layers are copied                  test_endings.py, test_teardown.py
    before a run: a host with a slow link, a pair cut off, a NIC down, leftovers        test_check.py
    before a run: processors that others keep busy, throttled GPUs, errors of a GPU     tests/launch/health/
    host keys, logins, sudo, an unreachable host, images, bad inventories and settings  test_refusals.py
    checkpoints torn, corrupt, malicious, without room                      tests/train/test_checkpoints*.py
    clocks that differ                                                      tests/keeper/test_keeper.py
    every order of events                                                   tests/keeper/test_decide.py
    uneven batches of our trainer                                           tests/train/test_parallel_states.py
    data that is missing or differs                       tests/launch/health/test_sameness.py, test_host_checks.py

    a host that computes slowly                                             test_slow.py

A link that turns slow while a run goes on is named by nobody.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.faults import FAULTS, measure
from tests.lab.conftest import Lab

pytestmark = pytest.mark.lab


#: Left to `make test-all`.
LONG = ("early_first", "early_last", "torchrun", "script_stopped", "link_down", "early_of_two")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if name in LONG else [])
        for name, fault in FAULTS.items()
        if fault.short
    ],
)
def test_a_fault_ends_the_run_is_named_and_leaves_nothing(lab: Lab, name: str) -> None:
    fault = replace(FAULTS[name], nodes=2) if name == "kill" else FAULTS[name]
    seen = measure(lab.name, fault)
    print(f"{name}: {seen}")
    assert seen.line, f"nobody named {fault.host}: {seen}"
    assert not (seen.wrong or seen.orphans or seen.problems), seen
