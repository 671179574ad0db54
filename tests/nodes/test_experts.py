"""Layers of experts between nodes in slices: results, bytes by the costs, refusals, a late rank."""

import dataclasses
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.costs.gemm import STAMP_BYTES
from interlace.costs.mixture_of_experts import exchanges_between_nodes
from interlace.costs.network import NetworkRates
from interlace.gemm.implementations import network
from interlace.operators.mixture_of_experts import chunked
from tests.errors import error_of
from tests.nodes.groups import (
    call_without_one,
    check_late,
    check_traffic,
    measured_network,
    process_group_of,
)
from tests.operators.mixture_of_experts.calls import (
    Call,
    check_all,
    forward,
    leaves_of,
    run_one,
)

SHAPES = [(4, (0, 0, 1, 1)), (4, (0, 1, 0, 1)), (2, (0, 1))]
GPT_OSS = interlace.ExpertActivation("silu", alpha=1.702, limit=7.0, up_offset=1.0)


def _calls(ranks):
    """Numbers of tokens, and on two ranks the forms of experts, too."""
    call = Call(ranks, hidden=24, ffn=16, impl="chunked", config=None)
    numbers = [
        call,
        dataclasses.replace(call, tokens=33, dtype="bfloat16", local=3, top_k=3, routing="few"),
        dataclasses.replace(call, tokens=1),
        dataclasses.replace(call, tokens=0),
    ]
    if ranks > 2:
        return numbers
    return [
        *numbers,
        dataclasses.replace(call, routing="holes", halves=True, along_k=False, biases=True),
        dataclasses.replace(call, routing="one", top_k=1, activation=GPT_OSS, biases=True),
        dataclasses.replace(call, activation=interlace.ExpertActivation("gelu"), gates=1),
    ]


def _results(calls, nodes, slice_bytes, trains):
    with (
        mock.patch.object(network, "SLICE_BYTES", slice_bytes),
        mock.patch.object(chunked, "_MOST_UNMEASURED", 8),
        process_group_of(nodes) as process_group,
    ):
        traffic = interlace.group_of(process_group).traffic
        results = []
        for call in calls:
            traffic.reset()
            y = run_one(call, process_group, backward=trains)
            results.append((y, dict(traffic.bytes_to), traffic.messages))
        return results


# A backward pass has the forward pass's results, too; without one nothing is kept for it.
_WITH_GRADIENTS = [
    (*SHAPES[0], 250, True),
    (*SHAPES[1], 1 << 20, True),
    (*SHAPES[2], 1 << 20, True),
    (*SHAPES[2], 250, True),
]
_WITHOUT = [(*SHAPES[1], 250, False), (*SHAPES[2], 1 << 20, False), (*SHAPES[2], 250, False)]


