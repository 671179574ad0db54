"""Calls of ``mixture_of_experts``."""

from __future__ import annotations

import dataclasses
import functools
import random

import torch
import torch.distributed as dist

import interlace
from interlace import ExpertActivation, MixtureOfExpertsConfig
from interlace.comm import group_of
from interlace.testing.cases.base import DTYPES, Case, Make, Tensors, generator, thin, whole_numbers
from interlace.units import round_up

OPERATOR = "mixture_of_experts"
IMPLEMENTATIONS = {OPERATOR: ("fused", "decode", "unfused")}
BETWEEN_NODES = {OPERATOR: ("chunked",)}
ROUTINGS = ("random", "one", "holes")

_GATE = 128.0
"""What every gate is: so large that silu(gate) is the gate itself, in float32, and every number
stays a multiple of a half.
"""

_ACTIVATIONS = {
    "swiglu": ExpertActivation(),
    # No gate is beyond the limit, and every number stays whole.
    "gpt-oss": ExpertActivation(limit=_GATE, up_offset=1.0),
}
"""Activations by form. Experts of the form ``"gpt-oss"`` have biases too, and weights with both
dimensions exchanged in memory, as those of that model.
"""

_CPU = MixtureOfExpertsConfig(
    block_m=16, block_n=64, block_k=64, group_m=2, programs=2, push_programs=2, push_rows=8,
    sum_programs=2, stagger=0,
)  # fmt: skip
_CUDA = MixtureOfExpertsConfig(
    block_m=64, block_n=64, block_k=32, num_warps=4, push_programs=8, push_rows=16,
    sum_programs=264, stagger=0,
)  # fmt: skip

# Tokens of each rank, experts of each rank, experts of a token, hidden, F, dtype.
_KINDS = (
    (7, 2, 2, 24, 20, "float32"),
    (33, 1, 1, 64, 32, "bfloat16"),
    (64, 4, 3, 128, 96, "float16"),
    (1, 2, 2, 16, 16, "bfloat16"),
)


