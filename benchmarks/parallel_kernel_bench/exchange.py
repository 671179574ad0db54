"""Collectives of one launch, which the solutions of ParallelKernelBench share.

Each rank puts its tiles into slots of the peers' symmetric memory, meets the peers' programs of the
same index at a barrier, and brings what has arrived into a tensor of its own. Slots take turns by
the epoch's parity, as in the example of ``src/interlace/language/README.md``. A sum adds in float32
and in rank order what has been rounded to the tensor's dtype. On two ranks that are NCCL's bits.

Every kind of call (kernel, sizes, dtypes) has a workspace of its own, which is kept, and a launch
that is prepared once, since the host's time decides for messages as small as these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import interlace.language as il
from interlace.comm import MAX_PROGRAMS, group_of
from interlace.comm.launching.kernels import Launch

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

    def __init__(
        self, kernel: Any, programs: int, half_bytes: int, process_group: Any, constants: Any
    ) -> None:
        self.group = group = group_of(process_group)
        name = f"{kernel.__name__} {programs} {half_bytes} {constants}"
        mark = group.agree(name)
        count = MAX_PROGRAMS * BARRIERS * group.world_size
        self._memory = memory = group.workspace(name, max(half_bytes, 16), count)
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


_calls: dict[Any, Call] = {}


def run(
    kernel: Any, programs: int, half_bytes: int, *arguments: Any,
    group: dist.ProcessGroup | None = None, **constants: Any,
) -> None:  # fmt: skip
    """Run a kernel of this folder on all ranks; see :class:`Call`.

    Args:
        kernel: The ``@triton.jit`` function.
        programs: Number of programs, the same on every rank.
        half_bytes: What a rank receives in a call.
        arguments: The kernel's own arguments, in order. Numbers must not change for one kind of
            call.
        group: The ranks. Default: all.
        constants: The kernel's constants, without ``WORLD_SIZE``.
    """
    kinds = [
        (each.dtype, each.data_ptr() % 16) if isinstance(each, torch.Tensor) else each
        for each in arguments
    ]
    group = group or dist.group.WORLD
    key = (kernel, programs, half_bytes, group, *kinds, *constants.values())
    call = _calls.get(key)
    if call is None:
        call = _calls[key] = Call(kernel, programs, half_bytes, group, constants)
    call(*arguments)


def programs_for(count: int, itemsize: int) -> tuple[int, int]:
    """Return the number of programs that move ``count`` elements, and the elements of a tile."""
    block = TILE_BYTES // itemsize
    while block > 256 and count <= block * 64:
        block //= 2  # few elements: more programs, so that more SMs store
    return min(math.ceil(count / block), MAX_PROGRAMS), block


# What kernels share

BARRIERS = 2  # sets of signals: kernels meet twice at most


@triton.jit
def begin(data, signals, epochs, ctx, mark, half, WORLD_SIZE: tl.constexpr):
    """Begin a call; return epoch, stamp, group, rank, the address of this call's slots, and this
    program's signals.
    """
    epoch, stamp, group, me = il.enter(epochs, ctx, mark)
    flags = il.pointer(signals, tl.int32) + tl.program_id(0) * 2 * WORLD_SIZE
    return epoch, stamp, group, me, data + (epoch & 1).to(tl.int64) * half, flags


@triton.jit
def end(signals, epochs, epoch, group, WORLD_SIZE: tl.constexpr):
    """End a call: advance the epoch."""
    il.clear_old(il.pointer(signals, tl.int32), 4096 * 2 * 2 * WORLD_SIZE, epoch, group)
    il.advance_epoch(epochs, epoch)


@triton.jit
def send(slots, i, value, me, group, WORLD_SIZE: tl.constexpr, COUNT: tl.constexpr, mask=None):
    """Put a tile into this rank's slot of ``COUNT`` elements on every peer, the next one first."""
    for step in tl.static_range(1, WORLD_SIZE):
        il.put(slots + me * COUNT + i, value, (me + step) % WORLD_SIZE, group, mask)


