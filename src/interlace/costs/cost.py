"""The work and traffic that make up an operator's cost."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Cost:
    """Work and traffic of one rank in one call.

    Attributes:
        flops: Multiplications and additions.
        memory_bytes: Bytes that this GPU's memory reads and writes, writes by peers included.
        link_bytes: Bytes of the puts that leave this rank.
        messages: Number of puts; a put that a program sends to several peers counts once per peer.
        signals: Number of signals that leave this rank.
        network_bytes: Bytes among ``link_bytes`` that go to ranks of other nodes.
        network_messages: Messages among ``messages`` that go there.
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
        network_bytes: Bytes that go to ranks of other nodes.
        network_messages: Messages that go there.
        slices: Exchanges that the messages leave in, one after another; 1 for a collective.
        remote_share: Fraction of the computation after which the last of them is complete.
        landing_bytes: Bytes that memory reads and writes to copy what has arrived to its place.
        shares: Relative sizes of the exchanges; empty if they are equal.
    """

    network_bytes: int
    network_messages: int
    slices: int = 1
    remote_share: float = 1.0
    landing_bytes: int = 0
    shares: tuple[int, ...] = ()
