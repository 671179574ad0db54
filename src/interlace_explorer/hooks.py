"""Hooks that connect explored programs to simulated memory.

They are in Triton's interpreter, in the primitives' waits, and in PyTorch's operators.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from torch.utils._python_dispatch import TorchDispatchMode

from interlace.comm.cpu import cpu_faults, shortcuts
from interlace.comm.groups import slices
from interlace.errors import ArgumentError
from interlace.language import lamport, packed, primitives
from interlace_explorer.memory import PART_BYTES, element_addresses, process_memory
from interlace_explorer.network import InlineSlices
from interlace_explorer.operations import Kind, Words
from interlace_explorer.ranks import RankRun, current
from interlace_explorer.waits import Judge, sum_values, sum_words, wait

_builder = interpreter.interpreter_builder


class _World:
    """The interface of simulated memory for ``interlace.comm`` and ``interlace.language``."""

    def send(self, addresses: Any, values: Any, kind: str) -> None:
        """Store values; ``kind`` is ``"put"``, or the order of a signal."""
        run = current()
        assert run is not None
        if len(addresses):
            run.send(addresses, values, kind)

    def fence(self) -> None:
        """Order earlier stores of this program before its later ones."""
        run = current()
        if run is not None:
            run.perform(Kind.FENCE)

    def move(self, target: int, source: int, nbytes: int) -> None:
        """Copy ``nbytes`` between addresses, of which either may be of symmetric memory.

        Raises:
            ArgumentError: a thread that is no rank's makes the copy.
        """
        run = current()
        if run is None:
            raise ArgumentError(
                "explore: copies must be made by the program's own thread; got triggered transfers "
                "that count tiles. Explore them with send= instead."
            )
        dtype = f"u{run.tree.cells.grain}"
        steps = np.arange(0, nbytes, run.tree.cells.grain, dtype=np.uint64)
        sources, targets = np.uint64(source) + steps, np.uint64(target) + steps
        values = (
            run.load(sources, dtype)
            if run.tree.view.holds(sources).all()
            else process_memory(source, nbytes).view(dtype)
        )
        if run.tree.view.holds(targets).all():
            run.send(targets, values, "release")
        else:
            process_memory(target, nbytes)[:] = values.view(np.uint8)

    def pause(self) -> None:
        """Refuse to pause: the hooks let every wait see what ends it at its first look."""
        raise RuntimeError("a wait of an explored kernel must find what its condition is about.")


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Let explored programs run in this process; nothing else should run meanwhile."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(shortcuts.taken())
        stack.enter_context(cpu_faults.living_in(_World()))
        launch = _launch(interpreter.GridExecutor.__call__)
        excepthook = functools.partial(_excepthook, sys.excepthook)
        replacements: list[tuple[Any, str, Any]] = [
            *(
                (_builder, name, functools.partial(hook, getattr(_builder, name)))
                for name, hook in _HOOKS.items()
            ),
            (interpreter.GridExecutor, "__call__", launch),
            (sys, "excepthook", excepthook),
            (slices, "SliceThread", InlineSlices),
        ]
        for owner, name, replacement in replacements:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        # The interpreter keeps a rewritten Python function for each Triton function that it has
        # called. Replacing it there reaches every kernel, however it imported the primitive.
        for function, wrapper in (
            (primitives.wait, wait),
            (packed.sum_words, sum_words),
            (lamport.sum_values, sum_values),
        ):
            original = function.rewrite()
            table = interpreter.InterpretedFunction.rewritten_fn
            stack.callback(table.__setitem__, function.fn, original)
            table[function.fn] = functools.partial(wrapper, original)
        yield


def _excepthook(original: Callable[..., None], *error: Any) -> None:
    """Report an exception, unless a run of an explored program is being abandoned.

    An abandoned run ends by an exception, which PyTorch's C code reports if it passes there.
    """
    if current() is None:
        original(*error)


@contextlib.contextmanager
def standing_still() -> Iterator[None]:
    """Restore this thread's program index after other threads have run kernels."""
    # The interpreter keeps the index of the running program in one global object.
    position = getattr(_builder, "grid_idx", None), getattr(_builder, "grid_dim", None)
    try:
        yield
    finally:
        _builder.grid_idx, _builder.grid_dim = position


@contextlib.contextmanager
def surroundings(run: RankRun) -> Iterator[None]:
    """Make a program's host operations on symmetric memory operations of its run."""
    with HostOperations(run):
        yield


# Kernels


