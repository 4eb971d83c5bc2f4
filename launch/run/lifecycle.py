"""One run on its hosts: all containers are started or none; they are followed, ended, gathered and summed up.

Containers are started and killed, never single processes. Whatever happens here, the run's containers are ended on
every host that can be reached, and runs/<id>/summary.json says how it ended.
"""

from __future__ import annotations

import queue
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch import files
from launch.cli import exits
from launch.cli.make_variables import name_inventory
from launch.cli.output import say
from launch.cli.refusal import Problem, Refusal
from launch.cli.signals import undisturbed
from launch.hosts import ssh
from launch.hosts.connection import Machine
from launch.job import container, outcome, torchrun_logs
from launch.job.plan import HostPlan, Plan, stop_seconds
from launch.run import gather
from launch.run.follow import Ended, Follower

SELF_END_SECONDS = 10  # after the first failure, for the other hosts to end by themselves and report why


class Run:
    """One run from its start to its summary."""

    def __init__(self, plan: Plan, opened: Sequence[Machine]) -> None:
        self.plan = plan
        self.pairs: list[tuple[Machine, HostPlan]] = list(zip(opened, plan.hosts, strict=True))
        self.folder = files.runs_dir() / plan.run
        self.ends: dict[str, Ended] = {}
        self.interrupted = False
        # For a user who does not wait for the end.
        self._last_message = (
            f"muster: not waited for: run {plan.run} may still be running on the hosts; {self._command('stop')} "
            "ends it and removes what is left of it"
        )

    def run(self) -> int:
        """Start, follow, end, gather, sum up; returns the exit status."""
        self.folder.mkdir(parents=True)
        files.write_json(self.folder / "plan.json", asdict(self.plan))
        plan = self.plan
        say(
            f"run {plan.run}: {plan.world_size} ranks on {', '.join(host_plan.host for host_plan in plan.hosts)}; "
            f"master {plan.master_addr}:{plan.master_port}; {files.shown(self.folder)}"
        )
        if plan.resume:
            say(f"continuing run {plan.resume}: {plan.script or 'python -m train'} {shlex.join(plan.args)}")
        status = "failed"
        follower = None
        try:
            # A container that is just being created cannot be stopped: an interrupt waits until all exist.
            with undisturbed(self._last_message, then_interrupt=True):
                self._start()
            follower = Follower(self.pairs, self.folder / "logs")
            status = self._watch(follower)
        except KeyboardInterrupt:
            status = "stopped"
            self.interrupted = True
            say(
                f"stopping the run on every host; a rank has {plan.grace} s to finish its step and save "
                "(Ctrl-C again: leave without waiting)"
            )
            self._stop_everywhere("Ctrl-C", stop_seconds(plan.grace))
        except Refusal as refusal:
            with undisturbed(self._last_message):
                self._finish_everywhere()
            failure = outcome.Failure(refusal.problems[0].where, None, refusal.problems[0].what)
            files.write_json(self.folder / "summary.json", self._summary("failed", failure))
            raise
        with undisturbed(self._last_message):
            if follower:
                follower.drain()
            return self._sum_up(status)

    def _command(self, target: str, variable: str = "RUN") -> str:
        """The command to type for this run."""
        return name_inventory(f"`make {target} {variable}={self.plan.run}`", Path(self.plan.inventory))

    def _start(self) -> None:
        results = ssh.in_parallel(lambda pair: container.start(*pair), self.pairs)
        fix = "fix that; no host was left running"
        failed = [
            Problem(f"host {host_plan.host}", f"its container did not start: {error}", fix)
            for (_, host_plan), error in zip(self.pairs, results, strict=True)
            if isinstance(error, BaseException)
        ]
        if failed:
            self._stop_everywhere("another host's container did not start", container.KILL_SECONDS)
            raise Refusal(failed, exits.FAILED)

    def _watch(self, follower: Follower) -> str:
        """Wait until all hosts have ended; after the first failure the others get SELF_END_SECONDS.

        Where one host was stopped by a signal, all ranks have agreed to stop: the others write their checkpoints too.
        """
        deadline: float | None = None
        while len(self.ends) < len(self.pairs):
            patience = 0.5 if deadline is None else min(0.5, max(0.01, deadline - time.monotonic()))
            try:
                ended = follower.ended.get(timeout=patience)
                self.ends[ended.host_plan.host] = ended
                if ended.status != 0:
                    stopped = ended.status in outcome.STOPPED_STATUSES
                    limit = time.monotonic() + (stop_seconds(self.plan.grace) if stopped else SELF_END_SECONDS)
                    deadline = limit if deadline is None else min(deadline, limit)
            except queue.Empty:
                if deadline is not None and time.monotonic() >= deadline:
                    say("ending the run on the other hosts")
                    self._stop_everywhere("another host failed", container.KILL_SECONDS)
                    deadline = time.monotonic() + SELF_END_SECONDS
                    for _, host_plan in self.pairs:
                        self.ends.setdefault(host_plan.host, Ended(host_plan, 143, "ended with the others"))
        return outcome.verdict([ended.status for ended in self.ends.values()])

    def _stop_everywhere(self, why: str, seconds: int) -> None:
        with undisturbed(self._last_message):
            results = ssh.in_parallel(lambda pair: container.stop(pair[0], self.plan.run, why, seconds), self.pairs)
        for (machine, _), result in zip(self.pairs, results, strict=True):
            if isinstance(result, BaseException):
                say(f"{machine.name}: could not stop: {result}; {self._command('stop')} when it answers again")

    def _finish_everywhere(self) -> dict[str, dict[str, Any]]:
        """Remove the containers, audit what is left, bring logs and results here. host -> container state."""
        results = ssh.in_parallel(lambda pair: gather.gather(*pair, self.folder), self.pairs)
        states: dict[str, dict[str, Any]] = {}
        for (machine, _), result in zip(self.pairs, results, strict=True):
            if isinstance(result, BaseException):
                say(f"{machine.name}: could not gather: {result}")
                states[machine.name] = {}
            else:
                states[machine.name] = result["state"]
                if result["left"]:
                    left = " ".join(result["left"])
                    say(f"{machine.name}: containers left: {left}; {self._command('stop')} removes them")
        return states

    def _sum_up(self, status: str) -> int:
        states = self._finish_everywhere()
        logs, plan = self.folder / "logs", self.plan
        for host_plan in plan.hosts:
            torchrun_logs.flatten(logs / host_plan.host, host_plan.ranks)
        stopped_by = gather.stopped_elsewhere(logs, plan.hosts)
        if status == "failed" and stopped_by:
            status = "stopped"
        bad = {
            host: outcome.describe_end(ended.status, states.get(host, {}), ended.reason)
            for host, ended in self.ends.items()
            if ended.status != 0
        }
        reports = outcome.reports_of(logs, [host_plan.host for host_plan in plan.hosts])
        failure = outcome.root_failure(reports, bad) if status == "failed" else None
        result = files.read_json(self.folder / "result.json") if status == "succeeded" else {}
        refused = failure is not None and plan.script is None and outcome.refused_its_settings(reports, self.folder)
        reason = None
        if status == "stopped":
            signalled = [host for host, ended in self.ends.items() if ended.status == outcome.TERMINATED]
            reason = stopped_by or ("Ctrl-C" if self.interrupted else outcome.stopped_reason(signalled))
        summary = self._summary(status, failure, result, refused, reason)
        files.write_json(self.folder / "summary.json", summary)
        self._close(summary, failure)
        return int(summary["exit_status"])

    def _summary(self, status: str, failure: outcome.Failure | None, *more: Any) -> dict[str, Any]:
        plan = self.plan
        where = (plan.run, len(plan.hosts), plan.world_size, plan.master_addr)
        return outcome.summary(*where, status, failure, *more)

    def _close(self, summary: dict[str, Any], failure: outcome.Failure | None) -> None:
        run = self.plan.run
        if summary["test_accuracy"] is not None:
            say(
                f"test accuracy {summary['test_accuracy']:.2%}, {summary['images_per_second']:.0f} images/s, "
                f"{summary['train_seconds']:.1f} s of training"
            )
        if (self.folder / "curves.png").exists():
            say(f"curves: {files.shown(self.folder / 'curves.png')}")
        if self.plan.script is None:
            more = ", metrics and checkpoint" if (self.folder / "metrics.jsonl").exists() else ""
            say(f"logs{more}: {files.shown(self.folder)}")
        else:
            logs, written = self.folder / "logs", self.folder / "workload"
            wrote = f"; what the script wrote: {files.shown(written)}" if written.exists() else ""
            say(f"logs: {files.shown(logs)}{wrote}")
        if summary["status"] != "succeeded" and any((self.folder / "checkpoints").glob("step-*.json")):
            say(f"it continues from its last checkpoint with {self._command('train', 'RESUME')}")
        if failure:
            say(f"run {run} FAILED: {failure}")
        else:
            say(f"run {run} {summary['status']}" + (f": {summary['reason']}" if summary["reason"] else ""))
