"""What ``gemv_all_reduce`` computes: examples, then everything against float64, bit equality,
gradients.
"""

import dataclasses

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import GemvAllReduceConfig
from tests.operators.gemv_all_reduce.calls import DTYPES, Call, check_all, run

SMALL = GemvAllReduceConfig("one_shot", block_n=2, block_k=16)


def _worked_example(protocol):
    """Of the kernels' docstrings: parts [1, 2] on rank 0 and [10, 20] on rank 1."""
    rank = dist.get_rank()
    x = torch.tensor([1.0, 0.0] if rank == 0 else [5.0, 5.0])
    w = torch.tensor([[1.0, 7.0], [2.0, 7.0]] if rank == 0 else [[1.0, 1.0], [2.0, 2.0]])
    bias = torch.tensor([100.0, 200.0])
    config = None if protocol == "unfused" else dataclasses.replace(SMALL, protocol=protocol)
    impl = "unfused" if protocol == "unfused" else "gemv"
    y = interlace.gemv_all_reduce(x, w, impl=impl, config=config)
    return y.tolist(), interlace.gemv_all_reduce(x, w, bias, impl=impl, config=config).tolist()


@pytest.mark.parametrize("protocol", ["unfused", "one_shot", "two_phase"])
def test_worked_example(ranks, protocol):
    assert ranks(2).run(_worked_example, protocol) == [([11.0, 22.0], [111.0, 222.0])] * 2


# (tokens, rows, columns): odd, prime, non-divisible by every block, larger than the blocks in one
# size each.
SHAPES = [
    (None, 1, 1), (None, 5, 7), (None, 33, 50), (1, 16, 32), (1, 37, 65), (2, 19, 33), (3, 16, 16),
    (17, 21, 40), (70, 9, 18),
]  # fmt: skip
EMPTY = [(None, 0, 4), (None, 5, 0), (2, 0, 0), (0, 5, 7), (3, 5, 0), (0, 0, 0)]
# Block_n, block_k, max_programs
CUTS = [(16, 32, 0), (4, 16, 2), (64, 64, 1), (2, 16, 3), (1, 16, 5)]


def _calls(protocol, dtype, every):
    """Every shape with one of the ways to cut it.

    With ``every`` 3, a third of the shapes for one dtype, another third for the next.
    """
    for i, (tokens, rows, columns) in enumerate(SHAPES):
        if (i + list(DTYPES).index(dtype)) % every:
            continue
        block_n, block_k, max_programs = CUTS[i % len(CUTS)]
        config = GemvAllReduceConfig(
            protocol, block_n=block_n, block_k=block_k, max_programs=max_programs
        )
        yield Call(tokens, rows, columns, dtype, bias=i % 2 == 0, config=config, seed=i)


@pytest.mark.parametrize(
    ("world_size", "dtype", "every"),
    [
        (1, "float16", 3),
        (2, "float32", 1),
        (2, "float16", 3),
        (2, "bfloat16", 3),
        (4, "float32", 3),
        (4, "bfloat16", 3),
    ],
)
@pytest.mark.parametrize("protocol", ["one_shot", "two_phase"])
def test_matches_float64(ranks, world_size, protocol, dtype, every):
    calls = list(_calls(protocol, dtype, every))
    check_all(calls, ranks(world_size).run(run, calls))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_auto_needs_no_configuration(ranks, world_size):
    calls = [Call(tokens, 40, 24, "bfloat16", bias=True, impl="auto") for tokens in (None, 1, 5)]
    check_all(calls, ranks(world_size).run(run, calls))


@pytest.mark.parametrize("impl", ["auto", "gemv", "unfused"])
def test_empty_inputs_give_zeros_or_the_bias(ranks, impl):
    calls = [Call(*shape, bias=bias, impl=impl) for shape in EMPTY for bias in (False, True)]
    check_all(calls, ranks(2).run(run, calls))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_unfused_rounds_after_every_step(ranks, world_size):
    """Small integers are exact in every dtype, so that even rounding after every step must give the
    exact sum.
    """
    results = ranks(world_size).run(_unfused_integers)
    expected = [sum(3 * (rank + 1) for rank in range(world_size)) + 1.0] * 6
    assert results == [[expected] * len(DTYPES)] * world_size


def _unfused_integers():
    rank = dist.get_rank()
    return [
        interlace.gemv_all_reduce(
            torch.ones(3, dtype=dtype),
            torch.full((6, 3), rank + 1, dtype=dtype),
            torch.ones(6, dtype=dtype),
            impl="unfused",
        ).tolist()
        for dtype in DTYPES.values()
    ]


@pytest.mark.parametrize("protocol", ["one_shot", "two_phase"])
def test_results_repeat_bit_by_bit(ranks, protocol):
    """Sums are in rank order whatever arrives first; an order of arrival would differ between runs
    and cuts of N.
    """
    wide, narrow = (
        GemvAllReduceConfig(protocol, block_n=n, block_k=32, max_programs=2) for n in (16, 4)
    )
    calls = [Call(3, 29, 50, config=config, seed=8) for config in (wide, narrow, wide)]
    for results in ranks(3).run(run, calls):
        assert all(torch.equal(y, results[0]) for y in results)


