"""Quantise blocks to float8, and gather codes and scales in the same launch."""

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import interlace.language as il
from benchmarks.parallel_kernel_bench.exchange import begin, run


@triton.jit(do_not_specialize=["data", "signals", "mark", "half"])
def quantise_kernel(
    x, codes, scales, data, signals, epochs, ctx, mark, half,
    BLOCKS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Quantise ``ROWS`` blocks of ``SIZE`` elements per program; four codes travel as a word."""
    epoch, stamp, group, me, half_at, flags = begin(
        data, signals, epochs, ctx, mark, half, WORLD_SIZE
    )
    COUNT: tl.constexpr = BLOCKS * SIZE // 4
    code_slots = il.pointer(half_at, tl.int32)
    scale_slots = il.pointer(half_at + 4 * WORLD_SIZE * COUNT, tl.float32)
    block = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i, inside = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :], block[:, None] < BLOCKS
    tile = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(tile), 1) / 448.0
    code = (tile / tl.where(scale == 0.0, 1.0, scale)[:, None]).to(tl.float8e4nv)
    tl.store(codes + 4 * me * COUNT + i, code, mask=inside)
    tl.store(scales + me * BLOCKS + block, scale, mask=block < BLOCKS)
    # Puts of the codes themselves would be a byte each, and came out wrong with Triton 3.6.
    tl.debug_barrier()
    words = codes.to(tl.pointer_type(tl.int32), bitcast=True)
    word = tl.program_id(0) * (ROWS * SIZE // 4) + tl.arange(0, ROWS * SIZE // 4)
    value = tl.load(words + me * COUNT + word, mask=word < COUNT, cache_modifier=".cg")
    for step in tl.static_range(1, WORLD_SIZE):
        peer = (me + step) % WORLD_SIZE
        il.put(code_slots + me * COUNT + word, value, peer, group, word < COUNT)
        il.put(scale_slots + me * BLOCKS + block, scale, peer, group, block < BLOCKS)
    arrived = il.barrier(flags, stamp, group, WORLD_SIZE)
    for step in tl.static_range(1, WORLD_SIZE):
        source = (me + step) % WORLD_SIZE
        value = il.get(code_slots + source * COUNT + word, me, group, word < COUNT)
        scale = il.get(scale_slots + source * BLOCKS + block, me, group, block < BLOCKS)
        scale = il.nan_unless(arrived.to(tl.int32), scale)
        tl.store(words + source * COUNT + word, value, mask=word < COUNT)
        tl.store(scales + source * BLOCKS + block, scale, mask=block < BLOCKS)
    il.advance_epoch(epochs, epoch)


def solution(
    local_tensor: torch.Tensor, block_size: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, *inner, columns = local_tensor.shape
    blocks, ranks = local_tensor.numel() // block_size, dist.get_world_size()
    shape = ranks * rows, *inner, columns
    codes = local_tensor.new_empty(shape, dtype=torch.float8_e4m3fn)
    scales = local_tensor.new_empty((*shape[:-1], columns // block_size), dtype=torch.float32)
    run(
        quantise_kernel, triton.cdiv(blocks, 32), ranks * blocks * (block_size + 4), local_tensor,
        codes, scales, BLOCKS=blocks, SIZE=block_size, ROWS=32,
    )  # fmt: skip
    return codes, scales
