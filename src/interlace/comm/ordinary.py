"""Make tensors that outlive a call, also if the call is in inference mode."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def makes_ordinary_tensors(make: Callable[P, T]) -> Callable[P, T]:
    """Decorate ``make`` so that it creates no inference tensors.

    PyTorch refuses to write to an inference tensor outside of inference mode, and to save it for a
    backward pass. A program may evaluate first, in ``torch.inference_mode()``, and train
    afterwards. So every tensor that outlives a call must be made by a function with this decorator.
    """

    @functools.wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return make(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return make(*args, **kwargs)

    return call
