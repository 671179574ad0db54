"""Find the rates of a machine's products from times of some of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from interlace.costs.time import MachineProfile, ProductRates, SizedCall

_STEPS = (1.5, 1.2, 1.08, 1.03)


@dataclasses.dataclass(frozen=True)
class ProductTime:
    """The time of one product of the library, ``rows x columns x inner`` in bfloat16."""

    rows: int
    columns: int
    inner: int
    us: float


@dataclasses.dataclass(frozen=True)
class MeasuredRates:
    """Hold what was measured of a machine without a call of any operator.

    Attributes:
        products: Times of products, the slowest rank's.
        link_bytes_per_s: Bytes per second that a copy engine fetches from a peer of the same node
            while that one fetches as well, on the slowest rank; None if no node has two ranks.
        world_size: Number of ranks that measured at once.
        is_complete: Whether there was memory for all products that are measured.
    """

    products: Sequence[ProductTime]
    link_bytes_per_s: float | None
    world_size: int
    is_complete: bool = True


def with_rates(
    start: MachineProfile, gpu: str, processors: int, rates: MeasuredRates, source: str
) -> MachineProfile:
    """Return a profile with measured rates, and without corrections, which are of other rates.

    How implementations compose their times stays as it is in ``start``.

    Args:
        start: What is known before: the GPU's own profile, or a guess.
        gpu: The GPU's name, as ``torch.cuda.get_device_name`` has it.
        processors: Its number of streaming multiprocessors.
        rates: What was measured.
        source: Where and when it was measured.
    """
    link = rates.link_bytes_per_s or start.link_bytes_per_s
    machine = dataclasses.replace(
        start,
        gpu=gpu,
        processors=processors,
        source=source,
        link_bytes_per_s=float(f"{link:.4g}"),
        corrections={},
        results=[],
    )
    return dataclasses.replace(machine, product=fit_rates(machine, rates.products))


def fit_rates(machine: MachineProfile, products: Sequence[ProductTime]) -> ProductRates:
    """Return the rates that explain the products' times best, near those of ``machine``.

    One rate after the other is changed by a factor as long as that helps, by smaller and smaller
    factors. A rate's change counts as much as an equal error of one product: what the products
    hardly show stays as it is, instead of following their noise. The rates of float32 change with
    those of tensor cores.
    """
    known = rates = machine.product
    names = [
        field.name for field in dataclasses.fields(ProductRates) if "float32" not in field.name
    ]

    def error(candidate: ProductRates) -> float:
        profile = dataclasses.replace(machine, product=candidate)
        changes = (math.log(getattr(candidate, name) / getattr(known, name)) for name in names)
        return math.fsum(change**2 for change in changes) + math.fsum(
            math.log(
                profile.library_product_us(
                    SizedCall(product.rows, product.columns, product.inner, 2, 1)
                )
                / product.us
            )
            ** 2
            for product in products
        )

    least = error(rates)
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
