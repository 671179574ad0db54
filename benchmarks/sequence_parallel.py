"""Time the products around attention by Ulysses beside the pair that programs run.

    python benchmarks/sequence_parallel.py --json FILE [--ranks 2] [--configs [--tables FOLDER]]

Of each size: the QKV product whose columns go to the ranks of their heads
(``gemm_all_to_all_columns``), the output product whose heads come back (``all_to_all_gemm``), and
both with their backward passes. Ways: ``fused``, Interlace's kernel; ``auto``, what runs by itself,
by the tuned tables; ``pair``, as a program writes it: ``F.linear``, a permute and
``all_to_all_single`` of NCCL, one exchange for queries, keys and values together; ``product`` and
``exchange``, which no way can do without; and where FlashInfer is installed ``flashinfer``, its
``UlyssesCommunicator``, whose exchange has the permute in it, of queries, keys and values one by
one. With ``--configs`` also other configurations of the fused kernel, of which ``--tables`` keeps
the fastest in the tuned tables of a folder, say ``src/interlace/tuning/tables``: ``impl="auto"``
goes by these. Microseconds of the slowest rank, the median and deciles, eager and in a CUDA graph.
Results are compared with the pair's first. Steps with backward passes are beside ``unfused``, which
is the pair by Interlace.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import documents
import torch
import torch.distributed as dist
import torch.nn.functional as F
from program_times import in_graph, in_turn

import interlace
from interlace import tuning
from interlace.bench import tuned
from interlace.cli.machine import describe
from interlace.documents import to_json
from interlace.gemm.config import GemmConfig
from interlace.registry import operator_named

TO_COLUMNS, TO_ROWS = "gemm_all_to_all_columns", "all_to_all_gemm"


@dataclasses.dataclass(frozen=True)
class Size:
    """Attention of one sample.

    Attributes:
        tokens: S, of all ranks.
        width: Of a token.
        heads, kv_heads: Query heads, and key heads.
    """

    tokens: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int = 128


# Llama 3 8B and 70B, and a model with one key head.
SIZES = tuple(
    Size(tokens, *model)
    for model in ((4096, 32, 8), (8192, 64, 8), (4096, 32, 1))
    for tokens in (8192, 32768, 131072)
)
CALLS, SETTLING = 5, 10
# What configurations change of the default, a field at a time; the first ones change nothing, and
# are there to be in the tables.
CONFIGS: dict[str, dict[str, tuple[int, ...]]] = {
    TO_COLUMNS: {"stagger": (100, 0), "group_m": (4, 16), "block_n": (128,)},
    TO_ROWS: {"senders": (16, 8, 24, 32), "group_m": (16,), "block_n": (128,)},
}


@dataclasses.dataclass(frozen=True)
class Work:
    """One operator's call of a size, on this rank.

    Attributes:
        operator: The operator's name.
        x: Its input.
        weights: Two weights, used in turn, so that none stays in the cache.
        options: Its columns.
        sent: Elements that go to each rank, and that come from each.
        sizes: Sizes of the cost's formula.
    """

    operator: str
    x: torch.Tensor
    weights: list[torch.Tensor]
    options: dict[str, Any]
    sent: tuple[list[int], list[int]]
    sizes: dict[str, int]

    def call(self, number: int, **options: Any) -> torch.Tensor:
        """Make the call with one of the weights."""
        function = getattr(interlace, self.operator)
        y: torch.Tensor = function(self.x, self.weights[number % 2], **self.options, **options)
        return y

    def pair(self, number: int) -> torch.Tensor:
        """Return the same result by PyTorch's own operators."""
        w, (sent, received) = self.weights[number % 2], self.sent
        arrived = self.x.new_empty(sum(received))
        if self.operator == TO_ROWS:
            dist.all_to_all_single(arrived, self.x.view(-1), received, sent)
            rows = self.sizes["rows"]
            parts = [part.view(rows, -1) for part in arrived.split(received)]
            return F.linear(torch.cat(parts, 1), w)
        y = F.linear(self.x, w)
        columns = [
            torch.cat([y[:, first:end] for first, end in ranges], 1).view(-1)
            for ranges in self.options["column_ranges"]
        ]
        dist.all_to_all_single(arrived, torch.cat(columns), received, sent)
        return arrived.view(len(y) * len(columns), -1)

    def step(self, number: int, impl: str) -> None:
        """Make the call and its backward pass."""
        y = self.call(number, impl=impl)
        y.backward(y.detach())


