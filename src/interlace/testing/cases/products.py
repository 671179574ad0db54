"""Calls of the operators around one matrix product, and of ``gemv_all_reduce``."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import interlace
import interlace.operators  # registers them
from interlace.comm import group_of
from interlace.gemm.operator import GemmOperator, product_operator
from interlace.gemm.splits import balanced
from interlace.gemm.terms import Terms
from interlace.operators.gemm_all_reduce.gemv import tuned
from interlace.registry import operators
from interlace.testing.cases.base import DTYPES, Case, Make, Tensors, generator, thin, whole_numbers

_COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")

GEMV = "gemv_all_reduce"
_PRODUCTS: dict[str, tuple[str, ...]] = {
    name: tuple(
        implementation.name
        for implementation in declaration.implementations
        if not implementation.is_stock
    )
    for name, declaration in operators().items()
    # The operators of a product and one collective; variants of them have cases of their own.
    if isinstance(declaration, GemmOperator)
    and declaration.collective in _COLLECTIVES
    and len(declaration.pattern) == 2
}
"""Stock pairs are left out: PyTorch tests them."""

IMPLEMENTATIONS = {GEMV: ("gemv one_shot", "gemv two_phase", "unfused"), **_PRODUCTS}


# Columns, inner size, dtype, whether there is a bias, whether rows are split unevenly, and what w
# is contiguous along. Few, because each one compiles kernels of its own; rows are not compiled in.
_KINDS = (
    (64, 48, "float32", True, False, "K"),
    (129, 65, "bfloat16", True, True, "N"),
    (96, 520, "float16", False, True, "K"),
    (256, 128, "bfloat16", False, False, "K"),
    (1, 16, "float16", False, False, "N"),
    (128, 64, "float8", True, True, "K"),
)
_ROWS = (1, 2, 7, 16, 33, 130)
_MAPPED_ROWS = (1, 2, 16, 64)  # whose padding to a whole mapping a mapped output accepts
_MOST_ROWS = 512

# Of gemv_all_reduce: rows of x (0 for a vector), columns, inner size, dtype, whether there is a
# bias.
_GEMV_KINDS = (
    (0, 64, 48, "float32", True),
    (1, 130, 256, "bfloat16", False),
    (2, 97, 65, "float16", True),
    (5, 64, 512, "bfloat16", True),
    (16, 33, 128, "float32", False),
    (0, 1, 8, "float16", False),
    (1, 4096, 512, "bfloat16", False),
)


@dataclasses.dataclass(frozen=True)
class ProductCase(Case):
    """``rows`` of x on each rank (of the product, where that is the same), or as ``splits`` say.

    Attributes:
        splits: None; or ``splits[s][d]`` rows from rank s to rank d (all-to-all); or the rows of
            each rank's result (reduce-scatter) or of each rank's x (all-gather).
        w_along: The dimension along which w is contiguous, ``"K"`` or ``"N"``.
    """

    rows: int = 16
    columns: int = 32
    inner: int = 32
    bias: bool = False
    splits: tuple[Any, ...] | None = None
    w_along: str = "K"

    @property
    def declaration(self) -> GemmOperator:
        """Return the operator's declaration."""
        return product_operator(self.operator)

    @property
    def collective(self) -> str:
        """Return the operator's collective."""
        return self.declaration.collective

    @property
    def sizes(self) -> str:
        split = "" if self.splits is None else f", splits {list(self.splits)}"
        rows = "given rows" if self.splits is not None else self.rows
        bias = ", bias" if self.bias else ""
        return f"{rows} x {self.columns} x {self.inner}{bias}, w along {self.w_along}{split}"

    def _rows_of(self, rank: int) -> int:
        if self.splits is None or self.declaration.adds_ranks:
            return self.rows
        return sum(self.splits[rank]) if self.collective == "all_to_all" else int(self.splits[rank])

    def tensors(self, rank: int, ranks: int, seed: int) -> Tensors:
        source, shared = generator(seed, rank), generator(seed, -1)
        rows, dtype = self._rows_of(rank), DTYPES[self.dtype]
        tensors = {
            "x": whole_numbers(source, (rows, self.inner), 2).to(dtype),
            "w": whole_numbers(source, (self.columns, self.inner), 1, thin(self.inner)).to(dtype),
        }
        if self.w_along == "N":
            tensors["w"] = tensors["w"].T.contiguous().T
        if self.bias:
            tensors["bias"] = whole_numbers(
                shared if self.declaration.adds_ranks else source, (self.columns,), 8
            ).to(self.result_dtype)
        # Powers of two: scaled products stay exact in float32.
        if self.dtype == "float8":
            tensors["x_scale"] = 2.0 ** torch.randint(0, 2, (rows, 1), generator=source)
            tensors["w_scale"] = 2.0 ** torch.randint(0, 2, (1, self.columns), generator=source)
        if self.backward:
            # Every rank has a copy of an all-reduce's result, so the gradients are equal, too.
            grad_source = shared if self.collective == "all_reduce" else source
            shape = self._result_rows(rank, ranks), self.columns
            grad = whole_numbers(grad_source, shape, 1, thin(max(*shape, 1), 48))
            tensors["grad"] = grad.to(self.result_dtype)
        return tensors

    def _result_rows(self, rank: int, ranks: int) -> int:
        match self.collective:
            case "all_gather":
                return sum(self._rows_of(peer) for peer in range(ranks))
            case "all_to_all":
                return self.rows if self.splits is None else sum(sent[rank] for sent in self.splits)
            case "all_reduce":
                return self.rows
        return int((self.splits or balanced(self.rows, ranks))[rank])

    @property
    def is_replicated(self) -> bool:
        return self.collective == "all_reduce"

    @property
    def shares_bias(self) -> bool:
        return self.bias and self.declaration.adds_ranks

    def outputs(self, leaves: list[Tensors], inputs: list[Tensors]) -> list[torch.Tensor]:
        xs = [leaf["x"] * call.get("x_scale", 1) for leaf, call in zip(leaves, inputs, strict=True)]
        ws = [
            leaf["w"] * call["w_scale"].mT if "w_scale" in call else leaf["w"]
            for leaf, call in zip(leaves, inputs, strict=True)
        ]
        biases = [
            leaf.get("bias", torch.zeros(self.columns, dtype=torch.float64)) for leaf in leaves
        ]
        return exact_results(self.collective, xs, ws, biases, self.splits)

    def open(self, group: dist.ProcessGroup | None) -> Make:
        splits = split_options(self.collective, self.splits, dist.get_rank(group))
        options = {"group": group, "impl": self._impl_on(group), **splits}
        return functools.partial(self.call, getattr(interlace, self.operator), options)

    def _impl_on(self, group: dist.ProcessGroup | None) -> str:
        """Return ``impl``; or ``"auto"`` on a group of several nodes that it cannot run this on."""
        members, operator = group_of(group).members, self.declaration
        if not members.spans_nodes or self.impl in operator.choosers:
            return self.impl
        is_shared_evenly = self.collective == "all_gather" or self.rows % members.world_size == 0
        terms = dataclasses.replace(
            Terms.of_sizes(
                self.rows,
                self.columns,
                DTYPES[self.dtype],
                members.device.type,
                members.world_size,
            ),
            has_bias=self.bias,
            converts=self.result_dtype != DTYPES[self.dtype],
            is_even=self.splits is None and is_shared_evenly,
            node_of_rank=members.node_of_rank,
        )
        return "auto" if operator.implementation(self.impl).refusal(terms) else self.impl


