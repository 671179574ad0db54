"""PyTorch's distributed checkpoint keeps every rank's shards if each rank has a key of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp

from interlace.nn import ColumnParallelLinear, MoE, RowParallelLinear


def _saved_and_loaded(folder: str) -> list[str]:
    """Return the names of parameters and optimizer states that differ after loading."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"up": ColumnParallelLinear(8, 8), "down": RowParallelLinear(8, 4), "experts": MoE(8, 8, 4)}
    )
    for layer in model.values():
        layer.impl = "unfused"
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    down = model["down"](model["up"](torch.ones(2, 8)))
    (down.sum() + model["experts"](torch.ones(2, 8))[0].sum()).backward()
    optimizer.step()
    key = f"rank {dist.get_rank()}"
    dcp.save(
        {key: {"model": model.state_dict(), "optimizer": optimizer.state_dict()}},
        checkpoint_id=folder,
    )
    states = optimizer.state_dict()["state"]
    moments = {i: state["exp_avg"] for i, state in states.items()}
    held = {**model.state_dict(), **{f"moment {i}": value for i, value in moments.items()}}
    before = {name: value.clone() for name, value in held.items()}
    for value in held.values():
        value.zero_()
    state = {key: {"model": model.state_dict(), "optimizer": optimizer.state_dict()}}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state[key]["model"])
    optimizer.load_state_dict(state[key]["optimizer"])
    loaded = {**model.state_dict()}
    for i, value in optimizer.state_dict()["state"].items():
        loaded[f"moment {i}"] = value["exp_avg"]
    return [name for name in before if not torch.equal(before[name], loaded[name])]


def test_a_key_for_every_rank(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(_saved_and_loaded, str(tmp_path)) == [[], []]
