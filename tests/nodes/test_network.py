"""The network between nodes: measured by the carrier of slices, and what ``auto`` makes of it."""

import dataclasses
import functools
import json
import os
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.cli import console, doctor_network, tune_machine
from interlace.comm.groups import machine_rates, network_rates
from interlace.comm.host import common_profile
from interlace.costs import known_profiles
from interlace.costs.known_profiles import profile_of
from interlace.costs.network import NetworkRates, parse_network, read_network
from interlace.operators.embedding_all_to_all.layout import Layout
from interlace.registry import operators
from interlace.tuning.gpu import Gpu
from tests.cli.test_commands import run as run_command
from tests.errors import error_of
from tests.nodes.groups import measured_network, process_group_of
from tests.operators.embedding_all_to_all.calls import Call
from tests.pool import free_port
from tests.profiles import forget_profiles, programs_store

SIZES = (64, 256, 1024)


def _measured(nodes):
    from interlace.comm.groups.network_rates import compare_with_all_to_all, measure_exchanges

    with process_group_of(nodes) as process_group:
        group = interlace.group_of(process_group)
        group.traffic.reset()
        times = measure_exchanges(group, SIZES)
        sent = group.traffic.messages
        compared = compare_with_all_to_all(group, SIZES)
        return [(each.nbytes, each.messages, each.us > 0) for each in times], compared, sent


def test_every_rank_exchanges_with_another_node(ranks):
    results = ranks(4).run(_measured, 2)
    for times, compared, sent in results:
        assert times == [(nbytes, 1, True) for nbytes in SIZES] + [(64, 4, True)]
        assert [each.nbytes for each in compared.exchanges] == list(SIZES)
        assert [each.nbytes for each in compared.collectives] == list(SIZES)
        assert compared == results[0][1], "the slowest rank's"
        assert compared.spread >= 0
        # Six samples of 32 exchanges for each size, of which the last one has four messages.
        assert sent >= 6 * 32 * (len(SIZES) + 4)


def test_partners_have_the_same_place_in_their_nodes():
    nodes = (0, 1, 0, 1, 2)
    assert [network_rates.partners(nodes, rank) for rank in range(5)] == [
        (1, 4), (4, 0), (3, -1), (-1, 2), (0, 1)
    ]  # fmt: skip


def _without_one(step):
    """Rank 1 does not come, or ends after the first exchange; the other's error and its delay."""
    with process_group_of(2) as process_group:
        group = interlace.group_of(process_group)
        group.network()
        interlace.set_deadline(3.0, process_group)
        error, start = None, time.monotonic()
        if group.rank == 0:
            error = error_of(network_rates.measure_exchanges, group, SIZES)
        elif step == "dies":
            with mock.patch.object(
                network_rates.SliceQueue, "arm", side_effect=interlace.ArgumentError("died")
            ):
                error_of(network_rates.measure_exchanges, group, SIZES)
        seconds = time.monotonic() - start
        dist.barrier()
        return error, seconds


def _connect_again():
    """One rank fails in its first call before it connects to the other, which waits for it; then
    both recover.
    """
    from interlace.gemm.implementations import two_levels

    x, w = torch.ones(8, 16), torch.ones(4, 16)
    with process_group_of(2) as process_group:
        group = interlace.group_of(process_group)
        call = functools.partial(
            interlace.gemm_reduce_scatter, x, w, impl="chunked", group=process_group
        )
        group.deadline_s = 1.0
        failure = None
        if group.rank == 1:
            with (
                mock.patch.object(two_levels._Sums, "of", side_effect=MemoryError),
                pytest.raises(MemoryError),
            ):
                call()
        else:
            failure = error_of(call)
        group.deadline_s = 60.0
        interlace.recover(process_group)
        return failure and (failure[0], failure[2]["peer"]), call().tolist()


def test_nodes_connect_after_an_attempt_that_failed_on_one_rank(ranks):
    results = [[32.0] * 4] * 4
    assert ranks(2).run(_connect_again) == [(("PeerTimeoutError", 1), results), (None, results)]


