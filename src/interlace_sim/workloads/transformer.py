"""A training step of a Transformer with tensor, pipeline and data parallelism.

Ranks are numbered tensor first, then pipeline, then data. In each layer the attention's output
product and the second feed-forward product are split along K, so each ends in an all-reduce over
the tensor group, in both passes (Shoeybi et al., arXiv:1909.08053). Their fused form is
``gemm_all_reduce``.

Rows of a rank:

- ``compute``: products and attention of one pipeline stage, microbatch after microbatch; optimizer;
- ``all_reduce``: tensor-parallel sums; the next kernel waits for each;
- ``gradients``: data-parallel all-reduces during the last backward pass; the optimizer waits for
  them;
- ``copy engine``: activations to the next stage and back; in the steady state no task waits for
  them.

Stages are alike, so one is simulated in its steady state. The fill and drain of a
one-forward-one-backward schedule are added: ``(pipeline - 1)`` times a microbatch's forward and
backward pass and both its messages (Narayanan et al., arXiv:2104.04473).
"""

from __future__ import annotations

import functools

from interlace.errors import ConfigError
from interlace_sim.machine import Given
from interlace_sim.operators import gemm_all_reduce
from interlace_sim.results import Result
from interlace_sim.topology import Topology
from interlace_sim.work import COPY, Collective, Message
from interlace_sim.workloads.common import Choices, Step, Tasks, Workload


class Transformer(Workload):
    """A dense Transformer and its training; presets lie in ``presets/transformer``."""

    hidden: Given
    layers: Given
    heads: Given
    key_value_heads: Given
    ffn: Given
    """Inner size of the feed-forward layers."""
    gated_ffn: bool = False
    """Whether there are two first products instead of one (SwiGLU)."""
    vocabulary: Given
    """Rows of the embedding and columns of the head, which no task computes."""
    sequence: Given
    microbatch: Given
    """Sequences that pass the pipeline together."""
    microbatches: Given
    """Microbatches of one data-parallel rank in a step."""
    itemsize: Given
    """Bytes of an element of weights and activations."""
    gradient_bytes: Given
    """Bytes of an element of the gradients that are all-reduced."""

    def step(self, topology: Topology, choices: Choices) -> Step:
        """List the tasks of the step on one rank of one stage.

        Ranks outside a tensor and pipeline group are data-parallel.

        Raises:
            ConfigError: the sizes do not divide, or groups would cut a ring.
        """
        tensor, pipeline = choices.tensor, choices.pipeline
        data = self._data_parallel(topology.ranks, tensor, pipeline)
        topology, groups = topology.split((tensor, pipeline, data))
        out = Tasks()
        stage = _Stage(out, self, groups[0], choices)
        layers = int(self.layers.value) // pipeline
        # Tensor-parallel ranks each send a part of the activations.
        activations = Message(
            groups[1], round(stage.tokens * self.hidden.value * self.itemsize.value / tensor)
        )
        gradients: list[str] = []
        last = int(self.microbatches.value) - 1
        for micro in range(last + 1):
            for layer in range(layers):
                stage.forward(f"m{micro} l{layer} ", choices.fused != "none")
            if pipeline > 1:
                out.add(f"m{micro} activations", COPY, activations, stage.last)
            for layer in reversed(range(layers)):
                stage.backward(f"m{micro} l{layer} ", choices.fused == "both")
                # Gradients accumulate over microbatches, and are summed over ranks once.
                if micro == last and data > 1:
                    size = round(stage.weights() * self.gradient_bytes.value)
                    work = Collective("all_reduce", choices.all_reduce, size, groups[2])
                    gradients.append(out.add(f"l{layer} gradients", "gradients", work, stage.last))
            if pipeline > 1:
                out.add(f"m{micro} gradients of activations", COPY, activations, stage.last)
        weights = stage.weights() * layers
        out.adam(weights, self.gradient_bytes.value, self.itemsize.value, stage.last, *gradients)
        name = (
            f"{self.name}, tensor {tensor}, pipeline {pipeline}, data {data}, "
            f"fused: {choices.fused}"
        )
        fill = functools.partial(_fill_and_drain, pipeline)
        return Step(name, topology, out.tasks, fill)

    def _data_parallel(self, ranks: int, tensor: int, pipeline: int) -> int:
        """Return the size of the data-parallel groups."""
        if tensor < 1 or pipeline < 1 or ranks % (tensor * pipeline):
            raise ConfigError(
                f"tensor x pipeline must divide the number of ranks; got {tensor} x {pipeline} for "
                f"{ranks}. Change one of them."
            )
        if self.layers.value % pipeline:
            raise ConfigError(
                "layers must divide evenly over the pipeline's stages; got "
                f"{self.layers.value:g} and {pipeline}. Change pipeline."
            )
        for name in ("heads", "ffn"):
            count = getattr(self, name).value
            if count % tensor:
                raise ConfigError(
                    f"{name} must divide evenly over the tensor group; got {count:g} and {tensor}. "
                    "Change tensor."
                )
        heads = self.key_value_heads.value
        if heads % tensor and tensor % heads:
            raise ConfigError(
                "key_value_heads must divide evenly over the tensor group, or the group over them; "
                f"got {heads:g} and {tensor}. Change tensor."
            )
        return ranks // (tensor * pipeline)


