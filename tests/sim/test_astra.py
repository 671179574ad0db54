"""The compatibility mode: recorded runs to the nanosecond, its rules one by one, bad input, Chakra
traces.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from interlace.errors import ConfigError
from interlace.units import GIB
from interlace_sim.astra.algorithms import binary_tree
from interlace_sim.astra.config import Network, System
from interlace_sim.astra.graph import Node
from interlace_sim.astra.network import AwareNetwork
from interlace_sim.astra.system import Mailbox, Npu
from interlace_sim.astra.workload import run
from interlace_sim.configfile import load, parse
from interlace_sim.engine import Engine
from interlace_sim.trace import report_to_perfetto
from interlace_sim.validate import describe, packaged_cases, read_graph, validate

CASES = json.loads(packaged_cases().read_text(encoding="utf-8"))


def ring(count: int = 4, **changes: Any) -> Network:
    return parse(
        Network,
        {
            "topology": ["Ring"],
            "npus_count": [count],
            "bandwidth": [1e9 / GIB],
            "latency": [10.0],
            **changes,
        },
        "test",
    )


def collective(kind: str, size: int) -> list[Node]:
    return [Node(0, kind, (), "collective", collective=kind, size=size)]


def run_all(network: Network, system: dict[str, Any], graph: list[Node], aware: bool = True) -> Any:
    return run(
        network, parse(System, system, "test"), [graph] * network.npus, congestion_aware=aware
    )


@pytest.mark.parametrize(
    "case", CASES["collectives"] + CASES["overlap"], ids=lambda case: case["id"]
)
def test_recorded_runs_are_met_to_the_nanosecond(case: dict[str, Any]) -> None:
    """One set of semantics for all of them; these are ASTRA-sim's own outputs."""
    network, system = (
        parse(Network, case["network"], "network"),
        parse(System, case["system"], "system"),
    )
    if "collective" in case:
        graph = collective(case["collective"], case["comm_size_bytes_per_npu"])
    else:
        graph = describe(case["workload"], "case")
    report = run(
        network, system, [graph] * network.npus, congestion_aware="unaware" not in case["backend"]
    )
    assert (max(report.end_ns), min(report.end_ns)) == (case["time_ns_max"], case["time_ns_min"])
    if "exposed_comm_ns" in case:
        assert sorted(set(report.exposed_ns)) == case["exposed_comm_ns"]
    if "below_nic_bound" in case:
        assert report.unphysical or not case["below_nic_bound"]
    assert not report.unphysical or "unaware" in case["backend"]
    assert report.bound_ns > 0


def test_the_recorded_dlrm_graph() -> None:
    case = CASES["dlrm_graph"]["runs"][0]
    graph = read_graph(CASES["dlrm_graph"]["graph"], "graph")
    network = parse(Network, case["network"], "network")
    report = run(network, parse(System, case["system"], "system"), [graph] * network.npus)
    assert [list(pair) for pair in set(zip(report.end_ns, report.exposed_ns, strict=True))] == case[
        "times_ns_and_exposed_comm_ns"
    ]


def test_two_runs_are_the_same() -> None:
    network = ring(8)
    first, second = (
        run_all(
            network, {"all-to-all-implementation": ["direct"]}, collective("all_to_all", 80_000)
        )
        for _ in range(2)
    )
    assert first == second


def test_ring_all_gather_by_hand() -> None:
    """3 steps of a 1000 B shard: endpoint 10, link 10 + 1000; and the last packet passes the
    endpoint again.
    """
    report = run_all(
        ring(4),
        {"all-gather-implementation": ["ring"], "endpoint-delay": 10},
        collective("all_gather", 1000),
    )
    assert report.end_ns == [3 * (10 + 1010) + 10] * 4
    assert report.sent_bytes == 4 * 3 * 1000


def test_a_reduction_takes_three_memory_passes() -> None:
    slow, fast = (
        run_all(
            ring(4),
            {"reduce-scatter-implementation": ["ring"], "local-mem-bw": rate},
            collective("reduce_scatter", 4000),
        ).total_ns
        for rate in (1, 1e9)
    )
    assert slow - fast == 3 * 3 * 1000  # after each of three messages


