"""Launch arguments that the kernels around a product share."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from interlace.comm import MAX_PROGRAMS, Group
from interlace.comm.groups.group import Workspace
from interlace.comm.groups.outputs import Destination, Output, destination_of, kept, taking_output
from interlace.comm.groups.reservation import Reservation, WorkspaceSize
from interlace.comm.launching.kernels import (
    CPU_PROGRAMS,
    Launch,
    addressable,
    capability,
    describe_matrix,
    describe_ranks,
    processors,
    triton_dtype,
)
from interlace.comm.launching.within_node import WithinNode
from interlace.comm.replay import tapes
from interlace.comm.replay.deferred import DeferredCall, first
from interlace.comm.replay.replays import AgainCall
from interlace.gemm.call import GemmCall
from interlace.gemm.config import GemmConfig
from interlace.gemm.kernels import layout
from interlace.gemm.operands import ALIGNMENT_BYTES, Operands, contiguous_dimension
from interlace.units import ceil_div, round_up

_DESCRIPTOR_CAPABILITY = (9, 0)
# Throughput of one SM of an H200 that computes and sends tiles (decision 0009).
_FLOP_PER_NS = 5600


def programs(group: Group, config: GemmConfig) -> int:
    """Return the number of programs to launch: one per SM, or fewer if ``config`` says so."""
    if group.backend == "cpu":
        return min(config.max_programs or MAX_PROGRAMS, CPU_PROGRAMS)
    processor_count = processors(group.device)
    return min(config.max_programs or processor_count, processor_count, MAX_PROGRAMS)


def spread_ns(config: GemmConfig, inner: int) -> int:
    """Return the nanoseconds over which programs begin; see ``GemmConfig.stagger``."""
    return tile_ns(config.block_m, config.block_n, inner) * config.stagger // 100


def tile_ns(block_m: int, block_n: int, inner: int) -> int:
    """Return the nanoseconds that a program takes for a tile, roughly."""
    return 2 * block_m * block_n * inner // _FLOP_PER_NS


@functools.cache
def moves_tiles(device: torch.device) -> bool:
    """Return whether a device moves tiles through tensor descriptors; ``meta`` stands for a GPU
    that does.
    """
    return device.type == "meta" or (
        device.type == "cuda"
        and torch.version.hip is None
        and capability(device) >= _DESCRIPTOR_CAPABILITY
    )


def operand_arguments(
    operands: Operands, config: GemmConfig, descriptors: bool, leaves: int = 0
) -> dict[str, Any]:
    """Return the arguments of a kernel that depend on its operands alone, by name.

    Args:
        operands: As :meth:`Operands.for_kernel` returns them.
        descriptors: Whether the kernel loads x and w as tiles through tensor descriptors.
        leaves: As a ``GemmCall`` has them.
    """
    from interlace.gemm.kernels.tiles import Scales

    x, w = operands.x, operands.w
    x_stride, w_stride = _strides(operands)
    if descriptors:
        x = describe_matrix(x, x_stride, [config.block_m, config.block_k], leaves)
        if contiguous_dimension(w) == 1:
            w = describe_matrix(w, w_stride, [config.block_n, config.block_k], leaves)
        else:
            w = describe_matrix(w.T, w_stride, [config.block_k, config.block_n], leaves, 0)
    return {
        "x": x,
        "w": w,
        "bias": operands.bias,
        "scales": Scales(
            operands.x_scale,
            operands.w_scale,
            scale_stride(operands.x_scale),
            scale_stride(operands.w_scale),
        ),
        "x_stride": x_stride,
        "w_stride": w_stride,
        "N": operands.columns,
        "K": operands.inner,
    }


def _strides(operands: Operands) -> tuple[int, int]:
    """Return the elements between two rows of x, and between two of w, or two columns of a weight
    that is contiguous along N.
    """
    return row_stride(operands.x), row_stride(operands.w, contiguous_dimension(operands.w) or 0)


def scale_stride(scale: torch.Tensor | None) -> int:
    """Return 1 for a scale per row, 0 for one of the whole matrix."""
    return 0 if scale is None or scale.numel() == 1 else 1


def constants(
    operands: Operands,
    config: GemmConfig,
    group: Group,
    *,
    descriptors: bool,
    tile_stores: bool,
    in_rank_order: bool = False,
    leaves: int = 0,
) -> dict[str, Any]:
    """Return the constants that every kernel with a product has.

    Args:
        descriptors: Whether the kernel loads x and w as tiles through tensor descriptors.
        tile_stores: Whether the result's tiles leave by copies out of shared memory.
        in_rank_order: Whether a sum has the same bits whichever rank computes it.
        leaves: As a ``GemmCall`` has them.
    """
    from interlace.gemm.kernels.tiles import Sending, Tiling

    dtype = triton_dtype(operands.out_dtype).name
    return {
        "SENDING": Sending(
            world_size=group.world_size,
            dtype=dtype,
            align=ALIGNMENT_BYTES // operands.out_dtype.itemsize,
            tile_stores=tile_stores,
            interleave=config.interleave,
            in_rank_order=in_rank_order,
            in_tree=leaves > 0,
        ),
        "TILING": Tiling(
            block_m=config.block_m,
            block_n=config.block_n,
            block_k=config.block_k,
            group_m=config.group_m,
            descriptors=descriptors,
            w_along_k=operands.w_along_k,
            # Kernels compile the same for all sizes (``do_not_specialize``), so Triton tells the
            # compiler nothing of them, and would store every element by itself.
            factor=math.gcd(16, operands.columns, operands.inner, *_strides(operands)),
            leaves=max(leaves, 1),
            node=dtype,
            block_scales="x" if operands.has_block_scales else "",
        ),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def describe_own(y: torch.Tensor, columns: int, block: list[int]) -> Any:
    """Return a tensor descriptor of this rank's result as ``[0, 0, 0, row, column]``, so that its
    tiles have as many dimensions as tiles sent to peers.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    # A descriptor must have elements, and a rank may have no rows.
    rows, stride = max(y.shape[0], 1), y.shape[1]
    strides = [rows * stride] * 3 + [stride, 1]
    return TensorDescriptor(
        addressable(y, stride), [1, 1, 1, rows, columns], strides, [1, 1, 1, *block]
    )


