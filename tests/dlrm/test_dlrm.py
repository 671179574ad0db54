"""A DLRM on several ranks equals one in float64 with the full batch, parameter for parameter."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace_dlrm
from interlace import ArgumentError
from interlace.nn import EmbeddingTable
from interlace_dlrm import DLRM, Batch, BatchStream, SyntheticClicks, Trainer
from interlace_dlrm.dlrm import _pairs
from tests.dlrm.single import Reference, whole_batch
from tests.errors import error_of
from tests.nn.features import weights_of

ROWS, WIDTH, SAMPLES = (9, 17, 5), 4, 4
SMALL: dict[str, Any] = {"bottom": (8,), "top": (8,)}


def _tables(*, lookups: int | None = 1, **options: Any) -> list[EmbeddingTable]:
    return [
        EmbeddingTable(f"C{i}", rows, WIDTH, bag_length=lookups, **options)
        for i, rows in enumerate(ROWS)
    ]


def _batches(count: int, *, jagged: bool = False, lookups: int = 1) -> list[tuple[Batch, Batch]]:
    """Return this rank's part and the full batch, for each of ``count`` batches."""
    ranks = dist.get_world_size()
    source = SyntheticClicks(count * SAMPLES * ranks, cardinality=20)
    streams = [
        BatchStream(
            source,
            SAMPLES * ranks,
            rows=ROWS,
            jagged=jagged,
            lookups=lookups,
            rank=rank,
            world_size=ranks,
        )
        for rank in range(ranks)
    ]
    return [
        (parts[dist.get_rank()], whole_batch(list(parts), len(ROWS)))
        for parts in zip(*streams, strict=True)
    ]


def test_pairs_in_the_order_of_the_model() -> None:
    """The docstring's example is right, and the products do not depend on the order of storage."""
    assert _pairs([1, 0], "cpu").tolist() == [3, 0, 2]
    x, e = torch.randn(1, 4), torch.randn(3, 1, 4)
    expected = None
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        stack = torch.stack([e[table] for table in order], 1)
        products = torch.cat([torch.bmm(stack, x[:, :, None]), torch.bmm(stack, stack.mT)], 2)
        result = products.flatten(1)[:, _pairs(order, "cpu")]
        expected = result if expected is None else expected
        assert torch.allclose(result, expected)
    vectors = [x, *e]
    assert torch.allclose(
        expected[0],
        torch.stack([(vectors[i] * vectors[j]).sum() for i in range(1, 4) for j in range(i)]),
    )


def _train(
    options: dict[str, Any], tables: dict[str, Any], data: dict[str, Any], impl: str, steps: int
) -> dict[str, Any]:
    rate, dense_rate = 0.2, 0.1
    model = DLRM(_tables(**tables), learning_rate=rate, seed=3, **SMALL, **options)
    model.embeddings.impl = impl
    if options.get("gradient") == "rowwise_adagrad":
        model.embeddings.epsilon = 1e-3
    trainer = Trainer(model, torch.optim.SGD(model.dense.parameters(), dense_rate))
    exact = Reference(
        model.dense.state_dict(), weights_of(model.embeddings), tables.get("mode", "sum")
    )
    losses = []
    for local, full in _batches(steps, **data):
        result = trainer.mean_over_ranks([trainer.step(local)])[0]
        epsilon = 1e-3 if options.get("gradient") == "rowwise_adagrad" else None
        losses.append(abs(result - exact.step(full, rate, dense_rate, epsilon=epsilon)))
    pairs = [(model.dense.state_dict()[name], value) for name, value in exact.dense.items()]
    pairs += [(table, exact.tables[name]) for name, table in weights_of(model.embeddings).items()]
    moved = Reference(
        DLRM(_tables(**tables), seed=3, **SMALL, gradient="sgd").dense.state_dict(), {}
    ).dense
    return {
        "losses": losses,
        "errors": [
            float((result - expected).abs().max() / expected.abs().max())
            for result, expected in pairs
        ],
        "moved": min(
            float((exact.dense[name] - value).abs().max()) for name, value in moved.items()
        ),
        "keys": sorted(model.dense.state_dict()),
    }


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("options", "tables", "data", "impl"),
    [
        ({"gradient": "rowwise_adagrad"}, {}, {}, "fused"),
        (
            {"gradient": "sgd"},
            {"lookups": None, "mode": "mean"},
            {"jagged": True, "lookups": 2},
            "fused",
        ),
        (
            {"gradient": "rowwise_adagrad"},
            {"lookups": None},
            {"jagged": True, "lookups": 2},
            "unfused",
        ),
    ],
    ids=["one-hot-adagrad", "jagged-mean-sgd", "unfused"],
)
def test_several_steps_on_the_whole_batch(
    ranks: Any,
    options: dict[str, Any],
    tables: dict[str, Any],
    data: dict[str, Any],
    impl: str,
    world_size: int,
) -> None:
    """Losses and all parameters are right after three steps.

    DDP trains the MLPs and the fused update the tables, both with the right scale.
    """
    for result in ranks(world_size).run(_train, options, tables, data, impl, 3):
        assert max(result["losses"]) < 1e-5, result
        assert max(result["errors"]) < 1e-5, result
        assert result["moved"] > 1e-4, "every parameter must have learnt something"
        assert result["keys"] == [
            f"{part}.{layer}.{parameter}"
            for part in ("bottom", "top")
            for layer in (0, 2)
            for parameter in ("bias", "weight")
        ]


def _split() -> float:
    """Return the largest difference between the logits of full tables and of tables split by
    columns.
    """
    full, split = DLRM(_tables(), **SMALL, seed=1), DLRM(_tables(column_shards=2), **SMALL, seed=1)
    assert full.embeddings.plan.stackable
    assert not split.embeddings.plan.stackable
    local = _batches(1)[0][0]
    with torch.no_grad():
        return float(
            (full(local.dense, local.indices) - split(local.dense, local.indices)).abs().max()
        )


def test_split_tables_change_nothing(ranks: Any) -> None:
    assert max(ranks(2).run(_split)) < 1e-6


def _refused() -> list[Any]:
    model = DLRM(_tables(), **SMALL)
    local = _batches(1)[0][0]
    uneven = [*_tables()[:2], EmbeddingTable("wider", 9, 8)]
    return [
        error_of(DLRM, uneven),
        error_of(DLRM, _tables(), average_gradients=True),
        error_of(model, local.dense[:-1], local.indices),
        error_of(Trainer, model, torch.optim.SGD(model.dense.parameters(), 0.1)),
    ]


def test_rejected(ranks: Any) -> None:
    for outcome in ranks(2).run(_refused):
        assert [kind for kind, _, _ in outcome] == ["ArgumentError"] * 4
        assert [message for _, message, _ in outcome] == [
            "DLRM: tables must all have the same width, for their dot products; got [4, 8].",
            (
                "DLRM: average_gradients must be left to the model, which averages logits' "
                "gradients instead."
            ),
            "DLRM: dense features must be of the bags' 4 samples; got 3.",
            "Trainer: the tables' gradient must be sgd or rowwise_adagrad; got 'dense'.",
        ]


def test_meta() -> None:
    model = DLRM(
        [dataclasses.replace(table, rows=10**12) for table in _tables()], device="meta", **SMALL
    )
    assert all(parameter.is_meta for parameter in model.parameters())
    assert isinstance(interlace_dlrm.DLRM, type)
    assert all(hasattr(interlace_dlrm, name) for name in interlace_dlrm.__all__)
    with pytest.raises(ArgumentError):
        DLRM([], device="meta")
