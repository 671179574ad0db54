"""What is known of a rank's lookups before and after they are sorted by row.

Nothing here communicates: every lookup is by itself, and what needs all lookups, sorting and
adding up, is torch's. The kernels take ``BLOCK`` of ``count`` lookups per program.
"""

import triton
import triton.language as tl


@triton.jit
def _lookups(count, BLOCK: tl.constexpr):
    """Return the program's lookups, and which of them there are."""
    lookup = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return lookup, lookup < count


@triton.jit(do_not_specialize=["count", "batch"])
def number_rows(indices, bags, first_keys, keys, count, batch, BLOCK: tl.constexpr):
    """Store each lookup's key: the number of its row among all rows of the rank.

    Args:
        indices: The rows that are looked up, each in its table.
        bags: The bag of each lookup, int32.
        first_keys: The key of each table's first row, int64.
        keys: Where keys are stored.
        batch: Bags of a table.
    """
    lookup, mask = _lookups(count, BLOCK)
    bag = tl.load(bags + lookup, mask=mask, other=0)
    first = tl.load(first_keys + bag // batch)
    key = first + tl.load(indices + lookup, mask=mask, other=0).to(tl.int64)
    tl.store(keys + lookup, key.to(keys.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count"])
def mark_segments(
    keys, order, bags, scale, sorted_bags, sorted_scale, begins, count, BLOCK: tl.constexpr
):
    """Put bags and factors in the order of the keys, and mark where segments begin.

    Args:
        keys: The sorted keys.
        order: The lookup that each key is of.
        bags, scale: The bag of each lookup; its factor, or None.
        sorted_bags, sorted_scale: Where they are stored; None without factors.
        begins: Where 1 is stored for a key that is another one than before, else 0.
    """
    lookup, mask = _lookups(count, BLOCK)
    source = tl.load(order + lookup, mask=mask, other=0)
    tl.store(sorted_bags + lookup, tl.load(bags + source, mask=mask, other=0), mask=mask)
    if scale is not None:
        factor = tl.load(scale + source, mask=mask, other=0.0)
        tl.store(sorted_scale + lookup, factor.to(tl.float32), mask=mask)
    key = tl.load(keys + lookup, mask=mask, other=0)
    before = tl.load(keys + lookup - 1, mask=mask & (lookup > 0), other=-1)
    tl.store(begins + lookup, (key != before).to(tl.int32), mask=mask)


@triton.jit(do_not_specialize=["count"])
def open_segments(begun, segments, count, BLOCK: tl.constexpr):
    """Store the first lookup of each segment.

    Args:
        begun: How many segments begin up to each lookup.
        segments: Where they are stored.
    """
    lookup, mask = _lookups(count, BLOCK)
    number = tl.load(begun + lookup, mask=mask, other=0)
    before = tl.load(begun + lookup - 1, mask=mask & (lookup > 0), other=0)
    tl.store(segments + number - 1, lookup.to(tl.int32), mask=mask & (number > before))


@triton.jit(do_not_specialize=["count"])
def mark_runs(begun, segments, begins, count, LOOKUPS: tl.constexpr, BLOCK: tl.constexpr):
    """Mark where runs begin: with their segment, and after every ``LOOKUPS`` lookups of it.

    Args:
        begun: How many segments begin up to each lookup.
        segments: The first lookup of each segment.
        begins: Where 1 is stored for a run's first lookup, else 0.
    """
    lookup, mask = _lookups(count, BLOCK)
    number = tl.load(begun + lookup, mask=mask, other=1)
    opening = tl.load(segments + number - 1, mask=mask, other=0)
    is_first = (lookup.to(tl.int32) - opening) % LOOKUPS == 0
    tl.store(begins + lookup, is_first.to(tl.int32), mask=mask)


@triton.jit(do_not_specialize=["count"])
def open_runs(
    begun, keys, bags, segments_begun, runs, run_bags, run_keys, run_segments, count,
    BLOCK: tl.constexpr,
):
    """Store the first lookup of each run with its bag, its key and its segment, so that the kernel
    that adds up gradients needs one load for each and not two.

    Args:
        begun: How many runs begin up to each lookup.
        keys, bags: Of each lookup, in the order of the keys.
        segments_begun: How many segments begin up to each lookup.
        runs, run_bags, run_keys, run_segments: Where they are stored.
    """
    lookup, mask = _lookups(count, BLOCK)
    number = tl.load(begun + lookup, mask=mask, other=0)
    before = tl.load(begun + lookup - 1, mask=mask & (lookup > 0), other=0)
    mask = mask & (number > before)
    run = number - 1
    tl.store(runs + run, lookup.to(tl.int32), mask=mask)
    tl.store(run_bags + run, tl.load(bags + lookup, mask=mask, other=0), mask=mask)
    tl.store(run_keys + run, tl.load(keys + lookup, mask=mask, other=0), mask=mask)
    segment = tl.load(segments_begun + lookup, mask=mask, other=1) - 1
    tl.store(run_segments + run, segment, mask=mask)
