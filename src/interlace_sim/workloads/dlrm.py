"""A training step of a deep-learning recommendation model.

Embedding tables are spread over the ranks (each looks up its tables for the whole batch),
everything else is data-parallel.

Rows of a rank:

- ``compute``: embedding lookup, bottom MLP, interaction, top MLP, their gradients, embedding
  update, optimizer;
- ``all_to_all``: pooled rows to the owners of the samples; in the backward pass their gradients
  back;
- ``all_reduce``: the MLPs' gradients, bucket by bucket;
- ``copy engine``: the next batch from the host (``prefetch``).

Overlaps are those of common trainers: the bottom MLP runs while the pooled rows travel, and its
backward pass while their gradients do; all-reduces start when their bucket is full, and the
optimizer waits for them; the next batch is copied at any time. A layer's weight gradient is
computed before its input gradient.

Fused in the forward pass, the lookup sends each slice of pooled rows as soon as it is complete, to
its final address, so nothing is unpacked. Fused in both passes, the interaction's backward kernel
sends gradients as it computes them, and the embedding update starts on those that have arrived.
"""

from __future__ import annotations

import itertools
from typing import Literal

from interlace_sim.machine import Given
from interlace_sim.operators import embedding_all_to_all
from interlace_sim.topology import Topology
from interlace_sim.work import COMPUTE, COPY, Collective, Consuming, Fused, HostCopy, Kernel, Task
from interlace_sim.workloads.common import (
    Choices,
    GivenLayers,
    Step,
    Tasks,
    Workload,
)


class Dlrm(Workload):
    """A recommendation model and its training; presets lie in ``presets/dlrm``."""

    batch_per_rank: Given
    """Samples per rank; the global batch is this times the number of ranks."""
    tables: Given
    """Tables of the model, spread evenly over the ranks."""
    embedding_dim: Given
    pooling_factor: Given
    """Rows that are summed per sample and table on average."""
    embedding_bytes: Given
    """Bytes of an element of a table."""
    exchange_bytes: Given
    """Bytes of an element that travels."""
    index_bytes: Given
    bottom_mlp: GivenLayers
    """Input size, then each layer's output size."""
    top_mlp: GivenLayers
    mlp_bytes: Given
    """Bytes of an element of weights, activations and gradients."""
    bucket_bytes: Given
    """Bytes of gradients that are all-reduced at once."""
    interaction: Literal["dot", "concatenate"] = "dot"
    unpack: bool = False
    """Whether a kernel that orders its output follows the unfused all-to-all."""
    prefetch: bool = False

    @classmethod
    def fractions(cls) -> tuple[str, ...]:
        return ("pooling_factor",)

    def step(self, topology: Topology, choices: Choices) -> Step:
        name = f"DLRM {self.name}, fused: {choices.fused}"
        return Step(name, topology, _tasks(self, choices))


