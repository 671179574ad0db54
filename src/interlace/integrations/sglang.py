"""Interlace in SGLang: a hook around its row-parallel linear layer."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace.clients import CLIENTS, is_on
from interlace.compile.choice import usable_ranks
from interlace.compile.findings import LeftAlone
from interlace.counting import calls_of
from interlace.gemm import invariance
from interlace.gemm.operands import FLOAT8, FLOATS, contiguous_dimension
from interlace.gemm.scaled import SCALE_BLOCK
from interlace.gemm.terms import default_output_dtype
from interlace.integrations import hosts
from interlace.registry import Operator, operator_matching
from interlace.tuning.choice import Choice

TARGET = "sglang.srt.layers.linear.RowParallelLinear.forward"

_OTHER_FORMATS = ("use_marlin", "use_mxfp8", "block_fp8_as_mxfp8")
"""Attributes of SGLang's method for float8 that say that it multiplies other formats."""

_BLOCKS = (FLOAT8, torch.float32)
"""The dtypes of a weight in blocks and of its scales."""

_CAPTURES = (
    "sglang.srt.model_executor.runner_utils.capture_mode",
    "sglang.srt.model_executor.cuda_graph_runner",
)
"""The modules in which SGLang's versions say whether they capture CUDA graphs."""

_HOST_US = 300.0
"""The least time of a product and an all-reduce for which an eager call is taken over. The host of
SGLang 0.5.17 takes 0.9 ms for each such layer and what is around it, so the GPU waits for short
ones: an eager prefill of 200 tokens, of 88 and 135 us, lost 12 % by longer calls (docs/sglang.md).
"""

calls = calls_of("sglang")
"""Counts of the layer's calls in this process."""


def plugin() -> None:
    """Call :func:`register` if the user has chosen Interlace.

    SGLang calls this in each of its processes, by the entry point ``sglang.srt.plugins``, because
    Interlace is installed. The choice is ``INTERLACE_SGLANG=1``, or ``interlace`` among the names
    in SGLang's variable ``SGLANG_PLUGINS``.
    """
    if hosts.is_chosen(CLIENTS["sglang"]):
        hosts.limit_memory(CLIENTS["sglang"])
        register()


