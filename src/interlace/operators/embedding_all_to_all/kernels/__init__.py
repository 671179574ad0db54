"""The kernels of ``embedding_all_to_all``; README.md explains the protocol."""
