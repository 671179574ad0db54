"""Functions of ``gin.ll`` as Triton calls them; ``_interpreted`` has the same names for the CPU
backend.
"""

from triton.language import core


def _call(name, arguments, types, result, _semantic):
    """Call a function of ``gin.ll``, in each thread for its elements, and in program order."""
    return core.extern_elementwise(
        "", "", arguments, {types: (name, result)}, is_pure=False, _semantic=_semantic
    )


_INT32, _INT64 = core.dtype("int32"), core.dtype("int64")


@core.extern
def post(
    gin, peer, target, target_start, source, source_start, nbytes, signal, counter, _semantic=None
):
    """Put a range; the first thread does it. ``peer``, ``signal`` and ``counter`` are int32, all
    others int64.
    """
    arguments = [gin, peer, target, target_start, source, source_start, nbytes, signal, counter]
    types = (_INT64, _INT32, _INT64, _INT64, _INT64, _INT64, _INT64, _INT32, _INT32)
    return _call("interlace_gin_put", arguments, types, _INT32, _semantic)


@core.extern
def read_signal(gin, signal, order, _semantic=None):
    """Read a signal (int64), with the memory order of C++ that has the number ``order``."""
    types = (_INT64, _INT32, _INT32)
    return _call("interlace_gin_signal", [gin, signal, order], types, _INT64, _semantic)


@core.extern
def read_counter(gin, counter, order, _semantic=None):
    """Read a counter (int64), with the memory order of C++ that has the number ``order``."""
    types = (_INT64, _INT32, _INT32)
    return _call("interlace_gin_counter", [gin, counter, order], types, _INT64, _semantic)


@core.extern
def reset_counter(gin, counter, _semantic=None):
    """Set a counter to 0; the first thread does it."""
    types = (_INT64, _INT32)
    return _call("interlace_gin_reset_counter", [gin, counter], types, _INT32, _semantic)


@core.extern
def shadow_address(gin, signal, _semantic=None):
    """Return the address (int64) of an int64 of this rank that belongs to a signal."""
    types = (_INT64, _INT32)
    return _call("interlace_gin_shadow", [gin, signal], types, _INT64, _semantic)
