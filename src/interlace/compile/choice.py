"""The choice between a fused operator and the unfused pair, by the times that are known."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._guards import TracingContext
from torch.utils._sympy.symbol import SymT, symbol_is_type

from interlace.comm import process_group_named
from interlace.comm.groups.group import known_nodes
from interlace.comm.host.common_profile import settle_network, settle_profile
from interlace.comm.host.nodes import declared_ranks_per_node
from interlace.comm.runtime.interpreter import interpreting
from interlace.compile.findings import LeftAlone
from interlace.compile.producers import Product
from interlace.errors import GroupError
from interlace.gemm import invariance
from interlace.gemm.between_nodes import times_between_nodes
from interlace.gemm.choice import MAX_RANKS
from interlace.gemm.terms import Terms
from interlace.registry import Operator

_GPUS = Path("/proc/driver/nvidia/gpus")
"""Folder with an entry for each GPU of the machine, or of its container."""


_PRODUCTS = ("mm", "addmm", "bmm", "matmul", "linear")


def require_runnable(device: torch.device) -> None:
    """Raise :class:`LeftAlone` if kernels cannot run on a device in this process, or must not.

    Serving programs that promise a row's bits in every batch, vLLM, SGLang and torchtitan among
    them, put products of their own in the place of PyTorch's: a kernel for ``aten::mm``. Another
    product would break that promise.
    """
    for name in replaced_products(device.type):
        raise LeftAlone(f"the program has a product of its own in the place of aten::{name}")
    if device.type not in ("cuda", "cpu"):
        raise LeftAlone(f"operators run on cuda and cpu; it is on {device.type}")
    if device.type == "cpu" and not interpreting():
        raise LeftAlone(
            "on the CPU operators need Triton's interpreter; TRITON_INTERPRET is not set"
        )


def replaced_products(device_type: str) -> list[str]:
    """Return the products of PyTorch's in whose place the program has put products of its own."""
    # The kernels that programs have registered in Python, as torch.library keeps them.
    return [name for name, key in _keys_of_products(device_type) if key in torch.library._impls]


@functools.cache
def _keys_of_products(device_type: str) -> tuple[tuple[str, str], ...]:
    """Return PyTorch's products, each with the key of a kernel that a program puts in its place."""
    return tuple((name, f"aten/{name}/{device_type.upper()}") for name in _PRODUCTS)


def require_common_profile(device: torch.device, nodes: int = 1) -> None:
    """Decide by the machine profile that all ranks of the program go by. Nobody waits.

    Ranks compile at any time: one of them may do so again when its peers do not.

    Args:
        device: The device of a product.
        nodes: Number of nodes between which the decision is.

    Raises:
        LeftAlone: Ranks cannot agree, as the program's store cannot be reached.
    """
    if device.type != "cuda":
        return
    try:
        settle_profile(device)
        if nodes > 1:
            settle_network(device)
    except RuntimeError as error:  # whatever kind of store it is
        raise LeftAlone(
            f"ranks cannot agree on a machine profile without the program's store: {error}"
        ) from error


def usable_ranks(group_name: str, device: torch.device) -> int:
    """Return the number of ranks of a group on which operators can run. Nothing is sent.

    Raises:
        LeftAlone: Operators cannot run on this group or on this device.
    """
    require_runnable(device)
    require_common_profile(device)
    try:
        group = process_group_named(group_name)
        ranks = dist.get_process_group_ranks(group)
    except (GroupError, LookupError, RuntimeError, ValueError) as error:
        raise LeftAlone(f"its group {group_name!r} is not known in this process") from error
    if len(ranks) == 1:
        raise LeftAlone("its group has one rank, which has nothing to send")
    if group_name in uneven_groups():
        raise LeftAlone("a tensor is sharded unevenly over its group, and shapes differ by rank")
    if len(ranks) > MAX_RANKS and nodes_of(group_name, device) == 1:
        raise LeftAlone(f"its group has {len(ranks)} ranks; operators take at most {MAX_RANKS}")
    return len(ranks)


def uneven_groups() -> list[str]:
    """Return the names of the process groups over which a DTensor of the program that is being
    compiled is sharded unevenly. It is the same list on every rank, and nothing is sent.

    A graph holds the shapes of this rank alone: ranks that decided by them would decide
    differently.
    """
    context = TracingContext.try_get()
    # Without a DTensor in the process there is no need to import what defines it.
    if context is None or not (dist.is_available() and dist.is_initialized()):
        return []
    from torch.distributed.tensor import DTensor, Shard

    names = set()
    for tensor in list(context.tensor_to_context.keys()):
        if not isinstance(tensor, DTensor):
            continue
        mesh = tensor.device_mesh
        for dimension, size in enumerate(tensor.shape):
            over = [
                number
                for number, placement in enumerate(tensor.placements)
                if isinstance(placement, Shard) and placement.dim % tensor.dim() == dimension
            ]
            if int(size) % math.prod(map(mesh.size, over)):
                names |= {mesh.get_group(number).group_name for number in over}
    return sorted(names)


