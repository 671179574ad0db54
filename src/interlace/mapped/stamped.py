"""``StampedQueue``: slices to every peer, after a stamp that says which call they are of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from interlace.comm.constants import on_device
from interlace.comm.group import Group
from interlace.comm.interpreter import require
from interlace.comm.kernels import Launch, triton_dtype
from interlace.comm.slices import Message, SliceQueue, Step

_STAMP_BYTES = 16


class Landing(NamedTuple):
    """Describe the memory that one peer's slices arrive in.

    Attributes:
        peer: Rank that sends.
        first: Offset of the first element among those of the result.
        elements: Number of elements, which are contiguous.
    """

    peer: int
    first: int
    elements: int


class StampedQueue:
    """Exchange slices with all peers of a group that spans nodes, and check whose call they are of.

    The messages of NCCL have neither tags nor sizes that it compares. So ahead of its slices each
    rank sends every peer a stamp, the epoch and the mark of the call; when all have arrived, a
    kernel compares them, and fills with NaN what is of another call. Use it within
    ``Group.running``::

        queue.open(); compute and count; queue.release(); is_valid = queue.close()
    """

    def __init__(
        self,
        group: Group,
        operator: str,
        mark: int,
        steps: Sequence[Step],
        landings: Sequence[Landing],
        result: torch.Tensor,
    ) -> None:
        """Prepare the exchange. Collective in an operator's first call.

        Args:
            group: The group.
            operator: Name of the calling operator.
            mark: The number that the ranks' agreement returned for the call.
            steps: The exchanges; see :class:`SliceQueue`.
            landings: The parts of ``result`` that peers send, one per peer, empty ones too.
            result: Contiguous memory that slices arrive in, of a floating-point dtype.
        """
        require(group.backend)
        from interlace.mapped.kernel import check_messages, stamp_messages

        peers = [landing.peer for landing in landings]
        self._stamps = torch.empty(
            2, len(peers), _STAMP_BYTES, dtype=torch.uint8, device=group.device
        )
        self._is_valid = torch.ones(1, dtype=torch.int32, device=group.device)
        greeting = Step(
            (),
            tuple(Message(peer, self._stamps[0, i]) for i, peer in enumerate(peers)),
            tuple(Message(peer, self._stamps[1, i]) for i, peer in enumerate(peers)),
        )
        self._queue = SliceQueue(group, operator, [greeting, *steps], mark)
        name = f"{operator}.stamped"
        shared = {
            "epochs": group.workspace(name, 4096).epochs,
            "ctx": group.context(name),
            "call": mark,
            "count": len(peers),
        }
        self._stamp = Launch(
            stamp_messages,
            (1,),
            {"stamps": self._stamps[0].data_ptr(), **shared},
            {"num_warps": 1},
            (self._stamps,),
        )
        parts = [
            (landing.peer, landing.first * result.element_size(), landing.elements)
            for landing in landings
        ]
        self._check = Launch(
            check_messages,
            (1,),
            {
                "sources": on_device(group, parts),
                "stamps": self._stamps[1].data_ptr(),
                "landing": result.data_ptr(),
                "is_valid": self._is_valid,
                **shared,
            },
            {"OUT": triton_dtype(result.dtype), "num_warps": 4},
            (self._stamps, result),
        )

    def open(self) -> None:
        """Write the stamps and arm the queue; counters are zero from here on."""
        self._stamp()
        self._queue.arm()

    def release(self) -> None:
        """Enqueue the exchanges, after what counts was enqueued."""
        self._queue.release()

    def abandon(self) -> None:
        """Cancel the exchanges, as nothing will count."""
        self._queue.disarm()

    def close(self) -> torch.Tensor:
        """Wait for all slices on the current stream, and compare the stamps.

        Returns:
            int32 ``[1]`` on the device: 1, or 0 if the result means nothing.
        """
        self._queue.join()
        self._check()
        return self._is_valid
