"""Modules can be copied, averaged and pickled.

Their process group is shared, and pickled by its name.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from interlace.nn import (
    ColumnParallelLinear,
    EmbeddingTable,
    LinearCrossEntropyLoss,
    MoE,
    RowParallelLinear,
    ShardedEmbeddingBags,
    UlyssesAttention,
)
from interlace_dlrm import DLRM
from tests.errors import error_of
from tests.programs import run_program

SIZE = 8
TABLES = [EmbeddingTable(name, 6, 4, bag_length=1) for name in ("a", "b", "c")]
INDICES = torch.tensor([0, 1, 2, 3, 4, 5])  # of two samples


def _modules(
    group: dist.ProcessGroup | None,
) -> dict[str, tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]]:
    """Return every kind of module with a process group, and a call of it."""
    torch.manual_seed(0)
    x = torch.randn(3, SIZE)
    bags: dict[str, Any] = {"group": group, "gradient": "rowwise_adagrad"}
    modules: dict[str, tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]] = {
        "column": (ColumnParallelLinear(SIZE, SIZE, group=group), lambda module: module(x)),
        "row": (
            RowParallelLinear(SIZE, SIZE, group=group),
            lambda module: module(x[:, : SIZE // dist.get_world_size(group)]),
        ),
        "loss": (
            LinearCrossEntropyLoss(SIZE, 3, group=group),
            lambda module: module(x, INDICES[:3]),
        ),
        "attention": (UlyssesAttention(SIZE, 2, group=group), lambda module: module(x)),
        "experts": (MoE(SIZE, SIZE, 2, 1, group=group), lambda module: module(x)[0]),
        "bags": (ShardedEmbeddingBags(TABLES, **bags), lambda module: module(INDICES)),
        "model": (
            DLRM(TABLES, dense_features=SIZE, bottom=(4,), top=(4,), **bags),
            lambda module: module(x[:2], INDICES),
        ),
    }
    for module, _ in modules.values():
        for part in module.modules():
            if hasattr(part, "impl"):
                part.impl = "unfused"
    return modules


def _loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def _average(module: nn.Module) -> nn.Module:
    averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    averaged.update_parameters(module)
    return averaged


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": _loaded,
    "average": _average,
}


def _copied(with_group: bool, method: str) -> dict[str, dict[str, bool]]:
    """Copy each module on this rank, and check by name the properties of the copy."""
    group = dist.new_group() if with_group else None
    outcomes = {}
    for name, (module, call) in _modules(group).items():
        call(module).sum().backward()  # a copy is also made of a module that has been trained
        module.zero_grad()
        copied = COPIES[method](module)
        inner = copied.module if isinstance(copied, AveragedModel) else copied
        state = {key: value.clone() for key, value in module.state_dict().items()}
        before = call(module).detach().clone()
        call(copied).sum().backward()
        changed = call(module).detach()
        inner.load_state_dict(state)
        attributes = type(inner)._group_attributes
        outcomes[name] = {
            "result": torch.equal(call(copied).detach(), before),
            "original unchanged": torch.equal(changed, before),
            "gradients": any(p.grad is not None for p in copied.parameters()) or name == "bags",
            "state": inner.state_dict().keys() == state.keys(),
            "own parameters": not {id(p) for p in module.parameters()}
            & {id(p) for p in copied.parameters()},
            "same groups": all(
                getattr(inner, attribute) is getattr(module, attribute) for attribute in attributes
            ),
        }
    return outcomes


@pytest.mark.parametrize("method", COPIES)
@pytest.mark.parametrize("with_group", [False, True])
def test_a_copy_works_like_the_original(ranks: Any, with_group: bool, method: str) -> None:
    """A copy works on the default process group and on another one.

    The original is unchanged.
    """
    for outcomes in ranks(2).run(_copied, with_group, method):
        assert len(outcomes) == 7
        assert all(all(holds.values()) for holds in outcomes.values()), outcomes


def _average_of_steps() -> list[float]:
    """Return the differences between averaged parameters and the average of parameters."""
    layer = RowParallelLinear(SIZE, SIZE)
    layer.impl = "unfused"
    averaged = AveragedModel(layer)
    seen = []
    for step in range(3):
        with torch.no_grad():
            layer.weight.add_(step)
        averaged.update_parameters(layer)
        seen.append(layer.weight.detach().clone())
    return [float((averaged.module.weight - torch.stack(seen).mean(0)).abs().max())]


def test_an_average_of_parameters(ranks: Any) -> None:
    for errors in ranks(2).run(_average_of_steps):
        assert max(errors) < 1e-5


def _pickled_on_two_ranks() -> dict[str, bytes]:
    pickles = {
        name: pickle.dumps(module) for name, (module, _) in _modules(dist.new_group()).items()
    }
    return pickles | {
        f"default {name}": pickle.dumps(module) for name, (module, _) in _modules(None).items()
    }


def _load_elsewhere(pickled: dict[str, bytes]) -> dict[str, Any]:
    return {name: error_of(pickle.loads, value) for name, value in pickled.items()}


def test_a_module_without_its_group_says_so(ranks: Any) -> None:
    """A pickle does not load without a group of its name, nor on another number of ranks."""
    pickled = ranks(2).run(_pickled_on_two_ranks)[1]
    (errors,) = ranks(1).run(_load_elsewhere, pickled)
    for name, error in errors.items():
        assert error is not None, name
        assert error[0] == "GroupError"
        if name.startswith("default"):
            assert "it must be loaded by the rank that saved it, 1 of 2; got 0 of 1." in error[1]
        else:
            assert (
                "the process group that it was saved with must exist; got none of the name"
                in error[1]
            )


def _functional() -> dict[str, bool]:
    """Tell, for each module, if substituted parameters have the effect of its own."""
    outcomes = {}
    for name, (module, call) in _modules(None).items():
        doubled = {key: 2 * value.detach() for key, value in module.named_parameters()}

        def substituted(
            module: nn.Module, call: Any = call, doubled: Any = doubled
        ) -> torch.Tensor:
            substituted_result: torch.Tensor = call(
                lambda *args: torch.func.functional_call(module, doubled, args)
            )
            return substituted_result

        with torch.no_grad():
            plain, outcome = call(module), substituted(module)
            for parameter in module.parameters():
                parameter.mul_(2)
            outcomes[name] = torch.equal(outcome, call(module)) and not torch.equal(outcome, plain)
    return outcomes


def test_functional_call(ranks: Any) -> None:
    for outcomes in ranks(2).run(_functional):
        assert all(outcomes.values()), outcomes


def _converted() -> dict[str, Any]:
    """Return results and gradients of layers that were moved to bfloat16."""
    outcomes: dict[str, Any] = {}
    group = dist.group.WORLD
    for name, (module, _) in _modules(group).items():
        if name in ("bags", "model"):  # their tables' dtypes are part of the plan
            continue
        moved = copy.deepcopy(module).to(torch.bfloat16)
        columns = SIZE // 2 if name == "row" else SIZE
        x = torch.randn(3, columns, dtype=torch.bfloat16, requires_grad=True)
        arguments = (INDICES[:3],) if name == "loss" else ()
        y = moved(x, *arguments)
        y = y[0] if isinstance(y, tuple) else y
        y.sum().backward()
        dtypes = {
            parameter.grad.dtype for parameter in moved.parameters() if parameter.grad is not None
        }
        outcomes[name] = (y.dtype, x.grad.dtype if x.grad is not None else None, dtypes)
        outcomes[f"{name}, x of another dtype"] = error_of(moved, x.detach().float(), *arguments)
    return outcomes


def test_modules_in_another_dtype(ranks: Any) -> None:
    for outcomes in ranks(2).run(_converted):
        assert len(outcomes) == 10
        for name, outcome in outcomes.items():
            if name.endswith("dtype"):
                assert outcome is not None, name
                assert outcome[0] == "ArgumentError"
            else:
                result = torch.float32 if name == "loss" else torch.bfloat16
                assert outcome == (result, torch.bfloat16, {torch.bfloat16})


_SOLO = """
import copy, pickle
import torch, torch.distributed as dist
import interlace
from tests.nn.test_copies import INDICES, TABLES

assert not dist.is_initialized()
assert interlace.comm.group_of().world_size == 1
layer = interlace.nn.ShardedEmbeddingBags(TABLES)
copied = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
assert torch.equal(copied(INDICES), layer(INDICES))
print("equal")
"""


def test_a_process_on_its_own(tmp_path: Path) -> None:
    """A process without a process group can copy and pickle.

    It is a program of its own, because the tests' process may have imported Triton without its
    interpreter.
    """
    (tmp_path / "solo.py").write_text(_SOLO)
    ended = run_program(tmp_path / "solo.py", folder=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "equal\n"), ended.stderr
