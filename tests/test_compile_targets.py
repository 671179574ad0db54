"""Every kernel of every operator compiles for every GPU that is supported, and for one of them in
every way, without a GPU.

In processes of their own, without TRITON_INTERPRET: there a kernel would be a Python function. A
kernel without a case here fails the test.

Together, a kernel's cases have each value of each flag, and each line of its source. Compilers take
time by the number of cases and by the code that a thread gets, so tiles and numbers of ranks are
small where code is only repeated for larger ones; products of matrix units have the tiles that are
used, as those decide whether ptxas serialises them.
"""

from __future__ import annotations

import pytest

from tests import compilers

# Argument types that an argument's name implies: the same names mean the same in every kernel.
_INTEGERS = ("call", "half", "slot", "N", "B", "K", "tiles", "stride_x", "stride_w")
_TYPES = {"epochs": "*i32", "ctx": "*i64", "words": "i64", **dict.fromkeys(_INTEGERS, "i32")}


def cases_of(kernel):
    """``(types, constexprs)`` to compile ``kernel`` with: each flag, dtype and kind of tile at
    least once; the first and the last as only a trace needs them, which adds to a kernel and leaves
    out nothing. What ptxas says of matrix units counts without a trace, so the first case of a
    product is compiled without one, too.
    """
    first, *others = _cases_of(kernel)
    if "ctx" not in first[0]:
        return [first, *others]
    is_product = any("tensordesc" in kind for kind in first[0].values())
    ends = [first, _traced(first)] if is_product else [_traced(first)]
    return [*ends, *others[:-1], *map(_traced, others[-1:])]


def _traced(case):
    types, constants = case
    return types | {"ctx": "*u64"}, constants


def _cases_of(kernel):
    return {
        **dict.fromkeys(_EXCHANGES, lambda: _exchanges(kernel)),
        "add_pieces": lambda: [
            (
                _FETCHING
                | dict.fromkeys(("y", "bias"), dtype)
                | {"slot_address": "i64"}
                | dict.fromkeys(("most_rows", "rows", "piece_rows", "N", "row_stride"), "i32"),
                {"WORLD_SIZE": ranks, "PIECES": 2, "FACTOR": 1, "ROWS": 4, "COLS": 1024} | more,
            )
            for dtype, ranks, more in (("*bf16", 2, {}), ("*fp32", 3, {"bias": None}))
        ],
        "admit_parts": lambda: [(_FETCHING, {"WORLD_SIZE": 4, "num_warps": 1})],
        "await_rows": lambda: [(_FETCHING, {"WORLD_SIZE": 8, "num_warps": 1})],
        "all_gather_gemm": _all_gather_gemm,
        "all_to_all_gemm": _all_to_all_gemm,
        "collect": _collect,
        "compare_clocks": lambda: [
            (
                _FETCHING
                | {"times": "*i64"}
                | dict.fromkeys(("rounds", "client", "server"), "i32"),
                {"num_warps": 1},
            )
        ],
        # The number of ranks does not matter.
        "count_slots": lambda: [*_mixture_of_experts_numbers()][:1],
        "dispatch_grouped_gemm": lambda: _mixture_of_experts_products("dispatch_grouped_gemm"),
        "dispatch_grouped_gemm_backward": lambda: _mixture_of_experts_products(
            "dispatch_grouped_gemm_backward"
        ),
        "decode_first_gemm": lambda: _mixture_of_experts_decoding(),
        "decode_second_gemm": lambda: _mixture_of_experts_decoding(),
        "embedding_all_to_all_backward": _embedding_all_to_all_backward,
        "embedding_all_to_all_between_nodes": _embedding_all_to_all_between_nodes,
        "check_messages": lambda: [
            (
                _MEETING
                | {"sources": "*i64", "is_valid": "*i32", "count": "i32"}
                | dict.fromkeys(("stamps", "landing"), "i64"),
                {"OUT": _dtype("bfloat16")},
            )
        ],
        "void_message": lambda: [
            (
                {"is_valid": "*i32", "landing": "i64", "ctx": "*i64", "elements": kind},
                {"OUT": _dtype("bfloat16"), "num_warps": 4},
            )
            for kind in ("i32", "i64")
        ],
        "stamp_messages": lambda: [
            (_MEETING | {"stamps": "i64", "count": "i32"}, {"num_warps": 1})
        ],
        "embedding_all_to_all_close": _embedding_all_to_all_close,
        "embedding_all_to_all_collect": _embedding_all_to_all_collect,
        "embedding_all_to_all_forward": _embedding_all_to_all_forward,
        # Only the size of an element matters.
        "gather_tokens": lambda: [*_mixture_of_experts_decoding()][::2],
        "gemm_all_reduce": lambda: _sums_over_ranks(),
        "gemm_all_to_all": _products,
        "gemm_all_to_all_columns": _gemm_all_to_all_columns,
        "gemm_reduce_scatter": lambda: _sums_over_ranks(),
        "gemv_all_reduce_one_shot": _gemv_all_reduce_one_shot,
        "gemv_all_reduce_two_phase": _gemv_all_reduce_two_phase,
        "choose_columns": _choices,
        "gradients_of_rows": lambda: [_losses()[0]],
        "losses_of_rows": _losses,
        "grouped_gemm_combine": lambda: _mixture_of_experts_products("grouped_gemm_combine"),
        "multiply_sum_and_norm": _multiply_sum_and_norm,
        "norm_rows": lambda: [
            ({"total": "*bf16"} | types, {"COLUMNS": 2048, "num_warps": 16} | more)
            for types, more in _norms(bias="constexpr")
        ],
        "sum_and_norm_rows": lambda: [
            (
                _TYPES | {"part": "*bf16"} | types,
                {"COLUMNS": 2048, "WORLD_SIZE": ranks, "num_warps": 16} | more,
            )
            for ranks, (types, more) in zip((1, 2, 3, 2), _norms(), strict=True)
        ],
        "multiply_few_rows": _multiply_few_rows,
        "multiply_unless_one": lambda: [
            (
                {"values": "*bf16", "factor": "*fp32", "count": "i64"},
                {"BLOCK": 4096, "num_warps": 8},
            )
        ],
        "hold": lambda: [
            (
                {"signals": "i64", "unread": "i64", "ctx": "*i64", "duration": "i64"},
                {"UNREAD": 1 << 18, "WORLD_SIZE": 4, "BLOCK": 1024, "num_warps": 4},
            )
        ],
        "prepare_recording": lambda: [
            (
                {"recorded": "*i64", "original": "*i64", "rings": "i64", "programs": "i32"},
                {"num_warps": 4},
            )
        ],
        "meet": lambda: [
            (_MEETING | {"is_valid": "*i32"}, {"WORLD_SIZE": 4}),
            (_MEETING, {"WORLD_SIZE": 4, "is_valid": None}),
        ],
        "grouped_gemm_gradient": lambda: _mixture_of_experts_products("grouped_gemm_gradient"),
        "multiply_and_sum": lambda: [
            (types, constants | {"PIECES": 2, "OWN_PART": own})
            # It takes no float8 with scales of blocks, which come last.
            for own, products in ((True, [*_products()][:1]), (False, [*_products()][:-1]))
            for types, constants in products
        ],
        "number_blocks": lambda: [*_mixture_of_experts_numbers()][:1],
        "plan_call": lambda: _mixture_of_experts_numbers(),
        "quantise": lambda: [
            (_QUANTISING, {"COLS": 1024, "LANES": 8} | absent) for absent in ({}, {"counts": None})
        ],
        **dict.fromkeys(
            ("mark_runs", "mark_segments", "number_rows", "open_runs", "open_segments"),
            lambda: _sorting(kernel),
        ),
        "pool_embeddings": _pool_embeddings,
        "settle_rows": lambda: [
            (
                _FETCHING | dict.fromkeys(("cells", "results"), "i32") | {present: "*bf16"},
                {"WORLD_SIZE": 8, "IN_PLACE": in_place, absent: None, "num_warps": 1} | options,
            )
            for present, absent, in_place, options in (
                ("gathered", "y", True, {"maxnreg": 32}),
                ("y", "gathered", False, {}),
            )
        ],
        "sum_parts": lambda: [
            (
                _TYPES | dict.fromkeys(("part", "y", "bias"), dtype) | {"elements": "i32"},
                {"WORLD_SIZE": ranks, "SCATTER": scatter, "FACTOR": 1, "CHUNK": 1024} | more,
            )
            for dtype, ranks, scatter, more in (
                ("*bf16", 2, False, {"IN_TREE": False}),
                ("*fp32", 3, True, {"IN_TREE": False, "bias": None}),
                ("*bf16", 8, True, {"IN_TREE": True}),
            )
        ],
        "settle": lambda: [(_SETTLING, {"PIECES": 8, "num_warps": 1})],
        "spread_rows": _spread_rows,
        "stage_rows": _stage_rows,
        # Neither the form of experts nor the bias matters, as also below where cases are fewer.
        "sum_results": lambda: [*_mixture_of_experts_rows()][:1],
        "activation_backward": lambda: _mixture_of_experts_rows(),
        "activate_rows": lambda: _mixture_of_experts_in_slices(),
        "activate_rows_backward": lambda: _mixture_of_experts_in_slices(),
        "sum_rows_of_tokens": lambda: [*_mixture_of_experts_in_slices()][:2],
        "bias_gradient": lambda: [*_mixture_of_experts_rows()][:2],
    }[kernel]()


