"""Run ``gemm_broadcast`` on two ranks: ``python examples/your_own_operator/run.py``."""

import torch
import torch.distributed as dist

import interlace


def worker() -> float:
    """Return the largest difference from ``F.linear`` and ``broadcast``; every rank runs this."""
    from gemm_broadcast import gemm_broadcast

    device = interlace.group_of().device
    torch.manual_seed(dist.get_rank())
    x, w = torch.randn(64, 32, device=device), torch.randn(48, 32, device=device)
    fused = gemm_broadcast(x, w, impl="fused")
    unfused = gemm_broadcast(x, w, impl="unfused")
    return (fused - unfused).abs().max().item()


def main() -> None:
    """Start the ranks and print what they found."""
    for rank, difference in enumerate(interlace.launch(worker, 2)):
        print(f"rank {rank}: largest difference {difference:.1e}")
        assert difference < 1e-4


if __name__ == "__main__":
    main()
