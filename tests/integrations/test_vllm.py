"""Graphs with vLLM's collectives, which here are operators of the same schema: what is fused, that
results stay, and that collectives that are left alone remain vLLM's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from interlace.compile import eager_backend, foreign, recording, uninstall
from interlace.gemm.operands import FLOAT8
from interlace.integrations import vllm
from tests.integrations import float8_kernels

M, K, N = 128, 8, 12  # as many tokens as gemm_all_reduce is for


def _all_reduce(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    result = tensor.clone()
    dist.all_reduce(result)
    return result


def _reduce_scatter(
    tensor: torch.Tensor, dim: int, world_size: int, group_name: str
) -> torch.Tensor:
    result = _all_reduce(tensor, group_name)
    return result.chunk(world_size, dim)[dist.get_rank()].clone()


def _all_gather(tensor: torch.Tensor, dim: int, world_size: int, group_name: str) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts, dim)


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    wide = x.to(torch.float32)
    part = wide if variance_size is None else wide[..., :variance_size]
    normed = wide * torch.rsqrt(part.pow(2).mean(-1, keepdim=True) + epsilon)
    if weight is not None:
        normed = normed.to(weight.dtype) * weight
    return normed.to(x.dtype)


def _fused_add_rms_norm(
    x: torch.Tensor, x_residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    total = x.to(torch.float32) + x_residual.to(torch.float32)
    return _rms_norm(total, weight, epsilon, variance_size).to(x.dtype), total.to(x.dtype)


def _resized(tensor: torch.Tensor, dim: int, size: Any) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim] = size
    return tensor.new_empty(shape)


def _envs() -> ModuleType:
    envs: Any = ModuleType("vllm.envs")
    envs.environment_variables = {}
    module: ModuleType = envs
    return module


@contextmanager
def _vllm() -> Iterator[None]:
    """What the pass needs of vLLM: its operators, and its groups by name."""
    library = torch.library.Library("vllm", "FRAGMENT")
    library.define("all_reduce(Tensor tensor, str group_name) -> Tensor")
    library.impl("all_reduce", _all_reduce, "CPU")
    torch.library.register_fake(
        "vllm::all_reduce", lambda tensor, group_name: torch.empty_like(tensor), lib=library
    )
    for name, run, resize in (
        ("reduce_scatter", _reduce_scatter, lambda size, ranks: size // ranks),
        ("all_gather", _all_gather, lambda size, ranks: size * ranks),
    ):
        library.define(f"{name}(Tensor tensor, int dim, int world_size, str group_name) -> Tensor")
        library.impl(name, run, "CPU")

        def fake(
            tensor: torch.Tensor,
            dim: int,
            world_size: int,
            group_name: str,
            resize: Callable[[Any, int], Any] = resize,
        ) -> torch.Tensor:
            return _resized(tensor, dim, resize(tensor.shape[dim], world_size))

        torch.library.register_fake(f"vllm::{name}", fake, lib=library)
    norms = torch.library.Library("vllm_ir", "FRAGMENT")
    settings = "Tensor? weight, float epsilon, SymInt? variance_size=None"
    norms.define(f"rms_norm(Tensor x, {settings}) -> Tensor")
    norms.define(f"fused_add_rms_norm(Tensor x, Tensor x_residual, {settings}) -> (Tensor, Tensor)")
    for name, norm in (("rms_norm", _rms_norm), ("fused_add_rms_norm", _fused_add_rms_norm)):
        norms.impl(name, norm, "CompositeExplicitAutograd")
        torch.library.register_fake(f"vllm_ir::{name}", norm, lib=norms)
    coordinator = SimpleNamespace(device_group=dist.group.WORLD)
    state: Any = ModuleType("vllm.distributed.parallel_state")
    state._groups = {"tp:0": lambda: coordinator, "gone:0": lambda: None}
    modules: dict[str, Any] = {
        "vllm": ModuleType("vllm"),
        "vllm.envs": _envs(),
        "vllm.distributed": ModuleType("vllm.distributed"),
        "vllm.distributed.parallel_state": state,
    }
    modules["vllm.distributed"].parallel_state = state
    sys.modules.update(modules)
    vllm.register()
    try:
        yield
    finally:
        uninstall()
        for name in (*vllm.COLLECTIVES, *vllm.NORMS, *vllm.PRODUCTS):
            foreign.unregister(name)
        for name in modules:
            del sys.modules[name]
        library._destroy()
        norms._destroy()


def _ops() -> Any:
    return torch.ops.vllm


def _sum_and_norm(
    x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """The norm with a residual as vLLM's own operator."""
    y = _ops().all_reduce(x @ w.t(), "tp:0")
    return torch.cat(torch.ops.vllm_ir.fused_add_rms_norm(y, r, v, 1e-6))


