"""Exactly one program is the last one of ``arrive_last``, for any sequence of grids."""

import torch


def _rounds(grids):
    from tests.language import counting_kernels as kernels

    counter = torch.zeros(1, dtype=torch.int32)
    rounds = []
    for grid, skip in grids:
        lasts = torch.full((8,), -1, dtype=torch.int32)
        lasts[7] = 0
        kernels.count_last[(grid,)](counter, lasts, skip)
        rounds.append((lasts[0].item(), lasts[7].item()))
    return rounds, counter.item()


def test_one_program_is_last_in_every_round(ranks):
    """The interpreter runs programs one after another, so the last one has the highest index."""
    grids = [(1, 0), (3, 0), (7, 2), (100, 0), (5, 4), (64, 1)]
    ((rounds, counter),) = ranks(1).run(_rounds, grids)
    assert rounds == [(grid - 1, 1) for grid, _ in grids]
    assert counter == len(grids) * 4096


def test_it_survives_the_counters_wrap(ranks):
    """The counter is an int32 that only grows: past its end it continues at the lowest number."""
    ((rounds, counter),) = ranks(1).run(_wrap)
    assert rounds == [(2, 1), (4, 1)]
    assert counter < 0


def _wrap():
    from tests.language import counting_kernels as kernels

    counter = torch.full((1,), 2**31 - 4096, dtype=torch.int32)
    rounds = []
    for grid in (3, 5):
        lasts = torch.full((8,), -1, dtype=torch.int32)
        lasts[7] = 0
        kernels.count_last[(grid,)](counter, lasts, 0)
        rounds.append((lasts[0].item(), lasts[7].item()))
    return rounds, counter.item()
