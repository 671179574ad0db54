"""From a stream of records to each rank's batches, as tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from interlace.data.records import CATEGORIES, MISSING, Records, hash_to_rows, log_transform, mix
from interlace.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch: ``n`` samples, ``T`` tables.

    Attributes:
        dense: float32 ``[n, 13]``, log-transformed.
        indices: int64, table-major: all bags of table 0, then all of table 1.
        offsets: int64 ``[T * n + 1]``, where each bag begins; None if every table's bags have one
            known length.
        labels: float32 ``[n]``, 0 or 1.
        valid: bool ``[n]``; False for samples that only fill up the last batch.
    """

    dense: torch.Tensor
    indices: torch.Tensor
    offsets: torch.Tensor | None
    labels: torch.Tensor
    valid: torch.Tensor

    def to(self, device: torch.device | str) -> Batch:
        """The batch on ``device``; without waiting for the copies if this one is pinned."""
        return self._map(lambda t: t.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        return self._map(torch.Tensor.pin_memory)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        offsets = None if self.offsets is None else change(self.offsets)
        return Batch(
            change(self.dense),
            change(self.indices),
            offsets,
            change(self.labels),
            change(self.valid),
        )


def collate(
    records: Records, rows: Sequence[int], lookups: Sequence[int] | int = 1, *, jagged: bool = False
) -> Batch:
    """Records as a model takes them, table t's bags from category t.

    For a bag of several lookups, an id stands for a fixed set of rows, in the manner of MLPerf's
    multi-hot data: hashes of the id and a position.

    Args:
        records: n of them.
        rows: of each table; at most 26 tables, each of at least 2 rows (row 0 is for missing
            categories).
        lookups: per bag, for each table or for all.
        jagged: bags of table t have 0 to ``2 * lookups[t] - 1`` lookups, depending on the id,
            instead of ``lookups[t]``.

    Raises:
        ArgumentError: more than 26 tables, a table of fewer than 2 rows, or a bag without lookups.
    """
    count = [lookups] * len(rows) if isinstance(lookups, int) else list(lookups)
    if (
        not 1 <= len(rows) <= CATEGORIES
        or len(count) != len(rows)
        or min(rows) < 2
        or min(count) < 1
    ):
        raise ArgumentError(
            f"collate: there must be 1 to {CATEGORIES} tables of at least 2 rows and 1 lookup "
            "each; "
            f"got rows {list(rows)} and lookups {count}."
        )
    bags = [_bags(records.categories[:, t], rows[t], count[t], jagged) for t in range(len(rows))]
    offsets = None
    if jagged:
        lengths = np.concatenate([length for _, length in bags])
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    return Batch(
        dense=torch.from_numpy(log_transform(records.integers)),
        indices=torch.from_numpy(np.concatenate([index for index, _ in bags])),
        offsets=offsets,
        labels=torch.from_numpy(records.labels.astype(np.float32)),
        valid=torch.ones(len(records), dtype=torch.bool),
    )


_Ints = npt.NDArray[np.int64]


def _bags(ids: _Ints, rows: int, lookups: int, jagged: bool) -> tuple[_Ints, _Ints]:
    """The bags of one table, one after another, and their lengths."""
    if lookups == 1 and not jagged:
        return hash_to_rows(ids, rows), np.ones(len(ids), np.int64)
    lengths = np.full(len(ids), lookups, np.int64)
    if jagged:
        lengths = (mix(ids.astype(np.uint64) + np.uint64(1)) % np.uint64(2 * lookups)).astype(
            np.int64
        )
    begins = np.cumsum(lengths) - lengths
    position = np.arange(lengths.sum()) - np.repeat(begins, lengths)
    spread = np.repeat(ids, lengths)
    # Position 0 is the id itself; the others lie in ranges of ids above 32 bits, which no real id
    # has.
    return hash_to_rows(
        np.where(spread == MISSING, MISSING, spread + (position << 32)), rows
    ), lengths


class BatchStream:
    """A rank's batches of a stream of records: every rank reads the same stream and takes its part
    of each global batch.

    Global batch g holds records ``[g * batch, (g + 1) * batch)`` of the stream, and rank r's part
    is the r-th of R equal chunks of it, so what a global batch holds does not depend on the number
    of ranks. The last, incomplete one is dropped (``last="drop"``) or filled up with copies of its
    last record that are marked as not valid (``last="pad"``).

    Args:
        source: anything that gives :class:`Records` when iterated over, the same ones each time.
        batch: samples of a global batch; R must divide it.
        rows, lookups, jagged: as for :func:`collate`.
        rank, world_size: this process's place among the data-parallel ranks.
        last: ``"drop"`` or ``"pad"``.
        held_out_every: set every so many-th global batch aside; 0 for none.
        held_out: give the batches that were set aside instead of the others.

    Raises:
        ArgumentError: R does not divide the batch, or an option that is none.

    Example:
        >>> stream = BatchStream(CriteoFiles(["train.txt"]), 2048, rows=[10_000] * 26, rank=0, world_size=4)
        >>> for batch in stream:  # 512 samples each
        ...     ...
    """

    def __init__(
        self,
        source: Iterable[Records],
        batch: int,
        *,
        rows: Sequence[int],
        lookups: Sequence[int] | int = 1,
        jagged: bool = False,
        rank: int = 0,
        world_size: int = 1,
        last: str = "drop",
        held_out_every: int = 0,
        held_out: bool = False,
    ) -> None:
        if batch < 1 or batch % world_size:
            raise ArgumentError(
                f"BatchStream: the global batch must divide evenly over {world_size} ranks; got "
                f"{batch}. "
                f"Take {max(1, batch // world_size) * world_size}."
            )
        if last not in ("drop", "pad"):
            raise ArgumentError(f"BatchStream: last must be drop or pad; got {last!r}.")
        if held_out_every == 1 or held_out_every < 0:
            raise ArgumentError(
                f"BatchStream: held_out_every must be 0 or at least 2; got {held_out_every}."
            )
        self.source, self.batch, self.rows, self.lookups, self.jagged = (
            source,
            batch,
            list(rows),
            lookups,
            jagged,
        )
        self.rank, self.world_size, self.last = rank, world_size, last
        self.held_out_every, self.held_out = held_out_every, held_out

    def __iter__(self) -> Iterator[Batch]:
        part = self.batch // self.world_size
        for number, records in enumerate(_global_batches(self.source, self.batch)):
            aside = bool(self.held_out_every) and (number + 1) % self.held_out_every == 0
            if aside != self.held_out or (len(records) < self.batch and self.last == "drop"):
                continue
            yield self._batch(records, self.rank * part, part)

    def _batch(self, records: Records, begin: int, count: int) -> Batch:
        missing = max(0, begin + count - len(records))
        own = records[begin : begin + count]
        if missing:
            own = Records.join([own, *[records[-1:]] * min(missing, count)])
        batch = collate(own, self.rows, self.lookups, jagged=self.jagged)
        batch.valid[max(0, count - missing) :] = False
        return batch


def _global_batches(source: Iterable[Records], size: int) -> Iterator[Records]:
    """The stream cut into ``size`` records each; the last may have fewer."""
    parts: list[Records] = []
    held = 0
    for records in source:
        parts.append(records)
        held += len(records)
        if held < size:
            continue
        joined = Records.join(parts)
        whole = held - held % size
        for begin in range(0, whole, size):
            yield joined[begin : begin + size]
        parts, held = [joined[whole:]], held - whole
    if held:
        yield Records.join(parts)
