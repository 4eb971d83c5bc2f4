"""Run by test_checkpoints_agree.py: "hosts" of one or two ranks, each with its own folder, ask where to go on.

run(folder) has each of CASES in folder/<case>; each rank leaves <case>/<rank>.json: what `resolve` or `newest_common`
gave, or the error, and the value of the state found.
"""

import json
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.train.parallel_ranks import fork
from train.checkpoints import CheckpointError, files, newest_common, resolve, transfer
from train.start.group import Place
from train.start.muster_run import leave_process_group

NUMBERS = 5000  # a file of more than one piece
transfer.PIECE_BYTES = 4096


def put(folder: Path, step: int, value: float | None = None) -> Path:
    """A checkpoint whose numbers are all the step's own, or `value`."""
    filled = torch.full((NUMBERS,), float(step if value is None else value))
    return files.write(folder, step, {"model": {"w": filled}, "position": {"step": step}}, 0.5)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def three(case: Path) -> list[Path]:
    return [case / f"host{number}" / "checkpoints" for number in range(3)]


def all_hold_the_newest(case: Path) -> list[Path]:
    for folder in three(case):
        put(folder, 10), put(folder, 20)
    return three(case)


def lacking_flipped_and_none(case: Path) -> list[Path]:
    """Host 0 lacks the newest one, host 1's has a flipped bit, host 2 (the only one intact) gives it to both."""
    hosts = three(case)
    put(hosts[0], 10)
    for host in hosts[1:]:
        put(host, 10), put(host, 20)
    flip(hosts[1] / "step-20.pt")
    return hosts


def a_new_host(case: Path) -> list[Path]:
    hosts = three(case)[:2]
    put(hosts[0], 20)
    return hosts


def newest_corrupt_everywhere(case: Path) -> list[Path]:
    hosts = three(case)[:2]
    for host in hosts:
        put(host, 10)
        flip(put(host, 20))
    return hosts


def nothing_anywhere(case: Path) -> list[Path]:
    return three(case)[:2]


def different_copies(case: Path) -> list[Path]:
    hosts = three(case)[:2]
    put(hosts[0], 20), put(hosts[1], 20, 99)
    return hosts


def one_shared_folder(case: Path) -> list[Path]:
    """Two leaders write the same files into one folder; the third, with its own, gives them."""
    hosts = three(case)
    put(hosts[0], 10), put(hosts[2], 20)
    return [hosts[0], hosts[0], hosts[2]]


def no_room(case: Path) -> list[Path]:
    """Host 1's folder cannot be made: a file is in its place."""
    hosts = three(case)[:2]
    put(hosts[0], 20)
    hosts[1].parent.mkdir(parents=True)
    hosts[1].write_text("in the way")
    return hosts


def from_elsewhere(case: Path) -> list[Path]:
    """--resume PATH, which only host 1 has."""
    put(case / "other1" / "checkpoints", 5, 55)
    put(case / "host0" / "checkpoints", 20)
    return three(case)[:2]


def from_an_older_one(case: Path) -> list[Path]:
    hosts = three(case)[:2]
    for host in hosts:
        put(host, 10), put(host, 20)
    return hosts


def anew(case: Path) -> list[Path]:
    return from_an_older_one(case)


def absent_path(case: Path) -> list[Path]:
    return from_an_older_one(case)


def a_slow_link(case: Path) -> list[Path]:
    """Each of the six pieces takes a quarter of the longest wait."""
    return a_new_host(case)


def bound_to_gpus(case: Path) -> list[Path]:
    """The default group is bound to devices, as NCCL's is."""
    return a_new_host(case)


def many_new_hosts(case: Path) -> list[Path]:
    hosts = [case / f"host{number}" / "checkpoints" for number in range(6)]
    put(hosts[2], 20)
    return hosts


CASES: dict[Callable[[Path], list[Path]], tuple[int, str]] = {  # ranks of a host, --resume ("": newest_common)
    all_hold_the_newest: (1, ""),
    lacking_flipped_and_none: (1, ""),
    a_new_host: (2, "auto"),
    newest_corrupt_everywhere: (2, "auto"),
    nothing_anywhere: (1, "auto"),
    different_copies: (1, ""),
    one_shared_folder: (1, "auto"),
    no_room: (1, ""),
    from_elsewhere: (2, "{case}/other{host}"),
    from_an_older_one: (1, "{case}/host{host}/checkpoints/step-10.pt"),
    anew: (1, "none"),
    absent_path: (1, "{case}/nowhere"),
    a_slow_link: (2, "auto"),
    bound_to_gpus: (2, "auto"),
    many_new_hosts: (1, "auto"),
}
LONGEST_WAIT = 4.0  # seconds, of the ranks on a slow link


def slow_down() -> None:
    made = transfer.pass_on

    def pass_on(piece: bytearray, line: list[int]) -> None:
        if dist.get_rank() == line[0]:
            time.sleep(LONGEST_WAIT / 4)
        made(piece, line)

    transfer.pass_on = pass_on


class Split:
    """A communicator of NCCL's, of which torch makes the new group's. All ranks would have to enter here, but those
    of a new group of gloo's do not."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        raise AssertionError("this rank would wait for ever")


def bind() -> None:
    """As with init_process_group(device_id=...): there is no GPU here, and no NCCL."""
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)  # type: ignore[union-attr]
    distributed_c10d._get_split_source = lambda group: Split()  # type: ignore[assignment]


def one_rank(rank: int, each: int, hosts: list[Path], resume: str, case: Path) -> None:
    world = each * len(hosts)
    slow = case.name == a_slow_link.__name__
    wait = timedelta(seconds=LONGEST_WAIT) if slow else None
    dist.init_process_group("gloo", init_method=f"file://{case}/store", rank=rank, world_size=world, timeout=wait)
    if slow:
        slow_down()
    if case.name == bound_to_gpus.__name__:
        bind()
    place, folder = Place(rank, rank % each, world, each), hosts[rank // each]
    answer: dict[str, object]
    try:
        if resume:
            found = resolve(resume.format(case=case, host=rank // each), folder, place)
            path, answer = found.path, {"step": found.step, "notes": found.notes, "path": str(found.path)}
        else:
            step, notes = newest_common(folder, place)
            path = None if step is None else folder / f"step-{step}.pt"
            answer = {"step": step, "notes": notes}
        if path is not None:
            state = files.load_path(path)
            answer["value"] = sorted(set(state["model"]["w"].tolist()))
    except CheckpointError as error:
        answer = {"error": str(error)}
    (case / f"{rank}.json").write_text(json.dumps(answer))
    dist.all_reduce(torch.zeros(1))
    leave_process_group()


def run(folder: Path) -> None:
    for prepare, (each, resume) in CASES.items():
        case = folder.resolve() / prepare.__name__
        case.mkdir()
        hosts = prepare(case)
        fork(one_rank, [(rank, each, hosts, resume, case) for rank in range(each * len(hosts))])