@dataclasses.dataclass(frozen=True)
class GemvCase(ProductCase):
    """A call of ``gemv_all_reduce``: ``rows`` of x, or a vector for 0.

    The second word of ``impl`` is the protocol of the kernel for few rows.
    """

    may_be_zero = ("rows",)

    @property
    def sizes(self) -> str:
        bias = ", bias" if self.bias else ""
        return f"{self.rows or 'vector'} x {self.columns} x {self.inner}{bias}"

    def tensors(self, rank: int, ranks: int, seed: int) -> Tensors:
        if self.rows:
            return super().tensors(rank, ranks, seed)
        tensors = dataclasses.replace(self, rows=1).tensors(rank, ranks, seed)
        lines = {name: tensors[name][0] for name in ("x", "grad") if name in tensors}
        return tensors | lines

    def open(self, group: dist.ProcessGroup | None) -> Make:
        owner, config = group_of(group), None
        if self.variant:
            choice = tuned(
                rows=self.rows or 1,
                columns=self.columns,
                inner=self.inner,
                dtype=DTYPES[self.dtype],
                world_size=owner.world_size,
                device=owner.device,
            )
            config = dataclasses.replace(choice.config, protocol=self.variant)
        options = {"group": group, "impl": self.impl_name, "config": config}
        return functools.partial(self.call, interlace.gemv_all_reduce, options)


