"""After ``sum_replicated_gradients`` every gradient is that of the plain model on one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from interlace.nn import (
    ColumnParallelLinear,
    EmbeddingTable,
    MoE,
    RowParallelLinear,
    ShardedEmbeddingBags,
    sum_replicated_gradients,
)
from interlace.nn.parallel_linear import ParallelLinear
from tests.errors import error_of

WIDTH, HEADS, HIDDEN, TOKENS, BATCH = 16, 4, 24, 8, 2


class _Attention(nn.Module):
    """Attention whose queries and keys are normalised head by head, as in Qwen3."""

    def __init__(self) -> None:
        super().__init__()
        self.size = WIDTH // HEADS
        self.projection: nn.Module = nn.Linear(WIDTH, 3 * WIDTH)
        self.query_norm, self.key_norm = nn.RMSNorm(self.size), nn.RMSNorm(self.size)
        self.output: nn.Module = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.size)) for part in self.projection(x).chunk(3, -1))
        heads = [t.permute(1, 2, 0, 3) for t in (self.query_norm(q), self.key_norm(k), v)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        y: torch.Tensor = self.output(mixed.permute(2, 0, 1, 3).flatten(-2))
        return y


class _Llama(nn.Module):
    """An embedding, a block and a head, ``[S, B] -> [S, B, vocabulary]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, WIDTH)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(3))
        for norm in self.norms:
            nn.init.uniform_(norm.weight)
        self.attention = _Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, WIDTH))
        self.head: nn.Module = nn.Linear(WIDTH, 8)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(self.norms[0](x))
        x = x + self.mlp(self.norms[1](x))
        y: torch.Tensor = self.head(self.norms[2](x))
        return y


def _parallel(
    model: _Llama, sequence_parallel: bool, group: dist.ProcessGroup | None = None
) -> _Llama:
    model, options = copy.deepcopy(model), {"sequence_parallel": sequence_parallel}
    projection, output, up, down = (
        model.attention.projection, model.attention.output, model.mlp[0], model.mlp[2]
    )  # fmt: skip
    model.attention.projection = ColumnParallelLinear.from_linear(
        projection, group, parts=[WIDTH] * 3, **options
    )
    model.attention.output = RowParallelLinear.from_linear(output, group, **options)
    model.mlp[0] = ColumnParallelLinear.from_linear(up, group, **options)
    model.mlp[2] = RowParallelLinear.from_linear(down, group, **options)
    model.head = ColumnParallelLinear.from_linear(model.head, group, **options)
    for module in model.modules():
        if isinstance(module, ParallelLinear):
            module.impl = "unfused"
    return model


def _wrong(full: nn.Module, model: nn.Module) -> list[str]:
    """Return the names of parameters of ``model`` whose gradients are not those of ``full``."""
    layers = dict(model.named_modules())
    wrong = []
    for name, parameter in full.named_parameters():
        layer, _, kind = name.rpartition(".")
        expected, found = parameter.grad, model.get_parameter(name).grad
        holder = layers[layer]
        if isinstance(holder, ParallelLinear) and kind in holder._sharded():
            expected = holder.shard_of(expected)
        if expected is None or found is None:
            wrong += [] if expected is found else [name]
        elif not torch.allclose(found, expected, rtol=1e-4, atol=1e-6):
            wrong.append(name)
    return wrong


def _llama(sequence_parallel: bool) -> Any:
    """Return what is wrong before and after the sum, and what was refused between."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    full = _Llama()
    model = _parallel(full, sequence_parallel)
    for _ in range(2):
        tokens, weights = torch.randint(8, (TOKENS, BATCH)), torch.rand(TOKENS, BATCH, 8)
        (full(tokens) * weights).sum().backward()
        own = tokens.chunk(ranks)[rank] if sequence_parallel else tokens
        (model(own) * weights.chunk(ranks, -1)[rank]).sum().backward()
    before, refused = _wrong(full, model), None
    norms = [model.attention.query_norm, model.attention.key_norm]
    if not sequence_parallel:
        refused = error_of(sum_replicated_gradients, model)
    sum_replicated_gradients(model, partial=() if sequence_parallel else norms)
    return before, refused, _wrong(full, model)


@pytest.mark.parametrize("world_size", [2, 4])
def test_tensor_and_sequence_parallel_model(ranks: Any, world_size: int) -> None:
    """A Llama-like block with norms of heads has all gradients of the plain model: with sequence
    parallelism without a word, and without it once norms between two layers are named.
    """
    partial = {f"attention.{name}_norm.weight" for name in ("query", "key")}
    for before, refused, after in ranks(world_size).run(_llama, False):
        assert set(before) == partial
        assert refused[0] == "ArgumentError"
        assert "the parameter 'attention.query_norm.weight', which _Attention" in refused[1]
        assert after == []
    for before, _, after in ranks(world_size).run(_llama, True):
        assert {"embedding.weight", *(f"norms.{i}.weight" for i in range(3)), *partial} == set(
            before
        )
        assert after == []


class _Experts(nn.Module):
    """A norm, and a mixture of experts behind it."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.experts = MoE(WIDTH, HIDDEN, 4, 2, bias=True, seed=3, group=group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.experts(self.norm(x))[0]
        return y


