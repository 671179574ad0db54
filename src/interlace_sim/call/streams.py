"""Implementations by libraries: products on one stream, copies on another, and kernels around."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from interlace.costs.time import MachineProfile, SizedCall
from interlace.units import ceil_div, round_up
from interlace_sim.call.movers import Mover
from interlace_sim.call.tiles import TiledKernel
from interlace_sim.call.world import COPIES, Key, Process, Program, World

_PRODUCT, _COPY = "gemm of the library", "Memcpy PtoP (Device -> Device)"
_SLICES = 16
"""Slices in which a library's product with remote stores is taken to send its rows to a rank."""

_STAGERS = 264
"""Programs of the kernel that copies this rank's rows to where its peers fetch them."""

_MAPPING_BYTES = 2 << 20
"""Bytes of which mapped memory is a multiple."""

_LEAST_ROWS, _FEW_ROWS = 64, 128
"""Rows of the library's lowest tiles, and rows that one tile of it covers."""

_MOST_PIECES = 2
"""Pieces of the rows for one rank, at most, where a kernel adds up what copies bring."""


class Streams:
    """The streams of one rank in a call around a product.

    Attributes:
        rows: Rows that belong to each rank.
        part_bytes: Bytes of the product's rows for one rank.
    """

    def __init__(self, world: World, rank: int, profile: MachineProfile, call: SizedCall) -> None:
        self.world, self.rank, self._profile, self._call = world, rank, profile, call
        self.ranks = world.ranks
        self.rows = ceil_div(call.rows, call.world_size)
        self.itemsize = call.output_itemsize or call.itemsize
        self.part_bytes = self.rows * call.columns * self.itemsize
        self.own_bytes = self.rows * call.inner * call.itemsize

    @property
    def in_turn(self) -> list[int]:
        """Return all ranks, from the next one on; this one is the last."""
        return [(self.rank + 1 + step) % self.ranks for step in range(self.ranks)]

    # Steps of a stream

    def product(self, rows: int | None = None, *, name: str = _PRODUCT) -> Process:
        """Multiply by the library: all rows, or some."""
        launch_us = self._profile.product.launch_us
        body_us = self._profile.library_product_us(self._call, rows) - launch_us
        yield round(1e3 * launch_us)
        start = self.world.engine.now
        yield round(1e3 * body_us)
        self.world.active(self.rank, name, start)

    def copy(self, source: int, dest: int, nbytes: float, key: Key) -> Process:
        """Copy by a copy engine of this rank, from a rank to another."""
        start = self.world.engine.now
        self.world.send(source, dest, nbytes, key)
        yield [key]
        self.world.active(self.rank, _COPY, start, stream=COPIES)

    def collect(self, collective: str) -> Mover:
        """Return the kernel that takes what has arrived from all ranks to the result."""
        columns = self._call.columns
        if collective == "all_to_all":
            return Mover(
                "collect", self.rows, columns, moved_bytes=2 * self.ranks * self.part_bytes
            )
        moved_bytes = (self.ranks + 1) * self.part_bytes
        sums = self.part_bytes if collective == "all_reduce" else 0
        return Mover("collect", self.rows, columns, moved_bytes=moved_bytes, sum_bytes=sums)

    # Implementations: each starts everything that runs on this rank

    def fused(self, kernel: TiledKernel, collective: str) -> None:
        """Run one kernel that sends its tiles as it computes them."""

        def body(program: Program) -> Process:
            if collective == "all_to_all":
                return kernel.all_to_all(program)
            return kernel.send_and_sum(program, broadcast=collective == "all_reduce")

        def main() -> Process:
            yield round(1e3 * self._profile.product.launch_us)
            kernel.start(self.rank, body)

        self.world.start(main())

    def chunked(self, collective: str) -> None:
        """Multiply for one rank after another; copy engines take each chunk meanwhile."""
        me = self.rank
        copied = [("copied", me, to) for to in self.in_turn[:-1]]

        def main() -> Process:
            for to in self.in_turn:
                yield from self.product(self.rows)
                self.world.post(("chunk", me, to))
            yield copied
            yield from self.collect(collective).run(self.world, me)

        self.world.start(main())
        self.world.start(self._copies([[("chunk", me, to)] for to in self.in_turn[:-1]]))

    def remote_stores(self, collective: str) -> None:
        """Multiply by the library, whose stores go to the peers' memory as they are made."""
        me, world, profile = self.rank, self.world, self._profile
        if self.part_bytes % _MAPPING_BYTES == 0:
            # Ranks' rows have no gaps between them, so that one product of all rows writes them.
            product_us = profile.library_product_us(self._call)
        elif self.rows <= _FEW_ROWS:
            # The products of a batch are computed at the same time, and w is read once for all.
            rows = self.ranks * round_up(self.rows, _LEAST_ROWS)
            product_us = profile.library_product_us(self._call, rows)
        else:
            product_us = profile.library_product_us(self._call, self.rows, self.ranks)
        body_ns = round(1e3 * (product_us - profile.product.launch_us))
        size = self.part_bytes / _SLICES

        def main() -> Process:
            yield round(1e3 * profile.product.launch_us)
            start = world.engine.now
            keys: list[Key] = []
            for piece in range(_SLICES * self.ranks):
                yield body_ns // (_SLICES * self.ranks)
                to = piece // _SLICES
                if to != me:
                    keys.append(("stored", me, piece))
                    efficiency = world.machine.collectives.fused_efficiency.value
                    world.send(me, to, size, keys[-1], efficiency=efficiency)
            yield keys
            world.active(me, _PRODUCT, start)
            yield from self.collect(collective).run(world, me)

        world.start(main())

    def pushed(self, collective: str) -> None:
        """Multiply by the library, before or after one small kernel that stores rows at peers."""
        columns, part, ranks = self._call.columns, self.part_bytes, self.ranks
        inner, own = self._call.inner, self.own_bytes
        kernels = {
            # The kernel, the elements that its programs share, the bytes that it puts at each peer,
            # and the bytes that it moves when values have arrived.
            "all_gather": ("spread_rows", self.rows, inner, own, 2 * ranks * own),
            "all_to_all": ("spread_rows", self.rows, columns, part, 2 * ranks * part),
            "reduce_scatter": ("sum_parts", self.rows, columns, part, (2 * ranks + 1) * part),
            "all_reduce": (
                "sum_parts", self._call.rows, columns, ranks * part, (ranks + 1) * ranks * part,
            ),
        }  # fmt: skip

        def main() -> Process:
            mover = Mover(*kernels[collective], by_words=True).run(self.world, self.rank)
            steps = (
                (mover, self.product()) if collective == "all_gather" else (self.product(), mover)
            )
            for step in steps:
                yield from step

        self.world.start(main())

    def chunked_sum(self, kernel: TiledKernel) -> None:
        """Multiply the peers' rows by the library, in pieces that copy engines send, and this
        rank's own by a kernel that adds the pieces that come.
        """
        me, world = self.rank, self.world
        # The kernel's first tiles hide the last copy, unless that takes longer than they do.
        copy_ns = 1e9 * self.part_bytes / world.machine.network.link_bytes_per_s.value
        pieces = 1 if copy_ns < kernel.tile_ns else _MOST_PIECES
        order = [(piece, to) for piece in range(pieces) for to in self.in_turn[:-1]]

        def main() -> Process:
            for piece, to in order:
                yield from self.product(ceil_div(self.rows, pieces))
                world.post(("chunk", me, to, piece))
            yield round(1e3 * self._profile.product.launch_us)
            kernel.start(me, lambda program: kernel.own_rows(program, pieces))

        def side() -> Process:
            yield from self._alone("admit_parts", _nothing)
            for piece, to in order:
                yield [("chunk", me, to, piece)]
                yield from self.copy(me, to, self.part_bytes / pieces, ("copied", me, to, piece))
                world.signal(("piece", me, to, piece))

        world.start(side())
        world.start(main())

    def gather(self, kernel: TiledKernel | None) -> None:
        """Fetch the peers' rows by copy engines, and multiply each source's as they come: by a
        kernel that waits for them, or by the library.
        """
        me, world = self.rank, self.world
        sources = self.in_turn[:-1]

        def stage() -> Process:
            yield round(world.machine.gpu.kernel_ns.value)
            launch = world.launch(me, "stage_rows")
            programs = [Program(world, me, launch, number) for number in range(_STAGERS)]
            yield world.memory_ns(2 * self.own_bytes)
            programs[-1].signal({peer: ("staged", me, peer) for peer in sources})
            world.post(("staging", me))

        def side() -> Process:
            yield from self._alone(
                "await_rows",
                lambda program: program.wait(0, {peer: ("staged", peer, me) for peer in sources}),
            )
            for source in sources:
                nbytes = self.own_bytes
                yield from self.copy(source, me, nbytes, ("fetched", source, me))
                world.post(("rows", source, me))

        def main() -> Process:
            yield [("staging", me)]
            if kernel is not None:
                yield round(1e3 * self._profile.product.launch_us)
                kernel.start(me, kernel.gather)
                return
            yield from self.product(self.rows)
            for source in sources:
                yield [("rows", source, me)]
                yield from self.product(self.rows)

        for process in (stage(), side(), main()):
            world.start(process)

    def _copies(self, awaited: Sequence[Sequence[Key]]) -> Process:
        """Copy each peer's part when what it waits for is there, the next rank's first."""
        for to, keys in zip(self.in_turn, awaited, strict=False):
            yield keys
            yield from self.copy(self.rank, to, self.part_bytes, ("copied", self.rank, to))

    def _alone(self, name: str, body: Callable[[Program], Process]) -> Process:
        """Run a kernel of one program."""
        yield round(self.world.machine.gpu.kernel_ns.value)
        program = Program(self.world, self.rank, self.world.launch(self.rank, name), 0)
        yield from body(program)


def _nothing(program: Program) -> Process:
    yield 0
