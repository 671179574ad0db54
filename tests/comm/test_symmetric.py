"""``empty_symmetric``: one more dimension, whose index is the rank."""

import gc
import os
import pickle

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import ArgumentError
from tests.errors import error_of


def _put_to_the_next(shape, dtype):
    """Each rank assigns to its right neighbour, in whole and then to one element."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sym = interlace.empty_symmetric(shape, dtype=dtype)
    fresh = bool((sym.peers == 0).all())
    dist.barrier()
    sym.peers[(rank + 1) % world_size].fill_(rank + 1)
    dist.barrier()
    gets = [sym.peers[peer].flatten()[0].item() for peer in range(world_size)]
    dist.barrier()
    sizes = tuple(sym.peers.shape), tuple(sym.local.shape), sym.local.dtype
    return (
        fresh,
        gets,
        sym.local.flatten().tolist(),
        sizes,
        sym.local.data_ptr() == sym.peers[rank].data_ptr(),
    )


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 5), torch.float32), (7, torch.bfloat16), ((), torch.int64), ((2, 1, 3), torch.uint8)],
)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_put_is_an_assignment(ranks, world_size, shape, dtype):
    sizes = (shape,) if isinstance(shape, int) else shape
    outcomes = ranks(world_size).run(_put_to_the_next, shape, dtype)
    for rank, (fresh, gets, local, shapes, same_address) in enumerate(outcomes):
        left = (rank - 1) % world_size
        assert fresh
        assert gets == [(peer - 1) % world_size + 1 for peer in range(world_size)]
        assert local == [left + 1] * torch.Size(sizes).numel()
        assert shapes == ((world_size, *sizes), sizes, dtype)
        assert same_address


def _views_and_blocks():
    """Two tensors of odd sizes, written through slices: neither may touch the other."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    a = interlace.empty_symmetric((5, 7), dtype=torch.float16)
    b = interlace.empty_symmetric((5000,), dtype=torch.float32)
    dist.barrier()
    a.peers[other, 1:4:2, ::3] = rank + 1
    b.peers[other][4999] = 9
    dist.barrier()
    result = a.local.clone(), b.local.sum().item(), b.local[4999].item()
    dist.barrier()
    return result


def test_slices_of_a_peer_are_torch_views(ranks):
    for rank, (a, b_sum, b_last) in enumerate(ranks(2).run(_views_and_blocks)):
        expected = torch.zeros(5, 7, dtype=torch.float16)
        expected[1:4:2, ::3] = 2 - rank
        assert torch.equal(a, expected)
        assert b_sum == b_last == 9


def _empty():
    sym = interlace.empty_symmetric((0, 3), dtype=torch.float32)
    return tuple(sym.local.shape), tuple(sym.peers.shape)


def test_an_empty_tensor_has_its_shape(ranks):
    assert ranks(2).run(_empty) == [((0, 3), (2, 0, 3))] * 2


def _mappings():
    with open("/proc/self/maps") as maps:
        return sum("memfd:interlace" in line for line in maps)


def _lifetime():
    gc.collect()  # of earlier tests, whose mappings would go while this one counts
    before = _mappings()
    sym = interlace.empty_symmetric((1000,), dtype=torch.float32)
    with_tensor = _mappings()
    view = sym.peers[1][10:20]
    del sym
    gc.collect()
    with_view = _mappings()
    view.fill_(1.0)  # would fault if the mapping were gone
    del view
    gc.collect()
    return [count - before for count in (with_tensor, with_view, _mappings())]


def test_memory_is_unmapped_with_its_last_view(ranks):
    """One mapping for each rank. A view keeps them; without one, none stays."""
    assert ranks(2).run(_lifetime) == [[2, 2, 0]] * 2


def _reuse():
    addresses = set()
    for _ in range(5):
        sym = interlace.empty_symmetric((1000,), dtype=torch.float32)
        addresses.add(sym.address)
        stale = bool(sym.local.any())
        dist.barrier()
        sym.local.fill_(3.0)
        del sym
        gc.collect()
        dist.barrier()
    return len(addresses), stale


def test_freed_addresses_are_used_again_and_zeroed(ranks):
    assert ranks(2).run(_reuse) == [(1, False)] * 2


def _mismatch(shapes, dtypes):
    rank = dist.get_rank()
    before = _mappings()
    error = error_of(interlace.empty_symmetric, shapes[rank], dtype=dtypes[rank])
    return error, _mappings() - before


@pytest.mark.parametrize(
    ("shapes", "dtypes", "message"),
    [
        (
            ((2, 3), (3, 2)),
            (torch.float32,) * 2,
            "shape must be the same on every rank; got [2, 3] on rank 0, [3, 2] on rank 1.",
        ),
        (
            ((4,), (4,)),
            (torch.float32, torch.int32),
            (
                "dtype must be the same on every rank; got 'torch.float32' on rank 0, "
                "'torch.int32' on rank 1."
            ),
        ),
    ],
)
def test_ranks_that_disagree_are_told_and_get_nothing(ranks, shapes, dtypes, message):
    for error, mapped in ranks(2).run(_mismatch, shapes, dtypes):
        assert error[:2] == (
            "RankMismatchError",
            f"empty_symmetric: {message} Nothing was computed.",
        )
        assert mapped == 0


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2, -1), torch.int8, "shape must have sizes of 0 or more; got (2, -1)."),
        ((2, 0.5), torch.int8, "shape must have sizes of 0 or more; got (2, 0.5)."),
        ("2", torch.int8, "shape must have sizes of 0 or more; got '2'."),
        (2, "int8", "dtype must be a torch.dtype; got 'int8'. Say torch.float32, for example."),
    ],
)
def test_shapes_and_dtypes_that_are_none(shape, dtype, message):
    with pytest.raises(ArgumentError) as caught:
        interlace.empty_symmetric(shape, dtype=dtype)
    assert str(caught.value) == f"empty_symmetric: {message}"


def test_a_symmetric_tensor_stays_in_its_process():
    with pytest.raises(ArgumentError, match=r"must stay in its process.*sym\.local\.clone\(\)"):
        pickle.dumps(interlace.empty_symmetric(2, dtype=torch.float32))


def _too_large():
    sym = interlace.empty_symmetric((4,), dtype=torch.float32)
    before = len(os.listdir("/proc/self/fd")), _mappings()
    error = error_of(interlace.empty_symmetric, (65 * 2**30,), dtype=torch.uint8)
    after = len(os.listdir("/proc/self/fd")), _mappings()
    dist.barrier()
    sym.peers[1 - dist.get_rank()].fill_(1.0)  # the group goes on
    dist.barrier()
    return error, before, after, sym.local.sum().item()


def test_what_does_not_fit_leaves_nothing_behind(ranks):
    for error, before, after, total in ranks(2).run(_too_large):
        assert error[0] == "WorkspaceError"
        assert "must fit in the address range reserved for a rank; 69.8 GB more do not." in error[1]
        assert after == before
        assert total == 4.0


@pytest.mark.parametrize("count", [1 << 60, 1 << 80])
def test_what_does_not_fit_in_a_process_on_its_own(count):
    with pytest.raises(interlace.WorkspaceError, match=r"memory must fit in this process"):
        interlace.empty_symmetric(count, dtype=torch.int8)
