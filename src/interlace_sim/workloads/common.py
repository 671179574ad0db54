"""Parts that the workloads share: lists of layers with sources, and a list of tasks that grows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from interlace_sim.configfile import Strict
from interlace_sim.machine import Machine, Source, find, load_changed, with_source
from interlace_sim.results import Result
from interlace_sim.step import Watch, run
from interlace_sim.topology import Topology
from interlace_sim.work import COMPUTE, Kernel, Task, Work, matrix_product

_MOST_LAYERS = 2**12
"""Layers of a model, each of which is simulated."""

_FLOAT32_BYTES = 4

Fusing = Literal["none", "forward", "both"]
"""Which passes use the fused operators."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
    """Hold the choices of a run besides the model, the machine and the network.

    Attributes:
        fused: Passes that use the fused operators.
        all_to_all, all_reduce: The library's algorithms, see :mod:`interlace_sim.collectives`.
        slices: Slices in which a fused kernel's output for one rank leaves; 0 is the workload's
            default.
        tensor, pipeline: Sizes of a Transformer's parallel groups.
    """

    fused: Fusing = "none"
    all_to_all: str = "one_shot"
    all_reduce: str = "ring"
    slices: int = 0
    tensor: int = 8
    pipeline: int = 8


class Layers(Source):
    """Sizes of a chain of layers, with their source."""

    value: Annotated[list[PositiveInt], Field(min_length=2, max_length=_MOST_LAYERS)]


GivenLayers = Annotated[Layers, BeforeValidator(with_source)]


class Workload(Strict):
    """Base of the workloads: numbers that count things must be integers of at least 1."""

    name: str
    note: str = ""

    @model_validator(mode="after")
    def _count_in_integers(self) -> Workload:
        for key in type(self).model_fields:
            # Sizes are floats in files, such as 1e6, but must be integers in value.
            value = getattr(getattr(self, key), "value", None)
            if (
                isinstance(value, float)
                and key not in self.fractions()
                and (value != int(value) or value < 1)
            ):
                raise ValueError(f"{key} must be a whole number of at least 1; got {value:g}")
            if key == "layers" and value is not None and value > _MOST_LAYERS:
                raise ValueError(f"layers must be at most {_MOST_LAYERS}; got {value:g}")
        return self

    @model_validator(mode="after")
    def _share_heads(self) -> Workload:
        heads, shared = (
            getattr(getattr(self, key, None), "value", 1) for key in ("heads", "key_value_heads")
        )
        if heads % shared:
            raise ValueError(
                f"heads must be a multiple of key_value_heads; got {heads:g} and {shared:g}"
            )
        return self

    def step(self, topology: Topology, choices: Choices) -> Step:
        """List the tasks of the step on one rank of a network.

        Raises:
            ConfigError: the model does not fit the number of ranks.
        """
        raise NotImplementedError

    @classmethod
    def fractions(cls) -> tuple[str, ...]:
        """List the keys whose values need not be integers above 0."""
        return ()


Model = TypeVar("Model", bound=Workload)


def load_workload(
    model: type[Model], folder: str, name: str, changes: dict[str, Any] | None = None
) -> Model:
    """Load a workload from a preset or YAML file, with values replaced by key.

    Raises:
        ConfigError: the file, a key or a value is wrong; the message names it and the fix.
    """
    return load_changed(model, find(folder, name), changes)


class Tasks:
    """A list of tasks in the order in which a rank's program issues them."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def add(self, name: str, row: str, work: Work, *deps: str | None) -> str:
        """Append a task and return its name. Dependencies that are None are left out."""
        self.tasks.append(Task(name, row, work, tuple(dep for dep in deps if dep is not None)))
        return name

    def kernel(self, name: str, flops: float, memory_bytes: float, *deps: str | None) -> str:
        """Append a kernel to the compute row and return its name."""
        return self.add(name, COMPUTE, Kernel(flops, memory_bytes), *deps)

    def adam(
        self, weights: float, gradient_bytes: float, itemsize: float, *deps: str | None
    ) -> None:
        """Append the kernel of Adam's step, which reads the gradient, reads and writes two moments
        and the float32 weight, and writes the weight that products read.
        """
        moved_bytes = 2 * 3 * _FLOAT32_BYTES + gradient_bytes + itemsize
        self.kernel("optimizer", 4 * weights, moved_bytes * weights, *deps)

    def product(
        self, name: str, m: float, n: float, k: float, itemsize: float, *deps: str | None
    ) -> str:
        """Append the kernel of an [m, k] by [k, n] product and return its name."""
        return self.add(name, COMPUTE, matrix_product(m, n, k, itemsize), *deps)


@dataclasses.dataclass(frozen=True)
class Step:
    """A step that can be run.

    Attributes:
        name: The result's name.
        topology: The network, with the coordinates that the tasks' groups refer to.
        tasks: One rank's tasks.
        extra_ns: Nanoseconds that are added in the end, from the result.
    """

    name: str
    topology: Topology
    tasks: list[Task]
    extra_ns: Callable[[Result], int] | None = None

    def run(
        self, machine: Machine, *, all_ranks: bool = False, watch: Watch | None = None
    ) -> Result:
        """Simulate the step; see :func:`interlace_sim.step.run`."""
        return run(
            machine,
            self.topology,
            self.tasks,
            name=self.name,
            all_ranks=all_ranks,
            extra_ns=self.extra_ns,
            watch=watch,
        )
