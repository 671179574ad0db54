"""Calls of ``mixture_of_experts`` with float8 weights, and what must come out, in float64."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

import interlace
from interlace import MixtureOfExpertsConfig

BLOCK, LARGEST = 128, 448.0


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    """``[L, N, K]`` as ``[L, N / 128, 128, K / 128, 128]``."""
    return weight.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))


def _quantised_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float8, and the scale of each block, of float32 ``[L, N, K]``."""
    blocks = _blocks(weight)
    scale = blocks.abs().amax((2, 4)) / LARGEST
    return (blocks / scale[:, :, None, :, None]).to(torch.float8_e4m3fn).view_as(weight), scale


def _wide(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Float64 of a float8 weight times its scales."""
    return (_blocks(weight.double()) * scale.double()[:, :, None, :, None]).view(weight.shape)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """Float64 of rows ``[rows, K]`` that become float8 with a scale for each 128 elements."""
    blocks = x.float().unflatten(1, (-1, BLOCK))
    scale = blocks.abs().amax(2, keepdim=True) / LARGEST
    scale = torch.where(scale == 0, 1.0, scale)
    float8 = (blocks / scale).to(torch.float8_e4m3fn)
    return (float8.double() * scale.double()).flatten(1)


@dataclasses.dataclass(frozen=True)
class Float8Call:
    """One call: ``local`` experts on each of ``world_size`` ranks, ``tokens`` on each.

    Attributes:
        routing: ``"random"``; ``"few"``: every second expert gets nothing; ``"holes"``: some slots
            name no expert; ``"zeros"``: some tokens are zero.
    """

    world_size: int
    tokens: int = 7
    top_k: int = 2
    local: int = 2
    hidden: int = 256
    ffn: int = 128
    dtype: torch.dtype = torch.bfloat16
    routing: str = "random"
    impl: str = "fused"
    config: MixtureOfExpertsConfig | None = None
    seed: int = 0

    def inputs(self, rank: int) -> dict[str, torch.Tensor]:
        """The arguments, on the CPU."""
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator)

        # Blocks differ in size, so that a wrong scale is a wrong result.
        x = random(self.tokens, self.hidden).unflatten(1, (-1, BLOCK))
        x = (x * 4.0 ** torch.arange(x.shape[1])[:, None]).flatten(1) / self.hidden**0.5
        if self.routing == "zeros":
            x[::2] = 0
        w_in = random(self.local, 2 * self.ffn, self.hidden) / self.hidden**0.5
        w_out = random(self.local, self.hidden, self.ffn) / self.ffn**0.5
        for weight in (w_in, w_out):
            blocks = _blocks(weight)
            blocks *= 4.0 ** torch.randint(
                -2, 3, (*blocks.shape[:2], 1, blocks.shape[3], 1), generator=generator
            )
        w_in, w_in_scale = _quantised_weight(w_in)
        w_out, w_out_scale = _quantised_weight(w_out)
        scores = torch.rand(self.tokens, self.world_size * self.local, generator=generator)
        if self.routing == "few":
            scores[:, 1::2] = -1
        weights, experts = scores.topk(self.top_k)
        if self.routing == "holes":
            experts[torch.rand(experts.shape, generator=generator) < 0.5] = -1
        return {
            "x": x.to(self.dtype),
            "experts": experts,
            "weights": weights,
            "w_in": w_in.unflatten(1, (2, self.ffn)).transpose(1, 2),
            "w_out": w_out,
            "w_in_scale": w_in_scale.unflatten(1, (2, -1)).transpose(1, 2),
            "w_out_scale": w_out_scale,
        }

    def expected(self, rank: int) -> torch.Tensor:
        """Y of a rank, float64: dense products of its tokens with all experts."""
        mine = self.inputs(rank)
        x = _rounded(mine["x"])
        y = torch.zeros(x.shape, dtype=torch.float64)
        for owner in range(self.world_size):
            theirs = self.inputs(owner)
            both = _wide(
                theirs["w_in"].transpose(1, 2).flatten(1, 2),
                theirs["w_in_scale"].transpose(1, 2).flatten(1, 2),
            )
            second = _wide(theirs["w_out"], theirs["w_out_scale"])
            for number in range(self.local):
                gate, up = (x @ both[number].T).chunk(2, 1)
                active = (torch.nn.functional.silu(gate) * up).to(self.dtype)
                results = _rounded(active) @ second[number].T
                named = mine["experts"] == owner * self.local + number
                y += results * (mine["weights"] * named).sum(1, keepdim=True)
        return y

    def run(self) -> torch.Tensor:
        """Make the call on this rank's device, and return y on the CPU."""
        device = interlace.group_of().device if dist.is_initialized() else torch.device("cpu")
        tensors = {}
        for name, tensor in self.inputs(own_rank()).items():
            # A copy to a device keeps the order in memory.
            tensors[name] = tensor.to(device)
        return interlace.mixture_of_experts(**tensors, impl=self.impl, config=self.config).cpu()

    def check(self, results: list[torch.Tensor]) -> None:
        """Compare the results of all ranks.

        The interpreter truncates the activation to bfloat16: numbers are up to 2^-8 of themselves
        lower, so that up to one in 16 becomes another float8, 2^-3 away, which is a relative error
        of 0.25 times 2^-3. ``"unfused"`` rounds gate, up and their function, too: four times as
        many. A wrong scale changes a result by half of itself at least.
        """
        for rank, y in enumerate(results):
            expected = self.expected(rank)
            assert y.dtype == self.dtype
            assert y.shape == expected.shape
            error = (y.double() - expected).norm() / expected.norm().clamp(min=1e-30)
            tolerance = 0.07 if self.impl == "unfused" else 0.04
            assert error <= tolerance, f"{self}: rank {rank}: relative error {error:.2e}"


def own_rank() -> int:
    """Return this process's rank, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def run_all(calls: list[Float8Call]) -> list[torch.Tensor]:
    """On a rank: make the calls one after another."""
    return [call.run() for call in calls]
