"""Times of kernels on a machine, before anything is communicated.

A matrix product of known sizes on a GPU with a profile takes as long as
:class:`interlace.costs.time.MachineProfile` says, which ``impl="auto"`` goes by, too: the library's
tiles, or those of our own kernels where a product is fused. All other kernels take a roofline's
time (:class:`interlace.sim.machine.Gpu`).
"""

from __future__ import annotations

import math

from interlace.costs.known_profiles import shipped_profile
from interlace.costs.time import MachineProfile
from interlace.sim.machine import Gpu, Machine
from interlace.sim.work import Kernel

_OWN_TILE = (128, 256)
"""Rows and columns of the tiles that our kernels have unless their products are small."""


def kernel_ns(gpu: Gpu, kernel: Kernel) -> int:
    """Return the nanoseconds of a kernel that only computes; 0 for no work."""
    if kernel.given_ns is not None:
        return kernel.given_ns
    profile = _profile(gpu, kernel)
    if profile is None or kernel.product is None:
        return gpu.roofline_ns(kernel.flops, kernel.memory_bytes)
    product_us = profile.library_product_us(kernel.product, products=kernel.products)
    # A profile's rates are measured, but a user may give the machine a slower memory.
    return math.ceil(max(1e3 * product_us, gpu.floor_ns(kernel.flops, kernel.memory_bytes)))


def launch_and_body_ns(machine: Machine, kernel: Kernel) -> tuple[int, int]:
    """Split the nanoseconds of a kernel that communicates into its launch, in which nothing leaves,
    and its body.

    Only the body suffers from fusing: registers, occupancy, address arithmetic. The tiles of a
    profile's products are those of fused kernels already.
    """
    gpu = machine.gpu
    profile = _profile(gpu, kernel)
    if profile is None or kernel.product is None:
        alone = kernel_ns(gpu, kernel)
        launch = min(alone, round(gpu.kernel_ns.value))
        return launch, round((alone - launch) * machine.collectives.fused_slowdown.value)
    tiles_us = profile.own_product_us(kernel.product, _OWN_TILE, products=kernel.products)
    memory_us = 1e6 * kernel.memory_bytes / profile.product.memory_bytes_per_s
    floor_ns = gpu.floor_ns(kernel.flops, kernel.memory_bytes)
    body = math.ceil(max(1e3 * tiles_us, 1e3 * memory_us, floor_ns))
    return round(1e3 * profile.product.launch_us), body


def _profile(gpu: Gpu, kernel: Kernel) -> MachineProfile | None:
    """Return the profile that times a kernel; None if a roofline does."""
    if gpu.profile is None or kernel.product is None or kernel.given_ns is not None:
        return None
    return shipped_profile(gpu.profile)
