"""GPU-initiated communication for any ``@triton.jit`` kernel; the memory model is in ``README.md``.

Every primitive works on the group's memory: ``ptr`` addresses rank 0's copy, and ``peer`` chooses
whose copy is meant. ``group`` is what :func:`join` makes of the kernel's ``ctx`` argument.
"""

import triton
import triton.language as tl

from interlace.comm import context
from interlace.comm.group import MAX_PROGRAMS
from interlace.comm.interpreter import interpreting

if interpreting():
    from interlace.language._interpreted import clock_ns, fence_system, load_acquire, num_threads, pause, signal_peer, store_to_peer
else:
    from interlace.language._device import clock_ns, fence_system, load_acquire, num_threads, pause, signal_peer, store_to_peer

_RANK = tl.constexpr(context.RANK)
_WORLD_SIZE = tl.constexpr(context.WORLD_SIZE)
_STRIDE_BYTES = tl.constexpr(context.STRIDE_BYTES)
_DEADLINE_NS = tl.constexpr(context.DEADLINE_NS)
_OPERATOR = tl.constexpr(context.OPERATOR)
_BROKEN_ADDRESS = tl.constexpr(context.BROKEN_ADDRESS)
_RECORD_ADDRESS = tl.constexpr(context.RECORD_ADDRESS)
_SCRATCH_ADDRESS = tl.constexpr(context.SCRATCH_ADDRESS)
_CODE = tl.constexpr(context.RECORD_CODE)
_RECORD_OPERATOR = tl.constexpr(context.RECORD_OPERATOR)
_PEER = tl.constexpr(context.RECORD_PEER)
_SLICE = tl.constexpr(context.RECORD_SLICE)
_WANTED = tl.constexpr(context.RECORD_WANTED)
_SEEN = tl.constexpr(context.RECORD_SEEN)
_LATE = tl.constexpr(context.LATE)
_MISCOUNTED = tl.constexpr(context.MISCOUNTED)

# Looks at a signal between two looks at the clock and at the group's health.
_LOOKS = tl.constexpr(4 if interpreting() else 128)
# Epoch cells written at a time: a few a thread on a GPU, all at once where every step of Python
# counts.
_CELLS = tl.constexpr(MAX_PROGRAMS if interpreting() else 128)
_TAG = tl.constexpr(0xFFFFFFFF)
_EPOCH_MASK = tl.constexpr(context.EPOCH_MASK)
# A signal may be a call or two ahead of who waits for it; where epochs wrap, the next one is three
# more.
_AHEAD = tl.constexpr(4)
# Calls from one clearing of old signals to the next, and how old a signal must be to be cleared:
# far more than any rank can be behind, and together far less than the calls after which an epoch's
# number comes again.
_CLEARING_PERIOD = tl.constexpr(1 << (context.EPOCH_BITS - 2))
_OLD = tl.constexpr(1 << (context.EPOCH_BITS - 4))
# Words that a program looks at, at a time
_CLEARED = tl.constexpr(MAX_PROGRAMS if interpreting() else 128)
_MAX_PROGRAMS = tl.constexpr(MAX_PROGRAMS)
_RELEASE = tl.constexpr("release")


# Who and where


@triton.jit
def join(ctx):
    """Read what the primitives need to know of the group; call it once, near the top of the kernel.

    Args:
        ctx: the operator's context (``Group.context(operator)``).

    Returns:
        ``group``: the context, this rank, and the bytes between two ranks' copies. Volatile, so
            that the compiler does not
        move the loads to where the primitives need them: there they would cost a trip to memory.
    """
    return ctx, tl.load(ctx + _RANK, volatile=True).to(tl.int32), tl.load(ctx + _STRIDE_BYTES, volatile=True)


@triton.jit
def rank(group):
    """This rank in the group (int32 scalar)."""
    return group[1]


@triton.jit
def world_size(group):
    """Ranks in the group (int32 scalar). Loops over peers want it as a constexpr argument instead.
    """
    return tl.load(group[0] + _WORLD_SIZE).to(tl.int32)


@triton.jit
def pointer(address, dtype: tl.constexpr):
    """A pointer to symmetric memory from ``SymmetricTensor.address``, which every kernel gets as an
    integer.
    """
    return tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(dtype)), 16)


