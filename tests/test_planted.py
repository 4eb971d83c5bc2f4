"""Promise: a planted fault is what it claims to be, and is found again in a file that has changed."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from tests.planted.faults import CannotPlaceError, Fault, Source, candidates, choose, place, planted, quotas
from tests.planted.reach import CONTEXT, logged

TEXT = """
class Sampler:
    def share(self, rank, size):  # größer
        if rank < 0 or rank >= size:
            raise ValueError(f"{rank == 1}")
        if not self.shuffle and rank not in (
            self.hosts
        ):
            return None
        return self.part(rank, size, max(1, 2))

def clean(folder):
    if folder == "/":
        return
    shutil.rmtree(folder)

def wait(deadline):
    return time.monotonic() < deadline
"""
FAULTS = list(candidates("train/sampler.py", Source(TEXT)))


HOSTS = "rank not in (\n            self.hosts\n        )"


def test_every_kind_of_fault_is_found_and_every_replacement_is_python() -> None:
    assert {(fault.line, fault.original, fault.replacement) for fault in FAULTS} == {
        (4, "rank < 0", "rank <= 0"),
        (4, "rank >= size", "rank > size"),
        (4, "rank < 0 or rank >= size", "rank < 0 and rank >= size"),
        (4, "if rank < 0 or rank >= size:", "if False:"),
        (6, "not self.shuffle", "self.shuffle"),
        (6, HOSTS, HOSTS.replace("not in", "in")),
        (6, f"not self.shuffle and {HOSTS}", f"not self.shuffle or {HOSTS}"),
        (6, f"if not self.shuffle and {HOSTS}:", "if False:"),
        (10, "max(1, 2)", "min(1, 2)"),
        (10, "self.part(rank, size, max(1, 2))", "self.part(size, rank, max(1, 2))"),
    }
    for fault in FAULTS:
        assert ast.dump(ast.parse(planted(TEXT, fault))) != ast.dump(ast.parse(TEXT))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kind)
def test_a_fault_is_placed_after_other_lines_have_changed(fault: Fault) -> None:
    changed = "FIRST = 1 if rank < 0 else 2\n" + TEXT.replace(HOSTS, " ".join(HOSTS.split()))
    start, end = place(Source(changed), fault)
    assert changed[start:end].split() == fault.original.split()


def test_a_fault_without_one_place_is_reported() -> None:
    fault = next(fault for fault in FAULTS if fault.original == "rank < 0")
    with pytest.raises(CannotPlaceError, match=r"sampler.py, Sampler.share: `rank < 0` is there 2 times"):
        planted(TEXT.replace("        if not", "        print(rank < 0)\n        if not"), fault)
    with pytest.raises(CannotPlaceError, match=r"has 0 functions Sampler.share"):
        planted(TEXT.replace("share", "part_of"), fault)


def test_the_choice_is_by_seed_of_all_kinds_and_one_for_each_function() -> None:
    found = [replace(fault, function=f"f{index}") for index in range(30) for fault in FAULTS]
    chosen = choose(found, {"train": 9}, 1)
    assert chosen == choose(found, {"train": 9}, 1) != choose(found, {"train": 9}, 2)
    assert len({fault.function for fault in chosen}) == 9
    families = [fault.kind.split(":")[0] for fault in chosen]
    assert {families.count(family) for family in families} == {3}
    assert quotas({"launch": 900, "train": 600, "fabfile.py": 10}, 18, 3) == {"launch": 9, "train": 6, "fabfile.py": 3}


def test_contexts_and_logs_of_pytest_are_read() -> None:
    for context in ("none|tests/a.py::b[c d]|run", "tests/a.py::b[c d] (setup)", "tests/a.py::b[c d]|teardown"):
        match = CONTEXT.search(context)
        assert match and match[1] == "tests/a.py::b[c d]"
    log = "1.50s setup    tests/a.py::b[c d]\n0.25s call     tests/a.py::b[c d]\n"
    log += "FAILED tests/a.py::e[f g] - assert 1 == 2\n"
    assert logged(log) == ({"tests/a.py::b[c d]": 1.75}, {"tests/a.py::e[f g]"})