def work_of(size: Size) -> Iterator[Work]:
    """Yield both operators' calls of a size."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    own_rows, queries = size.tokens // ranks, size.heads * size.head_dim
    ranges = interlace.qkv_column_ranges(size.heads, size.kv_heads, size.head_dim, ranks)
    counts = [sum(end - first for first, end in each) for each in ranges]
    columns = queries + 2 * size.kv_heads * size.head_dim

    def random(rows: int, inner: int) -> torch.Tensor:
        return (torch.randn(rows, inner, device="cuda") / inner**0.5).bfloat16()

    yield Work(
        TO_COLUMNS,
        random(own_rows, size.width) * size.width**0.5,
        [random(columns, size.width) for _ in range(2)],
        {"column_ranges": ranges},
        ([own_rows * count for count in counts], [own_rows * counts[rank]] * ranks),
        {"rows": own_rows, "columns": columns, "inner": size.width},
    )
    share = queries // ranks
    yield Work(
        TO_ROWS,
        random(size.tokens, share) * share**0.5,
        [random(size.width, queries) for _ in range(2)],
        {},
        ([own_rows * share] * ranks, [own_rows * share] * ranks),
        {"rows": own_rows, "columns": size.width, "inner": queries},
    )


def configs_of(work: Work) -> dict[str, GemmConfig]:
    """Return the default configuration of a call, and others, by what they change of it."""
    ranks, x = dist.get_world_size(), work.x
    sizes = work.sizes | {"rows": work.sizes["rows"] * ranks}
    declaration: Any = operator_named(work.operator)
    start = declaration.choose(**sizes, dtype=x.dtype, device=x.device, world_size=ranks).config
    start = declaration.fitted(start, work.options.get("column_ranges", []))
    return {
        f"{name}={value}": dataclasses.replace(start, **{name: value})
        for name, values in CONFIGS[work.operator].items()
        for value in values
    }


def flashinfer_of(work: Work, size: Size) -> Callable[[int], torch.Tensor] | None:
    """Return the call by FlashInfer's communicator; None if it is not installed, or takes no such
    heads.
    """
    ranks, dim = dist.get_world_size(), size.head_dim
    if importlib.util.find_spec("flashinfer") is None or size.kv_heads % ranks:
        return None
    ulysses = importlib.import_module("flashinfer.comm.ulysses")
    own_rows, counts = work.sizes["rows"], [size.heads, size.kv_heads, size.kv_heads]
    communicator = ulysses.UlyssesCommunicator(
        dist.group.WORLD, max_elems=own_rows * size.heads * dim, dtype=work.x.dtype
    )

    def to_columns(number: int) -> torch.Tensor:
        y = F.linear(work.x, work.weights[number % 2]).view(1, own_rows, -1, dim)
        q, *_ = (communicator.scatter_heads(part.contiguous()) for part in y.split(counts, 2))
        queries: torch.Tensor = q
        return queries

    def to_rows(number: int) -> torch.Tensor:
        gathered = communicator.gather_heads(work.x.view(1, len(work.x), -1, dim))
        return F.linear(gathered.view(own_rows, -1), work.weights[number % 2])

    return to_columns if work.operator == TO_COLUMNS else to_rows


def ways_of(work: Work, configs: dict[str, GemmConfig]) -> dict[str, Callable[[int], Any]]:
    """Return the forward pass in every way, and with these configurations."""
    sizes, (sent, received) = work.sizes, work.sent
    left = torch.randn(sizes["rows"], sizes["inner"], device="cuda").bfloat16()
    flat, arrived = (left.new_empty(sum(each)) for each in (sent, received))
    ways: dict[str, Callable[[int], Any]] = {
        "pair": work.pair,
        "fused": lambda i: work.call(i, impl="fused"),
        "auto": lambda i: work.call(i),
        "product": lambda i: F.linear(left, work.weights[i % 2]),
        "exchange": lambda i: dist.all_to_all_single(arrived, flat, received, sent),
    }
    for name, config in configs.items():
        ways[name] = lambda i, config=config: work.call(i, impl="fused", config=config)
    return ways


def time_work(work: Work, size: Size, *, with_configs: bool) -> dict[str, Any]:
    """Return the times of all ways of one call, and of its steps."""
    found: dict[str, Any] = {"operator": work.operator, **work.sizes}
    with torch.no_grad():
        wanted, y = work.pair(0), work.call(0, impl="fused")
        # Both round to bfloat16 once, after sums in another order.
        error = float((y.float() - wanted.float()).abs().max() / wanted.float().abs().max())
        if not error < 2**-6:
            raise AssertionError(f"{work.operator}, {work.sizes}: wrong by {error:.2g}")
        del wanted, y
        configs = configs_of(work) if with_configs else {}
        ways = ways_of(work, configs)
        peer = flashinfer_of(work, size)
        if peer is not None:
            ways["flashinfer"] = peer
        for name, times in in_turn(ways, calls=CALLS, settling=SETTLING).items():
            found[name] = times | {"graph": in_graph(ways[name], period=2)}
    leaving = sum(work.sent[0]) - work.sent[0][dist.get_rank()]
    found["configs"] = {name: str(config) for name, config in configs.items()}
    found |= {"flops": 2 * math.prod(work.sizes.values()), "link_bytes": 2 * leaving}
    for tensor in (work.x, *work.weights):
        tensor.requires_grad_()
    steps = {
        f"step, {impl}": (lambda i, impl=impl: work.step(i, impl)) for impl in ("unfused", "fused")
    }
    return found | in_turn(steps, calls=CALLS, settling=SETTLING)


def worker(with_configs: bool) -> list[dict[str, Any]]:
    """Time all sizes on this rank."""
    results = []
    for size in SIZES:
        for work in work_of(size):
            timed = time_work(work, size, with_configs=with_configs)
            results.append(dataclasses.asdict(size) | timed)
            if dist.get_rank() == 0:
                ratio = timed["fused"]["graph"]["median_us"] / timed["pair"]["graph"]["median_us"]
                print(f"{ratio:.2f} of the pair:", results[-1], flush=True)
    return results


def entry_of(result: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return the entry of a tuned table for one result with configurations."""
    times = {name: result[name]["graph"]["median_us"] for name in ("pair", *result["configs"])}
    best = min(result["configs"], key=times.__getitem__)
    return {
        "world_size": ranks,
        "dtype": "bfloat16",
        "rows": result["tokens"],
        "columns": result["columns"],
        "inner": result["inner"],
        "impl": "fused" if times[best] < times["pair"] else "unfused",
        "config": result["configs"][best],
        "fused_us": times[best],
        "unfused_us": times["pair"],
        "unfused": "cuBLAS + NCCL",
    }


def write_tables(folder: Path, results: list[dict[str, Any]], ranks: int) -> None:
    """Add results to the tuned tables of both operators for this machine's GPU."""
    machine = describe()
    for operator in (TO_COLUMNS, TO_ROWS):
        file = folder / tuning.file_name(operator, machine["gpus"][0])
        entries = [entry_of(each, ranks) for each in results if each["operator"] == operator]
        table = tuned.merge(tuned.read(file, operator), operator, machine, entries)
        file.write_text(to_json(table), encoding="utf-8")


def main() -> None:
    """Run the benchmark and write its results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--configs", action="store_true", help="time other configurations, too")
    parser.add_argument("--tables", type=Path, help="folder of tuned tables; needs --configs")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if options.tables is not None and not options.configs:
        parser.error("--tables needs --configs")
    results, *_ = interlace.launch(worker, options.ranks, options.configs, backend="cuda")
    documents.write(options.json, results)
    if options.tables is not None:
        write_tables(options.tables, results, options.ranks)


if __name__ == "__main__":
    main()
