"""What checks Interlace, and what depends on it; see ``docs/reliability.md``."""
