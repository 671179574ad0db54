"""Launch Triton kernels, and describe tensors and the memory of all ranks to them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from interlace.comm.groups.group import Group
from interlace.comm.launching.within_node import WithinNode
from interlace.comm.replay import recording as recordings
from interlace.comm.replay import tapes
from interlace.comm.runtime import kernel_folder
from interlace.comm.runtime.conditions import Condition, has, returns
from interlace.comm.runtime.dlpack import tensor_at
from interlace.comm.runtime.interpreter import interpreting
from interlace.comm.runtime.streams import launches
from interlace.units import ceil_div

MOST_MOVERS = 1024  # programs of a kernel that moves rows; each has signals of its own
CPU_PROGRAMS = 4
"""Programs of a kernel on the CPU, at most. The interpreter runs them one after another, so more
only take longer; these are enough for programs to take turns and to have several tiles each.
"""
_TILE = {"ROWS": 4, "COLS": 1024}
_SOLO_STRIDE = 1 << 20  # stride between ranks in a group of one, which has no second rank
_MAX_COMPILED = 4096  # calls whose compiled kernel is remembered
_MOST_COMPILING = 8  # kernels at a time: the part in Python is by turns
_KNOWN_TO_TRITON = 16
COMPILED_WITH = {"enable_fp_fusion": True}
"""Options of every kernel: products are added without a rounding between, as by default up to
Triton 3.9, which warns that others will have another default.
"""
_MIN_INT64 = 1 << 31  # Triton passes integers from here on, addresses among them, as 64 bits


@dataclasses.dataclass(frozen=True)
class Launch:
    """Describe a kernel launch with all its arguments.

    An operator runs it, and the operator's tuner compiles it ahead.

    Attributes:
        kernel: The ``@triton.jit`` function.
        grid: The number of programs.
        arguments: The value of every parameter that is not a constant, by the parameter's name.
        constants: The values of the ``tl.constexpr`` parameters, and Triton's own options such as
            ``num_warps``. A tuple among them holds only what JSON can, and so no ``tl.dtype``:
            Triton writes constants as JSON where a hook for what is compiled is set.
        keep: Tensors whose addresses are among the arguments; they live as long as the launch.
        compiled: What Triton has compiled for these very arguments, and the values of constants
            that are passed to it; None before the launch, and on the CPU.
    """

    kernel: Any
    grid: tuple[int]
    arguments: Mapping[str, Any]
    constants: dict[str, Any]
    keep: tuple[Any, ...] = ()
    compiled: tuple[Any, tuple[Any, ...]] | None = dataclasses.field(default=None, init=False)

    def __call__(self) -> None:
        """Enqueue the kernel on the current stream; on the CPU backend, run it.

        If the kernel reaches peers, this must happen within ``Group.running``.

        Raises:
            TypeError: The names of the arguments are not the names of the kernel's parameters.
        """
        recording = recordings.active()
        arguments = (
            self.arguments
            if recording is None
            else recording.arguments(self.kernel, self.grid[0], self.arguments)
        )
        values = _in_order(self.kernel, arguments, self.constants)
        # Triton looks at every argument to find the kernel that it has compiled, which takes the
        # host longer than the launch itself. So compiled kernels are remembered here.
        key = _key(self, values)
        found = _compiled.get(key)
        # Counted before the launch: if that is interrupted, the kernel may be running.
        launches.value += 1
        if found is None:
            found = self._compile_and_launch(key, values)
        else:
            compiled, constants = found
            stream = torch._C._cuda_getCurrentRawStream(key[1])
            _enqueue(compiled, self.grid[0], stream, values, constants)
        if recording is None:
            object.__setattr__(self, "compiled", found)

    def _compile_and_launch(
        self, key: tuple[Any, ...], values: tuple[Any, ...]
    ) -> tuple[Any, tuple[Any, ...]] | None:
        """Launch the kernel by Triton, and return what it has compiled; None in the interpreter.

        Args:
            key: By what that is remembered.
            values: The arguments, in order.
        """
        tapes.spoil("a kernel is launched for the first time")
        try:
            with _shortcuts(), kernel_folder.ours():
                compiled = self.kernel[self.grid](*values, **self.constants, **COMPILED_WITH)
        except Exception:
            # A kernel that did not compile does not run, so it is not counted. A kernel that fails
            # in the interpreter has run in part.
            if not interpreting():
                launches.value -= 1
            raise
        # The interpreter returns None instead of a compiled kernel.
        if compiled is None:
            return None
        if len(_compiled) >= _MAX_COMPILED:
            _compiled.clear()
        names = self.kernel.arg_names[len(values) :]
        found = _compiled[key] = compiled, tuple(self.constants[name] for name in names)
        return found

    def again(self) -> Callable[[int, Mapping[str, Any]], None] | None:
        """Return what launches this compiled kernel with another number of programs and other
        arguments; None for a launch that has not run on a GPU.

        Nothing about the arguments is looked at: Triton must compile them alike, which takes equal
        dtypes, alignments, and divisibility of integers by 16. The GPU that is torch's current one
        now must be so then.
        """
        if self.compiled is None:
            return None
        kernel, (compiled, constants), names = self.kernel, self.compiled, self.constants
        device = torch.cuda.current_device()

        def launch(programs: int, arguments: Mapping[str, Any]) -> None:
            values = _in_order(kernel, arguments, names)
            stream = torch._C._cuda_getCurrentRawStream(device)
            launches.value += 1
            _enqueue(compiled, programs, stream, values, constants)

        return launch

    def compile(self) -> Any:
        """Return Triton's compiled kernel, without running it."""
        values = _in_order(self.kernel, self.arguments, self.constants)
        with kernel_folder.ours():
            return self.kernel.warmup(*values, grid=self.grid, **self.constants, **COMPILED_WITH)


