"""What a call of a compiled program costs the host, measured on a machine without a GPU.

    python benchmarks/host_without_gpu.py [--calls 5000]

Two calls of ``gemm_all_reduce``, found by their form and launched by Triton's own launcher, with a
driver that does nothing (compiled here, needs ``cc``): one of many rows with a residual and a norm,
without the product, as the compiled program of an engine's eager prefill makes it; and one of one
row, as a program decodes that is not compiled. One rank, tensors on the CPU. Two times are printed
for each way into the operator: in a loop, the least of seven, of this thread's processor time; and
the median behind other code, which fills the caches as a program does.

Compare trees by setting ``PYTHONPATH``, in turns, on a machine that does nothing else. It says
nothing of what the driver and the library take.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import inspect
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROWS, COLUMNS, INNER = 300, 4096, 16
OPERATOR = "gemm_all_reduce_norm"

DRIVER = r"""
#include <stddef.h>
#include <string.h>
#include <stdint.h>
static char any[64];
int launches;
int cuInit(unsigned f) { return 0; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGetCount(int *c) { *c = 1; return 0; }
int cuDeviceGet(int *d, int o) { *d = 0; return 0; }
/* Compute capability 9.0, 132 processors, warps of 32, 227 KiB of shared memory. */
int cuDeviceGetAttribute(int *v, int a, int d) {
  *v = a == 75 ? 9 : a == 76 ? 0 : a == 97 ? 232448 : a == 16 ? 132 : a == 10 ? 32 : 65536;
  return 0;
}
int cuCtxGetCurrent(void **c) { *c = any; return 0; }
int cuCtxSetCurrent(void *c) { return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = any; return 0; }
int cuCtxGetDevice(int *d) { *d = 0; return 0; }
int cuCtxSetLimit(int l, size_t v) { return 0; }
int cuCtxGetLimit(size_t *v, int l) { *v = 0; return 0; }
int cuModuleLoadData(void **m, const void *i) { *m = any; return 0; }
int cuModuleUnload(void *m) { return 0; }
int cuModuleGetFunction(void **f, void *m, const char *n) { *f = any; return 0; }
int cuFuncGetAttribute(int *v, int a, void *f) { *v = a == 0 ? 1024 : a == 3 ? 0 : 32; return 0; }
int cuFuncSetAttribute(void *f, int a, int v) { return 0; }
int cuFuncSetCacheConfig(void *f, int c) { return 0; }
int cuGetErrorString(int e, const char **s) { *s = "none"; return 0; }
int cuPointerGetAttribute(void *d, int a, uint64_t p) { *(uint64_t *)d = p; return 0; }
int cuPointerGetAttributes(unsigned n, int *a, void **d, uint64_t p) { return 0; }
int cuLaunchKernelEx(const void *c, void *f, void **p, void **e) { launches++; return 0; }
int cuStreamIsCapturing(void *s, int *v) { *v = 0; return 0; }
int cuOccupancyMaxActiveClusters(int *n, void *f, const void *c) { *n = 1; return 0; }
int cuTensorMapEncodeTiled(void *m) { memset(m, 0, 128); return 0; }
int cuTensorMapEncodeIm2col(void *m) { return 0; }
"""


def main() -> None:
    """Compile the driver and measure in a process that loads it, or be that process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=5000, help="Calls of a loop; 0: no times.")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.calls)
        return
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "driver.c", Path(folder) / "libcuda.so.1"
        source.write_text(DRIVER)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        (Path(folder) / "libcuda.so").symlink_to(library)
        environment = {
            **os.environ, "LD_LIBRARY_PATH": folder, "TRITON_LIBCUDA_PATH": folder,
            "TRITON_CACHE_DIR": f"{folder}/cache", "TRITON_INTERPRET": "0",
        }  # fmt: skip
        command = [sys.executable, __file__, "--measure", "--calls", str(options.calls)]
        subprocess.run(command, env=environment, check=True)


