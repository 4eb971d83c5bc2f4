"""Promise: the forecast simulates a step bucket by bucket; here from figures made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.forecast import steady_rate, whole_rate
from launch.health import forecast
from launch.health.forecast import Compute, Reduce, period_seconds
from launch.health.ways import FOR_SLOW_LINKS, Training, Way, compared, cost

SECONDS = st.floats(0.001, 10)


def rank(ready: tuple[float, ...], ends: float, capacity: float | None = None, cores: float = 1.0) -> Compute:
    return Compute(ready, ends, 0.1, cores, capacity)


def step(samples: int, seconds: float) -> dict[str, Any]:
    """A measured step, a third of it forward, a tenth the update; gradients come in two buckets."""
    ready = [seconds * 0.2, seconds * 0.5]
    return {"samples": samples, "seconds": seconds, "backward": seconds / 3, "update": seconds / 10, "ready": ready,
            "cores": 1.0}  # fmt: skip


def document(reduce: float, slowness: tuple[float, ...] = (1.0, 1.0, 1.0), **settings: Any) -> dict[str, Any]:
    """Hosts that need 10 ms for a sample (times their slowness); a bucket's all-reduce takes `reduce` seconds."""
    world = len(slowness)
    batch = 120
    speeds = [1 / slow for slow in slowness]
    shares = []
    for nodes in range(1, world + 1):
        auto = [round(batch * speed / sum(speeds[:nodes])) for speed in speeds[:nodes]]
        shares.append({"nodes": nodes, "world_size": nodes, "equal": [batch // nodes] * nodes, "auto": auto})
    sums = {name: [reduce, reduce] for name in ("seconds", "busy_seconds")} | {"cpu_seconds": [0.0, 0.0]}
    return {
        "settings": {"model": "m", "parallel": "ddp", "shares": "", "batch_size": batch, "optimizer": "sgd"} | settings,
        "buckets": [1 << 20, 1 << 20],
        "capacity": [None] * world,
        "steps": [[step(samples, 0.01 * samples * slow) for samples in (20, 40, 120)] for slow in slowness],
        "without_ddp": [1.0] * world,
        "shares": shares,
        "communication": [{"nodes": nodes, "world_size": nodes, **sums} for nodes in range(2, world + 1)],
        "cold": [0.0] * world,
        "run": {"steps": 100_000, "powersgd": 0, "warmup": 0, "exchanges": {str(n): [0, 0] for n in (5, 16, 32)}},
    }


def ddp(found: list[forecast.Outlook]) -> dict[int, forecast.Outlook]:
    return {one.nodes: one for one in found if one.option == "--parallel ddp"}


def test_a_link_without_limit_makes_hosts_add_up() -> None:
    found = ddp(forecast.outlooks(document(1e-9)))
    assert [found[nodes].speed_up for nodes in (1, 2, 3)] == pytest.approx([1, 2, 3], rel=1e-3)
    assert found[3].efficiency == pytest.approx(1, rel=1e-3)
    assert found[1].images_per_second == pytest.approx(100)


def test_communication_that_fits_beside_backward_costs_only_what_the_last_bucket_takes() -> None:
    assert forecast.ddp_step_seconds(
        [rank((0.4, 1.0), 1.0)], [Reduce(0.5, 0.5, 0), Reduce(0.2, 0.2, 0)]
    ) == pytest.approx(1.3)


def test_a_bucket_waits_for_the_one_before() -> None:
    assert forecast.ddp_step_seconds(
        [rank((0.4, 1.0), 1.0)], [Reduce(2.0, 2.0, 0), Reduce(0.2, 0.2, 0)]
    ) == pytest.approx(2.7)


def test_a_bucket_waits_for_the_slowest_rank() -> None:
    ranks = [rank((0.4,), 1.0), rank((1.9,), 2.0)]
    assert forecast.ddp_step_seconds(ranks, [Reduce(0.5, 0.5, 0)]) == pytest.approx(1.9 + 0.5 + 0.1)


def test_on_cores_communication_takes_computing_time_from_backward() -> None:
    ready, sums = (0.4,), [Reduce(0.4, 0.4, 0.2)]
    free = forecast.ddp_step_seconds([rank(ready, 1.0, capacity=None)], sums)
    spare = forecast.ddp_step_seconds([rank(ready, 1.0, capacity=2.0)], sums)
    scarce = forecast.ddp_step_seconds([rank(ready, 1.0, capacity=1.0)], sums)
    assert free == spare == pytest.approx(1.1)
    assert scarce == pytest.approx(1.1 + 0.2)  # the computing time of the sum comes on top


def test_beside_other_work_a_sum_goes_at_the_speed_measured_there_and_faster_after_it() -> None:
    assert forecast.ddp_step_seconds([rank((0.5,), 1.0)], [Reduce(0.5, 1.0, 0)]) == pytest.approx(1.0 + 0.25 + 0.1)


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=4), st.lists(SECONDS, min_size=1, max_size=5))
def test_a_step_takes_no_less_than_its_longest_part_and_no_more_than_all_parts(
    computing: list[tuple[float, float]], sums: list[float]
) -> None:
    ranks = [
        rank(tuple(forward + backward * (index + 1) / len(sums) for index in range(len(sums))), forward + backward)
        for forward, backward in computing
    ]
    seconds = forecast.ddp_step_seconds(ranks, [Reduce(one, one, 0) for one in sums])
    longest = max(one.seconds for one in ranks)
    first = max(one.ready[0] for one in ranks)
    assert seconds >= max(longest, first + sum(sums)) - 1e-6
    assert seconds <= longest + sum(sums) + 1e-6


@given(st.floats(0.0001, 1), st.floats(1.1, 10))
def test_a_slower_link_never_makes_a_run_faster(reduce: float, times: float) -> None:
    fast, slow = (forecast.outlooks(document(seconds)) for seconds in (reduce, reduce * times))
    assert all(b.step_seconds >= a.step_seconds - 1e-9 for a, b in zip(fast, slow, strict=True))


def test_the_slower_host_decides_and_unequal_shares_help() -> None:
    found = {(one.nodes, one.option): one for one in forecast.outlooks(document(1e-9, (1.0, 3.0)))}
    equal, auto = found[2, "--parallel ddp"], found[2, "--parallel ddp --shares auto"]
    assert equal.step_seconds == pytest.approx(60 * 0.03, rel=1e-3)
    assert equal.speed_up == pytest.approx(2 / 3, rel=1e-3)
    assert auto.counts == (90, 30)
    assert auto.speed_up == pytest.approx(4 / 3, rel=1e-3)
    assert auto.efficiency == pytest.approx(1, rel=1e-3)


def test_only_what_the_benchmark_holds_against_runs_counts_as_verified() -> None:
    for one in forecast.outlooks(document(0.1, (1.0, 2.0))):
        assert one.verified == (one.option == "--parallel ddp")


def test_numbers_of_hosts_between_the_measured_ones_lie_on_the_line() -> None:
    known = document(0.1, (1.0,) * 6)
    known["communication"] = [
        entry | {"seconds": [0.01 * entry["nodes"]] * 2} for entry in known["communication"] if entry["nodes"] in (4, 6)
    ]
    assert forecast.reduces(known, 5, 5)[0].seconds == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("reduce", "slowness", "words"),
    [
        (0.001, (1.0, 1.0), ["2 hosts over this slow link: 2.0 x the speed of one host", "Use all 2"]),
        (9.0, (1.0, 1.0), ["0.065 x the speed", "tay on one host"]),
        (0.5, (1.0, 1.0), ["--batch-size 480", "stay on one host"]),
        (0.001, (1.0, 3.0), ["0.67 x the speed of one host", "NODES=2 with --parallel ddp --shares auto"]),
        (0.001, (1.0,), ["1 host: 100 images/s"]),
    ],
)
def test_the_recommendation_says_what_to_do(reduce: float, slowness: tuple[float, ...], words: list[str]) -> None:
    said = forecast.recommend(document(reduce, slowness), "slow link")
    assert all(word in said for word in words), said


