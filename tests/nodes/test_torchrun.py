"""Two agents of torchrun are two nodes, as on two machines."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

_PROGRAM = Path(__file__).parent / "program.py"
_AGENTS, _RANKS = 2, 1


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_two_agents_are_two_nodes(tmp_path: Path) -> None:
    environment = os.environ | {
        "INTERLACE_BACKEND": "cpu",
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "INTERLACE_DEADLINE_S": "90",
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), *sys.path])),
    }
    port = _free_port()
    agents = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={_AGENTS}"),
                *(f"--nproc-per-node={_RANKS}", f"--node-rank={agent}"),
                *("--master-addr=127.0.0.1", f"--master-port={port}", str(_PROGRAM), str(tmp_path)),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for agent in range(_AGENTS)
    ]
    for agent in agents:
        said, _ = agent.communicate(timeout=170)
        assert agent.returncode == 0, said
    for rank in range(_AGENTS * _RANKS):
        nodes, error, bound = json.loads((tmp_path / f"rank-{rank}").read_text())
        assert nodes == [agent for agent in range(_AGENTS) for _ in range(_RANKS)]
        assert error <= bound
