"""T3: a matrix product whose output the memory system tracks, to trigger the reduce-scatter.

Model of Pati et al., "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute &
Collectives", ASPLOS'24; see ``docs/t3.md``. One call gives one result, and ``sequential`` is the
baseline of the other configurations::

    from interlace_sim.t3 import Product, load_t3_machine, simulate

    machine = load_t3_machine("t3-paper")
    product = Product("T-NLG fc2, TP 8", rows=8192, columns=4256, depth=2128)
    before = simulate(machine, product, ranks=8, configuration="sequential")
    after = simulate(machine, product, ranks=8, configuration="t3-mca")
    print(before.total_ns / after.total_ns, after.memory_bytes)
"""

from interlace_sim.t3.addresses import (
    AddressMap,
    DmaMap,
    Target,
    all_to_all,
    direct_reduce_scatter,
    ring_reduce_scatter,
)
from interlace_sim.t3.endtoend import EndToEnd, estimate
from interlace_sim.t3.machine import T3Machine, load_t3_machine
from interlace_sim.t3.models import SUBLAYERS, load_t3_model
from interlace_sim.t3.product import Product
from interlace_sim.t3.run import COLLECTIVES, CONFIGURATIONS, simulate
from interlace_sim.t3.sublayer import SubLayer

__all__ = [
    "AddressMap",
    "COLLECTIVES",
    "CONFIGURATIONS",
    "DmaMap",
    "EndToEnd",
    "Product",
    "SUBLAYERS",
    "SubLayer",
    "T3Machine",
    "Target",
    "all_to_all",
    "direct_reduce_scatter",
    "estimate",
    "load_t3_machine",
    "load_t3_model",
    "ring_reduce_scatter",
    "simulate",
]
