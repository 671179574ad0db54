"""Random calls as real models make them, drawn with a seed, for ``interlace tune machine`` and
``interlace bench sweep``.

The models are those of :mod:`interlace.costs.models`. No GPU and no torch is needed here.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator

from interlace.costs.models import Model, models
from interlace.units import round_up

PATTERNS = (
    ("gemm", "all_reduce"),
    ("gemm", "reduce_scatter"),
    ("all_gather", "gemm"),
    ("gemm", "all_to_all"),
)
"""The operators whose calls are drawn: computation and collective in their order."""

_SHARDS = (2, 4, 8)
MOST_LOG2_TOKENS = 15
MOST_FLOPS = {"float8_e4m3fn": 16e12, "bfloat16": 8e12, "float16": 8e12, "float32": 0.5e12}
"""Of a drawn call, by the dtype of its operands: larger calls take more than 10 ms each, and say no
more than those of half their size.
"""


@dataclasses.dataclass(frozen=True)
class Draw:
    """One call of an operator.

    Attributes:
        pattern: The operator's computation and collective in their order.
        model: Name of the model.
        layer: The product's place in the model.
        shards: Number of ranks among which the model's weights are split. It need not be the number
            of ranks that measure: the sizes of one rank's product are what counts.
            None where no model has such a call.
        rows, columns, inner: M, N and K of the product on one rank.
        w_along_k: Whether the weight is contiguous along K, as in ``nn.Linear``; else along N.
        x_padding: Elements between the end of a row of x and the next one.
        has_bias: Whether there is a bias.
        has_block_scales: Whether float8 operands have a scale for each block, else one each.
    """

    pattern: tuple[str, str]
    model: str | None
    layer: str | None
    shards: int | None
    rows: int
    columns: int
    inner: int
    w_along_k: bool = True
    x_padding: int = 0
    has_bias: bool = False
    has_block_scales: bool = False


def draws(seed: int, world_size: int, dtype: str = "bfloat16") -> Iterator[Draw]:
    """Yield calls without end, each operator in turn.

    The number of tokens is drawn between 1 and 32768, each power of two as likely as any other; a
    third of the numbers are odd, a third are multiples of 128, and the others are multiples of 8.

    Args:
        seed: The same calls come for the same seed.
        world_size: Number of ranks that measure; all-gather and all-to-all need rows that it
            divides.
        dtype: dtype of the operands, on which the largest product depends.
    """
    chance, known = random.Random(seed), models()
    return in_turn(lambda pattern: _draw(pattern, chance, known, world_size), dtype)


def in_turn(draw: Callable[[tuple[str, str]], Draw], dtype: str) -> Iterator[Draw]:
    """Yield a call of each operator in turn, without end; too large ones are drawn again.

    Half of the calls of float8 have scales of blocks.
    """
    is_scaled, chance = dtype.startswith("float8"), random.Random(0)
    while True:
        for pattern in PATTERNS:
            while True:
                drawn = draw(pattern)
                if 2 * drawn.rows * drawn.columns * drawn.inner <= MOST_FLOPS[dtype]:
                    break
            if is_scaled and chance.random() < 0.5:
                drawn = dataclasses.replace(drawn, has_block_scales=True)
            yield drawn


def _draw(
    pattern: tuple[str, str], chance: random.Random, known: list[Model], world_size: int
) -> Draw:
    tokens = round(2 ** chance.uniform(0, MOST_LOG2_TOKENS))
    multiple = chance.choice((1, 8, 128))
    rows = tokens | 1 if multiple == 1 else round_up(tokens, multiple)
    model = chance.choice(known)
    shards = chance.choice([count for count in _SHARDS if model.heads % count == 0])
    layer, columns, inner = chance.choice(_layers(pattern, model, shards))
    if layer == "experts":
        rows *= model.top_k
    # The default split of an all-to-all is even; of the others, rows need not divide.
    if {"all_to_all", "all_gather"} & set(pattern):
        rows = round_up(rows, world_size)
    return Draw(pattern, model.name, layer, shards, rows, columns, inner)


def _layers(pattern: tuple[str, str], model: Model, shards: int) -> list[tuple[str, int, int]]:
    """Return the products of a layer that an operator may stand for: name, N and K on one rank."""
    attention = model.heads * model.head_dim // shards
    projections = (model.heads + 2 * model.kv_heads) * model.head_dim // shards
    feed_forward = model.intermediate // shards
    if "all_to_all" in pattern:
        if model.experts:
            return [("experts", model.hidden, model.intermediate)]
        return [("down", model.hidden, feed_forward)]
    if "all_gather" in pattern:
        return [("qkv", projections, model.hidden), ("gate_up", 2 * feed_forward, model.hidden)]
    return [("attention_output", model.hidden, attention), ("down", model.hidden, feed_forward)]