def register() -> None:
    """Put Interlace around SGLang's row-parallel linear layer.

    A layer whose product and all-reduce are predicted to be faster by Interlace runs as one
    operator; any other runs as before. So does every layer under
    ``--enable-deterministic-inference``, by which SGLang promises that a row's result does not
    depend on its batch.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    import interlace.operators  # noqa: F401  # registers torch.ops.interlace

    HookRegistry.register(TARGET, forward, HookType.AROUND)


def forward(
    original: Callable[..., Any],
    layer: Any,
    input_: torch.Tensor,
    skip_all_reduce: bool = False,
    forward_batch: Any = None,
    output_tensor: torch.Tensor | None = None,
) -> Any:
    """Run ``RowParallelLinear.forward`` as one operator, or as ``original`` where it cannot be.

    Returns:
        The sum over ranks, ``[..., N]``, and the bias if the layer leaves adding it to its caller,
        as SGLang's method does.
    """
    # A graph that is traced keeps SGLang's operators, which its compiler knows.
    if torch.compiler.is_compiling():
        return original(layer, input_, skip_all_reduce, forward_batch, output_tensor)
    try:
        if _is_deterministic():
            raise LeftAlone("SGLang's inference is to be deterministic")
        if skip_all_reduce or output_tensor is not None:
            raise LeftAlone("the caller does not want the sum, or brings memory for it")
        y = _reduced_product(layer, input_, _require_all_reduce(layer, forward_batch))
    except LeftAlone as refusal:
        calls.leave("RowParallelLinear", str(refusal))
        return original(layer, input_, skip_all_reduce, forward_batch, output_tensor)
    calls.take("RowParallelLinear")
    return y, layer.bias if layer.skip_bias_add else None


def _is_deterministic() -> bool:
    """Return whether SGLang was asked for deterministic inference."""
    # SGLang sets the variable by its flag; a program that starts an engine of its own may have set
    # the argument alone.
    if is_on(CLIENTS["sglang"].promise):
        return True
    # The place of the arguments differs between its versions.
    for module, name in (
        ("sglang.srt.runtime_context", "get_server_args"),
        ("sglang.srt.server_args", "get_global_server_args"),
    ):
        with contextlib.suppress(ValueError):  # they are not set yet
            arguments = getattr(sys.modules.get(module), name, lambda: None)()
            if getattr(arguments, "enable_deterministic_inference", False):
                return True
    return False


def _require_all_reduce(layer: Any, forward_batch: Any) -> dist.ProcessGroup:
    """Return the process group in which ``layer`` reduces its product.

    Raises:
        LeftAlone: The layer does something else than a product and an all-reduce.
    """
    from sglang.srt.layers import linear

    group = _group_of(layer)
    if group is None or group.world_size == 1 or not layer.reduce_results:
        raise LeftAlone("the layer does not reduce its product")
    # SGLang has had sequence parallelism in this layer since 0.5.18.
    flags = getattr(linear, "get_forward", None)
    if (flags is not None and flags().sp_active) or linear.should_skip_mlp_all_reduce():
        raise LeftAlone("SGLang reduces the product in another way, or later")
    if layer.use_dp_attention_reduce or layer.use_decode_attn_tp:
        raise LeftAlone("the layer reduces over another group than its weight is cut by")
    if group is not linear.get_parallel().tp_group:
        raise LeftAlone("the layer's weight is cut by another group than the tensor-parallel one")
    if (
        forward_batch is not None
        and not forward_batch.forward_mode.is_decode_or_idle()
        and linear.get_exec().comm.enable_quant_communications
    ):
        raise LeftAlone("the sum travels in a quantised format")
    if not layer.input_is_parallel:
        raise LeftAlone("the layer cuts its input itself")
    process_group: dist.ProcessGroup = group.device_group
    return process_group


def _group_of(layer: Any) -> Any:
    """Return SGLang's group in which ``layer`` reduces its product, or None.

    Raises:
        LeftAlone: The layer's weight is cut by another number of ranks than the group has.
    """
    from sglang.srt.layers import linear

    if hasattr(layer, "tp_group"):
        return layer.tp_group
    # Before 0.5.18 a layer has no group: it reduces over the tensor-parallel one.
    group = linear.get_parallel().tp_group
    if layer.tp_size not in (1, group.world_size):
        raise LeftAlone("the layer's weight is cut by another group than the tensor-parallel one")
    return None if layer.tp_size == 1 else group


def _has_blocks(layer: Any) -> bool:
    """Return whether the weight of ``layer`` is float8 with a float32 scale for each block, and its
    input is to be quantised in the same way; False if neither is quantised.

    Raises:
        LeftAlone: They are quantised in another way.
    """
    method, scale = layer.quant_method, getattr(layer, "weight_scale_inv", None)
    if type(method).__name__ == "UnquantizedLinearMethod":
        return False
    # Scales of another format are powers of two.
    has_blocks = (
        type(method).__name__ == "Fp8LinearMethod"
        and method.block_quant
        and list(method.weight_block_size) == [SCALE_BLOCK, SCALE_BLOCK]
        and getattr(method.quant_config, "scale_fmt", None) is None
        and not any(getattr(method, name, False) for name in _OTHER_FORMATS)
    )
    if not has_blocks or scale is None or (layer.weight.dtype, scale.dtype) != _BLOCKS:
        raise LeftAlone("the layer's weight is quantised, and not in blocks with float32 scales")
    return True


def _require_gain(operator: Operator, choice: Choice[Any]) -> None:
    """Raise :class:`LeftAlone` if a call is not known to be faster, or SGLang would not be."""
    if choice.impl not in choice.faster:
        raise LeftAlone("the operator is not known to be faster at these sizes")
    if not _is_eager():
        return
    pairs_us = (us for name, us in choice.times_us.items() if operator.is_pair(name))
    if min(pairs_us, default=math.inf) < _HOST_US:
        raise LeftAlone("outside of CUDA graphs SGLang's host takes longer than so small a product")


def _is_eager() -> bool:
    """Return whether SGLang calls a layer to run it at once, rather than to capture a CUDA graph or
    to warm up for that; False where it does not say so.
    """
    for module in _CAPTURES:
        is_capturing = getattr(sys.modules.get(module), "get_is_capture_mode", None)
        if is_capturing is not None:
            return not is_capturing()
    return False


def _reduced_product(layer: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Multiply ``x [..., K]`` by the layer's weight and add up the products of all ranks.

    Raises:
        LeftAlone: No operator computes this, or none is known to be faster.
    """
    has_blocks = _has_blocks(layer)
    if not isinstance(x, torch.Tensor):
        raise LeftAlone("the layer's input is quantised already")
    weight, bias = layer.weight, None if layer.skip_bias_add else layer.bias
    tensors = [tensor for tensor in (x, weight, bias) if tensor is not None]
    of_one_dtype = [tensor for tensor in tensors if not (has_blocks and tensor is weight)]
    if any(tensor.dtype != x.dtype for tensor in of_one_dtype) or x.dtype not in FLOATS:
        raise LeftAlone("operators take operands of one floating dtype")
    if has_blocks and x.dtype != default_output_dtype(FLOAT8):
        raise LeftAlone(f"products of float8 are {default_output_dtype(FLOAT8)}")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise LeftAlone("an operand requires a gradient")
    if weight.dim() != 2 or contiguous_dimension(weight) is None or not x.numel():
        raise LeftAlone("the operands are not matrices")
    ranks = usable_ranks(group.group_name, x.device)
    rows = x.reshape(-1, x.shape[-1])
    columns, inner = weight.shape
    operator = operator_matching("gemm", "all_reduce")
    choice = operator.choose(
        rows=len(rows), columns=columns, inner=inner, dtype=weight.dtype, world_size=ranks,
        device=x.device, **({"has_block_scales": True} if has_blocks else {}),
    )  # fmt: skip
    # In Interlace's own mode, a choice by time would depend on the number of rows.
    if x.device.type == "cuda" and not invariance.is_enabled():
        _require_gain(operator, choice)
    x_scale, w_scale = None, None
    if has_blocks:
        from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8

        rows, x_scale = sglang_per_token_group_quant_fp8(
            rows.contiguous(), SCALE_BLOCK, column_major_scales=True
        )
        w_scale = layer.weight_scale_inv
    # No operand requires a gradient, so the function finds a call that comes again first of all.
    y = interlace.gemm_all_reduce(
        rows, weight, bias, x_scale=x_scale, w_scale=w_scale, out_dtype=x.dtype, group=group
    )
    return y.view(*x.shape[:-1], columns)
