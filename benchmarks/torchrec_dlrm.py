"""TorchRec's DLRM on its own ``DistributedModelParallel`` with FBGEMM, and on Interlace's tables.

    python benchmarks/torchrec_dlrm.py --json FILE [--batch 8192] [--repeats 2] [--checks]

Both ways train TorchRec's own ``DLRM``: 26 tables of width 128 with row-wise Adagrad in the
backward pass, whose rows are those of Criteo's terabyte up to ``--most-rows``, and a dense part
that ``DistributedDataParallel`` replicates. They differ in one call: ``DistributedModelParallel``
with a table-wise plan of TorchRec's planner, or ``interlace.integrations.torchrec.shard`` with the
plan of its own or with TorchRec's. A trainer has one process per visible GPU, and ways take turns.

Weights, dense or not, and data are the same in all trainers. Losses are means over all ranks'
samples, and must agree to ``LOSS_TOLERANCE``: all is float32, but sums are of other orders.

A step is everything from a rank's own samples on: input distribution, forward and backward pass,
and all updates. Times are microseconds per step, the slowest rank's: the median, the least and the
most of ``--rounds`` rounds. Memory is in GiB, of the rank that uses most: the peak of PyTorch's
allocator, and what is in use on the GPU at the end, where symmetric memory counts as well.

``--checks`` tries what not both ways may take, once each: a table that two features share, and
ranks with different numbers of samples. Each is a process group of its own, and the results say
``"ran"`` with its losses, or the error.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import documents
import torch
import torch.distributed as dist
import torch.nn.functional as F
from engines import in_turns
from torch import nn

ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282,
    10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108,
    36,
)  # fmt: skip
"""Rows of Criteo's terabyte, where MLPerf's DLRM caps them at 40 million."""

DENSE, BOTTOM, TOP = 13, [512, 256], [1024, 1024, 512, 256, 1]
"""Dense features, and widths of the layers before and after the interaction."""

LOOKUPS = {"one": (1, 1), "uneven": (0, 6)}
"""The least and the most indices per bag of each case, drawn uniformly."""

BATCHES = 4
"""Batches that steps take in turn."""

RATE, EPSILON = 0.01, 1e-8
WAYS = ("torchrec", "interlace", "interlace, TorchRec's plan")
CHECKS = ("shared table", "uneven batches")

LOSS_TOLERANCE = 1e-3
"""The largest relative difference of a step's loss.

Row-wise Adagrad divides a row's first gradient by its own size: a row that was looked up for the
first time moves by the learning rate, in a direction that float32 sums of another order turn a
little. The losses of one way's trainers differ as well, as some of FBGEMM's sums are atomic.
"""


def main() -> None:
    """Start the trainers one after another, or be a process of one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="Where results go.")
    parser.add_argument("--batch", type=int, default=8192, help="Samples of each rank.")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--most-rows", type=int, default=4_000_000, help="Cap of a table's rows.")
    parser.add_argument("--steps", type=int, default=20, help="Steps whose losses are compared.")
    parser.add_argument("--rounds", type=int, default=9, help="Timed rounds of 10 steps each.")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--checks", action="store_true", help="Try also what one way may refuse.")
    parser.add_argument("--cpu", action="store_true", help="Try the script without a GPU.")
    parser.add_argument("--trainer", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--check", choices=CHECKS, default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trainer:
        train(options)
        return
    results: list[dict[str, Any]] = []

    def add(result: dict[str, Any]) -> None:
        results.append(result)
        print(result, flush=True)
        documents.write(options.json, results, batch=options.batch, most_rows=options.most_rows)

    for repeat, way in in_turns(WAYS, options.repeats):
        found, error = run(way, "")
        if error:
            raise SystemExit(error[-8000:])
        add({"way": way, "repeat": repeat, **found})
    for check in CHECKS if options.checks else ():
        for way in WAYS[:2]:
            found, error = run(way, check)
            raised = re.findall(r"^\[rank\d+\]: ([\w.]+Error: .*)|^(TimeoutError.*)", error, re.M)
            errors = ["".join(each) for each in raised]
            add({"way": way, "check": check, "ran": not error, **found, "error": errors[:1]})
    compare(results)


def run(way: str, check: str) -> tuple[dict[str, Any], str]:
    """Start a trainer, and return its results, or the end of its log if it has failed."""
    is_cpu = "--cpu" in sys.argv
    ranks = 2 if is_cpu else torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trainer.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), __file__, *sys.argv[1:]]
        command += ["--trainer", way, "--json", str(file)]
        command += ["--check", check] if check else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if is_cpu:
            # Without it, no operator of Interlace runs on the CPU.
            environment["TRITON_INTERPRET"] = "1"
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True,
                timeout=100 if check else 300,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {}, "TimeoutError: the trainer did not end"
        if done.returncode:
            return {}, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(file.read_text())
    return found, ""


