"""Make tensors that outlive a call, whatever the call is part of, and recognise runs of which
Inductor makes CUDA graphs.

``torch.compile(mode="reduce-overhead")`` runs a function three ways: the first call warms it up,
the second is captured in a CUDA graph, later calls replay the graph. While it warms up, every
allocation of the calling thread comes from the graphs' pool; afterwards Inductor raises an error if
anything but the function's results is alive in the pool, or if a result lies outside of it. So in
such a run

- what a group keeps from call to call is made by another thread (:func:`call_apart`),
- results are ordinary tensors and never symmetric memory (``interlace.comm.groups.outputs``),
- a group makes no graph of its own (``interlace.comm.replay.replays``).

Source: ``torch/_inductor/cudagraph_trees.py`` (``CUDAWarmupNode.run``, ``CUDAGraphNode._record``,
``check_memory_pool``) of PyTorch 2.11 and 2.13.
"""

from __future__ import annotations

import contextvars
import functools
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import _C
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

P = ParamSpec("P")
T = TypeVar("T")

_MODULE = "torch._inductor.cudagraph_trees"
_MANAGERS = "tree_manager_containers"  # one manager of graphs per GPU, in the thread's storage


def makes_ordinary_tensors(make: Callable[P, T]) -> Callable[P, T]:
    """Decorate ``make`` so that its tensors are neither inference tensors nor a graph's memory, and
    are real, on the device that it says.

    PyTorch refuses to write to an inference tensor outside of inference mode, and to save it for a
    backward pass. A program may evaluate first, in ``torch.inference_mode()``, and train
    afterwards. A program may also make its first call while a mode replaces tensors by fake ones,
    under a default device, or inside of a transform of ``torch.func``, whose tensors have no
    memory of their own. And while Inductor warms up one of its CUDA graphs, memory comes from
    the graph's pool, which may hold nothing that lasts. So every tensor that outlives a call must
    be made by a function with this decorator.
    """

    @functools.wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        # Nothing lasting is made in a capture; what is missing then is refused with a reason.
        if in_inductors_run() and not torch.cuda.is_current_stream_capturing():
            return call_apart(make, *args, **kwargs)
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


def in_inductors_run() -> bool:
    """Return whether this thread warms up or captures one of Inductor's CUDA graphs now.

    Inductor does both on a stream that it uses for nothing else. PyTorch has only 32 streams per
    GPU and priority, so a program with more may get the same stream; its calls there are then taken
    for Inductor's, which costs a copy and is right as well.
    """
    # A program that uses no such graphs has not imported the module, and pays for one look-up.
    trees = sys.modules.get(_MODULE)
    if trees is None:
        return False
    for index, container in _containers(trees).items():
        manager = container.tree_manager
        if (
            manager is not None
            and torch._C._cuda_getCurrentRawStream(index) == manager.stream.cuda_stream
        ):
            return True
    return False


def _containers(trees: Any) -> Mapping[int, Any]:
    """Return the containers of this thread's managers by the index of the GPU."""
    # Threads of autograd inherit PyTorch's thread-local storage, and other threads have none.
    containers = getattr(trees.local, _MANAGERS, None)
    if containers is None and torch._C._is_key_in_tls(_MANAGERS):
        containers = torch._C._get_obj_in_tls(_MANAGERS)
    return containers or {}


def call_apart(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return ``function(*args, **kwargs)``, called in a thread whose memory is not of the pool.

    The thread works on the GPU that is current here, after everything on the current stream. It has
    ended, and the GPU has run what it enqueued, when this returns. Gradients are not recorded.

    Raises:
        BaseException: What the function raises.
    """
    device, stream = torch.cuda.current_device(), torch.cuda.current_stream()
    results: list[T] = []
    failures: list[BaseException] = []

    def call() -> None:
        try:
            with torch.cuda.device(device), torch.no_grad():
                # The default stream, as a new thread has set no other one.
                own_stream = torch.cuda.current_stream()
                own_stream.wait_stream(stream)
                results.append(function(*args, **kwargs))
                own_stream.synchronize()
        except BaseException as error:
            failures.append(error)

    # Ranks that are threads find their group in a context variable.
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(call,), name="interlace outside of graphs")
    thread.start()
    try:
        thread.join()
    except BaseException:
        # Peers take part in what the thread does, so an interruption waits for its end.
        thread.join()
        raise
    if failures:
        raise failures[0]
    return results[0]
