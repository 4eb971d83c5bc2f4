"""Plants deliberate faults in Muster, one at a time, and prints which test finds each.

    python -m tests.planted map                  run the tests under coverage: which of them reach which line
    python -m tests.planted map --lab            the same with the lab tests, added to the map
    python -m tests.planted map --add tests/x.py     the same with these tests, added; other words for pytest as well
    python -m tests.planted map --data DIR... --tree TREE     from data of a baseline that was measured in TREE
    python -m tests.planted choose --seed 1 --count 66 --lab 8     write faults.json
    python -m tests.planted run [--lab NAME --lab-tree TREE] [--only 'lab-*'] [--jobs 2] [--limit 240]
    python -m tests.planted run --compare old.json new.json     faults that only the old suite found; status 1 if any

Of --data, DIR holds coverage's data files and DIR.log what pytest printed with --durations=0; a DIR named lab is of lab
tests. `run` writes build/planted/results.json; --limit is the seconds for each fault. The lab of --lab is up, made in
--lab-tree (here, unless given); without --lab no lab fault is tried. A fault of faults.json is found by its function
and text, so line numbers may change; edit or remove one that `run` can no longer place. found.json has the results of
the suite of 2026-11-30, before tests were merged and deleted.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path

from tests.planted import reach, runs
from tests.planted.faults import CannotPlaceError, Fault, Source, candidates, choose, package, place, planted, quotas

FAULTS = Path(__file__).with_name("faults.json")
RESULTS = reach.FOLDER / "results.json"
#: Coverage does not see what runs on the lab's hosts: which lab tests do.
ON_HOSTS = {
    "keeper/": ("tests/lab/test_endings.py", "tests/lab/test_faults.py", "tests/lab/test_restarts.py"),
    "playbooks/module_utils/muster_data.py": ("tests/lab/test_data.py",),
    "playbooks/module_utils/muster_links.py": ("tests/lab/test_check.py",),
    "playbooks/module_utils/muster_survey.py": ("tests/lab/test_check.py",),
}


def map_command(args: argparse.Namespace, words: list[str]) -> int:
    if not (args.lab or args.add):
        reach.fresh(args.tree)
    if args.data:
        for data in args.data:
            reach.add(data, args.tree, data.name == "lab", reach.logged(data.with_suffix(".log").read_text()))
    else:
        reach.add(reach.RAW, reach.ROOT, args.lab, reach.measure(args.lab, words))
    print(f"the map has {len(reach.Map().tests)} tests")
    return 0


def choose_command(args: argparse.Namespace, _: list[str]) -> int:
    known, lines, plain, lab = reach.Map(), Counter[str](), list[Fault](), list[Fault]()
    for file in reach.sources(reach.SOURCES):
        lines[package(file)] += (reach.SOURCES / file).read_text().count("\n")
        now = Source((reach.ROOT / file).read_text()) if (reach.ROOT / file).exists() else Source("")
        on_hosts = next((tests for start, tests in ON_HOSTS.items() if file.startswith(start)), ())
        for fault in candidates(file, Source((reach.SOURCES / file).read_text())):
            on_a_lab = replace(fault, lab=True, tests=on_hosts)
            with contextlib.suppress(CannotPlaceError):  # the tree may have changed since the map was made
                here = now.line(place(now, fault)[0])
                if known.reaching(fault):
                    plain.append(replace(fault, line=here))
                elif known.reaching(on_a_lab):
                    lab.append(replace(on_a_lab, line=here))
    chosen = choose(plain, quotas(lines, args.count - args.lab, 3), args.seed)
    with_lab = {name: lines[name] for name in lines if any(package(fault.file) == name for fault in lab)}
    chosen += choose(lab, quotas(with_lab, args.lab, 1), args.seed)
    numbers = Counter[str]()
    for index, fault in enumerate(chosen):
        name = "lab" if fault.lab else package(fault.file).removesuffix(".py")
        numbers[name] += 1
        chosen[index] = replace(fault, id=f"{name}-{numbers[name]:02}")
        ast.parse(planted((reach.ROOT / fault.file).read_text(), fault))
    document = {"seed": args.seed, "faults": [asdict(fault) for fault in chosen]}
    FAULTS.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(chosen)} faults, {numbers['lab']} of them for a lab, of {len(plain)} and {len(lab)}: {FAULTS}")
    return 0


def load() -> list[Fault]:
    entries = json.loads(FAULTS.read_text())["faults"]
    return [Fault(**entry | {"tests": tuple(entry["tests"])}) for entry in entries]


def run_command(args: argparse.Namespace, _: list[str]) -> int:
    if args.compare:
        old, new = (json.loads(path.read_text()) for path in args.compare)
        for lost in runs.lost(old, new):
            print(f"lost: {runs.line(lost, old[lost])}; now {new.get(lost, {}).get('status', 'not tried')}")
        return bool(runs.lost(old, new))
    faults = [fault for fault in load() if any(fnmatch(fault.id, pattern) for pattern in args.only)]
    plain, lab = ([fault for fault in faults if fault.lab == needs] for needs in (False, True))
    results: dict[str, runs.Result] = json.loads(RESULTS.read_text()) if args.only != ["*"] and RESULTS.exists() else {}
    begun, known = time.monotonic(), reach.Map()

    def go(some: list[Fault], *trees: runs.Tree) -> None:
        for fault, result in runs.run(some, trees, args.limit, known):
            results[fault.id] = result
            print(runs.line(fault.id, result), flush=True)
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")

    if plain:
        go(plain, *(runs.Tree(f"tree-{number}") for number in range(args.jobs)))
    if lab and args.lab:
        go(lab, runs.Tree("tree-lab", args.lab, args.lab_tree))
    counts = Counter(result["status"].split(":")[0] for result in results.values())
    minutes = (time.monotonic() - begun) / 60
    print(", ".join(f"{count} {status}" for status, count in counts.items()), f"in {minutes:.0f} minutes")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser("tests.planted", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(required=True)
    mapping = commands.add_parser("map")
    mapping.add_argument("--lab", action="store_true")
    mapping.add_argument("--add", action="store_true")
    mapping.add_argument("--data", type=Path, nargs="+", default=[])
    mapping.add_argument("--tree", type=Path, default=reach.ROOT)
    mapping.set_defaults(command=map_command)
    choosing = commands.add_parser("choose")
    choosing.add_argument("--seed", type=int, required=True)
    choosing.add_argument("--count", type=int, default=66)
    choosing.add_argument("--lab", type=int, default=8, choices=range(11))
    choosing.set_defaults(command=choose_command)
    running = commands.add_parser("run")
    running.add_argument("--only", nargs="+", default=["*"])
    running.add_argument("--jobs", type=int, default=2)
    running.add_argument("--limit", type=float, default=240)
    running.add_argument("--lab", default="")
    running.add_argument("--lab-tree", type=Path, default=reach.ROOT)
    running.add_argument("--compare", type=Path, nargs=2)
    running.set_defaults(command=run_command)
    args, words = parser.parse_known_args()
    status: int = args.command(args, words)
    return status


if __name__ == "__main__":
    sys.exit(main())
