"""Small kernels that move rows or add them up, in which programs meet those of other ranks."""

from __future__ import annotations

import dataclasses

from interlace.units import ceil_div
from interlace_sim.call.world import Key, Launch, Process, Program, World

_ROWS, _COLUMNS = 4, 1024
_FEW, _MOST = 132, 1024


@dataclasses.dataclass(frozen=True)
class Mover:
    """A kernel of one program for some tiles of 4 x 1024 elements.

    Attributes:
        name: Name of the kernel.
        rows, columns: Elements that its programs share.
        put_bytes: Bytes that it puts at each peer before it meets them.
        moved_bytes: Bytes of device memory that it moves when it has met them.
        sum_bytes: Bytes that it puts at each peer behind that, to meet them once more.
        by_words: Whether what it puts shows by itself that it has arrived, without signals.
    """

    name: str
    rows: int
    columns: int
    put_bytes: float = 0.0
    moved_bytes: float = 0.0
    sum_bytes: float = 0.0
    by_words: bool = False

    @property
    def programs(self) -> int:
        """Return the number of programs, as the real kernels' launch has it."""
        tiles = ceil_div(self.rows, _ROWS) * ceil_div(self.columns, _COLUMNS)
        return max(min(tiles, max(_FEW, tiles // 2), _MOST), 1)

    def run(self, world: World, rank: int) -> Process:
        """Launch the kernel on a rank, and wait for its end."""
        yield round(1e3 * launch_us(world))
        launch = world.launch(rank, self.name)
        ends: list[Key] = []
        for number in range(self.programs):
            ends.append((self.name, "end", rank, number))
            world.start(self._program(world, rank, launch, number, ends[-1]))
        yield ends

    def _program(self, world: World, rank: int, launch: Launch, number: int, end: Key) -> Process:
        program = Program(world, rank, launch, number)
        if self.by_words:
            yield from self._put(program, self.put_bytes, "put")
            program.record("wait", number)
            yield [(self.name, "put", peer, rank, number) for peer in program.peers]
            program.record("unpacked", number)
        else:
            if self.put_bytes:
                yield from self._put(program, self.put_bytes, "put")
                yield [(self.name, "put", rank, peer, number) for peer in program.peers]
            yield from program.barrier((self.name, "meet"))
        yield world.memory_ns(self.moved_bytes / self.programs, 1 / self.programs)
        if self.sum_bytes:
            yield from self._put(program, self.sum_bytes, "sum")
            yield [(self.name, "sum", rank, peer, number) for peer in program.peers]
            yield from program.barrier((self.name, "part"))
        world.post(end)

    def _put(self, program: Program, nbytes: float, what: str) -> Process:
        """Read a share of the bytes, and put it at each peer."""
        world, share = program.world, nbytes / self.programs
        efficiency = world.machine.collectives.fused_efficiency.value
        for peer in program.peers:
            yield world.memory_ns(share, 1 / self.programs)
            key = (self.name, what, program.rank, peer, program.number)
            program.record("put", round(share), peer)
            world.send(program.rank, peer, share, key, efficiency=efficiency)


def launch_us(world: World) -> float:
    """Return the time of a small kernel's launch on a stream, in microseconds."""
    return world.machine.gpu.kernel_ns.value / 1e3
