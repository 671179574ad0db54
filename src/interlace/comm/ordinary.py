"""Make tensors that outlive a call, whatever the call is part of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from interlace.comm import inductor_graphs

P = ParamSpec("P")
T = TypeVar("T")


def makes_ordinary_tensors(make: Callable[P, T]) -> Callable[P, T]:
    """Decorate ``make`` so that its tensors are neither inference tensors nor a graph's memory.

    PyTorch refuses to write to an inference tensor outside of inference mode, and to save it for a
    backward pass. A program may evaluate first, in ``torch.inference_mode()``, and train
    afterwards. And while Inductor warms up one of its CUDA graphs, memory comes from the graph's
    pool, which may hold nothing that lasts (``interlace.comm.inductor_graphs``). So every tensor
    that outlives a call must be made by a function with this decorator.
    """

    @functools.wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        # Nothing lasting is made in a capture; what is missing then is refused with a reason.
        if inductor_graphs.is_running() and not torch.cuda.is_current_stream_capturing():
            return inductor_graphs.call_apart(make, *args, **kwargs)
        if not torch.is_inference_mode_enabled():
            return make(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return make(*args, **kwargs)

    return call