@triton.jit
def received(slots, i, own, arrived, source: tl.constexpr, me, group, COUNT: tl.constexpr, mask):
    """Return what ``source`` has sent, as float32: ``own`` where that is this rank."""
    value = il.get(slots + source * COUNT + i, me, group, mask & (source != me), 0.0)
    value = tl.where(source == me, own.to(tl.float32), value.to(tl.float32))
    return il.nan_unless(arrived.to(tl.int32), value)


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
    end(signals, epochs, epoch, group, WORLD_SIZE)


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
    item = x.element_size()
    a, b, c = sizes
    word = math.gcd(8, *(n * item for n in (c, *x_strides, *y_strides)))
    if (x.data_ptr() | y.data_ptr()) % word:
        word = item
    scale = [n * item // word for n in (*x_strides, *y_strides)]
    count = a * b * c * item // word
    programs, block = programs_for(count, word)
    ranks = dist.get_world_size(group)
    run(
        move_kernel, programs, ranks * count * word, x, y, group=group,
        PEER_X=scale[0], A_X=scale[1], B_X=scale[2], PEER_Y=scale[3], A_Y=scale[4], B_Y=scale[5],
        COUNT=count, B=b, C=c * item // word, ROOT=root, INTO=into, WORD=_WORDS[word], BLOCK=block,
    )  # fmt: skip
    return y


def all_gather(
    x: torch.Tensor, dim: int = 0, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Concatenate the ranks' contiguous tensors of equal shape along a dimension."""
    ranks = dist.get_world_size(group)
    shape, outer = list(x.shape), math.prod(x.shape[:dim])
    shape[dim] *= ranks
    run_length = x.numel() // outer
    strides = (0, run_length, 0), (run_length, ranks * run_length, 0)
    return move(x, x.new_empty(shape), (outer, 1, run_length), *strides, group=group)


def all_to_all(
    x: torch.Tensor, split: int, cat: int, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Cut a contiguous tensor into one piece per rank along ``split``; concatenate what arrives
    along ``cat``.
    """
    ranks, shape = dist.get_world_size(group), list(x.shape)
    shape[split] //= ranks
    low, high = min(split, cat), max(split, cat)
    before, between = math.prod(shape[:low]), math.prod(shape[low + 1 : high])
    after, a, b = math.prod(shape[high + 1 :]), shape[low], shape[high]
    whole = a * between * b * after  # a piece, per index of the dimensions before
    if split == cat:
        sizes, x_strides = (before, 1, a * after), (a * after, ranks * a * after, 0)
        y_strides = x_strides
    elif split < cat:
        sizes, x_strides = (before, a * between, b * after), (whole, ranks * whole, b * after)
        y_strides = (b * after, ranks * whole, ranks * b * after)
    else:
        sizes, x_strides = (
            (before, a * between, b * after), (b * after, ranks * whole, ranks * b * after),
        )  # fmt: skip
        y_strides = (whole, ranks * whole, b * after)
    shape[cat] *= ranks
    return move(x, x.new_empty(shape), sizes, x_strides, y_strides, group=group)


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
    end(signals, epochs, epoch, group, WORLD_SIZE)


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
    ranks, count = dist.get_world_size(group), y.numel()
    programs, block = programs_for(count, x.element_size())
    run(
        sum_kernel, programs, ranks * count * x.element_size(), x, y, group=group, COUNT=count,
        PEER_X=count if scatter else 0, INTO=into, BLOCK=block, DTYPE=DTYPES[x.dtype],
    )  # fmt: skip
    return y


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum the ranks' contiguous tensors."""
    return add(x, torch.empty_like(x), group=group)


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum the ranks' contiguous tensors; return this rank's part of the first dimension."""
    y = x.new_empty((x.shape[0] // dist.get_world_size(group), *x.shape[1:]))
    return add(x, y, scatter=True, group=group)