_MEETING = {"signals": "i64", "call": "i32", "epochs": "*i32", "ctx": "*i64"}
_SETTLING = dict.fromkeys(("counters", "tiles", "is_valid"), "*i32") | {
    "ctx": "*i64",
    "pieces": "i32",
}
_FETCHING = {"signals": "i64", "epochs": "*i32", "ctx": "*i64", "notes": "*i32", "call": "i32"}


_EXCHANGES = ("adam_kernel", "fetch_kernel", "move_kernel", "rows_kernel", "sum_kernel")


def _exchanges(kernel):
    """Those of benchmarks/parallel_kernel_bench."""
    import triton.language as tl

    types = {
        "data": "i64", "signals": "i64", "epochs": "*i32", "ctx": "*i64", "mark": "i32",
        "half": "i64", "x": "*bf16", "y": "*bf16",
    }  # fmt: skip
    strides = ("PEER_X", "A_X", "B_X", "PEER_Y", "A_Y", "B_Y")
    rows = {"WIDTH": 24, "ROWS": 32, "COLS": 32, "WORLD_SIZE": 2}
    integers = dict.fromkeys(("take", "place", "parts", "indices"), "*i64")
    if kernel == "move_kernel":
        for root, into, word, sizes in ((-1, -1, tl.int64, (512, 8)), (0, 1, tl.int16, (300, 3))):
            shape = {"COUNT": sizes[0], "B": 4, "C": sizes[1], "ROOT": root, "INTO": into}
            yield (
                types,
                dict.fromkeys(strides, 64) | shape
                | {"WORD": word, "BLOCK": 256, "WORLD_SIZE": 2},
            )  # fmt: skip
    elif kernel == "sum_kernel":
        for into, dtype in ((-1, tl.bfloat16), (0, tl.float32)):
            constants = {"COUNT": 1000, "PEER_X": 1000, "INTO": into, "DTYPE": dtype}
            kinds = dict.fromkeys("xy", f"*{dtype.name}")
            yield types | kinds, constants | {"BLOCK": 512, "WORLD_SIZE": 3}
    elif kernel == "rows_kernel":
        for taken, word in ((True, tl.int64), (False, tl.int16)):
            flags = {"TAKE": taken, "PLACE": taken, "CAPACITY": 64, "WORD": word}
            yield types | integers, rows | flags
    elif kernel == "fetch_kernel":
        constants = rows | {"SHARD": 100, "COUNT": 64, "WORD": tl.int64}
        yield types | integers | {"table": "*bf16"}, constants
    else:
        tensors = ("grad", "weight", "m", "v", "weight_out", "m_out", "v_out")
        numbers = ("lr", "beta1", "beta2", "eps", "decay", "bc1", "bc2")
        for flags in ((True, True, True), (False, False, True), (True, False, False)):
            yield (
                types | dict.fromkeys(tensors, "*bf16") | dict.fromkeys(numbers, "fp32"),
                {"COUNT": 1000, "BLOCK": 256, "DTYPE": tl.bfloat16, "WORLD_SIZE": 2}
                | dict(zip(("SUM", "CUT", "GATHER"), flags, strict=True)),
            )


def _ones(*names):
    """Sizes of 1, of which Triton makes constants."""
    return dict.fromkeys(names, 1)


def _choices():
    """Greedy, where the kernel finds the highest logit itself, and of candidates."""
    sizes = dict.fromkeys(("rows", "count", "stride", "first"), "i32")
    chosen = {"chosen": "*i64", "chosen_values": "*fp32"}
    for ranks, k, candidates in ((2, 1, {}), (3, 20, {"values": "*bf16", "columns": "*i64"})):
        constants = {"WORLD_SIZE": ranks, "K": k, "CANDIDATES": 32 if k > 1 else 1}
        missing = {} if candidates else {"values": None, "columns": None}
        yield (
            _TYPES | sizes | chosen | {"logits": "*bf16"} | candidates,
            constants | missing | {"BLOCK": 8192, "num_warps": 16},
        )


