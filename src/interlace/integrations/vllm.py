"""Interlace in vLLM: the pass for ``torch.compile`` in every worker, and vLLM's groups by name."""

from __future__ import annotations

import importlib
import os

import torch.distributed as dist

from interlace import compile
from interlace.compile import backends, foreign
from interlace.integrations import hosts
from interlace.integrations.hosts import log

COLLECTIVES = {
    "vllm::all_reduce": "all_reduce",
    "vllm::reduce_scatter": "reduce_scatter",
    "vllm::all_gather": "all_gather",
}
"""vLLM's operators: ``(tensor, group_name)``, and ``(tensor, dim, world_size, group_name)``."""

NORMS = {"vllm_ir::rms_norm": False, "vllm_ir::fused_add_rms_norm": True}
"""vLLM's norms, which its own passes lower later, and whether they add a residual first."""

KEY = "INTERLACE_PASS"
"""The name, among vLLM's variables, of what the pass depends on."""


def plugin() -> None:
    """Call :func:`register` if the user has chosen Interlace.

    vLLM calls this in each of its processes, by the entry point ``vllm.general_plugins``, because
    Interlace is installed. The choice is ``INTERLACE_VLLM=1``, or ``interlace`` among the names in
    vLLM's variable ``VLLM_PLUGINS``.
    """
    if hosts.is_chosen("vLLM", "INTERLACE_VLLM", "VLLM_PLUGINS"):
        register()


def register() -> None:
    """Let Inductor run Interlace's pass in this process, which also knows vLLM's operators.

    The pass runs ahead of vLLM's own passes, which get the collectives and norms that were left
    alone. vLLM keeps compiled graphs on disk, by a key that holds its own variables and settings
    and nothing of Inductor's passes; so what the pass depends on becomes one of vLLM's variables.
    Under ``VLLM_BATCH_INVARIANT=1`` vLLM promises that a row's result does not depend on its
    batch, by kernels of its own; then nothing is registered.
    """
    if hosts.is_on("VLLM_BATCH_INVARIANT"):
        log.info("vLLM left alone: it runs in its batch-invariant mode (VLLM_BATCH_INVARIANT)")
        return
    for name, collective in COLLECTIVES.items():
        foreign.register(foreign.Foreign(name, collective, process_group))
    for name, has_residual in NORMS.items():
        foreign.register(foreign.ForeignNorm(name, has_residual))
    importlib.import_module("vllm.envs").environment_variables[KEY] = backends.installed_key
    # Inductor would give each rank and each model its own folder of Triton's kernels. Those of
    # operators are the same for all, and ranks share the work of compiling them.
    from triton import knobs

    os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)
    # At its start the engine waits for calls of dozens of sizes. Measured, each kind of them takes
    # a tenth of a second, and kernels are compiled that then do not run.
    compile.install(autotune=False)


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
