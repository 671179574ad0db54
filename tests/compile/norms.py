"""Norms as models and compilers spell them, and programs of a product, its all-reduce, residual and
norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.compile.programs import FEW, K, all_reduce, aten, c10d, group, wait

EPS = 1e-5
N = 16  # rows of weights in float16 begin at multiples of 16 bytes
NORMED = "gemm_all_reduce_norm"


def rms(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The norm as transformers' Llama, Mistral and Qwen3 have it."""
    wide = h.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(h.dtype)


def gemma(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The norm as transformers' Gemma has it."""
    wide = h.float()
    wide = wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + EPS, -0.5)
    return (wide * (1.0 + weight.float())).type_as(h)


def torchs(h: torch.Tensor, weight: torch.Tensor | float = 1.0) -> torch.Tensor:
    """The norm as ``torch.nn.functional.rms_norm`` becomes in a compiler."""
    wide = h.float()
    wide = wide * torch.rsqrt(torch.add(wide.pow(2).mean([h.dim() - 1], True), EPS))
    return (wide * weight if isinstance(weight, torch.Tensor) else wide).to(h.dtype)


def layer(h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The norm as Inductor spells out ``layer_norm``."""
    wide = h.float()
    variance, mean = torch.var_mean(wide, [h.dim() - 1], correction=0, keepdim=True)
    return ((wide - mean) * torch.rsqrt(variance + EPS) * weight + bias).to(h.dtype)


def cohere(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The LayerNorm as transformers' Cohere has it."""
    wide = h.to(torch.float32)
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).pow(2).mean(-1, keepdim=True)
    wide = (wide - mean) * torch.rsqrt(variance + EPS)
    return (weight.to(torch.float32) * wide).to(h.dtype)


