"""Read switches and numbers from environment variables; docs/reference.md lists Interlace's."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator, Mapping

from interlace.errors import ArgumentError

LIMIT_VARIABLE = "INTERLACE_MAX_WORKSPACE"
"""The variable with the most bytes of symmetric memory that a group's operators may hold."""

_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def text_of(variable: str) -> str | None:
    """Return what a variable holds; None if it is not set.

    Calls ask for variables that are seldom set, and ``os.environ`` raises an error and catches it
    for each of those, which takes several times as long as looking where CPython keeps them.
    """
    held: Mapping[bytes, bytes] | None = getattr(os.environ, "_data", None)
    if held is not None and _encoded(variable) not in held:
        return None
    return os.environ.get(variable)


_encoded = functools.cache(os.fsencode)


def switch(variable: str) -> bool | None:
    """Return whether a variable is on; None if it is not set, or empty.

    On are ``1``, ``true``, ``yes`` and ``on``, off are ``0``, ``false``, ``no`` and ``off``, in
    small letters or capitals.

    Raises:
        ArgumentError: The variable holds something else.
    """
    text = text_of(variable)
    if not text:
        return None
    if text.lower() not in _ON + _OFF:
        raise ArgumentError(f"{variable} must be 1 or 0; got {text!r}. Change it, or unset it.")
    return text.lower() in _ON


def whole_number(variable: str, default: int | None = None, *, least: int = 0) -> int:
    """Return the number that a variable holds, which may be a launcher's.

    Args:
        variable: Name of the variable.
        default: What is returned if it is not set, or empty; None: it must be set.
        least: The smallest number that it may hold.

    Raises:
        ArgumentError: The variable holds no such number.
    """
    text = os.environ.get(variable, "")
    if not text and default is not None:
        return default
    # Python refuses to read numbers of thousands of digits.
    if not text.isdecimal() or len(text) > 18 or int(text) < least:
        rule = f"a whole number of at least {least}" if least else "a whole number"
        raise ArgumentError(
            f"{variable} must be {rule}; got {text!r}. Unset it, or leave it to the launcher."
        )
    return int(text)


_BYTES = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def byte_count(variable: str, default: str = "") -> int | None:
    """Return the number of bytes that a variable holds; None if it is empty.

    The number may end in ``K``, ``M``, ``G`` or ``T``, powers of 1024, also as in ``512MiB``.

    Args:
        variable: Name of the variable.
        default: What it holds where it is not set.

    Raises:
        ArgumentError: The variable holds something else.
    """
    text = os.environ.get(variable, default)
    if not text:
        return None
    match = re.fullmatch(r"(\d{1,18})(?:([KMGT])(?:iB)?)?", text)
    if match is None:
        raise ArgumentError(
            f"{variable} must be a number of bytes, such as 536870912 or 512M; got {text!r}. "
            "Change it, or unset it."
        )
    return int(match[1]) << _BYTES[match[2] or ""]


def settings() -> dict[str, str]:
    """Return all variables of Interlace that are set, in the order of their names."""
    return {
        name: value for name, value in sorted(os.environ.items()) if name.startswith("INTERLACE_")
    }


@contextlib.contextmanager
def changed(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables within this context, for processes that start in it, too."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
