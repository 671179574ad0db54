"""``TriggeredTransfers``: an output of this rank's own memory, whose parts copy engines take away
as they are completed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from interlace.comm.copies import Transfer, TransferQueue, Triggered, join, push
from interlace.comm.interpreter import require
from interlace.comm.kernels import Launch
from interlace.comm.ordinary import makes_ordinary_tensors
from interlace.errors import ArgumentError
from interlace.mapped.output import MappedOutput
from interlace.units import next_power_of_2

OPERATOR = "triggered transfers"
_MOST_TILES = 1 << 30


class TriggeredTransfers(MappedOutput):
    """A :class:`MappedOutput` whose parts copy engines take to their ranks, as they are completed;
    no store leaves the GPU.

    The tensor that :meth:`begin` gives is memory of this rank. Once a part of it is complete, a
    copy engine takes it to its rank, while kernels go on: communication takes no processor. When a
    part is complete is said in one of two ways:

    - The program says it: :meth:`send`, after the kernel that completes the part. For kernels that
      nobody can change, called once for each part.
    - The kernel says it, with ``tiles``: the rows for each rank are cut into *pieces*, each with a
      counter in :attr:`counters`; a kernel that has stored a tile adds 1 to the counter of the
      tile's piece (:func:`interlace.language.count`). A piece leaves as soon as its counter has
      come to its number of tiles. :meth:`exchange` checks the counts: a kernel that has counted a
      tile twice, or left one out, leaves nothing hanging, and raises :class:`MiscountError`.

    Complete the part for the next rank first, then the one for the rank after, this rank's own
    last: all copies but the last one are then hidden, and no two ranks send to the same one. Loads
    from the tensor are as fast as from any.

    Attributes:
        counters: int32, one for each piece in the order of the tensor's rows, zero when an epoch
            begins; of no elements without ``tiles``.
        pieces: that each rank's part is cut into.
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
        """Allocate an output of ``shape``, and say how its parts become complete. Collective: every
        rank gives the same arguments.

        Args:
            shape, dtype, order, group, device: as for :class:`MappedOutput`.
            tiles: that kernels count of each piece: one number for all, or one for each, in the
                order of the tensor's rows. None: parts are sent by :meth:`send`.
            pieces: that the rows for one rank are cut into; must divide them.

        Raises:
            BackendError: the driver has no stream memory operations, which counting needs.
            As for :class:`MappedOutput`.
        """
        sizes = tuple(int(size) for size in shape)
        super().__init__(sizes, dtype=dtype, order=order, group=group, device=device)
        ranks, rows = self.group.world_size, self._chunk.sizes[0]
        if pieces < 1 or rows % pieces:
            raise ArgumentError(
                f"TriggeredTransfers: pieces must divide the {rows} rows for a rank; got {pieces}."
            )
        counts = (
            [tiles] * (ranks * pieces)
            if isinstance(tiles, int)
            else [int(each) for each in tiles or ()]
        )
        if tiles is not None and (
            len(counts) != ranks * pieces or not all(0 <= each < _MOST_TILES for each in counts)
        ):
            raise ArgumentError(
                "TriggeredTransfers: tiles must be a number of 0 or more, or one for each of "
                f"{ranks * pieces} pieces; got {tiles}."
            )
        self.group.agree(OPERATOR, pieces=pieces, tiles=None if tiles is None else tuple(counts))
        self.pieces = pieces
        self._sent: set[int] = set()
        self._queues: list[TransferQueue] = []
        # A driver without stream memory operations may be that of one rank
        with self.group.together(OPERATOR):
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
        """Parts in the order in which they should be completed: the next rank's first."""
        rank, ranks = self.group.rank, self.group.world_size
        return sorted(range(ranks), key=lambda part: (self.destinations[part] - rank - 1) % ranks)

    def _transfers(self, half: int, part: int) -> list[Transfer]:
        """The copies of a part's pieces; none of this rank's own, which is where it belongs."""
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
            homes.append(
                [
                    self._slot(half, rank, rank) if to == rank else next(free)
                    for to in self.destinations
                ]
            )
        return homes

    def begin(self) -> torch.Tensor:
        """The tensor to write in this epoch, and :attr:`counters` at zero; see
        :meth:`MappedOutput.begin`.

        Hand both to a kernel, or to several, on the current stream.

        Raises:
            BackendError: a CUDA graph is being captured, and might wait before the kernel:
            ``CUDA_DEVICE_MAX_CONNECTIONS`` is 1. As :meth:`MappedOutput.begin`.
        """
        if self._queues:
            self._queues[self.half].require_queues()
        target = super().begin()
        # The last epoch's copies, maybe awaited by another stream, read the same memory
        with self.group.running():
            self.counters.zero_()
        self._sent.clear()
        if self._queues:
            self._queues[self.half].arm(self)
        return target

    def send(self, part: int) -> None:
        """The kernels on the current stream so far complete a part: take it to its rank, beside
        those that follow.

        Args:
            part: which one, in the order of the tensor's rows; it is for rank
                ``destinations[part]``.

        Raises:
            ArgumentError: no epoch has begun, the part was sent, or tiles are counted.
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
        self._sent.add(part)
        push(self.group, self._transfers(self.half, part))

    def _complete(self) -> None:
        """Check what kernels have counted, or send what was not sent yet; then wait, on the current
        stream, for all copies.
        """
        if self._queues:
            self._settle()
            self._queues[self.half].release()
        else:
            for part in self._order():
                if part not in self._sent:
                    self.send(part)
        if self.group.world_size > 1:
            join(self.group)

    def abandon(self) -> None:
        """See :meth:`MappedOutput.abandon`. Parts that were sent have gone; nobody takes them for a
        result.
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
