"""Layers under what changes torch for a whole program: a default device, a default dtype, inference
mode, modes that see every operator, and the meta device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from interlace.nn import (
    ColumnParallelLinear,
    EmbeddingTable,
    LinearCrossEntropyLoss,
    MoE,
    RowParallelLinear,
    ShardedEmbeddingBags,
    UlyssesAttention,
)
from tests.errors import error_of

HERE: Any = {"device": "cpu", "dtype": torch.float32}
INDICES = torch.tensor([1, 2, 3, 4, 5, 6, 7, 0], device="cpu")
OFFSETS = torch.tensor([0, 2, 4, 6, 8], device="cpu")


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(1), **HERE)


def _bags(group: Any, length: int | None, gradient: str, impl: str) -> Any:
    tables = [EmbeddingTable(name, 8, 4, bag_length=length) for name in ("a", "b")]
    bags = ShardedEmbeddingBags(tables, gradient=gradient, group=group, device="cpu")
    bags.impl = impl
    return bags, lambda: bags(INDICES, None if length else OFFSETS)


def _experts(group: Any, impl: str) -> Any:
    layer = MoE(8, 8, experts=4, group=group, **HERE)
    layer.impl = impl
    return layer, lambda: layer(_x(5, 8))[0] + layer(_x(5, 8))[1].load_balancing_loss()


def _linear(kind: Any, group: Any) -> Any:
    torch.manual_seed(0)
    layer = kind(8, 6, group=group, **HERE)
    return layer, lambda: layer(_x(4, layer.weight.shape[1]))


def _loss(group: Any, impl: str) -> Any:
    torch.manual_seed(0)
    head = LinearCrossEntropyLoss(8, 5, group=group, **HERE)
    head.impl = impl
    return head, lambda: head(_x(4, 8), INDICES[1:5] % 5)


def _attention(group: Any) -> Any:
    torch.manual_seed(0)
    layer = UlyssesAttention(8, 2, group=group, **HERE)
    return layer, lambda: layer(_x(4, 8))


LAYERS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda group: _linear(RowParallelLinear, group),
    "columns": lambda group: _linear(ColumnParallelLinear, group),
    "attention": _attention,
    "loss": lambda group: _loss(group, "fused"),
    "unfused loss": lambda group: _loss(group, "unfused"),
    "experts": lambda group: _experts(group, "fused"),
    "unfused experts": lambda group: _experts(group, "unfused"),
    "one-hot bags": lambda group: _bags(group, 2, "dense", "unfused"),
    "bags": lambda group: _bags(group, None, "sgd", "fused"),
}


@contextlib.contextmanager
def _default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def _default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], Any]] = {
    "default device": _default_device,
    "default dtype": _default_dtype,
    "counter": lambda: FlopCounterMode(display=False),
    "inference": torch.inference_mode,
    "fake": lambda: FakeTensorMode(allow_non_fake_inputs=True),
}


def _step(layer: Any, call: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """The result, and after it gradients or updated tables."""
    y = call()
    if torch.is_inference_mode_enabled():
        return [y]
    y.sum().backward()
    return [y, *(p if p.grad is None else p.grad for p in layer.parameters())]


def _is_close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(
        (got.dtype, got.device, got.shape) == (want.dtype, want.device, want.shape)
        and torch.allclose(got.detach(), want.detach(), 1e-5, 1e-6)
        for got, want in zip(found, wanted, strict=False)
    )


def _first_in(name: str) -> list[str]:
    """What is wrong with a layer that a group first uses in a mode, in it and afterwards."""
    make, wrong = LAYERS[name], []
    wanted = _step(*make(dist.new_group()))
    for mode, enter in MODES.items():
        group = dist.new_group()
        if mode == "fake":
            layer, call = make(group)
            # The sizes of the messages of these bags are values.
            if name == "bags":
                with enter():
                    error = error_of(call)
                assert "bag_length, must have values" in error[1], error
            else:
                with enter():
                    shapes = [each.shape for each in _step(layer, call)]
                if shapes != [each.shape for each in wanted]:
                    wrong.append(f"{mode}: {shapes}")
        else:
            with enter():
                found = _step(*make(group))
            if not _is_close(found, wanted):
                wrong.append(mode)
        if not _is_close(_step(*make(group)), wanted):
            wrong.append(f"after {mode}")
    return wrong


@pytest.mark.parametrize("name", LAYERS)
def test_a_group_that_is_first_used_in_a_mode(ranks: Any, name: str) -> None:
    for wrong in ranks(2).run(_first_in, name):
        assert wrong == []


def _on_meta() -> list[Any]:
    meta: Any = {"device": "meta", "dtype": torch.bfloat16}
    calls = [
        (ColumnParallelLinear(4, 8, **meta), torch.empty(3, 4, **meta)),
        (RowParallelLinear(8, 4, **meta), torch.empty(3, 4, **meta)),
        (MoE(4, 4, experts=4, **meta), torch.empty(3, 4, **meta)),
    ]
    found = []
    for layer, x in calls:
        y = layer(x)
        y = y[0] if isinstance(y, tuple) else y
        y.sum().backward()
        found.append((y.is_meta, list(y.shape)))
    loss = LinearCrossEntropyLoss(4, 7, **meta)(
        calls[0][1], torch.empty(3, dtype=torch.int64, device="meta")
    )
    loss.backward()
    return [*found, (loss.is_meta, list(loss.shape))]


def test_layers_on_the_meta_device(ranks: Any) -> None:
    for found in ranks(2).run(_on_meta):
        assert found == [*[(True, [3, 4])] * 3, (True, [])]


class _Block(torch.nn.Module):
    """Layers of each kind, one behind the other."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.up = _linear(ColumnParallelLinear, group)[0]
        self.down = RowParallelLinear(6, 8, group=group, **HERE)
        self.experts = MoE(8, 8, experts=4, group=group, **HERE)

    def forward(self, x: torch.Tensor) -> Any:
        return self.experts(self.down(torch.relu(self.up(x))))[0]


def _traced() -> list[str]:
    """What is wrong with graphs that are traced of three tokens, in calls of seven."""
    block, wrong = _Block(dist.new_group()), []
    traced, x = _x(3, 8), _x(7, 8)
    with torch.no_grad():
        wanted = block(x)
        sizes = ({0: torch.export.Dim("tokens", min=2, max=64)},)
        graphs = {
            "export": lambda: torch.export.export(block, (traced,), dynamic_shapes=sizes).module(),
            "make_fx": lambda: make_fx(
                lambda x: block(x), tracing_mode="symbolic", _allow_non_fake_inputs=True
            )(traced),
        }
        for name, trace in graphs.items():
            y = trace()(x)
            if not _is_close([y], [wanted]):
                wrong.append(name)
    return wrong


def test_graphs_of_any_number_of_tokens(ranks: Any) -> None:
    """A number of tokens that is traced is no constant of the graph."""
    assert ranks(2).run(_traced) == [[]] * 2
