"""Batches of tensors for each rank, cut from a stream of records."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from interlace.errors import ArgumentError
from interlace_dlrm.errors import DataError
from interlace_dlrm.records import CATEGORIES, MISSING, Records, hash_to_rows, log_transform, mix


@dataclasses.dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch: ``n`` samples, ``T`` tables.

    Attributes:
        dense: float32 ``[n, 13]``, log-transformed.
        indices: int64, table-major: all bags of table 0, then all of table 1.
        offsets: int64 ``[T * n + 1]``, the index at which each bag begins; None if every table's
            bags have one known length.
        labels: float32 ``[n]``, 0 or 1.
        valid: bool ``[n]``; False for samples that only fill up the last batch.
    """

    dense: torch.Tensor
    indices: torch.Tensor
    offsets: torch.Tensor | None
    labels: torch.Tensor
    valid: torch.Tensor

    def to(self, device: torch.device | str) -> Batch:
        """Copy the batch to ``device``; the call does not wait for copies from pinned memory."""
        return self._map(lambda t: t.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Copy the batch to pinned memory, from which copies to GPUs are asynchronous."""
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
    """Turn records into a batch, table t's bags from category t.

    For a bag of several lookups, an id stands for a fixed set of rows, as in MLPerf's multi-hot
    data: hashes of the id and a position.

    Args:
        records: N records.
        rows: Rows of each table; at most 26 tables, each of at least 2 rows (row 0 is for missing
            categories).
        lookups: Lookups per bag, for each table or for all.
        jagged: Whether bags of table t have 0 to ``2 * lookups[t] - 1`` lookups, depending on the
            id, instead of ``lookups[t]``.

    Raises:
        ArgumentError: there are more than 26 tables, a table has fewer than 2 rows, or a bag has no
            lookups.
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
            f"each; got rows {list(rows)} and lookups {count}."
        )
    # Table-major order is that of the embedding operator: a rank owns tables, not samples.
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
        valid=torch.ones(len(records), dtype=torch.bool, device="cpu"),
    )


_Ints = npt.NDArray[np.int64]


def _bags(ids: _Ints, rows: int, lookups: int, jagged: bool) -> tuple[_Ints, _Ints]:
    """Return the bags of one table, one after another, and their lengths."""
    if lookups == 1 and not jagged:
        return hash_to_rows(ids, rows), np.ones(len(ids), np.int64)
    lengths = np.full(len(ids), lookups, np.int64)
    if jagged:
        lengths = (mix(ids.astype(np.uint64) + np.uint64(1)) % np.uint64(2 * lookups)).astype(
            np.int64
        )
    # The position of each lookup within its bag, for all bags at a time.
    begins = np.cumsum(lengths) - lengths
    position = np.arange(lengths.sum()) - np.repeat(begins, lengths)
    spread = np.repeat(ids, lengths)
    # Position 0 is the id itself; the others lie in ranges of ids above 32 bits, which no real id
    # has.
    return hash_to_rows(
        np.where(spread == MISSING, MISSING, spread + (position << 32)), rows
    ), lengths


class BatchStream:
    """The batches that a rank takes from a stream of records.

    Every rank reads the full stream and takes its part of each global batch.

    Global batch g holds records ``[g * batch, (g + 1) * batch)`` of the stream, and rank r's part
    is the r-th of R equal chunks of it, so the contents of a global batch do not depend on the
    number of ranks. The last, incomplete batch is dropped (``last="drop"``) or filled up with
    copies of its last record that are marked as not valid (``last="pad"``). A stream without a
    single batch is an error; only of those that are held out there may be none.

    Args:
        source: An iterable of :class:`Records` that repeats them each time it is iterated over.
        batch: Samples of a global batch; R must divide it.
        rows, lookups, jagged: Arguments of :func:`collate`.
        rank: Number of this process among the data-parallel ranks.
        world_size: R, the number of data-parallel ranks.
        last: ``"drop"`` or ``"pad"``.
        held_out_every: Interval in global batches at which one is held out; 0 holds out none.
        held_out: Whether to give the batches that are held out instead of all others.

    Raises:
        ArgumentError: R does not divide the batch, or an option has an unknown value.
        DataError: during iteration: the source has ended without a batch.

    Example:
        >>> files = CriteoFiles(["train.txt"])
        >>> stream = BatchStream(files, 2048, rows=[10_000] * 26, rank=0, world_size=4)
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
                f"{batch}. Take {max(1, batch // world_size) * world_size}."
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
        # Every rank reads all records, so that no rank needs to know the position of another.
        part = self.batch // self.world_size
        count, has_given = 0, False
        for number, records in enumerate(_global_batches(self.source, self.batch)):
            count += len(records)
            is_held_out = bool(self.held_out_every) and (number + 1) % self.held_out_every == 0
            if is_held_out != self.held_out or (len(records) < self.batch and self.last == "drop"):
                continue
            has_given = True
            yield self._batch(records, self.rank * part, part)
        if not has_given and not self.held_out:
            need = self.batch if self.last == "drop" else 1
            raise DataError(
                f"BatchStream: the source must have {need} records or more, for one batch; got "
                f"{count}. Give more data{', or take a smaller batch' if count else ''}."
            )

    def _batch(self, records: Records, begin: int, count: int) -> Batch:
        padded = max(0, begin + count - len(records))
        local = records[begin : begin + count]
        # A rank's part may lie beyond the last record entirely, and still needs as many samples.
        if padded:
            local = Records.join([local, *[records[-1:]] * min(padded, count)])
        batch = collate(local, self.rows, self.lookups, jagged=self.jagged)
        batch.valid[max(0, count - padded) :] = False
        return batch


def _global_batches(source: Iterable[Records], size: int) -> Iterator[Records]:
    """Cut the stream into ``size`` records each; the last cut may have fewer."""
    parts: list[Records] = []
    held = 0
    for records in source:
        parts.append(records)
        held += len(records)
        # Records arrive in blocks of any size, and are joined only when they fill a batch.
        if held < size:
            continue
        joined = Records.join(parts)
        complete = held - held % size
        for begin in range(0, complete, size):
            yield joined[begin : begin + size]
        parts, held = [joined[complete:]], held - complete
    if held:
        yield Records.join(parts)
