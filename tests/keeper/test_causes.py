"""Promises: a host's own network is blamed for a silence where it is the reason; a rank that was aborted because
another one did not come is not the cause.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from keeper import causes


@pytest.mark.parametrize("state", ["up", "unknown"])
def test_a_network_that_may_work_is_not_blamed(tmp_path: Path, state: str) -> None:
    (tmp_path / "eno2").mkdir()
    (tmp_path / "eno2" / "operstate").write_text(f"{state}\n")
    assert causes.interface_problem("eno2", tmp_path) == ""
    assert causes.interface_problem("lo") == ""  # of this machine: its state is unknown


@pytest.mark.parametrize("state", ["down", "lowerlayerdown", "notpresent"])
def test_an_interface_that_is_down_or_gone_is_named(tmp_path: Path, state: str) -> None:
    (tmp_path / "eno2").mkdir()
    (tmp_path / "eno2" / "operstate").write_text(f"{state}\n")
    assert causes.interface_problem("eno2", tmp_path) == "its network interface eno2 is down"
    assert causes.interface_problem("ens9", tmp_path) == "its network interface ens9 is gone"


WATCHDOG = """\
[rank0]:[E1218 20:27:21.41 ProcessGroupNCCL.cpp:629] [Rank 0] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=300000) ran for 300081 milliseconds before \
timing out.
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: [Rank 0] \
Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)

Exception raised from checkTimeout at ProcessGroupNCCL.cpp:632 (most recent call first):
"""
GLOO = (
    "terminate called after throwing an instance of 'gloo::IoException'\n  what():  Connection closed by peer [h2]:5\n"
)
ILLEGAL = "  what():  Process group watchdog thread terminated with exception: CUDA error: an illegal memory access\n"


def failure(exitcode: int, output: str, when: float) -> dict[str, object]:
    found = {"exitcode": exitcode, "exception": causes.explanation(exitcode, "", "", "")[0], "time": when}
    return causes.completed(found, output)


@pytest.mark.parametrize("output", [WATCHDOG, GLOO])
def test_who_was_aborted_waiting_for_another_is_not_the_cause(output: str) -> None:
    real = "Traceback (most recent call last):\n  File 'a', line 1\ntorch.OutOfMemoryError: CUDA out of memory. Tried\n"
    first = causes.in_order([failure(-6, output, 10.0), failure(1, real, 11.0)])[0]
    assert first["exception"] == "torch.OutOfMemoryError: CUDA out of memory. Tried"


def test_who_was_aborted_for_a_reason_of_its_own_is_the_cause() -> None:
    """A kernel of this rank's own has failed; a failed assertion of C++ says nothing that could be read."""
    found = failure(-6, ILLEGAL, 11.0)
    assert "killed by SIGABRT: Process group watchdog thread" in str(found["exception"])
    assert "illegal memory access" in str(found["exception"]) and not found["consequence"]
    assert failure(-6, "", 11.0)["exception"] == "killed by SIGABRT"
    assert not causes.is_consequence("killed by SIGABRT", -6)
