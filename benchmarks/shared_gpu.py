"""vLLM's workers on fewer GPUs than ranks: what an engine generates, and what its host does, can be
seen so, but nothing can be timed that waits for a peer.

vLLM imports this module in each of its workers, where it is named as ``worker_extension_cls``.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

# NCCL refuses two ranks on one GPU of a host. Ranks of several hosts speak by sockets.
os.environ["NCCL_HOSTID"] = str(os.getpid())
os.environ["INTERLACE_NODES"] = "1"  # which Interlace would take these for
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")

_init_device: Any = Worker.init_device


def _init_shared_device(worker: Any) -> None:
    worker.local_rank %= torch.cuda.device_count()
    _init_device(worker)


Worker.init_device = _init_shared_device


class SharedGPU:
    """What vLLM makes a base of its workers; all is done when this module is imported."""
