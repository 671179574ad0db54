"""``interlace.nn.ShardedEmbeddingBags`` equals several ``nn.EmbeddingBag`` under any plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn

import interlace
from interlace import ArgumentError
from interlace.nn import EmbeddingTable, PooledEmbeddings, ShardedEmbeddingBags, make_plan
from interlace.nn.input_distribution import _positions
from tests.errors import error_of
from tests.nn.features import SUMS, TABLES, Features, gradients_of, merged, own, weights_of

ULP = torch.finfo(torch.float32).eps
ONE_HOT = tuple(dataclasses.replace(table, bag_length=1) for table in SUMS)
HALVES = (
    EmbeddingTable("user", 11, 8, dtype=torch.float16),
    EmbeddingTable("item", 7, 8, dtype=torch.bfloat16),
    EmbeddingTable("word", 20, 8, dtype=torch.float16),
)
FIXED = tuple(
    dataclasses.replace(table, bag_length=length)
    for table, length in zip(TABLES, (2, 1, 3, 1), strict=True)
)


def _rank_and_world_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def test_worked_example() -> None:
    """One process, two tables: "a" sums rows 0 and 2, then nothing; "b" has the mean of rows 1 and
    1, then row 0.
    """
    bags = ShardedEmbeddingBags(
        [EmbeddingTable("a", 3, 2), EmbeddingTable("b", 2, 2, mode="mean")], device="cpu"
    )
    bags.load_state_dict(
        {
            "shards.a:0-2.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
            "shards.b:0-2.weight": torch.tensor([[10.0, 20.0], [30.0, 40.0]]),
        }
    )
    bags.impl = "unfused"
    y = bags(torch.tensor([0, 2, 1, 1, 0]), torch.tensor([0, 2, 2, 4, 5]))
    assert y.tolist() == [[6, 8, 30, 40], [0, 0, 10, 20]]
    assert bags.extra_repr() == "2 tables, rank=0 of 1, gradient=dense, impl=unfused"


def test_where_to_find_what_arrived() -> None:
    """The docstring's example: a | b b | c c c | d becomes a | c c c | b b | d."""
    assert _positions(torch.tensor([[1, 2], [3, 1]]), 7).tolist() == [0, 3, 4, 5, 1, 2, 6]


