"""Ranks for tests on GPUs: one a GPU, at most four."""

import pytest
import torch


@pytest.fixture(scope="session")
def world_size() -> int:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.fail("these tests need at least two GPUs")
    return min(count, 4)
