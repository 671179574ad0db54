"""What the compiler makes of rows that 16 does not divide. A kernel of an interpreter has no
instructions, so it is compiled in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from interlace.comm.launching.kernels import known_factor

WIDTHS = {1: 1, 2: 2, 4: 4, 8: 8}
"""Elements of 16 bits that are loaded at once, by the factor; 128 bits are the most."""


def _loads(factor: int) -> dict[str, int]:
    """Return how many loads and stores of global memory a copy of rows has, by their width."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tests.language import kernels

    names = ("x", "y", "rows", "columns", "stride", "FACTOR")
    types = dict(zip(names, ("*bf16", "*bf16", "i32", "i32", "i32", "constexpr"), strict=True))
    aligned: Any = {(place,): [["tt.divisibility", 16]] for place in (0, 1)}
    source = ASTSource(kernels.copy_rows, types, {"FACTOR": factor}, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    found: dict[str, int] = {}
    for vector, bits in re.findall(r"(?:ld|st)\.global(?:\.v(\d))?\.b(\d+)", compiled.asm["ptx"]):
        width = str(int(vector or 1) * int(bits) // 16)
        found[width] = found.get(width, 0) + 1
    return found


def test_rows_load_as_many_elements_at_once_as_their_alignment_allows() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.language.test_multiple_of", *map(str, WIDTHS)],
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    for found, width in zip(json.loads(done.stdout), WIDTHS.values(), strict=True):
        assert found.keys() == {str(width)}


@pytest.mark.parametrize(
    ("sizes", "factor"),
    [((4096,), 1), ((4096, 1000), 8), ((1000, 12), 4), ((6,), 2), ((4096, 7), 1), ((0, 48), 1)],
)
def test_the_factor_says_what_triton_does_not_know(sizes: tuple[int, ...], factor: int) -> None:
    assert known_factor(*sizes) == factor


if __name__ == "__main__":
    print(json.dumps([_loads(int(factor)) for factor in sys.argv[1:]]))
