"""Messages on a topology: who occupies which link, when.

A message's head crosses a link and is at the next one ``latency`` later; its bytes occupy each link
for ``bytes / bandwidth``. With ``cut_through`` (the default, what switches and torus routers do)
the head goes on at once and the links work at the same time; with ``store_and_forward`` a hop
begins when the last byte has come. Links are first come, first served; buffers are as large as they
need be. So messages that share a link wait, and nothing is faster than its links.

**One rank for all.** Where every rank does the same, all links of a class have the same load at the
same time, and the ``mirrored`` fabric keeps one server for each class: a message from rank 0 to d
occupies the classes of its path, and stands for the messages from every r to r + d. Where several
ranks share a link (uplinks of an oversubscribed leaf, a node's network card), their messages pass
it together and all of them end with the last. ``mirrored=False`` keeps every link, at the cost of
as many times more events; the tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable

from interlace.sim.engine import Engine, Join, Server, duration_ns
from interlace.sim.topology import Hop, Topology

# A link, what a rank gets of its bandwidth, its latency, its class
_Resolved = tuple[Server, float, int, int]


class Fabric:
    """The links of a topology, and the messages on them.

    Attributes:
        sent_bytes: by link class, of one rank where mirrored, else of all.
        messages: how many were sent.
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
        """Args: observe: called with (link class, kind of traffic, start, end, bytes) for every
        link that a message occupies;
            of one rank's links only.
        """
        self.engine, self.topology, self.mirrored = engine, topology, mirrored
        self.store_and_forward = store_and_forward
        self.messages = 0
        self._observe = observe
        self._servers: dict[Hop, Server] = {}
        self._paths: dict[tuple[int, int], list[list[_Resolved]]] = {}
        self.sent_bytes = [0.0] * len(topology.classes)

    def servers(self) -> dict[Hop, Server]:
        """The links that were used, by class and number."""
        return self._servers

    def send(
        self,
        source: int,
        destination: int,
        size: float,
        arrived: Callable[[], None],
        *,
        traffic: str = "",
        efficiency: float = 1.0,
    ) -> None:
        """Send ``size`` bytes now; ``arrived()`` is called when the last of them is there.

        In a mirrored fabric ``source`` is 0 and ``destination`` the displacement.

        Args:
            traffic: what to call it in results.
            efficiency: the share of the links' bandwidth that the sender reaches; the links are
                occupied for longer.
        """
        self.messages += 1
        paths = self._paths.get((source, destination))
        if paths is None:
            paths = [self._resolve(path) for path in self.topology.paths(source, destination)]
            self._paths[source, destination] = paths
        if size == 0 or not paths[0]:
            self.engine.after(sum(hop[2] for hop in paths[0]), arrived)
        elif len(paths) == 1:
            self._hop(paths[0], 0, size, 0, arrived, traffic, efficiency)
        else:
            both = Join(len(paths), arrived)
            for path in paths:
                self._hop(path, 0, size / len(paths), 0, both.done, traffic, efficiency)

    def _resolve(self, path: list[Hop]) -> list[_Resolved]:
        hops = []
        for index, link in path:
            description = self.topology.classes[index]
            key = (index, 0) if self.mirrored else (index, link)
            server = self._servers.get(key)
            if server is None:
                server = self._servers[key] = Server(description.name, description.kind)
            sharing = max(1.0, self.topology.sharing(index)) if self.mirrored else 1.0
            hops.append((server, description.bytes_per_s / sharing, description.latency_ns, index))
        return hops

    def _hop(
        self,
        path: list[_Resolved],
        at: int,
        size: float,
        tail: int,
        arrived: Callable[[], None],
        traffic: str,
        efficiency: float,
    ) -> None:
        """The head is at link ``at``; ``tail`` is when the last byte can be there."""
        engine = self.engine
        server, bytes_per_s, latency, index = path[at]
        duration = duration_ns(size, bytes_per_s * efficiency)
        start = server.reserve(engine.now, duration)
        self.sent_bytes[index] += size
        end = max(start + duration, tail)
        if self._observe is not None and (self.mirrored or server is self._servers.get((index, 0))):
            self._observe(server.name, traffic, start, start + duration, size)
        if at + 1 == len(path):
            engine.at(end + latency, arrived)
        elif self.store_and_forward:
            engine.at(end + latency, self._hop, path, at + 1, size, 0, arrived, traffic, efficiency)
        else:
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
            )
