"""What every operator's cost is made of."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Cost:
    """Work and traffic of one rank.

    Attributes:
        flops: multiplications and additions.
        memory_bytes: what this GPU's memory reads and writes, writes by peers included.
        link_bytes: bytes of puts that leave this rank.
        messages: puts, counted once for each peer that a put of a program reaches.
        signals: signals that leave this rank.
    """

    flops: int
    memory_bytes: int
    link_bytes: int
    messages: int
    signals: int
