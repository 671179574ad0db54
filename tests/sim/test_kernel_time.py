"""Times of matrix products by a machine's profile."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.costs.known_profiles import shipped_profile
from interlace.costs.time import SizedCall
from interlace.errors import ConfigError
from interlace_sim.kernel_time import kernel_ns, launch_and_body_ns
from interlace_sim.machine import load_machine
from interlace_sim.work import matrix_product


def test_a_profile_times_products_and_nothing_else() -> None:
    """One implementation of the model of time, to the nanosecond; without it, the roofline."""
    h200, profile = load_machine("h200-node"), shipped_profile("NVIDIA H200")
    assert profile is not None
    work = matrix_product(256, 8192, 7168, 2)
    call = SizedCall(256, 8192, 7168, 2, 1)
    assert work.product == call
    expected_us = profile.library_product_us(call)
    assert kernel_ns(h200.gpu, work) == math.ceil(1e3 * expected_us)
    # 64 tiles on 132 processors, one of them after another: the launch, and one tile's time.
    launch, body = launch_and_body_ns(h200, work)
    assert launch == round(1e3 * profile.product.launch_us)
    assert body == math.ceil(1e3 * profile.tile_us(128, 256, 7168, profile.product.flops_per_s))
    roofline = h200.gpu.roofline_ns(work.flops, work.memory_bytes)
    assert kernel_ns(h200.gpu, dataclasses.replace(work, product=None)) == roofline
    plain = load_machine("h200-node", {"gpu.profile": "none", "gpu.flops_per_s": 989e12})
    assert kernel_ns(plain.gpu, work) == roofline
    assert kernel_ns(h200.gpu, dataclasses.replace(work, given_ns=5)) == 5


def test_a_memory_that_is_slower_than_the_profiles_is_busy_for_no_longer_than_its_kernels() -> None:
    slow = load_machine("h200-node", {"gpu.memory_bytes_per_s": 1e9})
    work = matrix_product(256, 8192, 7168, 2)
    busy_ns = work.memory_bytes / slow.gpu.memory_efficiency.value
    assert kernel_ns(slow.gpu, work) == math.ceil(busy_ns)
    assert launch_and_body_ns(slow, work)[1] == math.ceil(busy_ns)


def test_elements_of_four_bytes_are_exact() -> None:
    """PyTorch multiplies float32 without tensor cores, 51 TFLOP/s in the library's kernels."""
    h200 = load_machine("h200-node")
    four, two = (kernel_ns(h200.gpu, matrix_product(8192, 8192, 8192, size)) for size in (4, 2))
    assert four == pytest.approx(2 * 8192**3 / 51e12 * 1e9, rel=0.05)
    assert four > 10 * two


@settings(max_examples=50, deadline=None)
@given(
    m=st.integers(1, 5000),
    n=st.integers(1, 5000),
    k=st.integers(1, 5000),
    itemsize=st.sampled_from([1, 2, 4]),
    products=st.integers(1, 9),
)
def test_no_profile_undercuts_physics(m: int, n: int, k: int, itemsize: int, products: int) -> None:
    h200, work = load_machine("h200-node"), matrix_product(m, n, k, itemsize, products=products)
    floor = h200.gpu.floor_ns(work.flops, work.memory_bytes)
    assert kernel_ns(h200.gpu, work) >= floor
    assert launch_and_body_ns(h200, work)[1] >= floor


def test_a_changed_rate_needs_another_clock() -> None:
    """A profile would time the products as before, and the change would be lost without a word."""
    with pytest.raises(ConfigError, match=r"timed by the profile of NVIDIA H200. Set gpu.profile="):
        load_machine("h200-node", {"gpu.flops_per_s": 1e15})
    known = "NVIDIA H100 80GB HBM3, NVIDIA H200"
    with pytest.raises(ConfigError, match=f"gpu.profile is wrong: .*none or one of {known}"):
        load_machine("h200-node", {"gpu.profile": "H9000"})