# name: the program, shapes of its arguments, the operators wanted, the collectives left
PROGRAMS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], list[str | None], int]] = {
    "many tokens": (
        lambda x, w: _ops().all_reduce(x @ w.t(), "tp:0").relu(),
        [(M, K), (N, K)],
        ["gemm_all_reduce"],
        0,
    ),
    "few tokens": (
        lambda x, w: _ops().all_reduce(x @ w.t(), group_name="tp:0"),
        [(6, K), (N, K)],
        ["gemm_all_reduce"],
        0,
    ),
    "residual and norm": (
        lambda x, w, r, v: torch.cat(
            _fused_add_rms_norm(_ops().all_reduce(x @ w.t(), "tp:0"), r, v, 1e-6)
        ),
        [(6, K), (N, K), (6, N), (N,)],
        ["gemm_all_reduce_norm"],
        0,
    ),
    "vLLM's norm": (
        lambda x, w, v: torch.ops.vllm_ir.rms_norm(_ops().all_reduce(x @ w.t(), "tp:0"), v, 1e-6),
        [(6, K), (N, K), (N,)],
        ["gemm_all_reduce_norm"],
        0,
    ),
    "vLLM's norm with a residual": (
        _sum_and_norm,
        [(6, K), (N, K), (6, N), (N,)],
        ["gemm_all_reduce_norm"],
        0,
    ),
    "vLLM's norm, whose total nobody takes": (
        lambda x, w, r: torch.ops.vllm_ir.fused_add_rms_norm(
            _ops().all_reduce(x @ w.t(), "tp:0"), r, None, 1e-6
        )[0],
        [(6, K), (N, K), (6, N)],
        ["gemm_all_reduce_norm"],
        0,
    ),
    "vLLM's norm of many tokens": (
        _sum_and_norm,
        [(300, K), (N, K), (300, N), (N,)],
        ["gemm_all_reduce"],
        1,
    ),
    "vLLM's norm of a part of the columns": (
        lambda x, w, v: torch.ops.vllm_ir.rms_norm(
            _ops().all_reduce(x @ w.t(), "tp:0"), v, 1e-6, N // 2
        ),
        [(6, K), (N, K), (N,)],
        ["gemm_all_reduce"],
        1,
    ),
    "vLLM's norm of a sum that is not a product's": (
        lambda x, r, v: torch.cat(
            torch.ops.vllm_ir.fused_add_rms_norm(_ops().all_reduce(x, "tp:0"), r, v, 1e-6)
        ),
        [(6, N), (6, N), (N,)],
        [None],
        2,
    ),
    "reduce-scatter": (
        lambda x, w: _ops().reduce_scatter(x @ w.t(), 0, 2, "tp:0"),
        [(M, K), (N, K)],
        ["gemm_reduce_scatter"],
        0,
    ),
    "all-gather": (
        lambda x, w: _ops().all_gather(x, 0, world_size=2, group_name="tp:0") @ w.t(),
        [(M, K), (N, K)],
        ["all_gather_gemm"],
        0,
    ),
    "two layers": (
        lambda x, w, v: _ops().all_reduce(
            _ops().all_reduce(x @ w.t(), "tp:0").relu() @ v.t(), "tp:0"
        ),
        [(M, K), (N, K), (K, N)],
        ["gemm_all_reduce", "gemm_all_reduce"],
        0,
    ),
    "the product has another use": (
        lambda x, w: (lambda y: _ops().all_reduce(y, "tp:0") + y)(x @ w.t()),
        [(M, K), (N, K)],
        [None],
        1,
    ),
    "the logits' gather": (
        lambda x, w: _ops().all_gather(x @ w.t(), -1, 2, "tp:0"),
        [(M, K), (N, K)],
        [None],
        1,
    ),
    "a group that is gone": (
        lambda x, w: _ops().all_reduce(x @ w.t(), "gone:0"),
        [(M, K), (N, K)],
        [None],
        1,
    ),
}


