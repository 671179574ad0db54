"""Machines: figures of a GPU, its node and its network, each with a source and a confidence.

A machine is a YAML file; presets lie in ``presets/machines``. ``interlace sim calibrate`` writes
one from measurements.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from interlace.costs.known_profiles import profiled_gpus, shipped_profile
from interlace.errors import ConfigError
from interlace_sim import topology
from interlace_sim.configfile import Model, Strict, parse, read
from interlace_sim.engine import duration_ns

_MAX_RANKS = 2**20

Confidence = Literal["measured", "published", "derived", "assumed"]


class Source(BaseModel):
    """Name the source of a value, and the confidence in it.

    Confidences are: measured by us, published by others, derived from such figures, assumed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    source: Annotated[str, Field(min_length=3)]
    confidence: Confidence


class Sourced(Source):
    """A number with its source and a confidence."""

    value: Annotated[float, Field(allow_inf_nan=False)]

    @model_validator(mode="after")
    def _possible(self) -> Sourced:
        if self.value < 0:
            raise ValueError("value must not be negative")
        # Products and quotients of several such numbers are finite, so every time is.
        if self.value and not 1e-24 <= self.value <= 1e24:
            raise ValueError("value must be 0, or between 1e-24 and 1e24")
        return self


def with_source(value: Any) -> Any:
    """Give a bare number, or a bare list, the source of a value whose file names none."""
    if isinstance(value, dict | Source):
        return value
    # YAML's true and false are ints in Python, and no value of a machine.
    if not isinstance(value, int | float | list) or isinstance(value, bool):
        raise ValueError("it must be a number, or have value, source and confidence")
    return {"value": value, "source": "given without a source", "confidence": "assumed"}


Given = Annotated[Sourced, BeforeValidator(with_source)]
"""A number with its source; in a user's file a bare number is enough."""


class Gpu(Strict):
    """One GPU.

    A kernel of F FLOPs and M bytes of memory traffic takes ``kernel_ns + (a**p + b**p)**(1/p)``,
    where a is F at ``flops_per_s * flops_efficiency``, b is M at ``memory_bytes_per_s *
    memory_efficiency`` and p is ``roofline_norm``: the larger of both where they differ, more where
    they are alike. With a ``profile``, that holds for all kernels but matrix products of known
    sizes, see :mod:`interlace_sim.kernel_time`.
    """

    profile: str | None = None
    """GPU whose shipped :class:`interlace.costs.time.MachineProfile` times matrix products; without
    one, or with ``none``, the roofline does.
    """
    flops_per_s: Given
    """Peak FLOPs per second of matrix products in the model's type."""
    flops_efficiency: Given
    memory_bytes_per_s: Given
    memory_efficiency: Given
    roofline_norm: Given
    kernel_ns: Given
    """Nanoseconds from one kernel to the next: launch, ramp, tail."""
    host_link_bytes_per_s: Given
    """Bytes per second from host memory by a copy engine."""
    load_ns: Given = Field(default=Sourced(value=0, source="not known", confidence="assumed"))
    """Nanoseconds from a program's request for a tile's operands until it has them, in a kernel
    that uses all SMs; a simulated call's small tiles wait for it.
    """
    program_ns: Given = Field(default=Sourced(value=0, source="not known", confidence="assumed"))
    """Nanoseconds from the start of one program of a kernel to that of the next one, in a simulated
    call whose programs all run at once.
    """
    read_efficiency: Given = Field(
        default=Sourced(value=0, source="not known", confidence="assumed")
    )
    """Share of ``memory_bytes_per_s`` that a kernel reaches which reads a matrix and hardly writes;
    0 for ``memory_efficiency``.
    """

    @field_validator("profile")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        # ``none`` is what a command can set, which has no other word for nothing.
        if name is None or name == "none":
            return None
        if len(name) > 100 or shipped_profile(name) is None:
            raise ValueError(f"it must be none or one of {', '.join(profiled_gpus())}")
        return name

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
        for name in ("flops_efficiency", "memory_efficiency", "read_efficiency"):
            if getattr(self, name).value > 1:
                raise ValueError(f"{name} must not be above 1")
        if self.roofline_norm.value < 1:
            raise ValueError("roofline_norm must be at least 1")
        return self

    def roofline_ns(self, flops: float, memory_bytes: float) -> int:
        """Return the nanoseconds of a kernel; 0 for no work."""
        if flops <= 0 and memory_bytes <= 0:
            return 0
        p = self.roofline_norm.value
        compute = 1e9 * flops / (self.flops_per_s.value * self.flops_efficiency.value)
        memory = 1e9 * memory_bytes / (self.memory_bytes_per_s.value * self.memory_efficiency.value)
        # A smooth maximum: kernels that are balanced between both limits reach neither of them.
        larger, smaller = max(compute, memory), min(compute, memory)
        # One nanosecond more than rounding down, so that no kernel undercuts its bound.
        return int(self.kernel_ns.value + larger * (1.0 + (smaller / larger) ** p) ** (1.0 / p)) + 1

    def floor_ns(self, flops: float, memory_bytes: float) -> float:
        """Return the nanoseconds that no kernel undercuts: both resources at peak, overlapped."""
        return 1e9 * max(
            flops / self.flops_per_s.value, memory_bytes / self.memory_bytes_per_s.value
        )