def test_a_host_more_has_to_be_worth_it() -> None:
    found = forecast.outlooks(document(1e-9, (1.0, 1.0, 2.5)))
    assert forecast.recommended([one for one in found if one.option == "--parallel ddp"]).nodes == 2


def test_a_factor_far_below_one_is_not_nought() -> None:
    assert [forecast.times(factor) for factor in (2.0, 1.68, 0.031, 0.6)] == ["2.0 x", "1.7 x", "0.031 x", "0.6 x"]


def test_the_benchmark_counts_the_fastest_epoch_after_the_first_without_its_first_step() -> None:
    times = {1: (1, 1.1), 2: (7, 8, 9, 19), 3: (7, 9, 11)}
    events = [
        {"event": "step", "epoch": epoch, "images": 10, "seconds": float(one)}
        for epoch, seconds in times.items()
        for one in seconds
    ]
    assert steady_rate(events) == 10
    epochs = [{"event": "epoch", "seconds": 12.5, "images": None}, {"event": "epoch", "seconds": 7.5}]
    assert whole_rate([*events, *epochs]) == 90 / 20


def test_a_model_whose_steps_take_the_same_time_with_any_batch_gets_a_forecast() -> None:
    """By chance the larger batch was quicker when it was measured: continued, that line would reach nought."""
    made = document(1e-4)
    made["steps"] = [[step(20, 0.004), step(40, 0.003), step(120, 0.001)]] * 3
    larger = forecast.compute(made, 0, 480)
    assert larger.seconds == pytest.approx(0.001) and larger.backward_ends >= 0
    assert forecast.compute(made, 0, 10).seconds == pytest.approx(0.004)
    assert forecast.compute(made, 0, 80).seconds == pytest.approx(0.002)  # between measured ones the line holds
    assert forecast.recommend(made, "link")


