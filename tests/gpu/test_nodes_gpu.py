"""Groups of several nodes on GPUs: NCCL carries slices between ranks that share no memory.

The ranks of one machine count as several nodes. NCCL sends through sockets between ranks that share
a GPU, and between GPUs as it does within a machine.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.comm.groups.copies import stream_waits_for
from interlace.comm.launching.leaving_sms import grouped_leaving_sms, leaving_sms
from interlace.comm.runtime.driver import writer
from interlace.errors import PeerTimeoutError
from interlace.operators.embedding_all_to_all import network_choice
from interlace.testing.cases import between_nodes, every_case
from interlace.testing.cases.products import ProductCase
from tests.nodes.groups import process_group_of

pytestmark = pytest.mark.gpu

_MORE_THAN_QUEUES = 40
"""Streams that block all queues to the device, of which there are 8, or at most 32."""

_DEADLINE_S = 3.0
_TIMEOUT_S = 240.0


def _every_case(operator: str, nodes: int) -> tuple[int, list[str]]:
    """Make every call of an operator three times, of which the last ones may be graphs of ours, and
    forward ones from a graph of the program as well; return how many calls there are, and the wrong
    ones.
    """
    implementations = between_nodes([operator])[operator]
    wrong, count = [], 0
    with process_group_of(nodes) as process_group:
        group = interlace.group_of(process_group)
        for case in every_case(dist.get_world_size(), [operator], spans_nodes=True):
            if case.impl not in implementations:
                continue
            prepared = case.prepare(process_group)
            count += 1
            wrong += [case.label for _ in range(3) if any(prepared.check())]
            # A backward pass may update tables, each time.
            if not case.capturable or case.backward:
                continue
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                results = prepared.run()
            for _ in range(2):
                found = torch.zeros(prepared.result_count, dtype=torch.int64, device=group.device)
                graph.replay()
                prepared.count_wrong(results, 0, found)
                group.synchronize()
                wrong += [f"{case.label}, in a graph"] if any(found.tolist()) else []
            graph.reset()  # NCCL keeps a communicator for as long as a graph has its kernels
    return count, wrong


@pytest.mark.parametrize("operator", list(between_nodes()))
def test_every_operator(ranks: Any, world_size: int, operator: str) -> None:
    """Eager and from a graph; two nodes of all ranks."""
    results = ranks(world_size).run(_every_case, operator, 2, timeout_s=_TIMEOUT_S)
    for count, wrong in results:
        assert count
        assert wrong == []


def _with_slices_of_gradients(count: int) -> tuple[int, list[str]]:
    """Make every call of embeddings as if so many slices of gradients were predicted to be best."""
    plan_of = network_choice.plan_of

    def in_slices(call: Any) -> network_choice.NetworkPlan:
        return plan_of(call)._replace(gradient_slices=count)

    with mock.patch.object(network_choice, "plan_of", in_slices):
        return _every_case("embedding_all_to_all", 2)


@pytest.mark.parametrize("count", [2, 3])
def test_slices_of_gradients(ranks: Any, count: int) -> None:
    for cases, wrong in ranks(2).run(_with_slices_of_gradients, count, timeout_s=_TIMEOUT_S):
        assert cases
        assert wrong == []


def _calls_that_come_again(operator: str) -> tuple[int, list[int], int]:
    """Make the same call with other numbers; return how many graphs are kept, the calls that are
    wrong, and what is kept of graphs once the group is as new.
    """
    with process_group_of(2) as process_group:
        group = interlace.group_of(process_group)
        generator = torch.Generator(group.device).manual_seed(group.rank)
        x, w = torch.zeros(2, 1024, 1024, dtype=torch.bfloat16, device=group.device)
        wrong = []
        for number in range(6):
            for operand in (x, w):
                operand.normal_(generator=generator)
            expected = getattr(interlace, operator)(x, w, group=process_group, impl="unfused")
            y = getattr(interlace, operator)(x, w, group=process_group, impl="chunked")
            largest = expected.abs().max()
            wrong += [number] if (y - expected).abs().max() > 0.02 * largest else []
            del y  # the next result has its memory
        kept = len(group.replays)
        interlace.recover(process_group)
        return kept, wrong, len(group.replays)


@pytest.mark.parametrize(
    "operator", ["gemm_all_to_all", "gemm_reduce_scatter", "all_gather_gemm", "gemm_all_reduce"]
)
def test_calls_that_come_again_are_graphs(ranks: Any, world_size: int, operator: str) -> None:
    for kept, wrong, left in ranks(world_size).run(_calls_that_come_again, operator):
        # The first results may lie elsewhere than later ones.
        assert 1 <= kept <= 2
        assert wrong == []
        assert left == 0


def _lookups_that_come_again(scaled: bool) -> tuple[int, list[int], int]:
    """Make the same calls of embeddings with other numbers; return as for products."""
    batch, tables, most = 512, 2, 8
    with process_group_of(2) as process_group:
        group = interlace.group_of(process_group)
        device, generator = group.device, torch.Generator(group.device).manual_seed(group.rank)
        weights = torch.zeros(tables, 1000, 64, dtype=torch.bfloat16, device=device)
        lookups = torch.zeros(tables * batch * most, dtype=torch.int64, device=device)
        factors = torch.zeros(len(lookups), dtype=torch.bfloat16, device=device)
        offsets = torch.zeros(tables * batch + 1, dtype=torch.int64, device=device)
        wrong = []
        for number in range(12):
            # Small whole numbers: sums in any order are equal.
            weights.copy_(torch.randint(-8, 8, weights.shape, generator=generator, device=device))
            lookups.random_(0, 1000, generator=generator)
            factors.copy_(torch.randint(1, 4, factors.shape, generator=generator, device=device))
            lengths = torch.randint(0, most, offsets[1:].shape, generator=generator, device=device)
            offsets[1:] = lengths.cumsum(0)
            count = int(offsets[-1])
            arguments = list(weights), lookups[:count], offsets
            scale = factors[:count] if scaled else None
            expected, y = (
                interlace.embedding_all_to_all(
                    *arguments, per_sample_weights=scale, impl=impl, group=process_group
                )
                for impl in ("unfused", "fused")
            )
            wrong += [number] if not torch.equal(y, expected) else []
            del y  # the next result has its memory
        kept = len(group.replays)
        interlace.recover(process_group)
        return kept, wrong, len(group.replays)


@pytest.mark.parametrize("scaled", [False, True])
def test_lookups_that_come_again_are_graphs(ranks: Any, world_size: int, scaled: bool) -> None:
    for kept, wrong, left in ranks(world_size).run(_lookups_that_come_again, scaled):
        assert 1 <= kept <= 4  # results lie in several buffers in turn
        assert wrong == []
        assert left == 0


def _experts_that_come_again(ranks: int) -> tuple[int, list[float], int]:
    """Call a layer of experts with other tokens; return as for products, with relative errors."""
    tokens, local, top_k, hidden, ffn = 4096, 4, 2, 512, 1024
    with process_group_of(2) as process_group:
        group = interlace.group_of(process_group)
        generator = torch.Generator(group.device).manual_seed(group.rank)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=group.device, dtype=torch.bfloat16)

        w_in = random(local, ffn, 2, hidden) / hidden**0.5
        w_out = random(local, hidden, ffn) / ffn**0.5
        x = random(tokens, hidden)
        weights, experts = random(tokens, ranks * local).float().softmax(-1).topk(top_k)
        errors = []
        for _ in range(6):
            x.normal_(generator=generator)
            order = torch.randperm(tokens, generator=generator, device=group.device)
            experts.copy_(experts[order])
            expected, y = (
                interlace.mixture_of_experts(
                    x, experts, weights, w_in, w_out, impl=impl, group=process_group
                )
                for impl in ("unfused", "chunked")
            )
            difference = (y.float() - expected.float()).norm() / expected.float().norm()
            errors.append(float(difference))
            del y
        kept = len(group.replays)
        interlace.recover(process_group)
        return kept, errors, len(group.replays)


def test_experts_that_come_again_are_graphs(ranks: Any, world_size: int) -> None:
    for kept, errors, left in ranks(world_size).run(_experts_that_come_again, world_size):
        assert 1 <= kept <= 2
        assert max(errors) < 0.01
        assert left == 0


def _recovery_with_a_graph() -> tuple[float, bool]:
    """Recover while the program keeps a graph with slices; return the seconds, and whether a later
    call is wrong.
    """
    with process_group_of(2) as process_group:
        group = interlace.group_of(process_group)
        x, w = torch.ones(2, 1024, 1024, dtype=torch.bfloat16, device=group.device)

        def call() -> torch.Tensor:
            return interlace.gemm_all_to_all(x, w, group=process_group, impl="chunked")

        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
        start = time.monotonic()
        interlace.recover(process_group)
        seconds = time.monotonic() - start
        is_wrong = bool((call() != 1024).any())
        graph.reset()
        return seconds, is_wrong


def test_a_graph_of_the_program_does_not_block_the_recovery(ranks: Any) -> None:
    for seconds, is_wrong in ranks(2).run(_recovery_with_a_graph):
        assert seconds < 30
        assert not is_wrong


def _sms_that_are_left() -> tuple[list[int], int]:
    device = interlace.group_of().device
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    library = ctypes.CDLL(f"libcublas.so.{torch.version.cuda.partition('.')[0]}")
    targets = []

    def note() -> None:
        target = ctypes.c_int()
        assert library.cublasGetSmCountTarget(handle, ctypes.byref(target)) == 0
        targets.append(target.value)

    note()
    with leaving_sms(2, device), grouped_leaving_sms(2, device):
        note()
        assert torch._C._get_sm_carveout_experimental() == 2
    note()
    assert torch._C._get_sm_carveout_experimental() is None
    return targets, torch.cuda.get_device_properties(device).multi_processor_count


def test_products_leave_sms(ranks: Any) -> None:
    targets, sms = ranks(1).run(_sms_that_are_left)[0]
    assert targets == [0, sms - 2, 0]


def _a_late_rank() -> tuple[str, float, bool]:
    """Miss a call on rank 1, while streams that wait for its result block every queue on rank 0.

    The call has come so often that it is a graph.
    """
    case = ProductCase("gemm_all_to_all", "chunked", "bfloat16", False, 1024, 1024, 1024)
    with process_group_of(2) as process_group:
        group = interlace.group_of(process_group)
        prepared = case.prepare(process_group)
        assert not any(any(prepared.check()) for _ in range(4))
        interlace.set_deadline(_DEADLINE_S, process_group)
        said, start = "", time.monotonic()
        if group.rank == 0:
            streams = [torch.cuda.Stream(group.device) for _ in range(_MORE_THAN_QUEUES)]
            sums = torch.zeros(len(streams), device=group.device)
            sums[0].add_(1)  # compiled kernels are loaded now
            torch.cuda.synchronize(group.device)
            try:
                results = prepared.run()
                called = torch.cuda.current_stream().record_event()
                for i, stream in enumerate(streams):
                    stream.wait_event(called)
                    with torch.cuda.stream(stream):
                        sums[i].add_(results[0].flatten()[0])
                group.synchronize()
            except PeerTimeoutError as error:
                said = str(error)
        seconds = time.monotonic() - start
        dist.monitored_barrier(_hosts())
        interlace.set_deadline(60.0, process_group)
        interlace.recover(process_group)
        return said, seconds, any(prepared.check())


def _hosts() -> dist.ProcessGroup:
    """Return a process group in which hosts can wait, whatever their GPUs do."""
    return dist.new_group(backend="gloo")


def test_a_late_rank(ranks: Any) -> None:
    """The deadline holds though every queue to the device is blocked; then both recover."""
    (said, seconds, is_wrong), (_, _, other_is_wrong) = ranks(2).run(_a_late_rank)
    assert "rank 1" in said
    assert seconds < 5 * _DEADLINE_S
    assert not is_wrong
    assert not other_is_wrong


def _blocked() -> tuple[bool, float, list[int]]:
    device = interlace.group_of().device
    words = torch.zeros(2, dtype=torch.int32, device=device)
    streams = [torch.cuda.Stream(device) for _ in range(_MORE_THAN_QUEUES)]
    free = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    for stream in streams:
        stream_waits_for(words.data_ptr(), 1, stream)
    with torch.cuda.stream(free):
        free.record_event()
    time.sleep(0.2)
    was_blocked = not free.query()
    start = time.monotonic()
    with writer(device) as write:
        write(words.data_ptr() + 4, 7)
        write(words.data_ptr(), 1)
    seconds = time.monotonic() - start
    torch.cuda.synchronize(device)
    return was_blocked, seconds, words.tolist()


def test_words_are_written_past_blocked_queues(ranks: Any) -> None:
    for was_blocked, seconds, words in ranks(2).run(_blocked):
        assert was_blocked
        assert seconds < 5
        assert words == [1, 7]
