"""Small tables of numbers that kernels read, made on the device once for each set of numbers."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence

import torch

from interlace.comm.group import Group
from interlace.comm.ordinary import makes_ordinary_tensors
from interlace.errors import WorkspaceError

_MOST = 256  # tables of numbers remembered a group, beside those that captured graphs refer to

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
                "an operator must be called once with these tables or splits before it is captured in a CUDA graph; got new ones."
            )
        found = _make(key, group.device)
        cache.recent[key] = found
        if len(cache.recent) > _MOST:
            cache.recent.popitem(last=False)
    elif capturing:
        cache.captured[key] = found
    else:
        cache.recent.move_to_end(key)
    return found


@makes_ordinary_tensors
def _make(numbers: Numbers, device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)