def test_shared_links_wait_only_where_congestion_is_modelled() -> None:
    """Direct all-to-all on a ring of 4: six hops of 1000 B share each node's two links, or do
    not.
    """
    aware, unaware = (
        run_all(ring(4), {}, collective("all_to_all", 4000), aware).total_ns
        for aware in (True, False)
    )
    assert unaware == 10 + (2 * 10 + 1000) + 10
    assert aware > 3000


def test_splits_are_chunks_and_active_chunks_a_limit() -> None:
    network = ring(4)
    whole = run_all(network, {}, collective("all_reduce", 64_000), aware=False).total_ns
    one_by_one = run_all(
        network, {"preferred-dataset-splits": 4}, collective("all_reduce", 64_000), aware=False
    ).total_ns
    together = run_all(
        network,
        {"preferred-dataset-splits": 4, "active-chunks-per-dimension": 4},
        collective("all_reduce", 64_000),
        aware=False,
    ).total_ns
    assert together < whole < one_by_one


def test_what_splits_do_not_divide_is_a_whole_chunk_more() -> None:
    """401 bytes in 4 are chunks of 100: five of them."""
    system = {"preferred-dataset-splits": 4, "all-gather-implementation": ["ring"]}
    odd, even = (run_all(ring(4), system, collective("all_gather", size)) for size in (401, 400))
    assert odd.sent_bytes == 5 / 4 * even.sent_bytes


@pytest.mark.parametrize(
    ("policy", "order"), [("LIFO", ["a", "c", "b"]), ("FIFO", ["a", "b", "c"])]
)
def test_lifo_lets_the_later_collective_go_first(policy: str, order: list[str]) -> None:
    """Three at once, one chunk at a time: the first is running already when the others come."""
    engine, system, shape = Engine(), parse(System, {"scheduling-policy": policy}, "s"), (4,)
    mailbox = Mailbox(engine, AwareNetwork(engine, ["Ring"], shape, [1.0], [10.0]))
    ended: list[str] = []
    for rank in range(4):
        npu = Npu(rank, engine, mailbox, system, shape)
        for name in "abc":
            npu.collective(
                "all_reduce",
                4000,
                None,
                None,
                0,
                lambda name=name, rank=rank: ended.append(name) if rank == 0 else None,
            )
    engine.run()
    assert ended == order


def test_one_computation_and_one_collective_at_a_time() -> None:
    graph = [
        Node(0, "a", (), duration_us=5),
        Node(1, "b", (), duration_us=7),
        Node(2, "host", (), duration_us=3, cpu=True),
    ]
    report = run(ring(1, npus_count=[1]), parse(System, {}, "s"), [graph])
    assert report.spans[0] == [(2, 0, 3000), (0, 0, 5000), (1, 5000, 12000)]
    assert report.exposed_ns == [0]


def test_sends_and_receives() -> None:
    graphs = [
        [
            Node(0, "send", (), "send", size=1000, peer=1, tag=3),
            Node(1, "after", (0,), duration_us=1),
        ],
        [Node(0, "receive", (), "receive", size=1000, peer=0, tag=3)],
    ]
    report = run(ring(2), parse(System, {}, "s"), graphs)
    assert report.end_ns == [1010 + 1000, 1010]


