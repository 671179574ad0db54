"""Buffers that operators hand out, and what a CUDA graph's capture keeps of them (here without a
GPU).
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from interlace.comm.groups.group import Group
from interlace.comm.groups.outputs import LANDING, Output


@pytest.fixture
def group() -> Group:
    return Group(None, torch.device("cpu"))


def _tensor(group: Group, output: Output) -> torch.Tensor:
    return output.tensor((1024,), torch.float32, group.device)


def test_a_captured_landing_outlives_larger_buffers(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both buffers hold live tensors, so a captured call gets the landing: a graph that is replayed
    writes there.
    """
    held = [_tensor(group, group.outputs.take(4096)) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(group.streams, "capture_id", lambda: 7)
        captured = group.outputs.take(4096)
        assert captured.destination.own_index == LANDING
    freed = weakref.ref(captured._space.block)
    del captured
    group.outputs.take(1 << 20)
    held.clear()
    gc.collect()
    assert freed() is not None
    group.release()
    gc.collect()
    assert freed() is None


def test_what_nothing_was_captured_in_goes_when_buffers_grow(group: Group) -> None:
    output = group.outputs.take(4096)
    y, freed = _tensor(group, output), weakref.ref(output._space.block)
    del output
    group.outputs.take(1 << 20)
    gc.collect()
    assert freed() is not None
    del y
    gc.collect()
    assert freed() is None
