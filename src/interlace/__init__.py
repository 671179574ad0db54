"""Interlace: GPU kernels that compute and communicate at once, for PyTorch and Triton."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlace import compile, mapped, nn, optim
    from interlace.comm import (
        Faults,
        Group,
        SymmetricTensor,
        Traffic,
        empty_symmetric,
        group_of,
        inject,
        launch,
        recover,
        set_deadline,
        synchronize,
    )
    from interlace.counting import counts
    from interlace.errors import (
        ArgumentError,
        BackendError,
        GroupError,
        InterlaceError,
        LaunchError,
        MiscountError,
        PeerTimeoutError,
        RankMismatchError,
        WorkspaceError,
    )
    from interlace.gemm.autotune import autotune
    from interlace.gemm.epilogue import Normed
    from interlace.gemm.invariance import batch_invariant
    from interlace.mapped import MappedOutput, TriggeredTransfers, fuse
    from interlace.operators.all_gather_gemm import AllGatherGemmConfig, all_gather_gemm
    from interlace.operators.all_to_all_gemm import AllToAllGemmConfig, all_to_all_gemm
    from interlace.operators.embedding_all_to_all import embedding_all_to_all
    from interlace.operators.embedding_all_to_all.config import EmbeddingAllToAllConfig
    from interlace.operators.explain import explain
    from interlace.operators.gemm_all_reduce import gemm_all_reduce, gemv_all_reduce
    from interlace.operators.gemm_all_reduce.config import (
        GemmAllReduceConfig,
        GemmAllReduceNormConfig,
        GemvAllReduceConfig,
    )
    from interlace.operators.gemm_all_to_all import GemmAllToAllConfig, gemm_all_to_all
    from interlace.operators.gemm_all_to_all_columns import (
        GemmAllToAllColumnsConfig,
        gemm_all_to_all_columns,
        qkv_column_ranges,
    )
    from interlace.operators.gemm_reduce_scatter import GemmReduceScatterConfig, gemm_reduce_scatter
    from interlace.operators.linear_cross_entropy import linear_cross_entropy
    from interlace.operators.linear_top_k import TopColumns, linear_top_k
    from interlace.operators.mixture_of_experts import mixture_of_experts
    from interlace.operators.mixture_of_experts.activation import ExpertActivation
    from interlace.operators.mixture_of_experts.config import MixtureOfExpertsConfig
    from interlace.registry import operator
    from interlace.tracing import trace

__version__ = "0.3.0"

# Public name -> module. Nothing here imports torch or Triton until it is used.
_PUBLIC = {
    "Faults": "interlace.comm",
    "Group": "interlace.comm",
    "SymmetricTensor": "interlace.comm",
    "Traffic": "interlace.comm",
    "empty_symmetric": "interlace.comm",
    "group_of": "interlace.comm",
    "inject": "interlace.comm",
    "launch": "interlace.comm",
    "recover": "interlace.comm",
    "set_deadline": "interlace.comm",
    "synchronize": "interlace.comm",
    "counts": "interlace.counting",
    "ArgumentError": "interlace.errors",
    "BackendError": "interlace.errors",
    "GroupError": "interlace.errors",
    "InterlaceError": "interlace.errors",
    "LaunchError": "interlace.errors",
    "MiscountError": "interlace.errors",
    "PeerTimeoutError": "interlace.errors",
    "RankMismatchError": "interlace.errors",
    "WorkspaceError": "interlace.errors",
    "MappedOutput": "interlace.mapped",
    "TriggeredTransfers": "interlace.mapped",
    "fuse": "interlace.mapped",
    "autotune": "interlace.gemm.autotune",
    "Normed": "interlace.gemm.epilogue",
    "batch_invariant": "interlace.gemm.invariance",
    "all_gather_gemm": "interlace.operators.all_gather_gemm",
    "AllGatherGemmConfig": "interlace.operators.all_gather_gemm",
    "all_to_all_gemm": "interlace.operators.all_to_all_gemm",
    "AllToAllGemmConfig": "interlace.operators.all_to_all_gemm",
    "embedding_all_to_all": "interlace.operators.embedding_all_to_all",
    "EmbeddingAllToAllConfig": "interlace.operators.embedding_all_to_all.config",
    "explain": "interlace.operators.explain",
    "operator": "interlace.registry",
    "gemm_all_reduce": "interlace.operators.gemm_all_reduce",
    "GemmAllReduceConfig": "interlace.operators.gemm_all_reduce.config",
    "GemmAllReduceNormConfig": "interlace.operators.gemm_all_reduce.config",
    "gemm_all_to_all": "interlace.operators.gemm_all_to_all",
    "GemmAllToAllConfig": "interlace.operators.gemm_all_to_all",
    "gemm_all_to_all_columns": "interlace.operators.gemm_all_to_all_columns",
    "GemmAllToAllColumnsConfig": "interlace.operators.gemm_all_to_all_columns",
    "qkv_column_ranges": "interlace.operators.gemm_all_to_all_columns",
    "gemm_reduce_scatter": "interlace.operators.gemm_reduce_scatter",
    "GemmReduceScatterConfig": "interlace.operators.gemm_reduce_scatter",
    "gemv_all_reduce": "interlace.operators.gemm_all_reduce",
    "GemvAllReduceConfig": "interlace.operators.gemm_all_reduce.config",
    "linear_cross_entropy": "interlace.operators.linear_cross_entropy",
    "linear_top_k": "interlace.operators.linear_top_k",
    "TopColumns": "interlace.operators.linear_top_k",
    "mixture_of_experts": "interlace.operators.mixture_of_experts",
    "ExpertActivation": "interlace.operators.mixture_of_experts.activation",
    "MixtureOfExpertsConfig": "interlace.operators.mixture_of_experts.config",
    "trace": "interlace.tracing",
}

_MODULES = ("compile", "mapped", "nn", "optim")

# Spelled out for type checkers: the keys of _PUBLIC, _MODULES and the version.
__all__ = [
    "AllGatherGemmConfig",
    "AllToAllGemmConfig",
    "ArgumentError",
    "BackendError",
    "EmbeddingAllToAllConfig",
    "ExpertActivation",
    "Faults",
    "GemmAllReduceConfig",
    "GemmAllReduceNormConfig",
    "GemmAllToAllColumnsConfig",
    "GemmAllToAllConfig",
    "GemmReduceScatterConfig",
    "GemvAllReduceConfig",
    "Group",
    "GroupError",
    "InterlaceError",
    "LaunchError",
    "MappedOutput",
    "MiscountError",
    "MixtureOfExpertsConfig",
    "Normed",
    "PeerTimeoutError",
    "RankMismatchError",
    "SymmetricTensor",
    "TopColumns",
    "Traffic",
    "TriggeredTransfers",
    "WorkspaceError",
    "__version__",
    "all_gather_gemm",
    "all_to_all_gemm",
    "autotune",
    "batch_invariant",
    "compile",
    "counts",
    "embedding_all_to_all",
    "empty_symmetric",
    "explain",
    "fuse",
    "gemm_all_reduce",
    "gemm_all_to_all",
    "gemm_all_to_all_columns",
    "gemm_reduce_scatter",
    "gemv_all_reduce",
    "group_of",
    "inject",
    "launch",
    "linear_cross_entropy",
    "linear_top_k",
    "mapped",
    "mixture_of_experts",
    "nn",
    "operator",
    "optim",
    "qkv_column_ranges",
    "recover",
    "set_deadline",
    "synchronize",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"interlace.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'interlace' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