@dataclasses.dataclass(frozen=True)
class ExpertsCase(Case):
    """``tokens`` and ``local`` experts on each rank, ``top_k`` experts per token.

    Attributes:
        routing: ``"random"``; ``"one"``: every token chooses the last expert first; ``"holes"``:
            some slots name no expert.
        capacity: Rows that an expert takes from each rank at most; 0 for no limit.
        form: A key of ``_ACTIVATIONS``.
    """

    leaf_names = ("x", "weights", "w_in", "w_out", "b_in", "b_out")

    may_be_zero = ("capacity",)

    tokens: int = 7
    local: int = 2
    top_k: int = 2
    hidden: int = 24
    ffn: int = 20
    routing: str = "random"
    capacity: int = 0
    form: str = "swiglu"

    @property
    def sizes(self) -> str:
        limit = f", capacity {self.capacity}" if self.capacity else ""
        layer = f"top {self.top_k}, {self.local} experts per rank, {self.hidden} x {self.ffn}"
        form = "" if self.form == "swiglu" else f", as in {self.form}"
        return f"{self.tokens} tokens, {layer}, routing {self.routing}{limit}{form}"

    def units(self, results: int) -> list[float]:
        # y and the gradients of x and w_out have the gate as a factor; a weight has a factor of a
        # half.
        return [_GATE / 2, _GATE / 2, _GATE, 0.5, _GATE / 2, 0.5, 0.5][:results]

    def tensors(self, rank: int, ranks: int, seed: int) -> Tensors:
        source, dtype, experts = generator(seed, rank), DTYPES[self.dtype], ranks * self.local
        x = whole_numbers(source, (self.tokens, self.hidden), 1, 0.5)
        x[:, 0] = 1  # which the gates multiply
        w_in = whole_numbers(
            source, (self.local, self.ffn, 2, self.hidden), 1, thin(self.hidden, 3)
        )
        w_in[:, :, 0] = 0
        w_in[:, :, 0, 0] = _GATE
        scores = torch.rand(self.tokens, experts, generator=source)
        if self.routing == "one":
            scores[:, -1] = 2
        chosen = scores.topk(min(self.top_k, experts))[1]
        if self.routing == "holes":
            chosen[torch.rand(chosen.shape, generator=source) < 0.5] = -1
        tensors = {
            "x": x.to(dtype),
            "weights": 0.5 * torch.randint(1, 3, chosen.shape, generator=source),
            "w_in": w_in.to(dtype),
            "w_out": whole_numbers(
                source, (self.local, self.hidden, self.ffn), 1, thin(self.ffn, 3)
            ).to(dtype),
            "experts": chosen,
        }
        if self.form == "gpt-oss":
            w_in, w_out = tensors["w_in"], tensors["w_out"]
            tensors["w_in"] = w_in.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
            tensors["w_out"] = w_out.transpose(1, 2).contiguous().transpose(1, 2)
            b_in = whole_numbers(source, (self.local, self.ffn, 2), 1, 0.5)
            b_in[:, :, 0] = 0  # so that a gate is what it was
            b_out = _GATE * whole_numbers(source, (self.local, self.hidden), 1, 0.5)
            tensors |= {"b_in": b_in.to(dtype), "b_out": b_out.to(dtype)}
        if self.backward:
            tensors["grad"] = whole_numbers(
                source, (self.tokens, self.hidden), 1, thin(self.hidden, 6)
            ).to(dtype)
        return tensors

    def outputs(self, leaves: list[Tensors], inputs: list[Tensors]) -> list[torch.Tensor]:
        """Compute dense products of all tokens with all experts."""
        w_in, w_out, *biases = (
            torch.cat([call[name] for call in leaves])
            for name in self.leaf_names[2:]
            if name in leaves[0]
        )
        outputs = []
        for leaf, call in zip(leaves, inputs, strict=True):
            both = torch.einsum("th,efgh->etfg", leaf["x"], w_in)
            if biases:
                both = both + biases[0][:, None]
            active = _ACTIVATIONS[self.form](both[..., 0], both[..., 1])
            results = torch.einsum("etf,ehf->teh", active, w_out)
            if biases:
                results = results + biases[1]
            shares = torch.zeros(self.tokens, len(w_in) + 1, dtype=torch.float64)
            chosen = torch.where(self._kept(call["experts"], len(w_in)), call["experts"], len(w_in))
            # Dropped slots are added to an extra column, which is not used.
            shares = shares.scatter_add(1, chosen, leaf["weights"])
            outputs.append(torch.einsum("te,teh->th", shares[:, :-1], results))
        return outputs

    def _kept(self, chosen: torch.Tensor, experts: int) -> torch.Tensor:
        """Return a mask ``[tokens, top_k]`` of the slots that are not dropped."""
        flat = chosen.flatten()
        kept = torch.zeros_like(flat, dtype=torch.bool)
        for expert in range(experts):
            kept[(flat == expert).nonzero()[: self.capacity or len(flat), 0]] = True
        return kept.view_as(chosen)

    def dtypes(self, results: int) -> list[torch.dtype]:
        dtype = self.result_dtype
        # The gradient of the slots' weights is the third result.
        return [dtype, dtype, torch.float32, *[dtype] * 4][:results]

    def open(self, group: dist.ProcessGroup | None) -> Make:
        base = _CPU if group_of(group).backend == "cpu" else _CUDA
        options = {
            "impl": self.impl_name,
            "config": base if self.impl == "fused" else None,
            "capacity": self.capacity or None,
            "activation": _ACTIVATIONS[self.form],
            "group": group,
        }
        return functools.partial(self.call, interlace.mixture_of_experts, options)


def every(operator: str, impl: str, ranks: int) -> list[ExpertsCase]:
    """Return one small layer with its backward pass, and one with experts as those of gpt-oss,
    which take few rows; in slices, which have no capacity, and in decoding, which has no backward
    pass either, these experts take all tokens that go to them.
    """
    if impl in BETWEEN_NODES[OPERATOR]:
        return [
            ExpertsCase(OPERATOR, impl, "bfloat16", True, hidden=32, ffn=32),
            ExpertsCase(
                OPERATOR, impl, "bfloat16", hidden=24, ffn=16, routing="one", form="gpt-oss"
            ),
        ]
    if impl == "decode":
        return [
            ExpertsCase(OPERATOR, impl, "bfloat16", hidden=32, ffn=32),
            ExpertsCase(OPERATOR, impl, "float32", routing="one", form="gpt-oss"),
        ]
    return [
        ExpertsCase(OPERATOR, impl, "bfloat16", True, hidden=32, ffn=32),
        ExpertsCase(OPERATOR, impl, "float32", True, routing="one", capacity=3, form="gpt-oss"),
    ]


def draw(operator: str, impl: str, ranks: int, source: random.Random, large: bool) -> ExpertsCase:
    """Return a random call."""
    tokens, local, top_k, hidden, ffn, dtype = source.choice(_KINDS)
    is_sliced = impl in BETWEEN_NODES[OPERATOR]
    if is_sliced:  # rows of which PyTorch's grouped product takes
        hidden, ffn, dtype = round_up(hidden, 8), round_up(ffn, 8), "bfloat16"
    return ExpertsCase(
        OPERATOR,
        impl,
        dtype,
        source.random() < 0.5 and impl != "decode",
        tokens,
        local,
        min(top_k, ranks * local),
        hidden,
        ffn,
        source.choice(ROUTINGS),
        0 if impl == "decode" or is_sliced else source.choice((0, 0, 3)),
        source.choice(tuple(_ACTIVATIONS)),
    )
