"""Waits of explored kernels: one operation each, which takes place when its condition holds.

The primitive itself then looks once, at the values that ended the wait, and finds it over. So the
explorer needs no knowledge of signals and packed words: it asks the primitives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import triton.language as tl

from interlace import language
from interlace.language._interpreted import require_addresses
from interlace.language.primitives import require_tile_of_signals
from interlace.units import next_power_of_2
from interlace_explorer import kernels
from interlace_explorer.memory import Addresses
from interlace_explorer.operations import Kind, Operation, Words
from interlace_explorer.ranks import RankRun, current


def wait(
    original: Callable[..., Any],
    ptr: Any,
    epoch: Any,
    peer: Any,
    slice: Any,
    group: Any,
    mask: Any = None,
) -> Any:
    """Wait for signals as one operation, then call ``original``, which is ``il.wait``."""
    run = current()
    assert run is not None
    # Before the rank stands still, where a signal that is not awaited as meant would be a deadlock.
    require_tile_of_signals(ptr)
    pointers = language.peer_pointer(ptr, language.rank(group), group).handle.data
    selected = np.broadcast_to(True if mask is None else _plain(mask), pointers.shape).astype(bool)
    stamps = np.broadcast_to(np.asarray(_plain(epoch)).astype(np.int32), pointers.shape)[selected]
    require_addresses("wait", pointers[selected], language.rank(group), 4, group)
    _await(run, Kind.WAIT, pointers[selected], stamps, (0, 4))
    # The primitive shall see signals that have just arrived. Their true values may be a call ahead,
    # which would make runs differ that are otherwise the same.
    with _having_seen(run, pointers[selected], stamps):
        return original(ptr, epoch, peer, slice, group, mask)


def sum_words(
    original: Callable[..., Any],
    ptr: Any,
    kept: Any,
    stride: Any,
    first: Any,
    epoch: Any,
    slice: Any,
    group: Any,
    mask: Any,
    SOURCES: Any,
    VALUES: Any,
    *order: Any,
) -> Any:
    """Wait for packed words as one operation, then call ``original``, which adds them."""
    with _having_awaited(ptr, kept, stride, epoch, group, mask, SOURCES, int(_plain(VALUES))):
        return original(
            ptr, kept, stride, first, epoch, slice, group, mask, SOURCES, VALUES, *order
        )


def sum_values(
    original: Callable[..., Any],
    ptr: Any,
    own: Any,
    stride: Any,
    first: Any,
    epoch: Any,
    slice: Any,
    group: Any,
    mask: Any,
    SOURCES: Any,
    *order: Any,
) -> Any:
    """Wait for values that show by themselves that they have arrived, then call ``original``."""
    with _having_awaited(ptr, own, stride, epoch, group, mask, SOURCES, 0):
        return original(ptr, own, stride, first, epoch, slice, group, mask, SOURCES, *order)


@contextlib.contextmanager
def _having_awaited(
    ptr: Any, kept: Any, stride: Any, epoch: Any, group: Any, mask: Any, sources: Any, values: int
) -> Iterator[None]:
    """Wait for one tile from every source as one operation; loads see it within the block.

    Args:
        ptr, kept, stride, epoch, group, mask, sources: As ``sum_words`` takes them.
        values: Number of values per packed word; 0 for values that are not packed.
    """
    run = current()
    assert run is not None
    me = language.rank(group)
    pointers = language.peer_pointer(ptr, me, group).handle.data
    itemsize = ptr.dtype.element_ty.primitive_bitwidth // 8
    selected = np.broadcast_to(_plain(mask), pointers.shape).astype(bool)
    rank, step = (int(np.asarray(_plain(each)).item()) for each in (me, stride))
    others = [source for source in range(int(_plain(sources))) if kept is None or source != rank]
    addresses = np.concatenate(
        [pointers[selected] + np.uint64(source * step * itemsize) for source in others]
        or [pointers[:0].ravel()]
    )
    stamps = np.full(len(addresses), np.asarray(_plain(epoch)).item(), np.int32)
    primitives = "get_packed, sum_packed" if values else "get_lamport, sum_lamport"
    require_addresses(primitives, addresses, rank, itemsize, group)
    response = _await(run, Kind.WORDS, addresses, stamps, (values, itemsize))
    with _having_seen(run, addresses, np.frombuffer(response or b"", f"i{itemsize}")):
        yield


def _await(
    run: RankRun, kind: Kind, addresses: Addresses, stamps: Words, detail: tuple[int, int]
) -> Any:
    """Do a wait and return the words that it has seen; None for signals.

    Args:
        detail: Number of values per packed word, or 0, and the bytes of a signal or word.
    """
    if not len(addresses):
        return None
    offsets = run.tree.view.offsets_of(addresses)
    cells = run.tree.cells.cells_at(offsets, detail[1])
    return run.perform(kind, cells, stamps, detail)


@contextlib.contextmanager
def _having_seen(run: RankRun, addresses: Addresses, values: Words) -> Iterator[None]:
    """Let loads from these addresses return these values, within a block."""
    order = np.argsort(addresses)
    run.awaited = (addresses[order], values[order]) if len(addresses) else None
    try:
        yield
    finally:
        run.awaited = None


def _plain(x: Any) -> Any:
    """Return a tensor's numpy array, a constexpr's value, or ``x`` itself."""
    if isinstance(x, tl.tensor):
        return x.handle.data
    return getattr(x, "value", x)


class Judge:
    """Tells if a wait is over, from the words that it would see; it remembers the answers."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int], bool] = {}

    def __call__(self, node: Operation, seen: Words) -> bool:
        """Tell if the wait ``node`` is over when its cells hold ``seen``."""
        assert node.values is not None
        values, itemsize = node.detail
        words = seen.view(f"i{itemsize}")
        if node.kind == Kind.WORDS and not values:
            return bool((words != 0).all())
        # The epoch is in the low bits of a packed word. The other bits hold its value, and would
        # make the remembered answers useless.
        keys = [
            (values, int(word) & 0xFFFFFFFF, int(epoch))
            for word, epoch in zip(words, node.values, strict=True)
        ]
        unknown = {
            key: word for key, word in zip(keys, words, strict=True) if key not in self._known
        }
        if unknown:
            self._ask(values, list(unknown), np.array(list(unknown.values())))
        return all(self._known[key] for key in keys)

    def _ask(self, values: int, keys: list[tuple[int, int, int]], words: Words) -> None:
        """Ask the primitives: ``values`` per packed word, or 0 for signals."""
        # A tile of Triton has a power of two of elements.
        count = next_power_of_2(len(keys))
        seen = torch.from_numpy(np.concatenate([words, words[:1].repeat(count - len(keys))]))
        stamps = torch.tensor(
            [epoch for _, _, epoch in keys] + [0] * (count - len(keys)), dtype=torch.int32
        )
        out = torch.zeros(count, dtype=torch.int32)
        if values:
            kernels.judge_words[(1,)](seen, stamps, out, N=count, VALUES=values)
        else:
            kernels.judge_signals[(1,)](seen, stamps, out, N=count)
        self._known.update(zip(keys, [bool(answer) for answer in out.tolist()], strict=False))
