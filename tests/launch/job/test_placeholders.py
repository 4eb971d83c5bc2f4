"""Promises of launch.job.placeholders: an unknown placeholder is refused by name, other braces are left alone."""

import pytest

from launch.cli.refusal import Refusal
from launch.job import placeholders
from train.start import placeholders as filled_in

OLDER_STYLE = ["--init-method", "tcp://{master_addr}:{free_port}", "--rank", "{rank}", "--local_rank={local_rank}"]


@pytest.mark.parametrize(
    "word",
    ['{"a": 1}', '{"a": {"b": {"c": 2}}}', "{}", "{0}", "{x:.2f}", "{", "}}", "{{ name }}", "${HOME}"[1:-1], "{a.b}"],
)
def test_braces_that_are_no_placeholder_pass_as_they_are(word: str) -> None:
    placeholders.check([word])
    assert filled_in.fill([word], {}) == [word]


def test_arguments_of_the_older_style_are_filled_in() -> None:
    placeholders.check(OLDER_STYLE)
    place = {"RANK": "5", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.2", "MUSTER_FREE_PORT": "29501"}
    expected = ["--init-method", "tcp://10.0.0.2:29501", "--rank", "5", "--local_rank=1"]
    assert filled_in.fill(OLDER_STYLE, place) == expected


def test_an_ipv6_address_before_a_port_gets_its_brackets() -> None:
    place = {"MASTER_ADDR": "fd00::2", "MASTER_PORT": "29500"}
    words = ["tcp://{master_addr}:{master_port}", "{master_addr}"]
    assert filled_in.fill(words, place) == ["tcp://[fd00::2]:29500", "fd00::2"]


def test_a_placeholder_in_json_is_filled_in() -> None:
    assert filled_in.fill(['{"rank": {rank}, "name": "{{rank}}"}'], {"RANK": "3"}) == ['{"rank": 3, "name": "{rank}"}']


def test_doubled_braces_keep_a_name_from_being_a_placeholder() -> None:
    placeholders.check(["model-{{epoch}}.pt"])
    assert filled_in.fill(["model-{{epoch}}.pt"], {}) == ["model-{epoch}.pt"]


def test_every_unknown_placeholder_is_refused_by_name_and_with_a_near_one() -> None:
    with pytest.raises(Refusal) as refusal:
        placeholders.check(["--rank", "{local_rnak}", "model-{epoch}.pt", "{epoch}"])
    near, far = refusal.value.problems
    assert "{local_rnak}" in near.what and "write {local_rank}," in near.fix
    assert "{epoch}" in far.what and "{{epoch}}" in far.fix and "{free_port}" in far.fix


def test_a_value_that_the_host_does_not_have_is_named() -> None:
    with pytest.raises(ValueError, match="MUSTER_FREE_PORT"):
        filled_in.fill(["{free_port}"], {})


def test_both_sides_mean_the_same_by_a_placeholder() -> None:
    """train and launch do not import each other."""
    assert set(placeholders.NAMES) == set(filled_in.VARIABLES)
    assert filled_in.PLACEHOLDER.pattern == placeholders.PLACEHOLDER.pattern
