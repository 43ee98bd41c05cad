"""The method, derived again by listing every completion of a tiny policy: V = 3 symbols, T = 3 tokens at most.

The policy has one parameter per symbol, added to logits that depend on the history, so that the score of a token with
respect to the parameters is its score with respect to the logits, s_t = e_{y_t} − π_t, and S_t = Σ_{j≤t} s_j. The last
symbol ends a completion. All expectations are sums over completions, in float64; groups of N are listed as tuples of
completions.
"""

import itertools

import pytest
import torch

from tests.helpers.oracles import double_loop
from trl_otb.baselines import BASELINES, compute_advantages


V, T = 3, 3
END = V - 1


class Enumeration:
    """Every completion with its probability, reward, scores, energies and mask."""

    def __init__(self):
        g = torch.Generator().manual_seed(0)
        logits = {}  # by history
        self.completions = []

        def extend(history, probability, scores):
            if len(history) == T or history[-1:] == (END,):
                self.completions.append((history, probability, scores))
                return
            z = logits.setdefault(history, torch.randn(V, generator=g, dtype=torch.float64))
            pi = z.softmax(0)
            for y in range(V):
                score = torch.nn.functional.one_hot(torch.tensor(y), V) - pi
                extend((*history, y), probability * pi[y], [*scores, score])

        extend((), torch.tensor(1.0, dtype=torch.float64), [])
        size = len(self.completions)
        self.probability = torch.stack([p for _, p, _ in self.completions])
        self.rewards = torch.rand(size, generator=g, dtype=torch.float64)
        self.mask = torch.tensor([[int(t < len(h)) for t in range(T)] for h, _, _ in self.completions])
        self.scores = torch.zeros(size, T, V, dtype=torch.float64)
        for i, (_, _, scores) in enumerate(self.completions):
            self.scores[i, : len(scores)] = torch.stack(scores)
        self.energy = self.scores.square().sum(2)

    def mean(self, values):
        """E over completions, of values with one row for each."""
        return torch.einsum("i,i...->...", self.probability, values)

    @property
    def gradient(self):
        return self.mean(self.rewards[:, None] * self.scores.sum(1))

    def expected_gradient(self, n, **options):
        """E of ĝ = 1/N Σ_i Σ_t A_{t,i} s_{t,i}, over all groups of N."""
        groups = torch.tensor(list(itertools.product(range(len(self.mask)), repeat=n)))
        rows = groups.flatten()
        advantages = compute_advantages(
            self.rewards[rows].float(), self.energy[rows].float(), self.mask[rows], n, **options
        ).double()
        estimates = (advantages.unsqueeze(2) * self.scores[rows]).sum(1).view(-1, n, V).mean(1)
        return torch.einsum("g,gv->v", self.probability[groups].prod(1), estimates)


@pytest.fixture(scope="module")
def policy():
    return Enumeration()


def test_all_completions_are_listed(policy):
    assert len(policy.mask) == 1 + 2 + 2 * 2 * 3  # ended at once, after one token, and of three tokens
    assert policy.probability.sum().item() == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(policy.mean(policy.scores), torch.zeros(T, V, dtype=torch.float64), atol=1e-12, rtol=0)


def test_cross_terms_vanish_and_realized_energy_is_the_squared_norm_of_the_score(policy):
    """E⟨s_j, s_k⟩ = 0 for j ≠ k, hence E‖S_t‖² = E W_t, though no completion has ‖S_t‖² = W_t by itself."""
    gram = policy.mean(torch.einsum("ijv,ikv->ijk", policy.scores, policy.scores))
    torch.testing.assert_close(gram, torch.diag(gram.diagonal()), atol=1e-12, rtol=0)
    squared_norm = policy.scores.cumsum(1).square().sum(2)
    realized = policy.energy.cumsum(1)
    torch.testing.assert_close(policy.mean(squared_norm), policy.mean(realized), atol=1e-12, rtol=0)
    assert (squared_norm - realized).abs().max() > 0.5


def test_the_baseline_of_theorem_4_1_is_the_minimum_it_claims_to_be(policy):
    """
    B_t = E[W_t G_t] / E[W_t] minimises E[W_t (G_t − b)²], over the completions with a t-th token.

    The library's B_t is that of a group which holds every completion, with W_t weighted by its probability: an
    importance ratio of √p scales every w_j by p.
    """
    advantages = compute_advantages(
        policy.rewards.float(),
        policy.energy.float(),
        policy.mask,
        len(policy.mask),
        zero_tail=False,
        importance_weights=policy.probability.sqrt().float().unsqueeze(1),
    )
    realized = policy.energy.cumsum(1) * policy.mask
    for t in range(T):
        b = torch.zeros((), dtype=torch.float64, requires_grad=True)
        power = policy.mean(realized[:, t] * (policy.rewards - b).square())
        (slope,) = torch.autograd.grad(power, b, create_graph=True)
        (curvature,) = torch.autograd.grad(slope, b)
        least = (b - slope / curvature).item()  # a parabola: one step of Newton's
        row = int(policy.mask[:, t].nonzero()[0])
        assert policy.rewards[row].item() - advantages[row, t].item() == pytest.approx(least, abs=1e-6)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("baseline", [name for name, entry in BASELINES.items() if not entry.compares_prompts])