@pytest.mark.parametrize("step", ["does not come", "dies"])
def test_a_rank_that_does_not_measure_is_named_in_time(ranks, step):
    (error, seconds), _ = ranks(2).run(_without_one, step)
    kind, message, fields = error
    assert kind == "PeerTimeoutError", message
    assert (fields["peer"], fields["node"]) == (1, 1)
    assert seconds < 30


@pytest.mark.usefixtures("quick_launches")
def test_doctor_measures_the_network(tmp_path):
    file = tmp_path / "network.json"
    done = run_command(
        "doctor", "--network", "-n", "2", "--nodes", "2", "--backend", "cpu", "--json", file
    )
    assert done.exit_code == 0, done.output
    assert "ranks that share memory" in done.output
    assert "Gloo over TCP, interface lo" in " ".join(done.output.split())
    document = json.loads(file.read_text())
    assert [rank["node"] for rank in document["ranks"]] == [0, 1]
    assert {(each["nbytes"], each["messages"]) for each in document["exchanges"]} == {
        (1 << 16, 1), (1 << 18, 1), (1 << 20, 1), (1 << 22, 1), (1 << 16, 4), (1 << 18, 4)
    }  # fmt: skip


@pytest.mark.usefixtures("quick_launches")
def test_doctor_says_that_all_ranks_share_memory():
    done = run_command("doctor", "--network", "-n", "2", "--backend", "cpu")
    assert done.exit_code == 0, done.output
    assert "All ranks share memory" in done.output