def _losses():
    """Losses alone and with gradients, of one rank and of several, smoothed and not."""
    numbers = dict.fromkeys(("losses", "log_sums", "scale", "scales"), "*fp32")
    sizes = dict.fromkeys(("rows", "columns", "stride", "first", "vocabulary", "ignored"), "i32")
    types = _TYPES | numbers | sizes | dict.fromkeys(("smoothing", "z_loss"), "fp32")
    return [
        (
            types | {"logits": logits, "targets": targets},
            {"WORLD_SIZE": ranks, "SMOOTHS": smooths, "GRADIENT": gradient}
            | {"BLOCK": 256 * warps, "num_warps": warps},
        )
        for logits, targets, ranks, smooths, gradient, warps in (
            ("*bf16", "*i64", 2, True, True, 16),
            ("*fp32", "*i32", 3, False, False, 8),
            ("*bf16", "*i64", 1, False, True, 8),
        )
    ]


def _stage_rows():
    """Rows, where they are multiplied as well; float8 with scales."""
    names = ("rows", "K", "x_stride", "x_scale_stride", "inner_groups")
    addresses = dict.fromkeys(("staged_address", "scale_offset", "own_address"), "i64")
    types = _FETCHING | dict.fromkeys(names, "i32") | addresses | {"x_scale": "*fp32"}
    blocks = {"WORLD_SIZE": 4, "INNER_ALIGN": 8, "FACTOR": 8, "ROWS": 2, "COLS": 512}
    blocks["SCALES"] = 0
    for own, in_place in ((False, False), (True, True), (False, True)):
        more = {"x_scale": None, "OWN": own, "IN_PLACE": in_place}
        yield types | {"x": "*bf16"}, blocks | more
    scaled = {"INNER_ALIGN": 16, "OWN": True, "IN_PLACE": False, "SCALES": 56}
    yield types | {"x": "*fp8e4nv"}, blocks | scaled


def _spread_rows():
    """The same rows to all, and others to each."""
    sizes = ("K", "x_stride", "gathered_stride", "cells")
    types = _TYPES | {"routes": "*i64"} | dict.fromkeys(sizes, "i32")
    for dtype, each, one in (("*bf16", False, {}), ("*fp32", True, _ones("K", "x_stride"))):
        yield (
            types | {"x": dtype, "gathered": dtype},
            {"WORLD_SIZE": 3, "SCATTER": each, "FACTOR": 1, "ROWS": 2, "COLS": 512} | one,
        )


def _collect():
    """Copies and sums, for this rank and for all, into memory of its own or where they arrive."""
    import triton.language as tl

    addresses = dict.fromkeys(("slots", "result", "landing"), "i64")
    sizes = dict.fromkeys(("rows", "columns", "slot_stride", "row_stride"), "i32")
    types = _MEETING | addresses | sizes
    constants = {"WORLD_SIZE": 3, "DTYPE": tl.bfloat16, "FACTOR": 1, "ROWS": 2, "COLS": 512}
    for reduction, captured in (
        ("copy", True), ("sum", True), ("sum_for_all", False), ("sum_for_all", True)
    ):  # fmt: skip
        in_place = captured and reduction == "sum_for_all"
        flags = {"REDUCTION": reduction, "IN_PLACE": in_place, "CAPTURED": captured}
        yield types, constants | flags | {"is_valid": None}
    flags = {"REDUCTION": "copy", "IN_PLACE": False, "CAPTURED": False, "DTYPE": tl.float32}
    yield types | {"is_valid": "*i32"}, constants | flags | _ones("columns", "row_stride")


_EMBEDDING_ADDRESSES = ("buffers", "grants", "signals", "buffer_bytes")
_EMBEDDING_SIZES = (
    "call",
    "buffer_index",
    "B",
    "chunk",
    "T",
    "column_groups",
    "own_groups",
    "drawn_tasks",
)
_EMBEDDING_TYPES = {
    "epochs": "*i32", "ctx": "*i64",
    **dict.fromkeys(_EMBEDDING_ADDRESSES, "i64"), **dict.fromkeys(_EMBEDDING_SIZES, "i32"),
}  # fmt: skip


def _lookups(index, factors="constexpr"):
    """The types of the lookups' lists; without factors by default."""
    from interlace.operators.embedding_all_to_all.kernels.forward import Lookups

    return {"lookups": Lookups("*i64", f"*{index}", f"*{index}", factors)}


def _embedding_all_to_all_forward():
    """Each table and output dtype, kind of index; full and partly filled vectors."""
    from interlace.operators.embedding_all_to_all.kernels.forward import Pooling
    from interlace.operators.embedding_all_to_all.kernels.vectors import Vectors

    def case(lookups, pooling, vectors, ranks=4):
        constants = {"WORLD_SIZE": ranks, "POOLING": pooling, "VECTORS": vectors}
        return _EMBEDDING_TYPES | lookups, constants

    wide = Vectors("fp32", "fp32", width=128, full=True, align=4)
    yield case(_lookups("i64"), Pooling(4, 4, False), wide)
    vectors = Vectors("fp16", "fp32", width=128, full=False, align=1)
    yield case(_lookups("i32", "*fp32"), Pooling(8, 2, False), vectors, ranks=3)
    vectors = Vectors("bf16", "bf16", width=1024, full=True, align=8)
    yield case(_lookups("i64"), Pooling(1, 4, True), vectors, ranks=8)


def _pool_embeddings():
    """Both kinds of index; with factors and without, sums and means; full and partly filled
    vectors.
    """
    from interlace.operators.embedding_all_to_all.kernels.forward import Pooling
    from interlace.operators.embedding_all_to_all.kernels.vectors import Vectors

    types = {"output": "i64"}
    types |= dict.fromkeys(("B", "T", "column_groups", "program_tasks"), "i32")
    wide = Vectors("fp16", "fp16", width=128, full=True, align=8)
    narrow = Vectors("fp32", "bf16", width=64, full=False, align=1)
    for lookups, vectors, mean, more in (
        (_lookups("i64"), wide, False, {"num_warps": 1}),
        (_lookups("i32", "*fp32"), narrow, True, {}),
    ):
        yield types | lookups, {"POOLING": Pooling(4, 3, mean), "VECTORS": vectors} | more


def _sorting(kernel):
    """Both kinds of key and index; with factors and without."""
    types = dict.fromkeys(kernel.arg_names, "*i32") | dict.fromkeys(("count", "batch"), "i32")
    types |= {"first_keys": "*i64", "order": "*i64", "scale": "*bf16", "sorted_scale": "*fp32"}
    for keys, indices, more in (
        ("*i64", "*i32", {}),
        ("*i32", "*i64", {"scale": None, "sorted_scale": None}),
    ):
        kinds = {"keys": keys, "run_keys": keys, "indices": indices}
        yield types | kinds, {"BLOCK": 1024, "LOOKUPS": 32} | more