# -- the size of buckets -----------------------------------------------------------------------------------------------

MIB = 1 << 20


def with_gradients(known: dict[str, Any], sizes: list[int]) -> dict[str, Any]:
    """The document, of a model whose parameters' gradients, of so many MiB, come one after another, the last first."""
    for steps in known["steps"]:
        for each in steps:
            times = [each["seconds"] * 0.5 * (number + 1) / len(sizes) for number in range(len(sizes))]
            each["gradients"] = times[::-1]
    return known | {"gradients": [size * MIB for size in sizes]}


def test_buckets_are_filled_as_gradients_come() -> None:
    known = with_gradients(document(0.2), [3, 1, 2, 9, 1, 1])
    assert forecast.bucketed(known, 1) == [[5], [4], [3], [2], [1], [0]]
    assert forecast.bucketed(known, 2) == [[5, 4], [3], [2], [1, 0]]
    assert forecast.bucketed(known, 24) == [[5, 4, 3, 2, 1, 0]]


@given(st.floats(0, 1), st.floats(0, 1e-6), st.lists(st.integers(1, 10**9), min_size=2, unique=True))
def test_what_a_bucket_takes_is_a_time_and_a_time_for_each_byte(each: float, slope: float, sizes: list[int]) -> None:
    sums = [Reduce(each + slope * size, each + slope * size, 0.0) for size in sizes]
    (found,) = forecast.resized(sums, sizes, [5000])
    assert found.seconds == pytest.approx(each + slope * 5000, rel=1e-3, abs=1e-3 * max(one.seconds for one in sums))


def test_a_bucket_that_takes_less_the_larger_it_is_was_measured_badly() -> None:
    assert forecast.fitted([1, 3], [2.0, 1.0]) == (1.5, 0.0)
    assert forecast.fitted([1, 3], [1.0, 5.0]) == (0.0, 1.5)  # nor does nothing take less than no time
    assert forecast.fitted([2], [4.0]) == (0.0, 2.0)
    assert forecast.resized([], [], [MIB]) == []


def test_smaller_buckets_are_found_where_the_last_one_holds_up_the_step() -> None:
    """Two of 20 MiB take 0.2 s each, the second of which begins with the end of backward."""
    known = with_gradients(document(0.2, (1.0, 1.0)), [1] * 40)
    known["buckets"] = [20 * MIB, 20 * MIB]
    found = {one.option: one for one in forecast.outlooks(known) if one.nodes == 2}
    assert "--bucket-mb 1" in found
    usual, better = found["--parallel ddp"], found["--bucket-mb 1"]
    assert better.step_seconds < usual.step_seconds - 0.1 and better.verified and not better.way.is_approximate
    assert better.counts == usual.counts
    for entry in known["communication"]:  # each message takes long: few are better
        entry |= {name: [5.0, 5.0] for name in ("seconds", "busy_seconds")}
    known["buckets"] = [39 * MIB, MIB]
    assert not [one for one in forecast.outlooks(known) if "--bucket-mb" in one.option]


