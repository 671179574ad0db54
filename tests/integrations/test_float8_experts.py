"""Experts in float8 as ``transformers`` keeps them, by a stand-in for its module of experts: what
is read from it, and what the operator makes of it. transformers itself is not needed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import interlace
from interlace.errors import ArgumentError
from interlace.integrations.transformers import WeightLayout
from tests.operators.mixture_of_experts.float8 import Float8Call

CALL = Float8Call(1, tokens=6, local=3, ffn=128, hidden=256, impl="unfused")


class Experts(torch.nn.Module):
    """Gate and up of all experts, one behind the other, each with a scale for each block."""

    has_gate, is_concatenated, is_transposed, has_bias = True, True, False, False
    block_size, activation_scheme = [128, 128], "dynamic"

    def __init__(self) -> None:
        super().__init__()
        inputs = CALL.inputs(0)
        for name, tensor in (
            ("gate_up_proj", inputs["w_in"].transpose(1, 2).flatten(1, 2)),
            ("down_proj", inputs["w_out"]),
            ("gate_up_proj_scale_inv", inputs["w_in_scale"].transpose(1, 2).flatten(1, 2)),
            ("down_proj_scale_inv", inputs["w_out_scale"]),
        ):
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        self.act_fn = torch.nn.SiLU()

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up


def test_weights_and_scales_are_read_where_they_are() -> None:
    experts, inputs = Experts(), CALL.inputs(0)
    layout = WeightLayout.of(experts, "interlace")
    assert layout.is_float8
    w_in, w_out = layout.parameters(experts)
    scales = layout.scales(experts)
    assert w_in.data_ptr() == experts.gate_up_proj.data_ptr()
    assert scales["w_in_scale"].data_ptr() == experts.gate_up_proj_scale_inv.data_ptr()
    routing = (inputs[name] for name in ("x", "experts", "weights"))
    # This process may have imported Triton for GPUs, so no kernel runs in it.
    options = {"activation": layout.activation, "impl": CALL.impl}
    y = interlace.mixture_of_experts(*routing, w_in, w_out, **options, **scales)
    CALL.check([y])


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": None},
        {"block_size": [64, 64]},
        {"activation_scheme": "static"},
        {"is_concatenated": False},
        {"gate_up_proj_scale_inv": None},
    ],
)
def test_other_formats_are_refused_when_a_model_is_loaded(changes: dict[str, Any]) -> None:
    experts = Experts()
    for name, value in changes.items():
        setattr(experts, name, value)
    if "is_concatenated" in changes:
        experts._apply_gate = lambda both: experts.act_fn(both[..., ::2]) * both[..., 1::2]
    with pytest.raises(ArgumentError, match="float32 scales of blocks of 128 x 128"):
        WeightLayout.of(experts, "interlace")
