"""Benchmark of ``mixture_of_experts`` on CUDA: second product and combine, the whole layer, its
backward pass.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from interlace.bench.timing import measure
from interlace.comm import Group, group_of
from interlace.comm.group import solo_group
from interlace.comm.kernels import Launch
from interlace.costs import mixture_of_experts as costs
from interlace.costs.machine import H200_NODE
from interlace.errors import ArgumentError, InterlaceError
from interlace.operators.mixture_of_experts import launch
from interlace.operators.mixture_of_experts.config import OPERATOR, MixtureOfExpertsConfig
from interlace.units import NS_PER_S

__all__ = ["OPERATOR", "PARTS", "ROUTINGS", "Case", "Shape", "bench", "tune"]

PARTS = ("combine", "forward", "backward")
ROUTINGS = ("balanced", "skewed")
_FLOPS_PER_S = 989e12
"""Dense bfloat16 products of an H200 at most (NVIDIA H200 data sheet)."""

Step = Callable[[int], object]


@dataclasses.dataclass(frozen=True)
class Shape:
    """One benchmarked layer: ``tokens`` a rank, each to ``top_k`` of ``experts`` experts ``hidden x
    ffn``.

    Attributes:
        routing: ``"balanced"``: each token's experts are drawn evenly; ``"skewed"``: the i-th most
            wanted one with weight 1 / i, which is so for all tokens.
    """

    tokens: int = 4096
    hidden: int = 4096
    ffn: int = 14336
    experts: int = 8
    top_k: int = 2
    routing: str = "balanced"
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.routing not in ROUTINGS:
            raise ArgumentError(
                f"routing must be one of {', '.join(ROUTINGS)}; got {self.routing!r}."
            )
        if not 1 <= self.top_k <= min(8, self.experts):
            raise ArgumentError(
                f"top_k must be from 1 to 8 and at most the number of experts; got {self.top_k}."
            )

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.experts} x {self.hidden} x {self.ffn}, top {self.top_k}, {self.routing}"


@dataclasses.dataclass(frozen=True)
class _Alone(launch.Call):
    """A call of this rank without its peers, whatever the group."""

    @functools.cached_property
    def group(self) -> Group:
        return solo_group(self.x.device)


class Case:
    """A shape's inputs and weights on this rank, the calls on them, and everything that the unfused
    steps know beforehand.

    That is more than they could know in a model without waiting for the device: how many rows go
    where.
    """

    def __init__(
        self,
        shape: Shape,
        config: MixtureOfExpertsConfig | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.shape, self.group = shape, group
        self.owner = group_of(group)
        self.rank, self.ranks, device = self.owner.rank, self.owner.world_size, self.owner.device
        if shape.experts % self.ranks:
            raise ArgumentError(
                f"experts must divide evenly over {self.ranks} ranks; got {shape.experts}."
            )
        self.local = shape.experts // self.ranks
        generator = torch.Generator(device).manual_seed(1 + self.rank)

        def random(*size: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=device).mul_(scale).to(shape.dtype)

        self.x, self.grad = random(shape.tokens, shape.hidden), random(shape.tokens, shape.hidden)
        self.w_in = random(self.local, shape.ffn, 2, shape.hidden, scale=shape.hidden**-0.5)
        self.w_out = random(self.local, shape.hidden, shape.ffn, scale=shape.ffn**-0.5)
        self.experts, self.weights = self._route(generator)
        choice = launch.choose(
            tokens=shape.tokens, hidden=shape.hidden, ffn=shape.ffn, experts=shape.experts,
            top_k=shape.top_k, dtype=shape.dtype, world_size=self.ranks, device=device,
        )  # fmt: skip
        self.config, self.auto = config or choice.config, choice.impl
        self._unfused()

    def _route(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, k]`` distinct experts a token, and weights that add up to 1."""
        shape, device = self.shape, self.x.device
        # The same on every rank
        order = torch.randperm(shape.experts, generator=torch.Generator().manual_seed(0)).to(device)
        wanted = torch.zeros(shape.experts, device=device)
        if shape.routing == "skewed":
            wanted[order] = -torch.arange(1, shape.experts + 1, device=device).float().log()
        uniform = torch.rand(shape.tokens, shape.experts, generator=generator, device=device).clamp(
            1e-7, 1 - 1e-7
        )
        # Gumbel: the k highest are a draw without replacement
        scores = wanted - (-uniform.log()).log()
        chosen, experts = scores.topk(shape.top_k)
        return experts, torch.softmax(chosen, -1)

    # Fused

    def call(self, keeps: bool) -> launch.Call:
        name = "" if self.group is None else self.group.group_name
        most = max(1, self.shape.tokens)
        return launch.Call(
            self.x,
            self.experts,
            self.weights,
            self.w_in,
            self.w_out,
            most,
            name,
            "fused",
            str(self.config),
            keeps,
        )

    def alone(self) -> launch.Call:
        """This rank's part of the work, as if all rows were its own: nothing is sent."""
        rows = [
            sum(source[self.rank * self.local + expert] for source in self.counts)
            for expert in range(self.local)
        ]
        experts = torch.repeat_interleave(torch.tensor(rows)).to(self.x.device)[:, None]
        x = self.x.new_zeros(len(experts), self.shape.hidden)
        weights = torch.ones_like(experts, dtype=torch.float32)
        return _Alone(
            x,
            experts,
            weights,
            self.w_in,
            self.w_out,
            max(1, len(experts)),
            "",
            "fused",
            str(self.config),
            False,
        )

    def prepared(self, call: launch.Call) -> tuple[list[Launch], torch.Tensor]:
        """A call's launches after it has run once: the last two may be repeated by themselves."""
        launches, y, _, _ = launch.prepare_forward(call, call.agree(OPERATOR))
        with call.group.running():
            for each in launches:
                each()
        return launches, y

    def forward(self, keeps: bool) -> tuple[torch.Tensor, launch.Saved]:
        return launch.run(self.call(keeps))

    # Unfused

    def _unfused(self) -> None:
        """Counts, and the orders in which rows go through the steps."""
        shape, device = self.shape, self.x.device
        flat = self.experts.flatten()
        mine = torch.bincount(flat, minlength=shape.experts)
        each = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(each, mine, group=self.group)
        self.counts: list[list[int]] = [one.tolist() for one in each]
        here = [
            counts[self.rank * self.local : (self.rank + 1) * self.local] for counts in self.counts
        ]
        self.sent = mine.view(self.ranks, self.local).sum(1).tolist()
        self.arriving = [sum(counts) for counts in here]
        labels = torch.cat([torch.repeat_interleave(torch.tensor(counts)) for counts in here])
        self.by_expert = torch.argsort(labels, stable=True).to(device)  # arrival order -> experts
        self.by_source = torch.argsort(self.by_expert)
        self.rows_of = [sum(counts[expert] for counts in here) for expert in range(self.local)]
        self.ends = torch.tensor(self.rows_of, device=device).cumsum(0).to(torch.int32)
        # Gates, then ups
        gate_up = self.w_in.transpose(1, 2).reshape(self.local, 2 * shape.ffn, shape.hidden)
        self.in_first, self.out_first = gate_up.transpose(1, 2), self.w_out.transpose(1, 2)

    def order(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots by expert, and each slot's place in that."""
        order = torch.argsort(self.experts.flatten(), stable=True)
        return order, torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), device=order.device)
        )

    def exchange(self, rows: torch.Tensor, *, back: bool) -> torch.Tensor:
        out, into = (self.arriving, self.sent) if back else (self.sent, self.arriving)
        received = rows.new_empty(sum(into), rows.shape[1])
        dist.all_to_all_single(received, rows, into, out, group=self.group)
        return received

    def grouped(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """``rows [M, K]`` by expert, ``weights [L, K, N]``."""
        if self.has_grouped_mm:
            return torch._grouped_mm(rows, weights, offs=self.ends)
        parts = zip(rows.split(self.rows_of), weights, strict=True)
        return torch.cat([part @ weight for part, weight in parts])

    def grouped_gradient(self, rows: torch.Tensor, grads: torch.Tensor) -> torch.Tensor:
        """``grads.T @ rows`` of each expert: ``[L, N, K]``."""
        if self.has_grouped_mm:
            return torch._grouped_mm(grads.T, rows, offs=self.ends)
        parts = zip(grads.split(self.rows_of), rows.split(self.rows_of), strict=True)
        return torch.stack([grad.T @ part for grad, part in parts])

    @property
    def has_grouped_mm(self) -> bool:
        return (
            hasattr(torch, "_grouped_mm")
            and self.x.device.type == "cuda"
            and self.shape.dtype == torch.bfloat16
        )

    @property
    def product(self) -> str:
        return "torch._grouped_mm" if self.has_grouped_mm else "grouped F.linear"

    def swiglu(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, 1)
        return F.silu(gate) * up

    def weighted_sum(self, returned: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        rows = returned[places].view(*self.experts.shape, -1)
        return torch.bmm(self.weights[:, None].to(rows.dtype), rows)[:, 0]

    def unfused_combine(self, active: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        results = self.grouped(active, self.out_first)[self.by_source]
        return self.weighted_sum(self.exchange(results, back=True), places)

    def unfused_forward(self) -> torch.Tensor:
        order, places = self.order()
        rows = self.exchange(self.x[order // self.shape.top_k], back=False)[self.by_expert]
        return self.unfused_combine(self.swiglu(self.grouped(rows, self.in_first)), places)

    def kept(self) -> tuple[torch.Tensor, ...]:
        """What an unfused forward pass keeps for the backward pass: order, places, rows, gate and
        up, results that came back.
        """
        order, places = self.order()
        rows = self.exchange(self.x[order // self.shape.top_k], back=False)[self.by_expert]
        both = self.grouped(rows, self.in_first)
        results = self.grouped(self.swiglu(both), self.out_first)[self.by_source]
        return order, places, rows, both, self.exchange(results, back=True)

    def unfused_backward(self, kept: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        order, places, rows, both, returned = kept
        upstream = self.grad[order // self.shape.top_k]
        weight_grads = (
            (upstream * returned).sum(-1, dtype=torch.float32)[places].view_as(self.weights)
        )
        scaled = upstream * self.weights.flatten()[order, None].to(upstream.dtype)
        arrived = self.exchange(scaled, back=False)[self.by_expert]
        gate, up = both.chunk(2, 1)
        active = self.grouped(arrived, self.out_first.transpose(1, 2))
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        inner = torch.cat([active * up * sigmoid * (1 + gate * (1 - sigmoid)), active * silu], 1)
        w_out_grad = self.grouped_gradient(silu * up, arrived)
        w_in_grad = self.grouped_gradient(rows, inner)
        back = self.grouped(inner, self.in_first.transpose(1, 2))[self.by_source]
        x_grad = self.exchange(back, back=True)[places].view(*self.experts.shape, -1).sum(1)
        return x_grad, weight_grads, w_in_grad, w_out_grad


# Right before fast


def tolerance(shape: Shape) -> float:
    """Relative error of results that pass a few roundings to the dtype, and sums of float32."""
    return (
        6 * torch.finfo(shape.dtype).eps
        + 8 * math.sqrt(shape.ffn + shape.hidden) * torch.finfo(torch.float32).eps
    )


def check(case: Case) -> float:
    """Largest relative difference between fused and unfused, forward and backward, on any rank.

    Raises:
        InterlaceError: it is too large.
    """
    shape = case.shape
    for _ in range(3):  # a race shows itself in many calls, seldom in one
        y, saved = case.forward(True)
    grads = launch.run_backward(case.call(True), case.grad, saved, (True, True))
    case.owner.synchronize()
    expected = [case.unfused_forward(), *case.unfused_backward(case.kept())]
    # Ours has gate and up in turn.
    expected[3] = expected[3].view(case.local, 2, shape.ffn, shape.hidden).transpose(1, 2)
    found = [y, *grads]
    errors = [_relative(mine, theirs) for mine, theirs in zip(found, expected, strict=True)]
    worst = torch.tensor(errors, device=case.x.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=case.group)
    if not worst.max().item() <= tolerance(shape):
        names = ("y", "x's gradient", "weights' gradient", "w_in's gradient", "w_out's gradient")
        which = ", ".join(
            f"{name} {error:.1e}" for name, error in zip(names, worst.tolist(), strict=True)
        )
        raise InterlaceError(
            f"{OPERATOR} {shape}, {case.config}: relative errors must be at most "
            f"{tolerance(shape):.1e}; got {which}. Not timed."
        )
    return float(worst.max().item())


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(
        (found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30)
    )


# The benchmark


def bench(
    shape: Shape,
    config: MixtureOfExpertsConfig | None = None,
    group: dist.ProcessGroup | None = None,
    parts: Sequence[str] = PARTS,
) -> list[dict[str, Any]]:
    """Check, then time one shape in every way, part by part. Collective; the same results on every
    rank.

    Raises:
        InterlaceError: the fused result is wrong; nothing is timed then.
    """
    case = Case(shape, config, group)
    error = check(case)
    results = []
    for part in parts:
        case.owner.release()  # buffers that the last part's graphs have taken: they are gone
        times = {}
        for name, step in _WAYS[part](case).items():
            times[name] = dataclasses.asdict(measure(step, group=case.group))
        memory_bytes, link_bytes, flops = _floor(case, part)
        floor_ns = max(
            H200_NODE.floor_ns(memory_bytes, link_bytes), flops / _FLOPS_PER_S * NS_PER_S
        )
        results.append(
            {
                "operator": OPERATOR,
                "part": part,
                "shape": f"{shape}, {part}",
                **{
                    name: getattr(shape, name)
                    for name in ("tokens", "hidden", "ffn", "experts", "top_k", "routing")
                },
                "dtype": str(shape.dtype).removeprefix("torch."),
                "world_size": case.ranks,
                "config": str(case.config),
                "auto": case.auto,
                "relative_error": error,
                "floor_us": round(floor_ns / 1e3, 2),
                "memory_bytes": memory_bytes,
                "link_bytes": link_bytes,
                "flops": flops,
                "times": times,
            }
        )
    case.owner.synchronize()
    return results


def _combine_ways(case: Case) -> Mapping[str, Step]:
    """The second product, from the inner layer's output on, to y."""
    (*_, combine, total), _ = case.prepared(case.call(False))
    (*_, alone, _), _ = case.prepared(case.alone())
    _, places, _, both, _ = case.kept()
    active = case.swiglu(both)
    results = case.grouped(active, case.out_first)
    solo = solo_group(case.x.device)

    def fused(_: int) -> None:
        with case.owner.running():
            combine()
            total()

    def product(_: int) -> None:
        with solo.running():
            alone()

    return {
        "fused": fused,
        f"{case.product} + NCCL + permutes + sum": lambda _: case.unfused_combine(active, places),
        f"{case.product} + NCCL": lambda _: case.exchange(
            case.grouped(active, case.out_first), back=True
        ),
        f"{case.product} alone": lambda _: case.grouped(active, case.out_first),
        "our grouped product alone": product,
        "NCCL alone": lambda _: case.exchange(results, back=True),
    }


def _forward_ways(case: Case) -> Mapping[str, Step]:
    """From x and the router's choice to y."""
    order, _, rows, both, _ = case.kept()
    sent = case.x[order // case.shape.top_k]
    active = case.swiglu(both)

    def products(_: int) -> None:
        case.grouped(rows, case.in_first)
        case.grouped(active, case.out_first)

    def exchanges(_: int) -> None:
        case.exchange(sent, back=False)
        case.exchange(rows, back=True)

    return {
        "fused": lambda _: case.forward(False),
        "fused, keeping what the backward pass needs": lambda _: case.forward(True),
        f"{case.product} + NCCL + permutes + sum": lambda _: case.unfused_forward(),
        f"both {case.product} alone": products,
        "both NCCL alone": exchanges,
    }


def _backward_ways(case: Case) -> Mapping[str, Step]:
    """From y's gradient to those of x, the router's weights and the experts."""
    _, saved = case.forward(True)
    call, kept = case.call(True), case.kept()
    _, _, rows, both, _ = kept
    active = case.swiglu(both)

    def products(_: int) -> None:
        case.grouped(rows, case.out_first.transpose(1, 2))
        case.grouped(both, case.in_first.transpose(1, 2))
        case.grouped_gradient(active, rows)
        case.grouped_gradient(rows, both)

    def exchanges(_: int) -> None:
        case.exchange(case.exchange(rows, back=True), back=False)

    return {
        "fused": lambda _: launch.run_backward(call, case.grad, saved, (True, True)),
        f"{case.product} + NCCL + permutes + sum": lambda _: case.unfused_backward(kept),
        f"four {case.product} alone": products,
        "both NCCL alone": exchanges,
    }


_WAYS: dict[str, Callable[[Case], Mapping[str, Step]]] = {
    "combine": _combine_ways,
    "forward": _forward_ways,
    "backward": _backward_ways,
}


def _floor(case: Case, part: str) -> tuple[int, int, int]:
    """Memory bytes, link bytes and FLOPs of the least that a part can do, on the rank that has most
    of each.
    """
    shape, counts, rank, size = case.shape, case.counts, case.rank, case.shape.dtype.itemsize
    where: dict[str, Any] = {"counts": counts, "rank": rank, "hidden": shape.hidden}
    products = costs.flops(**where, ffn=shape.ffn)
    link = costs.floor_link_bytes(**where, itemsize=size)
    if part == "combine":
        third = costs.weight_bytes(**where, ffn=shape.ffn, itemsize=size) // 3
        rows = costs.arrivals(counts, rank)
        numbers = rows * shape.ffn + shape.hidden * (2 * sum(counts[rank]) + shape.tokens)
        mine = [
            third + numbers * size,
            costs.returning(counts, rank) * shape.hidden * size,
            products // 3,
        ]
    elif part == "forward":
        memory = costs.floor_memory_bytes(
            **where, tokens=shape.tokens, ffn=shape.ffn, itemsize=size, trains=False
        )
        mine = [memory, link, products]
    else:
        memory = costs.backward_memory_bytes(
            **where, tokens=shape.tokens, ffn=shape.ffn, itemsize=size
        )
        mine = [memory, link, 2 * products]
    most = torch.tensor(mine, dtype=torch.int64, device=case.x.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=case.group)
    memory_bytes, link_bytes, flops = most.tolist()
    return int(memory_bytes), int(link_bytes), int(flops)


# The tuner

AXES: dict[str, Sequence[int]] = {
    "push_programs": (12, 16, 24, 32, 48),
    "push_rows": (32, 64, 128),
    "block_m": (64, 128),
    "group_m": (4, 8, 16),
    "stagger": (0, 50, 100),
    "sum_programs": (1056, 2112, 4096),
}


def tune(shape: Shape, group: dist.ProcessGroup | None = None) -> list[tuple[float, str]]:
    """The best configuration found for the layer, forward and backward, and its time: one setting
    at a time, once round. Collective; the same on every rank.
    """
    case = Case(shape, group=group)
    best, best_us = case.config, _candidate_us(case, case.config)
    for name, values in AXES.items():
        for value in values:
            change: dict[str, Any] = {name: value}
            candidate = dataclasses.replace(best, **change)
            if candidate == best:
                continue
            time_us = _candidate_us(case, candidate)
            if time_us < best_us:
                best, best_us = candidate, time_us
    if math.isinf(best_us):
        return []
    return [(best_us, str(best))]


def _candidate_us(case: Case, config: MixtureOfExpertsConfig) -> float:
    """Median time of a forward and a backward pass; infinite if it does not compile on some rank or
    is wrong.
    """
    case.owner.release()
    case.config = config
    works = torch.ones((), device=case.x.device)
    try:
        for each in _launches(case):
            each.compile()
    except (
        Exception
    ) as error:  # the compiler's errors have no common base: too much shared memory, say
        works.zero_()
        print(
            f"{OPERATOR} {case.shape}, {config}: left out: {str(error).splitlines()[0][:100]}",
            flush=True,
        )
    dist.all_reduce(works, op=dist.ReduceOp.MIN, group=case.group)
    if not works.item():
        return math.inf
    try:
        check(case)
    except InterlaceError as error:
        print(error, flush=True)
        return math.inf

    def step(_: int) -> None:
        saved = case.forward(True)[1]
        launch.run_backward(case.call(True), case.grad, saved, (True, True))

    return measure(step, samples=7, group=case.group).median_us


def _launches(case: Case) -> list[Launch]:
    """All launches of a forward and a backward pass, not yet run."""
    call = case.call(True)
    prepared = launch.prepare_forward(call, 0)
    backward, _ = launch.prepare_backward(call, 0, case.grad, prepared[2], (True, True))
    return [*prepared[0], *backward]
