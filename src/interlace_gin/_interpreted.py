"""Functions of ``_device`` for Triton's interpreter: plain Python, called while a kernel runs."""

import numpy as np
import triton.language as tl

from interlace.language._interpreted import plain
from interlace_gin.engine_cpu import Put, engine_at


def _number(value):
    """Return a scalar, or what all elements of a tile are, as a Python integer."""
    return int(np.asarray(plain(value)).flat[0])


def post(gin, peer, target, target_start, source, source_start, nbytes, signal, counter):
    """Begin a put."""
    fields = (target, target_start, source, source_start, nbytes, signal, counter)
    engine_at(_number(gin)).put(_number(peer), Put(*map(_number, fields)))


def read_signal(gin, signal, order):
    """Read a signal, as int64 of the shape of ``signal``."""
    return tl.full(signal.shape, engine_at(_number(gin)).value("signal", _number(signal)), tl.int64)


def read_counter(gin, counter, order):
    """Read a counter, as int64 of the shape of ``counter``."""
    value = engine_at(_number(gin)).value("counter", _number(counter))
    return tl.full(counter.shape, value, tl.int64)


def reset_counter(gin, counter):
    """Set a counter to 0."""
    engine_at(_number(gin)).reset_counter(_number(counter))


def shadow_address(gin, signal):
    """Return the address of the int64 that belongs to a signal."""
    return tl.full([], engine_at(_number(gin)).shadow_address(_number(signal)), tl.int64)
