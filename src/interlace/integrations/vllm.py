"""Interlace in vLLM: the pass for ``torch.compile`` in every worker, and vLLM's groups by name."""

from __future__ import annotations

import torch.distributed as dist

from interlace import compile
from interlace.compile.foreign import Foreign
from interlace.compile.foreign import register as register_collective
from interlace.compile.foreign_norms import ForeignNorm
from interlace.compile.foreign_norms import register as register_norm

COLLECTIVES = {
    "vllm::all_reduce": "all_reduce",
    "vllm::reduce_scatter": "reduce_scatter",
    "vllm::all_gather": "all_gather",
}
"""vLLM's operators: ``(tensor, group_name)``, and ``(tensor, dim, world_size, group_name)``."""

NORMS = {"vllm_ir::rms_norm": False, "vllm_ir::fused_add_rms_norm": True}
"""vLLM's norms, which its own passes lower later, and whether they add a residual first."""


def register() -> None:
    """Let Inductor run Interlace's pass in this process, which also knows vLLM's operators.

    vLLM calls this in each of its processes, by the entry point ``vllm.general_plugins``, unless
    its variable ``VLLM_PLUGINS`` names other plugins only. The pass runs ahead of vLLM's own
    passes, which get the collectives and norms that were left alone.
    """
    for name, collective in COLLECTIVES.items():
        register_collective(Foreign(name, collective, process_group))
    for name, has_residual in NORMS.items():
        register_norm(ForeignNorm(name, has_residual))
    compile.install()


def process_group(name: str) -> dist.ProcessGroup:
    """Return the process group of one of vLLM's group coordinators, such as ``"tp:0"``.

    Raises:
        LookupError: vLLM has no such group any more, or never had.
    """
    from vllm.distributed import parallel_state

    coordinator = parallel_state._groups[name]()
    if coordinator is None:
        raise LookupError(name)
    group: dist.ProcessGroup = coordinator.device_group
    return group
