"""Programs whose protocols are explored: every operator, called with different shapes one behind
the other.
"""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import interlace
from interlace.comm.groups import copies
from interlace_explorer import Rank

Call = tuple[Callable[[], Any], Any]
"""What is called, and what must come out."""

_TILES = {
    "block_m": 16,
    "block_n": 16,
    "block_k": 64,  # the product itself is not explored: one step
    "num_warps": 1,
    "max_programs": 2,
    "stagger": 0,
}


def _rounds(rank: Rank, make: Callable[[int, int], Call]) -> None:
    """Both kinds of calls once, so that all is agreed on; then three more. ``make(kind, turn)`` has
    other numbers in each turn.
    """
    for turn, kind in enumerate((0, 1, 0, 1, 1)):
        if turn == 2:
            rank.ready()
        call, expected = make(kind, turn)
        torch.testing.assert_close(call(), expected, rtol=1e-4, atol=1e-4)


def _numbers(rank: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """Small whole numbers: sums of them are exact."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(-3, 4, shape, generator=generator).float()


def _everyones(rank: Rank, *shape: int, seed: int = 0) -> list[torch.Tensor]:
    return [_numbers(each, *shape, seed=seed) for each in range(rank.world_size)]


# gemv


def gemv(rank: Rank, protocol: str = "one_shot", dtype: torch.dtype = torch.float32) -> None:
    config = interlace.GemvAllReduceConfig(
        protocol=protocol, block_n=16, block_k=32, max_programs=2
    )

    def make(kind: int, turn: int) -> Call:
        tokens, rows = ((1, 16), (2, 48))[kind]
        x, w, total = _product(rank, tokens, rows, 32, turn)
        return functools.partial(
            interlace.gemv_all_reduce, x.to(dtype), w.to(dtype), impl="gemv", config=config
        ), total.to(dtype)

    _rounds(rank, make)


# A loss


def loss(rank: Rank) -> None:
    """A row, and rows of two chunks, several to a program. The backward pass has no kernel of
    its own that communicates.
    """

    def make(kind: int, turn: int) -> Call:
        rows = (1, 8)[kind]
        x = _numbers(0, rows, 16, seed=turn)
        ws = _everyones(rank, 8, 16, seed=9)
        target = torch.arange(rows) * 5 % (8 * rank.world_size)
        call = functools.partial(
            interlace.linear_cross_entropy, x, ws[rank.rank], target, chunk_rows=6, impl="fused"
        )
        return call, F.cross_entropy(x @ torch.cat(ws).T, target)

    _rounds(rank, make)


def top_k(rank: Rank) -> None:
    """One row with one candidate of each rank, and several rows with two; all logits differ."""

    def make(kind: int, turn: int) -> Call:
        rows, k, ranks = (1, 8)[kind], (1, 2)[kind], rank.world_size
        source = torch.Generator().manual_seed(turn)
        w = (torch.randperm(8 * ranks, generator=source).float() - 4 * ranks)[:, None]
        x = torch.randint(0, 2, (rows, 1), generator=source) * 2.0 - 1
        own = w.chunk(ranks)[rank.rank].contiguous()
        call = functools.partial(interlace.linear_top_k, x, own, k, impl="fused")
        return lambda: tuple(call()), tuple((x @ w.T).topk(k, 1))

    _rounds(rank, make)


# Products


def _product(
    rank: Rank, rows: int, columns: int, inner: int, turn: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's x and w, and all ranks' sum of products."""
    xs, ws = _everyones(rank, rows, inner, seed=turn), _everyones(rank, columns, inner, seed=9)
    total = sum((x @ w.T for x, w in zip(xs, ws, strict=True)), torch.zeros(rows, columns))
    return xs[rank.rank], ws[rank.rank], total


def _rows(rank: Rank, impl: str) -> int:
    """Mapped outputs need whole pages for each rank. Few rows are moved by one program, so that a
    rank may be ahead of every program of another.
    """
    return {"remote_stores": 32, "pushed": 4}.get(impl, 20) * rank.world_size


def reduce_scatter(rank: Rank, impl: str = "fused", empty: bool = False, few: bool = False) -> None:
    """Ranks get different numbers of rows, but of pushed ones; ``empty``: the last gets none;
    ``few``: fewer than a tile has, which ``chunked`` multiplies without its kernel.
    """
    config = interlace.GemmReduceScatterConfig(**_TILES)
    splits = (
        [_rows(rank, impl) // rank.world_size] * rank.world_size
        if impl == "pushed"
        else ([9, 1, 5] if few else [36, 4, 20])[: rank.world_size]
    )
    splits[-1] *= not empty
    rows = sum(splits)

    def make(kind: int, turn: int) -> Call:
        x, w, total = _product(rank, rows, 32, (16, 48)[kind], turn)
        call = functools.partial(
            interlace.gemm_reduce_scatter, x, w, splits=splits, impl=impl, config=config
        )
        return call, total.split(splits)[rank.rank]

    _rounds(rank, make)


def two_levels(rank: Rank, collective: str) -> None:
    """A sum within nodes and then between them: few rows, since messages must be small."""
    rows = 4 * rank.world_size

    def make(kind: int, turn: int) -> Call:
        x, w, total = _product(rank, rows, 16, (16, 48)[kind], turn)
        if collective == "reduce_scatter":
            total = total.tensor_split(rank.world_size)[rank.rank]
        function = getattr(interlace, f"gemm_{collective}")
        return functools.partial(function, x, w, impl="chunked"), total

    _rounds(rank, make)


def all_reduce(rank: Rank, impl: str = "fused") -> None:
    config, rows = interlace.GemmAllReduceConfig(**_TILES), _rows(rank, impl)

    def make(kind: int, turn: int) -> Call:
        x, w, total = _product(rank, rows, 32, (16, 48)[kind], turn)
        return functools.partial(interlace.gemm_all_reduce, x, w, impl=impl, config=config), total

    _rounds(rank, make)


def normed(rank: Rank, impl: str = "fused", dtype: torch.dtype = torch.float32) -> None:
    """An all-reduce with its norm."""

    def make(kind: int, turn: int) -> Call:
        tokens, columns = ((1, 64), (3, 32))[kind]
        x, w, total = _product(rank, tokens, columns, 16, turn)
        residual = _numbers(99, tokens, columns, seed=turn)
        h = total + residual
        call = functools.partial(
            interlace.gemm_all_reduce, x.to(dtype), w.to(dtype), residual=residual.to(dtype),
            norm="rms", eps=1.0, impl=impl, out_dtype=torch.float32,
        )  # fmt: skip
        y = h / (h.square().mean(-1, keepdim=True) + 1.0).sqrt()
        return call, interlace.Normed(y, h.to(dtype), torch.empty(0))

    _rounds(rank, make)


def all_to_all(rank: Rank, impl: str = "fused") -> None:
    config, rows = interlace.GemmAllToAllConfig(**_TILES), _rows(rank, impl)

    def make(kind: int, turn: int) -> Call:
        inner = (16, 48)[kind]
        xs, ws = _everyones(rank, rows, inner, seed=turn), _everyones(rank, 32, inner, seed=9)
        parts = [
            (x @ w.T).tensor_split(rank.world_size)[rank.rank] for x, w in zip(xs, ws, strict=True)
        ]
        call = functools.partial(
            interlace.gemm_all_to_all, xs[rank.rank], ws[rank.rank], impl=impl, config=config
        )
        return call, torch.cat(parts)

    _rounds(rank, make)


def to_columns(rank: Rank) -> None:
    """Ranks have different numbers of rows, and the last rows of w are every rank's columns."""
    config, ranks = interlace.GemmAllToAllColumnsConfig(**_TILES), rank.world_size
    columns = [[(16 * each, 16 * each + 16), (16 * ranks, 16 * ranks + 8)] for each in range(ranks)]

    def make(kind: int, turn: int) -> Call:
        inner = (16, 48)[kind]
        splits = [20 if each else 12 for each in range(ranks)]
        xs = [_numbers(each, rows, inner, seed=turn) for each, rows in enumerate(splits)]
        w = _numbers(99, 16 * ranks + 8, inner, seed=9)
        call = functools.partial(
            interlace.gemm_all_to_all_columns, xs[rank.rank], w, column_ranges=columns,
            splits=splits, impl="fused", config=config,
        )  # fmt: skip
        own = torch.cat([w[a:b] for a, b in columns[rank.rank]])
        return call, torch.cat(xs) @ own.T

    _rounds(rank, make)


def to_rows(rank: Rank, empty: bool = False) -> None:
    """Ranks own different numbers of rows; ``empty``: the last owns none."""
    config = interlace.AllToAllGemmConfig(**_TILES | {"max_programs": 3}, senders=2)
    splits = [20 if each else 36 for each in range(rank.world_size)]
    if empty:
        splits[-1] = 0

    def make(kind: int, turn: int) -> Call:
        inner = (16, 24)[kind]
        xs = _everyones(rank, sum(splits), inner, seed=turn)
        w = _numbers(99, 32, inner * rank.world_size, seed=9)
        call = functools.partial(
            interlace.all_to_all_gemm, xs[rank.rank], w, splits=splits, impl="fused",
            config=config, return_gathered=True,
        )  # fmt: skip
        gathered = torch.cat(xs, 1).split(splits)[rank.rank]
        return call, (gathered @ w.T, gathered)

    _rounds(rank, make)


def all_gather(rank: Rank, impl: str = "fused") -> None:
    config = interlace.AllGatherGemmConfig(**_TILES)

    def make(kind: int, turn: int) -> Call:
        # Few rows are moved by one program, so that a rank may be ahead of every program of
        # another.
        rows, inner = ((4, 16), (3, 48))[kind] if impl == "pushed" else ((20, 16), (12, 48))[kind]
        xs, w = _everyones(rank, rows, inner, seed=turn), _numbers(rank.rank, 32, inner, seed=9)
        call = functools.partial(
            interlace.all_gather_gemm,
            xs[rank.rank],
            w,
            impl=impl,
            config=config,
            return_gathered=True,
        )
        return call, (torch.cat(xs) @ w.T, torch.cat(xs))

    _rounds(rank, make)


def all_gather_in_place(rank: Rank) -> None:
    """Rows of a symmetric tensor, which the next call's rows overwrite."""
    config = interlace.AllGatherGemmConfig(**_TILES)
    memory = interlace.empty_symmetric(12 * 48, dtype=torch.float32).local

    def make(kind: int, turn: int) -> Call:
        rows, inner = ((20, 16), (12, 48))[kind]
        xs, w = _everyones(rank, rows, inner, seed=turn), _numbers(rank.rank, 32, inner, seed=9)
        own, x = xs[rank.rank], memory[: rows * inner].view(rows, inner)

        def call() -> Any:
            # A copy by the host's own means would not be seen by the simulated memory.
            copies.fetch(rank.group, x.data_ptr(), own.data_ptr(), own.nbytes, rank.rank)
            return interlace.all_gather_gemm(
                x, w, impl="fused", config=config, return_gathered=True
            )

        return call, (torch.cat(xs) @ w.T, torch.cat(xs))

    _rounds(rank, make)


# Embeddings


def _embedding_config(**options: Any) -> interlace.EmbeddingAllToAllConfig:
    small = {
        "block_bags": 2,
        "max_programs": 2,
        "slice_blocks": 1,
        "push_programs": 2,
        "push_rows": 1,
        "push_blocks": 1,
        "update_programs": 1,
        "block_runs": 4,
    }
    return interlace.EmbeddingAllToAllConfig(**small | options)


def _lookups(rank: int, batch: int, turn: int) -> torch.Tensor:
    """One lookup per bag."""
    return torch.randint(0, 8, (batch,), generator=torch.Generator().manual_seed(100 * turn + rank))


def embedding_forward(rank: Rank) -> None:
    """A table on every rank. No gradients are recorded: else ranks ask in each call whether tables
    train.
    """
    chunk = 3
    config, batch = _embedding_config(), chunk * rank.world_size

    def make(kind: int, turn: int) -> Call:
        width = (8, 12)[kind]
        tables = _everyones(rank, 8, width, seed=turn)
        whole = torch.cat(
            [table[_lookups(each, batch, turn)] for each, table in enumerate(tables)], 1
        )
        call = functools.partial(
            interlace.embedding_all_to_all,
            [tables[rank.rank]],
            _lookups(rank.rank, batch, turn),
            torch.arange(batch + 1),
            impl="fused",
            config=config,
            name=f"width {width}",
            check_indices=False,
        )
        return call, whole[rank.rank * chunk : (rank.rank + 1) * chunk]

    with torch.no_grad():
        _rounds(rank, make)


def embedding_backward(rank: Rank, without: int = -1) -> None:
    """Two exchanges with a table on every rank but ``without``, and one backward pass through
    both.
    """
    chunk = 2
    config, batch = _embedding_config(), chunk * rank.world_size

    def forward(table: torch.Tensor | None, width: int, turn: int) -> torch.Tensor:
        tables = [] if table is None else [table]
        y = interlace.embedding_all_to_all(
            tables,
            _lookups(rank.rank, batch, turn)[: len(tables) * batch],
            torch.arange(len(tables) * batch + 1),
            impl="fused",
            config=config,
            name=f"width {width}",
            batch_size=batch,
            output_dtype=torch.float32,
            check_indices=False,
        )
        scale = torch.arange(1.0, chunk + 1) + chunk * rank.rank
        return (y * scale[:, None]).sum()

    def gradients(tables: list[torch.Tensor], turn: int) -> list[torch.Tensor]:
        loss = sum(
            forward(tables[i] if tables else None, width, turn) for i, width in enumerate((8, 12))
        )
        loss.backward()  # type: ignore[union-attr]
        return [table.grad for table in tables]  # type: ignore[misc]

    def make(kind: int, turn: int) -> Call:
        mine = (
            []
            if rank.rank == without
            else [_numbers(rank.rank, 8, width).requires_grad_() for width in (8, 12)]
        )
        scale = torch.arange(1.0, batch + 1)
        lookups = _lookups(rank.rank, batch, turn)
        expected = [
            torch.zeros_like(table).index_add_(
                0, lookups, scale[:, None].expand(-1, table.shape[1])
            )
            for table in mine
        ]
        return functools.partial(gradients, mine, turn), expected

    _rounds(rank, make)


# Experts


def experts(rank: Rank, backward: bool = False, impl: str = "fused") -> None:
    """One expert on every rank, two for each token; with ``backward``, one backward pass through
    two layers side by side.
    """
    config = interlace.MixtureOfExpertsConfig(
        block_m=16, block_n=32, block_k=16, group_m=2, programs=1, push_programs=1, push_rows=4,
        sum_programs=1, stagger=0,
    )  # fmt: skip
    w_in = [_numbers(each, 1, 16, 2, 16, seed=8) / 4 for each in range(rank.world_size)]
    w_out = [_numbers(each, 1, 16, 16, seed=9) / 4 for each in range(rank.world_size)]
    weight = [each[rank.rank].requires_grad_(backward) for each in (w_in, w_out)]

    def layer(
        tokens: int, turn: int
    ) -> tuple[torch.Tensor, Callable[[], torch.Tensor], torch.Tensor]:
        """x, the call, and what comes out of it."""
        x = (_numbers(rank.rank, tokens, 16, seed=turn) / 4).requires_grad_(backward)
        first = (torch.arange(tokens) + rank.rank) % rank.world_size
        chosen = torch.stack([first, (first + 1) % rank.world_size], 1)
        weights = torch.tensor([0.5, 0.25]).repeat(tokens, 1)
        call = functools.partial(
            interlace.mixture_of_experts,
            x,
            chosen,
            weights,
            w_in[rank.rank],
            w_out[rank.rank],
            impl=impl,
            config=config,
        )
        rows = []
        for t, numbers in enumerate(chosen.tolist()):
            each = [
                weights[t, j] * _expert(x[t], w_in[e][0], w_out[e][0])
                for j, e in enumerate(numbers)
            ]
            rows.append(torch.stack(each).sum(0))
        return x, call, torch.stack(rows)

    def make(kind: int, turn: int) -> Call:
        if not backward:
            _, call, y = layer((3, 5)[kind], turn)
            return call, y
        layers = [layer(tokens, turn) for tokens in (3, 5)]
        xs = [x for x, _, _ in layers]
        expected = torch.autograd.grad([y.sum() for _, _, y in layers], xs)
        # The weights' gradients, sums over all ranks' tokens, are computed but not compared.
        return lambda: torch.autograd.grad([call().sum() for _, call, _ in layers], [*xs, *weight])[
            :2
        ], expected

    _rounds(rank, make)


def experts_in_float8(rank: Rank, impl: str = "fused") -> None:
    """As there, with weights of float8. Tokens are exact in float8, activations are not."""
    config = interlace.MixtureOfExpertsConfig(
        block_m=16, block_n=128, block_k=128, group_m=2, num_warps=4, programs=1, push_programs=1,
        push_rows=4, sum_programs=1, stagger=0,
    )  # fmt: skip
    w_in = [_numbers(each, 2, 128, 128, seed=8).clamp(-1, 1) for each in range(rank.world_size)]
    w_out = torch.eye(128)[None].to(torch.float8_e4m3fn)

    def make(kind: int, turn: int) -> Call:
        tokens = (3, 5)[kind]
        x = _numbers(rank.rank, tokens, 128, seed=turn)
        x[:, 0] = 3.5  # 448 / 128, so that all are whole numbers of the scale
        first = (torch.arange(tokens) + rank.rank) % rank.world_size
        chosen = torch.stack([first, (first + 1) % rank.world_size], 1)
        weights = torch.tensor([0.5, 0.25]).repeat(tokens, 1)
        results = []
        for of_token, experts_of_token in zip(x, chosen.tolist(), strict=True):
            rows = []
            for expert in experts_of_token:
                gate, up = w_in[expert] @ of_token
                active = (gate.relu() * up).half().float()
                scale = active.abs().max() / 448
                float8 = (active / scale).to(torch.float8_e4m3fn).float()
                rows.append((float8 * scale).half().float())
            results.append(0.5 * rows[0] + 0.25 * rows[1])
        call = functools.partial(
            interlace.mixture_of_experts,
            x.half(),
            chosen,
            weights,
            w_in[rank.rank][None].to(torch.float8_e4m3fn).transpose(1, 2),
            w_out,
            w_in_scale=torch.ones(1, 1, 2, 1),
            w_out_scale=torch.ones(1, 1, 1),
            activation="relu",
            impl=impl,
            config=config,
        )
        return call, torch.stack(results).half()

    _rounds(rank, make)


def _expert(x: torch.Tensor, w_in: torch.Tensor, w_out: torch.Tensor) -> torch.Tensor:
    return w_out @ (F.silu(w_in[:, 0] @ x) * (w_in[:, 1] @ x))


# Mapped outputs


def fused(rank: Rank, collective: str, transport: str = "stores") -> None:
    """Somebody else's producers, whose stores are collectives: two of them, in turn."""
    ranks = rank.world_size
    # A page for each rank; few rows, which one program moves.
    shapes = (
        [(ranks, 1024), (ranks, 512)]
        if collective == "gather"
        else [(4 * ranks, 256), (2 * ranks, 512)]
    )
    producer = _copy if transport == "stores" else _copy_and_send
    products = [
        interlace.fuse(producer, collective, shape=shape, dtype=torch.float32, transport=transport)
        for shape in shapes
    ]

    def make(kind: int, turn: int) -> Call:
        shape, product = shapes[kind], products[kind]
        outputs = _everyones(rank, *shape, seed=turn)
        total = sum(outputs, torch.zeros(shape))
        part = slice(shape[0] // ranks * rank.rank, shape[0] // ranks * (rank.rank + 1))
        expected = {
            "all_to_all": torch.cat([each[part] for each in outputs]),
            "reduce_scatter": total[part],
            "all_reduce": total,
            "gather": torch.stack(outputs) if rank.rank == 0 else torch.empty(0, *shape),
        }[collective]
        return lambda: product(outputs[rank.rank]).clone(), expected

    _rounds(rank, make)


def _copy(value: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(value)


def _copy_and_send(value: torch.Tensor, out: torch.Tensor, send: Callable[[int], None]) -> None:
    out.copy_(value)
    send(0)


# A kernel of users


@functools.cache
def _readme() -> Any:
    """The kernel of the language's README, and its host side, as a module."""
    text = (Path(interlace.__file__).parent / "language" / "README.md").read_text()
    path = Path(tempfile.mkdtemp(prefix="interlace-tests-")) / "all_gather_of_the_readme.py"
    path.write_text("\n".join(block.split("```")[0] for block in text.split("```python\n")[1:]))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def readme(rank: Rank) -> None:
    def make(kind: int, turn: int) -> Call:
        xs = _everyones(rank, (256, 512)[kind], seed=turn)
        return functools.partial(_readme().all_gather, xs[rank.rank]), torch.stack(xs)

    _rounds(rank, make)


PROGRAMS: dict[str, Callable[[Rank], None]] = {
    "gemv, one shot": gemv,
    "gemv, one shot, two values a word": functools.partial(gemv, dtype=torch.bfloat16),
    "gemv, two phases": functools.partial(gemv, protocol="two_phase"),
    "linear_cross_entropy": loss,
    "linear_top_k": top_k,
    "gemm_reduce_scatter, fused": reduce_scatter,
    "gemm_reduce_scatter, fused, no rows": functools.partial(reduce_scatter, empty=True),
    "gemm_reduce_scatter, chunked": functools.partial(reduce_scatter, impl="chunked"),
    "gemm_reduce_scatter, chunked, few rows": functools.partial(
        reduce_scatter, impl="chunked", few=True
    ),
    "gemm_reduce_scatter, pushed": functools.partial(reduce_scatter, impl="pushed"),
    "gemm_all_reduce, fused": all_reduce,
    "gemm_all_reduce, remote_stores": functools.partial(all_reduce, impl="remote_stores"),
    "gemm_all_reduce, pushed": functools.partial(all_reduce, impl="pushed"),
    "gemm_all_reduce_norm, fused": normed,
    "gemm_all_reduce_norm, pushed": functools.partial(normed, impl="pushed", dtype=torch.bfloat16),
    "gemm_all_to_all, fused": all_to_all,
    "gemm_all_to_all, pushed": functools.partial(all_to_all, impl="pushed"),
    "gemm_all_to_all_columns": to_columns,
    "all_to_all_gemm": to_rows,
    "all_to_all_gemm, no rows": functools.partial(to_rows, empty=True),
    "all_gather_gemm, fused": all_gather,
    "all_gather_gemm, fused, in place": all_gather_in_place,
    "all_gather_gemm, chunked": functools.partial(all_gather, impl="chunked"),
    "all_gather_gemm, pushed": functools.partial(all_gather, impl="pushed"),
    "embedding forward, direct": embedding_forward,
    "embedding forward, between nodes": embedding_forward,
    "embedding backward, between nodes": embedding_backward,
    "gemm_all_to_all, between nodes": functools.partial(all_to_all, impl="chunked"),
    "gemm_reduce_scatter, two levels": functools.partial(two_levels, collective="reduce_scatter"),
    "gemm_all_reduce, two levels": functools.partial(two_levels, collective="all_reduce"),
    "all_gather_gemm, two levels": functools.partial(all_gather, impl="chunked"),
    "embedding backward": embedding_backward,
    "embedding backward, a rank without tables": functools.partial(embedding_backward, without=1),
    "mixture_of_experts": experts,
    "mixture_of_experts, backward": functools.partial(experts, backward=True),
    "mixture_of_experts, decode": functools.partial(experts, impl="decode"),
    "mixture_of_experts, float8": experts_in_float8,
    "mixture_of_experts, float8, decode": functools.partial(experts_in_float8, impl="decode"),
    "mapped all-to-all": functools.partial(fused, collective="all_to_all"),
    "mapped all-to-all by copies": functools.partial(
        fused, collective="all_to_all", transport="copy_engine"
    ),
    "mapped reduce-scatter": functools.partial(fused, collective="reduce_scatter"),
    "mapped all-reduce": functools.partial(fused, collective="all_reduce"),
    "mapped gather": functools.partial(fused, collective="gather"),
    "a kernel of the language's README": readme,
}
"""Every protocol, by a name."""


def nodes_of(name: str, ranks: int) -> tuple[int, ...]:
    """The node of each rank, of at least so many ranks, if the program is of several nodes."""
    if "two levels" in name:
        # As many ranks on every node.
        return (0, 1) if ranks == 2 else (0, 0, 1, 1)
    # The first rank is on a node by itself.
    return (0,) + (1,) * (ranks - 1) if "between nodes" in name else ()
