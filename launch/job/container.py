"""A run's container on one host: started, waited for, stopped and removed there, by its label or its name.

Never found by a process name. Each function here is one call over the host's connection.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from launch.hosts.connection import ANSWER_SECONDS, Machine
from launch.job.plan import HOST_RUNS_DIR, HostPlan, folders, run_dir_on_host

ENGINE_SECONDS = 120  # for Podman to make and start a container, and to remove it and keep what it holds
KILL_SECONDS = 5  # from SIGTERM to SIGKILL, where nothing is left to save
LONGEST_STOP_SECONDS = 3700  # the longest GRACE, and what the engine needs beyond it
KEPT_RUNS = 20  # folders of finished runs that a host keeps; the README says so


def start(machine: Machine, host_plan: HostPlan) -> None:
    """Start a host's container, detached. Other users cannot read the run's folder.

    Raises RuntimeError with Podman's message when it does not start.
    """
    used = folders(host_plan)  # touched: the run that is continued must be one of the newest, which are kept
    command = f"mkdir -p -m 700 {used} && touch {used} && {shlex.join(host_plan.command)}"
    done = machine.root(command, ENGINE_SECONDS)
    if done.exited != 0:
        raise RuntimeError((done.stderr or done.stdout).strip() or f"podman ended with {done.exited}")


def prune_command(runs: str = HOST_RUNS_DIR, keep: int = KEPT_RUNS) -> str:
    """A shell command that removes, in the background, all folders of runs but those in use and the `keep` newest."""
    script = f"""
ids=$(podman ps --all --quiet --filter label=muster.run) && used=$(test -z "$ids" || podman inspect $ids) || exit
ls -dt {runs}/*/ | tail -n +{keep + 1} | while read -r folder; do
  case "$used" in *"$(basename "$folder")"*) ;; *) rm -rf "$folder" ;; esac
done
"""
    return f"{{ setsid sh -c {shlex.quote(script)} </dev/null >/dev/null 2>&1 & }}"


def stream_output(machine: Machine, host_plan: HostPlan, out: Any) -> Any:
    """The container's output from its first line until it ends; `out` is a file-like object."""
    return machine.root(f"podman logs --follow {host_plan.container} 2>&1", None, out)


def wait(machine: Machine, host_plan: HostPlan) -> int:
    """The container's exit status, once it has ended. Raises HostLost when the host stays away."""
    done = machine.through_drops(lambda: machine.root(f"podman wait {host_plan.container}", None))
    status = done.stdout.strip()
    return int(status) if done.exited == 0 and status.isdigit() else -1


def stop(machine: Machine, run: str, why: str, seconds: int | None = None) -> None:
    """Stop every container of a run on a host: SIGTERM, then SIGKILL. Writes there who stopped the run and why.

    `seconds`: between the two signals; None: as long as the plan says, so that ranks can write a checkpoint.
    Raises RuntimeError with the host's message when its containers could not be stopped.
    """
    folder = run_dir_on_host(run)
    note = f"test -d {folder} && printf '%s\\n' {shlex.quote(why)} > {folder}/stopped"
    patience = "" if seconds is None else f"--time {seconds} "
    command = f'ids=$({_ids(run)}) || exit; test -z "$ids" || podman stop {patience}$ids >/dev/null'
    longest = LONGEST_STOP_SECONDS if seconds is None else seconds
    machine.answer(f"{note}; {command}", longest + ANSWER_SECONDS)


def remove(machine: Machine, run: str) -> None:
    """Remove the containers of a stopped run from a host.

    A command that follows the run is given 3 seconds to copy its results and to remove them itself. Raises RuntimeError
    with the host's message when containers are left.
    """
    wait_for_follower = f'for i in 1 2 3 4 5 6; do test -z "$({_ids(run)})" && break; sleep 0.5; done'
    command = f'ids=$({_ids(run)}) || exit; test -z "$ids" || podman rm --force $ids'
    machine.answer(f"{wait_for_follower}; {command}", ANSWER_SECONDS + KILL_SECONDS)


def listed(machine: Machine) -> list[dict[str, Any]]:
    """The containers with a run's label on a host, as `podman ps` lists them. Raises RuntimeError when it cannot."""
    found: list[dict[str, Any]] = json.loads(
        machine.answer("podman ps --all --filter label=muster.run --format json") or "[]"
    )
    return found


def finish(machine: Machine, host_plan: HostPlan) -> dict[str, Any]:
    """After the end: keep what the script wrote in its own folder, give all to the SSH user, remove the container.

    The folders of old runs go too, in the background: at a start that would take the ranks' processors.

    Returns {"state": podman's State or {}, "left": ids of containers of this run that are still there}. Raises
    RuntimeError with the host's message when none of it could be done.
    """
    container, run_dir = host_plan.container, host_plan.run_dir
    script = f"""
state=$(podman inspect --format '{{{{json .State}}}}' {container} 2>/dev/null || echo '{{}}')
upper=$(podman inspect --format '{{{{.GraphDriver.Data.UpperDir}}}}' {container} 2>/dev/null)
if [ -n "$upper" ] && [ -d "$upper/workload" ]; then cp -a --remove-destination "$upper/workload" {run_dir}/; fi
test -z "$SUDO_USER" || chown -R -h "$SUDO_USER" {run_dir}
chmod -R u+rX {run_dir}
podman rm --force --time {KILL_SECONDS} {container} >/dev/null 2>&1
echo "state=$state"
echo "left=$({_ids(host_plan.environment["MUSTER_RUN_ID"])} | tr '\\n' ' ')"
{prune_command()}
"""
    answer = machine.answer(script, ENGINE_SECONDS)
    found = dict(line.split("=", 1) for line in answer.splitlines() if "=" in line)
    return {"state": json.loads(found.get("state") or "{}"), "left": found.get("left", "").split()}


def _ids(run: str) -> str:
    return f"podman ps --all --quiet --filter label=muster.run={run}"
