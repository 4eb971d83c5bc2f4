"""What of a session goes into a checkpoint, and how a run goes on from one.

`state_of` and `restore` are each other's reverse.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchvision

from train import order
from train.checkpoints import CheckpointError, Own, StartPoint, load_path, manifest, own, resolve
from train.datasets.loader import counted_rows
from train.evaluate import Score
from train.inference import recipe
from train.model import running_statistics
from train.session import Position, Session, on_all_ranks, was_restarted
from train.settings import SettingsError, as_document, flag
from train.start import proof
from train.start.group import first_complaint, from_all_ranks
from train.step import forward

State = dict[str, Any]
# Another value of these makes another training: a checkpoint of one is no checkpoint of the other.
FIXED = ("model", "dataset", "batch_size", "seed", "optimizer")
TIMES = ("seconds", "train_seconds")  # of Position


def state_of(session: Session) -> State:
    """Everything a checkpoint holds: tensors (not copied) and plain values. Collective; the same on all ranks.

    With --sync-every its weights are the common ones, and it has no optimizer: each member's own is in `own_state_of`.
    """
    strategy, network, exchange = session.strategy, session.strategy.network, session.exchange
    common = exchange.agreed() if exchange else {}
    return {
        "model": strategy.model_state() | common | running_statistics.mean_buffers(network),
        "rank_buffers": running_statistics.gather_buffers(network),
        "optimizer": None if exchange else strategy.optimizer_state(session.optimizer),
        "scaler": None if exchange else session.precision.state(),
        "exchange": exchange.state() if exchange else None,
        "members": session.members.sizes() if session.members else None,
        "ema": session.ema.state() if session.ema else None,
        "ema_rank_buffers": session.ema.rank_buffers() if session.ema else None,
        "shares": list(session.weights),
        "position": position_of(session),
        "config": config_of(session),
        "versions": {"torch": torch.__version__, "torchvision": torchvision.__version__},
        "world_size": session.place.world_size,
    }


def own_state_of(session: Session) -> Own | None:
    """What this member alone has, after `state_of`: None on ranks that write none, and where there is nothing."""
    strategy, exchange, members = session.strategy, session.exchange, session.members
    if members is None or session.member is None or not members.leads:
        return None
    state: State = {"strategy": strategy.own_state()}
    if exchange is not None:
        common = exchange.agreed()
        state |= {
            "part": session.part,
            "model": {name: value for name, value in strategy.model_state().items() if name in common},
            "optimizer": strategy.optimizer_state(session.optimizer),
            "scaler": session.precision.state(),
            "exchange": exchange.own_state(),
        }
    return Own(session.member, state)


def position_of(session: Session) -> dict[str, Any]:
    """The position as all hosts keep it: its times are rank 0's, since each host's clock has counted its own.
    Collective."""
    position = dataclasses.asdict(session.position)
    if session.place.world_size > 1:
        times = torch.tensor([position[name] for name in TIMES], dtype=torch.float64)
        dist.broadcast(times, src=0)
        position |= zip(TIMES, times.tolist(), strict=True)
    return position


def config_of(session: Session) -> dict[str, Any]:
    """The settings without what is each host's own affair: hosts' checkpoints of a step are equal to the bit."""
    kept = {name: value for name, value in as_document(session.settings).items() if name not in proof.OWN_AFFAIRS}
    return kept | {"data": recipe.data_config(session.dataset, session.settings)}


def restore(session: Session, state: State, path: Path) -> list[str]:
    """Brings a session to where the checkpoint was. Collective. Returns what a user should know, one line each.

    Raises SettingsError where the checkpoint is of another training.
    """
    notes = compare(state["config"], as_document(session.settings))
    same_ranks = state["world_size"] == session.place.world_size
    mine: State | None = None
    if session.member and has_same_members(session, state):
        mine = own.read_mine(path, session.member, session.place)
    if state.get("exchange"):
        state, said = with_own(session, state, mine, path)
        notes += said
    session.strategy.load(state["model"], session.optimizer, state["optimizer"])
    if same_ranks and state["rank_buffers"] is not None:
        running_statistics.set_buffers(session.strategy.network, state["rank_buffers"][session.place.rank])
    session.precision.load(state["scaler"])
    if session.exchange:
        begin_exchange(session, state, mine)
    notes += restore_averages(session, state, same_ranks)
    if same_ranks and state["config"].get("shares") == session.settings.shares:
        session.weights = state["shares"]  # as measured then
    if not same_ranks:
        now = session.place.world_size
        notes.append(f"{now} rank{'s go' if now > 1 else ' goes'} on from a checkpoint of {state['world_size']}")
    session.position = Position(**state["position"])
    if same_ranks:  # else its sums come in another order anyway
        warm_up(session)
    session.strategy.load_own_state(mine["strategy"] if mine else None, session.position.step)
    if session.members and not session.exchange and not mine and state.get("members") and not state.get("exchange"):
        notes.append("what --compress had kept of gradients for later steps is not here of all hosts: it begins anew")
    return notes


def has_same_members(session: Session, state: State) -> bool:
    """Whether each member of this run is one of the run that wrote the checkpoint, if their own files are there."""
    exchange, then = session.exchange, state.get("exchange")
    if session.members is None or state.get("members") != session.members.sizes() or bool(exchange) != bool(then):
        return False
    return exchange is None or exchange.layout() == state["exchange"]["layout"]


def begin_exchange(session: Session, state: State, mine: State | None) -> None:
    """When the network has the common weights."""
    assert session.exchange is not None
    if mine:
        session.exchange.load(state["exchange"], mine["exchange"], mine["model"])
    else:
        session.exchange.begin(state.get("exchange"))


def restore_averages(session: Session, state: State, same_ranks: bool) -> list[str]:
    """After the network's own weights. Returns notes."""
    ema = session.ema
    if ema is None:
        return []
    if not state["ema"]:
        ema.begin()
        return ["the checkpoint has no averaged weights: they begin with its weights"]
    rows = state.get("ema_rank_buffers")  # older checkpoints have none
    ema.load(state["ema"], rows[session.place.rank] if same_ranks and rows is not None else None)
    return []


