"""Record what a call does, and play it when such a call comes again, past Python.

A program's own code, run between two calls of an operator, leaves nothing of the operator's Python
in the processor's caches: what takes 15 us in a loop takes 30 to 100 us there, where a stock pair,
which is C++, takes as long as in a loop. What such a call does is always the same where its
arguments are, but for the addresses of tensors: it allocates results, multiplies, launches. So two
calls are recorded as such *steps*, and if both recordings are alike, later calls are made from them
by ``player.c``: it looks at the arguments, asks whether calls may be played now, and makes the
steps, without a line of Python of its own.

A call has a tape only if it says that its steps are all that it does (``Group.has_recorded``), if
all that steps get is an argument, another step's result or the same in every call, and if nothing
is launched that is no step. The player is compiled as Triton compiles its own launchers, in less
than a second; where it cannot be, calls take the long way.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from interlace.comm.runtime import kernel_folder
from interlace.comm.runtime.conditions import Condition
from interlace.comm.runtime.streams import launches

T = TypeVar("T")
Expression = tuple[Any, ...]
"""What a step gets: ``("constant", value)``, ``("slot", number)`` or ``("tuple", type, items)``.
Slots hold the call's arguments, and behind them what steps return.
"""
Step = tuple[Any, Expression, tuple[str, ...] | None, tuple[int, ...], str]
"""See :class:`RecordedCall`. The kind is ``"launch"``; ``"attempt"``, which returns None where it
has done nothing, so that the call takes the long way; or ``"call"``.
"""

log = logging.getLogger("interlace.replay")

_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)
_PLAIN_TYPES = frozenset(_PLAIN)
_MOST_WAITING = 64  # calls that have been recorded once; others of a program come in between


class _Unrecordable(Exception):
    """What a call does is not known from its arguments."""


@dataclasses.dataclass(frozen=True)
class RecordedCall:
    """What a call does.

    Attributes:
        steps: Function, arguments, the names of the last of those, the slots of the result, which
            may be several tensors, and the kind.
        result: The call's.
        slots: Their number.
        conditions: What must be so for such a call to be played.
        failed: Is told the error of a call that ends behind a launch.
        holder: Returns what the tape belongs to; None when that is gone.
        kept: What must live as long as the tape.
    """

    steps: tuple[Step, ...]
    result: Expression
    slots: int
    conditions: tuple[Condition, ...]
    failed: Callable[[BaseException], None]
    holder: Callable[[], Any]
    kept: tuple[Any, ...]

    def is_like(self, other: RecordedCall) -> bool:
        """Return whether both calls have done the same, for a holder that is still there."""
        holder = self.holder()
        if holder is None or holder is not other.holder():
            return False
        return _are_alike(
            (self.steps, self.result, self.slots), (other.steps, other.result, other.slots)
        )


def _are_alike(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, torch.Tensor):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_are_alike, one, other))
    return bool(one == other)


class CallRecorder:
    """Note what one call does."""

    def __init__(self, args: tuple[Any, ...], *, knows_gradients: bool = False) -> None:
        """Begin with the arguments of a call.

        Args:
            knows_gradients: Whether it is part of what the call is known by whether gradients are
                recorded, and none of this call is.
        """
        self.knows_gradients = knows_gradients
        self._steps: list[Step] = []
        self._slots: dict[int, int] = {}
        self._lasting: set[int] = set()
        self._kept: list[Any] = []
        self._alive: list[Any] = [args]  # an id is its object's as long as that lives
        self._addresses: set[int] = set()
        self._count = len(args)
        self._fault = ""
        self._ways: tuple[Any, ...] | None = None
        for slot, value in enumerate(args):
            if isinstance(value, torch.Tensor):
                self._hold(value, slot)

    def keep(self, *values: Any) -> None:
        """Take values as they are in every call, and let them live as long as the tape does."""
        self._kept += values
        self._lasting.update(map(id, values))

    def spoil(self, reason: str) -> None:
        """Be no recording, for a reason in words."""
        self._fault = self._fault or reason

    def complete(
        self,
        holder: Any,
        conditions: tuple[Condition, ...],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Say that all that the call does has been noted; see :class:`RecordedCall`.

        Args:
            holder: What the tape belongs to, which neither steps nor conditions nor ``failed`` keep
                alive.
        """
        self._ways = conditions, failed, weakref.ref(holder)

    @property
    def is_complete(self) -> bool:
        """Whether it is known what the call does."""
        return self._ways is not None and not self._fault

    def note(
        self,
        function: Any,
        args: tuple[Any, ...],
        names: dict[str, Any],
        result: object,
        *,
        kind: str = "call",
    ) -> None:
        """Note a step that has been made; see :data:`Step` for its kind."""
        try:
            arguments = self._expression((*args, *names.values()))
        except _Unrecordable as error:
            self.spoil(str(error))
            return
        if kind == "attempt" and self._steps:
            self.spoil("something has been done before an attempt")
        results = result if isinstance(result, tuple) else (result,)
        if not all(
            isinstance(each, torch.Tensor) and id(each) not in self._slots for each in results
        ):
            results = ()
        slots = tuple(range(self._count, self._count + len(results)))
        self._count += len(results)
        for each, slot in zip(results, slots, strict=True):
            self._hold(each, slot)
        self._steps.append((function, arguments, tuple(names) or None, slots, kind))

    def finished(self, result: object) -> RecordedCall | None:
        """Return what the call has done, given its result; None where that is not known."""
        if self._ways is None:
            return None
        try:
            found = self._expression(result)
        except _Unrecordable as error:
            self.spoil(str(error))
        if not self.is_complete:
            log.debug("a call has no tape: %s", self._fault)
            return None
        conditions, failed, holder = self._ways
        steps, kept = tuple(self._steps), tuple(self._kept)
        return RecordedCall(steps, found, self._count, conditions, failed, holder, kept)

    def _hold(self, tensor: torch.Tensor, slot: int) -> None:
        if id(tensor) in self._slots:
            self.spoil("one tensor is two arguments")
        self._slots[id(tensor)] = slot
        self._alive.append(tensor)
        if tensor.numel():
            self._addresses.add(tensor.data_ptr())

    def _expression(self, value: Any) -> Expression:
        if id(value) in self._lasting:
            return "constant", value
        # Most are arguments of a launch. With new rows a recording takes as long as a choice.
        if type(value) is tuple:
            plain, addresses, lasting = _PLAIN_TYPES, self._addresses, self._lasting
            expressions = [
                ("constant", each)
                if type(each) in plain and (each not in addresses or id(each) in lasting)
                else self._expression(each)
                for each in value
            ]
            return "tuple", tuple, tuple(expressions)
        if isinstance(value, torch.Tensor):
            slot = self._slots.get(id(value))
            if slot is None:
                raise _Unrecordable("a tensor is neither an argument nor a step's")
            return "slot", slot
        if isinstance(value, tuple):
            return "tuple", type(value), tuple(map(self._expression, value))
        if not isinstance(value, _PLAIN):
            raise _Unrecordable(f"an argument is a {type(value).__name__}")
        if type(value) is int and value in self._addresses:
            raise _Unrecordable("a number is a tensor's address")
        return "constant", value


