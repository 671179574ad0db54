"""Benchmark of ``mixture_of_experts`` on CUDA: the combine, the whole layer, its backward pass."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from interlace.bench.benchmark import (
    Benchmark,
    LeastWork,
    Step,
    Way,
    changes_along,
    constant,
    relative_error,
)
from interlace.comm import default_name
from interlace.comm.groups.group import solo_group
from interlace.comm.launching.kernels import Launch
from interlace.costs import mixture_of_experts as costs
from interlace.errors import ArgumentError
from interlace.gemm.reference import exchange_rows
from interlace.operators.mixture_of_experts import fused
from interlace.operators.mixture_of_experts.activation import ExpertActivation
from interlace.operators.mixture_of_experts.call import LayerCall, run, run_backward
from interlace.operators.mixture_of_experts.choice import choose
from interlace.operators.mixture_of_experts.config import OPERATOR, MixtureOfExpertsConfig
from interlace.operators.mixture_of_experts.layout import MAX_TOP_K, Parameters, Saved
from interlace.registry import operator_named

PARTS = ("combine", "forward", "backward")
_LEAVES = ("x", "weights", "w_in", "w_out", "b_in", "b_out")
_RESULTS = ("y", *(f"{name}'s gradient" for name in _LEAVES))
_ALL = (True,) * 4
"""All parameters need a gradient."""

ROUTINGS = ("balanced", "skewed")

PRODUCT = "torch._grouped_mm"
"""The grouped product of the unfused steps, as tables show it."""

FORMS = {
    "swiglu": ExpertActivation(),
    "gpt-oss": ExpertActivation("silu", alpha=1.702, limit=7.0, up_offset=1.0),
}
"""Activations of experts. Those of gpt-oss have biases too, and weights ``[L, hidden, 2 F]`` with a
column of the gate and one of up in turn, and ``[L, F, hidden]``, as transformers keeps them.
"""


@dataclasses.dataclass(frozen=True)
class ExpertsShape:
    """One benchmarked layer: ``tokens`` per rank, each to ``top_k`` of all ranks' ``experts``.

    An expert's size is ``hidden x ffn``.

    Attributes:
        routing: ``"balanced"`` if each token's experts are drawn evenly; ``"skewed"`` if an order
            of experts, common to all tokens, gives the i-th one the weight 1 / i.
        form: One of ``FORMS``.
    """

    tokens: int = 4096
    hidden: int = 4096
    ffn: int = 14336
    experts: int = 8
    top_k: int = 2
    routing: str = "balanced"
    dtype: torch.dtype = torch.bfloat16
    form: str = "swiglu"

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ArgumentError(f"form must be one of {', '.join(FORMS)}; got {self.form!r}.")
        if self.routing not in ROUTINGS:
            raise ArgumentError(
                f"routing must be one of {', '.join(ROUTINGS)}; got {self.routing!r}."
            )
        if not 1 <= self.top_k <= min(MAX_TOP_K, self.experts):
            raise ArgumentError(
                f"top_k must be from 1 to {MAX_TOP_K} and at most the number of experts; got "
                f"{self.top_k}."
            )

    @property
    def tolerance(self) -> float:
        """The relative error of a few roundings to the dtype, and of sums of float32."""
        return (
            6 * torch.finfo(self.dtype).eps
            + 8 * math.sqrt(self.ffn + self.hidden) * torch.finfo(torch.float32).eps
        )

    def __str__(self) -> str:
        experts = f"{self.experts} x {self.hidden} x {self.ffn}"
        form = "" if self.form == "swiglu" else f", {self.form}"
        return f"{self.tokens} tokens, {experts}, top {self.top_k}, {self.routing}{form}"


def forward_launches(call: LayerCall) -> list[Launch]:
    """Return the launches of a forward pass of ``impl="fused"``, into new memory."""
    from interlace.operators.mixture_of_experts import fused_launches

    return fused_launches.forward_launches(call, *fused.forward_memory(call)(call.group))


class Kept(NamedTuple):
    """The tensors that an unfused forward pass keeps for the backward pass.

    Attributes:
        order, positions: Slots by expert, and each slot's position in that order.
        rows: The rows that this rank's experts received, by expert.
        both: Gate and up, side by side.
        returned: The results that came back, by slot.
    """

    order: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    both: torch.Tensor
    returned: torch.Tensor


class ExpertCalls(Benchmark[MixtureOfExpertsConfig]):
    """A shape's inputs and weights on this rank, the calls on them, and the unfused steps.

    The unfused steps know beforehand how many rows go to which rank. That is more than they could
    know in a model without waiting for the device.
    """

    shape: ExpertsShape
    # A way may use launches that were prepared before, and with them the group's workspaces.
    releases = False

    def __init__(
        self,
        shape: ExpertsShape,
        config: MixtureOfExpertsConfig | None = None,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
        keeps: bool = True,
    ) -> None:
        super().__init__(operator_named(OPERATOR), shape, group)
        self.rank, self.ranks, device = self.owner.rank, self.owner.world_size, self.device
        if shape.experts % self.ranks:
            raise ArgumentError(
                f"experts must divide evenly over {self.ranks} ranks; got {shape.experts}."
            )
        self.local = shape.experts // self.ranks
        generator = torch.Generator(device).manual_seed(1 + self.rank + 1000 * seed)

        def random(*size: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=device).mul_(scale).to(shape.dtype)

        self.x, self.grad = random(shape.tokens, shape.hidden), random(shape.tokens, shape.hidden)
        self.w_in = random(self.local, shape.ffn, 2, shape.hidden, scale=shape.hidden**-0.5)
        self.w_out = random(self.local, shape.hidden, shape.ffn, scale=shape.ffn**-0.5)
        self.activation = FORMS[shape.form]
        self.b_in: torch.Tensor | None = None
        self.b_out: torch.Tensor | None = None
        if shape.form == "gpt-oss":
            self.w_in = self.w_in.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
            self.w_out = self.w_out.transpose(1, 2).contiguous().transpose(1, 2)
            self.b_in = random(self.local, shape.ffn, 2, scale=0.1)
            self.b_out = random(self.local, shape.hidden, scale=0.1)
        self.experts, self.weights = self._route(generator)
        choice = choose(self.call(keeps, config=MixtureOfExpertsConfig()).terms, device)
        self.config, self.auto = config or choice.config, choice.impl
        self._plan_unfused()

    def _route(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[T, k]`` distinct experts per token, and weights that add up to 1."""
        shape, device = self.shape, self.x.device
        # All ranks must prefer the same experts.
        order = torch.randperm(shape.experts, generator=torch.Generator().manual_seed(0)).to(device)
        popularity = torch.zeros(shape.experts, device=device)
        if shape.routing == "skewed":
            popularity[order] = -torch.arange(1, shape.experts + 1, device=device).float().log()
        uniform = torch.rand(shape.tokens, shape.experts, generator=generator, device=device).clamp(
            1e-7, 1 - 1e-7
        )
        # With Gumbel noise, the k highest scores are a draw without replacement.
        scores = popularity - (-uniform.log()).log()
        chosen, experts = scores.topk(shape.top_k)
        return experts, torch.softmax(chosen, -1)

    @property
    def parameters(self) -> Parameters:
        """The experts' weights and biases."""
        return Parameters(self.w_in, self.w_out, self.b_in, self.b_out)

    @property
    def weight_bytes(self) -> int:
        """The bytes of the weights of this rank's experts that have rows."""
        shape = self.shape
        return costs.weight_bytes(
            counts=self.counts, rank=self.rank, hidden=shape.hidden, ffn=shape.ffn,
            itemsize=shape.dtype.itemsize,
        )  # fmt: skip

    # Fused

    def call(
        self, keeps: bool, impl: str = "fused", config: MixtureOfExpertsConfig | None = None
    ) -> LayerCall:
        """Return a call; ``keeps`` if its backward pass will run."""
        capacity = max(1, self.shape.tokens)
        return LayerCall(
            self.x,
            self.experts,
            self.weights,
            *self.parameters,
            capacity,
            default_name(self.group),
            impl,
            str(config or self.config),
            str(self.activation),
            keeps,
            keeps,
        )

    def default_config(self, impl: str) -> MixtureOfExpertsConfig:
        """Return the configuration that an implementation takes if it is given none."""
        call = dataclasses.replace(self.call(False, impl), config="")
        return call.chosen[1]

    def exact(self) -> torch.Tensor:
        """Return y in float32, by stock PyTorch, one expert after another."""
        call = self.call(False, "unfused")
        return run(
            dataclasses.replace(
                call,
                keeps=True,  # calls with gradients multiply by no grouped products
                x=call.x.float(),
                w_in=call.w_in.float(),
                w_out=call.w_out.float(),
                b_in=None if call.b_in is None else call.b_in.float(),
                b_out=None if call.b_out is None else call.b_out.float(),
            )
        )[0]

    def alone(self) -> LayerCall:
        """Return a call of this rank's part of the work, in which nothing is sent."""
        # Every row goes to one expert, with weight 1.
        experts = self.owner_of[:, None]
        call = dataclasses.replace(
            self.call(False),
            x=self.x.new_zeros(len(experts), self.shape.hidden),
            experts=experts,
            weights=torch.ones_like(experts, dtype=torch.float32),
            capacity=max(1, len(experts)),
        )
        call.group = solo_group(self.x.device)
        return call

    def prepared(self, call: LayerCall) -> list[Launch]:
        """Run a call once; return its launches, of which the last two may be repeated."""
        call.agree(OPERATOR)
        launches = forward_launches(call)
        with call.group.running():
            for step in launches:
                step()
        return launches

    def forward(self, keeps: bool) -> tuple[torch.Tensor, Saved]:
        """Run the layer."""
        return run(self.call(keeps))

    # Unfused

    def _plan_unfused(self) -> None:
        """Exchange the counts, and find the orders in which rows go through the unfused steps."""
        shape, device = self.shape, self.x.device
        flat = self.experts.flatten()
        counts = torch.bincount(flat, minlength=shape.experts)
        gathered = [torch.empty_like(counts) for _ in range(self.ranks)]
        dist.all_gather(gathered, counts, group=self.group)
        self.counts: list[list[int]] = [row.tolist() for row in gathered]
        first, last = self.rank * self.local, (self.rank + 1) * self.local
        local_counts = [row[first:last] for row in self.counts]
        self.sent = counts.view(self.ranks, self.local).sum(1).tolist()
        self.arriving = [sum(row) for row in local_counts]
        labels = torch.cat([torch.repeat_interleave(torch.tensor(row)) for row in local_counts])
        # Rows arrive by source, and are multiplied by expert.
        self.by_expert = torch.argsort(labels, stable=True).to(device)
        self.by_source = torch.argsort(self.by_expert)
        rows_of = torch.tensor(local_counts, device=device).sum(0)
        self.ends = rows_of.cumsum(0).to(torch.int32)
        # All gates, then all ups, in place of one of each in turn.
        gate_up = self.w_in.transpose(1, 2).reshape(self.local, 2 * shape.ffn, shape.hidden)
        self.in_first, self.out_first = gate_up.transpose(1, 2), self.w_out.transpose(1, 2)
        self.owner_of = torch.repeat_interleave(rows_of)
        if self.b_in is not None:
            self.bias_first = self.b_in.transpose(1, 2).reshape(self.local, 2 * shape.ffn)

    def order(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots sorted by expert, and each slot's position in that order."""
        # Slots of one expert stay in the order of their tokens.
        order = torch.argsort(self.experts.flatten(), stable=True)
        return order, torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), device=order.device)
        )

    def exchange(self, rows: torch.Tensor, *, back: bool) -> torch.Tensor:
        """Send rows to their experts by NCCL, or back."""
        out, into = (self.arriving, self.sent) if back else (self.sent, self.arriving)
        return exchange_rows(rows, out, into, self.group)

    def grouped(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Multiply the rows that arrive here, ``[M, K]``, sorted by expert, by ``[L, K, N]``."""
        return torch._grouped_mm(rows, weights, offs=self.ends)

    def grouped_gradient(self, rows: torch.Tensor, grads: torch.Tensor) -> torch.Tensor:
        """Return ``grads.T @ rows`` of each expert, ``[L, N, K]``."""
        return torch._grouped_mm(grads.T, rows, offs=self.ends)

    def first(self, rows: torch.Tensor) -> torch.Tensor:
        """Return gate and up of rows that are sorted by expert, side by side."""
        both = self.grouped(rows, self.in_first)
        return both if self.b_in is None else both + self.bias_first[self.owner_of]

    def activate(self, both: torch.Tensor) -> torch.Tensor:
        """Apply the activation to gate and up, side by side."""
        return self.activation(*both.chunk(2, 1))

    def second(self, active: torch.Tensor) -> torch.Tensor:
        """Return the experts' results of their activations."""
        results = self.grouped(active, self.out_first)
        return results if self.b_out is None else results + self.b_out[self.owner_of]

    def weighted_sum(self, returned: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Add each token's results with its router's weights."""
        rows = returned[positions].view(*self.experts.shape, -1)
        return torch.bmm(self.weights[:, None].to(rows.dtype), rows)[:, 0]

    def unfused_combine(self, active: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run the second product and the combine as a program without Interlace would."""
        results = self.second(active)[self.by_source]
        return self.weighted_sum(self.exchange(results, back=True), positions)

    def unfused_forward(self) -> torch.Tensor:
        """Run the layer as a program without Interlace would."""
        kept = self.keep()
        return self.weighted_sum(kept.returned, kept.positions)

    def keep(self) -> Kept:
        """Run an unfused forward pass and return what it keeps for the backward pass."""
        order, positions = self.order()
        rows = self.exchange(self.x[order // self.shape.top_k], back=False)[self.by_expert]
        both = self.first(rows)
        results = self.second(self.activate(both))[self.by_source]
        return Kept(order, positions, rows, both, self.exchange(results, back=True))

    def unfused_backward(self, kept: Kept) -> tuple[torch.Tensor, ...]:
        """Return the gradients of x, the router's weights, w_in, w_out and the biases."""
        order, positions, rows, both, returned = kept
        upstream = self.grad[order // self.shape.top_k]
        weight_grads = (
            (upstream * returned).sum(-1, dtype=torch.float32)[positions].view_as(self.weights)
        )
        scaled = upstream * self.weights.flatten()[order, None].to(upstream.dtype)
        arrived = self.exchange(scaled, back=False)[self.by_expert]
        active, inner = self.activate_again(
            both, self.grouped(arrived, self.out_first.transpose(1, 2))
        )
        w_out_grad = self.grouped_gradient(active, arrived)
        w_in_grad = self.grouped_gradient(rows, inner)
        back = self.grouped(inner, self.in_first.transpose(1, 2))[self.by_source]
        x_grad = self.exchange(back, back=True)[positions].view(*self.experts.shape, -1).sum(1)
        gradients = x_grad, weight_grads, w_in_grad, w_out_grad
        if self.b_in is None:
            return gradients
        # A product with ones adds in float32; grouped products take rows of 16 bytes.
        ones = rows.new_ones(len(rows), 8)
        sums = (self.grouped_gradient(ones, grad)[..., 0] for grad in (inner, arrived))
        return *gradients, *sums

    def activate_again(
        self, both: torch.Tensor, upstream: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the activation of ``both``, and the gradient of ``both`` for that of the
        activation.
        """
        if self.shape.form == "swiglu":
            # The derivative of silu(gate) * up by gate and by up.
            gate, up = both.chunk(2, 1)
            sigmoid = gate.sigmoid()
            silu = gate * sigmoid
            of_gate = upstream * up * sigmoid * (1 + gate * (1 - sigmoid))
            return silu * up, torch.cat([of_gate, upstream * silu], 1)
        leaf = both.detach().requires_grad_()
        with torch.enable_grad():
            active = self.activate(leaf)
        return active.detach(), torch.autograd.grad(active, leaf, upstream)[0]

    # Check and tuning

    def check(self, config: MixtureOfExpertsConfig) -> float:
        """Return the largest difference between fused and unfused, both directions, on any rank."""
        self.config = config
        shape = self.shape
        # A race shows itself in many calls, seldom in one.
        for _ in range(3):
            y, saved = self.forward(True)
        grads = run_backward(self.call(True), self.grad, saved, _ALL)
        self.owner.synchronize()
        expected = [self.unfused_forward(), *self.unfused_backward(self.keep())]
        # Our kernels have gate and up in turn.
        expected[3] = expected[3].view(self.local, 2, shape.ffn, shape.hidden).transpose(1, 2)
        if self.b_in is not None:
            expected[5] = expected[5].view(self.local, 2, shape.ffn).transpose(1, 2)
        errors = [
            relative_error(ours, pair) for ours, pair in zip([y, *grads], expected, strict=False)
        ]
        # The message tells which results are wrong on this rank.
        named = zip(_RESULTS, errors, strict=False)
        wrong = [name for name, error in named if not error <= self.shape.tolerance]
        return self.accept(errors, config, *wrong)

    def tuned_call(self, config: MixtureOfExpertsConfig) -> Step:
        """Return a forward and a backward pass."""

        def step(_: int) -> None:
            saved = self.forward(True)[1]
            run_backward(self.call(True), self.grad, saved, _ALL)

        return step

    def compile(self, config: MixtureOfExpertsConfig) -> None:
        """Compile the kernels of both directions."""
        # The buffers that the last candidate's graph took may be used again.
        self.owner.release()
        self.config = config
        for step in _launches(self):
            step.compile()


# The benchmark


def bench(
    shape: ExpertsShape,
    config: MixtureOfExpertsConfig | None = None,
    group: dist.ProcessGroup | None = None,
    parts: Sequence[str] = PARTS,
) -> list[dict[str, Any]]:
    """Check, then time one shape in every way, part by part.

    Collective; the same results on every rank.

    Raises:
        InterlaceError: The fused result is wrong; nothing is timed then.
    """
    case = ExpertCalls(shape, config, group)
    error = case.check(case.config)
    results = []
    for part in parts:
        # The buffers that the last part's graphs took may be used again.
        case.owner.release()
        times = case.time(_WAYS[part](case))
        results.append(
            {
                "part": part,
                "shape": f"{shape}, {part}",
                **case.header(case.config, case.auto, error),
                **LeastWork(*case.maxima(least_work(case, part))).entries(),
                "times": times,
            }
        )
    case.owner.synchronize()
    return results


def _combine_ways(case: ExpertCalls) -> list[Way]:
    """Return ways from the inner layer's output to y: the second product and the combine."""
    # The last two launches of a call are the second product and the sum.
    *_, combine, total = case.prepared(case.call(False))
    *_, alone, _ = case.prepared(case.alone())
    # Each way begins where the first product ends, from the same rows.
    kept = case.keep()
    positions, both = kept.positions, kept.both
    active = case.activate(both)
    results = case.second(active)
    solo = solo_group(case.x.device)

    def fused(_: int) -> None:
        with case.owner.running():
            combine()
            total()

    def product(_: int) -> None:
        with solo.running():
            alone()

    return [
        Way("fused", "ours", fused, "fused"),
        Way(
            f"{PRODUCT} + NCCL + permutes + sum",
            "pair",
            lambda _: case.unfused_combine(active, positions),
        ),
        Way(
            f"{PRODUCT} + NCCL",
            "pair",
            lambda _: case.exchange(case.grouped(active, case.out_first), back=True),
        ),
        Way(f"{PRODUCT} alone", "compute", lambda _: case.grouped(active, case.out_first)),
        Way("our grouped product alone", "compute", product),
        Way("NCCL alone", "communication", lambda _: case.exchange(results, back=True)),
    ]


def _forward_ways(case: ExpertCalls) -> list[Way]:
    """Return ways from x and the router's choice to y."""
    kept = case.keep()
    rows, both = kept.rows, kept.both
    sent = case.x[kept.order // case.shape.top_k]
    active = case.activate(both)

    def products(_: int) -> None:
        case.grouped(rows, case.in_first)
        case.grouped(active, case.out_first)

    def exchanges(_: int) -> None:
        case.exchange(sent, back=False)
        case.exchange(rows, back=True)

    return [
        Way("fused", "ours", lambda _: case.forward(False), "fused"),
        Way("fused, keeping what the backward pass needs", "ours", lambda _: case.forward(True)),
        Way(f"{PRODUCT} + NCCL + permutes + sum", "pair", lambda _: case.unfused_forward()),
        Way(f"both {PRODUCT} alone", "compute", products),
        Way("both NCCL alone", "communication", exchanges),
    ]


def _backward_ways(case: ExpertCalls) -> list[Way]:
    """Return ways from y's gradient to those of x, the router's weights and the experts."""
    _, saved = case.forward(True)
    call, kept = case.call(True), case.keep()
    rows, both = kept.rows, kept.both
    active = case.activate(both)

    def products(_: int) -> None:
        case.grouped(rows, case.out_first.transpose(1, 2))
        case.grouped(both, case.in_first.transpose(1, 2))
        case.grouped_gradient(active, rows)
        case.grouped_gradient(rows, both)

    def exchanges(_: int) -> None:
        case.exchange(case.exchange(rows, back=True), back=False)

    return [
        Way(
            "fused",
            "ours",
            lambda _: run_backward(call, case.grad, saved, _ALL),
            "fused",
        ),
        Way(f"{PRODUCT} + NCCL + permutes + sum", "pair", lambda _: case.unfused_backward(kept)),
        Way(f"four {PRODUCT} alone", "compute", products),
        Way("both NCCL alone", "communication", exchanges),
    ]


_WAYS: dict[str, Callable[[ExpertCalls], list[Way]]] = {
    "combine": _combine_ways,
    "forward": _forward_ways,
    "backward": _backward_ways,
}


def least_work(case: ExpertCalls, part: str) -> list[int]:
    """Return the least work of a part on this rank: bytes of memory and of links, and FLOPs."""
    shape, counts, rank, size = case.shape, case.counts, case.rank, case.shape.dtype.itemsize
    routed: dict[str, Any] = {"counts": counts, "rank": rank, "hidden": shape.hidden}
    products = costs.flops(**routed, ffn=shape.ffn)
    link = costs.floor_link_bytes(**routed, itemsize=size)
    if part == "combine":
        # An expert has three matrices; the second product reads one of them.
        rows = costs.arrivals(counts, rank)
        numbers = rows * shape.ffn + shape.hidden * (2 * sum(counts[rank]) + shape.tokens)
        return [
            case.weight_bytes // 3 + numbers * size,
            costs.returning(counts, rank) * shape.hidden * size,
            products // 3,
        ]
    sizes: dict[str, Any] = {"tokens": shape.tokens, "ffn": shape.ffn, "itemsize": size}
    if part == "forward":
        return [costs.floor_memory_bytes(**routed, **sizes, trains=False), link, products]
    # Each product has two in the backward pass: for its input and for its weight.
    return [costs.backward_memory_bytes(**routed, **sizes), link, 2 * products]


# The tuner

AXES: dict[str, Sequence[int]] = {
    "push_programs": (12, 16, 24, 32, 48),
    "push_rows": (32, 64, 128),
    "block_m": (64, 128),
    "group_m": (4, 8, 16),
    "stagger": (0, 50, 100),
    "sum_programs": (1056, 2112, 4096),
}


def tune(shape: ExpertsShape, group: dist.ProcessGroup | None = None) -> MixtureOfExpertsConfig:
    """Return the best configuration that was found for the layer.

    The time is of a forward and a backward pass. One setting is tuned at a time, once round.
    Collective; the same on every rank.

    Raises:
        BackendError: No configuration runs and is right.
    """
    case = ExpertCalls(shape, group=group)
    return case.fastest(case.tune([constant(case.config), *changes_along(AXES)]))


def _launches(case: ExpertCalls) -> list[Launch]:
    """Return all launches of a forward and a backward pass, not yet run."""
    from interlace.operators.mixture_of_experts.fused_launches import backward_launches

    call = case.call(True)
    saved = Saved.empty(call.sizes, call.x, saves=True)
    memory = fused.backward_memory(call, _ALL)(call.group)
    backward = backward_launches(call, case.grad, saved, _ALL, *memory)
    return [*forward_launches(call), *backward]


def measure(
    sizes: dict[str, Any], *, dtype: str, part: str, config: str = ""
) -> list[dict[str, Any]]:
    """Benchmark a mixture of experts.

    Args:
        sizes: Sizes by name.
        dtype: Dtype of the layer.
        part: A part of the layer; ``"all"``; ``"decoding"``; or ``"tune"`` and ``"tune
            decoding"``: then the forward pass with the best configuration.
        config: The configuration; empty for the default one, and in decoding for several.
    """
    from benchmarks import expert_decoding  # which imports this module

    shape = ExpertsShape(**sizes, dtype=getattr(torch, dtype))
    if part == "tune":
        return bench(shape, tune(shape), parts=("forward",))
    chosen = MixtureOfExpertsConfig.parse(config) if config else None
    if part == "tune decoding":
        chosen = expert_decoding.tune(shape)
    if part in ("decoding", "tune decoding"):
        return [expert_decoding.bench(shape, chosen)]
    return bench(shape, chosen, parts=PARTS if part == "all" else (part,))
