"""``fuse`` makes the stores of a producer that takes ``out=`` part of a collective."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from interlace.comm import group_of
from interlace.comm.groups.symmetric import require_dtype, sizes_of
from interlace.comm.runtime.dlpack import tensor_at
from interlace.errors import ArgumentError
from interlace.mapped.layout import SUM_PIECES, chunk_of, received_pieces, waiting_pieces
from interlace.mapped.output import MappedOutput
from interlace.mapped.triggered import TriggeredTransfers

COLLECTIVES = ("all_to_all", "reduce_scatter", "all_reduce", "gather", "scatter")
TRANSPORTS = ("stores", "copy_engine")
_ROOTED = ("gather", "scatter")
_SUMMABLE = (torch.float16, torch.bfloat16, torch.float32)


def memory_of(
    collective: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    transport: str,
    ranks: int,
    granularity: int,
) -> list[tuple[int, int]]:
    """Return the symmetric memory that :func:`fuse` allocates beside signals: bytes and number of
    its pieces, each of which is a multiple of ``granularity``. For collectives without a root.

    Raises:
        ArgumentError: More than half would be padding.
    """
    owner = MappedOutput if transport == "stores" else TriggeredTransfers
    nbytes = chunk_of(owner.__name__, shape, dtype.itemsize, ranks, granularity).nbytes
    pieces = [(nbytes, received_pieces(ranks))]
    if transport == "copy_engine" and ranks > 1:
        pieces.append((nbytes, waiting_pieces(ranks)))
    if collective == "all_reduce":
        pieces.append((math.prod(shape) * dtype.itemsize, SUM_PIECES))
    return pieces


class Fused:
    """A producer whose stores are the first half of a collective; made by :func:`fuse`.

    Attributes:
        output: The mapped output that the producer writes; :class:`TriggeredTransfers` for
            ``transport="copy_engine"``.
    """

    def __init__(
        self,
        producer: Callable[..., Any],
        collective: str,
        shape: tuple[int, ...],
        root: int,
        output: MappedOutput,
    ) -> None:
        # The result has the shape of the output, without the padding of its memory.
        self.shape, self.output = shape, output
        self.producer, self.collective, self.root = producer, collective, root
        ranks = output.group.world_size
        self._parts = shape if len(shape) != 2 else (ranks, shape[0] // ranks, shape[1])
        self._sums, self._gives_views = None, False
        output.collects = collective in ("reduce_scatter", "all_reduce")
        if collective == "all_reduce":
            nbytes = math.prod(shape) * output.dtype.itemsize
            self._sums = output.group.allocate(nbytes, SUM_PIECES)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the producer, and the rest of the collective. Collective; the host does not wait.

        Returns:
            all_to_all: ``[M, N]``, rows in the order of the ranks that made them (``[R, ...]`` for
            such a shape). gather: ``[R, ...]`` on the root, without elements elsewhere. scatter:
            the part that the root made for this rank. These are memory that the call after the next
            one writes again; clone a result unless it is read on this stream before the next call.
            reduce_scatter: ``[M/R, N]``, a new tensor. all_reduce: ``[M, N]``, memory that the call
            after the next one writes again. Sums are float32, in rank order.
        """
        if self.collective == "all_to_all" and self.output.collects:
            raise ArgumentError(
                "fuse: an all_to_all whose calls are run_into must not be called for views. Make "
                "another."
            )
        # A captured output whose epochs end by a copy keeps its half, and one whose epochs end by a
        # view does not, so an output serves one kind of call.
        self._gives_views = True
        return self._run(None, args, kwargs)

    def run_into(self, result: torch.Tensor, *args: Any) -> None:
        """Run an all_to_all or a sum into ``result``, contiguous, which no later call changes.

        Raises:
            ArgumentError: An all_to_all was called for a view before, the collective has a root, or
                ``result`` cannot hold its result.
        """
        if self.collective in _ROOTED:
            raise ArgumentError(f"fuse: a {self.collective} cannot be run_into. Call it.")
        ranks, device = self.output.group.world_size, self.output.group.device
        elements = math.prod(self.shape) // (ranks if self.collective == "reduce_scatter" else 1)
        got = result.numel(), result.dtype, result.device.type
        # The kernel has an address alone, and would write beyond another tensor.
        if got != (elements, self.output.dtype, device.type) or not result.is_contiguous():
            raise ArgumentError(
                f"fuse: result must be contiguous, with {elements} elements of {self.output.dtype} "
                f"on {device}; got shape {list(result.shape)} and strides "
                f"{list(result.stride())} of {result.dtype} on {result.device}."
            )
        if self.collective == "all_to_all" and self._gives_views:
            raise ArgumentError(
                "fuse: an all_to_all that was called for views must not be run_into. Make another."
            )
        self.output.collects = True
        self._run(result, args, {})

    def _run(
        self, result: torch.Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        group, turn = self.output.group, self.output.turn
        target = self.output.begin()
        if isinstance(self.output, TriggeredTransfers):
            counts = self.output.counters.numel() > 0
            kwargs |= {"counters": self.output.counters} if counts else {"send": self.output.send}
        # Only the root produces what is scattered; the epoch is every rank's.
        if self.collective != "scatter" or group.rank == self.root:
            sizes, strides = target.shape, target.stride()
            try:
                # A producer may launch kernels, which run on the current GPU.
                with group.on_device():
                    self.producer(*args, **kwargs, out=target)
                if target.shape != sizes:
                    _refuse_shape(target, sizes, strides)
            except BaseException:  # The next call is another epoch.
                self.output.abandon()
                if target.shape != sizes:
                    _refuse_shape(target, sizes, strides)
                raise
        match self.collective:
            case "gather":
                received = self.output.exchange()
                return received if group.rank == self.root else received[:0]
            case "scatter":
                return self.output.exchange()[self.root]
            case "reduce_scatter":
                result = target.new_empty(self._parts[1:]) if result is None else result
                return self.output.collect("sum", result)
            case "all_reduce":
                result = self._sums_of(turn) if result is None else result
                return self.output.collect("sum_for_all", result, self._sums)
            case _ if result is not None:
                return self.output.collect("copy", result)
            case _:
                received = self.output.exchange()
                return received.flatten(0, 1) if len(self.shape) == 2 else received

    def _sums_of(self, turn: int) -> torch.Tensor:
        """Return the tensor that the sums of all ranks arrive in.

        The call after the next one writes it again.
        """
        assert self._sums is not None
        group, (ranks, rows, columns) = self.output.group, self._parts
        address = self._sums.address + turn * (self._sums.nbytes // 2) + group.rank * group.stride
        shape, dtype = (ranks * rows, columns), self.output.dtype
        return tensor_at(address, shape, dtype, group.device, self._sums)


def _refuse_shape(target: torch.Tensor, sizes: torch.Size, strides: tuple[int, ...]) -> NoReturn:
    """Restore and refuse an output that a producer has resized, as torch's functions do.

    Raises:
        ArgumentError: Always.
    """
    got = tuple(target.shape)
    target.as_strided_(sizes, strides)
    raise ArgumentError(
        f"fuse: shape must be that of the producer's output; got {tuple(sizes)} for an output "
        f"{got}. Make another for this shape, on every rank."
    ) from None


def fuse(
    producer: Callable[..., Any],
    collective: str,
    *,
    shape: Sequence[int],
    dtype: torch.dtype,
    order: str = "natural",
    root: int = 0,
    transport: str = "stores",
    tiles: int | Sequence[int] | None = None,
    pieces: int = 1,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> Fused:
    """Make the stores of any producer the first half of a collective. Collective; every rank gives
    the same arguments.

    The producer is not changed: its output is memory of the ranks that need it. No autograd: it has
    to write to ``out``.

    Args:
        producer: Called with the arguments of the result, and ``out=``: ``torch.mm``,
            ``torch.bmm``, a function that launches your kernel, a compiled graph. It must write
            every element of ``out`` and only store there.
        collective: ``"all_to_all"``, ``"reduce_scatter"``, ``"all_reduce"`` (sums), ``"gather"``
            (to ``root``), ``"scatter"`` (from ``root``, whose producer alone is called).
        shape: Shape of the producer's output: ``(M, N)``, M / R rows for each rank, or ``(R,
            ...)``, for sums ``(R, M/R, N)``; any shape for gather.
        dtype: Element type of the output; for sums float16, bfloat16 or float32.
        order: See :class:`MappedOutput`; the producer's rows must be in that order.
        transport: ``"stores"``: the producer's own stores go to the peers. ``"copy_engine"``: it
            stores to memory of this rank, and copies take each part away once it is complete; see
            :class:`TriggeredTransfers`. It then also gets ``send=``, to be called with each part
            that it has completed, or, with tiles, ``counters=``. Not for gather and scatter.
        tiles, pieces: See :class:`TriggeredTransfers`.
        group, device: See :class:`MappedOutput`.

    Returns:
        A callable that returns the collective's result; see :meth:`Fused.__call__`.

    Raises:
        ArgumentError: The collective, the transport, the shape or the dtype do not fit; or any
            error of :class:`MappedOutput` and :class:`TriggeredTransfers`. A call raises it as
            well, on the rank whose producer's output has another shape.
        RankMismatchError: Ranks differ in the collective, the transport or the root, or in an
            argument of these outputs.

    Example:
        >>> shape, dtype = (4096, 4096), torch.bfloat16
        >>> product = interlace.fuse(torch.mm, "reduce_scatter", shape=shape, dtype=dtype)
        >>> y = product(x, w.T)  # on each rank [4096 / R, 4096]: the sum over ranks of x @ w.T
    """
    if collective not in COLLECTIVES:
        raise ArgumentError(
            f"fuse: collective must be one of {', '.join(COLLECTIVES)}; got {collective!r}."
        )
    if not callable(producer):
        raise ArgumentError(f"fuse: producer must be a function that takes out=; got {producer!r}.")
    sizes = sizes_of("fuse", shape)
    require_dtype("fuse", dtype)
    if collective in ("reduce_scatter", "all_reduce") and (
        dtype not in _SUMMABLE or len(sizes) not in (2, 3)
    ):
        raise ArgumentError(
            f"fuse: {collective} must have a shape (M, N) or (R, M/R, N), and float16, "
            f"bfloat16 or float32; got {sizes} of {dtype}."
        )
    if transport not in TRANSPORTS:
        raise ArgumentError(
            f"fuse: transport must be one of {', '.join(TRANSPORTS)}; got {transport!r}."
        )
    if transport == "copy_engine" and collective in _ROOTED:
        raise ArgumentError(f"fuse: {collective} must have transport 'stores'; got 'copy_engine'.")
    if transport == "stores" and tiles is not None:
        raise ArgumentError(
            f"fuse: tiles must be given with transport='copy_engine' only; got tiles {tiles}."
        )
    owner = group_of(group, device)
    if collective == "scatter" and root not in range(owner.world_size):
        raise ArgumentError(
            f"fuse: root must be a rank of the group, 0 to {owner.world_size - 1}; got {root!r}."
        )
    agreed_root = root if collective in _ROOTED else -1
    owner.agree("fuse", collective=collective, transport=transport, root=agreed_root)
    options: dict[str, Any] = {"dtype": dtype, "order": order, "group": group, "device": device}
    output: MappedOutput
    if transport == "stores":
        output = MappedOutput(sizes, root=root if collective == "gather" else None, **options)
    else:
        output = TriggeredTransfers(sizes, tiles=tiles, pieces=pieces, **options)
    return Fused(producer, collective, sizes, root, output)
