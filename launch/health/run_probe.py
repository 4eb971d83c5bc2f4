"""Runs `python -m train.forecast.probe` on the hosts as a run is started there, returns its document and cleans up.

Not for what the figures mean: see rank_measurements.py and forecast.py. Its schema: train/forecast/probe.py.
"""

from __future__ import annotations

import datetime
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

from launch.cli import exits
from launch.cli.refusal import Problem, Refusal
from launch.cli.signals import undisturbed
from launch.hosts import ssh
from launch.hosts.clustermap import ClusterMap, MapHost
from launch.hosts.connection import ANSWER_SECONDS, Machine
from launch.job import container, outcome, readiness
from launch.job import plan as plans
from launch.job.plan import HostPlan, Options

SCHEMA = "muster.probe/1"
PROBE_SECONDS = 600.0
LAST_WORDS_SECONDS = 5.0  # for the other hosts to end by themselves after the first failure, and to say why


@dataclass(frozen=True)
class Left:
    """What a host had of a probe when the probe was removed."""

    failure: dict[str, Any]  # failure.json as train/start/agent.py writes it, or {}
    document: dict[str, Any]  # probe.json, on the first host; or {}
    state: dict[str, Any]  # Podman's of the container, or {}


def run(
    cluster: ClusterMap,
    hosts: Sequence[MapHost],
    machines: Sequence[Machine],
    arguments: Sequence[str] = (),
    port: int | None = None,
) -> dict[str, Any]:
    """The document of a probe with `arguments` on `hosts`; `machines` are their connections, in the same order.

    `port`: one that is free on the first host; None: the hosts are asked for it first. Whatever happens, the containers
    and folders of the probe are removed on every host that answers.

    Raises:
        Refusal: with the root cause and its host.
    """
    options = Options(len(hosts), tuple(arguments), module="train.forecast.probe", direct=True)
    if port is None:
        port = readiness.check(machines, hosts, cluster.image.id)
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    some = replace(cluster, hosts=list(hosts))
    plan = plans.make_plan(some, options, plans.new_run_id(), port, ssh.local_user(), created)
    pairs = list(zip(machines, plan.hosts, strict=True))
    pool, waits = ThreadPoolExecutor(max_workers=len(pairs)), dict[str, Future[int]]()
    try:
        with undisturbed(then_interrupt=True):  # a container that is still being created cannot be removed
            _start(pairs)
        for machine, host_plan in pairs:
            waits[host_plan.host] = pool.submit(_wait, machine, host_plan)
        ended = _wait_for_all(waits)
    finally:
        with undisturbed(then_interrupt=True):
            left = _clear(pairs)
            pool.shutdown(wait=True, cancel_futures=True)
    return document_of(left, ended, PROBE_SECONDS)


def _start(pairs: Sequence[tuple[Machine, HostPlan]]) -> None:
    results = ssh.in_parallel(lambda pair: container.start(*pair), pairs)
    fix = "fix that, and check again; nothing of it is left on the hosts"
    problems = [
        Problem(f"host {host_plan.host}", f"the container of a probe did not start: {error}", fix)
        for (_, host_plan), error in zip(pairs, results, strict=True)
        if isinstance(error, BaseException)
    ]
    if problems:
        raise Refusal(problems, exits.FAILED)


def _wait(machine: Machine, host_plan: HostPlan) -> int:
    """The container's exit status; -1 where it is not known in time."""
    command = f"timeout {PROBE_SECONDS:.0f} podman wait {host_plan.container}"
    done = machine.root(command, PROBE_SECONDS + ANSWER_SECONDS)
    status = done.stdout.strip()
    return int(status) if done.exited == 0 and status.isdigit() else -1


def _wait_for_all(waits: Mapping[str, Future[int]]) -> dict[str, int]:
    """Host -> exit status, of the hosts that ended in time: before the limit, and soon after the first failure."""
    pending: set[Future[int]] = set(waits.values())
    deadline = time.monotonic() + PROBE_SECONDS
    while pending:
        done, pending = wait(pending, max(0.0, deadline - time.monotonic()), FIRST_COMPLETED)
        if not done:
            break
        if any(future.exception() or future.result() != 0 for future in done):
            deadline = min(deadline, time.monotonic() + LAST_WORDS_SECONDS)
    return {
        host: future.result() if future.exception() is None else -1 for host, future in waits.items() if future.done()
    }


def _clear(pairs: Sequence[tuple[Machine, HostPlan]]) -> dict[str, Left]:
    """Fetch what each host has of the probe, and remove it there. Hosts that do not answer are left out."""
    results = ssh.in_parallel(lambda pair: parse_left(pair[0].answer(clear_command(pair[1]))), pairs)
    return {
        host_plan.host: result
        for (_, host_plan), result in zip(pairs, results, strict=True)
        if isinstance(result, Left)
    }


def clear_command(host_plan: HostPlan) -> str:
    """A shell command that prints what a host has of the probe and removes it. Pure."""
    folder, name = shlex.quote(host_plan.run_dir), host_plan.container
    files = [
        f"printf '{file}='; cat {folder}/{file}.json 2>/dev/null | tr -d '\\n'; echo" for file in ("failure", "probe")
    ]
    state = f"printf 'state='; podman inspect --format '{{{{json .State}}}}' {name} 2>/dev/null; echo"
    return "; ".join([*files, state, f"podman rm --force --time 0 {name} >/dev/null 2>&1; rm -rf {folder}"])


def parse_left(answer: str) -> Left:
    """The answer to `clear_command`. Pure."""
    found = dict(line.split("=", 1) for line in answer.splitlines() if "=" in line)

    def read(name: str) -> dict[str, Any]:
        try:
            loaded = json.loads(found.get(name) or "{}")
        except ValueError:  # it was just being written
            return {}
        return loaded if isinstance(loaded, dict) else {}

    return Left(read("failure"), read("probe"), read("state"))


def document_of(left: Mapping[str, Left], ended: Mapping[str, int], limit: float) -> dict[str, Any]:
    """The document, if the probe succeeded on all hosts within `limit` seconds. Raises Refusal with the cause. Pure."""
    bad = {
        host: outcome.describe_end(status, left[host].state) if host in left else "no answer over SSH"
        for host, status in ended.items()
        if status != 0
    }
    reports = {host: one.failure for host, one in left.items() if one.failure}
    failure = outcome.root_failure(reports, bad)
    if failure is None:
        document = next((one.document for one in left.values() if one.document), {})
        if document.get("schema") == SCHEMA:
            return document
        missing = ", ".join(host for host in left if host not in ended)
        where = f"host {missing}" if missing else "the first host"
        what = f"the probe had not ended after {limit:.0f} s" if missing else "the probe ended without its document"
        fix = "see what the host is busy with, and whether the training network carries data (`make check`)"
        raise Refusal([Problem(where, what, fix)], exits.FAILED)
    settings = {entry["exitcode"] for report in reports.values() for entry in report["failures"]} == {exits.REFUSED}
    where = "ARGS" if settings else f"host {failure.host}"
    what = failure.reason.split("train: ", 1)[-1] if settings else f"the probe failed: {failure}"
    fix = "correct the trainer's arguments" if settings else "fix that, and check again"
    raise Refusal([Problem(where, what, fix)], exits.REFUSED if settings else exits.FAILED)
