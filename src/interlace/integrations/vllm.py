"""Interlace in vLLM: the pass for ``torch.compile`` in every worker, and vLLM's groups by name."""

from __future__ import annotations

import contextlib

import torch.distributed as dist

from interlace import compile
from interlace.clients import CLIENTS, is_on
from interlace.compile import backends, foreign
from interlace.compile.summary import summary
from interlace.counting import log
from interlace.integrations import hosts

_VLLM = CLIENTS["vllm"]

COLLECTIVES = {
    "vllm::all_reduce": "all_reduce",
    "vllm::reduce_scatter": "reduce_scatter",
    "vllm::all_gather": "all_gather",
}
"""vLLM's operators: ``(tensor, group_name)``, and ``(tensor, dim, world_size, group_name)``."""

NORMS = {"vllm_ir::rms_norm": False, "vllm_ir::fused_add_rms_norm": True}
"""vLLM's norms, which its own passes lower later, and whether they add a residual first."""


def plugin() -> None:
    """Call :func:`register` if the user has chosen Interlace.

    vLLM calls this in each of its processes, by the entry point ``vllm.general_plugins``, because
    Interlace is installed. The choice is ``INTERLACE_VLLM=1``, or ``interlace`` among the names in
    vLLM's variable ``VLLM_PLUGINS``.
    """
    hosts.log_through("vllm")
    if hosts.is_chosen(_VLLM):
        hosts.limit_memory(_VLLM)
        register()


def register() -> None:
    """Let Inductor run Interlace's pass in this process, which also knows vLLM's operators.

    The pass runs ahead of vLLM's own passes, which get the collectives and norms that were left
    alone. Under ``VLLM_BATCH_INVARIANT=1`` vLLM promises that a row's result does not depend on its
    batch, by kernels of its own; then nothing is registered.
    """
    if is_on(_VLLM.promise):
        log.info("vLLM left alone: it runs in its batch-invariant mode (%s)", _VLLM.promise)
        return
    for name, collective in COLLECTIVES.items():
        foreign.register(foreign.Foreign(name, collective, process_group))
    for name, has_residual in NORMS.items():
        foreign.register(foreign.ForeignNorm(name, has_residual))
    summary.name_program("vllm", "vLLM")
    _keep_graphs_apart()
    # At its start the engine waits for calls of dozens of sizes. Measured, each kind of them takes
    # a tenth of a second, and kernels are compiled that then do not run.
    compile.install(autotune=False)


def _keep_graphs_apart() -> None:
    """Let the key of vLLM's cache of compiled graphs tell graphs with Interlace from others.

    vLLM's key covers its own variables, the model and PyTorch, but no pass in Inductor's slot: a
    graph that it compiled without Interlace, or by another version, would be used again.
    """
    with contextlib.suppress(ImportError):
        from vllm import envs

        # What vLLM hashes: values of functions, by names of variables.
        variables = getattr(envs, "environment_variables", None)
        if isinstance(variables, dict):
            variables["interlace"] = backends.installed_key


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
