"""``python -m interlace``."""

from interlace.cli import main

if __name__ == "__main__":
    main()