@pytest.mark.parametrize("make", ["transposed", "strided", "offset", "expanded"])
def test_x_need_not_be_contiguous(ranks, make):
    for y, expected in ranks(2).run(_non_contiguous, make):
        assert torch.equal(y, expected)


def _non_contiguous(make):
    x, w, _ = Call(6, 11, 20).inputs(dist.get_rank())
    if make == "transposed":
        odd = x.T.contiguous().T
    elif make == "strided":
        odd = torch.full((12, 40), float("nan"))[::2, ::2].copy_(x)
    elif make == "offset":
        odd = torch.full((6, 23), float("nan"))[:, 3:].copy_(x)
    else:
        x = x[:1].repeat(6, 1)
        odd = x[:1].expand(6, 20)
    config = GemvAllReduceConfig("one_shot", block_n=4, block_k=16)
    assert odd.stride() != x.stride()
    return interlace.gemv_all_reduce(odd, w, config=config), interlace.gemv_all_reduce(
        x, w, config=config
    )


def test_rows_of_w_may_be_apart(ranks):
    """A slice of a larger weight: its rows are contiguous, the matrix is not."""
    for y, expected in ranks(2).run(_w_with_padding):
        assert torch.equal(y, expected)


def _w_with_padding():
    x, w, _ = Call(2, 11, 20).inputs(dist.get_rank())
    padded = torch.full((11, 32), float("nan"))
    padded[:, 5:25] = w
    config = GemvAllReduceConfig("two_phase", block_n=4, block_k=16)
    return interlace.gemv_all_reduce(x, padded[:, 5:25], config=config), interlace.gemv_all_reduce(
        x, w, config=config
    )


def test_elements_of_the_bias_may_be_apart(ranks):
    for results in ranks(2).run(_bias_apart):
        for y, expected in results:
            assert torch.equal(y, expected)


def _bias_apart():
    x, w, bias = Call(2, 11, 20, bias=True).inputs(dist.get_rank())
    apart = torch.stack([bias, torch.full_like(bias, float("nan"))], -1)[:, 0]
    return [
        tuple(interlace.gemv_all_reduce(x, w, vector, config=config) for vector in (apart, bias))
        for config in (
            GemvAllReduceConfig("one_shot", block_n=4, block_k=16),
            GemvAllReduceConfig("two_phase", block_n=4, block_k=16),
        )
    ]


def _gradients(call, needed):
    x, w, bias = call.inputs(dist.get_rank())
    inputs = [t.requires_grad_(name in needed) for name, t in zip("xwb", (x, w, bias), strict=True)]
    y = interlace.gemv_all_reduce(*inputs, config=call.config)
    y.backward(_upstream(call))
    return [t.grad for t in inputs]


def _upstream(call):
    shape = (call.rows,) if call.tokens is None else (call.tokens, call.rows)
    return torch.randn(shape, generator=torch.Generator().manual_seed(77))


@pytest.mark.parametrize("tokens", [None, 1, 5])
@pytest.mark.parametrize("needed", ["x", "w", "b", "xwb"])
def test_gradients_match_float64(ranks, tokens, needed):
    """Those of ``sum over ranks of x @ w.T, + bias``; an input that needs none gets none."""
    call = Call(tokens, 13, 9, bias=True, config=SMALL)
    shards = [tuple(t.double().requires_grad_() for t in call.inputs(rank)) for rank in range(2)]
    bias = shards[0][2]
    total = sum(x @ w.T for x, w, _ in shards) + bias
    total.backward(_upstream(call).double())
    for rank, gradients in enumerate(ranks(2).run(_gradients, call, needed)):
        x, w, _ = shards[rank]
        for name, gradient, exact in zip(
            "xwb", gradients, (x.grad, w.grad, bias.grad), strict=True
        ):
            if name in needed:
                # At most 13 products in float32, none above 9: two factors of a few standard
                # deviations.
                torch.testing.assert_close(
                    gradient.double(), exact, rtol=0, atol=14 * 2**-24 * 13 * 9
                )
            else:
                assert gradient is None


@pytest.mark.parametrize("shape", EMPTY)
def test_gradients_of_empty_inputs(ranks, shape):
    call = Call(*shape, bias=True)
    for rank, gradients in enumerate(ranks(2).run(_gradients, call, "xwb")):
        for gradient, tensor in zip(gradients[:2], call.inputs(rank), strict=False):
            assert torch.equal(gradient, torch.zeros_like(tensor))
        assert torch.equal(gradients[2], torch.atleast_2d(_upstream(call)).sum(0))


def _last_positions(positions):
    """``hidden[:, -1]`` of ``[3, positions, 16]``, in address space of which only three rows are
    ever touched.
    """
    stride = 16 * positions
    storage = torch.UntypedStorage(2 * (2 * stride + 16))
    x = torch.empty(0, dtype=torch.bfloat16).set_(storage, 0, (3, 16), (stride, 1))
    x.copy_(torch.arange(48).view(3, 16))
    w = torch.ones(4, 16, dtype=torch.bfloat16)
    return interlace.gemv_all_reduce(x, w, impl="gemv"), interlace.gemv_all_reduce(
        x.clone(), w, impl="gemv"
    )


def test_tokens_that_lie_far_apart(ranks):
    """Their distance in elements does not fit in 32 bits."""
    ((y, expected),) = ranks(1).run(_last_positions, 1 << 26)
    assert torch.equal(y, expected)