@triton.jit
def peer_pointer(ptr, peer, group):
    """Where ``peer``'s copy of ``ptr`` is mapped here. ``peer`` is a scalar, or a tile that
    broadcasts with ``ptr``.
    """
    stride = group[2] // (ptr.dtype.element_ty.primitive_bitwidth // 8)
    return ptr + tl.multiple_of(stride, 16) * peer


# Epochs


@triton.jit
def next_epoch(epochs):
    """The number of this call (int32 scalar, 1 to ``2**24 - 2``, then 1 again), as this program's
    cell says.

    One trip to memory, as for :func:`join`. Call both once the kernel's first loads are under way:
    then it costs nothing.
    """
    return tl.load(epochs + tl.program_id(0), volatile=True)


@triton.jit
def previous_epoch(epoch):
    """The number of the call before this one. A signal that was never set counts as the one before
    the first call.
    """
    return (epoch - tl.where(((epoch - 1) & _EPOCH_MASK) == 0, 3, 1)) & _EPOCH_MASK


@triton.jit
def following_epoch(epoch):
    """The number of the call after this one; of the first, where ``epoch`` is 0.

    Zero and the number before it are left out. A packed word of two values carries the number
    alone, which must differ from memory that was never written; and parity must go on alternating.
    """
    return (epoch + tl.where(((epoch + 2) & _EPOCH_MASK) == 0, 3, 1)) & _EPOCH_MASK


@triton.jit
def mark(epoch, call):
    """The stamp of a call, which its signals and words carry: the epoch in the low 24 bits, the
    call's mark in the high 8.

    Ranks that make different calls, both of them agreed on before, then wait for each other until
    the deadline instead of taking each other's data for their own.

    Args:
        call: int32 scalar: what ``Group.agree`` returned for the call's arguments (its high 8
            bits).
    """
    return (epoch & _EPOCH_MASK) | call


@triton.jit
def unmarked(stamp):
    """The epoch of a stamp without the mark of its call: a signal that no call waits for."""
    return stamp & _EPOCH_MASK


@triton.jit
def in_turn(ptr, epoch, count):
    """The one of two sets of ``count`` signals (or numbers) from ``ptr`` on whose turn it is in
    this call.

    A rank may be one call ahead of another, and then sets its signals of the next call before this
    one's were seen.
    """
    return ptr + (epoch & 1) * count


@triton.jit
def advance_epoch(epochs, epoch):
    """Say that this program is done with ``epoch``: its cell then holds the next one. The last
    thing a kernel does.

    The programs of a launch share out all cells, so that a later launch of any grid finds them
    equal: no atomic, no second launch, and no program can see a cell change before it has read its
    own.
    """
    following = following_epoch(epoch)
    programs = tl.num_programs(0)
    for first in range(tl.program_id(0), _MAX_PROGRAMS, programs * _CELLS):
        cells = first + programs * tl.arange(0, _CELLS)
        tl.store(epochs + cells, following, mask=cells < _MAX_PROGRAMS)


@triton.jit
def clear_old(ptr, count, epoch, group):
    """Every ``2**22`` calls: set this rank's signals or packed words that are older than ``2**20``
    calls to 0.

    Epochs come again after ``2**24`` calls. A signal that only some calls set, which nobody has set
    for exactly as long, would then pass for this call's. In all other calls this costs a
    comparison. A signal that a peer sets meanwhile is kept.

    Args:
        ptr: pointer to int32 signals or int64 packed words (rank 0's copy, as always); no counters
            may be among them.
        count: how many there are (int32 scalar); the programs of a launch share them out.
        epoch: of this call.
    """
    if (epoch & (_CLEARING_PERIOD - 1)) == _CLEARING_PERIOD - 2:
        own = peer_pointer(ptr, rank(group), group)
        lanes = tl.arange(0, _CLEARED)
        for first in range(tl.program_id(0) * _CLEARED, count, tl.num_programs(0) * _CLEARED):
            here = own + tl.minimum(first + lanes, count - 1)
            seen = tl.load(here, volatile=True)
            # What is a call or two ahead looks nearly as old as an epoch can be.
            age = (epoch - seen.to(tl.int32)) & _EPOCH_MASK
            old = (age >= _OLD) & (age < _EPOCH_MASK - _OLD)
            tl.atomic_cas(here, seen, tl.where(old, 0, seen), sem="relaxed", scope="sys")