_MOST_WAITING = 64
"""Numbers of a tile per thread, beside which all sums of a tree of four leaves fit in registers."""


def describe_waiting(
    group: Group, operands: Operands, config: GemmConfig, leaves: int, tiles: bool
) -> Any:
    """Return a tensor descriptor of new memory in which sums of several leaves of K wait, as
    ``add_to_tree`` takes it; None if they wait in registers: of two leaves one sum waits, which
    fits beside any tile that fits without.

    Args:
        leaves: As a ``GemmCall`` has them.
        tiles: Whether the kernel moves tiles through tensor descriptors.
    """
    numbers = config.block_m * config.block_n // (32 * config.num_warps)
    if not tiles or leaves <= 2 or numbers <= _MOST_WAITING:
        return None
    rows = 2 * config.block_m * programs(group, config)
    memory = operands.x.new_empty((rows, config.block_n), dtype=operands.out_dtype)
    return describe_own(memory, config.block_n, [config.block_m, config.block_n])


def padded_columns(columns: int, dtype: torch.dtype) -> int:
    """Return the elements from one row of a result to the next, so that a descriptor can address
    every row.
    """
    return round_up(columns, ALIGNMENT_BYTES // dtype.itemsize)


def without_padding(y: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the first columns of a result ``[rows, padded columns]``: itself where there are no
    others, else a copy, also of one row, as a view could not be changed in place by what autograd
    records.
    """
    if y.shape[1] == columns:
        return y
    return y[:, :columns].clone(memory_format=torch.contiguous_format)


def row_stride(matrix: torch.Tensor, dimension: int = 1) -> int:
    """Return the elements from one row to the next of a matrix whose rows are contiguous, or, with
    ``dimension`` 0, from one column to the next.

    A matrix with a single row has no such stride; an aligned one that a descriptor accepts is
    returned instead.
    """
    count = matrix.shape[1 - dimension]
    if count > 1:
        return matrix.stride(1 - dimension)
    return padded_columns(max(matrix.shape[dimension], 1), matrix.dtype)


def output_bytes(most_rows: int, columns: int, dtype: torch.dtype) -> int:
    """Return the bytes of a buffer in which peers store rows, of the rank that has most."""
    return most_rows * padded_columns(columns, dtype) * dtype.itemsize


PreparePeers = Callable[[Group, Operands, Destination], Launch]
"""Returns the launch of a kernel whose rows go into buffers, which are padded for descriptors."""


def run_into_peers(
    group: Group,
    given: Operands,
    rows: int,
    columns: int,
    nbytes: int,
    key: tuple[Hashable, ...],
    prepare: PreparePeers,
) -> DeferredCall | torch.Tensor:
    """Return the work of a kernel that stores each row in its owner's result; its own result is
    this rank's, ``[rows, columns]``. Collective when the group's output buffers must grow.

    Args:
        given: The call's operands.
        nbytes: The bytes of the largest result of any rank, for which every rank's buffer has room;
            see :func:`output_bytes`.
        key: What the launch depends on, beside the addresses of operands and result.
        prepare: Returns the launch, given operands as :meth:`Operands.for_kernel` returns them. It
            refers to no group and no operand where calls are found by their form.
    """
    operands, dtype = given.for_kernel(), given.out_dtype
    shape = [rows, padded_columns(columns, dtype)]
    if group.world_size == 1:
        y = operands.x.new_empty(shape, dtype=dtype)
        launch = prepare(group, operands, Destination(y.data_ptr(), 0, 0))
        with group.running():
            launch()
        return without_padding(y, columns)

    # Peers store tiles straight into the result, so it is symmetric memory.
    take = taking_output(nbytes, shape, dtype)
    result = functools.partial(output_rows, columns=columns)
    launches: list[Launch] = []

    def prepare_launch(output: Output, y: torch.Tensor) -> Callable[[], None]:
        def enqueue() -> None:
            launches.append(prepare(group, operands, output.destination))
            launches[-1]()

        return enqueue

    def again() -> AgainCall | None:
        # A call that was a graph has launched nothing.
        relaunch = launches[-1].again() if launches and operands is given else None
        if relaunch is None:
            return None
        return functools.partial(_run_into_peers_again, prepare, relaunch, take, result, dtype)

    return DeferredCall(
        (*key, operands.memory()),
        take,
        prepare_launch,
        result,
        where=destination_of,
        is_of_operands=operands is given,
        again=again,
    )


def _run_into_peers_again(
    prepare: PreparePeers,
    relaunch: Callable[[int, Mapping[str, Any]], None],
    take: Callable[[Group], tuple[Output, torch.Tensor]],
    result: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    group: Group,
    _: Hashable,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Run a call like an earlier one of :func:`run_into_peers`, by the kernel that it compiled."""
    output, y = take(group)
    launch = prepare(group, Operands(x, w, bias, None, None, dtype), output.destination)
    with group.launching():
        relaunch(launch.grid[0], launch.arguments)
    return result(output, y)


def output_rows(output: Output, y: torch.Tensor, *, columns: int) -> torch.Tensor:
    """Return the result ``[rows, columns]`` in a buffer, or copied from one that is not lent."""
    return kept(output, y) if y.shape[1] == columns else without_padding(y, columns)


@dataclasses.dataclass(frozen=True)
class PartSlots:
    """The slots in which parts arrive before they are summed, ``[rank, half, source, row,
    column]``, and their signals.

    Attributes:
        workspace: The operator's workspace, which holds slots and signals.
        tiles: A tensor descriptor of the slots; None without descriptors.
        per_source: The number of signals of one source.
        routes: ``[ranks][ROUTE]`` on the device.
    """

    workspace: Workspace
    tiles: Any
    per_source: int
    routes: torch.Tensor


def slots_size(
    operator: str,
    rows: Sequence[int],
    columns: int,
    dtype: torch.dtype,
    config: GemmConfig,
) -> WorkspaceSize:
    """Return the size of the workspace with the slots for ``rows`` of each rank."""
    most_rows, stride, ranks = max(rows), padded_columns(columns, dtype), len(rows)
    count = ceil_div(most_rows, config.block_m) * ceil_div(columns, config.block_n)
    # Every rank asks for the slots of the rank that has most rows, so that all agree on the size.
    nbytes = max(4096, ranks * most_rows * stride * dtype.itemsize)
    return WorkspaceSize(operator, nbytes, layout.HEADER + ranks * count)


def slots_for(
    group: Group,
    operator: str,
    rows: Sequence[int],
    columns: int,
    dtype: torch.dtype,
    config: GemmConfig,
    tiles: bool,
) -> PartSlots:
    """Return slots for ``rows`` of each rank. Collective when the workspace must grow."""
    most_rows, stride, ranks = max(rows), padded_columns(columns, dtype), group.world_size
    workspace = group.workspace(*slots_size(operator, rows, columns, dtype, config))
    routes = group.cache.tables.on_device(
        [(sum(rows[:rank]), rows[rank], 0) for rank in range(ranks)]
    )
    descriptor = None
    if tiles:
        # The dimensions are rank, half, source, row and column; the stride of the rank is the
        # group's.
        sizes = [
            (2, workspace.half_bytes // dtype.itemsize),
            (ranks, most_rows * stride),
            (most_rows, stride),
            (columns, 1),
        ]
        descriptor = describe_ranks(
            group, workspace.data.address, dtype, sizes, [config.block_m, config.block_n]
        )
    return PartSlots(
        workspace, descriptor, (workspace.signal_count - layout.HEADER) // ranks, routes
    )


@functools.lru_cache(maxsize=1024)  # asked for in every call
def lamport_size(operator: str, impl: str, slot_bytes: int, ranks: int) -> WorkspaceSize:
    """Return the size of the workspace of a kernel whose values travel by Lamport's protocol.

    Args:
        slot_bytes: Bytes that a rank sends to each.
    """
    from interlace.gemm.kernels.lamport import HEADER_WORDS

    return WorkspaceSize(f"{operator}.{impl}", 8 * HEADER_WORDS + ranks * slot_bytes)


def lamport_reservation(call: GemmCall, impl: str, slot_bytes: int) -> Reservation:
    """Return the symmetric memory of such a kernel; see :func:`lamport_size`."""
    size = lamport_size(call.operator.name, impl, slot_bytes, call.group.world_size)
    return Reservation((size,))


def lamport_arguments(
    group: Group | WithinNode, operator: str, impl: str, slot_bytes: int, mark: int
) -> dict[str, Any]:
    """Return the arguments of a kernel whose values travel by Lamport's protocol, by name.

    Collective when the memory must grow.

    Args:
        group: The group of the call.
        operator: The operator's name.
        impl: The implementation, whose memory is for its values alone.
        slot_bytes: Bytes that a rank sends to each.
        mark: The number from ``Group.agree``.
    """
    size = lamport_size(operator, impl, slot_bytes, group.world_size)
    return word_arguments(group, size, operator, mark)


def word_arguments(
    group: Group | WithinNode, size: WorkspaceSize, operator: str, mark: int
) -> dict[str, Any]:
    """Return the arguments of a kernel whose values travel as words that carry their arrival.

    Args:
        group: The group of the call.
        size: The kernel's workspace.
        operator: The name in the deadline's error.
        mark: The number from ``Group.agree``.
    """
    workspace, context = group.workspace(*size), group.context(operator)
    tapes.keep(workspace.epochs, context)
    return {
        "words": workspace.data.address,
        "epochs": workspace.epochs,
        "ctx": context,
        "call": mark,
        "half": workspace.half_bytes // 8,
    }


class KernelOfWords:
    """A kernel whose values travel as words that carry their arrival. A call enqueues it on the
    current stream, and must happen within ``Group.running``.

    Attributes:
        launch: The launch; None before the first call.
    """

    def __init__(
        self,
        group: Group | WithinNode,
        find: Callable[[Any], dict[str, Any]],
        describe: Callable[[dict[str, Any]], Launch],
    ) -> None:
        """Prepare a launch. Collective when the workspace must grow.

        Args:
            group: The ranks.
            find: Returns the arguments that say where words travel, by name, given the group:
                :func:`lamport_arguments` or :func:`word_arguments`. It must refer to no group.
            describe: Returns the launch, given those.
        """
        self._find, self._memory, self._describe = find, find(group), describe
        self.launch: Launch | None = None

    def __call__(self) -> None:
        self.launch = self._describe(self._memory)
        self.launch()

    def compile(self) -> Any:
        """Return Triton's compiled kernel, without running it."""
        return self._describe(self._memory).compile()

    def again(
        self,
        names: Sequence[str],
        take: Callable[[Any], tuple[Any, ...]],
        run: Callable[..., None],
        result: Callable[..., Any] = first,
        *,
        reads_in_place: bool = False,
    ) -> AgainCall | None:
        """Return what makes calls of other operands with such a kernel, past its description; None
        where none has run on a GPU. It is collective when the workspace must grow, and refers to no
        group and no operand of this call.

        Args:
            names: The names of the kernel's parameters that get other values.
            take: Returns a call's new memory, given the group.
            run: Enqueues a call's work, given what enqueues the kernel with those values by name,
                the memory and the operands. It must refer to no group and no operand either.
            result: Returns a call's result, given its memory.
            reads_in_place: Whether another implementation may run where x is symmetric memory.
        """
        relaunch = None if self.launch is None else self.launch.again()
        if self.launch is None or relaunch is None:
            return None
        (programs,), find = self.launch.grid, self._find
        kept = {
            name: value
            for name, value in self.launch.arguments.items()
            if name not in names and name not in self._memory
        }

        # Beside what differs, tensors of a kernel are tables that the group keeps.
        tables = [value for value in kept.values() if isinstance(value, torch.Tensor)]

        def again(group: Group, _: Hashable, *operands: torch.Tensor | None) -> Any:
            tapes.keep(*tables)
            memory = take(group)
            # Looked up each time: peers that replay a capture may use an older workspace.
            arguments = kept | find(group)

            def enqueue(**others: Any) -> None:
                relaunch(programs, arguments | others)

            with group.launching():
                run(enqueue, memory, *operands)
            found = result(*memory)
            group.has_recorded(reads_in_place=reads_in_place)
            return found

        return again
