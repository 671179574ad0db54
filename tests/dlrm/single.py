"""The DLRM of the paper in float64, in one process, without ``interlace_dlrm``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from interlace_dlrm import Batch


class Reference:
    """A DLRM on the full batch, with its parameters in float64 and its updates written out.

    Args:
        dense: ``state_dict`` of the model's ``dense``.
        tables: Whole, by name, in the order of the model.
        mode: Of all tables.
    """

    def __init__(
        self,
        dense: Mapping[str, torch.Tensor],
        tables: Mapping[str, torch.Tensor],
        mode: str = "sum",
    ) -> None:
        self.dense = {
            name: value.detach().double().requires_grad_() for name, value in dense.items()
        }
        self.tables = {
            name: value.detach().double().requires_grad_() for name, value in tables.items()
        }
        self.states = {
            name: torch.zeros(len(value), dtype=torch.float64) for name, value in tables.items()
        }
        self.mode = mode

    def logits(self, batch: Batch, lookups: int = 1) -> torch.Tensor:
        samples, count = len(batch.labels), len(self.tables)
        x = self._mlp("bottom", batch.dense.double())
        vectors = [x]
        for t, table in enumerate(self.tables.values()):
            if batch.offsets is None:
                bags = batch.indices.view(count, samples, lookups)[t]
                rows = table[bags]
                vectors.append(rows.sum(1) if self.mode == "sum" else rows.mean(1))
            else:
                ends = batch.offsets[t * samples : (t + 1) * samples + 1]
                indices = batch.indices[ends[0] : ends[-1]]
                vectors.append(
                    F.embedding_bag(
                        indices, table, ends - ends[0], mode=self.mode, include_last_offset=True
                    )
                )
        pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(1, count + 1) for j in range(i)]
        return self._mlp("top", torch.cat([x, torch.stack(pairs, 1)], 1)).squeeze(1)

    def step(
        self,
        batch: Batch,
        rate: float,
        dense_rate: float,
        *,
        epsilon: float | None,
        lookups: int = 1,
    ) -> float:
        """Do a step: SGD for the MLPs; for the tables row-wise Adagrad, or SGD if ``epsilon`` is
        None. The result is the mean loss.
        """
        loss = F.binary_cross_entropy_with_logits(
            self.logits(batch, lookups), batch.labels.double()
        )
        leaves = [*self.dense.values(), *self.tables.values()]
        gradients = torch.autograd.grad(loss, leaves)
        with torch.no_grad():
            for value, gradient in zip(self.dense.values(), gradients, strict=False):
                value -= dense_rate * gradient
            for (name, value), gradient in zip(
                self.tables.items(), gradients[len(self.dense) :], strict=True
            ):
                if epsilon is None:
                    value -= rate * gradient
                else:
                    self.states[name] += gradient.square().mean(1)
                    value -= rate * gradient / (self.states[name].sqrt() + epsilon)[:, None]
        return float(loss.detach())

    def _mlp(self, part: str, x: torch.Tensor) -> torch.Tensor:
        layers = sorted({int(name.split(".")[1]) for name in self.dense if name.startswith(part)})
        for i, layer in enumerate(layers):
            x = F.linear(
                x, self.dense[f"{part}.{layer}.weight"], self.dense[f"{part}.{layer}.bias"]
            )
            x = x.relu() if i < len(layers) - 1 else x
        return x


def whole_batch(parts: list[Batch], tables: int) -> Batch:
    """Merge all ranks' parts of a global batch."""
    lengths, bags = [], []
    for part in parts:
        samples = len(part.labels)
        ends = (
            part.offsets
            if part.offsets is not None
            else torch.arange(tables * samples + 1) * (len(part.indices) // (tables * samples))
        )
        bags.append([part.indices[a:b] for a, b in itertools.pairwise(ends.tolist())])
        lengths.append(samples)
    ordered = [
        bag
        for t in range(tables)
        for part, n in zip(bags, lengths, strict=True)
        for bag in part[t * n : (t + 1) * n]
    ]
    offsets = torch.tensor([0, *map(len, ordered)]).cumsum(0)
    return Batch(
        torch.cat([part.dense for part in parts]),
        torch.cat(ordered),
        offsets,
        torch.cat([part.labels for part in parts]),
        torch.cat([part.valid for part in parts]),
    )
