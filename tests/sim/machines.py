"""Machines for tests: links of 1 byte per nanosecond, nothing else takes time."""

from __future__ import annotations

from typing import Any

from interlace_sim.configfile import parse
from interlace_sim.machine import Machine


def machine(**changes: Any) -> Machine:
    """A machine without overheads. ``changes`` replace values in gpu, collectives and network by
    key.
    """
    data: dict[str, Any] = {
        "name": "test",
        "gpu": {
            "flops_per_s": 1e12,
            "flops_efficiency": 1,
            "memory_bytes_per_s": 1e12,
            "memory_efficiency": 1,
            "roofline_norm": 2,
            "kernel_ns": 0,
            "host_link_bytes_per_s": 1e9,
        },
        "collectives": {
            "launch_ns": 0,
            "step_ns": 0,
            "reduction": 1,
            "efficiency": 1,
            "fused_efficiency": 1,
            "fused_slowdown": 1,
            "slice_ns": 0,
            "message_ns": 0,
            "skew": 0,
        },
        "network": {"topology": "switch", "link_bytes_per_s": 1e9, "latency_ns": 0},
    }
    for key, value in changes.items():
        next(part for part in (data["gpu"], data["collectives"], data["network"]) if key in part)[
            key
        ] = value
    return parse(Machine, data, "test machine")
