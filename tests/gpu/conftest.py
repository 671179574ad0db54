"""Ranks for tests on GPUs: the same processes for the whole run, and any number of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.pool import Pool, pools


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that repeat calls many times or measure time have the GPUs for themselves.

    The smoke test comes first: what it compiles, the others find in Triton's cache.
    """
    items.sort(key=lambda item: item.get_closest_marker("smoke") is None)
    for item in items:
        if isinstance(item, pytest.Function) and {"turns", "own_gpus"} & set(item.fixturenames):
            item.add_marker(pytest.mark.alone)


@pytest.fixture(scope="session")
def world_size(request: pytest.FixtureRequest) -> int:
    """Number of ranks, from ``--ranks``; by default one per GPU, at least two and at most four.

    If there are fewer GPUs than ranks, ranks share GPUs.
    """
    count = torch.cuda.device_count()
    if count == 0:
        pytest.fail("these tests need a GPU")
    chosen: int | None = request.config.getoption("--ranks")
    return chosen or min(max(count, 2), 4)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Pool]]:
    """``ranks(world_size).run(function, *args)``: every rank's result of a function, on GPUs.

    The processes are reused. A function that breaks a group or leaves it unusable works on a
    process group of its own (``torch.distributed.new_group()``); after an error that it does not
    catch, the processes are replaced.
    """
    with pools("cuda") as pool:
        yield pool


@pytest.fixture(scope="session")
def turns(world_size: int) -> Callable[[int], int]:
    """``turns(n)``: how often to repeat something: n times, but less if ranks share GPUs.

    Then every wait for a peer lasts until the peer's time slice, some milliseconds.
    """
    shared = torch.cuda.device_count() < world_size
    return lambda n: max(n // 20, 8) if shared else n


@pytest.fixture(scope="session")
def own_gpus(world_size: int) -> None:
    """Skip a test that means something only if every rank has a GPU of its own."""
    if torch.cuda.device_count() < world_size:
        pytest.skip(
            f"every rank must have a GPU of its own; got {torch.cuda.device_count()} GPUs for "
            f"{world_size} ranks"
        )
