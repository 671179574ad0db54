"""Collectives of one launch, which the solutions of ParallelKernelBench share.

Each rank puts its tiles into slots of the peers' symmetric memory, meets the peers' programs of the
same index at a barrier, and brings what has arrived into a tensor of its own. Slots take turns by
the epoch's parity, as in the example of ``src/interlace/language/README.md``. A sum adds in float32
and in rank order what has been rounded to the tensor's dtype. On two ranks that are NCCL's bits.

Every kind of call (kernel, sizes, dtypes) has a workspace of its own, which is kept, and a launch
that is prepared once, since the host's time decides for messages as small as these.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import interlace.language as il
from interlace.comm import MAX_PROGRAMS, group_of
from interlace.comm.launching.kernels import Launch

ROW_PROGRAMS, CPU_PROGRAMS = 256, 4  # the same on every rank, whose numbers of rows differ
TILE_BYTES = 8192  # what a program of four warps moves at a time
_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class Call:
    """Launch a kernel of this folder for one kind of call.

    The kernel's parameters are the arguments of the call, then ``data, signals, epochs, ctx, mark,
    half``, which :func:`begin` takes, then constants, ``WORLD_SIZE`` among them.

    Attributes:
        group: The ranks.
    """

    def __init__(self, plan: Plan, process_group: dist.ProcessGroup) -> None:
        kernel, programs, constants = plan.kernel, plan.programs, dict(plan.constants)
        self.group = group = group_of(process_group)
        name = f"{kernel.__name__} {programs} {plan.half_bytes} {constants}"
        mark = group.agree(name)
        count = programs * BARRIERS * 2 * group.world_size
        self._memory = memory = group.workspace(name, max(plan.half_bytes, 16), count)
        self._kernel, self._programs = kernel, programs
        self._constants = {**constants, "WORLD_SIZE": group.world_size}
        names = [name for name in kernel.arg_names if name not in self._constants]
        self._names = names[:-6]
        self._fixed = {
            "data": memory.data.address, "signals": memory.signals.address,
            "epochs": memory.epochs, "ctx": group.context(kernel.__name__), "mark": mark,
            "half": memory.half_bytes,
        }  # fmt: skip
        self._again: Callable[[int, Mapping[str, Any]], None] | None = None

    def __call__(self, *arguments: Any) -> None:
        """Run the kernel on the current stream."""
        named = dict(zip(self._names, arguments, strict=True), **self._fixed)
        with self.group.running():
            if self._again is not None:
                self._again(self._programs, named)
                return
            launch = Launch(self._kernel, (self._programs,), named, self._constants)
            launch()
            self._again = launch.again()


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What a kind of call is, beside the dtypes of its arguments; equal ones are one object."""

    kernel: Any
    programs: int
    half_bytes: int
    constants: tuple[tuple[str, Any], ...]


planned = functools.lru_cache(maxsize=4096)(Plan)
_calls: dict[Any, Call] = {}


def perform(plan: Plan, group: dist.ProcessGroup, *arguments: Any) -> None:
    """Run the kernel of a plan on all ranks of a group; see :func:`run`."""
    kinds = [
        (each.dtype, each.data_ptr() % 16) if isinstance(each, torch.Tensor) else type(each)
        for each in arguments
    ]
    key = (plan, group, *kinds)
    call = _calls.get(key)
    if call is None:
        call = _calls[key] = Call(plan, group)
    call(*arguments)


def run(
    kernel: Any, programs: int, half_bytes: int, *arguments: Any,
    group: dist.ProcessGroup | None = None, **constants: Any,
) -> None:  # fmt: skip
    """Run a kernel of this folder on all ranks; see :class:`Call`.

    Args:
        kernel: The ``@triton.jit`` function.
        programs: Number of programs, the same on every rank.
        half_bytes: What a rank receives in a call.
        arguments: The kernel's own arguments, in order: tensors, and numbers of type float.
        group: The ranks. Default: all.
        constants: The kernel's constants, without ``WORLD_SIZE``.
    """
    plan = planned(kernel, programs, half_bytes, tuple(constants.items()))
    perform(plan, whole(group), *arguments)


