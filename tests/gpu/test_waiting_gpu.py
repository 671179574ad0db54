"""Calls do not make the host wait for the GPU, which may have much to do before them: programs that
enqueue ahead of it would lose what they are ahead. Run with ``-m gpu``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.registry import operators
from interlace.testing.cases import IMPLEMENTATIONS, every_case

pytestmark = pytest.mark.gpu

_SLEEP_CYCLES = 800_000_000  # some 0.4 s: other tests may keep the host from a call for a while
_INNER, _COLUMNS = 512, 1024


def _wait(call: Callable[[], object]) -> list[str]:
    """Why the host waits for the GPU in a call, which has much to do before it; in words."""
    torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda._sleep(_SLEEP_CYCLES)
        slept = torch.cuda.Event()
        slept.record()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        has_waited = slept.query()
    torch.cuda.synchronize()
    places = [
        f"{warning.filename}:{warning.lineno}"
        for warning in caught
        if "called a synchronizing" in str(warning.message)
    ]
    return [*places, *(["for what came before the call"] if has_waited else [])]


def _of_repeated_calls(operator: str) -> dict[str, list[str]]:
    waits = {}
    for case in every_case(dist.get_world_size(), [operator]):
        prepared = case.prepare(dist.new_group())
        for _ in range(4):
            prepared.run()
        waits[case.label] = _wait(prepared.run)
    return waits


def _asks(label: str) -> bool:
    """Whether a call cannot do without: stock experts and tables ask how many rows each rank gets
    and each table has, as programs with NCCL do, and PyTorch has sizes of sparse gradients on the
    host.
    """
    operator, impl, *_ = label.split()
    tables = operator == "embedding_all_to_all"
    stock = impl == "unfused:" and (tables or operator == "mixture_of_experts")
    return stock or (tables and ", sparse," in label)


@pytest.mark.parametrize("operator", IMPLEMENTATIONS)
def test_repeated_calls_do_not_wait(ranks: Any, world_size: int, operator: str) -> None:
    for waits in ranks(world_size).run(_of_repeated_calls, operator, timeout_s=300):
        found = {label: wait for label, wait in waits.items() if wait and not _asks(label)}
        assert not found


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def _calls(operator: str, impl: str) -> tuple[Any, Any]:
    """What makes a call with a number of rows, given them and a group, and what makes the rows."""
    ranks = dist.get_world_size()
    if operator == "mixture_of_experts":
        w_in, w_out = _random(4, 256, 2, 256), _random(4, 256, 256)

        def experts(rows: tuple[torch.Tensor, ...], group: Any) -> Any:
            return interlace.mixture_of_experts(*rows, w_in, w_out, impl=impl, group=group)

        def tokens(count: int) -> tuple[torch.Tensor, ...]:
            weights, chosen = torch.rand(count, 4 * ranks, device="cuda").topk(2)
            return _random(count, 256), chosen, weights

        return experts, tokens
    if operator == "embedding_all_to_all":
        tables = [torch.randn(1000, 64, device="cuda") for _ in range(3)]

        def embedding(rows: tuple[torch.Tensor, ...], group: Any) -> Any:
            return interlace.embedding_all_to_all(tables, *rows, impl=impl, group=group)

        def lookups(count: int) -> tuple[torch.Tensor, ...]:
            indices = torch.randint(0, 1000, (3 * count,), device="cuda")
            return indices, torch.arange(3 * count + 1, device="cuda")

        return embedding, lookups
    w = _random(_COLUMNS, _INNER)
    function = getattr(interlace, operator)
    return (lambda rows, group: function(*rows, w, impl=impl, group=group)), (
        lambda count: (_random(count, _INNER),)
    )


_MAPPED = {
    ("gemm_all_reduce", "remote_stores"),
    ("gemm_all_reduce", "chunked"),
    ("gemm_all_to_all", "chunked"),
}
"""What maps memory for each number of rows where the caller asks for it. ``auto`` takes it for a
few round numbers of rows alone, and these are none.
"""
_OF_NODES = {("mixture_of_experts", "chunked")}
"""What several nodes alone run."""
_OF_ROWS = [
    (name, impl)
    for name in (
        "gemm_all_reduce", "gemm_reduce_scatter", "all_gather_gemm", "gemm_all_to_all",
        "mixture_of_experts", "embedding_all_to_all",
    )
    for impl in ("auto", *(each.name for each in operators()[name].implementations))
    if (name, impl) not in _MAPPED | _OF_NODES and not _asks(f"{name} {impl}:")
    and impl not in ("async_tp", "symm_mem", "across_nodes")
]  # fmt: skip


_FEW, _MANY = (16, 12, 8, 14, 10, 4), (1024, 528, 656, 80, 1008, 48)
"""The most rows first."""


def _of_new_rows(operator: str, impl: str, trains: bool) -> dict[int, list[str]]:
    """With numbers of rows that the group has not seen, fewer than it has, by number. Kernels were
    compiled by calls of another group.
    """
    first, second = dist.new_group(), dist.new_group()
    forward, rows_of = _calls(operator, impl)
    waits = {}

    def call(rows: tuple[torch.Tensor, ...], group: Any) -> None:
        if trains:
            x, *others = rows
            forward((x.detach().requires_grad_(), *others), group).sum().backward()
        else:
            forward(rows, group)

    for number, count in enumerate(_FEW if impl in ("gemv", "decode") else _MANY):
        rows = rows_of(count)
        for _ in range(2):
            call(rows, first)
        if number:
            waits[count] = _wait(functools.partial(call, rows, second))
            continue
        for _ in range(2):
            call(rows, second)
    return waits


@pytest.mark.parametrize(("operator", "impl"), _OF_ROWS)
def test_new_rows_do_not_wait(ranks: Any, world_size: int, operator: str, impl: str) -> None:
    for waits in ranks(world_size).run(_of_new_rows, operator, impl, False, timeout_s=300):
        assert not any(waits.values()), waits


@pytest.mark.parametrize(
    "operator",
    ["gemm_all_reduce", "gemm_reduce_scatter", "all_gather_gemm", "gemm_all_to_all",
     "mixture_of_experts"],
)  # fmt: skip
def test_training_with_new_rows_does_not_wait(ranks: Any, world_size: int, operator: str) -> None:
    for waits in ranks(world_size).run(_of_new_rows, operator, "auto", True, timeout_s=300):
        assert not any(waits.values()), waits