def test_communicator_groups_are_rings_of_their_own() -> None:
    graph = [Node(0, "c", (), "collective", collective="all_gather", size=1000, group=7)]
    idle = [Node(0, "c", (), duration_us=1)]
    report = run(
        ring(4),
        parse(System, {"endpoint-delay": 99}, "s"),
        [graph, idle, graph, idle],
        groups={7: [0, 2]},
    )
    # Two hops; the endpoint of a group is 10 ns
    assert report.end_ns[0] == 10 + (2 * (10 + 1000)) + 10


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("block", ["Ring", "Switch"])
def test_a_group_of_all_npus_is_the_network(kind: str, block: str) -> None:
    """It takes the dimensions and the system file's algorithms; in another order, too."""
    sizes = {"npus_count": [2, 4], "bandwidth": [1.0, 2.0], "latency": [10.0, 20.0]}
    network = ring(8, topology=[block] * 2, **sizes)
    system = parse(System, {f"{kind.replace('_', '-')}-implementation": ["direct", "ring"]}, "s")
    everyone, group = (
        [Node(0, "c", (), "collective", collective=kind, size=8000, group=number)]
        for number in (0, 7)
    )
    expected = run(network, system, [everyone] * 8)
    assert run(network, system, [group] * 8, groups={7: list(range(8))[::-1]}) == expected
    # A group of some NPUs has one dimension, and is a ring where the file has several algorithms.
    some = run(network, system, [group] * 7 + [[]], groups={7: list(range(7))})
    assert some.sent_bytes != expected.sent_bytes


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_a_group_goes_by_the_one_algorithm_of_all_dimensions(kind: str) -> None:
    """On a switch three of four NPUs are as far from one another as three of three."""
    names = {"direct": ["direct"], "oneRing": ["oneRing"], "ring": None}
    times = {}
    for name, given in names.items():
        system = {"endpoint-delay": 10}
        if given:
            system[f"{kind.replace('_', '-')}-implementation"] = given  # type: ignore[assignment]
        graph = [Node(0, "c", (), "collective", collective=kind, size=9000, group=2)]
        four = ring(4, topology=["Switch"])
        groups = {2: [0, 2, 3]}
        loop = [Node(0, "c", (), duration_us=1)]
        report = run(four, parse(System, system, "s"), [graph, loop, graph, graph], groups=groups)
        alone = run_all(ring(3, topology=["Switch"]), system, collective(kind, 9000))
        times[name] = report.end_ns[0]
        # The rounds of a local direct all-reduce are longer, see Direct; others are alike.
        if (name, kind) != ("direct", "all_reduce"):
            assert [report.end_ns[i] for i in (0, 2, 3)] == alone.end_ns
    assert times["direct"] != times["oneRing"]


def test_groups_that_a_trace_defines() -> None:
    """PyTorch's metadata; no members are all NPUs, and the file's groups are beside them."""

    def graph(number: int, defines: Any) -> list[Node]:
        return [
            Node(0, "metadata", (), "none", defines=defines),
            Node(1, "c", (0,), "collective", collective="all_gather", size=1000, group=number),
        ]

    system = parse(System, {}, "s")
    pairs = (
        run(ring(4), system, [graph(5, ((5, (0, 1, 2, 3)),))] * 4),
        run(ring(4), system, [graph(5, ((0, (3, 2, 1, 0)), (5, ())))] * 4, groups={6: [1]}),
    )
    assert pairs[0].end_ns == pairs[1].end_ns
    for defines, groups in (
        (((5, (0, 1)),), {5: [0, 2]}),
        (((0, (0, 1)),), {5: [0, 1, 2, 3]}),
    ):
        with pytest.raises(ConfigError, match=r"NPU 0: node 0 \(metadata\) must define commun"):
            run(ring(4), system, [graph(5, defines)] * 4, groups=groups)


def test_replay_takes_every_nodes_own_duration() -> None:
    graph = [
        Node(0, "metadata", (), "none"),
        Node(1, "sum", (0,), "collective", duration_us=5, collective="anything"),
        Node(2, "product", (0,), duration_us=9, flops=10**9, size=1),
        Node(3, "receive", (1,), "receive", duration_us=2),
    ]
    report = run_all(ring(2), {"replay-only": 1, "roofline-enabled": 1}, graph)
    assert report.spans[0] == [(0, 0, 1), (1, 1, 5001), (3, 5001, 7001), (2, 1, 9001)]
    assert (report.sent_bytes, report.exposed_ns[0]) == (0, 1)
    assert report.bound_ns == report.total_ns
    # A broadcast is replayed always.
    cast = [Node(0, "c", (), "collective", duration_us=5, collective="broadcast", size=8)]
    assert run_all(ring(2), {}, cast).end_ns == [5000, 5000]


def test_dimensions_without_an_algorithm_are_warned_of() -> None:
    sizes = {"npus_count": [2, 4], "bandwidth": [1.0, 1.0], "latency": [1.0, 1.0]}
    network = ring(8, topology=["Ring", "Ring"], **sizes)
    system = {"all-reduce-implementation": ["ring"]}
    (warning,) = run_all(network, system, collective("all_reduce", 800)).warnings
    assert "names 1 of 2 dimensions" in warning
    assert "in 4 parts that never meet" in warning
    for names in (["ring", "ring"], ["oneRing"]):
        system["all-reduce-implementation"] = names
        assert not run_all(network, system, collective("all_reduce", 800)).warnings


