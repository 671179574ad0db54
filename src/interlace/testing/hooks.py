"""Where explored programs meet simulated memory: Triton's interpreter, the primitives, and
PyTorch's operators.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from torch.utils._python_dispatch import TorchDispatchMode

from interlace.comm import cpu_faults, shortcuts
from interlace.errors import ArgumentError
from interlace import language
from interlace.language import packed, primitives
from interlace.testing import judges
from interlace.testing.memory import Addresses, element_addresses
from interlace.testing.operations import Kind, Operation, Words
from interlace.testing.ranks import Run, current
from interlace.units import next_power_of_2

_builder = interpreter.interpreter_builder


class _World:
    """Simulated memory, as ``interlace.comm`` and ``interlace.language`` see it."""

    def send(self, addresses: Any, values: Any, kind: str) -> None:
        run = current()
        assert run is not None
        if not run.tree.view.holds(addresses).all():
            raise ArgumentError("a put must go to symmetric memory; got other addresses.")
        if len(addresses):
            run.send(addresses, values, kind)

    def fence(self) -> None:
        run = current()
        if run is not None:
            run.perform(Kind.FENCE)

    def move(self, target: int, source: int, nbytes: int) -> None:
        run = current()
        if run is None:
            raise ArgumentError(
                "explore: copies must be made by the program's own thread; got triggered "
                "transfers that "
                "count tiles. Explore them with send= instead."
            )
        dtype = f"u{run.tree.cells.grain}"
        steps = np.arange(0, nbytes, run.tree.cells.grain, dtype=np.uint64)
        sources, targets = np.uint64(source) + steps, np.uint64(target) + steps
        values = (
            run.load(sources, dtype)
            if run.tree.view.holds(sources).all()
            else _real(source, nbytes).view(dtype)
        )
        if run.tree.view.holds(targets).all():
            run.send(targets, values, "release")
        else:
            _real(target, nbytes)[:] = values.view(np.uint8)

    def pause(self) -> None:
        raise RuntimeError("a wait of an explored kernel must find what its condition is about.")


def _real(address: int, nbytes: int) -> Words:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Explored programs may run in this process; nothing else should meanwhile."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(shortcuts.taken())
        stack.enter_context(cpu_faults.living_in(_World()))
        for name, hook in _HOOKS.items():
            stack.enter_context(
                _replaced(_builder, name, functools.partial(hook, getattr(_builder, name)))
            )
        call = interpreter.GridExecutor.__call__
        stack.enter_context(_replaced(interpreter.GridExecutor, "__call__", _launch(call)))
        stack.enter_context(
            _replaced(sys, "excepthook", functools.partial(_excepthook, sys.excepthook))
        )
        for function, replacement in (
            (primitives.wait, _wait),
            (packed.sum_words, _sum_words),
        ):
            original = function.rewrite()
            table = interpreter.InterpretedFunction.rewritten_fn
            stack.callback(table.__setitem__, function.fn, original)
            table[function.fn] = functools.partial(replacement, original)
        yield


def _excepthook(original: Callable[..., None], *error: Any) -> None:
    """Say nothing of a run that is given up: a tensor that goes meanwhile is told by C code, which
    reports the exception.
    """
    if current() is None:
        original(*error)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    missing = name not in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextlib.contextmanager
def standing_still() -> Iterator[None]:
    """Other threads run kernels meanwhile: which program this one runs is remembered."""
    place = getattr(_builder, "grid_idx", None), getattr(_builder, "grid_dim", None)
    try:
        yield
    finally:
        _builder.grid_idx, _builder.grid_dim = place


@contextlib.contextmanager
def surroundings(run: Run) -> Iterator[None]:
    """What an explored program lives in: its host operations on symmetric memory are operations,
    too.
    """
    with _HostOperations(run):
        yield


# Kernels


def _launch(call: Callable[..., Any]) -> Callable[..., Any]:
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
    original(x, y, z)
    run = current()
    if run is not None:
        dim = _builder.grid_dim
        run.program = (x * dim[1] + y) * dim[2] + z
        run.perform(Kind.PROGRAM, detail=run.program)


def _masked_load(
    original: Callable[..., Any], ptrs: Any, mask: Any, other: Any, *rest: Any, **options: Any
) -> Any:
    run, shared = _shared(ptrs, mask)
    if run is None or not shared.any():
        return original(ptrs, mask, other, *rest, **options)
    result = original(ptrs, _handle_of(mask.data & ~shared), other, *rest, **options)
    data = np.array(np.broadcast_to(result.data, ptrs.data.shape))
    data[shared] = run.load(ptrs.data[shared], data.dtype)
    return interpreter.TensorHandle(data, result.dtype)


def _masked_store(
    original: Callable[..., Any], ptrs: Any, value: Any, mask: Any, *rest: Any, **options: Any
) -> Any:
    run, shared = _shared(ptrs, mask)
    if run is None or not shared.any():
        return original(ptrs, value, mask, *rest, **options)
    run.send(ptrs.data[shared], np.broadcast_to(value.data, ptrs.data.shape)[shared], "store")
    return original(ptrs, value, _handle_of(mask.data & ~shared), *rest, **options)


def _atomic_rmw(
    original: Callable[..., Any], rmw: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any
) -> Any:
    run, shared = _shared(ptr, mask)
    if run is None or not shared.any():
        return original(rmw, ptr, val, mask, sem, scope)
    function = _MODIFY.get(rmw.name)
    values = np.broadcast_to(val.data, ptr.data.shape)[shared]
    return _atomic(
        run,
        ptr,
        shared,
        val,
        sem,
        None if function is None else functools.partial(function, values),
    )


def _atomic_cas(
    original: Callable[..., Any], ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any
) -> Any:
    run, shared = _shared(ptr, None)
    if run is None or not shared.any():
        return original(ptr, cmp, val, sem, scope)
    return _atomic(
        run,
        ptr,
        shared,
        val,
        sem,
        functools.partial(_exchange_if_equal, cmp.data.ravel(), val.data.ravel()),
    )


def _atomic(
    run: Run, ptr: Any, shared: Words, val: Any, sem: Any, function: Callable[[Words], Words] | None
) -> Any:
    """The values before an atomic operation on symmetric memory."""
    dtype = val.data.dtype
    if run.awaited is not None:  # what a wait has seen
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
        values = np.frombuffer(run.perform(Kind.ATOMIC, cells, detail=detail), dtype)
    result = np.zeros(ptr.data.shape, dtype)
    result[shared] = values
    return interpreter.TensorHandle(result, val.dtype.scalar)


def _shared(ptrs: Any, mask: Any) -> tuple[Run | None, Words]:
    """The run of this thread, and which elements of a tile of pointers, within a mask, are of
    symmetric memory.
    """
    run = current()
    if run is None:
        return None, np.zeros(0, bool)
    inside = run.tree.view.holds(ptrs.data)
    return run, inside if mask is None else inside & np.broadcast_to(
        mask.data, ptrs.data.shape
    ).astype(bool)


def _handle_of(mask: Words) -> Any:
    return interpreter.TensorHandle(mask, tl.int1)


def _exchange_if_equal(wanted: Words, new: Words, old: Words) -> Words:
    return np.where(old == wanted, new, old).astype(old.dtype)


_MODIFY: dict[str, Callable[[Words, Words], Words]] = {
    "ADD": lambda value, old: (old + value).astype(old.dtype),
    "XCHG": lambda value, old: np.array(value, old.dtype),
}

_HOOKS: dict[str, Callable[..., Any]] = {
    "set_grid_idx": _set_grid_idx,
    "create_masked_load": _masked_load,
    "create_masked_store": _masked_store,
    "create_atomic_rmw": _atomic_rmw,
    "create_atomic_cas": _atomic_cas,
}


# Waits: one operation, which takes place when its condition holds. The primitive itself then looks
# once, and finds it.


def _wait(
    original: Callable[..., Any], ptr: Any, epoch: Any, peer: Any, slice: Any, group: Any, mask: Any
) -> Any:
    run = current()
    assert run is not None
    here = language.peer_pointer(ptr, language.rank(group), group).handle.data
    chosen = np.broadcast_to(_plain(mask), here.shape).astype(bool)
    wanted = np.broadcast_to(np.asarray(_plain(epoch)).astype(np.int32), here.shape)[chosen]
    _await(run, Kind.WAIT, here[chosen], wanted, None)
    with _having_seen(run, here[chosen], wanted):
        return original(ptr, epoch, peer, slice, group, mask)


def _sum_words(
    original: Callable[..., Any], ptr: Any, own: Any, stride: Any, first: Any, epoch: Any,
    slice: Any, group: Any, mask: Any, SOURCES: Any, VALUES: Any,
) -> Any:  # fmt: skip
    run = current()
    assert run is not None
    me = language.rank(group)
    here = language.peer_pointer(ptr, me, group).handle.data
    chosen = np.broadcast_to(_plain(mask), here.shape).astype(bool)
    rank, step = int(np.asarray(_plain(me)).item()), int(np.asarray(_plain(stride)).item()) * 8
    sources = [source for source in range(int(_plain(SOURCES))) if own is None or source != rank]
    addresses = np.concatenate(
        [here[chosen] + np.uint64(source * step) for source in sources] or [here[:0].ravel()]
    )
    wanted = np.full(len(addresses), np.asarray(_plain(epoch)).item(), np.int32)
    response = _await(run, Kind.WORDS, addresses, wanted, int(_plain(VALUES)))
    with _having_seen(run, addresses, np.frombuffer(response or b"", np.int64)):
        return original(ptr, own, stride, first, epoch, slice, group, mask, SOURCES, VALUES)


def _await(run: Run, kind: Kind, addresses: Addresses, wanted: Words, detail: Any) -> Any:
    if not len(addresses):
        return None
    if not run.tree.view.holds(addresses).all():
        raise ArgumentError("a kernel must wait for symmetric memory; got other addresses.")
    offsets = run.tree.view.offsets_of(addresses)
    return run.perform(
        kind, run.tree.cells.cells_at(offsets, 4 if kind == Kind.WAIT else 8), wanted, detail
    )


@contextlib.contextmanager
def _having_seen(run: Run, addresses: Addresses, values: Words) -> Iterator[None]:
    order = np.argsort(addresses)
    run.awaited = (addresses[order], values[order]) if len(addresses) else None
    try:
        yield
    finally:
        run.awaited = None


def _plain(x: Any) -> Any:
    if isinstance(x, tl.tensor):
        return x.handle.data
    return getattr(x, "value", x)


class Judge:
    """Whether a wait is over, by what it would see."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int], bool] = {}

    def __call__(self, node: Operation, seen: Words) -> bool:
        assert node.values is not None
        values = 0 if node.kind == Kind.WAIT else int(node.detail)
        words = seen.view(np.int32 if node.kind == Kind.WAIT else np.int64)
        # Only the low bits of a packed word say which epoch it is of; the others hold its value.
        keys = [
            (values, int(word) & 0xFFFFFFFF, int(epoch))
            for word, epoch in zip(words, node.values, strict=True)
        ]
        asked = {key: word for key, word in zip(keys, words, strict=True) if key not in self._known}
        if asked:
            self._ask(values, list(asked), np.array(list(asked.values())))
        return all(self._known[key] for key in keys)

    def _ask(self, values: int, keys: list[tuple[int, int, int]], words: Words) -> None:
        count = next_power_of_2(len(keys))
        seen = torch.from_numpy(np.concatenate([words, words[:1].repeat(count - len(keys))]))
        wanted = torch.tensor(
            [epoch for _, _, epoch in keys] + [0] * (count - len(keys)), dtype=torch.int32
        )
        out = torch.zeros(count, dtype=torch.int32)
        if values:
            judges.judge_words[(1,)](seen, wanted, out, N=count, VALUES=values)
        else:
            judges.judge_signals[(1,)](seen, wanted, out, N=count)
        self._known.update(zip(keys, [bool(each) for each in out.tolist()], strict=False))


