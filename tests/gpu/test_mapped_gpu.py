"""Mapped outputs on GPUs, with producers that this project did not write. Run with ``-m gpu``.

The result must be the same bit by bit as the producer's own in memory of its own, moved by NCCL;
but for ``addmm``, where cuBLAS takes another way if rows are padded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import interlace
from interlace.mapped import empty_rotating
from tests.errors import error_of
from tests.mapped import tutorial

pytestmark = pytest.mark.gpu


def _random(*sizes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(100 * dist.get_rank() + seed)
    return torch.randn(*sizes, generator=generator, device="cuda").bfloat16()


def _exchanged(parts: torch.Tensor) -> torch.Tensor:
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts.contiguous())
    return received


def _scaled(out: torch.Tensor) -> None:
    x, w = (
        _random(1024, 512, seed=1).to(torch.float8_e4m3fn),
        _random(768, 512, seed=2).to(torch.float8_e4m3fn),
    )
    one = torch.ones([], device="cuda")
    torch._scaled_mm(x, w.T, one, one, out_dtype=torch.bfloat16, out=out)


def _attention(out: torch.Tensor) -> None:
    """FlashAttention returns a tensor of its own; the copy out of it is the producer."""
    q, k, v = (_random(1, 8, 1024, 96, seed=seed) for seed in (3, 4, 5))
    out.copy_(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(1024, 768))


def _grouped(out: torch.Tensor) -> None:
    """It takes no ``out``, so a copy is the producer. Groups of other rows than ranks."""
    ends = torch.tensor([100, 600, 1024], dtype=torch.int32, device="cuda")
    out.copy_(torch._grouped_mm(_random(1024, 512), _random(3, 768, 512, seed=1).mT, offs=ends))


@torch.no_grad()
def _pooled(out: torch.Tensor) -> None:
    """FBGEMM's embedding takes no ``out`` either. Three tables; 1024 bags of 5 rows of each."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        DenseTableBatchedEmbeddingBagsCodegen,
    )

    bags = DenseTableBatchedEmbeddingBagsCodegen(
        [(1000, 256)] * 3, use_cpu=out.device.type == "cpu"
    ).to(out.device)
    for table, weights in enumerate(bags.split_embedding_weights()):
        weights.copy_(_random(1000, 256, seed=table))
    indices = torch.arange(3 * 1024 * 5, device=out.device) * 7919 % 1000
    out.copy_(bags(indices, torch.arange(0, len(indices) + 1, 5, device=out.device)))


@torch.compile(dynamic=False)
def _silu_and_scale(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(F.silu(x) * 3)


PRODUCERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "mm": lambda out: torch.mm(_random(1024, 512), _random(768, 512, seed=1).T, out=out),
    "addmm": lambda out: torch.addmm(
        _random(768), _random(1024, 512), _random(768, 512, seed=1).T, out=out
    ),
    "two halves": lambda out: [
        torch.mm(_random(1024, 512)[h], _random(768, 512, seed=1).T, out=out[h])
        for h in (slice(0, 500), slice(500, None))
    ],
    # Four products, whatever the number of ranks.
    "bmm": lambda out: torch.bmm(
        _random(4, 256, 512), _random(4, 768, 512, seed=1).mT, out=out.unflatten(0, (4, 256))
    ),
    "grouped_mm": _grouped,
    "triton": lambda out: tutorial.product(_random(1024, 512), _random(768, 512, seed=1), out=out),
    "scaled_mm": _scaled,
    "attention": _attention,
    "inductor": lambda out: _silu_and_scale(_random(1024, 768), out),
    "copy": lambda out: out.copy_(_random(1024, 768)),
    "fbgemm": _pooled,
}


def _produce(names: list[str]) -> dict[str, bool]:
    same = {}
    for name in names:
        producer = PRODUCERS[name]
        out = interlace.MappedOutput((1024, 768), dtype=torch.bfloat16)
        plain = torch.empty(1024, 768, dtype=torch.bfloat16, device="cuda")
        producer(plain)
        producer(out.begin())
        received, expected = out.exchange().flatten(0, 1), _exchanged(plain)
        same[name] = torch.equal(received, expected) or (
            name == "addmm" and torch.allclose(received, expected, rtol=2e-2, atol=2e-1)
        )
    torch.cuda.synchronize()
    return same


def test_producers_that_know_nothing_of_it(ranks: Any, world_size: int) -> None:
    names = [name for name in PRODUCERS if name != "fbgemm"]
    for same in ranks(world_size).run(_produce, names):
        assert same == dict.fromkeys(names, True)


def test_fbgemm(ranks: Any, world_size: int) -> None:
    pytest.importorskip(
        "fbgemm_gpu",
        reason="FBGEMM's embedding needs fbgemm_gpu, of the version that fits this torch",
    )
    assert ranks(world_size).run(_produce, ["fbgemm"]) == [{"fbgemm": True}] * world_size


def _batches() -> bool:
    """Products of one rank each, with padding between them: ``(R, rows, columns)``."""
    ranks = dist.get_world_size()
    x, w = _random(ranks, 100, 512), _random(ranks, 72, 512, seed=1).mT
    received = interlace.fuse(
        torch.bmm, "all_to_all", shape=(ranks, 100, 72), dtype=torch.bfloat16
    )(x, w)
    same = torch.equal(received, _exchanged(torch.bmm(x, w)))
    torch.cuda.synchronize()
    return same


def test_a_product_for_each_rank(ranks: Any, world_size: int) -> None:
    assert ranks(world_size).run(_batches) == [True] * world_size


