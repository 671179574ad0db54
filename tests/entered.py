"""What a call enters, for tests of what it costs the host; and somebody who listens to calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils._python_dispatch import TorchDispatchMode

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


class Listening(TorchDispatchMode):
    """While somebody listens, calls take the dispatcher's way, and none is played."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))
