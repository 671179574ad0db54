"""``examples/your_own_operator``: an operator of another package has all that ours have, by its
declaration alone.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import registry
from interlace.cli.gpus import choice_on, gpu_named
from interlace.costs import find_cost
from interlace.costs.time import SizedCall
from interlace.gemm import schema
from interlace.gemm.implementations.fused import FUSED
from interlace.gemm.implementations.unfused import UNFUSED
from interlace.registry import operators
from tests.errors import error_of
from tests.programs import run_program
from tests.untimed import untimed

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "your_own_operator"
NAME = "gemm_broadcast"

# Ranks import this file, too.
if str(EXAMPLE) not in sys.path:
    sys.path.insert(0, str(EXAMPLE))
package = importlib.import_module(NAME)
SMALL = package.GemmConfig(block_m=16, block_n=16, block_k=16, max_programs=3)


def _operands(rows=37, columns=29, inner=21, dtype=torch.float32, rank=None):
    """Operands that differ by rank; whole numbers, so that every sum is exact."""
    source = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
    shapes = (rows, inner), (columns, inner), (columns,)
    return [torch.randint(-3, 4, shape, generator=source).to(dtype) for shape in shapes]


def _right(impl, dtype):
    x, w, bias = _operands(dtype=dtype)
    found = []
    for turn in range(3):
        y = package.gemm_broadcast(x + turn, w, bias, impl=impl, config=SMALL)
        root = [part.double() for part in _operands(dtype=dtype, rank=0)]
        found.append(torch.equal(y.double(), (root[0] + turn) @ root[1].T + root[2]))
    interlace.synchronize()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("impl", "dtype"),
    [("fused", torch.float32), ("fused", torch.bfloat16), ("unfused", torch.float32)],
)
def test_it_matches_float64(ranks, world_size, impl, dtype):
    assert ranks(world_size).run(_right, impl, dtype) == [[True] * 3] * world_size


def _sent():
    x, w, bias = _operands()
    package.gemm_broadcast(x, w, bias, impl="fused", config=SMALL)
    interlace.synchronize()
    group = interlace.group_of()
    group.traffic.reset()
    package.gemm_broadcast(x, w, bias, impl="fused", config=SMALL)
    interlace.synchronize()
    return sum(group.traffic.bytes_to.values())


def test_costs_are_the_counted_traffic(ranks):
    sizes = {"rows": 37, "columns": 29, "inner": 21, "itemsize": 4, "world_size": 3}
    formula = find_cost(NAME).formula
    expected = [formula(**sizes, rank=rank).link_bytes for rank in range(3)]
    assert ranks(3).run(_sent) == expected


def _gradients():
    x, w, bias = (tensor.requires_grad_() for tensor in _operands())
    y = package.gemm_broadcast(x, w, bias, impl="fused", config=SMALL)
    (y * (1 + dist.get_rank())).sum().backward()
    root = [tensor.requires_grad_() for tensor in _operands(rank=0)]
    total = sum(1 + rank for rank in range(dist.get_world_size()))
    (torch.nn.functional.linear(*root) * total).sum().backward()
    is_root = dist.get_rank() == 0
    return [
        torch.equal(mine.grad, theirs.grad if is_root else torch.zeros_like(theirs))
        for mine, theirs in zip((x, w, bias), root, strict=True)
    ]


def test_gradients(ranks):
    assert ranks(2).run(_gradients) == [[True] * 3] * 2


def _checked():
    x, w, bias = _operands()
    name = dist.group.WORLD.group_name
    arguments = x, w, bias, None, None, x.dtype, name, "fused", str(SMALL)
    torch.library.opcheck(
        torch.ops.interlace.gemm_broadcast.default,
        arguments,
        test_utils=("test_schema", "test_faketensor"),
    )
    call = functools.partial(package.gemm_broadcast, impl="fused", config=SMALL)
    compiled = torch.compile(
        lambda x: call(x * 2, w, bias).relu(), backend="aot_eager", fullgraph=True
    )
    return torch.equal(compiled(x), call(x * 2, w, bias).relu())


def test_opcheck_and_compile(ranks):
    assert ranks(2).run(_checked) == [True] * 2


def _disagreeing():
    x, w, bias = _operands(rows=8 + dist.get_rank())
    return error_of(lambda: package.gemm_broadcast(x, w, bias))[:2]


def test_ranks_that_disagree_are_told(ranks):
    for kind, message in ranks(2).run(_disagreeing):
        assert kind == "RankMismatchError"
        assert "[8, 21] on rank 0" in message


def _without_the_root():
    process_group = dist.new_group()
    x, w, bias = _operands()
    package.gemm_broadcast(x, w, bias, group=process_group, impl="fused", config=SMALL)
    interlace.set_deadline(1.0, process_group)
    if dist.get_rank() == 0:
        dist.barrier()
        return None
    error = error_of(
        lambda: package.gemm_broadcast(x, w, bias, group=process_group, impl="fused", config=SMALL)
    )
    dist.barrier()
    return error[0]


def test_a_root_that_never_calls(ranks):
    assert ranks(2).run(_without_the_root) == [None, "PeerTimeoutError"]


def test_explain_and_the_registry_know_it():
    x, w, bias = _operands(rank=0)
    assert NAME in operators()
    text = interlace.explain(NAME, x, w, bias=bias)
    assert text.startswith(
        "gemm_broadcast of x [37, 21] and w [29, 21], float32, on 1 rank: fused ("
    )
    with pytest.raises(
        interlace.ArgumentError, match="impl must be one of auto, measured, batch_invariant, fused,"
    ):
        package.gemm_broadcast(x, w, impl="chunked")


def test_auto_takes_the_first_implementation_whatever_its_name():
    """The times of a new operator are not known, and nothing says that its kernel is "fused"."""
    ring = dataclasses.replace(FUSED, name="ring")
    declaration = type("GemmRing", (package.GemmBroadcast,), {"implementations": (ring, UNFUSED)})()
    sizes = {"rows": 64, "columns": 64, "inner": 64, "dtype": torch.float32, "world_size": 2}
    assert declaration.choose(**sizes, device=torch.device("cpu")).impl == "ring"
    call = SizedCall.of_dtype("float32", 64, 64, 64, 2)
    assert choice_on(gpu_named("h200"), declaration, call, torch.float32).impl == "ring"


def test_an_operator_that_explains_nothing_says_so(monkeypatch):
    """One around no product declares itself what ``interlace.explain`` takes and says."""
    members = {"computation": "scan", "collective": "sum", "choose": lambda self, **call: None}
    declaration = type("Scan", (registry.Operator,), members)()
    monkeypatch.setitem(registry._operators, declaration.name, declaration)
    with pytest.raises(interlace.ArgumentError, match="got 'scan_sum', whose declaration has"):
        interlace.explain("scan_sum", torch.ones(1))


def test_an_operator_without_the_unfused_pair_is_refused(monkeypatch):
    """Another one may refuse a call, also one that a user's program makes for the first time."""
    kernel_only = {"name": "gemm_kernel_only", "implementations": (FUSED,)}
    declaration = type("GemmKernelOnly", (package.GemmBroadcast,), kernel_only)()
    monkeypatch.setitem(registry._operators, declaration.name, declaration)
    with pytest.raises(interlace.ArgumentError, match=r"must include 'unfused'.*got fused"):
        schema.define(declaration.name)


