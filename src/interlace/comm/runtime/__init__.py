"""What a rank has by itself: its driver, streams, threads, deadlines, and its place in torch."""
