"""Units of bytes and times, and their formatting.

GB is 1e9 bytes and GiB is 2**30 bytes. Times are in nanoseconds unless a name says otherwise.
"""

from __future__ import annotations

import math
from decimal import Decimal

KB = 10**3
MB = 10**6
GB = 10**9
TB = 10**12
KIB = 2**10
MIB = 2**20
GIB = 2**30
TIB = 2**40

MOST_COUNT = 2**30
"""The largest size that is taken from a text: the bytes of a product of two fit into an int64."""

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


def format_number(value: float, digits: int = 3) -> str:
    """Format a number with ``digits`` digits, or with all those before the point.

    It is never shown as a power of ten: ``999.7`` -> ``"1000"``, ``0.00001234`` -> ``"0.0000123"``.
    """
    text = f"{value:.{digits}g}"
    return f"{Decimal(text):f}" if "e-" in text else f"{value:.0f}" if "e" in text else text


def format_count(count: int, noun: str) -> str:
    """Format a number with its noun: ``(1, "rank")`` -> ``"1 rank"``, and ``"2 ranks"``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_bytes(count: float) -> str:
    """Format a number of bytes with a power of ten: ``1_500_000`` -> ``"1.5 MB"``."""
    for size, name in ((TB, "TB"), (GB, "GB"), (MB, "MB"), (KB, "KB")):
        if abs(count) >= size:
            return f"{format_number(count / size)} {name}"
    return f"{count:.0f} B"


def format_binary_bytes(count: int) -> str:
    """Format a power of two of bytes with a power of two: ``65_536`` -> ``"64 KiB"``."""
    for size, name in ((MIB, "MiB"), (KIB, "KiB")):
        if count >= size:
            return f"{count // size} {name}"
    return f"{count} B"


def format_memory(count: int) -> str:
    """Format any number of bytes with powers of two: ``1_572_864`` -> ``"1.5 MiB"``."""
    for size, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= size:
            return f"{format_number(count / size)} {name}"
    return f"{count} B"


def format_ns(nanoseconds: float) -> str:
    """Format a time in nanoseconds: ``12_600`` -> ``"12.6 us"``."""
    for size, name in ((NS_PER_S, "s"), (NS_PER_MS, "ms"), (NS_PER_US, "us")):
        if abs(nanoseconds) >= size:
            return f"{format_number(nanoseconds / size)} {name}"
    return f"{nanoseconds:.0f} ns"


def shortened(text: str) -> str:
    """Return a text in quotation marks for a message, without what is behind 60 letters."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def parse_count(text: str) -> int | None:
    """Return the number of things that a text is; None if it is no whole number up to 2^30."""
    # The longest texts are numbers that Python refuses to read.
    if not text.strip().isdecimal() or len(text) > 20 or int(text) > MOST_COUNT:
        return None
    return int(text)


def ceil_div(a: int, b: int) -> int:
    """Return the smallest integer that is not below ``a / b``; ``a`` at least 0, ``b`` positive."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``a``."""
    return ceil_div(a, multiple) * multiple


def round_down(a: int, multiple: int) -> int:
    """Return the largest multiple of ``multiple`` that is not above ``a``."""
    return a // multiple * multiple


def next_power_of_2(a: int) -> int:
    """Return the smallest power of two that is not below ``a``; 1 for ``a`` below 2."""
    return 1 << max(0, a - 1).bit_length()


def alignment(itemsize: int, *numbers: int) -> int:
    """Return the largest power of two of elements, up to 16 bytes, that divides all ``numbers``.

    Vectors are loaded and stored as wide as that.
    """
    return math.gcd(16 // itemsize, *numbers)
