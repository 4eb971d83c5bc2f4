"""How figures and rows of names are written for people: one unit for one thing, everywhere. Links and all-reduces are
in Gbit/s."""

from __future__ import annotations

from collections.abc import Sequence

_BYTES = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def rate(mbits: float) -> str:
    """A bandwidth, given in 10^6 bit/s, in Gbit/s with its unit: "9.41 Gbit/s", "0.094 Gbit/s"."""
    return f"{gbits(mbits)} Gbit/s"


def gbits(mbits: float) -> str:
    """A bandwidth, given in 10^6 bit/s, as a bare figure in Gbit/s: three digits, below 0.1 two, no exponent."""
    value = mbits / 1000
    if value < 0.0001:
        return f"{value:.6f}" if value else "0"
    return f"{value:.3g}" if value >= 0.1 else f"{value:#.2g}"


def milliseconds(value: float) -> str:
    """A time in ms with its unit."""
    return f"{number(value)} ms"


def number(value: float) -> str:
    """A positive figure with two significant digits or more, without an exponent."""
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 0.995 else f"{value:.2f}"


def size(count: float) -> str:
    """A number of bytes: "1.5 GiB"."""
    for unit, factor in _BYTES:
        if abs(count) >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} bytes"


def age(seconds: float) -> str:
    """A span of time: "40 s", "3 min", "2.5 h", "6 days"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * 86400 else f"{seconds / 86400:.0f} days"


def some(names: Sequence[str], most: int = 6) -> str:
    """Names in a row, the first few of many."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
