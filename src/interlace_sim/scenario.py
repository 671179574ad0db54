"""A run by name: a model on a machine, a number of nodes, and the passes that are fused.

Commands, sweeps and studies run scenarios.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from interlace.errors import ConfigError
from interlace.units import GB, GIB, KB, KIB, MB, MIB, TB, TIB
from interlace_sim.collectives import ALGORITHMS
from interlace_sim.defaults import DEFAULTS
from interlace_sim.machine import Machine, load_machine
from interlace_sim.results import Result
from interlace_sim.step import Watch
from interlace_sim.work import Collective, Task
from interlace_sim.workloads import dlrm, moe, transformer
from interlace_sim.workloads.common import Choices, Fusing, Step, Workload, load_workload

KINDS = tuple(DEFAULTS)
MODELS: dict[str, type[Workload]] = {
    "dlrm": dlrm.Dlrm,
    "transformer": transformer.Transformer,
    "moe": moe.Moe,
}
FUSING: tuple[Fusing, ...] = ("none", "forward", "both")
_DECIMAL = {"B": 1, "kB": KB, "KB": KB, "MB": MB, "GB": GB, "TB": TB}
_BYTES_OF = {**_DECIMAL, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_MAX_BYTES = 2**60
_MAX_SLICES = 2**12
_KINDS_OF_VALUES: dict[str, tuple[type, str]] = {
    "int": (int, "a whole number"),
    "bool": (bool, "true or false"),
}


@dataclasses.dataclass(frozen=True)
class Scenario(Choices):
    """Everything that determines a result, the choices of :class:`Choices` among it.

    Attributes:
        kind: One of :data:`KINDS`.
        model, machine: A preset's name or a YAML file.
        nodes: Number of nodes; a node has one or several of the machine's GPUs.
        topology: Network between nodes; None is the machine's.
        collective, algorithm, size: Kind, algorithm and bytes of a ``collective``.
        all_ranks: Simulate every rank instead of one that stands for all.
        model_changes, machine_changes: Pairs of a dotted key and its value.
    """

    kind: str
    model: str = ""
    machine: str = ""
    nodes: int = 0
    topology: str | None = None
    collective: str = "all_to_all"
    algorithm: str = "one_shot"
    size: int = 16 << 20
    all_ranks: bool = False
    model_changes: tuple[tuple[str, Any], ...] = ()
    machine_changes: tuple[tuple[str, Any], ...] = ()

    def complete(self) -> Scenario:
        """Fill in the defaults of the scenario's kind.

        Raises:
            ConfigError: a value is one that no run can have.
        """
        if self.kind not in KINDS:
            raise ConfigError(f"a workload must be one of {', '.join(KINDS)}; got {self.kind!r}.")
        if self.fused not in FUSING:
            raise ConfigError(f"--fused must be none, forward or both; got {self.fused!r}.")
        for name in ("all_to_all", "all_reduce"):
            if getattr(self, name) not in ALGORITHMS[name]:
                raise ConfigError(
                    f"{name} must be one of {', '.join(ALGORITHMS[name])}; got "
                    f"{getattr(self, name)!r}."
                )
        if self.nodes < 0:
            raise ConfigError(f"nodes must not be negative; got {self.nodes}.")
        if not 0 <= self.slices <= _MAX_SLICES:
            raise ConfigError(f"slices must be from 0 to {_MAX_SLICES}; got {self.slices}.")
        if self.size < 1:
            raise ConfigError(f"a collective's bytes must be at least 1; got {self.size}.")
        # Larger ones are mistakes, and times of them are no longer exact.
        if self.size > _MAX_BYTES:
            raise ConfigError(
                f"a collective's bytes must be at most 2^60; got {Decimal(self.size):.3g}."
            )
        if self.kind == "collective" and (self.model or self.model_changes):
            raise ConfigError("a collective has no model; got one. Leave it out.")
        default = DEFAULTS[self.kind]
        return dataclasses.replace(
            self,
            model=self.model or default.model,
            machine=self.machine or default.machine,
            nodes=self.nodes or default.nodes,
        )

    def change(self, changes: Mapping[str, Any]) -> Scenario:
        """Replace parameters: a field by its name, or ``model.KEY`` or ``machine.KEY``.

        Raises:
            ConfigError: there is no such parameter, or its value is of another kind.
        """
        fields: dict[str, Any] = {}
        keyed = {"model": dict(self.model_changes), "machine": dict(self.machine_changes)}
        # The changes themselves are not parameters: a user changes model.KEY and machine.KEY.
        known = {
            field.name: field
            for field in dataclasses.fields(self)
            if not field.name.endswith("_changes")
        }
        for key, value in changes.items():
            owner, _, inner_key = key.partition(".")
            if inner_key and owner in keyed:
                keyed[owner][inner_key] = value
            elif key in known and key != "kind":
                fields[key] = _parameter(known[key], value)
            else:
                raise ConfigError(
                    "a parameter must be one of "
                    f"{', '.join(name for name in known if name != 'kind')}, model.KEY or "
                    f"machine.KEY; got {key!r}."
                )
        return dataclasses.replace(
            self,
            **fields,
            # Sorted, so that scenarios with equal changes are equal, however they were made.
            model_changes=tuple(sorted(keyed["model"].items())),
            machine_changes=tuple(sorted(keyed["machine"].items())),
        )

    def load_machine(self) -> Machine:
        """Load the scenario's machine with its changes."""
        return load_machine(self.complete().machine, dict(self.machine_changes))

    def load_model(self) -> Workload:
        """Load the scenario's model with its changes; its class is that of the kind."""
        full = self.complete()
        return load_workload(MODELS[full.kind], full.kind, full.model, dict(full.model_changes))

    def step(self) -> Step:
        """List the scenario's tasks, on its network.

        Raises:
            ConfigError: a file, a key or a combination is wrong.
        """
        full = self.complete()
        machine = full.load_machine()
        # A machine without nodes counts every GPU as a node.
        ranks = full.nodes * (machine.node.gpus if machine.node else 1)
        topology = machine.build_topology(ranks, full.topology)
        if full.kind != "collective":
            return full.load_model().step(topology, full)
        work = Collective(full.collective, full.algorithm, full.size)
        tasks = [Task(full.collective, full.collective, work)]
        return Step(f"{full.collective}, {full.algorithm}", topology, tasks)

    def simulate(self, watch: Watch | None = None) -> Result:
        """Simulate the scenario; errors are those of :meth:`step`.

        Args:
            watch: As :func:`interlace_sim.step.run` takes it.
        """
        return self.step().run(self.load_machine(), all_ranks=self.all_ranks, watch=watch)


