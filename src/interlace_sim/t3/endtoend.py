"""Layers from simulated sub-layers and a stated breakdown: training, prompts, and the generation of
tokens.

A layer's products are known from its sizes. Products whose output needs an all-reduce are simulated
with it. The other products (the first ones of attention and of the feed-forward block, and in
training the gradients without an all-reduce) run at the FLOPs per second of the simulated FC-2.
Attention's own operators, norms and similar ones are a share of the sequential time, which the
caller states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from interlace.errors import ConfigError
from interlace_sim.t3.machine import T3Machine
from interlace_sim.t3.models import SUBLAYERS, SubLayerName, T3Model
from interlace_sim.t3.product import Product
from interlace_sim.t3.run import simulate

Phase = Literal["training", "prompt", "generation"]
REDUCED: dict[Phase, tuple[SubLayerName, ...]] = {
    "prompt": ("op", "fc2"),
    "generation": ("op", "fc2"),
    "training": ("op", "fc2", "fc1", "ip"),
}
"""Sub-layers that end in an all-reduce: in the forward pass, and in both passes."""
REST_SHARE = 0.425
"""Share of the sequential time in operators that are not sliced.

It is an assumption: the paper's breakdown is not known to us.
"""
CONFIGURATIONS = ("sequential", "t3", "t3-mca", "ideal")


@dataclasses.dataclass(frozen=True)
class EndToEnd:
    """Times of one layer by configuration; all layers are alike.

    Attributes:
        reduced_ns: Nanoseconds of the sub-layers with an all-reduce, by configuration.
        products_ns: Nanoseconds of the other products.
        rest_ns: Nanoseconds of operators that are not sliced.
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
        """Return the nanoseconds of the layer."""
        return self.reduced_ns[configuration] + self.products_ns + self.rest_ns

    def speed_up(self, configuration: str) -> float:
        """Return the speed-up against the sequential layer."""
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
    """Estimate the time of a layer of ``model`` on ``ranks`` GPUs.

    Args:
        machine: The GPUs and their links.
        model: The model.
        ranks: Tensor-parallel degree.
        phase: ``"training"``, ``"prompt"`` or ``"generation"``.
        tokens: Tokens that go through a layer at once; the model's by default. In ``generation``
            there is one per sequence, so they are the batch.
        rest_share: Share of the sequential time in operators that are not sliced.
        known: Totals by configuration of sub-layers that have been simulated, by the inner
            dimension of their product, and the product's own time as ``product``.

    Raises:
        ConfigError: the phase is unknown, generation has no ``tokens``, the share is not from 0 to
            below 1, or the degree does not divide the model.
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
    for sublayer in REDUCED[phase]:
        depth = products[sublayer].depth
        # Sub-layers of equal inner dimension are the same product.
        if depth not in done:
            done[depth] = totals(machine, products[sublayer], ranks)
        for name in CONFIGURATIONS:
            reduced[name] += done[depth][name]
    flops = {name: product.flops for name, product in products.items()}
    # Training computes every product three times: forward, and the gradients of inputs and weights.
    passes = 3 if phase == "training" else 1
    remaining = passes * sum(flops.values()) - sum(flops[name] for name in REDUCED[phase])
    products_ns = remaining * done[products["fc2"].depth]["product"] / products["fc2"].flops
    # The stated share refers to the sum of everything, so it is solved for.
    sliced = reduced["sequential"] + products_ns
    rest_ns = sliced * rest_share / (1 - rest_share)
    return EndToEnd(
        phase, model.name, ranks, products["op"].rows, rest_share, reduced, products_ns, rest_ns
    )


def totals(machine: T3Machine, product: Product, ranks: int) -> dict[str, int]:
    """Return the nanoseconds of a sub-layer by configuration, and of its product alone."""
    results = {name: simulate(machine, product, ranks, name) for name in CONFIGURATIONS}
    return {
        **{name: result.total_ns for name, result in results.items()},
        "product": results["sequential"].fused.time_ns,
    }