def _collectives() -> list[tuple[str, float]]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    errors = []
    for name in interlace.mapped.COLLECTIVES:
        for order in ("natural", "rotated"):
            shape = (256 * ranks, 1000)
            x = empty_rotating((shape[0], 512), dtype=torch.bfloat16)
            x.natural.copy_(_random(shape[0], 512))
            w = _random(1000, 512, seed=1)
            run = interlace.fuse(
                torch.mm,
                name,
                shape=shape,
                dtype=torch.bfloat16,
                order=order if name != "gather" else "natural",
            )
            y = [
                run(x.natural if order == "natural" or name == "gather" else x.rotated, w.T).clone()
                for _ in range(3)
            ][-1]
            product = x.natural @ w.T
            whole = torch.empty(ranks, *shape, dtype=torch.bfloat16, device="cuda")
            dist.all_gather_into_tensor(whole, product)
            mine = slice(256 * rank, 256 * (rank + 1))
            expected = {
                "all_to_all": whole[:, mine].flatten(0, 1),
                "reduce_scatter": whole[:, mine].float().sum(0),
                "all_reduce": whole.float().sum(0),
                "gather": whole if rank == 0 else whole[:0],
                "scatter": whole[0, mine],
            }[name]
            error = (
                float((y.float() - expected.float()).norm() / expected.float().norm())
                if expected.numel()
                else 0.0
            )
            errors.append((f"{name} {order}", error))
    torch.cuda.synchronize()
    return errors


def test_collectives(ranks: Any, world_size: int) -> None:
    for errors in ranks(world_size).run(_collectives):
        assert all(error < 3e-3 for _, error in errors), errors


def _replay() -> list[bool]:
    """One graph, replayed back to back with ranks of different speed, between eager epochs."""
    out = interlace.MappedOutput((1024, 768), dtype=torch.bfloat16)
    x, w = _random(1024, 512), _random(768, 512, seed=1)
    kept = torch.zeros(8, 1024, 768, dtype=torch.bfloat16, device="cuda")
    step = torch.zeros([], dtype=torch.int64, device="cuda")
    torch.mm(x, w.T, out=out.begin())
    out.exchange()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        torch.mm(x, w.T, out=out.begin())
        kept.index_copy_(0, step[None], out.exchange().flatten(0, 1)[None])
        step += 1
    same = []
    for turn in range(2):
        step.zero_()
        factors = []
        for i in range(8):
            x.copy_(_random(1024, 512, seed=10 * turn + i))
            if (dist.get_rank() + i) % 3 == 0:
                torch.cuda._sleep(200_000)
            graph.replay()
            factors.append(_random(1024, 512, seed=10 * turn + i))
        torch.mm(x, w.T, out=out.begin())
        last = out.exchange().flatten(0, 1).clone()
        same += [torch.equal(kept[i], _exchanged(factor @ w.T)) for i, factor in enumerate(factors)]
        same.append(torch.equal(last, _exchanged(x @ w.T)))
    torch.cuda.synchronize()
    return same


def test_graphs(ranks: Any, world_size: int) -> None:
    assert all(all(same) for same in ranks(world_size).run(_replay))


def _set_up() -> float:
    """Milliseconds that an output of 64 MiB takes to set up, the fastest of three: the first one
    loads kernels.
    """
    milliseconds = []
    for _ in range(3):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.monotonic()
        interlace.MappedOutput((4096, 8192), dtype=torch.bfloat16)
        milliseconds.append((time.monotonic() - start) * 1e3)
    return min(milliseconds)


@pytest.mark.usefixtures("own_gpus")
def test_set_up_is_quick(ranks: Any, world_size: int) -> None:
    assert max(ranks(world_size).run(_set_up)) < 200


def _long_run(epochs: int) -> tuple[int, int]:
    """Wrong epochs, and bytes of torch's memory that the epochs took."""
    out = interlace.MappedOutput((4096, 8192), dtype=torch.bfloat16)
    wrong = torch.zeros([], dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    for epoch in range(epochs):
        out.begin()[:, 0].fill_((epoch * 7) % 251)
        if epoch % 97 == dist.get_rank():
            torch.cuda._sleep(100_000)
        wrong += (out.exchange()[:, :, 0] != (epoch * 7) % 251).sum()
    torch.cuda.synchronize()
    return int(wrong), torch.cuda.memory_reserved() - reserved


def test_ten_thousand_epochs(ranks: Any, world_size: int, turns: Any) -> None:
    for wrong, grown in ranks(world_size).run(_long_run, turns(10_000)):
        assert wrong == 0
        assert grown < 16 << 20


def _absent() -> Any:
    group = dist.new_group()
    out = interlace.MappedOutput((1024, 768), dtype=torch.bfloat16, group=group)
    out.begin().zero_()
    out.exchange()
    interlace.synchronize(group)
    interlace.set_deadline(2.0, group)
    dist.barrier()
    if dist.get_rank() == 1:
        return None
    out.begin().zero_()
    out.exchange()
    start = time.monotonic()
    error = error_of(interlace.synchronize, group)
    return error[:2], time.monotonic() - start


def test_a_peer_that_never_exchanges(ranks: Any, world_size: int) -> None:
    for rank, outcome in enumerate(ranks(world_size).run(_absent)):
        if rank == 1:
            assert outcome is None
            continue
        (kind, message), seconds = outcome
        assert kind == "PeerTimeoutError"
        assert message.startswith(f"mapped output: rank {rank} waited 2 s for rank 1 ")
        assert seconds < 60