# One-sided transfers


@triton.jit
def put(ptr, value, peer, group, mask=None):
    """Store a tile in ``peer``'s copy of ``ptr``. Relaxed: order it by :func:`signal` or
    :func:`fence`.

    ``peer`` may be a tile: then each element goes to its own peer.
    """
    store_to_peer(peer_pointer(ptr, peer, group), value, peer, rank(group), mask)


@triton.jit
def get(ptr, peer, group, mask=None, other=None):
    """Load a tile from ``peer``'s copy of ``ptr``, past the first-level cache. Relaxed; usually
    after a :func:`wait`.
    """
    return tl.load(peer_pointer(ptr, peer, group), mask=mask, other=other, cache_modifier=".cg")


@triton.jit
def fence(group):
    """Order all earlier puts of this program before all its later ones (acquire-release, system
    scope).
    """
    tl.debug_barrier()
    fence_system(tl.load(group[0] + _SCRATCH_ADDRESS).to(tl.pointer_type(tl.int32)))
    tl.debug_barrier()


# Signals


@triton.jit
def signal(ptr, epoch, peer, group, mask=None, ORDER: tl.constexpr = _RELEASE):
    """Set the int32 signal ``ptr`` on ``peer`` to ``epoch``.

    With order ``"release"`` (system scope) whoever has waited for it sees every earlier put of this
    program, by any of its threads; ``"relaxed"`` promises nothing. A signal has one writer, which
    sets it again only once its reader has seen it (:func:`in_turn`). ``ptr`` and ``peer`` may be
    tiles: several signals at once.
    """
    signal_peer(peer_pointer(ptr, peer, group), epoch, peer, rank(group), mask, ORDER)


@triton.jit
def put_signal(ptr, value, signal_ptr, epoch, peer, group, mask=None):
    """:func:`put` and then :func:`signal` with release order."""
    put(ptr, value, peer, group, mask)
    signal(signal_ptr, epoch, peer, group)


@triton.jit
def wait(ptr, epoch, peer, slice, group, mask):
    """Wait until this rank's signals ``ptr`` have reached ``epoch``: acquire, system scope.

    A signal has, where its mark is that of ``epoch`` and its number is that of ``epoch`` or of one
    of the next calls.

    Args:
        ptr: 1-D int32 tile of signals (rank 0's copy, as always).
        epoch: int32 scalar: the stamp or the number that is awaited.
        peer: tile of the ranks that set them, for the error.
        slice: scalar: what is awaited, for the error.
        mask: tile; signals outside it are not awaited.

    Returns:
        Whether they did (bool scalar). False after the deadline, or once the group is broken: the
        program must not use what it waited for, and should end.
    """
    # One look a thread, as in _sum_words: the sum over all copies decides, so that every thread has
    # the same answer.
    COPIES: tl.constexpr = triton.cdiv(num_threads(), ptr.shape[0])
    copy = tl.zeros([ptr.shape[0], COPIES], tl.int32) + tl.arange(0, COPIES)[None, :]
    here = peer_pointer(ptr, rank(group), group)[:, None] + copy * 0
    wanted = mask[:, None] & (copy >= 0)
    late = wanted & _is_behind(load_acquire(here, wanted), epoch)
    behind = tl.sum(tl.ravel(late.to(tl.int32)))
    arrived = 1
    looks = 0
    start = tl.zeros([], tl.int64)
    while behind > 0:
        pause()
        # Acquiring at every look would empty the first-level cache under the programs that compute.
        seen = tl.load(here, mask=wanted, other=0, volatile=True)
        late = wanted & _is_behind(seen, epoch)
        behind = tl.sum(tl.ravel(late.to(tl.int32)))
        if behind == 0:
            load_acquire(here, wanted)
        looks += 1
        if (behind > 0) & (looks % _LOOKS == 0):
            start = _start(start)
            if _over(start, group) > 0:
                first = tl.min(tl.ravel(tl.where(late, peer[:, None] + copy * 0, 1 << 30)))
                mine = late & (peer[:, None] + copy * 0 == first)
                _report(group, first, slice, epoch, tl.min(tl.ravel(tl.where(mine, seen, 2147483647))), _LATE)
                arrived = 0
                behind = 0
    tl.debug_barrier()  # what one thread has acquired, the others may now load
    return arrived > 0


