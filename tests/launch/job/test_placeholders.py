"""Promises: a placeholder in a script's arguments is filled in for each rank, an unknown one is refused by name, a
doubled brace is a brace, and other braces are left alone."""

import pytest

from keeper.placeholders import fill
from launch.cli.refusal import Refusal
from launch.job import placeholders

OLDER_STYLE = ["--init-method", "tcp://{master_addr}:{free_port}", "--rank", "{rank}", "--local_rank={local_rank}"]


@pytest.mark.parametrize(
    "word",
    ['{"a": 1}', '{"a": {"b": {"c": 2}}}', "{}", "{0}", "{x:.2f}", "{", "}}", "}", "{a.b}", '{"a": {}}}'],
)
def test_braces_that_are_no_placeholder_pass_as_they_are(word: str) -> None:
    placeholders.check([word])
    assert fill([word], {}) == [word]


def test_arguments_of_the_older_style_are_filled_in() -> None:
    placeholders.check(OLDER_STYLE)
    place = {"RANK": "5", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.2", "MUSTER_FREE_PORT": "29501"}
    expected = ["--init-method", "tcp://10.0.0.2:29501", "--rank", "5", "--local_rank=1"]
    assert fill(OLDER_STYLE, place) == expected


def test_an_ipv6_address_before_a_port_gets_its_brackets() -> None:
    place = {"MASTER_ADDR": "fd00::2", "MASTER_PORT": "29500"}
    words = ["tcp://{master_addr}:{master_port}", "{master_addr}"]
    assert fill(words, place) == ["tcp://[fd00::2]:29500", "fd00::2"]


def test_a_placeholder_in_json_is_filled_in() -> None:
    assert fill(['{"rank": {rank}, "name": "{{rank}}"}'], {"RANK": "3"}) == ['{"rank": 3, "name": "{rank}"}']


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("model-{{epoch}}.pt", "model-{epoch}.pt"),
        ("{{", "{"),
        ("{{}}", "{}"),
        ('{{"a": {{"rank": {rank}}}}}', '{"a": {"rank": 3}}'),
        ('{{"a": {"rank": {rank}}}}', '{"a": {"rank": 3}}'),  # braces within doubled ones that are not
        ('{"rank":{rank}}', '{"rank":3}'),
        ("{{{rank}}}", "{3}"),
        ("{{{{ name }}}}", "{{ name }}"),
        ("{{rank}", "{rank}"),
        ("{{x} }}", "{x} }"),
    ],
)
def test_a_doubled_brace_is_a_brace(typed: str, expected: str) -> None:
    placeholders.check([typed])
    assert fill([typed], {"RANK": "3"}) == [expected]


def test_every_unknown_placeholder_is_refused_by_name_and_with_a_near_one() -> None:
    with pytest.raises(Refusal) as refusal:
        placeholders.check(["--rank", "{local_rnak}", "model-{epoch}.pt", "{epoch}"])
    near, far = refusal.value.problems
    assert "{local_rnak}" in near.what and "write {local_rank}," in near.fix
    assert "{epoch}" in far.what and "{{epoch}}" in far.fix and "{free_port}" in far.fix


def test_a_value_that_the_host_does_not_have_is_named() -> None:
    with pytest.raises(ValueError, match="MUSTER_FREE_PORT"):
        fill(["{free_port}"], {})
