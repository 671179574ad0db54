"""The hook around SGLang's row-parallel linear, against the contract of that layer and of SGLang's
hooks, which here are modules of the same names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from interlace.compile.findings import LeftAlone
from interlace.gemm.operands import FLOAT8
from interlace.integrations import sglang
from interlace.registry import operator_matching
from interlace.tuning.choice import Choice
from tests.integrations import float8_kernels

K, N = 16, 12


class UnquantizedLinearMethod:
    """SGLang's method of a layer whose weight is a plain ``[N, K]``."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, layer.weight, bias)


class Fp8LinearMethod(UnquantizedLinearMethod):
    """SGLang's method of a layer whose weight is float8, with a scale for each block."""

    weight_block_size = (128, 128)

    def __init__(self, block_quant: bool = True, scale_fmt: str | None = None) -> None:
        self.block_quant, self.quant_config = block_quant, SimpleNamespace(scale_fmt=scale_fmt)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows, scale = float8_kernels.quantised(x, 128, False)
        y = float8_kernels.multiplied(rows, layer.weight, scale, layer.weight_scale_inv)
        return y if bias is None else y + bias


class RowParallelLinear:
    """The attributes and the method that the hook relies on."""

    def __init__(self, group: Any, bias: bool = False, **changes: Any) -> None:
        self.tp_group = group
        self.weight = torch.randn(N, K)
        # The bias is the same on every rank.
        self.bias = torch.arange(float(N)) if bias else None
        self.quant_method = UnquantizedLinearMethod()
        self.skip_bias_add = self.use_dp_attention_reduce = self.use_decode_attn_tp = False
        self.reduce_results = self.input_is_parallel = True
        self.__dict__.update(changes)

    def forward(
        self,
        input_: torch.Tensor,
        skip_all_reduce: bool = False,
        forward_batch: Any = None,
        output_tensor: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        bias = None if dist.get_rank() or self.skip_bias_add else self.bias
        y = self.quant_method.apply(self, input_, bias)
        if output_tensor is not None:
            y = output_tensor.copy_(y)
        if self.reduce_results and not skip_all_reduce:
            dist.all_reduce(y)
        return y, self.bias if self.skip_bias_add else None


class HookType(Enum):
    AROUND = "around"


@contextmanager
def _sglang(server_arguments: Any = None) -> Iterator[type]:
    """What the hook needs of SGLang; gives the class of layers with the hook around its method."""
    hooks: dict[str, Callable[..., Any]] = {}

    class HookRegistry:
        @staticmethod
        def register(target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
            assert hook_type is HookType.AROUND
            hooks[target] = hook

    group = SimpleNamespace(world_size=dist.get_world_size(), device_group=dist.group.WORLD)
    forward = SimpleNamespace(sp_active=False)
    registry: Any = ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookRegistry, registry.HookType = HookRegistry, HookType
    linear: Any = ModuleType("sglang.srt.layers.linear")
    linear.get_forward = lambda: forward
    linear.should_skip_mlp_all_reduce = lambda: False
    linear.get_parallel = lambda: SimpleNamespace(tp_group=group)
    linear.get_exec = lambda: SimpleNamespace(
        comm=SimpleNamespace(enable_quant_communications=True)
    )
    layers: Any = ModuleType("sglang.srt.layers")
    layers.linear = linear
    modules: dict[str, Any] = {
        name: ModuleType(name) for name in ("sglang", "sglang.srt", "sglang.srt.plugins")
    }
    arguments: Any = ModuleType("sglang.srt.server_args")
    arguments.get_global_server_args = lambda: server_arguments
    quantisation: Any = ModuleType("sglang.kernels.ops.quantization.fp8_kernel")
    quantisation.sglang_per_token_group_quant_fp8 = lambda x, size, *, column_major_scales: (
        float8_kernels.quantised(x, size, False)
    )
    modules |= {each.__name__: each for each in (registry, linear, layers, arguments, quantisation)}
    sys.modules.update(modules)
    sglang.calls.clear()
    try:
        sglang.register()
        hook = hooks["sglang.srt.layers.linear.RowParallelLinear.forward"]

        class Hooked(RowParallelLinear):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return hook(RowParallelLinear.forward, self, *args, **kwargs)

        Hooked.group = group  # type: ignore[attr-defined]
        yield Hooked
    finally:
        for name in modules:
            del sys.modules[name]


PREFILL = SimpleNamespace(forward_mode=SimpleNamespace(is_decode_or_idle=lambda: False))
DECODE = SimpleNamespace(forward_mode=SimpleNamespace(is_decode_or_idle=lambda: True))

# name: shape of x, changes of the layer, arguments of the call, part of the reason if it is left
DETERMINISTIC = SimpleNamespace(enable_deterministic_inference=True)

CALLS: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any], str | None]] = {
    "decode": ((6, K), {}, {"forward_batch": DECODE}, None),
    "prefill": ((130, K), {}, {}, None),
    "three dimensions": ((2, 3, K), {}, {}, None),
    "a bias": ((130, K), {"bias": True}, {}, None),
    "a bias of few tokens": ((5, K), {"bias": True}, {}, None),
    "a bias for the caller": ((6, K), {"bias": True, "skip_bias_add": True}, {}, None),
    "no sum": ((6, K), {"reduce_results": False}, {}, "does not reduce"),
    "skipped": ((6, K), {}, {"skip_all_reduce": True}, "does not want the sum"),
    "memory": ((6, K), {}, {"output_tensor": torch.empty(6, N)}, "brings memory"),
    "quantised sum": ((6, K), {}, {"forward_batch": PREFILL}, "quantised format"),
    "blocks that are none": (
        (6, 256), {"quant_method": Fp8LinearMethod(False)}, {}, "weight is quantised",
    ),
    "blocks": ((6, 256), {"quant_method": Fp8LinearMethod()}, {}, None),
    "blocks of powers of two": (
        (6, 256), {"quant_method": Fp8LinearMethod(scale_fmt="ue8m0")}, {}, "weight is quantised",
    ),
    "another group": ((6, K), {"use_dp_attention_reduce": True}, {}, "another group"),
    "before 0.5.18": ((6, K), {"tp_size": 2}, {}, None),
    "before 0.5.18, alone": ((6, K), {"tp_size": 1}, {}, "does not reduce"),
    "before 0.5.18, fewer ranks": ((6, K), {"tp_size": 4}, {}, "another group"),
}  # fmt: skip