def traced_sizes() -> list[tuple[str, str]]:
    """Return the sizes of the graph that is being compiled that change from call to call, each with
    the value that it was traced with.

    The pass decides by these values, and Inductor does not tell graphs apart by them.
    """
    context = TracingContext.try_get()
    shapes = context.fake_mode.shape_env if context is not None and context.fake_mode else None
    known = {} if shapes is None else shapes.backed_var_to_val
    return sorted(
        (str(symbol), str(number))
        for symbol, number in known.items()
        if symbol_is_type(symbol, SymT.SIZE)
    )


def nodes_of(group_name: str, device: torch.device) -> int:
    """Return the number of nodes that the ranks of a usable group are on. Nothing is sent."""
    group = process_group_named(group_name)
    # A group that has been used knows its nodes, which may be torchrun agents of one machine.
    known = known_nodes(group)
    if known is not None:
        return known
    ranks_per_node = ranks_of_a_node(device)
    ranks = dist.get_process_group_ranks(group)
    return len({rank // ranks_per_node for rank in ranks}) if ranks_per_node else 1


def ranks_of_a_node(device: torch.device) -> int | None:
    """Return the number of consecutive ranks on one node, or None if it is unknown.

    ``INTERLACE_NODES`` decides, then ``LOCAL_WORLD_SIZE``, which torchrun sets, then the step of
    Slurm whose tasks the ranks are; without them, the number of the machine's GPUs, of which a rank
    may see one only.
    """
    if (ranks := declared_ranks_per_node()) is not None or device.type != "cuda":
        return ranks
    gpus = sum(1 for _ in _GPUS.iterdir()) if _GPUS.is_dir() else 0
    return max(gpus, torch.cuda.device_count())


def choose_in_group(
    operator: Operator,
    product: Product,
    rows: int,
    ranks: int,
    group_name: str,
    out_dtype: torch.dtype | None = None,
) -> str:
    """Return the reason of :func:`choose` for the nodes that a usable group's ranks are on."""
    nodes = nodes_of(group_name, product.device)
    return choose(operator, product, rows, ranks, nodes, out_dtype)


def choose(
    operator: Operator,
    product: Product,
    rows: int,
    ranks: int,
    nodes: int = 1,
    out_dtype: torch.dtype | None = None,
) -> str:
    """Return the reason why ``operator`` is the faster way to compute this product.

    Args:
        rows: M. For an all-gather, the rows of all ranks.
        nodes: Number of nodes that the ranks are on.
        out_dtype: The dtype of the result, if it is not the product's.

    Raises:
        LeftAlone: The pair is faster, or nothing was measured. Where calls must be batch-invariant,
            the operator has no implementation that is, or it refuses these operands.
    """
    converts = {} if out_dtype in (None, product.dtype) else {"out_dtype": out_dtype}
    if nodes > 1:
        if product.x_scale is not None:
            raise LeftAlone(f"{operator.name} multiplies float8 within a node")
        if converts:
            raise LeftAlone(
                f"the product is cast to {out_dtype} before the sum, which {operator.name} does "
                "within a node"
            )
        return _choose_between_nodes(operator, product, rows, ranks, nodes)
    terms = dataclasses.replace(_terms(product, rows, ranks), converts=bool(converts))
    if invariance.is_enabled():
        return _choose_invariant(operator, terms)
    sizes = dict(zip(operator.sizes, (rows, product.columns, product.inner), strict=True))
    call = {
        "dtype": product.operand_dtype, "world_size": ranks, "device": product.device, **converts,
    }  # fmt: skip
    if product.has_block_scales:
        call["has_block_scales"] = True
    choice = operator.choose(**sizes, **call, w_along_k=product.w_along_k)
    # ``impl="auto"`` of an explicit call runs the fused kernel where no time is known. The pass
    # must not: the user has not asked for the operator, so it has to be known to be faster.
    if not choice.is_known and product.device.type == "cuda":
        raise LeftAlone(f"nothing is known on this GPU of the sizes of {operator.name}")
    # What runs is the first implementation that does not refuse these operands. If that is a pair,
    # the operator would only add overhead.
    name, unmet = choice.accepted(operator, terms)
    is_faster = name in choice.faster or product.device.type == "cpu"
    if is_faster and not operator.is_pair(name):
        if product.device.type != "cpu":
            return str(choice.reason)
        # The sizes are those that `interlace explain` takes for the times on a GPU.
        return f"{choice.reason}: {rows}x{product.columns}x{product.inner} -n {ranks}"
    if unmet:
        refusals = (
            f"impl={refused!r}, which must have {lacks}" for refused, lacks in unmet.items()
        )
        raise LeftAlone(f"{operator.name} would be faster by {' or '.join(refusals)}")
    result = f" with a result of {out_dtype}, to which the product is cast" if converts else ""
    raise LeftAlone(f"{operator.name} is not faster{result}: {choice.reason}")


def _choose_between_nodes(
    operator: Operator, product: Product, rows: int, ranks: int, nodes: int
) -> str:
    """Return the reason why ``operator`` takes less time than the pair between nodes.

    Raises:
        LeftAlone: No network was measured between them, or the pair is faster over it; or calls
            must be batch-invariant.
    """
    if invariance.is_enabled():
        raise LeftAlone(f"{operator.name} is not batch-invariant between {nodes} nodes")
    require_common_profile(product.device, nodes)
    sizes = {"rows": rows, "columns": product.columns, "inner": product.inner}
    call = {"dtype": product.dtype, "world_size": ranks, "device": product.device}
    node_of_rank = tuple(rank * nodes // ranks for rank in range(ranks))
    terms = dataclasses.replace(_terms(product, rows, ranks), node_of_rank=node_of_rank)
    choice = operator.choose(**dict(zip(operator.sizes, sizes.values(), strict=True)), **call)
    times = times_between_nodes(operator.name, nodes, **sizes, **call)
    choice = choice.between(operator, nodes, times)
    name, _ = choice.accepted(operator, terms)
    if operator.is_pair(name):
        raise LeftAlone(f"{operator.name} is not faster between {nodes} nodes: {choice.reason}")
    return str(choice.reason)


def _choose_invariant(operator: Operator, terms: Terms) -> str:
    """Return the reason why ``operator`` takes the pair's place where calls must be invariant.

    Nothing is asked about times, which depend on the number of rows.

    Raises:
        LeftAlone: The operator has no batch-invariant implementation, or it refuses these operands.
    """
    implementations = invariance.invariant_implementations(operator)
    if not implementations:
        raise LeftAlone(f"{operator.name} has no batch-invariant implementation")
    refusal = implementations[0].refusal(terms)
    if refusal is not None:
        raise LeftAlone(f"{operator.name} would be batch-invariant, but must have {refusal}")
    return "calls must be batch-invariant"


def _terms(product: Product, rows: int, ranks: int) -> Terms:
    """Return the terms of the operator's call if its result has the operands' dtype."""
    dtype, device_type = product.operand_dtype, product.device.type
    terms = Terms.of_sizes(rows, product.columns, dtype, device_type, ranks)
    return dataclasses.replace(terms, has_bias=product.bias is not None, is_even=rows % ranks == 0)


def are_small(products: list[Product], rows: int) -> bool:
    """Return whether the operands of a sum of products are small compared with the sum."""
    # Concatenating the operands reads and writes each of them once. The pair writes every product,
    # reads all of them again, and writes their sum. Whichever moves fewer elements is cheaper.
    columns, inner = products[0].columns, sum(product.inner for product in products)
    return 2 * inner * (rows + columns) <= (len(products) + 1) * rows * columns


def choose_sum(
    operator: Operator,
    products: list[Product],
    rows: int,
    ranks: int,
    out_dtype: torch.dtype | None = None,
) -> tuple[bool, str]:
    """Return whether to concatenate the operands of a sum of products, and why that is faster.

    Concatenated operands, x and w side by side along K, make the sum a single product. The
    alternative keeps the products apart and adds them up in parts, rank by rank.

    Args:
        rows: M.
        out_dtype: The dtype of the result, if it is not the products'. Then operands must be
            concatenated.

    Raises:
        LeftAlone: Neither way is faster than the pair for a product of the total K, or nothing was
            measured; or calls must be batch-invariant.
    """
    if invariance.is_enabled():
        raise LeftAlone(f"it is a sum of products, of which {operator.name} is not batch-invariant")
    first, inner = products[0], sum(product.inner for product in products)
    sizes = {"rows": rows, "columns": first.columns, "inner": inner}
    converts = {} if out_dtype in (None, first.dtype) else {"out_dtype": out_dtype}
    call = {"dtype": first.dtype, "world_size": ranks, "device": first.device, **converts}
    choice = operator.choose(**sizes, **call)
    one_product = not (choice.impl == "chunked" or operator.is_pair(choice.impl))
    side_by_side = one_product and are_small(products, rows)
    # Where operands are too large to be copied, chunks need only be faster than the pair.
    in_parts = bool(operator.sum_name and not converts) and (
        first.device.type == "cpu" or "chunked" in choice.faster
    )
    if first.device.type == "cuda" and not choice.is_known:
        raise LeftAlone(
            f"nothing is known on this GPU of the sizes of {operator.name}, of a sum of products"
        )
    if one_product and not (side_by_side or in_parts):
        cast = f", and is cast to {out_dtype}, which products in parts are not" if converts else ""
        raise LeftAlone(
            f"it is a sum of products whose operands are too large to be put side by side{cast}"
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


def overload(name: str) -> Any:
    """Return the overload of ``torch.ops.interlace.<name>`` that calls in a graph refer to."""
    return getattr(torch.ops.interlace, name).default