def _fill_and_drain(pipeline: int, result: Result) -> int:
    """Return the nanoseconds of a pipeline's fill and drain, from a stage in its steady state."""
    # The first microbatch is timed: the last one contends with the gradients' all-reduces.
    first = [task for task in result.tasks if task.name.startswith("m0 ")]
    work = [task for task in first if task.row != COPY]
    messages = sum(task.end_ns - task.start_ns for task in first if task.row == COPY)
    busy = max(task.end_ns for task in work) - min(task.start_ns for task in work)
    return (pipeline - 1) * (busy + messages)


class _Stage:
    """Builder of the tasks of a stage's layers on the tensor group's first rank."""

    def __init__(
        self,
        out: Tasks,
        model: Transformer,
        group: tuple[int, ...],
        choices: Choices,
    ) -> None:
        self.out, self.model, self.group, self.tensor = out, model, group, choices.tensor
        self.algorithm, self.slices = choices.all_reduce, choices.slices or 8
        self.tokens = int(model.microbatch.value * model.sequence.value)
        self.hidden, self.itemsize = int(model.hidden.value), int(model.itemsize.value)
        # Where ranks share a head of keys and values, each computes it.
        kv_heads = max(model.key_value_heads.value, self.tensor)
        self.kv = int(model.hidden.value * kv_heads / model.heads.value)
        self.first = int(model.ffn.value) * (2 if model.gated_ffn else 1)
        self.last: str | None = None

    def weights(self) -> float:
        """Count the weights of a layer on this rank."""
        h = self.hidden
        return (
            h * (h + 2 * self.kv) + h * h + h * self.first + h * self.model.ffn.value
        ) / self.tensor

    def _kernel(self, name: str, columns: float, inner: float) -> None:
        """Add a product of all tokens, in the forward pass or of an input gradient."""
        self.last = self.out.product(name, self.tokens, columns, inner, self.itemsize, self.last)

    def _weight_gradient(self, name: str, rows: float, columns: float) -> None:
        """Add the product of a weight's gradient, whose K are the tokens."""
        self.last = self.out.product(name, rows, columns, self.tokens, self.itemsize, self.last)

    def _reduced(self, prefix: str, inner: float, columns: int, fused: bool) -> None:
        """Add a product that ends in an all-reduce over the tensor group."""
        # A tensor group of one rank has nothing to sum.
        if self.tensor == 1:
            self._kernel(prefix + "GEMM", columns, inner)
            return
        operator = gemm_all_reduce(
            rows=self.tokens,
            columns=columns,
            inner=int(inner),
            itemsize=self.itemsize,
            world_size=self.tensor,
            axes=self.group,
            algorithm=self.algorithm,
            slices=self.slices,
        )
        tasks = operator.tasks(fused, prefix, (self.last,) if self.last else ())
        self.out.tasks += tasks
        self.last = tasks[-1].name

    def _attention(self, name: str, passes: float) -> None:
        """Add scores and values of a causal, memory-efficient attention.

        It computes half of all pairs, and moves only q, k, v and the output.
        """
        pairs = self.model.microbatch.value * self.model.sequence.value**2 / 2
        flops = passes * 2 * 2 * pairs * self.hidden / self.tensor
        moved = passes * self.itemsize * self.tokens * (2 * self.hidden + 2 * self.kv) / self.tensor
        self.last = self.out.kernel(name, flops, moved, self.last)

    def forward(self, prefix: str, fused: bool) -> None:
        t = self.tensor
        self._kernel(prefix + "QKV", (self.hidden + 2 * self.kv) / t, self.hidden)
        self._attention(prefix + "attention", 1)
        self._reduced(prefix + "output ", self.hidden / t, self.hidden, fused)
        self._kernel(prefix + "FC-1", self.first / t, self.hidden)
        self._reduced(prefix + "FC-2 ", self.model.ffn.value / t, self.hidden, fused)

    def backward(self, prefix: str, fused: bool) -> None:
        """Add the gradients of a layer's inputs and weights.

        The sums over the tensor group are those of the input gradients of FC-1 and QKV, whose
        inputs every rank of the group has in full (Shoeybi et al., arXiv:1909.08053, section 3).
        """
        t = self.tensor
        self._kernel(prefix + "FC-2 input gradient", self.model.ffn.value / t, self.hidden)
        self._weight_gradient(
            prefix + "FC-2 weight gradient", self.model.ffn.value / t, self.hidden
        )
        self._weight_gradient(prefix + "FC-1 weight gradient", self.first / t, self.hidden)
        self._reduced(prefix + "FC-1 input gradient ", self.first / t, self.hidden, fused)
        self._kernel(prefix + "output input gradient", self.hidden / t, self.hidden)
        self._weight_gradient(prefix + "output weight gradient", self.hidden / t, self.hidden)
        # Four products for the forward pass's two, and the scores once more.
        self._attention(prefix + "attention backward", 2.5)
        self._weight_gradient(
            prefix + "QKV weight gradient", (self.hidden + 2 * self.kv) / t, self.hidden
        )
        self._reduced(
            prefix + "QKV input gradient ", (self.hidden + 2 * self.kv) / t, self.hidden, fused
        )
