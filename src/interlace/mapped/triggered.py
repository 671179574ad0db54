"""``TriggeredTransfers``: an output in local memory; copy engines send each completed part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from interlace.comm.groups.copies import (
    Transfer,
    TransferQueue,
    Triggered,
    join,
    push,
    require_queues,
)
from interlace.comm.launching.kernels import Launch
from interlace.comm.runtime.interpreter import require
from interlace.comm.runtime.ordinary import makes_ordinary_tensors
from interlace.errors import ArgumentError
from interlace.mapped.layout import waiting_pieces
from interlace.mapped.output import MappedOutput
from interlace.units import next_power_of_2

OPERATOR = "triggered transfers"
_MAX_TILES = 1 << 30


class TriggeredTransfers(MappedOutput):
    """A :class:`MappedOutput` whose parts copy engines send to their ranks once they are complete.

    No store leaves the GPU: the tensor that :meth:`begin` returns is memory of this rank. Once a
    part of it is complete, a copy engine sends it to its rank, while kernels go on: communication
    takes no SM. There are two ways to tell that a part is complete:

    - The program calls :meth:`send` after the kernel that completes the part, once for each part.
      This is for kernels that cannot be changed.
    - The kernel counts, with ``tiles``: the rows for each rank are cut into *pieces*, each with a
      counter in :attr:`counters`; a kernel that has stored a tile adds 1 to the counter of the
      tile's piece (:func:`interlace.language.count`). A piece is sent as soon as its counter has
      reached its number of tiles. :meth:`exchange` checks the counts: if a kernel has counted a
      tile twice, or left one out, no wait hangs, and :class:`MiscountError` is raised.

    Complete the part for the next rank first, then the part for the rank after it, this rank's own
    last: all copies but the last one are then hidden, and no two ranks send to the same rank. Loads
    from the tensor are as fast as from any.

    Attributes:
        counters: int32, one for each piece in the order of the tensor's rows, zero when an epoch
            begins; without elements if there are no ``tiles``.
        pieces: The number of pieces that each rank's part is cut into.
    """

    @makes_ordinary_tensors
    def __init__(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype,
        tiles: int | Sequence[int] | None = None,
        pieces: int = 1,
        order: str = "natural",
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Allocate an output of ``shape``. Collective: every rank gives the same arguments.

        Args:
            shape, dtype, order, group, device: See :class:`MappedOutput`.
            tiles: The number of tiles that kernels count in each piece: one number for all pieces,
                or one for each, in the order of the tensor's rows. None: parts are sent by
                :meth:`send`.
            pieces: The number of pieces that the rows for one rank are cut into; must divide them.

        Raises:
            BackendError: The driver has no stream memory operations, which counting needs; or any
                error of :class:`MappedOutput`.
        """
        super().__init__(shape, dtype=dtype, order=order, group=group, device=device)
        ranks, rows = self.group.world_size, self._chunk.sizes[0]
        if pieces < 1 or rows % pieces:
            raise ArgumentError(
                f"TriggeredTransfers: pieces must divide the {rows} rows for a rank; got {pieces}."
            )
        counts = (
            [tiles] * (ranks * pieces)
            if isinstance(tiles, int)
            else [int(count) for count in tiles or ()]
        )
        if tiles is not None and (
            len(counts) != ranks * pieces or not all(0 <= count < _MAX_TILES for count in counts)
        ):
            raise ArgumentError(
                "TriggeredTransfers: tiles must be a number of 0 or more, or one for each of "
                f"{ranks * pieces} pieces; got {tiles}."
            )
        self.group.agree(OPERATOR, pieces=pieces, tiles=None if tiles is None else tuple(counts))
        self.pieces = pieces
        self._sent: set[int] = set()
        self._queues: list[TransferQueue] = []
        # The driver of a single rank may be without stream memory operations.
        with self.group.agreement.together(OPERATOR):
            self.counters = torch.zeros(len(counts), dtype=torch.int32, device=self.group.device)
            self._tiles = torch.tensor(counts, dtype=torch.int32, device=self.group.device)
            if tiles is not None:
                self._is_valid = torch.ones(1, dtype=torch.int32, device=self.group.device)
                self._queues = [
                    TransferQueue(self.group, self._triggers(half, counts)) for half in range(2)
                ]

    def _triggers(self, half: int, counts: list[int]) -> list[Triggered]:
        counter = self.counters.data_ptr()
        return [
            Triggered(
                counter + 4 * (part * self.pieces + piece),
                counts[part * self.pieces + piece],
                transfer,
            )
            for part in self._order()
            for piece, transfer in enumerate(self._transfers(half, part))
        ]

    def _order(self) -> list[int]:
        """Return the parts in the order to complete them in, the next rank's first."""
        rank, ranks = self.group.rank, self.group.world_size
        return sorted(range(ranks), key=lambda part: (self.destinations[part] - rank - 1) % ranks)

    def _transfers(self, half: int, part: int) -> list[Transfer]:
        """Return the copies of a part's pieces; this rank's own part needs none."""
        rank, to = self.group.rank, self.destinations[part]
        if to == rank:
            return []
        nbytes = self._chunk.sizes[0] // self.pieces * self._chunk.strides[0] * self.dtype.itemsize
        source, target = (
            self._written[half].data_ptr() + part * self._chunk.nbytes,
            self._slot(half, to, rank),
        )
        return [
            Transfer(target + piece * nbytes, source + piece * nbytes, nbytes, to)
            for piece in range(self.pieces)
        ]

    def _homes(self) -> list[list[int]]:
        """Return the addresses of the parts; this rank's own is stored where it is received."""
        rank, ranks = self.group.rank, self.group.world_size
        waiting: list[int] = []
        if ranks > 1:
            self._staging = self.group.allocate(self._chunk.nbytes, waiting_pieces(ranks))
            first = self._staging.address + rank * self._staging.stride
            waiting = [first + i * self._chunk.nbytes for i in range(ranks - 1)]
        homes = []
        for half in range(2):
            free = iter(waiting)
            homes.append(
                [
                    self._slot(half, rank, rank) if to == rank else next(free)
                    for to in self.destinations
                ]
            )
        return homes

    def begin(self) -> torch.Tensor:
        """Return the tensor to write in this epoch, and set :attr:`counters` to zero.

        Pass both to a kernel, or to several, on the current stream. See :meth:`MappedOutput.begin`.

        Raises:
            BackendError: A CUDA graph is being captured, and might wait before the kernel, because
                ``CUDA_DEVICE_MAX_CONNECTIONS`` is 1; or any error of :meth:`MappedOutput.begin`.
        """
        if self._queues:
            require_queues(self.group, "triggered transfers")
        target = super().begin()
        self._sent.clear()
        if self._queues:
            # The last epoch's copies, which another stream may wait for, read the same memory.
            with self.group.running():
                self.counters.zero_()
            self._queues[self.half].arm(self)
        return target

    def send(self, part: int) -> None:
        """Send a part that is complete after the kernels enqueued on the current stream until now.

        The copy runs while kernels go on that are enqueued later.

        Args:
            part: The index of the part in the order of the tensor's rows; it is for rank
                ``destinations[part]``.

        Raises:
            ArgumentError: No epoch has begun, the part was sent, or tiles are counted.
        """
        if (
            not self._writing
            or self._queues
            or part in self._sent
            or not 0 <= part < len(self.destinations)
        ):
            raise ArgumentError(
                f"TriggeredTransfers.send: an epoch must have begun in which part {part}, of "
                f"{len(self.destinations)}, was not "
                f"sent, and tiles must not be counted. Call begin(), and send each part once."
            )
        # Noted before the copy: whether that succeeds or not, the part must not be sent twice.
        self._sent.add(part)
        push(self.group, self._transfers(self.half, part))

    def _complete(self) -> None:
        """Check the counts, or send the parts that were not sent; then wait for all copies.

        The current stream waits, not the host.
        """
        if self._queues:
            # The counts are checked before the copies' waits are enqueued. The check sets a wrong
            # counter to the awaited number, so the waits end even if a kernel has left out a tile.
            self._settle()
            self._queues[self.half].release()
        else:
            for part in self._order():
                if part not in self._sent:
                    self.send(part)
        # The barrier that follows on this stream tells the peers that the copies are done.
        if self.group.world_size > 1:
            join(self.group)

    def abandon(self) -> None:
        """Give up the epoch, as :meth:`MappedOutput.abandon` does.

        Parts that were sent have arrived, but no peer takes them for a result.
        """
        if self._writing and self._queues:
            self._queues[self.half].disarm()
        elif self._writing and self._sent:
            join(self.group)
        super().abandon()

    def _settle(self) -> None:
        require(self.group.backend)
        from interlace.mapped import kernel

        with self.group.running():
            arguments = {
                "counters": self.counters,
                "tiles": self._tiles,
                "is_valid": self._is_valid,
                "ctx": self.group.context(OPERATOR),
                "pieces": self.counters.numel(),
            }
            constants = {"PIECES": next_power_of_2(self.counters.numel()), "num_warps": 1}
            Launch(kernel.settle, (1,), arguments, constants)()
