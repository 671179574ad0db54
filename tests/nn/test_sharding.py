"""Sharding plans hold every column once, are balanced, fit, and are equal on every rank."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from interlace import ArgumentError
from interlace.costs.machine import Machine
from interlace.costs.sharding import ShardCost, shard_cost
from interlace.nn import EmbeddingTable, make_plan

TABLE = st.builds(
    lambda rows, width, mode, lookups: (rows, width, mode, lookups),
    st.integers(1, 10**6),
    st.integers(1, 300),
    st.sampled_from(["sum", "mean"]),
    st.integers(1, 60),
)


def _tables(*rows_and_widths: tuple[int, int], **options: Any) -> list[EmbeddingTable]:
    return [
        EmbeddingTable(f"t{i}", rows, width, **options)
        for i, (rows, width) in enumerate(rows_and_widths)
    ]


def test_the_cost_of_a_shard() -> None:
    """The cost of a shard on two ranks: four samples of two lookups, 10 rows of 8 float32; forward
    alone, and then with row-wise Adagrad.
    """
    sizes: dict[str, Any] = {
        "rows": 10,
        "width": 8,
        "itemsize": 4,
        "pooling_factor": 2,
        "batch": 4,
        "world_size": 2,
    }
    forward = shard_cost(**sizes, training=False)
    # 8 rows of 32 bytes and 8 indices read, 2 of 4 pooled rows of 32 bytes stored here and 2 sent.
    assert forward == ShardCost(8 * (32 + 8) + 64, 64, 320)
    both = shard_cost(**sizes, state_bytes_per_row=4)
    # As many gradients come; each of 8 lookups reads one, an index, and a row and its state, and
    # writes the two.
    assert both == ShardCost(forward.memory_bytes + 128 + 8 * (32 + 64 + 8 + 8), 128, 360)


@given(st.lists(TABLE, min_size=1, max_size=12), st.integers(1, 8))
def test_every_column_has_one_rank_and_loads_are_balanced(
    drawn: list[tuple[int, int, str, int]], world_size: int
) -> None:
    tables = [
        EmbeddingTable(f"t{i}", rows, width, mode=mode, pooling_factor=lookups)
        for i, (rows, width, mode, lookups) in enumerate(drawn)
    ]
    plan = make_plan(tables, world_size)
    assert plan == make_plan(list(tables), world_size)
    for table in tables:
        columns = sorted((shard.start, shard.stop) for shard in plan.shards if shard.table == table)
        edges = [0, *(stop for _, stop in columns)]
        assert edges[-1] == table.width
        assert [start for start, _ in columns] == edges[:-1]
    assert [shard for rank in range(world_size) for shard in plan.of_rank(rank)] == list(
        plan.shards
    )
    assert sorted(shard.name for shard in plan.in_output_order()) == sorted(
        shard.name for shard in plan.shards
    )
    # Greedy: before its last shard, the slowest rank was no slower than any other.
    floors = [plan.floor_ns(rank) for rank in range(world_size)]
    largest = max(
        plan.machine.floor_ns(shard.cost.memory_bytes, shard.cost.link_bytes)
        for shard in plan.shards
    )
    assert max(floors) <= min(floors) + largest * (1 + 1e-9)
    if sum((table.width + 3) // 4 for table in tables) >= world_size:
        assert min(floors) > 0, "no rank may be idle while a table could be split"


def test_the_costliest_goes_first_and_to_the_emptiest() -> None:
    tables = _tables((1000, 64), (1000, 64), (1000, 192), (1000, 64))
    plan = make_plan(tables, 2)
    assert [shard.label for shard in plan.of_rank(0)] == ["t2"]
    assert [shard.label for shard in plan.of_rank(1)] == ["t0", "t1", "t3"]
    assert str(plan).splitlines()[0] == "ShardingPlan of 4 tables over 2 ranks"
    assert str(plan).splitlines()[1].startswith("  rank 0: t2 (768 KB, ")
    out = io.StringIO()
    Console(file=out, width=80).print(plan)
    assert "t2" in out.getvalue()
    assert "sum of float32" in out.getvalue()


def test_storage_counts_copies_and_states() -> None:
    """A rank's memory holds two copies with dense gradients, and every row's state."""
    tables = _tables((1000, 8))
    one, two, state = (
        make_plan(tables, 1, **more).cost(0).storage_bytes
        for more in ({}, {"copies": 2}, {"state_bytes_per_row": 4})
    )
    assert (two, state) == (2 * one, one + 4 * 1000)


def test_the_links_count_too() -> None:
    """Slow links make a wide table's pooled rows cost more than many lookups of a narrow one in
    memory.
    """
    tables = [
        EmbeddingTable("wide", 100, 256),
        *(EmbeddingTable(f"deep{i}", 100, 32, pooling_factor=8) for i in range(4)),
    ]
    slow_links = Machine(
        "slow links", memory_bytes_per_s=1e12, link_bytes_per_s=1e9, source="made up"
    )
    assert [shard.label for shard in make_plan(tables, 2, machine=slow_links).of_rank(0)] == [
        "wide"
    ]
    fast_links = Machine(
        "fast links", memory_bytes_per_s=1e12, link_bytes_per_s=1e15, source="made up"
    )
    assert len(make_plan(tables, 2, machine=fast_links).of_rank(0)) > 1


def test_tables_are_split_by_columns_where_they_must() -> None:
    wide = make_plan(_tables((10, 5000), (10, 64)), 4)
    columns = sorted((s.start, s.stop) for s in wide.shards if s.table.name == "t0")
    assert columns == [(0, 1664), (1664, 3332), (3332, 5000)]
    large = make_plan(_tables((1000, 64), (1000, 8)), 2, capacity_bytes=160_000)
    assert [shard.label for shard in large.shards] == ["t0[0:32]", "t1", "t0[32:64]"]
    assert not large.stackable
    few = make_plan(_tables((1000, 64)), 4)
    assert [len(few.of_rank(rank)) for rank in range(4)] == [1] * 4
    asked = make_plan(_tables((1000, 10), column_shards=2), 1)
    assert [shard.name for shard in asked.shards] == ["t0:0-4", "t0:4-10"]
    assert [shard.width for shard in make_plan(_tables((5, 3)), 4).shards] == [3], (
        "three columns stay together"
    )


def test_kinds_come_one_after_another() -> None:
    tables = [
        EmbeddingTable("a", 10, 4, mode="mean"),
        EmbeddingTable("b", 10, 4),
        EmbeddingTable("c", 10, 4, mode="mean"),
        EmbeddingTable("d", 10, 4, dtype=torch.bfloat16),
    ]
    plan = make_plan(tables, 1)
    assert plan.kinds == (("mean", torch.float32), ("sum", torch.float32), ("sum", torch.bfloat16))
    assert plan.stack_order() == [0, 2, 1, 3]
    assert [shard.label for shard in plan.of_rank(0, ("mean", torch.float32))] == ["a", "c"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: make_plan([], 2),
            "ShardingPlan: there must be tables, each of another name; got [].",
        ),
        (
            lambda: make_plan([(5, 4)], 2),
            "ShardingPlan: tables must be of interlace.nn.EmbeddingTable; got (5, 4). Say "
            'EmbeddingTable("user", rows=1000, width=64).',
        ),
        (
            lambda: make_plan(_tables((5, 4)) * 2, 2),
            "ShardingPlan: there must be tables, each of another name; got ['t0', 't0'].",
        ),
        (
            lambda: make_plan(_tables((1000, 64)), 2, capacity_bytes=10_000),
            "ShardingPlan: table 't0' of 1000 rows and 64 columns must fit; got 2 ranks have room "
            "for 10 KB each, while it needs "
            "256 KB, and its columns cannot be split further. Use more ranks, fewer rows, or a "
            "smaller dtype.",
        ),
        (
            lambda: make_plan(_tables((1000, 8), (1000, 8), (1000, 8)), 2, capacity_bytes=40_000),
            "ShardingPlan: columns 0-8 of table 't2' must fit; got 2 ranks have room for 40 KB "
            "each, while all tables need 96 KB, "
            "and ranks hold 32 KB, 32 KB already. Use more ranks, fewer rows, or a smaller dtype.",
        ),
        (
            lambda: EmbeddingTable("a.b", 1, 1),
            "EmbeddingTable 'a.b': name must not be empty and have neither dots nor colons.",
        ),
        (
            lambda: EmbeddingTable("a", 1, 2.0),  # type: ignore[arg-type]
            "EmbeddingTable 'a': width must be an integer; got 2.0.",
        ),
        (
            lambda: EmbeddingTable("a", 0, 1),
            "EmbeddingTable 'a': rows and width must be positive; got 0 and 1.",
        ),
        (
            lambda: EmbeddingTable("a", 1, 1, mode="max"),
            "EmbeddingTable 'a': mode must be sum or mean; got 'max'.",
        ),
        (
            lambda: EmbeddingTable("a", 1, 1, bag_length=0),
            "EmbeddingTable 'a': bag_length must be positive or None; got 0.",
        ),
        (
            lambda: EmbeddingTable("a", 1, 4, column_shards=5),
            "EmbeddingTable 'a': column_shards must be 1 to 4; got 5.",
        ),
        (
            lambda: EmbeddingTable("a", 1, 1, dtype=torch.float64),
            "EmbeddingTable 'a': dtype must be float32, float16 or bfloat16; got torch.float64.",
        ),
    ],
)
def test_rejected(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        make()
    assert str(caught.value) == message
