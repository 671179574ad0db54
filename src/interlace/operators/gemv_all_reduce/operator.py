"""The declaration of ``gemv_all_reduce``."""

from __future__ import annotations

from typing import Any

import torch

from interlace.gemm.between_nodes import known_network
from interlace.gemm.invariance import is_enabled
from interlace.operators.gemv_all_reduce import launch
from interlace.operators.gemv_all_reduce.config import GemvAllReduceConfig
from interlace.operators.gemv_all_reduce.validate import validate
from interlace.registry import BATCH_INVARIANT, Implementation, Operator, operator


@operator
class GemvAllReduce(Operator):
    """``all_reduce(x @ w.T) + bias`` of a few tokens: the linear layer of a decoding step."""

    computation = "gemv"
    collective = "all_reduce"
    sizes = ("tokens", "rows", "columns")
    config_type = GemvAllReduceConfig
    norm_name = "gemm_all_reduce_norm"
    choosers = ("auto", "measured", BATCH_INVARIANT)
    command_module = "interlace.cli.bench_gemv_all_reduce"
    implementations = (
        Implementation(
            "fused",
            "one kernel that sends sums as it computes them",
            launch.run_fused,
            is_batch_invariant=True,
        ),
        Implementation(
            "gemm",
            "gemm_all_reduce, by the implementation that it takes itself",
            launch.run_gemm,
            spans_nodes=True,
        ),
        Implementation(
            "unfused", "F.linear, then all_reduce", launch.run_unfused, spans_nodes=True
        ),
    )

    def choose(self, **call: Any) -> Any:
        """Return what ``impl="auto"`` runs for a call of these sizes, and why."""
        return launch.choose(**call)

    def argument_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the tensors and the options that :meth:`explain` takes, by name."""
        return ("x", "w"), ("bias",)

    def explain(  # type: ignore[override]
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        *,
        world_size: int,
        nodes: int = 1,
        bias: torch.Tensor | None = None,
    ) -> tuple[str, str, str]:
        """Return a description of a call, what ``impl="auto"`` runs, and the reason."""
        validate(x, w, bias)
        sizes: dict[str, Any] = {
            "tokens": x.shape[0] if x.dim() == 2 else 1,
            "rows": w.shape[0],
            "columns": w.shape[1],
            "dtype": x.dtype,
            "world_size": world_size,
            "device": x.device,
        }
        choice = self.choose(**sizes).between(self, nodes, known_network(x.device))
        dtype = str(x.dtype).removeprefix("torch.")
        call = f"{self.name} of x {list(x.shape)} and w {list(w.shape)}, {dtype}"
        if is_enabled():
            reason = "calls must be batch-invariant"
            impl, config = launch.choose_invariant(sizes)
            return call, f"fused ({config})" if impl == "fused" else impl, reason
        chosen = f"fused ({choice.config})" if choice.impl == "fused" else choice.impl
        return call, chosen, choice.reason
