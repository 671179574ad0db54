"""What a call of a compiled program costs the host, measured on a machine without a GPU.

    python benchmarks/host_without_gpu.py [--calls 5000]

The call is a ``gemm_all_reduce`` of many rows with a residual and a norm, as an engine's eager
prefill makes it: found by its form, launched by Triton's own launcher, with a driver that does
nothing (compiled here, needs ``cc``), and without the product. One rank, tensors on the CPU. Two
times are printed for each way into the operator: in a loop, the least of seven, of this thread's
processor time; and the median behind other code, which fills the caches as a program does.

Compare trees by setting ``PYTHONPATH``, in turns, on a machine that does nothing else. It says
nothing of what the driver and the library take.
"""

from __future__ import annotations

import argparse
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
    parser.add_argument("--calls", type=int, default=5000, help="Calls of a loop.")
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
    """Print the times of the call."""
    import torch

    operator, arguments, run = prepared()
    functions: list[str] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            functions.append(frame.f_code.co_name)

    with torch.inference_mode():
        run()
        sys.setprofile(note)
        try:
            run()
        finally:
            sys.setprofile(None)
        print(f"a call enters {len(functions)} functions of Python")
        print_times("by the dispatcher", lambda: operator(*arguments), calls)
        print_times("past the dispatcher", lambda: operator.from_inductor(*arguments), calls)
        print_times("by its tape, as Inductor's programs call it", run, calls)


def prepared() -> tuple[Any, tuple[Any, ...], Callable[[], Any]]:
    """Return the operator, its arguments, and what makes the call, which has come before."""
    import ctypes

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
    import interlace.operators
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

    group, dtype = interlace.group_of(device="cpu"), torch.bfloat16
    stream: Any = object()
    group.streams._order.streams[0] = group.streams._order.executed = stream
    group.replays.is_enabled = True
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
    stub = ctypes.CDLL("libcuda.so.1")
    launches = ctypes.c_int.in_dll(stub, "launches")
    before = launches.value
    operator(*arguments)
    assert launches.value == before + 1, "the call was not found by its form"
    with torch.inference_mode():
        for _ in range(10):
            play(*arguments)
    return operator, arguments, lambda: play(*arguments)


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