# Host operations

_WITHOUT_LOADS = {"new_empty", "empty_like", "new_empty_strided", "new_zeros", "zeros_like", "new_full", "full_like", "new_ones",
                  "ones_like", "set_", "resize_"}  # fmt: skip
_WITHOUT_OLD_VALUE = {"copy_", "zero_", "fill_"}


class _HostOperations(TorchDispatchMode):
    """PyTorch's operators on tensors over symmetric memory: loads before them, stores behind
    them.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "interlace":
            with self:  # the operator's own calls of PyTorch are host operations, too
                return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
        if func.is_view:
            return func(*args, **kwargs)
        name = func._schema.name.split("::")[-1]
        stored: list[torch.Tensor] = []
        for i, argument in enumerate(func._schema.arguments):
            value = kwargs.get(argument.name, args[i] if i < len(args) else None)
            written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if (
                    not isinstance(tensor, torch.Tensor)
                    or not tensor.numel()
                    or self._elsewhere(tensor)
                ):
                    continue
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

    def _elsewhere(self, tensor: torch.Tensor) -> bool:
        return not self._run.tree.view.holds(np.array([tensor.data_ptr()], np.uint64))[0]

    def _load(self, tensor: torch.Tensor) -> None:
        addresses = element_addresses(tensor)
        values = self._run.load(addresses, f"u{tensor.element_size()}")
        flat = torch.from_numpy(values.copy().view(np.uint8)).view(tensor.dtype)
        tensor.detach().copy_(flat.view(tensor.shape))

    def _store(self, tensor: torch.Tensor) -> None:
        values = (
            tensor.detach()
            .contiguous()
            .view(-1)
            .view(torch.uint8)
            .numpy()
            .view(f"u{tensor.element_size()}")
        )
        self._run.send(element_addresses(tensor), values.copy(), "store")
