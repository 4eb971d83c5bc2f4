"""Refusals: everything that is wrong with an input or a host, each with its place and its fix. Not for bugs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from launch.cli import exits


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where it is, what it is, and how to fix it."""

    where: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"  {self.where}: {self.what}\n      fix: {self.fix}"


class Refusal(Exception):
    """Nothing was started, or what was started has been ended again; `status` is the exit status."""

    def __init__(self, problems: Iterable[Problem], status: int = exits.REFUSED) -> None:
        self.problems = tuple(problems)
        self.status = status
        super().__init__("\n".join(str(problem) for problem in self.problems))


def refuse(where: str, what: str, fix: str, status: int = exits.REFUSED) -> Refusal:
    """A refusal with a single problem."""
    return Refusal([Problem(where, what, fix)], status)