class Collectives(Strict):
    """The collective library and the fused kernels."""

    launch_ns: Given
    """Nanoseconds before the first byte of a library's collective moves."""
    step_ns: Given
    """Nanoseconds of each dependent step of an algorithm, on top of the links' latency."""
    efficiency: Given
    """Share of the links' bandwidth that the library's collectives reach."""
    efficiency_of: dict[
        Literal["all_to_all", "all_reduce", "reduce_scatter", "all_gather"], Given
    ] = Field(default={})
    """Share of the links' bandwidth that the library's collective of one kind reaches."""
    reduction: Given
    """Share of a reduction's memory time that a step adds: 1 if it starts when everything has
    arrived, 0 if it keeps up with the links.
    """
    piece_bytes: Given | None = None
    """Bytes of a piece; the library goes round the destinations of a round piece by piece, in at
    most 64 pieces per message. Without it, messages are not cut.
    """
    fused_efficiency: Given
    """Share of the links' bandwidth that a fused kernel's stores or puts reach."""
    fused_slowdown: Given
    """Computation of a fused kernel over the same computation alone: registers, occupancy, address
    arithmetic.
    """
    slice_ns: Given
    """Nanoseconds from a slice's last store until the receiver sees its signal."""
    message_ns: Given | None = None
    """Nanoseconds by which a fused kernel's message occupies a link between nodes beside its bytes,
    where the library exchanges slices.
    """
    skew: Given
    """Spread of the ranks' kernel ends, as a share of the kernel; the fused kernel waits for the
    last.
    """

    @model_validator(mode="after")
    def _possible(self) -> Collectives:
        for name, figure in (
            ("efficiency", self.efficiency),
            ("fused_efficiency", self.fused_efficiency),
            *self.efficiency_of.items(),
        ):
            if not 0 < figure.value <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1")
        if self.fused_slowdown.value < 1:
            raise ValueError("fused_slowdown must be at least 1")
        return self

    def library_efficiency(self, kind: str) -> float:
        """Return the share of the links' bandwidth that the library's collective reaches."""
        shares: dict[Any, Sourced] = dict(self.efficiency_of)
        return shares.get(kind, self.efficiency).value


class Net(Strict):
    """A network."""

    topology: str
    """``ring``, ``torus2d``, ``torus3d``, ``torus:AxB``, ``switch``, ``full``,
    ``fattree[:LEAVESxDOWN/UP]``.
    """
    link_bytes_per_s: Given
    """Bytes of payload per second, per link and direction."""
    latency_ns: Given
    """Nanoseconds per hop, from the first byte in to the first byte out."""
    ties: Literal["clockwise", "split"] = "clockwise"

    @field_validator("topology")
    @classmethod
    def _known(cls, text: str) -> str:
        if not topology.NAME.fullmatch(text):
            raise ValueError(
                "it must be ring, torus2d, torus3d, torus:AxB, switch, full or "
                "fattree[:LEAVESxDOWN/UP]"
            )
        return text

    @model_validator(mode="after")
    def _possible(self) -> Net:
        if self.link_bytes_per_s.value <= 0:
            raise ValueError("link_bytes_per_s must be above 0")
        return self


