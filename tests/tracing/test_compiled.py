"""What a trace costs in compiled kernels: nothing when there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import interlace.language as il
from benchmarks.compare_ptx import normalise
from interlace.language import primitives
from tests.compilers import TARGETS


@triton.jit
def recording(data, signals, ctx, epoch, BLOCK: tl.constexpr):
    group = il.join(ctx)
    lanes = tl.arange(0, BLOCK)
    peers, is_peer = il.other_ranks(il.rank(group), 2)
    ptr, flags = il.pointer(data, tl.float32), il.pointer(signals, tl.int32)
    il.record("tile", epoch, group)
    value = lanes.to(tl.float32) * epoch
    il.record("computed", epoch, group)
    il.put(ptr + lanes, value, 1, group)
    il.signal(flags + peers, epoch, peers, group, is_peer)
    il.wait(flags + peers, epoch, peers, 0, group, is_peer)
    il.record("mark", 7, group)


@triton.jit
def not_recording(data, signals, ctx, epoch, BLOCK: tl.constexpr):
    group = il.join(ctx)
    lanes = tl.arange(0, BLOCK)
    peers, is_peer = il.other_ranks(il.rank(group), 2)
    ptr, flags = il.pointer(data, tl.float32), il.pointer(signals, tl.int32)
    value = lanes.to(tl.float32) * epoch
    # What put and signal were before kernels could record.
    primitives.store_to_peer(
        il.peer_pointer(ptr + lanes, 1, group), value, 1, il.rank(group), None
    )
    primitives.signal_peer(
        il.peer_pointer(flags + peers, peers, group), epoch, peers, il.rank(group), is_peer,
        "release",
    )
    il.wait(flags + peers, epoch, peers, 0, group, is_peer)


def compiled(kernel, ctx, target):
    types = {"data": "i64", "signals": "i64", "ctx": ctx, "epoch": "i32", "BLOCK": "constexpr"}
    source = ASTSource(kernel, types, {"BLOCK": 256})
    target = GPUTarget(*TARGETS[target])
    return triton.compile(source, target=target, options={"num_warps": 4})


report = {}
for target in TARGETS:
    for ctx in ("*i64", "*u64"):
        assembly = compiled(recording, ctx, target).asm
        text = assembly["ptx"] if target != "gfx942" else assembly["amdgcn"]
        clock = "%globaltimer" if target != "gfx942" else "s_memrealtime"
        report[f"{target} {ctx}"] = text.count(clock)
ptx = [normalise(compiled(each, "*i64", "sm_90").asm["ptx"]) for each in (recording, not_recording)]
report["same"] = ptx[0] == ptx[1]
report["smid"] = [
    compiled(recording, ctx, "sm_90").asm["ptx"].count("%smid") for ctx in ("*i64", "*u64")
]


@triton.jit
def misspelt(ctx):
    il.record("tiles", 0, il.join(ctx))


try:
    triton.compile(
        ASTSource(misspelt, {"ctx": "*i64"}, {}), target=GPUTarget(*TARGETS["sm_90"])
    )
except triton.CompilationError as error:
    report["refused"] = str(error.__cause__ or error)
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def report(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> dict[str, object]:
    """What a process says that compiles kernels, instead of interpreting them; Triton's cache has
    those that have not changed since the last tests.
    """
    folder = tmp_path_factory.mktemp("compiled")
    (folder / "kernels_of_a_trace.py").write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    environment["TRITON_CACHE_DIR"] = str(pytestconfig.cache.mkdir("triton"))
    done = subprocess.run(
        [sys.executable, str(folder / "kernels_of_a_trace.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    loaded: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return loaded


def test_without_a_trace_the_ptx_is_the_same(report: dict[str, object]) -> None:
    assert report["same"]
    assert report["smid"][0] == 0  # type: ignore[index]


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942"])
def test_with_a_trace_each_event_reads_the_clock(report: dict[str, object], target: str) -> None:
    """Begin, tile, computed, put, signals, wait, arrived and mark. Deadlines read it as well."""
    without, traced = (report[f"{target} {kind}"] for kind in ("*i64", "*u64"))
    assert traced - without == 8  # type: ignore[operator]


def test_a_kind_that_there_is_not_is_refused_without_a_trace_too(report: dict[str, object]) -> None:
    assert "the kind of an event must be tile, computed or mark" in str(report["refused"])
