"""The whole survey of a host: its engine's answers, the processor, limits, a data set's fingerprint, and its speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils import muster_survey
from ansible.module_utils.muster_engines import Docker, Engine, Podman
from ansible.module_utils.muster_host import Result

from launch.health.host_checks import check_host
from launch.health.sameness import compare
from launch.health.verdicts import Asked

ABSENT = Result(127, "", "not installed")
HANGS = Result(124, "", "no answer within 20 s")
MODULE_UTILS = Path(__file__).parents[2] / "playbooks" / "module_utils"


def test_only_musters_own_images_are_reported() -> None:
    images = [{"Id": "ab" * 32, "Names": ["localhost/muster/train:latest", "localhost/other:1"]}, {"Id": "c" * 64}]
    found = muster_survey.parse_images(Podman(), Result(0, json.dumps(images), ""))
    assert found == {"localhost/muster/train:latest": "ab" * 32}


def test_runs_are_reported_with_owner_and_age_the_ended_ones_too() -> None:
    printed = "muster-x-0\texited\tx\tann\t2026-11-21 17:33:20 +0000 UTC\nmuster-y-0\trunning\ty\t\t?\n"
    assert muster_survey.parse_runs(Docker(), Result(0, printed, ""), now=1795286000.0) == [
        {
            "run": "x",
            "container": "muster-x-0",
            "state": "exited",
            "owner": "ann",
            "created": 1795282400.0,
            "age_seconds": 3600.0,
        },
        {
            "run": "y",
            "container": "muster-y-0",
            "state": "running",
            "owner": "",
            "created": None,
            "age_seconds": None,
        },
    ]


@pytest.mark.parametrize("of", [Podman(), Docker()])
def test_a_host_without_an_engine_has_no_runs_and_one_whose_engine_hangs_has_unknown_ones(of: Engine) -> None:
    assert muster_survey.parse_images(of, ABSENT) == {} and muster_survey.parse_runs(of, ABSENT, 0.0) == []
    assert muster_survey.parse_images(of, HANGS) is None and muster_survey.parse_runs(of, HANGS, 0.0) is None


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("of", [Podman(), Docker()])
def test_an_engine_that_does_not_answer_is_none(of: Engine, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for answer in (ABSENT, HANGS, Result(0, '{"ServerErrors": ["no daemon"]}' if full else "\n", "")):
        monkeypatch.setattr(muster_survey, "run", lambda words, seconds, answer=answer: answer)
        found = muster_survey.about_engine(of, full)
        assert found == {"engine": None, "storage": of.storage}


X86 = "processor\t: 0\nmodel name\t: AMD EPYC 7B13\nflags\t\t: fpu sse2 fma avx f16c avx2 avx512f amx_bf16 aes\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd aes sve bf16 i8mm\nCPU part\t: 0xd40\n"


@pytest.mark.parametrize(
    ("cpuinfo", "model", "flags"),
    [
        (X86, "AMD EPYC 7B13", ["amx_bf16", "avx", "avx2", "avx512f", "fma"]),
        (ARM, "", ["asimd", "bf16", "i8mm", "sve"]),
        ("", "", []),
    ],
)
def test_the_processor_and_what_of_it_changes_numerics(cpuinfo: str, model: str, flags: list[str]) -> None:
    assert muster_survey.parse_cpu_model(cpuinfo) == model
    assert muster_survey.parse_cpu_flags(cpuinfo) == flags


@pytest.mark.slow
def test_the_limits_of_open_files_are_those_of_the_process() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))\n"
        "from ansible.module_utils.muster_survey import limits; import json; print(json.dumps(limits()))"
    )
    assert json.loads(_python(code)) == {"nofile": 256, "nofile_hard": 512}


def _python(code: str, text: str = "") -> str:
    """Python as it runs on a host: these modules under ansible.module_utils, and nothing else of Ansible."""
    prefix = (
        "import sys, types\n"
        "for name in ('ansible', 'ansible.module_utils'): sys.modules[name] = types.ModuleType(name)\n"
        f"sys.modules['ansible.module_utils'].__path__ = [{str(MODULE_UTILS)!r}]\n"
    )
    words = [sys.executable, "-I", "-c", prefix + code]
    return subprocess.run(words, input=text, capture_output=True, text=True, check=True, timeout=300).stdout


def data_set(folder: Path, changed: str = "") -> Path:
    for name in ("cat/1.png", "cat/2.png", "dog/1.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        content = bytearray((name * 50_000).encode())
        if name == changed:
            content[-1] ^= 1
        (folder / name).write_bytes(content)
    return folder


def test_the_same_data_has_the_same_fingerprint_wherever_it_lies(tmp_path: Path) -> None:
    first = muster_survey.fingerprint(data_set(tmp_path / "a"))
    second = muster_survey.fingerprint(data_set(tmp_path / "elsewhere" / "b"))
    assert first["sha256"] == second["sha256"] is not None
    assert (first["complete"], first["files"], first["bytes"]) == (True, 3, 1_350_000)


def test_a_file_altered_moved_or_missing_changes_the_fingerprint(tmp_path: Path) -> None:
    whole = muster_survey.fingerprint(data_set(tmp_path / "a"))["sha256"]
    altered = muster_survey.fingerprint(data_set(tmp_path / "b", changed="dog/1.png"))["sha256"]
    data_set(tmp_path / "c").joinpath("cat/2.png").rename(tmp_path / "c" / "dog" / "2.png")
    data_set(tmp_path / "d").joinpath("cat/2.png").unlink()
    others = [altered, *(muster_survey.fingerprint(tmp_path / name)["sha256"] for name in "cd")]
    assert None not in others and len({whole, *others}) == 4


def test_links_are_followed_once_and_links_to_nowhere_do_no_harm(tmp_path: Path) -> None:
    folder = data_set(tmp_path / "a")
    (folder / "again").symlink_to(folder)
    (folder / "lost.png").symlink_to(tmp_path / "nowhere")
    (folder / "linked").symlink_to(data_set(tmp_path / "b") / "dog")
    found = muster_survey.fingerprint(folder)
    assert (found["complete"], found["files"]) == (True, 4)


def test_data_that_takes_too_long_or_is_not_there_has_no_fingerprint(tmp_path: Path) -> None:
    unfinished = muster_survey.fingerprint(data_set(tmp_path), seconds=-1.0)
    assert unfinished["present"] and not unfinished["complete"] and unfinished["sha256"] is None
    absent = muster_survey.fingerprint(tmp_path / "nowhere")
    assert not absent["present"] and not absent["complete"] and absent["files"] == 0


KEYS = {
    *("ended", "kernel", "arch", "os", "python", "cpus", "machine_cpus"),
    *("cpu_model", "cpu_flags", "busy", "limits", "memory_bytes", "memory_free_bytes"),
    "disk_free_bytes",
    *("muster_disk_free_bytes", "threads_max", "ready", "engine_change", "engine", "place", "nics"),
    *("rdma", "gpus", "gpu_problems", "gpu_problem", "gpu_health", "xid", "xid_problem", "images", "runs", "data"),
    *("firewalls", "dataset", "vpn"),
}


def test_this_machine_is_surveyed_in_one_command_without_ansible(tmp_path: Path) -> None:
    options = {"data_dir": str(tmp_path), "full": False}
    code = "from ansible.module_utils.muster_survey import survey; import json, sys\n"
    found: dict[str, Any] = json.loads(
        _python(code + "print(json.dumps(survey(json.load(sys.stdin))))", json.dumps(options))
    )
    assert set(found) == KEYS and found["busy"] is None
    assert 0 <= time.time() - found["ended"] < 300
    assert 0 < found["memory_free_bytes"] <= found["memory_bytes"]
    assert found["threads_max"] >= 1024
    assert found["data"] == {"path": str(tmp_path), "present": True}
    assert found["limits"]["nofile"] != 0 and found["machine_cpus"] == os.cpu_count()


@pytest.mark.slow
def test_the_checks_find_every_fact_that_they_need_in_a_survey(tmp_path: Path) -> None:
    found = muster_survey.survey({"data_dir": str(data_set(tmp_path)), "full": True})
    verdicts = check_host("here", found, Asked(clock_offset=0.0, checkpoint_bytes=1, data_dir=str(tmp_path)))
    assert 0 <= found["busy"] <= 1
    lacking = [verdict for verdict in verdicts if "lacks" in verdict.what]
    assert lacking == [] and {"clock", "disk", "limits", "data", "gpus"} <= {v.check for v in verdicts}
    rows = compare({"here": found}, {"here": None})
    assert {row.property.key for row in rows} >= {"arch", "kernel", "python", "data"}


@pytest.mark.parametrize(
    ("before", "after", "busy"),
    [
        ("cpu  100 0 50 800 50 0 0 0 7 0\ncpu0 1 1 1 1 1", "cpu  110 5 55 850 80 0 0 0 9 0\n", 0.2),
        ("cpu 0 0 0 0 0", "cpu 30 0 30 0 0", 1.0),
        ("cpu 0 0 0 0 0", "cpu 0 0 0 30 30", 0.0),
        ("cpu 0 0 0 0 0 0 0 0", "cpu 0 0 0 30 0 0 10 20", 0.5),  # interrupts, and what the hypervisor took
        ("cpu 0 0 0 0 9", "cpu 30 0 30 0 0", 1.0),  # iowait may go back
        ("cpu 1 2 3 4 5", "cpu 1 2 3 4 5", None),
        ("", "cpu 1 2 3 4 5", None),
        ("cpu 1 2 3", "cpu 2 3 4", None),
        ("cpu a b c d e", "cpu 1 2 3 4 5", None),
    ],
)
def test_processors_wait_where_they_are_idle_or_wait_for_a_disk(before: str, after: str, busy: float | None) -> None:
    assert muster_survey.busy_part(before, after) == busy


@pytest.mark.slow
def test_the_processors_are_watched_before_any_command_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    find_gpus, pause = muster_survey.find_gpus, time.sleep

    def find() -> Any:
        order.append("command")
        return find_gpus()

    def sleep(seconds: float) -> None:
        order.extend([f"sleep {seconds}"] if seconds == muster_survey.BUSY_SECONDS else [])  # subprocess sleeps, too
        pause(seconds)

    monkeypatch.setattr(muster_survey, "find_gpus", find)
    monkeypatch.setattr(muster_survey.time, "sleep", sleep)
    assert muster_survey.survey({"full": True})["busy"] is not None
    assert order[0] == f"sleep {muster_survey.BUSY_SECONDS}" and "command" in order
    order.clear()
    assert muster_survey.survey({})["busy"] is None
    assert order[0] == "command"


@pytest.mark.slow
def test_a_survey_without_ip_says_what_to_install() -> None:
    code = (
        "from ansible.module_utils import muster_host, muster_nics\n"
        "muster_nics.run = lambda command: muster_host.Result(127, '', 'ip: not installed')\n"
        "from ansible.module_utils.muster_answer import run\n"
        "run({'survey': {'engine': False}, 'meeting': None, 'seconds': 60}, print)"
    )
    with pytest.raises(subprocess.CalledProcessError) as error:
        _python(code)
    assert error.value.stderr.startswith("`ip -j -d addr show` failed: ") and "install iproute2" in error.value.stderr


def test_a_host_that_lacks_packages_says_that_and_no_more() -> None:
    lacks = {family: {"all": {"nothing": "no-such-command"}} for family in ("debian", "rhel")}
    assert muster_survey.survey({"full": True, "wanted": {"packages": lacks}}) == {
        "ready": False,
        "engine_change": [],
    }
