"""Promises of train.reporting.step_stats: every rank learns the same of each step, one step later."""

from pathlib import Path

import pytest
import torch

from tests.train import model_ranks
from tests.train.test_model import Results
from train.reporting.step_stats import NonFiniteLoss, StepStats

YES, NO = torch.tensor(True), torch.tensor(False)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return model_ranks.run(Path(tmp_path_factory.mktemp("ranks")), "stats", 3)


@pytest.mark.slow
def test_figures_are_those_of_all_ranks_and_come_one_step_late(ranks: Results) -> None:
    for rank in ranks:
        first, second, third = rank["seen"]
        assert first is None
        assert second[:5] == (1, (1 + 2 + 3) / 6, (0 + 1 + 2) / 6, (), {"lr": 0.1})
        assert third[:3] == (2, (2 + 3 + 4) / 6, 0.5)


@pytest.mark.slow
def test_all_ranks_learn_who_was_asked_to_stop(ranks: Results) -> None:
    assert [rank["seen"][2][3] for rank in ranks] == [(2,)] * 3


@pytest.mark.slow
def test_all_ranks_learn_what_each_computed_and_waited_where_it_timed_a_step(ranks: Results) -> None:
    for rank in ranks:
        _, without, timed = rank["seen"]
        assert without[5:] == ((), ()) and timed[5:] == ((0.5, 0.0, 2.5), (0.25, 0.0, 0.25))


@pytest.mark.slow
def test_all_ranks_stop_alike_naming_the_ranks_and_the_step_of_a_loss_that_is_not_finite(ranks: Results) -> None:
    for rank in ranks:
        assert rank["error"].startswith("the loss was not finite on ranks 1, 2 at epoch 1, step 3: try a smaller --lr")


@pytest.mark.slow
def test_flush_gives_the_last_step_once(ranks: Results) -> None:
    assert [(rank["last"], rank["none"]) for rank in ranks] == [([(9, 1.0)], [])] * 3


def test_one_process_needs_no_process_group() -> None:
    watch = StepStats(1, 0, torch.device("cpu"))
    assert watch.add(1, 1, torch.tensor(6.0), torch.tensor(3), YES, 4, stop=True) is None
    (record,) = watch.flush()
    assert (record.loss, record.accuracy, record.stop) == (1.5, 0.75, (0,))
    watch.add(2, 1, torch.tensor(float("inf")), torch.tensor(3), NO, 4)
    with pytest.raises(NonFiniteLoss, match="on rank 0 at epoch 1, step 2: try a smaller --lr"):
        watch.flush()


def test_a_vote_is_known_at_the_next_one_and_the_last_one_at_the_end() -> None:
    watch = StepStats(1, 0, torch.device("cpu"))
    assert [watch.vote(stop) for stop in (False, True, False)] == [False, False, True]
    assert watch.no_votes() is False and watch.no_votes() is False
    assert watch.vote(True) is False and watch.no_votes() is True


def test_a_step_without_an_accuracy_has_none() -> None:
    watch = StepStats(1, 0, torch.device("cpu"))
    watch.add(1, 1, torch.tensor(6.0), torch.tensor(float("nan")), YES, 4, torch.tensor(1.0))
    (record,) = watch.flush()
    assert record.accuracy is None and record.loss == 1.5


def test_figures_come_as_many_steps_late_as_wanted_and_each_once() -> None:
    watch = StepStats(1, 0, torch.device("cpu"), behind=3)
    found = [watch.add(step, 1, torch.tensor(1.0 * step), torch.tensor(0), YES, 1) for step in range(1, 6)]
    assert [record and record.step for record in found] == [None, None, None, 1, 2]
    assert [record.loss for record in watch.flush()] == [3.0, 4.0, 5.0] and watch.flush() == []