def _call(name: str) -> tuple[int, list[str], float, bool]:
    shape, changes, options, _ = CALLS[name]
    torch.manual_seed(3 + dist.get_rank())
    with _sglang() as hooked:
        layer = hooked(hooked.group, **changes)  # type: ignore[attr-defined]
        if name.startswith("before"):
            # Layers had the number of ranks instead of their group, and no sequence parallelism.
            del layer.tp_group, sys.modules["sglang.srt.layers.linear"].get_forward  # type: ignore[attr-defined]
        x = torch.randn(shape)
        if name.startswith("blocks"):
            x, layer.weight = x.bfloat16(), torch.randn(N, shape[1]).to(FLOAT8)
            layer.weight_scale_inv = torch.rand(1, 2) + 0.5
        expected, its_bias = RowParallelLinear.forward(layer, x, **options)
        expected = expected.clone()
        found, bias = layer.forward(x, **options)
    assert found.shape == expected.shape
    left = [reason for _, reason in sglang.calls.left]
    error = float((found - expected).norm() / expected.norm())
    return sglang.calls.taken.total(), left, error, bias is its_bias


@pytest.mark.parametrize("name", CALLS)
def test_row_parallel_linear(ranks: Any, name: str) -> None:
    *_, reason = CALLS[name]
    for taken, left, error, same_bias in ranks(2).run(_call, name):
        assert taken == (reason is None)
        assert [reason in each for each in left] == ([] if reason is None else [True])
        # Parts and sums of float8 are rounded to bfloat16, by truncation in the interpreter.
        assert error < (2**-6 if name.startswith("blocks") else 1e-5)
        assert same_bias


def _deterministic(by_variable: bool) -> list[str]:
    """The reasons for which calls are left alone where SGLang's inference is to be deterministic,
    and where its arguments are not set yet.
    """
    variable = "SGLANG_ENABLE_DETERMINISTIC_INFERENCE"
    x, reasons = torch.randn(6, K), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(variable, "True" if by_variable else "0")
        with _sglang(None if by_variable else DETERMINISTIC) as hooked:
            layer = hooked(hooked.group)  # type: ignore[attr-defined]
            layer.forward(x)
            reasons += [reason for _, reason in sglang.calls.left]
            sglang.calls.clear()
            layer.weight.requires_grad_()
            patch.setattr(sglang, "_is_deterministic", lambda: False)
            layer.forward(x)
            reasons += [reason for _, reason in sglang.calls.left]
    return reasons


@pytest.mark.parametrize("by_variable", [True, False])
def test_what_sglang_promises(ranks: Any, by_variable: bool) -> None:
    for reasons in ranks(2).run(_deterministic, by_variable):
        assert reasons == [
            "SGLang's inference is to be deterministic",
            "an operand requires a gradient",
        ]


@pytest.mark.parametrize("module", sglang._CAPTURES)
def test_short_calls_of_an_eager_engine_are_left_alone(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that does not say whether it captures gets what it would in a graph."""
    operator = operator_matching("gemm", "all_reduce")
    short = {"pushed": 43.0, "unfused": 90.0, "symm_mem": 88.0}
    long = {"fused": 500.0, "unfused": 601.0}

    def refusal(times_us: dict[str, float], faster: tuple[str, ...]) -> str | None:
        choice = Choice(next(iter(times_us)), None, "", times_us=times_us, faster=faster)
        try:
            sglang._require_gain(operator, choice)  # type: ignore[arg-type]
        except LeftAlone as reason:
            return str(reason)
        return None

    assert refusal(short, ()) == "the operator is not known to be faster at these sizes"
    assert refusal(short, ("pushed",)) is None
    runner: Any = ModuleType(module)
    monkeypatch.setitem(sys.modules, module, runner)
    runner.get_is_capture_mode = lambda: True
    assert refusal(short, ("pushed",)) is None
    runner.get_is_capture_mode = lambda: False
    assert "host takes longer" in str(refusal(short, ("pushed",)))
    assert refusal(long, ("fused",)) is None