@pytest.mark.parametrize(
    ("graphs", "system", "bound_ns", "reason"),
    [
        # Seven NPUs send to one, whose only link has a byte per nanosecond.
        (
            [[Node(n, "r", (), "receive", size=10**6, peer=n, tag=n) for n in range(1, 8)]]
            + [[Node(0, "s", (), "send", size=10**6, peer=0, tag=n)] for n in range(1, 8)],
            {},
            7e6,
            "bytes that reach NPU 0",
        ),
        # Direct: the congestion-unaware network lets all messages leave at once.
        (
            [[Node(0, "c", (), "collective", collective="all_to_all", size=7 << 20, group=2)]] * 7
            + [[]],
            {"all-to-all-implementation": ["direct"]},
            6 << 20,
            "bytes that leave NPU 0",
        ),
        # FLOPs without bytes take no time in ASTRA-sim.
        (
            [[Node(0, "p", flops=10**9)]] * 8,
            {"roofline-enabled": 1, "peak-perf": 1},
            1e6,
            "computation of NPU 0",
        ),
    ],
    ids=["receives", "a group", "roofline"],
)
def test_what_is_faster_than_physics_is_flagged(
    graphs: list[list[Node]], system: dict[str, Any], bound_ns: float, reason: str
) -> None:
    network = ring(8, topology=["Switch"])
    report = run(
        network,
        parse(System, system, "s"),
        graphs,
        congestion_aware=False,
        groups={2: list(range(7))},
    )
    assert report.bound_ns == pytest.approx(bound_ns)
    assert report.bound_reason == reason
    assert report.unphysical
    if "roofline-enabled" not in system:
        aware = run(network, parse(System, system, "s"), graphs, groups={2: list(range(7))})
        assert not aware.unphysical


def test_bounds_that_add_up() -> None:
    """The roofline's own times, chains through sends, and both ways of an all-reduce."""
    roofline = {"roofline-enabled": 1, "peak-perf": 1, "local-mem-bw": 100}
    products = [Node(0, "a", flops=10**9, size=10), Node(1, "b", (0,), flops=10**6, size=10**6)]
    report = run_all(ring(1, npus_count=[1]), roofline, products)
    assert report.bound_ns == report.total_ns == 1_010_000
    chain = [
        Node(0, "a", duration_us=3),
        Node(1, "s", (0,), "send", size=5000, peer=2),
        Node(2, "b", (1,), duration_us=3),
    ]
    takes = [Node(0, "r", (), "receive", size=5000, peer=0)]
    report = run(ring(4), parse(System, {}, "s"), [chain, [], takes, []])
    # Two hops of 10 ns, the bytes over one link; the run stores them at each hop.
    assert report.bound_ns == 3000 + 20 + 5000 + 3000
    assert report.bound_reason == "a chain of nodes of NPU 0"
    assert report.total_ns == report.bound_ns + 5000
    report = run_all(ring(4), {}, collective("all_reduce", 64_000))
    assert report.bound_ns == pytest.approx(2 * 64_000 * 3 / 4 / 2)
    assert not report.unphysical


def test_receives_that_wait_together_have_rows_of_their_own() -> None:
    graphs = [
        [Node(n, f"r{n}", (), "receive", size=1000, peer=n) for n in (1, 2, 3)]
        + [Node(4, "last", (1,), "receive", size=1000, peer=1, tag=9)],
        *[[Node(0, "s", (), "send", size=1000, peer=0)] for _ in range(3)],
    ]
    graphs[1].append(Node(1, "again", (0,), "send", size=1000, peer=0, tag=9))
    report = run(ring(4), parse(System, {}, "s"), graphs)
    events = report_to_perfetto(report, graphs)["traceEvents"]
    bars = [e for e in events if e["ph"] == "X" and e["pid"] == 0]
    for one, two in itertools.combinations(bars, 2):
        first, second = sorted((one, two), key=lambda bar: bar["ts"])
        assert one["tid"] != two["tid"] or first["ts"] + first["dur"] <= second["ts"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 0}
    assert names == {"receives", "receives 2", "receives 3"}


