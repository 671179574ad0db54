"""Sums in a fixed tree of pairs, whose bits do not depend on who adds which subtree."""

import triton
import triton.language as tl

from interlace.language.tiles import complete_tiles, put_tile


@triton.jit
def add_to_tree(
    value, ones, twos, fours, index, COUNT: tl.constexpr, NODE: tl.constexpr, waiting=None
):
    """Add one of ``COUNT`` values, which come in order, to a tree of pairs.

    The tree of eight values is ``((v0+v1) + (v2+v3)) + ((v4+v5) + (v6+v7))``. Each sum is float32;
    before it is added to another one, it is rounded to ``NODE``, as are the values. So a rank that
    has a whole subtree may send its sum as ``NODE``, and the bits of the whole are the same for
    every number of ranks. The last sum is not rounded here.

    Args:
        value: float32 tile.
        ones, twos, fours: Tiles of dtype ``NODE``: the sums of one, two and four values that wait
            for their other half; any before the first value.
        index: The number of the value: int32 scalar or constant.
        COUNT: 1, 2, 4 or 8.
        NODE: The dtype of sums that are added.
        waiting: A tensor descriptor ``[1, 1, 1, 2 * rows * programs, columns]`` of dtype NODE,
            whose block is a value: memory in which sums of two and of four values wait that do not
            fit into registers. None: ``twos`` and ``fours``, which mean nothing else.

    No sum is -0.0, since put_lamport sends that as 0.0.

    Returns:
        The sum of the largest subtree that ends with this value (float32), which after the last
        one is the whole sum; and the three sums that wait.

    Example: 1, 2, 3, 4 with ``COUNT = 4``. 1 waits in ``ones``; 2 makes 3, which waits in ``twos``;
    3 waits in ``ones``; 4 makes 7, and that makes 10.
    """
    if COUNT > 1:
        if index % 2 == 0:
            ones = value.to(NODE)
        else:
            value = _add(ones, value.to(NODE))
            if COUNT > 2:
                if index % 4 == 1:
                    twos = _keep(value.to(NODE), twos, waiting, 0)
                else:
                    value = _add(_kept(value, twos, waiting, 0), value.to(NODE))
                    if COUNT > 4:
                        if index % 8 == 3:
                            fours = _keep(value.to(NODE), fours, waiting, 1)
                        else:
                            value = _add(_kept(value, fours, waiting, 1), value.to(NODE))
    return value, ones, twos, fours


@triton.jit
def _keep(value, in_registers, waiting, level):
    """Let a sum wait; return what waits in registers."""
    if waiting is None:
        in_registers = value
    else:
        block = tl.reshape(value, [1, 1, 1, value.shape[0], value.shape[1]])
        put_tile(waiting, [0, 0, 0, _row(value, level), 0], block)
    return in_registers


@triton.jit
def _kept(like, in_registers, waiting, level):
    """Return a sum that waits."""
    if waiting is None:
        return in_registers
    else:
        # The store may have left shared memory, but not arrived.
        complete_tiles()
        return tl.reshape(waiting.load([0, 0, 0, _row(like, level), 0]), like.shape)


@triton.jit
def _row(value, level):
    """Return where this program's sums of a level wait: the row of the descriptor."""
    return (2 * tl.program_id(0) + level) * value.shape[0]


@triton.jit
def _add(left, right):
    """Return a float32 sum that is never -0.0."""
    return left.to(tl.float32) + right.to(tl.float32) + 0.0
