"""Event-driven models of distributed training, and the gain from fusing on many nodes.

See ``docs/simulator.md``. Neither torch nor Triton is needed. One call gives one result::

    from interlace.sim import Scenario

    unfused = Scenario("dlrm", nodes=128).simulate()
    fused = Scenario("dlrm", nodes=128, fused="both").simulate()
    print(fused.total_ns / unfused.total_ns, fused.bound)

Any other program is a list of tasks on a machine::

    from interlace.sim import Collective, Task, load_machine, matrix_product, run

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

if TYPE_CHECKING:
    from interlace.sim.engine import Engine, Join, Server
    from interlace.sim.fabric import Fabric
    from interlace.sim.machine import Machine, load_machine
    from interlace.sim.results import Result
    from interlace.sim.scenario import Scenario
    from interlace.sim.step import run
    from interlace.sim.sweeps import sweep
    from interlace.sim.work import (
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
    "load_machine",
    "matrix_product",
    "run",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'interlace.sim' has no attribute {name!r}")
    return getattr(importlib.import_module(f"interlace.sim.{_PUBLIC[name]}"), name)
