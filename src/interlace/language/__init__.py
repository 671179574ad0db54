"""GPU-initiated communication inside any Triton kernel: ``import interlace.language as il``.

Put, get, signal and wait between the ranks of a group, for every ``@triton.jit`` kernel. The memory
model is in ``README.md``.
"""

from interlace.language._instructions import to_float8
from interlace.language.addresses import (
    join,
    multiple_of,
    other_ranks,
    peer_pointer,
    pointer,
    rank,
    world_size,
)
from interlace.language.counting import arrive_last, count
from interlace.language.deadlines import (
    clock_ns,
    fill_nan,
    is_broken,
    nan_unless,
    report_late,
    report_miscount,
)
from interlace.language.epochs import (
    advance_epoch,
    clear_old,
    enter,
    following_epoch,
    in_turn,
    mark,
    next_epoch,
    previous_epoch,
    unmarked,
)
from interlace.language.lamport import get_lamport, put_lamport, sum_lamport
from interlace.language.packed import get_packed, put_packed, sum_packed
from interlace.language.primitives import barrier, fence, get, put, put_signal, signal, wait
from interlace.language.recording import record
from interlace.language.tiles import accept_tiles, complete_tiles, put_tile

__all__ = [
    "accept_tiles",
    "advance_epoch",
    "arrive_last",
    "barrier",
    "clear_old",
    "clock_ns",
    "complete_tiles",
    "count",
    "enter",
    "fence",
    "fill_nan",
    "following_epoch",
    "get",
    "get_lamport",
    "get_packed",
    "in_turn",
    "is_broken",
    "join",
    "mark",
    "multiple_of",
    "nan_unless",
    "next_epoch",
    "other_ranks",
    "peer_pointer",
    "pointer",
    "previous_epoch",
    "put",
    "put_lamport",
    "put_packed",
    "put_signal",
    "put_tile",
    "rank",
    "record",
    "report_late",
    "report_miscount",
    "signal",
    "sum_lamport",
    "sum_packed",
    "to_float8",
    "unmarked",
    "wait",
    "world_size",
]