@pytest.mark.parametrize(
    ("world_size", "nodes", "slice_bytes", "trains"), [*_WITH_GRADIENTS, *_WITHOUT]
)
def test_results_and_traffic(ranks, world_size, nodes, slice_bytes, trains):
    calls = _calls(world_size)
    calls += calls[:2]  # which find what the first calls have left
    outcomes = ranks(world_size).run(_results, calls, nodes, slice_bytes, trains)
    check_all(calls, [[y for y, *_ in outcome] for outcome in outcomes])
    for rank, outcome in enumerate(outcomes):
        for call, ((y, *_), bytes_to, messages) in zip(calls, outcome, strict=True):
            if not call.tokens:
                assert not messages
                continue
            passes = (False, True) if trains else (False,)
            costs = [
                cost
                for backward in passes
                for cost in exchanges_between_nodes(
                    rank=rank, tokens=call.tokens, hidden=24, top_k=call.top_k,
                    itemsize=y.element_size(), node_of_rank=nodes,
                    slices=max(1, min(8, y.nbytes // slice_bytes)), backward=backward,
                )
            ]  # fmt: skip
            # In each pass every peer of another node gets a stamp.
            stamps = len(passes) * sum(node != nodes[rank] for node in nodes)
            expected = (
                sum(cost.network_bytes for cost in costs) + stamps * STAMP_BYTES,
                sum(cost.network_messages for cost in costs) + stamps,
            )
            check_traffic(bytes_to, messages, rank, nodes, expected)


def _compiled(call):
    """The results of both passes, of a call as it is and compiled."""
    with process_group_of(2) as process_group:
        results = []
        for function in (forward, torch.compile(forward, backend="aot_eager")):
            tensors = call.inputs(dist.get_rank())
            leaves = [leaf.requires_grad_() for leaf in leaves_of(tensors)]
            y = function(call, tensors, process_group)
            results.append((y, *torch.autograd.grad(y, leaves, tensors[5])))
        return [torch.equal(*pair) for pair in zip(*results, strict=True)]


@pytest.mark.parametrize("halves", [False, True])
def test_compiled_calls(ranks, halves):
    """Gradients have the strides that shape inference has said."""
    call = dataclasses.replace(_calls(2)[0], halves=halves, along_k=not halves, biases=True)
    assert ranks(2).run(_compiled, call) == [[True] * 7] * 2


def _refusals(call):
    errors = [error_of(run_one, call, backward=False)[:2]]
    with process_group_of(2) as process_group:
        drops = dataclasses.replace(call, factor=0.5)
        errors.append(error_of(run_one, drops, process_group, backward=False)[:2])
    return errors


def test_what_it_does_not_take_is_refused_on_all_ranks(ranks):
    call = Call(2, hidden=24, ffn=16, impl="chunked", config=None)
    starts = "mixture_of_experts: impl='chunked' must have "
    for within, drops in ranks(2).run(_refusals, call):
        assert within[1].startswith(f"{starts}ranks of several nodes.")
        assert drops[1].startswith(f"{starts}no capacity that could drop tokens.")


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A call as the helpers of this folder take it."""

    call: Call

    def make(self, process_group):
        return forward(self.call, self.call.inputs(dist.get_rank()), process_group).detach()


def test_a_late_rank_is_named(ranks):
    call = _calls(4)[0]
    outcomes = ranks(4).run(call_without_one, _Layer(call), 3)
    check_late(outcomes, 3)
    check_all([call], [[[y]] for *_, y in outcomes])
    assert all(math.isfinite(float(y.sum())) for *_, y in outcomes)


# A message takes 1 us or 20 ms, a collective 10 ms.
QUICK = NetworkRates("wire", "made up", 2, 2, [(1, 1.0), (9999, 1.0)], [(9999, 10_000.0)])
SLOW = dataclasses.replace(QUICK, slice_us=[(1, 20_000.0), (9999, 20_000.0)])


def _by_auto(call, rates, keeps):
    """What explain says of a call by ``auto`` with a measured network, and its slices."""
    x, experts, weights, w_in, w_out, _ = call.inputs(dist.get_rank())
    with (
        process_group_of(2) as process_group,
        measured_network(rates),
        mock.patch.object(chunked, "cut", wraps=chunked.cut) as cut,
    ):
        said = interlace.explain(
            "mixture_of_experts", x.requires_grad_(keeps), experts, weights, w_in, w_out,
            group=process_group,
        )  # fmt: skip
        y = run_one(call, process_group, backward=keeps)
    return said, {arguments[1] for arguments, _ in cut.call_args_list}, y


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("rates", [QUICK, SLOW])
def test_auto_takes_slices_where_a_measured_network_says_so(ranks, rates, keeps):
    call = dataclasses.replace(_calls(2)[0], impl="auto", tokens=8)
    outcomes = ranks(2).run(_by_auto, call, rates, keeps)
    check_all([call], [[y] for *_, y in outcomes])
    for said, slices, _ in outcomes:
        impl = "chunked" if rates is QUICK else "unfused"
        assert f"2 ranks of 2 nodes: {impl}, because predicted between 2 nodes over wire: " in said
        # Sixteen tokens are multiplied in the time of one, so more slices only add to it.
        assert slices == ({1} if rates is QUICK else set())