def test_doctor_ends_where_a_rank_does_not_join():
    """As rank 0 of two, of which the other one is never started."""
    launcher = {
        "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    with mock.patch.dict("os.environ", launcher):
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        done = run_command("doctor", "--network", "--backend", "cpu", "--deadline", "2")
        assert "GLOO_SOCKET_IFNAME" not in os.environ, "loopback reaches no other machine"
    assert done.exit_code == 1
    assert "all 2 ranks must join the process group in time" in " ".join(done.output.split())


@pytest.mark.usefixtures("quick_launches")
def test_demo_between_nodes(tmp_path, monkeypatch):
    arguments = ("demo", "-n", "2", "--nodes", "2", "--backend", "cpu")
    done = run_command(*arguments, "--json", tmp_path / "demo.json")
    assert done.exit_code == 0, done.output
    assert "Every rank holds what PyTorch's pair gives, bit by bit." in done.output
    document = json.loads((tmp_path / "demo.json").read_text())
    for rank in document["ranks"]:
        for each in rank["operators"]:
            assert each["counted"] == each["predicted"] > 0
    wrong = document["ranks"][1]["operators"][0] | {"same": False}
    monkeypatch.setattr(
        console, "run_ranks", lambda *_, **__: [{**document["ranks"][0], "operators": [wrong]}]
    )
    failed = run_command(*arguments)
    assert failed.exit_code == 1
    assert "WRONG" in failed.output


def test_networks_are_read_from_nccls_log(tmp_path):
    (tmp_path / "nccl.1").write_text(
        "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/3/GDRDMA\n"
        "h:1:2 [0] NCCL INFO Channel 01/0 : 1[0] -> 0[0] [receive] via NET/Socket/0/Shared\n"
    )
    assert doctor_network.networks_in_use("cuda", tmp_path) == [
        "NCCL over NET/IB/GDRDMA",
        "NCCL over NET/Socket",
    ]


# The profile


def _tuned(folder):
    """Measure into a profile, on the CPU in place of a GPU."""
    environment = {"INTERLACE_CACHE_DIR": f"{folder}/{dist.get_rank()}"}
    with (
        process_group_of(2) as process_group,
        mock.patch.dict("os.environ", environment),
        mock.patch.object(tune_machine, "group_of", return_value=interlace.group_of(process_group)),
        mock.patch.object(Gpu, "of", return_value=Gpu("NVIDIA H200", 132, 1 << 17)),
    ):
        profile_of.cache_clear()
        tune_machine.measure_network_on_rank(folder, folder, 60.0, SIZES)
        profile_of.cache_clear()
        return profile_of("NVIDIA H200")


def test_a_measured_network_is_kept_in_the_profile_of_every_node(ranks, tmp_path):
    first, second = ranks(2).run(_tuned, str(tmp_path))
    assert first == second
    assert first.compositions == known_profiles.shipped_profile("NVIDIA H200").compositions
    network = first.network
    assert network.network == "Gloo over TCP, interface lo"
    assert [nbytes for nbytes, _ in network.slice_us] == list(SIZES)
    assert (network.ranks, network.nodes) == (2, 2)
    names = [name for name, factor in network.collective_factors if factor > 0]
    assert names == ["all_gather", "reduce_scatter", "all_reduce"]


def _joined(folder, lacks_memory):
    """Make two groups as a program that lets the first one measure, on the CPU in place of a GPU;
    return how often it measured, the network that is known then and in the next program, and the
    warnings.
    """
    rank = dist.get_rank()
    environment = {"INTERLACE_CACHE_DIR": f"{folder}/{rank}", common_profile.VARIABLE: "1"}
    measured = mock.Mock(side_effect=functools.partial(network_rates.measure_network, sizes=SIZES))
    has_memory = mock.Mock(return_value=rank not in lacks_memory)
    with (
        mock.patch.dict("os.environ", environment),
        mock.patch("torch.cuda.get_device_name", return_value="NVIDIA H200"),
        mock.patch(
            "torch.cuda.get_device_properties",
            return_value=SimpleNamespace(multi_processor_count=132),
        ),
        mock.patch.object(machine_rates, "_may_measure", return_value=True),
        mock.patch.object(network_rates, "has_memory", has_memory),
        programs_store(folder),
        mock.patch.object(network_rates, "measure_network", measured),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        known = []
        try:
            for _ in range(2):
                with process_group_of(2):
                    known.append(profile_of("NVIDIA H200").network)
            forget_profiles()
            known.append(profile_of("NVIDIA H200").network)
        finally:
            forget_profiles()
    return measured.call_count, known, [str(warning.message) for warning in caught]


def test_the_first_group_between_nodes_measures_if_it_may(ranks, tmp_path):
    first, second = ranks(2).run(_joined, str(tmp_path), ())
    assert first == second
    count, (network, later, in_the_next_program), said = first
    assert count == 1
    assert network == later == in_the_next_program
    assert network.network == "the network between 2 nodes"
    assert [nbytes for nbytes, _ in network.slice_us] == list(SIZES)
    assert said == []


def test_no_rank_measures_where_one_has_no_memory(ranks, tmp_path):
    for count, networks, said in ranks(2).run(_joined, str(tmp_path), (1,)):
        assert count == 2, "each group asks whether there is memory by now"
        assert networks == [None] * 3
        assert "a GPU must have 1024 MiB of free memory" in said[0]


# The choice


def test_embeddings_that_were_measured():
    """Sixteen thousand samples, eight tables a rank, two H200s as two hosts over sockets."""
    from interlace.operators.embedding_all_to_all import network_choice

    file = "benchmarks/results/exploration/2026-11-26-between-nodes-2xh200.json"
    document = json.loads((Path(__file__).parents[2] / file).read_text())
    network, results = parse_network(document["network"]["rates"]), document["results"]["lookups"]
    errors, taken = {}, set()
    with measured_network(network):
        for lookups in sorted(map(int, results)):
            sizes = network_choice.LookupSizes(Layout(((128,) * 8,) * 2, 16384), lookups, 2, 2, 2)
            times = network_choice.times_between_nodes(sizes, torch.device("cpu"))
            measured = results[str(lookups)]["us"]["torch"]
            errors[lookups] = round(100 * (times.predictions["unfused"].us / measured - 1))
            if network_choice.plan_by(times).impl == "fused":
                taken.add(lookups)
    # Torch's pooling of few lookups takes twice the time to read their rows.
    assert errors == {1: -26, 4: -25, 8: -28, 20: -22, 64: -8, 203: 0}
    # Of the pair's time they took 0.95 and 0.66; and 1.07 to 1.18 with fewer lookups.
    assert taken == {64, 203}


def test_explain_predicts_slices_without_a_gpu(tmp_path):
    file = tmp_path / "network.json"
    file.write_text(json.dumps(dataclasses.asdict(QUICK)))
    shape = ("gemm_all_to_all", "8192x2048x65536", "-n", "2", "--nodes", "2")
    done = run_command("explain", *shape, "--network", file)
    assert done.exit_code == 0, done.output
    words = [line.split()[0] for line in done.output.splitlines() if line]
    assert "2 nodes, wire" in " ".join(done.output.split())
    first = words.index("implementation") + 1
    assert words[first : first + 2] == ["chunked", "unfused"]
    missing = run_command("explain", *shape)
    assert missing.exit_code == 1
    assert "--nodes must have a measured network; the profile of NVIDIA H200 has none" in " ".join(
        missing.output.split()
    )


# A message takes 1 us or 2 ms, a collective 1 ms.
QUICK = NetworkRates("wire", "made up", 2, 2, [(1, 1.0), (9999, 1.0)], [(9999, 1000.0)])
SLOW = dataclasses.replace(QUICK, slice_us=[(1, 2000.0), (9999, 2000.0)])
# Slices gain 30 %, which is within what times vary by.
VARYING = dataclasses.replace(QUICK, slice_us=[(1, 700.0), (9999, 700.0)], spread=0.4)


def _chosen(network):
    """A product by ``auto`` with a measured network: what explain says, and what ran."""
    from interlace.gemm.implementations import network as sliced

    x, w = torch.ones(64, 32), torch.ones(16, 32)
    with (
        process_group_of(2) as process_group,
        measured_network(network),
        mock.patch.object(sliced, "slice_count", wraps=sliced.slice_count) as products,
    ):
        said = interlace.explain("gemm_all_to_all", x, w, group=process_group)
        y = interlace.gemm_all_to_all(x, w, group=process_group)
        torch.testing.assert_close(y, torch.full((64, 16), 32.0))
    return said, products.call_count


def test_auto_takes_slices_where_a_measured_network_says_so(ranks):
    for said, products in ranks(2).run(_chosen, QUICK):
        assert "ranks of 2 nodes: chunked, because predicted between 2 nodes over wire: " in said
        assert products == 1


@pytest.mark.parametrize("network", [SLOW, None])
def test_auto_takes_the_pair_else(ranks, network):
    reason = "predicted between 2 nodes over wire: unfused" if network else "no network between the"
    for said, products in ranks(2).run(_chosen, network):
        assert "2 ranks of 2 nodes: unfused, because " in said
        assert reason in said
        assert products == 0


def test_auto_takes_the_pair_where_times_vary_by_more_than_slices_gain(ranks):
    for said, products in ranks(2).run(_chosen, VARYING):
        assert "2 ranks of 2 nodes: unfused, because predicted" in said
        assert "; slices would run if they were 40% faster than every pair" in said
        assert products == 0
    steady = dataclasses.replace(VARYING, spread=0.1)
    for said, products in ranks(2).run(_chosen, steady):
        assert "2 ranks of 2 nodes: chunked, because predicted" in said
        assert products == 1


def _bags(networks, call):
    """Embeddings between nodes where each rank knows a network: the result, what explain says, and
    the slices of calls in slices.
    """
    from interlace.operators.embedding_all_to_all import between_nodes
    from tests.operators.embedding_all_to_all.calls import run_one

    taken = []

    def cut_of(*arguments):
        taken.append(arguments[-1])
        return of(*arguments)

    of = between_nodes.Cut.of
    indices, offsets, _ = call.lookups(dist.get_rank())
    with (
        process_group_of(2) as process_group,
        measured_network(networks[dist.get_rank()]),
        mock.patch.object(between_nodes.Cut, "of", cut_of),
    ):
        said = interlace.explain(
            "embedding_all_to_all", call.tables(dist.get_rank()), indices, offsets,
            group=process_group,
        )  # fmt: skip
        for _ in range(2):
            y = run_one(call, group=process_group).clone()
        return y, said, taken


@pytest.mark.parametrize(
    ("networks", "impl", "taken"),
    [
        ((QUICK, QUICK), "auto", [(1,), (1,)]),
        ((SLOW, SLOW), "auto", []),
        ((VARYING, VARYING), "auto", []),
        # Ranks that know different networks run the same, and wait for no slice in vain.
        ((QUICK, SLOW), "auto", []),
        ((None, QUICK), "auto", []),
        ((None, QUICK), "fused", [(1,), (1,)]),
        ((None, None), "auto", []),
    ],
)
def test_embeddings_take_slices_where_all_ranks_expect_them_to_be_faster(
    ranks, networks, impl, taken
):
    call = Call(((4, 8), (4, 8)), 64, impl=impl, config=None)
    results = ranks(2).run(_bags, networks, call)
    call.check([y for y, *_ in results])
    for network, (_, said, slices) in zip(networks, results, strict=True):
        assert slices == taken
        if network is None:
            assert "2 nodes: pooled, because no network between the 2 nodes was measured" in said
            assert "; over a guessed one, NCCL over NET/Socket" in said
            assert said.endswith("; slices must be 10% below.")
        else:
            expected = "fused" if network is QUICK else "pooled"
            assert f"2 nodes: {expected}, because predicted between 2 nodes over wire: " in said
            assert ("; gradients in 1 slice" in said) == (network is QUICK)


def test_gradients_travel_in_slices_where_updates_take_as_long():
    """Eight tables a rank, 16384 samples, over sockets: one lookup leaves nothing to hide."""
    from interlace.operators.embedding_all_to_all import network_choice

    root = Path(__file__).parents[2]
    network = read_network(root / "src/interlace/costs/networks/two_h200_over_sockets.json")
    layout = Layout(((128,) * 8, (128,) * 8), 16384)

    def slices(lookups, network):
        with measured_network(network):
            device = torch.device("cuda")
            return network_choice.gradient_slices(
                network_choice.LookupSizes(layout, lookups, 4, 4, 2), device
            )

    assert slices(1, network) == 1
    assert slices(40, network) == 2
    assert slices(40, dataclasses.replace(network, spread=0.5)) == 2, "both ways vary alike"
    assert slices(40, None) == 2, "this network is guessed"
    assert slices(20, network) == 2
    assert slices(20, None) == 1, "a guess must gain more"


def test_explain_guesses_a_network_where_none_was_measured():
    """Sixteen thousand samples, eight tables; sizes are all that counts, so nothing is stored."""
    tables = [torch.empty(1, 128, dtype=torch.float16).expand(9, 128)] * 8
    bags = 8 * 16384
    offsets = torch.zeros(1, dtype=torch.int32).expand(bags + 1)
    chosen = {}
    with measured_network(None):
        for lookups in (1, 4, 8, 20, 64, 252):
            indices = torch.zeros(1, dtype=torch.int32).expand(bags * lookups)
            _, chosen[lookups], reason = operators()["embedding_all_to_all"].explain(
                tables, indices, offsets, world_size=2, nodes=2
            )
    said = "predicted: fused 3273 us in 2 slices (1/4 + 3/4), pooled 4230 us, unfused 10094 us"
    assert said in reason
    # Slices took 1.19, 1.17, 1.25, 1.14, 1.04 and 0.76 of the pair's time on two H200s.
    assert chosen == dict.fromkeys((1, 4, 8, 20, 64), "pooled") | {252: "fused"}


def test_more_ranks_than_the_kernels_take():
    from interlace.operators.embedding_all_to_all import network_choice

    layout = Layout(((128,) * 8,) * 16, 16384)
    with measured_network(QUICK):
        sizes = network_choice.LookupSizes(layout, 99, 2, 2, 2)
        times = network_choice.times_between_nodes(sizes, torch.device("cpu"))
    assert set(times.predictions) == {"pooled", "unfused"}
    assert network_choice.plan_by(times).impl == "pooled"