def test_roofline() -> None:
    system = {"roofline-enabled": 1, "peak-perf": 1, "local-mem-bw": 100}
    graph = [
        Node(0, "flops", flops=10**9, size=10),
        Node(1, "bytes", (0,), flops=10**6, size=10**6),
    ]
    report = run(ring(1, npus_count=[1]), parse(System, system, "s"), [graph])
    assert report.end_ns == [1_000_000 + 10_000]


def test_trees_have_every_member_once() -> None:
    for last in (True, False):
        tree = binary_tree([2, 4, 6, 8, 10, 12, 14, 16], last)
        roots = [node for node, (parent, *_) in tree.items() if parent < 0]
        assert roots == [16 if last else 2]
        children = [child for _, *below in tree.values() for child in below if child >= 0]
        assert sorted(children + roots) == sorted(tree)


# Bad input.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "topology: [Ring]\nnpus_count: [4]\nbandwidth: [0]\nlatency: [1]\n",
            r"net.yml: bandwidth.0 is wrong: .*greater than 0.*; got 0",
        ),
        (
            "topology: [Mesh]\nnpus_count: [4]\nbandwidth: [1]\nlatency: [1]\n",
            r"net.yml: topology.0 is wrong: .*'Ring', 'Switch' or 'Fully",
        ),
        (
            "topology: [Ring]\nnpus_count: [4, 2]\nbandwidth: [1]\nlatency: [1]\n",
            r"net.yml: .*npus_count must have one entry for each of the 1",
        ),
        (
            "topology: [Ring]\nnpus_count: [4]\nbandwidth: [1]\nlatency: [1]\nlinks: 3\n",
            r"net.yml: links must be a known key; it is not. Remove",
        ),
        (
            "topology: [Ring]\nnpus_count: [4]\nbandwidth: [1]\n",
            r"net.yml: latency must be given; it is missing",
        ),
        ("topology: [Ring\n", r"net.yml, line 2, column 1 must be YAML"),
        ("- 1\n", r"net.yml must be a mapping of keys to values; got \[1\]"),
    ],
)
def test_network_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "net.yml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(Network, file)


def test_system_files(tmp_path: Path) -> None:
    file = tmp_path / "sys.json"
    for content, message in (
        (
            '{"endpoint-delay": -1}',
            r"sys.json: endpoint-delay is wrong: .*greater than or equal to 0; got -1",
        ),
        (
            '{"all-reduce-implementation": ["bruck"]}',
            r"sys.json: all-reduce-implementation.0 is wrong",
        ),
        ('{"all-reduce-implementation": ["direct0"]}', r"all-reduce-implementation.0 is wrong"),
        (
            '{"all-reduce-implementation": ["oneRing", "ring"]}',
            r"over all dimensions, one..., must be the only one",
        ),
        (
            '{"all-reduce-implementation-custom": ["x"]}',
            r"sys.json: all-reduce-implementation-custom must not be given: collectives of one's",
        ),
        ('{"per-node-custom-implementation": "x"}', r"per-node-custom-implementation must not be"),
        ('{"track-local-mem": 1}', r"track-local-mem is wrong: .* 0; got 1"),
        ('{"boost-mode": 1}', r"boost-mode is wrong"),
        ('{"preferred-dataset-splits": 10000000}', r"preferred-dataset-splits is wrong"),
        ('{"endpoint-delay": 1', r"sys.json, line 1, column 21 must be JSON"),
    ):
        file.write_text(content)
        with pytest.raises(ConfigError, match=message):
            load(System, file)
    with pytest.raises(
        ConfigError, match=r"nowhere.json must be a file that can be read; No such file"
    ):
        load(System, tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (
            [Node(0, "a", (1,)), Node(1, "b", (0,))],
            r"dependencies must not form a cycle; nodes 0, 1 do",
        ),
        (
            [Node(0, "a", (5,))],
            r"node 0 must depend on nodes of the graph; got 5. The graph is cut short",
        ),
        ([Node(0, "a"), Node(0, "b")], r"node ids must differ; got 0 twice"),
        (collective("all_to_all", 0), r"node 0 must move bytes; got 0"),
        (
            [Node(0, "a", (), "collective", collective="broadcast", size=8)],
            r"must be one of all_reduce, .*; got 'broadcast'",
        ),
        (
            [Node(0, "a", (), "receive", size=8, peer=1)],
            r"every node must end; NPU 0 \(of 4\) still waits in node 0",
        ),
        (
            [Node(0, "a", (), "send", size=8, peer=0)],
            r"graph of NPU 0: node 0's peer must be another NPU; got its own, 0",
        ),
        ([Node(0, "a", flops=-1)], r"node 0's FLOPs must not be negative; got -1"),
        ([Node(0, "a", duration_us=2**61)], r"node 0's duration must be at most 2\^60"),
        (
            [Node(0, "a", (), "collective", collective="all_reduce", size=8, dims=())],
            r"node 0 \(a\)'s involved_dim must be said for all 1 dimensions",
        ),
        ([Node(0, "a", (), "send", size=8, peer=9)], r"peer must be an NPU below 4; got 9"),
        (
            [Node(0, "a", (), "collective", collective="all_reduce", size=8, group=3)],
            r"communicator group must be defined; got 3",
        ),
    ],
)
def test_bad_graphs(graph: list[Node], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_all(ring(4), {}, graph)


def test_too_many_messages() -> None:
    graph = [
        Node(n, "a", (), "collective", collective="all_reduce", size=8000) for n in range(1000)
    ]
    message = r"a run must have at most 20,000,000 messages; it would have some 2.4e\+07"
    with pytest.raises(ConfigError, match=message):
        run_all(ring(4), {"preferred-dataset-splits": 1000}, graph)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([0, 4], r"group 3 must have different NPUs below 4; got \[0, 4\]"),
        ([0, -1], r"group 3 must have different NPUs below 4; got \[0, -1\]"),
        ([0, 0], r"group 3 must have different NPUs below 4; got \[0, 0\]"),
        ([0, 1], r"graph of NPU 2: node 0's communicator group must have NPU 2 in it"),
        ([], r"graph of NPU 0: node 0's communicator group must have NPU 0 in it"),
    ],
)
def test_bad_groups(members: list[int], message: str) -> None:
    graph = [Node(0, "a", (), "collective", collective="all_reduce", size=64, group=3)]
    with pytest.raises(ConfigError, match=message):
        run(ring(4), parse(System, {}, "system"), [graph] * 4, groups={3: members})


