"""Promises: a rank counts what it does in its steps, and the metrics get the mean of those since the last time."""

from __future__ import annotations

import pytest

from train.reporting.work import NOTED_FIRST, NOTED_STEPS, Work


def test_every_timed_step_is_counted_once() -> None:
    work = Work()
    assert work.told() is None
    work.add(None, None)
    for computing in (0.25, 0.25, 0.5):  # the second one is the same as the first: DDP has timed no other
        work.add(computing, 0.5)
    work.waited += 0.125
    assert work.told() == [4, 2, 0.75, 0.125]


def test_the_metrics_get_each_of_the_first_steps_and_then_the_mean_of_a_hundred() -> None:
    work = Work()
    assert work.add(None, None) is None
    first = [work.add(step / 10, 0.5) for step in range(2, NOTED_FIRST + 1)]
    assert first == [pytest.approx((step / 10, step / 10)) for step in range(2, NOTED_FIRST + 1)]
    later = [work.add(100.0 + step, None) for step in range(1, NOTED_STEPS + 1)]
    assert later[:-1] == [None] * (NOTED_STEPS - 1)
    assert later[-1] == pytest.approx((100 + (NOTED_STEPS + 1) / 2, 0.0))
