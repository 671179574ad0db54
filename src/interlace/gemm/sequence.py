"""Products between two layouts of one matrix: ranks have rows of the sequence, or columns.

What the two operators of Ulysses' sequence parallelism share: how rows and columns are shared out,
and their declaration. ``sequence_dispatch`` runs a call.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch.distributed as dist

from interlace.comm import Group, process_group_named
from interlace.comm.groups.reservation import Reservation
from interlace.errors import ArgumentError
from interlace.gemm import invariance
from interlace.gemm.choice import choose_alike
from interlace.gemm.config import GemmConfig
from interlace.gemm.operands import Operands, integer
from interlace.gemm.reservations import Ranks
from interlace.registry import BATCH_INVARIANT, Operator
from interlace.tuning.choice import Choice
from interlace.units import ceil_div

ColumnRanges = Sequence[Sequence[tuple[int, int]]]
"""For each rank, the columns that belong to it: ranges ``(first, end)``, in their order."""

Ranges = tuple[tuple[tuple[int, int], ...], ...]
"""The same, as calls hold it."""


def column_count(ranges_of_rank: Sequence[tuple[int, int]]) -> int:
    """Return the number of columns in a rank's ranges."""
    return sum(end - first for first, end in ranges_of_rank)


def contiguous_ranges(counts: Sequence[int]) -> Ranges:
    """Return the ranges of ranks that have so many columns each, one rank's behind the other's."""
    return tuple(((sum(counts[:rank]), sum(counts[: rank + 1])),) for rank in range(len(counts)))


def flat_ranges(column_ranges: ColumnRanges) -> list[int]:
    """Return ranges as a schema holds them: of each rank their number, then their ends."""
    flat: list[int] = []
    for ranges_of_rank in column_ranges:
        flat.append(len(ranges_of_rank))
        flat += [edge for column_range in ranges_of_rank for edge in column_range]
    return flat


@functools.lru_cache(maxsize=1024)
def ranges_of(flat: tuple[int, ...]) -> Ranges:
    """Return what :func:`flat_ranges` has flattened."""
    by_rank, start = [], 0
    while start < len(flat):
        end = start + 1 + 2 * flat[start]
        by_rank.append(
            tuple(zip(flat[start + 1 : end : 2], flat[start + 2 : end : 2], strict=True))
        )
        start = end
    return tuple(by_rank)


