"""The primitives of ``interlace.language`` between ranks, in kernels as small as possible."""

import ctypes
import functools
import os
import signal
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import interlace
from tests.errors import error_of

BLOCK = 8


def _launch(group, kernel, *args, grid=1, **options):
    """Do an operator's duties around its kernel: order, health and traffic."""
    with group.running():
        kernel[(grid,)](*args, **options)


def _symmetric(count, dtype, process_group=None):
    return interlace.empty_symmetric((count,), dtype=dtype, group=process_group)


def _identity():
    from tests.language import kernels

    group = interlace.group_of()
    out = torch.zeros(2, dtype=torch.int32)
    _launch(group, kernels.who_am_i, out, group.context("test"))
    return out.tolist()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_rank_and_world_size(ranks, world_size):
    assert ranks(world_size).run(_identity) == [[rank, world_size] for rank in range(world_size)]


def _ring(faults):
    from tests.language import kernels

    group = interlace.group_of()
    data, signals = _symmetric(BLOCK, torch.float32), _symmetric(1, torch.int32)
    rows = []
    group.traffic.reset()
    with interlace.inject(faults):
        for epoch in range(1, 4):
            out = torch.full((BLOCK,), float("nan"))
            _launch(
                group, kernels.put_signal_ring, data.address, signals.address, out,
                group.context("test"), epoch, WORLD_SIZE=group.world_size, BLOCK=BLOCK,
            )  # fmt: skip
            rows.append(out.tolist())
            # The ring has no way back: nobody may overwrite what its neighbour still reads
            dist.barrier()
    traffic = group.traffic
    return rows, (traffic.messages, traffic.message_bytes, traffic.signals, dict(traffic.bytes_to))


