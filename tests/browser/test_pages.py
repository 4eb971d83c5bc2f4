"""Promises of every page in a real browser, on wide and narrow screens, in light and dark: it is whole without a
network, says nothing on the console, shows every picture, fits the screen, and can be read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By

from launch.health.report import charts
from launch.report import run_page
from tests.browser.chromium import Chromium
from tests.launch.health.test_page import document
from tests.launch.report import made_runs

pytestmark = pytest.mark.browser

PAGES = ("runs", *made_runs.NAMES, "check", "check of 16 hosts")
VIEWS = ((1280, "light"), (1280, "dark"), (400, "light"))  # no style is for narrow and dark screens alone
GROUNDS = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 25, 30)"}

#: Pages that are opened in every view by `make test`; `make test-all` does so with all.
IN_EVERY_VIEW = ("runs", "restarted", "check")


@pytest.mark.parametrize(
    ("page", "width", "scheme"),
    [
        pytest.param(
            page, *view, id=f"{page}-{view[0]}-{view[1]}",
            marks=() if view == VIEWS[0] or page in IN_EVERY_VIEW else pytest.mark.long,
        )
        for page in PAGES
        for view in VIEWS
    ],
)  # fmt: skip
def test_a_page_is_whole_without_a_network_fits_the_screen_and_can_be_read(
    page: str, width: int, scheme: str, chromium: Chromium, pages: dict[str, Path]
) -> None:
    seen = chromium.see(pages[page], width, scheme)
    assert seen.ground == GROUNDS[scheme] and seen.width["screen"] == width
    wrong = {
        "on the console": list(seen.console),
        "asked for from elsewhere": [url for url in seen.requests if not url.startswith(("file:///", "data:"))],
        "files asked for, of 1": [url for url in seen.requests if url.startswith("file:")][1:],
        "pictures empty or not as wide as their place": list(filter(is_no_picture, seen.drawings)),
        "over something else in a picture": list(seen.overlaps),
        "wider than the screen": list(seen.width["out"]),
        "unreadable": list(seen.unreadable),
    }
    assert {check: found for check, found in wrong.items() if found} == {}
    assert any(url.startswith("file:") for url in seen.requests)  # the page itself
    assert bool(seen.drawings) == (page != "runs") and seen.texts > 20
    assert seen.width["page"] <= seen.width["screen"]


def is_no_picture(drawing: dict[str, Any]) -> bool:
    is_there = drawing["marks"] >= 1 and drawing["height"] >= 50 and drawing["name"]
    return not (is_there and 0.85 * drawing["room"] <= drawing["width"] <= drawing["room"] + 1)


def test_a_page_follows_the_screen_when_it_is_turned(chromium: Chromium, pages: dict[str, Path]) -> None:
    chromium.open(pages["restarted"], 1280)
    chromium.resize(400)
    chromium.wait_for("return [...document.querySelectorAll('.drawing svg')].every((svg) => svg.clientWidth <= 400)")
    assert chromium.run("return document.documentElement.scrollWidth") <= 400


def test_the_list_of_runs_is_seen_whole_on_a_wide_screen(chromium: Chromium, pages: dict[str, Path]) -> None:
    chromium.open(pages["runs"], 1280)
    box = "document.querySelector('.scroll')"
    width, room = chromium.run(f"return [{box}.scrollWidth, {box}.clientWidth]")
    assert width <= room


def test_the_list_of_runs_is_sorted_by_a_click_both_ways(chromium: Chromium, pages: dict[str, Path]) -> None:
    chromium.open(pages["runs"])

    def column(head: str) -> list[str]:
        """The cells of a column after a click on its head."""
        buttons = chromium.driver.find_elements(By.CSS_SELECTOR, "th button")
        number = [button.text for button in buttons].index(head)
        buttons[number].click()
        cells = chromium.run(
            f"return [...document.querySelectorAll('tbody tr')].map((row) => row.cells[{number}].innerText)"
        )
        return [str(cell).strip() for cell in cells]

    assert column("result") == ["76.31%", "90.00%", "94.99%", "99.16%", "", ""]
    assert column("result") == ["99.16%", "94.99%", "90.00%", "76.31%", "", ""]  # what has none stays last
    assert column("ranks") == ["1", "2", "3", "3", "3", "256"]  # as numbers, not as words
    assert column("duration") == ["17.1 s", "18.0 s", "26.6 s", "1:04 min", "1:06:48 h", "2:47:40 h"]
    assert column("run")[0] == made_runs.LARGE and column("run")[0] == made_runs.SUCCEEDED
    assert chromium.run("return document.querySelectorAll('th[aria-sort]').length") == 1
    assert chromium.run("return document.querySelector('th[aria-sort]').innerText").strip() == "run"


def test_a_link_in_the_list_opens_the_page_of_that_run(chromium: Chromium, pages: dict[str, Path]) -> None:
    chromium.open(pages["runs"], 400)
    chromium.driver.find_element(By.LINK_TEXT, made_runs.FAILED).click()
    chromium.wait_for("return document.querySelector('h1')?.textContent.includes('resnet18 on digits')")
    assert chromium.driver.title == f"Run {made_runs.FAILED}: failed"


def test_the_pointer_over_a_mark_says_what_it_is(chromium: Chromium, pages: dict[str, Path]) -> None:
    chromium.open(pages["restarted"])
    (failure,) = chromium.driver.find_elements(By.CSS_SELECTOR, ".drawing [aria-label*='kind: failure']")
    ActionChains(chromium.driver).move_to_element(failure).perform()
    chromium.wait_for("return document.querySelector('#vg-tooltip-element.visible')")
    said = chromium.run("return document.querySelector('#vg-tooltip-element').innerText")
    assert "h2: its keeper is gone" in said and "27.768" in said


WICKED = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>\"'&amp;{{7*7}}"


def test_what_a_run_said_is_text_and_never_runs(chromium: Chromium, tmp_path: Path) -> None:
    folder = made_runs.failed(tmp_path / "wicked", WICKED)
    settings = json.loads((folder / "settings.json").read_text())
    (folder / "settings.json").write_text(json.dumps(settings | {"model": WICKED}))
    chromium.open(run_page.write(folder))
    assert WICKED in chromium.run("return document.querySelector('.cause').textContent")
    assert WICKED in chromium.run("return document.querySelector('h1').textContent")
    (failure,) = chromium.driver.find_elements(By.CSS_SELECTOR, ".drawing [aria-label*='kind: failure']")
    ActionChains(chromium.driver).move_to_element(failure).perform()
    chromium.wait_for("return document.querySelector('#vg-tooltip-element.visible')")
    assert "onerror" in chromium.run("return document.querySelector('#vg-tooltip-element').textContent")
    assert chromium.run("return window.hacked ?? null") is None
    assert chromium.run("return document.querySelectorAll('img, h1 script, .cause script').length") == 0


def test_the_heat_map_is_a_picture_of_its_own(chromium: Chromium, tmp_path: Path) -> None:
    """As a mail program or a wiki shows it: without scripts, and without what is around it in a page."""
    (tmp_path / "heatmap.svg").write_text(charts.heatmap_svg(document()) or "")
    (tmp_path / "mail.html").write_text('<!DOCTYPE html><link rel="icon" href="data:,"><img src="heatmap.svg">')
    chromium.open(tmp_path / "mail.html")
    chromium.wait_for("return document.querySelector('img').complete")
    width, height = chromium.run(
        "const one = document.querySelector('img'); return [one.naturalWidth, one.naturalHeight]"
    )
    assert width > 200 and height > 120 and chromium.logs("browser") == []
