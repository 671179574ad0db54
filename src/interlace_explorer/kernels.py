"""Kernels that ask the primitives of ``interlace.language`` whether a wait is over."""

import triton
import triton.language as tl

from interlace.language import packed, primitives


@triton.jit
def judge_signals(seen, awaited, out, N: tl.constexpr):
    """Store, for each of ``N`` signals, 1 if it ends a wait for ``awaited``, and 0 if not."""
    i = tl.arange(0, N)
    behind = primitives.is_behind(tl.load(seen + i), tl.load(awaited + i))
    tl.store(out + i, (behind == 0).to(tl.int32))


@triton.jit
def judge_words(seen, awaited, out, N: tl.constexpr, VALUES: tl.constexpr):
    """Store, for each of ``N`` packed words, 1 if it is of epoch ``awaited``, and 0 if not."""
    i = tl.arange(0, N)
    arrived = packed.carries(tl.load(seen + i), tl.load(awaited + i), VALUES) != 0
    tl.store(out + i, arrived.to(tl.int32))
