"""Machines: what a GPU, its node and its network can do, each value with a source and a confidence.

A machine is a YAML file; presets lie in ``presets/machines``. ``interlace sim calibrate`` writes
one from measurements.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from interlace.errors import ConfigError
from interlace.sim import topology
from interlace.sim.configfile import Strict, load, parse, read
from interlace.sim.engine import duration_ns

Confidence = Literal["measured", "published", "derived", "assumed"]


class Sourced(BaseModel):
    """A number, where it comes from, and how far to trust it: measured by us, published by others,
    derived from those, assumed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: float
    source: Annotated[str, Field(min_length=3)]
    confidence: Confidence

    @model_validator(mode="after")
    def _not_negative(self) -> Sourced:
        if self.value < 0:
            raise ValueError("value must not be negative")
        return self


def _with_source(value: Any) -> Any:
    """A bare number is a number whose source the file does not say."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return (
        {"value": value, "source": "given without a source", "confidence": "assumed"}
        if plain
        else value
    )


Given = Annotated[Sourced, BeforeValidator(_with_source)]
"""A number with its source; in a user's file the number alone will do."""


class Gpu(Strict):
    """One GPU.

    A kernel of F FLOPs and M bytes of memory traffic takes ``kernel_ns + (a**p + b**p)**(1/p)``,
    where a is F at ``flops_per_s * flops_efficiency``, b is M at ``memory_bytes_per_s *
    memory_efficiency`` and p is ``roofline_norm``: the larger of both where they differ, more where
    they are alike.
    """

    flops_per_s: Given
    """Peak of the matrix products' type."""
    flops_efficiency: Given
    memory_bytes_per_s: Given
    memory_efficiency: Given
    roofline_norm: Given
    kernel_ns: Given
    """From one kernel to the next: launch, ramp, tail."""
    host_link_bytes_per_s: Given
    """From host memory, by a copy engine."""

    @model_validator(mode="after")
    def _possible(self) -> Gpu:
        for name in (
            "flops_per_s",
            "flops_efficiency",
            "memory_bytes_per_s",
            "memory_efficiency",
            "host_link_bytes_per_s",
        ):
            if getattr(self, name).value <= 0:
                raise ValueError(f"{name} must be above 0")
        for name in ("flops_efficiency", "memory_efficiency"):
            if getattr(self, name).value > 1:
                raise ValueError(f"{name} must not be above 1")
        if self.roofline_norm.value < 1:
            raise ValueError("roofline_norm must be at least 1")
        return self

    def kernel_time_ns(self, flops: float, memory_bytes: float) -> int:
        """How long a kernel takes; 0 for no work."""
        if flops <= 0 and memory_bytes <= 0:
            return 0
        p = self.roofline_norm.value
        compute = 1e9 * flops / (self.flops_per_s.value * self.flops_efficiency.value)
        memory = 1e9 * memory_bytes / (self.memory_bytes_per_s.value * self.memory_efficiency.value)
        larger, smaller = max(compute, memory), min(compute, memory)
        return int(self.kernel_ns.value + larger * (1.0 + (smaller / larger) ** p) ** (1.0 / p)) + 1

    def floor_ns(self, flops: float, memory_bytes: float) -> float:
        """No kernel is faster: both resources at their peaks, perfectly overlapped."""
        return 1e9 * max(
            flops / self.flops_per_s.value, memory_bytes / self.memory_bytes_per_s.value
        )


class Collectives(Strict):
    """The collective library and the fused kernels."""

    launch_ns: Given
    """Before the first byte of a library's collective moves."""
    step_ns: Given
    """Of each dependent step of an algorithm, beside the links' latency."""
    efficiency: Given
    """Share of the links' bandwidth that the library's collectives reach."""
    efficiency_of: dict[
        Literal["all_to_all", "all_reduce", "reduce_scatter", "all_gather"], Given
    ] = Field(default={})
    """The same, for one collective."""
    reduction: Given
    """Share of a reduction's memory time that a step adds: 1 where it starts when all has come, 0
    where it keeps up.
    """
    piece_bytes: Given | None = None
    """The library goes round the destinations of a round in pieces of this size, at most 64 a
    message; none: whole messages.
    """
    fused_efficiency: Given
    """Share that a fused kernel's stores or puts reach."""
    fused_slowdown: Given
    """Computation of a fused kernel over the same computation alone: registers, occupancy, address
    arithmetic.
    """
    slice_ns: Given
    """From a slice's last store to its receiver knowing it."""
    skew: Given
    """Spread of the ranks' kernel ends, as a share of the kernel; the fused kernel waits for the
    last.
    """

    @model_validator(mode="after")
    def _possible(self) -> Collectives:
        for name, given in (
            ("efficiency", self.efficiency),
            ("fused_efficiency", self.fused_efficiency),
            *self.efficiency_of.items(),
        ):
            if not 0 < given.value <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1")
        if self.fused_slowdown.value < 1:
            raise ValueError("fused_slowdown must be at least 1")
        return self

    def library_efficiency(self, kind: str) -> float:
        """Share of the links' bandwidth that the library's collective of this kind reaches."""
        given: Sourced = dict(self.efficiency_of).get(kind, self.efficiency)  # type: ignore[call-overload]
        return given.value


