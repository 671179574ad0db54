"""The declaration of ``embedding_all_to_all``."""

from __future__ import annotations

from typing import Any

import torch

from interlace.errors import ArgumentError
from interlace.gemm.between_nodes import known_network
from interlace.operators.embedding_all_to_all import launch, network_choice
from interlace.operators.embedding_all_to_all.config import EmbeddingAllToAllConfig
from interlace.operators.embedding_all_to_all.layout import Layout
from interlace.operators.embedding_all_to_all.validate import batch_of, validate
from interlace.registry import Implementation, Operator, operator
from interlace.units import ceil_div, next_power_of_2


@operator
class EmbeddingAllToAll(Operator):
    """``all_to_all(embedding_bag(tables))``: pooled rows of sharded tables for a rank's samples."""

    name = "embedding_all_to_all"
    collective = "all_to_all"
    sizes = ("tables", "width", "batch", "pooling_factor")
    config_type = EmbeddingAllToAllConfig
    command_module = "interlace.cli.bench_embedding_all_to_all"
    implementations = (
        Implementation("fused", "one kernel that sends rows as it pools them", spans_nodes=True),
        Implementation(
            "pooled", "the kernel without peers, then all_to_all_single", spans_nodes=True
        ),
        Implementation("unfused", "F.embedding_bag, then all_to_all_single", spans_nodes=True),
    )

    def choose(self, **call: Any) -> Any:
        """Return what ``impl="auto"`` runs for a call of these sizes, and why."""
        return launch.choose(**call)

    def argument_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the tensors and the options that :meth:`explain` takes, by name."""
        return ("weights", "indices", "offsets"), ()

    def explain(  # type: ignore[override]
        self,
        weights: list[torch.Tensor],
        indices: torch.Tensor,
        offsets: torch.Tensor,
        *,
        world_size: int,
        nodes: int = 1,
    ) -> tuple[str, str, str]:
        """Return a description of a call, what ``impl="auto"`` runs, and the reason."""
        validate(weights, indices, offsets, None, "sum", None, "dense")
        if not weights:
            raise ArgumentError("explain: weights must have a table; got none.")
        batch = batch_of(len(weights), offsets, None)
        width, dtype = max(weight.shape[1] for weight in weights), weights[0].dtype
        # Rounded as in a call, so that this is the entry of the table that a call takes.
        lookups = ceil_div(indices.shape[0], max(1, len(weights) * batch))
        pooling_factor = next_power_of_2(lookups)
        tables = "1 table" if len(weights) == 1 else f"{len(weights)} tables"
        name = str(dtype).removeprefix("torch.")
        call = (
            f"{self.name} of {tables} per rank, at most {width} wide, {name}, batch {batch}, about "
            f"{pooling_factor} lookups per bag"
        )
        choice = self.choose(
            tables=len(weights),
            width=width,
            batch=batch,
            pooling_factor=pooling_factor,
            dtype=dtype,
            world_size=world_size,
            device=indices.device,
        )
        if nodes > 1:
            # Other ranks' tables are not known here; they are taken to be like this rank's.
            own = tuple(weight.shape[1] for weight in weights)
            sizes = network_choice.LookupSizes(
                Layout((own,) * world_size, batch), lookups, dtype.itemsize, dtype.itemsize, nodes
            )
            times = network_choice.times_between_nodes(sizes, indices.device)
            is_measured = known_network(indices.device) is not None
            reason = choice.between(self, nodes, times if is_measured else None).reason
            if times is not None and not is_measured:
                reason += (
                    f"; over a guessed one, {times.network}, predicted: {times}; slices must be "
                    f"{times.margin:.0%} below"
                )
            impl = network_choice.plan_by(times).impl
            if impl == "fused":
                count = network_choice.gradient_slices(sizes, indices.device)
                reason += f"; gradients in {count} slice{'s' if count > 1 else ''}"
            return call, impl, reason
        return call, f"fused ({choice.config})", choice.reason
