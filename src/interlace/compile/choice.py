"""Which operator, if any, is faster than a pair: the tuned tables' answer."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm import process_group_named
from interlace.comm.interpreter import interpreting
from interlace.compile.findings import LeftAlone
from interlace.compile.producers import Product
from interlace.gemm.batch import BatchOperator
from interlace.gemm.call import Terms
from interlace.gemm.choice import MAX_RANKS
from interlace.operators.gemv_all_reduce.config import FEW_TOKENS
from interlace.registry import Operator, operator_matching


def usable_ranks(group_name: str, device: torch.device) -> int:
    """How many ranks a group has. Nothing is sent.

    Raises:
        LeftAlone: operators cannot run on this group, or not on this device.
    """
    if device.type not in ("cuda", "cpu"):
        raise LeftAlone(f"operators run on cuda and cpu; it is on {device.type}")
    if device.type == "cpu" and not interpreting():
        raise LeftAlone(
            "on the CPU operators need Triton's interpreter; TRITON_INTERPRET is not set"
        )
    try:
        group = process_group_named(group_name)
        ranks = dist.get_process_group_ranks(group)
    except (LookupError, RuntimeError, ValueError) as error:
        raise LeftAlone(f"its group {group_name!r} is not known in this process") from error
    if len(ranks) == 1:
        raise LeftAlone("its group has one rank, which has nothing to send")
    if len(ranks) > MAX_RANKS:
        raise LeftAlone(f"its group has {len(ranks)} ranks; operators take at most {MAX_RANKS}")
    here = ranks_of_a_machine(device)
    machines = len({rank // here for rank in ranks}) if here else 1
    if machines > 1:
        raise LeftAlone(
            f"its group spans {machines} machines of {here} ranks (by LOCAL_WORLD_SIZE, or GPUs "
            "in sight)"
        )
    return len(ranks)


def ranks_of_a_machine(device: torch.device) -> int | None:
    """Consecutive ranks on one machine: what torchrun says, else as many as there are GPUs; None if
    nothing tells.
    """
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    if said.isdecimal() and int(said):
        return int(said)
    return torch.cuda.device_count() if device.type == "cuda" else None


def choose(operator: Operator, product: Product, rows: int, ranks: int) -> str:
    """Return why ``operator`` is the faster way to compute this product.

    It must have been measured: ``impl="auto"`` of a call runs the kernel where nothing was, but
    nobody has asked for this one.

    Args:
        rows: M: of an all-gather, all ranks'; of a batch, all its products'.

    Raises:
        LeftAlone: The pair is faster, or nothing was measured.
    """
    sizes = dict(zip(operator.sizes, (rows, product.columns, product.inner), strict=True))
    choice = operator.choose(**sizes, dtype=product.dtype, world_size=ranks, device=product.device)
    if not choice.measured and product.device.type == "cuda":
        raise LeftAlone(f"nothing was measured on this GPU near the sizes of {operator.name}")
    if _is_pair(operator, choice.impl):
        raise LeftAlone(f"{operator.name} is not faster: {choice.reason}")
    refusal = operator.implementation(choice.impl).refusal(_terms(product, rows, ranks))
    if refusal is not None and _is_pair(operator, choice.fallback):
        raise LeftAlone(
            f"{operator.name} would be faster by impl={choice.impl!r}, which must have {refusal}"
        )
    return str(choice.reason)


def _is_pair(operator: Operator, impl: str) -> bool:
    """Return whether an implementation is what the graph runs anyway."""
    return impl == "unfused" or operator.implementation(impl).is_stock


def _terms(product: Product, rows: int, ranks: int) -> Terms:
    """Return the terms of the operator's call; its result has the operands' dtype."""
    return Terms(
        has_bias=product.bias is not None,
        converts=False,
        is_even=rows % ranks == 0,
        rows=rows,
        device_type=product.device.type,
        dtype=product.dtype,
        result_bytes=rows * product.columns * product.dtype.itemsize,
    )


def are_small(products: list[Product], rows: int) -> bool:
    """Whether operands are small beside the products' sum.

    Putting them side by side moves them twice; a pair writes each product, and reads all for a sum
    that it writes.
    """
    columns, inner = products[0].columns, sum(product.inner for product in products)
    return 2 * inner * (rows + columns) <= (len(products) + 1) * rows * columns


def choose_sum(
    operator: Operator, products: list[Product], rows: int, ranks: int
) -> tuple[bool, str]:
    """Whether a sum of products is one product, operands side by side, and its parts are not added
    up; why ``operator`` is faster.

    Args:
        rows: M; of batches, all rows.

    Raises:
        LeftAlone: neither is faster for one product of all their K, or nothing was measured.
    """
    first, inner = products[0], sum(product.inner for product in products)
    sizes = {"rows": rows, "columns": first.columns, "inner": inner}
    choice = operator.choose(**sizes, dtype=first.dtype, world_size=ranks, device=first.device)
    batches = isinstance(operator, BatchOperator)
    side_by_side = not batches and choice.impl == "fused" and are_small(products, rows)
    # A batch has no operands to lay side by side, so chunks need only be faster than the pair.
    in_parts = bool(operator.sum_name) and (
        first.device.type == "cpu"
        or ("chunked" in choice.faster if batches else choice.impl == "chunked")
    )
    if first.device.type == "cuda" and not choice.measured:
        raise LeftAlone(
            f"nothing was measured on this GPU near the sizes of {operator.name}, of a sum of products"
        )
    if choice.impl == "fused" and not (side_by_side or in_parts or batches):
        raise LeftAlone(
            "it is a sum of products whose operands are too large to be put side by side"
        )
    if not (side_by_side or in_parts):
        raise LeftAlone(
            f"it is a sum of products, and {operator.name} of them is not faster: {choice.reason}"
        )
    return (
        side_by_side,
        (
            f"a sum of {len(products)} products, "
            f"{'side by side' if side_by_side else 'in parts'}: {choice.reason}"
        ),
    )


def all_reduce_operator(rows: int, rows_contiguous: bool) -> Operator:
    """Return the operator of a product and an all-reduce: for few tokens the one that reads the
    weight fastest.
    """
    few = rows < FEW_TOKENS and rows_contiguous
    return operator_matching("gemv" if few else "gemm", "all_reduce")


def overload(name: str) -> Any:
    """Return ``torch.ops.interlace.<name>`` as it stands in a graph."""
    return getattr(torch.ops.interlace, name).default
