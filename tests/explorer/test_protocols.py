"""Every operator's protocol under thousands of schedules; and broken in one place, which must be
found.
"""

from __future__ import annotations

from typing import Any

import pytest

SCHEDULES = {2: 164, 3: 142}  # by ranks
_NAMES = [
    "gemv, one shot",
    "gemv, one shot, two values a word",
    "gemv, two phases",
    "linear_cross_entropy",
    "linear_top_k",
    "gemm_reduce_scatter, fused",
    "gemm_reduce_scatter, fused, no rows",
    "gemm_reduce_scatter, chunked",
    "gemm_reduce_scatter, chunked, few rows",
    "gemm_reduce_scatter, pushed",
    "gemm_all_reduce, fused",
    "gemm_all_reduce, remote_stores",
    "gemm_all_reduce, pushed",
    "gemm_all_reduce_norm, fused",
    "gemm_all_reduce_norm, pushed",
    "gemm_all_to_all, fused",
    "gemm_all_to_all, pushed",
    "gemm_all_to_all_columns",
    "all_to_all_gemm",
    "all_to_all_gemm, no rows",
    "all_gather_gemm, fused",
    "all_gather_gemm, fused, in place",
    "all_gather_gemm, chunked",
    "all_gather_gemm, pushed",
    "embedding forward, direct",
    "embedding forward, between nodes",
    "embedding backward, between nodes",
    "gemm_all_to_all, between nodes",
    "gemm_reduce_scatter, two levels",
    "gemm_all_reduce, two levels",
    "all_gather_gemm, two levels",
    "embedding backward",
    "embedding backward, a rank without tables",
    "mixture_of_experts",
    "mixture_of_experts, backward",
    "mixture_of_experts, decode",
    "mixture_of_experts, float8",
    "mixture_of_experts, float8, decode",
    "mapped all-to-all",
    "mapped all-to-all by copies",
    "mapped reduce-scatter",
    "mapped all-reduce",
    "mapped gather",
    "a kernel of the language's README",
]


def _explore(name: str) -> int:
    """How many schedules were tried; each of the processes takes another number of ranks."""
    import torch.distributed as dist

    from interlace_explorer import explore
    from tests.explorer.programs import PROGRAMS, nodes_of

    count = 2 + dist.get_rank()
    nodes = nodes_of(name, count)
    report = explore(
        PROGRAMS[name],
        ranks=len(nodes) or count,
        schedules=SCHEDULES[count],
        seed=count,
        node_of_rank=nodes,
    )
    report.raise_if_failed()
    return report.schedules


@pytest.mark.parametrize("name", _NAMES)
def test_every_schedule_is_right(ranks: Any, name: str) -> None:
    counts = ranks(2).run(_explore, name)
    assert counts[0] > 100
    assert sum(counts) * len(_NAMES) >= 10_000, (
        "all programs together: also where tests run in several processes"
    )


def _names() -> list[str]:
    from tests.explorer.programs import PROGRAMS

    return list(PROGRAMS)


def test_every_program_is_explored(ranks: Any) -> None:
    assert ranks(1).run(_names) == [_NAMES]


# Mutants


def _lost(part: int, parts: int) -> list[str]:
    """Every ``parts``-th mutant that is not found, or is found by an error instead of a broken
    rule.
    """
    import torch.distributed as dist

    from interlace_explorer import explore
    from tests.explorer.mutants import MUTANTS
    from tests.explorer.programs import PROGRAMS, nodes_of

    lost = []
    for mutant in MUTANTS[
        part * dist.get_world_size() + dist.get_rank() :: parts * dist.get_world_size()
    ]:
        with mutant.applied():
            failure = explore(
                PROGRAMS[mutant.protocol],
                ranks=mutant.ranks,
                schedules=300,
                node_of_rank=nodes_of(mutant.protocol, mutant.ranks),
            ).failure
        if failure is None or failure.kind == "error":
            lost.append(f"{mutant.name}: {failure}")
    return lost


@pytest.mark.parametrize("part", range(4))
def test_every_mutant_is_found(ranks: Any, part: int) -> None:
    assert ranks(2).run(_lost, part, 4) == [[], []]