def _run(
    name: str, dtypes: tuple[torch.dtype, ...] = (torch.float32,)
) -> tuple[list[str | None], int, float]:
    """What was fused, vLLM's operators that remain, and the result's error.

    The last dtype is that of all arguments from its place on.
    """
    program, shapes, *_ = PROGRAMS[name]
    torch.manual_seed(17 + dist.get_rank())
    dtypes = (*dtypes, *[dtypes[-1]] * len(shapes))[: len(shapes)]
    arguments = [torch.randn(shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    remaining = 0

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch._aot_autograd.utils import make_boxed_func

        from interlace.compile import fuse

        def compile_graph(graph: torch.fx.GraphModule, _: Any) -> Any:
            nonlocal remaining
            fuse(graph.graph)
            graph.recompile()
            targets = [str(node.target) for node in graph.graph.nodes]
            remaining = sum(target.startswith(("vllm.", "vllm_ir.")) for target in targets)
            assert not any(target.startswith("_c10d_functional") for target in targets)
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=compile_graph)(module, inputs)

    with _vllm(), torch.no_grad(), recording() as findings:
        expected = program(*arguments)
        torch.compiler.reset()
        found = torch.compile(program, backend=backend, fullgraph=True)(*arguments)
    assert found.stride() == expected.stride()
    error = float((found - expected).norm() / expected.norm())
    return [finding.operator for finding in findings], remaining, error


@pytest.mark.parametrize("name", PROGRAMS)
def test_collectives_of_vllm(ranks: Any, name: str) -> None:
    *_, operators, left = PROGRAMS[name]
    for found, remaining, error in ranks(2).run(_run, name):
        assert (found, remaining) == (operators, left)
        assert error < 1e-5


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32])
def test_norms_of_vllm_in_bfloat16(ranks: Any, weight: torch.dtype) -> None:
    """The weight may be float32, as Gemma's is; the total is rounded once, as vLLM does."""
    name, others = "vLLM's norm with a residual", (torch.bfloat16,) * 3
    for found, remaining, error in ranks(2).run(_run, name, (*others, weight)):
        assert (found, remaining) == (["gemm_all_reduce_norm"], 0)
        assert error < 1e-2


def _dynamic(name: str, counts: tuple[int, ...]) -> tuple[list[str | None], list[float]]:
    """vLLM compiles one graph for any number of tokens; with the first of ``counts``."""
    program, shapes, *_ = PROGRAMS[name]
    torch.manual_seed(17 + dist.get_rank())
    arguments = [torch.randn(shape) for shape in shapes]
    of_tokens = [i for i, shape in enumerate(shapes) if shape[0] == shapes[0][0]]
    errors = []
    with _vllm(), torch.no_grad(), recording() as findings:
        torch.compiler.reset()
        compiled = torch.compile(program, backend=eager_backend, fullgraph=True)
        for tokens in counts:
            for i in of_tokens:
                arguments[i] = torch.randn(tokens, *shapes[i][1:])
                torch._dynamo.mark_dynamic(arguments[i], 0)
            expected = program(*arguments)
            errors.append(float((compiled(*arguments) - expected).norm() / expected.norm()))
    return [finding.operator for finding in findings], errors


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("two layers", ["gemm_all_reduce", "gemm_all_reduce"]),
        ("reduce-scatter", [None]),
        ("all-gather", [None]),
    ],
)
def test_tokens_whose_number_changes(ranks: Any, name: str, wanted: list[str | None]) -> None:
    """Only an all-reduce is fused; the graph is not compiled anew."""
    for operators, errors in ranks(2).run(_dynamic, name, (130, 6)):
        assert operators == wanted
        assert max(errors) < 1e-5


@pytest.mark.parametrize("counts", [(7, 300), (320, 6)])
def test_a_norm_of_tokens_whose_number_changes(ranks: Any, counts: tuple[int, ...]) -> None:
    """The graph decodes, too, whatever it was traced with, and is not compiled anew."""
    name = "vLLM's norm with a residual"
    for operators, errors in ranks(2).run(_dynamic, name, counts):
        assert operators == ["gemm_all_reduce_norm"]
        assert max(errors) < 1e-5


class RowParallelLinear(torch.nn.Linear):
    """What the plug-in looks at of vLLM's layer, which adds its bias on the first rank only."""

    skip_bias_add = False


def _run_biased(columns: int) -> tuple[list[str | None], int, float]:
    with _vllm():
        RowParallelLinear(K, columns)
    try:
        return _run("few tokens")
    finally:
        vllm._biased_columns.clear()


@pytest.mark.parametrize(("columns", "operators"), [(N, [None]), (N + 1, ["gemm_all_reduce"])])
def test_a_bias_that_other_ranks_do_not_see(
    ranks: Any, columns: int, operators: list[str | None]
) -> None:
    """Sums with as many columns are left alone on all ranks, as one rank's graph has the bias."""
    for found, _, error in ranks(2).run(_run_biased, columns):
        assert found == operators
        assert error < 1e-5


