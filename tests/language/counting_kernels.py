"""Kernels of ``test_counting``; imported by ranks only, where the interpreter is on."""

import triton
import triton.language as tl

import interlace.language as il


@triton.jit
def count_last(counter, lasts, SKIP: tl.constexpr):
    """Every program except the first ``SKIP`` arrives; the last one stores its index and the number
    of last programs.
    """
    program, members = tl.program_id(0), tl.num_programs(0) - SKIP
    if program >= SKIP:  # noqa: SIM102 -- only members may arrive
        if il.arrive_last(counter, program - SKIP, members):
            tl.store(lasts + tl.load(lasts + 7), program)
            tl.store(lasts + 7, tl.load(lasts + 7) + 1)
