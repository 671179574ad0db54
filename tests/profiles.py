"""Machine profiles that a test has made a program know."""

from interlace.costs import known_profiles


def forget_profiles() -> None:
    """Forget the profiles that this process has measured, and what follows from any profile."""
    known_profiles._adopted.clear()
    for cached in known_profiles._by_profiles:
        cached.cache_clear()