def _dtype(name):
    import triton.language as tl

    return getattr(tl, name)


def _embedding_all_to_all_between_nodes():
    """Ranks of one node and of two; full and partly filled vectors, factors, kinds of index."""
    from interlace.operators.embedding_all_to_all.kernels.between_nodes import (
        RanksByNode,
        SlicedMemory,
    )
    from interlace.operators.embedding_all_to_all.kernels.forward import Pooling
    from interlace.operators.embedding_all_to_all.kernels.vectors import Vectors

    sizes = (
        "first_blocks", "first_bytes", "slice_blocks", "slice_bytes", "first_local", "tasks",
    )  # fmt: skip
    types = _EMBEDDING_TYPES | {"ranks": "*i64", "memory": SlicedMemory(*["i64"] * 5)}
    types |= dict.fromkeys((*sizes, "program_tasks"), "i32")
    wide = Vectors("fp16", "fp16", width=128, full=True, align=8)
    narrow = Vectors("fp32", "bf16", width=64, full=False, align=1)
    for lookups, ranks, vectors, more in (
        (_lookups("i64"), RanksByNode(2, remote=1), wide, {"num_warps": 1}),
        (_lookups("i32", "*fp32"), RanksByNode(8, remote=4), narrow, {}),
    ):
        constants = {"RANKS": ranks, "VECTORS": vectors}
        yield types | lookups, constants | {"POOLING": Pooling(4, 4, False)} | more


def _embedding_all_to_all_close():
    """A node of one rank, and of four."""
    import triton.language as tl

    from interlace.operators.embedding_all_to_all.kernels.between_nodes import RanksByNode

    types = _MEETING | {"ranks": "*i64", "own_buffer": "i64", "elements": "i32"}
    for ranks in (RanksByNode(2, remote=1), RanksByNode(8, remote=4)):
        constants = {"RANKS": ranks, "OUT": tl.float16}
        yield types | {"first_local": "i32"}, constants


def _embedding_all_to_all_collect():
    """Both sizes of elements."""
    import triton.language as tl

    types = _MEETING | {"sources": "*i64", "output": "i64", "landing": "i64"}
    types |= dict.fromkeys(("samples", "first_rows", "slice_rows", "columns"), "i32")
    for dtype in (tl.bfloat16, tl.float32):
        yield types, {"REMOTE": 4, "ROWS": 16, "COLUMNS": 256, "OUT": dtype}


def _embedding_all_to_all_backward():
    """Each update, key, table and gradient dtype; one rank, and a row cut into several runs; and
    as by default, with so few registers.
    """
    from interlace.operators.embedding_all_to_all.config import default_config
    from interlace.operators.embedding_all_to_all.kernels.backward import (
        Progress,
        Runs,
        SortedRuns,
        Tables,
        Writing,
    )
    from interlace.operators.embedding_all_to_all.kernels.gradients import GradientPushing, Rates
    from interlace.operators.embedding_all_to_all.kernels.vectors import Vectors

    types = _EMBEDDING_TYPES | {"bags": "*i32", "scale": "*fp32", "rates": Rates("fp32", "fp32")}
    types |= {"tables": Tables("*i64", "*i64"), "progress": Progress("*i32", "*fp32")}
    types |= dict.fromkeys(("gradient", "landing", "target"), "i64")
    types |= dict.fromkeys(("max_tables", "landing_groups"), "i32")

    def case(key, update, vectors, runs, *, by_segment=False, pushers=64, rows=8, **more):
        constants = {
            "WORLD_SIZE": 4,
            "PUSHING": GradientPushing(pushers, rows, blocks=4, width=vectors.width),
            "RUNS": Runs(runs, lookups=128),
            "WRITING": Writing(update, by_segment),
            "VECTORS": vectors,
        }
        runs = SortedRuns(**dict.fromkeys(SortedRuns._fields, "*i32"))._replace(keys=f"*{key}")
        return types | {"runs": runs}, constants | more

    wide = Vectors("fp32", "fp32", width=128, full=True, align=4)
    yield case("i32", "adagrad", wide, 4, scale=None)
    vectors = Vectors("fp16", "fp32", width=128, full=False, align=1)
    yield case("i64", "sgd", vectors, 8, WORLD_SIZE=3)
    vectors = Vectors("bf16", "bf16", width=1024, full=True, align=8)
    yield case("i32", "store", vectors, 1, by_segment=True, rows=1, scale=None, WORLD_SIZE=8)
    vectors = Vectors("fp32", "fp16", width=64, full=False, align=8)
    yield case("i32", "store", vectors, 4, pushers=0, scale=None, WORLD_SIZE=1)
    for width in (32, 128, 1024):
        config = default_config(width=width, itemsize=4, processors=132)
        vectors = Vectors("fp32", "fp32", width=width, full=True, align=4)
        yield case(
            "i32", "adagrad", vectors, config.block_runs, rows=config.push_rows, scale=None,
            num_warps=config.update_warps, maxnreg=config.update_registers,
        )  # fmt: skip


def _all_gather_gemm():
    """Products of rows that peers fetch in place, and of rows that they do not, gathered or not."""
    products = list(_products({"INNER_ALIGN": 8}))
    for i, (types, constants) in enumerate(products):
        types = types | {"filled": "*bf16", "cells": "i32"}
        missing = {"filled": None} if i == 0 else {}
        yield types, constants | {"IN_PLACE": i != 1} | missing


def _gemm_all_to_all_columns():
    """Whole tiles through descriptors; ordinary loads and stores, a bias, w along N."""
    sizes = dict.fromkeys(("first_row", "own_cells", "tiles_n"), "i32")
    described, _, stored, *_ = _products()
    for owners, (types, constants) in ((1, described), (2, described), (2, stored)):
        tables = dict.fromkeys(("columns", "strides"), "*i64")
        yield types | sizes | tables, constants | {"OWNERS": owners, "FACTOR": 8}


def _all_to_all_gemm():
    """As there, and a single rank's own product."""
    from interlace.operators.all_to_all_gemm.kernel import ColumnPushing

    sizes = dict.fromkeys(("own_columns", "place", "gathered_stride", "y_stride", "cells"), "i32")
    moved = {"PUSHING": ColumnPushing(16, 32, 512, 16)}
    (types, constants), _, (pointers, stores), *_ = _products()
    described = {"x": "*bf16", "result": "tensordesc<bf16[64, 64]>"}
    yield types | sizes | described, constants | moved
    alone = stores["SENDING"]._replace(world_size=1)
    none = {"SENDING": alone, "PUSHING": ColumnPushing(0, 32, 512, 16), "bias": None}
    for more in ({}, none):
        yield pointers | sizes, stores | moved | {"gathered": None} | more


