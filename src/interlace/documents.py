"""JSON as every parser takes it, as the standard has no NaN and no infinity; and JSON files."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from interlace.errors import ConfigError, InterlaceError

DAMAGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors of code that goes through a document in which something is not as it should be."""


def to_json(
    document: object, indent: int | None = 1, default: Callable[[Any], Any] | None = None
) -> str:
    """Format a document as JSON, with a final newline.

    A number that is not finite becomes null, such as the AUC of samples of one class.

    Args:
        document: Dicts, lists, tuples, text, numbers, booleans and None.
        indent: Spaces of indentation; None writes one line.
        default: Function that makes one of these of any other value.
    """
    return json.dumps(_finite(document), allow_nan=False, indent=indent, default=default) + "\n"


def read_json(file: Path, meaning: str) -> Any:
    """Read a document, all of whose numbers are finite.

    Args:
        file: The file.
        meaning: What the file must be, for the message.

    Raises:
        ConfigError: the file cannot be read, is no JSON, or is larger than any that is written.
    """
    try:
        text = read_bytes(file).decode("utf-8")
        return json.loads(text, parse_constant=_number, parse_float=_number)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} must be {meaning}; {error}.") from error


def read_bytes(file: Path) -> bytes:
    """Read a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger than any that is written, or has no end.
    """
    with file.open("rb") as stream:
        content = stream.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    return content


@contextlib.contextmanager
def reading(files: Sequence[Path], meaning: str) -> Iterator[None]:
    """Turn the errors of code that goes through documents into one that names their files.

    Args:
        files: The files that the documents are from.
        meaning: What they must be, for the message.

    Raises:
        ConfigError: a document lacks something, or has something else in its place.
    """
    try:
        yield
    except InterlaceError:
        raise
    except DAMAGE as error:
        names = " and ".join(map(str, files))
        raise ConfigError(f"{names} must be {meaning}; {type(error).__name__}: {error}.") from error


_MOST_BYTES = 2**30


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:60]} is not a number of JSON")
    return value


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
