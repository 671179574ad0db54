"""Export of a step as ASTRA-sim's graph, which ASTRA-sim and the compatibility mode run."""

from __future__ import annotations

from collections.abc import Sequence

from interlace.errors import ConfigError
from interlace_sim.astra.graph import Node
from interlace_sim.kernel_time import kernel_ns
from interlace_sim.machine import Machine
from interlace_sim.work import Collective, HostCopy, Kernel, Task


def to_graph(tasks: Sequence[Task], machine: Machine) -> list[Node]:
    """Return the graph of an NPU; all NPUs have equal graphs.

    A row's order becomes dependencies. Kernels have the machine's time in full microseconds (at
    least one), and their FLOPs and bytes for the roofline. Copies from the host are left out, as
    ASTRA-sim has no such resource.

    Raises:
        ConfigError: a task has no counterpart in a graph: a fused kernel, a collective of some
            ranks only, a message.
    """
    numbers: dict[str, int] = {}
    nodes: list[Node] = []
    last: dict[str, str] = {}
    # ASTRA-sim has no copies from the host, so tasks lose their dependencies on them as well.
    left_out = {task.name for task in tasks if isinstance(task.work, HostCopy)}
    for task in tasks:
        if task.name in left_out:
            continue
        # A row runs one task at a time; a graph has no rows, so their order becomes dependencies.
        before = [dep for dep in task.deps if dep not in left_out]
        if task.row in last:
            before.append(last[task.row])
        deps = tuple(sorted({numbers[dep] for dep in before}))
        work = task.work
        number = len(nodes)
        if isinstance(work, Kernel):
            time = kernel_ns(machine.gpu, work)
            node = Node(
                number,
                task.name,
                deps,
                # Chakra's times are integers of microseconds, and 0 would mean one nanosecond.
                duration_us=max(1, round(time / 1000)),
                flops=round(work.flops),
                size=round(work.memory_bytes),
            )
        elif isinstance(work, Collective) and work.axes is None:
            node = Node(number, task.name, deps, "collective", collective=work.kind, size=work.size)
        else:
            raise ConfigError(
                "a Chakra trace must have kernels and collectives of all ranks only; "
                f"{task.name!r} is neither. Ask for --fused none, of a DLRM."
            )
        numbers[task.name] = number
        last[task.row] = task.name
        nodes.append(node)
    return nodes