def _tasks(model: Dlrm, choices: Choices) -> list[Task]:
    fused, slices = choices.fused, choices.slices or 4
    out = Tasks()
    samples, dim = model.batch_per_rank.value, model.embedding_dim.value
    # A rank has tables / ranks of the tables, and looks them up for samples x ranks samples.
    bags = model.tables.value * samples
    exchanged = round(bags * dim * model.exchange_bytes.value)
    rows_bytes = bags * model.pooling_factor.value * dim * model.embedding_bytes.value
    index_bytes = bags * model.pooling_factor.value * model.index_bytes.value

    if model.prefetch:
        out.add(
            "copy of the next batch",
            COPY,
            HostCopy(round(index_bytes + 4 * samples * model.bottom_mlp.value[0])),
        )
    lookup = embedding_all_to_all(
        bags=bags,
        pooling_factor=model.pooling_factor.value,
        dim=int(dim),
        itemsize=int(model.embedding_bytes.value),
        exchange_itemsize=int(model.exchange_bytes.value),
        index_itemsize=int(model.index_bytes.value),
        algorithm=choices.all_to_all,
        unpack=model.unpack,
        slices=slices,
    )
    *before, features = lookup.tasks(fused != "none")
    unpacks = features.name == "unpack"
    out.tasks += [*before, *([] if unpacks else [features])]
    bottom = _mlp_forward(out, "bottom", model.bottom_mlp.value, samples, model.mlp_bytes.value)
    # The unpacking waits for the rows, so the bottom MLP comes before it in the compute row.
    if unpacks:
        out.tasks.append(features)
    # The dot interaction multiplies all pairs of the embedding vectors and the bottom MLP's output.
    pairs_flops = (
        samples * (model.tables.value + 1) ** 2 * dim if model.interaction == "dot" else 0.0
    )
    pairs_bytes = 2 * samples * (model.tables.value + 1) * dim * model.mlp_bytes.value
    out.kernel("interaction", pairs_flops, pairs_bytes, bottom, features.name)
    _mlp_forward(out, "top", model.top_mlp.value, samples, model.mlp_bytes.value)

    # Layers nearest the output come first in the backward pass, and fill the first bucket.
    reducer = _Reducer(out, model.bucket_bytes.value, choices.all_reduce)
    _mlp_backward(out, reducer, "top", model.top_mlp.value, samples, model.mlp_bytes.value)
    gradient = Kernel(2 * pairs_flops, 2 * pairs_bytes)
    # Every looked-up row is read and written; the gradients are read once.
    update = Kernel(
        2 * bags * model.pooling_factor.value * dim, 2 * rows_bytes + index_bytes + exchanged
    )
    sending, consuming = (
        "interaction backward + gradient All-to-All",
        "gradient All-to-All + embedding update",
    )
    exchanged_gradient: str | None = None
    if fused == "both":
        out.add(
            sending, COMPUTE, Fused(gradient, "all_to_all", exchanged, slices=slices, waits=False)
        )
    else:
        sent = out.add("interaction backward", COMPUTE, gradient)
        exchanged_gradient = out.add(
            "gradient All-to-All",
            "all_to_all",
            Collective("all_to_all", choices.all_to_all, exchanged),
            sent,
        )
    _mlp_backward(out, reducer, "bottom", model.bottom_mlp.value, samples, model.mlp_bytes.value)
    reducer.flush()
    if fused == "both":
        out.add(
            consuming,
            COMPUTE,
            Consuming(update, "all_to_all", exchanged, slices=slices, sent_by=sending),
        )
    else:
        out.add("embedding update", COMPUTE, update, exchanged_gradient)
    weights = sum(
        a * b
        for sizes in (model.bottom_mlp.value, model.top_mlp.value)
        for a, b in itertools.pairwise(sizes)
    )
    out.kernel("optimizer", 2 * weights, 3 * weights * model.mlp_bytes.value, *reducer.names)
    return out.tasks


def _mlp_forward(out: Tasks, name: str, sizes: list[int], samples: float, itemsize: float) -> str:
    last = ""
    for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        last = out.product(f"{name} {layer}", samples, fan_out, fan_in, itemsize)
    return last


def _mlp_backward(
    out: Tasks, reducer: _Reducer, name: str, sizes: list[int], samples: float, itemsize: float
) -> None:
    for layer in reversed(range(len(sizes) - 1)):
        fan_in, fan_out = sizes[layer], sizes[layer + 1]
        ready = out.product(f"{name} {layer} weight gradient", fan_out, fan_in, samples, itemsize)
        reducer.add(fan_in * fan_out * itemsize, ready)
        out.product(f"{name} {layer} input gradient", samples, fan_in, fan_out, itemsize)


class _Reducer:
    """A collector of gradients into buckets, which all-reduces full buckets."""

    def __init__(self, out: Tasks, bucket_bytes: float, algorithm: str) -> None:
        self.out, self.bucket_bytes, self.algorithm = out, bucket_bytes, algorithm
        # Bytes of gradients that wait for their bucket to fill.
        self.held = 0.0
        self.last: str | None = None
        self.names: list[str] = []

    def add(self, size: float, ready: str) -> None:
        self.held += size
        self.last = ready
        if self.held >= self.bucket_bytes:
            self.flush()

    def flush(self) -> None:
        if self.held:
            work = Collective("all_reduce", self.algorithm, round(self.held))
            self.names.append(
                self.out.add(f"AllReduce {len(self.names)}", "all_reduce", work, self.last)
            )
            self.held = 0.0