def test_buckets_of_a_size_that_was_asked_for_stay() -> None:
    known = with_gradients(with_options(document(0.2, (1.0, 1.0), bucket_mb=8), 0.1, 0.1), [1] * 40)
    known["buckets"] = [20 * MIB, 20 * MIB]
    found = [one for one in forecast.outlooks(known) if one.nodes == 2]
    assert found[0].option == "--bucket-mb 8"
    assert {one.way.bucket_mb for one in found if one.way.parallel == "ddp"} == {8}
    (sharded,) = (one for one in found if one.way.parallel == "fsdp")
    known["settings"]["bucket_mb"] = 25
    (same,) = (one for one in forecast.outlooks(known) if one.way.parallel == "fsdp")
    assert sharded.step_seconds == same.step_seconds  # it has no buckets of DDP's


# -- the options for slow links ----------------------------------------------------------------------------------------


def with_options(known: dict[str, Any], compressed: float, exchanged: float) -> dict[str, Any]:
    """The document, with what a bucket's all-reduce takes compressed, and the exchange of each of four pieces."""
    for entry in known["communication"]:
        sums = {name: [compressed] * 2 for name in ("seconds", "busy_seconds")} | {"cpu_seconds": [0.0] * 2}
        pieces = {name: [exchanged] * 4 for name in ("seconds", "busy_seconds")}
        pieces |= {"cpu_seconds": [0.0] * 4, "training_seconds": [0.01] * 4}
        entry |= {"compress": {"bf16": sums, "powersgd:4": sums}, "exchange": {"int8": pieces}}
    return known


def of_way(known: dict[str, Any], way: Way) -> forecast.Outlook:
    return next(one for one in forecast.outlooks(known) if one.nodes == 2 and one.way == way)


def test_training_waits_for_an_exchange_once_in_a_period() -> None:
    pieces = [Reduce(0.5, 0.6, 0.0, 0.05), Reduce(0.5, 0.6, 0.0, 0.05)]
    ranks = [rank((0.5,), 0.9), rank((0.5,), 1.9)]
    assert period_seconds(ranks, [], pieces, 10, 0) == pytest.approx(10 * 2.0 + 1.0 + 0.1)


def test_a_piece_on_its_way_costs_what_it_computes_and_what_it_is_late() -> None:
    piece = Reduce(1.0, 2.0, 0.5, 0.05)
    free, scarce = rank((0.5,), 0.9), rank((0.5,), 0.9, capacity=1.0)
    assert period_seconds([free], [], [piece] * 4, 16, 4) == pytest.approx(16 + 0.2)  # a piece has 4 s
    assert period_seconds([scarce], [], [piece] * 4, 16, 4) == pytest.approx(16 + 0.2 + 4 * 0.5)
    assert period_seconds([free], [], [piece] * 4, 4, 4) == pytest.approx(4 + 0.2 + 4 * 1.0)  # and here 1 s


def test_a_whole_run_has_what_is_sent_beside_its_steady_state() -> None:
    way = Way(sync_every=16, compress="int8")
    known = with_options(document(0.2, (1.0, 1.0)), 0.1, 0.1)
    steady = of_way(known, way)
    assert steady.images_per_second == steady.steady_images_per_second
    known["run"] = {"steps": 80, "powersgd": 8, "warmup": 40, "exchanges": {"16": [10, 2], "32": [10, 2]}}
    whole = of_way(known, way)
    assert whole.steady_images_per_second == steady.steady_images_per_second
    assert whole.step_seconds == pytest.approx(0.6 + 0.44 * (10 + 2 + 40 / 16) / 80)
    low_rank, plain = of_way(known, Way(compress="powersgd:4")), of_way(known, Way())
    of_steady = 120 / low_rank.steady_images_per_second
    assert low_rank.step_seconds == pytest.approx(0.1 * plain.step_seconds + 0.9 * of_steady)
    assert plain.images_per_second == plain.steady_images_per_second
    streamed = with_options(document(0.2, (1.0, 1.0), sync_every=16, stream=4, compress="int8"), 0.1, 0.1)
    streamed["run"] = known["run"]
    first = next(one for one in forecast.outlooks(streamed) if one.nodes == 2)  # in pieces, but training waits for them
    assert first.step_seconds == pytest.approx(0.6 + 0.44 * 12 / 80 + 0.5 * 0.04 / 16)


