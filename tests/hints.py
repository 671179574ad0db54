"""Hints to the compiler (``tl.multiple_of``) that are untrue fail in Triton's interpreter, too,
where they have no effect otherwise. On a GPU such a hint is an error of a misaligned address.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from triton.runtime.interpreter import TensorHandle

_set_attribute = TensorHandle.set_attr


def _set_checked(self: TensorHandle, name: str, values: Sequence[int]) -> None:
    if name == "tt.divisibility" and np.any(self.data.astype(np.int64) % values[0]):
        raise AssertionError(f"a kernel says that {self.data} is a multiple of {values[0]}.")
    _set_attribute(self, name, values)


def check() -> None:
    """Check all hints of kernels that this process interprets from now on."""
    TensorHandle.set_attr = _set_checked