def test_algorithms_that_no_group_has() -> None:
    graph = [Node(0, "a", (), "collective", collective="all_reduce", size=64, group=3)]
    for name, message in (
        ("doubleBinaryTree", "must be of a collective of all NPUs; got a communicator group of 3"),
        ("halvingDoubling", "must have a power of two of NPUs in its dimension; got 3"),
    ):
        system = parse(System, {"all-reduce-implementation": [name]}, "s")
        with pytest.raises(ConfigError, match=rf"NPU 0: node 0 \(a\): {name} {message}"):
            run(ring(4), system, [graph] * 3 + [[]], groups={3: [0, 1, 2]})


def test_what_does_not_fit_together() -> None:
    with pytest.raises(ConfigError, match=r"one graph per NPU; got 1 for 4"):
        run(ring(4), parse(System, {}, "s"), [collective("all_reduce", 400)])
    with pytest.raises(ConfigError, match=r"must name at most one algorithm per dimension"):
        run_all(
            ring(4), {"all-reduce-implementation": ["ring", "ring"]}, collective("all_reduce", 400)
        )
    with pytest.raises(
        ConfigError, match=r"at least preferred-dataset-splits; got 3 bytes and 4 splits"
    ):
        run_all(ring(4), {"preferred-dataset-splits": 4}, collective("all_gather", 3))
    with pytest.raises(ConfigError, match=r"power of two of NPUs in its dimension; got 6"):
        run_all(
            ring(6),
            {"all-reduce-implementation": ["halvingDoubling"]},
            collective("all_reduce", 600),
        )


# Validation.


def test_validate_reports_each_figure(tmp_path: Path) -> None:
    document = {
        "collectives": [
            CASES["collectives"][0],
            {**CASES["collectives"][0], "id": "wrong", "time_ns_max": 1},
        ],
        "measured_torus_all_to_all": CASES["measured_torus_all_to_all"],
    }
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(document))
    cases = validate(file)
    astra = [case for case in cases if case.source == "astra-sim"]
    assert [case.passed for case in astra] == [True, True, False, True]
    measured = [case for case in cases if case.source == "measured"]
    assert len(measured) == 2
    assert all(abs(case.error) < 0.05 for case in measured)


