"""Fused kernels around a product of few rows, which send packed words that need no signals."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from interlace.units import ceil_div
from interlace_sim.call.world import Key, Launch, Process, Program, World


@dataclasses.dataclass(frozen=True)
class WordsKernel:
    """A kernel whose tiles of the weight's rows are read once.

    Attributes:
        world: The ranks.
        name: Name of the kernel.
        tiles: Number of tiles.
        programs: Number of programs, all of which are resident.
        weight_bytes: Bytes that a rank reads.
        tile_bytes: Bytes of the packed words of a tile.
    """

    world: World
    name: str
    tiles: int
    programs: int
    weight_bytes: int
    tile_bytes: int

    def start(self, rank: int, *, two_phase: bool) -> None:
        """Start the kernel on a rank.

        Args:
            two_phase: Whether parts go to the owners of their rows, which send the sums to all;
                else every rank gets every part.
        """
        self.world.start(self._launch(rank, two_phase))

    def _launch(self, rank: int, two_phase: bool) -> Process:
        yield round(self.world.machine.gpu.kernel_ns.value)
        launch = self.world.launch(rank, self.name)
        for number in range(self.programs):
            self.world.start(self._program(rank, launch, number, two_phase))

    def _program(self, rank: int, launch: Launch, number: int, two_phase: bool) -> Process:
        ranks, world = self.world.ranks, self.world
        yield round(number * world.machine.gpu.program_ns.value)
        program = Program(world, rank, launch, number)
        own = range(number, self.tiles, self.programs)
        part_bytes = self.tile_bytes // ranks if two_phase else self.tile_bytes
        # All programs read at the same time, so that each has its share of the memory's rate.
        waves = ceil_div(self.tiles, self.programs)
        for tile in own:
            program.record("tile", tile)
            yield world.read_ns(self.weight_bytes) // waves
            self._put(program, "part", tile, part_bytes)
        for tile in own:
            yield from self._wait(program, "part", tile)
            yield world.memory_ns((ranks + 1) * part_bytes, 1 / self.programs)
            if two_phase:
                self._put(program, "sum", tile, part_bytes)
        for tile in own if two_phase else ():
            yield from self._wait(program, "sum", tile)

    def _put(self, program: Program, what: str, tile: int, nbytes: int) -> None:
        efficiency = self.world.machine.collectives.fused_efficiency.value
        for peer in program.peers:
            program.record("put", nbytes, peer)
            key = (what, program.rank, peer, tile)
            self.world.send(program.rank, peer, nbytes, key, efficiency=efficiency)

    def _wait(self, program: Program, what: str, tile: int) -> Process:
        program.record("wait", tile)
        keys: Iterable[Key] = [(what, peer, program.rank, tile) for peer in program.peers]
        yield keys
        program.record("unpacked", tile)