def _products(more=None):
    """Descriptors, full tiles; ordinary loads and stores, a bias, w along N; float8 with scales."""
    from interlace.gemm.kernels.grants import OutputBuffers
    from interlace.gemm.kernels.reduction import SlotHalves
    from interlace.gemm.kernels.tiles import Scales, Sending, Tiling

    names = ("slot_address", "y_address", "signals")
    sizes = (
        "call",
        "own_buffer",
        "per_source",
        "most_rows",
        "own_rows",
        "part_rows",
        "M",
        "N",
        "spread_ns",
    )
    sizes += ("rows", "piece_rows", "product_rows")
    strides = ("x_stride", "w_stride")
    types = {
        **dict.fromkeys(names, "i64"),
        **dict.fromkeys((*sizes, *strides, "K"), "i32"),
        "routes": "*i64",
    }
    types |= {
        "epochs": "*i32",
        "notes": "*i32",
        "ctx": "*i64",
        "scales": Scales("*fp32", "*fp32", "i32", "i32"),
        "gathered_scales": "*fp32",
        "halves": SlotHalves("i64", "i64"),
        "buffers": OutputBuffers("i64", "i64"),
    }
    tiling = Tiling(64, 64, 64, 8, descriptors=True, w_along_k=True)
    sending = Sending(2, "bf16", align=8, tile_stores=True, interleave=8, in_rank_order=False)
    plain = {"TILING": tiling, "SENDING": sending, "waiting": None} | (more or {})
    unscaled = {"scales": Scales("constexpr", "constexpr", "i32", "i32")}
    not_gathered = {"gathered_scales": None}

    def described(dtype):
        outside = dict.fromkeys(("slots", "results", "tiles"), "tensordesc<bf16[1, 1, 1, 64, 64]>")
        inside = dict.fromkeys(("x", "w", "gathered"), f"tensordesc<{dtype}[64, 64]>")
        return types | inside | outside | {"result": "tensordesc<bf16[1, 64, 64]>"}

    yield described("bf16") | unscaled, plain | not_gathered | {"bias": None}
    ordered = sending._replace(world_size=3, in_rank_order=True)
    yield described("fp8e4nv"), plain | {"bias": None, "SENDING": ordered}
    pointers = types | dict.fromkeys(("x", "w", "gathered", "bias"), "*fp16")
    stores = {
        "TILING": tiling._replace(descriptors=False, w_along_k=False),
        "SENDING": ordered._replace(world_size=2, dtype="fp16", tile_stores=False),
    }
    undescribed = dict.fromkeys(("tiles", "slots", "results", "result"))
    yield pointers | unscaled, plain | not_gathered | stores | undescribed
    in_blocks = tiling._replace(block_n=256, block_k=128, block_scales="x")
    blocks = described("fp8e4nv") | dict.fromkeys(("x", "gathered"), "tensordesc<fp8e4nv[64, 128]>")
    wide = dict.fromkeys(("slots", "results", "tiles"), "tensordesc<bf16[1, 1, 1, 64, 256]>")
    blocks |= wide | {
        "w": "tensordesc<fp8e4nv[256, 128]>",
        "result": "tensordesc<bf16[1, 64, 256]>",
    }
    yield blocks, plain | {"bias": None, "TILING": in_blocks}


def _sums_over_ranks():
    """As other products; with eight leaves of K, which two ranks or four share."""
    described, float8, stores, blocks = _products()
    yield from (described, float8, blocks)
    types, constants = described
    tree = {"leaves": 4, "node": "bf16"}, {"in_rank_order": True, "in_tree": True}
    leaves = dict.fromkeys(("x", "w"), "tensordesc<bf16[1, 64, 64]>")
    yield types | leaves, _in_tree(constants, *tree)
    # Sums that wait in memory beside the largest tile.
    large = _in_tree(constants, *tree) | {"num_warps": 8, "num_stages": 3}
    large["TILING"] = large["TILING"]._replace(block_m=128, block_n=256)
    operands = {"x": "tensordesc<bf16[1, 128, 64]>", "w": "tensordesc<bf16[1, 256, 64]>"}
    tiles = dict.fromkeys(("slots", "results", "waiting"), "tensordesc<bf16[1, 1, 1, 128, 256]>")
    yield types | operands | tiles, {name: large[name] for name in large if name != "waiting"}
    types, constants = stores
    tree = {"leaves": 2, "node": "fp16"}, {"in_rank_order": True, "in_tree": True, "world_size": 4}
    yield types, _in_tree(constants, *tree)


def _in_tree(constants, tiling, sending):
    return constants | {
        "TILING": constants["TILING"]._replace(**tiling),
        "SENDING": constants["SENDING"]._replace(**sending),
    }


def _gemv_all_reduce(dtype, block_n, block_b, block_k, even, values, tree=None, **constants):
    from interlace.gemm.kernels.gemv import GemvTiling

    tensors = dict.fromkeys(("x", "w", "bias", "y"), f"*{dtype}")
    tiling = GemvTiling(
        block_n=block_n, block_b=block_b, block_k=block_k, even=even, even_k=even,
        word_values=values,
        round_parts=values == 2,
        **(tree or {}),
    )  # fmt: skip
    return _TYPES | tensors, {"TILING": tiling} | constants


def _norms(sections=1, bias="*bf16"):
    """Types and constants of each norm and quantisation."""
    from interlace.operators.gemm_all_reduce.kernels.norm import (
        NormForm,
        NormInputs,
        NormOutputs,
    )

    for norm, quantization, y, scale, scales in (
        ("layer", "none", "*bf16", "constexpr", "constexpr"),
        ("rms", "tensor", "*fp8e4nv", "*fp32", "constexpr"),
        ("rms", "row", "*fp8e4nv", "constexpr", "*fp32"),
        ("rms", "block", "*fp8e4nv", "constexpr", "*fp32"),
    ):
        inputs = NormInputs(bias, "*bf16", "*bf16", "*fp32", scale, "fp32")
        types = {"inputs": inputs, "outputs": NormOutputs(y, "*bf16", scales)}
        yield types | {"N": "i32", "B": "i32"}, {"FORM": NormForm(norm, quantization, sections)}


