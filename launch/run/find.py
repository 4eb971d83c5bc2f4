"""A run that is named by RUN=<id>: its plan, from here or from its hosts, and connections to those that have it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch.cli import exits
from launch.cli.refusal import refuse
from launch.files import read_json, runs_dir, write_json
from launch.job.follow import View
from launch.job.plan import Plan, document, received
from launch.run import ask_hosts
from launch.run.ask_hosts import Answers, Hosts, Known


@contextmanager
def asked(path: Path, run: str) -> Iterator[tuple[Known, Hosts, Answers]]:
    """The hosts of an inventory, and what they answer to the verb `runs` with this run.

    Raises Refusal without a run, with those that are in progress.
    """
    known = ask_hosts.known(path)
    with ask_hosts.reached(known) as hosts:
        answers = hosts.ask("runs", {"run": run} if run else None)
        if not run:
            raise which_run(answers, path)
        yield known, hosts, answers


def plan_of(run: str, answers: Answers) -> Plan:
    """The plan of a run: from runs/<id>/plan.json, else from the first host that has it whole, and then kept there.

    answers: to the verb `runs` with this run. Raises Refusal when no host that answered has it, or no plan can be read.
    """
    entries = ask_hosts.listed(answers).get(run, {})
    if not entries:
        silent = [host for host, answer in answers.items() if not isinstance(answer, dict)]
        where = f"no host that answered has a run {run}" if silent else f"no host has a run {run}"
        status = exits.UNREACHABLE if silent else exits.REFUSED
        raise refuse("RUN", where, f"`make status` shows what there is; {ask_hosts.known_runs()}", status)
    path = runs_dir() / run / "plan.json"
    plan = _first_plan(run, [read_json(path), *(entry.get("plan") for entry in entries.values())])
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, document(plan))
    return plan


def _first_plan(run: str, documents: Iterable[Any]) -> Plan:
    """The first of these documents that is the plan of this run. Raises Refusal, with what is wrong with the first."""
    wrong = []
    for found in filter(None, documents):
        try:
            return received(found, run)
        except ValueError as error:
            wrong.append(str(error))
    why = wrong[0] if wrong else "no host that answered has its plan"
    fix = "use the version of Muster, or the machine, that started it: a script may have written over it on the hosts"
    raise refuse("RUN", f"run {run}: {why}", fix)


def described(plan: Plan) -> str:
    """Which run a view is of."""
    return f"run {plan.run} of {plan.owner} on {', '.join(one.host for one in plan.hosts)}"


def views_of(plan: Plan, known: Known, hosts: Hosts) -> list[View]:
    """A view of each host of the run. A host that does not answer now is tried again while the others are watched.

    Raises Refusal where the inventory does not have one of them any more.
    """
    targets = {target.name: target for target in known.targets}
    unknown = [host_plan.host for host_plan in plan.hosts if host_plan.host not in targets]
    if unknown:
        what = f"it ran on {', '.join(unknown)} too, which {known.inventory} does not have"
        raise refuse("RUN", what, "name the inventory of the run with INVENTORY=...")
    return [View(targets[one.host], known.known_hosts, hosts.machines.get(one.host)) for one in plan.hosts]


def which_run(answers: Answers, path: Path) -> Any:
    """The refusal of a command that lacks RUN=<id>, with what runs now."""
    failed = ask_hosts.report_failed(answers, path)
    live = [run for run, entries in ask_hosts.listed(answers).items() if any(map(goes_on, entries.values()))]
    on_hosts = f"on the hosts{' that answered' if failed else ''} now: {', '.join(live) or 'none'}"
    return refuse("RUN", "which run?", f"give RUN=<id>; {on_hosts}", failed or exits.REFUSED)


def goes_on(entry: dict[str, Any]) -> bool:
    """Whether a run goes on on a host, by its entry in the answer to `runs`."""
    return entry["status"] in ("starting", "running")