class _Calling(threading.local):
    recorder: CallRecorder | None = None


_thread = _Calling()


def recorder() -> CallRecorder | None:
    """Return what records the call that this thread makes; None if nothing does."""
    return _thread.recorder


def step(function: Callable[..., T], *args: Any, **names: Any) -> T:
    """Return ``function(*args, **names)``, and note it as one step, whatever it does.

    Args:
        function: It must do the same in every call with such arguments, and refer to no operand.
        args, names: Tensors are the call's arguments, results of earlier steps, or what the
            recording was told to keep; anything else is the same in every such call.
    """
    made = _thread.recorder
    if made is None:
        return function(*args, **names)
    result = _unrecorded(made, function, *args, **names)
    made.note(function, args, names, result)
    return result


def attempt(function: Callable[..., T | None], *args: Any) -> T | None:
    """Return ``function(*args)``, and note it as the first step of a call that may do without.

    Args:
        function: As for :func:`step`. It returns None where it has done nothing, and is no step
            then.
    """
    made = _thread.recorder
    if made is None:
        return function(*args)
    result = _unrecorded(made, function, *args)
    if result is not None:
        made.note(function, args, {}, result, kind="attempt")
    return result


def _unrecorded(made: CallRecorder, function: Callable[..., T], *args: Any, **names: Any) -> T:
    _thread.recorder = None
    try:
        return function(*args, **names)
    finally:
        _thread.recorder = made


def keep(*values: Any) -> None:
    """Let the recording of the call that this thread makes, if it makes one, take values as they
    are in every call; see :meth:`CallRecorder.keep`.
    """
    made = _thread.recorder
    if made is not None:
        made.keep(*values)


def spoil(reason: str) -> None:
    """Let the recording of the call that this thread makes, if it makes one, be none: something is
    done that is no step.
    """
    made = _thread.recorder
    if made is not None:
        made.spoil(reason)


def depend_on(conditions: Callable[[], Iterable[Condition]]) -> None:
    """Play calls only while conditions hold.

    Args:
        conditions: Returns them, as they are while a call is recorded.
    """
    _asked.append(conditions)