def test_first_steps_that_take_longer_make_a_short_run_slower_and_a_long_one_hardly() -> None:
    known = document(0.2) | {"cold": [1.0, 3.0, 2.0]}
    long = ddp(forecast.outlooks(known))
    known["run"] = known["run"] | {"steps": 10}
    short = ddp(forecast.outlooks(known))
    for nodes, seconds in ((1, 1.0), (2, 3.0), (3, 3.0)):  # the slowest host's
        assert short[nodes].step_seconds == pytest.approx(long[nodes].step_seconds + seconds / 10, abs=1e-4)
        assert short[nodes].waiting == pytest.approx(long[nodes].waiting)
        assert short[nodes].steady_images_per_second == long[nodes].steady_images_per_second


def test_ranks_of_a_host_sum_up_in_every_step_of_a_period() -> None:
    known = with_options(document(0.2), 0.1, 0.0)
    for share in known["shares"]:
        share["world_size"] *= 2
    known = known | {"steps": known["steps"] * 2, "capacity": known["capacity"] * 2}
    within = {name: [1.0, 1.0] for name in ("seconds", "busy_seconds")} | {"cpu_seconds": [0.0, 0.0]}
    way = Way(sync_every=16, compress="int8")
    share = known["shares"][1] | {"equal": [30] * 4, "auto": [30] * 4}
    alone = forecast.outlook(known, share, way, None)
    known["communication"].insert(0, {"nodes": 1, "world_size": 2, **within})
    both = forecast.outlook(known, share, way, None)
    assert both.step_seconds > alone.step_seconds + 1.0


def test_ways_are_compared_where_they_were_measured() -> None:
    bare, rich = document(0.2, (1.0, 1.0)), with_options(document(0.2, (1.0, 1.0)), 0.1, 0.1)
    assert not any(one.way in FOR_SLOW_LINKS for one in forecast.outlooks(bare))
    assert {one.way for one in forecast.outlooks(rich) if one.nodes == 2} >= set(FOR_SLOW_LINKS)
    assert {one.way for one in forecast.outlooks(rich) if one.nodes == 1} == {Way()}
    two_ranks = rich | {"shares": [share | {"world_size": 2 * share["world_size"]} for share in rich["shares"]]}
    assert not any(way in FOR_SLOW_LINKS for way in compared(two_ranks, two_ranks["shares"][0]))
    assert of_way(rich, Way(compress="bf16")).step_seconds < of_way(rich, Way()).step_seconds
    rare = of_way(rich, Way(sync_every=16, compress="int8"))
    assert rare.step_seconds == pytest.approx(0.6 + (4 * 0.1 + 0.04) / 16)
    asked = with_options(document(0.2, (1.0, 1.0), sync_every=16, compress="int8"), 0.1, 0.1)
    alone = [one for one in forecast.outlooks(asked) if one.nodes == 1]
    assert alone[0].way.sync_every == 16 and alone[0].step_seconds == pytest.approx(1.2)  # and nobody to exchange with
    lighter = of_way(rich | {"without_ddp": [0.9, 0.8]}, Way(sync_every=16, compress="int8"))
    assert lighter.step_seconds == pytest.approx(0.54 + (4 * 0.1 + 0.04) / 16)
    assert lighter.waiting == pytest.approx(1 - 0.54 / lighter.step_seconds)


def test_the_way_that_was_asked_for_comes_first_and_all_have_its_shares() -> None:
    known = with_options(document(0.2, (1.0, 2.0), compress="int8", sync_every=5, stream=2, shares="auto"), 0.1, 0.1)
    found = [one for one in forecast.outlooks(known) if one.nodes == 2]
    assert found[0].option == "--sync-every 5 --stream 2 --compress int8 --shares auto"
    assert Way(shares="auto", compress="bf16") in [one.way for one in found]


def test_what_costs_accuracy_is_said_but_recommended_to_those_alone_who_asked_for_it() -> None:
    known = with_options(document(0.5, (1.0, 1.0)), 0.3, 0.1)
    said = forecast.recommend(known)
    assert "Use NODES=2 with --compress bf16" in said
    loss = cost(Way(sync_every=16, compress="int8"), Training("sgd", 100_000))
    assert f"At some cost ({loss}, docs/slow-links.md): 1.9 x with --sync-every 16 --compress int8." in said
    assert "sync-every" not in forecast.recommend(known | {"run": known["run"] | {"steps": 100}})
    known["settings"]["optimizer"] = "adamw"  # with which it costs more than is advised
    assert "sync-every" not in forecast.recommend(known)
    asked = with_options(document(0.5, (1.0, 1.0), sync_every=16, compress="int8"), 0.3, 0.1)
    assert "Use all 2." in forecast.recommend(asked)
