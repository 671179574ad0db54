"""GPU-initiated puts over the network, by NCCL's GIN; on the CPU backend, by the host."""
