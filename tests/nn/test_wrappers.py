"""Models of sharded layers under torch's wrappers and utilities: a step whose gradients are clipped
is that of the whole model, and so is a state dict.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, get_total_norm, parametrize, prune

from interlace.nn import (
    ColumnParallelLinear,
    EmbeddingTable,
    MoE,
    RowParallelLinear,
    ShardedEmbeddingBags,
    ShardingPlan,
    make_plan,
    unsharded_state_dict,
)
from tests.errors import error_of

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
NORMS = [(2.0, None), (2.0, True), (1.0, False), (math.inf, None)]  # order, foreach


class _Model(nn.Module):
    """A block that is used twice, and a head whose weight is also that of an embedding."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        up, down, head = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 8, bias=False)
        if group is not None:
            up, down, head = (
                ColumnParallelLinear.from_linear(up, group),
                RowParallelLinear.from_linear(down, group),
                ColumnParallelLinear.from_linear(head, group),
            )
            up.impl = down.impl = head.impl = "unfused"
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(4), up, nn.GELU(), down)] * 2)
        self.head, self.embedding = head, nn.Module()
        self.embedding.weight = head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(x)
        return y


def _checkpoints(model: _Model, mesh: DeviceMesh) -> nn.Module:
    del mesh
    model.blocks = nn.ModuleList([checkpoint_wrapper(model.blocks[0])] * 2)
    return model