def measure(calls: int) -> None:
    """Print the times of both calls."""
    import torch

    group = group_on_cpu()
    kinds = {
        "many rows, norm, from a compiled program": many_rows,
        "one row, from a program": one_row,
    }
    for name, prepare in kinds.items():
        ways = prepare(group)  # memory that grows forgets the calls before
        *_, played = ways.values()
        with torch.inference_mode():
            count = functions_entered(played)
            print(f"{name}: enters {count} functions of Python when it is played")
            for way, call in ways.items() if calls else ():
                print_times(f"  {way}", call, calls)


def functions_entered(call: Callable[[], Any]) -> int:
    """Return the number of functions of Python that a call enters, which has come before."""
    functions: list[str] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            functions.append(frame.f_code.co_name)

    for _ in range(10):
        call()
    stub = ctypes.c_int.in_dll(ctypes.CDLL("libcuda.so.1"), "launches")
    before = stub.value
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    assert stub.value == before + 1, "the call was not launched"
    return len(functions)


def group_on_cpu() -> Any:
    """Return a group of one rank whose calls are found and launched as on a GPU."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    c: Any = torch._C
    # As torch's own, these are no functions of Python. The device of the CPU has no number.
    c._cuda_getCurrentRawStream, c._cuda_getDevice = {None: 0, 0: 0}.get, {}.clear
    c._cuda_isCurrentStreamCapturing = ().__len__
    cuda: Any = torch.cuda
    cuda.is_current_stream_capturing, cuda.current_device = lambda: False, lambda: 0
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver

    driver.set_active(CudaDriver())
    active: Any = driver.active
    active.get_device_capability = lambda device=0: (9, 0)
    active.get_current_stream, active.get_current_device = lambda device: 0, lambda: 0

    import interlace

    group = interlace.group_of(device="cpu")
    stream: Any = object()
    group.streams._order.streams[0] = group.streams._order.executed = stream
    group.replays.is_enabled = True
    return group


def many_rows(group: Any) -> dict[str, Callable[[], Any]]:
    """Return the ways into a call of many rows, the last one by its tape."""
    import torch
    import torch.distributed as dist

    from interlace.comm.groups.registration import entrance
    from interlace.comm.host.agreement import Family
    from interlace.comm.launching.kernels import Launch
    from interlace.comm.replay import tapes
    from interlace.gemm.epilogue import Epilogue, Normed
    from interlace.gemm.operands import Operands
    from interlace.operators.gemm_all_reduce import normed, normed_launch
    from interlace.operators.gemm_all_reduce.kernels.norm import NormForm
    from interlace.operators.gemm_all_reduce.kernels.norm_rows import sum_and_norm_rows

    # Calls are found by their form on GPUs alone. New tensors are one element, as memory of the CPU
    # would take longer than that of a GPU, which PyTorch keeps.
    exec(inspect.getsource(normed._known_call).replace("not x.is_cuda or ", ""), vars(normed))
    new = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]
    small = lambda rows, columns, dtype: tapes.step(new, (1, 1), (1, 1), dtype)  # noqa: E731
    normed_launch.empty_rows_on = lambda device: small
    torch.mm = lambda x, w, out: out  # type: ignore[assignment]

    class EnginesParameter(torch.nn.Parameter):
        """A weight as vLLM's are, at which PyTorch looks by way of Python."""

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return super().__torch_function__(function, types, args, kwargs or {})

    dtype = torch.bfloat16
    x, w, residual = (
        torch.randn(*shape).to(dtype)
        for shape in ((ROWS, INNER), (COLUMNS, INNER), (ROWS, COLUMNS))
    )
    w = EnginesParameter(w, requires_grad=False)
    weight, name = torch.ones(COLUMNS, dtype=dtype), dist.group.WORLD.group_name  # type: ignore[union-attr]
    others = (residual, weight, None, "rms", 1e-6, None, None, False, None, None, name, "auto", "")
    arguments = (x, w, None, *others)
    call: Any = SimpleNamespace(
        operands=Operands(x, w, None, None, None, dtype), group=group,
        known_epilogue=Epilogue.of(x, *others[:-5]), family=Family(1, True, 0),
        operator=SimpleNamespace(name=OPERATOR),
    )  # fmt: skip
    results = Normed(torch.empty_like(residual), torch.empty_like(residual), torch.empty(0))
    memory = normed_launch._pushed_memory(group, OPERATOR, ROWS, COLUMNS, dtype, 1 << 24)
    memory |= normed_launch._norm_arguments(results, 1e-6, None, residual, weight, None, None)
    memory |= {"part": torch.empty_like(residual), "N": COLUMNS, "B": ROWS}
    constants = {
        "WORLD_SIZE": 2, "COLUMNS": COLUMNS, "FORM": NormForm("rms", "none", 1, 1), "num_warps": 8,
    }  # fmt: skip
    launch = Launch(sum_and_norm_rows, (ROWS + 1,), memory, constants)
    launch()
    kernel: Any = SimpleNamespace(launch=launch)
    again = normed_launch._again_of_any_rows(call, kernel)
    known = normed._known_call(1, x, w, None, *others)
    assert again is not None
    assert known is not None
    group.replays.remember_form(known[0], again)

    operator = getattr(torch.ops.interlace, OPERATOR).default
    entrance(OPERATOR)._is_played = True
    play = tapes.player(operator.from_inductor)
    return {
        "by the dispatcher": lambda: operator(*arguments),
        "past the dispatcher": lambda: entrance(OPERATOR).from_inductor(*arguments),
        "by its tape": lambda: play(*arguments),
    }


