"""A training step of a mixture-of-experts Transformer with expert parallelism.

Every rank has the attention and the gate (data-parallel), and a part of each layer's experts.
Tokens travel to their experts (dispatch), and the experts' results travel back (combine).

Rows of a rank:

- ``compute``: attention, gate, experts, their gradients, optimizer;
- ``all_to_all``: dispatch and combine, and those of the gradients; the next kernel waits for each;
- ``gradients``: data-parallel all-reduces of everything but experts, during the backward pass.

Fused in the forward pass, the second expert product sends each tile of rows to the tokens' owners
(``gemm_all_to_all``), and the first one starts on the tokens that have arrived. Fused in both
passes, the gradients' products do so as well.

Routing is even: every expert gets an equal number of tokens, ``top_k`` times the batch in all.
Uneven routing lengthens both forms.
"""

from __future__ import annotations

from interlace.errors import ConfigError
from interlace_sim.machine import Given
from interlace_sim.topology import Topology
from interlace_sim.work import COMPUTE, Collective, Consuming, Fused, Kernel, Task, matrix_product
from interlace_sim.workloads.common import Choices, Step, Tasks, Workload


class Moe(Workload):
    """A mixture-of-experts model and its training; presets lie in ``presets/moe``."""

    hidden: Given
    layers: Given
    """Layers with experts; layers without experts are left out."""
    heads: Given
    key_value_heads: Given
    expert_ffn: Given
    """Inner size of an expert."""
    gated_ffn: bool = False
    experts: Given
    top_k: Given
    """Experts per token."""
    sequence: Given
    batch_per_rank: Given
    """Sequences per rank."""
    itemsize: Given
    gradient_bytes: Given

    def step(self, topology: Topology, choices: Choices) -> Step:
        experts, ranks = int(self.experts.value), topology.ranks
        if experts % ranks and ranks % experts:
            raise ConfigError(
                f"experts must divide evenly over the ranks, or ranks over experts; got {experts} "
                f"and {ranks}. Change the nodes."
            )
        if self.top_k.value > experts:
            raise ConfigError(
                f"top_k must be at most experts; got {self.top_k.value:g} and {experts}."
            )
        groups: list[tuple[int, ...]] | None = None
        # More ranks than experts: each group has every expert once.
        if experts < ranks:
            topology, groups = topology.split((experts, ranks // experts))
        tasks = _tasks(self, ranks, groups, choices)
        return Step(f"{self.name}, fused: {choices.fused}", topology, tasks)


class _Layers:
    """Builder of the tasks of one layer, forward and backward."""

    def __init__(
        self,
        out: Tasks,
        model: Moe,
        ranks: int,
        axes: tuple[int, ...] | None,
        choices: Choices,
    ) -> None:
        self.out, self.model, self.ranks = out, model, ranks
        self.algorithm, self.slices = choices.all_to_all, choices.slices or 4
        self.tokens = int(model.sequence.value * model.batch_per_rank.value)
        self.hidden, self.itemsize = int(model.hidden.value), int(model.itemsize.value)
        self.kv = int(model.hidden.value * model.key_value_heads.value / model.heads.value)
        self.routed = int(self.tokens * model.top_k.value)
        self.exchanged = self.routed * self.hidden * self.itemsize
        self.first = int(model.expert_ffn.value) * (2 if model.gated_ffn else 1)
        # Experts per rank; with more ranks than experts a rank has one.
        self.local = max(1, int(model.experts.value) // ranks)
        self.axes = axes
        self.last: str | None = None

    def dense_weights(self) -> int:
        return self.hidden * (2 * self.hidden + 2 * self.kv) + self.hidden * int(
            self.model.experts.value
        )

    def expert_weights(self) -> int:
        return self.local * self.hidden * (self.first + int(self.model.expert_ffn.value))

    def _dense(self, name: str, factor: float) -> None:
        qkv = matrix_product(self.tokens, self.hidden + 2 * self.kv, self.hidden, self.itemsize)
        output = matrix_product(self.tokens, self.hidden, self.hidden, self.itemsize)
        pairs = self.model.batch_per_rank.value * self.model.sequence.value**2 / 2
        attention = (
            4 * pairs * self.hidden,
            self.itemsize * self.tokens * (2 * self.hidden + 2 * self.kv),
        )
        # Backward, attention computes 2.5 times as much: four products for the forward pass's two,
        # and the scores once more, which the forward pass does not keep.
        share = 2.5 if factor > 1 else 1
        flops = factor * (qkv.flops + output.flops) + share * attention[0]
        moved = factor * (qkv.memory_bytes + output.memory_bytes) + share * attention[1]
        self.last = self.out.kernel(name, flops, moved, self.last)

    def _expert(self, columns: int, inner: int) -> Kernel:
        """Return the products of all experts of this rank, each with its own weights."""
        tokens = self.routed / self.local
        return matrix_product(tokens, columns, inner, self.itemsize, products=self.local)

    def _weight_gradient(self, rows: int, columns: int) -> Kernel:
        """Return the products of the gradients of all experts' weights, whose K are the tokens."""
        tokens = self.routed / self.local
        return matrix_product(rows, columns, tokens, self.itemsize, products=self.local)

    def _arriving(self, name: str, kernel: Kernel, fused: bool, stage: str) -> None:
        """Add an exchange of tokens and the product that computes on them."""
        if fused and self.ranks > 1:
            work = Consuming(kernel, "all_to_all", self.exchanged, self.axes, self.slices)
            self.last = self.out.add(f"{name} {stage} All-to-All + GEMM", COMPUTE, work, self.last)
            return
        self._exchange(f"{name} {stage} All-to-All")
        self.last = self.out.add(f"{name} {stage} GEMM", COMPUTE, kernel, self.last)

    def _leaving(self, name: str, kernel: Kernel, fused: bool, stage: str) -> None:
        """Add a product and the exchange of its rows."""
        if fused and self.ranks > 1:
            work = Fused(kernel, "all_to_all", self.exchanged, self.axes, self.slices)
            self.last = self.out.add(f"{name} {stage} GEMM + All-to-All", COMPUTE, work, self.last)
            return
        self.last = self.out.add(f"{name} {stage} GEMM", COMPUTE, kernel, self.last)
        self._exchange(f"{name} {stage} All-to-All")

    def _exchange(self, name: str) -> None:
        if self.ranks > 1:
            self.last = self.out.add(
                name,
                "all_to_all",
                Collective("all_to_all", self.algorithm, self.exchanged, self.axes),
                self.last,
            )

    def forward(self, name: str, fused: bool) -> None:
        ffn = int(self.model.expert_ffn.value)
        self._dense(f"{name} attention", 1)
        self._arriving(name, self._expert(self.first, self.hidden), fused, "dispatch")
        self._leaving(name, self._expert(self.hidden, ffn), fused, "combine")

    def backward(self, name: str, fused: bool) -> None:
        ffn = int(self.model.expert_ffn.value)
        self._arriving(name, self._expert(ffn, self.hidden), fused, "combine backward")
        self.last = self.out.add(
            f"{name} second weight gradient",
            COMPUTE,
            self._weight_gradient(self.hidden, ffn),
            self.last,
        )
        self._leaving(name, self._expert(self.hidden, self.first), fused, "dispatch backward")
        self.last = self.out.add(
            f"{name} first weight gradient",
            COMPUTE,
            self._weight_gradient(self.first, self.hidden),
            self.last,
        )
        self._dense(f"{name} attention backward", 2)


def _tasks(
    model: Moe, ranks: int, groups: list[tuple[int, ...]] | None, choices: Choices
) -> list[Task]:
    """List the tasks of the step on one rank.

    Args:
        model: The model.
        ranks: Number of ranks.
        groups: Coordinates of the ranks that split the experts between them, and coordinates of
            the ranks that have copies of each other's experts; None if all ranks split them.
        choices: The run's.
    """
    fused = choices.fused
    out = Tasks()
    stage = _Layers(out, model, ranks, groups[0] if groups else None, choices)
    layers = int(model.layers.value)
    gradients: list[str] = []
    for layer in range(layers):
        stage.forward(f"l{layer}", fused != "none")
    for layer in reversed(range(layers)):
        stage.backward(f"l{layer}", fused == "both")
        if ranks > 1:
            size = round(stage.dense_weights() * model.gradient_bytes.value)
            gradients.append(
                out.add(
                    f"l{layer} gradients",
                    "gradients",
                    Collective("all_reduce", choices.all_reduce, size),
                    stage.last,
                )
            )
        # Ranks with copies of one expert sum its gradients, the others have nothing to sum.
        if groups is not None:
            size = round(stage.expert_weights() * model.gradient_bytes.value)
            work = Collective("all_reduce", choices.all_reduce, size, groups[1])
            gradients.append(out.add(f"l{layer} expert gradients", "gradients", work, stage.last))
    weights = layers * (stage.dense_weights() + stage.expert_weights())
    out.adam(weights, model.gradient_bytes.value, model.itemsize.value, stage.last, *gradients)
    return out.tasks
