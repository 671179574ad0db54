"""``LinearCrossEntropyLoss`` equals ``nn.Linear`` and ``F.cross_entropy``: losses, gradients, state
dicts, also of a vocabulary that the ranks do not divide.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import interlace
from interlace.nn import LinearCrossEntropyLoss, unsharded_state_dict
from tests.errors import error_of

WIDTH, VOCABULARY = 12, 11  # 2 ranks have 6 and 5 columns, 3 ranks 4, 4 and 3
IGNORED = 7
# float32 sums of some hundred products: a few units in the last place.
TOLERANCE = 200**0.5 * torch.finfo(torch.float32).eps

PLAIN: dict[str, Any] = {}
SMOOTHED = {"label_smoothing": 0.1, "z_loss": 0.01, "reduction": "none", "chunk_rows": 5}
SUMMED = {"ignore_index": IGNORED, "reduction": "sum", "sequence_parallel": True, "chunk_rows": 6}


def _error(result: torch.Tensor | None, expected: torch.Tensor) -> float:
    assert result is not None
    assert result.shape == expected.shape
    return float((result.double() - expected).norm() / expected.norm())


def _linear(bias: bool = True) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(WIDTH, VOCABULARY, bias)


def _expected(
    linear: nn.Linear, x: torch.Tensor, target: torch.Tensor, z_loss: float = 0.0, **options: Any
) -> torch.Tensor:
    """Return the loss by stock PyTorch, of all logits."""
    logits = linear(x).flatten(0, -2)
    shape = target.shape if options.get("reduction") == "none" else []
    loss = F.cross_entropy(logits, target.flatten(), **options).reshape(shape)
    return loss + z_loss * logits.logsumexp(-1).square().reshape(target.shape) if z_loss else loss


def _chosen(bias: bool) -> list[bool]:
    """Whether a head chooses the tokens with the highest logits of the full layer, in order."""
    linear, x = _linear(bias), torch.rand(2, 3, WIDTH) + 1
    with torch.no_grad():
        # All logits are below that of the padding, which is 0.
        linear.weight.abs_().neg_().sub_(0.1)
    head = LinearCrossEntropyLoss.from_linear(linear)
    with torch.no_grad():
        wanted = linear(x).topk(3)
    found = head.top_k(x, 3)
    greedy = head.top_k(x).columns[..., 0]
    assert not found.values.requires_grad
    return [found.columns.equal(wanted.indices), greedy.equal(wanted.indices[..., 0])]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_head_chooses_tokens(ranks: Any, count: int) -> None:
    for bias in (False, True):
        assert ranks(count).run(_chosen, bias) == [[True, True]] * count


def _compare(impl: str, bias: bool, options: dict[str, Any]) -> dict[str, float]:
    """Return the errors of the loss and its gradients against the full layer in float64."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    linear = _linear(bias)
    head = LinearCrossEntropyLoss.from_linear(linear, **options)
    head.impl = impl
    x, target = torch.randn(6, 2, WIDTH), torch.randint(VOCABULARY, (6, 2))
    target[1, 0] = options.get("ignore_index", 0)
    others = {name: value for name, value in options.items() if name not in ("chunk_rows",)}
    is_cut = others.pop("sequence_parallel", False)
    rows = slice(rank * 6 // ranks, (rank + 1) * 6 // ranks) if is_cut else slice(None)
    own, exact = x[rows].clone().requires_grad_(), x.double().requires_grad_()
    loss, wanted = head(own, target), _expected(linear.double(), exact, target, **others)
    assert loss.dtype == torch.float32
    scale = torch.linspace(0.5, 2, wanted.numel()).view(wanted.shape)
    loss.backward(scale)
    wanted.backward(scale.double())
    errors = {"loss": _error(loss, wanted), "x": _error(own.grad, exact.grad[rows])}
    for name, parameter in linear.named_parameters():
        assert parameter.grad is not None
        errors[name] = _error(getattr(head, name).grad, head.shard_of(parameter.grad))
    # The padding has gradients of 0, so that the norm is the whole layer's.
    norms = [
        nn.utils.get_total_norm([parameter.grad for parameter in module.parameters()])
        for module in (head, linear)
    ]
    errors["norm"] = _error(*norms)
    return errors


@pytest.mark.parametrize(
    ("world_size", "impl", "bias", "options"),
    [
        (3, "auto", True, SMOOTHED),
        (2, "auto", False, SUMMED),
        (1, "auto", True, PLAIN),
        (3, "unfused", True, SUMMED),
    ],
)
def test_ranks_match_the_full_layer(
    ranks: Any, world_size: int, impl: str, bias: bool, options: dict[str, Any]
) -> None:
    for errors in ranks(world_size).run(_compare, impl, bias, options):
        assert max(errors.values()) < TOLERANCE, errors


def _model(is_sharded: bool) -> nn.Module:
    torch.manual_seed(9)
    kind = LinearCrossEntropyLoss if is_sharded else nn.Linear
    return nn.ModuleDict({"body": nn.Linear(4, WIDTH), "head": kind(WIDTH, VOCABULARY, bias=True)})


def _through_a_file(loaded: dict[str, torch.Tensor]) -> tuple[bool, list[int], dict[str, Any]]:
    """Load a full state dict, and return what a rank's shard is worth, its shape, and the full
    state dict of the shards.
    """
    model = _model(is_sharded=True)
    drawn = copy.deepcopy(unsharded_state_dict(model))
    shard = copy.deepcopy(model.state_dict())
    model.load_state_dict(loaded)
    again = copy.deepcopy(unsharded_state_dict(model))
    model.load_state_dict(shard)
    is_same = all(torch.equal(model.state_dict()[name], value) for name, value in shard.items())
    # Drawn with one seed, the shards are those of nn.Linear.
    wanted = _model(is_sharded=False).state_dict()
    is_same = is_same and all(torch.equal(drawn[name], wanted[name]) for name in wanted)
    return is_same, list(shard["head.weight"].shape), again


def test_state_dicts_are_those_of_the_full_layer_on_any_number_of_ranks(ranks: Any) -> None:
    """What two ranks have saved three ranks load, and the model that was never sharded."""
    drawn = _model(is_sharded=False).state_dict()
    state = {name: torch.randn_like(value) for name, value in drawn.items()}
    for world_size, rows in ((2, 6), (3, 4), (1, 11)):
        found = ranks(world_size).run(_through_a_file, state)
        for is_same, shape, again in found:
            assert is_same
            assert shape == [rows, WIDTH]
            assert again.keys() == state.keys()
            assert all(torch.equal(again[name], state[name]) for name in state)
        state = found[0][2]
    full = _model(is_sharded=False)
    full.load_state_dict(state)
    # Neither memory nor a file has the padding.
    weight = state["head.weight"]
    assert weight.untyped_storage().nbytes() == weight.numel() * weight.itemsize


def _other_ways() -> list[bool]:
    """Whether a compiled call has the same bits, and one under autocast the same dtypes and nearly
    the same numbers.
    """
    head = LinearCrossEntropyLoss.from_linear(_linear())
    head.impl = "unfused"
    x, target = torch.randn(4, WIDTH), torch.randint(VOCABULARY, (4,))

    def gradients(call: Any, *, autocast: bool = False) -> list[torch.Tensor]:
        head.zero_grad()
        own = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = call(own, target)
        loss.backward()
        return [loss.detach(), own.grad, *(parameter.grad for parameter in head.parameters())]

    plain = gradients(head)
    compiled = gradients(torch.compile(head, fullgraph=True, backend="aot_eager"))
    mixed = gradients(head, autocast=True)
    return [
        all(torch.equal(a, b) for a, b in zip(plain, compiled, strict=True)),
        all(b.dtype == torch.float32 for b in mixed),
        all(torch.allclose(a, b, 0.1, 0.02) for a, b in zip(plain, mixed, strict=True)),
        not torch.equal(plain[0], mixed[0]),
    ]


def test_compiles_and_takes_autocast(ranks: Any) -> None:
    for found in ranks(2).run(_other_ways):
        assert all(found), found


def _sharded_twice() -> dict[str, float]:
    """Return the errors of a clipped step under FSDP2, on two of four ranks with other samples."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "vocabulary"))
    linear = _linear()
    head = LinearCrossEntropyLoss.from_linear(linear, mesh.get_group("vocabulary"))
    fully_shard(head, mesh=mesh["data"])
    x, target = torch.randn(2, 4, WIDTH), torch.randint(VOCABULARY, (2, 4))
    sample = mesh.get_local_rank("data")
    head(x[sample], target[sample]).backward()
    # Samples have equally many tokens, so the mean of their means is that of all tokens.
    _expected(linear, x, target).backward()
    norms = []
    for module in (head, linear):
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        torch.optim.SGD(module.parameters(), 1.0).step()
    state = unsharded_state_dict(head)
    errors = {
        name: _error(state[name], value.double()) for name, value in linear.state_dict().items()
    }
    return errors | {"norm": _error(*norms)}


def test_a_clipped_step_under_fsdp2(ranks: Any) -> None:
    for errors in ranks(4).run(_sharded_twice):
        assert max(errors.values()) < TOLERANCE, errors


def _refused() -> list[tuple[str, str]]:
    head = LinearCrossEntropyLoss(WIDTH, VOCABULARY)
    cut = LinearCrossEntropyLoss(WIDTH, VOCABULARY, sequence_parallel=True, reduction="all")
    x, target = torch.zeros(4, WIDTH), torch.zeros(4, dtype=torch.int64)
    attempts = [
        lambda: LinearCrossEntropyLoss(WIDTH, 4),
        lambda: LinearCrossEntropyLoss(0, VOCABULARY),
        lambda: LinearCrossEntropyLoss.from_linear(nn.Linear(WIDTH, 2)),
        lambda: head(torch.zeros(4, VOCABULARY), target),
        lambda: head(x, target[:3]),
        lambda: head(x.bfloat16(), target),
        lambda: head(x, target.float()),
        lambda: cut(torch.zeros(WIDTH), target),
        lambda: cut(x, target),
        lambda: cut(x[:, None], target.repeat(3)[:, None]),
    ]
    return [(error_of(attempt) or ("", "nothing"))[:2] for attempt in attempts]


def test_rejected(ranks: Any) -> None:
    name = "LinearCrossEntropyLoss"
    for errors in ranks(3).run(_refused):
        assert {kind for kind, _ in errors} == {"ArgumentError"}
        assert [message for _, message in errors] == [
            f"{name}: vocabulary must give each of 3 ranks a column, where all but the last have "
            "2; got 4. Use a group of fewer ranks.",
            f"{name}: in_features and out_features must be positive; got 0 and 11.",
            f"{name}: vocabulary must give each of 3 ranks a column, where all but the last have "
            "1; got 2. Use a group of fewer ranks.",
            f"{name}: x must be [..., 12]; got shape [4, 11].",
            f"{name}: target must have the tokens' shape, [4]; got shape [3].",
            f"{name}: x must have the weight's dtype, torch.float32; got torch.bfloat16. Convert "
            "x, or use torch.autocast.",
            "linear_cross_entropy: target must be int32 or int64; got torch.float32.",
            f"{name}: x must be [sequence, ..., 12]; got shape [12].",
            f"{name}: target must have the tokens' shape, [12]; got shape [4].",
            "linear_cross_entropy: reduction must be one of mean, sum, none; got 'all'.",
        ]
    assert repr(interlace.nn.LinearCrossEntropyLoss(4, 6)) == (
        "LinearCrossEntropyLoss(in_features=4, out_features=6, bias=False, rank=0 of 1, impl=auto)"
    )
