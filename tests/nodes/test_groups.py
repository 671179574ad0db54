"""Groups of several nodes: who shares memory, what a stray store does, what every operator runs."""

import ctypes
import dataclasses
import itertools
import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.comm.groups.carrier import run_within
from interlace.comm.host.nodes import numbered
from interlace.gemm.decision import resolve
from interlace.gemm.operator import GemmOperator
from interlace.gemm.terms import Terms
from interlace.registry import operators
from interlace.testing.cases import IMPLEMENTATIONS, every_case
from tests.errors import error_of
from tests.nodes.groups import process_group_of

UNMEASURED = (
    "no network between the 2 nodes was measured, which INTERLACE_MEASURE_MACHINE=1 or "
    "`interlace tune machine` on them does"
)

SHAPES = [(4, 2), (2, 2)]
"""Ranks, and the nodes that they are on: 2 x 2 and 2 x 1."""


def _members(nodes):
    with process_group_of(nodes) as process_group:
        group = interlace.group_of(process_group)
        members = group.members
        return (
            group.spans_nodes,
            group.nodes,
            members.node_of_rank,
            members.node,
            members.local_ranks,
            members.remote_ranks,
        )


def test_a_group_knows_its_nodes(ranks):
    assert ranks(4).run(_members, 2) == [
        (True, 2, (0, 0, 1, 1), 0, (0, 1), (2, 3)),
        (True, 2, (0, 0, 1, 1), 0, (0, 1), (2, 3)),
        (True, 2, (0, 0, 1, 1), 1, (2, 3), (0, 1)),
        (True, 2, (0, 0, 1, 1), 1, (2, 3), (0, 1)),
    ]


def test_one_node_is_a_group_as_ever(ranks):
    assert ranks(2).run(_members, 1) == [(False, 1, (), 0, (0, 1), ())] * 2