def _multiply_sum_and_norm():
    """One token and several; each norm and quantisation."""
    for (sections, block_b, more), which in (
        ((8, 1, {"num_warps": 1}), 0),
        ((8, 1, {"num_warps": 1}), 2),
        ((4, 16, {"num_stages": 3}), 1),
        ((8, 1, {"num_warps": 1}), 3),
    ):
        types, constants = [*_norms(sections)][which]
        even, values = block_b == 1, 1 if block_b == 1 else 2
        gemv, tiling = _gemv_all_reduce(
            "bf16", 4 if block_b == 1 else 64, block_b, 128, even, values, WORLD_SIZE=2,
            ONE_TILE=block_b == 1, COLUMNS=256, **more,
        )  # fmt: skip
        sizes = dict.fromkeys(("producers", "line"), "i32")
        one = _ones("N") if which == 2 else {}
        yield gemv | sizes | types, tiling | constants | one


def _gemv_all_reduce_one_shot():
    yield _gemv_all_reduce("bf16", 4, 1, 512, True, 1, ONE_TILE=True, WORLD_SIZE=2)
    yield _gemv_all_reduce("fp32", 4, 1, 512, False, 1, ONE_TILE=False, WORLD_SIZE=3)
    yield _gemv_all_reduce("fp16", 32, 16, 128, False, 2, ONE_TILE=True, WORLD_SIZE=2)
    tree = {"leaves": 2, "node": "bf16", "in_tree": True}
    yield _gemv_all_reduce("bf16", 16, 4, 128, True, 2, tree, ONE_TILE=True, WORLD_SIZE=4)
    one = _ones("N", "K", "stride_x", "stride_w") | {"num_warps": 1}
    yield _gemv_all_reduce("bf16", 16, 8, 256, False, 2, ONE_TILE=True, WORLD_SIZE=2, **one)
    yield _gemv_all_reduce(
        "bf16", 32, 2, 128, True, 2, ONE_TILE=False, WORLD_SIZE=1, bias=None
    )  # fmt: skip


def _multiply_few_rows():
    """Three weights through descriptors, and by pointers, with biases; one in eight leaves of K;
    one along N, behind x; and one row. Float8 with a scale for each row and for each block.
    """
    from interlace.gemm.kernels import gemv
    from interlace.gemm.kernels.tiles import Scales, Tiling

    sizes = ("M", "K", "first_1", "first_2", "x_stride")
    each = [f"{name}_{index}" for name in ("N", "stride") for index in range(3)]
    types = dict.fromkeys((*sizes, *each), "i32")
    described = Tiling(64, 16, 64, 1, descriptors=True, w_along_k=True)
    one_row = gemv.GemvTiling(4, 1, 512, even=True, even_k=False, word_values=1, round_parts=False)
    for dtype, weights, has_bias, first, tiling in (
        ("bf16", 3, False, "w", described),
        ("fp16", 3, True, "w", described._replace(descriptors=False)),
        ("bf16", 1, True, "w", described._replace(leaves=8, node="bf16")),
        ("fp32", 1, True, "x", described._replace(descriptors=False, w_along_k=False)),
        ("bf16", 3, True, "row", one_row),
        ("fp8e4nv", 1, False, "w", described),
        ("fp8e4nv", 1, False, "w", described._replace(block_scales="w")),
        ("fp8e4nv", 1, True, "x", described._replace(descriptors=False, block_scales="x")),
        ("fp8e4nv", 1, False, "row", one_row._replace(block_scales=True)),
    ):
        is_scaled = dtype == "fp8e4nv"
        pointer = "*fp32" if is_scaled else "constexpr"
        constants, tensors = {"FIRST": first, "TILING": tiling}, {"x": f"*{dtype}"}
        tensors["scales"] = Scales(pointer, pointer, "i32", "i32")
        for index in range(3):
            for name in ("w", "bias", "y"):
                if index >= weights or (name == "bias" and not has_bias):
                    constants[f"{name}_{index}"] = None
                else:
                    is_operand = name == "w" or not is_scaled
                    tensors[f"{name}_{index}"] = f"*{dtype if is_operand else 'bf16'}"
        if first != "row" and tiling.descriptors:
            leaf = "1, " if tiling.leaves > 1 else ""
            tensors["x"] = f"tensordesc<{dtype}[{leaf}16, 64]>"
            of_weight = f"tensordesc<{dtype}[{leaf}64, 64]>"
            tensors |= {f"w_{index}": of_weight for index in range(weights)}
        yield types | tensors, constants


def _gemv_all_reduce_two_phase():
    tree = {"leaves": 4, "node": "bf16", "in_tree": True}
    yield _gemv_all_reduce("bf16", 64, 16, 128, True, 2, tree, ONE_TILE=True, WORLD_SIZE=2)
    yield _gemv_all_reduce("fp32", 16, 16, 32, False, 1, ONE_TILE=False, WORLD_SIZE=3)
    yield _gemv_all_reduce(
        "fp16", 16, 1, 256, False, 1, ONE_TILE=False, WORLD_SIZE=2, bias=None
    )  # fmt: skip


_MOE_TABLES = ("histograms", "slot_rows", "slot_at", "plan", "grants", "ticket", "met", "epochs")
_MOE_MATRICES = ("a", "b", "out", "kept", "results", "product_gradient", "inner_gradient")
_MOE_MEMORY = (
    "numbers",
    "gradients",
    "buffer",
    "buffers",
    "signals",
    "scaled",
    "received",
    "rows_of",
)
_MOE_SIZES = ("arrivals", "slots", "capacity", "tokens", "E", "L", "hidden_groups", "spread_ns")
_MOE_NUMBERS = (
    "call",
    "half",
    "buffer_index",
    "rank",
    "columns",
    "inner",
    "wide",
    "narrow",
    "width",
    "hidden",
)
_MOE_TYPES = {
    "ctx": "*i64",
    **dict.fromkeys(_MOE_TABLES, "*i32"),
    **dict.fromkeys(("scales", "weights", "gradient"), "*fp32"),
    **dict.fromkeys((*_MOE_MATRICES, *_MOE_MEMORY, "buffer_bytes", "scale_bytes"), "i64"),
    **dict.fromkeys((*_MOE_SIZES, *_MOE_NUMBERS), "i32"),
}
_QUANTISING = {
    "values": "*bf16",
    "counts": "*i32",
    "words": "*i32",
    "scales": "*fp32",
    **dict.fromkeys(("rows", "L", "width"), "i32"),
}
_MOE_LANES = {"WORLD_SIZE": 2, "L_LANES": 8, "E_LANES": 16}


def _expert_lanes(world_size=2):
    from interlace.operators.mixture_of_experts.kernels.plan import ExpertLanes

    return ExpertLanes(world_size, _MOE_LANES["E_LANES"], _MOE_LANES["L_LANES"])