def _float8():
    x, w, _ = _operands(dtype=torch.float8_e4m3fn)
    scales = torch.full((1,), 2.0), torch.full((1,), 2.0)
    name = dist.group.WORLD.group_name
    return [
        error_of(lambda: package.gemm_broadcast(x, w)),
        error_of(
            lambda: torch.ops.interlace.gemm_broadcast(
                x, w, None, *scales, torch.bfloat16, name, "fused", ""
            )
        ),
    ]


def test_float8_is_refused_by_an_operator_that_takes_none(ranks):
    """Its public function has no scales to pass, and its kernel would leave them out."""
    for rank in ranks(2).run(_float8):
        for kind, message, *_ in rank:
            assert kind == "ArgumentError"
            assert message.startswith("gemm_broadcast: x must be float16, bfloat16 or float32; got")


def _bench():
    from interlace.bench import products

    with untimed():
        return products.bench(products.ProductShape(NAME, 8, 16, 24, torch.float32))


def test_benchmarks_run_it(ranks):
    for result in ranks(2).run(_bench):
        assert {"fused", "unfused", "cuBLAS alone"} <= result["times"].keys()
        assert result["flops"] == 2 * 8 * 16 * 24


def test_nothing_in_interlace_knows_it():
    """The declaration alone is what a new operator takes: no file of ours is edited for it."""
    for file in (ROOT / "src").rglob("*"):
        if file.suffix in (".py", ".toml", ".json", ".md"):
            assert NAME not in file.read_text(encoding="utf-8"), file
    files = sorted(path.name for path in (EXAMPLE / NAME).glob("*.py"))
    assert files == ["__init__.py", "fused.py", "kernel.py", "reference.py"]


def test_its_program_runs(tmp_path):
    ended = run_program(EXAMPLE / "run.py", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert [line[:6] for line in ended.stdout.splitlines()] == ["rank 0", "rank 1"]


def test_its_kernel_compiles_for_gpus_that_are_not_here(pytestconfig):
    """In a process that does not interpret kernels, as the program says; Triton's cache has them if
    they have not changed since the last tests.
    """
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    environment["TRITON_CACHE_DIR"] = str(pytestconfig.cache.mkdir("triton"))
    done = subprocess.run(
        [sys.executable, EXAMPLE / "compile.py"],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.rsplit(": ")[0] for line in done.stdout.splitlines()]
    assert lines == ["cuda 90", "cuda 100", "hip gfx942"]


def _program(rank):
    """Three calls back to back, of two shapes, with other numbers each time."""
    calls = [(24, 20, 8), (10, 36, 8), (24, 20, 8)]
    kernel = functools.partial(package.gemm_broadcast, impl="fused", config=SMALL)
    for rows, columns, inner in calls[:2]:  # agreed on and allocated before schedules differ
        kernel(torch.zeros(rows, inner), torch.zeros(columns, inner))
    rank.ready()
    for turn, shape in enumerate(calls):
        x, w, _ = _operands(*shape, rank=10 * turn + rank.rank)
        root = _operands(*shape, rank=10 * turn)
        assert torch.equal(kernel(x, w), root[0] @ root[1].T)


def _explored():
    from interlace_explorer import explore

    schedules = []
    for count in (2, 3):
        report = explore(_program, ranks=count, schedules=120, seed=count)
        report.raise_if_failed()
        schedules.append(report.schedules)
    return schedules


def test_its_protocol_holds_in_every_schedule(ranks):
    (schedules,) = ranks(1).run(_explored)
    assert min(schedules) > 50