def train(options: argparse.Namespace) -> None:
    """Be one process of a trainer; the first one writes what all have found."""
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu") if options.cpu else torch.device("cuda", rank)
    if options.cpu:
        dist.init_process_group("gloo")
    else:
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    model, optimizer, plan = dlrm(options, device)
    found: dict[str, Any] = {"plan": plan, "losses": {}, "step_us": {}}
    for case, (least, most) in LOOKUPS.items():
        if options.check and case != "one":
            continue
        batches = [batch(options, device, index, least, most) for index in range(BATCHES)]
        steps = 4 if options.check else options.steps
        found["losses"][case] = [
            mean(step(model, optimizer, batches[index % BATCHES]), device) for index in range(steps)
        ]
        if not options.check:
            found["step_us"][case] = timed(model, optimizer, batches, options.rounds, device)
    found["memory"] = memory(device)
    if dist.get_rank() == 0:
        options.json.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def features(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Return the name of each feature and the index of its table."""
    own = [(f"feature_{index}", index) for index in range(len(ROWS))]
    return [*own, ("another", 1)] if options.check == "shared table" else own


def dlrm(
    options: argparse.Namespace, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, int]]:
    """Return the sharded model, the dense part's optimizer, and the rank of each table."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.models.dlrm import DLRM

    configs = [
        EmbeddingBagConfig(
            name=f"table_{table}", embedding_dim=options.width,
            num_embeddings=min(rows, options.most_rows),
            feature_names=[name for name, of_table in features(options) if of_table == table],
            init_fn=functools.partial(fill, seed=table),
        )
        for table, rows in enumerate(ROWS)
    ]  # fmt: skip
    tables = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    torch.manual_seed(1)
    model = DLRM(tables, DENSE, [*BOTTOM, options.width], TOP, dense_device=device)
    plan = torchrecs_plan(options, model, device)
    ranks = {
        name: sharding.ranks[0]
        for module in plan.plan.values()
        for name, sharding in module.items()
    }
    if options.trainer == "torchrec":
        return *by_torchrec(model, plan, device), ranks
    return by_interlace(model, options, ranks, device)


@torch.no_grad()
def fill(weight: torch.Tensor, seed: int) -> None:
    """Draw a whole table's weights: the same for a seed, whoever holds the table."""
    if not weight.numel():
        return  # another rank's table
    generator = torch.Generator(weight.device).manual_seed(seed)
    bound = len(weight) ** -0.5
    weight.uniform_(-bound, bound, generator=generator)


def sharders() -> list[Any]:
    """Return TorchRec's sharder of pooled tables, with FBGEMM's fused update."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    return [EmbeddingBagCollectionSharder()]


def torchrecs_plan(options: argparse.Namespace, model: nn.Module, device: torch.device) -> Any:
    """Return the table-wise plan of TorchRec's planner. Collective."""
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints

    constraints = {
        f"table_{table}": ParameterConstraints(
            sharding_types=["table_wise"], compute_kernels=["fused"]
        )
        for table in range(len(ROWS))
    }
    capacity = 2**40 if device.type == "cpu" else torch.cuda.mem_get_info()[1]
    topology = Topology(
        world_size=dist.get_world_size(), compute_device=device.type,
        hbm_cap=capacity, ddr_cap=2**40, local_world_size=dist.get_world_size(),
    )  # fmt: skip
    planner = EmbeddingShardingPlanner(
        topology=topology, batch_size=options.batch, constraints=constraints
    )
    return planner.collective_plan(model, sharders(), dist.group.WORLD)


def by_torchrec(
    model: nn.Module, plan: Any, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model in ``DistributedModelParallel``, and the optimizer of its dense part."""
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.optimizers import in_backward_optimizer_filter
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    tables: Any = model.sparse_arch.embedding_bag_collection
    settings = {"lr": RATE, "eps": EPSILON}
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), settings)
    parallel = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders())
    dense = dict(in_backward_optimizer_filter(parallel.named_parameters()))
    return parallel, torch.optim.SGD(dense.values(), RATE)


def by_interlace(
    model: nn.Module, options: argparse.Namespace, ranks: dict[str, int], device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, int]]:
    """Return the model with Interlace's tables, the dense part's optimizer, and tables' ranks."""
    from torch.nn.parallel import DistributedDataParallel
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    from interlace.integrations.torchrec import shard

    arch: Any = model.sparse_arch
    settings: dict[str, Any] = {
        "gradient": "rowwise_adagrad", "learning_rate": RATE, "epsilon": EPSILON, "device": device,
        "batch": options.batch * dist.get_world_size(),
    }  # fmt: skip
    if options.trainer != "interlace":
        settings["plan"] = plan_of(arch.embedding_bag_collection, ranks)
    arch.embedding_bag_collection = tables = shard(arch.embedding_bag_collection, **settings)
    shards = tables.bags.plan.shards
    # Tables are drawn as a whole, so a part of a table would have other weights.
    assert all(each.width == options.width for each in shards), "the plan splits tables"
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    others = [name for name, _ in model.named_parameters() if name not in dense]
    # The states of row-wise Adagrad are buffers, of this rank's tables alone.
    others += [name for name, _ in model.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, others)
    parallel = DistributedDataParallel(
        model, device_ids=None if device.type == "cpu" else [device.index]
    )
    placed = {each.table.name: each.rank for each in shards}
    return parallel, torch.optim.SGD(dense.values(), RATE), placed


def plan_of(tables: Any, ranks: dict[str, int]) -> Any:
    """Return Interlace's plan that puts whole tables on the given ranks."""
    import dataclasses

    from interlace.nn.sharding import EmbeddingTable, make_plan

    described = [
        EmbeddingTable(each.name, each.num_embeddings, each.embedding_dim)
        for each in tables.embedding_bag_configs()
    ]
    planned = make_plan(described, dist.get_world_size(), state_bytes_per_row=4)
    order = {table.name: index for index, table in enumerate(described)}
    moved = [dataclasses.replace(each, rank=ranks[each.table.name]) for each in planned.shards]
    moved.sort(key=lambda each: (each.rank, order[each.table.name]))
    return dataclasses.replace(planned, shards=tuple(moved))


def batch(
    options: argparse.Namespace, device: torch.device, index: int, least: int, most: int
) -> tuple[torch.Tensor, Any, torch.Tensor]:
    """Return a rank's dense features, indices and labels; the labels follow from the indices.

    Args:
        options: The script's options.
        device: Where they are made.
        index: The batch's number.
        least, most: Indices per bag.
    """
    from torchrec import KeyedJaggedTensor

    rank = dist.get_rank()
    samples = options.batch - (rank if options.check == "uneven batches" else 0)
    generator = torch.Generator().manual_seed(1000 * index + rank)
    keys, values, lengths = [], [], []
    for name, table in features(options):
        keys.append(name)
        lengths.append(torch.randint(least, most + 1, (samples,), generator=generator))
        rows, count = min(ROWS[table], options.most_rows), int(lengths[-1].sum())
        # Few rows are popular, as in click logs: a share of them has most lookups.
        drawn = rows * torch.rand(count, generator=generator) ** 3
        values.append(drawn.long().clamp(max=rows - 1))
    sparse = KeyedJaggedTensor.from_lengths_sync(
        keys, torch.cat(values).to(device), torch.cat(lengths).int().to(device)
    )
    dense = torch.randn(samples, DENSE, generator=generator)
    labels = (dense.sum(1) > 0).float()
    return dense.to(device), sparse, labels.to(device)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: tuple[torch.Tensor, Any, torch.Tensor]
) -> torch.Tensor:
    """Train one step, and return the loss of this rank's samples."""
    dense, sparse, labels = data
    optimizer.zero_grad()
    loss = F.binary_cross_entropy_with_logits(model(dense, sparse).squeeze(1), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def timed(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], rounds: int,
    device: torch.device,
) -> list[float]:  # fmt: skip
    """Return the microseconds of a step, the slowest rank's: the median, the least and the most."""
    steps, times = 10, []
    for _ in range(rounds):
        synchronize(device)
        dist.barrier()
        begin = time.perf_counter()
        for index in range(steps):
            step(model, optimizer, batches[index % BATCHES])
        synchronize(device)
        times.append(largest((time.perf_counter() - begin) / steps * 1e6, device))
    return [round(each, 1) for each in (statistics.median(times), min(times), max(times))]


def memory(device: torch.device) -> dict[str, float]:
    """Return GiB on the rank that uses most: the allocator's peak, and what is in use in all."""
    if device.type == "cpu":
        return {}
    free, total = torch.cuda.mem_get_info()
    of_rank = {"peak_allocated_gib": torch.cuda.max_memory_allocated(), "used_gib": total - free}
    return {name: round(largest(size / 2**30, device), 3) for name, size in of_rank.items()}


def synchronize(device: torch.device) -> None:
    """Wait for the GPU, if there is one."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def largest(value: float, device: torch.device) -> float:
    """Return the largest of all ranks' values. Collective."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def mean(loss: torch.Tensor, device: torch.device) -> float:
    """Return the mean of all ranks' losses. Collective."""
    total = loss.double().to(device)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def compare(results: list[dict[str, Any]]) -> None:
    """Print the largest relative difference of losses from those of TorchRec's first trainer.

    Raises:
        AssertionError: It is above ``LOSS_TOLERANCE``, or nothing was learned.
    """
    timings = [each for each in results if "check" not in each]
    first = next(each for each in timings if each["way"] == "torchrec")["losses"]
    for case, expected in first.items():
        # The first and the last steps are on the same batches.
        assert sum(expected[-BATCHES:]) < sum(expected[:BATCHES]), f"{case}: nothing was learned"
        for way in WAYS:
            worst = max(
                difference(each["losses"][case], expected) for each in timings if each["way"] == way
            )
            print(f"losses, {case} index per bag, {way}: {worst:.1e} from TorchRec's first")
            assert worst <= LOSS_TOLERANCE, f"losses of {way} differ by {worst}"


def difference(losses: list[float], expected: list[float]) -> float:
    """Return the largest relative difference of two curves of losses, step by step."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


if __name__ == "__main__":
    main()