def whole(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return a group, or that of all ranks for None."""
    return dist.group.WORLD if group is None else group  # type: ignore[return-value]


def programs_for(count: int, itemsize: int) -> tuple[int, int]:
    """Return the number of programs that move ``count`` elements, and the elements of a tile."""
    block = TILE_BYTES // itemsize
    while block > 256 and count <= block * 64:
        block //= 2  # few elements: more programs, so that more SMs store
    return min(math.ceil(count / block), MAX_PROGRAMS), block


def replayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a solution of several launches one CUDA graph per set of addresses, as operators do.

    The second call with the same addresses, shapes and numbers is captured; later ones replay it
    and copy its results. It must not wait for the GPU; if PyTorch cannot capture it, it warns, and
    runs launch by launch from then on. On the CPU nothing is changed.
    """
    results: dict[Any, Any] = {}
    is_captured, can_be_captured = [False], [True]

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        group, found = group_of(None), []
        if group.backend == "cpu" or not can_be_captured[0]:
            return function(*arguments)
        key = (function, _places(arguments))

        def enqueue() -> None:
            is_captured[0] = group.replays.capturing
            found.append(function(*arguments))

        with group.running():
            try:
                if not group.replays.run(key, enqueue):
                    return _copied(results[key])
            except RuntimeError as error:
                if not is_captured[0]:
                    raise
                # Nothing has run yet, so this rank and its peers still make the same calls.
                warnings.warn(f"{function.__module__} is no graph: {error}", stacklevel=2)
                can_be_captured[0] = False
                return function(*arguments)
            if not is_captured[0]:
                return found[-1]
            results[key] = found[-1]
            return _copied(results[key])

    return call


def _places(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.data_ptr(), value.dtype, value.shape, value.stride()
    if isinstance(value, (tuple, list)):
        return tuple(map(_places, value))
    return value


def _copied(value: Any) -> Any:
    """Return a result with copies of its tensors, which are made at once."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if not isinstance(value, tuple):
        return value
    tensors = [part for part in value if isinstance(part, torch.Tensor)]
    copies = [torch.empty_like(tensor) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    found = iter(copies)
    return tuple(next(found) if isinstance(part, torch.Tensor) else part for part in value)


# What kernels share

BARRIERS = 2
"""Times that the programs of a kernel may meet. All signals of a workspace are set in each call, as
its programs are always as many, so that no old ones must be cleared.
"""


@triton.jit
def begin(data, signals, epochs, ctx, mark, half, WORLD_SIZE: tl.constexpr):
    """Begin a call; return epoch, stamp, group, rank, the address of this call's slots, and this
    program's signals.
    """
    epoch, stamp, group, me = il.enter(epochs, ctx, mark)
    flags = il.pointer(signals, tl.int32) + tl.program_id(0) * 2 * WORLD_SIZE
    return epoch, stamp, group, me, data + (epoch & 1).to(tl.int64) * half, flags


@triton.jit
def received(slots, i, own, arrived, source: tl.constexpr, me, group, COUNT: tl.constexpr, mask):
    """Return what ``source`` has sent, as float32: ``own`` where that is this rank."""
    value = il.get(slots + source * COUNT + i, me, group, mask & (source != me), 0.0)
    value = tl.where(source == me, own.to(tl.float32), value.to(tl.float32))
    return il.nan_unless(arrived.to(tl.int32), value)


@triton.jit
def sum_over_ranks(
    half_at, i, value, mask, stamp, me, group, COUNT: tl.constexpr, WORLD_SIZE: tl.constexpr
):
    """Return the sum over the ranks of float32 values ``[n]``, numbers i of ``COUNT`` in a call.

    They travel as packed words, 8 bytes each: no signal, one way.
    """
    words = il.pointer(half_at, tl.int64) + i[:, None]
    own, inside = value[:, None], mask[:, None]
    for step in tl.static_range(1, WORLD_SIZE):
        peer = (me + step) % WORLD_SIZE
        il.put_packed(words + me * COUNT, own, stamp, peer, group, inside)
    slice = tl.program_id(0)
    total = il.sum_packed(words, own, COUNT, stamp, slice, group, inside, WORLD_SIZE)
    return tl.sum(total, 1)


# Data move as they are


@triton.jit(do_not_specialize=["data", "signals", "mark", "half"])
def move_kernel(
    x, y, data, signals, epochs, ctx, mark, half,
    PEER_X: tl.constexpr, A_X: tl.constexpr, B_X: tl.constexpr, PEER_Y: tl.constexpr,
    A_Y: tl.constexpr, B_Y: tl.constexpr, COUNT: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
    ROOT: tl.constexpr, INTO: tl.constexpr, WORD: tl.constexpr, BLOCK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Send peer d words ``x[d, a, b, c]``; what source s has sent becomes ``y[s, a, b, c]``.

    With a ROOT only that rank sends, with INTO only that rank receives; -1 is all ranks.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch, stamp, group, me, half_at, flags = begin(
        data, signals, epochs, ctx, mark, half, WORLD_SIZE
    )
    slots = il.pointer(half_at, WORD)
    words, out = x.to(tl.pointer_type(WORD)), y.to(tl.pointer_type(WORD))
    for first in range(program * BLOCK, COUNT, programs * BLOCK):
        i = first + tl.arange(0, BLOCK)
        inside, a, b, c = i < COUNT, i // (B * C), i // C % B, i % C
        source, target = words + (a * A_X + b * B_X + c), out + (a * A_Y + b * B_Y + c)
        if (ROOT < 0) | (me == ROOT):
            for step in tl.static_range(1, WORLD_SIZE):
                peer = (me + step) % WORLD_SIZE
                if (INTO < 0) | (peer == INTO):
                    value = tl.load(source + peer * PEER_X, mask=inside)
                    il.put(slots + me * COUNT + i, value, peer, group, inside)
            if (INTO < 0) | (me == INTO):
                tl.store(target + me * PEER_Y, tl.load(source + me * PEER_X, inside), mask=inside)
    arrived = il.barrier(flags, stamp, group, WORLD_SIZE)
    if (INTO < 0) | (me == INTO):
        for first in range(program * BLOCK, COUNT, programs * BLOCK):
            i = first + tl.arange(0, BLOCK)
            inside, a, b, c = i < COUNT, i // (B * C), i // C % B, i % C
            target = out + (a * A_Y + b * B_Y + c)
            for step in tl.static_range(1, WORLD_SIZE):
                peer = (me + step) % WORLD_SIZE
                if (ROOT < 0) | (peer == ROOT):
                    value = il.get(slots + peer * COUNT + i, me, group, inside)
                    # All bits set are NaN in every floating type.
                    tl.store(target + peer * PEER_Y, tl.where(arrived, value, -1), mask=inside)
    il.advance_epoch(epochs, epoch)


def move(
    x: torch.Tensor, y: torch.Tensor, sizes: tuple[int, int, int], x_strides: tuple[int, int, int],
    y_strides: tuple[int, int, int], *, root: int = -1, into: int = -1,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:  # fmt: skip
    """Send peer d ``x[d, a, b, c]``, and store what source s sends as ``y[s, a, b, c]``; return y.

    Args:
        x, y: Contiguous tensors of one dtype, of any shape.
        sizes: Those of a, b and c: what goes to one peer.
        x_strides, y_strides: Elements between peers, between a, and between b; c is contiguous.
        root: The only rank that sends; -1: all.
        into: The only rank that receives; -1: all.
        group: The ranks. Default: all.
    """
    group = whole(group)
    is_aligned = not (x.data_ptr() | y.data_ptr()) % 8
    strides, item = (*x_strides, *y_strides), x.element_size()
    plan = _moving(sizes, strides, item, is_aligned, root, into, group.size())
    perform(plan, group, x, y)
    return y


@functools.lru_cache(maxsize=4096)
def _moving(
    sizes: tuple[int, int, int], strides: tuple[int, ...], item: int, is_aligned: bool, root: int,
    into: int, ranks: int,
) -> Plan:  # fmt: skip
    a, b, c = sizes
    word = math.gcd(8, *(n * item for n in (c, *strides))) if is_aligned else item
    count = a * b * c * item // word
    programs, block = programs_for(count, word)
    names = ("PEER_X", "A_X", "B_X", "PEER_Y", "A_Y", "B_Y")
    constants = {
        **{name: n * item // word for name, n in zip(names, strides, strict=True)},
        "COUNT": count, "B": b, "C": c * item // word, "ROOT": root, "INTO": into,
        "WORD": _WORDS[word], "BLOCK": block,
    }  # fmt: skip
    return planned(move_kernel, programs, ranks * count * word, tuple(constants.items()))


def all_gather(
    x: torch.Tensor, dim: int = 0, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Concatenate the ranks' contiguous tensors of equal shape along a dimension."""
    group = whole(group)
    shape, *geometry = _gathering(x.shape, dim, group.size())
    return move(x, x.new_empty(shape), *geometry, group=group)


@functools.lru_cache(maxsize=4096)
def _gathering(shape: torch.Size, dim: int, ranks: int) -> tuple[Any, ...]:
    """Return the result's shape, and the sizes and strides of :func:`move`."""
    outer, total = math.prod(shape[:dim]), math.prod(shape)
    gathered, length = list(shape), total // outer
    gathered[dim] *= ranks
    return gathered, (outer, 1, length), (0, length, 0), (length, ranks * length, 0)


def all_to_all(
    x: torch.Tensor, split: int, cat: int, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Cut a contiguous tensor into one piece per rank along ``split``; concatenate what arrives
    along ``cat``.
    """
    group = whole(group)
    shape, *geometry = _splitting(x.shape, split, cat, group.size())
    return move(x, x.new_empty(shape), *geometry, group=group)


@functools.lru_cache(maxsize=4096)
def _splitting(given: torch.Size, split: int, cat: int, ranks: int) -> tuple[Any, ...]:
    """Return the result's shape, and the sizes and strides of :func:`move`."""
    shape = list(given)
    shape[split] //= ranks
    low, high = min(split, cat), max(split, cat)
    before, between = math.prod(shape[:low]), math.prod(shape[low + 1 : high])
    after, a, b = math.prod(shape[high + 1 :]), shape[low], shape[high]
    shape[cat] *= ranks
    if split == cat:
        strides = (a * after, ranks * a * after, 0)
        return shape, (before, 1, a * after), strides, strides
    # A piece, per index of the dimensions before: in one tensor all of it lies together.
    piece = a * between * b * after
    together = (piece, ranks * piece, b * after)
    apart = (b * after, ranks * piece, ranks * b * after)
    sizes = (before, a * between, b * after)
    return (shape, sizes, together, apart) if split < cat else (shape, sizes, apart, together)


# Sums


@triton.jit(do_not_specialize=["data", "signals", "mark", "half"])
def sum_kernel(
    x, y, data, signals, epochs, ctx, mark, half,
    COUNT: tl.constexpr, PEER_X: tl.constexpr, INTO: tl.constexpr, BLOCK: tl.constexpr,
    DTYPE: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Send peer d ``x[d * PEER_X : d * PEER_X + COUNT]``; y is the sum of what arrives.

    With INTO only that rank receives, and y is a copy of x on the others.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch, stamp, group, me, half_at, flags = begin(
        data, signals, epochs, ctx, mark, half, WORLD_SIZE
    )
    slots = il.pointer(half_at, DTYPE)
    for first in range(program * BLOCK, COUNT, programs * BLOCK):
        i = first + tl.arange(0, BLOCK)
        for step in tl.static_range(1, WORLD_SIZE):
            peer = (me + step) % WORLD_SIZE
            if (INTO < 0) | (peer == INTO):
                value = tl.load(x + peer * PEER_X + i, mask=i < COUNT)
                il.put(slots + me * COUNT + i, value, peer, group, i < COUNT)
    arrived = il.barrier(flags, stamp, group, WORLD_SIZE)
    for first in range(program * BLOCK, COUNT, programs * BLOCK):
        i = first + tl.arange(0, BLOCK)
        own = tl.load(x + me * PEER_X + i, mask=i < COUNT, other=0.0)
        total = tl.zeros([BLOCK], tl.float32)
        for source in tl.static_range(WORLD_SIZE):
            if (INTO < 0) | (me == INTO):
                total += received(slots, i, own, arrived, source, me, group, COUNT, i < COUNT)
        value = total.to(DTYPE) if INTO < 0 else tl.where(me == INTO, total.to(DTYPE), own)
        tl.store(y + i, value, mask=i < COUNT)
    il.advance_epoch(epochs, epoch)


def add(
    x: torch.Tensor, y: torch.Tensor, *, scatter: bool = False, into: int = -1,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:  # fmt: skip
    """Store the sum over the ranks of contiguous tensors x in y, which may be x; return y.

    Args:
        scatter: x has one part per rank, and y is the sum of this rank's parts.
        into: The only rank that gets the sum, y being a copy of x on the others; -1: all.
        group: The ranks. Default: all.
    """
    group = whole(group)
    perform(_adding(y.numel(), x.dtype, scatter, into, group.size()), group, x, y)
    return y


@functools.lru_cache(maxsize=4096)
def _adding(count: int, dtype: torch.dtype, scatter: bool, into: int, ranks: int) -> Plan:
    programs, block = programs_for(count, dtype.itemsize)
    constants = {
        "COUNT": count, "PEER_X": count if scatter else 0, "INTO": into, "BLOCK": block,
        "DTYPE": DTYPES[dtype],
    }  # fmt: skip
    half_bytes = ranks * count * dtype.itemsize
    return planned(sum_kernel, programs, half_bytes, tuple(constants.items()))


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum the ranks' contiguous tensors."""
    return add(x, torch.empty_like(x), group=group)


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum the ranks' contiguous tensors; return this rank's part of the first dimension."""
    group = whole(group)
    y = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    return add(x, y, scatter=True, group=group)


# Rows


@triton.jit(do_not_specialize=["data", "signals", "mark", "half"])
def rows_kernel(
    x, y, take, place, parts, data, signals, epochs, ctx, mark, half,
    WIDTH: tl.constexpr, CAPACITY: tl.constexpr, TAKE: tl.constexpr, PLACE: tl.constexpr,
    WORD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Send peer d its rows of x; what arrives become rows of y.

    ``parts [4, R]``: where each peer's rows begin and how many they are, and where those from each
    source begin and how many they are. Row i to be sent is row ``take[i]`` of x, row i of those
    that arrive becomes row ``place[i]`` of y.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch, stamp, group, me, half_at, flags = begin(
        data, signals, epochs, ctx, mark, half, WORLD_SIZE
    )
    slots = il.pointer(half_at, WORD)
    words, out = x.to(tl.pointer_type(WORD)), y.to(tl.pointer_type(WORD))
    r, c = tl.arange(0, ROWS).to(tl.int64)[:, None], tl.arange(0, COLS)[None, :]
    for step in tl.static_range(1, WORLD_SIZE):
        peer = (me + step) % WORLD_SIZE
        start, count = tl.load(parts + peer), tl.load(parts + WORLD_SIZE + peer)
        for first in range(program * ROWS, count, programs * ROWS):
            i = first + r
            row = tl.load(take + start + i, mask=i < count, other=0) if TAKE else start + i
            for column in range(0, WIDTH, COLS):
                inside = (i < count) & (column + c < WIDTH)
                value = tl.load(words + row * WIDTH + column + c, mask=inside)
                slot = slots + (me * CAPACITY + i) * WIDTH + column + c
                il.put(slot, value, peer, group, inside)
    arrived = il.barrier(flags, stamp, group, WORLD_SIZE)
    for step in tl.static_range(WORLD_SIZE):
        source = (me + step) % WORLD_SIZE
        start = tl.load(parts + 2 * WORLD_SIZE + source)
        count = tl.load(parts + 3 * WORLD_SIZE + source)
        sent = tl.load(parts + me)  # rows of this rank for itself, which travel nowhere
        for first in range(program * ROWS, count, programs * ROWS):
            i = first + r
            row = tl.load(place + start + i, mask=i < count, other=0) if PLACE else start + i
            for column in range(0, WIDTH, COLS):
                inside = (i < count) & (column + c < WIDTH)
                if step == 0:
                    from_row = (
                        tl.load(take + sent + i, mask=i < count, other=0) if TAKE else sent + i
                    )
                    value = tl.load(words + from_row * WIDTH + column + c, mask=inside)
                else:
                    slot = slots + (source * CAPACITY + i) * WIDTH + column + c
                    value = tl.where(arrived, il.get(slot, me, group, inside), -1)
                tl.store(out + row * WIDTH + column + c, value, mask=inside)
    il.advance_epoch(epochs, epoch)


@functools.lru_cache(maxsize=4096)
def _parts(
    device: torch.device, starts: tuple[int, ...] | None, sent: tuple[int, ...],
    received: tuple[int, ...],
) -> torch.Tensor:  # fmt: skip
    starts = tuple(sum(sent[:i]) for i in range(len(sent))) if starts is None else starts
    targets = tuple(sum(received[:i]) for i in range(len(received)))
    return torch.tensor([starts, sent, targets, received], device=device)


def exchange_rows(
    x: torch.Tensor, sent: Sequence[int], received: Sequence[int], capacity: int, *,
    take: torch.Tensor | None = None, place: torch.Tensor | None = None,
    starts: Sequence[int] | None = None, parts: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:  # fmt: skip
    """Send each rank its rows of contiguous ``x [rows, ...]``; return those that arrive.

    Args:
        x: The rows; their width is the same on every rank.
        sent: Number of rows for each rank.
        received: Number of rows from each rank.
        capacity: At least as many as any rank sends to another; the same on every rank.
        take: int64: the rows of x to send, in order. Default: all.
        place: int64: where each row that arrives goes. Default: in the order of the ranks.
        starts: Where the rows for each rank begin. Default: one rank's after another's.
        parts: See :func:`rows_kernel`; default: made of the numbers, and kept.
        group: The ranks. Default: all.
    """
    y = x.new_empty((sum(received), *x.shape[1:]))
    width_bytes = math.prod(x.shape[1:]) * x.element_size()
    word = math.gcd(8, width_bytes)
    width = width_bytes // word
    cols = min(triton.next_power_of_2(width), 1024)
    if parts is None:
        starts = None if starts is None else tuple(starts)
        parts = _parts(x.device, starts, tuple(sent), tuple(received))
    on_cpu = x.device.type == "cpu"
    ranks, nothing = dist.get_world_size(group), parts
    run(
        rows_kernel, CPU_PROGRAMS if on_cpu else ROW_PROGRAMS, ranks * capacity * width_bytes, x, y,
        nothing if take is None else take, nothing if place is None else place, parts, group=group,
        WIDTH=width, CAPACITY=capacity, TAKE=take is not None, PLACE=place is not None,
        WORD=_WORDS[word], ROWS=max(1024 // cols, 1), COLS=cols,
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["data", "signals", "mark", "half"])
def fetch_kernel(
    table, indices, y, data, signals, epochs, ctx, mark, half,
    SHARD: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr, WORD: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Store row ``indices[i]`` of a table whose rows are cut over the ranks as row i of y.

    Each program sends a few indices to every peer, and puts the rows that peers have asked for
    straight from its shard into their slots; the programs of its index meet twice.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch, stamp, group, me, half_at, flags = begin(
        data, signals, epochs, ctx, mark, half, WORLD_SIZE
    )
    asked = il.pointer(half_at, tl.int64)
    slots = il.pointer(half_at + (WORLD_SIZE * COUNT * 8 + 15) // 16 * 16, WORD)
    words, out = table.to(tl.pointer_type(WORD)), y.to(tl.pointer_type(WORD))
    r, c = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    for first in range(program * ROWS, COUNT, programs * ROWS):
        i = first + tl.arange(0, ROWS)
        wanted = tl.load(indices + i, mask=i < COUNT, other=0)
        for step in tl.static_range(1, WORLD_SIZE):
            peer = (me + step) % WORLD_SIZE
            il.put(asked + me * COUNT + i, wanted, peer, group, i < COUNT)
    met = il.barrier(flags, stamp, group, WORLD_SIZE)
    for step in tl.static_range(WORLD_SIZE):
        peer = (me + step) % WORLD_SIZE
        for first in range(program * ROWS, COUNT, programs * ROWS):
            i = first + r
            if step == 0:
                row = tl.load(indices + i, mask=i < COUNT, other=0)
            else:
                row = il.get(asked + peer * COUNT + i, me, group, i < COUNT, 0)
            is_here = met & (i < COUNT) & (row // SHARD == me)
            for column in range(0, WIDTH, COLS):
                inside = is_here & (column + c < WIDTH)
                value = tl.load(words + row % SHARD * WIDTH + column + c, mask=inside)
                at = i.to(tl.int64) * WIDTH + column + c
                if step == 0:
                    tl.store(out + at, value, mask=inside)
                else:
                    il.put(slots + at, value, peer, group, inside)
    arrived = il.barrier(flags + programs * 2 * WORLD_SIZE, stamp, group, WORLD_SIZE)
    for first in range(program * ROWS, COUNT, programs * ROWS):
        i = first + r
        row = tl.load(indices + i, mask=i < COUNT, other=0)
        is_elsewhere = (i < COUNT) & (row // SHARD != me)
        for column in range(0, WIDTH, COLS):
            inside = is_elsewhere & (column + c < WIDTH)
            at = i.to(tl.int64) * WIDTH + column + c
            value = il.get(slots + at, me, group, inside)
            tl.store(out + at, tl.where(arrived, value, -1), mask=inside)
    il.advance_epoch(epochs, epoch)


def fetch_rows(
    table_shard: torch.Tensor, indices: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the rows ``indices`` of a table, of which each rank has equally many in turn.

    Args:
        table_shard: ``[rows / R, width]``, contiguous.
        indices: int64, equally many on every rank.
        group: The ranks. Default: all.
    """
    (shard, width), count = table_shard.shape, indices.numel()
    y = table_shard.new_empty(count, width)
    word = math.gcd(8, width * table_shard.element_size())
    width = width * table_shard.element_size() // word
    cols = min(triton.next_power_of_2(width), 1024)
    rows = max(1024 // cols, 1)
    most = CPU_PROGRAMS if table_shard.device.type == "cpu" else MAX_PROGRAMS
    run(
        fetch_kernel, min(math.ceil(count / rows), most),
        dist.get_world_size(group) * count * 8 + 16 + y.numel() * y.element_size(), table_shard,
        indices, y,
        group=group, SHARD=shard, COUNT=count, WIDTH=width, WORD=_WORDS[word], ROWS=rows, COLS=cols,
    )  # fmt: skip
    return y
