"""Messages on a topology, and the links that they occupy over time.

A message's head crosses a link and is at the next one ``latency`` later; its bytes occupy each link
for ``bytes / bandwidth``. With cut-through (the default, as in switches and torus routers) the head
goes on at once and the links work at the same time; with ``store_and_forward`` a hop begins when
the last byte has arrived. Links are first come, first served, and buffers are unlimited. Messages
that share a link therefore wait, and no message is faster than its links.

**One rank for all.** Where every rank does the same, all links of a class have the same load at the
same time, and the ``mirrored`` fabric keeps one server for each class: a message from rank 0 to d
occupies the classes of its path, and stands for the messages from every r to r + d. Where several
ranks share a link (uplinks of an oversubscribed leaf, a node's network card), their messages pass
it together and all of them end with the last. ``mirrored=False`` keeps every link, at the cost of
as many times more events; the tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable

from interlace_sim.engine import Engine, Join, Server, duration_ns
from interlace_sim.topology import INSIDE, Hop, Topology

# A link, a rank's share of its bandwidth in bytes per second, its latency, and its class.
_Resolved = tuple[Server, float, int, int]


class Fabric:
    """The links of a topology, and the messages on them.

    Attributes:
        sent_bytes: Bytes per link class: one rank's if mirrored, else all ranks'.
    """

    def __init__(
        self,
        engine: Engine,
        topology: Topology,
        *,
        mirrored: bool = True,
        store_and_forward: bool = False,
        observe: Callable[[str, str, int, int, float], None] | None = None,
    ) -> None:
        """Prepare the links of a topology; none is occupied.

        Args:
            engine: The clock.
            topology: Ranks and links.
            mirrored: Let rank 0 stand for all ranks.
            store_and_forward: Begin a hop when the last byte has arrived, instead of the first.
            observe: Called with (link class, kind of traffic, start, end, bytes) for every use of
                one rank's links.
        """
        self.engine, self.topology, self.mirrored = engine, topology, mirrored
        self.store_and_forward = store_and_forward
        self._observe = observe
        self._links: dict[Hop, _Resolved] = {}
        self._paths: dict[tuple[int, int], list[list[_Resolved]]] = {}
        self.sent_bytes = [0.0] * len(topology.classes)

    def servers(self) -> dict[Hop, Server]:
        """Return the links that were used, by class and number."""
        return {key: server for key, (server, *_) in self._links.items()}

    def send(
        self,
        source: int,
        destination: int,
        size: float,
        arrived: Callable[[], None],
        *,
        traffic: str = "",
        efficiency: float = 1.0,
        overhead_ns: int = 0,
    ) -> None:
        """Send ``size`` bytes now, and call ``arrived()`` when the last of them is there.

        In a mirrored fabric ``source`` is 0 and ``destination`` the displacement.

        Args:
            traffic: Name of the traffic in results.
            efficiency: Share of the links' bandwidth that the sender reaches; below 1 it occupies
                the links for longer.
            overhead_ns: Nanoseconds by which the message occupies each link beside its bytes; none
                of the links inside a node.
        """
        paths = self._ways(source, destination)
        if paths[0] and paths[0][0][0].name.startswith(INSIDE):
            overhead_ns = 0
        if size == 0 or not paths[0]:
            self.engine.after(sum(hop[2] for hop in paths[0]), arrived)
        elif len(paths) == 1:
            self._hop(paths[0], 0, size, 0, arrived, traffic, efficiency, overhead_ns)
        else:
            # A tie on a torus that splits it: the message has arrived with its last part.
            both = Join(len(paths), arrived)
            for path in paths:
                part = size / len(paths)
                self._hop(path, 0, part, 0, both.done, traffic, efficiency, overhead_ns)

    def hops(self, source: int, destination: int) -> float:
        """Return how often one rank's links are used, if every rank sends a message as far as from
        one rank to another; the mean where ranks share links that are not mirrored.
        """
        ways = self._ways(source, destination)
        if self.mirrored:
            return sum(map(len, ways))
        return sum(self.topology.sharing(index) for path in ways for *_, index in path)

    def _ways(self, source: int, destination: int) -> list[list[_Resolved]]:
        known = self._paths.get((source, destination))
        if known is None:
            known = [self._resolve(path) for path in self.topology.paths(source, destination)]
            self._paths[source, destination] = known
        return known

    def _resolve(self, path: list[Hop]) -> list[_Resolved]:
        return [self._link((index, 0 if self.mirrored else link)) for index, link in path]

    def _link(self, key: Hop) -> _Resolved:
        # One object for all paths over a link, of which a large network has millions.
        known = self._links.get(key)
        if known is None:
            index, _ = key
            description = self.topology.classes[index]
            # Ranks that share a link use it at the same time, so each gets its share of the
            # bandwidth; a rank with several links of a class uses one per message.
            sharing = max(1.0, self.topology.sharing(index)) if self.mirrored else 1.0
            rate = description.bytes_per_s / sharing
            known = Server(description.name), rate, description.latency_ns, index
            self._links[key] = known
        return known

    def _hop(
        self,
        path: list[_Resolved],
        at: int,
        size: float,
        tail: int,
        arrived: Callable[[], None],
        traffic: str,
        efficiency: float,
        overhead_ns: int,
    ) -> None:
        """Occupy link ``at``, which the head has reached; the last byte is there at ``tail``."""
        engine = self.engine
        server, bytes_per_s, latency, index = path[at]
        duration = duration_ns(size, bytes_per_s * efficiency) + overhead_ns
        start = server.reserve(engine.now, duration)
        self.sent_bytes[index] += size
        # A slow link before this one delivers the last byte later than this link could pass it on.
        end = max(start + duration, tail)
        if self._observe is not None and (self.mirrored or path[at] is self._links.get((index, 0))):
            self._observe(server.name, traffic, start, start + duration, size)
        if at + 1 == len(path):
            engine.at(end + latency, arrived)
        elif self.store_and_forward:
            engine.at(
                end + latency,
                self._hop,
                path,
                at + 1,
                size,
                0,
                arrived,
                traffic,
                efficiency,
                overhead_ns,
            )
        else:
            # Cut-through: the next link begins with the head, and works while this one does.
            engine.at(
                start + latency,
                self._hop,
                path,
                at + 1,
                size,
                end + latency,
                arrived,
                traffic,
                efficiency,
                overhead_ns,
            )