def test_a_baseline_says_truly_whether_it_is_unbiased(policy, baseline, n):
    """As it is, with one left out, and without the zero tail, by all groups."""
    entry = BASELINES[baseline]
    for leave_one_out in (False,) if entry.leaves_one_out else (False, True):
        for zero_tail in (True, False) if entry.zero_tail else (True,):
            options = {"leave_one_out": leave_one_out, "zero_tail": zero_tail}
            error = policy.expected_gradient(n, baseline=baseline, **options) - policy.gradient
            assert entry.is_unbiased(**options) == (error.abs().max().item() < 2e-7), options
    assert entry.leaves_one_out or entry.is_unbiased(leave_one_out=True)


DAMPED = {2: 0.992, 3: 0.996}  # the cosine by N


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    ("baseline", "cosine"), [("ogb_pooled", 1.0), ("rloo_pooled", 1.0), ("ogb_pooled_damped", DAMPED)]
)
def test_pooling_with_other_prompts_is_unbiased_and_damping_is_not(policy, baseline, cosine, n):
    """Whatever the other prompts' completions were: each of a prompt's groups meets the same three others."""
    others = torch.tensor([1, 3, 12, 5, 6, 8, 2, 9, 11])[: 3 * n]
    groups = torch.tensor(list(itertools.product(range(len(policy.mask)), repeat=n)))
    expected, shifts = torch.zeros_like(policy.gradient), 0.0
    for group, probability in zip(groups, policy.probability[groups].prod(1), strict=True):
        rows = torch.cat([group, others])
        inputs = policy.rewards[rows].float(), policy.energy[rows].float(), policy.mask[rows], n
        advantages = compute_advantages(*inputs, baseline=baseline)[:n].double()
        alone = compute_advantages(*(x[:n] if isinstance(x, torch.Tensor) else x for x in inputs), baseline=baseline)
        shifts = max(shifts, (advantages - alone).abs().max().item())
        expected += probability * (advantages.unsqueeze(2) * policy.scores[group]).sum(1).mean(0)
    if cosine == 1.0:
        torch.testing.assert_close(expected, policy.gradient, atol=2e-7, rtol=0)
    else:
        found = torch.nn.functional.cosine_similarity(expected, policy.gradient, dim=0).item()
        assert found == pytest.approx(cosine[n], abs=1e-3)
    assert shifts > 0.01  # it did look at the others


# ‖E ĝ − g‖ / ‖g‖ and the cosine of E ĝ to g, for N = 2 and N = 3, with the completion's own return in its baseline.
# Most of the bias is a factor near (N − 1)/N, which a learning rate absorbs; the rest turns the gradient by up to 9
# degrees.
BIAS = {
    "group_mean": ((1 / 2, 1.0), (1 / 3, 1.0)),
    "opo": ((0.497, 0.999), (0.330, 1.000)),
    "ogb": ((0.528, 0.997), (0.350, 0.998)),
    "otb_shrunk": ((0.591, 0.997), (0.408, 0.998)),
    "otb": ((0.526, 0.989), (0.402, 0.994)),
    "rloo": ((0.0, 1.0), (0.0, 1.0)),
}


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("baseline", BIAS)
def test_how_large_the_bias_with_the_own_return_is(policy, baseline, n):
    """By the library, and in float64 by the plain double loop of the definitions over all groups."""
    expected = policy.expected_gradient(n, baseline=baseline)
    groups = torch.tensor(list(itertools.product(range(len(policy.mask)), repeat=n)))
    rows = groups.flatten()
    by_loop = double_loop(
        policy.rewards[rows].tolist(), policy.energy[rows].tolist(), policy.mask[rows].tolist(), n, baseline=baseline
    )
    estimates = (by_loop.double().unsqueeze(2) * policy.scores[rows]).sum(1).view(-1, n, V).mean(1)
    again = torch.einsum("g,gv->v", policy.probability[groups].prod(1), estimates)
    torch.testing.assert_close(expected, again, atol=2e-7, rtol=0)
    size = ((expected - policy.gradient).norm() / policy.gradient.norm()).item()
    cosine = torch.nn.functional.cosine_similarity(expected, policy.gradient, dim=0).item()
    assert (size, cosine) == pytest.approx(BIAS[baseline][n - 2], abs=1e-3)


def test_a_baseline_with_the_own_return_is_one_without_it_damped(policy):
    """G − B = (1 − ω_i) (G − B_(−i)), ω_i the completion's share of the weight: here for `ogb` in all groups of 3."""
    rows = torch.tensor(list(itertools.product(range(len(policy.mask)), repeat=3))).flatten()
    inputs = (policy.rewards[rows].float(), policy.energy[rows].float(), policy.mask[rows], 3)
    total = policy.energy.sum(1)[rows].view(-1, 3)
    share = (total / total.sum(1, keepdim=True)).flatten().float().unsqueeze(1)
    damped = (1 - share) * compute_advantages(*inputs, baseline="ogb", leave_one_out=True)
    torch.testing.assert_close(compute_advantages(*inputs, baseline="ogb"), damped, atol=1e-6, rtol=0)
