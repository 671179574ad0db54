"""Measure the profile of a machine: its products, its links, and calls of every operator.

``interlace tune machine`` runs it. What the short stay cannot tell, how an implementation composes
its time, is taken from the profile that is known, and scaled.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from interlace.bench import profile_fit
from interlace.bench.products import operand_sets
from interlace.bench.timing import measure
from interlace.comm import Group, copies, group_of
from interlace.costs.time import Call, MachineProfile, ProductRates
from interlace.units import round_up

_PRODUCTS = 40
_MOST_FLOPS = 2e12
_SAMPLES, _GRAPH_US = 3, 300.0
_LINK_BYTES = 256 << 20
_STEPS = (1.5, 1.2, 1.08, 1.03)


@dataclasses.dataclass(frozen=True)
class ProductTime:
    """The time of one product of the library, ``rows x columns x inner`` in bfloat16."""

    rows: int
    columns: int
    inner: int
    us: float


def measure_products() -> list[ProductTime]:
    """Return times of random products on this rank's GPU; collective."""
    chance = random.Random(0)
    times: list[ProductTime] = []
    while len(times) < _PRODUCTS:
        rows, columns, inner = (
            round_up(round(2 ** chance.uniform(low, high)), 8)
            for low, high in ((3, 14), (9, 14), (8, 14))
        )
        if 2 * rows * columns * inner <= _MOST_FLOPS:
            times.append(ProductTime(rows, columns, inner, _product_us(rows, columns, inner)))
    return times


def _product_us(rows: int, columns: int, inner: int) -> float:
    device = torch.device("cuda", torch.cuda.current_device())
    elements = (rows + columns) * inner + rows * columns
    sets = [
        (
            torch.randn(rows, inner, device=device).bfloat16(),
            torch.randn(columns, inner, device=device).bfloat16(),
        )
        for _ in range(operand_sets(2 * elements, device))
    ]

    def multiply(i: int) -> torch.Tensor:
        x, w = sets[i % len(sets)]
        return torch.mm(x, w.T)

    timing = measure(multiply, period=len(sets), samples=_SAMPLES, graph_us=_GRAPH_US)
    return timing.median_us


def measure_link(group: Group) -> float:
    """Return the bytes per second that a copy engine fetches from a peer while that one fetches as
    well; collective.
    """
    block = group.allocate(2 * _LINK_BYTES)
    peer = (group.rank + 1) % group.world_size
    target = block.address + group.rank * block.stride
    source = block.address + peer * block.stride + _LINK_BYTES
    timing = measure(
        lambda _: copies.fetch(group, target, source, _LINK_BYTES, peer),
        samples=_SAMPLES,
        graph_us=_GRAPH_US,
    )
    return _LINK_BYTES / timing.median_us * 1e6


def measure_rates() -> dict[str, Any]:
    """Return times of products and the rate of a link, as JSON can hold them; collective."""
    return {
        "products": [dataclasses.asdict(time) for time in measure_products()],
        "link_bytes_per_s": measure_link(group_of()),
        "world_size": group_of().world_size,
    }


# From measurements to a profile


def profile_from(
    start: MachineProfile,
    gpu: str,
    processors: int,
    rates: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    source: str,
) -> MachineProfile:
    """Return the profile that measurements show.

    Args:
        start: What is known before: the GPU's own profile, or a guess.
        gpu: The GPU's name, as ``torch.cuda.get_device_name`` has it.
        processors: Its number of streaming multiprocessors.
        rates: What :func:`measure_rates` has returned.
        results: Results of calls, as those of :func:`interlace.bench.sweep.bench`.
        source: Where and when it was measured.
    """
    products = [ProductTime(**fields) for fields in rates["products"]]
    machine = dataclasses.replace(
        start,
        gpu=gpu,
        processors=processors,
        source=source,
        link_bytes_per_s=float(f"{rates['link_bytes_per_s']:.4g}"),
        corrections={},
        results=[],
        is_guess=False,
    )
    machine = dataclasses.replace(machine, product=fit_rates(machine, products))
    points = profile_fit.points_of([{"results": results}])
    scaled = profile_fit.scaled(machine, points)
    compositions = {
        operator: {**known, **scaled.get(operator, {})}
        for operator, known in machine.compositions.items()
    }
    composed = dataclasses.replace(machine, compositions=compositions)
    return dataclasses.replace(composed, corrections=profile_fit.corrections_of(composed, points))


def fit_rates(machine: MachineProfile, products: Sequence[ProductTime]) -> ProductRates:
    """Return the rates that explain the products' times best, near those of ``machine``.

    One rate after the other is changed by a factor as long as that helps, by smaller and smaller
    factors. The rates of float32 change with those of tensor cores.
    """
    rates = machine.product

    def error(candidate: ProductRates) -> float:
        profile = dataclasses.replace(machine, product=candidate)
        return math.fsum(
            math.log(
                profile.library_product_us(Call(product.rows, product.columns, product.inner, 2, 1))
                / product.us
            )
            ** 2
            for product in products
        )

    least = error(rates)
    names = [
        field.name for field in dataclasses.fields(ProductRates) if "float32" not in field.name
    ]
    for step in _STEPS:
        for name, factor in itertools.product(names, (step, 1 / step)):
            while True:
                value = float(f"{getattr(rates, name) * factor:.4g}")
                if name == "small_tile_efficiency" and value > 1:
                    break
                candidate = dataclasses.replace(rates, **{name: value})
                candidate_error = error(candidate)
                if candidate_error >= least * (1 - 1e-6):
                    break
                rates, least = candidate, candidate_error
    change = rates.flops_per_s / machine.product.flops_per_s
    return dataclasses.replace(
        rates,
        float32_flops_per_s=float(f"{rates.float32_flops_per_s * change:.4g}"),
        own_float32_flops_per_s=float(f"{rates.own_float32_flops_per_s * change:.4g}"),
    )
