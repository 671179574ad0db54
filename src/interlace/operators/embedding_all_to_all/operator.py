"""The declaration of ``embedding_all_to_all``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import torch

from interlace.comm.groups.reservation import Reservation
from interlace.comm.runtime import ranges
from interlace.errors import ArgumentError
from interlace.gemm.between_nodes import known_network
from interlace.mapped.meeting import compare_once
from interlace.operators.embedding_all_to_all import exchanged, fused, network_choice
from interlace.operators.embedding_all_to_all.backward import BACKWARD, Target
from interlace.operators.embedding_all_to_all.backward import reservation as reserve_backward
from interlace.operators.embedding_all_to_all.call import EmbeddingCall
from interlace.operators.embedding_all_to_all.config import EmbeddingAllToAllConfig, choose
from interlace.operators.embedding_all_to_all.layout import Layout, SizedLookups
from interlace.operators.embedding_all_to_all.lookups import Sorted, sort_lookups
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
    command_module = "interlace.cli.scripts"
    implementations = (
        Implementation(
            "fused",
            "one kernel that sends rows as it pools them",
            fused.run,
            fused.refusal,
            spans_nodes=True,
            reservation=fused.reservation,
            backward=fused.run_backward,
        ),
        Implementation(
            "pooled",
            "the kernel without peers, then all_to_all_single",
            exchanged.run_pooled,
            spans_nodes=True,
            reservation=lambda _: Reservation(),
            backward=exchanged.run_pooled_backward,
        ),
        Implementation(
            "unfused",
            "F.embedding_bag, then all_to_all_single",
            exchanged.run_unfused,
            spans_nodes=True,
            reservation=lambda _: Reservation(),
            backward=exchanged.run_unfused_backward,
        ),
    )

    def choose(self, **call: Any) -> Any:
        """Return what ``impl="auto"`` runs for a call of these sizes, and why."""
        return choose(**call)

    def run(self, call: EmbeddingCall) -> torch.Tensor:
        """Run the forward pass; return ``[samples of this rank, columns]``. Collective."""
        if call.is_empty:
            return call.new_output()
        implementation = self._chosen(call, fused.forward_reservation)
        self._compare_batches(call, self.name, implementation)
        with self._range(self.name, implementation, call):
            y: torch.Tensor = call.group.perform(implementation.run(call), call.known)
        return y

    def run_backward(
        self, call: EmbeddingCall, grad: torch.Tensor, target: Target
    ) -> Sorted | None:
        """Run the backward pass, which writes ``target``. Collective.

        Args:
            call: The backward pass of a call.
            grad: Gradients of this rank's samples, ``[samples of this rank, columns]``.
            target: The memory to write.

        Returns:
            This rank's lookups by row; None where they were not needed.
        """
        # Ranks have agreed on an empty batch, too: their peers would wait for them otherwise.
        if call.is_empty:
            return sort_lookups(call, target.rows) if target.by_segment else None
        implementation = self._chosen(call, reserve_backward)
        assert implementation.backward is not None
        self._compare_batches(call, BACKWARD, implementation)
        with self._range(BACKWARD, implementation, call):
            outcome = implementation.backward(call, grad, target)
            lookups: Sorted | None = call.group.perform(outcome, call.known)
        return lookups

    def _chosen(
        self, call: EmbeddingCall, reserve: Callable[[Layout, int], Reservation]
    ) -> Implementation:
        """Return the implementation that runs: the one that was asked for, or that of ``"auto"``.

        Collective in the first call of a kind by ``"auto"`` between nodes.

        Args:
            call: The pass.
            reserve: Returns the symmetric memory of the kernels' pass on one node.

        Raises:
            ArgumentError: The implementation was asked for, and cannot run such a call.
        """
        if call.impl in self.choosers:
            if call.group.spans_nodes:
                return self.implementation(call.plan.impl)
            lacks = call.group.shortage(lambda: reserve(call.layout, call.dtype.itemsize))
            return self.implementation("fused" if lacks is None else "pooled")
        implementation = self.implementation(call.impl)
        refusal = implementation.refusal(call)
        if refusal is not None:
            raise ArgumentError(
                f"{self.name}: impl={call.impl!r} must have {refusal}. "
                f"{self.advice(call, call.group.nodes)}"
            )
        return implementation

    def _compare_batches(
        self, call: EmbeddingCall, name: str, implementation: Implementation
    ) -> None:
        """Let ranks compare their batches where the stock all-to-all, which others than the kernel
        call, would not.
        """
        if implementation.name != "fused":
            compare_once(call.group, call.family, name, call.layout.batch)

    def _range(
        self, name: str, implementation: Implementation, call: EmbeddingCall
    ) -> AbstractContextManager[object]:
        """Return the range of a pass for profilers."""
        operands = (*call.weights, call.indices)
        return ranges.around(name, implementation.name, operands, call.link_bytes)

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
        lacking: Mapping[str, str] = MappingProxyType({}),
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
            own_widths = tuple(weight.shape[1] for weight in weights)
            sizes = network_choice.LookupSizes(
                Layout((own_widths,) * world_size, batch),
                lookups,
                dtype.itemsize,
                dtype.itemsize,
                nodes,
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
        if "fused" in lacking:
            return call, "pooled", f"fused needs {lacking['fused']}; {choice.reason}"
        return call, f"fused ({choice.config})", choice.reason

    def sized(  # type: ignore[override]
        self,
        weights: list[torch.Tensor],
        indices: torch.Tensor,
        offsets: torch.Tensor,
        *,
        world_size: int,
    ) -> SizedLookups | None:
        """Return the sizes of a call if all ranks' tables are like this rank's, and the output has
        their dtype; None without tables.
        """
        validate(weights, indices, offsets, None, "sum", None, "dense")
        if not weights:
            return None
        widths = tuple(weight.shape[1] for weight in weights)
        layout = Layout((widths,) * world_size, batch_of(len(weights), offsets, None))
        has_backward = any(weight.requires_grad for weight in weights)
        return SizedLookups(layout, weights[0].dtype.itemsize, has_backward)
