"""Programs whose protocols are explored: every operator, called with different shapes one behind the other."""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import interlace
from interlace.testing import Rank

Call = tuple[Callable[[], Any], Any]
"""What is called, and what must come out."""

_TILES = {"block_m": 16, "block_n": 16, "block_k": 16, "num_warps": 1, "max_programs": 2, "stagger": 0}


def _rounds(rank: Rank, calls: Sequence[Call]) -> None:
    """Every call once, so that all is agreed on; then again, and the first one a third time."""
    for i, (call, expected) in enumerate((*calls, *calls, calls[0])):
        if i == len(calls):
            rank.ready()
        torch.testing.assert_close(call(), expected, rtol=1e-4, atol=1e-4)


def _numbers(rank: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """Small whole numbers: sums of them are exact."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(-3, 4, shape, generator=generator).float()


def _everyones(rank: Rank, *shape: int, seed: int = 0) -> list[torch.Tensor]:
    return [_numbers(each, *shape, seed=seed) for each in range(rank.world_size)]


def _balanced(rows: int, ranks: int) -> list[int]:
    return [len(part) for part in torch.arange(rows).tensor_split(ranks)]


# gemv


def gemv(rank: Rank, protocol: str = "one_shot", dtype: torch.dtype = torch.float32) -> None:
    config = interlace.GemvAllReduceConfig(protocol=protocol, block_n=16, block_k=32, max_programs=2)
    calls: list[Call] = []
    for tokens, rows in ((1, 16), (2, 48)):
        xs, ws = _everyones(rank, tokens, 32), _everyones(rank, rows, 32, seed=1)
        total = sum((x @ w.T for x, w in zip(xs, ws, strict=True)), torch.zeros(tokens, rows))
        x, w = xs[rank.rank].to(dtype), ws[rank.rank].to(dtype)
        calls.append((functools.partial(interlace.gemv_all_reduce, x, w, impl="fused", config=config), total.to(dtype)))
    _rounds(rank, calls)


# Products


def _products(rank: Rank, *kinds: tuple[int, int, int]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each of the kinds (rows, columns, K): this rank's x and w, and all ranks' sum of products."""
    found = []
    for rows, columns, inner in kinds:
        xs, ws = _everyones(rank, rows, inner), _everyones(rank, columns, inner, seed=1)
        total = sum((x @ w.T for x, w in zip(xs, ws, strict=True)), torch.zeros(rows, columns))
        found.append((xs[rank.rank], ws[rank.rank], total))
    return found


def reduce_scatter(rank: Rank, impl: str = "fused", empty: bool = False) -> None:
    """``empty``: the last rank gets no rows."""
    config = interlace.GemmReduceScatterConfig(**_TILES)
    rows = (32 if impl == "mapped" else 20) * rank.world_size
    calls: list[Call] = []
    for x, w, total in _products(rank, (rows, 32, 16), (rows, 32, 48)):
        splits = _balanced(rows, rank.world_size)
        if empty:
            splits = [*_balanced(rows, rank.world_size - 1), 0]
        call = functools.partial(interlace.gemm_reduce_scatter, x, w, splits=splits, impl=impl, config=config)
        calls.append((call, total.split(splits)[rank.rank]))
    _rounds(rank, calls)


def all_reduce(rank: Rank, impl: str = "fused") -> None:
    config = interlace.GemmAllReduceConfig(**_TILES)
    rows = (32 if impl == "mapped" else 20) * rank.world_size
    calls: list[Call] = []
    for x, w, total in _products(rank, (rows, 32, 16), (rows, 32, 48)):
        calls.append((functools.partial(interlace.gemm_all_reduce, x, w, impl=impl, config=config), total))
    _rounds(rank, calls)


def all_to_all(rank: Rank, impl: str = "fused") -> None:
    config = interlace.GemmAllToAllConfig(**_TILES)
    rows = (32 if impl == "mapped" else 20) * rank.world_size
    calls: list[Call] = []
    for columns, inner in ((32, 16), (32, 48)):
        xs, ws = _everyones(rank, rows, inner), _everyones(rank, columns, inner, seed=1)
        parts = [(x @ w.T).tensor_split(rank.world_size)[rank.rank] for x, w in zip(xs, ws, strict=True)]
        call = functools.partial(interlace.gemm_all_to_all, xs[rank.rank], ws[rank.rank], impl=impl, config=config)
        calls.append((call, torch.cat(parts)))
    _rounds(rank, calls)


def all_gather(rank: Rank, impl: str = "fused") -> None:
    config = interlace.AllGatherGemmConfig(**_TILES)
    calls: list[Call] = []
    for rows, inner in ((20, 16), (12, 48)):
        xs, w = _everyones(rank, rows, inner), _numbers(rank.rank, 32, inner, seed=1)
        call = functools.partial(interlace.all_gather_gemm, xs[rank.rank], w, impl=impl, config=config, return_gathered=True)
        calls.append((call, (torch.cat(xs) @ w.T, torch.cat(xs))))
    _rounds(rank, calls)


def to_all_bmm(rank: Rank, impl: str = "fused") -> None:
    calls: list[Call] = []
    for count, share, inner in ((2, 4, 16), (2, 8, 16)):
        xs = [each.view(rank.world_size, count, share, inner) for each in
              _everyones(rank, rank.world_size * count * share, inner)]  # fmt: skip
        w = _numbers(rank.rank, count, inner, 16, seed=1)
        whole = torch.cat([x[rank.rank] for x in xs], 1)
        call = functools.partial(_bmm, xs[rank.rank].reshape(-1, inner), w, impl)
        calls.append((call, whole @ w))
    _rounds(rank, calls)


def _bmm(x: torch.Tensor, w: torch.Tensor, impl: str) -> torch.Tensor:
    import interlace.ops.all_to_all_bmm.op

    return torch.ops.interlace.all_to_all_bmm(x, w, "", impl)[0]


# Embeddings


def _embedding_config(**options: Any) -> interlace.EmbeddingAllToAllConfig:
    small = {"block_bags": 2, "max_programs": 2, "slice_blocks": 1, "push_programs": 2, "push_rows": 4, "update_programs": 1,
             "block_runs": 4}  # fmt: skip
    return interlace.EmbeddingAllToAllConfig(**small | options)


def _tables(rank: int, count: int, width: int) -> list[torch.Tensor]:
    return [_numbers(rank, 8, width, seed=2 + table) for table in range(count)]


def _lookups(rank: int, count: int, batch: int) -> torch.Tensor:
    """One lookup per bag."""
    return torch.randint(0, 8, (count * batch,), generator=torch.Generator().manual_seed(rank))


def embedding_forward(rank: Rank, protocol: str = "direct", order: str = "interleaved", chunk: int = 3) -> None:
    config, batch = _embedding_config(protocol=protocol, order=order), chunk * rank.world_size
    calls: list[Call] = []
    for width in (8, 12):
        columns = [table[_lookups(each, 1, batch)] for each in range(rank.world_size) for table in _tables(each, 1, width)]
        mine = torch.cat(columns, 1)[rank.rank * chunk : (rank.rank + 1) * chunk]
        call = functools.partial(
            interlace.embedding_all_to_all, _tables(rank.rank, 1, width), _lookups(rank.rank, 1, batch),
            torch.arange(batch + 1), config=config, name=f"width {width}", check_indices=False,
        )  # fmt: skip
        calls.append((call, mine))
    _rounds(rank, calls)


def embedding_backward(rank: Rank, without: int = -1) -> None:
    """Forward and backward; rank ``without`` owns no table."""
    chunk = 2
    config, batch = _embedding_config(), chunk * rank.world_size
    calls: list[Call] = []
    for width in (8, 12):
        count = 0 if rank.rank == without else 1
        tables = [table.requires_grad_() for table in _tables(rank.rank, count, width)]
        indices = _lookups(rank.rank, count, batch)
        expected = [torch.zeros(8, width).index_add_(0, indices, torch.ones(batch, width)) for _ in tables]
        calls.append((functools.partial(_gradients, tables, indices, batch, config, width), expected))
    _rounds(rank, calls)


def _gradients(
    tables: list[torch.Tensor], indices: torch.Tensor, batch: int, config: interlace.EmbeddingAllToAllConfig, width: int
) -> list[torch.Tensor]:
    for table in tables:
        table.grad = None
    y = interlace.embedding_all_to_all(
        tables, indices, torch.arange(len(tables) * batch + 1), config=config, name=f"width {width}", batch_size=batch,
        output_dtype=torch.float32, check_indices=False,
    )  # fmt: skip
    y.sum().backward()
    return [table.grad for table in tables]  # type: ignore[misc]


# Experts


def experts(rank: Rank, backward: bool = False) -> None:
    config = interlace.MixtureOfExpertsConfig(
        block_m=16, block_n=32, block_k=16, group_m=2, programs=1, push_programs=1, push_rows=4, sum_programs=1, stagger=0
    )
    calls: list[Call] = []
    for tokens in (3, 5):
        x, chosen = _numbers(rank.rank, tokens, 16) / 4, _experts(rank.rank, rank.world_size, tokens)
        weights = torch.tensor([0.5, 0.25]).repeat(tokens, 1)
        w_in = [_numbers(each, 1, 16, 2, 16, seed=1) / 4 for each in range(rank.world_size)]
        w_out = [_numbers(each, 1, 16, 16, seed=2) / 4 for each in range(rank.world_size)]
        x.requires_grad_(backward)
        y = sum(
            (weights[:, j, None] * torch.stack([_expert(row, w_in[e][0], w_out[e][0]) for row, e in
             zip(x, chosen[:, j].tolist(), strict=True)]) for j in range(2)), torch.zeros(tokens, 16)
        )  # fmt: skip
        expected = torch.autograd.grad(y.sum(), x)[0] if backward else y
        arguments = x, chosen, weights, w_in[rank.rank], w_out[rank.rank]
        calls.append((functools.partial(_run_experts, *arguments, config, backward), expected))
    _rounds(rank, calls)


def _experts(rank: int, ranks: int, tokens: int) -> torch.Tensor:
    first = (torch.arange(tokens) + rank) % ranks
    return torch.stack([first, (first + 1) % ranks], 1)


def _expert(x: torch.Tensor, w_in: torch.Tensor, w_out: torch.Tensor) -> torch.Tensor:
    return w_out @ (F.silu(w_in[:, 0] @ x) * (w_in[:, 1] @ x))


def _run_experts(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, w_in: torch.Tensor, w_out: torch.Tensor,
    config: interlace.MixtureOfExpertsConfig, backward: bool,
) -> torch.Tensor:  # fmt: skip
    y = interlace.mixture_of_experts(x, chosen, weights, w_in, w_out, impl="fused", config=config)
    return torch.autograd.grad(y.sum(), x)[0] if backward else y


# Mapped outputs


def fused(rank: Rank, collective: str) -> None:
    """Somebody else's producer (``torch.mm``), whose stores are a collective."""
    ranks = rank.world_size
    shape = (ranks, 1024) if collective == "gather" else (32 * ranks, 32)
    product = interlace.fuse(_fill, collective, shape=shape, dtype=torch.float32)
    calls: list[Call] = []
    for seed in (0, 1):
        outputs = _everyones(rank, *shape, seed=seed)
        total = sum(outputs, torch.zeros(shape))
        part = slice(32 * rank.rank, 32 * (rank.rank + 1))
        expected = {
            "all_to_all": torch.cat([each[part] for each in outputs]),
            "reduce_scatter": total[part],
            "all_reduce": total,
            "gather": torch.stack(outputs) if rank.rank == 0 else torch.empty(0, *shape),
        }[collective]
        calls.append((functools.partial(_result, product, outputs[rank.rank]), expected))
    _rounds(rank, calls)


def _fill(value: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(value)


def _result(product: Any, value: torch.Tensor) -> torch.Tensor:
    return product(value).clone()


# Kernels of users


@functools.cache
def _readme() -> Any:
    """The kernel of the language's README, and its host side, as a module."""
    text = (Path(interlace.__file__).parent / "language" / "README.md").read_text()
    path = Path(tempfile.mkdtemp(prefix="interlace-tests-")) / "all_gather_of_the_readme.py"
    path.write_text("\n".join(block.split("```")[0] for block in text.split("```python\n")[1:]))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def readme(rank: Rank) -> None:
    calls: list[Call] = []
    for count in (256, 512):
        xs = _everyones(rank, count)
        calls.append((functools.partial(_readme().all_gather, xs[rank.rank]), torch.stack(xs)))
    _rounds(rank, calls)
