"""Promises: what a control machine asks on a host is done as it says, and a verb that fails or is left leaves nothing.

The door runs as it does on a host, as a process of its own; Podman is a script that records its calls.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import random
import re
import struct
import subprocess
import termios
import threading
import time
from pathlib import Path
from typing import IO, Any

import pytest

from keeper import WITNESSES
from keeper.output import Writer
from tests.keeper import fake_host
from tests.keeper.fake_host import EXIT, PODMAN, SECONDS, Call, Host

host = fake_host.host


# follow


def collect(call: Call) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    """What came of each stream, and all frames without data. Offsets have to fit."""
    streams: dict[str, bytes] = {}
    others = []
    for words, data in call.frames():
        if "stream" in words:
            assert words["offset"] == len(streams.setdefault(words["stream"], b"")) and len(data) == words["bytes"]
            streams[words["stream"]] += data
        else:
            others.append(words)
    return streams, others


def test_a_follower_gets_everything_and_then_the_end(host: Host) -> None:
    folder = host.has_run("r1", state={"status": "running"})
    held = host.taken_by("r1")
    written = {name: b"" for name in ("rank-0", "rank-1", "torchrun")}

    def run() -> None:
        writers = {name: Writer(folder / "output", name) for name in ("rank-0", "torchrun")}
        for number in range(3000):
            if number == 1000:
                writers["rank-1"] = Writer(folder / "output", "rank-1")
            for name, writer in writers.items():
                line = random.randbytes(random.randrange(200)) + b"\n"
                writer.append(line)
                written[name] += line
        (folder / "state.json").write_text('{"status": "ended"}')
        (folder / "exit.json").write_text(json.dumps(EXIT))
        held.release()

    thread = threading.Thread(target=run)
    call = host.call("follow", run="r1", offsets={}, tail=None)
    thread.start()
    streams, others = collect(call)
    thread.join()
    assert streams == {"events": b'{"event": "lease"}\n', **written}
    assert others[-1] == {"end": EXIT, "container": None}
    states = [words["state"]["status"] for words in others if "state" in words]
    assert states == ["running", "ended"] or states == ["ended"]
    assert call.process.wait(SECONDS) == 0


@pytest.mark.slow
def test_a_follower_that_comes_back_with_its_offsets_gets_no_byte_twice_and_misses_none(host: Host) -> None:
    folder = host.has_run("r1")
    held = host.taken_by("r1")
    lines = [b"%d\n" % number for number in range(200_000)]

    def run() -> None:
        writer = Writer(folder / "output", "rank-0")
        for begin in range(0, len(lines), 100):
            writer.append(b"".join(lines[begin : begin + 100]))
            time.sleep(0.0005)
        (folder / "exit.json").write_text(json.dumps(EXIT))
        held.release()

    thread = threading.Thread(target=run)
    thread.start()
    got, calls, ended = b"", 0, False
    while not ended:
        calls += 1
        call = host.call("follow", run="r1", offsets={"rank-0": len(got)} if got else {}, tail=None)
        frames = 0
        for words, data in call.frames():
            ended = "end" in words
            if words.get("stream") == "rank-0":
                assert words["offset"] == len(got)
                got, frames = got + data, frames + 1
                if frames == 3 and calls < 6:
                    break
        call.hang_up()
    thread.join()
    assert got == b"".join(lines) and calls > 3


@pytest.mark.slow
def test_a_tail_begins_with_the_last_lines_and_leaves_out_no_event(host: Host) -> None:
    folder = host.has_run("r1", exit=EXIT)
    (folder / "events.jsonl").write_text('{"event": "lease"}\n' * 9)
    Writer(folder / "output", "rank-0").append(b"".join(b"line %d\n" % number for number in range(100)))
    Writer(folder / "output", "rank-1").append(b"known\nnew\n")
    call = host.call("follow", run="r1", offsets={"rank-1": 6}, tail=2)
    data = {words["stream"]: data for words, data in call.frames() if words.get("bytes")}
    assert data == {"events": b'{"event": "lease"}\n' * 9, "rank-0": b"line 98\nline 99\n", "rank-1": b"new\n"}


def test_a_follower_is_told_where_a_tailed_stream_begins_before_there_is_more_of_it(host: Host) -> None:
    """After a drop it goes on from there."""
    folder = host.has_run("r1", exit=EXIT)
    Writer(folder / "output", "rank-0").append(b"line\n")
    frames = list(host.call("follow", run="r1", offsets={}, tail=0).frames())
    assert ({"stream": "rank-0", "offset": 5, "bytes": 0}, b"") in frames


def test_what_the_size_limit_dropped_is_named(host: Host) -> None:
    folder = host.has_run("r1", exit=EXIT)
    Writer(folder / "output", "rank-0", 10, 10, 30).append(b"x" * 55)
    frames = [words for words, _ in host.call("follow", run="r1", offsets={}, tail=None).frames()]
    assert {"skipped": "rank-0", "offset": 10, "to": 40} in frames


def test_who_wants_events_alone_gets_no_output(host: Host) -> None:
    folder = host.has_run("r1", exit=EXIT)
    Writer(folder / "output", "rank-0").append(b"line\n")
    streams, _ = collect(host.call("follow", run="r1", offsets={}, tail=None, streams="events"))
    assert set(streams) == {"events"}


@pytest.mark.slow
def test_a_keeper_that_is_gone_ends_the_view_with_podmans_words(host: Host) -> None:
    folder = host.has_run("r1")
    Writer(folder / "output", "rank-0").append(b"line\n")
    host.containers("r1", ExitCode=137, OOMKilled=True)
    held = host.taken_by("r1")
    frames = host.call("follow", run="r1", offsets={}, tail=None).frames()
    assert next(frames)[0]["stream"] == "events"
    held.release()
    *_, (last, _) = frames
    assert last == {"end": None, "container": {"Running": False, "ExitCode": 137, "OOMKilled": True}}


@pytest.mark.slow
def test_a_follower_of_a_run_that_says_nothing_hears_that_the_host_is_there(host: Host) -> None:
    host.has_run("r1")
    with host.taken_by("r1"):
        frames = [words for words, _ in itertools.islice(host.call("follow", run="r1").frames(), 3)]
    assert [set(words) - {"offset", "bytes"} for words in frames] == [{"stream"}, {"alive"}, {"alive"}]


@pytest.mark.slow
def test_a_run_that_is_starting_is_followed(host: Host) -> None:
    """Its keeper has not taken the lease yet; that is not a keeper that is gone."""
    folder = host.has_run("r1", age=0)
    (folder / "events.jsonl").unlink()
    frames = host.call("follow", run="r1", offsets={}, tail=None).frames()

    def begin_and_end() -> None:
        time.sleep(2)  # longer than the door waits between two looks at the lease
        with host.taken_by("r1"):
            (folder / "events.jsonl").write_text('{"event": "lease"}\n')
            (folder / "exit.json").write_text(json.dumps(EXIT))

    threading.Thread(target=begin_and_end).start()
    assert [words.get("stream", "end") for words, _ in frames if "alive" not in words] == ["events", "end"]


def test_what_a_witness_says_while_it_follows_is_there_for_the_keeper(host: Host) -> None:
    host.has_run("r1")
    (host.private / "r1").mkdir(parents=True)
    file = host.private / "r1" / WITNESSES / "c0ffee.json"
    with host.taken_by("r1"):
        call = host.call("follow", run="r1", offsets={}, tail=None, witness="c0ffee")
        for said in (b'{"number": 1}\n{"number": 2}\n{"num', b'ber": 3}\n'):
            call.stdin.write(said)
            number, deadline = 2 + (b"3" in said), time.monotonic() + SECONDS
            while not (file.exists() and json.loads(file.read_text()) == {"number": number}):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        call.hang_up()
        assert call.process.wait(SECONDS) == 1
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("reads", [True, False])
def test_a_follower_whose_caller_goes_away_leaves_no_process(host: Host, reads: bool) -> None:
    """Also when its output is stuck because nobody reads it."""
    folder = host.has_run("r1")
    with host.taken_by("r1"):
        call = host.call("follow", run="r1", offsets={}, tail=None)
        if reads:
            assert next(call.frames())[0]["stream"] == "events"
        else:
            Writer(folder / "output", "rank-0").append(b"x" * 1_000_000)
            wait_until_full(call.stdout)
        call.stdin.close()
        assert call.process.wait(SECONDS) == 1


def wait_until_full(pipe: IO[bytes]) -> None:
    """But for what is lost where a small write has a page of its own."""
    room = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) // 2
    while struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0] < room:
        time.sleep(0.01)


@pytest.mark.slow
def test_a_slow_reader_makes_no_backlog_in_the_door(host: Host) -> None:
    folder = host.has_run("r1", exit=EXIT)
    Writer(folder / "output", "rank-0").append(b"x" * 33_000_000)
    Writer(folder / "output", "rank-1").append(b"x" * 33_000_000)
    call = host.call("follow", run="r1", offsets={}, tail=None)
    most = size = 0
    for words, data in call.frames():
        size += len(data)
        if "end" not in words:
            most = max(most, peak_kib(call.process.pid))
    assert size > 66_000_000 and most < 40_000


def peak_kib(shell: int) -> int:
    """The most memory that a process, or the one that it started, has had."""
    children = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
    text = "".join(Path(f"/proc/{pid}/status").read_text() for pid in [shell, *children])
    return max(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmHWM"))


def test_a_run_that_is_not_here_cannot_be_followed(host: Host) -> None:
    assert host.ask("follow", run="r1", offsets={}, tail=None) == {"error": "there is no run r1 on this host"}


# stop


def test_a_request_to_stop_reaches_the_keeper_whole(host: Host) -> None:
    host.has_run("r1")
    folder = host.private / "r1"
    folder.mkdir(parents=True)
    with host.taken_by("r1"):
        assert host.ask("stop", run="r1", by="make stop of ann@laptop", grace=5) == {"asked": True}
    asked = json.loads((folder / "stop.json").read_text())
    assert (asked["by"], asked["grace"]) == ("make stop of ann@laptop", 5) and abs(
        asked["time"] - time.time()
    ) < SECONDS
    assert not list(folder.glob(".*"))


def test_who_asks_for_the_end_of_what_is_over_hears_so(host: Host) -> None:
    host.has_run("died")
    host.has_run("ended", exit=EXIT)
    for run in ("died", "ended", "never"):
        assert host.ask("stop", run=run, by="me", grace=None) == {"asked": False}


@pytest.mark.parametrize("state", ["running", "paused"])
def test_a_container_whose_keeper_does_not_answer_is_killed_and_stays(host: Host, state: str) -> None:
    folder = host.has_run("r1")
    (host.private / "r1").mkdir(parents=True)
    host.containers("r1", state)
    host.when_podman_kills(f"sed -i s/{state}/exited/ $here/ps")
    before = set(folder.rglob("*"))
    with host.taken_by("r1"):
        answer = host.ask("stop", run="r1", by="me", grace=None, kill=True)
    assert answer == {"asked": True, "killed": ["muster-r1-0"]} and set(folder.rglob("*")) == before
    assert [call for call in host.podman() if not call.startswith("ps")] == ["kill -- muster-r1-0"]
    assert json.loads((host.engine / "ps").read_text())[0]["State"] == "exited"


@pytest.mark.slow
@pytest.mark.parametrize("kill", ["true", "echo 'Error: it is paused' >&2; exit 125"])
def test_a_container_that_no_kill_ends_is_removed(host: Host, kill: str) -> None:
    host.has_run("r1")
    (host.private / "r1").mkdir(parents=True)
    host.containers("r1", "paused")
    host.when_podman_kills(kill)
    with host.taken_by("r1"):
        assert host.ask("stop", run="r1", by="me", grace=None, kill=True)["killed"] == ["muster-r1-0"]
    assert host.podman()[-1] == "rm --force --ignore -- muster-r1-0" and (host.runs / "r1/plan.json").exists()


def test_what_is_over_or_has_ended_is_not_killed(host: Host) -> None:
    host.has_run("r1", exit=EXIT)
    host.containers("r1", "running")
    assert host.ask("stop", run="r1", by="me", grace=None, kill=True) == {"asked": False, "killed": []}
    host.has_run("r2")
    host.containers("r2", "exited")
    (host.private / "r2").mkdir(parents=True)
    with host.taken_by("r2"):
        assert host.ask("stop", run="r2", by="me", grace=None, kill=True) == {"asked": True, "killed": []}
    assert {call.split()[0] for call in host.podman()} == {"ps"}


# runs


def test_all_runs_are_listed_newest_first_with_what_became_of_them(host: Host) -> None:
    host.has_run("died", age=400)
    host.has_run("ended", age=300, exit=EXIT, gathered={"by": "ann"})
    host.has_run("going", age=200, state={"status": "running"})
    (host.has_run("begins", age=0) / "events.jsonl").unlink()
    (host.runs / "no-run").mkdir()
    with host.taken_by("going"):
        answer = host.ask("runs")
    listed = {run["run"]: run for run in answer["runs"]}
    assert {name: run["status"] for name, run in listed.items()} == {
        **{"begins": "starting", "going": "running", "ended": "succeeded", "died": "died"}
    }
    assert list(listed) == ["begins", "going", "ended", "died"]
    assert listed["ended"] == {
        **{"run": "ended", "node_rank": 1, "owner": "ann@laptop", "created": "today", "hosts": ["h1", "h2"]},
        **{"script": None, "status": "succeeded", "state": None, "exit": EXIT, "gathered": {"by": "ann"}},
    }
    assert listed["going"]["state"] == {"status": "running"}
    assert answer["lease"]["run"] == "going" and answer["queue"] == []
    assert abs(answer["time"] - time.time()) < SECONDS


def test_one_run_is_described_with_its_plan(host: Host) -> None:
    for run in ("r1", "r2"):
        host.has_run(run)
    assert [(run["run"], run["plan"]) for run in host.ask("runs", run="r2")["runs"]] == [("r2", host.plan("r2"))]
    assert host.ask("runs", run="../r2")["runs"] == []


@pytest.mark.parametrize("text", ["", "[]", '{"hosts": 3}', "\x00"])
def test_a_plan_that_a_script_has_overwritten_hides_no_run(host: Host, text: str) -> None:
    folder = host.has_run("r1", exit=EXIT)
    (folder / "plan.json").write_text(text)
    assert [run["status"] for run in host.ask("runs")["runs"]] == ["succeeded"]


@pytest.mark.slow
def test_who_waits_is_listed_until_its_caller_goes(host: Host) -> None:
    waiting = host.call("queue", run="r2", owner="ann@laptop", wait=True)
    assert next(waiting.frames())[0] == {"proposed": 1}
    waiting.stdin.write(b'{"commit": 1}\n')
    assert next(waiting.frames())[0]["place"] == 1
    assert [(one["run"], one["state"]) for one in host.ask("runs")["queue"]] == [("r2", "waits")]
    waiting.hang_up()
    waiting.process.wait(SECONDS)
    assert host.ask("runs")["queue"] == []


# offer and seal


def written_by_a_script(folder: Path) -> None:
    """A workload that the keeper has copied, and what a script did then."""
    (folder / "workload/old").mkdir(parents=True)
    for name in ("main.py", "old/data", "old/changed"):
        (folder / "workload" / name).write_text("as it was")
    (folder / "workload.copied").touch()
    time.sleep(0.05)  # the kernel's clock of files goes in steps of some milliseconds
    for name in ("old/changed", "new/model.pt", "new/__pycache__/x.pyc"):
        (folder / "workload" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "workload" / name).write_text("new")
    (folder / "workload/latest").symlink_to("new")


@pytest.mark.slow
def test_what_the_script_wrote_is_offered_again_and_again(host: Host) -> None:
    written_by_a_script(host.has_run("r1", exit=EXIT))
    host.containers("r1", ExitCode=0)
    state = {"Running": False, "ExitCode": 0}
    wanted = ["latest", "new/model.pt", "old/changed"]
    said = {"exit": EXIT, "container": state, "node_rank": 1, "running": False}
    for more in ([], ["curves.png", "samples"]):
        for _ in range(2):
            assert host.ask("offer", run="r1") == {**said, "written": wanted, "more": more, "checkpoints": []}
        (host.runs / "r1/samples").mkdir(exist_ok=True)
        (host.runs / "r1/curves.png").touch()


def test_the_trainers_checkpoints_are_offered_once_they_are_whole(host: Host) -> None:
    folder = host.has_run("r1", exit=EXIT) / "checkpoints"
    folder.mkdir()
    for name in ("step-5.json", "step-5.pt", "step-40.json", "step-40.pt", "step-60.pt", "step-7.json", "step-x.json"):
        (folder / name).touch()
    assert host.ask("offer", run="r1")["checkpoints"] == [5, 40]


def test_the_user_who_gathers_gets_the_files_and_nobody_else(host: Host) -> None:
    folder = host.has_run("r1", exit=EXIT)
    (folder / "closed").mkdir(0o000)
    (folder / "out").symlink_to(host.root)
    folder.chmod(0o700)
    host.environment["SUDO_USER"] = "nobody"
    before = host.root.stat().st_uid
    host.ask("offer", run="r1")
    if os.geteuid() == 0:
        assert folder.owner() == (folder / "closed").owner() == (folder / "plan.json").owner() == "nobody"
        assert host.root.stat().st_uid == before
    assert folder.stat().st_mode & 0o777 == 0o700 and (folder / "closed").stat().st_mode & 0o777 == 0o500


@pytest.mark.slow
def test_the_run_that_was_gone_on_from_is_readable_again_unless_another_one_goes_on_from_it(host: Host) -> None:
    """A start gives it to the run; what a script has written for a plan of its own names no other folder."""
    earlier = host.has_run("r0", exit=EXIT)
    host.has_run("r1", plan=host.plan("r1", resume="r0"), exit=EXIT)
    host.has_run("r2", plan=host.plan("r2", resume="r0"))
    host.has_run("odd", plan=host.plan("odd", resume="../outside"), exit=EXIT)
    outside = host.runs / "../outside"
    for folder in (earlier, outside):
        (folder / "closed").mkdir(0o000, parents=True)
    with host.taken_by("r2"):
        host.ask("offer", run="r1")
        assert (earlier / "closed").stat().st_mode & 0o777 == 0
    for run in ("r1", "odd"):
        host.ask("offer", run=run)
    assert (earlier / "closed").stat().st_mode & 0o777 == 0o500
    assert (outside / "closed").stat().st_mode & 0o777 == 0


@pytest.mark.slow
def test_nothing_is_offered_or_removed_while_a_run_goes_on(host: Host) -> None:
    folder = host.has_run("r1")
    written_by_a_script(folder)
    with host.taken_by("r1"):
        answer = host.ask("offer", run="r1")
        assert answer["running"] and answer["written"] == []
        assert host.ask("seal", run="r1", by="me", keep=5) == {"error": "run r1 is not over"}
    assert not (folder / "written.json").exists() and not (folder / "gathered.json").exists()
    assert {call.split()[0] for call in host.podman()} == {"ps"}


@pytest.mark.slow
def test_a_gathered_run_keeps_its_files_and_nothing_else(host: Host) -> None:
    folder = host.has_run("r1", exit=EXIT)
    written_by_a_script(folder)
    (host.private / "r1/secrets").mkdir(parents=True)
    host.containers("r1")
    nothing: dict[str, list[str]] = {"containers": [], "processes": [], "GPU memory": []}
    for _ in range(2):
        assert host.ask("seal", run="r1", by="ann", keep=5) == {"left": nothing, "cleared": True, "removed": []}
    assert not (folder / "workload").exists() and not (host.private / "r1").exists()
    assert json.loads((folder / "gathered.json").read_text())["by"] == "ann"
    assert "rm --force --ignore -- muster-r1-0" in host.podman()


def test_nothing_is_written_through_a_link_that_a_script_left(host: Host) -> None:
    folder = host.has_run("r1", exit=EXIT)
    (host.root / "precious").write_text("precious")
    (folder / "gathered.json").symlink_to(host.root / "precious")
    host.ask("seal", run="r1", by="ann", keep=5)
    assert (host.root / "precious").read_text() == "precious" and not (folder / "gathered.json").is_symlink()


@pytest.mark.slow
def test_what_a_run_left_is_named_and_cleared(host: Host) -> None:
    run = f"r{os.getpid()}"
    host.has_run(run, exit=EXIT)
    host.containers(run, "running")
    left = subprocess.Popen(["sleep", "500"], env={"MUSTER_RUN_ID": run})
    other = subprocess.Popen(["sleep", "500"], env={"MUSTER_RUN_ID": f"{run}x"})
    try:
        threading.Thread(target=left.wait, daemon=True).start()
        answer = host.ask("seal", run=run, by="ann", keep=5)
        left_there = {"containers": [f"muster-{run}-0"], "processes": [f"{left.pid} sleep 500"], "GPU memory": []}
        assert answer["left"] == left_there
        assert answer["cleared"] and other.poll() is None
    finally:
        left.kill()
        other.kill()
        other.wait()


def test_a_container_that_stays_is_not_called_cleared(host: Host) -> None:
    host.has_run("r1", exit=EXIT)
    host.containers("r1")
    (host.engine / "podman").write_text(PODMAN.replace("rm -f", "true"))
    assert host.ask("seal", run="r1", by="ann", keep=5)["cleared"] is False


def test_an_engine_that_fails_is_not_taken_for_one_without_containers(host: Host) -> None:
    host.has_run("r1", exit=EXIT)
    (host.engine / "podman").write_text("#!/bin/sh\necho 'Error: no space left' >&2; exit 125")
    for verb in ("offer", "seal"):
        assert host.ask(verb, run="r1", by="ann", keep=5) == {"error": "`podman ps`: Error: no space left"}


def test_old_runs_go_when_they_are_gathered_and_no_other_one_needs_them(host: Host) -> None:
    gathered = {"by": "ann", "time": 0}
    for age, (run, more) in enumerate(
        {
            "new": {"exit": EXIT, "gathered": gathered},
            "not-gathered": {"exit": EXIT, "plan": host.plan("not-gathered", resume="resumed")},
            "second": {"exit": EXIT, "gathered": gathered, "plan": host.plan("second", resume="third")},
            "third": {"exit": EXIT, "gathered": gathered},
            "resumed": {"exit": EXIT, "gathered": gathered},
            "died": {},
            "oldest": {"exit": EXIT, "gathered": gathered},
        }.items()
    ):
        host.has_run(run, age=1000 + age, **more)
    (host.runs / ".removed-abc/x").mkdir(parents=True)
    for name in ("resumed-from-nowhere", "just-made"):
        (host.runs / name).mkdir()
    os.utime(host.runs / "resumed-from-nowhere", (0, 0))
    assert host.ask("seal", run="new", by="ann", keep=2)["removed"] == ["third", "oldest"]
    left = {path.name for path in host.runs.iterdir()}
    assert left == {"new", "not-gathered", "second", "resumed", "died", "just-made"}


def test_an_old_run_that_was_gathered_just_now_stays(host: Host) -> None:
    for age in range(4):
        host.has_run(
            f"r{age}", age=1000 + age, exit=EXIT, **({"gathered": {"by": "ann", "time": 0}} if age < 3 else {})
        )
    assert host.ask("seal", run="r3", by="ann", keep=2)["removed"] == ["r2"]
    assert {path.name for path in host.runs.iterdir()} == {"r0", "r1", "r3"}


# All verbs


def test_an_error_is_one_line_and_the_status_says_it(host: Host) -> None:
    assert host.start(plan={}, node_rank=0).answer() == {"error": "KeyError: 'run'"}


@pytest.mark.slow
def test_one_deploy_at_a_time_works_on_a_host(host: Host) -> None:
    first = host.call("deploy", by="ann@desk", what="deploy")
    assert next(first.frames())[0] == {"held": True}
    refused = host.ask("deploy", by="bob@laptop", what="teardown")["error"]
    assert re.match(r"a deploy of ann@desk, begun \d+ s ago, is in progress there", refused)
    first.stdin.write(b'{"ping": true}\n')
    first.hang_up()
    assert first.process.wait(SECONDS) == 1
    assert next(host.call("deploy", by="bob@laptop", what="teardown").frames())[0] == {"held": True}