def _error_of(y: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error, in units of the rounding error of a float32 sum of a few rows."""
    assert y.shape == expected.shape
    errors = (y.detach().double() - expected).abs() / (8 * ULP * (1 + expected.abs()))
    return float(errors.max()) if errors.numel() else 0.0


def _forward(tables: tuple[EmbeddingTable, ...], options: dict[str, Any]) -> dict[str, Any]:
    rank, world_size = _rank_and_world_size()
    bags = ShardedEmbeddingBags(tables)
    features = Features.draw(tables, 4 * world_size)
    indices, offsets, weights = features.of_rank(rank, world_size)
    if options.get("int32"):
        indices = indices.int()
    weighted = bool(options.get("weighted"))
    fixed = bool(options.get("without_offsets"))
    pooled = bags.pool(indices, None if fixed else offsets, weights if weighted else None)
    y = bags(indices, None if fixed else offsets, weights if weighted else None)
    expected = own(features.expected(weights_of(bags), weighted=weighted))
    by_table = torch.cat(list(pooled.tables().values()), 1)
    bags.impl = "unfused"
    unfused = bags(indices, None if fixed else offsets, weights if weighted else None)
    storage = pooled.values.untyped_storage().data_ptr()
    return {
        "errors": [_error_of(outcome, expected) for outcome in (y, pooled.ordered(), by_table)],
        "unfused": _error_of(unfused, expected),
        "views": sum(
            table.untyped_storage().data_ptr() == storage for table in pooled.tables().values()
        ),
        "names": list(pooled.tables()),
        "plan": str(bags.plan),
    }


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("tables", "options"),
    [
        (TABLES, {}),
        (SUMS, {"weighted": True, "int32": True}),
        (ONE_HOT, {"without_offsets": True}),
        (FIXED, {"without_offsets": True}),
        (FIXED, {}),
        (HALVES, {}),
    ],
    ids=["jagged", "weighted-int32", "one-hot", "fixed", "fixed-with-offsets", "halves"],
)
def test_forward(
    ranks: Any, tables: tuple[EmbeddingTable, ...], options: dict[str, Any], world_size: int
) -> None:
    outcomes = ranks(world_size).run(_forward, tables, options)
    for outcome in outcomes:
        assert max(outcome["errors"]) <= 1, outcome
        # The unfused operator rounds to the tables' dtype in between.
        assert outcome["unfused"] <= max(
            1, max(torch.finfo(table.dtype).eps for table in tables) / (8 * ULP)
        ), outcome
        assert outcome["names"] == [table.name for table in tables]
        assert outcome["plan"] == outcomes[0]["plan"]
        assert outcome["views"] >= len(tables) - 1, (
            "only a table whose columns lie apart may be copied"
        )


def test_layouts_of_many_batches_are_not_kept() -> None:
    """But for the last ones, and for those that a CUDA graph refers to."""
    distribution = ShardedEmbeddingBags(FIXED).distribution
    lengths = sum(table.bag_length or 0 for table in FIXED)
    for samples in range(1, 40):
        distribution(torch.zeros(samples * lengths, dtype=torch.int64), None)
    kept = [samples for samples, _ in distribution._layouts]
    assert kept == list(range(24, 40))
    distribution(torch.zeros(24 * lengths, dtype=torch.int64), None)
    distribution(torch.zeros(50 * lengths, dtype=torch.int64), None)
    assert [samples for samples, _ in distribution._layouts] == [*range(26, 40), 24, 50]


def _distribute(
    cases: list[tuple[list[tuple[int, str, int | None, int]], int, int]],
) -> list[float]:
    """Compare tables of random kinds and lengths with every bag summed one by one."""
    rank, world_size = _rank_and_world_size()
    errors = []
    for described, samples, seed in cases:
        tables = tuple(
            EmbeddingTable(
                f"t{i}", 9, width, mode=mode, bag_length=length, column_shards=min(shards, width)
            )
            for i, (width, mode, length, shards) in enumerate(described)
        )
        bags = ShardedEmbeddingBags(tables)
        bags.impl = "unfused"
        features = Features.draw(tables, samples * world_size, lengths=(0, 4), seed=seed)
        indices, offsets, _ = features.of_rank(rank, world_size)
        errors.append(_error_of(bags(indices, offsets), own(features.expected(weights_of(bags)))))
    return errors


_TABLE = st.tuples(
    st.integers(1, 9),
    st.sampled_from(["sum", "mean"]),
    st.sampled_from([None, 1, 3]),
    st.integers(1, 3),
)
_CASE = st.tuples(st.lists(_TABLE, min_size=1, max_size=5), st.integers(0, 4), st.integers(0, 99))


@pytest.mark.parametrize("world_size", [2, 4])
@hypothesis.settings(max_examples=3, phases=[hypothesis.Phase.generate])
@hypothesis.given(cases=st.lists(_CASE, min_size=4, max_size=6))
def test_any_tables_and_bags(ranks: Any, world_size: int, cases: Any) -> None:
    """Any tables and bags are right, also with no samples, with fewer tables than ranks, and with
    one table in several pieces on one rank.
    """
    for errors in ranks(world_size).run(_distribute, cases):
        assert max(errors) <= 1


class _KeyedJaggedTensor:
    """A stand-in for torchrec's ``KeyedJaggedTensor``, with the methods that are used."""

    def __init__(
        self,
        keys: list[str],
        values: torch.Tensor,
        lengths: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> None:
        self._keys, self._values, self._lengths, self._weights = keys, values, lengths, weights

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> torch.Tensor:
        return self._values

    def offsets(self) -> torch.Tensor:
        return torch.cat([self._lengths.new_zeros(1), self._lengths.cumsum(0)])

    def weights_or_none(self) -> torch.Tensor | None:
        return self._weights

    def permute(self, order: list[int]) -> _KeyedJaggedTensor:
        lengths = self._lengths.view(len(self._keys), -1)
        sizes = lengths.sum(1).tolist()
        parts = self._values.split(sizes)
        weights = (
            None
            if self._weights is None
            else torch.cat([self._weights.split(sizes)[i] for i in order])
        )
        keys = [self._keys[i] for i in order]
        values = torch.cat([parts[i] for i in order])
        return _KeyedJaggedTensor(keys, values, lengths[order].flatten(), weights)


class _LosesGradients(_KeyedJaggedTensor):
    """One whose method runs operators without a gradient."""

    @torch.no_grad()
    def permute(self, order: list[int]) -> _KeyedJaggedTensor:
        return super().permute(order)


def _keyed() -> list[Any]:
    bags = ShardedEmbeddingBags(SUMS)
    bags.impl = "unfused"
    extra = (SUMS[2], EmbeddingTable("unknown", 9, 8), SUMS[0], SUMS[1])
    features = Features.draw(extra, 2 * dist.get_world_size(), seed=4)
    indices, offsets, weights = features.of_rank(*_rank_and_world_size())
    y = bags(_KeyedJaggedTensor([table.name for table in extra], indices, offsets.diff(), weights))
    names = [table.name for table in extra]
    order = [names.index(table.name) for table in SUMS]
    picked = Features(SUMS, [features.bags[i] for i in order], [features.weights[i] for i in order])
    expected = own(picked.expected(weights_of(bags), weighted=True))
    incomplete = _KeyedJaggedTensor(["user"], indices, offsets.diff(), None)
    learned = _LosesGradients(names, indices, offsets.diff(), weights.clone().requires_grad_())
    with torch.no_grad():
        assert _error_of(bags(learned), expected) <= 1
    return [
        _error_of(y, expected),
        error_of(bags, learned),
        error_of(bags, incomplete),
        error_of(bags, incomplete, offsets),
        error_of(bags, "user"),
    ]


def test_keyed_jagged_tensors(ranks: Any) -> None:
    """Keys may be in any order, more of them than tables, and with weights."""
    for error, lost, absent, both, no_tensor in ranks(2).run(_keyed):
        assert error <= 1
        assert "weights of a KeyedJaggedTensor that require a gradient must come in" in lost[1]
        assert (
            "a KeyedJaggedTensor must have a key for every table; got none for item, word."
            in absent[1]
        )
        assert "offsets and weights must not be given beside a KeyedJaggedTensor" in both[1]
        assert "features must be indices or a KeyedJaggedTensor; got str." in no_tensor[1]


# Gradients


def _gradients(gradient: str, average: bool, impl: str) -> float:
    rank, world_size = _rank_and_world_size()
    bags = ShardedEmbeddingBags(TABLES, gradient=gradient, average_gradients=average)
    bags.impl = impl
    features = Features.draw(TABLES, 4 * world_size, seed=1)
    indices, offsets, _ = features.of_rank(rank, world_size)
    tables_in_float64 = {
        name: table.double().requires_grad_() for name, table in weights_of(bags).items()
    }
    expected = features.expected(tables_in_float64)
    upstream = torch.randn(
        expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    bags(indices, offsets).backward(own(upstream).float())
    expected.backward(upstream / world_size if average else upstream)
    gradients = gradients_of(bags)
    errors = []
    for name, table in tables_in_float64.items():
        assert table.grad is not None
        errors.append(_error_of(gradients[name], table.grad))
    return max(errors)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("gradient", "average", "impl"),
    [("dense", True, "fused"), ("sparse", False, "fused"), ("dense", False, "unfused")],
)
def test_gradients(ranks: Any, gradient: str, average: bool, impl: str, world_size: int) -> None:
    assert max(ranks(world_size).run(_gradients, gradient, average, impl)) <= 4


def _in_place(weighted: bool) -> list[bool]:
    """Whether gradients are as they are where a new tensor takes the result's place."""
    # Of one kind and in the order of ranks, so that the result is not put in order first.
    tables = [EmbeddingTable(name, 8, 4) for name in ("a", "b")]
    bags = ShardedEmbeddingBags(tables, group=dist.new_group())
    indices, offsets, weights = Features.draw(tables, 4, seed=5).of_rank(*_rank_and_world_size())
    gradients = []
    for inplace in (True, False):
        scale = weights.clone().requires_grad_() if weighted else None
        bags.zero_grad()
        y = torch.nn.functional.relu(bags(indices, offsets, scale), inplace)
        y.square().sum().backward()
        gradients.append([each.grad for each in (*bags.parameters(), scale) if each is not None])
    return [one.equal(other) for one, other in zip(*gradients, strict=True)]


@pytest.mark.parametrize("weighted", [False, True])
def test_results_may_be_modified_in_place(ranks: Any, weighted: bool) -> None:
    for found in ranks(2).run(_in_place, weighted):
        assert all(found), found


def _weights_learn(tables: tuple[EmbeddingTable, ...], gradient: str) -> tuple[float, Any]:
    """Compare the gradient of this rank's weights with float64 on full tables.

    Also the error if only one rank's weights require a gradient.
    """
    rank, world_size = _rank_and_world_size()
    # A new group: what was agreed on once is not compared again.
    bags = ShardedEmbeddingBags(tables, gradient=gradient, group=dist.new_group())
    bags.requires_grad_(gradient != "dense")
    features = Features.draw(tables, 4 * world_size, seed=5)
    exact = [[weight.double().requires_grad_() for weight in of] for of in features.weights]
    expected = dataclasses.replace(features, weights=exact).expected(
        weights_of(bags), weighted=True
    )
    upstream = torch.randn(
        expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    expected.backward(upstream)
    of_weights: Any = [[weight.grad for weight in of] for of in exact]
    *_, wanted = dataclasses.replace(features, weights=of_weights).of_rank(rank, world_size)
    indices, offsets, weights = features.of_rank(rank, world_size)
    weights.requires_grad_(rank == 0)
    mismatch = error_of(bags, indices, offsets, weights) if world_size > 1 else None
    weights.requires_grad_()
    bags(indices, offsets, weights).backward(own(upstream).float())
    assert weights.grad is not None
    return _error_of(weights.grad, wanted), mismatch


@pytest.mark.parametrize(
    ("tables", "gradient"),
    [((*SUMS, dataclasses.replace(TABLES[2], name="wide")), "sgd"), (ONE_HOT, "dense")],
    ids=["jagged", "one-hot, frozen"],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_learn(
    ranks: Any, tables: tuple[EmbeddingTable, ...], gradient: str, world_size: int
) -> None:
    """It does not depend on average_gradients, and goes by the tables before their update."""
    for error, mismatch in ranks(world_size).run(_weights_learn, tables, gradient):
        assert error <= 4
        if world_size > 1:
            assert mismatch[0] == "RankMismatchError"
            assert "gradient of per sample weights must be the same" in mismatch[1]


def _learn(gradient: str, impl: str, steps: int) -> dict[str, float]:
    """Compare steps of a fused update on all ranks with float64 on full tables.

    A shard's state is of its own columns.
    """
    rank, world_size = _rank_and_world_size()
    rate, epsilon = 0.1, 1e-3
    bags = ShardedEmbeddingBags(SUMS, gradient=gradient, learning_rate=rate, epsilon=epsilon)
    bags.impl = impl
    tables_in_float64 = {name: table.double() for name, table in weights_of(bags).items()}
    states = {
        name: torch.zeros(len(table), dtype=torch.float64)
        for name, table in tables_in_float64.items()
    }
    for step in range(steps):
        features = Features.draw(SUMS, 4 * world_size, seed=step)
        leaves = {name: table.requires_grad_() for name, table in tables_in_float64.items()}
        (features.expected(leaves) ** 2).mean().backward()
        for name, table in leaves.items():
            gradient_of = table.grad
            assert gradient_of is not None
            states[name] += gradient_of.square().mean(1)
            divisor = (
                (states[name].sqrt() + epsilon)[:, None] if gradient == "rowwise_adagrad" else 1.0
            )
            tables_in_float64[name] = (table - rate * gradient_of / divisor).detach()
        indices, offsets, _ = features.of_rank(rank, world_size)
        bags(indices, offsets).square().mean().backward()
    outcome = weights_of(bags)
    assert all(parameter.grad is None for parameter in bags.parameters())
    return {
        name: float((outcome[name] - table).abs().max() / table.abs().max())
        for name, table in tables_in_float64.items()
    }


@pytest.mark.parametrize(
    ("gradient", "impl"),
    [("sgd", "fused"), ("rowwise_adagrad", "fused"), ("rowwise_adagrad", "unfused")],
)
def test_fused_updates(ranks: Any, gradient: str, impl: str) -> None:
    for errors in ranks(2).run(_learn, gradient, impl, 3):
        assert max(errors.values()) < 1e-5, errors


# State


def _save_and_continue() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    bags = ShardedEmbeddingBags(TABLES, gradient="rowwise_adagrad", seed=5)
    _step(bags)
    return merged(bags.state_dict()), weights_of(bags)


def _step(bags: ShardedEmbeddingBags) -> None:
    bags.impl = "unfused"
    features = Features.draw(TABLES, 12, seed=3)
    indices, offsets, _ = features.of_rank(*_rank_and_world_size())
    bags(indices, offsets).square().sum().backward()


def _load(saved: dict[str, Any], split: bool) -> dict[str, Any]:
    tables = [
        dataclasses.replace(table, column_shards=3 if split and table.width == 12 else 1)
        for table in TABLES
    ]
    bags = ShardedEmbeddingBags(tables, gradient="rowwise_adagrad", seed=6)
    bags.load_state_dict(dict(saved))
    states = merged(
        {
            name: state
            for name, state in bags.state_dict().items()
            if name.endswith("sum_of_squares")
        }
    )
    incomplete = {
        name: value for name, value in saved.items() if not name.startswith("shards.word:0-4")
    }
    try:
        bags.load_state_dict(incomplete)
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    holds_word = any(
        shard.table.name == "word" and shard.start < 4
        for shard in bags.plan.of_rank(bags.group.rank)
    )
    return {
        "weights": weights_of(bags),
        "states": states,
        "refused": refused,
        "holds_word": holds_word,
    }


@pytest.mark.parametrize(("world_size", "split"), [(1, False), (4, True)])
def test_state_dicts_fit_any_number_of_ranks(ranks: Any, world_size: int, split: bool) -> None:
    saved, weights = ranks(2).run(_save_and_continue)[0]
    word = {name: value for name, value in saved.items() if "word" in name}
    assert set(word) == {
        f"shards.word:{columns}.{field}"
        for columns in ("0-4", "4-12")
        for field in ("weight", "sum_of_squares")
    }
    first, second = word["shards.word:0-4.sum_of_squares"], word["shards.word:4-12.sum_of_squares"]
    assert first.max() > 0
    for outcome in ranks(world_size).run(_load, saved, split):
        assert all(torch.equal(outcome["weights"][name], weights[name]) for name in weights)
        states = outcome["states"]
        if split:
            assert torch.equal(states["shards.word:0-4.sum_of_squares"], first)
            assert torch.equal(states["shards.word:4-8.sum_of_squares"], second)
            assert torch.equal(states["shards.word:8-12.sum_of_squares"], second)
        else:
            assert torch.allclose(
                states["shards.word:0-12.sum_of_squares"], first / 3 + second * 2 / 3, rtol=4 * ULP
            )
        assert torch.equal(
            states["shards.user:0-8.sum_of_squares"], saved["shards.user:0-8.sum_of_squares"]
        )
        assert ("Missing key(s)" in outcome["refused"]) == outcome["holds_word"]


def _draw() -> dict[str, torch.Tensor]:
    return weights_of(ShardedEmbeddingBags(TABLES, seed=9))


def test_first_weights_do_not_depend_on_the_plan(ranks: Any) -> None:
    one_rank, four_ranks = ranks(1).run(_draw)[0], ranks(4).run(_draw)[0]
    for table in TABLES:
        assert torch.equal(one_rank[table.name], four_ranks[table.name])
        bound = table.rows**-0.5
        assert 0.5 * bound < one_rank[table.name].abs().max() <= bound
    assert not torch.equal(one_rank["user"][:5], one_rank["city"])


# Refusals


def _refused() -> list[Any]:
    rank, world_size = _rank_and_world_size()
    # A new group: what was agreed on once, in tests before this one, is not compared again.
    bags = ShardedEmbeddingBags(SUMS, group=dist.new_group())
    indices, offsets, weights = Features.draw(SUMS, 2 * world_size).of_rank(rank, world_size)
    one_hot = ShardedEmbeddingBags(ONE_HOT)
    return [
        error_of(bags, indices),
        error_of(bags, indices, offsets[:-1]),
        error_of(bags, indices.float(), offsets),
        error_of(bags, indices, offsets.float()),
        error_of(bags, indices[:-1], offsets),
        error_of(bags, indices, offsets.flip(0)),
        error_of(bags, indices, offsets, weights[:-1]),
        error_of(one_hot, torch.zeros(4, dtype=torch.int64)),
        error_of(one_hot, torch.zeros(6, dtype=torch.int64), torch.tensor([0, 2, 2, 3, 4, 5, 6])),
        error_of(ShardedEmbeddingBags, SUMS, gradient="adam"),
        error_of(ShardedEmbeddingBags, SUMS, memory_bytes=100),
        error_of(ShardedEmbeddingBags, SUMS, plan=make_plan(SUMS, 7)),
        error_of(ShardedEmbeddingBags, [EmbeddingTable("huge", 10**12, 1024)]),
        error_of(bags.half),
        error_of(ShardedEmbeddingBags, SUMS[: 1 + rank]),
        error_of(
            bags,
            indices if rank else indices[:0],
            offsets if rank else torch.zeros(4, dtype=torch.int64),
        ),
    ]


def test_rejected(ranks: Any) -> None:
    kinds = ["ArgumentError"] * 14 + ["RankMismatchError"] * 2
    messages = [
        (
            "ShardedEmbeddingBags: offsets must be given unless every table has a bag_length; got "
            "None."
        ),
        "ShardedEmbeddingBags: offsets must be [3 * samples + 1] for 3 tables; got [6].",
        "ShardedEmbeddingBags: indices must be 1-D int32 or int64; got ",
        "ShardedEmbeddingBags: offsets must be int32 or int64; got torch.float32.",
        "ShardedEmbeddingBags: offsets must rise from 0 to the number of indices, ",
        "ShardedEmbeddingBags: offsets must rise from 0 to the number of indices, ",
        "ShardedEmbeddingBags: per_sample_weights must have one weight an index; got ",
        "ShardedEmbeddingBags: indices must be 3 a sample, by the tables' bag_length; got 4.",
        (
            "ShardedEmbeddingBags: bags must have the tables' bag_length; offsets say otherwise. "
            "Set it to None."
        ),
        (
            "ShardedEmbeddingBags: gradient must be one of dense, sparse, sgd, rowwise_adagrad; "
            "got 'adam'."
        ),
        (
            "ShardingPlan: table 'user' of 11 rows and 8 columns must fit; got 2 ranks have room "
            "for 100 B each"
        ),
        (
            "ShardedEmbeddingBags: plan must be of these tables and of 2 ranks; got 3 tables and "
            "7 ranks."
        ),
        (
            "ShardingPlan: table 'huge' of 1000000000000 rows and 1024 columns must fit; got 2 "
            "ranks have room for "
        ),
        (
            "ShardedEmbeddingBags: tables must keep their dtypes, which are part of the plan; got "
            "a conversion from torch.float32 to torch.float16. "
        ),
        "ShardedEmbeddingBags: tables must be the same on every rank; got ",
        (
            "ShardedEmbeddingBags: samples must be the same on every rank; got 1 on rank 0, 2 on "
            "rank 1."
        ),
    ]
    for outcome in ranks(2).run(_refused):
        assert [error[0] for error in outcome] == kinds
        for error, message in zip(outcome, messages, strict=True):
            assert error[1].startswith(message), (error[1], message)


def test_tables_of_several_widths_are_not_stacked() -> None:
    plan = make_plan([EmbeddingTable(f"of {width}", 3, width) for width in (4, 2, 6)], 1)
    pooled = PooledEmbeddings(torch.zeros(5, 12), plan.in_output_order(), plan)
    with pytest.raises(ArgumentError, match=r"tables must have one width; got \[2, 4, 6\]"):
        pooled.stacked()


def test_parts_of_a_table_that_do_not_fit_are_not_joined() -> None:
    """Neither those of other rows than the table's, nor states of some of the columns alone."""
    made = [EmbeddingTable("a", 3, 4, column_shards=count) for count in (2, 1)]
    halves, whole = (ShardedEmbeddingBags([t], gradient="rowwise_adagrad") for t in made)
    state = halves.state_dict()
    shorter = state | {"shards.a:2-4.weight": state["shards.a:2-4.weight"][1:]}
    with pytest.raises(RuntimeError, match=r"size mismatch for shards\.a:0-4\.weight"):
        whole.load_state_dict(shorter)
    del state["shards.a:2-4.sum_of_squares"]
    with pytest.raises(RuntimeError, match=r"Missing key.*shards\.a:0-4\.sum_of_squares"):
        whole.load_state_dict(state)


def test_meta_allocates_nothing() -> None:
    bags = ShardedEmbeddingBags([EmbeddingTable("huge", 10**12, 1024)], device="meta")
    assert [parameter.shape for parameter in bags.parameters()] == [(10**12, 1024)]
    assert isinstance(bags, nn.Module)


def _late() -> Any:
    """Rank 1 does not come to the second call."""
    group = dist.new_group()
    bags = ShardedEmbeddingBags(SUMS, group=group)
    bags.impl = "unfused"
    arguments = Features.draw(SUMS, 4).of_rank(*_rank_and_world_size())[:2]
    bags(*arguments)
    interlace.set_deadline(1.0, group)
    error = error_of(bags, *arguments) if dist.get_rank() == 0 else None
    dist.barrier()
    return error


def test_a_rank_that_does_not_come(ranks: Any) -> None:
    kind, message, _ = ranks(2).run(_late)[0]
    assert kind == "PeerTimeoutError"
    assert message.startswith(
        "ShardedEmbeddingBags: rank 0 waited 1 s for a peer (in the exchange on the host)."
    )
    ranks(2).close()  # the exchange that failed has left its process group in an unknown state
