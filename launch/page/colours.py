"""The colours of all pages and pictures, by name, in light and in dark.

In a page they are variables of CSS, `var(--ink)`, drawings included, so that both follow the reader's setting.
"""

from __future__ import annotations

#: Classes of figures against the median, from bad to good: background and ink in light, the same in dark. Orange to
#: blue, which colour-blind readers can distinguish; every figure has a contrast of 4.5 or more.
SCALE = {
    "q0": ("#b3401b", "#ffffff", "#e0693f", "#14100e"),
    "q1": ("#f0a375", "#2b1206", "#a4542f", "#ffffff"),
    "q2": ("#f8dcc8", "#2b1206", "#5c3a2a", "#ffe9dd"),
    "q3": ("#e9edf1", "#1b2530", "#2c3640", "#e6ecf2"),
    "q4": ("#a9cdea", "#0b2237", "#1f4f78", "#e8f3fc"),
    "qx": ("#2b2b2b", "#ffffff", "#f2f2f2", "#7d0000"),
}
#: Lines of drawings, in light and dark (Okabe and Ito's colours, darkened or lightened for contrast).
LIGHT_LINES = ("#0072b2", "#c04f00", "#00785a", "#a8447f", "#806600", "#5b4bb7")
DARK_LINES = ("#56b4e9", "#ff9a57", "#35c79c", "#e79bc6", "#e6c229", "#a99df5")

_LIGHT = {
    "page": "#ffffff",
    "card": "#f6f8fa",
    "ink": "#1b2530",
    "quiet": "#5a6672",
    "line": "#d5dbe1",
    "faint": "#b9c9da",  # bars and lines that stand behind others
    "healthy": "#1d7a3e",
    "warning": "#8a5a00",
    "incomplete": "#7a3fa0",
    "error": "#b3261e",
}
_DARK = {
    "page": "#14191e",
    "card": "#1b2229",
    "ink": "#e4e9ee",
    "quiet": "#9aa7b3",
    "line": "#38424c",
    "faint": "#40566c",
    "healthy": "#5cc98a",
    "warning": "#f0b64a",
    "incomplete": "#c99af0",
    "error": "#ff8a80",
}


def _all(own: dict[str, str], lines: tuple[str, ...], column: int) -> dict[str, str]:
    scale = {name: colours[column] for name, colours in SCALE.items()}
    inks = {f"{name}i": colours[column + 1] for name, colours in SCALE.items()}
    return own | {f"l{number}": colour for number, colour in enumerate(lines)} | scale | inks


#: Every colour by its name: "ink", "l0" (the first line), "q0" (the worst class of SCALE), "q0i" (its ink).
LIGHT = _all(_LIGHT, LIGHT_LINES, 0)
DARK = _all(_DARK, DARK_LINES, 2)


def variable(name: str) -> str:
    """The colour of this name in a page. Raises KeyError when there is none."""
    assert LIGHT[name] and DARK[name]
    return f"var(--{name})"
