"""Groups of ranks: shared memory within a node, slices between nodes, rates, start and recovery."""