def _fsdp2(model: _Model, mesh: DeviceMesh) -> nn.Module:
    fully_shard(model.blocks[0], mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model


WRAPPERS: dict[str, Callable[[_Model, DeviceMesh], nn.Module]] = {
    "none": lambda model, mesh: model,
    "checkpoints": _checkpoints,
    "DDP": lambda model, mesh: DistributedDataParallel(
        model, process_group=mesh.get_group("data"), gradient_as_bucket_view=True
    ),
    "FSDP2": _fsdp2,
    "FSDP": lambda model, mesh: FullyShardedDataParallel(
        model, process_group=mesh.get_group("data"), use_orig_params=True, device_id=_CPU
    ),
}
_CPU = torch.device("cpu")


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(3, 4), torch.randn(3, 4)


def _full(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _clipped_steps(wrapper: str) -> list[str]:
    """Return what differs after steps of the whole model and of a sharded one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    wrong = []
    for order, foreach in NORMS if wrapper != "FSDP" else [(2.0, None), (math.inf, None)]:
        whole = _Model()
        model = WRAPPERS[wrapper](_Model(mesh.get_group("tensor")), mesh)
        loss = sum(whole(x).square().sum() for x in _inputs())
        (loss if wrapper in ("none", "checkpoints") else loss / 2).backward()
        norm = clip_grad_norm_(whole.parameters(), 0.1, order)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        if wrapper in ("none", "checkpoints"):
            sum(model(x).square().sum() for x in _inputs()).backward()
        else:
            model(_inputs()[mesh.get_local_rank("data")]).square().sum().backward()
        if isinstance(model, FullyShardedDataParallel):
            result = model.clip_grad_norm_(0.1, order)
        else:
            result = clip_grad_norm_(model.parameters(), 0.1, order, foreach=foreach)
        torch.optim.SGD(whole.parameters(), 1.0).step()
        optimizer.step()
        if not torch.allclose(_full(result), norm, **TOLERANCE):
            wrong.append(f"norm {order}: {result} instead of {norm}")
        state = unsharded_state_dict(model)
        if [key.removeprefix("module.") for key in state] != list(whole.state_dict()):
            wrong.append(f"names: {list(state)}")
        for (name, value), expected in zip(state.items(), whole.state_dict().values(), strict=True):
            everywhere = [torch.empty_like(value) for _ in range(dist.get_world_size())]
            dist.all_gather(everywhere, value.contiguous())
            if not torch.allclose(value, expected, **TOLERANCE):
                wrong.append(f"{name}, norm {order}")
            if not all(torch.equal(value, other) for other in everywhere):
                wrong.append(f"{name} differs between ranks, norm {order}")
    return wrong


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_clipped_step_is_that_of_the_whole_model(ranks: Any, wrapper: str) -> None:
    assert ranks(4).run(_clipped_steps, wrapper) == [[]] * 4


def _utilities() -> dict[str, Any]:
    """Check on two ranks what utilities and optimizers see of shards and of their gradients."""
    rank = dist.get_rank()
    model, x = _Model(dist.group.WORLD), _inputs()[0]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    facts: dict[str, Any] = {}
    for step in ("skipped", "stepped"):
        model.zero_grad()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        scaler.scale(model(x).square().sum()).backward()
        if step == "skipped" and rank == 1:
            model.head.weight.grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        facts[step] = (
            scaler.get_scale(),
            sum(torch.equal(value, before[name]) for name, value in model.state_dict().items()),
        )
    # What optimizers keep and what is saved are plain tensors.
    states = [state["momentum_buffer"] for state in optimizer.state.values()]
    facts["states"] = {type(state) for state in states} == {torch.Tensor}
    file = io.BytesIO()
    torch.save([model.head.weight, model.head.weight.grad], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    facts["saved"] = [type(value) for value in saved] == [nn.Parameter, torch.Tensor]

    # Fake tensors are added to gradients that were marked, and a compiled total counts all ranks.
    def total() -> torch.Tensor:
        return get_total_norm([parameter.grad for parameter in model.parameters()])

    norm = float(total())
    # Fake tensors of torch 2.11 take no parameter of any other class than torch's own.
    if torch.__version__ >= (2, 12):  # type: ignore[operator]
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            model(mode.from_tensor(x)).square().sum().backward()
    facts["compiled"] = norm, float(torch.compile(total, backend="eager")())
    # Parameters and gradients that take the place of others are shards, too.
    model = copy.deepcopy(model).to_empty(device="cpu")
    state = _Model().state_dict()
    del state["embedding.weight"]  # which is not cut, as no layer of ours loads it
    model.load_state_dict(state, strict=False, assign=True)
    whole = _Model()
    facts["replaced"] = []
    for each in (model, whole):
        each(x).square().sum().backward()
        # The embedding has no gradient: the state dict has cut its tie.
        parameters = [parameter for parameter in each.parameters() if parameter.grad is not None]
        for parameter in parameters:
            parameter.grad = parameter.grad * 2
        each.to(torch.bfloat16).to(torch.float32)
        facts["replaced"].append(float(get_total_norm([p.grad for p in parameters])))
    # Some ranks may have frozen parameters that others train.
    model.head.weight.requires_grad_(rank == 0)
    model.zero_grad()
    model(x).square().sum().backward()
    facts["frozen"] = float(clip_grad_norm_(model.parameters(), 1.0))
    if rank == 1:
        model.blocks[0][3].weight.grad[0, 0] = math.nan
    try:
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    except RuntimeError:
        facts["not finite"] = True
    return facts


def test_utilities_see_all_ranks_shards(ranks: Any) -> None:
    facts = ranks(2).run(_utilities)
    assert [fact["skipped"] for fact in facts] == [(2.0, 14)] * 2
    assert [fact["stepped"] for fact in facts] == [(2.0, 0)] * 2
    for fact in facts:
        assert fact["states"]
        assert fact["saved"]
        assert fact["compiled"][0] == fact["compiled"][1] == facts[0]["compiled"][0]
        assert fact["replaced"][0] == pytest.approx(fact["replaced"][1], rel=1e-6)
        assert fact["frozen"] == facts[0]["frozen"]
        assert fact["not finite"]


def _experts_and_tables() -> dict[str, Any]:
    """Compare clipped gradients and state dicts with those of one rank that has all of them."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "experts"))
    alone = dist.new_group([rank], use_local_synchronization=True)
    tables = [EmbeddingTable(name, 6, 4, bag_length=1) for name in ("a", "b", "c")]
    inputs, facts = _inputs(), {}
    models: list[list[Any]] = []
    for group in (dist.group.WORLD, alone):
        experts = MoE(4, 4, experts=4, bias=True, group=group)
        bags = ShardedEmbeddingBags(tables, group=group, average_gradients=False)
        experts.impl = bags.impl = "unfused"
        models.append([experts, bags])
    (experts, bags), (all_experts, all_bags) = models
    fully_shard(experts, mesh=mesh["data"])
    experts(inputs[rank])[0].square().sum().backward()
    bags(torch.tensor([rank, 2 + rank, 4 + rank])).square().sum().backward()
    sum(all_experts(x)[0].square().sum() for x in inputs).backward()
    all_bags(torch.arange(6)).square().sum().backward()
    for name, mine, whole in (("experts", experts, all_experts), ("tables", bags, all_bags)):
        norms = [
            get_total_norm([p.grad for key, p in model.named_parameters() if "router" not in key])
            for model in (mine, whole)
        ]
        # What is not sharded is the parameter itself.
        state = copy.deepcopy(unsharded_state_dict(mine))
        expected = unsharded_state_dict(whole)
        differ = [key for key in expected if not torch.equal(state[key], expected[key])]
        facts[name] = float(norms[0] - norms[1]), differ
        with torch.no_grad():
            for parameter in mine.parameters():
                parameter.zero_()
        mine.load_state_dict(state)
        again = unsharded_state_dict(mine)
        facts[f"{name}, loaded"] = [key for key in again if not torch.equal(again[key], state[key])]
    wrong = {key: _full(value) for key, value in experts.state_dict().items()}
    facts["names"] = set(wrong) < set(all_experts.state_dict())
    return facts


def test_experts_and_tables(ranks: Any) -> None:
    """Every rank counts, saves and loads those of all ranks; experts also under FSDP2."""
    for facts in ranks(2).run(_experts_and_tables):
        assert facts.pop("names")
        for name in ("experts", "tables"):
            difference, keys = facts.pop(name)
            assert abs(difference) < 1e-4
            assert keys == []
        assert facts == {"experts, loaded": [], "tables, loaded": []}


class _Double(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def _swapped() -> list[str]:
    """What does not count all ranks' shards once a state dict was loaded by swapping tensors."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        tables = [EmbeddingTable(name, 4, 4) for name in ("a", "b")]
        layers: dict[str, tuple[nn.Module, Callable[[Any], torch.Tensor]]] = {
            "columns": (ColumnParallelLinear(4, 6), lambda layer: layer(torch.ones(3, 4))),
            "experts": (MoE(4, 4, 4), lambda layer: layer(torch.ones(3, 4))[0]),
            "tables": (
                ShardedEmbeddingBags(tables),
                lambda layer: layer(torch.ones(4, dtype=torch.int64), torch.arange(5)),
            ),
        }
        wrong = []
        for name, (layer, call) in layers.items():
            call(layer).square().sum().backward()
            before = get_total_norm([parameter.grad for parameter in layer.parameters()])
            layer.zero_grad()
            layer.load_state_dict(layer.state_dict())
            call(layer).square().sum().backward()
            after = get_total_norm([parameter.grad for parameter in layer.parameters()])
            if not torch.allclose(before, after):
                wrong.append(name)
        return wrong
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_shards_that_a_state_dict_swaps(ranks: Any) -> None:
    assert ranks(2).run(_swapped) == [[], []]


def _computed() -> dict[str, Any]:
    """Facts about parameters that are computed from parts."""
    up, experts, pruned = ColumnParallelLinear(4, 8), MoE(4, 4, 2, 1), ColumnParallelLinear(4, 8)
    facts: dict[str, Any] = {}
    parametrize.register_parametrization(up, "weight", _Double())
    parametrize.register_parametrization(experts, "w_in", _Double())
    prune.l1_unstructured(pruned, "weight", 0.5)
    (up(torch.ones(2, 4)) * (1 + dist.get_rank())).sum().backward()
    facts["norm"] = float(get_total_norm([up.parametrizations.weight.original.grad]))
    experts.load_state_dict(experts.state_dict())
    facts["refused"] = [error_of(unsharded_state_dict, each) for each in (up, experts, pruned)]
    named = ColumnParallelLinear(4, 8)
    named.weight_scale = nn.Parameter(torch.ones(1))
    facts["kept"] = {key: list(each.shape) for key, each in unsharded_state_dict(named).items()}
    return facts


def test_parameters_that_are_computed_from_others(ranks: Any) -> None:
    """They are parts in gradients' norms, and refused where all ranks' shards are asked for."""
    first, second = ranks(2).run(_computed)
    assert first["norm"] == second["norm"] > 0
    for facts in (first, second):
        assert facts["kept"] == {"weight": [8, 4], "bias": [8], "weight_scale": [1]}
        for (kind, message, _), name in zip(
            facts["refused"], ("weight", "w_in", "weight"), strict=True
        ):
            assert kind == "ArgumentError"
            assert f"must not be computed from others; got {name} of " in message


def _refused() -> list[Any]:
    mesh = init_device_mesh("cpu", (2,))
    plan = make_plan([EmbeddingTable("a", 6, 4, bag_length=1)], 2)
    shards = tuple(dataclasses.replace(shard, rank=0) for shard in plan.shards)
    plan = ShardingPlan(plan.tables, shards, 2)
    bags = ShardedEmbeddingBags(plan.tables, plan=plan)
    bags.impl = "unfused"
    bags(torch.tensor([1, 2])).sum().backward()
    return [
        error_of(fully_shard, ColumnParallelLinear(4, 8), mesh=mesh),
        error_of(clip_grad_norm_, bags.parameters(), 1.0),
    ]


def test_refused(ranks: Any) -> None:
    """Shards are not sharded over ranks that hold others; a rank without tables cannot be asked."""
    errors = ranks(2).run(_refused)
    for sharded, _ in errors:
        assert sharded is not None
        assert sharded[0] == "ArgumentError"
        assert "weight must be sharded again only over ranks that hold the same" in sharded[1]
    assert errors[0][1][0] == "ArgumentError"
    assert "every rank must hold a part of a table" in errors[0][1][1]
    assert errors[1][1] is None
