"""Make tensors that outlive a call, whatever the call is part of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import _C
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from interlace.comm.runtime import inductor_graphs

P = ParamSpec("P")
T = TypeVar("T")


def makes_ordinary_tensors(make: Callable[P, T]) -> Callable[P, T]:
    """Decorate ``make`` so that its tensors are neither inference tensors nor a graph's memory, and
    are real, on the device that it says.

    PyTorch refuses to write to an inference tensor outside of inference mode, and to save it for a
    backward pass. A program may evaluate first, in ``torch.inference_mode()``, and train
    afterwards. A program may also make its first call while a mode replaces tensors by fake ones,
    under a default device, or inside of a transform of ``torch.func``, whose tensors have no
    memory of their own. And while Inductor warms up one of its CUDA graphs, memory comes from
    the graph's pool, which may hold nothing that lasts
    (``interlace.comm.runtime.inductor_graphs``). So every tensor that outlives a call must be made
    by a function with this decorator.
    """

    @functools.wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        # Nothing lasting is made in a capture; what is missing then is refused with a reason.
        if inductor_graphs.is_running() and not torch.cuda.is_current_stream_capturing():
            return inductor_graphs.call_apart(make, *args, **kwargs)
        if _C._are_functorch_transforms_active():
            with temporarily_clear_interpreter_stack():
                return call(*args, **kwargs)
        modes = _C._len_torch_function_stack() + _C._len_torch_dispatch_stack()
        if not (modes or torch.is_inference_mode_enabled()):
            return make(*args, **kwargs)
        # A default device is a mode of torch's functions; fake tensors are one of its dispatcher.
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            _C.DisableTorchFunction(),
            _disable_current_modes(),
        ):
            return make(*args, **kwargs)

    return call
