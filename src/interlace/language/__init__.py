"""GPU-initiated put, signal and wait inside any Triton kernel: ``import interlace.language as il``."""

from interlace.language.counting import arrive_last
from interlace.language.primitives import (
    advance_epoch,
    barrier,
    fence,
    get,
    get_packed,
    join,
    mark,
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
from interlace.language.tiles import complete_tiles, put_tile

__all__ = [
    "advance_epoch",
    "arrive_last",
    "barrier",
    "complete_tiles",
    "fence",
    "get",
    "get_packed",
    "join",
    "mark",
    "next_epoch",
    "peer_pointer",
    "pointer",
    "put",
    "put_packed",
    "put_signal",
    "put_tile",
    "rank",
    "signal",
    "sum_packed",
    "wait",
    "world_size",
]
