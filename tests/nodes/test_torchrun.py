"""Two agents of torchrun are two nodes, as on two machines; ``interlace.launch`` starts nothing."""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.pool import free_port

_PROGRAM = Path(__file__).parent / "program.py"
_AGENTS, _RANKS = 2, 1
_NETWORK = "10.213.77"


@dataclasses.dataclass(frozen=True)
class Host:
    """Where an agent runs.

    Attributes:
        prefix: Words before its command.
        interface, address: Its end of the network.
    """

    prefix: tuple[str, ...]
    interface: str
    address: str


@contextlib.contextmanager
def _hosts() -> Iterator[list[Host]]:
    """Two hosts: network namespaces with a cable between them where this machine lets us make them,
    else twice this machine.
    """
    with contextlib.ExitStack() as stack:
        try:
            hosts = _namespaces(stack)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"no network namespaces: {error}")  # beside a failure
            hosts = [Host((), "lo", "127.0.0.1")] * _AGENTS
        yield hosts


def _namespaces(stack: contextlib.ExitStack) -> list[Host]:
    if any(shutil.which(tool) is None for tool in ("unshare", "nsenter", "ip")):
        raise OSError("namespaces need util-linux and iproute2")
    keepers = []
    for _ in range(_AGENTS):
        # A namespace is there as long as a process is in it.
        keeper = subprocess.Popen(["unshare", "--net", "sleep", "600"], stderr=subprocess.DEVNULL)
        stack.callback(keeper.wait)
        stack.callback(keeper.kill)
        keepers.append(keeper)
    _wait_until_apart(keepers)

    def run(agent: int, *words: str) -> None:
        command = [*_within(keepers[agent]), "ip", *words]
        subprocess.run(command, check=True, timeout=20, capture_output=True)

    far_end = ("peer", "name", "cable1", "netns", str(keepers[1].pid))
    run(0, "link", "add", "cable0", "type", "veth", *far_end)
    for agent in range(_AGENTS):
        cable = f"cable{agent}"
        run(agent, "address", "add", f"{_NETWORK}.{agent + 1}/24", "dev", cable)
        for device in ("lo", cable):
            run(agent, "link", "set", device, "up")
    return [
        Host(_within(keeper), f"cable{agent}", f"{_NETWORK}.{agent + 1}")
        for agent, keeper in enumerate(keepers)
    ]


def _within(keeper: "subprocess.Popen[bytes]") -> tuple[str, ...]:
    return "nsenter", "--net", "--target", str(keeper.pid)


def _wait_until_apart(keepers: "list[subprocess.Popen[bytes]]") -> None:
    """Wait until each keeper has a network namespace of its own.

    Raises:
        OSError: A keeper has ended, or none is made in time: it is not allowed here.
    """
    end = time.monotonic() + 20
    own = os.readlink("/proc/self/ns/net")
    while any(os.readlink(f"/proc/{keeper.pid}/ns/net") == own for keeper in keepers):
        if time.monotonic() > end or any(keeper.poll() is not None for keeper in keepers):
            raise OSError("network namespaces are not allowed")
        time.sleep(0.05)


def test_two_agents_are_two_nodes(tmp_path: Path) -> None:
    with _hosts() as hosts:
        _run_agents(tmp_path, hosts)
    for rank in range(_AGENTS * _RANKS):
        nodes, error, bound, interfaces = json.loads((tmp_path / f"rank-{rank}").read_text())
        assert nodes == [agent for agent in range(_AGENTS) for _ in range(_RANKS)]
        assert error <= bound
        # In a namespace there is nothing but the cable.
        assert hosts[rank // _RANKS].interface in interfaces
        assert not hosts[0].prefix or "eth0" not in interfaces


def _run_agents(folder: Path, hosts: list[Host]) -> None:
    environment = os.environ | {
        "INTERLACE_BACKEND": "cpu",
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "INTERLACE_DEADLINE_S": "90",
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), *sys.path])),
    }
    port = free_port()
    outputs = [folder / f"agent-{agent}" for agent in range(_AGENTS)]
    agents = [
        subprocess.Popen(
            [
                *host.prefix,
                *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={_AGENTS}"),
                *(f"--nproc-per-node={_RANKS}", f"--node-rank={agent}"),
                *(f"--master-addr={hosts[0].address}", f"--master-port={port}"),
                *(str(_PROGRAM), str(folder)),
            ],
            env=environment | {"GLOO_SOCKET_IFNAME": host.interface},
            stdout=output.open("w"),
            stderr=subprocess.STDOUT,
        )
        for agent, (host, output) in enumerate(zip(hosts, outputs, strict=True))
    ]
    end = time.monotonic() + 600
    try:
        # An agent whose peer has failed waits for it: whoever fails first ends the test.
        while any(agent.poll() is None for agent in agents) and not any(
            agent.returncode for agent in agents
        ):
            assert time.monotonic() < end, _said(outputs)
            time.sleep(0.1)
        assert all(agent.returncode == 0 for agent in agents), _said(outputs)
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()


def _said(outputs: list[Path]) -> str:
    return "\n".join(f"{output.name}:\n{output.read_text()}" for output in outputs)