class _PassingOn(torch.nn.Parameter):
    """As vLLM's parameters, whose method does nothing by itself."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs is None:
            kwargs = {}
        return super().__torch_function__(func, types, args, kwargs)


class _Counting(_PassingOn):
    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls += 1
        return super().__torch_function__(func, types, args, kwargs)


def test_parameters_that_change_no_call_are_not_asked() -> None:
    layer = torch.nn.Module()
    parameters = [kind(torch.ones(2)) for kind in (_PassingOn, _Counting, torch.nn.Parameter)]
    for parameter in parameters:
        vllm._note_parameter(layer, "weight", parameter)
    vllm._note_parameter(layer, "bias", None)
    asked = [type(each).__torch_function__ for each in parameters]
    disabled = torch._C._disabled_torch_function_impl
    assert [each is disabled for each in asked] == [True, False, True]
    _Counting.calls = 0
    assert parameters[1].sum() == parameters[0].sum() == 2
    assert _Counting.calls > 0


def _quantised(x: torch.Tensor, use_ue8m0: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """As vLLM's function, which has scales along rows for DeepGEMM and CUTLASS."""
    y, scale = torch.empty_like(x, dtype=FLOAT8), x.new_empty(2, len(x), dtype=torch.float32).T
    torch.ops._C.per_token_group_fp8_quant(
        x, y, scale, 128, 1e-10, -448.0, 448.0, use_ue8m0, True, False
    )
    return y, scale