def _tokens(rank: int) -> torch.Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(rank))


def _moe(way: str, impl: str) -> dict[str, Any]:
    """Return this rank's gradients; each rank's loss is the mean over its own tokens."""
    average: bool | None = True
    model: Any = _Experts()
    model.experts.impl = impl
    called: nn.Module = model
    if way == "ddp":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            model, [f"experts.{name}" for name in ("w_in", "w_out", "b_in", "b_out")]
        )
        called, average = DistributedDataParallel(model), None
    loss = called(_tokens(dist.get_rank())).square().mean()
    if way == "sum":
        loss, average = loss / dist.get_world_size(), False
    loss.backward()
    refused = error_of(sum_replicated_gradients, model)
    sum_replicated_gradients(called, average=average)
    return {name: value.grad for name, value in model.named_parameters()} | {"refused": refused}


@pytest.mark.parametrize(
    ("world_size", "way", "impl"),
    [(2, "mean", "unfused"), (4, "sum", "unfused"), (2, "ddp", "unfused"), (2, "mean", "fused")],
)
def test_experts(ranks: Any, world_size: int, way: str, impl: str) -> None:
    """A norm, a router and experts have the gradients of the mean over all tokens, also where
    ``DistributedDataParallel`` reduces what is replicated; and only if it is said that it is the
    mean.
    """
    full = _Experts()
    full.experts.impl = "unfused"  # this process is none that interprets kernels
    full(torch.cat([_tokens(rank) for rank in range(world_size)])).square().mean().backward()
    for rank, gradients in enumerate(ranks(world_size).run(_moe, way, impl)):
        refused = gradients.pop("refused")
        assert refused[0] == "ArgumentError"
        assert "average must be given" in refused[1]
        assert "'norm.weight'" in refused[1]
        for name, value in full.named_parameters():
            expected = value.grad
            if ".w_" in name or ".b_" in name:
                expected = expected.chunk(world_size)[rank]
            torch.testing.assert_close(gradients[name], expected, rtol=1e-4, atol=1e-6)


