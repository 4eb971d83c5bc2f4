"""A view of a run as a witness: it hears the keepers, votes and remembers as one of them, and has no ranks.

So of two hosts either may be lost. What it says reaches a keeper with the same stream that shows the run (follow.py);
what is decided, and why this is safe: keeper/course.py. Its memory ends with it, so another view is another witness.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any

from keeper import course as courses
from keeper.decide import Heard
from keeper.known import WITNESS


class Witness:
    """One witness of one run; for several threads."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        """plan: plan.json."""
        self.id = secrets.token_hex(4)
        self._course = courses.of_plan(plan, WITNESS + self.id, time.monotonic())
        self._number = 0  # of its last message
        self._lock = threading.Lock()

    def answer(self, host: str, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """What the keeper of a host is to hear, whose state.json this is; None where the run needs no witness."""
        with self._lock:
            now = time.monotonic()
            if "beat" in state:
                self._course, _ = courses.decide(self._course, Heard(now, host, state["beat"]))
            if "beat" not in state or self._course.left:
                return None
            self._number += 1
            return {"number": self._number, "words": courses.beat(self._course, now)}