def _groups_of_one_node():
    """The ranks of each node form a group that shares memory, within a program of two nodes."""
    with process_group_of(2):
        os.environ["INTERLACE_NODES"] = "2"
        try:
            halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            mine = halves[dist.get_rank() // 2]
            sym = interlace.empty_symmetric((3,), dtype=torch.float32, group=mine)
        finally:
            del os.environ["INTERLACE_NODES"]
        sym.peers[1 - sym.group.rank].fill_(float(dist.get_rank()))
        dist.barrier()
        return sym.group.spans_nodes, sym.local.tolist()


def test_a_group_within_a_node_shares_memory(ranks):
    assert ranks(4).run(_groups_of_one_node) == [(False, [peer * 1.0] * 3) for peer in (1, 0, 3, 2)]


def test_nodes_are_numbered_in_the_order_of_ranks():
    assert numbered(["a", "a", "a"]) == ()
    assert numbered(["b", "a", "b", "c"]) == (0, 1, 0, 2)


def _launchers(environment):
    from interlace.comm.host.nodes import _by_launcher

    return _by_launcher(environment)


@pytest.mark.parametrize(
    ("environment", "node"),
    [
        ({}, ""),
        ({"TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "3", "SLURM_NODEID": "7"}, "3"),
        ({"SLURM_PROCID": "9", "SLURM_NODEID": "7"}, "7"),
        ({"GROUP_RANK": "3"}, ""),
    ],
)
def test_launchers_say_which_node_a_process_is_on(environment, node):
    assert _launchers(environment) == node


def _wrong_number():
    os.environ["INTERLACE_NODES"] = "3"
    try:
        return error_of(interlace.group_of, dist.new_group())[:2]
    finally:
        del os.environ["INTERLACE_NODES"]


def test_a_number_of_nodes_must_divide_the_ranks(ranks):
    message = "INTERLACE_NODES must be a number that divides the 4 ranks; got 3."
    assert ranks(4).run(_wrong_number) == [("ArgumentError", message)] * 4


def _store_to(peer):
    """Store to a rank's memory in a process of its own; the signal by which that ends, if any."""
    with process_group_of(2) as process_group:
        group = interlace.group_of(process_group)
        block = group.allocate(4096)
        address = block.address + (group.rank + peer) % 4 * block.stride
        child = os.fork()
        if not child:
            ctypes.c_int32.from_address(address).value = 1
            os._exit(0)
        _, status = os.waitpid(child, 0)
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def test_a_stray_store_to_another_node_faults(ranks):
    assert ranks(4).run(_store_to, 2) == [signal.SIGSEGV] * 4
    assert ranks(4).run(_store_to, 0) == [0] * 4


def _shared_memory():
    with process_group_of(2) as process_group:
        calls = {
            "empty_symmetric": lambda: interlace.empty_symmetric(
                (4,), dtype=torch.float32, group=process_group
            ),
            "MappedOutput": lambda: interlace.MappedOutput(
                (4, 4), dtype=torch.float32, group=process_group
            ),
            "TriggeredTransfers": lambda: interlace.TriggeredTransfers(
                (4, 4), dtype=torch.float32, group=process_group
            ),
        }
        return {name: error_of(call)[:2] for name, call in calls.items()}


def test_memory_that_all_ranks_share_is_refused(ranks):
    for errors in ranks(4).run(_shared_memory):
        for name, (kind, message) in errors.items():
            assert kind == "GroupError"
            assert message == (
                f"{name}: ranks of the group must share memory; they are on 2 nodes (0, 0, 1, 1 "
                "by rank). Form a group per node, by torch.distributed.new_group, and give that "
                "one."
            )


# Operators


def _cases(operator, ranks):
    """Cases of an operator's pair, by ``impl="auto"``."""
    implementations = IMPLEMENTATIONS[operator]
    pair = [case for case in every_case(ranks, [operator]) if case.impl == "unfused"]
    some = pair or [case for case in every_case(ranks, [operator]) if case.impl in implementations]
    return [dataclasses.replace(case, impl="auto") for case in some]


def _wrong_elements(operator, nodes):
    with process_group_of(nodes) as process_group:
        cases = _cases(operator, dist.get_world_size())
        assert cases
        return [(case.label, case.prepare(process_group).check()) for case in cases]


@pytest.mark.parametrize(("world_size", "nodes"), SHAPES)
@pytest.mark.parametrize("operator", [*operators(), "gemm_sum_reduce_scatter"])
def test_every_operator_runs_between_nodes(ranks, operator, world_size, nodes):
    """Forward and backward, chosen by ``auto``: the results of one node."""
    for results in ranks(world_size).run(_wrong_elements, operator, nodes):
        for label, wrong in results:
            assert not any(wrong), label


def _refused(operator, impl):
    with process_group_of(2) as process_group:
        case = next(case for case in every_case(2, [operator]) if case.impl.startswith(impl))
        kind, message, _ = error_of(case.prepare(process_group).run)
        advised = re.findall(r"'(\w+)'", message.partition("Take impl=")[2])
        taken = [dataclasses.replace(case, impl=word) for word in advised]
        return kind, message, [error_of(each.prepare(process_group).run) for each in taken]


@pytest.mark.parametrize(
    ("operator", "impl", "able"),
    [
        (
            "gemm_reduce_scatter",
            "fused",
            "'auto', 'chunked' or 'unfused'",
        ),
        (
            "gemm_all_reduce",
            "gemv",
            "'auto', 'chunked' or 'unfused'",
        ),
        ("mixture_of_experts", "fused", "'auto', 'chunked' or 'unfused'"),
        ("mixture_of_experts", "decode", "'auto', 'chunked' or 'unfused'"),
    ],
)
def test_an_implementation_that_needs_shared_memory_is_refused_on_all_ranks(
    ranks, operator, impl, able
):
    message = (
        f"{operator}: impl={impl!r} must have ranks that share memory; they are on 2 nodes. Take "
        f"impl={able}."
    )
    for kind, said, errors in ranks(2).run(_refused, operator, impl):
        assert (kind, said) == ("ArgumentError", message)
        assert errors
        assert not any(errors), "what is advised takes the call"


def _refused_in_the_mode(operator):
    """A batch-invariant call, for which no word of ``impl`` would do."""
    with process_group_of(2) as process_group, interlace.batch_invariant():
        case = next(case for case in every_case(2, [operator]) if case.impl.startswith("fused"))
        return error_of(dataclasses.replace(case, impl="auto").prepare(process_group).run)[:2]


@pytest.mark.parametrize("operator", ["gemm_reduce_scatter", "mixture_of_experts"])
def test_batch_invariant_calls_are_refused_between_nodes(ranks, operator):
    for kind, message in ranks(2).run(_refused_in_the_mode, operator):
        assert kind == "ArgumentError"
        assert "must have ranks that share memory; they are on 2 nodes." in message
        assert message.endswith("Call it outside of interlace.batch_invariant().")


def _calls():
    """Properties of calls around a product, within a node and between two."""
    for device, dtype, bias, converts, even, nodes in itertools.product(
        ("cpu", "cuda"), (torch.bfloat16, torch.float8_e4m3fn), *[(False, True)] * 3,
        ((), (0, 0, 1, 1), (0, 0, 0, 1)),
    ):  # fmt: skip
        terms = Terms.of_sizes(4096, 4096, dtype, device, 4)
        yield dataclasses.replace(
            terms, has_bias=bias, converts=converts, is_even=even, node_of_rank=nodes
        )


@pytest.mark.parametrize(
    "name", [name for name, each in operators().items() if isinstance(each, GemmOperator)]
)
def test_every_refusal_advises_what_takes_the_call(name):
    operator, advised = operators()[name], 0

    def take(impl, nodes, terms):
        operator.require_nodes(impl, nodes, terms)
        resolve(operator, impl, None, terms)

    for terms in _calls():
        nodes = 1 + max(terms.node_of_rank, default=0)
        for implementation in operator.implementations:
            _, message, _ = error_of(take, implementation.name, nodes, terms) or ("", "", {})
            for word in re.findall(r"'(\w+)'", message.partition("Take impl='auto'")[2]):
                assert operator.refusal(word, terms) is None, message
                assert nodes == 1 or operator.spans_nodes(word), message
                advised += 1
    assert advised


def _explained():
    with process_group_of(2) as process_group:
        x, w = torch.randn(4, 16), torch.randn(8, 16)
        return [
            interlace.explain(operator, x, w, group=process_group).partition(", on ")[2]
            for operator in ("gemm_all_reduce", "gemv_all_reduce")
        ]


def test_explain_says_what_runs_between_nodes(ranks):
    for texts in ranks(2).run(_explained):
        for said in texts:
            assert said.startswith("2 ranks of 2 nodes: unfused, because")
            assert said.endswith(f"{UNMEASURED}.")


def test_explain_says_that_embeddings_are_exchanged_as_a_whole():
    """Until slices are predicted to be faster."""
    declaration = operators()["embedding_all_to_all"]
    call = [torch.randn(8, 4)], torch.zeros(16, dtype=torch.int64), torch.arange(17)
    _, within, _ = declaration.explain(*call, world_size=8, nodes=1)
    _, between, reason = declaration.explain(*call, world_size=8, nodes=2)
    assert within.startswith("fused (")
    assert between == "pooled"
    assert reason == UNMEASURED


# Deadlines


def _absent(late):
    with process_group_of(2) as process_group:
        group = interlace.group_of(process_group)
        interlace.set_deadline(3.0, process_group)
        error = None
        if group.rank != late:
            error = error_of(group.exchange, "roll call", None)
        dist.barrier()
        return error


def test_the_error_names_the_node_of_a_rank_that_does_not_come(ranks):
    for rank, error in enumerate(ranks(4).run(_absent, 3)):
        if rank != 3:
            kind, message, fields = error
            assert kind == "PeerTimeoutError"
            assert f"rank {rank} waited 3 s for rank 3 of node 1 (" in message
            assert (fields["peer"], fields["node"]) == (3, 1)


# The launcher


def _seen():
    group = interlace.group_of()
    y = interlace.gemv_all_reduce(torch.ones(8), torch.ones(4, 8))
    return group.members.node_of_rank, y.tolist()


@pytest.mark.usefixtures("quick_launches")
def test_launch_splits_a_machine_into_nodes():
    results = interlace.launch(_seen, 2, backend="cpu", nodes=2)
    assert results == [((0, 1), [16.0] * 4)] * 2
    with pytest.raises(interlace.ArgumentError, match=r"nodes must be a number that divides the 2"):
        interlace.launch(_seen, 2, backend="cpu", nodes=3)


def _compiled_experts():
    """Forward and backward of a compiled call with gradients, and of an eager one."""
    with process_group_of(2) as process_group:
        case = next(case for case in every_case(2, ["mixture_of_experts"]) if case.backward)
        tensors = case.tensors(dist.get_rank(), 2, 0)

        def call(x, w_in):
            return interlace.mixture_of_experts(
                x, tensors["experts"], tensors["weights"], w_in, tensors["w_out"],
                group=process_group,
            )  # fmt: skip

        results = []
        for function in (call, torch.compile(call, backend="aot_eager")):
            x, w_in = (tensors[name].clone().requires_grad_() for name in ("x", "w_in"))
            y = function(x, w_in)
            y.sum().backward()
            results.append((y.detach(), x.grad, w_in.grad))
        return all(map(torch.equal, *results))


def test_experts_compile_between_nodes(ranks):
    assert ranks(2).run(_compiled_experts) == [True] * 2


def test_what_never_connects_is_given_up():
    """NCCL waits in the host's code for a peer that is dead."""
    with pytest.raises(RuntimeError, match=r"^NCCL must be connected within 0\.1 s; "):
        run_within(0.1, lambda: time.sleep(30), "NCCL")
    with pytest.raises(ZeroDivisionError):
        run_within(5, lambda: 1 // 0, "NCCL")
    done = []
    run_within(5, lambda: done.append(threading.current_thread()), "NCCL")
    assert done[0] is not threading.current_thread()
