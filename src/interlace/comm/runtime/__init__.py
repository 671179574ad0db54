"""What a rank has by itself: its driver, streams, threads, processes, and its place in torch."""
