"""Tensors that are kept from call to call, made by a call that may be in inference mode."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def makes_ordinary_tensors(make: Callable[P, T]) -> Callable[P, T]:
    """Let the tensors that ``make`` creates be ordinary ones, also where it is called in
    ``torch.inference_mode()``.

    PyTorch lets nobody write to an inference tensor outside of inference mode, nor save it for a
    backward pass. So whatever outlives a call must be made by a function with this decorator: a
    program may evaluate first and train afterwards.
    """

    @functools.wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return make(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return make(*args, **kwargs)

    return call
