"""Training steps as tasks: DLRM, Transformer, mixture of experts."""
