"""The operations that the primitives consist of, on the backend that runs this process."""

from interlace.comm.runtime.interpreter import interpreting

# Triton compiles or interprets a function when it is decorated, so the choice is made once for all.
if interpreting():
    from interlace.language._interpreted import (
        asks_for_records, clock_ns, fence_system, is_cuda, is_tile, kind_of_event,
        load_acquire, load_whole, num_threads, pause, processor, records, require_aligned,
        require_grid, require_memory, require_peers, signal_peer, store_to_peer, tile_bytes,
        to_float8,
    )
else:
    from interlace.language._device import (
        asks_for_records, clock_ns, fence_system, is_cuda, is_tile, kind_of_event,
        load_acquire, load_whole, num_threads, pause, processor, records, require_aligned,
        require_grid, require_memory, require_peers, signal_peer, store_to_peer, tile_bytes,
        to_float8,
    )

__all__ = [
    "asks_for_records", "clock_ns", "fence_system", "is_cuda", "is_tile",
    "kind_of_event", "load_acquire", "load_whole", "num_threads", "pause", "processor", "records",
    "require_aligned", "require_grid", "require_memory", "require_peers", "signal_peer",
    "store_to_peer", "tile_bytes", "to_float8",
]
