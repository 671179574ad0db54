"""Memory of a rank, and CUDA graphs that refer to it: kept, replayed, and let go in time."""
