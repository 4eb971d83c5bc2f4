"""Promise: a misspelt variable is refused with a guess; a message's commands can be copied as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.cli.make_variables import name_inventory, refuse_unknown_variables
from launch.cli.refusal import Refusal


@pytest.mark.parametrize(
    "flags", ["", "s", " -- NODES=2 RESUME=last GRACE=60 ARGS=--lr=0.1\\ --epochs\\ 3", "w -- INVENTORY=inventory/lab"]
)
def test_known_variables_pass(flags: str) -> None:
    refuse_unknown_variables(flags)


@pytest.mark.parametrize(("name", "guess"), [("NODE", "NODES"), ("nodes", "NODES"), ("INVENTRY", "INVENTORY")])
def test_a_misspelt_variable_is_refused_with_a_guess(name: str, guess: str) -> None:
    with pytest.raises(Refusal, match=f"did you mean {guess}"):
        refuse_unknown_variables(f" -- {name}=1 ARGS=--epochs\\ 3")


def test_commands_in_messages_name_the_inventory() -> None:
    lab = Path("inventory/lab")
    said = "run `make trust`, or `make stop RUN=r1`, not `make deploy INVENTORY=x`; see `make local`"
    assert name_inventory(said, lab) == (
        "run `make trust INVENTORY=inventory/lab`, or `make stop RUN=r1 INVENTORY=inventory/lab`, "
        "not `make deploy INVENTORY=x`; see `make local`"
    )
    assert name_inventory(said, Path("inventory/hosts.yml")) == said == name_inventory(said, None)
