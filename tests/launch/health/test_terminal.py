"""Promise: a check fits a screen: what is wrong first with its fix, then what is right, then figures."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from launch.health.report import terminal
from launch.health.verdicts import ERROR, HEALTHY, INCOMPLETE, WARNING, Verdict
from tests.launch.health.test_link_checks import AB, BA, H3, links, names, of
from tests.launch.health.test_page import NASTY, document, forecast

CHECKS = ("clock", "runs", "gpus", "data", "disk", "memory", "limits", "load")


def printed(made: dict[str, Any], width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width)
    terminal.show(made, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def large(bad: tuple[str, ...] = (), hosts: int = 30, **changes: Any) -> dict[str, Any]:
    """A check of many hosts, of which `bad` have a slow network, a full disk, a hot GPU and another torch."""
    every = names(hosts)
    verdicts = [
        Verdict(check, f"host {host}", HEALTHY, f"{n}.0 GiB free", "")
        for n, host in enumerate(every)
        for check in CHECKS
        if host not in bad or check not in ("disk", "gpus")
    ]
    for host in bad:
        slow = f"{host} -> others 0.094 Gbit/s, others -> {host} 0.094 Gbit/s, the median is 0.941 Gbit/s"
        verdicts += [
            Verdict("disk", f"host {host}", ERROR, "0.5 GiB free for runs", "remove old runs in /var/lib/muster/runs"),
            Verdict("gpus", f"host {host}", INCOMPLETE, "the host's answer lacks `gpus`", "run `make deploy`"),
            Verdict("bandwidth", f"host {host}", WARNING, slow, f"check {host}'s cable, switch port and NIC"),
            Verdict("torch", f"host {host}", ERROR, "torch 2.12.1; 28 others have 2.13.0: hosts differ", "run deploy"),
        ]
    verdicts += [
        Verdict("sameness", "cluster", HEALTHY, "the same on 30 hosts: image, code, torchvision, CUDA, architecture"),
        Verdict("links", "cluster", HEALTHY, "870 pairs, slowest h1 -> h2 0.941 Gbit/s, median 0.941 Gbit/s"),
        Verdict("all-reduce", "cluster", HEALTHY, "128 MiB in 2.2 s with correct values: bus bandwidth 0.92 Gbit/s"),
        Verdict("drift", "cluster", HEALTHY, "no bandwidth of 870 pairs changed by 25% or more since then"),
    ]
    slow_links = {pair: 94.0 for host in bad for pair in of(host, hosts, 94.0)}
    torch = ["2.12.1" if host in bad else "2.13.0" for host in every]
    sameness = {
        "hosts": every,
        "rows": [{"property": "torch", "values": torch, "odd": list(bad), "level": ERROR, "majority": "2.13.0"}],
    }
    made = {"hosts": every, "links": links(every, slow_links), "verdicts": verdicts, "sameness": sameness}
    return document(**(made | {"forecast": forecast(list(range(1, hosts + 1)))} | changes))


@pytest.mark.parametrize("bad", [(), ("h7", "h21"), tuple(names(15))], ids=["healthy", "two bad", "half bad"])
def test_thirty_hosts_fit_a_screen(bad: tuple[str, ...]) -> None:
    lines = printed(large(bad), width=100).splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    text = "\n".join(lines)
    for word in ("bus bandwidth 0.92 Gbit/s", "slowest pairs in Gbit/s (median 0.", "Take powersgd"):
        assert word in text
    assert ("healthy on all 30 hosts: clock, runs, gpus, data" in text) is not bool(bad)


def test_two_bad_hosts_of_thirty_stand_on_top_with_their_fixes() -> None:
    text = printed(large(("h7", "h21")), width=100)
    top, rest = text.split("✓", 1)
    for words in ("disk", "remove old runs", "h7, h21: 0.5 GiB free", "h7 -> others 0.094", "check h7's cable"):
        assert words in top
    assert rest.startswith(" healthy on all 30 hosts: clock, runs, data, memory") and "disk" not in rest
    assert "differs: torch: 2.12.1 on h7, h21; 2.13.0 on the other hosts" in rest
    assert "slowest pairs in Gbit/s (median 0.941): h1 -> h2 0.941," in rest  # those of h7 and h21 are explained


def test_the_graver_comes_first_then_tables_then_advice() -> None:
    text = printed(document())
    order: tuple[str, ...] = (
        "✗ error",
        "fix: open the port",
        "? incomplete",
        "! warning",
        "✓",
        "Bandwidth",
        "Round trip",
    )
    order += ("differs: torch: 2.12.1 on h2", "speed-up", "Take powersgd on 3 hosts.")
    places = [text.index(words) for words in order]
    assert places == sorted(places)


def rows_of(text: str, title: str) -> dict[str, list[str]]:
    """The rows of the link table under a title, by their first cell."""
    lines = text[text.index(title) :].splitlines()[2 : 2 + len(H3)]
    return {line.split()[0]: line.split()[1:] for line in lines}


def test_few_hosts_are_shown_pair_by_pair_with_marks_and_words() -> None:
    text = printed(document(links=links(H3, {AB: 94}, rtt={AB: 12.3, BA: 0.04}, error={("h3", "h1"): "refused"})[:-1]))
    assert rows_of(text, "Bandwidth in Gbit/s") == {
        "h1": ["-", "0.094*", "0.941"],
        "h2": ["0.941", "-", "0.941"],
        "h3": ["broken", "?", "-"],
    }
    assert rows_of(text, "Round trip in ms")["h1"] == ["-", "12*", "0.20"]


def test_a_table_that_is_wider_than_the_terminal_gives_way_to_the_extremes() -> None:
    assert "slowest pairs" in printed(document(), width=24) and "slowest pairs" not in printed(document(), width=60)


def test_faults_of_pairs_are_shown_a_few_and_counted() -> None:
    pairs = [Verdict("bandwidth", f"h{n} -> h{n + 1}", WARNING, f"0.{n} Gbit/s", f"check h{n}") for n in range(1, 8)]
    text = printed(document(verdicts=pairs))
    assert "bandwidth, 7 pairs" in text and "h1 -> h2: 0.1 Gbit/s" in text and "4 more: h4 -> h5," in text
    assert "fix: check h1; the others likewise" in text


def test_one_option_for_each_number_of_hosts_and_all_options_for_all_hosts() -> None:
    text = printed(large())
    counts = [line.split()[:2] for line in text.splitlines() if line.strip().endswith("90%")]
    wanted = [[str(n), "ddp"] for n in (1, 2, 4, 8, 16, 30)] + [["30", "powersgd"]]
    assert counts == wanted


def test_what_was_left_out_is_said() -> None:
    text = printed(document(forecast=None, allreduce={"rows": [], "note": "left out: fix the errors first"}))
    assert "All-reduce: left out: fix the errors first" in text and "Forecast: Not made." in text
    assert printed(document(links=[], verdicts=[], sameness=None, allreduce=None, forecast=None))


def test_markup_in_a_message_is_shown_as_it_is() -> None:
    text = printed(document(verdicts=[Verdict("x", "h1", ERROR, "bad [red]key[/red] [/]", "do [this]")]))
    assert "bad [red]key[/red] [/]" in text and "do [this]" in text
    assert printed(document(inventory=NASTY, verdicts=[Verdict(NASTY, NASTY, WARNING, NASTY, NASTY)]))
