"""What this rank has done in its steps: for its keeper, which finds out who is slow, and for the metrics."""

from dataclasses import dataclass

NOTED_FIRST, NOTED_STEPS = 10, 100  # the metrics get times after each of the first steps, then after each hundredth


@dataclass
class Work:
    """What this rank has done in its steps so far, for its keeper (keeper/slow.py); and what the metrics get of it."""

    steps: int = 0
    timed: int = 0  # steps whose computing is known
    computing: float | None = None  # seconds of the step that was timed last
    computed: float = 0.0  # seconds of all timed steps
    waited: float = 0.0  # seconds in which steps waited for their batches
    noted: int = 0  # the step after which the metrics got times
    #: Since then: timed steps, seconds computed, seconds waited for others.
    sums: tuple[int, float, float] = (0, 0.0, 0.0)

    def add(self, computing: float | None, share: float | None) -> tuple[float, float] | None:
        """After a step. computing: seconds of the step that was timed last; share: of that step, waiting for others.

        Returns what the metrics get: the mean seconds that this rank computed and waited in the timed steps since the
        last time, after each of the first NOTED_FIRST steps and then after each NOTED_STEPS.
        """
        self.steps += 1
        if computing is not None and computing != self.computing:
            waiting = computing * (share or 0.0) / (1 - (share or 0.0))
            timed, computed, waited = self.sums
            self.sums = timed + 1, computed + computing, waited + waiting
            self.timed, self.computing, self.computed = self.timed + 1, computing, self.computed + computing
        timed, computed, waited = self.sums
        if not timed or (self.steps > NOTED_FIRST and self.steps - self.noted < NOTED_STEPS):
            return None
        self.noted, self.sums = self.steps, (0, 0.0, 0.0)
        return computed / timed, waited / timed

    def told(self) -> list[float] | None:
        """As in the rank's datagram; None where steps are not timed."""
        return [self.steps, self.timed, round(self.computed, 6), round(self.waited, 6)] if self.timed else None
