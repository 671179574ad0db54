"""Instructions of GPUs that the primitives consist of; ``_interpreted`` has the same names for the
CPU backend.
"""

import triton
import triton.language as tl
from triton.language import core

from interlace.comm.runtime.context import KINDS

_LENGTH_WITHOUT_RINGS = 3  # of the value of join
# Without a pause, polling slows the programs that still compute; 20 to 100 ns are alike
# (docs/decisions/0005).
_PAUSE_NS = 20


@core.extern
def is_cuda(_semantic=None):
    """Tell if the kernel is compiled for an NVIDIA GPU (constexpr bool)."""
    return core.constexpr(_semantic.builder.options.backend_name == "cuda")


@core.extern
def num_threads(_semantic=None):
    """Return the number of threads of a program (constexpr int)."""
    options = _semantic.builder.options
    return core.constexpr(options.num_warps * getattr(options, "warp_size", 32))


@core.extern
def _ticks(lanes, _semantic=None):
    """Read each thread's clock, in ticks, as an int64 tile of the shape of ``lanes``."""
    if _semantic.builder.options.backend_name == "cuda":
        asm, constraints = "mov.u64 $0, %globaltimer;", "=l,r"
    else:
        asm, constraints = "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s,v"
    return core.inline_asm_elementwise(
        asm, constraints, [lanes], dtype=core.int64, is_pure=False, pack=1, _semantic=_semantic
    )


@core.extern
def _ns_per_tick(_semantic=None):
    """Return the number of nanoseconds per tick of the clock (constexpr int)."""
    # gfx942 counts at 100 MHz (CDNA3 instruction set architecture, s_memrealtime).
    return core.constexpr(1 if _semantic.builder.options.backend_name == "cuda" else 10)


@triton.jit
def clock_ns(lanes):
    """Read each thread's clock in ns: int64 of the shape of ``lanes``, an int32 tile or scalar."""
    return _ticks(lanes) * _ns_per_tick()


@triton.jit
def to_float8(value):
    """Round float32 numbers to float8_e4m3fn."""
    return value.to(tl.float8e4nv)


@core.extern
def processor(lane, _semantic=None):
    """Return the number of the SM, as int64 of the shape of the int32 scalar or tile ``lane``.

    On gfx942 the number is made of the accelerator die (bits 8 to 11), and the shader engine and
    compute unit in it.
    """
    if _semantic.builder.options.backend_name == "cuda":
        asm, constraints = "{ .reg .u32 s; mov.u32 s, %smid; cvt.u64.u32 $0, s; }", "=l,r"
    else:
        asm = (
            "s_getreg_b32 $0, hwreg(HW_REG_HW_ID, 8, 8)\n"
            "s_getreg_b32 vcc_lo, hwreg(HW_REG_XCC_ID, 0, 4)\n"
            "s_lshl_b32 vcc_lo, vcc_lo, 8\ns_or_b32 $0, $0, vcc_lo"
        )
        number = core.inline_asm_elementwise(
            asm, "=s,v,~{vcc},~{scc}", [lane], dtype=core.int32, is_pure=False, pack=1,
            _semantic=_semantic,
        )
        return number.to(core.int64, _semantic=_semantic)
    return core.inline_asm_elementwise(
        asm, constraints, [lane], dtype=core.int64, is_pure=False, pack=1, _semantic=_semantic
    )


@core.extern
def records(group, _semantic=None):
    """Tell if a program of this group's value records events (constexpr bool)."""
    return core.constexpr(len(group) > _LENGTH_WITHOUT_RINGS)


@core.extern
def asks_for_records(ctx, _semantic=None):
    """Tell if a context asks the kernel to record events (constexpr bool)."""
    return core.constexpr(ctx.dtype.element_ty == core.uint64)


@core.extern
def is_tile(value, _semantic=None):
    """Tell if a value is a tile, not a scalar (constexpr bool)."""
    return core.constexpr(isinstance(value, core.tensor) and value.type.is_block())


@core.extern
def tile_bytes(value, _semantic=None):
    """Return the bytes of a tile or a scalar (constexpr int)."""
    elements = value.type.numel if value.type.is_block() else 1
    return core.constexpr(elements * value.dtype.primitive_bitwidth // 8)


@core.extern
def kind_of_event(name, _semantic=None):
    """Return the number of a kind of events that a kernel may record (constexpr int)."""
    return core.constexpr(KINDS[core._unwrap_if_constexpr(name)])


@core.extern
def _fence_every_thread(_semantic=None):
    """Order each thread's own stores: acquire-release, system scope."""
    core.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=core.int32, is_pure=False, pack=1,
        _semantic=_semantic
    )


