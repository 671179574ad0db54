"""``TriggeredTransfers``: an output of this rank's own memory, whose parts copy engines carry away as a kernel completes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from interlace.comm.copies import Transfer, TransferQueue
from interlace.comm.interpreter import require
from interlace.errors import ArgumentError
from interlace.mapped.output import MappedOutput
from interlace.units import next_power_of_2

OPERATOR = "triggered transfers"
_MOST_TILES = 1 << 30


class TriggeredTransfers(MappedOutput):
    """A :class:`MappedOutput` for kernels that count their tiles: copies take the parts to their ranks, no store leaves the GPU.

    The tensor that :meth:`begin` gives is memory of this rank. Its rows are cut into *pieces*, each with a counter in
    :attr:`counters`: a kernel that has stored a tile adds 1 to the counter of the tile's piece
    (:func:`interlace.language.count`). Once a counter has come to the piece's number of tiles, a copy engine takes the piece to
    its rank, while the kernel goes on: communication takes no processor. A kernel that completes the rows for the
    next rank first, then those for the rank after, and its own last, has all copies but the last one hidden behind it.

    Loads from the tensor are as fast as from any. :meth:`exchange` checks the counts: a kernel that has counted a tile twice, or
    left one out, leaves nothing hanging, and raises :class:`MiscountError`.

    Attributes:
        counters: int32, one for each piece in the order of the tensor's rows; zero when an epoch begins.
        pieces: that each rank's part is cut into.
    """

    def __init__(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype,
        tiles: int | Sequence[int],
        pieces: int = 1,
        order: str = "natural",
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Allocate an output of ``shape`` and say when its pieces are complete. Collective: every rank gives the same arguments.

        Args:
            shape, dtype, order, group, device: as for :class:`MappedOutput`.
            tiles: that are counted of each piece: one number for all, or one for each, in the order of the tensor's rows.
            pieces: that the rows for one rank are cut into; must divide them.

        Raises:
            BackendError: the driver has no stream memory operations.
            As for :class:`MappedOutput`.
        """
        sizes = tuple(int(size) for size in shape)
        super().__init__(sizes, dtype=dtype, order=order, group=group, device=device)
        ranks, rank, rows = self.group.world_size, self.group.rank, self._chunk.sizes[0]
        if pieces < 1 or rows % pieces:
            raise ArgumentError(f"TriggeredTransfers: pieces must divide the {rows} rows for a rank; got {pieces}.")
        counts = [tiles] * (ranks * pieces) if isinstance(tiles, int) else [int(each) for each in tiles]
        if len(counts) != ranks * pieces or not all(0 <= each < _MOST_TILES for each in counts):
            raise ArgumentError(
                f"TriggeredTransfers: tiles must be a number of 0 or more, or one for each of {ranks * pieces} pieces; got {tiles}."
            )
        self.group.agree(OPERATOR, pieces=pieces, tiles=tuple(counts))
        self.pieces = pieces
        self.counters = torch.zeros(ranks * pieces, dtype=torch.int32, device=self.group.device)
        self._tiles = torch.tensor(counts, dtype=torch.int32, device=self.group.device)
        self._sound = torch.ones(1, dtype=torch.int32, device=self.group.device)
        piece_rows = rows // pieces
        nbytes = piece_rows * self._chunk.strides[0] * dtype.itemsize
        parts = sorted(range(ranks), key=lambda part: (self.destinations[part] - rank - 1) % ranks)  # the neighbour's first
        self._queues = [
            TransferQueue(self.group, [
                Transfer(
                    counter=self.counters.data_ptr() + 4 * (part * pieces + piece),
                    value=counts[part * pieces + piece],
                    target=self._slot(half, self.destinations[part], rank) + piece * nbytes,
                    source=self._written[half].data_ptr() + part * self._chunk.nbytes + piece * nbytes,
                    nbytes=nbytes,
                    peer=self.destinations[part],
                )
                for part in parts
                if self.destinations[part] != rank
                for piece in range(pieces)
            ])
            for half in range(2)
        ]  # fmt: skip

    def _homes(self) -> list[list[int]]:
        """The part for this rank is stored where it is received; the others wait for their copies."""
        rank, ranks = self.group.rank, self.group.world_size
        waiting: list[int] = []
        if ranks > 1:
            self._staging = self.group.allocate(self._chunk.nbytes, ranks - 1)
            mine = self._staging.address + rank * self._staging.stride
            waiting = [mine + i * self._chunk.nbytes for i in range(ranks - 1)]
        homes = []
        for half in range(2):
            free = iter(waiting)
            homes.append([self._slot(half, rank, rank) if to == rank else next(free) for to in self.destinations])
        return homes

    def begin(self) -> torch.Tensor:
        """The tensor to write in this epoch, and :attr:`counters` at zero; see :meth:`MappedOutput.begin`.

        Hand both to a kernel, or to several, on the current stream.
        """
        target = super().begin()
        with self.group.running():  # the last epoch's copies, maybe awaited by another stream, read the same memory
            self.counters.zero_()
        self._queues[self.half].arm(self)
        return target

    def exchange(self) -> torch.Tensor:
        """End the epoch; see :meth:`MappedOutput.exchange`. On the stream of the kernels that count.

        Raises:
            MiscountError: they did not count every tile once. On CUDA the next call on the group, or
                :func:`interlace.synchronize`, raises; peers raise :class:`PeerTimeoutError`.
            As for :class:`MappedOutput`.
        """
        if self._writing:
            require(self.group.backend)
            from interlace.mapped import kernel

            with self.group.running():
                kernel.settle[(1,)](
                    self.counters, self._tiles, self._sound, self.group.context(OPERATOR), self.counters.numel(),
                    PIECES=next_power_of_2(self.counters.numel()), num_warps=1,
                )  # fmt: skip
            self._queues[self.half].release()
        return super().exchange()
