"""FLOPs, memory bytes, link bytes and messages of every operator, in plain Python.

Three readers: benchmarks (physical floors), the simulator (durations), and the tests, which hold
them against the traffic that the CPU backend counts.
"""