@triton.jit
def fence_system(scratch):
    """Order this program's stores before its later ones: acquire-release, system scope.

    Args:
        scratch: Pointer to an int32 of this rank that nothing reads.
    """
    if is_cuda():
        _fence_every_thread()
    else:
        # Triton has no fence for every backend. Instead one thread stores with release order, after
        # a barrier that brings the other threads' stores into its past.
        tl.debug_barrier()
        tl.atomic_xchg(scratch, 0, sem="release", scope="sys")


@core.extern
def _load_acquire_cuda(ptr, mask, _semantic=None):
    """Load int32 values with acquire order at system scope; 0 where the int32 ``mask`` is 0."""
    asm = (
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; "
        "@p ld.acquire.sys.global.b32 $0, [$1]; }"
    )
    return core.inline_asm_elementwise(
        asm, "=r,l,r", [ptr, mask], dtype=core.int32, is_pure=False, pack=1, _semantic=_semantic
    )


@triton.jit
def load_acquire(ptr, mask):
    """Load int32 signals; stores that were released before them are visible to the loading thread.

    Args:
        ptr: Tile of int32 pointers.
        mask: bool tile; signals outside it are 0.
    """
    if is_cuda():
        return _load_acquire_cuda(ptr, mask.to(tl.int32))
    else:
        return tl.atomic_add(ptr, 0, mask=mask, sem="acquire", scope="sys")


@triton.jit
def load_whole(ptr, mask):
    """Load integers that a peer may store meanwhile; 0 outside ``mask``."""
    return tl.load(ptr, mask=mask, other=0, volatile=True)


@core.extern
def require_peers(primitive, peer, mask, group, _semantic=None):
    """Do nothing, in no instruction: ranks of peers are checked in the interpreter only."""


@core.extern
def require_grid(most, _semantic=None):
    """Do nothing, in no instruction: grids are checked in the interpreter only."""


@core.extern
def require_aligned(address, _semantic=None):
    """Do nothing, in no instruction: addresses are checked in the interpreter only."""


@core.extern
def require_memory(primitive, ptr, peer, mask, group, _semantic=None):
    """Do nothing, in no instruction: addresses are checked in the interpreter only."""


@triton.jit
def store_to_peer(ptr, value, peer, rank, mask):
    """Store a tile at pointers into the memory of ``peer``; relaxed.

    ``peer`` and ``rank`` are for the interpreter, which counts the traffic.
    """
    # Written through to the system, so that no cache of this GPU holds the data back.
    tl.store(ptr, value, mask=mask, cache_modifier=".wt")


@triton.jit
def signal_peer(ptr, epoch, peer, rank, mask, ORDER: tl.constexpr):
    """Set int32 signals in the memory of ``peer`` to ``epoch``, with order ``ORDER``."""
    tl.static_assert(
        ORDER == "release" or ORDER == "relaxed", "signal: order must be release or relaxed"
    )
    if ORDER == "release":
        # Triton puts no barrier between a tile's stores and a release, which one thread makes:
        # without this barrier the stores of other warps would not be covered.
        tl.debug_barrier()
    tl.atomic_xchg(ptr, epoch, mask=mask, sem=ORDER, scope="sys")


@core.extern
def _sleep(_semantic=None):
    """Let the thread sleep: 20 ns, or 128 cycles on gfx942."""
    if _semantic.builder.options.backend_name == "cuda":
        asm = f"nanosleep.u32 {_PAUSE_NS}; mov.u32 $0, 0;"
        constraints = "=r"
    else:
        # s_sleep counts in units of 64 cycles.
        asm, constraints = "s_sleep 2\nv_mov_b32 $0, 0", "=v"
    core.inline_asm_elementwise(
        asm, constraints, [], dtype=core.int32, is_pure=False, pack=1, _semantic=_semantic
    )


@triton.jit
def pause(looks):
    """Pause between two looks at a signal: leave the memory system to programs that compute.

    ``looks`` is for the interpreter, whose pauses grow.
    """
    _sleep()
