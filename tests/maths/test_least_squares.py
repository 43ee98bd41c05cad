"""Shares of the parts of a prediction: those that leave least in folds that the parts were not fitted to."""

import pytest
import torch

from trl_otb.baselines.least_squares import B0, ONE, TARGET, Sums, confidences, products, solution


@pytest.mark.parametrize("seed", range(6))
def test_shares_leave_the_least_also_where_parts_say_the_same(seed):
    g, folds, sizes = torch.Generator().manual_seed(seed), 4, [3, 1]
    common, first, second, own = (torch.randn(12, 5, 1, generator=g) for _ in range(4))
    b0 = torch.randn(12, 5, 1, generator=g)
    target = common + 1.5 * own
    columns = torch.cat([torch.ones_like(b0), b0, common + 0.3 * first, common + 0.3 * second, target], dim=-1)
    fold = torch.arange(12) % folds
    sums = Sums((ONE, B0, "first", "second", TARGET), products(columns, torch.ones(12, 5), fold, folds))
    fitted = solution(sums.of_other_folds(), 1e-3)[fold].unsqueeze(1)
    parts = [of.sum(dim=-1) for of in (columns[..., :-1].double() * fitted).split(sizes, dim=-1)]

    def left(shares):
        predicted = sum(c * of for c, of in zip(shares, parts, strict=True))
        return (target[..., 0].double() - predicted).square().sum().item()

    tried = torch.linspace(0, 1, 41, dtype=torch.float64).tolist()
    least = min(left((one, other)) for one in tried for other in tried)
    found = confidences(sums, 1e-3, sizes).tolist()
    assert left(found) <= 1.012 * least and all(0 <= c <= 1 for c in found)