def test_validate_names_what_it_does_not_understand(tmp_path: Path) -> None:
    file = tmp_path / "cases.json"
    for document, message in (
        ({"collectives": [{"id": "x"}]}, r"collectives\[0\] \(x\): collective must be given"),
        (
            {"overlap": [{**CASES["overlap"][0], "workload": "two of them"}]},
            r"workload must read .*; got 'two of them'",
        ),
        (
            {"collectives": [{**CASES["collectives"][0], "npus": 3}]},
            r"npus must be the product of npus_count; got 3 and 16",
        ),
    ):
        document["collectives"] = [*document.get("collectives", []), CASES["collectives"][0]]
        file.write_text(json.dumps(document))
        cases = validate(file)
        assert sorted(case.passed for case in cases) == [False, True, True]  # the others are run
        assert re.search(message, next(case.problem for case in cases if not case.passed))
    file.write_text("{}")
    with pytest.raises(
        ConfigError, match=r"must have collectives, overlap or dlrm_graph; it has none"
    ):
        validate(file)


def test_a_recorded_run_may_bring_its_graph(tmp_path: Path) -> None:
    case = {key: value for key, value in CASES["overlap"][-2].items() if key != "workload"}
    case["graph"] = [
        {"id": 0, "name": "embedding", "deps": [], "kind": "COMP", "duration_us": 100},
        {"id": 1, "name": "A2A", "deps": [0], "kind": "ALL_TO_ALL", "bytes": 16 << 20},
        {"id": 2, "name": "bottom", "deps": [0], "kind": "COMP", "duration_us": 150},
        {"id": 3, "name": "top", "deps": [1, 2], "kind": "COMP", "duration_us": 20},
    ]
    file = tmp_path / "cases.json"
    file.write_text(json.dumps({"overlap": [case]}))
    assert [case.error for case in validate(file)] == [0, 0, 0]


# Chakra traces.


def test_traces_written_are_traces_read(tmp_path: Path) -> None:
    pytest.importorskip("chakra")
    from interlace_sim.astra import chakra

    graphs = [
        [
            Node(0, "embedding", (), duration_us=100, flops=7, size=9),
            Node(
                1,
                "All-to-All",
                (0,),
                "collective",
                collective="all_to_all",
                size=1 << 20,
                dims=(True,),
                priority=2,
            ),
            Node(2, "send", (0,), "send", size=300 * (1 + rank), peer=1 - rank, tag=5),
            Node(3, "receive", (2,), "receive", size=300 * (2 - rank), peer=1 - rank, tag=5),
            Node(4, "host", (1, 3), duration_us=1, cpu=True),
            Node(5, "all", (4,), "collective", collective="all_reduce", size=128, group=3),
            Node(6, "end", (5,), "none", defines=((3, (0, 1)), (4, ()))),
            Node(7, "cast", (6,), "collective", duration_us=9, collective="broadcast", size=8),
        ]
        for rank in range(2)
    ]
    prefix = str(tmp_path / "trace")
    chakra.write_traces(graphs, prefix)
    assert chakra.read_traces(prefix, 2) == graphs


def test_truncated_and_missing_traces(tmp_path: Path) -> None:
    pytest.importorskip("chakra")
    from interlace_sim.astra import chakra

    prefix = str(tmp_path / "trace")
    path = chakra.write_traces([[Node(0, "a long name", duration_us=1)]], prefix)[0]
    content = path.read_bytes()
    path.write_bytes(content[:-3])
    with pytest.raises(
        ConfigError,
        match=r"trace.0.et must end with a whole message; the one at byte \d+ has "
        r"\d+ bytes, of which \d+ are there",
    ):
        chakra.read_trace(path)
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"must begin with a message of metadata; it is empty"):
        chakra.read_trace(path)
    path.write_bytes(content + b"\x05\xff\xff\xff\xff\xff")
    with pytest.raises(ConfigError, match=r"node 1 must be a Chakra node"):
        chakra.read_trace(path)
    with pytest.raises(
        ConfigError, match=re.escape(f"{prefix}.1.et must be a Chakra trace; No such file")
    ):
        chakra.read_traces(prefix, 2) if path.write_bytes(content) else None