@pytest.mark.parametrize(
    "faults",
    [interlace.Faults(), interlace.Faults(max_delay_s=0.01), interlace.Faults(reorder_puts=True)],
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_put_signal_and_wait(ranks, world_size, faults):
    """The signal releases the put before it; both are counted, by destination."""
    for rank, (rows, traffic) in enumerate(ranks(world_size).run(_ring, faults)):
        left, right = (rank - 1) % world_size, (rank + 1) % world_size
        assert rows == [[100.0 * left + i for i in range(BLOCK)]] * 3
        assert traffic == (3, 3 * 4 * BLOCK, 3, {right: 3 * 4 * BLOCK})


def _put_once(kernel_name, args, options):
    from tests.language import kernels

    group = interlace.group_of()
    data = _symmetric(BLOCK, torch.float32)
    group.traffic.reset()
    _launch(
        group, getattr(kernels, kernel_name), data.address, group.context("test"), *args, **options
    )
    dist.barrier()
    result = data.local.tolist(), group.traffic.message_bytes, dict(group.traffic.bytes_to)
    dist.barrier()
    return result


def test_a_masked_put_touches_and_counts_what_is_in_the_mask(ranks):
    first, second = ranks(2).run(_put_once, "masked_put", (1,), {"COUNT": 3, "BLOCK": BLOCK})
    assert first == ([0.0] * BLOCK, 12, {1: 12})
    assert second == ([1.0, 2.0, 3.0, *[0.0] * (BLOCK - 3)], 0, {})


def test_a_put_whose_peer_is_a_tile(ranks):
    """Each element goes to its own rank; the element for this rank is no traffic."""
    for rank, (data, nbytes, bytes_to) in enumerate(
        ranks(4).run(_put_once, "scatter", (), {"WORLD_SIZE": 4})
    ):
        assert data[:4] == [10.0 * source + rank for source in range(4)]
        assert nbytes == 12
        assert bytes_to == {peer: 4 for peer in range(4) if peer != rank}


def _use_peers():
    from tests.language import kernels

    group = interlace.group_of()
    data, signals = _symmetric(2, torch.float32), _symmetric(2, torch.int32)
    errors = {}
    for primitive in ("put", "get", "signal", "wait"):
        arguments = data.address, signals.address, group.context("test")
        options = {"PRIMITIVE": primitive}
        launch = functools.partial(_launch, group, kernels.use_peer, *arguments)
        errors[primitive] = [
            error_of(launch, first, COUNT=2, **options) for first in (-1, 1)
        ]  # fmt: skip
        launch(1, COUNT=1, **options)  # rank 2 is not in the mask
    dist.barrier()
    return errors


def test_a_peer_that_the_group_does_not_have(ranks):
    for rank, errors in enumerate(ranks(2).run(_use_peers)):
        for primitive, refused in errors.items():
            for peer, (kind, message, _) in zip((-1, 2), refused, strict=True):
                assert kind == "ArgumentError"
                assert message == (
                    f"{primitive}: peer must be a rank of the group, 0 to 1; got {peer} on rank "
                    f"{rank}. Take it modulo the number of ranks, or leave it out by the mask."
                )


def _misuse():
    from tests.language import kernels

    group = interlace.group_of()
    data, signals = _symmetric(BLOCK, torch.float32), _symmetric(1, torch.int32)
    context = group.context("test")
    with pytest.raises(Exception, match=r"ptr must be a 1-D tile of signals") as scalar:
        _launch(group, kernels.wait_for_a_scalar, signals.address, context)
    peer = (group.rank + 1) % group.world_size
    tensor, symmetric = (
        error_of(_launch, group, kernels.masked_put, given, context, peer, COUNT=BLOCK, BLOCK=BLOCK)
        for given in (data.local, data)
    )
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    for ask in (
        data.data_ptr,
        lambda: native_specialize_impl(BaseBackend, data, False, True, True),
    ):
        assert error_of(ask)[:2] == symmetric[:2]  # what compiled kernels ask
    return str(scalar.value), tensor, symmetric


def test_a_tensor_in_place_of_its_address_and_a_scalar_signal(ranks):
    """The first one would store to this rank, or to the memory of nobody; only rank 0's own tensor
    has the address that a kernel expects. A symmetric tensor has several, and is refused.
    """
    outcomes = ranks(2).run(_misuse)
    assert all("ptr + tl.arange(0, 1)" in scalar for scalar, *_ in outcomes)
    assert outcomes[0][1] is None
    kind, message, _ = outcomes[1][1]
    assert kind == "ArgumentError"
    assert message == (
        f"put: every address must be of symmetric memory of rank 0; {BLOCK} of {BLOCK} are not, on "
        "rank 1. Allocate as much as the kernel uses, mask what is beyond it, and give the kernel "
        "SymmetricTensor.address, for il.pointer, instead of a tensor."
    )
    assert outcomes[0][2][:2] == (
        "ArgumentError",
        "a kernel must get the address of symmetric memory; got the SymmetricTensor. Give the "
        "kernel sym.address, for il.pointer, or sym.local, if it reaches this rank's tensor only.",
    )


def _reach_beyond(primitive, itemsize):
    from tests.language import kernels

    process_group = dist.new_group()
    group = interlace.group_of(process_group)
    # Neighbours in the address range of a new group, where no earlier test has left gaps: neither
    # may be reached from the other.
    memory = [_symmetric(1024, torch.float32, process_group) for _ in range(3)]
    assert [m.address - memory[0].address for m in memory] == [0, 8192, 16384]
    peer = group.rank if primitive.startswith(("wait", "get_")) else 1 - group.rank
    errors = [
        error_of(
            _launch, group, kernels.reach, memory[1].address, place, group.context("test"), peer,
            PRIMITIVE=primitive,
        )
        for place in (4096 - itemsize, 4096, -2 * itemsize)
    ]  # fmt: skip
    dist.barrier()
    return errors, [m.local.any().item() for m in memory]


@pytest.mark.parametrize(
    ("primitive", "itemsize"),
    [("put", 4), ("get", 4), ("signal", 4), ("wait", 4), ("get_packed", 8), ("get_lamport", 4)],
)
def test_memory_that_is_too_small(ranks, primitive, itemsize):
    """A kernel that runs past the end of its memory is told so, and reaches nothing else."""
    # Outside are one element, both, and both before the start: past the end of other memory.
    outside = [(1, 0), (2, 0), (2, 4096 - 2 * itemsize)]
    for rank, (errors, touched) in enumerate(ranks(2).run(_reach_beyond, primitive, itemsize)):
        peer = rank if primitive.startswith(("wait", "get_")) else 1 - rank
        for (kind, message, _), (count, distance) in zip(errors, outside, strict=True):
            assert kind == "ArgumentError"
            assert message.startswith(primitive)
            assert (
                f"every address must be of symmetric memory of rank {peer}; {count} of 2 are not "
                f"(the first is {distance} bytes past the end of 4096), on rank {rank}. " in message
            )
        assert not any(touched)


def _mistype():
    from tests.language import kernels

    group = interlace.group_of()
    data, context = _symmetric(8, torch.float32), group.context("test")
    messages = {
        "address": "make one of an address by il.pointer",
        "signal at an address": "make one of an address by il.pointer",
        "words at an address": "make one of an address by il.pointer",
        "half a word": "address must be a multiple of 16; got one with a remainder of 2",
        "signal": "ptr must point to int32 signals",
        "wait": "ptr must point to int32 signals",
        "put_packed": "ptr must point to int64 words",
        "float16": "values must be float32",
        "get_packed": "ptr must point to int64 words",
        "1-D": "ptr must be a 2-D tile of words",
    }
    for mistake, message in messages.items():
        with pytest.raises(Exception, match=message):
            _launch(group, kernels.mistype, data.address, context, MISTAKE=mistake)


def test_pointers_and_values_of_a_wrong_type_are_refused(ranks):
    """A signal of another size would never be seen; the wait for it would expire."""
    ranks(1).run(_mistype)


def _await_one(awaits, step):
    from tests.language import kernels

    group = interlace.group_of()
    data, signals = _symmetric(8, torch.float32), _symmetric(1, torch.int32)
    interlace.set_deadline(0.5)
    peer = (group.rank + step) % group.world_size
    error = error_of(
        _launch, group, kernels.wait_for_one, data.address, signals.address, group.context("test"),
        peer, AWAITS=awaits,
    )  # fmt: skip
    dist.barrier()
    interlace.recover()
    interlace.set_deadline(60)
    return error


@pytest.mark.parametrize("awaits", ["signal", "condition", "word", "value"])
def test_waits_for_one_peer_without_a_tile_of_masks(ranks, awaits):
    """A peer that is a scalar is named by the error; a mask that is a scalar holds for the tile."""
    for rank, (kind, message, _) in enumerate(ranks(2).run(_await_one, awaits, 1)):
        assert kind == "PeerTimeoutError"
        assert f"rank {rank} waited 0.5 s for rank {1 - rank} (slice 0, " in message


@pytest.mark.parametrize("awaits", ["signal", "word", "value"])
def test_a_wait_for_what_the_rank_itself_never_sends(ranks, awaits):
    """It breaks the group: NaN alone would not say that the kernel forgets its own part."""
    for rank, (kind, message, _) in enumerate(ranks(2).run(_await_one, awaits, 0)):
        assert kind == "PeerTimeoutError"
        assert f"rank {rank} waited 0.5 s for rank {rank} (slice 0, " in message
        assert "The peer is this rank itself, which must signal before it waits" in message


@pytest.mark.parametrize(
    ("wanted", "seen", "reason"),
    [
        (5, 4, "is late, dead, or made a different call"),
        (5, 0, "is late, dead, or made a different call"),
        (5, 9, "is calls ahead, or set the signal again before this rank had seen it"),
        (2**24 - 2, 5, "is calls ahead, or set the signal again before this rank had seen it"),
        (5, 2**24 - 2, "is late, dead, or made a different call"),
    ],
)
def test_an_error_says_if_the_peer_is_ahead(wanted, seen, reason):
    error = interlace.PeerTimeoutError(
        operator="ring", rank=0, peer=1, wanted=wanted, seen=seen, deadline_s=1
    )
    assert f"The peer {reason}; this group is broken now." in str(error)


def _look_while_another_process_stores():
    from tests.language import kernels

    group, memory = interlace.group_of(), _symmetric(1024, torch.int16)
    number = ctypes.c_int16.from_address(memory.local.data_ptr())
    child = os.fork()
    while not child:
        for _ in range(1000):
            number.value = 0x1234
            number.value = 0
    seen = set()
    try:
        out = torch.empty(4096, dtype=torch.int16)
        for _ in range(200):
            _launch(group, kernels.look, memory.address, out, group.context("test"), COUNT=len(out))
            seen |= set(out.tolist())
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return seen


def test_numbers_of_two_bytes_arrive_whole(ranks):
    """Triton's interpreter loads them by memcpy, which may load one byte before and one after."""
    # The memory of a process on its own is not shared with its children.
    for seen in ranks(2).run(_look_while_another_process_stores):
        assert seen == {0, 0x1234}


def _gather():
    from tests.language import kernels

    group = interlace.group_of()
    data, signals = _symmetric(BLOCK, torch.float32), _symmetric(2 * 4, torch.int32)
    outs = []
    for epoch in (1, 2):
        out = torch.full((group.world_size, BLOCK), float("nan"))
        _launch(
            group, kernels.gather_by_get, data.address, signals.address, out, group.context("test"),
            epoch, WORLD_SIZE=group.world_size, BLOCK=BLOCK,
        )  # fmt: skip
        outs.append(out)
        dist.barrier()
    return outs


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_barrier_and_get(ranks, world_size):
    for outs in ranks(world_size).run(_gather):
        for epoch, out in enumerate(outs, 1):
            expected = (
                100.0 * torch.arange(world_size)[:, None] + torch.arange(BLOCK)[None, :] + epoch
            )
            assert torch.equal(out, expected)


def _words(keep, faults):
    from tests.language import kernels

    group = interlace.group_of()
    words = _symmetric(4 * BLOCK, torch.int64)
    outs = []
    with interlace.inject(faults):
        for epoch in (1, 2, 3):
            out = torch.full((BLOCK,), float("nan"))
            _launch(
                group, kernels.sum_words, words.address, out, group.context("test"),
                torch.tensor(epoch, dtype=torch.int32).item(), WORLD_SIZE=group.world_size,
                KEEP=keep, BLOCK=BLOCK,
            )  # fmt: skip
            outs.append(out.tolist())
            dist.barrier()
    return outs


@pytest.mark.parametrize(
    "faults", [interlace.Faults(), interlace.Faults(max_delay_s=0.005, reorder_puts=True)]
)
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("world_size", [1, 4])
def test_packed_words_prove_their_own_arrival(ranks, world_size, keep, faults):
    expected = [float(sum(rank + 1 + i for rank in range(world_size))) for i in range(BLOCK)]
    assert ranks(world_size).run(_words, keep, faults) == [[expected] * 3] * world_size


def _pairs(values, keep):
    from tests.language import kernels

    group = interlace.group_of()
    words = _symmetric(4 * BLOCK, torch.int64)
    out = torch.full((2, BLOCK, 2), float("nan"))
    _launch(
        group, kernels.sum_pairs, words.address, values[group.rank].contiguous(), out,
        group.context("test"), 1 << 23, WORLD_SIZE=group.world_size, KEEP=keep, BLOCK=BLOCK,
    )  # fmt: skip
    dist.barrier()
    return out


def _round_to_12_digits(values):
    """Round the significand in float64: to nearest, ties to even."""
    mantissa, exponent = torch.frexp(values.double())
    return torch.ldexp(torch.round(torch.ldexp(mantissa, torch.tensor(12))), exponent - 12)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("world_size", [2, 4])
def test_two_values_in_a_word_are_rounded_alike_on_every_rank(ranks, world_size, keep):
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(world_size, BLOCK, 2, generator=generator) * 10.0 ** torch.randint(
        -30, 30, (BLOCK, 2), generator=generator
    )
    rounded = _round_to_12_digits(values)
    expected = torch.zeros(BLOCK, 2)
    for rank in range(world_size):
        expected += rounded[rank].float()  # float32 in rank order
    for rank, (total, right) in enumerate(ranks(world_size).run(_pairs, values, keep)):
        assert torch.equal(total, expected)
        assert torch.equal(right.double(), rounded[(rank + 1) % world_size])


def test_what_half_precision_and_non_numbers_become_in_pairs(ranks):
    """Halves pass exactly, subnormal ones too, and infinities and NaNs of any payload are kept.

    Of two values that are equally near, the even one is taken.
    """
    tiny, huge = torch.finfo(torch.float16).smallest_normal / 1024, torch.finfo(torch.bfloat16).max
    exact = torch.tensor(
        [[1 + 2**-10, -tiny], [huge, -huge], [float("inf"), float("-inf")], [0.0, 65504.0]]
    )
    nans = torch.tensor([[0x7FFFFFFF, 0x7F800001], [-1, 0x7FC00000]], dtype=torch.int32).view(
        torch.float32
    )
    ties = torch.tensor([[1 + 2**-12, 1 + 3 * 2**-12], [-1 - 2**-12, -1 - 3 * 2**-12]])
    values = torch.cat([exact, nans, ties])
    for _, alone in ranks(2).run(_pairs, values.expand(2, BLOCK, 2), False):
        assert torch.equal(alone[:4], exact)
        assert alone[4:6].isnan().all()
        assert alone[6:].tolist() == [[1, 1 + 2**-10], [-1, -1 - 2**-10]]


def _four_puts(order, fence, epochs):
    """Return the epochs in which the reader saw a tile of an earlier one."""
    from tests.language import kernels

    group = interlace.group_of()
    data, signals, answers = (
        _symmetric(4 * BLOCK, torch.int32),
        _symmetric(1, torch.int32),
        _symmetric(1, torch.int32),
    )
    wrong = []
    with interlace.inject(interlace.Faults(seed=group.rank, reorder_puts=True)):
        for epoch in range(1, epochs + 1):
            out = torch.zeros(4 * BLOCK, dtype=torch.int32)
            _launch(
                group, kernels.four_puts_and_a_signal, data.address, signals.address,
                answers.address, out, group.context("test"), epoch, ORDER=order, FENCE=fence,
                BLOCK=BLOCK,
            )  # fmt: skip
            if group.rank == 1 and not bool((out == epoch).all()):
                wrong.append(epoch)
            dist.barrier()
    return wrong


@pytest.mark.parametrize(("order", "fence"), [("release", False), ("relaxed", True)])
def test_a_release_or_a_fence_orders_the_puts_before_it(ranks, order, fence):
    assert ranks(2).run(_four_puts, order, fence, 40) == [[], []]


def test_a_relaxed_signal_without_a_fence_is_caught(ranks):
    """A wrong kernel fails.

    If the faults could not show it, the tests above would prove nothing.
    """
    _, wrong = ranks(2).run(_four_puts, "relaxed", False, 40)
    assert wrong


def _expired_wait():
    from tests.language import kernels

    process_group = dist.new_group()
    group = interlace.group_of(process_group)
    data, signals = (
        _symmetric(BLOCK, torch.float32, process_group),
        _symmetric(1, torch.int32, process_group),
    )
    interlace.set_deadline(0.5, process_group)
    error, out = None, torch.zeros(BLOCK)
    if group.rank == 1:  # its left neighbour, rank 0, does not come
        arguments = data.address, signals.address, out, group.context("ring"), 5
        error = error_of(
            _launch, group, kernels.put_signal_ring, *arguments, WORLD_SIZE=2, BLOCK=BLOCK
        )
    dist.barrier()
    return error, out.tolist()


def test_a_wait_ends_at_the_deadline_and_says_so(ranks):
    (nothing, _), (error, out) = ranks(2).run(_expired_wait)
    kind, message, fields = error
    assert nothing is None
    assert kind == "PeerTimeoutError"
    assert message.startswith(
        "ring: rank 1 waited 0.5 s for rank 0 (slice 7, epoch 5, and saw epoch 0)."
    )
    assert (fields["peer"], fields["slice"], fields["wanted"], fields["seen"]) == (0, 7, 5, 0)
    assert out == [-1.0] * BLOCK  # the kernel went on to its end, and was told


def _expires(shares):
    """Whether waits must end that have lasted for such shares of a deadline, which is far longer
    than any test.
    """
    from tests.language import kernels

    group = interlace.group_of()
    before, group.deadline_s = group.deadline_s, 10_000.0
    found = []
    for share in shares:
        out = torch.zeros(1, dtype=torch.int32)
        waited_ns = int(share * group.deadline_s * 1e9)
        _launch(group, kernels.expire, out, group.context("test"), waited_ns)
        found.append(out.item())
    group.deadline_s = before
    return found


def test_a_wait_lasts_one_deadline(ranks):
    assert ranks(1).run(_expires, [0.0, 0.8, 1.2, 1.8, 2.5]) == [[0, 0, 1, 1, 1]]


def _epochs(start):
    from interlace.comm.groups.group import MAX_PROGRAMS
    from tests.language import kernels

    epochs = torch.full((MAX_PROGRAMS,), start, dtype=torch.int32)
    seen = []
    for programs in (3, 1, 5):
        out = torch.zeros(2, programs, dtype=torch.int32)
        kernels.next_of_every_program[(programs,)](epochs, out[0], out[1])
        seen.append([set(numbers) for numbers in out.tolist()])
    return seen, len(epochs.unique())


def _enter_grids():
    from interlace.comm import MAX_PROGRAMS
    from tests.language import kernels

    epochs = torch.ones(MAX_PROGRAMS, dtype=torch.int32)
    out = torch.zeros(2, MAX_PROGRAMS + 1, dtype=torch.int32)
    group = interlace.group_of()

    def launch(grid):
        with group.running():
            kernels.next_of_every_program[grid](epochs, out[0], out[1])

    grids = (MAX_PROGRAMS + 1,), (2, 2), (1, 1, 2)
    return [error_of(launch, grid) for grid in grids], epochs.unique().tolist()


def test_a_grid_without_an_epoch_cell_for_each_program_is_refused(ranks):
    [(errors, epochs)] = ranks(1).run(_enter_grids)
    for (kind, message, _), grid in zip(
        errors, ("(4097, 1, 1)", "(2, 2, 1)", "(1, 1, 2)"), strict=True
    ):
        assert kind == "ArgumentError"
        assert message.startswith(
            "next_epoch, enter: the grid must be 1-D, of at most 4096 programs, since each has an "
            f"epoch cell; got {grid}."
        )
    assert epochs == [1]


_WRAP = 1 << 24


@pytest.mark.parametrize(
    "expected", [[1, 2, 3], [2, 3, 4], [_WRAP - 3, _WRAP - 2, 1], [_WRAP - 2, 1, 2]]
)
def test_epochs_are_equal_for_every_program_whatever_the_grid(ranks, expected):
    """Epochs are numbers of 24 bits.

    Zero and the number before it are left out, so that parity alternates.
    """
    [(seen, distinct)] = ranks(1).run(_epochs, expected[0])
    assert [epochs for epochs, _ in seen] == [{epoch} for epoch in expected]
    assert [before for _, before in seen[1:]] == [{epoch} for epoch in expected[:2]]
    assert distinct == 1


def _stamp(epoch, mark=0):
    return mark << 24 | epoch


_COMPARISONS = {
    "this call": (_stamp(7, 3), _stamp(7, 3), False),
    "the call before": (_stamp(6, 3), _stamp(7, 3), True),
    "one call ahead": (_stamp(8, 3), _stamp(7, 3), False),
    "one call ahead, where epochs wrap": (_stamp(1, 3), _stamp(_WRAP - 2, 3), False),
    "one call behind, where epochs wrap": (_stamp(_WRAP - 2, 3), _stamp(1, 3), True),
    "another mark": (_stamp(7, 2), _stamp(7, 3), True),
    "another mark, one call ahead": (_stamp(8, 2), _stamp(7, 3), True),
    "no mark": (_stamp(7), _stamp(7, 3), True),
    "the largest mark": (_stamp(7, 127), _stamp(7, 127), False),
    "never set": (0, _stamp(7, 3), True),
    "never set, where epochs wrap": (0, _stamp(_WRAP - 2, 3), True),
    "the call before the first": (0, _WRAP - 2, False),
    "long ago": (_stamp(7 + (1 << 20), 3), _stamp(7, 3), True),
}


def _behind():
    from tests.language import kernels

    seen, awaited, _ = (
        torch.tensor(item, dtype=torch.int32) for item in zip(*_COMPARISONS.values(), strict=True)
    )
    result = torch.zeros(16, dtype=torch.int32)
    padded = [torch.nn.functional.pad(item, (0, 16 - len(item))) for item in (seen, awaited)]
    kernels.compare_signals[(1,)](*padded, result, BLOCK=16)
    return result[: len(seen)].bool().tolist()


def test_what_a_wait_takes_for_arrived(ranks):
    (result,) = ranks(1).run(_behind)
    assert dict(zip(_COMPARISONS, result, strict=True)) == {
        name: behind for name, (_, _, behind) in _COMPARISONS.items()
    }


def _after_clearing(dtype, epoch, values):
    """Return signals of the right neighbour and of this rank, which has cleared its own."""
    import triton.language as tl

    from interlace.comm.groups.group import MAX_PROGRAMS
    from tests.language import kernels

    group = interlace.group_of()
    signals, epochs = (
        _symmetric(len(values), dtype),
        torch.full((MAX_PROGRAMS,), epoch, dtype=torch.int32),
    )
    signals.local.copy_(torch.tensor(values, dtype=dtype))
    dist.barrier()
    if group.rank == 0:
        arguments = signals.address, epochs, group.context("test"), len(values) - 1
        _launch(
            group,
            kernels.clear_signals,
            *arguments,
            grid=2,
            DTYPE=tl.int32 if dtype == torch.int32 else tl.int64,
        )
    dist.barrier()
    return signals.local.tolist(), epochs.unique().tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("call", range(4))
def test_old_signals_are_cleared(ranks, dtype, call):
    """Old signals are cleared four times in all epochs.

    New ones, those a call ahead, and the memory after the signals are kept.
    """
    epoch = ((call + 1) << 22) - 2
    following = 1 if epoch == _WRAP - 2 else epoch + 1
    old_stamp = [_stamp((epoch - age) % _WRAP, 5) for age in (1 << 20, 3 << 20, 5 << 20)]
    new = [_stamp(epoch, 5), _stamp(epoch - 1, 6), _stamp(following, 7)]
    values = [
        number | (3 << 60 if dtype == torch.int64 else 0)
        for number in [*old_stamp, *new, *old_stamp * 3000, old_stamp[0]]
    ]
    (cleared, epochs), (peers, _) = ranks(2).run(_after_clearing, dtype, epoch, values)
    assert cleared == [0, 0, 0, *values[3:6], *[0] * 9000, values[-1]]
    assert peers == values
    assert epochs == [following]


def test_signals_are_left_alone_in_other_calls(ranks):
    values = [_stamp(5, 1), 0, _stamp(6, 2)]
    assert ranks(2).run(_after_clearing, torch.int32, (1 << 22) - 3, values)[0][0] == values


def _arrays_to_store():
    """Tell, for every store to a peer, if its arrays may be written to: for a tile, and for one
    value to several peers.
    """
    from interlace.language import _interpreted

    store, writeable = _interpreted.interpreter.store, []

    def watched(*arrays):
        writeable.extend(item.flags.writeable for item in arrays)
        store(*arrays)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_interpreted, "interpreter", SimpleNamespace(store=watched))
        _ring(interlace.Faults())
    return len(writeable) > 0, all(writeable)


def test_stores_of_triton_3_6(ranks):
    """The interpreter refuses arrays that may not be written to, such as broadcast ones."""
    assert ranks(2).run(_arrays_to_store) == [(True, True)] * 2
