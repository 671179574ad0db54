"""The pass, which replaces each pair of product and collective in a graph by one operator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

import interlace.operators  # noqa: F401  # registers torch.ops.interlace
from interlace.compile import collectives, foreign, received, sent, siblings
from interlace.compile.collectives import Collective
from interlace.compile.findings import Finding, LeftAlone, module_of, record
from interlace.compile.graph import Writer, are_equal, argument, aten, erase_unused, value
from interlace.registry import operator_matching, operators


def fuse(graph: Graph, *, autotune: bool = True, merge_products: bool = True) -> list[Finding]:
    """Replace each pair of product and collective by a fused operator if it is known to be faster.

    Nothing is computed or sent.

    Args:
        graph: A graph of ATen operators after autograd, forward or backward, as AOTAutograd passes
            it to a compiler. It is changed in place; pairs that are left alone stay unchanged.
        autotune: Whether operators measure their implementations at the first call of a kind that
            is not captured in a CUDA graph (see :func:`interlace.autotune`), where they can.
        merge_products: Whether products of up to 64 rows with the same input become one kernel.

    Returns:
        A finding for every collective of the graph, and for all products that became one kernel.
    """
    direction = (
        "backward"
        if any(node.name.startswith("tangents") for node in graph.find_nodes(op="placeholder"))
        else "forward"
    )
    replace_copies(graph)
    spelled, refused = foreign.spell_out(graph)
    try:
        findings = _fuse_all(graph, direction)
    finally:
        for spelling in spelled:
            spelling.finish()
    findings += [
        Finding(**_description(node, direction), operator=None, reason=reason)
        for node, reason in refused
    ]
    if merge_products:
        findings += siblings.merge(graph, direction)
    if any(finding.operator for finding in findings):
        if autotune:
            _let_measure(graph)
        graph.lint()
    record(findings)
    return findings


def _fuse_all(graph: Graph, direction: str) -> list[Finding]:
    """Try to fuse every collective of ``torch.distributed``, and return a finding for each."""
    # Collectives are described before any is rewritten: later their operands may be gone.
    descriptions = {
        node: _description(node, direction)
        for node in graph.nodes
        if collectives.is_collective(node)
    }
    merged = sent.merge_all_reduces(graph)
    return [
        Finding(
            **description,
            operator=operator_matching("gemm", "all_reduce").name,
            reason=f"added to {merged[node]} before it is reduced",
        )
        if node in merged
        else _consider(node, description)
        for node, description in descriptions.items()
    ]


def _let_measure(graph: Graph) -> None:
    """Let the operators of a graph measure, where they would go by predictions."""
    for node in graph.nodes:
        if getattr(node.target, "namespace", "") != "interlace":
            continue
        declaration = operators().get(str(node.target).split(".")[1])
        # The last two arguments are impl and config.
        if declaration is not None and "measured" in declaration.choosers:
            *arguments, impl, config = node.args
            if impl == "auto":
                node.args = (*arguments, "measured", config)


def replace_copies(graph: Graph) -> None:
    """Replace the copy with which an in-place collective ends, by the collective's result.

    ``dist.all_reduce(y)`` is traced as a collective of y, a wait, and ``copy(y, waited)``, the new
    y. The copy takes of y only its shape, strides and dtype, which the result has as well; but it
    is another use of the product. So is a new tensor that a collective's result is copied to, such
    as ``product.new_empty(shape)``: it is erased together with the copy.

    If the program goes on using the result beside the copy, the copy becomes a clone of the result:
    the program may write to either, and the other must not change.
    """
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        target, source = (argument(node, "self"), argument(node, "src"))
        if not isinstance(source, Node) or source.target is not collectives.WAIT:
            continue
        with contextlib.suppress(LeftAlone):
            layout = value(target)
            if not _has_layout_of(layout, value(source)):
                continue
            result = source
            if not collectives.is_only_use(node, source):
                result = Writer(node, node).call(aten.clone.default, source)
            if not _has_layout_of(layout, value(result)):
                graph.erase_node(result)
                continue
            node.replace_all_uses_with(result)
            graph.erase_node(node)
            if not target.is_impure():
                erase_unused([target])


def _has_layout_of(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    kinds = [(operand.dtype, operand.device) for operand in (tensor, other)]
    layouts = [(*operand.shape, *operand.stride()) for operand in (tensor, other)]
    return kinds[0] == kinds[1] and are_equal(*layouts)


def _description(node: Node, direction: str) -> dict[str, Any]:
    """Return the finding's fields that are known before the rewrite is tried."""
    source = node.all_input_nodes[0] if node.all_input_nodes else node
    shape = getattr(source.meta.get("val"), "shape", ())
    return {
        "graph": direction,
        "collective": str(node.target).split(".")[1],
        "node": node.name,
        "shape": tuple(size if isinstance(size, int) else str(size) for size in shape),
        "module": module_of(node),
    }


def _consider(node: Node, description: dict[str, Any]) -> Finding:
    """Fuse a collective with its product if possible, and return the finding."""
    try:
        collective = collectives.read(node)
        name, reason = _FUSE[collective.target](collective)
    except LeftAlone as refusal:
        return Finding(**description, operator=None, reason=str(refusal))
    return Finding(**description, operator=name, reason=reason)


_FUSE: dict[Any, Callable[[Collective], tuple[str, str]]] = {
    collectives.ALL_REDUCE: sent.all_reduce,
    collectives.REDUCE_SCATTER: sent.reduce_scatter,
    collectives.ALL_TO_ALL: sent.all_to_all,
    collectives.ALL_GATHER: received.all_gather,
}
