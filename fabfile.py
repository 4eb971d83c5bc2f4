"""The commands of Muster: `fab --list`. Each is one function; `make` targets call them with the same names.

An option that is not given is taken from the environment variable of its name in capitals, which is how make hands on
`make train NODES=2`. Exit statuses: launch/cli/exits.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from invoke.context import Context
from invoke.tasks import task
from rich.console import Console

from launch.cli.command import run as run_command
from launch.cli.make_variables import DEFAULT_INVENTORY
from launch.files import ROOT, shown

# Where the output is no terminal (a file, CI), tables get room instead of rich's 80 columns.
CONSOLE = Console(soft_wrap=True) if sys.stdout.isatty() else Console(soft_wrap=True, width=160)


def _given(value: str, name: str, default: str = "") -> str:
    return value or os.environ.get(name, "") or default


def _inventory(value: str) -> Path:
    return Path(_given(value, "INVENTORY", shown(ROOT / DEFAULT_INVENTORY)))


def _truth(value: object, name: str) -> bool:
    return bool(value) or os.environ.get(name, "") not in ("", "0", "no", "false")


#: Printed after an interrupt of a command that starts runs, and of one that changes hosts.
RUNS_GO_ON = "`make status` shows what still runs on the hosts, and `make stop RUN=<id>` ends it"
HOSTS_HALF_DONE = "the hosts are not finished; run `make {0}` again, it continues where it stopped"


def _end(command: Callable[[], int], inventory: Path | None = None, after_interrupt: str = "") -> NoReturn:
    """Run a command (launch.cli.command.run) and end this process with its exit status."""
    raise SystemExit(run_command(command, inventory, after_interrupt))


@task
def trust(context: Context, inventory: str = "", yes: bool = False) -> None:
    """Collect the hosts' keys, show fingerprints, ask (YES=1: do not), write the inventory's known_hosts."""
    from launch.hosts import trust as trusting

    _end(lambda: trusting.trust(_inventory(inventory), _truth(yes, "YES"), CONSOLE), _inventory(inventory))


@task(
    help={
        "horovod": "an image with Horovod, for --parallel horovod",
        "measure": "measure the links again, also where the last deploy did so on the same networks",
    }
)
def deploy(context: Context, inventory: str = "", horovod: bool = False, measure: bool = False) -> None:
    """Provision the hosts, detect, choose the network, build and distribute the image, write the cluster map."""
    from launch.deploy import deploy as deploying

    with_horovod, remeasure = _truth(horovod, "HOROVOD"), _truth(measure, "MEASURE")
    _end(
        lambda: deploying.deploy(_inventory(inventory), CONSOLE, with_horovod, remeasure),
        _inventory(inventory),
        HOSTS_HALF_DONE.format("deploy"),
    )


@task(
    help={
        "src": "the folder that ranks shall see as /data; nothing: list the datasets on the hosts, or use NAME again",
        "name": "what the dataset is called on the hosts",
        "verify": "read all files anew, here and on the hosts",
        "remove": "remove the dataset NAME from all hosts",
    }
)
def data(
    context: Context, inventory: str = "", src: str = "", name: str = "", verify: bool = False, remove: bool = False
) -> None:
    """Bring the dataset SRC to every host, from host to host, only what differs; list and remove datasets."""
    from launch.deploy import data as bringing

    request = bringing.Request(
        inventory=_inventory(inventory),
        src=_given(src, "SRC"),
        name=_given(name, "NAME"),
        verify=_truth(verify, "VERIFY"),
        remove=_truth(remove, "REMOVE"),
    )
    _end(
        lambda: bringing.data(request, CONSOLE), request.inventory, "run the same command again: it goes on from there"
    )


@task(
    help={
        "nodes": "run on the first N hosts of the inventory; all when not given",
        "args": "arguments of the trainer (python -m train --help) or of your own script",
        "project": "folder of your own model, dataset, loss or transform for our trainer; with its requirements.txt",
        "workload": "folder of your own script; with its requirements.txt, if it has one",
        "script": "your script, relative to the workload",
        "resume": "continue an earlier run from its newest checkpoint: its id, or last",
        "grace": "seconds that a stopped run gets to finish its step and write a checkpoint (30)",
        "max-restarts": "how often a failed run goes on by itself (3; a script: once it says that it can); 0: never",
        "min-nodes": "the fewest hosts on which it goes on (1)",
        "max-host-failures": "a host because of which it failed so often is left out (2)",
        "wait": "wait for the hosts while other runs are in progress there; first come, first served",
        "detach": "start, and end without watching; make attach shows the run later",
        "keep-runs": "how many gathered runs stay on the hosts and here (20); 0: all",
        "secrets": "a folder of files, or a file with lines NAME=value: /muster/private/secrets/<name> for the ranks",
        "view": "plain: lines alone, also on a terminal",
        "launcher": "horovod: for a script of your own that calls hvd.init(); needs make deploy HOROVOD=1",
        "dry-run": "print every host's command and environment, start nothing",
        "skip-check": "leave out the quick check before the start",
    }
)
def train(
    context: Context,
    inventory: str = "",
    nodes: str = "",
    args: str = "",
    project: str = "",
    workload: str = "",
    script: str = "",
    resume: str = "",
    grace: str = "",
    max_restarts: str = "",
    min_nodes: str = "",
    max_host_failures: str = "",
    keep_runs: str = "",
    secrets: str = "",
    view: str = "",
    launcher: str = "",
    wait: bool = False,
    detach: bool = False,
    dry_run: bool = False,
    skip_check: bool = False,
) -> None:
    """Train on the hosts of a deployed inventory; live output of every rank; results in runs/<id>/."""
    from launch.run import train as run

    request = run.Request(
        inventory=_inventory(inventory),
        nodes=_given(nodes, "NODES"),
        args=_given(args, "ARGS"),
        project=_given(project, "PROJECT"),
        workload=_given(workload, "WORKLOAD"),
        script=_given(script, "SCRIPT"),
        resume=_given(resume, "RESUME"),
        grace=_given(grace, "GRACE"),
        max_restarts=_given(max_restarts, "MAX_RESTARTS"),
        min_nodes=_given(min_nodes, "MIN_NODES"),
        max_host_failures=_given(max_host_failures, "MAX_HOST_FAILURES"),
        keep_runs=_given(keep_runs, "KEEP_RUNS"),
        secrets=_given(secrets, "SECRETS"),
        view=_given(view, "VIEW"),
        launcher=_given(launcher, "LAUNCHER"),
        wait=_truth(wait, "WAIT"),
        detach=_truth(detach, "DETACH"),
        dry_run=_truth(dry_run, "DRY_RUN"),
        skip_check=_truth(skip_check, "SKIP_CHECK"),
    )
    _end(lambda: run.train(request, CONSOLE), request.inventory, RUNS_GO_ON)


@task(
    help={
        "anyway": "start it also where it would not be the same run, and list the differences",
        "secrets": "as for train: their content is not kept with a run",
        "wait": "as for train",
        "detach": "as for train",
        "keep-runs": "as for train",
        "view": "plain: lines alone, also on a terminal",
        "dry-run": "say what differs, start nothing",
        "skip-check": "leave out the quick check before the start, and the comparison of data and hardware",
    }
)
def reproduce(
    context: Context,
    inventory: str = "",
    run: str = "",
    anyway: bool = False,
    secrets: str = "",
    keep_runs: str = "",
    view: str = "",
    wait: bool = False,
    detach: bool = False,
    dry_run: bool = False,
    skip_check: bool = False,
) -> None:
    """Run RUN=<id> once more: same image, hosts, arguments; say what differs, and compare the results."""
    from launch.run import reproduce as reproducing

    request = reproducing.Request(
        inventory=_inventory(inventory),
        run=_given(run, "RUN"),
        given={name: os.environ.get(name, "") for name in reproducing.OF_THE_RUN},
        anyway=_truth(anyway, "ANYWAY"),
        secrets=_given(secrets, "SECRETS"),
        keep_runs=_given(keep_runs, "KEEP_RUNS"),
        view=_given(view, "VIEW"),
        wait=_truth(wait, "WAIT"),
        detach=_truth(detach, "DETACH"),
        dry_run=_truth(dry_run, "DRY_RUN"),
        skip_check=_truth(skip_check, "SKIP_CHECK"),
    )
    _end(lambda: reproducing.reproduce(request, CONSOLE), request.inventory, RUNS_GO_ON)


@task(
    help={
        "nodes": "check the first N hosts of the inventory; all when not given",
        "args": "arguments of the training to forecast, as for train",
        "project": "folder of its own model, dataset, loss or transform, as for train",
        "forecast": "0: leave the forecast out",
        "as-json": "print one JSON document and nothing else (JSON=1)",
    }
)
def check(
    context: Context,
    inventory: str = "",
    nodes: str = "",
    args: str = "",
    project: str = "",
    forecast: str = "",
    as_json: bool = False,
) -> None:
    """Measure links, hosts and their sameness, sum over the real backend, forecast a run; writes report.html."""
    from launch.deploy import workload
    from launch.health import check as checking

    request = checking.Request(
        inventory=_inventory(inventory),
        nodes=_given(nodes, "NODES"),
        args=_given(args, "ARGS"),
        project=_given(project, "PROJECT"),
        forecast=_given(forecast, "FORECAST", "1"),
        as_json=_truth(as_json, "JSON"),
    )
    _end(lambda: checking.check(request, CONSOLE, workload.bring), request.inventory, RUNS_GO_ON)


@task(
    help={
        "keep-runs": "how many gathered runs stay on the hosts and here (20); 0: all",
        "view": "plain: lines alone, also on a terminal",
    }
)
def attach(context: Context, inventory: str = "", run: str = "", keep_runs: str = "", view: str = "") -> None:
    """Watch RUN=<id> that goes on on its hosts, whoever started it, as train does; Ctrl-C stops it."""
    from launch.run import attach as attaching

    path, name = _inventory(inventory), _given(run, "RUN")
    kept, plain = _given(keep_runs, "KEEP_RUNS"), _given(view, "VIEW")
    _end(lambda: attaching.attach(path, name, kept, plain, CONSOLE), path, RUNS_GO_ON)


@task(help={"keep-runs": "how many gathered runs stay on the hosts and here (20); 0: all"})
def gather(context: Context, inventory: str = "", run: str = "", keep_runs: str = "") -> None:
    """Fetch the results of RUN=<id>, or of all ended runs, from their hosts; may be repeated."""
    from launch.run import fetch

    path = _inventory(inventory)
    _end(lambda: fetch.fetch(path, _given(run, "RUN"), _given(keep_runs, "KEEP_RUNS"), CONSOLE), path)


@task
def status(context: Context, inventory: str = "") -> None:
    """Show the runs on the hosts, who waits for them, and the newest runs gathered here."""
    from launch.run import status as showing

    _end(lambda: showing.status(_inventory(inventory), CONSOLE), _inventory(inventory))


@task(help={"view": "plain: lines alone, also on a terminal"})
def logs(context: Context, inventory: str = "", run: str = "", view: str = "") -> None:
    """Print the output of RUN=<id> from its begin, labelled by host and rank; live while it runs."""
    from launch.run import logs as viewing

    path, name, plain = _inventory(inventory), _given(run, "RUN"), _given(view, "VIEW")
    _end(lambda: viewing.logs(path, name, plain, CONSOLE), path)


@task
def stop(context: Context, inventory: str = "", run: str = "", grace: str = "") -> None:
    """Stop RUN=<id> on all its hosts, and wait for its end; GRACE: seconds for its ranks, in the place of the run's."""
    from launch.run import stop as stopping

    path, name, seconds = _inventory(inventory), _given(run, "RUN"), _given(grace, "GRACE")
    _end(lambda: stopping.stop(path, name, CONSOLE, seconds), path)


