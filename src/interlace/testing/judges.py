"""Whether waits are over, asked of the primitives themselves."""

import triton
import triton.language as tl

from interlace.language import packed, primitives


@triton.jit
def judge_signals(seen, wanted, out, N: tl.constexpr):
    """For each of ``N`` signals, 1 if it lets a wait for ``wanted`` end."""
    i = tl.arange(0, N)
    behind = primitives.is_behind(tl.load(seen + i), tl.load(wanted + i))
    tl.store(out + i, (behind == 0).to(tl.int32))


@triton.jit
def judge_words(seen, wanted, out, N: tl.constexpr, VALUES: tl.constexpr):
    """For each of ``N`` packed words, 1 if it is of epoch ``wanted``."""
    i = tl.arange(0, N)
    tl.store(
        out + i,
        (packed.carries(tl.load(seen + i), tl.load(wanted + i), VALUES) != 0).to(tl.int32),
    )
