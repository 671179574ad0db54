"""ASTRA-sim's collective algorithms: the part of one NPU for one chunk in one dimension.

They share a rhythm. A *packet* passes the endpoint (``endpoint-delay``, plus the time of three
memory passes if it is reduced), which gives a credit; a credit and a queued packet together become
a message; a received message queues the next packet. An algorithm ends when it has sent all its
messages and has all its credits back.
"""

from __future__ import annotations

import abc
import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from interlace_sim.astra.system import Npu, Stream

LOCAL_DELAY_NS = 10
"""Nanoseconds of the endpoint inside a group of some NPUs, which ASTRA-sim fixes."""


class Part(NamedTuple):
    """The part of one NPU in a collective, for one chunk in one dimension.

    Attributes:
        collective: Kind of the collective.
        members: NPUs of the dimension.
        size: Bytes of the chunk; of the shard for an all-gather.
        endpoint_ns: Nanoseconds of a packet in the endpoint.
        step: Direction of a ring, 1 or -1.
        local: Whether the members are a communicator group of some NPUs, which ASTRA-sim takes for
            a local ring.
    """

    npu: Npu
    stream: Stream
    collective: str
    members: list[int]
    size: int
    endpoint_ns: int
    step: int = 1
    local: bool = False


class _Packets(abc.ABC):
    """The rhythm that the ring, direct and halving-doubling algorithms share.

    Attributes:
        messages: Messages that are still to be sent.
        window: Packets that travel at a time.
    """

    messages: int
    window: int
    message_bytes: int

    def __init__(self, part: Part) -> None:
        self.npu, self.stream, self.collective, self.members = part[:4]
        self.endpoint_ns, self.step = part.endpoint_ns, part.step
        self.at = self.members.index(self.npu.id)
        self.window = 1
        self.credits = 0
        # Receiver, sender and bytes of each packet.
        self.queue: deque[tuple[int, int, int]] = deque()
        # A round begins with packets of this NPU's own data, which need no reduction.
        self._plain = 0
        self._later = 0
        self._rounds = 0

    def start(self) -> None:
        for _ in range(self.window):
            self._insert()

    @abc.abstractmethod
    def _later_packets(self) -> int:
        """Return the number of packets of a round after the first ``window``."""

    @abc.abstractmethod
    def _next(self) -> tuple[int, int, int]:
        """Return receiver, sender and bytes of the next packet, and step to the packet after it."""

    def _insert(self) -> None:
        if self._plain == 0 and self._later == 0:
            self._plain, self._later = self.window, self._later_packets()
            self._rounds += 1
        reduced = False
        if self._plain > 0:
            self._plain -= 1
        else:
            self._later -= 1
            # The rounds of an all-reduce alternate: the odd ones reduce, the even ones gather.
            reduced = self.collective == "reduce_scatter" or (
                self.collective == "all_reduce" and self._rounds % 2 == 1
            )
        packet = self._next()
        self.queue.append(packet)
        self.npu.through_endpoint(self.endpoint_ns, packet[2] if reduced else 0, self._credit)

    def _credit(self) -> None:
        self.credits += 1
        self._send()
        self._maybe_finish()

    def _send(self) -> None:
        # A message needs a packet and a credit; whichever comes second sends it.
        if not self.queue or self.messages == 0 or self.credits == 0:
            return
        receiver, sender, size = self.queue.popleft()
        self.messages -= 1
        self.credits -= 1
        self.npu.send(receiver, self.stream.tag, size)
        self.npu.receive(sender, self.stream.tag, size, self._received)

    def _received(self) -> None:
        self._insert()

    def _maybe_finish(self) -> None:
        if self.messages == 0 and self.credits == self.window:
            self.npu.finish_phase(self.stream)


class Ring(_Packets):
    """A ring: each NPU sends to its neighbour; an all-to-all relays each block hop by hop."""

    def __init__(self, part: Part) -> None:
        super().__init__(part)
        count, collective = len(part.members), part.collective
        # A ring passes every block n - 1 times; a relayed all-to-all passes blocks 1 to n - 1 times
        # each.
        self.messages = {"all_reduce": 2 * (count - 1), "all_to_all": (count - 1) * count // 2}.get(
            collective, count - 1
        )
        self.message_bytes = part.size if collective == "all_gather" else part.size // count

    def _later_packets(self) -> int:
        return (len(self.members) - 1) * self.window

    def _next(self) -> tuple[int, int, int]:
        return self._member(self.step), self._member(-self.step), self.message_bytes

    def _member(self, offset: int) -> int:
        return self.members[(self.at + offset) % len(self.members)]


