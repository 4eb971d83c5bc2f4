"""Promises of --parallel: the gradient is that of the mean loss over the whole batch, however ranks share it."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.parallel_gradients import BATCHES, CASES
from tests.train.parallel_models import CPU, network, reference
from tests.train.parallel_ranks import run
from tests.train.parallel_states import Forgetful
from train.model import torchvision_cpu
from train.model.plain_names import plain
from train.parallel import make
from train.parallel.ddp import bucket_cap
from train.parallel.fsdp import Fsdp, blocks
from train.settings import Settings, SettingsError
from train.start.group import Place

torchvision_cpu.watch()
import torchvision  # noqa: E402

RANKS: dict[str, tuple[int, ...]] = {"ddp": (2, 3), "static_graph": (2,), "unused": (2,), "fsdp": (1, 3), "none": (1,)}
MORE_RANKS = {"ddp": (1, 4), "fsdp": (2, 4)}


@pytest.fixture(
    scope="module",
    params=[*RANKS.items(), *(pytest.param(each, marks=pytest.mark.long) for each in MORE_RANKS.items())],
    ids=lambda param: f"{param[0]}-{'-'.join(map(str, param[1]))}",
)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Any]:
    function, ranks = request.param
    return run("parallel_gradients", function, tmp_path_factory.mktemp(function), *ranks)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_whole_batch(found: dict[tuple[int, int], Any], case: str) -> None:
    """Shares equal or not, in passes or at once, where the batch is short, where a rank has no sample of it."""
    expected = reference(BATCHES)
    for gradients in found.values():
        for ours, theirs in zip(gradients[case], expected, strict=True):
            assert len(ours) == len(theirs)
            for mine, whole in zip(ours, theirs, strict=True):
                torch.testing.assert_close(mine, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("parallel", ["none", "dp"])
def test_one_process_refuses_more_ranks(parallel: str) -> None:
    with pytest.raises(SettingsError, match=f"--parallel {parallel}: it is one process, and these are 2 ranks"):
        make(Settings(parallel=parallel), network(), Place(0, 0, 2, 2), CPU)


def test_names_are_the_bare_models() -> None:
    assert plain("_orig_mod.layer1.0._checkpoint_wrapped_module.conv1.weight") == "layer1.0.conv1.weight"


@pytest.mark.slow
def test_one_rank_under_ddp_trains_to_the_same_bits_without_it(found_alone: dict[str, Any]) -> None:
    assert found_alone["kinds"] == ("OneRank", "Ddp")
    for ours, ddps in zip(found_alone["ours"], found_alone["ddp"], strict=True):
        assert ours.equal(ddps)


@pytest.fixture
def found_alone(tmp_path: Path) -> dict[str, Any]:
    alone: dict[str, Any] = run("parallel_gradients", "one_rank", tmp_path, 1)[1, 0]
    return alone


def test_one_rank_refuses_what_ddp_would_refuse_on_more() -> None:
    for until, unused, refused in ((0, False, True), (1, False, True), (0, True, False)):
        strategy = make(Settings(find_unused_parameters=unused), Forgetful(until), Place(), CPU)
        told = pytest.raises(RuntimeError, match=r"no gradient reached unused\.weight, unused\.bias")
        with told if refused else nullcontext():
            for _ in range(2):
                with strategy.passes(last=False):
                    strategy.module(torch.ones(2, 4))  # the first of two micro-batches may lack them
                strategy.network.zero_grad()
                with strategy.passes(last=True):
                    strategy.module(torch.ones(2, 4)).sum().backward()


def test_compiling_leaves_the_names() -> None:
    strategy = make(Settings(parallel="none"), network(), Place(), CPU)
    strategy.compile(backend="eager")
    assert list(strategy.model_state()) == list(network().state_dict())


@pytest.mark.parametrize(
    "name",
    [
        "resnet50",
        "vit_b_16",
        "vgg16",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("swin_v2_t", "densenet121")),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("inception_v3", "convnext_tiny", "maxvit_t")),
    ],
)
def test_fsdp_cuts_models_at_modules_that_are_called(name: str) -> None:
    """Gathering hangs on a block's forward. Blocks are disjoint, and hold nearly all of the model."""
    options = {"aux_logits": False, "init_weights": False} if name == "inception_v3" else {}
    with torch.device("meta"):
        model = torchvision.models.get_model(name, weights=None, **options)
    chosen = list(blocks(model))
    inside = [module for block in chosen for module in block.modules()]
    assert len(inside) == len(set(inside))
    parameters = sum(p.numel() for block in chosen for p in block.parameters())
    assert parameters > 0.9 * sum(p.numel() for p in model.parameters())
    called: set[nn.Module] = set()
    for block in chosen:
        block.register_forward_pre_hook(lambda module, _: called.add(module))
    size = 299 if name == "inception_v3" else 224
    model.eval()(torch.zeros(1, 3, size, size, device="meta"))
    assert called == set(chosen)


def test_fsdp_refuses_uneven_steps() -> None:
    with pytest.raises(SettingsError, match="cannot be joined"):
        Fsdp.join(Fsdp.__new__(Fsdp))


def test_the_first_bucket_stays_small_unless_a_size_is_asked_for() -> None:
    assert bucket_cap(Settings().bucket_mb) is None  # torch's own, 1 MiB for the first
    assert bucket_cap(8) == 8
