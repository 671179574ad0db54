"""What tracing believes of every operator's results is what they are: shapes, strides, dtypes.

A compiled graph holds these, and refuses other results when it runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import interlace
from interlace import ArgumentError, GroupError
from interlace.registry import Operator, operators
from tests.nodes.groups import process_group_of

OPS = torch.ops.interlace
K, N = 8, 6
SENT = ([1, 3], [2, 2])  # rows that each of two ranks sends to each


class _Compared(TorchDispatchMode):
    """Runs each operator's fake beside it, and keeps what differs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.wrong: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A backward pass computes with gradients again, which no mode lets through by itself.
        key = torch._C.DispatchKey.AutogradFunctionality
        with torch._C._SetExcludeDispatchKeyGuard(key, torch.is_grad_enabled()):
            result = func(*args, **(kwargs or {}))
        if func.namespace == "interlace":
            self.seen.add(func.name())
            with FakeTensorMode() as mode:
                fakes = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs or {}))
                expected = func(*fakes[0], **fakes[1])
            real, fake = (list(map(_described, tree_leaves(each))) for each in (result, expected))
            if real != fake:
                self.wrong.append(f"{func.name()}: {fake} and not {real}")
        return result


def _described(tensor: torch.Tensor) -> tuple[Any, ...]:
    # Strides of dimensions that have one element, or of no element, mean nothing.
    strides = [
        stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size > 1 and tensor.numel()
    ]
    return tuple(tensor.shape), strides, tensor.dtype, tensor.device


def _calls(group: dist.ProcessGroup) -> Iterator[Callable[[], Any]]:
    """Calls of every operator, with and without rows, biases, lists and gradients."""
    torch.manual_seed(dist.get_rank())
    rank, name, new = dist.get_rank(), group.group_name, torch.randn
    for rows, has_bias, is_along_n in ((4, True, False), (4, False, True), (0, False, False)):
        x, w = new(K, rows).T, new(N, K)
        w = w.T.contiguous().T if is_along_n else w
        bias = torch.ones(N) if has_bias else None
        half = {"out_dtype": torch.bfloat16} if not has_bias else {}
        for training in (False, True):
            operands = [
                None if each is None else each.clone().requires_grad_(training)
                for each in (x, w, bias)
            ]
            few, halves = {"group": group}, {"group": group} | half
            lists = {"input_splits": SENT[rank], "output_splits": [row[rank] for row in SENT]}
            yield lambda operands=operands, how=halves: interlace.gemm_all_reduce(*operands, **how)
            yield lambda operands=operands, how=halves: interlace.gemm_reduce_scatter(
                *operands, **how
            )
            yield lambda operands=operands, how=halves: interlace.all_gather_gemm(*operands, **how)
            yield lambda operands=operands, how=halves: interlace.gemm_all_to_all(*operands, **how)
            yield lambda operands=operands, how=few: interlace.gemv_all_reduce(*operands, **how)
            if rows:
                yield lambda operands=operands, how=few | lists: interlace.gemm_all_to_all(
                    *operands, **how
                )
                yield lambda operands=operands, how=few: interlace.gemm_reduce_scatter(
                    *operands, splits=[3, 1], **how
                )
                one = [operands[0][0], *operands[1:]]
                yield lambda one=one, how=few: interlace.gemv_all_reduce(*one, **how)
        for residual, dtype in itertools.product((None, new(rows, N)), (None, torch.float8_e4m3fn)):
            scale = None if dtype is None else torch.ones(1)
            yield lambda x=x, w=w, bias=bias, more=(residual, scale, dtype): (
                interlace.gemv_all_reduce(
                    x, w, bias, norm="rms", norm_weight=torch.ones(N), residual=more[0],
                    scale=more[1], out_dtype=more[2], group=group,
                )
            )  # fmt: skip
        yield lambda x=x, w=w: OPS.gemm_sum_reduce_scatter([x, x], [w, w], name)
        yield lambda x=x: OPS.rows_for_peers(x.contiguous(), name, 0)
        yield lambda: OPS.memory_for_peers([2, 4], torch.float32, torch.device("cpu"), name, 1)
        yield lambda x=x, w=w, bias=bias: OPS.linears(x, [w, w], [bias, bias])
        yield lambda x=x, w=w: OPS.linears(x.bfloat16(), [w.bfloat16()], [None])
    yield from _calls_of_a_sequence(group)
    yield from _calls_of_losses(group)
    yield from _calls_of_experts(group)
    yield from _calls_of_tables(group)


