"""Fused kernels around a product, tile by tile, in the order in which the real ones go round."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from interlace.costs.time import MachineProfile, SizedCall
from interlace.units import ceil_div
from interlace_sim.call.world import Key, Launch, Process, Program, World


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The tiles of a fused kernel's product.

    Attributes:
        block_m, block_n: Rows and columns of a tile.
        block_k: Elements along K that a program loads at a time.
        num_stages: Loads in flight.
        most_programs: Number of programs; 0 for one per processor.
        group_m: Rows of tiles that are computed together.
        interleave: Tiles for one rank before the next rank's turn; where parts are summed, programs
            that begin a round of tiles with the same rank.
        stagger: Per cent of a tile's time over which programs begin one after another.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    num_stages: int = 3
    most_programs: int = 0
    group_m: int = 8
    interleave: int = 8
    stagger: int = 0


class TiledKernel:
    """A fused kernel of one call, on every rank.

    Attributes:
        world: The ranks.
        programs: Number of its programs.
        tiles: Tiles of one rank's rows.
        tile_bytes: Bytes of a tile that travels.
        tile_ns: Time of a tile.
        put_ns: The part of it from the end of a tile's multiplications to its store.
    """

    def __init__(
        self,
        world: World,
        name: str,
        collective: str,
        profile: MachineProfile,
        call: SizedCall,
        tiling: Tiling,
    ) -> None:
        self.world, self.name, self._tiling, self._call = world, name, tiling, call
        self.programs = min(tiling.most_programs or profile.processors, profile.processors)
        self.rows = ceil_div(call.rows, call.world_size)
        self._tiles_m = ceil_div(self.rows, tiling.block_m)
        self.tiles = self._tiles_m * ceil_div(call.columns, tiling.block_n)
        itemsize = call.output_itemsize or call.itemsize
        self.tile_bytes = tiling.block_m * tiling.block_n * itemsize
        # The last rows and columns of a tile may lie outside of the result.
        self._sent_bytes = self.rows * call.columns * itemsize / self.tiles
        tile_us = profile.tile_us(
            tiling.block_m, tiling.block_n, call.inner, profile.flops_per_s(call, own=True)
        )
        memory_us = 1e6 * self._operand_bytes(collective) / profile.product.memory_bytes_per_s
        # A load takes its time, however small the tile is that waits for it.
        steps = ceil_div(call.inner, tiling.block_k)
        loads_us = steps * world.machine.gpu.load_ns.value / tiling.num_stages / 1e3
        # What a tile takes beside its multiplications is the way from registers to the store.
        self.put_ns = round(1e3 * profile.product.tile_us)
        self._compute_ns = round(1e3 * max(tile_us, memory_us, loads_us)) - self.put_ns
        self.tile_ns = self._compute_ns + self.put_ns
        self._spread_ns = self.tile_ns * tiling.stagger // 100
        self._efficiency = world.machine.collectives.fused_efficiency.value
        self._senders = [0] * world.ranks
        self._ended = [0] * world.ranks

    def _operand_bytes(self, collective: str) -> float:
        """Return the bytes of x and w that all programs together read for a tile of each.

        Neighbours share rows and columns of tiles in the L2, which seldom holds what the tiles
        before have read: a weight may be read once for each rank's rows.
        """
        tiling, call, ranks = self._tiling, self._call, self.world.ranks
        if collective == "all_to_all":
            numbers, dests = ceil_div(self.programs, ranks), ranks
        elif collective == "all_gather":
            numbers, dests = self.programs, max(1, self.programs // self.tiles)
        else:
            numbers, dests = self.programs, ranks
        lines = min(tiling.group_m, self._tiles_m)
        columns = min(ceil_div(min(numbers, self.tiles), lines) * tiling.block_n, call.columns)
        rows = min(lines * tiling.block_m, self.rows) * dests
        return float((rows + columns) * call.inner * call.itemsize)

    def start(self, rank: int, body: Callable[[Program], Process], end: Key | None = None) -> None:
        """Start the kernel on a rank now; with ``end``, post a key when all programs have ended."""
        launch = self.world.launch(rank, self.name)
        for number in range(self.programs):
            self.world.start(self._program(rank, launch, number, body, end))

    def _program(
        self,
        rank: int,
        launch: Launch,
        number: int,
        body: Callable[[Program], Process],
        end: Key | None,
    ) -> Process:
        program = Program(self.world, rank, launch, number)
        yield from body(program)
        self._ended[rank] += 1
        if end is not None and self._ended[rank] == self.programs:
            self.world.post(end)

    # The bodies of programs

    def all_to_all(self, program: Program) -> Process:
        """Send each tile to its owner, in turn for each, from the neighbour's on."""
        me, ranks, interleave = program.rank, self.world.ranks, self._tiling.interleave
        yield from self._grant(program)
        sent = _Sent(self, program)
        tasks = ceil_div(self.tiles, interleave) * interleave
        for task in range(program.number, tasks * ranks, self.programs):
            dest = (me + 1 + task // interleave) % ranks
            tile = task // (interleave * ranks) * interleave + task % interleave
            if tile < self.tiles:
                yield from self._multiply(program, tile)
                yield from sent.put(dest)
        yield from self._end_sending(program, sent)

    def send_and_sum(self, program: Program, *, broadcast: bool) -> Process:
        """Send parts to their owners, and sum this rank's own rows a round behind.

        Args:
            broadcast: Whether every rank gets the sums.
        """
        me, ranks = program.rank, self.world.ranks
        if broadcast:
            yield from self._grant(program)
        else:
            yield self._spread_ns * program.number // self.programs
        sent = _Sent(self, program)
        unannounced = -1
        rounds = ceil_div(self.tiles, self.programs)
        for step in range(rounds * ranks + 1):
            turn = (step + program.number // self._tiling.interleave) % ranks
            if step == rounds * ranks:
                turn = ranks - 1
            dest = (me + 1 + turn) % ranks
            this_round = step // ranks * self.programs + program.number
            tile = this_round - self.programs if dest == me else this_round
            if not 0 <= tile < self.tiles:
                continue
            yield from self._multiply(program, tile)
            if 0 <= unannounced < this_round:
                yield from self._announce(program, unannounced, sent)
                unannounced = -1
            if dest != me:
                yield from sent.put(dest)
                unannounced = this_round
                continue
            awaited = {peer: ("part", peer, me, tile) for peer in program.peers}
            yield from program.wait(tile, awaited)
            # Parts are read, and the sum is stored, while other programs do the same.
            yield self.world.move(me, (ranks + 1) * self.tile_bytes)
            if broadcast:
                yield from sent.put(*((me + ahead) % ranks for ahead in range(ranks)))
        if unannounced >= 0:
            yield from self._announce(program, unannounced, sent)
        yield from self._end_sending(program, sent)

    def gather(self, program: Program) -> Process:
        """Multiply this rank's own rows, and then each source's when they have arrived."""
        me, ranks = program.rank, self.world.ranks
        known = me
        for task in range(program.number, self.tiles * ranks, self.programs):
            source = (me + task // self.tiles) % ranks
            if source != known:
                known = source
                # A copy sets the signal; nobody else does.
                yield from program.wait(0, {source: ("rows", source, me)})
            yield from self._multiply(program, task)
            yield self.put_ns

    def own_rows(self, program: Program, pieces: int) -> Process:
        """Multiply this rank's own rows, and add the peers' parts, which copies bring.

        Args:
            pieces: Pieces in which the rows of each peer's part arrive.
        """
        me, here = program.rank, 0
        for tile in range(program.number, self.tiles, self.programs):
            yield from self._multiply(program, tile)
            needed = tile * pieces // self.tiles + 1
            if needed > here:
                here = needed
                keys = {peer: ("piece", peer, me, needed - 1) for peer in program.peers}
                yield from program.wait(tile, keys)
            yield self.world.move(me, (self.world.ranks + 1) * self.tile_bytes)
        self._say_done(program)

    # Their parts

    def _multiply(self, program: Program, tile: int) -> Process:
        program.record("tile", tile)
        yield self._compute_ns
        program.record("computed", tile)

    def _grant(self, program: Program) -> Process:
        """Tell the peers which buffer is theirs, begin in turn, and wait for the peers' grants."""
        me = program.rank
        if program.number == 0:
            program.signal({peer: ("grant", me, peer) for peer in program.peers})
        yield self._spread_ns * program.number // self.programs
        yield from program.wait(0, {peer: ("grant", peer, me) for peer in program.peers})

    def _announce(self, program: Program, tile: int, sent: _Sent) -> Process:
        """Signal a part to all peers once its copies have arrived."""
        yield from sent.complete()
        program.signal({peer: ("part", program.rank, peer, tile) for peer in program.peers})

    def _end_sending(self, program: Program, sent: _Sent) -> Process:
        """Tell the peers when the last program has sent everything; the last one waits for them."""
        me = program.rank
        yield from sent.complete()
        self._say_done(program)
        if program.number == self.programs - 1:
            yield from program.wait(0, {peer: ("done", peer, me) for peer in program.peers})

    def _say_done(self, program: Program) -> None:
        """Tell the peers that this rank is done, if this program is the last one to be."""
        me = program.rank
        self._senders[me] += 1
        if self._senders[me] == self.programs:
            program.signal({peer: ("done", me, peer) for peer in program.peers})

    def put(self, program: Program, dest: int, key: Key) -> None:
        """Put a tile at a rank now, by a copy out of shared memory; the key says it is there."""
        program.record("put", self.tile_bytes, dest)
        if dest == program.rank:
            self.world.post(key)
        else:
            self.world.send(program.rank, dest, self._sent_bytes, key, efficiency=self._efficiency)


class _Sent:
    """The tiles that one program has sent: each leaves shared memory before the next one enters."""

    def __init__(self, kernel: TiledKernel, program: Program) -> None:
        self._kernel, self._program = kernel, program
        self._count = 0
        self._last: list[Key] = []

    def put(self, *dests: int) -> Process:
        """Put the tile that has been computed at some ranks."""
        yield from self.complete()
        yield self._kernel.put_ns
        program = self._program
        self._last = []
        for dest in dests:
            self._count += 1
            key = ("tile", program.rank, program.number, self._count)
            self._last.append(key)
            self._kernel.put(program, dest, key)

    def complete(self) -> Process:
        """Wait until the last tile has arrived."""
        yield self._last
