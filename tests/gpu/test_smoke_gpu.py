"""One call of every implementation of every operator, forward and backward. Run with ``-m "gpu and
smoke"``.

Every operator has ranks of its own, and all work at once: most of the time goes to compiling
kernels.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest
import torch.distributed as dist

from interlace.testing.cases import IMPLEMENTATIONS, every_case
from tests.pool import Pool

pytestmark = [pytest.mark.gpu, pytest.mark.smoke]


def _wrong(operator: str) -> dict[str, list[int]]:
    """Wrong elements of each result of each call of an operator, of new tensors and then of some
    that lie elsewhere.
    """
    cases = list(every_case(dist.get_world_size(), [operator]))
    return {
        case.label: case.prepare().check() + case.prepare(layouts=seed).check()
        for seed, case in enumerate(cases)
    }


def _check(pool: Pool, operator: str) -> None:
    for rank, found in enumerate(pool.run(_wrong, operator)):
        wrong = {label: counts for label, counts in found.items() if any(counts)}
        assert not wrong, f"rank {rank}"
        assert {label.split(":")[0] for label in found} == {
            f"{operator} {impl}" for impl in IMPLEMENTATIONS[operator]
        }


def check_all(world_size: int, backend: str) -> None:
    """Check every operator on ranks of its own, all at the same time, and raise the first
    failure.
    """
    with ExitStack() as stack:
        pools = {
            operator: stack.enter_context(closing(Pool(world_size, backend)))
            for operator in IMPLEMENTATIONS
        }
        with ThreadPoolExecutor(len(pools)) as executor:
            futures = [executor.submit(_check, pool, operator) for operator, pool in pools.items()]
        for future in futures:
            future.result()


def test_every_implementation_of_every_operator(world_size: int) -> None:
    check_all(world_size, "cuda")
