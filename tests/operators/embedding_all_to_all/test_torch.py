"""``torch.ops.interlace.embedding_all_to_all`` as torch's own tools see it: opcheck, fake tensors,
compiled graphs.
"""

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.optim import SGD, RowWiseAdagrad
from tests.operators.embedding_all_to_all.calls import SMALL, Call
from tests.operators.embedding_all_to_all.test_gradients import upstream

CALL = Call(((4, 2), (3,)), 5)
ALONE = Call(((4, 2),), 5)


def _arguments(call, gradient="dense"):
    """What ``api`` hands to the operator."""
    rank = dist.get_rank()
    tables = [table.requires_grad_() for table in call.tables(rank)]
    indices, offsets, _ = call.lookups(rank)
    counts, widths = (
        [len(each) for each in call.widths],
        [width for each in call.widths for width in each],
    )
    layout = (call.batch, counts, widths, rank, "sum", torch.float32)
    states = [torch.rand(len(table)) for table in tables] if gradient == "RowWiseAdagrad" else []
    return tables, indices, offsets, states, layout, ("", "fused", str(SMALL))


def _opcheck_forward():
    tables, indices, offsets, _, layout, how = _arguments(ALONE)
    assert interlace.embedding_all_to_all is not None  # the first use of the name registers the op
    op = torch.ops.interlace.embedding_all_to_all.default
    return torch.library.opcheck(
        op, (tables, indices, offsets, None, None, [], *layout, "dense", 0.0, 0.0, *how, False)
    )


def _opcheck_backward():
    tables, indices, offsets, states, layout, how = _arguments(ALONE, "RowWiseAdagrad")
    assert interlace.embedding_all_to_all is not None
    grad, tables = upstream(ALONE, dist.get_rank()), [table.detach() for table in tables]
    trains, rows = [True] * len(tables), [len(table) for table in tables]
    gradient, update = (
        torch.ops.interlace.embedding_all_to_all_gradient,
        torch.ops.interlace.embedding_all_to_all_update,
    )
    found = [
        torch.library.opcheck(
            gradient.default,
            (grad, indices, offsets, None, *layout, rows, trains, torch.float32, sparse, *how),
        )
        for sparse in (False, True)
    ]
    more = (*layout, trains, "RowWiseAdagrad", 0.1, 1e-3, *how)
    found.append(
        torch.library.opcheck(update.default, (grad, tables, states, indices, offsets, None, *more))
    )
    return {name: outcome for outcomes in found for name, outcome in outcomes.items()}


@pytest.mark.parametrize("check", [_opcheck_forward, _opcheck_backward])
def test_opcheck(ranks, check):
    """Schema, autograd registration, fake tensor and AOT dispatch with dynamic shapes agree with
    the kernels.
    """
    for outcome in ranks(1).run(check):
        assert set(outcome.values()) == {"SUCCESS"}, outcome


def _compiled(call, kind, impl):
    rank = dist.get_rank()
    indices, offsets, _ = call.lookups(rank)

    def step(tables, gradient):
        y = interlace.embedding_all_to_all(
            tables,
            indices,
            offsets,
            gradient=gradient,
            batch_size=call.batch,
            name=f"compiled {call.widths}",
            impl=impl,
            config=SMALL,
        )
        return torch.relu(y * 2).sum(-1)

    outcomes = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        tables = [table.requires_grad_() for table in call.tables(rank)]
        states = [torch.ones(len(table)) for table in tables]
        gradient = {"sgd": SGD(0.5), "adagrad": RowWiseAdagrad(0.5, 1e-3, states)}.get(kind, kind)
        y = function(tables, gradient)
        y.sum().backward()
        outcomes.append(
            [
                y.detach(),
                *(table.grad if kind == "dense" else table.detach() for table in tables),
                *states,
            ]
        )
    return outcomes


_WITHOUT_TABLES = Call(((4, 2), ()), 5)


@pytest.mark.parametrize(
    ("call", "kind", "impl"),
    [
        (CALL, "dense", "auto"), (CALL, "adagrad", "auto"), (CALL, "dense", "pooled"),
        (_WITHOUT_TABLES, "dense", "pooled"), (_WITHOUT_TABLES, "adagrad", "auto"),
    ],
)  # fmt: skip
def test_compiles_into_one_graph(ranks, call, kind, impl):
    """With its gradients and updates; a graph break or an input that the op forgets to declare
    fails here.

    A rank without tables has a backward graph as well: its peers need its samples' gradients.
    """
    for eager, compiled in ranks(2).run(_compiled, call, kind, impl):
        torch.testing.assert_close(compiled, eager, rtol=0, atol=0)


def test_fake_tensors_start_no_kernel():
    """Shapes alone, on a rank by itself: a batch that the ranks do not divide, and tables of other
    ranks.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert interlace.embedding_all_to_all is not None
    with FakeTensorMode():
        for rank, rows in enumerate((2, 2, 1)):
            tables, indices, offsets = (
                [torch.empty(9, 4)],
                torch.empty(7, dtype=torch.int64),
                torch.empty(6, dtype=torch.int64),
            )
            y = torch.ops.interlace.embedding_all_to_all(
                tables, indices, offsets, None, None, [], 5, [1, 0, 2], [4, 3, 8], rank, "sum",
                torch.bfloat16, "dense", 0.0, 0.0, "", "fused", "", False,
            )  # fmt: skip
            assert (y.shape, y.dtype) == ((rows, 15), torch.bfloat16)