@triton.jit
def _is_behind(seen, epoch):
    """Whether a signal is not this call's, nor one of the same mark a call or two later. Numbers
    wrap; marks do not.
    """
    return (((seen - epoch) & _EPOCH_MASK) >= _AHEAD) | (unmarked(seen ^ epoch) != (seen ^ epoch))


@triton.jit
def barrier(ptr, epoch, group, WORLD_SIZE: tl.constexpr):
    """Wait until the programs of this index on all ranks are here. Returns as :func:`wait`.

    Puts that any of them made before are then visible to all of them.

    Args:
        ptr: ``2 * WORLD_SIZE`` int32 signals of this program index alone: two sets, which take
            turns by the epoch's parity, for a rank may be one barrier ahead of another.
        epoch: int32 scalar: the stamp or the number of this barrier; consecutive ones differ in
            parity.
    """
    peers = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
    me = rank(group)
    others = (peers < WORLD_SIZE) & (peers != me)
    ptr = in_turn(ptr, epoch, WORLD_SIZE)
    signal(ptr + me + tl.zeros_like(peers), epoch, peers, group, others)
    return wait(ptr + peers, epoch, peers, tl.program_id(0), group, others)


# Packed words: values and their epoch in one 8-byte store, which arrives whole. No signal, no
# fence.


@triton.jit
def put_packed(ptr, value, epoch, peer, group, mask=None, VALUES: tl.constexpr = 1):
    """Store float32 values with ``epoch`` as int64 words in ``peer``'s copy of ``ptr``.

    Words need no order among themselves or with anything else: each carries the proof of its own
    arrival. One value a word costs twice the bytes of a :func:`put`, and two cost as many; both
    save the signal's round trip.

    Args:
        value: float32 tile of the shape of ``ptr``; with two values a word, ``[*shape, 2]``.
        VALUES: 1: all 32 bits of the value and of the epoch. 2: each value rounded to 20 bits
            (sign, 8 of exponent, 11 of mantissa, so that values of float16 and bfloat16 are kept
            exactly), and 24 bits of the epoch, without its mark.
    """
    if VALUES == 1:
        word = (value.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (epoch.to(tl.int64) & _TAG)
    else:
        tl.static_assert(VALUES == 2, "put_packed: a word holds one value or two")
        first, second = tl.split(_round_to_20_bits(value))
        pair = (first.to(tl.int64) << 32) | ((second.to(tl.int64) & _TAG) << 12)
        word = pair | (epoch.to(tl.int64) & _EPOCH_MASK)
    put(ptr, word, peer, group, mask)


@triton.jit
def _round_to_20_bits(value):
    """The bits of float32 values, the low 12 zero; to nearest, ties to even. A NaN stays one."""
    bits = value.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FF + ((bits >> 12) & 1)) & -0x1000
    return tl.where(value != value, 0x7FC00000, rounded)


@triton.jit
def _unpack(word, VALUES: tl.constexpr):
    """The float32 values of int64 words; two a word in a dimension of their own, the last."""
    first = (word >> 32).to(tl.int32)
    if VALUES == 1:
        return first.to(tl.float32, bitcast=True)
    else:
        second = (word >> 12).to(tl.int32)
        return (tl.join(first, second) & -0x1000).to(tl.float32, bitcast=True)


@triton.jit
def _carries(word, epoch, VALUES: tl.constexpr):
    return (_tag(word, VALUES) == epoch) if VALUES == 1 else (_tag(word, VALUES) == (epoch & _EPOCH_MASK))


@triton.jit
def _tag(word, VALUES: tl.constexpr):
    return word.to(tl.int32) if VALUES == 1 else word.to(tl.int32) & _EPOCH_MASK


