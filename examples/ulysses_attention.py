"""Attend over a sequence that four ranks share out, beside one rank that has all of it.

``interlace.nn.UlyssesAttention`` sends the columns of the QKV product to the ranks that own their
heads while it multiplies, and takes the heads back into the output product. Here the ranks have
different numbers of tokens, one of them none, and share two key heads. The output and all gradients
are those of one rank.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import interlace

TOKENS = [24, 9, 0, 31]  # of each rank
SAMPLES, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 2, 48, 8, 2, 16


def whole_attention(x: torch.Tensor, qkv: nn.Linear, out: nn.Linear) -> torch.Tensor:
    """Return attention over the whole sequence ``[S, B, H]`` on one rank."""
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    q, k, v = (
        part.unflatten(-1, (-1, HEAD_DIM)).permute(1, 2, 0, 3)
        for part in qkv(x).split([queries, keys, keys], -1)
    )
    attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    y: torch.Tensor = out(attended.permute(2, 0, 1, 3).flatten(2))
    return y


def worker() -> float:
    """Compare this rank's tokens and all gradients; return the largest difference."""
    rank, device = dist.get_rank(), interlace.group_of().device
    # One seed for all ranks, so that every rank has the same weights and the same sequence.
    torch.manual_seed(0)
    layer = interlace.nn.UlyssesAttention(
        WIDTH, HEADS, KV_HEADS, HEAD_DIM, bias=True, is_causal=True, device=device
    )
    x = torch.randn(sum(TOKENS), SAMPLES, WIDTH, device=device)
    grad = torch.randn_like(x)

    own = x.split(TOKENS)[rank].clone().requires_grad_()
    y = layer(own, TOKENS)
    y.backward(grad.split(TOKENS)[rank])
    # Each rank has the gradients of its own tokens.
    interlace.nn.sum_replicated_gradients(layer, average=False)

    x.requires_grad_()
    wanted = whole_attention(x, layer.qkv, layer.out)
    parameters = list(layer.parameters())
    gradients = torch.autograd.grad(wanted, [x, *parameters], grad)
    found = [y, own.grad, *(parameter.grad for parameter in parameters)]
    expected = [wanted.split(TOKENS)[rank], gradients[0].split(TOKENS)[rank], *gradients[1:]]
    return max(
        float((a - b).detach().abs().max())
        for a, b in zip(found, expected, strict=True)
        if a.numel()
    )


def main() -> None:
    differences = interlace.launch(worker, 4)
    for rank, (tokens, difference) in enumerate(zip(TOKENS, differences, strict=True)):
        print(f"rank {rank}: {tokens:2} tokens, largest difference from one rank {difference:.1e}")
    assert max(differences) < 1e-3


if __name__ == "__main__":
    main()
