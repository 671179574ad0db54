"""Device-side records of a rank's tables, made once for each set of tables."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence

import torch

from interlace.comm import Group
from interlace.errors import WorkspaceError
from interlace.ops.embedding_all_to_all import record
from interlace.ops.embedding_all_to_all.config import OPERATOR

_MOST = 256  # sets of tables remembered a group, beside those that captured graphs refer to

Numbers = tuple[tuple[int, ...], ...]


class _Cache:
    def __init__(self) -> None:
        self.recent: OrderedDict[Numbers, torch.Tensor] = OrderedDict()
        self.captured: dict[Numbers, torch.Tensor] = {}


_caches: weakref.WeakKeyDictionary[Group, _Cache] = weakref.WeakKeyDictionary()


def on_device(group: Group, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """``rows`` as int64 on the group's device; the same tensor for the same numbers.

    What a captured graph refers to is kept as long as the group.
    """
    key = tuple(map(tuple, rows))
    cache = _caches.setdefault(group, _Cache())
    found = cache.captured.get(key)
    if found is not None:
        return found
    found = cache.recent.get(key)
    capturing = group.capture_id() is not None
    if found is None:
        if capturing:
            raise WorkspaceError(
                f"{OPERATOR} must be called once with these tables before it is captured in a CUDA graph; got new ones."
            )
        found = torch.tensor(key, dtype=torch.int64, device=group.device)
        cache.recent[key] = found
        if len(cache.recent) > _MOST:
            cache.recent.popitem(last=False)
    elif capturing:
        cache.captured[key] = found
    else:
        cache.recent.move_to_end(key)
    return found


def entry(
    *,
    width: int,
    column: int,
    own_column: int,
    address: int = 0,
    stride: int = 0,
    first_key: int = 0,
    target: int = -1,
    target_stride: int = 0,
    state: int = 0,
) -> tuple[int, ...]:
    """The record of one table; see ``record`` for the fields."""
    fields = [0] * record.FIELDS
    fields[record.ADDRESS], fields[record.STRIDE], fields[record.WIDTH] = address, stride, width
    fields[record.COLUMN], fields[record.OWN_COLUMN], fields[record.FIRST_KEY] = column, own_column, first_key
    fields[record.TARGET], fields[record.TARGET_STRIDE], fields[record.STATE] = target, target_stride, state
    return tuple(fields)


def alignment(numbers: Sequence[int], itemsize: int) -> int:
    """Elements, a power of two of at most 16 bytes, that every one of ``numbers`` (in elements) is a multiple of."""
    align = 16 // itemsize
    while align > 1 and any(number % align for number in numbers):
        align //= 2
    return align