def test_groups_file(tmp_path: Path) -> None:
    pytest.importorskip("chakra")
    from interlace_sim.astra import chakra

    file = tmp_path / "groups.json"
    file.write_text('{"1": [0, 1], "2": [2, 3]}')
    assert chakra.read_groups(file) == {1: [0, 1], 2: [2, 3]}
    for text, message in (
        ('{"1": "all"}', "1 must be a number with a list of NPUs"),
        ('{"1": [0, true]}', "1 must be a number with a list of NPUs"),
        ('{"0": [0, 1]}', "0 must be above 0, which is all NPUs"),
        ('{"01": [0], "1": [1]}', "1 must be given once; it is there twice"),
        ('{"1": [0], "1": [1]}', "'1' is given twice; remove one"),
        ('{"-1": [0]}', "-1 must be a number with a list of NPUs"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=rf"groups.json.*{message}"):
            chakra.read_groups(file)


@pytest.mark.parametrize(
    ("kind", "attributes", "message"),
    [
        (7, {}, r"comm_type must be given; it is missing. Add it\."),
        (7, {"comm_type": {"int64_val": 9}}, r"got BARRIER, which is not modelled, nor is it by"),
        (7, {"comm_type": {"string_val": "ALL_REDUCE"}}, r"comm_type must be an integer; got stri"),
        (7, {"comm_type": {"int64_val": 0}, "comm_size": {"double_val": 8.0}}, r"comm_size must"),
        (7, {"comm_type": {"int64_val": 0}, "pg_name": {"string_val": "--1"}}, r"got '--1'"),
        (7, {"comm_type": {"int64_val": 0}, "involved_dim": {"bool_val": True}}, r"a bool_list"),
        (
            5,
            {"comm_dst": {"int32_val": 0}, "comm_src": {"int32_val": 0}},
            r"comm_src must be NPU 1",
        ),
        (
            6,
            {"comm_dst": {"int32_val": 0}, "comm_src": {"int32_val": 0}},
            r"comm_dst must be NPU 1",
        ),
        (
            4,
            {"is_cpu_op": {"string_val": "False"}},
            r"is_cpu_op must be a bool_val; got string_val",
        ),
        (5, {"is_cpu_op": {"bool_val": True}}, r"is_cpu_op must be false of communication"),
        (2, {}, r"remote memory must not be used: its loads and stores are not modelled"),
        (12, {}, r"type must be one of Chakra's; got 12"),
    ],
)
def test_nodes_that_are_not_modelled(
    kind: int, attributes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    pytest.importorskip("chakra")
    from chakra.schema.protobuf import et_def_pb2 as definitions

    from interlace_sim.astra import chakra

    node = definitions.Node(id=3, name="n", type=kind, duration_micros=7)
    for name, value in attributes.items():
        node.attr.append(definitions.AttributeProto(name=name, **value))
    stream = io.BytesIO()
    chakra._append(stream, definitions.GlobalMetadata(version="0.0.4"))
    chakra._append(stream, node)
    file = tmp_path / "trace.1.et"
    file.write_bytes(stream.getvalue())
    with pytest.raises(ConfigError, match=rf"trace.1.et: node 3 \(n\): .*{message}"):
        chakra.read_trace(file, 1)
    if kind < 8 and "is_cpu_op" not in attributes:
        # Only its duration counts if it is replayed.
        (read,) = chakra.read_trace(file, 1, replay_only=True)
        assert (read.duration_us, read.size, read.group) == (7, 0, 0)


def test_the_hosts_call_of_a_collective_is_the_hosts(tmp_path: Path) -> None:
    """Older converters of Chakra wrote the call as communication, without a comm_type."""
    pytest.importorskip("chakra")
    from chakra.schema.protobuf import et_def_pb2 as definitions

    from interlace_sim.astra import chakra

    node = definitions.Node(id=3, name="c10d::allreduce_", type=7, duration_micros=7)
    node.attr.append(definitions.AttributeProto(name="is_cpu_op", bool_val=True))
    stream = io.BytesIO()
    chakra._append(stream, definitions.GlobalMetadata(version="0.0.4"))
    chakra._append(stream, node)
    (tmp_path / "trace.0.et").write_bytes(stream.getvalue())
    (read,) = chakra.read_trace(tmp_path / "trace.0.et", 0)
    assert (read.kind, read.cpu, read.duration_us) == ("compute", True, 7)
