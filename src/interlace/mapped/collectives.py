"""``fuse``: a producer that takes ``out=``, and the collective that its stores become."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm.dlpack import bytes_at, view_as
from interlace.comm.interpreter import require
from interlace.comm.kernels import Launch, triton_dtype
from interlace.errors import ArgumentError
from interlace.mapped.output import OPERATOR, MappedOutput
from interlace.mapped.triggered import TriggeredTransfers
from interlace.units import ceil_div

COLLECTIVES = ("all_to_all", "reduce_scatter", "all_reduce", "gather", "scatter")
TRANSPORTS = ("stores", "copy_engine")
_ROOTED = ("gather", "scatter")
_SUMMABLE = (torch.float16, torch.bfloat16, torch.float32)


class Fused:
    """A producer whose stores are the first half of a collective; made by :func:`fuse`.

    Attributes:
        output: the mapped output that the producer writes; :class:`TriggeredTransfers` for one that counts.
    """

    def __init__(
        self,
        producer: Callable[..., Any],
        collective: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        order: str,
        root: int,
        transport: str,
        tiles: int | Sequence[int] | None,
        pieces: int,
        group: dist.ProcessGroup | None,
        device: torch.device | str | None,
    ) -> None:
        if collective not in COLLECTIVES:
            raise ArgumentError(f"fuse: collective must be one of {', '.join(COLLECTIVES)}; got {collective!r}.")
        if collective in ("reduce_scatter", "all_reduce") and (dtype not in _SUMMABLE or len(shape) not in (2, 3)):
            raise ArgumentError(
                f"fuse: {collective} must have a shape (M, N) or (R, M/R, N), and float16, bfloat16 or float32; got {tuple(shape)} "
                f"of {dtype}."
            )
        if transport not in TRANSPORTS:
            raise ArgumentError(f"fuse: transport must be one of {', '.join(TRANSPORTS)}; got {transport!r}.")
        if transport == "copy_engine" and collective in _ROOTED:
            raise ArgumentError(f"fuse: {collective} must have transport 'stores'; got 'copy_engine'.")
        if transport == "stores" and tiles is not None:
            raise ArgumentError(f"fuse: tiles must be given with transport='copy_engine' only; got tiles {tiles}.")
        self.producer, self.collective, self.root = producer, collective, root
        self.output: MappedOutput
        if transport == "stores":
            to = root if collective == "gather" else None
            self.output = MappedOutput(shape, dtype=dtype, order=order, root=to, group=group, device=device)
        else:
            self.output = TriggeredTransfers(
                shape, dtype=dtype, tiles=tiles, pieces=pieces, order=order, group=group, device=device
            )  # fmt: skip
        self.shape = tuple(int(size) for size in shape)
        self._sums = None
        if collective == "all_reduce":
            self._sums = self.output.group.allocate(math.prod(self.shape) * dtype.itemsize, 2)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the producer, and the rest of the collective. Collective; the host does not wait.

        Returns:
            all_to_all: ``[M, N]``, rows in the order of the ranks that made them (``[R, ...]`` for such a shape). gather:
            ``[R, ...]`` on the root, of no elements elsewhere. scatter: what the root made for this rank. These are memory that
            the call after the next one writes again; clone what is to stay, unless it is read on this stream before the next
            call.
            reduce_scatter: ``[M/R, N]``, a new tensor. all_reduce: ``[M, N]``, memory as above. Sums are float32, in rank order.
        """
        return self._run(None, args, kwargs)

    def run_into(self, result: torch.Tensor, *args: Any) -> None:
        """The same for all_to_all and sums, with the result in ``result``, contiguous, which stays as it is."""
        self._run(result, args, {})

    def _run(self, result: torch.Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        group, half = self.output.group, self.output.half
        target = self.output.begin()
        if isinstance(self.output, TriggeredTransfers):
            counts = self.output.counters.numel() > 0
            kwargs |= {"counters": self.output.counters} if counts else {"send": self.output.send}
        if self.collective != "scatter" or group.rank == self.root:
            try:
                self.producer(*args, **kwargs, out=target)
            except BaseException:  # the next call is another epoch
                self.output.abandon()
                raise
        received = self.output.exchange()
        match self.collective:
            case "gather":
                return received if group.rank == self.root else received[:0]
            case "scatter":
                return received[self.root]
            case "reduce_scatter":
                return self._sum(received, half, received.new_empty(received.shape[1:]) if result is None else result)
            case "all_reduce":
                y = self._sum(received, half, None)
            case _:
                y = received.flatten(0, 1) if len(self.shape) == 2 else received
        return y if result is None else result.view(y.shape).copy_(y)

    def _sum(self, received: torch.Tensor, half: int, result: torch.Tensor | None) -> torch.Tensor:
        """The sum over ranks, in ``result`` or, of an all-reduce, in memory that the call after the next one writes."""
        group, (ranks, rows, columns) = self.output.group, received.shape
        if self._sums is None:
            assert result is not None
            address, first = result.data_ptr(), 0
        else:
            nbytes = math.prod(self.shape) * received.dtype.itemsize
            address, first = self._sums.address + half * (self._sums.nbytes // 2), group.rank * rows
            raw = bytes_at(address + group.rank * group.stride, (nbytes,), (1,), group.device, self._sums)
            result = view_as(raw, (ranks * rows, columns), received.dtype)
        require(group.backend)
        from interlace.mapped import kernel

        block = (4, 1024)
        tiles = ceil_div(rows, block[0]) * ceil_div(columns, block[1])
        with group.running():
            arguments = (
                received, address, group.context(OPERATOR), first, rows, columns, received.stride(0), received.stride(1),
                result.stride(0),
            )  # fmt: skip
            constants = {
                "WORLD_SIZE": ranks, "BROADCAST": self._sums is not None, "DTYPE": triton_dtype(received.dtype),
                "ROWS": block[0], "COLS": block[1],
            }  # fmt: skip
            Launch(kernel.sum_slots, (max(1, min(tiles, 8 if group.backend == "cpu" else 2048)),), arguments, constants)()
        if self._sums is not None:
            self.output.meet()
        return result


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
    """Make the stores of any producer the first half of a collective. Collective; every rank gives the same arguments.

    The producer is not changed: its output is memory of the ranks that need it. No autograd: it has to write to ``out``.

    Args:
        producer: called with the arguments of the result, and ``out=``: ``torch.mm``, ``torch.bmm``, a function that launches a
            kernel of your own, a compiled graph. It must write every element of ``out`` and only store there.
        collective: ``"all_to_all"``, ``"reduce_scatter"``, ``"all_reduce"`` (sums), ``"gather"`` (to ``root``), ``"scatter"`` (from
            ``root``, whose producer alone is called).
        shape: of the producer's output: ``(M, N)``, M / R rows for each rank, or ``(R, ...)``, for sums ``(R, M/R, N)``; any shape
            for gather.
        dtype: of the output; sums: float16, bfloat16 or float32.
        order: see :class:`MappedOutput`; the producer's rows must be in that order.
        transport: ``"stores"``: the producer's own stores go to the peers. ``"copy_engine"``: it stores to memory of this rank, and
            copies take each part away once it is complete; see :class:`TriggeredTransfers`. It then also gets ``send=``, to be
            called with each part that it has completed, or, with tiles, ``counters=``. Not for gather and scatter.
        tiles, pieces: as there.
        group, device: as for :class:`MappedOutput`.

    Returns:
        A callable that returns the collective's result; see :meth:`Fused.__call__`.

    Raises:
        As :class:`MappedOutput` and :class:`TriggeredTransfers`.

    Example:
        >>> product = interlace.fuse(torch.mm, "reduce_scatter", shape=(4096, 4096), dtype=torch.bfloat16)
        >>> y = product(x, w.T)  # on each rank [4096 / R, 4096]: the sum over ranks of x @ w.T
    """
    return Fused(producer, collective, shape, dtype, order, root, transport, tiles, pieces, group, device)
