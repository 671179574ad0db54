"""Times of kernels on a machine, before anything is communicated.

A matrix product of known sizes on a GPU with a profile takes as long as
:class:`interlace.costs.time.MachineProfile` says, which ``impl="auto"`` goes by, too: the library's
tiles, or those of our own kernels where a product is fused. All other kernels take a roofline's
time (:class:`interlace_sim.machine.Gpu`).
"""

from __future__ import annotations

import functools
import math

from interlace.costs.known_profiles import shipped_profile
from interlace.costs.time import MachineProfile, SizedCall
from interlace_sim.machine import Gpu, Machine
from interlace_sim.work import Kernel

_OWN_TILE = (128, 256)
"""Rows and columns of the tiles that our kernels have unless their products are small."""


def kernel_ns(gpu: Gpu, kernel: Kernel) -> int:
    """Return the nanoseconds of a kernel that only computes; 0 for no work."""
    if kernel.given_ns is not None:
        return kernel.given_ns
    if gpu.profile is None or kernel.product is None:
        return gpu.roofline_ns(kernel.flops, kernel.memory_bytes)
    product_us, _ = _product_us(gpu.profile, kernel.product, kernel.products)
    return math.ceil(max(1e3 * product_us, _floor_ns(gpu, kernel)))


def _floor_ns(gpu: Gpu, kernel: Kernel) -> float:
    """Return the least nanoseconds on this machine of a product that a profile times: a user may
    give a machine a slower memory than its profile was measured with.
    """
    return gpu.floor_ns(kernel.flops, kernel.memory_bytes / gpu.memory_efficiency.value)


def launch_and_body_ns(machine: Machine, kernel: Kernel) -> tuple[int, int]:
    """Split the nanoseconds of a kernel that communicates into its launch, in which nothing leaves,
    and its body.

    Only the body suffers from fusing: registers, occupancy, address arithmetic. A profile's tiles
    are those of our own kernels, so that they need no factor for it.
    """
    gpu = machine.gpu
    if gpu.profile is None or kernel.product is None or kernel.given_ns is not None:
        alone = kernel_ns(gpu, kernel)
        launch = min(alone, round(gpu.kernel_ns.value))
        return launch, round((alone - launch) * machine.collectives.fused_slowdown.value)
    _, tiles_us = _product_us(gpu.profile, kernel.product, kernel.products)
    rates = _profile(gpu.profile).product
    # The peers' parts are written into this memory beside the product.
    memory_us = 1e6 * kernel.memory_bytes / rates.memory_bytes_per_s
    body_ns = max(1e3 * tiles_us, 1e3 * memory_us, _floor_ns(gpu, kernel))
    return round(1e3 * rates.launch_us), math.ceil(body_ns)


def _profile(gpu: str) -> MachineProfile:
    profile = shipped_profile(gpu)
    assert profile is not None, "a machine's profile is checked when it is loaded"
    return profile


# A step has few different products, each many times, and a profile tries many tiles for each.
@functools.lru_cache(maxsize=1024)
def _product_us(gpu: str, call: SizedCall, products: int) -> tuple[float, float]:
    """Return how long a product takes in the library's kernel, and in tiles of ours."""
    profile = _profile(gpu)
    return (
        profile.library_product_us(call, products=products),
        profile.own_product_us(call, _OWN_TILE, products=products),
    )