def _calls_of_a_sequence(group: dist.ProcessGroup) -> Iterator[Callable[[], Any]]:
    for training, splits, has_bias in itertools.product((False, True), (None, (3, 1)), (0, 1)):
        rows = 2 if splits is None else splits[dist.get_rank()]
        x, columns = torch.randn(K, rows).T, torch.randn(4, K // 2)
        w, bias = torch.randn(N, K), torch.ones(N) if has_bias else None
        for each in (x, columns, w):
            each.requires_grad_(training)
        options = {"splits": splits, "group": group}
        yield lambda x=x, w=w, bias=bias, options=options: interlace.gemm_all_to_all_columns(
            x, w, bias, column_ranges=[[(0, 2), (3, 4)], [(2, 4)]], **options
        )
        yield lambda x=columns, w=w, bias=bias, options=options: interlace.all_to_all_gemm(
            x, w, bias, **options
        )


def _calls_of_losses(group: dist.ProcessGroup) -> Iterator[Callable[[], Any]]:
    for rows, k in ((4, 1), (4, 3), (0, 1)):
        yield lambda rows=rows, k=k: interlace.linear_top_k(
            torch.ones(rows, K), torch.ones(N, K), k, group=group
        )
    for reduction, rows, has_bias, training in itertools.product(
        ("mean", "none"), (4, 0), (False, True), (False, True)
    ):
        x = torch.randn(K, rows).T.requires_grad_(training)
        w = torch.randn(K, N).T.requires_grad_(training)
        bias = torch.ones(N, requires_grad=training) if has_bias else None
        target = torch.arange(rows)
        yield (
            lambda x=x, w=w, bias=bias, target=target, reduction=reduction: (
                interlace.linear_cross_entropy(x, w, target, bias, reduction=reduction, group=group)
            )
        )


def _calls_of_experts(group: dist.ProcessGroup) -> Iterator[Callable[[], Any]]:
    for tokens, impl, has_biases, training in itertools.product(
        (3, 0), ("auto", "unfused"), (False, True), (False, True)
    ):
        weights, experts = torch.softmax(torch.randn(4, tokens).T, -1).topk(2)
        shapes = (2, 6, 2, K), (2, K, 6), *(((2, 6, 2), (2, K)) if has_biases else ())
        parameters = [torch.randn(shape).requires_grad_(training) for shape in shapes]
        x = torch.randn(K, tokens).T.requires_grad_(training)
        weights = weights.T.contiguous().T.detach().requires_grad_(training)
        yield (
            lambda x=x, experts=experts, weights=weights, parameters=parameters, impl=impl: (
                interlace.mixture_of_experts(
                    x, experts, weights, *parameters, group=group, impl=impl
                )
            )
        )


def _calls_of_tables(group: dist.ProcessGroup) -> Iterator[Callable[[], Any]]:
    for gradient, bags, tables in (
        ("dense", 4, 2),
        ("sparse", 3, 1),
        (interlace.optim.SGD(0.1), 4, 1),
        ("dense", 0, 1),
    ):
        weights = [torch.randn(5, width).requires_grad_() for width in (4, 8)[:tables]]
        # Rank 1 has no table of its own.
        weights = weights if dist.get_rank() == 0 else []
        count = 2 * bags * len(weights)
        indices, offsets = torch.arange(count) % 5, torch.arange(0, count + 1, 2)
        yield (
            lambda more=(weights, indices, offsets), gradient=gradient, bags=bags: (
                interlace.embedding_all_to_all(
                    *more,
                    gradient=gradient,
                    batch_size=bags,
                    output_dtype=torch.float32,
                    group=group,
                )
            )
        )


def _is_ours(declaration: Operator) -> bool:
    return type(declaration).__module__.startswith("interlace.")


def _compared(nodes: int) -> tuple[list[str], set[str], set[str], list[str]]:
    """On a rank: fakes that are wrong, the operators that ran, all there are, and refusals."""
    refusals: list[str] = []
    with process_group_of(nodes) as group, _Compared() as compared:
        for call in _calls(group):
            try:
                results = [each for each in tree_leaves(call()) if each.requires_grad]
            except (ArgumentError, GroupError) as error:
                refusals.append(str(error))  # on all ranks, as they make the same calls
                continue
            if results:
                torch.autograd.backward([each.sum() for each in results])
    names = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]
    # Tests of operators of other packages may have run in these processes.
    others = [name for name, it in operators().items() if not _is_ours(it)]
    defined = {
        "::".join((library, name))
        for library, _, name in names
        if library == "interlace" and not name.startswith(tuple(others))
    }
    return compared.wrong, compared.seen, defined, refusals


@pytest.mark.parametrize("nodes", [1, 2])
def test_fakes_of_every_operator_are_like_its_results(ranks: Any, nodes: int) -> None:
    found = ranks(2).run(_compared, nodes)
    for wrong, seen, defined, _ in found:
        assert wrong == []
        if nodes == 1:
            assert seen == defined