def _launch(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of a launch, which tells the run when it has ended."""

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        run = current()
        if run is None:
            call(executor, *args, **kwargs)
            return
        run.kernel = executor.fn.__name__
        try:
            call(executor, *args, **kwargs)
        finally:
            run.program = -1
        run.perform(Kind.RETURN)

    return launch


def _set_grid_idx(original: Callable[..., None], x: int, y: int, z: int) -> None:
    """Tell the run that the next program of a launch begins."""
    original(x, y, z)
    run = current()
    if run is not None:
        dim = _builder.grid_dim
        run.program = (x * dim[1] + y) * dim[2] + z
        run.perform(Kind.PROGRAM, detail=run.program)


Hook = Callable[..., Any]


def _on_shared(pointers: int, mask: int | None) -> Callable[[Hook], Hook]:
    """Let a hook replace an operation of the interpreter only where it is on symmetric memory.

    The hook is called with the run, the elements within the mask that are of symmetric memory (bool
    array), the original operation and its arguments.

    Args:
        pointers, mask: Positions of these two among the operation's arguments; None without a mask.
    """

    def decorate(hook: Hook) -> Hook:
        def replacement(original: Hook, *args: Any, **options: Any) -> Any:
            run = current()
            # Other threads of this process may run kernels of their own, on ordinary memory.
            if run is not None:
                shared = run.tree.view.holds(args[pointers].data)
                if mask is not None:
                    shared = shared & np.broadcast_to(args[mask].data, shared.shape).astype(bool)
                if shared.any():
                    return hook(run, shared, original, *args, **options)
            return original(*args, **options)

        return replacement

    return decorate


@_on_shared(pointers=0, mask=1)
def _masked_load(
    run: RankRun, shared: Words, original: Hook, ptrs: Any, mask: Any, *args: Any, **options: Any
) -> Any:
    """Load elements of symmetric memory from the run, and the others from the process."""
    result = original(ptrs, _handle_of(mask.data & ~shared), *args, **options)
    data = np.array(np.broadcast_to(result.data, ptrs.data.shape))
    data[shared] = run.load(ptrs.data[shared], data.dtype)
    return interpreter.TensorHandle(data, result.dtype)


@_on_shared(pointers=0, mask=2)
def _masked_store(
    run: RankRun, shared: Words, original: Hook, ptrs: Any, value: Any, mask: Any, *args: Any
) -> Any:
    """Store elements of symmetric memory by the run, and the others in the process."""
    run.send(ptrs.data[shared], np.broadcast_to(value.data, ptrs.data.shape)[shared], "store")
    return original(ptrs, value, _handle_of(mask.data & ~shared), *args)


@_on_shared(pointers=1, mask=3)
def _atomic_rmw(
    run: RankRun,
    shared: Words,
    _: Hook,
    rmw: Any,
    ptr: Any,
    val: Any,
    mask: Any,
    sem: Any,
    scope: Any,
) -> Any:
    """Do atomic read-modify-writes on symmetric memory: as one operation of the run, or as several
    where elements of the tile meet at one address.
    """
    modify = _MODIFY.get(rmw.name)
    values = np.broadcast_to(val.data, ptr.data.shape)
    result = np.zeros(ptr.data.shape, val.data.dtype)
    for part in _without_repeats(ptr.data, shared):
        function = None if modify is None else functools.partial(modify, values[part])
        result[part] = _atomic(run, ptr, part, val, sem, function).data[part]
    return interpreter.TensorHandle(result, val.dtype.scalar)


def _without_repeats(addresses: Words, selected: Words) -> Iterator[Words]:
    """Share out the selected elements over masks in which no address comes twice."""
    while selected.any():
        _, first = np.unique(addresses[selected], return_index=True)
        part = np.zeros_like(selected)
        part.flat[np.flatnonzero(selected)[first]] = True
        selected = selected & ~part
        yield part


@_on_shared(pointers=0, mask=None)
def _atomic_cas(
    run: RankRun, shared: Words, _: Hook, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any
) -> Any:
    """Do a compare-and-swap on symmetric memory as one operation of the run."""
    function = functools.partial(_exchange_if_equal, cmp.data.ravel(), val.data.ravel())
    return _atomic(run, ptr, shared, val, sem, function)


def _atomic(
    run: RankRun,
    ptr: Any,
    shared: Words,
    val: Any,
    sem: Any,
    function: Callable[[Words], Words] | None,
) -> Any:
    """Do an atomic operation on symmetric memory, and return the values before it.

    Args:
        run: The run of this thread.
        ptr, val, sem: Arguments of the interpreter's operation.
        shared: The elements that are of symmetric memory (bool array).
        function: New values from old ones; None if the explorer does not know the operation.

    Raises:
        ArgumentError: ``function`` is None.
    """
    dtype = val.data.dtype
    # Within a wait, the atomic is a load with acquire order of the values that have ended the wait.
    if run.awaited is not None:
        values = run.load(ptr.data[shared], dtype)
    elif function is None:
        raise ArgumentError(
            "an atomic operation on symmetric memory must be add, exchange or compare-and-swap to "
            "be explored."
        )
    else:
        cells = run.tree.cells.cells_at(run.tree.view.offsets_of(ptr.data[shared]), dtype.itemsize)
        detail = (
            function,
            dtype,
            sem.name.startswith("ACQ"),
            sem.name in ("RELEASE", "ACQUIRE_RELEASE"),
        )
        is_own = (run.tree.view.offsets_of(ptr.data[shared]) // PART_BYTES == run.tree.rank).all()
        kind = Kind.ATOMIC if is_own else Kind.PEER_ATOMIC
        values = np.frombuffer(run.perform(kind, cells, detail=detail), dtype)
    result = np.zeros(ptr.data.shape, dtype)
    result[shared] = values
    return interpreter.TensorHandle(result, val.dtype.scalar)


def _handle_of(mask: Words) -> Any:
    """Wrap a mask for the interpreter."""
    return interpreter.TensorHandle(mask, tl.int1)


def _exchange_if_equal(expected: Words, new: Words, before: Words) -> Words:
    """Return ``new`` where ``before`` is as expected, and ``before`` elsewhere."""
    return np.where(before == expected, new, before).astype(before.dtype)


_MODIFY: dict[str, Callable[[Words, Words], Words]] = {
    "ADD": lambda value, before: (before + value).astype(before.dtype),
    "XCHG": lambda value, before: np.array(value, before.dtype),
}

_HOOKS: dict[str, Hook] = {
    "set_grid_idx": _set_grid_idx,
    "create_masked_load": _masked_load,
    "create_masked_store": _masked_store,
    "create_atomic_rmw": _atomic_rmw,
    "create_atomic_cas": _atomic_cas,
}


# PyTorch's operators on tensors over symmetric memory

# Operators that do not read their tensor arguments.
_WITHOUT_LOADS = {
    "new_empty",
    "empty_like",
    "new_empty_strided",
    "new_zeros",
    "zeros_like",
    "new_full",
    "full_like",
    "new_ones",
    "ones_like",
    "set_",
    "resize_",
}
# Operators that overwrite their argument without reading it.
_WITHOUT_OLD_VALUE = {"copy_", "zero_", "fill_"}


class HostOperations(TorchDispatchMode):
    """Mode in which an operator's tensors over symmetric memory are loaded before it runs, and the
    tensors that it writes are stored after it.

    Args:
        run: The run that does the loads and stores.
    """

    def __init__(self, run: RankRun) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "interlace":
            # The operator itself calls PyTorch's operators on symmetric memory. The mode is off
            # within this method, so it is entered again for them.
            with self:
                return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
        if func.is_view:
            return func(*args, **kwargs)
        name = func._schema.name.split("::")[-1]
        stored: list[torch.Tensor] = []
        for i, argument in enumerate(func._schema.arguments):
            value = kwargs.get(argument.name, args[i] if i < len(args) else None)
            written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if not isinstance(tensor, torch.Tensor) or not self._is_symmetric(tensor):
                    continue
                # A copy onto itself changes nothing, and would count as a store.
                if name == "copy_" and args[0].data_ptr() == args[1].data_ptr():
                    return args[0]
                if written:
                    stored.append(tensor)
                if name not in _WITHOUT_LOADS and not (
                    written and (argument.kwarg_only or name in _WITHOUT_OLD_VALUE)
                ):
                    self._load(tensor)
        result = func(*args, **kwargs)
        for tensor in stored:
            self._store(tensor)
        return result

    def _is_symmetric(self, tensor: torch.Tensor) -> bool:
        """Tell if a tensor has elements, and they are in symmetric memory."""
        if not tensor.numel():
            return False
        return bool(self._run.tree.view.holds(np.array([tensor.data_ptr()], np.uint64))[0])

    def _load(self, tensor: torch.Tensor) -> None:
        """Load a tensor's elements from simulated memory into the rank's view."""
        addresses = element_addresses(tensor)
        values = self._run.load(addresses, f"u{tensor.element_size()}")
        flat = torch.from_numpy(values.copy().view(np.uint8)).view(tensor.dtype)
        tensor.detach().copy_(flat.view(tensor.shape))

    def _store(self, tensor: torch.Tensor) -> None:
        """Store a tensor's elements from the rank's view in simulated memory."""
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        values = raw.view(f"u{tensor.element_size()}")
        self._run.send(element_addresses(tensor), values.copy(), "store")


__all__ = ["Judge", "installed", "standing_still", "surroundings"]