def _two_dimensions() -> list[str]:
    """Return what is wrong where two ranks share the layers and two pairs have other samples."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    full = _Llama()
    model = _parallel(full, True, mesh.get_group("tensor"))
    samples = [torch.randint(8, (TOKENS, BATCH)) for _ in range(2)]
    weights = torch.rand(TOKENS, BATCH, 8)
    for tokens in samples:
        ((full(tokens) * weights).sum() / 2).backward()
    data, tensor = (mesh.get_local_rank(name) for name in ("data", "tensor"))
    own = samples[data].chunk(2)[tensor]
    (model(own) * weights.chunk(2, -1)[tensor]).sum().backward()
    sum_replicated_gradients(model, mesh.get_group("tensor"))
    sum_replicated_gradients(model, mesh.get_group("data"), average=True)
    whole = error_of(sum_replicated_gradients, model, average=True)
    assert whole is not None
    assert "'attention.projection.weight', which ColumnParallelLinear" in whole[1]
    return _wrong(full, model)


def test_each_dimension_of_a_mesh(ranks: Any) -> None:
    """Called for each dimension of a mesh, it averages shards over ranks that hold the same."""
    assert ranks(4).run(_two_dimensions) == [[]] * 4


def _bags() -> Any:
    """Return the gradients of a dense layer beside tables, and the error of another average."""
    rank = dist.get_rank()
    bags = ShardedEmbeddingBags(
        [EmbeddingTable(name, 4, 4, bag_length=1) for name in "ab"], gradient="dense"
    )
    torch.manual_seed(0)
    model = nn.ModuleDict({"bags": bags, "dense": nn.Linear(8, 1)})
    model["dense"](bags(torch.tensor([rank, 3, 2, rank]))).mean().backward()
    dense = model["dense"].weight.grad.clone()
    tables = {name: value.grad.clone() for name, value in bags.named_parameters()}
    refused = error_of(sum_replicated_gradients, model, average=False)
    sum_replicated_gradients(model)
    kept = all(torch.equal(tables[name], value.grad) for name, value in bags.named_parameters())
    return dense, model["dense"].weight.grad, kept, refused


def test_dense_layers_beside_tables(ranks: Any) -> None:
    """Dense layers are averaged as the tables beside them are, which stay as they are."""
    outcomes = ranks(2).run(_bags)
    mean = (outcomes[0][0] + outcomes[1][0]) / 2
    for _, found, kept, refused in outcomes:
        torch.testing.assert_close(found, mean)
        assert kept
        assert refused[0] == "ArgumentError"
        assert "average=False, which sums" in refused[1]
        assert "ShardedEmbeddingBags 'bags', which averages" in refused[1]


def _buckets(limit: int) -> Any:
    """Return gradients of parameters of several dtypes and sizes, some absent on rank 1."""
    import interlace.nn.replicated_gradients as module

    before, module._BUCKET_BYTES = module._BUCKET_BYTES, limit
    calls, reduce = [], dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        calls.append(tensor.dtype)
        return reduce(tensor, *args, **options)

    dist.all_reduce = counted
    try:
        model = nn.ParameterList(
            torch.ones(size, dtype=dtype)
            for size in (3, 5, 40, 7)
            for dtype in (torch.float32, torch.bfloat16)
        )
        model.append(torch.ones(4, 6).T)  # whose gradient is not contiguous
        model.append(nn.Parameter(torch.ones(2), requires_grad=False))
        rank = dist.get_rank()
        for i, value in enumerate(model[:9]):
            if i != 2 + rank and i != 5:
                value.grad = torch.full_like(value, float(i + rank))
        sum_replicated_gradients(model, average=False)
    finally:
        module._BUCKET_BYTES, dist.all_reduce = before, reduce
    return [None if value.grad is None else value.grad.unique().tolist() for value in model], calls


def test_few_exchanges(ranks: Any) -> None:
    """Gradients of a dtype are summed at once, up to a bucket's size. A rank without a gradient
    adds zeros, and a gradient that no rank has stays away.
    """
    expected = [[1.0], [3.0], [3.0], [3.0], [9.0], None, [13.0], [15.0], [17.0], None]
    for limit, exchanges in ((1 << 20, 3), (64, 6)):
        for gradients, calls in ranks(2).run(_buckets, limit):
            assert gradients == expected
            assert len(calls) == exchanges


def _refused() -> dict[str, Any]:
    def model_of(*modules: nn.Module) -> nn.Module:
        return nn.ModuleDict({f"m{i}": module for i, module in enumerate(modules)})

    class Tied(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

    def sparse() -> nn.Module:
        embedding = nn.Embedding(4, 2, sparse=True)
        embedding(torch.tensor([1])).sum().backward()
        return embedding

    same = ColumnParallelLinear(4, 4, bias=False)
    own = ColumnParallelLinear(4, 4, bias=False, sequence_parallel=True)
    mesh = init_device_mesh("cpu", (2,))
    others: dict[str, Callable[[], nn.Module]] = {
        "mixed": lambda: model_of(nn.LayerNorm(4), same, own),
        "tied": lambda: model_of(own, Tied(own.weight)),
        "sparse": sparse,
        "sharded": lambda: fully_shard(nn.Linear(4, 4), mesh=mesh),
        "replicas": lambda: model_of(DistributedDataParallel(_Experts())),
    }
    errors = {
        name: error_of(
            sum_replicated_gradients, make(), average=name in ("sparse", "sharded") or None
        )
        for name, make in others.items()
    }
    own.weight.grad = torch.ones_like(own.weight)
    sum_replicated_gradients(others["tied"](), complete=[own])
    errors["as named"] = own.weight.grad.unique().tolist()
    errors["differ"] = error_of(
        sum_replicated_gradients, nn.Linear(2 + dist.get_rank(), 1), average=True
    )
    return errors


def test_what_it_cannot_know(ranks: Any) -> None:
    """It refuses to guess, names the parameter, and changes no gradient."""
    for errors in ranks(2).run(_refused):
        assert errors.pop("as named") == [1.0]
        name, text, _ = errors.pop("differ")
        assert name == "RankMismatchError"
        assert "number of elements" in text
        texts = {
            "mixed": "the parameter 'm0.weight', of a model where ColumnParallelLinear 'm1' takes",
            "tied": "the parameter 'm0.weight', which Tied 'm1' holds as well",
            "sparse": "the parameter 'weight', whose gradient is of layout torch.sparse_coo",
            "sharded": "the parameter 'weight', a DTensor over ranks [0, 1]",
            "replicas": "of experts, which DistributedDataParallel averages with other experts",
        }
        for case, (kind, text, _) in errors.items():
            assert kind == "ArgumentError"
            assert texts[case] in text, (case, text)
