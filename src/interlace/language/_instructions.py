"""The operations that the primitives consist of, on the backend that runs this process."""

from interlace.comm.interpreter import interpreting

# Triton compiles or interprets a function when it is decorated, so the choice is made once for all.
if interpreting():
    from interlace.language._interpreted import (
        clock_ns, fence_system, is_cuda, load_acquire, num_threads, pause, require_peers,
        signal_peer, store_to_peer,
    )
else:
    from interlace.language._device import (
        clock_ns, fence_system, is_cuda, load_acquire, num_threads, pause, require_peers,
        signal_peer, store_to_peer,
    )

__all__ = [
    "clock_ns", "fence_system", "is_cuda", "load_acquire", "num_threads", "pause", "require_peers",
    "signal_peer", "store_to_peer",
]
