"""Promise: what stands in a page is readable in light and in dark."""

from __future__ import annotations

import pytest

from launch.page.colours import DARK, DARK_LINES, LIGHT, LIGHT_LINES, SCALE, variable


def contrast(one: str, other: str) -> float:
    """The contrast of two colours as WCAG 2 defines it (relative luminance of sRGB)."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", SCALE)
def test_figures_are_readable_on_every_colour_of_a_heat_map(name: str) -> None:
    for colours in (LIGHT, DARK):
        assert contrast(colours[name], colours[f"{name}i"]) >= 4.5


@pytest.mark.parametrize("name", ["ink", "quiet", "healthy", "warning", "incomplete", "error", "l0"])
def test_words_are_readable_on_the_page_and_on_cards(name: str) -> None:
    for colours in (LIGHT, DARK):
        assert min(contrast(colours[name], colours[ground]) for ground in ("page", "card")) >= 4.5


def test_lines_stand_out() -> None:
    for number in range(len(LIGHT_LINES)):
        assert contrast(LIGHT[f"l{number}"], LIGHT["page"]) >= 3 and contrast(DARK[f"l{number}"], DARK["page"]) >= 3
    assert len(LIGHT_LINES) == len(DARK_LINES) and LIGHT.keys() == DARK.keys()


def test_a_colour_that_does_not_exist_is_an_error() -> None:
    assert variable("ink") == "var(--ink)"
    with pytest.raises(KeyError):
        variable("pink")
