"""`make train`: start the plan on all hosts or none, follow it, end it everywhere, gather what it leaves.

The container is the unit of starting and killing. Whatever happens here, the run's containers are ended on every host
that can be reached, and runs/<id>/summary.json says how it went.
"""

from __future__ import annotations

import datetime
import queue
import secrets
import shlex
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from launch import clustermap, config, exits, inventory, makevars, outcome, ssh
from launch import plan as plans
from launch import resume as resuming
from launch.clustermap import ClusterMap, MapHost
from launch.follow import Ended, Follower
from launch.machine import STOP_SECONDS, Machine, Standing
from launch.plan import Options, Part, Plan
from launch.refusal import Problem, Refusal, refuse
from launch.signals import undisturbed

GRACE_SECONDS = 10  # after the first failure, for the other hosts to end by themselves and say why
GATHER_SECONDS = 600


@dataclass(frozen=True)
class Request:
    """`make train` as typed."""

    inventory: Path
    nodes: str = ""
    args: str = ""
    workload: str = ""
    script: str = ""
    resume: str = ""
    grace: str = ""
    dry_run: bool = False
    skip_check: bool = False


def train(request: Request, console: Console) -> int:
    """Run a training job; returns the exit status.

    Raises:
        Refusal: when nothing was started.
    """
    cluster = clustermap.read(request.inventory)
    options = parse_options(request)
    earlier = resuming.find(request.resume, request.inventory) if request.resume else None
    if earlier:
        options = resuming.continued(options, earlier)
    hosts = plans.chosen_hosts(cluster, options.nodes)
    run, created = new_run_id(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    owner = ssh.local_user()
    if request.dry_run:
        if request.workload:
            from containers import image as images

            options = replace(options, image=images.workload_reference(Path(request.workload)))
        plan = plans.make_plan(cluster, options, run, clustermap.MASTER_PORTS[0], owner, created)
        print(plans.describe(plan))
        first, last = clustermap.MASTER_PORTS
        print(
            f"\nDry run: nothing was started. The start picks a free port from {first} to {last} on {plan.master_host}."
        )
        return exits.SUCCEEDED
    with machines(cluster, hosts) as opened:
        if request.workload:
            options = replace(options, image=_ship_workload(request, opened, console, cluster.image.ref))
        image = options.image or cluster.image.id
        port = look_before_start(request, cluster, hosts, opened, image, earlier)
        plan = plans.make_plan(cluster, options, run, port, owner, created)
        return Job(plan, opened).run()


def parse_options(request: Request) -> Options:
    """The options of a request, checked.

    Raises:
        Refusal: for a bad NODES, GRACE, ARGS, WORKLOAD or SCRIPT.
    """
    nodes, grace = plans.parse_nodes(request.nodes), plans.parse_grace(request.grace)
    try:
        args = tuple(shlex.split(request.args))
    except ValueError as error:
        raise refuse("ARGS", f"ARGS={request.args}: {error}", "close the quotation") from None
    script = _check_workload(request.workload, request.script) if request.workload or request.script else None
    return Options(nodes, args if script else config.inline(args), script, grace=grace)


def _check_workload(workload: str, script: str) -> str:
    """The script's path inside its workload; SCRIPT may also be given as a path from where make is typed."""
    folder = Path(workload)
    if not workload:
        raise refuse("SCRIPT", f"SCRIPT={script} without WORKLOAD", "name the script's folder with WORKLOAD=path")
    if not folder.is_dir():
        raise refuse("WORKLOAD", f"{workload} is not a folder", "give the folder that holds your script")
    scripts = ", ".join(sorted(file.name for file in folder.glob("*.py"))[:10]) or "no .py file"
    if not script:
        raise refuse("SCRIPT", f"WORKLOAD={workload} without SCRIPT", f"name the script to run; there is: {scripts}")
    inside = (folder / script).resolve()
    if not inside.is_file() and Path(script).is_file():
        inside = Path(script).resolve()
    if not inside.is_file() or not inside.is_relative_to(folder.resolve()):
        raise refuse(
            "SCRIPT", f"there is no {script} in {workload}", f"name a file of that folder; there is: {scripts}"
        )
    return str(inside.relative_to(folder.resolve()))


def say(text: str) -> None:
    """A line of Muster's own, between the labelled lines of the ranks."""
    print(f"muster | {text}", flush=True)


def new_run_id() -> str:
    """A run id that sorts by time and is unique: 20261121-143005-3fa2."""
    return f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


@contextmanager
def machines(cluster: ClusterMap, hosts: Sequence[MapHost]) -> Iterator[list[Machine]]:
    """Connections to the given hosts of a cluster map, closed at the end.

    Raises:
        Refusal: naming every host that cannot be reached.
    """
    targets, known_hosts = targets_of(cluster, hosts), Path(cluster.known_hosts)
    with ssh.connections(targets, known_hosts) as opened:
        made = [Machine(target, known_hosts, c, say) for target, c in zip(targets, opened, strict=True)]
        try:
            yield made
        finally:
            for machine in made:
                machine.close()


def targets_of(cluster: ClusterMap, hosts: Sequence[MapHost]) -> list[inventory.Target]:
    """How to reach the hosts. A sudo password is not in the map: it is read from the inventory when one is needed."""
    passwords: dict[str, str | None] = {}
    if any(host.ssh["needs_sudo_password"] for host in hosts):
        read = inventory.read(Path(cluster.inventory))
        passwords = {host.name: host.target.sudo_password for host in read.hosts}
    return [clustermap.to_target(host, passwords.get(host.name)) for host in hosts]


def look_before_start(
    request: Request,
    cluster: ClusterMap,
    hosts: Sequence[MapHost],
    opened: Sequence[Machine],
    image: str,
    earlier: resuming.Earlier | None,
) -> int:
    """The quick form of `make check` beside what a start needs to know; returns a free port on the first host.

    Raises:
        Refusal: naming all that stands in the way.
    """
    if request.skip_check:
        return check_standing(opened, hosts, image, earlier)

    def quick() -> list[str]:
        from launch import check  # here: it starts probes, which are runs themselves; and beside the hosts' answers

        # check_standing looks at the image, which is this run's own, and at runs in progress.
        verdicts = check.quick(cluster, hosts, opened, podman=False)
        return check.refuse_errors(verdicts, leave_out=("image", "runs"))

    with ThreadPoolExecutor(max_workers=1) as pool:
        looking = pool.submit(quick)
        port = check_standing(opened, hosts, image, earlier)
        warnings = looking.result()
    for line in warnings:
        say(f"check: {line}")
    return port


def check_standing(
    opened: Sequence[Machine], hosts: Sequence[MapHost], image: str, earlier: resuming.Earlier | None = None
) -> int:
    """Look at all hosts at once before anything is started; returns a free port on the first one.

    `earlier`: the run to continue; one host that holds a checkpoint of it is enough.

    Raises:
        Refusal: naming every host that is not ready, and why.
    """

    resume = resuming.has_checkpoint_command(earlier) if earlier else None

    def look(pair: tuple[Machine, MapHost]) -> Standing:
        machine, host = pair
        return machine.stand(image, host.data_dir, clustermap.MASTER_PORTS if host is hosts[0] else None, resume)

    results = ssh.in_parallel(look, list(zip(opened, hosts, strict=True)))
    problems: list[Problem] = []
    for host, standing in zip(hosts, results, strict=True):
        if isinstance(standing, BaseException):
            mend = "log in and see what the host is busy with"
            problems.append(Problem(f"host {host.name}", f"did not answer: {standing}", mend))
        else:
            problems += judge_standing(host, standing, image, needs_port=host is hosts[0])
    if earlier and not any(isinstance(standing, Standing) and standing.has_resume for standing in results):
        problems += resuming.refusal_of_nothing(earlier, [host.name for host in hosts]).problems
    if problems:
        raise Refusal(problems)
    first = results[0]
    assert isinstance(first, Standing) and first.port is not None
    return first.port


def judge_standing(host: MapHost, standing: Standing, image: str, needs_port: bool) -> list[Problem]:
    """What keeps a run from starting on a host."""
    where, problems = f"host {host.name}", []
    if not standing.has_image:
        problems.append(Problem(where, f"does not hold image {image[:12]}", "run `make deploy`"))
    if not standing.has_data_dir:
        problems.append(Problem(where, f"has no folder {host.data_dir} (data_dir)", "create it, or correct data_dir"))
    for other in {entry["run"]: entry for entry in standing.runs}.values():
        what = f"run {other['run']} of {other['owner']} is in progress ({other['age']})"
        mend = f"wait for it (`make status`), or end it with `make stop RUN={other['run']}`"
        if (Path("runs") / other["run"] / "summary.json").exists():
            what = f"a container is left over from run {other['run']}, which has ended ({other['age']})"
            mend = f"remove it with `make stop RUN={other['run']}`"
        problems.append(Problem(where, what, mend))
    if needs_port and standing.port is None:
        first, last = clustermap.MASTER_PORTS
        problems.append(Problem(where, f"no port from {first} to {last} is free", "see who holds them: `ss -ltnp`"))
    return problems


def _ship_workload(request: Request, opened: Sequence[Machine], console: Console, deployed: str) -> str:
    """Build the workload's image on the kind that is `deployed`, bring it to the hosts that lack it; returns its id."""
    from containers import image as images  # here: only this path builds, and starting must be fast
    from containers.engine import ContainersError
    from launch import control, deploy

    control.ensure_ready(console)

    def progress(line: str) -> None:
        console.print(f"    image: {line}", style="dim", highlight=False)

    try:
        training = images.build_training_image(progress, horovod=deployed == images.HOROVOD_REFERENCE)
        image = images.build_workload_image(training, Path(request.workload), progress)
        answers = ssh.in_parallel(lambda machine: machine.stand(image.id, None, None), opened)
        lacking = [
            machine.name
            for machine, answer in zip(opened, answers, strict=True)
            if not (isinstance(answer, Standing) and answer.has_image)
        ]
        if lacking:
            export = images.export_oci(image, progress)
            deploy.distribute(inventory.read(request.inventory), image, export, lacking)
    except ContainersError as error:
        raise deploy.image_refusal(error) from None
    return image.id


class Job:
    """One run from its start to its summary."""

    def __init__(self, plan: Plan, opened: Sequence[Machine]) -> None:
        self.plan = plan
        self.pairs: list[tuple[Machine, Part]] = list(zip(opened, plan.parts, strict=True))
        self.folder = Path("runs") / plan.run
        self.ends: dict[str, Ended] = {}
        self.interrupted = False
        # Of a user who does not wait for the end.
        self._last_words = makevars.name_inventory(
            f"muster: left at once: run {plan.run} may still be running on the hosts; `make stop RUN={plan.run}` "
            "ends it and removes what is left of it",
            Path(plan.inventory),
        )

    def run(self) -> int:
        """Start, follow, end, gather, sum up; returns the exit status."""
        self.folder.mkdir(parents=True)
        outcome.write_json(self.folder / "plan.json", self.plan)
        plan = self.plan
        say(
            f"run {plan.run}: {plan.world_size} ranks on {', '.join(part.host for part in plan.parts)}; "
            f"master {plan.master_addr}:{plan.master_port}; {self.folder}"
        )
        if plan.resume:
            say(f"continuing run {plan.resume}: {shlex.join([plan.script or 'python -m train', *plan.args])}")
        status = "failed"
        follower = None
        try:
            # A container that is just being made cannot be stopped: an interrupt waits until all are there.
            with undisturbed(self._last_words, then_interrupt=True):
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
            self._stop_everywhere("Ctrl-C", plans.stop_seconds(plan.grace))
        except Refusal as refusal:
            with undisturbed(self._last_words):
                self._finish_everywhere()
            failure = outcome.Failure(refusal.problems[0].where, None, refusal.problems[0].what)
            outcome.write_json(self.folder / "summary.json", outcome.summary(plan, "failed", failure, {}))
            raise
        with undisturbed(self._last_words):
            if follower:
                follower.drain()
            return self._sum_up(status)

    def _start(self) -> None:
        results = ssh.in_parallel(lambda pair: pair[0].start(pair[1]), self.pairs)
        failed = [
            Problem(f"host {part.host}", f"its container did not start: {error}", "mend that; no host was left running")
            for (_, part), error in zip(self.pairs, results, strict=True)
            if isinstance(error, BaseException)
        ]
        if failed:
            self._stop_everywhere("another host's container did not start", STOP_SECONDS)
            raise Refusal(failed, exits.FAILED)

    def _watch(self, follower: Follower) -> str:
        """Wait until all hosts have ended; after the first failure the others get GRACE_SECONDS.

        Where a host was told to stop, the ranks have agreed on it: the others are writing their checkpoints too.
        """
        deadline: float | None = None
        while len(self.ends) < len(self.pairs):
            patience = 0.5 if deadline is None else min(0.5, max(0.01, deadline - time.monotonic()))
            try:
                ended = follower.ended.get(timeout=patience)
                self.ends[ended.part.host] = ended
                if ended.status != 0:
                    stopped = ended.status in outcome.STOPPED_STATUSES
                    limit = time.monotonic() + (plans.stop_seconds(self.plan.grace) if stopped else GRACE_SECONDS)
                    deadline = limit if deadline is None else min(deadline, limit)
            except queue.Empty:
                if deadline is not None and time.monotonic() >= deadline:
                    say("ending the run on the other hosts")
                    self._stop_everywhere("another host failed", STOP_SECONDS)
                    deadline = time.monotonic() + GRACE_SECONDS
                    for _, part in self.pairs:
                        self.ends.setdefault(part.host, Ended(part, 143, "ended with the others"))
        return outcome.verdict([ended.status for ended in self.ends.values()])

    def _stop_everywhere(self, why: str, seconds: int) -> None:
        with undisturbed(self._last_words):
            results = ssh.in_parallel(lambda pair: pair[0].stop(self.plan.run, why, seconds), self.pairs)
        for (machine, _), result in zip(self.pairs, results, strict=True):
            if isinstance(result, BaseException):
                say(f"{machine.name}: could not stop: {result}; `make stop RUN={self.plan.run}` when it is back")

    def _finish_everywhere(self) -> dict[str, dict[str, Any]]:
        """Remove the containers, audit what is left, bring logs and results here. host -> container state."""
        results = ssh.in_parallel(self._finish, self.pairs)
        states: dict[str, dict[str, Any]] = {}
        for (machine, _), result in zip(self.pairs, results, strict=True):
            if isinstance(result, BaseException):
                say(f"{machine.name}: could not gather: {result}")
                states[machine.name] = {}
            else:
                states[machine.name] = result["state"]
                if result["left"]:
                    say(f"{machine.name}: containers left: {' '.join(result['left'])}; `make stop` removes them")
        return states

    def _finish(self, pair: tuple[Machine, Part]) -> dict[str, Any]:
        machine, part = pair
        finished = machine.finish(part)
        logs = self.folder / "logs" / part.host
        logs.mkdir(parents=True, exist_ok=True)
        shell = ssh.rsync_shell(machine.target, Path(machine.known_hosts))
        left = [f"{part.run_dir}/{name}" for name in ("logs/", "failure.json", "stopped")]
        _rsync(shell, machine, left, logs, [])
        if part.node_rank == 0:
            keep_out = [
                "--exclude=__pycache__",
                *(f"--exclude=/{name}" for name in ("logs", "failure.json", "stopped")),
            ]
            _rsync(shell, machine, [f"{part.run_dir}/"], self.folder, keep_out)
        return finished

    def _sum_up(self, status: str) -> int:
        states = self._finish_everywhere()
        logs, plan = self.folder / "logs", self.plan
        flatten_logs(logs, plan.parts)
        stopped_by = _stopped_elsewhere(logs, plan.parts)
        if status == "failed" and stopped_by:
            status = "stopped"
        bad = {
            host: outcome.describe_end(ended.status, states.get(host, {}), ended.reason)
            for host, ended in self.ends.items()
            if ended.status != 0
        }
        reports = outcome.reports_of(logs, [part.host for part in plan.parts])
        failure = outcome.root_failure(reports, bad) if status == "failed" else None
        result = outcome.read_json(self.folder / "result.json") if status == "succeeded" else {}
        refused = failure is not None and plan.script is None and outcome.refused_its_settings(reports, self.folder)
        summary = outcome.summary(plan, status, failure, result, exits.REFUSED if refused else None)
        if status == "stopped":
            told = [host for host, ended in self.ends.items() if ended.status == outcome.TERMINATED]
            summary["reason"] = stopped_by or ("Ctrl-C" if self.interrupted else outcome.stopped_reason(told))
        outcome.write_json(self.folder / "summary.json", summary)
        self._close(summary, failure)
        return int(summary["exit_status"])

    def _close(self, summary: dict[str, Any], failure: outcome.Failure | None) -> None:
        run = self.plan.run
        if summary["test_accuracy"] is not None:
            say(
                f"test accuracy {summary['test_accuracy']:.2%}, {summary['images_per_second']:.0f} images/s, "
                f"{summary['train_seconds']:.1f} s of training"
            )
        if (self.folder / "curves.png").exists():
            say(f"curves: {self.folder / 'curves.png'}")
        if self.plan.script is None:
            say(f"logs, metrics and checkpoint: {self.folder}")
        else:
            written = self.folder / "workload"
            say(f"logs: {self.folder}/logs" + (f"; what the script wrote: {written}" if written.exists() else ""))
        if summary["status"] != "succeeded" and any((self.folder / "checkpoints").glob("step-*.json")):
            go_on = makevars.name_inventory(f"`make train RESUME={run}`", Path(self.plan.inventory))
            say(f"it continues from its last checkpoint with {go_on}")
        if failure:
            say(f"run {run} FAILED: {failure}")
        else:
            say(f"run {run} {summary['status']}" + (f": {summary['reason']}" if summary["reason"] else ""))


def _rsync(shell: str, machine: Machine, sources: Sequence[str], into: Path, options: Sequence[str]) -> None:
    """Copy from a host. A missing source is no error: not every run leaves everything."""
    words = ["rsync", "-rlt", "--ignore-missing-args", *options, "-e", shell]
    done = subprocess.run(
        [*words, *(ssh.rsync_source(machine.target, source) for source in sources), f"{into}/"],
        capture_output=True,
        text=True,
        timeout=GATHER_SECONDS,
        check=False,
        start_new_session=True,  # Ctrl-C goes to the whole process group of a terminal: this ends in its own time
    )
    if done.returncode not in (0, 23, 24):
        raise RuntimeError(f"rsync ended with {done.returncode}: {done.stderr.strip()[-300:]}")


def flatten_logs(logs: Path, parts: Sequence[Part]) -> None:
    """torchrun's <id>/attempt_0/<local_rank>/stdout.log as rank-<rank>.out and rank-<rank>.err of the host's folder."""
    for part in parts:
        for kind, suffix in (("stdout.log", "out"), ("stderr.log", "err")):
            for file in sorted((logs / part.host).glob(f"*/attempt_*/*/{kind}")):
                file.rename(logs / part.host / f"rank-{part.ranks[int(file.parent.name)]}.{suffix}")
        for folder in sorted((logs / part.host).rglob("*/"), reverse=True):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def _stopped_elsewhere(logs: Path, parts: Sequence[Part]) -> str | None:
    """The note that `make stop` leaves on each host, if somebody stopped this run."""
    for part in parts:
        note = logs / part.host / "stopped"
        if note.exists() and (text := note.read_text().strip()).startswith("make stop"):
            return text
    return None
