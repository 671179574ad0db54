"""Small tables of numbers that kernels read, made on the device once for each set of numbers."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence

import torch

from interlace.comm.group import Group
from interlace.comm.ordinary import makes_ordinary_tensors
from interlace.errors import WorkspaceError

_MOST = 256  # tables of numbers that a group remembers without anybody referring to them

Numbers = tuple[tuple[int, ...], ...]


class _Cache:
    """The tables of one group. The numbers may be this rank's own: a miss costs a copy to the
    device and asks no peer.

    Attributes:
        alive: every table that something still refers to: ``recent``, ``captured``, or a call of
            the group's replays.
        recent: the ones that were asked for last.
        captured: the ones that CUDA graphs of the program refer to.
    """

    def __init__(self) -> None:
        self.alive: weakref.WeakValueDictionary[Numbers, torch.Tensor] = (
            weakref.WeakValueDictionary()
        )
        self.recent: OrderedDict[Numbers, torch.Tensor] = OrderedDict()
        self.captured: dict[Numbers, torch.Tensor] = {}


_caches: weakref.WeakKeyDictionary[Group, _Cache] = weakref.WeakKeyDictionary()


def on_device(group: Group, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """``rows`` as int64 on the group's device; the same tensor for the same numbers.

    A table that a CUDA graph of the program refers to is kept as long as the group; one that a call
    of the group's replays has used is kept as long as that call is remembered, since it may be
    captured when it comes again.

    Raises:
        WorkspaceError: the numbers are new, and a CUDA graph is being captured.
    """
    key = tuple(map(tuple, rows))
    cache = _caches.setdefault(group, _Cache())
    found = cache.recent.get(key)
    capturing = group.capture_id() is not None
    if found is not None:
        cache.recent.move_to_end(key)
    else:
        found = cache.alive.get(key)
        if found is None and capturing:
            raise WorkspaceError(
                "an operator must be called once with these tables or splits before it is "
                "captured in a CUDA graph; got new ones."
            )
        if found is None:
            found = cache.alive[key] = _make(key, group.device)
        cache.recent[key] = found
        if len(cache.recent) > _MOST:
            cache.recent.popitem(last=False)
    if capturing and not group.replays.capturing:
        cache.captured[key] = found
    group.replays.refer_to(found)
    return found


@makes_ordinary_tensors
def _make(numbers: Numbers, device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)
