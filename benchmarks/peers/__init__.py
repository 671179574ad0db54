"""Peers, beside the stock pair, the computation alone and Interlace, in one run on GPUs.

    python -m benchmarks.peers --json FILE [--only QuACK] [--capability experts] [--path FOLDER]

README.md says how peers are installed, and what is measured.
"""
