"""Memory that others own: the allocator of offsets, and tensors over addresses."""

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interlace import WorkspaceError
from interlace.comm.replay.memory import Block, FreeList, memory_of
from interlace.comm.runtime.dlpack import tensor_at


def test_memory_of_a_rank_is_of_blocks_that_have_this_rank():
    """Behind the last rank of a small group may be memory of another group, which would count."""
    device = torch.device("cpu")
    pair = Block(1 << 50, 64, 4096, 2, device, lambda: None)
    alone = Block(1 << 51, 64, 4096, 1, device, lambda: None)
    first, second, third = ({*memory_of(rank)} for rank in range(3))
    assert {(pair.address, 64), (alone.address, 64)} <= first
    assert (pair.address + 4096, 64) in second
    assert all(
        place[0] not in (alone.address + 4096, pair.address + 8192) for place in second | third
    )


def test_free_list_example():
    """Two spans from the start; the first one's place is used again; neighbours merge into the
    whole.
    """
    spans = FreeList(10)
    assert (spans.take(4), spans.take(6)) == (0, 4)
    spans.give(0, 4)
    assert spans.take(3) == 0
    spans.give(4, 6)
    spans.give(0, 3)
    assert spans.take(10) == 0


def test_a_span_that_is_taken_again_leaves_the_gap_of_the_next_one():
    offsets = FreeList(100, gap=10)
    assert [offsets.take(20), offsets.take(20)] == [10, 40]
    offsets.give(10, 20)
    assert offsets.take(21) == 70, "it would touch the second span's gap"
    assert offsets.take(20) == 10
    offsets.give(40, 20)
    offsets.give(10, 20)
    assert offsets.take(40) == 10, "between two gaps, up to the last span"


def test_free_list_with_gaps():
    """A gap before each span stays free, and is part of the whole again."""
    spans = FreeList(20, gap=2)
    assert (spans.take(4), spans.take(6)) == (2, 8)
    with pytest.raises(WorkspaceError):
        spans.take(5)
    assert spans.take(4) == 16
    spans.give(8, 6)
    assert spans.take(6) == 8
    for span in ((2, 4), (8, 6), (16, 4)):
        spans.give(*span)
    assert spans.take(18) == 2


def test_free_list_without_room():
    spans = FreeList(10)
    spans.take(8)
    with pytest.raises(
        WorkspaceError,
        match=r"must fit in the address range reserved for a rank; 3 B more do not\.",
    ):
        spans.take(3)
    assert spans.take(2) == 8


@given(
    st.lists(
        st.one_of(st.integers(1, 40), st.sampled_from(["give first", "give last"])), max_size=60
    )
)
def test_free_list_spans_never_overlap_and_all_come_back(steps):
    spans, held = FreeList(100), []
    for step in steps:
        if isinstance(step, int):
            try:
                start = spans.take(step)
            except WorkspaceError:
                continue
            assert 0 <= start <= 100 - step
            assert all(start + step <= other or other + size <= start for other, size in held)
            held.append((start, step))
        elif held:
            spans.give(*held.pop(0 if step == "give first" else -1))
    for span in held:
        spans.give(*span)
    assert spans.take(100) == 0


class _Owner:
    pass


def test_a_view_keeps_the_owner_and_the_last_one_frees_it():
    memory = np.arange(24, dtype=np.uint8)
    owner = _Owner()
    gone = weakref.ref(owner)
    address = memory.ctypes.data
    tensor = tensor_at(address, (2, 4), torch.uint8, torch.device("cpu"), owner, (12, 1))
    assert tensor.tolist() == [[0, 1, 2, 3], [12, 13, 14, 15]]
    tensor[1, 2] = 99
    assert memory[14] == 99
    view = tensor[1:].view(torch.int32)
    del owner, tensor
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float8_e4m3fn, torch.bool],
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (3, 2, 1), (0, 4)])
def test_memory_becomes_a_tensor_of_any_type(shape, dtype):
    """Of types that DLPack has a code for here, and of others: contiguous, and of two ranks."""
    count, device = torch.Size(shape).numel(), torch.device("cpu")
    whole = torch.arange(16).remainder(2).to(dtype)  # two ranks, 8 elements apart
    own = tensor_at(whole.data_ptr(), shape, dtype, device, whole)
    assert own.dtype == dtype
    assert own.is_contiguous()
    assert not own._is_view()
    assert own.tolist() == whole[:count].reshape(shape).tolist()
    both = tensor_at(whole.data_ptr(), (2, *shape), dtype, device, whole, (8, *own.stride()))
    assert both.tolist() == whole.reshape(2, 8)[:, :count].reshape(2, *shape).tolist()
