"""Calls of ``mixture_of_experts`` that ranks can make, and what must come out, in float64."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
import torch.distributed as dist

import interlace
from interlace import ExpertActivation, MixtureOfExpertsConfig
from interlace.operators.mixture_of_experts.layout import capacity_of

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SMALL = MixtureOfExpertsConfig(
    block_m=16, block_n=64, block_k=64, group_m=2, programs=2, push_programs=2, push_rows=8,
    sum_programs=2, stagger=0,
)  # fmt: skip
NAMES = ("y", "x", "weights", "w_in", "w_out", "b_in", "b_out")

SILU = ExpertActivation()


def ordered(tensor: torch.Tensor, dimensions: tuple[int, ...]) -> torch.Tensor:
    """The same numbers, with ``dimensions`` as they follow each other in memory."""
    inverse = sorted(range(len(dimensions)), key=dimensions.__getitem__)
    return tensor.permute(dimensions).contiguous().permute(inverse)


def leaves_of(inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """x, weights, w_in, w_out and the biases."""
    return [inputs[i] for i in (0, 2, 3, 4, *range(6, len(inputs)))]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call: ``local`` experts on each of ``world_size`` ranks, ``tokens`` on each.

    Attributes:
        routing: ``"random"``; ``"one"``: all tokens to the last expert first; ``"few"``: every
            second expert gets nothing; ``"holes"``: some slots name no expert.
        halves: Whether the memory of w_in holds an expert's gate before its up.
        along_k: Whether a token's numbers are multiplied by neighbours in the weights' memory.
        biases: Whether both products have a bias.
        activation: The function of gate and up.
        gates: 2, or 1 for experts without a gate.
    """

    world_size: int
    tokens: int = 7
    top_k: int = 2
    local: int = 2
    hidden: int = 24
    ffn: int = 20
    dtype: str = "float32"
    factor: float | None = None
    routing: str = "random"
    impl: str = "fused"
    config: MixtureOfExpertsConfig | None = SMALL
    seed: int = 0
    halves: bool = False
    along_k: bool = True
    biases: bool = False
    activation: ExpertActivation = SILU
    gates: int = 2

    @property
    def experts(self) -> int:
        return self.world_size * self.local

    @property
    def capacity(self) -> int | None:
        return (
            None
            if self.factor is None
            else capacity_of(self.tokens, self.top_k, self.experts, self.factor)
        )

    def inputs(self, rank: int) -> tuple[torch.Tensor, ...]:
        """x, experts, weights, w_in, w_out, the gradient of y, and the biases if there are any."""
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)
        dtype = DTYPES[self.dtype]

        def random(*size, scale=1.0):
            return (torch.randn(size, generator=generator) * scale).to(dtype)

        x, grad = random(self.tokens, self.hidden), random(self.tokens, self.hidden)
        w_in = random(self.local, self.ffn, self.gates, self.hidden, scale=self.hidden**-0.5)
        w_out = random(self.local, self.hidden, self.ffn, scale=self.ffn**-0.5)
        if self.activation.limit is not None:
            w_in *= 2 * self.activation.limit  # some gates and ups are clamped
        lines = (2, 1) if self.halves else (1, 2)
        w_in = ordered(w_in, (0, *lines, 3) if self.along_k else (0, 3, *lines))
        if not self.along_k:
            w_out = ordered(w_out, (0, 2, 1))
        scores = torch.rand(self.tokens, self.experts, generator=generator)
        if self.routing == "one":
            scores[:, -1] = 2
        if self.routing == "few":
            scores[:, 1::2] = -1
        weights, experts = scores.topk(self.top_k)
        if self.routing == "holes":
            experts[torch.rand(experts.shape, generator=generator) < 0.5] = -1
        biases = ()
        if self.biases:
            b_in, b_out = random(self.local, self.ffn, self.gates), random(self.local, self.hidden)
            biases = ordered(b_in, (0, *lines)), b_out
        return x, experts, weights, w_in, w_out, grad, *biases

    def kept(self, rank: int) -> torch.Tensor:
        """``[T, k]``: which slots are not dropped."""
        experts = self.inputs(rank)[1]
        flat = experts.flatten()
        kept = torch.zeros_like(flat, dtype=torch.bool)
        for expert in range(self.experts):
            kept[(flat == expert).nonzero()[: self.capacity or len(flat), 0]] = True
        return kept.view_as(experts)

    @functools.cached_property
    def counts(self) -> list[list[int]]:
        """``[source][expert]``, as ``costs`` wants it."""
        found = []
        for rank in range(self.world_size):
            experts = self.inputs(rank)[1]
            found.append(torch.bincount(experts[self.kept(rank)], minlength=self.experts).tolist())
        return found

    @functools.cached_property
    def expected(self) -> list[list[torch.Tensor]]:
        """``[rank]``: y and the gradients of x, weights, w_in, w_out and the biases: dense products
        of all tokens with all experts.
        """
        ranks = range(self.world_size)
        every = [self.inputs(rank) for rank in ranks]
        leaves = [
            [each.double().requires_grad_() for each in leaves_of(inputs)] for inputs in every
        ]
        w_in, w_out, *biases = (
            torch.cat([leaves[rank][i] for rank in ranks]) for i in range(2, len(leaves[0]))
        )
        outputs = []
        for rank in ranks:
            x, weights, *_ = leaves[rank]
            both = torch.einsum("th,efgh->etfg", x, w_in)
            if biases:
                both = both + biases[0][:, None]
            results = torch.einsum("etf,ehf->teh", self.activation(*both.unbind(-1)), w_out)
            if biases:
                results = results + biases[1]
            shares = torch.zeros(self.tokens, self.experts + 1, dtype=torch.float64)
            # Dropped slots in a column of their own
            experts = torch.where(self.kept(rank), every[rank][1], self.experts)
            shares = shares.scatter_add(1, experts, weights)
            outputs.append(torch.einsum("te,teh->th", shares[:, :-1], results))
        torch.autograd.backward(outputs, [inputs[5].double() for inputs in every])
        return [
            [y.detach(), *(leaf.grad for leaf in mine)]
            for y, mine in zip(outputs, leaves, strict=True)
        ]

    @property
    def tolerance(self) -> float:
        """Relative error of a whole tensor: sums of float32, and up to six roundings of what goes
        from step to step (the CPU backend truncates to bfloat16).
        """
        rounding = 0.0 if self.dtype == "float32" else 6 * torch.finfo(DTYPES[self.dtype]).eps
        return (
            rounding
            + 8 * math.sqrt(self.ffn + self.hidden + self.tokens) * torch.finfo(torch.float32).eps
        )

    def check(self, results: list[list[torch.Tensor]]) -> None:
        """``results[rank]`` as ``expected``."""
        for rank, (found, expected) in enumerate(zip(results, self.expected, strict=True)):
            for name, mine, wanted in zip(NAMES, found, expected, strict=False):
                assert mine.shape == wanted.shape
                assert mine.dtype == (torch.float32 if name == "weights" else DTYPES[self.dtype])
                error = (mine.double() - wanted).norm() / wanted.norm().clamp(min=1e-30)
                assert error <= self.tolerance, (
                    f"{self}: {name} of rank {rank} is wrong: relative error {error:.2e}"
                )


def forward(
    call: Call, tensors: tuple[torch.Tensor, ...], group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    return interlace.mixture_of_experts(
        *tensors[:5],
        *tensors[6:],
        activation=call.activation,
        capacity=call.capacity,
        group=group,
        impl=call.impl,
        config=call.config,
    )


def run_one(
    call: Call, group: dist.ProcessGroup | None = None, *, backward: bool = True
) -> list[torch.Tensor]:
    """y, and, if ``backward``, the gradients of x, weights, w_in, w_out and the biases."""
    tensors = call.inputs(dist.get_rank(group))
    leaves = [leaf.requires_grad_(backward) for leaf in leaves_of(tensors)]
    y = forward(call, tensors, group)
    grads = torch.autograd.grad(y, leaves, tensors[5]) if backward else ()
    if grads:
        assert grads[2].stride() == tensors[3].stride()
    return [y.detach(), *grads]


def run(calls: list[Call]) -> list[list[torch.Tensor]]:
    """On a rank: make the calls one after another."""
    return [run_one(call) for call in calls]


def check_all(calls: list[Call], results: list[list[list[torch.Tensor]]]) -> None:
    """``results[rank][i]`` against ``calls[i]``."""
    for i, call in enumerate(calls):
        call.check([result[i] for result in results])
