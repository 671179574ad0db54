"""What tests of refused calls look at, on ranks too."""

import interlace


def error_of(call, *args, **kwargs):
    """Type, message and attributes of the error that a call raises; None if it raises none."""
    try:
        call(*args, **kwargs)
    except interlace.InterlaceError as error:
        return type(error).__name__, str(error), dict(vars(error))
    return None
