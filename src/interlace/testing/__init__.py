"""What checks Interlace: calls of every operator whose results are known. See ``docs/reliability.md``."""