class NodeNet(Net):
    """The network inside a node."""

    gpus: Annotated[int, Field(ge=1, le=_MAX_RANKS)]
    cards: Annotated[int, Field(ge=1, le=_MAX_RANKS)]
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
        """Return the nanoseconds that a reduction of ``size`` received bytes adds to a step.

        A reduction reads two operands and writes one.
        """
        # Two reads and a write of device memory, as in the library's kernels.
        share = 3 * size * self.collectives.reduction.value
        return duration_ns(
            share, self.gpu.memory_bytes_per_s.value * self.gpu.memory_efficiency.value
        )

    def build_topology(self, ranks: int, text: str | None = None) -> topology.Topology:
        """Build the network of ``ranks`` GPUs.

        Args:
            ranks: Number of GPUs.
            text: Short name of the topology between nodes; the machine's by default.

        Raises:
            ConfigError: the topology does not fit ``ranks``, or they are more than 2^20.
        """
        # An all-to-all lists a message for each rank, which must fit into this machine's memory.
        if ranks > _MAX_RANKS:
            raise ConfigError(
                f"a machine must have at most {_MAX_RANKS} ranks; got {ranks}. Take fewer nodes."
            )
        # A node of one GPU has no inner network.
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
        # Within a node no message touches the network cards.
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
    """List the names of the presets in ``presets/<folder>``."""
    return sorted(
        item.name.removesuffix(".yaml")
        for item in resources.files("interlace_sim").joinpath("presets", folder).iterdir()
        if item.name.endswith(".yaml")
    )


def find(folder: str, name: str) -> Path:
    """Return a preset's file, or the file that ``name`` is.

    Raises:
        ConfigError: there is no such preset.
    """
    # Names with a suffix are files, and all others presets, so a typo cannot be taken for a file.
    if name.endswith((".yaml", ".yml", ".json")):
        return Path(name)
    if name not in presets(folder):
        option = "machine" if folder.endswith("machines") else "model"
        raise ConfigError(
            f"{option} must be a YAML file or one of {', '.join(presets(folder))}; got {name!r}."
        )
    return Path(str(resources.files("interlace_sim").joinpath("presets", folder, f"{name}.yaml")))


def load_machine(name: str, changes: dict[str, Any] | None = None) -> Machine:
    """Load a machine from a preset or file, with values replaced.

    Args:
        name: A preset of ``presets/machines``, or a YAML file.
        changes: Dotted key -> number or text, say ``{"network.latency_ns": 500}``.

    Raises:
        ConfigError: unknown name or key, a value that no machine can have, or one that changes
            hardly anything because a profile times the products.
    """
    machine = load_changed(Machine, find("machines", name), changes)
    for key in ("gpu.flops_per_s", "gpu.flops_efficiency"):
        if machine.gpu.profile is not None and key in (changes or {}):
            raise ConfigError(
                f"{key} must be changed without a profile; got it for {name}, whose products are "
                f"timed by the profile of {machine.gpu.profile}. Set gpu.profile=none as well."
            )
    return machine


def load_changed(
    model: type[Model],
    file: Path,
    changes: Mapping[str, Any] | None,
) -> Model:
    """Load a configuration with values replaced by dotted key.

    Args:
        model: Class of the configuration.
        file: YAML or JSON file.
        changes: Dotted key -> value.

    Raises:
        ConfigError: the file, a key or a value is wrong.
    """
    data = read(file)
    if not changes:
        return parse(model, data, str(file))
    changed = copy.deepcopy(data)
    for key, value in changes.items():
        replace(changed, key, value, f"--set {key} of {file}")
    try:
        return parse(model, changed, f"{file} with {', '.join(f'--set {key}' for key in changes)}")
    except ConfigError:
        # An error that the file has by itself is not one of the changes.
        parse(model, data, str(file))
        raise


def replace(data: Any, key: str, value: Any, source: str) -> None:
    """Set a dotted key in nested mappings; a sourced value gets the user as its source.

    Args:
        data: Contents of a file; changed in place.
        key: Dotted key.
        value: Number or text.
        source: The file's name, for errors.

    Raises:
        ConfigError: there is no such key.
    """
    *parents, last = key.split(".")
    at = data
    for part in parents:
        if not isinstance(at, dict) or part not in at:
            raise ConfigError(
                f"{source}: {key} must be a known key; {part} is not. Keys: "
                f"{', '.join(map(str, at)) if isinstance(at, dict) else 'none'}."
            )
        at = at[part]
    if not isinstance(at, dict):
        raise ConfigError(f"{source}: {key} must be a known key; {parents[-1]} has none.")
    # A last key that does not exist is set all the same: validation refuses it, and lists the keys.
    if isinstance(at.get(last), dict) and "value" in at[last]:
        at[last] = {"value": value, "source": "set by the user", "confidence": "assumed"}
    else:
        at[last] = value