def warm_up(session: Session) -> None:
    """`Strategy.warm_up` with the first pass of an epoch, made as the next step makes its passes."""
    settings = session.settings
    step = next(
        order.steps(session.samples, settings.batch_size, settings.seed, 0, session.cut, session.place.rank,
                    settings.micro_batch, session.mixes)
    )  # fmt: skip
    piece = step.passes[0]
    batch = on_all_ranks(lambda: next(iter(session.loader.training([piece.indices], 0))), session.place)
    rows = counted_rows(batch, piece.count)
    parts = (session.strategy, session.precision, batch, rows, session.mix(), session.loss)
    session.strategy.warm_up(lambda: forward(*parts)[0])


def compare(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Settings that differ from the checkpoint's, as notes. Raises SettingsError for those that may not."""
    wrong = [
        f"{flag(name)} {now[name]} (the checkpoint has {before.get(name)})"
        for name in FIXED
        if before.get(name) != now[name]
    ]
    if wrong:
        raise SettingsError(
            f"the checkpoint is of another training: {'; '.join(wrong)}; "
            "give its settings, start afresh with --resume none, or take only its weights: --resume none --init-from"
        )
    ignored = {
        *("data", "run_dir", "resume", "timeout", "spawn", "init", "keep", "checkpoint_every", "workers"),
        *("loggers", "profile", "download"),
    }
    changed = [k for k in now if k in before and before[k] != now[k] and k not in ignored]
    return (
        [f"settings changed since the checkpoint: {', '.join(f'{k} {before[k]} -> {now[k]}' for k in changed)}"]
        if changed
        else []
    )


def with_own(session: Session, state: State, mine: State | None, path: Path) -> tuple[State, list[str]]:
    """(a checkpoint of --sync-every, with weights and optimizer for this rank to load; notes). Collective.

    mine: this member's own state, if all members are those of then; else what the members had learned since their last
    exchange, and their optimizers, go on as the mean of what is found of them.
    """
    if mine:
        return state | {"optimizer": mine["optimizer"], "scaler": mine["scaler"]}, []
    sizes, exchange = state["members"], state["exchange"]
    is_behind = any(map(any, exchange["counts"])) or any(mean is not None for mean in exchange["means"])
    read, found, notes = own.read_any(path, len(sizes), session.place)
    if not found:
        lost = "what they had learned since the last exchange is lost, and " if is_behind else ""
        return state, [
            *notes,
            f"of {len(sizes)} hosts' own files of --sync-every none is here: {lost}optimizers begin anew",
        ]
    common = {name: state["model"][name] for name in exchange["names"]}
    weights, optimizer, scaler = own.mean(read, common, session.place)
    notes.append(of_members(found, len(sizes), is_behind))
    return state | {"model": state["model"] | weights, "optimizer": optimizer, "scaler": scaler}, notes


def of_members(found: int, members: int, is_behind: bool) -> str:
    """What a run goes on from, where it has not the members of the run before. is_behind: these had learned something
    since their last exchange."""
    if not is_behind:
        whose = f"the mean of {found} of {members} hosts'" if found > 1 else f"that of one of {members} hosts"
        return f"weights are those of the hosts' last exchange, the optimizer is {whose}"
    learned = f"the mean of what {found} of {members} hosts" if found > 1 else f"what one of {members} hosts"
    return f"weights and optimizer are {learned} had learned alone"


def begin(session: Session) -> list[str]:
    """Goes to where --resume says. Collective. Returns notes for the user.

    Raises CheckpointError, SettingsError, on all ranks alike.
    """
    place = session.place
    found = where_to_begin(session)
    if found.path is None:
        anew = ["no checkpoint was kept before the failure: it begins anew"] if was_restarted() else []
        return [*found.notes, *anew]
    state, problem = {}, ""
    try:
        state = load_path(found.path)
    except CheckpointError as error:
        problem = str(error)
    if problem := first_complaint(problem, place):
        raise CheckpointError(problem)
    session.resumed_from = found.path
    notes = restore(session, state, found.path)
    take_evaluation(session, found.path, state["position"]["step"])
    epochs = session.position.epoch + session.epoch_is_trained
    if epochs >= session.settings.epochs:
        notes.append(f"all of its {epochs} epochs are trained: there is nothing left to train (for more: --epochs)")
    return [*found.notes, f"going on from {found.path.name}", *notes]


def take_evaluation(session: Session, path: Path, step: int) -> None:
    """What is known beside the checkpoint: its evaluation, if that had ended on any host. Collective."""
    here = path.parent.resolve() == (session.settings.run_dir / "checkpoints").resolve()
    said = from_all_ranks((here, manifest(path.parent, step).get("evaluation")), session.place)
    session.kept = step if all(is_here for is_here, _ in said) else None
    known = next((found for _, found in said if found), None)
    if known and session.epoch_is_trained:
        session.score = Score(**known)
        session.position.end_epoch(session.score)


def where_to_begin(session: Session) -> StartPoint:
    """As --resume says; but a run that was started again goes on from what it has kept itself, if there is any.

    Collective. Raises CheckpointError.
    """
    settings, found = session.settings, StartPoint()
    where = settings.run_dir / "checkpoints", session.place, session.member
    if was_restarted():
        found = resolve("auto", *where)
    if found.path is None:
        found = resolve(settings.resume, *where)
    earlier = os.environ.get("MUSTER_RESUME_DIR")
    if found.path is None and settings.resume == "auto" and earlier:
        found = resolve(earlier, *where)
    return found
