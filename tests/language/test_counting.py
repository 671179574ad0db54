"""``arrive_last``: exactly one program is the last one, whatever grids came before."""

import torch


def _rounds(grids):
    from tests.language import counting_kernels as kernels

    counter = torch.zeros(1, dtype=torch.int32)
    found = []
    for grid, skip in grids:
        lasts = torch.full((8,), -1, dtype=torch.int32)
        lasts[7] = 0
        kernels.count_last[(grid,)](counter, lasts, skip)
        found.append((lasts[0].item(), lasts[7].item()))
    return found, counter.item()


def test_one_program_is_last_in_every_round(ranks):
    """Programs run one after another here, so the last one is that of the highest index."""
    grids = [(1, 0), (3, 0), (7, 2), (100, 0), (5, 4), (64, 1)]
    ((found, counter),) = ranks(1).run(_rounds, grids)
    assert found == [(grid - 1, 1) for grid, _ in grids]
    assert counter == len(grids) * 4096


def test_it_survives_the_counters_wrap(ranks):
    """The counter is int32 and only grows: past its end it goes on from below."""
    ((found, counter),) = ranks(1).run(_wrap)
    assert found == [(2, 1), (4, 1)]
    assert counter < 0


def _wrap():
    from tests.language import counting_kernels as kernels

    counter = torch.full((1,), 2**31 - 4096, dtype=torch.int32)
    found = []
    for grid in (3, 5):
        lasts = torch.full((8,), -1, dtype=torch.int32)
        lasts[7] = 0
        kernels.count_last[(grid,)](counter, lasts, 0)
        found.append((lasts[0].item(), lasts[7].item()))
    return found, counter.item()
