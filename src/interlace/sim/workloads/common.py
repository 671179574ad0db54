"""Parts that the workloads share: lists of layers with sources, and a list of tasks that grows."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, model_validator

from interlace.sim.configfile import Strict
from interlace.sim.machine import Confidence, Given, find, load_changed
from interlace.sim.work import COMPUTE, Kernel, Task, Work

Fusing = Literal["none", "forward", "both"]
"""Which passes use the fused operators."""


class Layers(BaseModel):
    """Sizes of a chain of layers, with their source."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: Annotated[list[PositiveInt], Field(min_length=2)]
    source: Annotated[str, Field(min_length=3)]
    confidence: Confidence


def _with_source(value: Any) -> Any:
    return (
        {"value": value, "source": "given without a source", "confidence": "assumed"}
        if isinstance(value, list)
        else value
    )


GivenLayers = Annotated[Layers, BeforeValidator(_with_source)]


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
        return self

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
    return load_changed(model, find(folder, name), changes, suffix="")


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


def product(m: float, n: float, k: float, itemsize: float) -> tuple[float, float]:
    """Return FLOPs and memory bytes of an [m, k] by [k, n] matrix product.

    Operands and result are moved once.
    """
    return 2 * m * n * k, itemsize * (m * k + n * k + m * n)


__all__ = ["Fusing", "Given", "GivenLayers", "Tasks", "Workload", "load_workload", "product"]
