"""Compile kernels that put over the network, and say what the assembler made of them; run by
``test_compiled`` without TRITON_INTERPRET, where a kernel would be a Python function.
"""

import contextlib
import importlib.util
import io
import json
import re
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from interlace_gin.kernels import await_nothing, exchange_ranges
from tests.compilers import TARGETS

_ROOT = Path(__file__).parents[2]
_TYPES = {
    **dict.fromkeys(("x", "y"), "*fp32"),
    **dict.fromkeys(("peers", "arrived", "counters"), "*i32"),
    **dict.fromkeys(("half", "rounds", "signal", "peer"), "i32"),
    "ctx": "*i64",
}  # all others are int64: addresses, handles and bytes
_CONSTANTS = {"WORLD_SIZE": 4, "SLICES": 4, "BLOCKS": 2, "BLOCK": 256, "SIZE": 512}


def _example():
    """The kernels of the example."""
    path = _ROOT / "examples" / "07_puts_over_the_network.py"
    spec = importlib.util.spec_from_file_location("example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compiled(kernel, target, libraries, traced=False):
    """What is in the PTX of a kernel, and what the assembler says of it."""
    constants = {name: _CONSTANTS[name] for name in kernel.arg_names if name in _CONSTANTS}
    types = {name: _TYPES.get(name, "i64") for name in kernel.arg_names}
    if traced:
        types["ctx"] = "*u64"
    source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constants)
    with contextlib.redirect_stdout(io.StringIO()) as log:
        compiled = triton.compile(
            source, target=GPUTarget(*TARGETS[target]), options={"extern_libs": libraries}
        )
    assert compiled.asm["cubin"]
    ptx, said = compiled.asm["ptx"], log.getvalue()
    return {
        "unresolved": re.findall(r"\.extern \.func .*?(\w+)\s*$", ptx, re.MULTILINE),
        "doorbells": len(re.findall(r"st\.mmio\.relaxed\.sys\.global", ptx)),
        "proxy_stores": len(re.findall(r"st\.relaxed\.sys\.global\.\S*b128", ptx)),
        "acquires": len(re.findall(r"ld\.acquire\.sys\.b64", ptx)),
        "relaxed_looks": len(re.findall(r"ld\.relaxed\.sys\.b64", ptx)),
        "system_releases": len(re.findall(r"fence\.(?:release|acq_rel|sc)\.sys", ptx)),
        "registers": max(int(n) for n in re.findall(r"Used (\d+) registers", said)),
        "spilled_bytes": sum(int(n) for n in re.findall(r"(\d+) bytes spill", said)),
    }


def main(text: str, device_code: str) -> None:
    """Print everything that is compiled as JSON.

    Args:
        text: ``gin.ll``, or a variant of it.
        device_code: NCCL's bitcode.
    """
    libraries = (("interlace_gin", text), ("nccl", device_code))
    example = _example()
    kernels = [
        exchange_ranges, await_nothing, example.double_and_put,
        example.collect,
    ]  # fmt: skip
    found = {
        f"{kernel.__name__} {target}": _compiled(kernel, target, libraries)
        for kernel in kernels
        for target in ("sm_90", "sm_100")
    }
    found["traced"] = _compiled(exchange_ranges, "sm_90", libraries, traced=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
