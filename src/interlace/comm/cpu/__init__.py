"""The CPU backend: Triton's interpreter made quicker, and faults to inject into its network."""