class Direct(Ring):
    """Direct exchange: each NPU sends to all its peers, the nearest first.

    At most ``window`` messages travel at a time; -1 is all of them.
    """

    def __init__(self, part: Part, window: int) -> None:
        super().__init__(part)
        peers = len(part.members) - 1
        self.peers, self._offset, self._received_count = peers, 0, 0
        self._local = part.local
        self.window = peers if window == -1 else min(window, peers)
        if part.collective == "all_to_all":
            self.messages = peers

    def _later_packets(self) -> int:
        # In a local ring ASTRA-sim lets a round be as long as the ring algorithm's.
        return super()._later_packets() if self._local else self.window

    def _next(self) -> tuple[int, int, int]:
        self._offset = self._offset % self.peers + 1
        away = self._offset * self.step
        return self._member(away), self._member(-away), self.message_bytes

    def _received(self) -> None:
        self._received_count += 1
        self._insert()

    def _credit(self) -> None:
        self.credits += 1
        # The second half of an all-reduce gathers sums, so it waits for all of the first half.
        if self.collective == "all_reduce" and self.messages <= self.peers:
            if self._received_count < self.peers:
                return
            for _ in range(self.window):
                self._send()
        else:
            self._send()
        self._maybe_finish()


class HalvingDoubling(_Packets):
    """Halving and doubling: half is exchanged with the NPU 1 away, a quarter with the NPU 2 away,
    and so on; then back.
    """

    def __init__(self, part: Part) -> None:
        super().__init__(part)
        count, collective = len(part.members), part.collective
        self.levels = int(math.log2(count))
        self.messages = 2 * self.levels if collective == "all_reduce" else self.levels
        gather = collective == "all_gather"
        self.message_bytes = part.size if gather else part.size // 2
        self._distance = count // 2 if gather else 1
        self._growing = not gather

    def _later_packets(self) -> int:
        return self.levels - self.window

    def _next(self) -> tuple[int, int, int]:
        distance, size, count = self._distance, self.message_bytes, len(self.members)
        # Peers swap: the lower half of each block of 2 x distance goes up, the upper half goes
        # down.
        step = 0 if distance == 0 else distance if (self.at // distance) % 2 == 0 else -distance
        peer = self.members[(self.at + step) % count]
        self._advance()
        # An all-reduce turns around at the largest distance, and gathers on the way back.
        if self._distance == count and self.collective == "all_reduce":
            self._growing = False
            self._advance()
        return peer, peer, size

    def _advance(self) -> None:
        if self._growing:
            self._distance, self.message_bytes = self._distance * 2, self.message_bytes // 2
        else:
            self._distance, self.message_bytes = self._distance // 2, self.message_bytes * 2


class Tree:
    """An all-reduce up and down a binary tree, with the full chunk on every edge.

    Chunks take the two trees in turn.
    """

    def __init__(
        self, npu: Npu, stream: Stream, links: tuple[int, int, int], size: int, endpoint_ns: int
    ) -> None:
        self.npu, self.stream, self.size, self.endpoint_ns = npu, stream, size, endpoint_ns
        self.parent, self.left, self.right = links
        self._arrived = 0

    def start(self) -> None:
        children = [child for child in (self.left, self.right) if child >= 0]
        if not children:
            self._pass(False, self._send_up)
        # The root has one child, and turns the sum around.
        elif self.parent < 0:
            self._hear(children[0], lambda: self._pass(True, self._send_down))
        else:
            # An inner NPU has two children, and sends up when both have arrived.
            for child in children:
                self._hear(child, lambda: self._pass(True, self._summed))

    def _summed(self) -> None:
        self._arrived += 1
        if self._arrived == 2:
            self._send_up()

    def _send_up(self) -> None:
        self.npu.send(self.parent, self.stream.tag, self.size)
        leaf = self.left < 0 and self.right < 0
        # ASTRA-sim charges a reduction for the sum on its way down as well, except at a leaf.
        arrived = self._finish if leaf else self._send_down
        self._hear(self.parent, lambda: self._pass(not leaf, arrived))

    def _send_down(self) -> None:
        for child in (self.left, self.right):
            if child >= 0:
                self.npu.send(child, self.stream.tag, self.size)
        self._finish()

    def _finish(self) -> None:
        self.npu.finish_phase(self.stream)

    def _hear(self, sender: int, arrived: Callable[[], None]) -> None:
        self.npu.receive(sender, self.stream.tag, self.size, arrived)

    def _pass(self, reduced: bool, passed: Callable[[], None]) -> None:
        self.npu.through_endpoint(self.endpoint_ns, self.size if reduced else 0, passed)


def binary_tree(members: list[int], root_last: bool) -> dict[int, tuple[int, int, int]]:
    """Return parent, left and right child of every member; -1 is none.

    The tree is balanced and in order, under a root that is the first or the last member. The number
    of members must be a power of two.
    """
    tree: dict[int, tuple[int, int, int]] = {}

    def build(low: int, high: int, parent: int) -> int:
        middle = (low + high) // 2
        node = members[middle]
        left = build(low, middle - 1, node) if low < middle else -1
        right = build(middle + 1, high, node) if middle < high else -1
        tree[node] = (parent, left, right)
        return node

    last = len(members) - 1
    root = members[last] if root_last else members[0]
    below = build(0, last - 1, root) if root_last else build(1, last, root)
    tree[root] = (-1, below, -1) if root_last else (-1, -1, below)
    return tree
