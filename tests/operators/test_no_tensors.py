"""An argument that is no tensor, where an operator or a layer takes one, is refused by its name; a
number may be one of NumPy's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import pytest
import torch

import interlace
from interlace import ArgumentError, nn
from interlace.registry import find_operator, operators

NO_TENSORS = ([1.0, 2.0], np.ones((4, 8), np.float32), "words", None)
X, W, BIAS = torch.ones(4, 8), torch.ones(6, 8), torch.ones(6)
OF_FLOAT8 = {
    "x": X.to(torch.float8_e4m3fn),
    "w": W.to(torch.float8_e4m3fn),
    "bias": BIAS.bfloat16(),
    "x_scale": torch.ones(1),
    "w_scale": torch.ones(1),
}
WITH_NORM = {
    "x": X,
    "w": W,
    "bias": BIAS,
    "residual": torch.ones(4, 6),
    "norm_weight": BIAS,
    "norm_bias": BIAS,
    "scale": torch.ones(1),
    "out_dtype": torch.float8_e4m3fn,
}
TARGET = torch.tensor([0, 1, 2, 3])
BAGS = {
    "indices": torch.tensor([0, 1]),
    "offsets": torch.tensor([0, 1, 2]),
    "per_sample_weights": torch.ones(2),
}

CALLS: dict[str, list[Mapping[str, Any]]] = {
    "all_gather_gemm": [OF_FLOAT8],
    # Of no columns any number of ranks has equally many.
    "all_to_all_gemm": [{"x": X[:, :0], "w": W[:, :0], "bias": BIAS}],
    "gemm_all_to_all": [OF_FLOAT8],
    "gemm_all_to_all_columns": [{"x": X, "w": W, "bias": BIAS}],
    "gemm_reduce_scatter": [OF_FLOAT8, {"x": X, "w": W, "out": torch.empty(4, 6)}],
    "gemm_all_reduce": [OF_FLOAT8, WITH_NORM],
    "gemv_all_reduce": [{"x": X, "w": W, "bias": BIAS}, WITH_NORM],
    "embedding_all_to_all": [{"weights": [W], **BAGS}],
    "linear_cross_entropy": [{"x": X, "w": W, "target": TARGET, "bias": BIAS}],
    "linear_top_k": [{"x": X, "w": W, "bias": BIAS}],
    "mixture_of_experts": [
        {
            "x": X,
            "experts": TARGET[:, None] % 2,
            "weights": torch.ones(4, 1),
            "w_in": torch.ones(2, 6, 2, 8),
            "w_out": torch.ones(2, 8, 6),
            "b_in": torch.ones(2, 6, 2),
            "b_out": torch.ones(2, 8),
        },
        {
            "x": torch.ones(4, 128, dtype=torch.bfloat16),
            "experts": TARGET[:, None] % 2,
            "weights": torch.ones(4, 1),
            "w_in": torch.ones(2, 2, 128, 128).to(torch.float8_e4m3fn).transpose(1, 2),
            "w_out": torch.ones(2, 128, 128).to(torch.float8_e4m3fn),
            "w_in_scale": torch.ones(2, 1, 2, 1),
            "w_out_scale": torch.ones(2, 1, 1),
        },
    ],
}
"""Public function -> arguments that it takes, which together have every tensor that it may get."""


def _public() -> dict[str, Callable[..., Any]]:
    found = {}
    for each in operators().values():
        if each.has_public_function and type(each).__module__.startswith("interlace."):
            names = filter(None, (each.name, each.vector_name))
            found |= {name: getattr(interlace, name) for name in names}
    return found


def _takes_none(function: Callable[..., Any], name: str) -> bool:
    return inspect.signature(function).parameters[name].default is None


def _refusal(name: str) -> str:
    """What an error begins with; a list may be refused for what is in it."""
    return rf"^\w+: {name}(\[0\])? must"


def _require_refused(call: Callable[..., Any], arguments: Mapping[str, Any], name: str) -> None:
    """Whatever stands for the argument of that name must be refused in words that have the name."""
    for value in NO_TENSORS:
        if value is None and _takes_none(call, name):
            continue
        with pytest.raises(ArgumentError, match=_refusal(name)):
            call(**{**arguments, name: value})


@pytest.mark.parametrize("function", sorted(_public()))
def test_an_operator_refuses_what_is_no_tensor(function: str) -> None:
    call = _public()[function]
    taken = {
        name
        for name, parameter in inspect.signature(call).parameters.items()
        if "torch.Tensor" in str(parameter.annotation)
    }
    assert taken == {name for given in CALLS[function] for name in given} - {"out_dtype"}
    for arguments in CALLS[function]:
        # Kernels would run in the interpreter, for which this process is not set up.
        call(**arguments, impl="unfused")
        for name in taken & set(arguments):
            _require_refused(call, arguments, name)


@pytest.mark.parametrize("function", sorted(_public()))
def test_what_is_said_of_a_call_needs_tensors(function: str) -> None:
    """``explain`` calls ``reservations`` before it, of several ranks."""
    declaration = find_operator(function)
    assert declaration is not None
    required, optional = declaration.argument_names()
    arguments = {name: CALLS[function][0].get(name) for name in (*required, *optional)}
    given = {name: value for name, value in arguments.items() if value is not None}

    for method in ("", "explain", "reservations"):

        def say(method: str = method, **said: Any) -> None:
            tensors = [said.pop(name) for name in required]
            if not method:
                interlace.explain(function, *tensors, **said)
                return
            sizes = {"world_size": 2} | ({"granularity": 1} if method == "reservations" else {})
            getattr(declaration, method)(*tensors, **sizes, **said)

        say(**given)
        for name in given:
            for value in NO_TENSORS:
                if value is None and name in optional:
                    continue
                with pytest.raises(ArgumentError, match=_refusal(name)):
                    say(**{**given, name: value})


def test_tables_are_tensors() -> None:
    for value in NO_TENSORS:
        with pytest.raises(ArgumentError, match=r"weights\[1\] must be a torch.Tensor"):
            interlace.embedding_all_to_all([W, value], BAGS["indices"], BAGS["offsets"])


def _layers() -> dict[str, tuple[Callable[..., Any], Mapping[str, Any]]]:
    columns, rows = nn.ColumnParallelLinear(8, 6), nn.RowParallelLinear(8, 6)
    of_shard = nn.ColumnParallelLinear(8, 6, sequence_parallel=True)
    to_shard = nn.RowParallelLinear(8, 6, sequence_parallel=True)
    experts, loss = nn.MoE(8, 6, 2, 1), nn.LinearCrossEntropyLoss(8, 6)
    bags = nn.ShardedEmbeddingBags([nn.EmbeddingTable("a", 5, 4)])
    attention = nn.UlyssesAttention(8, 2)
    for layer in (columns, rows, of_shard, to_shard, experts, loss, bags, attention):
        layer.impl = "unfused"
    of_bags = {"features": BAGS["indices"], **BAGS}
    del of_bags["indices"]
    return {
        "columns": (columns.forward, {"x": X}),
        "columns of a shard": (of_shard.forward, {"x": X}),
        "rows": (rows.forward, {"x": X}),
        "rows to a shard": (to_shard.forward, {"x": X}),
        "attention": (attention.forward, {"x": X}),
        "experts": (experts.forward, {"x": X}),
        "loss": (loss.forward, {"x": X, "target": TARGET}),
        "top k": (loss.top_k, {"x": X}),
        "bags": (bags.forward, of_bags),
        "bags, pooled": (bags.pool, of_bags),
    }


@pytest.mark.parametrize("layer", sorted(_layers()))
def test_a_layer_refuses_what_is_no_tensor(layer: str) -> None:
    call, arguments = _layers()[layer]
    call(**arguments)
    for name in arguments:
        _require_refused(call, arguments, name)


class _Numbers(Protocol):
    """Functions that make numbers."""

    integer: Callable[[int], Any]
    real: Callable[[float], Any]
    truth: Callable[[bool], Any]


class _Python:
    integer, real, truth = int, float, bool


class _NumPy:
    integer, real, truth = np.int32, np.float32, np.bool_


def _results(numbers: _Numbers) -> dict[str, torch.Tensor]:
    """What every function and layer with numbers returns, of a rank."""
    i, real, truth = numbers.integer, numbers.real, numbers.truth
    torch.manual_seed(0)
    loss = {
        "ignore_index": i(1),
        "label_smoothing": real(0.25),
        "z_loss": real(0.5),
        "vocabulary": i(12),
        "chunk_rows": i(2),
        "sequence_parallel": truth(False),
    }
    table = nn.EmbeddingTable("a", i(8), i(4), bag_length=i(1))
    attention = nn.UlyssesAttention(i(8), i(2), i(2), i(4))
    experts = {**CALLS["mixture_of_experts"][0], "capacity": i(2)}
    lookups = BAGS["indices"], BAGS["offsets"]
    bags = {"batch_size": i(2), "check_indices": truth(True), "name": "numbers"}
    return {
        "linear_top_k": interlace.linear_top_k(X, W, i(2), vocabulary=i(12)).values,
        "linear_cross_entropy": interlace.linear_cross_entropy(X, W, TARGET, **loss),
        "mixture_of_experts": interlace.mixture_of_experts(**experts),
        "embedding_all_to_all": interlace.embedding_all_to_all([W], *lookups, **bags),
        "norm": interlace.gemm_all_reduce(X, W, norm_weight=BIAS, eps=real(1e-4)).y,
        "symmetric": interlace.empty_symmetric(i(3), dtype=torch.float32).local,
        "MoE": nn.MoE(i(8), i(4), i(4), i(2), capacity_factor=real(1.5), seed=i(3))(X)[0],
        "attention": attention(X, splits=[i(4), i(4)]),
        "tables": nn.ShardedEmbeddingBags([table], seed=i(3))(lookups[0]),
    }


def _differing_results() -> list[str]:
    found, wanted = _results(_NumPy), _results(_Python)
    return [name for name, y in found.items() if not y.equal(wanted[name])]


def test_numbers_may_be_those_of_numpy(ranks: Any) -> None:
    """They would neither be exchanged between ranks as they are nor, as int32, hold what is
    computed of them.
    """
    assert ranks(2).run(_differing_results) == [[], []]