def _swiglu(**changes):
    from interlace.operators.mixture_of_experts.kernels.activation import Form

    return Form(2, False, "silu", 1.0, None, 0.0)._replace(**changes)


def _expert_forms():
    """That of gpt-oss, and one without a gate of each other kind."""
    yield _swiglu(alpha=1.702, limit=7.0, up_offset=1.0)
    for kind in ("gelu", "gelu_tanh", "relu", "relu2"):
        yield _swiglu(gates=1, kind=kind)


def _mixture_of_experts_numbers():
    for world_size in (2, 1):
        constants = {"E_LANES": _MOE_LANES["E_LANES"], "LANES": _expert_lanes(world_size)}
        constants |= {"BLOCK": 128, "NUMBERED": world_size == 1, "BLOCKS": 256}
        yield _MOE_TYPES | {"experts": "*i64", "blocks": "i32"}, constants


def _mixture_of_experts_rows():
    """Sums with weights and of gradients; activations."""
    import triton.language as tl

    blocks = {"DTYPE": tl.bfloat16, "ALIGN": 8, "ROWS": 2, "COLS": 512, "TOP_K": 3}
    absent = dict.fromkeys(("bias", "factors"))
    types = _MOE_TYPES | {"y": "*bf16", "out": "*bf16"}
    yield dict(types), _MOE_LANES | blocks | absent | {"FORM": _swiglu(halves=True)}
    types |= {"bias": "*bf16", "factors": "*fp32"}
    for form in _expert_forms():
        yield dict(types), _MOE_LANES | blocks | {"FORM": form}


def _mixture_of_experts_in_slices():
    """Gate and up in turn, in halves, and no gate; with biases and without."""
    names = ("products", "active", "results", "sums", "incoming", "gradients", "inner", "scaled")
    rows = dict.fromkeys(names, "*bf16") | {"of_weights": "*fp32", "routing": "*fp32"}
    indices = dict.fromkeys(("owners", "places", "order"), "*i64") | {"ends": "*i32"}
    numbers = dict.fromkeys(("L", "width", "tokens", "first", "hidden"), "i32")
    types = rows | indices | numbers
    blocks = {"ROWS": 2, "COLS": 512, "TOP_K": 3}
    absent = {"bias": None, "out_bias": None, "WEIGHTED": True}
    yield dict(types), blocks | absent | {"FORM": _swiglu()}
    types |= {"bias": "*bf16", "out_bias": "*bf16"}
    blocks |= {"WEIGHTED": False}
    yield dict(types), blocks | {"FORM": _swiglu(halves=True, limit=7.0)}
    yield dict(types), blocks | {"FORM": _swiglu(gates=1)}


def _mixture_of_experts_products(kernel):
    """What :func:`_expert_products` says, with rows that leave and their scales in tuples."""
    from interlace.operators.mixture_of_experts.kernels.dispatch import BlockScales, LeavingRows

    absent = "constexpr"
    for types, constants in _expert_products(kernel):
        if kernel == "dispatch_grouped_gemm":
            is_float8 = "x_scale" in types
            of_blocks, scale_bytes = ("*fp32", "i64") if is_float8 else (absent, absent)
            rows = LeavingRows(
                types["x"], "*i32", absent, of_blocks, "i64", "i64", "*i32", scale_bytes
            )
            scales = BlockScales("i64", "*fp32", "*fp32") if is_float8 else absent
            yield types | {"rows": rows, "scales": scales}, constants
        elif kernel == "dispatch_grouped_gemm_backward":
            rows = LeavingRows(types["grad"], "*i32", "*fp32", absent, "i64", absent, absent, "i64")
            yield types | {"rows": rows}, constants
        else:
            yield types, constants


def _expert_products(kernel):
    """With descriptors, forward (for training) and backward; and with pointers."""
    import triton.language as tl

    from interlace.gemm.kernels.tiles import Tiling
    from interlace.operators.mixture_of_experts.kernels.dispatch import RowPushing

    pushing = RowPushing(programs=16, rows=64, block_rows=2, block_columns=1024, top_k=6, align=8)
    shared = _MOE_LANES | {"PUSHING": pushing, "LANES": _expert_lanes()}
    not_float8 = dict.fromkeys(("a_scale", "b_scale", "out_scale"))
    alone = {"WORLD_SIZE": 1, "LANES": _expert_lanes(1)}
    directions = {
        "dispatch_grouped_gemm": ((True, False), (True, True)),
        "dispatch_grouped_gemm_backward": ((False, False),),
        "grouped_gemm_combine": ((True, False), (False, False)),
        "grouped_gemm_gradient": ((True, False),),  # the same in both directions
    }
    for forward, halves in directions[kernel]:
        weight = "64, 256" if not forward else "128, 64" if halves else "256, 64"
        out = "128, 128" if forward else "128, 256"
        types = _MOE_TYPES | {"x": "*bf16", "grad": "*bf16"}
        if kernel == "grouped_gemm_gradient":
            blocks = {"a": "64, 128", "b": "64, 256", "out": "128, 256"}
        else:
            blocks = {
                "a": "128, 64",
                "b": weight,
                "out": out,
                "kept": out,
                "results": "1, 128, 256",
            }
        types |= {name: f"tensordesc<bf16[{block}]>" for name, block in blocks.items()}
        constants = (
            shared
            | not_float8
            | {
                "DTYPE": tl.bfloat16,
                "EVEN": forward,
                "FORM": _swiglu(halves=halves),
                "TILING": Tiling(128, 256, 64, 8, True, w_along_k=forward),
                "num_warps": 8,
            }
        )
        absent = ("met", "bias") if forward else ("bias",)
        if forward or kernel != "grouped_gemm_combine":
            yield types, constants | dict.fromkeys(absent)
            if not halves and kernel != "grouped_gemm_gradient":
                # A rank alone, as where ranks share a batch and add up their experts' parts.
                yield types, constants | dict.fromkeys(absent) | alone
        if halves:
            # The layouts of gpt-oss and of openai_privacy_filter: biases, weights along N.
            more = {"b": "tensordesc<bf16[64, 128]>"}
            constants["TILING"] = constants["TILING"]._replace(w_along_k=False)
            constants["FORM"] = _swiglu(halves=True, alpha=1.702, limit=7.0, up_offset=1.0)
            yield types | more | {"bias": "*bf16"}, constants
        elif kernel == "grouped_gemm_combine" and not forward:
            # Forward too, if the weight lies as [L, F, hidden]; then there may be a bias.
            yield types | {"bias": "*bf16"}, constants | {"met": None}
    forward = kernel == "dispatch_grouped_gemm"
    constants = (
        shared
        | not_float8
        | {
            "DTYPE": tl.float32,
            "EVEN": False,
            "FORM": _swiglu(halves=forward),
            "TILING": Tiling(32, 32, 16, 8, False, w_along_k=forward),
        }
    )
    if kernel == "dispatch_grouped_gemm":
        # Pointers to weights along N, and experts without a gate.
        along_n = constants["TILING"]._replace(w_along_k=False)
        for form in (_swiglu(halves=True), _swiglu(gates=1, kind="gelu")):
            types = _MOE_TYPES | {"x": "*fp32", "bias": "*fp32"}
            yield types, constants | {"TILING": along_n, "FORM": form}
    yield _MOE_TYPES | {"x": "*fp32", "grad": "*fp32"}, constants | {"bias": None}
    if kernel in ("dispatch_grouped_gemm", "grouped_gemm_combine"):
        yield from _mixture_of_float8_experts(shared | {"kernel": kernel})