@dataclasses.dataclass(frozen=True)
class SequenceCall:
    """One call, validated and agreed on by all ranks.

    Attributes:
        operands: X, w and bias of this rank.
        rows: Rows of the sequence on each rank.
        columns: Columns of each rank, of the product or of the gathered x.
        gather: Whether the gathered x is a result, too.
        group: The ranks; ``gemm.reservations.Ranks`` where only sizes count.
        group_name: The name of their process group.
        config: The fused kernel's configuration.
        mark: The number that this call's signals carry; from the ranks' agreement.
    """

    operands: Operands
    rows: tuple[int, ...]
    columns: Ranges
    gather: bool
    group: Group
    group_name: str
    config: GemmConfig
    mark: int

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Return the process group; None where this process is on its own."""
        return process_group_named(self.group_name)

    @property
    def column_counts(self) -> list[int]:
        """Return the number of columns of each rank."""
        return list(map(column_count, self.columns))

    @property
    def first_row(self) -> int:
        """Return the number of rows of the ranks before this one."""
        return sum(self.rows[: self.group.rank])

    def memory(self) -> tuple[Any, ...]:
        """Return what the work depends on, for the key of a replay."""
        return self.rows, self.columns, self.gather, self.config, self.mark, self.operands.memory()


class SequenceOperator(Operator):
    """Base of the two operators, which differ in the side of the product that ranks exchange.

    Attributes:
        alike: An operator of as large a product, whose ranks exchange as many bytes: its predicted
            times are taken for this one's, which no profile composes, beyond the tuned table.
    """

    alike: ClassVar[str]

    computation = "gemm"
    sizes = ("rows", "columns", "inner")
    choosers = ("auto", BATCH_INVARIANT)

    def choose(self, **call: Any) -> Choice[Any]:
        """Return what ``impl="auto"`` runs; see :func:`interlace.gemm.choice.choose_alike`."""
        return choose_alike(self.name, self.alike, self.config_type, **call)

    @abc.abstractmethod
    def excess(
        self,
        operands: Operands,
        rows: Sequence[int],
        columns: Ranges,
        rank: int,
        world_size: int,
    ) -> dict[str, int]:
        """Return by how much a rank's operands have more than the lists say, in words; 0 for a list
        that has not an entry for each rank, which :meth:`check` refuses.

        Ranks compare these numbers, so that one whose operands do not fit stops all of them.
        """

    @abc.abstractmethod
    def check(
        self,
        operands: Operands,
        rows: Sequence[int],
        columns: Ranges,
        rank: int | None,
        world_size: int,
    ) -> None:
        """Refuse lists that fit neither the operands nor the group, on all ranks alike.

        Args:
            rows: Rows of the sequence on each rank.
            columns: Columns of each rank.
            rank: This rank; None where it is not known, whose operands any rank may have.
            world_size: The number of ranks.

        Raises:
            ArgumentError: A list does not fit.
        """

    def fitted(self, config: Any, columns: ColumnRanges) -> Any:
        """Return a configuration whose tiles fit the columns of the ranks."""
        return config

    def choice_of(
        self,
        operands: Operands,
        rows: Sequence[int],
        columns: ColumnRanges,
        world_size: int,
        nodes: int = 1,
        *,
        is_batch_invariant: bool = False,
    ) -> Choice[Any]:
        """Return what ``impl="auto"`` chooses for these operands, within a node or between several.

        Args:
            rows: Rows of each rank.
            is_batch_invariant: Whether a row must have the same bits in every batch, for which only
                the kernel is known.
        """
        x = operands.x
        if is_batch_invariant and not invariance.has_one_arithmetic(x.device, x.dtype):
            # Tiles may change bits here, so they must not follow the rows.
            rows = [invariance.REFERENCE_ROWS] * world_size
        # Rows of the whole sequence, so that each rank's share is what tiles are chosen by; and all
        # of K, also where x has only some of its columns.
        sizes = operands.sizes(sum(rows)) | {"inner": operands.w.shape[1]}
        choice = self.choose(**sizes, world_size=world_size, w_along_k=operands.w_along_k)
        choice = dataclasses.replace(choice, config=self.fitted(choice.config, columns))
        if is_batch_invariant:
            (kernel,) = invariance.invariant_implementations(self)
            reason = f"calls must be batch-invariant; {choice.reason}"
            return dataclasses.replace(choice, impl=kernel.name, times_us={}, reason=reason)
        if nodes == 1:
            return choice
        reason = f"the ranks are on {nodes} nodes, between which no kernel of this operator sends"
        return dataclasses.replace(choice, impl="unfused", times_us={}, reason=reason)

    def sized_call(
        self, operands: Operands, rows: Sequence[int], columns: Ranges, world_size: int
    ) -> SequenceCall:
        """Return a call of these sizes, whose operands may be any rank's, for :meth:`sized`.

        Raises:
            ArgumentError: The lists do not fit.
        """
        self.check(operands, rows, columns, None, world_size)
        choice = self.choice_of(
            operands, rows, columns, world_size, is_batch_invariant=invariance.is_enabled()
        )
        ranks: Any = Ranks(world_size, operands.x.device, 1)
        return SequenceCall(operands, tuple(rows), columns, False, ranks, "", choice.config, 0)

    def explain(
        self,
        *tensors: Any,
        world_size: int,
        nodes: int = 1,
        lacking: Mapping[str, str] = MappingProxyType({}),
        **options: Any,
    ) -> tuple[str, str, str]:
        """Return a description of the call, what ``impl="auto"`` runs, and the reason."""
        call = self.sized(*tensors, world_size=world_size, **options)
        operands, rows, columns = call.operands, call.rows, call.columns
        dtype = str(operands.x.dtype).removeprefix("torch.")
        described = (
            f"{self.name} of x {list(operands.x.shape)} and w {list(operands.w.shape)}, {dtype}"
        )
        is_batch_invariant = invariance.is_enabled()
        choice = self.choice_of(
            operands, rows, columns, world_size, nodes, is_batch_invariant=is_batch_invariant
        )
        if is_batch_invariant:
            self.require_nodes(choice.impl, nodes, is_invariant=True)
        elif choice.impl in lacking:
            return described, "unfused", f"{choice.impl} needs {lacking[choice.impl]}"
        chosen = choice.impl
        if chosen == self.implementations[0].name:
            chosen = f"{chosen} ({choice.config})"
        return described, chosen, choice.reason


def check_ranges(operator: str, columns: Ranges, count: int, world_size: int) -> None:
    """Refuse ranges that are not of the columns or the group.

    Args:
        count: Number of columns that there are.

    Raises:
        ArgumentError: There is not a list for each rank, or a range is none of the columns, or a
            rank has a column twice.
    """
    subject = f"{operator}: column_ranges"
    if len(columns) != world_size:
        raise ArgumentError(
            f"{subject} must have a list for each of {world_size} ranks; got {len(columns)}."
        )
    for rank, ranges_of_rank in enumerate(columns):
        for first, end in ranges_of_rank:
            if not 0 <= first <= end <= count:
                raise ArgumentError(
                    f"{subject}[{rank}] must hold ranges (first, end) of the {count} columns; got "
                    f"{(first, end)}."
                )
        in_order = sorted(
            column_range for column_range in ranges_of_rank if column_range[0] < column_range[1]
        )
        for before, behind in itertools.pairwise(in_order):
            if behind[0] < before[1]:
                raise ArgumentError(
                    f"{subject}[{rank}] must have no column twice; got {list(ranges_of_rank)}."
                )


def validate_ranges(operator: str, column_ranges: object) -> list[list[tuple[int, int]]]:
    """Return ranges as lists of two integers, once they are such lists.

    Of which columns and ranks they are, ranks check together.

    Raises:
        ArgumentError: They are no lists, or hold something other than pairs of integers.
    """
    subject = f"{operator}: column_ranges"
    return [
        [_pair(f"{subject}[{rank}]", edges) for edges in _list(f"{subject}[{rank}]", of_rank)]
        for rank, of_rank in enumerate(_list(subject, column_ranges))
    ]


def _list(subject: str, value: object) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise ArgumentError(
            f"{subject} must be a list, of ranges (first, end) for each rank; got {value!r}."
        )
    return value


def _pair(subject: str, value: object) -> tuple[int, int]:
    rule = f"{subject} must hold ranges (first, end) of two integers"
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ArgumentError(f"{rule}; got {value!r}.")
    first, end = value
    return integer(rule, first), integer(rule, end)


def qkv_column_ranges(
    heads: int, kv_heads: int, head_dim: int, world_size: int
) -> list[list[tuple[int, int]]]:
    """Return the columns of a fused QKV product that belong to each rank's heads.

    The product has the queries of all heads, then all keys, then all values, as models keep them.
    Each rank gets equally many heads, one behind the other, and the keys and values that belong to
    them: its result has its queries, keys and values in this order. With fewer key and value heads
    than ranks, several ranks get the same one.

    Args:
        heads: Query heads; ``world_size`` divides them.
        kv_heads: Key heads, and as many value heads; they divide ``heads``, and either
            ``world_size`` divides them or they divide it.
        head_dim: Columns of a head.
        world_size: R, the number of ranks.

    Raises:
        ArgumentError: A number is not positive, or does not divide the other.

    Example:
        >>> interlace.qkv_column_ranges(4, 1, 64, 2)  # queries 0 to 256, keys to 320, values to 384
        [[(0, 128), (256, 320), (320, 384)], [(128, 256), (256, 320), (320, 384)]]
    """
    numbers = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "world_size": world_size}
    for name, number in numbers.items():
        rule = f"qkv_column_ranges: {name} must be at least 1"
        numbers[name] = integer(rule, number)
        if numbers[name] < 1:
            raise ArgumentError(f"{rule}; got {number!r}.")
    heads, kv_heads, head_dim, world_size = numbers.values()
    if heads % world_size or heads % kv_heads:
        raise ArgumentError(
            f"qkv_column_ranges: heads must be a multiple of world_size, {world_size}, and of "
            f"kv_heads, {kv_heads}; got {heads}. Use a group of fewer ranks, or write "
            "column_ranges of your own."
        )
    if kv_heads % world_size and world_size % kv_heads:
        raise ArgumentError(
            f"qkv_column_ranges: kv_heads must be a multiple or a divisor of world_size, "
            f"{world_size}; got {kv_heads}. Use a group of fewer ranks, or write column_ranges of "
            "your own."
        )
    own_heads, own_kv = heads // world_size, ceil_div(kv_heads, world_size)
    queries, keys = heads * head_dim, kv_heads * head_dim
    by_rank = []
    for rank in range(world_size):
        first_kv = rank * kv_heads // world_size * head_dim
        key = queries + first_kv
        by_rank.append(
            [
                (rank * own_heads * head_dim, (rank + 1) * own_heads * head_dim),
                (key, key + own_kv * head_dim),
                (key + keys, key + keys + own_kv * head_dim),
            ]
        )
    return by_rank


def no_memory(call: SequenceCall) -> Reservation:
    """Return that a call needs no symmetric memory."""
    return Reservation()