def one_row(group: Any) -> dict[str, Callable[[], Any]]:
    """Return the ways into a call of one row, the last one by its tape."""
    import torch

    import interlace
    from interlace.comm.groups import registration
    from interlace.gemm import dispatch, schema
    from interlace.operators.gemm_all_reduce import OPERATOR as PLAIN
    from interlace.operators.gemm_all_reduce import gemv

    # What is looked at is that operands are on a GPU.
    schema.may_be_played = lambda _: registration.is_unobserved()
    schema.recalling_group = lambda *_: group
    gemv.require = lambda _: None
    x, w = (torch.randn(*shape).bfloat16() for shape in ((1, INNER), (COLUMNS, INNER)))
    config = gemv.default_config(rows=1, columns=COLUMNS, world_size=2, itemsize=x.itemsize)
    y = torch.empty(1, COLUMNS, dtype=x.dtype)
    kernel = gemv.prepare(group, x, w, None, y, config, 1 << 24)
    kernel()
    again = kernel.again(("x", "w", "bias", "y"), small_result, gemv._enqueue)
    assert again is not None
    form, _ = dispatch.known_call(PLAIN, x, w, None, x.dtype, False, "auto", group, None, None)
    absent: Any = None
    run_again = functools.partial(dispatch._run_again, absent, absent, x.dtype, again)
    group.replays.remember_form(form, run_again)
    group.replays.comes_again = lambda _: False  # a graph
    others = (None, None, None, None, None, "auto", False)
    return {
        "past the dispatcher": lambda: schema._plain(PLAIN, x, w, *others),
        "by its tape": lambda: interlace.gemm_all_reduce(x, w),
    }


def small_result(group: Any) -> tuple[Any, ...]:
    """Return a call's new memory, of one element, as a step of a tape."""
    import torch

    from interlace.comm.replay import tapes

    new = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]
    return (tapes.step(new, (1, 1), (1, 1), torch.bfloat16),)


def print_times(name: str, call: Callable[[], Any], calls: int) -> None:
    """Print the microseconds of a call in a loop, and behind other code."""
    times = timeit.repeat(call, number=calls, repeat=7, timer=time.thread_time)
    behind = []
    for _ in range(600):
        fill_caches()
        begin = time.perf_counter_ns()
        call()
        behind.append(time.perf_counter_ns() - begin)
    median = sorted(behind)[len(behind) // 2] / 1e3
    print(f"{name}: {1e6 * min(times) / calls:.1f} us in a loop, {median:.1f} behind other code")


def fill_caches() -> None:
    """Run code and read memory that have nothing to do with the call."""
    import torch

    torch.arange(1 << 19).flip(0).sum()
    torch.randn(8, 8).softmax(0).sum().item()
    json.dumps({"a": [1, 2, {"b": None}]})
    re.sub("a+", "b", "caaat")
    sorted(random.random() for _ in range(50))


if __name__ == "__main__":
    main()
