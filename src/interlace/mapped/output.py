"""``MappedOutput``: an output for any kernel, whose rows are memory of the ranks they are for; and
``empty_rotating``: a matrix that can be read from any rank's rows on, cyclically.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

from interlace.comm import Group, group_of
from interlace.comm.groups.symmetric import require_dtype, sizes_of
from interlace.comm.launching.kernels import (
    cut_rows,
    known_factor,
    triton_dtype,
)
from interlace.comm.replay.memory import Block
from interlace.comm.runtime.dlpack import tensor_at
from interlace.comm.runtime.interpreter import require
from interlace.comm.runtime.ordinary import makes_ordinary_tensors
from interlace.errors import ArgumentError
from interlace.mapped.layout import (
    Mapping,
    chunk_of,
    chunk_of_block,
    chunk_of_rows,
    received_pieces,
)
from interlace.mapped.meeting import StreamMeeting

OPERATOR = "mapped output"
ORDERS = ("natural", "rotated")


class MappedOutput:
    """A tensor to write, each part of which is memory of the rank that the part is for.

    :meth:`begin` returns the tensor for one *epoch*: pass it, or any slice of it, to a kernel as
    its output, or to several kernels. :meth:`exchange` ends the epoch and returns the parts that
    all ranks have written for this one. Two buffers take turns, so the next epoch's stores do not
    disturb a reader: the result of ``exchange`` may be read, on the same stream, until the next
    ``exchange``.

    Loads through the tensor are correct and slow, as they cross the links: producers that
    accumulate into their output (``beta`` other than 0, atomics) are faster in ordinary memory. A
    kernel that writes beyond its output faults, or writes into the part of another rank, as it
    would in any memory.

    Attributes:
        group: The group of ranks.
        dtype: The element type.
        destinations: The rank that each part of the tensor is for.
        half: The index of the buffer that the current epoch uses, 0 or 1.
        turn: The index of the memory for this epoch's results, 0 or 1. It goes on alternating when
            the buffers no longer do.
        captured: Whether a CUDA graph has captured the output.
        collects: Whether every epoch ends by :meth:`collect`. Set it before the first epoch.
    """

    @makes_ordinary_tensors
    def __init__(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype,
        order: str = "natural",
        root: int | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Map a tensor of ``shape``. Collective: every rank gives the same arguments.

        Args:
            shape: ``(M, N)``: M / R rows for each rank. Rows are padded until parts end at the
                boundaries of mappings (every 2 MiB on CUDA), so ``stride(0)`` may be above N. Or
                ``(R, ...)``, a part for each rank, with padding between parts. With ``root``, the
                shape of the single part.
            dtype: Element type.
            order: ``"natural"``: part i is for rank i. ``"rotated"``: part i is for rank ``rank + 1
                + i``, this rank's own part the last, so that ranks do not all write to rank 0
                first; see :func:`interlace.mapped.empty_rotating` for the input.
            root: Every rank writes a single part, for this rank (a gather); default: a part for
                each rank (an all-to-all).
            group: 1 to 8 ranks of one node, or ranks of several nodes; default: the default process
                group.
            device: Default: the current CUDA device, or the CPU if there is none.

        Raises:
            ArgumentError: the shape does not divide, or would be padded to more than twice its
                size.
            RankMismatchError: ranks differ in shape, dtype, order or root.
            BackendError: the GPUs cannot map each other's memory.
            WorkspaceError: the memory does not fit, or a CUDA graph is being captured.
        """
        class_name = type(self).__name__
        sizes = sizes_of(class_name, shape)
        require_dtype(class_name, dtype)
        self.group: Group = group_of(group, device)
        self.group.require_one_node(class_name)
        if self.group.backend == "cpu":
            require("cpu")
            from interlace.comm.cpu import shortcuts  # imports Triton

            shortcuts.mend()  # any kernel may write the output
        self.dtype = dtype
        ranks, rank = self.group.world_size, self.group.rank
        _validate(class_name, sizes, order, root, ranks)
        # Ranks agree before any memory is allocated, so that none maps memory that its peers do
        # not have.
        mark = self.group.agree(
            OPERATOR, shape=sizes, dtype=str(dtype), order=order, root=-1 if root is None else root
        )
        # A part must end at a boundary of mappings, since the next part may be on another GPU.
        granularity = self.group.granularity
        if root is not None:
            chunk = chunk_of_block(sizes, dtype.itemsize, granularity)
        else:
            chunk = chunk_of(class_name, sizes, dtype.itemsize, ranks, granularity)
        first = rank + 1 if order == "rotated" else 0
        self.destinations = (
            [root] if root is not None else [(first + i) % ranks for i in range(ranks)]
        )
        # [half][source]: the parts that this rank receives. Every rank has as much memory, even if
        # only a root receives parts.
        self._chunk = chunk
        self._block = self.group.allocate(chunk.nbytes, received_pieces(ranks))
        step = chunk.nbytes // dtype.itemsize
        # The received parts are contiguous on this rank; the written ones are spread over ranks.
        device = self.group.device
        sizes_of_all, strides = (ranks, *chunk.sizes), (step, *chunk.strides)
        self._received = [
            tensor_at(self._slot(half, rank, 0), sizes_of_all, dtype, device, self._block, strides)
            for half in range(2)
        ]
        # A matrix, and a single part, have the dimensions of a chunk, others one more.
        strides = chunk.strides if len(chunk.strides) == len(sizes) else strides
        self._written = [self._map(homes, sizes, strides) for homes in self._homes()]
        self._meeting = StreamMeeting.of(self.group, OPERATOR, mark)
        # Int32 on the device: 0 if the parts that were written must not be used.
        self._is_valid: torch.Tensor | None = None
        self.half = self.turn = 0
        self._writing = False
        self.captured = self.collects = False
        self.group.cache.recoverable.add(self)

    def _homes(self) -> list[list[int]]:
        """Return the addresses of the parts that a producer writes, in its order, for each half."""
        return [
            [self._slot(half, to, self.group.rank) for to in self.destinations] for half in range(2)
        ]

    def _slot(self, half: int, to: int, source: int) -> int:
        """Return the address, as mapped on this rank, of the part from ``source`` for ``to``."""
        ranks = self.group.world_size
        return (
            self._block.address
            + to * self._block.stride
            + (half * ranks + source) * self._chunk.nbytes
        )

    def _map(
        self, pieces: Sequence[int], sizes: Sequence[int], strides: Sequence[int]
    ) -> torch.Tensor:
        """Map chunks of symmetric memory one behind the other; return a tensor over them."""
        mapping = Mapping(
            self._block, self.group.device, *self.group.remap(pieces, self._chunk.nbytes)
        )
        device = self.group.device
        return tensor_at(mapping.address, sizes, self.dtype, device, mapping, strides)

    @property
    def place(self) -> tuple[int, int]:
        """The buffer of the current epoch and the memory for its results: both indices."""
        return self.half, self.turn

    def go_back(self, place: tuple[int, int]) -> None:
        """Return to an earlier ``place``, as epochs since then were captured and did not run.

        Ranks must be at one place, and a rank may fail where its peers have captured more.
        """
        self.half, self.turn = place

    def begin(self) -> torch.Tensor:
        """Return the tensor to write in this epoch, ``[M, N]`` or ``[R, ...]``; see the class.

        Its contents are undefined.

        Collective in a CUDA graph, and after the output has been in one, unless epochs end by
        :meth:`collect`: a graph replays with the same buffer, so ranks first wait, on the stream,
        until all have read it.

        Raises:
            ArgumentError: The epoch has begun already.
            PeerTimeoutError: A wait of the group has expired before.
        """
        self.group.check()
        if self._writing:
            raise ArgumentError(
                f"{type(self).__name__}.begin: an epoch must end before the next begins. Call "
                "exchange() first."
            )
        # The group's own replays choose the graph that fits the epoch, so only graphs of the
        # caller pin the buffer.
        self.captured |= self.group.capture_id() is not None and not self.group.replays.capturing
        if self.captured and not self.collects:
            self._meeting(self._is_valid)
        self._writing = True
        return self._written[self.half]

    def exchange(self) -> torch.Tensor:
        """End the epoch: wait, on the current stream, until every rank has written. Collective; the
        host does not wait.

        Call it on the stream of the kernels that wrote, or on a stream that waits for them.

        Returns:
            ``[R, ...]``: the parts that all ranks wrote for this one, to be read on this stream
            before the next :meth:`exchange`.

        Raises:
            ArgumentError: No epoch has begun.
            PeerTimeoutError: A peer did not exchange before the group's deadline. On CUDA the
                kernel ends, and the next call on the group, or :func:`interlace.synchronize`,
                raises.
        """
        received = self._end()
        self._meeting(self._is_valid)
        return received

    def _end(self) -> torch.Tensor:
        """End the epoch; return the tensor that is received once all ranks have met."""
        if not self._writing:
            raise ArgumentError(
                f"{type(self).__name__}.exchange: an epoch must have begun. Call begin() and "
                "write first."
            )
        self._complete()
        self._writing = False
        received = self._received[self.half]
        self.advance()
        return received

    def _complete(self) -> None:
        """Enqueue the remaining work of this rank's epoch, before the rank meets its peers."""

    def collect(
        self, reduction: str, result: torch.Tensor, sums: Block | None = None
    ) -> torch.Tensor:
        """Exchange, and bring the received parts into the contiguous ``result`` by the same kernel.

        Collective; the host does not wait. Parts that do not arrive by the deadline are NaN.

        Args:
            reduction: ``"copy"``: all parts, ``[R, ...]``. ``"sum"``: their sum over ranks, float32
                in rank order. ``"sum_for_all"``: the sums of all ranks, ``[R, ...]``.
            result: A tensor of as many elements, and this dtype.
            sums: For ``"sum_for_all"``: symmetric memory of twice that size, where sums arrive. The
                result may be the half that :attr:`turn` names; else they arrive in the first half.

        Returns:
            ``result``.
        """
        turn, received = self.turn, self._end()
        require(self.group.backend)
        from interlace.mapped import kernel

        # The kernel sees each part as a matrix, whatever the shape of the output.
        parts = received[:, None] if received.dim() == 2 else received.flatten(1, -2)
        _, rows, columns = parts.shape
        landing = 0 if sums is None else sums.address + turn * (sums.nbytes // 2)
        own_landing = landing + self.group.rank * self.group.stride
        is_in_place = sums is not None and result.data_ptr() == own_landing
        if sums is not None and not is_in_place:
            # A half that goes by no count of this host: a peer may replay a graph of this call.
            landing = sums.address
        programs, tile = cut_rows(rows, columns, self.group)
        arguments = {
            "slots": parts.data_ptr(),
            "result": result.data_ptr(),
            "landing": landing,
            "rows": rows,
            "columns": columns,
            "slot_stride": parts.stride(0),
            "row_stride": parts.stride(1),
            "is_valid": self._is_valid,
        }
        constants = {
            "REDUCTION": reduction,
            "IN_PLACE": is_in_place,
            "CAPTURED": self.captured,
            "DTYPE": triton_dtype(self.dtype),
            "FACTOR": known_factor(columns, parts.stride(0), parts.stride(1)),
            **tile,
        }
        self._meeting.launch(kernel.collect, programs, arguments, constants)
        return result

    def abandon(self) -> None:
        """Give up the epoch that has begun, if one has: its producer has failed.

        Nothing is exchanged. Peers that exchange wait for this rank until the deadline; if all
        ranks abandon the epoch, the next one begins as if it had never begun.
        """
        self._writing = False

    def reset(self) -> None:
        """Begin anew on every rank, as :meth:`Group.recover` does.

        An epoch that has begun is given up and not counted. CUDA graphs of the program that have
        captured the output are lost; ranks need not have captured the same ones.
        """
        self.abandon()
        self.half = self.turn = 0
        self.captured = False
        self._meeting.workspace.reset(self.group.rank)

    def advance(self) -> None:
        """Count an epoch, from :meth:`begin` to :meth:`exchange`, that a graph has replayed.

        The graph is one of the group's ``replays``. Buffers take turns until a CUDA graph has
        captured an epoch that ends by :meth:`collect`. From then on every epoch, whether in a graph
        or not, ends when ranks have read their parts, so all may use one buffer. They must, as it
        is unknown which graph is replayed first: a peer may still read the other buffer then, of
        the last epoch that ended without reading.
        """
        self.turn = 1 - self.turn
        if not (self.captured and self.collects):
            self.half = 1 - self.half


def _validate(
    class_name: str, sizes: tuple[int, ...], order: str, root: int | None, ranks: int
) -> None:
    if not sizes:
        raise ArgumentError(f"{class_name}: shape must have at least one size; got {sizes}.")
    if order not in ORDERS:
        raise ArgumentError(
            f"{class_name}: order must be one of {', '.join(ORDERS)}; got {order!r}."
        )
    if root is not None:
        if not 0 <= root < ranks:
            raise ArgumentError(
                f"{class_name}: root must be a rank of the group, 0 to {ranks - 1}; got {root}."
            )
        return
    if len(sizes) == 1 or (len(sizes) == 2 and sizes[0] % ranks):
        raise ArgumentError(
            f"{class_name}: a shape (M, N) must have the {ranks} ranks divide M; got {sizes}."
        )
    if len(sizes) > 2 and sizes[0] != ranks:
        raise ArgumentError(
            f"{class_name}: a shape of {len(sizes)} sizes must begin with the {ranks} ranks; got "
            f"{sizes}."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class RotatingInput:
    """A matrix whose memory is mapped twice in a row, so that rotating its rows copies nothing.

    Attributes:
        natural: ``[M, K]``.
        rotated: ``[M, K]``: the same rows, from those for rank ``rank + 1`` on, this rank's own the
            last. A producer that writes a :class:`MappedOutput` in rotated order reads it.
    """

    natural: torch.Tensor
    rotated: torch.Tensor


@makes_ordinary_tensors
def empty_rotating(
    shape: Sequence[int],
    *,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> RotatingInput:
    """Allocate memory for ``[M, K]`` that is mapped twice in a row. Collective.

    Within one kernel use one of the two tensors only: CUDA does not order accesses through two
    addresses of the same memory.

    Args:
        shape: M, which the ranks divide, and K; rows may be padded, as in :class:`MappedOutput`.
        dtype, group, device: See :class:`MappedOutput`.

    Raises:
        ArgumentError: The ranks do not divide M, or padding would take more than half.
    """
    owner = group_of(group, device)
    owner.require_one_node("empty_rotating")
    if len(shape) != 2 or shape[0] % owner.world_size:
        raise ArgumentError(
            f"empty_rotating: shape must be (M, K), and the {owner.world_size} ranks divide M; "
            f"got {tuple(shape)}."
        )
    rows, columns = int(shape[0]), int(shape[1])
    owner.agree("empty_rotating", shape=(rows, columns), dtype=str(dtype))
    chunk = chunk_of_rows("empty_rotating", rows, columns, dtype.itemsize, owner.granularity)
    block = owner.allocate(chunk.nbytes)
    address = block.address + owner.rank * block.stride
    natural = tensor_at(address, chunk.sizes, dtype, owner.device, block, chunk.strides)
    # The own rows come last, so a rank on its own rotates nothing.
    if owner.world_size == 1:
        return RotatingInput(natural, natural)
    # The same memory twice in a row: what ends with the first mapping goes on in the second.
    mapping = Mapping(block, owner.device, *owner.remap([address, address], chunk.nbytes))
    start = (
        (owner.rank + 1)
        % owner.world_size
        * (rows // owner.world_size)
        * chunk.strides[0]
        * dtype.itemsize
    )
    address = mapping.address + start
    rotated = tensor_at(address, chunk.sizes, dtype, owner.device, mapping, chunk.strides)
    return RotatingInput(natural, rotated)