@triton.jit
def get_packed(ptr, epoch, peer, slice, group, mask, VALUES: tl.constexpr = 1):
    """Wait for a tile of packed words, and unpack it.

    Args:
        ptr: 2-D int64 tile: where the words arrive.
        peer: tile that broadcasts with ``ptr``: the ranks that put them, for the error.
        slice, mask, VALUES: as in :func:`sum_packed`.

    Returns:
        The values (float32 tile); NaN after the deadline, or once the group is broken.
    """
    return _sum_words(ptr, None, 0, peer + tl.zeros(ptr.shape, tl.int32), epoch, slice, group, mask, 1, VALUES)


@triton.jit
def sum_packed(
    ptr, own, stride, epoch, slice, group, mask, WORLD_SIZE: tl.constexpr, VALUES: tl.constexpr = 1
):  # fmt: skip
    """Wait for one tile of packed words from every rank and add them: float32, in rank order.

    Args:
        ptr: 2-D int64 tile: where rank 0's words arrive; rank s's arrive at ``ptr + s * stride``.
        own: float32 tile: this rank's part, kept in registers; or None if it was put like the
            others'.
        slice: scalar: what is awaited, for the error.
        mask: tile of the shape of ``ptr``; words outside it are not awaited and count as zero.
        VALUES: in a word, as they were put. Two: ``own`` and the result are ``[*shape, 2]``.

    Returns:
        The sum (float32 tile); NaN after the deadline, or once the group is broken.
    """
    first = tl.zeros(ptr.shape, tl.int32)
    return _sum_words(ptr, own, stride, first, epoch, slice, group, mask, WORLD_SIZE, VALUES)


@triton.jit
def _sum_words(
    ptr, own, stride, first, epoch, slice, group, mask, SOURCES: tl.constexpr, VALUES: tl.constexpr
):  # fmt: skip
    """The sum over s of the words at ``ptr + s * stride``, which rank ``first + s`` puts there."""
    # A tile smaller than the program is held several times over, each copy loaded by another
    # thread. While words arrive, copies differ, and threads that judge by their own would part
    # ways. So copies get a dimension of their own: then the sum that decides is over all of them,
    # and every thread has the same answer.
    COPIES: tl.constexpr = triton.cdiv(num_threads(), ptr.shape[0] * ptr.shape[1])
    copy = tl.zeros([ptr.shape[0], ptr.shape[1], COPIES], tl.int32) + tl.arange(0, COPIES)[None, None, :]
    here = peer_pointer(ptr, rank(group), group)[:, :, None] + copy * 0
    # As a tile: the interpreter turns a scalar condition into integers when it meets a mask.
    me = rank(group) + copy * 0
    wanted = mask[:, :, None] & (copy >= 0)
    if own is not None and VALUES == 2:
        # What the others got: all ranks add the same
        own = _round_to_20_bits(own).to(tl.float32, bitcast=True)
    looks = 0
    missing = 1
    expired = 0
    start = tl.zeros([], tl.int64)
    total = _unpack(tl.zeros(copy.shape, tl.int64), VALUES)
    while missing > 0:
        # All ranks' words are loaded before the first is looked at: one round trip a look, not one
        # a rank.
        total = _unpack(tl.zeros(copy.shape, tl.int64), VALUES)
        absent = tl.zeros(copy.shape, tl.int32)
        for source in tl.static_range(SOURCES):
            awaited = wanted if own is None else wanted & (me != source)
            word = tl.load(here + source * stride, mask=awaited, other=0, volatile=True)
            here_now = _carries(word, epoch, VALUES)
            absent += (awaited & (here_now == 0)).to(tl.int32)
            value = _unpack(tl.where(here_now, word, 0), VALUES)
            if own is None:
                total += value
            elif VALUES == 1:
                total += tl.where(me == source, own[:, :, None], value)
            else:
                total += tl.where((me == source)[:, :, :, None], own[:, :, None, :], value)
        missing = tl.sum(tl.ravel(absent))
        looks += 1
        if missing > 0:
            pause()
        if (missing > 0) & (looks % _LOOKS == 0):
            start = _start(start)
            expired = _over(start, group)
        missing = missing * (1 - expired)
    if expired > 0:
        _report_missing_words(here, stride, first[:, :, None] + copy * 0, epoch, slice, group, wanted, SOURCES, VALUES)
    # Every carried variable is used here: Triton 3.6 fails on a loop that carries a tile and drops
    # another result.
    total = tl.where((expired == 0) & (missing == 0) & (looks > 0) & (start >= 0), total, float("nan"))
    counted = copy == 0 if VALUES == 1 else (copy == 0)[:, :, :, None]
    return tl.sum(tl.where(counted, total, 0.0), 2)


