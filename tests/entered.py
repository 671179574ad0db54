"""What a call enters, for tests of what it costs the host."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def entered(call: Callable[[], T]) -> tuple[T, list[str]]:
    """What a call returns, and the file of every function of Python that it enters, itself among
    them.
    """
    files: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return result, files
