"""ASTRA-sim's network YAML and system JSON, read and checked.

A key that would change a result in ASTRA-sim, and does not here, is refused.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, model_validator

from interlace_sim.configfile import Rate, Strict

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
MOST_NPUS = 2**20
MOST_CHUNKS = 2**14
"""Chunks of a collective. ASTRA-sim's own files have up to 64."""


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _plain_block(value: Any) -> Any:
    """Replace ``{"type": "Ring"}`` by ``Ring``, which means as much."""
    return [
        item["type"] if isinstance(item, dict) and item.keys() == {"type"} else item
        for item in _as_list(value)
    ]


def _flag(value: Any) -> Any:
    return bool(value) if isinstance(value, int) else value


def _alone(names: list[str]) -> list[str]:
    if len(names) > 1 and any(name.startswith("one") for name in names):
        raise ValueError("an algorithm over all dimensions, one..., must be the only one")
    return names


Flag = Annotated[bool, BeforeValidator(_flag)]
"""True or false; of a number, whether it is not 0, as in ASTRA-sim."""

# A pydantic pattern instead of an enumeration: direct may end in a window, such as direct4.
Implementation = Annotated[
    list[
        Annotated[
            str,
            Field(
                pattern=r"^((one)?(ring|Ring|[dD]irect([1-9][0-9]{0,4})?|[hH]alvingDoubling)"
                r"|doubleBinaryTree)$"
            ),
        ]
    ],
    Field(min_length=1),
    BeforeValidator(_as_list),
    AfterValidator(_alone),
]


class Network(Strict):
    """One entry per dimension, the first varying fastest over NPU numbers."""

    topology: Annotated[
        list[Literal["Ring", "Switch", "FullyConnected"]], BeforeValidator(_plain_block)
    ]
    npus_count: list[PositiveInt]
    bandwidth: list[Rate]
    """Per link and direction, in 2**30 bytes per second."""
    latency: list[Annotated[float, Field(ge=0, le=1e24)]]
    """Per hop, in nanoseconds."""

    @model_validator(mode="after")
    def _possible(self) -> Network:
        if not self.topology:
            raise ValueError("topology must have at least one dimension; it has none")
        for name in ("npus_count", "bandwidth", "latency"):
            if len(getattr(self, name)) != len(self.topology):
                raise ValueError(
                    f"{name} must have one entry for each of the {len(self.topology)} dimensions "
                    "of topology"
                )
        if self.npus > MOST_NPUS:
            raise ValueError(f"npus_count must be at most {MOST_NPUS} NPUs in all; it is more")
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
    endpoint_delay: Annotated[int, Field(alias="endpoint-delay", ge=0, le=2**60)] = 10
    active_chunks_per_dimension: Annotated[
        PositiveInt, Field(alias="active-chunks-per-dimension")
    ] = 1
    preferred_dataset_splits: Annotated[
        int, Field(alias="preferred-dataset-splits", ge=1, le=MOST_CHUNKS)
    ] = 1
    all_reduce: Annotated[Implementation | None, Field(alias="all-reduce-implementation")] = None
    all_gather: Annotated[Implementation | None, Field(alias="all-gather-implementation")] = None
    reduce_scatter: Annotated[
        Implementation | None, Field(alias="reduce-scatter-implementation")
    ] = None
    all_to_all: Annotated[Implementation | None, Field(alias="all-to-all-implementation")] = None
    collective_optimization: Annotated[
        Literal["localBWAware", "baseline"], Field(alias="collective-optimization")
    ] = "localBWAware"
    local_mem_bw: Annotated[Rate, Field(alias="local-mem-bw")] = 1600.0
    """Bytes per nanosecond (10**9 B/s)."""
    peak_perf: Annotated[Rate, Field(alias="peak-perf")] = 900.0
    """TFLOP/s, for ``roofline-enabled``."""
    roofline_enabled: Annotated[Flag, Field(alias="roofline-enabled")] = False
    replay_only: Annotated[Flag, Field(alias="replay-only")] = False
    """Whether every node, communication too, only takes its own duration."""
    # Keys with one permitted value are those whose other values would change results, or ask for
    # files, in ASTRA-sim or in an earlier version of it.
    boost_mode: Annotated[Literal[0], Field(alias="boost-mode")] = 0
    intra_dimension_scheduling: Annotated[
        Literal["FIFO"], Field(alias="intra-dimension-scheduling")
    ] = "FIFO"
    inter_dimension_scheduling: Annotated[
        Literal["baseline"], Field(alias="inter-dimension-scheduling")
    ] = "baseline"
    model_shared_bus: Annotated[Literal[0], Field(alias="model-shared-bus")] = 0
    track_local_mem: Annotated[Literal[0], Field(alias="track-local-mem")] = 0
    # The keys below change no result without a shared bus and without tracked memory, so any value
    # is accepted.
    local_reduction_delay: Annotated[int, Field(alias="local-reduction-delay")] = 1
    local_mem_trace_filename: Annotated[str | None, Field(alias="local-mem-trace-filename")] = None
    L: float = 0
    o: float = 0
    g: float = 0
    G: float = 0
    # The keys below are about ASTRA-sim's log.
    trace_enabled: Annotated[Flag, Field(alias="trace-enabled")] = False
    logging: Any = None

    @model_validator(mode="before")
    @classmethod
    def _no_custom_collectives(cls, data: Any) -> Any:
        for key in data if isinstance(data, dict) else ():
            if str(key).endswith(("-implementation-custom", "-custom-implementation")):
                raise ValueError(
                    f"{key} must not be given: collectives of one's own (Chakra files of messages) "
                    "are not modelled. Without it the run is another one, by the algorithms of the "
                    "keys without custom"
                )
        return data

    def algorithms(self, kind: str, dimensions: int) -> list[str]:
        """List the algorithm of every dimension.

        Without an entry in the file, an all-to-all is direct and the other collectives are rings.
        """
        return list(
            getattr(self, kind) or ["direct" if kind == "all_to_all" else "ring"] * dimensions
        )
