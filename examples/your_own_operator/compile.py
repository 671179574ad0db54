"""Compile the kernel of ``gemm_broadcast`` for GPUs that need not be here, as a test of it.

Triton decides by TRITON_INTERPRET, when a kernel is decorated, whether to interpret or to compile
it. So this runs in a process of its own, without that variable.
"""

import triton
from gemm_broadcast.kernel import gemm_broadcast
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from interlace.gemm.kernels.tiles import Sending, Tiling

TARGETS = (GPUTarget("cuda", 90, 32), GPUTarget("cuda", 100, 32), GPUTarget("hip", "gfx942", 64))

# What Triton would see of a launch's arguments: pointers, addresses as int64, other numbers.
TYPES = {
    **dict.fromkeys(("x", "w", "y"), "*bf16"),
    "epochs": "*i32",
    "ctx": "*i64",  # "*u64" compiles what a trace runs
    **dict.fromkeys(("landing_address", "signals"), "i64"),
    **dict.fromkeys(("call", "M", "N", "K", "x_stride", "w_stride"), "i32"),
}
# What the launch gives by name: ``interlace.gemm.launch.constants``, and None for no bias.
CONSTANTS = {
    "bias": None,
    "ROOT": 0,
    "SENDING": Sending(
        world_size=4, dtype="bf16", align=8, tile_stores=False, interleave=1,
        in_rank_order=False,
    ),
    "TILING": Tiling(
        block_m=64, block_n=64, block_k=32, group_m=8, descriptors=False, w_along_k=True,
    ),
}  # fmt: skip


def main() -> None:
    signature = TYPES | dict.fromkeys(CONSTANTS, "constexpr")
    for target in TARGETS:
        compiled = triton.compile(
            ASTSource(gemm_broadcast, signature, CONSTANTS),
            target=target,
            options={"num_warps": 4, "num_stages": 3},
        )
        binary = "cubin" if target.backend == "cuda" else "hsaco"
        print(f"{target.backend} {target.arch}: {len(compiled.asm[binary])} bytes")


if __name__ == "__main__":
    main()
