"""Groups of several nodes for tests, on the ranks of one machine."""

import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import interlace
from interlace.comm.host.nodes import NODES_VARIABLE
from interlace.costs.known_profiles import profile_of
from interlace.costs.network import NetworkRates
from interlace.gemm import between_nodes
from interlace.operators.embedding_all_to_all import network_choice as embedding_choice
from interlace.operators.mixture_of_experts import choice as experts_choice
from tests.errors import error_of
from tests.pool import fork_server
from tests.profiles import forget_profiles


@contextmanager
def process_group_of(nodes: int | Sequence[int]) -> Iterator[dist.ProcessGroup]:
    """On a rank: a new process group of all ranks, which count as so many nodes.

    Args:
        nodes: The number of nodes, of consecutive ranks; or each rank's node.
    """
    if isinstance(nodes, int):
        variables = {NODES_VARIABLE: str(nodes)}
    else:
        # As torchrun says it.
        variables = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": str(nodes[dist.get_rank()])}
    with mock.patch.dict(os.environ, variables):
        process_group = dist.new_group()
        interlace.group_of(process_group)
    yield process_group
    dist.destroy_process_group(process_group)


@contextmanager
def measured_network(network: NetworkRates | None) -> Iterator[None]:
    """Within it, this process predicts times between nodes of H200s whose network is this one, or
    was not measured.
    """
    profile = dataclasses.replace(profile_of("NVIDIA H200"), network=network)
    forget_profiles()
    with ExitStack() as stack:
        for module in (between_nodes, embedding_choice, experts_choice):
            stack.enter_context(mock.patch.object(module, "profile_on", return_value=profile))
        yield
    forget_profiles()


def call_without_one(call, late, nodes=2):
    """On a rank: make a product's call twice, the second time without rank ``late``; recover.

    Returns:
        The error of the second call, or None on the late rank; its seconds; and what a third call,
        after recovery, returns.
    """
    with process_group_of(nodes) as process_group:
        call.make(process_group)
        interlace.set_deadline(4.0, process_group)
        start, error = time.monotonic(), None
        if dist.get_rank() != late:
            error = error_of(call.make, process_group)
        took_s = time.monotonic() - start
        dist.barrier()
        interlace.set_deadline(60.0, process_group)
        interlace.recover(process_group)
        return error, took_s, call.make(process_group)


def check_traffic(bytes_to, messages, rank, node_of_rank, expected):
    """On the host: a rank has sent the bytes and messages to other nodes that are expected of it,
    where every peer gets as many messages.
    """
    far = [peer for peer in bytes_to if node_of_rank[peer] != node_of_rank[rank]]
    nbytes, count = expected
    assert sum(bytes_to[peer] for peer in far) == nbytes
    assert messages * len(far) == count * (len(node_of_rank) - 1)


def check_late(outcomes, late):
    """On the host: all ranks but the late one have named it in time, as ``call_without_one``
    returns their outcomes.
    """
    for rank, (error, took_s, _) in enumerate(outcomes):
        if rank != late:
            kind, _, fields = error
            assert (kind, fields["peer"]) == ("PeerTimeoutError", late)
            assert took_s < 30


def errors_after_a_death(make: Callable[[], object], folder: Path) -> list[list]:
    """Start four ranks of two nodes that make a call twice; rank 3 is killed before the second one.

    Returns:
        Of each other rank, what the second call raises: the error's name and message, the peer and
        the node that it names, and the seconds that it took.
    """
    context = fork_server()
    processes = [
        context.Process(target=_rank_of_four, args=(rank, folder, make)) for rank in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode is not None
    return [json.loads((folder / f"rank-{rank}").read_text()) for rank in range(3)]


def _rank_of_four(rank, folder, make):
    from interlace.comm import init_process_group

    os.environ[NODES_VARIABLE] = "2"
    store = f"file://{folder}/store"
    init_process_group("cpu", rank=rank, world_size=4, init_method=store, local_rank=rank)
    torch.set_num_threads(1)
    make()
    interlace.set_deadline(4.0)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    kind, message, fields = error_of(make)
    took_s = time.monotonic() - start
    text = json.dumps([kind, message, fields.get("peer"), fields.get("node"), took_s])
    (folder / f"rank-{rank}").write_text(text)
    time.sleep(5)  # the others say first on whom they gave up
    os._exit(0)
