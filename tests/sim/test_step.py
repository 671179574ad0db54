"""Steps: closed forms, the mirrored fabric against every rank, fused kernels, bounds,
determinism.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.errors import ConfigError
from interlace_sim.bounds import Bound
from interlace_sim.collectives import ALGORITHMS, Group, schedule
from interlace_sim.engine import Engine
from interlace_sim.errors import UnphysicalError
from interlace_sim.fabric import Fabric
from interlace_sim.results import LinkUse, LinkUses, Result
from interlace_sim.step import run
from interlace_sim.topology import FatTree, Hierarchical, Switch, Topology, Torus, build
from interlace_sim.work import (
    COMPUTE,
    COPY,
    Collective,
    Consuming,
    Fused,
    HostCopy,
    Kernel,
    Message,
    Task,
    Work,
)
from tests.sim.machines import machine


def one(topology: Topology, work: Work, *, all_ranks: bool = False, **changes: float) -> Result:
    return run(machine(**changes), topology, [Task("work", "row", work)], all_ranks=all_ranks)


# Closed forms, with links of 1 B/ns.


def test_all_to_all_at_once_on_a_switch_takes_what_must_leave() -> None:
    """15 blocks of 1000 B leave each port; the last one passes the second port a block later, and
    two latencies.
    """
    result = one(Switch(16, 1e9, 7), Collective("all_to_all", "one_shot", 16_000))
    assert result.total_ns == 15 * 1000 + 2 * 7
    assert result.bound.time_ns == 15_000
    assert result.sent_bytes == {"up": 15_000, "down": 15_000}


def test_ring_all_reduce_takes_2_n_minus_1_steps() -> None:
    result = one(
        Torus((8,), 1e9, 50), Collective("all_reduce", "ring", 8000), memory_bytes_per_s=1e18
    )
    assert result.total_ns == pytest.approx(14 * (1000 + 50), abs=14)


def test_ring_relay_all_to_all_moves_half_the_buffer_times_the_ring() -> None:
    result = one(Torus((8,), 1e9, 0), Collective("all_to_all", "ring", 8000))
    assert result.total_ns == 1000 * 8 * 7 // 2


def test_halving_doubling_on_a_switch() -> None:
    result = one(
        Switch(8, 1e9, 0),
        Collective("all_reduce", "halving_doubling", 8000),
        memory_bytes_per_s=1e18,
    )
    assert result.total_ns == pytest.approx(2 * (4000 + 2000 + 1000), abs=8)


def test_reduction_reads_two_and_writes_one() -> None:
    fast = one(
        Switch(2, 1e9, 0), Collective("reduce_scatter", "direct", 2000), memory_bytes_per_s=1e18
    )
    slow = one(
        Switch(2, 1e9, 0), Collective("reduce_scatter", "direct", 2000), memory_bytes_per_s=1e9
    )
    assert slow.total_ns - fast.total_ns == pytest.approx(3 * 1000, abs=2)


def test_messages_that_share_a_link_wait() -> None:
    """Two collectives at once take as long as both of them one after the other."""
    works = [Task(name, name, Collective("all_to_all", "one_shot", 16_000)) for name in ("a", "b")]
    alone = run(machine(), Switch(16, 1e9, 0), works[:1]).total_ns
    both = run(machine(), Switch(16, 1e9, 0), works).total_ns
    assert both == 2 * alone


def test_both_ways_of_switching() -> None:
    """1000 B over three idle hops of 50 ns: the bytes count once, or at every hop; a second message
    waits behind the first.
    """
    for store_and_forward, expected in ((False, [1150, 2150]), (True, [3150, 4150])):
        engine = Engine()
        fabric = Fabric(
            engine, Torus((8,), 1e9, 50), mirrored=False, store_and_forward=store_and_forward
        )
        arrivals: list[int] = []
        for _ in range(2):
            fabric.send(
                0, 3, 1000, lambda arrivals=arrivals, engine=engine: arrivals.append(engine.now)
            )
        engine.run()
        assert arrivals == expected
        assert fabric.sent_bytes[0] == 2 * 3 * 1000
        assert {server.busy_ns for server in fabric.servers().values()} == {2000}


def test_oversubscribed_uplinks_slow_what_leaves_the_leaf() -> None:
    full, half = (
        one(FatTree(4, 4, up, 1e9, 0), Collective("all_to_all", "one_shot", 16_000))
        for up in (4, 1)
    )
    assert full.total_ns < half.total_ns
    assert half.total_ns >= 12 * 1000 * 4  # twelve blocks of each of four ranks pass one uplink


def test_kernel_and_copy_times() -> None:
    tasks = [
        Task("flops", COMPUTE, Kernel(flops=1e6)),
        Task("bytes", COMPUTE, Kernel(memory_bytes=2e6)),
        Task("given", COMPUTE, Kernel(given_ns=123)),
        Task("copy", COPY, HostCopy(500)),
    ]
    result = run(machine(), Switch(1, 1e9, 0), tasks)
    ends = {task.name: task.end_ns for task in result.tasks}
    assert ends["flops"] == pytest.approx(1000, abs=1)
    assert ends["bytes"] - ends["flops"] == pytest.approx(2000, abs=1)
    assert ends["given"] - ends["bytes"] == 123
    assert ends["copy"] == 500


# One rank for all of them.


TOPOLOGIES = ["torus:4x4", "torus:2x3x4", "ring:6", "switch:8", "full:5", "fattree:3x4/4"]


@pytest.mark.parametrize("text", TOPOLOGIES)
@pytest.mark.parametrize(
    ("kind", "algorithm"), [(k, a) for k, names in ALGORITHMS.items() for a in names]
)
def test_mirrored_equals_every_rank(text: str, kind: str, algorithm: str) -> None:
    ranks = 1
    for part in text.split(":")[1].split("/")[0].split("x"):
        ranks *= int(part)
    topology = build(text, ranks, bytes_per_s=1e9, latency_ns=11)
    work = Collective(kind, algorithm, 7 * 960)
    try:
        mirrored = one(topology, work)
    except ConfigError:
        assert algorithm in (
            "halving_doubling",
            "double_binary_tree",
        )  # not the same for all ranks, or no power of two
        return
    every = one(topology, work, all_ranks=True)
    assert every.total_ns == mirrored.total_ns
    assert every.sent_bytes == pytest.approx(mirrored.sent_bytes)


@pytest.mark.parametrize("shape", [(2,), (2, 2), (2, 4)])
def test_both_links_between_two_neighbours_carry_a_split_tie(shape: tuple[int, ...]) -> None:
    """In a dimension of two every message is a tie, so splitting uses the way back as well."""
    topology = Torus(shape, 1e9, 11, "split")
    size = 1 << 20
    split = one(topology, Collective("all_to_all", "one_shot", size))
    everyone = one(topology, Collective("all_to_all", "one_shot", size), all_ranks=True)
    assert split.total_ns == everyone.total_ns
    # Half of all bytes go to the other half of the ranks, half of them by each way.
    crossing = topology.ranks // 2 * size / 2
    assert split.bound.time_ns >= 1e9 * crossing / topology.bisection_bytes_per_s()
    if shape == (2,):
        assert split.sent_bytes == {"x+": size / 4, "x-": size / 4}
        assert split.bound.time_ns == pytest.approx(size / 4)


@pytest.mark.parametrize(
    "work",
    [
        Fused(Kernel(memory_bytes=5e6), "all_to_all", 64_000),
        Fused(Kernel(memory_bytes=5e6), "all_reduce", 64_000, receive_bytes=1000),
        Fused(Kernel(memory_bytes=5e3), "all_reduce", 64_007, receive_bytes=1000, gather_size=37),
        Consuming(Kernel(memory_bytes=5e6), "all_gather", 64_000),
        Message((0,), 5000),
    ],
)
def test_fused_mirrored_equals_every_rank(work: Work) -> None:
    topology = Torus((4, 4), 1e9, 11)
    assert one(topology, work).total_ns == one(topology, work, all_ranks=True).total_ns


def test_shared_links_are_close_to_every_rank() -> None:
    """Ranks that share an uplink end together in the mirrored fabric; every rank for itself is a
    little faster, never slower.
    """
    for topology in (
        FatTree(4, 4, 2, 1e9, 10),
        Hierarchical(Switch(4, 1e10, 5), Switch(8, 1e9, 10), cards=2),
    ):
        work = Collective("all_to_all", "one_shot", 64_000)
        mirrored, every = one(topology, work).total_ns, one(topology, work, all_ranks=True).total_ns
        assert every <= mirrored <= 1.25 * every


def test_trees_need_every_rank_and_reduce_everywhere() -> None:
    with pytest.raises(ConfigError, match="must be run on every rank"):
        one(Switch(8, 1e9, 5), Collective("all_reduce", "double_binary_tree", 8000))
    for ranks in (2, 3, 7, 8):
        result = one(
            Switch(ranks, 1e9, 5),
            Collective("all_reduce", "double_binary_tree", 8000),
            all_ranks=True,
        )
        assert result.bound.time_ns <= result.total_ns < 10 * 8000


# Fused kernels.


def test_a_fused_kernel_hides_the_shorter_part() -> None:
    topology = Switch(8, 1e9, 0)
    kernel = Kernel(given_ns=20_000)
    unfused = run(
        machine(),
        topology,
        [
            Task("k", COMPUTE, kernel),
            Task("c", "row", Collective("all_to_all", "one_shot", 8000), ("k",)),
        ],
    )
    fused = one(topology, Fused(kernel, "all_to_all", 8000, slices=8))
    assert unfused.total_ns == 27_000
    # All but the last slices leave while it computes
    assert 20_000 <= fused.total_ns <= 20_000 + 200
    slow = one(topology, Fused(Kernel(given_ns=2000), "all_to_all", 80_000, slices=8))
    assert 70_000 <= slow.total_ns <= 72_000  # the links decide


def test_slices_of_several_sizes() -> None:
    """4000 B for one peer: the links take as many nanoseconds from the first slice on, which is
    complete after an eighth of the kernel, or after a quarter.
    """
    topology = Switch(2, 1e9, 0)
    work = Fused(Kernel(given_ns=800), "all_to_all", 8000, slices=2)
    assert one(topology, work).total_ns == 200 + 4000
    assert one(topology, dataclasses.replace(work, shares=(1, 1))).total_ns == 200 + 4000
    assert one(topology, dataclasses.replace(work, shares=(1, 3))).total_ns == 100 + 4000


def test_slices_slowdown_skew_and_flags_are_charged() -> None:
    topology = Switch(4, 1e9, 0)
    work = Fused(Kernel(given_ns=10_000), "all_to_all", 400, slices=2)
    plain = one(topology, work)
    assert one(topology, work, fused_slowdown=1.5).total_ns - plain.total_ns == 5000
    assert one(topology, work, slice_ns=300).total_ns - plain.total_ns == 300
    assert one(topology, work, skew=0.1).total_ns - plain.total_ns == 1000
    coarse = one(topology, dataclasses.replace(work, size=400_000, slices=1))
    fine = one(topology, dataclasses.replace(work, size=400_000, slices=16))
    assert fine.total_ns < coarse.total_ns


def test_the_owners_sums_leave_slice_by_slice() -> None:
    """Four ranks of two slices, 1000 ns each: own slices are done at 7000 and 8000 ns, and their
    sums, 500 B for each of three peers, leave then. With one slice all sums leave at 8000 ns.
    """
    topology = Switch(4, 1e9, 0)
    work = Fused(Kernel(given_ns=8000), "all_reduce", 4000, slices=2)
    assert one(topology, work).total_ns == 7000 + 2 * 3 * 500
    assert one(topology, dataclasses.replace(work, slices=1)).total_ns == 8000 + 3 * 1000
    # Adding up takes 1001 ns, half of it before each slice's sums leave.
    adding = one(topology, dataclasses.replace(work, receive_bytes=1e6))
    assert adding.total_ns == 8000 + 1001 + 3 * 500
    assert adding.busy_ns[COMPUTE] == 8000 + 1001
    # From 1000 ns on the links decide: 30,000 B of parts, and as many of sums.
    assert one(topology, dataclasses.replace(work, size=40_000)).total_ns == 1000 + 60_000


def test_a_consumer_starts_on_what_has_come() -> None:
    topology = Switch(8, 1e9, 0)
    kernel = Kernel(given_ns=8000)
    unfused = run(
        machine(),
        topology,
        [
            Task("c", "row", Collective("all_to_all", "one_shot", 8000)),
            Task("k", COMPUTE, kernel, ("c",)),
        ],
    )
    fused = one(topology, Consuming(kernel, "all_to_all", 8000, slices=8))
    assert unfused.total_ns == 15_000
    assert 8000 <= fused.total_ns <= 9100


def test_what_a_producer_sends_a_consumer_gets_even_later() -> None:
    topology = Torus((4, 2), 1e9, 3)
    tasks = [
        Task(
            "send", COMPUTE, Fused(Kernel(given_ns=1000), "all_to_all", 8000, slices=4, waits=False)
        ),
        Task("between", COMPUTE, Kernel(given_ns=50_000), ("send",)),
        Task(
            "use",
            COMPUTE,
            Consuming(Kernel(given_ns=700), "all_to_all", 8000, slices=4, sent_by="send"),
            ("between",),
        ),
    ]
    for all_ranks in (False, True):
        result = run(machine(), topology, tasks, all_ranks=all_ranks)
        assert result.total_ns == 51_700  # everything came meanwhile
        assert result.traffic_bytes == {"all_to_all": 7000}


# Bounds.


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_nothing_is_faster_than_physics(data: st.DataObject) -> None:
    """Random collectives on random networks; run() itself holds each against its bound, and
    raises.
    """
    text = data.draw(st.sampled_from([*TOPOLOGIES, "torus:8x2", "fattree:2x4/2", "switch:16"]))
    ranks = 1
    for part in text.split(":")[1].split("/")[0].split("x"):
        ranks *= int(part)
    topology = build(
        text,
        ranks,
        bytes_per_s=data.draw(st.sampled_from([1e9, 7e9])),
        latency_ns=data.draw(st.integers(0, 900)),
    )
    kind = data.draw(st.sampled_from(sorted(ALGORITHMS)))
    algorithm = data.draw(st.sampled_from(ALGORITHMS[kind]))
    size = data.draw(st.integers(0, 10**6))
    try:
        result = one(
            topology, Collective(kind, algorithm, size), all_ranks=data.draw(st.booleans())
        )
    except ConfigError:
        return
    assert result.total_ns >= result.bound.time_ns
    assert (result.bound.time_ns > 0) == (size > 0)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_fused_kernel_is_faster_than_physics(data: st.DataObject) -> None:
    """As above, and one rank stands for all of them."""
    topology = build(
        text := data.draw(st.sampled_from(["ring:5", "torus:4x2", "switch:8", "switch:1"])),
        {"ring:5": 5, "torus:4x2": 8, "switch:8": 8, "switch:1": 1}[text],
        bytes_per_s=data.draw(st.sampled_from([1e9, 7e9])),
        latency_ns=data.draw(st.integers(0, 900)),
    )
    work = Fused(
        Kernel(given_ns=data.draw(st.integers(0, 10**6))),
        data.draw(st.sampled_from(["all_to_all", "reduce_scatter", "all_reduce"])),
        data.draw(st.integers(0, 10**6)),
        slices=data.draw(st.integers(1, 9)),
        receive_bytes=data.draw(st.integers(0, 10**6)),
        gather_size=data.draw(st.none() | st.integers(0, 10**6)),
    )
    slice_ns = data.draw(st.integers(0, 5000))
    result = one(topology, work, slice_ns=slice_ns)
    assert result.total_ns == one(topology, work, all_ranks=True, slice_ns=slice_ns).total_ns


def test_a_result_below_its_bound_is_refused() -> None:
    with pytest.raises(
        UnphysicalError,
        match="must not be faster than physics; got 9 ns, where the bisection alone needs 10 ns",
    ):
        Bound(10, "the bisection").check(9, "a run")


@pytest.mark.parametrize("kind", sorted(ALGORITHMS))
def test_more_bandwidth_or_less_latency_is_not_slower(kind: str) -> None:
    for algorithm in ALGORITHMS[kind]:
        if algorithm in ("halving_doubling", "double_binary_tree"):
            continue
        work = Collective(kind, algorithm, 160_000)
        times = [
            one(Torus((4, 4), bandwidth, latency), work).total_ns
            for bandwidth, latency in ((1e9, 1000), (1e9, 10), (4e9, 10))
        ]
        assert times[0] >= times[1] >= times[2]


def test_bytes_leave_as_the_algorithm_says() -> None:
    topology = Switch(8, 1e9, 0)
    for kind, share in (
        ("all_to_all", 7 / 8),
        ("all_reduce", 14 / 8),
        ("reduce_scatter", 7 / 8),
        ("all_gather", 7 / 8),
    ):
        for algorithm in ALGORITHMS[kind]:
            if algorithm == "double_binary_tree" or (kind, algorithm) == ("all_to_all", "ring"):
                continue
            assert one(topology, Collective(kind, algorithm, 80_000)).sent_bytes[
                "up"
            ] == pytest.approx(80_000 * share), algorithm


@pytest.mark.parametrize("size", [1, 1000, 65537])
@pytest.mark.parametrize("ranks", [2, 7, 12])
def test_what_leaves_is_what_the_links_carry(ranks: int, size: int) -> None:
    """On direct links a byte that leaves crosses one link, also of sizes that do not divide."""
    topology = build("full", ranks, bytes_per_s=1e9, latency_ns=5)
    kernel = Kernel(given_ns=100)
    for work in (
        *(Collective(kind, "direct", size) for kind in ALGORITHMS),
        *(Fused(kernel, kind, size) for kind in ("all_to_all", "reduce_scatter", "all_reduce")),
        Fused(kernel, "all_reduce", size, gather_size=size // 3 + 1),
        Consuming(kernel, "all_gather", size),
    ):
        result = one(topology, work)
        assert sum(result.sent_bytes.values()) == sum(result.traffic_bytes.values()) > 0


def test_schedules_deliver_every_block_once() -> None:
    """All-to-all at once and one after the other: each of the other ranks gets one block."""
    group = Group(Torus((3, 4), 1e9, 0))
    for algorithm in ("one_shot", "direct"):
        places = [
            place
            for step in schedule("all_to_all", algorithm, 1200, group)
            for place, _ in step.sends
        ]
        assert sorted(places) == list(range(1, 12))
    assert sorted(group.displacement(place) for place in range(12)) == list(range(12))
    assert Group(Torus((3, 4), 1e9, 0), (1,)).members(4) == [1, 4, 7, 10]


# The program.


def test_rows_keep_their_order_and_tasks_their_dependencies() -> None:
    tasks = [
        Task("a", COMPUTE, Kernel(given_ns=10)),
        Task("late", "other", Kernel(given_ns=1), ("a",)),
        Task("behind", "other", Kernel(given_ns=1)),
        Task("b", COMPUTE, Kernel(given_ns=10), ("behind",)),
    ]
    result = run(machine(), Switch(1, 1e9, 0), tasks)
    assert {task.name: (task.start_ns, task.end_ns) for task in result.tasks} == {
        "a": (0, 10),
        "late": (10, 11),
        "behind": (11, 12),
        "b": (12, 22),
    }
    assert [task.name for task in result.critical_path()] == ["a", "late", "behind", "b"]


def test_two_runs_are_the_same() -> None:
    topology = Torus((4, 4), 1e9, 11)
    tasks = [
        Task("f", COMPUTE, Fused(Kernel(given_ns=5000), "all_to_all", 70_001)),
        Task("r", "row", Collective("all_reduce", "ring", 9001)),
    ]
    first, second = (run(machine(), topology, tasks) for _ in range(2))
    assert first == second


def test_link_uses_are_a_sequence_in_the_order_of_recording() -> None:
    uses = LinkUses()
    assert list(uses) == []
    for link, start in (("x+", 0), ("x-", 5), ("x+", 7)):
        uses.add(link, "all_to_all", start, start + 7, 700.5)
    first = LinkUse("x+", "all_to_all", 0, 7, 700.5)
    assert uses[0] == first
    assert list(uses) == [uses[0], uses[1], uses[-1]] == uses[:]
    assert [use.link for use in uses[1:]] == ["x-", "x+"]
    other = LinkUses()
    assert other != uses
    for use in uses:
        other.add(*dataclasses.astuple(use))
    assert other == uses
    with pytest.raises(IndexError):
        uses[3]


def test_a_run_of_more_than_centuries_is_refused() -> None:
    slow = build("switch", 2, bytes_per_s=1e-3, latency_ns=0)
    message = r"free again within 292 years; up would be after 5e\+14 s"
    with pytest.raises(ConfigError, match=message):
        one(slow, Collective("all_to_all", "one_shot", 10**12))


@pytest.mark.parametrize("all_ranks", [False, True])
@pytest.mark.parametrize("text", ["torus:3x4", "switch:12", "fattree:3x4/2", "full:12"])
def test_a_run_says_which_share_of_it_is_done(text: str, all_ranks: bool) -> None:
    work: list[Work] = [
        Collective("all_to_all", "per_dimension", 7001),
        Collective("all_reduce", "ring", 7001),
        Fused(Kernel(given_ns=500), "all_to_all", 7001, slices=3),
        Fused(Kernel(given_ns=500), "all_reduce", 7001, slices=3),
        Consuming(Kernel(given_ns=500), "all_gather", 20, slices=8),
        Kernel(given_ns=500),
        Message((0,), 100),
    ]
    tasks = [Task(str(number), COMPUTE, each) for number, each in enumerate(work)]
    shares: list[Callable[[], float]] = []
    topology = build(text, 12, bytes_per_s=1e9, latency_ns=11)
    result = run(machine(), topology, tasks, all_ranks=all_ranks, watch=shares.append)
    assert result.link_uses
    assert shares[0]() == 1 if not all_ranks else 0.8 < shares[0]() < 1.2
    run(machine(), topology, [Task("k", COMPUTE, Kernel(given_ns=5))], watch=shares.append)
    assert shares[1]() == 0


def test_records_of_a_large_run_are_few_objects() -> None:
    """Objects for every link use were searched for garbage again and again: half of the time."""
    topology = Torus((32, 32), 1e9, 11)
    gc.collect()
    before = len(gc.get_objects())
    result = one(topology, Collective("all_to_all", "one_shot", 1 << 20))
    gc.collect()
    assert len(result.link_uses) == 1024 * 16
    assert len(gc.get_objects()) - before < 1024


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (
            [Task("a", "r", Kernel(), ("b",)), Task("b", "r", Kernel(), ("a",))],
            "task 'a' must wait for tasks before it; got 'b'",
        ),
        (
            [Task("a", "r", Kernel()), Task("a", "r", Kernel())],
            "must have different names; got 'a' twice",
        ),
        (
            [Task("a", "r", Collective("all_to_all", "bruck", 8))],
            "all_to_all's algorithm must be one of one_shot, .*; got 'bruck'",
        ),
        (
            [Task("a", "r", Collective("broadcast", "ring", 8))],
            "a collective must be one of .*; got 'broadcast'",
        ),
        (
            [Task("a", "r", Collective("all_reduce", "halving_doubling", 8))],
            "halving_doubling must have a power of two of ranks; got 6",
        ),
    ],
)
def test_rejections(tasks: list[Task], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(machine(), Switch(6, 1e9, 0), tasks)