def _mixture_of_float8_experts(shared):
    """Weights with scales of blocks; with descriptors and with pointers."""
    import triton.language as tl

    from interlace.gemm.kernels.tiles import Tiling

    lines = "128" if shared["kernel"] == "grouped_gemm_combine" else "2, 64"
    constants = {name: value for name, value in shared.items() if name != "kernel"}
    constants |= {
        "DTYPE": tl.bfloat16,
        "FORM": _swiglu(halves=True),
        "num_warps": 4,
        **dict.fromkeys(("bias", "met", "kept")),
    }
    types = _MOE_TYPES | {
        "x": "*i32", "x_scale": "*fp32", "a_scale": "i64", "b_scale": "*fp32",
        "out_scale": "*fp32", "scale_bytes": "i64",
    }  # fmt: skip
    if shared["kernel"] == "grouped_gemm_combine":
        types["a_scale"] = "*fp32"
    tiling = Tiling(64, 128, 128, 16, True, w_along_k=True, block_scales="x")
    described = {
        "a": "tensordesc<fp8e4nv[64, 128]>",
        "b": f"tensordesc<fp8e4nv[{lines}, 128]>",
        "results": "tensordesc<bf16[1, 64, 128]>",
    }
    yield types | described, constants | {"TILING": tiling}
    yield types, constants | {"TILING": tiling._replace(descriptors=False)}


def _mixture_of_experts_decoding():
    """Tensor cores and none, both orders of gate and up, sizes that tiles divide and others."""
    import triton.language as tl

    from interlace.gemm.kernels.tiles import Tiling
    from interlace.operators.mixture_of_experts.kernels.decode import DecodeTiling, Shares

    addresses = dict.fromkeys(("landing", "results", "active", "weights"), "i64")
    sizes = ("half", "rows_at", "tokens", "length", "hidden_groups", "ffn_groups")
    types = _MOE_TYPES | {
        "signals": "i64",
        **dict.fromkeys(("entries", "counts"), "*i32"),
        **addresses,
        **dict.fromkeys((*sizes, "E", "L"), "i32"),
        "experts": "*i64",
        "scales": "*fp32",
    }
    shared = {"WORLD_SIZE": 2, "num_warps": 4}
    oss, relu2 = next(_expert_forms()), _swiglu(gates=1, kind="relu2")
    # Weights along N have biases; the last experts have no gate.
    for dtype, name, tile, tail, align, halves, along_k, form in (
        (tl.bfloat16, "*bf16", (16, 64, 128), 0, 8, False, True, _swiglu()),
        (tl.float16, "*fp16", (64, 128, 64), 32, 8, True, False, oss),
        (tl.float32, "*fp32", (16, 32, 16), 16, 1, False, True, _swiglu()),
        (tl.float32, "*fp32", (16, 32, 16), 0, 1, False, False, relu2),
    ):
        constants = {
            "DTYPE": dtype,
            "SHARES": Shares(64, columns=1024, top_k=3, align=align, ffn_align=align, slots=2048),
            "TILES": DecodeTiling(
                Tiling(*tile, 1, False, w_along_k=along_k), tail, align == 8, local_lanes=8
            ),
            "FORM": form._replace(halves=halves),
        }
        constants |= dict.fromkeys(("weight_scales", "active_scales", "scales_at"))
        pointers = {"x": name, "y": name, "bias": name}
        yield types | pointers, shared | constants | ({"bias": None} if along_k else {})
    constants |= {
        "DTYPE": tl.bfloat16,
        "SHARES": constants["SHARES"]._replace(align=16, ffn_align=16),
        "TILES": DecodeTiling(Tiling(16, 128, 128, 1, False, w_along_k=True), 0, True, 8),
        "FORM": _swiglu(halves=True),
        "bias": None,
    }
    for name in ("weight_scales", "active_scales", "scales_at"):
        del constants[name]
    scales = dict.fromkeys(("weight_scales", "active_scales", "row_scales"), "*fp32")
    scales |= {"scales_at": "i32"}
    yield types | {"x": "*bf16", "y": "*bf16"} | scales, shared | constants


def kernels():
    """Every kernel that is launched: a public JITFunction that takes a context, or asks for its
    program's index.
    """
    import importlib
    import pkgutil

    from triton.runtime.jit import JITFunction

    import interlace.operators

    modules = [
        module.name
        for module in pkgutil.walk_packages(interlace.operators.__path__, "interlace.operators.")
        if ".kernel" in module.name and not module.ispkg
    ]
    shared = (
        "mapped.kernel",
        "comm.replay.recording_kernel",
        "tracing.kernels",
        "gemm.kernels.few_rows",
        "gemm.kernels.staged",
        "gemm.kernels.lamport",
    )
    for name in [*modules, *(f"interlace.{module}" for module in shared)]:
        module = importlib.import_module(name)
        for name, value in vars(module).items():
            local = isinstance(value, JITFunction) and value.fn.__module__ == module.__name__
            if (
                local
                and not name.startswith("_")
                and ("ctx" in value.arg_names or "tl.program_id(" in value.src)
            ):
                yield value
    from benchmarks.parallel_kernel_bench import exchange, training

    yield from (exchange.move_kernel, exchange.sum_kernel, exchange.rows_kernel)
    yield from (exchange.fetch_kernel, training.adam_kernel)


def test_every_kernel_has_cases():
    """For every target, with a type or a constant for each of its arguments."""
    kernels_of: dict[str, set[str]] = {}
    for line in compilers.cases():
        kernel, target, _ = line.split()
        kernels_of.setdefault(target, set()).add(kernel)
    assert set(kernels_of) == set(compilers.TARGETS)
    assert kernels_of["sm_100"] == kernels_of["sm_90"] >= kernels_of["gfx942"]


@pytest.mark.parametrize("target", compilers.TARGETS)
def test_every_kernel_compiles(compiler, target):
    compiler.check(target)
