"""JSON as every parser takes it, as the standard has no NaN and no infinity; and JSON files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from interlace.errors import ArgumentError


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
    """Read a document.

    Args:
        file: The file.
        meaning: What the file must be, for the message.

    Raises:
        ArgumentError: the file cannot be read, or is no JSON.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{file} must be {meaning}; {error}.") from error


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