def exact_results(
    collective: str,
    xs: Sequence[torch.Tensor],
    ws: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    splits: Any,
) -> list[torch.Tensor]:
    """Return every rank's result of a product and its collective, by torch alone.

    Args:
        collective: ``"all_gather"``, ``"all_to_all"``, ``"all_reduce"`` or ``"reduce_scatter"``.
        xs: Every rank's x, ``[M, K]``; the results are of their dtype.
        ws: Every rank's w, ``[N, K]``.
        biases: Every rank's bias, ``[N]``; sums take the first one.
        splits: None for rows that are shared out evenly; else the rows from rank s to rank d as
            ``splits[s][d]`` (all-to-all), or the rows of each rank's result (reduce-scatter).
    """
    ranks = len(xs)
    if collective == "all_gather":
        gathered = torch.cat(list(xs))
        return [gathered @ w.T + bias for w, bias in zip(ws, biases, strict=True)]
    parts = [x @ w.T for x, w in zip(xs, ws, strict=True)]
    if collective == "all_to_all":
        sent = splits or [[len(xs[0]) // ranks] * ranks] * ranks
        pieces = [
            (part + bias).split(list(counts))
            for part, bias, counts in zip(parts, biases, sent, strict=True)
        ]
        return [torch.cat([piece[rank] for piece in pieces]) for rank in range(ranks)]
    total = torch.stack(parts).sum(0) + biases[0]
    if collective == "all_reduce":
        return [total] * ranks
    return list(total.split(list(splits or balanced(len(total), ranks))))


def split_options(collective: str, splits: Any, rank: int) -> dict[str, list[int]]:
    """Return the arguments by which a rank gives ``splits`` to an operator, by name."""
    if splits is None:
        return {}
    if collective == "all_to_all":
        received = [sent[rank] for sent in splits]
        return {"input_splits": list(splits[rank]), "output_splits": received}
    return {"splits": list(splits)}


def every(operator: str, impl: str, ranks: int) -> list[ProductCase]:
    """Return a small call with its backward pass, and, if the implementation takes it, a call with
    uneven rows and a rank without rows; of ``gemv_all_reduce`` calls with one row and with several.
    """
    if operator == GEMV:
        return [
            GemvCase(operator, impl, "bfloat16", True, 1, 96, 64, True),
            GemvCase(operator, impl, "float16", True, 5, 33, 48, False),
        ]
    cases = [
        ProductCase(
            operator,
            impl,
            "bfloat16",
            True,
            _as_many_as_taken(operator, impl, 16 * ranks),
            64,
            32,
            takes_bias(operator, impl),
        ),
    ]
    if takes_any_rows(operator, impl):
        splits = _uneven(operator, random.Random(1), ranks)
        rows = sum(splits) if product_operator(operator).collective == "reduce_scatter" else 0
        cases.append(
            ProductCase(
                operator,
                impl,
                "float32",
                True,
                rows,
                33,
                17,
                takes_bias(operator, impl),
                splits,
                "N",
            )
        )
    return cases


def draw(operator: str, impl: str, ranks: int, source: random.Random, large: bool) -> ProductCase:
    """Return a random call; ``large`` allows some calls with many rows, or a large weight."""
    if operator == GEMV:
        rows, columns, inner, dtype, bias = source.choice(
            _GEMV_KINDS if large else _GEMV_KINDS[:-1]
        )
        return GemvCase(operator, impl, dtype, source.random() < 0.4, rows, columns, inner, bias)
    columns, inner, dtype, bias, uneven, along = source.choice(
        [kind for kind in _KINDS if impl in ("fused", "unfused") or kind[2] != "float8"]
    )
    uneven = uneven and takes_any_rows(operator, impl)
    splits = _uneven(operator, source, ranks) if uneven else None
    # Numbers are drawn in the same order whatever the implementation: a seed makes the same calls.
    sizes = _MAPPED_ROWS if impl == "remote_stores" else _ROWS
    share = _MOST_ROWS if large and source.random() < 0.1 else source.choice(sizes)
    collective = product_operator(operator).collective
    rows = share if collective == "all_gather" else share * ranks
    takes_uneven = collective == "all_reduce" and _takes(operator, impl, is_even=False)
    if takes_uneven and source.random() < 0.3:
        rows = max(1, rows - 1)  # not a multiple of the ranks
    if splits is not None and collective == "reduce_scatter":
        rows = sum(splits)
    rows = _as_many_as_taken(operator, impl, rows)
    backward = dtype != "float8" and source.random() < 0.4
    return ProductCase(
        operator,
        impl,
        dtype,
        backward,
        rows,
        columns,
        inner,
        bias and takes_bias(operator, impl),
        splits,
        along,
    )


def takes_bias(operator: str, impl: str) -> bool:
    """Return whether an implementation adds biases."""
    return _takes(operator, impl, has_bias=True)


def takes_any_rows(operator: str, impl: str) -> bool:
    """Return whether rows may be split unevenly."""
    return bool(product_operator(operator).split_names) and _takes(operator, impl, is_even=False)


def _as_many_as_taken(operator: str, impl: str, rows: int) -> int:
    """Return ``rows``, halved until an implementation that is for few rows takes them."""
    while rows > 1 and not _takes(operator, impl, rows=rows):
        rows //= 2
    return rows


def _takes(
    operator: str, impl: str, *, has_bias: bool = False, is_even: bool = True, rows: int = 1
) -> bool:
    terms = Terms.of_sizes(rows, 8, torch.bfloat16, "cuda", 2)
    terms = dataclasses.replace(terms, has_bias=has_bias, is_even=is_even)
    return product_operator(operator).implementation(impl).refusal(terms) is None


def _uneven(operator: str, source: random.Random, ranks: int) -> tuple[Any, ...]:
    """Return the rows of each rank, one of them without rows; for an all-to-all, of each pair of
    ranks.
    """
    rows = [source.choice((1, 5, 17, 64, 129)) for _ in range(ranks)]
    if ranks > 1:
        rows[source.randrange(ranks)] = 0
    if product_operator(operator).collective != "all_to_all":
        return tuple(rows)
    return tuple(tuple(rows[s:] + rows[:s]) for s in range(ranks))
