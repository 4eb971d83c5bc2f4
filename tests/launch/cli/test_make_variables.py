"""Promise: what is typed after `make` arrives unchanged; a misspelt variable is refused with a guess; the commands in a
message can be copied as they stand."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from launch.cli.make_variables import name_inventory, names_given, refuse_unknown_variables
from launch.cli.refusal import Refusal


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "s",
        " -- NODES=2 PROJECT=a RESUME=last GRACE=9 ARGS=--lr=0.1\\ --epochs\\ 3",
        "w -- INVENTORY=inventory/lab",
    ],
)
def test_known_variables_pass(flags: str) -> None:
    refuse_unknown_variables(flags)


@pytest.mark.parametrize(("name", "guess"), [("NODE", "NODES"), ("nodes", "NODES"), ("INVENTRY", "INVENTORY")])
def test_a_misspelt_variable_is_refused_with_a_guess(name: str, guess: str) -> None:
    with pytest.raises(Refusal, match=f"did you mean {guess}"):
        refuse_unknown_variables(f" -- {name}=1 ARGS=--epochs\\ 3")


PRINT_ENVIRONMENT = """
include Makefile
environment:
	@$(PYTHON) -c 'import json, os; print(json.dumps(dict(os.environ)))'
"""


def through_make(folder: Path, *words: str) -> dict[str, str]:
    """The environment of a command that our Makefile starts, with `words` on make's command line."""
    (folder / "environment.mk").write_text(PRINT_ENVIRONMENT)
    make = ["make", "-s", "-f", str(folder / "environment.mk"), "environment", *words]
    return dict(json.loads(subprocess.run(make, check=True, capture_output=True, text=True).stdout))


@pytest.mark.slow
@pytest.mark.parametrize(
    "value",
    [
        "--seed 1'2",
        '"',
        "--run-dir $HOME/$$ $(shell echo no)",
        "--lr\n=1 RUNN=2",
        "a\\b \\ c  d",
        "x\\ -- NODE=2",
        "#)",
        "",
    ],
)
def test_what_is_typed_arrives_unchanged(value: str, tmp_path: Path) -> None:
    found = through_make(tmp_path, f"ARGS={value}", "NODES=2", "RUN:=r1", "INVENTORY=inventory/$x y")
    assert (found["ARGS"], found["INVENTORY"]) == (value, "inventory/$x y")
    assert sorted(names_given(found["MAKEFLAGS"])) == ["ARGS", "INVENTORY", "NODES", "RUN"]
    refuse_unknown_variables(found["MAKEFLAGS"])


@pytest.mark.slow
def test_a_variable_that_was_not_given_is_not_there(tmp_path: Path) -> None:
    found = through_make(tmp_path)
    assert "ARGS" not in found and found["INVENTORY"] == "inventory/hosts.yml"


def test_an_inventory_with_a_blank_is_quoted_in_messages() -> None:
    assert name_inventory("run `make trust`", Path("my hosts")) == "run `make trust INVENTORY='my hosts'`"


def test_commands_in_messages_name_the_inventory() -> None:
    lab = Path("inventory/lab")
    said = "run `make trust`, or `make stop RUN=r1`, not `make deploy INVENTORY=x`; see `make local`"
    assert name_inventory(said, lab) == (
        "run `make trust INVENTORY=inventory/lab`, or `make stop RUN=r1 INVENTORY=inventory/lab`, "
        "not `make deploy INVENTORY=x`; see `make local`"
    )
    assert name_inventory(said, Path("inventory/hosts.yml")) == said == name_inventory(said, None)