def _enqueue(
    compiled: Any,
    programs: int,
    stream: int,
    values: tuple[Any, ...],
    constants: tuple[Any, ...],
) -> None:
    """Enqueue a compiled kernel that has run before.

    Triton prepares what hooks are to be told, and calls them, in each launch; most of the time
    there are none. It also asks for the device and its stream by slower ways.
    """
    if _is_hooked():
        tapes.spoil("Triton has hooks")
        compiled[(programs, 1, 1)](*values, stream=stream)
        return
    whole = (
        programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
        *values, *constants,
    )  # fmt: skip
    recorder = tapes.recorder()
    if recorder is None:
        compiled.run(*whole)
    else:
        _note_launch(recorder, compiled, whole)


def _is_hooked() -> bool:
    """Return whether Triton is to tell somebody of launches."""
    runtime = _triton_runtime()
    before, after = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))


def _no_hooks() -> Iterable[Condition]:
    """Return the conditions that Triton has the hooks that it has now."""
    runtime = _triton_runtime()
    for name in ("launch_enter_hook", "launch_exit_hook"):
        yield has(runtime, name)
        calls = getattr(getattr(runtime, name), "calls", None)
        if calls is not None:
            yield returns(calls.__len__)


tapes.depend_on(_no_hooks)


def _note_launch(recorder: tapes.CallRecorder, compiled: Any, whole: tuple[Any, ...]) -> None:
    """Launch a kernel, and note as a step what Triton's launcher, in Python, calls in C.

    The step has the kernel's handle, which is gone with the kernel.
    """
    run, launch, calls = compiled.run, compiled.run.launch, []

    def note(*args: Any) -> None:
        calls.append(args)
        launch(*args)

    with _noting:
        run.launch = note
        try:
            run(*whole)
        finally:
            run.launch = launch
    for args in calls:
        # Of a kernel's own arguments, all but these are plain or tensors.
        recorder.keep(*[value for value in args if type(value) in (list, bytes)])
        others = [value for value in whole[9:] if type(value) not in _OF_PYTHON]
        recorder.keep(compiled, whole[5], *filter(_is_of_triton, others))
        recorder.note(launch, args, {}, None, kind="launch")


_OF_PYTHON = frozenset((int, float, bool, str, type(None), torch.Tensor))
"""Types of most constants and arguments, of which none is of Triton's language."""


def _is_of_triton(value: object) -> bool:
    """Return whether a constant is an object of Triton's language."""
    return type(value).__module__.startswith("triton.language")


_noting = threading.Lock()


@functools.cache  # an import takes longer than what it finds
def _triton_runtime() -> Any:
    """Return Triton's settings of launches."""
    from triton import knobs

    return knobs.runtime


