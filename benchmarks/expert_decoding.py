"""Benchmark of ``mixture_of_experts`` while a model decodes: few tokens per rank, cold weights.

Each call has weights and a routing of its own, so that no expert is in the L2 at its turn. All
calls are in CUDA graphs.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.kernels import kernels_of
from benchmarks.mixture_of_experts import (
    PRODUCT,
    ExpertCalls,
    ExpertsShape,
    forward_launches,
    least_work,
)
from interlace.bench.benchmark import (
    Benchmark,
    LeastWork,
    Step,
    Way,
    changes_along,
    constant,
    relative_error,
)
from interlace.comm.groups.machine_rates import sets_past_cache
from interlace.costs.machine import H200_NODE
from interlace.errors import InterlaceError
from interlace.operators.mixture_of_experts import decode
from interlace.operators.mixture_of_experts.call import run
from interlace.operators.mixture_of_experts.config import OPERATOR, MixtureOfExpertsConfig
from interlace.registry import operator_named

TOKENS = (1, 4, 16, 64, 256)
"""Tokens per rank."""

_REPLAYS = 3
"""Replays of a graph that the profiler looks at."""


Candidates = Mapping[str, tuple[str, MixtureOfExpertsConfig]]
"""Implementation and configuration by display name."""


def candidates(layer: ExpertCalls) -> Candidates:
    """Return the implementations and configurations that are timed, by their names in tables.

    What follows an implementation's name differs from its default configuration.
    """
    changes: dict[str, list[dict[str, Any]]] = {
        "fused": [
            {},
            {"block_m": 64, "block_n": 256, "num_stages": 4, "push_programs": 16},
            {"block_m": 64, "block_n": 128, "num_warps": 4, "num_stages": 6, "push_programs": 16},
        ],
        "decode": [
            {},
            {"block_m": 16, "block_n": 64, "block_k": 128, "num_stages": 4},
            {"block_m": 16, "block_n": 64, "block_k": 64, "num_stages": 4},
            {"block_m": 16, "block_n": 128, "block_k": 64, "num_stages": 4},
            {"block_m": 32, "block_n": 128, "block_k": 64, "num_stages": 4},
            {"block_m": 64, "block_n": 128, "block_k": 64, "num_stages": 3},
            {"block_m": 128, "block_n": 128, "block_k": 64, "num_stages": 4, "num_warps": 8},
        ],
    }
    if layer.shape.tokens > max(TOKENS):
        changes = {impl: [{}] for impl in changes}  # the others are meant for few tokens
    configurations: dict[str, tuple[str, MixtureOfExpertsConfig]] = {}
    for impl, of_impl in changes.items():
        default = layer.default_config(impl)
        for change in of_impl:
            config = dataclasses.replace(default, **change)
            fields = ", ".join(f"{name}={value}" for name, value in change.items())
            # A change may lead to the default again.
            if (impl, config) not in configurations.values():
                configurations[f"{impl} ({fields})" if fields else impl] = impl, config
    return configurations


class TimedDecoding(Benchmark[MixtureOfExpertsConfig]):
    """Layers of one shape, which calls take in turn, with every way to run them.

    Attributes:
        layers: The layers; each has weights and a routing of its own.
        impl: The implementation that :meth:`tuned_call` runs.
    """

    shape: ExpertsShape
    # Buffers of captured graphs are used again by the next ones, which have the same sizes.
    releases = False

    def __init__(self, shape: ExpertsShape, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(operator_named(OPERATOR), shape, group)
        first = ExpertCalls(shape, group=group, keeps=False)
        count = 2
        if self.device.type == "cuda":
            (nbytes,) = self.maxima([first.weight_bytes])
            count = max(count, sets_past_cache(nbytes, self.device))
        self.layers = [
            first,
            *(ExpertCalls(shape, group=group, seed=i, keeps=False) for i in range(1, count)),
        ]
        self.operand_sets, self.impl = count, "decode"

    def layer(self, i: int) -> ExpertCalls:
        """Return the layer of the i-th call."""
        return self.layers[i % self.operand_sets]

    @functools.cached_property
    def exact(self) -> list[torch.Tensor]:
        """The result of each layer in float32, ``[T, hidden]`` of this rank."""
        return [layer.exact() for layer in self.layers]

    def expected(self, i: int) -> torch.Tensor:
        """Return the result of the i-th call in float32."""
        return self.exact[i % self.operand_sets]

    def tuned_call(self, config: MixtureOfExpertsConfig) -> Callable[[int], torch.Tensor]:
        """Return a forward pass by the implementation that is set."""
        impl = self.impl
        return lambda i: run(self.layer(i).call(False, impl, config))[0]

    def compile(self, config: MixtureOfExpertsConfig) -> None:
        """Compile the kernels of a forward pass."""
        call = self.layers[0].call(False, self.impl, config)
        launches = (
            decode.launches(call, torch.empty_like(call.x))
            if self.impl == "decode"
            else forward_launches(call)
        )
        for step in launches:
            step.compile()

    # Ways

    def ours(self, which: Candidates) -> tuple[list[Way], float]:
        """Return those implementations and configurations that run and are right, and their largest
        relative error.
        """
        from triton.runtime.errors import OutOfResources

        ways, errors = [], [0.0]
        for name, (impl, config) in which.items():
            self.impl = impl
            compilation = functools.partial(self.compile, config)
            if not self.all_compile([compilation], [config])[0]:
                continue
            try:
                errors.append(self.check(config))
            # Every rank refuses alike; a lack of resources is found before anything is launched.
            except (InterlaceError, OutOfResources) as error:
                self.leave_out(config, error)
                continue
            ways.append(Way(name, "ours", self.tuned_call(config), impl if name == impl else ""))
        return ways, max(errors)

    def pairs(self) -> list[Way]:
        """Return the stock forms, each checked.

        Raises:
            InterlaceError: A result is wrong.
        """
        forms: dict[str, Callable[[int], torch.Tensor]] = {
            f"{PRODUCT} + NCCL all-to-all of known splits": (
                lambda i: self.layer(i).unfused_forward()
            ),
            f"{PRODUCT} + NCCL all-gather and reduce-scatter": (
                lambda i: run(self.layer(i).call(False, "unfused"))[0]
            ),
        }
        for name, call in forms.items():
            errors = [relative_error(call(i), self.expected(i)) for i in range(self.operand_sets)]
            self.accept(errors, name)
        impls = ("", "unfused")
        return [
            Way(name, "pair", call, impl)
            for (name, call), impl in zip(forms.items(), impls, strict=True)
        ]

    def alone(self) -> list[Way]:
        """Return the grouped products and the collectives without each other."""
        kept = [layer.keep() for layer in self.layers]
        sent = [
            layer.x[routed.order // self.shape.top_k]
            for layer, routed in zip(self.layers, kept, strict=True)
        ]

        def products(i: int) -> None:
            layer, routed = self.layer(i), kept[i % self.operand_sets]
            layer.grouped(routed.rows, layer.in_first)
            layer.grouped(layer.activate(routed.both), layer.out_first)

        def exchanges(i: int) -> None:
            layer, routed = self.layer(i), kept[i % self.operand_sets]
            layer.exchange(sent[i % self.operand_sets], back=False)
            layer.exchange(routed.rows, back=True)

        return [
            Way(f"both {PRODUCT} alone", "compute", products),
            Way("both NCCL all-to-alls alone", "communication", exchanges),
        ]

    def work(self) -> tuple[LeastWork, int]:
        """Return the mean over layers of the least work and of the bytes of weights, on the rank
        that has most of each.
        """
        of_layers = [
            self.maxima([*least_work(layer, "forward"), layer.weight_bytes])
            for layer in self.layers
        ]
        *least, weights = (int(statistics.mean(values)) for values in zip(*of_layers, strict=True))
        return LeastWork(*least), weights


def bench(
    shape: ExpertsShape,
    config: MixtureOfExpertsConfig | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Check, time and profile one shape in every way. Collective; times are the same on every rank.

    Args:
        config: The only configuration of our kernels to time; default: several.

    Raises:
        InterlaceError: A result is wrong; nothing is timed then.
    """
    case = TimedDecoding(shape, group)
    known = candidates(case.layers[0])
    if config is not None:
        known = {impl: (impl, config) for impl in ("fused", "decode")}
    ours, error = case.ours(known)
    ways = [*ours, *case.pairs(), *case.alone()]
    times = case.time(ways)
    # All are timed before any is profiled: a profiler, once it has run, may slow down later calls.
    for way in ways:
        kernels = kernels_of(case.owner, *_graph_of(case, way.call))
        times[way.name]["kernels"] = [dataclasses.asdict(kernel) for kernel in kernels]
    work, weight_bytes = case.work()
    exchange_us = work.link_bytes / H200_NODE.link_bytes_per_s * 1e6
    case.owner.synchronize()
    return {
        "part": "decoding",
        "shape": f"{shape}, decoding",
        **case.header(known["decode"][1], case.layers[0].auto, error),
        **work.entries(),
        "weight_bytes": weight_bytes,
        # Decoding cannot hide the exchange: no expert has anything to do before tokens arrive.
        "weights_us": round(weight_bytes / H200_NODE.memory_bytes_per_s * 1e6, 2),
        "exchange_us": round(exchange_us, 2),
        "layers": case.operand_sets,
        "times": times,
    }


AXES: dict[str, tuple[int, ...]] = {
    "block_m": (16, 32, 64, 128),
    "block_n": (64, 128, 256),
    "block_k": (64, 128),
    "num_stages": (2, 3, 4, 5),
    "num_warps": (4, 8),
    "push_programs": (16, 64),
}


def tune(shape: ExpertsShape, group: dist.ProcessGroup | None = None) -> MixtureOfExpertsConfig:
    """Return the best configuration of ``impl="decode"`` that was found.

    One setting is tuned at a time, once round. Collective; the same on every rank.

    Raises:
        BackendError: No configuration runs and is right.
    """
    case = TimedDecoding(shape, group)
    start = case.layers[0].default_config("decode")
    return case.fastest(case.tune([constant(start), *changes_along(AXES)]))


def _graph_of(case: TimedDecoding, call: Step) -> tuple[Step, int, int]:
    """Return a step that replays a graph of one call per layer, its runs, and its calls per run."""
    calls = case.operand_sets

    def enqueue() -> None:
        for i in range(calls):
            call(i)

    if case.owner.backend == "cpu":
        return lambda _: enqueue(), 1, calls
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        enqueue()
    return lambda _: graph.replay(), _REPLAYS, calls