def t5(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The norm as transformers' T5 has it: the product alone casts its input to float32."""
    variance = h.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return weight * (h * torch.rsqrt(variance + EPS)).to(h.dtype)


def with_wide_residual(
    y: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual and norm as vLLM has them: the norm is of the total before it is rounded."""
    total = y.float() + residual
    wide = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS)
    return wide.to(y.dtype) * weight, total.to(y.dtype)


def float8(y: torch.Tensor, scale: torch.Tensor, *, multiplies: bool = False) -> torch.Tensor:
    """A cast by a scale per tensor; what is too large becomes the largest number."""
    y = y * scale if multiplies else y.float() / scale
    return y.view(-1, N).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


Program = Callable[..., Any]
XW, R, V = [(FEW, K), (N, K)], (FEW, N), (N,)

# name: the program, shapes of its arguments, how often the operator is put in
FUSED: dict[str, tuple[Program, list[tuple[int, ...]], int]] = {
    "transformers' norm": (
        lambda x, w, r, v: (lambda t: (t, rms(t, v)))(r + all_reduce(x @ w.t())),
        [*XW, R, V],
        1,
    ),
    "the norm alone": (lambda x, w, v: rms(all_reduce(x @ w.t()), v), [*XW, V], 1),
    "a norm without a weight": (
        lambda x, w, r: torchs(all_reduce(x @ w.t()) + r),
        [*XW, R],
        1,
    ),
    "torch's norm": (
        lambda x, w, r, v: torchs(all_reduce(x @ w.t()) + r, v),
        [*XW, R, V],
        1,
    ),
    "a square as a product": (
        lambda x, w, r, v: (lambda t: t * torch.rsqrt((t * t).mean(-1, True) + EPS) * v)(
            (all_reduce(x @ w.t()) + r).float()
        ).to(x.dtype),
        [*XW, R, V],
        1,
    ),
    "LayerNorm": (
        lambda x, w, r, v, b: F.layer_norm(all_reduce(x @ w.t()) + r, (N,), v, b, EPS),
        [*XW, R, V, V],
        1,
    ),
    "LayerNorm, spelled out": (
        lambda x, w, r, v, b: layer(all_reduce(x @ w.t()) + r, v, b),
        [*XW, R, V, V],
        1,
    ),
    "LayerNorm in float32": (
        lambda x, w, r: (lambda t: (t, F.layer_norm(t.float(), (N,), None, None, EPS).to(t.dtype)))(
            r + all_reduce(x @ w.t())
        ),
        [*XW, R],
        1,
    ),
    "Cohere's norm": (
        lambda x, w, r, v: (lambda t: (t, cohere(t, v)))(r + all_reduce(x @ w.t())),
        [*XW, R, V],
        1,
    ),
    "T5's norm": (
        lambda x, w, r, v: (lambda t: (t, t5(t, v)))(r + all_reduce(x @ w.t())),
        [*XW, R, V],
        1,
    ),
    "Gemma's layer": (
        lambda x, w, r, v, u: (lambda t: (t, gemma(t, u)))(r + gemma(all_reduce(x @ w.t()), v)),
        [*XW, R, V, V],
        1,
    ),
    "vLLM's residual": (
        lambda x, w, r, v: with_wide_residual(all_reduce(x @ w.t()), r, v),
        [*XW, R, V],
        1,
    ),
    "a total that is rounded twice": (
        lambda x, w, r, v: (
            lambda t: (torchs(t, v).to(x.dtype), *(aten._to_copy(t, dtype=x.dtype) for _ in "12"))
        )(all_reduce(x @ w.t()).float() + r),
        [*XW, R, V],
        1,
    ),
    "a bias after the sum": (
        lambda x, w, b, r, v: rms(all_reduce(x @ w.t()) + b + r, v),
        [*XW, V, R, V],
        1,
    ),
    "a bias after the sum, no residual": (
        lambda x, w, b, v: (lambda t: (t.relu(), rms(t, v)))(all_reduce(x @ w.t()) + b),
        [*XW, V, V],
        1,
    ),
    "the sum and its norm": (
        lambda x, w, v: (lambda s: (s.relu(), rms(s, v), s.view(-1)))(all_reduce(x @ w.t())),
        [*XW, V],
        1,
    ),
    "sequences of tokens": (
        lambda x, w, r, v: (lambda t: (t, rms(t, v)))(
            r + all_reduce((x.view(-1, K) @ w.t()).view(3, 2, N)).view(-1, N).view(3, 2, N)
        ),
        [(3, 2, K), (N, K), (3, 2, N), V],
        1,
    ),
    "one token": (
        lambda x, w, r, v: (lambda t: (t, rms(t, v)))(r + all_reduce((x @ w.t()).view(1, 1, N))),
        [(1, K), (N, K), (1, 1, N), V],
        1,
    ),
    "a residual in another order": (
        lambda x, w, r, v: (lambda t: (t, rms(t, v)))(all_reduce(x @ w.t()) + r.t()),
        [*XW, (N, FEW), V],
        1,
    ),
    "a batch behind the sequence": (
        lambda x, w, r, v: (lambda t: (t, rms(t, v), t.transpose(0, 1).view(-1, N)))(
            r.transpose(0, 1) + all_reduce(x.view(-1, K) @ w.t()).view(2, 3, N)
        ),
        [(2, 3, K), (N, K), (3, 2, N), V],
        1,
    ),
    "in place, as Dynamo traces it": (
        lambda x, w, r, v: (lambda y: rms(r + aten.copy(y, all_reduce(y)), v))(x @ w.t()),
        [*XW, R, V],
        1,
    ),
    "waited for twice": (
        lambda x, w, v: (lambda sent: (rms(wait(sent), v), wait(sent).relu()))(
            c10d.all_reduce(x @ w.t(), "sum", group())
        ),
        [*XW, V],
        1,
    ),
    "two halves of a layer": (
        lambda x, w, u, r, v: (lambda t: rms(t + all_reduce(rms(t, v) @ u), v))(
            r + all_reduce(x @ w.t())
        ),
        [*XW, (N, N), R, V],
        2,
    ),
}
# Roundings to the dtype that the operator has not, or has otherwise.
ROUNDINGS = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
