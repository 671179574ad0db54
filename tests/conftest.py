"""Fixtures for all tests. Nothing here starts a process or imports torch before a test asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import hypothesis
import pytest

from tests.pool import Pool

# Examples run in other processes and take a while; the same ones every time.
hypothesis.settings.register_profile("interlace", deadline=None, derandomize=True, database=None, max_examples=25)
hypothesis.settings.load_profile("interlace")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Pool]]:
    """``ranks(world_size).run(function, *args)``: every rank's result of a function, on processes that are reused."""
    pools: dict[int, Pool] = {}

    def pool(world_size: int) -> Pool:
        return pools.setdefault(world_size, Pool(world_size))

    yield pool
    for each in pools.values():
        each.close()
