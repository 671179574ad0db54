"""``impl="gemv"`` of ``torch.ops.interlace.gemm_all_reduce`` as torch's own tools see it: opcheck,
fake tensors, compiled graphs.
"""

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import GemvAllReduceConfig
from tests.operators.gemv_all_reduce.calls import Call

CONFIG = GemvAllReduceConfig("one_shot", block_n=4, block_k=16)


def _opcheck(call):
    x, w, bias = call.inputs(dist.get_rank())
    inputs = [t.requires_grad_() for t in (x, w, bias)]
    assert interlace.gemv_all_reduce is not None  # the first use of the name registers the op
    op = torch.ops.interlace.gemm_all_reduce.default
    return torch.library.opcheck(op, (*inputs, None, None, torch.float32, "", "gemv", str(CONFIG)))


@pytest.mark.parametrize("tokens", [1, 3])
def test_opcheck(ranks, tokens):
    """Schema, autograd registration, fake tensor and AOT dispatch with dynamic shapes agree with
    the kernel.
    """
    for outcome in ranks(2).run(_opcheck, Call(tokens, 5, 7, bias=True)):
        assert set(outcome.values()) == {"SUCCESS"}, outcome


def _layer(x, w, bias):
    return torch.relu(interlace.gemv_all_reduce(x * 2, w, bias, config=CONFIG)).sum(-1)


def _compiled(call, backend):
    outcomes = []
    for function in (_layer, torch.compile(_layer, fullgraph=True, backend=backend)):
        x, w, bias = (t.requires_grad_() for t in call.inputs(dist.get_rank()))
        y = function(x, w, bias)
        y.sum().backward()
        outcomes.append([y.detach(), x.grad, w.grad, bias.grad])
    return outcomes


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_into_one_graph(ranks, backend):
    """With its gradients; a graph break or an input that the op forgets to declare fails here."""
    for eager, compiled in ranks(2).run(_compiled, Call(3, 6, 8, bias=True), backend):
        torch.testing.assert_close(compiled, eager, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(8,), (3, 8), (0, 8)])
def test_meta_tensors_have_the_shape_of_the_result(shape):
    x, w = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta"),
        torch.empty(5, 8, dtype=torch.bfloat16, device="meta"),
    )
    y = interlace.gemv_all_reduce(x, w)
    assert (y.shape, y.dtype, y.device.type) == (
        torch.Size([*shape[:-1], 5]),
        torch.bfloat16,
        "meta",
    )


def test_fake_tensors_start_no_communication():
    """Tracing on one rank alone must not wait for the others."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        y = interlace.gemv_all_reduce(torch.empty(3, 8), torch.empty(5, 8), torch.empty(5))
    assert y.shape == (3, 5)