@task(help={"yes": "end runs in progress, too, and lose what they and `make data` have on the hosts"})
def teardown(context: Context, inventory: str = "", yes: bool = False, packages: bool = False) -> None:
    """Remove Muster's containers, images and settings from every host; PACKAGES=1: also packages that it installed."""
    from launch.deploy import deploy as deploying

    _end(
        lambda: deploying.teardown(_inventory(inventory), CONSOLE, _truth(yes, "YES"), _truth(packages, "PACKAGES")),
        _inventory(inventory),
        HOSTS_HALF_DONE.format("teardown"),
    )


def _lab(*arguments: str) -> None:
    from containers import lab as labs
    from containers.engine import ContainersError
    from launch.cli import exits
    from launch.cli.refusal import refuse
    from launch.deploy import control

    def command() -> int:
        try:
            options = labs.parse(list(arguments))
            control.ensure_ready(CONSOLE)
            return labs.run(options)
        except ContainersError as error:
            status = exits.REFUSED if isinstance(error, labs.BadOption) else exits.FAILED
            raise refuse(error.where, error.what, error.fix, status) from None

    _end(command)


@task(
    help={
        "hosts": "how many (2)",
        "name": "name of the lab (lab)",
        "link": "rate of the data NICs, such as 1gbit",
        "cpus": "computing time of each host, in cores, such as 0.4; all that its cores give when not given",
        "system": "debian, ubuntu (24.04), ubuntu22.04, or several with commas between, which hosts get in turn (OS=)",
    }
)
def lab(context: Context, hosts: str = "", name: str = "", link: str = "", cpus: str = "", system: str = "") -> None:
    """Containers as hosts on this machine, bare, as a cluster to play with; writes inventory/<name>."""
    given = {"link": _given(link, "LINK"), "cpus": _given(cpus, "CPUS"), "os": _given(system, "OS")}
    options = [f"--{option}={value}" for option, value in given.items() if value]
    size = _given(hosts, "HOSTS", "2")
    _lab("up", "--name", _given(name, "LAB", "lab"), "--hosts", size, *options)


@task
def lab_down(context: Context, name: str = "") -> None:
    """Remove a lab: its hosts, networks, volumes and inventory."""
    _lab("down", "--name", _given(name, "LAB", "lab"))


@task
def lab_status(context: Context) -> None:
    """Show the labs on this machine."""
    _lab("status")


@task
def demo(context: Context) -> None:
    """The main job at once: a lab of two hosts, trust, deploy, a two-host run. The lab stays up."""
    from launch import demo as demonstration

    _end(lambda: demonstration.demo(CONSOLE), ROOT / "inventory" / demonstration.LAB, RUNS_GO_ON)
