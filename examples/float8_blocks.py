"""Run a row-parallel layer, and experts, of a model that is published in float8 with scales of
blocks.

DeepSeek V3 and the models after it hold a weight in float8 with a float32 scale for each 128 x 128
elements, and multiply it by activations with a scale for each 1 x 128. ``gemm_all_reduce`` takes
both as they are. Here two ranks share the layer along K; beside it is what the weights were before
they were quantised, and the largest error that float8 explains. Then a sum over ranks is normalised
and quantised in the same way by the operator itself, as the next layer takes it. Last, experts:
tokens stay bfloat16, and travel and are multiplied as float8.
"""

import torch

import interlace

TOKENS, HIDDEN, INNER = 6, 256, 512  # INNER is K of the whole layer
EXPERTS, WIDTH = 4, 128
BLOCK, LARGEST = 128, 448.0  # of float8_e4m3fn
ROUNDING = 2.0**-4  # half a unit in the last place of its three digits of mantissa


def quantise(matrix: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in float8, and a scale for each block of ``rows`` x 128 elements.

    Scales are rounded up to powers of two, as ``float8_e8m0fnu`` has them; any float32 will do.
    """
    blocks = matrix.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, rows))
    scale = blocks.abs().amax((1, 3)).div(LARGEST).log2().ceil().exp2()
    narrow = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return narrow.flatten(2).flatten(0, 1), scale


def experts() -> float:
    """Return the error of a layer of experts, as a part of what it was before its weights were
    quantised.
    """
    group = interlace.group_of()
    torch.manual_seed(1)
    w_in = torch.randn(EXPERTS, 2, WIDTH, HIDDEN) / HIDDEN**0.5  # gate and up
    w_out = torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    weights, chosen = torch.softmax(torch.randn(TOKENS, EXPERTS), -1).topk(2)
    count = EXPERTS // group.world_size
    own = slice(group.rank * count, (group.rank + 1) * count)
    in_8, in_scale = quantise(w_in[own].flatten(0, 2), BLOCK)
    out_8, out_scale = quantise(w_out[own].flatten(0, 1), BLOCK)
    y = interlace.mixture_of_experts(
        *(each.to(group.device) for each in (x, chosen, weights)),
        in_8.view(count, 2, WIDTH, HIDDEN).transpose(1, 2).to(group.device),
        out_8.view(count, HIDDEN, WIDTH).to(group.device),
        w_in_scale=in_scale.view(count, 2, -1, HIDDEN // BLOCK).transpose(1, 2).to(group.device),
        w_out_scale=out_scale.view(count, HIDDEN // BLOCK, -1).to(group.device),
    )
    both = torch.einsum("th,egfh->tegf", x.float(), w_in)
    active = torch.nn.functional.silu(both[:, :, 0]) * both[:, :, 1]
    results = torch.einsum("tef,ehf->teh", active, w_out)
    shares = torch.zeros(TOKENS, EXPERTS).scatter(1, chosen, weights)
    exact = torch.einsum("te,teh->th", shares, results)
    return float((y.cpu().float() - exact).norm() / exact.norm())


def worker() -> tuple[float, float, float]:
    """Return the largest error as a part of what float8 explains, that of the normalised sum, and
    that of experts.
    """
    group = interlace.group_of()
    # One seed for all ranks, so that every rank has the same layer and takes its own part of K.
    torch.manual_seed(0)
    x, w = torch.randn(TOKENS, INNER), torch.randn(HIDDEN, INNER)
    part = slice(
        group.rank * INNER // group.world_size, (group.rank + 1) * INNER // group.world_size
    )
    x_shard, x_scale = quantise(x[:, part], 1)
    w_shard, w_scale = quantise(w[:, part], BLOCK)
    operands = (each.to(group.device) for each in (x_shard, w_shard, x_scale, w_scale))
    x8, w8, x_scale, w_scale = operands
    y = interlace.gemm_all_reduce(x8, w8, x_scale=x_scale, w_scale=w_scale)

    # Each factor is off by at most a rounding of itself (numbers that are too small for that add
    # next to nothing), the product by both. Sums are rounded to bfloat16 twice.
    exact, size = x @ w.T, x.abs() @ w.abs().T
    allowed = (2 * ROUNDING + ROUNDING**2) * size + 2 * 2.0**-8 * size
    explained = float(((y.cpu().float() - exact).abs() / allowed).max())

    # The next layer's input: the norm of a sum, in float8 with a scale for each 128 of a row.
    norm = torch.ones(HIDDEN, device=group.device)
    wide = x[:, part].bfloat16().to(group.device), w[:, part].bfloat16().to(group.device)
    normed = interlace.gemm_all_reduce(
        *wide, norm_weight=norm, out_dtype=torch.float8_e4m3fn, block_scales=True
    )
    found = normed.y.float() * normed.scale.repeat_interleave(BLOCK, 1)
    wanted = torch.nn.functional.rms_norm(normed.residual.float(), (HIDDEN,), eps=1e-6)
    return explained, float((found - wanted).norm() / wanted.norm()), experts()


def main() -> None:
    for rank, (explained, error, of_experts) in enumerate(interlace.launch(worker, 2)):
        print(
            f"rank {rank}: {explained:.0%} of the error that float8 allows; norm {error:.1%} off, "
            f"experts {of_experts:.1%}"
        )
        assert explained < 1
        assert error < 2 * ROUNDING
        # Two products of two factors, each of which is off by at most a rounding of itself.
        assert of_experts < 4 * ROUNDING


if __name__ == "__main__":
    main()
