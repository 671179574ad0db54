"""Benchmark of ``mixture_of_experts`` on CUDA: the combine, the whole layer, its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from interlace.bench import expert_decoding
from interlace.bench.benchmark import LeastWork, Step, Way, changes_along, constant, relative_error
from interlace.bench.expert_calls import ROUTINGS, ExpertCalls, ExpertsShape
from interlace.comm.groups.group import solo_group
from interlace.comm.launching.kernels import Launch
from interlace.costs import mixture_of_experts as costs
from interlace.operators.mixture_of_experts import fused, fused_backward
from interlace.operators.mixture_of_experts.call import run_backward
from interlace.operators.mixture_of_experts.config import OPERATOR, MixtureOfExpertsConfig

__all__ = ["OPERATOR", "PARTS", "ROUTINGS", "ExpertsShape", "TimedExperts", "bench", "tune"]

PARTS = ("combine", "forward", "backward")
_LEAVES = ("x", "weights", "w_in", "w_out", "b_in", "b_out")
_RESULTS = ("y", *(f"{name}'s gradient" for name in _LEAVES))
_ALL = (True,) * 4
"""All parameters need a gradient."""


class TimedExperts(ExpertCalls):
    """A layer with its check, its ways and its times."""

    # A way may use launches that were prepared before, and with them the group's workspaces.
    releases = False

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
    case = TimedExperts(shape, config, group)
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
                **_work(case, part).entries(),
                "times": times,
            }
        )
    case.owner.synchronize()
    return results


def _combine_ways(case: TimedExperts) -> list[Way]:
    """Return ways from the inner layer's output to y: the second product and the combine."""
    # The last two launches of a call are the second product and the sum.
    (*_, combine, total), _ = case.prepared(case.call(False))
    (*_, alone, _), _ = case.prepared(case.alone())
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
            f"{case.product} + NCCL + permutes + sum",
            "pair",
            lambda _: case.unfused_combine(active, positions),
        ),
        Way(
            f"{case.product} + NCCL",
            "pair",
            lambda _: case.exchange(case.grouped(active, case.out_first), back=True),
        ),
        Way(f"{case.product} alone", "compute", lambda _: case.grouped(active, case.out_first)),
        Way("our grouped product alone", "compute", product),
        Way("NCCL alone", "communication", lambda _: case.exchange(results, back=True)),
    ]


def _forward_ways(case: TimedExperts) -> list[Way]:
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
        Way(f"{case.product} + NCCL + permutes + sum", "pair", lambda _: case.unfused_forward()),
        Way(f"both {case.product} alone", "compute", products),
        Way("both NCCL alone", "communication", exchanges),
    ]


def _backward_ways(case: TimedExperts) -> list[Way]:
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
        Way(
            f"{case.product} + NCCL + permutes + sum", "pair", lambda _: case.unfused_backward(kept)
        ),
        Way(f"four {case.product} alone", "compute", products),
        Way("both NCCL alone", "communication", exchanges),
    ]


_WAYS: dict[str, Callable[[TimedExperts], list[Way]]] = {
    "combine": _combine_ways,
    "forward": _forward_ways,
    "backward": _backward_ways,
}


def _work(case: TimedExperts, part: str) -> LeastWork:
    """Return the least work of a part, on the rank that has most of each kind."""
    shape, counts, rank, size = case.shape, case.counts, case.rank, case.shape.dtype.itemsize
    routed: dict[str, Any] = {"counts": counts, "rank": rank, "hidden": shape.hidden}
    products = costs.flops(**routed, ffn=shape.ffn)
    link = costs.floor_link_bytes(**routed, itemsize=size)
    if part == "combine":
        # An expert has three matrices; the second product reads one of them.
        third = costs.weight_bytes(**routed, ffn=shape.ffn, itemsize=size) // 3
        rows = costs.arrivals(counts, rank)
        numbers = rows * shape.ffn + shape.hidden * (2 * sum(counts[rank]) + shape.tokens)
        work = [
            third + numbers * size,
            costs.returning(counts, rank) * shape.hidden * size,
            products // 3,
        ]
    elif part == "forward":
        memory = costs.floor_memory_bytes(
            **routed, tokens=shape.tokens, ffn=shape.ffn, itemsize=size, trains=False
        )
        work = [memory, link, products]
    else:
        memory = costs.backward_memory_bytes(
            **routed, tokens=shape.tokens, ffn=shape.ffn, itemsize=size
        )
        # Each product has two in the backward pass: for its input and for its weight.
        work = [memory, link, 2 * products]
    return LeastWork(*case.maxima(work))


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
    case = TimedExperts(shape, group=group)
    return case.fastest(case.tune([constant(case.config), *changes_along(AXES)]))


def _launches(case: TimedExperts) -> list[Launch]:
    """Return all launches of a forward and a backward pass, not yet run."""
    call = case.call(True)
    forward, _, saved, _ = fused.prepare(call)
    backward, _ = fused_backward.prepare(call, case.grad, saved, _ALL)
    return [*forward, *backward]


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
    shape = ExpertsShape(**sizes, dtype=getattr(torch, dtype))
    if part == "tune":
        return bench(shape, tune(shape), parts=("forward",))
    chosen = MixtureOfExpertsConfig.parse(config) if config else None
    if part == "tune decoding":
        chosen = expert_decoding.tune(shape)
    if part in ("decoding", "tune decoding"):
        return [expert_decoding.bench(shape, chosen)]
    return bench(shape, chosen, parts=PARTS if part == "all" else (part,))
