"""Where a run continues: the newest step that a host holds intact, chosen by all ranks together.

All functions here are collective: every rank calls them at the same point, with the same arguments except
its place, and gets the same answer or the same CheckpointError. A host's local rank 0, its leader, reads and writes
for it. Hosts may each have a folder of their own or share one. Ranks of a host are numbered in a row, as torchrun does.
"""

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

from train.checkpoints import files
from train.checkpoints.files import CheckpointError, Manifest, Member
from train.checkpoints.prune import set_aside
from train.checkpoints.transfer import hand_out, raise_together
from train.start.group import Place, from_all_ranks


@dataclass(frozen=True)
class StartPoint:
    """Where to begin: `path` is this host's intact file, None to begin at step 0; `notes` are for the user."""

    path: Path | None = None
    step: int | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Copy:
    """What a leader holds of one step: a manifest that its file matches, or what is wrong; neither if it has none."""

    host: str
    manifest: Manifest | None = None
    complaint: str = ""

    @property
    def sha256(self) -> str | None:
        return self.manifest["sha256"] if self.manifest else None


@dataclass(frozen=True)
class Choice:
    step: int
    copies: list[Copy | None]  # of each rank, None where it is no leader
    giver: int  # the lowest rank that holds it intact
    takers: list[int]  # leaders that hold none, or another one


def newest_common(folder: Path, place: Place) -> tuple[int | None, list[str]]:
    """The newest step of which a host holds an intact checkpoint, and notes for the user: corrupt ones that were
    passed over (host, file, reason), copies that hosts were given. None where there is no such step.

    On return every host holds that step in `folder`. Raises CheckpointError where a host cannot be given it.
    """
    choice, notes = choose(folder, place)
    if choice is None:
        return None, notes
    return choice.step, notes + give(choice, folder, folder, place)


def resolve(resume: str, folder: Path, place: Place, member: Member | None = None) -> StartPoint:
    """Where training begins, for --resume: "auto" (newest_common in `folder`), "none" (step 0) or a path: a
    step-<n>.pt, a folder of checkpoints, or a run's folder; hosts where nothing is at that path are given it, into
    `folder`. member: this rank's, where members have files of their own.

    Checkpoints in `folder` of later steps than that are renamed to left-step-<n>: see `prune.set_aside`.
    Raises CheckpointError.
    """
    source, only = (folder, None) if resume in ("auto", "none") else meant(Path(resume))
    choice, notes = (None, list[str]()) if resume == "none" else choose(source, place, only, member)
    if choice is None and resume not in ("auto", "none"):
        reasons = from_all_ranks(why_unreadable(source) if place.local_rank == 0 else "", place)
        said = dict.fromkeys(filter(None, reasons))
        raise CheckpointError("; ".join([f"--resume {resume}: no host has an intact checkpoint there", *said, *notes]))
    same = source.resolve() == folder.resolve()
    if place.local_rank == 0:
        problem = try_set_aside(folder, choice.step if choice and same else -1)
    raise_together(problem if place.local_rank == 0 else "", place)  # and nobody writes before all are done
    if choice is None:
        return StartPoint(notes=notes)
    notes += give(choice, source, folder, place)
    mine = folder if place.rank - place.local_rank in choice.takers else source
    return StartPoint(files.path_of(mine, choice.step), choice.step, notes)


def meant(path: Path) -> tuple[Path, int | None]:
    """(folder of checkpoints, the one step asked for or None) for a path on the command line."""
    if path.suffix in (".pt", ".json"):
        files.refuse_member(path)
        step = files.step_of(path)
        if step is None:
            raise CheckpointError(
                f"--resume {path}: not named step-<n>.pt, so it is none of this trainer's checkpoints; "
                "to start from its weights use --init-from"
            )
        return path.parent, step
    inside = path / "checkpoints"
    return (inside if os.path.isdir(inside) else path), None  # False, too, for a folder that may not be read


def why_unreadable(folder: Path) -> str:
    """What keeps this host from reading the folder; empty where it can, or has no such folder."""
    try:
        os.listdir(folder)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{socket.gethostname()}: {folder} cannot be read ({error.strerror or error})"
    return ""


def choose(
    folder: Path, place: Place, only: int | None = None, member: Member | None = None
) -> tuple[Choice | None, list[str]]:
    """Goes from the newest step down; every leader that has a step verifies its copy.

    A step of which one of the members has no own file, as after the failure of its host, gives way to an older one of
    which all have theirs: from that the run goes on as if unbroken. Where there is none, the newest step it is.
    """
    mine = files.saved_steps(folder) if place.local_rank == 0 else []
    steps = {step for steps in from_all_ranks(mine, place) for step in steps if only in (None, step)}
    notes: list[str] = []
    newest, passed = None, list[str]()
    for step in sorted(steps, reverse=True):
        copies = from_all_ranks(inspect(folder, step, place) if place.local_rank == 0 else None, place)
        notes += [f"{copy.host}: {copy.complaint}, passed over" for copy in copies if copy and copy.complaint]
        intact = [rank for rank, copy in enumerate(copies) if copy and copy.manifest]
        if intact:
            good = copies[intact[0]]
            takers = [rank for rank, copy in enumerate(copies) if copy and good and copy.sha256 != good.sha256]
            choice = Choice(step, copies, intact[0], takers)
            newest = newest or choice
            is_shared = good and good.manifest and member and good.manifest.get("members") == member.of
            lacking = without_own(folder, step, place, member) if member and is_shared else []
            if not lacking:
                return choice, notes + passed
            passed += lacking
    return newest, notes


def without_own(folder: Path, step: int, place: Place, member: Member) -> list[str]:
    """Complaints of the hosts that lack their own file of this step; all members of then take part now."""
    complaint, host = "", f"{socket.gethostname()} (rank {place.rank})"
    if member.number not in files.members_of(folder, step, member.of):
        complaint = f"{host}: no own file of step {step}, which is passed over"
    else:
        try:
            files.verify(folder, step, member.number)
        except CheckpointError as error:
            complaint = f"{host}: {error}, passed over"
    return [text for text in from_all_ranks(complaint, place) if text]


def inspect(folder: Path, step: int, place: Place) -> Copy:
    host = f"{socket.gethostname()} (rank {place.rank})"
    if step not in files.saved_steps(folder):
        return Copy(host)
    try:
        return Copy(host, files.verify(folder, step))
    except CheckpointError as error:
        return Copy(host, complaint=str(error))


def give(choice: Choice, source: Path, folder: Path, place: Place) -> list[str]:
    """Gives the chosen checkpoint to the leaders that lack it, into their `folder`. Returns notes."""
    giver = choice.copies[choice.giver]
    assert giver is not None and giver.manifest is not None
    if not choice.takers:
        return []
    hand_out(source, folder, giver.manifest, choice.giver, choice.takers, place)
    names = [copy.host for rank, copy in enumerate(choice.copies) if copy and rank in choice.takers]
    size = giver.manifest["bytes"] / 2**20
    return [f"{name}: was given step-{choice.step}.pt ({size:.1f} MiB) by {giver.host}" for name in names]


def try_set_aside(folder: Path, after: int) -> str:
    try:
        set_aside(folder, after)
    except OSError as error:
        return f"cannot rename the checkpoints in {folder} of later steps than the one where this run begins: {error}"
    return ""
