"""Newton and Schulz's iteration on a matrix whose columns are cut over the ranks."""

import torch
import torch.distributed as dist

from benchmarks.parallel_kernel_bench.exchange import add, all_reduce, replayed

# Of Muon's: by K. Jordan, and by Y. Jiacheng.
COEFFICIENTS = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012),
    ),
}  # fmt: skip


@replayed
@torch.no_grad()
def solution(
    x: torch.Tensor, steps: int = 5, coefficient_type: str = "quintic", partition_dim: int = 1,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:  # fmt: skip
    y = (x if partition_dim == 1 else x.mT).float()
    y = y / all_reduce((y * y).sum(), group).sqrt().clamp(min=1e-7)
    coefficients = COEFFICIENTS[coefficient_type]
    for step in range(steps):
        a, b, c = coefficients[step % len(coefficients)]
        gram = y @ y.mT
        add(gram, gram, group=group)
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    y = y.to(x.dtype)
    return y if partition_dim == 1 else y.mT.contiguous()