def compile_ahead(launches: Iterable[Launch], device: torch.device) -> Callable[[], None]:
    """Begin to compile the kernels of launches, several at a time, so that their first launches
    need not; return what waits until all are compiled.

    A kernel takes a second or more, most of it outside of Python, so threads help. What does not
    compile says so at its launch.

    Args:
        device: The GPU of the launches.
    """
    from triton import AsyncCompileMode

    launches = list(launches)
    # In this thread, as hashes depend on the order in which functions get theirs.
    for launch in launches:
        kernel_folder.hash_callees_first(launch.kernel)
    workers = min(max(len(os.sched_getaffinity(0)) // 2, 1), _MOST_COMPILING)

    def compile_all() -> None:
        # A thread's current device is the first one, whatever that of the caller is.
        with (
            torch.cuda.device(device if device.type == "cuda" else -1),
            ThreadPoolExecutor(workers, initializer=kernel_folder.begin) as executor,
            AsyncCompileMode(executor, ignore_errors=True),
        ):
            for launch in launches:
                launch.compile()

    thread = threading.Thread(target=compile_all, name="interlace-compile")
    thread.start()
    return thread.join


def _shortcuts() -> contextlib.AbstractContextManager[None]:
    """Return a context that makes Triton's interpreter faster, if the interpreter runs kernels."""
    if not interpreting():
        return contextlib.nullcontext()
    from interlace.comm.cpu import shortcuts  # imports Triton

    return shortcuts.taken()


def _key(launch: Launch, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return all that Triton may compile a launch for, whose arguments in order are ``values``;
    second the index of the current GPU.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
    return (id(launch.kernel), device, *map(_kind, values), *launch.constants.items())


_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""Compiled kernels, which launch any number of programs, and the values of their constants."""

_orders: dict[int, tuple[Any, Callable[[Mapping[str, Any]], Any]]] = {}
"""Kernels by their ``id``, each with what puts its arguments in order. To look a kernel up by
itself is to hash it, which :func:`kernel_folder.hash_callees_first` has to come before.
"""


def _in_order(
    kernel: Any, arguments: Mapping[str, Any], constants: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments' values in the order of the kernel's parameters."""
    # Some launches still give their arguments by position.
    known = _orders.get(id(kernel))
    if known is None:
        kernel_folder.hash_callees_first(kernel)
        names = [name for name in kernel.arg_names if name not in constants]
        # For a single name itemgetter returns the value itself, not a tuple.
        known = _orders[id(kernel)] = (
            kernel,
            operator.itemgetter(*names)
            if len(names) > 1
            else lambda arguments: (arguments[names[0]],),
        )
    try:
        values: tuple[Any, ...] = known[1](arguments)
    except KeyError:
        values = ()
    if len(values) != len(arguments):
        names = [name for name in kernel.arg_names if name not in constants]
        absent = [name for name in names if name not in arguments]
        unknown = [name for name in arguments if name not in names]
        raise TypeError(
            f"the launch of {getattr(kernel, '__name__', kernel)} must name all parameters of the "
            f"kernel and no others; missing {absent}, unknown {unknown}."
        )
    return values


def _kind(value: Any) -> Any:
    """Return a key of all properties of an argument that Triton may compile a kernel for."""
    if type(value) is int:
        # Triton makes a constant of 1, and else looks at the width and whether 16 divides it.
        if value == 1:
            return "one"
        kind = _alignment(value)
        return kind if -_MIN_INT64 <= value < _MIN_INT64 else f"wide {kind}"
    if isinstance(value, torch.Tensor):
        return value.dtype, _alignment(value.data_ptr())
    if type(value) is float:
        return float
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    # Only tensor descriptors have a block shape. TMA requires that their base is aligned.
    block = getattr(value, "block_shape", None)
    return value if block is None else (value.base.dtype, *block)


def _alignment(address: int) -> str:
    """Return whether 16 divides the address or integer, as text that equals no argument."""
    return "anywhere" if address % 16 else "aligned"


@functools.cache  # torch's look-up is slow, and operators ask in every call
def processors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors (SMs) of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache  # asked for in every call, as the number of SMs is
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)


def cut_rows(rows: int, columns: int, group: Group | WithinNode) -> tuple[int, dict[str, int]]:
    """Return the number of programs that move rows, and the tile that a program takes at a time.

    Args:
        rows: Number of rows.
        columns: Elements of one row.
        group: The group whose rows are moved.
    """
    tiles = ceil_div(rows, _TILE["ROWS"]) * ceil_div(columns, _TILE["COLS"])
    # Each program has signals to send and to wait for, so one per SM is faster if rows are few.
    max_programs = (
        CPU_PROGRAMS
        if group.backend == "cpu"
        else min(max(processors(group.device), tiles // 2), MOST_MOVERS)
    )
    return max(min(tiles, max_programs), 1), _TILE


def known_factor(*sizes: int) -> int:
    """Return the ``FACTOR`` of ``interlace.language.multiple_of`` for arguments of a kernel: the
    power of two, at most 8, that divides them all.

    It is 1 if 16 divides them all, as Triton tells the compiler that by itself, unless arguments
    are in the kernel's ``do_not_specialize``.
    """
    factor = math.gcd(_KNOWN_TO_TRITON, *sizes)
    return 1 if factor == _KNOWN_TO_TRITON else factor


@functools.cache
def triton_dtype(dtype: torch.dtype) -> Any:
    """Return Triton's element type; Triton is imported by this function.

    A tuple of constants holds its ``name``, of which kernels make a ``tl.dtype`` again; see
    ``Launch``.
    """
    import triton.language as tl

    return {
        torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32,
        torch.float8_e4m3fn: tl.float8e4nv,
    }[dtype]  # fmt: skip


def describe_matrix(
    matrix: torch.Tensor, stride: int, block: list[int], parts: int = 1, dimension: int = 1
) -> Any:
    """Return a tensor descriptor of a matrix whose rows are contiguous; with several ``parts`` of
    its rows or columns, ``[parts, rows, columns]`` of a part, so that tiles end where a part does.

    A descriptor must have an address, which a matrix without elements lacks, so such a matrix gets
    a row that no kernel reads.

    Args:
        matrix: ``[rows, columns]``.
        stride: Elements between the starts of two rows.
        block: Rows and columns of a tile.
        parts: Equal parts.
        dimension: The dimension that parts share.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    sizes, strides = [max(size, 1) for size in matrix.shape], [stride, 1]
    if parts > 1:
        sizes[dimension] //= parts
        strides = [sizes[dimension] * strides[dimension], *strides]
        sizes, block = [parts, *sizes], [1, *block]
    return TensorDescriptor(addressable(matrix, stride), sizes, strides, block)


def addressable(matrix: torch.Tensor, elements: int) -> torch.Tensor:
    """Return ``matrix``, or an uninitialised vector of ``elements`` if it is empty."""
    return matrix if matrix.numel() else matrix.new_empty(elements)


def describe_parts(parts: torch.Tensor, block: list[int]) -> Any:
    """Return a tensor descriptor of matrices of this rank.

    A tile lies in one part and is masked at the part's end.

    Args:
        parts: ``[part, row, column]``.
        block: Rows and columns of a tile.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(parts, list(parts.shape), list(parts.stride()), [1, *block])


def describe_ranks(
    group: Group,
    address: int,
    dtype: torch.dtype,
    inner: Sequence[tuple[int, int]],
    block: list[int],
) -> Any:
    """Return a tensor descriptor of every rank's memory: ``[rank, *inner sizes]``.

    Args:
        group: The group whose memory it is.
        address: Address of rank 0's copy.
        dtype: Element type.
        inner: Size and stride, in elements, of each further dimension.
        block: Rows and columns of a tile, in the last two dimensions.
    """
    outer = (group.world_size, group.stride // dtype.itemsize or _SOLO_STRIDE)
    return describe_memory(address, group.device, dtype, (outer, *inner), tuple(block))


@functools.lru_cache(maxsize=4096)  # calls describe the memory of earlier calls
def describe_memory(
    address: int,
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[tuple[int, int], ...],
    block: tuple[int, ...],
) -> Any:
    """Return a tensor descriptor of memory, which the caller keeps alive.

    Args:
        address: Address of the first element.
        device: Device whose kernels use the descriptor.
        dtype: Element type.
        sizes: Size and stride, in elements, of each dimension.
        block: The sizes of a tile in the last dimensions; it has one element of those before.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    base = tensor_at(address, (16 // dtype.itemsize,), dtype, device, None)
    shape, strides = zip(*sizes, strict=True)
    before = [1] * (len(shape) - len(block))
    return TensorDescriptor(base, list(shape), list(strides), before + list(block))
