"""The kernels of ``mixture_of_experts``; README.md explains the protocol.

The plan says how many rows go from which rank to which expert (``layout``). Every kernel reads it,
and only :func:`~interlace.operators.mixture_of_experts.kernels.plan.plan_call` talks to the peers
about it.
"""
