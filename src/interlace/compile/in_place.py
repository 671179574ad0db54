"""Rows that peers fetch, written by Inductor's kernels to where peers can reach them.

Rows in symmetric memory need no staging before an ``all_gather_gemm``. What comes before a gather
in a block is a norm or another chain of calls that Inductor compiles; here its last kernel is made
to write the rows to the group's own memory. A rank's rows are then written once instead of twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from interlace.comm import group_named
from interlace.comm.groups.registration import OPERATOR_TAGS, register
from interlace.compile.choice import nodes_of, overload, usable_ranks
from interlace.compile.findings import LeftAlone
from interlace.compile.graph import VIEWS, Writer, argument, is_static, value
from interlace.gemm import invariance
from interlace.registry import operator_matching

_ROWS, _MEMORY = "rows_for_peers", "memory_for_peers"

_ORDERED_ON_CPUS = "2.13"
"""PyTorch's version since which its code for CPUs waits for memory that a kernel only writes: when
2.11 fuses such a kernel with others there, it forgets what the kernel must come after.
"""

_library = torch.library.Library("interlace", "FRAGMENT")
_library.define(f"{_ROWS}(Tensor x, str group_name, int slot) -> Tensor", tags=OPERATOR_TAGS)
_library.define(
    f"{_MEMORY}(int[] shape, ScalarType dtype, Device device, str group_name, int slot) -> Tensor",
    tags=OPERATOR_TAGS,
)


def place_rows(graph: Graph) -> None:
    """Let Inductor write the rows of a graph's gathers to symmetric memory, where peers fetch them.

    Each gather gets a slot of that memory. Two share one where the later one's rows are computed
    from what the earlier one has brought: then peers have fetched those when it is written again.

    Args:
        graph: A graph of fused operators, in the form that Inductor takes; changed in place.
    """
    gathers = graph.find_nodes(
        op="call_function", target=overload(operator_matching("all_gather", "gemm").name)
    )
    chosen = [node for node in gathers if _is_computed(node.args[0]) and _reads_in_place(node)]
    before = _gathers_before(graph, chosen)
    last_of_slot: list[int] = []
    for number, node in enumerate(chosen):
        x = node.args[0]
        assert isinstance(x, Node)
        slot = next(
            (slot for slot, last in enumerate(last_of_slot) if before[x] >> last & 1),
            len(last_of_slot),
        )
        last_of_slot[slot : slot + 1] = [number]
        rows = Writer(node, node).call(overload(_ROWS), x, argument(node, "group_name"), slot)
        node.update_arg(0, rows)
    if chosen:
        _register_lowering()


def _is_computed(x: Any) -> bool:
    """Return whether a kernel of Inductor's computes x, element by element at its end."""
    while isinstance(x, Node) and x.target in VIEWS:
        x = x.args[0]
    return isinstance(x, Node) and torch.Tag.pointwise in getattr(x.target, "tags", ())


def _reads_in_place(node: Node) -> bool:
    """Return whether peers will fetch the rows of a gather from where they lie."""
    operator = operator_matching("all_gather", "gemm")
    group_name, impl = argument(node, "group_name"), argument(node, "impl")
    try:
        x, w = value(node.args[0]), value(node.args[1])  # type: ignore[arg-type]
        ranks = usable_ranks(group_name, x.device)
    except LeftAlone:
        return False
    if x.device.type == "cpu" and torch.__version__ < _ORDERED_ON_CPUS:
        return False
    sizes = (*x.shape, *w.shape)
    is_on_one_node = nodes_of(group_name, x.device) == 1
    if not is_on_one_node or not is_static(*sizes) or invariance.is_enabled():
        return False
    if argument(node, "splits") is not None or argument(node, "x_scale") is not None:
        return False
    if impl in operator.choosers:
        call = {"dtype": x.dtype, "world_size": ranks, "device": x.device}
        numbers = (ranks * x.shape[0], w.shape[0], x.shape[1])
        impl = operator.choose(**dict(zip(operator.sizes, numbers, strict=True)), **call).impl
    return bool(operator.implementation(impl).reads_in_place)


def _gathers_before(graph: Graph, gathers: Sequence[Node]) -> dict[Node, int]:
    """Return for each node the gathers that it is computed from: a bit for each, in a number."""
    number = {node: index for index, node in enumerate(gathers)}
    before: dict[Node, int] = {}
    for node in graph.nodes:
        bits = 1 << number[node] if node in number else 0
        for source in node.all_input_nodes:
            bits |= before[source]
        before[node] = bits
    return before


def _memory(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, group_name: str, slot: int
) -> torch.Tensor:
    """Return ``[*shape]`` of a slot's symmetric memory, or of ordinary memory beyond the limit."""
    group = group_named(group_name, device)
    with group.running():  # after the group's last call, on whatever stream that was
        rows = group.memory.rows_for_peers(slot, shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device) if rows is None else rows


def _rows(x: torch.Tensor, group_name: str, slot: int) -> torch.Tensor:
    """Copy x to a slot's memory: what runs where Inductor does not compile the graph."""
    return _memory(x.shape, x.dtype, x.device, group_name, slot).copy_(x)


def _fake_memory(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, group_name: str, slot: int
) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _fake_rows(x: torch.Tensor, group_name: str, slot: int) -> torch.Tensor:
    return x.new_empty(x.shape)


register(_library, _ROWS, _rows, _fake_rows)
# Without a tensor among its arguments the dispatcher has no device to go by.
_library.impl(_MEMORY, _memory, "BackendSelect")
torch.library.register_fake(f"interlace::{_MEMORY}", _fake_memory, lib=_library)


def _register_lowering() -> None:
    """Tell Inductor, once, to compute x of ``rows_for_peers`` in the memory that it is to go to."""
    from torch._inductor import ir
    from torch._inductor.lowering import lowerings, register_lowering
    from torch._inductor.virtualized import V

    if overload(_ROWS) in lowerings:
        return

    @register_lowering(overload(_ROWS), type_promotion_kind=None)
    def lower(x: Any, group_name: str, slot: int) -> Any:
        place = x.get_size(), x.get_dtype(), x.get_device(), group_name, slot
        memory = ir.TensorBox.create(ir.FallbackKernel.create(overload(_MEMORY), *place))
        # The next call writes it, too, so it must not become the memory of another tensor.
        V.graph.never_reuse_buffers.add(memory.get_name())
        ir.MutationLayoutSHOULDREMOVE.realize_into(x, memory)
        return memory
