"""``StampedQueue``: slices to every peer, with a stamp that says which call they are of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from interlace.comm.groups.group import Group
from interlace.comm.groups.slices import Message, SliceQueue, Step
from interlace.comm.groups.symmetric_memory import Workspace
from interlace.comm.launching.kernels import Launch, triton_dtype
from interlace.comm.runtime.interpreter import require

_STAMP_BYTES = 16


def reserve_stamps(group: Group, operator: str) -> Workspace:
    """Return the memory in which an operator's stamped exchanges count their calls.

    Collective in the operator's first call, so it comes before anything is enqueued.
    """
    return group.workspace(_workspace_of(operator), 4096)


def _workspace_of(operator: str) -> str:
    return f"{operator}.stamped"


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
    """Exchange slices with all peers of a group that spans nodes, and check their call.

    The messages of NCCL have neither tags nor sizes that it compares. So with the slices of the
    first step each rank sends every peer a stamp, the epoch and the mark of the call. When all have
    arrived, a kernel compares them, and fills data of another call with NaN. Use it within
    ``Group.running``::

        queue.open(); compute and count; queue.release(); is_valid = queue.close()

    Work that needs the slices of one step only comes after ``queue.wait(step)``, which compares the
    stamps at the first step.
    """

    def __init__(
        self,
        group: Group,
        operator: str,
        mark: int,
        steps: Sequence[Step],
        landings: Sequence[Landing],
        result: torch.Tensor,
        lanes: int | None = None,
    ) -> None:
        """Prepare the exchange. Collective in an operator's first call.

        Args:
            group: The group.
            operator: Name of the calling operator.
            mark: The number that the ranks' agreement returned for the call.
            steps: The exchanges, at least one; see :class:`SliceQueue`.
            landings: The parts of ``result`` that peers send, one per peer, empty ones too, which
                become NaN at the end if the slices are of another call.
            result: Contiguous memory that slices arrive in, of a floating-point dtype.
            lanes: See :class:`SliceQueue`.
        """
        require(group.backend)
        from interlace.mapped.kernel import check_messages, stamp_messages

        self._group, self._steps, self._dtype = group, steps, result.dtype
        peers = [landing.peer for landing in landings]
        self._stamps = torch.empty(
            2, len(peers), _STAMP_BYTES, dtype=torch.uint8, device=group.device
        )
        self._is_valid = torch.empty(1, dtype=torch.int32, device=group.device)
        sent, received = (
            tuple(Message(peer, stamps[i]) for i, peer in enumerate(peers))
            for stamps in self._stamps
        )
        # In a step of their own stamps would cost another launch of NCCL's kernel.
        first, *later = steps
        first = Step(first.triggers, (*sent, *first.departures), (*received, *first.arrivals))
        self._queue = SliceQueue(group, operator, [first, *later], mark, lanes)
        self._is_checked = False
        self._name = _workspace_of(operator)
        shared = {
            "epochs": reserve_stamps(group, operator).epochs,
            "ctx": group.context(self._name),
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
                "sources": group.cache.tables.on_device(parts),
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

    def release(self, steps: int | None = None) -> None:
        """Enqueue the exchanges, by default of all steps, after the kernels that count."""
        self._queue.release(steps)

    def wait(self, number: int) -> torch.Tensor:
        """Wait on the current stream for the slices of one step, which was released.

        Slices of another call, or in a group that is broken, become NaN.

        Returns:
            int32 ``[1]`` on the device: 1, or 0 if the slices mean nothing.
        """
        # Stamps are compared before any slice is used: work that passes slices on must not spread
        # those of another call.
        if not self._is_checked:
            self._queue.wait(0)
            self._check()
            self._is_checked = True
        self._queue.wait(number)
        for message in self._steps[number].arrivals:
            self._void(message.data)()
        return self._is_valid

    def _void(self, landing: torch.Tensor) -> Launch:
        """Return the launch that fills a slice with NaN if it is not valid."""
        from interlace.mapped.kernel import void_message

        return Launch(
            void_message,
            (1,),
            {
                "is_valid": self._is_valid,
                "landing": landing.data_ptr(),
                "ctx": self._group.context(self._name),
                "elements": landing.nbytes // self._dtype.itemsize,
            },
            {"OUT": triton_dtype(self._dtype), "num_warps": 4},
            (landing,),
        )

    def abandon(self) -> None:
        """Cancel the exchanges, as nothing will count."""
        self._queue.disarm()

    def close(self) -> torch.Tensor:
        """Wait for all slices on the current stream, and compare the stamps.

        Returns:
            int32 ``[1]`` on the device: 1, or 0 if the result means nothing.
        """
        self._queue.join()
        if not self._is_checked:
            self._check()
        return self._is_valid
