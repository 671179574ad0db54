"""The work and traffic that make up an operator's cost."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Cost:
    """Work and traffic of one rank in one call.

    Attributes:
        flops: multiplications and additions.
        memory_bytes: bytes that this GPU's memory reads and writes, writes by peers included.
        link_bytes: bytes of the puts that leave this rank.
        messages: number of puts; a put that a program sends to several peers counts once per peer.
        signals: number of signals that leave this rank.
        network_bytes: bytes among ``link_bytes`` that go to ranks of other nodes.
        network_messages: messages among ``messages`` that go there.
    """

    flops: int
    memory_bytes: int
    link_bytes: int
    messages: int
    signals: int
    network_bytes: int = 0
    network_messages: int = 0


@dataclasses.dataclass(frozen=True)
class NetworkCost:
    """The traffic of one rank between nodes, from which the time of a call follows.

    Attributes:
        network_bytes: bytes that go to ranks of other nodes.
        network_messages: messages that go there.
        slices: exchanges that the messages leave in, one after another; 1 for a collective.
        remote_share: fraction of the computation after which the last of them is complete.
        landing_bytes: bytes that memory reads and writes to copy what has arrived to its place.
        shares: relative sizes of the exchanges; empty if they are equal.
    """

    network_bytes: int
    network_messages: int
    slices: int = 1
    remote_share: float = 1.0
    landing_bytes: int = 0
    shares: tuple[int, ...] = ()
