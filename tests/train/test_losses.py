"""Promises of train.losses: losses of single samples, and mixing that does not know how many ranks there are."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as given_settings
from hypothesis import strategies as st
from torch.nn import functional

from train.losses import Mix, logits, mixed, per_sample, right
from train.model import torchvision_cpu
from train.order import equally, step_of

torchvision_cpu.watch()

MIXES = {"mixup": Mix(0, 0, 0.4, 0.0), "cutmix": Mix(0, 0, 0.0, 1.0), "both": Mix(0, 0, 0.2, 1.0)}


def drawn(samples: int, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(samples)
    return torch.randn(samples, classes, generator=draw), torch.randint(0, classes, (samples,), generator=draw)


def test_there_is_a_loss_for_each_sample() -> None:
    outputs, labels = drawn(6)
    losses = per_sample(outputs, labels)
    assert losses.mean() == pytest.approx(float(functional.cross_entropy(outputs, labels)))
    assert [float(v) for v in losses] == pytest.approx(
        [float(functional.cross_entropy(o[None], y[None])) for o, y in zip(outputs, labels, strict=True)]
    )


def test_label_smoothing_gives_its_part_to_all_classes() -> None:
    outputs, labels = drawn(6)
    target = 0.9 * functional.one_hot(labels, 5) + 0.1 / 5
    wanted = -(target * outputs.log_softmax(1)).sum(1)
    torch.testing.assert_close(per_sample(outputs, labels, 0.1), wanted)


def test_losses_are_float32_under_mixed_precision() -> None:
    outputs, labels = drawn(6)
    assert per_sample(outputs.bfloat16(), labels).dtype == torch.float32


@pytest.mark.parametrize(("name", "weights"), [("googlenet", (0.3, 0.3)), ("inception_v3", (0.4,))])
def test_auxiliary_heads_count_with_their_weights(name: str, weights: tuple[float, ...]) -> None:
    from torchvision.models.googlenet import GoogLeNetOutputs
    from torchvision.models.inception import InceptionOutputs

    (main, labels), heads = drawn(6), [drawn(6 + n)[0][:6] for n in range(1, 3)]
    outputs = GoogLeNetOutputs(main, *heads) if name == "googlenet" else InceptionOutputs(main, heads[0])
    wanted = per_sample(main, labels)
    for head, weight in zip(heads, weights, strict=False):
        wanted = wanted + weight * per_sample(head, labels)
    torch.testing.assert_close(per_sample(outputs, labels), wanted)
    assert logits(outputs) is main


def test_another_kind_of_output_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="returned dict; a classifier returns logits"):
        per_sample({"boxes": torch.zeros(1, 2)}, torch.zeros(1, dtype=torch.int64))


def masks(samples: int = 3, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(samples)
    return (
        torch.randn(samples, classes, 5, 6, generator=draw),
        torch.randint(0, classes, (samples, 5, 6), generator=draw),
    )


def test_the_loss_of_a_mask_is_the_mean_over_its_pixels() -> None:
    outputs, targets = masks()
    wanted = torch.stack([functional.cross_entropy(o[None], y[None]) for o, y in zip(outputs, targets, strict=True)])
    torch.testing.assert_close(per_sample(outputs, targets), wanted)
    torch.testing.assert_close(per_sample(outputs, targets.to(torch.uint8)), wanted)


def test_pixels_of_no_class_do_not_count() -> None:
    outputs, targets = masks()
    targets[0, :3], targets[1] = -100, -100
    wanted = functional.cross_entropy(outputs[:1, :, 3:], targets[:1, 3:])
    losses, answers = per_sample(outputs, targets), right(outputs, targets)
    assert answers is not None
    torch.testing.assert_close(losses[0], wanted)
    assert answers[0] == pytest.approx(float((outputs[0, :, 3:].argmax(0) == targets[0, 3:]).float().mean()))
    assert losses[1] == 0 and answers[1] == 0


def test_models_for_segmentation_return_their_answer_and_an_auxiliary_one() -> None:
    outputs, targets = masks()
    other = masks(4)[0][:3]
    wanted = per_sample(outputs, targets) + 0.5 * per_sample(other, targets)
    torch.testing.assert_close(per_sample({"out": outputs, "aux": other}, targets), wanted)
    assert logits({"out": outputs, "aux": other}) is outputs


def test_right_answers_are_counted_where_there_are_any() -> None:
    outputs, labels = drawn(6)
    answers = right(outputs, labels)
    assert answers is not None and answers.tolist() == (outputs.argmax(1) == labels).tolist()
    for regression in (labels.float(), labels[:, None], {"boxes": labels}, labels > 2):
        assert right(outputs, regression) is None
    assert right({"boxes": outputs}, labels) is None
    assert right(outputs[:, :1], labels) is None  # one output is no choice between classes


def pictures(numbers: "np.typing.NDArray[np.int64]") -> tuple[torch.Tensor, torch.Tensor]:
    """A picture and a label for each sample number."""
    images = [torch.rand(3, 7, 9, generator=torch.Generator().manual_seed(int(n))) for n in numbers]
    return torch.stack(images), torch.from_numpy(numbers % 10)


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("world_size", [2, 3])
@given_settings(max_examples=15, deadline=None)
@given(step=st.integers(0, 1000), count=st.integers(3, 17), micro_batch=st.sampled_from([0, 2]))
def test_any_cut_into_ranks_and_passes_gives_the_same_mixture(
    name: str, world_size: int, step: int, count: int, micro_batch: int
) -> None:
    mix = replace(MIXES[name], step=step)
    batch = np.random.default_rng(step).permutation(50)[:count].astype(np.int64)
    whole = mix.apply(*pictures(np.append(batch, batch[0])))
    parts = []
    for rank in range(world_size):
        for each in step_of(batch, equally(world_size), rank, micro_batch, partners=True).passes:
            images, labels, partners, lam = mix.apply(*pictures(each.indices))
            assert lam == whole[3]
            parts.append((images[: each.count], labels[: each.count], partners[: each.count]))
    for together, alone in zip(map(torch.cat, zip(*parts, strict=True)), whole[:3], strict=True):
        assert together.equal(alone)


def test_mixup_is_the_weighted_sum_of_neighbours() -> None:
    images, labels = pictures(np.arange(4, dtype=np.int64))
    result, own, partners, lam = MIXES["mixup"].apply(images, labels)
    torch.testing.assert_close(result, lam * images[:3] + (1 - lam) * images[1:])
    assert (own.tolist(), partners.tolist()) == ([0, 1, 2], [1, 2, 3])


@pytest.mark.parametrize("size", [(7, 9), (32, 32), (1, 5)])
def test_lam_is_the_part_of_the_own_image_that_is_left(size: tuple[int, int]) -> None:
    images = torch.stack([torch.zeros(1, *size), torch.ones(1, *size)])
    seen = set()
    for step in range(200):
        result, _, _, lam = Mix(3, step, 0.0, 1.0).apply(images, torch.tensor([0, 1]))
        assert 1 - float(result.double().mean()) == pytest.approx(lam, abs=1e-12)
        seen.add(lam)
    assert len(seen) > 3


def test_each_step_has_its_own_lam_and_alpha_shapes_it() -> None:
    for alpha, spread in ((0.2, 0.42), (1.0, 0.29)):  # sqrt(1 / (4 * (2 * alpha + 1)))
        lams = np.array([Mix(1, step, alpha, 0.0).drawn for step in range(2000)])
        assert abs(lams.mean() - 0.5) < 0.03
        assert abs(lams.std() - spread) < 0.02
        assert 0 <= lams.min() <= lams.max() <= 1


def test_with_both_a_coin_chooses_for_each_step() -> None:
    cuts = sum(Mix(5, step, 0.2, 1.0).cuts for step in range(1000))
    assert 450 < cuts < 550
    assert not any(Mix(5, step, 0.2, 0.0).cuts for step in range(20))
    assert all(Mix(5, step, 0.0, 1.0).cuts for step in range(20))


def test_mixing_stays_as_it_is() -> None:
    """A resumed run must go on as it began, with any later version."""
    assert [Mix(0, step, 0.2, 0.0).drawn for step in range(3)] == [
        0.12551593780517578,
        0.05230426788330078,
        0.5601358413696289,
    ]
    assert Mix(0, 0, 0.0, 1.0).box(224, 224) == (slice(0, 123), slice(87, 224))


def test_the_mixed_loss_weighs_both_labels() -> None:
    outputs, labels = drawn(6)
    partners = labels.roll(1)
    wanted = 0.3 * per_sample(outputs, labels, 0.1) + 0.7 * per_sample(outputs, partners, 0.1)
    torch.testing.assert_close(mixed(outputs, labels, partners, 0.3, partial(per_sample, smoothing=0.1)), wanted)
    assert mixed(outputs, labels, partners, 1.0).equal(per_sample(outputs, labels))
