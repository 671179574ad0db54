"""Event-driven models of distributed training, and the gain from fusing on many nodes.

See ``docs/simulator.md``. Neither torch nor Triton is needed. One call gives one result::

    from interlace_sim import Scenario

    unfused = Scenario("dlrm", nodes=128).simulate()
    fused = Scenario("dlrm", nodes=128, fused="both").simulate()
    print(fused.total_ns / unfused.total_ns, fused.bound)

Any other program is a list of tasks on a machine::

    from interlace_sim import Collective, Task, load_machine, matrix_product, run

    machine = load_machine("h200-node")
    tasks = [
        Task("GEMM", "compute", matrix_product(8192, 8192, 7168, itemsize=2)),
        Task("AllReduce", "library", Collective("all_reduce", "ring", size=64 << 20), ("GEMM",)),
    ]
    result = run(machine, machine.build_topology(4), tasks)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from interlace.extras import needing

if TYPE_CHECKING:
    from interlace_sim.engine import Engine, Join, Server
    from interlace_sim.errors import UnphysicalError
    from interlace_sim.fabric import Fabric
    from interlace_sim.machine import Machine, load_machine
    from interlace_sim.results import Result
    from interlace_sim.scenario import Scenario
    from interlace_sim.step import run
    from interlace_sim.sweeps import sweep
    from interlace_sim.work import (
        Collective,
        Consuming,
        Fused,
        HostCopy,
        Kernel,
        Message,
        Task,
        matrix_product,
    )

_PUBLIC = {
    "Collective": "work",
    "Consuming": "work",
    "Engine": "engine",
    "Fabric": "fabric",
    "Fused": "work",
    "HostCopy": "work",
    "Join": "engine",
    "Kernel": "work",
    "Machine": "machine",
    "Message": "work",
    "Result": "results",
    "Scenario": "scenario",
    "Server": "engine",
    "Task": "work",
    "UnphysicalError": "errors",
    "load_machine": "machine",
    "matrix_product": "work",
    "run": "step",
    "sweep": "sweeps",
}

__all__ = [
    "Collective",
    "Consuming",
    "Engine",
    "Fabric",
    "Fused",
    "HostCopy",
    "Join",
    "Kernel",
    "Machine",
    "Message",
    "Result",
    "Scenario",
    "Server",
    "Task",
    "UnphysicalError",
    "load_machine",
    "matrix_product",
    "run",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'interlace_sim' has no attribute {name!r}")
    with needing("The simulator"):
        return getattr(importlib.import_module(f"interlace_sim.{_PUBLIC[name]}"), name)
