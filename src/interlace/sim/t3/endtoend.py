"""Whole layers from simulated sub-layers and a stated breakdown: training, prompts, and the
generation of tokens.

A layer's products are known from its sizes. Those whose output needs an all-reduce are simulated,
with it; the others (the first ones of attention and of the feed-forward block, and in training the
gradients that need none) take the time of as many FLOPs at the rate of the simulated FC-2. What is
left, attention's own operators, norms and the like, is a share of the sequential time, which the
caller states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from interlace.errors import ConfigError
from interlace.sim.t3.machine import T3Machine
from interlace.sim.t3.models import SUBLAYERS, SubLayerName, T3Model
from interlace.sim.t3.product import Product
from interlace.sim.t3.run import simulate

Phase = Literal["training", "prompt", "generation"]
REDUCED: dict[Phase, tuple[SubLayerName, ...]] = {
    "prompt": ("op", "fc2"),
    "generation": ("op", "fc2"),
    "training": ("op", "fc2", "fc1", "ip"),
}
"""Sub-layers that end in an all-reduce: of the forward pass, and of both."""
REST_SHARE = 0.425
"""Of the sequential time, in operators that are not sliced: assumed, the paper's breakdown is not
known here.
"""
CONFIGURATIONS = ("sequential", "t3", "t3-mca", "ideal")


@dataclasses.dataclass(frozen=True)
class EndToEnd:
    """One layer, by configuration; all layers are alike.

    Attributes:
        reduced_ns: the sub-layers with an all-reduce.
        products_ns: the other products.
        rest_ns: what is not sliced.
    """

    phase: Phase
    model: str
    ranks: int
    tokens: int
    rest_share: float
    reduced_ns: dict[str, int]
    products_ns: float
    rest_ns: float

    def layer_ns(self, configuration: str) -> float:
        return self.reduced_ns[configuration] + self.products_ns + self.rest_ns

    def speed_up(self, configuration: str) -> float:
        """Against the sequential layer."""
        return self.layer_ns("sequential") / self.layer_ns(configuration)


def estimate(
    machine: T3Machine,
    model: T3Model,
    ranks: int,
    phase: Phase,
    *,
    tokens: int | None = None,
    rest_share: float = REST_SHARE,
    known: Mapping[int, Mapping[str, int]] | None = None,
) -> EndToEnd:
    """A layer of ``model`` on ``ranks`` GPUs.

    Args:
        tokens: that go through a layer at once; the model's by default. In ``generation`` one of
            each sequence: the batch.
        rest_share: of the sequential time, in what is not sliced.
        known: totals by configuration of sub-layers that were simulated before, by the inner
            dimension of their product; with them the product's own time, ``product``.

    Raises:
        ConfigError: an unknown phase, generation without ``tokens``, a share that is not from 0 to
            below 1, or a degree that does not divide the model.
    """
    if phase not in REDUCED:
        raise ConfigError(f"a phase must be one of {', '.join(REDUCED)}; got {phase!r}.")
    if phase == "generation" and tokens is None:
        raise ConfigError(
            "generation must have the number of sequences as tokens; got none. Say tokens=8."
        )
    if not 0 <= rest_share < 1:
        raise ConfigError(f"the share of the rest must be from 0 to below 1; got {rest_share}.")
    products = {name: model.product(name, ranks, tokens) for name in SUBLAYERS}
    reduced = dict.fromkeys(CONFIGURATIONS, 0)
    done = dict(known or {})
    for name in REDUCED[phase]:
        depth = products[name].depth
        if depth not in done:
            done[depth] = totals(machine, products[name], ranks)
        for each in CONFIGURATIONS:
            reduced[each] += done[depth][each]
    flops = {name: product.flops for name, product in products.items()}
    passes = (
        3 if phase == "training" else 1
    )  # forward; and backward, the gradients of inputs and of weights
    others = passes * sum(flops.values()) - sum(flops[name] for name in REDUCED[phase])
    others_ns = others * done[products["fc2"].depth]["product"] / products["fc2"].flops
    sliced = reduced["sequential"] + others_ns
    rest = sliced * rest_share / (1 - rest_share)
    return EndToEnd(
        phase, model.name, ranks, products["op"].rows, rest_share, reduced, others_ns, rest
    )


def totals(machine: T3Machine, product: Product, ranks: int) -> dict[str, int]:
    """Time of a sub-layer by configuration, and of its product alone."""
    results = {name: simulate(machine, product, ranks, name) for name in CONFIGURATIONS}
    return {
        **{name: result.total_ns for name, result in results.items()},
        "product": results["sequential"].fused.time_ns,
    }
