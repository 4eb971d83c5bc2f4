"""Promise: the first cause of a failure is named, not one of its consequences; a run's summary says how it went."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keeper.decide import CONTAINER_ENDED as GONE
from launch import files
from launch.cli import exits
from launch.job import outcome
from launch.job.outcome import Failure, HostEnd, Verdict
from tests.launch.fake_hosts import cause, exit_words


def ended(host: str, *causes: Any, status: str = "failed", **more: Any) -> HostEnd:
    return HostEnd(host, exit_words(status, *causes, **more))


def away(host: str) -> HostEnd:
    """A host that does not answer."""
    return HostEnd(host, answers=False, ended=False)


def failure_of(*ends: HostEnd) -> Failure:
    verdict = outcome.verdict(ends)
    assert verdict.status == "failed" and verdict.failure and verdict.reason == verdict.failure.reason
    return verdict.failure


CONTAINER_ENDED = "the container ended with exit status 3"
LOST_PEER = "E: Connection closed by peer"


def test_a_closed_connection_yields_to_what_closed_it_even_when_noticed_earlier() -> None:
    killed = cause("h2", rank=1, age=1.0)
    found = failure_of(
        ended("h1", cause("h1", rank=0, reason=LOST_PEER, consequence=True, age=2.0), killed), ended("h2", killed)
    )
    assert str(found) == "rank 1 on h2: killed by SIGKILL"


def test_of_two_causes_the_earlier_counts() -> None:
    found = failure_of(ended("h1", cause("h1", rank=0, age=1.0)), ended("h2", cause("h2", rank=1, age=3.0)))
    assert found.rank == 1


def test_a_host_whose_ranks_ended_well_while_others_went_on_is_the_cause() -> None:
    """Loops of unequal length: whoever goes on only loses its peer."""
    followed = cause("h1", rank=0, reason=LOST_PEER, consequence=True)
    all_ended = ({"event": "rank_ended", "rank": 1}, {"event": "ranks_ended"})
    early = replace(ended("h2", followed), events=all_ended)
    found = failure_of(ended("h1", followed), early)
    assert (found.host, found.rank) == ("h2", None) and "status 0 while those on h1 went on" in found.reason
    said = outcome.verdict([ended("h1", followed), early]).cause
    assert said is not None and (said["host"], said["reason"], said["consequence"]) == ("h2", found.reason, False)
    own = cause("h1", rank=0, reason="ValueError: bad data")  # that is another matter
    assert failure_of(ended("h1", own), early).host == "h1"
    assert failure_of(ended("h1", followed), replace(early, events=({"event": "ended", "status": 0},))).host == "h1"
    one = replace(ended("h1", followed), events=({"event": "rank_ended", "rank": 1, "after": 5.0},))
    later = replace(ended("h2", followed), events=({"event": "rank_ended", "rank": 2, "after": 6.0},))
    found = failure_of(later, one)
    assert (found.host, found.rank) == ("h1", 1) and "status 0 while rank 0 on h1 went on" in found.reason


def test_a_host_whose_keeper_left_no_word_is_the_cause_when_the_others_only_lost_it() -> None:
    followed = cause("h1", rank=0, reason=LOST_PEER, consequence=True)
    oom = HostEnd("h2", container={"OOMKilled": True, "ExitCode": 137})
    found = failure_of(ended("h1", followed), oom)
    assert (found.host, found.rank) == ("h2", None) and "out of memory" in found.reason
    gone = cause("h2", "host_lost", reason="its keeper is gone")
    found = failure_of(ended("h1", gone), HostEnd("h2", container={"ExitCode": 137}))
    assert str(found) == "h2: the container was killed by SIGKILL"


def test_a_host_that_is_silent_to_all_and_does_not_answer_is_lost() -> None:
    lost = cause("h3", "host_lost", reason="no word from it for 10 s")
    followed = cause("h1", rank=0, reason=LOST_PEER, consequence=True, age=5.0)
    found = failure_of(ended("h1", lost, followed), ended("h2", lost), away("h3"))
    assert str(found) == "h3: the host is lost: no word from it for 10 s"


def test_two_hosts_that_only_miss_each_other_are_one_cut_pair() -> None:
    verdict = outcome.verdict(
        [ended("h1", cause("h2", "host_lost", age=1.0)), ended("h2", cause("h1", "host_lost", age=0.5))]
    )
    assert str(verdict.failure).startswith("h1 and h2: do not hear each other on the training network")
    assert verdict.cause and verdict.cause["kind"] == "cut"


def test_of_two_hosts_that_miss_each_other_the_one_that_does_not_answer_is_lost() -> None:
    found = failure_of(away("h1"), ended("h2", cause("h1", "host_lost", reason="no word from it for 10 s")))
    assert str(found) == "h1: the host is lost: no word from it for 10 s"


def test_a_pair_that_a_third_host_hears_is_named_as_one() -> None:
    pair = cause("h2", "cut", reason="do not hear each other for 10 s, though h3 hears both", other="h1")
    assert str(failure_of(*(ended(host, pair) for host in ("h1", "h2", "h3")))).startswith("h1 and h2: do not hear")


@pytest.mark.parametrize("alone", [cause("h1", "host_lost", age=3.0), cause("h3", "host_lost", age=3.0)])
def test_a_host_that_answers_over_ssh_is_not_lost_but_cut_off(alone: dict[str, Any]) -> None:
    """Whether it names itself, as it hears nobody, or the first one that it missed."""
    lost = cause("h3", "host_lost", age=1.0)
    found = failure_of(ended("h1", lost), ended("h2", lost), ended("h3", alone))
    assert found.host == "h3" and "cut off on the training network: h1, h2 do not hear it" in found.reason


@given(st.permutations(["h1", "h2", "h3", "h4"]), st.sampled_from(["h1", "h2", "h3", "h4"]))
def test_whoever_is_cut_off_is_named_in_whatever_order_the_hosts_are_asked(order: list[str], cut: str) -> None:
    others = [host for host in sorted(order) if host != cut]
    ends = {host: ended(host, cause(cut, "host_lost", age=1.0)) for host in others}
    ends[cut] = ended(cut, *(cause(host, "host_lost", age=5.0) for host in others))
    assert failure_of(*(ends[host] for host in order)).host == cut


@pytest.mark.parametrize("kind", ["host_lost", "cut"])
def test_a_host_whose_own_network_is_down_is_named_whoever_misses_whom(kind: str) -> None:
    down = [{"event": "interface", "reason": "its network interface eno2 is down"}]
    missed, ends = cause("h2", kind, other="h1"), ended("h2", cause("h1", kind, other="h2"))
    found = failure_of(ended("h1", missed), replace(ends, events=down))
    assert str(found) == "h2: its network interface eno2 is down"
    crashed = cause("h1", rank=0, age=90.0)
    assert failure_of(ended("h1", missed, crashed), replace(ends, events=down)).rank == 0  # what came first counts


def test_events_say_what_is_known_before_the_end() -> None:
    event = {**cause("h2", rank=1), "event": "failed", "after": 7.0}
    found = outcome.first_failure([HostEnd("h1", events=[event], ended=False), away("h2")])
    assert found and str(found[0]) == "rank 1 on h2: killed by SIGKILL"
    assert outcome.first_failure([HostEnd("h1", ended=False)]) is None


def test_all_that_succeeded_succeeded() -> None:
    assert outcome.verdict([ended("h1", status="succeeded"), ended("h2", status="succeeded")]) == Verdict("succeeded")


def test_a_host_without_a_word_is_no_success() -> None:
    good = ended("h1", status="succeeded")
    died = HostEnd("h2", container={"ExitCode": 3})
    assert str(failure_of(good, died)) == str(failure_of(good, died, away("h3"))) == f"h2: {CONTAINER_ENDED}"
    assert str(failure_of(away("h1"), away("h2"))) == "h1, h2: no answer over SSH"
    assert str(failure_of(HostEnd("h1", ended=False))) == "h1: its keeper says nothing any more"


def test_a_keepers_word_that_the_run_succeeded_is_one_for_the_silent_hosts_too() -> None:
    """It says so only once it knows that the ranks of every host have ended well."""
    good = ended("h1", status="succeeded")
    for silent in (away("h2"), HostEnd("h2", ended=False), HostEnd("h2", ended=False, stuck=True)):
        assert outcome.verdict([good, silent]) == outcome.verdict([silent, good]) == Verdict("succeeded")
    assert failure_of(ended("h1", cause("h1", rank=0)), away("h2")).rank == 0


def test_who_stopped_a_run_is_said_and_where_ranks_did_not_save() -> None:
    stop = {"by": "make stop by ann@desk", "killed": False}
    ends = [ended("h1", status="stopped", stop=stop), ended("h2", status="stopped", stop=stop)]
    assert outcome.verdict(ends) == Verdict("stopped", reason="make stop by ann@desk")
    late = ended("h2", status="stopped", stop={**stop, "killed": True})
    said = "make stop by ann@desk; ranks on h2 did not end in time and were killed"
    assert outcome.verdict([ends[0], late]).reason == said  # never: all ranks saved a checkpoint


@pytest.mark.parametrize(
    ("state", "said"),
    [({"ExitCode": 137}, "SIGKILL"), ({"ExitCode": 3}, "exit status 3"), ({}, "gone"), ({"OOMKilled": True}, "memory")],
)
def test_how_a_container_ended_in_words(state: dict[str, Any], said: str) -> None:
    assert said in outcome.describe_container(state)


def test_the_summary_has_every_promised_key(tmp_path: Path) -> None:
    where = ("20260101-000000-abcd", 2, 3, "10.78.0.11")
    result = {"test_accuracy": 0.98, "images_per_second": 500.0, "train_seconds": 30.0}
    good = outcome.summary(*where, Verdict("succeeded"), result)
    assert (good["exit_status"], good["nodes"], good["world_size"], good["failed_rank"]) == (
        exits.SUCCEEDED,
        2,
        3,
        None,
    )
    assert (good["test_accuracy"], good["master_addr"], good["cause"]) == (0.98, "10.78.0.11", None)
    others = outcome.summary(*where, Verdict("succeeded"), {"test_accuracy": "0.98", "train_seconds": float("nan")})
    assert (others["test_accuracy"], others["train_seconds"]) == (None, None)
    failed = Verdict("failed", Failure("h2", 1, "killed by SIGKILL"), cause("h2", rank=1), "killed by SIGKILL")
    bad = outcome.summary(*where, failed, missing=["h3"])
    assert (bad["exit_status"], bad["failed_rank"], bad["test_accuracy"]) == (exits.FAILED, 1, None)
    assert (bad["cause"]["kind"], bad["missing_hosts"], bad["failed_host"]) == ("rank", ["h3"], "h2")
    files.write_json(tmp_path / "summary.json", bad)
    assert files.read_json(tmp_path / "summary.json") == bad


def test_a_torn_or_absent_document_reads_as_empty(tmp_path: Path) -> None:
    (tmp_path / "torn.json").write_text('{"a": ')
    assert files.read_json(tmp_path / "torn.json") == files.read_json(tmp_path / "absent.json") == {}


def test_where_all_ranks_wait_for_each_other_no_single_host_is_to_blame() -> None:
    stuck = cause("h3", "hang", reason="no progress: all ranks wait for each other in collectives")
    found = failure_of(ended("h1", stuck), ended("h3", stuck))
    assert (found.host, found.rank) == ("h1, h3", None)
    assert str(failure_of(ended("h1", cause("h1", "hang", 2, "no progress; it stands at x.py:3")))).startswith("rank 2")


def again(host: str, *causes: Any, status: str = "succeeded", hosts: str = "h1 h3", **more: Any) -> HostEnd:
    """The end of a host in, or after, attempt 2."""
    attempts = [{"number": 1, "hosts": ["h1", "h2", "h3"], "cause": cause("h2", "host_lost"), "reached": 40}]
    return ended(host, *causes, status=status, attempt=2, hosts=hosts.split(), attempts=attempts, **more)


def test_a_run_that_went_on_without_a_host_has_succeeded_whatever_became_of_that_one() -> None:
    lost = cause("h2", "host_lost", reason="it hears no other host for 10 s")
    attempt = {"event": "attempt", "attempt": 2, "hosts": ["h1", "h3"]}
    for second in (away("h2"), ended("h2", lost), HostEnd("h2", container={"ExitCode": 137})):
        verdict = outcome.verdict([again("h1"), second, again("h3")])
        assert (verdict.status, len(verdict.attempts)) == ("succeeded", 1)
        verdict = outcome.verdict([again("h1"), second, HostEnd("h3", events=[attempt], answers=False, ended=False)])
        assert verdict.status == "succeeded"
    assert outcome.summary("r", 3, 3, "10.0.0.1", verdict)["restarts"] == 1


def test_what_ended_the_newest_attempt_counts_and_why_there_was_no_other_is_kept() -> None:
    killed = cause("h3", rank=1, age=1.0)
    gave_up = again("h1", killed, status="failed", given_up="MAX_RESTARTS")
    verdict = outcome.verdict([gave_up, ended("h2", cause("h2", "host_lost", age=9.0)), away("h3")])
    assert verdict.failure == Failure("h3", 1, "killed by SIGKILL") and verdict.given_up == "MAX_RESTARTS"
    assert outcome.summary("r", 3, 3, "10.0.0.1", verdict)["given_up"] == "MAX_RESTARTS"


def test_an_attempt_that_is_over_has_a_cause_of_its_own() -> None:
    noted = [{"event": "failed", "attempt": 1, "after": 5.0, **cause("h2", rank=1, reason="first")},
             {"event": "attempt", "attempt": 2, "after": 8.0, "hosts": ["h1", "h2"]},
             {"event": "failed", "attempt": 2, "after": 9.0, **cause("h1", rank=0, reason="second")}]  # fmt: skip
    ends = [HostEnd("h1", events=noted, ended=False)]
    found = outcome.first_failure(ends)
    assert found is not None and found[0].reason == "second"
    because = {"kind": "rank", "host": "h2", "rank": 1, "other": "", "reason": "first"}
    assert outcome.agreed(ends, because, 2) == (Failure("h2", 1, "first"), noted[0])
    assert outcome.agreed(ends, because, 3) == (Failure("h2", 1, "first"), because)  # the same once more, unheard
    cut = {"kind": "cut", "host": "h2", "rank": None, "other": "h1", "reason": "do not hear each other"}
    assert outcome.agreed(ends, cut, 2)[0].host == "h1 and h2"


@pytest.mark.parametrize("container", [{}, {"ExitCode": 137}])
def test_a_container_that_has_ended_is_named_though_its_keeper_is_back_and_has_the_last_word(container: Any) -> None:
    gone = cause("h2", "host_lost", reason=GONE)
    ends = [ended("h1", gone), HostEnd("h2", exit_words("failed", gone), container=container)]
    verdict = outcome.verdict(ends)
    what = "the container was killed by SIGKILL" if container else GONE
    assert verdict.failure == Failure("h2", None, what)


def test_of_how_attempts_ended_the_host_is_asked_that_knows_most() -> None:
    known = [{"number": 1}, {"number": 2}]
    ends = [ended(host, attempt=3, hosts=["h2"], attempts=known[:count]) for host, count in (("h1", 1), ("h2", 2))]
    assert list(outcome.verdict(ends).attempts) == known


def test_the_results_are_those_of_the_last_master() -> None:
    documents = [{"attempt": 1, "hosts": ["h1", "h2"]}, {"attempt": 2, "hosts": ["h2"]}, None, {}, {"attempt": 3}]
    assert outcome.results_host("h1", documents) == "h2"
    assert outcome.results_host("h1", [None, {}]) == "h1"


def test_who_was_slow_and_until_when_is_kept_by_attempt_and_in_order() -> None:
    def slow(host: str, time: float, attempt: int = 1, over: bool = False, step: int = 9) -> dict[str, Any]:
        words = {"event": "slow", "time": time, "attempt": attempt, "host": host, "rank": None, "over": over}
        return {**words, "step": step}

    first = HostEnd("h1", events=[slow("h1", 5.0, step=50), slow("h1", 9.0, attempt=2), slow("h1", 12.0, 2, True, 80)])
    second = HostEnd("h2", events=[slow("h2", 3.0), slow("h2", 4.0, over=True, step=20)])
    found = [(one["host"], one["attempt"], one["step"], one["until"]) for one in outcome.slow_times([first, second])]
    assert found == [("h2", 1, 9, 20), ("h1", 1, 50, None), ("h1", 2, 9, 80)]


def test_a_slow_rank_is_named_with_its_host() -> None:
    event = {"host": "h2", "rank": 3, "times": 1.5, "seconds": 0.3, "others_seconds": 0.2, "step": None, "reason": ""}
    assert outcome.slow_in_words(event) == (
        "rank 3 on h2 is slow: its steps take 1.5 times as long as the others', 300 : 200 ms"
    )
    short = {**event, "seconds": 0.0061, "others_seconds": 0.0041}
    assert "times as long as the others', 6.1 : 4.1 ms" in outcome.slow_in_words(short)
    assert outcome.slow_in_words({**event, "over": True, "step": 7}) == "rank 3 on h2 is no longer slow (step 7)"


def test_the_loss_stands_in_where_there_is_no_accuracy() -> None:
    assert outcome.reached({"test_accuracy": 0.98211, "test_loss": 0.1}) == ("test accuracy", "98.21%")
    assert outcome.reached({"test_accuracy": 0, "test_loss": 0.1}) == ("test accuracy", "0.00%")
    assert outcome.reached({"test_accuracy": None, "test_loss": 0.12345678}) == ("test loss", "0.1235")
    assert outcome.reached({"test_loss": float("nan")}) == outcome.reached({}) == ("", "")
    assert outcome.in_short({"test_accuracy": 0.98211, "test_loss": 0.1}) == "98.21%"
    assert outcome.in_short({"test_accuracy": None, "test_loss": 0.12345678}) == "loss 0.1235"
    assert outcome.in_short({}) == ""