class Net(Strict):
    """A network."""

    topology: str
    """``ring``, ``torus2d``, ``torus3d``, ``torus:AxB``, ``switch``, ``full``,
    ``fattree[:LEAVESxDOWN/UP]``.
    """
    link_bytes_per_s: Given
    """Per link and direction, of payload."""
    latency_ns: Given
    """Per hop: from the first byte in to the first byte out."""
    ties: Literal["clockwise", "split"] = "clockwise"

    @model_validator(mode="after")
    def _possible(self) -> Net:
        if self.link_bytes_per_s.value <= 0:
            raise ValueError("link_bytes_per_s must be above 0")
        return self


class NodeNet(Net):
    """The network inside a node."""

    gpus: Annotated[int, Field(ge=1)]
    cards: Annotated[int, Field(ge=1)]
    """Network cards of a node; its GPUs share them evenly."""


class Machine(Strict):
    """GPUs in a network, or in nodes in a network."""

    name: str
    note: str = ""
    gpu: Gpu
    collectives: Collectives
    network: Net
    node: NodeNet | None = None

    def reduction_ns(self, size: float) -> int:
        """What adding ``size`` received bytes to one's own adds to a step of a collective: two
        reads and a write.
        """
        share = 3 * size * self.collectives.reduction.value
        return duration_ns(
            share, self.gpu.memory_bytes_per_s.value * self.gpu.memory_efficiency.value
        )

    def build_topology(self, ranks: int, text: str | None = None) -> topology.Topology:
        """The network of ``ranks`` GPUs.

        Args:
            text: another topology between nodes than the machine's.

        Raises:
            ConfigError: it does not fit ``ranks``.
        """
        if self.node is None or self.node.gpus == 1:
            return _net(self.network, text or self.network.topology, ranks)
        inner_ranks = min(ranks, self.node.gpus)
        if ranks % inner_ranks:
            raise ConfigError(
                f"ranks must fill nodes of {self.node.gpus} GPUs; got {ranks}. Use a multiple of "
                f"{self.node.gpus}."
            )
        inner = _net(self.node, self.node.topology, inner_ranks)
        nodes = ranks // inner_ranks
        if nodes == 1:
            return inner
        outer = _net(self.network, text or self.network.topology, nodes * self.node.cards)
        return topology.Hierarchical(inner, outer, self.node.cards)


def _net(net: Net, text: str, ranks: int) -> topology.Topology:
    return topology.build(
        text,
        ranks,
        bytes_per_s=net.link_bytes_per_s.value,
        latency_ns=round(net.latency_ns.value),
        ties=net.ties,
    )


def presets(folder: str) -> list[str]:
    """Names of the presets in ``presets/<folder>``."""
    return sorted(
        item.name.removesuffix(".yaml")
        for item in resources.files("interlace.sim").joinpath("presets", folder).iterdir()
        if item.name.endswith(".yaml")
    )


def find(folder: str, name: str) -> Path:
    """A preset's file, or the file that ``name`` is.

    Raises:
        ConfigError: neither exists.
    """
    if name.endswith((".yaml", ".yml", ".json")):
        return Path(name)
    if name not in presets(folder):
        raise ConfigError(
            f"{folder.removesuffix('s')} must be a YAML file or one of "
            f"{', '.join(presets(folder))}; got {name!r}."
        )
    return Path(str(resources.files("interlace.sim").joinpath("presets", folder, f"{name}.yaml")))


def load_machine(name: str, changes: dict[str, Any] | None = None) -> Machine:
    """A preset or file, with values replaced.

    Args:
        changes: dotted key -> number or text, say ``{"network.latency_ns": 500}``.

    Raises:
        ConfigError: unknown name or key, or a value that no machine can have.
    """
    file = find("machines", name)
    if not changes:
        return load(Machine, file)
    data = read(file)
    for key, value in changes.items():
        replace(data, key, value, str(file))
    return parse(Machine, data, f"{file} with changes")


def replace(data: Any, key: str, value: Any, where: str) -> None:
    """Set a dotted key in nested mappings; of a sourced value, the number.

    Raises:
        ConfigError: there is no such key.
    """
    *parents, last = key.split(".")
    at = data
    for part in parents:
        if not isinstance(at, dict) or part not in at:
            raise ConfigError(
                f"{where}: {key} must be a known key; {part} is not. Keys: "
                f"{', '.join(at) if isinstance(at, dict) else 'none'}."
            )
        at = at[part]
    if not isinstance(at, dict):
        raise ConfigError(f"{where}: {key} must be a known key; {parents[-1]} has none.")
    if (
        isinstance(at.get(last), dict) and "value" in at[last]
    ):  # a key that does not exist is refused when all is read
        at[last] = {"value": value, "source": "set by the user", "confidence": "assumed"}
    else:
        at[last] = value