_asked: list[Callable[[], Iterable[Condition]]] = []


def player(call: Callable[..., Any], *, is_public: bool = False) -> Callable[..., Any]:
    """Return what makes calls as ``call`` does, by its tape where there is one; ``call`` itself
    where the player cannot be compiled.

    Args:
        call: Takes arguments by position alone.
        is_public: Whether arguments are what users have given: then tensors of subclasses, those
            without strides and those that PyTorch still has to negate take the long way, and so do
            calls that autograd records; what is recorded while it records others is not played
            while it does not. Else they are ordinary, or parameters of subclasses.
    """
    native = _native()
    if native is None:
        return call
    first: dict[bytes, RecordedCall] = {}

    def record(key: bytes, *args: Any) -> Any:
        spoil("a call is made within another")
        made, before = CallRecorder(args, knows_gradients=is_public), first.pop(key, None)
        settings: tuple[Condition, ...] = ()
        try:
            _thread.recorder = made
            if before is not None:
                settings = tuple(condition for conditions in _asked for condition in conditions())
            result = call(*args)
        finally:
            _thread.recorder = None
        recorded = made.finished(result)
        if recorded is not None and before is not None and recorded.is_like(before):
            try:
                playing.keep(key, _tape(native, recorded, settings))
            except ValueError as error:
                log.debug("a call has no tape: %s", error)
        elif recorded is not None:
            if len(first) >= _MOST_WAITING:
                first.pop(next(iter(first)), None)  # another thread may have done so
            first[key] = recorded
        return result

    playing = native.Player(call, record, is_public)
    return playing  # type: ignore[no-any-return]


def _tape(native: Any, recorded: RecordedCall, settings: tuple[Condition, ...]) -> Any:
    """Return the tape of a call, which its holder can close.

    Raises:
        ValueError: The player has no room for so many tensors, or arguments of a step.
    """
    conditions = (*recorded.conditions, *settings)
    tape = native.Tape(
        recorded.steps, recorded.result, recorded.slots, conditions, launches, recorded.failed,
        recorded.kept,
    )  # fmt: skip
    holder = recorded.holder()
    if holder not in _held:
        # What the steps refer to goes with the holder.
        weakref.finalize(holder, _close, _held.setdefault(holder, weakref.WeakSet()))
    _held[holder].add(tape)
    return tape


_held: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
"""Tapes by what they belong to; players keep them."""


def forget(holder: Any) -> None:
    """Play none of the tapes of a holder any more."""
    held = _held.get(holder)
    if held is not None:
        _close(held)


def _close(tapes: weakref.WeakSet[Any]) -> None:
    # Not by an iteration, as another thread may keep one more meanwhile.
    with contextlib.suppress(KeyError):
        while True:
            tapes.pop().close()


@functools.cache
def _native() -> Any:
    """Return the compiled player; None where there is no compiler, or PyTorch is another."""
    try:
        from triton.runtime.build import compile_module_from_src

        source = Path(__file__).with_name("player.c").read_text()
        with kernel_folder.ours():
            module = compile_module_from_src(source, "interlace_player")
        types = torch.Tensor, torch.nn.Parameter, torch.dtype, dist.ProcessGroup, torch.strided
        functions = torch._C.DisableTorchFunctionSubclass, torch.is_grad_enabled
        module.init(*types, *functions, *_tensor_functions())
    except Exception as error:
        log.info("calls are made without the compiled player: %s", error)
        return None
    return module


_FUNCTIONS = (
    "get_dim", "get_sizes", "get_strides", "get_data_ptr", "get_dtype", "get_device_type",
    "get_device_index",
)  # fmt: skip


def _tensor_functions() -> tuple[int, ...]:
    """Return where a Python tensor's object holds its ``at::Tensor``, which is one pointer, and the
    addresses of the functions that read one.

    Raises:
        OSError, AttributeError, RuntimeError: PyTorch has no such thing.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    addresses = [
        ctypes.cast(getattr(library, f"aoti_torch_{name}"), ctypes.c_void_p).value or 0
        for name in _FUNCTIONS
    ]
    tensors = torch.empty(3), torch.empty(2, 4)[:, 1:], torch.nn.Parameter(torch.empty(1))
    width, head = ctypes.sizeof(ctypes.c_void_p), object.__basicsize__
    for offset in range(head, torch.Tensor.__basicsize__, width):
        read = [ctypes.c_void_p.from_address(id(tensor) + offset).value for tensor in tensors]
        if read == [tensor._cdata for tensor in tensors]:
            return offset, *addresses
    raise RuntimeError("a Python tensor does not hold its at::Tensor")
