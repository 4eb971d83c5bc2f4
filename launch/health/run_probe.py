"""Runs `python -m train.forecast.probe` on the hosts as a run is started there, returns its document and removes all.

Not for what the figures mean: see rank_measurements.py and forecast.py. Its schema: train/forecast/probe.py.
"""

from __future__ import annotations

import datetime
import queue
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from launch.cli import exits, signals
from launch.cli.output import say
from launch.cli.refusal import Problem, Refusal
from launch.cli.signals import undisturbed
from launch.hosts import door, ssh
from launch.hosts.clustermap import ClusterMap, MapHost
from launch.hosts.connection import Machine
from launch.job import outcome, readiness
from launch.job import plan as plans
from launch.job.follow import SILENT_SECONDS, Follower, View
from launch.job.outcome import Failure, HostEnd, Verdict
from launch.job.plan import Options, Ports
from launch.job.queue import turn
from launch.job.start import DROP_SECONDS, start

SCHEMA = "muster.probe/1"
PROBE_SECONDS = 600.0
DOCUMENT = "probe.json"


def run(
    cluster: ClusterMap,
    hosts: Sequence[MapHost],
    machines: Sequence[Machine],
    arguments: Sequence[str] = (),
    ports: Ports | None = None,
    wait: bool = False,
) -> dict[str, Any]:
    """The document of a probe with `arguments` on `hosts`; `machines` are their connections, in the same order.

    `ports`: free ones; None: the hosts are asked for them first. `wait`: for runs in progress on them. Whatever
    happens, all of the probe is removed on every host that answers.

    Raises:
        Refusal: with the root cause and its host; also when a run is in progress on one of them, unless `wait`.
    """
    options = Options(len(hosts), tuple(arguments), module="train.forecast.probe", direct=True)
    name, owner = plans.new_run_id(), ssh.local_user()
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    some = replace(cluster, hosts=list(hosts))
    document: dict[str, Any] = {}
    ends: list[HostEnd] = []
    with turn(machines, name, owner, wait, say if wait else lambda text: None):
        found = ports or readiness.check(machines, hosts, cluster.image.id)
        plan = plans.make_plan(some, options, name, found, owner, created)
        with undisturbed():  # a container that is still being created cannot be removed
            start(machines, plan)
    try:
        signals.raise_held()
        follower = Follower(name, [View(one.target, one.known_hosts, one) for one in machines], None)
        follower.start()
        ends = _wait(follower)
    finally:
        with undisturbed(then_interrupt=True):
            document = _remove(machines, name)
    return document_of(document, ends, PROBE_SECONDS)


def _wait(follower: Follower) -> list[HostEnd]:
    """Wait until the probe has ended on all hosts, or on all that answer after the first end, or for too long."""
    deadline = time.monotonic() + PROBE_SECONDS
    try:
        while follower.waiting and time.monotonic() < deadline:
            try:
                heard = follower.heard.get(timeout=SILENT_SECONDS)
            except queue.Empty:
                heard = None
            silent = not any(view.answers() for view in follower.waiting)
            if silent and (len(follower.waiting) < len(follower.views) or heard is None):
                break
        return [view.end() for view in follower.views.values()]
    finally:
        follower.leave()


def _remove(machines: Sequence[Machine], run: str) -> dict[str, Any]:
    """Remove all of the probe; returns its document, or {}. Hosts that do not answer are left out."""
    asked = {"run": run, "files": [DOCUMENT]}
    answers = ssh.in_parallel(lambda machine: door.ask(machine, "drop", asked, DROP_SECONDS), machines)
    documents = (answer.get("documents") or {} for answer in answers if isinstance(answer, dict))
    return next((found for one in documents if (found := one.get(DOCUMENT))), {})


def document_of(document: dict[str, Any], ends: Sequence[HostEnd], limit: float) -> dict[str, Any]:
    """The document, if the probe succeeded on all hosts within `limit` seconds. Raises Refusal with the cause. Pure."""
    verdict, away = outcome.verdict(ends), [end.host for end in ends if not end.answers]
    if verdict.status == "succeeded" and away:  # the ranks have ended well, but what is left there was not removed
        verdict = Verdict("failed", Failure(", ".join(away), None, "no answer over SSH"))
    going = [end.host for end in ends if not end.ended and end.answers]
    if verdict.status == "succeeded" and not going and document.get("schema") == SCHEMA:
        return document
    if verdict.status == "succeeded" or going:
        where = f"host {', '.join(going)}" if going else "the first host"
        what = f"the probe had not ended after {limit:.0f} s" if going else "the probe ended without its document"
        fix = "see what the host is busy with, and whether the training network carries data (`make check`)"
        raise Refusal([Problem(where, what, fix)], exits.FAILED)
    failures = [failure for end in ends if end.exit for failure in end.exit.get("failures") or []]
    settings = bool(failures) and {failure["exitcode"] for failure in failures} == {exits.REFUSED}
    said = str(verdict.failure or verdict.reason)
    where = "ARGS" if settings else f"host {verdict.failure.host}" if verdict.failure else "the probe"
    what = said.split("train: ", 1)[-1] if settings else f"the probe failed: {said}"
    fix = "correct the trainer's arguments" if settings else "fix that, and check again"
    raise Refusal([Problem(where, what, fix)], exits.REFUSED if settings else exits.FAILED)
