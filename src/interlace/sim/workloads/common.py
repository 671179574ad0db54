"""What the workloads share: values with sources, lists of layers, and a list of tasks that grows."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, model_validator

from interlace.sim.configfile import Strict, parse, read
from interlace.sim.machine import Confidence, Given, find, replace
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
    """Base of the workloads: every number is at least 0, and whole where it counts things."""

    name: str
    note: str = ""

    @model_validator(mode="after")
    def _whole_numbers(self) -> Workload:
        for key in type(self).model_fields:
            given = getattr(self, key)
            value = getattr(given, "value", None)
            if (
                isinstance(value, float)
                and key not in self.fractions()
                and (value != int(value) or value < 1)
            ):
                raise ValueError(f"{key} must be a whole number of at least 1; got {value:g}")
        return self

    @classmethod
    def fractions(cls) -> tuple[str, ...]:
        """Keys whose values need not be whole numbers above 0."""
        return ()


Model = TypeVar("Model", bound=Workload)


def load_workload(
    model: type[Model], folder: str, name: str, changes: dict[str, Any] | None = None
) -> Model:
    """A preset or YAML file, with values replaced by key.

    Raises:
        ConfigError: naming the file, the key and the fix.
    """
    file = find(folder, name)
    data = read(file)
    for key, value in (changes or {}).items():
        replace(data, key, value, str(file))
    return parse(model, data, str(file))


class Tasks:
    """Tasks in the order in which a rank's program issues them."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def add(self, name: str, row: str, work: Work, *deps: str | None) -> str:
        """Append a task; its name. Dependencies that are None are left out."""
        self.tasks.append(Task(name, row, work, tuple(dep for dep in deps if dep is not None)))
        return name

    def kernel(self, name: str, flops: float, memory_bytes: float, *deps: str | None) -> str:
        """Append a kernel to the compute row."""
        return self.add(name, COMPUTE, Kernel(flops, memory_bytes), *deps)


def product(m: float, n: float, k: float, itemsize: float) -> tuple[float, float]:
    """FLOPs and memory bytes of an [m, k] by [k, n] matrix product that reads and writes everything
    once.
    """
    return 2 * m * n * k, itemsize * (m * k + n * k + m * n)


__all__ = ["Fusing", "Given", "GivenLayers", "Tasks", "Workload", "load_workload", "product"]
