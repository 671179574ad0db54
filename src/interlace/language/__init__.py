"""GPU-initiated put, signal and wait inside any Triton kernel: ``import interlace.language as il``."""

from interlace.language.primitives import (
    advance_epoch,
    barrier,
    fence,
    get,
    join,
    next_epoch,
    peer_pointer,
    pointer,
    put,
    put_packed,
    put_signal,
    rank,
    signal,
    sum_packed,
    wait,
    world_size,
)

__all__ = [
    "advance_epoch",
    "barrier",
    "fence",
    "get",
    "join",
    "next_epoch",
    "peer_pointer",
    "pointer",
    "put",
    "put_packed",
    "put_signal",
    "rank",
    "signal",
    "sum_packed",
    "wait",
    "world_size",
]
