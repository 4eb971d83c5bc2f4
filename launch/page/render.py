"""Jinja2 templates become pages: one file each, everything in them escaped, nothing needed from elsewhere."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from launch.files import write_whole
from launch.page import colours, drawing

TEMPLATES = Path(__file__).parent / "templates"


def write(path: Path, template: Path, content: Mapping[str, Any]) -> None:
    """Write the page that `template` makes of `content`. Raises OSError when it cannot be written."""
    write_whole(path, page(template, content))


def page(template: Path, content: Mapping[str, Any]) -> str:
    """The page. What a template names and `content` lacks is an error (jinja2.UndefinedError), not an empty place."""
    text = _environment(template.parent).get_template(template.name).render(content)
    return text.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair, as a rank's output may have it


@functools.cache
def _environment(folder: Path) -> Environment:
    """The templates of a folder, and those that all share."""
    made = Environment(
        loader=FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["code"] = with_code
    made.globals |= {"light": colours.LIGHT, "dark": colours.DARK, "scale": colours.SCALE, "shapes": drawing.SHAPES}
    made.globals |= {"vega": drawing.library}
    return made


def with_code(words: str) -> Markup:
    """Escaped; text between pairs of backticks becomes code."""
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", str(escape(words))))
