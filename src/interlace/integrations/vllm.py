"""Interlace in vLLM: the pass for ``torch.compile`` in every worker, and vLLM's groups by name."""

from __future__ import annotations

import contextlib
import functools
import operator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_parameter_registration_hook

from interlace import compile
from interlace.clients import CLIENTS, is_on
from interlace.compile import backends, foreign
from interlace.compile.findings import LeftAlone
from interlace.compile.foreign import ScaledOperands
from interlace.compile.graph import Writer, aten, value
from interlace.compile.summary import summary
from interlace.counting import log
from interlace.gemm.operands import FLOAT8
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


_FLASHINFER_ROWS = 32
"""Below this many rows vLLM lets FlashInfer multiply, whose scales are no powers of two."""


@torch.library.custom_op("interlace::vllm_quantise", mutates_args=())
def _quantise(
    x: torch.Tensor, group_size: int, use_ue8m0: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x [M, K]`` in float8 and its scales ``[M, K / group_size]``, contiguous along M, by
    vLLM's own function.

    Args:
        group_size: Elements of a row that share a scale.
        use_ue8m0: Whether scales are powers of two, with 32 rows and more.
    """
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    is_power = use_ue8m0 and len(x) >= _FLASHINFER_ROWS
    quantised, scale = per_token_group_quant_fp8(
        x, group_size, column_major_scales=True, use_ue8m0=is_power
    )
    return quantised, scale


@_quantise.register_fake
def _(x: torch.Tensor, group_size: int, use_ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = x.shape
    scale = x.new_empty([columns // group_size, rows], dtype=torch.float32).T
    return torch.empty_like(x, dtype=FLOAT8), scale


def _of_deep_gemm(_: Writer, arguments: dict[str, Any]) -> ScaledOperands:
    """Return the operands of ``vllm::fp8_gemm_nt_op``."""
    names = ("q_input", "weight", "input_scale", "weight_scale")
    x, w, x_scale, w_scale = (arguments[name] for name in names)
    return x, w, x_scale, w_scale, None


def _of_triton(_: Writer, arguments: dict[str, Any]) -> ScaledOperands:
    """Return the operands of ``vllm::w8a8_triton_block_scaled_mm_func``."""
    x, w, x_scale, w_scale = list(arguments.values())[:4]
    return x, w, x_scale, w_scale, None


def _of_cutlass(writer: Writer, arguments: dict[str, Any]) -> ScaledOperands:
    """Return the operands of ``_C::cutlass_scaled_mm``, whose weight is ``[K, N]``, as are the
    scales of its blocks.
    """
    x, w, x_scale, w_scale = (arguments[name] for name in ("a", "b", "a_scales", "b_scales"))
    if value(x_scale).shape[1:].numel() > 1:
        w_scale = writer.call(aten.permute.default, w_scale, [1, 0])
    else:
        w_scale = writer.reshape(w_scale, [-1])
    return x, writer.call(aten.permute.default, w, [1, 0]), x_scale, w_scale, arguments["bias"]


def _of_flashinfer(writer: Writer, arguments: dict[str, Any]) -> ScaledOperands:
    """Return the operands of ``vllm::dynamic_flashinfer_deepgemm_blockscale_gemm``, which quantises
    x itself.
    """
    pair = writer.call(
        torch.ops.interlace.vllm_quantise.default,
        arguments["input"], arguments["group_size"], arguments["use_deep_gemm_e8m0"],
    )  # fmt: skip
    x, x_scale = (writer.call(operator.getitem, pair, index) for index in (0, 1))
    return x, arguments["weight"], x_scale, arguments["weight_scale"], None


PRODUCTS = {
    "vllm::fp8_gemm_nt_op": _of_deep_gemm,
    "vllm::w8a8_triton_block_scaled_mm_func": _of_triton,
    "_C::cutlass_scaled_mm": _of_cutlass,
    "vllm::dynamic_flashinfer_deepgemm_blockscale_gemm": _of_flashinfer,
}
"""vLLM's products of float8, and what returns their operands."""


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
        foreign.register(foreign.Foreign(name, collective, process_group, _require_no_bias))
    for name, has_residual in NORMS.items():
        foreign.register(foreign.ForeignNorm(name, has_residual))
    for name, operands in PRODUCTS.items():
        foreign.register(foreign.ForeignProduct(name, operands))
    _watch_parameters()
    summary.name_program("vllm", "vLLM")
    _keep_graphs_apart()
    # At its start the engine waits for calls of dozens of sizes. Measured, each kind of them takes
    # a tenth of a second, and kernels are compiled that then do not run.
    compile.install(autotune=False)


_biased_columns: set[int] = set()
"""Columns of the row-parallel layers of this process that add a bias before their sum."""


@functools.cache
def _watch_parameters() -> None:
    """Let torch call :func:`_note_parameter` for every parameter that a module of this process
    gets.
    """
    register_module_parameter_registration_hook(_note_parameter)


def _note_parameter(
    layer: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None
) -> None:
    """Note a row-parallel layer that adds a bias, when it gets this parameter, and make operators
    take the parameter at the cost of another tensor.
    """
    if parameter is None:
        return
    _ask_no_more(type(parameter))
    is_row_parallel = "RowParallelLinear" in (base.__name__ for base in type(layer).__mro__)
    adds_bias = not getattr(layer, "skip_bias_add", True)
    if name == "bias" and is_row_parallel and adds_bias:
        _biased_columns.add(len(parameter))


@functools.cache
def _ask_no_more(kind: type) -> None:
    """Let operators take parameters of a class as they take those of PyTorch's, if its method for
    calls of them does nothing but call that of its base.

    That is so for vLLM's parameters. PyTorch asks their method in each call of an operator, which
    takes the host 10 us, as long as the operator's dispatch; that ``torch.nn.Parameter`` changes no
    call, it knows without asking.
    """
    if not issubclass(kind, torch.nn.Parameter):  # a tensor that says that it is a parameter
        return
    for base in kind.__mro__[: kind.__mro__.index(torch.nn.Parameter)]:
        code = getattr(getattr(vars(base).get(_ASKED), "__func__", None), "__code__", None)
        if code is not None and code.co_names == ("super", _ASKED):
            setattr(base, _ASKED, torch._C._disabled_torch_function_impl)


_ASKED = "__torch_function__"


def _require_no_bias(operand: torch.Tensor) -> None:
    """Raise :class:`LeftAlone` if the first rank may have added a bias to a collective's operand.

    vLLM adds a layer's bias on the first rank only, and only that rank's graph shows it: ranks that
    decided by their graphs would decide differently, and wait for one another.
    """
    if operand.shape[-1] in _biased_columns:
        raise LeftAlone("a row-parallel layer adds a bias, on the first rank only")


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