# What did not come


@triton.jit
def nan_unless(arrived, value):
    """``value``, a tile of floats, or NaN where ``arrived`` (int32 scalar) is 0: a failed wait must
    not pass a number on.
    """
    nothing = tl.full(value.shape, float("nan"), tl.float32).to(value.dtype)  # Triton 3.6's interpreter has no constants of bfloat16
    return tl.where(arrived + tl.zeros(value.shape, tl.int32) > 0, value, nothing)


@triton.jit
def fill_nan(target, count):
    """Fill ``count`` elements of this rank's memory from the pointer ``target`` on: a result that
    could not be computed.
    """
    lanes = tl.arange(0, 1024)
    for start in range(0, count, 1024):
        nothing = tl.full([1024], float("nan"), tl.float32).to(target.dtype.element_ty)
        tl.store(target + start + lanes, nothing, mask=start + lanes < count)


# Giving up


@triton.jit
def _lanes():
    """A tile with one element for each thread of the program."""
    return tl.arange(0, num_threads())


@triton.jit
def _start(start):
    """When a wait began, as far as its deadline is concerned: the first time that it looks at the
    clock.
    """
    return tl.where(start == 0, tl.max(clock_ns(_lanes()), 0), start)


@triton.jit
def _over(start, group):
    """1 if a wait that began at ``start`` must end (its deadline has passed, or another wait's
    has), else 0.

    Threads read clock and flag at different times; the maximum over all gives each the same answer.
    """
    lanes = _lanes()
    broken = tl.load(tl.load(group[0] + _BROKEN_ADDRESS).to(tl.pointer_type(tl.int32)) + lanes * 0, volatile=True)
    deadline = tl.load(group[0] + _DEADLINE_NS + lanes * 0, volatile=True)
    return tl.max(((broken != 0) | (clock_ns(lanes) - start > deadline)).to(tl.int32), 0)


@triton.jit
def report_miscount(group, piece, wanted, seen):
    """Record, for the host, that a kernel has counted ``seen`` tiles of a piece that has
    ``wanted``; the group is broken then.
    """
    _report(group, rank(group), piece, wanted, seen, _MISCOUNTED)


@triton.jit
def _report(group, peer, slice, wanted, seen, CODE: tl.constexpr):
    """Record a failure, if it is the first: the flag for this rank's programs, the rest for the
    host.
    """
    broken = tl.load(group[0] + _BROKEN_ADDRESS).to(tl.pointer_type(tl.int32))
    if tl.atomic_cas(broken, 0, 1, sem="relaxed", scope="gpu") == 0:
        record = tl.load(group[0] + _RECORD_ADDRESS).to(tl.pointer_type(tl.int32))
        tl.store(record + _RECORD_OPERATOR, tl.load(group[0] + _OPERATOR).to(tl.int32))
        tl.store(record + _PEER, peer)
        tl.store(record + _SLICE, slice)
        tl.store(record + _WANTED, wanted)
        tl.store(record + _SEEN, seen)
        tl.debug_barrier()
        tl.atomic_xchg(record + _CODE, CODE, sem="release", scope="sys")


@triton.jit
def _report_missing_words(
    here, stride, first, epoch, slice, group, mask, SOURCES: tl.constexpr, VALUES: tl.constexpr
):  # fmt: skip
    late = 1 << 30
    seen = 0
    for step in tl.static_range(SOURCES):
        source = SOURCES - 1 - step
        awaited = mask & (first + source != rank(group))
        word = tl.load(here + source * stride, mask=awaited, other=0, volatile=True)
        absent = awaited & (_carries(word, epoch, VALUES) == 0)
        peer = tl.min(tl.ravel(tl.where(absent, first + source, 1 << 30)))
        if peer < late:
            late = peer
            seen = tl.min(tl.ravel(tl.where(absent & (first + source == peer), _tag(word, VALUES), 2147483647)))
    if late < (1 << 30):
        _report(group, late, slice, epoch, seen, _LATE)