def parse_size(text: str) -> int:
    """Parse a size in bytes: ``"16MiB"`` is 16777216, and so is ``"16777216"``.

    Units are B, kB, MB, GB and TB (powers of ten), and KiB, MiB, GiB and TiB (powers of two).

    Raises:
        ConfigError: the text is not a size.
    """
    # With two digits of an exponent no number takes long to be made.
    number = r"(\d+(?:\.\d+)?(?:[eE]\+?\d{1,2})?)"
    match = re.fullmatch(rf"{number}\s*([KMGT]i?B|kB|B)?", text.strip())
    # Decimal, since a float has fewer digits than a large number of bytes.
    size = Decimal(match[1]) * _BYTES_OF[match[2] or "B"] if match else Decimal(-1)
    if size < 0 or size != int(size):
        raise ConfigError(
            f"size must be a number of bytes; got {text!r}. Say 16MiB, or 16MB for powers of ten; "
            "units are B, kB, MB, GB, TB, KiB, MiB, GiB and TiB."
        )
    return int(size)


def _parameter(field: dataclasses.Field[Any], value: Any) -> Any:
    """Return a scenario's parameter; a size may be text, such as ``"16MiB"``.

    Raises:
        ConfigError: the value is not of the parameter's kind.
    """
    if field.name == "size" and isinstance(value, str):
        return parse_size(value)
    if field.name == "topology" and value is None:
        return value
    kind, rule = _KINDS_OF_VALUES.get(str(field.type), (str, "a name"))
    # Exactly: Python's truth values are ints.
    given = type(value)
    if given is not kind:
        raise ConfigError(f"{field.name} must be {rule}; got {value!r}.")
    if field.name in ("nodes", "tensor", "pipeline") and value < 1:
        raise ConfigError(f"{field.name} must be at least 1; got {value}.")
    return value