def _deep_gemm(x: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    y = x.new_empty(len(x), len(w))
    _ops().fp8_gemm_nt_op(*_quantised(x, True), w, w_scale, y, True)
    return y


def _cutlass(x: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    y = x.new_empty(len(x), len(w))
    rows, scale = _quantised(x)
    torch.ops._C.cutlass_scaled_mm(y, rows, w.t(), scale, w_scale.t(), None)
    return y


def _cutlass_by_rows(x: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    """A scale for each row of x, and one for w, as ``quantization="fp8"`` has them."""
    y = x.new_empty(len(x), len(w))
    scale = x.abs().amax(-1, keepdim=True).float() / 448
    rows = (x / scale).to(FLOAT8)
    torch.ops._C.cutlass_scaled_mm(y, rows, w.t(), scale, w_scale[:1, :1].reshape(()), None)
    return y


def _triton(
    x: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    rows, scale = _quantised(x)
    y: torch.Tensor = _ops().w8a8_triton_block_scaled_mm_func(
        rows, w, scale, w_scale, [128, 128], dtype
    )
    return y


def _flashinfer(x: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = _ops().dynamic_flashinfer_deepgemm_blockscale_gemm(x, w, w_scale, 128, True)
    return y


# name: the program, tokens, the operator wanted, and the reason if there is none
PRODUCTS: dict[str, tuple[Callable[..., torch.Tensor], int, str | None, str]] = {
    "DeepGEMM": (
        lambda *operands: _ops().all_reduce(_deep_gemm(*operands), "tp:0"),
        6, "gemm_all_reduce", "",
    ),
    "DeepGEMM and a norm": (
        lambda *operands: torch.ops.vllm_ir.rms_norm(
            _ops().all_reduce(_deep_gemm(*operands), "tp:0"), None, 1e-6
        ),
        6, "gemm_all_reduce_norm", "",
    ),
    "CUTLASS": (
        lambda *operands: _ops().reduce_scatter(_cutlass(*operands), 0, 2, "tp:0"),
        40, "gemm_reduce_scatter", "",
    ),
    "CUTLASS, scales of rows": (
        lambda *operands: _ops().all_reduce(_cutlass_by_rows(*operands), "tp:0"),
        6, "gemm_all_reduce", "",
    ),
    "Triton": (
        lambda *operands: _ops().all_reduce(_triton(*operands), "tp:0"),
        40, "gemm_all_reduce", "",
    ),
    "FlashInfer": (
        lambda *operands: _ops().all_reduce(_flashinfer(*operands), "tp:0"),
        40, "gemm_all_reduce", "",
    ),
    "another dtype": (
        lambda *operands: _ops().all_reduce(_triton(*operands, torch.float16), "tp:0"),
        6, None, "operators multiply torch.float8_e4m3fn into torch.bfloat16",
    ),
    "packed scales": (
        lambda x, w, w_scale: _ops().all_reduce(_deep_gemm(x, w, w_scale.int()), "tp:0"),
        6, None, "operators take float32 for matrices, rows or blocks of 128",
    ),
    "the product has another use": (
        lambda *operands: (lambda y: _ops().all_reduce(y, "tp:0") + y)(_flashinfer(*operands)),
        6, None, "uses the product, too",
    ),
}  # fmt: skip


def _run_product(name: str) -> tuple[list[tuple[str | None, str]], list[str], float]:
    """The operators and reasons, vLLM's products and our quantisation that are called then, and the
    error.
    """
    from torch._inductor import config

    program, tokens, *_ = PRODUCTS[name]
    torch.manual_seed(17 + dist.get_rank())
    arguments = [torch.randn(tokens, 256).bfloat16(), torch.randn(48, 256).to(FLOAT8)]
    arguments.append(torch.randint(1, 4, (1, 2)).float())
    fp8_utils: Any = ModuleType("fp8_utils")
    fp8_utils.per_token_group_quant_fp8 = lambda x, size, *, column_major_scales, use_ue8m0: (
        float8_kernels.quantised(x, size, use_ue8m0)
    )
    graphs: list[torch.fx.Graph] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch._aot_autograd.utils import make_boxed_func

        from interlace.compile import fuse

        def compile_graph(graph: torch.fx.GraphModule, _: Any) -> Any:
            fuse(graph.graph)
            graph.graph.lint()
            graph.recompile()
            graphs.append(graph.graph)
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=compile_graph)(module, inputs)

    quantising = "vllm.model_executor.layers.quantization.utils.fp8_utils"
    with (
        _vllm(), float8_kernels.kernels(), float8_kernels.products(), torch.no_grad(),
        recording() as findings, config.patch(enable_auto_functionalized_v2=False),
        pytest.MonkeyPatch.context() as patch,
    ):  # fmt: skip
        patch.setitem(sys.modules, quantising, fp8_utils)
        expected = program(*arguments).float()
        torch.compiler.reset()
        found = torch.compile(program, backend=backend, fullgraph=True)(*arguments).float()
        # Functionalised calls have the operator as their first argument.
        called = [item for node in graphs[0].nodes for item in (node.target, *node.args[:1])]
    names = [item.name() for item in called if isinstance(item, torch._ops.OpOverload)]
    products = [name for name in names if name in (*vllm.PRODUCTS, "interlace::vllm_quantise")]
    return (
        [(finding.operator, finding.reason) for finding in findings],
        products,
        float((found - expected).norm() / expected.norm()),
    )


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_vllm(ranks: Any, name: str) -> None:
    _, _, operator, wanted = PRODUCTS[name]
    for ((found, reason),), products, error in ranks(2).run(_run_product, name):
        assert found == operator, reason
        assert wanted in reason
        assert len(products) == (operator is None or name == "FlashInfer")
        # Parts and sums are rounded to bfloat16, by truncation in the interpreter.
        assert error < 2**-6


def _inductor() -> tuple[list[str | None], float]:
    """By Inductor without a word of the program, as vLLM's own backend calls it.

    Two products in a row, with nothing between that a C++ compiler would need half a minute for.
    """
    from torch._inductor import config

    def program(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
        return _ops().all_reduce(_ops().all_reduce(x @ w.t(), "tp:0") @ v.t(), "tp:0")

    _, shapes, *_ = PROGRAMS["two layers"]
    torch.manual_seed(17 + dist.get_rank())
    arguments = [torch.randn(shape) for shape in shapes]
    with _vllm(), torch.no_grad(), recording() as findings, config.patch(force_disable_caches=True):
        expected = program(*arguments)
        torch.compiler.reset()
        found = torch.compile(program, fullgraph=True)(*arguments)
    return [each.operator for each in findings], float((found - expected).norm() / expected.norm())


def test_inductor(ranks: Any) -> None:
    for operators, error in ranks(2).run(_inductor):
        assert operators == ["gemm_all_reduce", "gemm_all_reduce"]
        assert error < 1e-5


def test_vllm_in_its_batch_invariant_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own kernels keep its promise, so nothing is registered."""
    calls: list[Any] = []
    monkeypatch.setattr(vllm.compile, "install", lambda **options: calls.append(options))
    monkeypatch.setattr(foreign, "register", calls.append)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    vllm.register()
    assert not calls
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    vllm.register()
    # An engine would wait for measurements at its start.
    assert calls[-1] == {"autotune": False}


def test_graphs_that_vllm_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its key for compiled graphs changes with whatever the pass depends on, and only while the
    pass is on.
    """
    package, envs = ModuleType("vllm"), _envs()
    vars(package)["envs"] = envs
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.envs", envs)

    def key() -> str:
        # As vLLM does, which asks all of its variables.
        return repr({name: value() for name, value in vars(envs)["environment_variables"].items()})

    without = key()
    vllm.register()
    try:
        first = key()
        assert first == key() != without
        monkeypatch.setenv("INTERLACE_AUTOTUNE", "1")
        assert key() != first
    finally:
        uninstall()
