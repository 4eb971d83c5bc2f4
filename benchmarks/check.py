"""`make bench-check`: how long the full and the quick check take on three lab hosts, and the schedule for 32 hosts.

The reference of the schedule measures the same pairs one after another, as a script with a loop around iperf3 does. For
three hosts there is no difference between the two. For 32 hosts nothing is measured: the seconds are computed from the
number of rounds. The full check is measured without the forecast, and without the time that make needs to start.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from pathlib import Path

from benchmarks.common import FAB, close, environment, fab, lab
from launch.health import check
from launch.hosts import clustermap
from launch.hosts.connection import machines
from launch.network import measure
from launch.network.measure import rounds

RUNS = 5
MANY = 32


def full_seconds(name: str) -> float:
    """Seconds of one `fab check` without the forecast.

    Raises:
        SystemExit: the command failed.
    """
    begun = time.monotonic()
    done = subprocess.run(
        [FAB, "check"], env=environment(name, FORECAST=0), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"benchmark: `fab check` ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return time.monotonic() - begun


def quick_seconds(name: str) -> float:
    """Seconds of the quick check, including the logins, which `make train` needs in any case."""
    begun = time.monotonic()
    cluster = clustermap.read(Path("inventory") / name)
    with machines(cluster, cluster.hosts) as opened:
        check.quick(cluster, cluster.hosts, opened)
    return time.monotonic() - begun


def main() -> None:
    """Measure and print."""
    hosts = [f"h{number}" for number in range(MANY)]
    begun = time.perf_counter()
    made = rounds(hosts)
    schedule = time.perf_counter() - begun
    pairs = sum(map(len, made))
    each = measure.PAIR_SECONDS + measure.BANDWIDTH_SECONDS
    with lab("bench-check", 3) as name:
        fab(name, "deploy")
        full, quick = [], []
        for turn in range(RUNS + 1):
            whole, short = full_seconds(name), quick_seconds(name)
            print(f"turn {turn}{' (warm-up)' if not turn else ''}: full {whole:.2f} s, quick {short:.2f} s")
            if turn:
                full.append(whole)
                quick.append(short)
    close(
        {
            "full_seconds": round(statistics.median(full), 2),
            "quick_seconds": round(statistics.median(quick), 2),
            "schedule_32_hosts_seconds": round(schedule, 5),
            "schedule_32_hosts_rounds": len(made),
            "measuring_32_hosts_seconds": round(measure.expected_seconds(MANY, 1, measure.BANDWIDTH_SECONDS), 1),
            "reference_seconds": round(pairs * each, 1),
            "ratio": round(len(made) / pairs, 4),
            "reference": f"the {pairs} pairs of 32 hosts one after another; both computed with {each} s for a pair",
        }
    )


if __name__ == "__main__":
    main()
