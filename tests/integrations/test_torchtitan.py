"""torchtitan's debug models, unedited, with tensor parallelism: what is fused, and that the loss
and all gradients are those of the same program without Interlace.

Its trainer has no device but a GPU. What runs here are the parts of which a training step of it
consists: ``model_registry``, the sharding, ``ParallelDims``, ``Module.parallelize``,
``apply_compile``, ``init_weights``, the context of its backend ``spmd_types``, and its loss.
FlexAttention has no gradient on the CPU, so attention is torchtitan's own by
``scaled_dot_product_attention``; and FSDP, which torchtitan 0.3 calls as PyTorch 2.13 does not know
it, is left out.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._inductor import config as inductor_config

import interlace
from interlace.compile import eager_backend, recording
from interlace.integrations import symm_mem
from tests.pool import COMPILING_S

pytest.importorskip("torchtitan", reason="make test-integrations installs it")

LAYERS, VOCABULARY = 2, 2048
FORWARD = ["all_gather_gemm", "gemm_reduce_scatter"] * 2
BACKWARD = [
    "all_gather_gemm",
    "gemm_sum_reduce_scatter",  # the gate's and up's gradients
    "all_gather_gemm",
    "gemm_reduce_scatter",
]
Step = tuple[torch.Tensor, dict[str, torch.Tensor]]


def _step(name: str, backend: Any = None, sequence_parallel: bool = True, **options: Any) -> Step:
    """The loss and the gradients of one training step, on this rank's shards.

    Args:
        name: ``"llama3"`` or ``"qwen3"``.
        backend: As ``--compile.backend``; None does not compile.
        sequence_parallel: As ``--parallelism.enable_sequence_parallel``.
        options: Of torchtitan's ``model_registry``.
    """
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config import CompileConfig, ParallelismConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed.compile import apply_compile
    from torchtitan.distributed.utils import get_spmd_context
    from torchtitan.models.common.attention import ScaledDotProductAttention

    ranks = dist.get_world_size()
    config = (
        import_module(f"torchtitan.models.{name}").model_registry("debugmodel", **options).model
    )
    config.layers = config.layers[:LAYERS]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    sharding = import_module(f"torchtitan.models.{name}.sharding")
    experts = {"enable_ep": False} if name == "qwen3" else {}
    set_sharding = getattr(sharding, f"set_{name}_sharding_config")
    set_sharding(config, enable_sp=sequence_parallel, **experts)
    with torch.device("meta"):
        model = config.build()
    with mock.patch.object(parallel_dims, "device_type", "cpu"):
        dims = ParallelDims.from_config(ParallelismConfig(tensor_parallel_degree=ranks), ranks)
        dims.build_mesh()
    model.parallelize(dims)
    if backend is not None:
        torch.compiler.reset()
        compiling = CompileConfig(enable=True, backend=backend)
        apply_compile(model, compile_config=compiling, parallel_dims=dims)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    rows = torch.randint(0, VOCABULARY, (2, 9))
    # Threads of autograd would not know the mesh: torchtitan's trainer switches them off, too.
    with get_spmd_context(parallel_dims=dims)(), torch.autograd.set_multithreading_enabled(False):
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        loss_of = CrossEntropyLoss(CrossEntropyLoss.Config(global_vocab_size=VOCABULARY))
        loss, _ = loss_of(model(rows[:, :-1]), rows[:, 1:], torch.tensor(16))
        loss.backward()
    gradients = {key: each.grad for key, each in model.named_parameters() if each.grad is not None}
    assert len(gradients) > 6 * LAYERS
    return loss.detach(), gradients


def _largest_error(found: Step, expected: Step) -> float:
    (loss, gradients), (expected_loss, expected_gradients) = found, expected
    assert gradients.keys() == expected_gradients.keys()
    pairs = [(gradients[name], each) for name, each in expected_gradients.items()]
    return max(
        float((ours - theirs).norm() / theirs.norm())
        for ours, theirs in [(loss, expected_loss), *pairs]
    )


def _compiled(
    name: str, backend: Any, sequence_parallel: bool
) -> tuple[float, list[tuple[str, str | None]]]:
    expected = _step(name, "aot_eager", sequence_parallel)
    # Of a graph that Inductor takes from its cache, of an earlier run, nothing is found.
    with recording() as findings, inductor_config.patch(force_disable_caches=True):
        found = _step(name, backend, sequence_parallel)
    return _largest_error(found, expected), [(each.graph, each.operator) for each in findings]


@pytest.mark.parametrize(
    ("name", "backend", "sequence_parallel"),
    [
        ("llama3", eager_backend, True),
        ("llama3", eager_backend, False),
        ("qwen3", eager_backend, True),
        pytest.param("llama3", "interlace", True, marks=pytest.mark.inductor),
    ],
)
def test_compiled_blocks(ranks: Any, name: str, backend: Any, sequence_parallel: bool) -> None:
    """One compiled block serves all layers: four collectives forward, four backward, all fused."""
    wanted = [("forward", each) for each in FORWARD] + [("backward", each) for each in BACKWARD]
    if not sequence_parallel:
        wanted = [("forward", "gemm_all_reduce")] * 2 + [
            (
                "backward",
                None,
            ),  # the sum of the gate's and up's gradients: too large to put side by side
            ("backward", "gemm_all_reduce"),
        ]
    for error, fused in ranks(2).run(
        _compiled, name, backend, sequence_parallel, timeout_s=COMPILING_S
    ):
        assert fused == wanted
        assert error < 1e-5


def _dist_gemm() -> tuple[float, int, list[str]]:
    expected = _step("llama3")
    product = torch.mm

    def mm(a: torch.Tensor, b: torch.Tensor, out_dtype: Any = None, **options: Any) -> Any:
        return product(a, b, **options)

    symm_mem.install()
    try:
        # PyTorch has no product with a dtype of its own on the CPU; all of this is float32.
        with mock.patch.object(torch, "mm", mm):
            found = _step("llama3", tp_gemm_backend="dist_gemm")
        taken, left = symm_mem.calls.taken.total(), list(symm_mem.calls.left)
    finally:
        symm_mem.uninstall()
    return _largest_error(found, expected), taken, [reason for _, reason in left]


def test_dist_gemm(ranks: Any) -> None:
    """All gathers and scatters of all layers; each has one more for every gradient."""
    for error, taken, left in ranks(2).run(_dist_gemm):
        assert (taken, left) == (10 * LAYERS, [])
        assert error < 1e-5


def test_the_backend_is_found_by_its_name() -> None:
    from torch._dynamo.backends.registry import lookup_backend

    assert lookup_backend("interlace") is interlace.compile.backend
