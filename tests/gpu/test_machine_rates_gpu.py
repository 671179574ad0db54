"""Rates of products and links as they are measured when a group is made. Run with ``-m gpu``."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch

import interlace
from interlace.comm.groups import machine_rates
from interlace.costs.known_profiles import profile_of
from interlace.costs.product_fit import with_rates
from interlace.costs.time import SizedCall

pytestmark = pytest.mark.gpu


def _measured() -> tuple[float, float | None, bool]:
    """Return the median error of products' times by fitted rates, the rate of a link, and whether
    the program's random numbers are what they were.
    """
    group = interlace.group_of()
    state = torch.cuda.get_rng_state(group.device)
    rates = machine_rates.measure_rates(group)
    name = torch.cuda.get_device_name(group.device)
    processors = torch.cuda.get_device_properties(group.device).multi_processor_count
    profile = with_rates(profile_of(name, processors), name, processors, rates, "this test")
    errors = [
        abs(
            profile.library_product_us(SizedCall(each.rows, each.columns, each.inner, 2, 1))
            / each.us
            - 1
        )
        for each in rates.products
    ]
    same = torch.equal(state, torch.cuda.get_rng_state(group.device))
    return statistics.median(errors), rates.link_bytes_per_s, same


@pytest.mark.usefixtures("own_gpus")
def test_rates_explain_the_products(ranks: Any, world_size: int) -> None:
    found = ranks(world_size).run(_measured)
    for error, link, same in found:
        assert error < 0.15
        assert link is not None
        assert link > 1e9
        assert same
    assert len(set(found)) == 1, "all ranks know the same rates"
