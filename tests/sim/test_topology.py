"""Topologies: routes, and the symmetry on which the mirrored fabric rests."""

from __future__ import annotations

from collections import Counter

import pytest

from interlace.errors import ConfigError
from interlace_sim.topology import (
    FatTree,
    FullyConnected,
    Hierarchical,
    Switch,
    Topology,
    Torus,
    build,
)

ALL = [
    Torus((6,), 1e9, 10),
    Torus((4,), 1e9, 10, "split"),
    Torus((4, 3), 1e9, 10),
    Torus((2, 4, 3), 1e9, 10),
    Torus((4, 4), 1e9, 10, "split"),
    Switch(5, 1e9, 10),
    FullyConnected(5, 1e9, 10),
    FatTree(3, 4, 2, 1e9, 10),
    FatTree(4, 4, 4, 1e9, 10),
    Hierarchical(Switch(4, 1e10, 5), Switch(6, 1e9, 10), cards=2),
    Hierarchical(Switch(4, 1e10, 5), FatTree(2, 4, 2, 1e9, 10), cards=2),
    Hierarchical(FullyConnected(3, 1e10, 5), Torus((4, 2), 1e9, 10), cards=1),
]


@pytest.mark.parametrize("topology", ALL, ids=lambda topology: topology.name)
def test_every_rank_sees_the_same_network(topology: Topology) -> None:
    """What one displacement uses is the same from every rank, and spreads evenly over the links of
    each class.
    """
    for displacement in range(1, topology.ranks):
        expected = [[index for index, _ in path] for path in topology.paths(0, displacement)]
        used: Counter[tuple[int, int, int]] = Counter()
        for rank in range(topology.ranks):
            paths = topology.paths(rank, topology.shift(rank, displacement))
            assert [[index for index, _ in path] for path in paths] == expected
            for number, path in enumerate(paths):
                used.update((number, hop, link) for hop, (_, link) in enumerate(path))
        for number, classes in enumerate(expected):
            for hop, index in enumerate(classes):
                links = topology.classes[index].count
                counts = [used[number, hop, link] for link in range(links)]
                assert sum(counts) == topology.ranks
                if (
                    links <= topology.ranks
                    and "full" not in topology.name
                    and "inner" not in topology.name
                ):
                    assert max(counts) == topology.ranks / links


@pytest.mark.parametrize("topology", ALL, ids=lambda topology: topology.name)
def test_shift_and_difference_are_inverse(topology: Topology) -> None:
    for a in range(topology.ranks):
        for b in range(topology.ranks):
            assert topology.shift(b, topology.difference(a, b)) == a


def test_a_torus_is_cut_across_its_longest_even_dimension() -> None:
    """Every ring of four links is cut twice: there are two of them, or three."""
    assert Torus((4, 2), 1e9, 10).bisection_bytes_per_s() == 2 * 2 * 1e9
    assert Torus((4, 3), 1e9, 10).bisection_bytes_per_s() == 2 * 3 * 1e9


def test_torus_goes_dimension_by_dimension_the_shorter_way() -> None:
    torus = Torus((4, 4), 1e9, 10)
    names = [torus.classes[index].name for index, _ in torus.path(0, 4 * 3 + 1)]
    assert names == ["x+", "y-"]
    assert [link for _, link in torus.path(0, 4 * 3 + 1)] == [0, 1]  # from rank 0, then from rank 1
    assert [torus.classes[index].name for index, _ in torus.path(0, 2)] == [
        "x+",
        "x+",
    ]  # a tie goes clockwise
    split = Torus((4, 4), 1e9, 10, "split")
    assert [[split.classes[index].name for index, _ in path] for path in split.paths(0, 2)] == [
        ["x+", "x+"],
        ["x-", "x-"],
    ]


def test_fat_tree_goes_to_the_spine_of_the_destination() -> None:
    tree = FatTree(2, 4, 2, 1e9, 10)
    assert tree.path(0, 3) == [(0, 0), (3, 3)]  # in the leaf
    assert tree.path(0, 7) == [(0, 0), (1, 1), (2, 3), (3, 7)]  # spine 1, as 7 % 4 % 2
    assert tree.sharing(1) == 2


@pytest.mark.parametrize(
    ("text", "ranks", "shape"),
    [
        ("ring", 6, (6,)),
        ("torus2d", 128, (8, 16)),
        ("torus3d", 128, (4, 4, 8)),
        ("torus:16x8", 128, (16, 8)),
        ("switch", 5, (5,)),
        ("full", 4, (4,)),
        ("fattree:4x8/4", 32, (8, 4)),
        ("fattree", 64, (16, 4)),
        ("torus2d", 7, (1, 7)),
    ],
)
def test_names(text: str, ranks: int, shape: tuple[int, ...]) -> None:
    assert build(text, ranks, bytes_per_s=1e9, latency_ns=1).shape == shape


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        (
            "torus:8x8",
            128,
            r"topology torus:8x8 must have as many ranks as the run; "
            r"got 64 for 128. Say --nodes 64",
        ),
        ("mesh", 4, r"topology must be ring, .*; got 'mesh'"),
        ("torus:8xA", 8, r"must have sizes such as torus:8x16"),
        ("fattree:2x4/3", 8, r"must divide evenly over its uplinks; got 4 and 3"),
        ("fattree:2x4/0", 8, r"must divide evenly over its uplinks; got 4 and 0"),
        ("torus:0x8", 8, r"topology must have sizes of at least 1; got 'torus:0x8'"),
    ],
)
def test_rejections(text: str, ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(text, ranks, bytes_per_s=1e9, latency_ns=1)


def test_no_bandwidth_is_refused() -> None:
    with pytest.raises(ConfigError, match="bandwidth must be positive"):
        build("ring", 4, bytes_per_s=0, latency_ns=1)


def test_splitting_for_groups() -> None:
    topology, groups = Switch(16, 1e9, 1).split((8, 2))
    assert (topology.shape, groups) == ((8, 2), [(0,), (1,)])
    nodes = Hierarchical(Switch(8, 1e10, 1), FatTree(16, 16, 16, 1e9, 1), cards=8)
    topology, groups = nodes.split((8, 8, 4))
    assert (topology.shape, groups) == ((8, 2, 4, 4), [(0,), (1, 2), (3,)])
    with pytest.raises(ConfigError, match="rings undivided"):
        Torus((8, 4), 1e9, 1).split((4, 8))
    with pytest.raises(ConfigError, match="must make 16 ranks"):
        Switch(16, 1e9, 1).split((8,))
