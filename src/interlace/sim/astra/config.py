"""ASTRA-sim's network YAML and system JSON, read and checked."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from interlace.sim.configfile import Strict

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _plain_block(value: Any) -> Any:
    """Replace ``{"type": "Ring"}`` by ``Ring``, which means as much."""
    return [item.get("type", item) if isinstance(item, dict) else item for item in _as_list(value)]


# A pydantic pattern instead of an enumeration: direct may end in a window, such as direct4.
Implementation = Annotated[
    list[
        Annotated[
            str,
            Field(
                pattern=r"^((one)?(ring|Ring|direct\d*|Direct\d*|halvingDoubling|HalvingDoubling)"
                r"|doubleBinaryTree)$"
            ),
        ]
    ],
    BeforeValidator(_as_list),
]


class Network(Strict):
    """One entry per dimension, the first varying fastest over NPU numbers."""

    topology: Annotated[
        list[Literal["Ring", "Switch", "FullyConnected"]], BeforeValidator(_plain_block)
    ]
    npus_count: list[Annotated[int, Field(ge=1)]]
    bandwidth: list[PositiveFloat]
    """Per link and direction, in 2**30 bytes per second."""
    latency: list[Annotated[float, Field(ge=0)]]
    """Per hop, in nanoseconds."""

    @model_validator(mode="after")
    def _lengths(self) -> Network:
        for name in ("npus_count", "bandwidth", "latency"):
            if len(getattr(self, name)) != len(self.topology):
                raise ValueError(
                    f"{name} must have one entry for each of the {len(self.topology)} dimensions "
                    "of topology"
                )
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.npus_count)

    @property
    def npus(self) -> int:
        return math.prod(self.npus_count)


class System(Strict):
    """ASTRA-sim's system layer.

    Keys of parts that are not modelled are accepted if their values change nothing.
    """

    scheduling_policy: Annotated[
        Literal["LIFO", "FIFO", "EXPLICIT"], Field(alias="scheduling-policy")
    ] = "LIFO"
    endpoint_delay: Annotated[int, Field(alias="endpoint-delay", ge=0)] = 10
    active_chunks_per_dimension: Annotated[
        PositiveInt, Field(alias="active-chunks-per-dimension")
    ] = 1
    preferred_dataset_splits: Annotated[PositiveInt, Field(alias="preferred-dataset-splits")] = 1
    all_reduce: Annotated[Implementation | None, Field(alias="all-reduce-implementation")] = None
    all_gather: Annotated[Implementation | None, Field(alias="all-gather-implementation")] = None
    reduce_scatter: Annotated[
        Implementation | None, Field(alias="reduce-scatter-implementation")
    ] = None
    all_to_all: Annotated[Implementation | None, Field(alias="all-to-all-implementation")] = None
    collective_optimization: Annotated[
        Literal["localBWAware", "baseline"], Field(alias="collective-optimization")
    ] = "localBWAware"
    local_mem_bw: Annotated[PositiveFloat, Field(alias="local-mem-bw")] = 1600.0
    """Bytes per nanosecond (10**9 B/s)."""
    peak_perf: Annotated[PositiveFloat, Field(alias="peak-perf")] = 900.0
    """TFLOP/s, for ``roofline-enabled``."""
    roofline_enabled: Annotated[bool, Field(alias="roofline-enabled")] = False
    boost_mode: Annotated[int, Field(alias="boost-mode")] = 0
    local_reduction_delay: Annotated[int, Field(alias="local-reduction-delay")] = 1
    intra_dimension_scheduling: Annotated[
        Literal["FIFO"], Field(alias="intra-dimension-scheduling")
    ] = "FIFO"
    inter_dimension_scheduling: Annotated[
        Literal["baseline"], Field(alias="inter-dimension-scheduling")
    ] = "baseline"
    # Keys with one permitted value are those whose other values would change results here.
    model_shared_bus: Annotated[Literal[0], Field(alias="model-shared-bus")] = 0
    replay_only: Annotated[int, Field(alias="replay-only")] = 0
    trace_enabled: Annotated[int, Field(alias="trace-enabled")] = 0
    # The keys below do not change results, so any value is accepted.
    logging: Any = None
    track_local_mem: Annotated[int, Field(alias="track-local-mem")] = 0
    local_mem_trace_filename: Annotated[str | None, Field(alias="local-mem-trace-filename")] = None
    L: float = 0
    o: float = 0
    g: float = 0
    G: float = 0

    @field_validator("roofline_enabled", mode="before")
    @classmethod
    def _number_is_bool(cls, value: Any) -> Any:
        return bool(value) if isinstance(value, int) else value

    def algorithms(self, kind: str, dimensions: int) -> list[str]:
        """List the algorithm of every dimension.

        Without an entry in the file, an all-to-all is direct and the other collectives are rings.
        """
        return list(
            getattr(self, kind) or ["direct" if kind == "all_to_all" else "ring"] * dimensions
        )
