"""
Does a baseline change the mean of the gradient? Exactly, for ten small policies, under TRL's kinds of loss.

    python -m recipes.studies.bias --publish   # 10 seconds on one core

A policy writes up to four of three letters, and an end; its logits are linear in a few numbers of what is written. All
121 completions are listed, so expectations are sums. A baseline B adds −E[Σ_t B_t s_t / Z] to the mean of a step's
gradient, s_t a token's score and Z what the loss divides by. Its length is given over that of the gradient itself,
E[R Σ_t s_t], of `dr_grpo`.

- `dr_grpo` divides by a constant, `grpo` by the completion's length, `dapo` by the tokens of the batch: 16 prompts
  with 4 completions. Z is scaled to be 1 where all lengths are the mean length.
- `sequence_mask`: another policy samples, a completion's ratio multiplies its gradient, and the tenth of the
  completions with the largest ratios is left out.

A constant is the mean reward; `value` has learned from 12 batches of 8 prompts with 4 completions, and is taken with
that constant as its B0. Its parts are the prediction, and later luck.
"""

import argparse
import itertools
import sys
import warnings

import torch

import trl_otb
from recipes.studies import render
from trl_otb.baselines import Completions, Value, squeeze
from trl_otb.energy import token_energy


LETTERS, LONGEST, FEATURES = 3, 4, 6
BATCH = 64  # completions that `dapo` divides by the tokens of
CUT = 0.1  # of the completions
LOSSES = ("dr_grpo", "dapo", "grpo", "sequence_mask")
PARTS = ("constant", "value", "prediction", "later luck")


class Policy:
    """All that it may write: ids `(Y, T)`, T = 4, the end being the last id; and of each its log-probs and reward."""

    def __init__(self, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.weights = 0.7 * torch.randn(LETTERS + 1, FEATURES, generator=rng, dtype=torch.float64)
        ends = [[*some, LETTERS] for n in range(LONGEST) for some in itertools.product(range(LETTERS), repeat=n)]
        texts = ends + [list(some) for some in itertools.product(range(LETTERS), repeat=LONGEST)]
        self.lengths = torch.tensor([len(text) for text in texts])
        self.mask = (torch.arange(LONGEST) < self.lengths.unsqueeze(1)).double()
        self.ids = torch.tensor([text + [LETTERS] * (LONGEST - len(text)) for text in texts])
        # Of what is written before each token: 1, the last letter, how much there is, and how many of the first letter
        before = torch.cat([torch.full((len(texts), 1), LETTERS + 1), self.ids[:, :-1]], dim=1)
        last = torch.nn.functional.one_hot(before, LETTERS + 2)[..., :LETTERS].double()
        place = (torch.arange(LONGEST) / LONGEST).expand(len(texts), LONGEST)
        firsts = last[..., 0].cumsum(dim=1) / LONGEST
        self.numbers = torch.cat([torch.ones_like(last[..., :1]), last, place.unsqueeze(-1), firsts.unsqueeze(-1)], -1)
        # A worth of each letter, and chance
        worth = torch.rand(LETTERS + 1, generator=rng, dtype=torch.float64)
        whole = (worth[self.ids] * self.mask).sum(dim=1) / LONGEST
        self.rewards = 0.7 * whole + 0.3 * torch.rand(len(texts), generator=rng, dtype=torch.float64)
        self.rng = rng

    def logps(self, weights: torch.Tensor) -> torch.Tensor:
        """`(Y, T, V)` log π of every next symbol."""
        return (self.numbers @ weights.T).log_softmax(dim=-1)

    def probabilities(self, weights: torch.Tensor) -> torch.Tensor:
        """Of each completion; they sum to 1."""
        of_tokens = self.logps(weights).gather(-1, self.ids.unsqueeze(-1)).squeeze(-1)
        return (of_tokens * self.mask).sum(dim=1).exp()

    def scores(self) -> torch.Tensor:
        """`(Y, T, V·F)`: ∇ log π(y_t), 0 beyond the end."""
        taken = torch.nn.functional.one_hot(self.ids, LETTERS + 1) - self.logps(self.weights).exp()
        return (taken.unsqueeze(-1) * self.numbers.unsqueeze(-2)).flatten(2) * self.mask.unsqueeze(-1)

    def completions(self, rows: torch.Tensor, n: int) -> Completions:
        """These of all, as a baseline sees them, in groups of `n`."""
        logps = self.logps(self.weights)
        taken = logps.gather(-1, self.ids.unsqueeze(-1)).squeeze(-1)
        energy = token_energy(taken, (2 * logps).logsumexp(dim=-1))
        of_tokens = {"energy": energy, "logps": taken, "states": self.numbers}
        return squeeze(
            self.rewards[rows].float(),
            self.mask[rows].float(),
            n,
            **{name: (values * (self.mask if values.dim() == 2 else self.mask.unsqueeze(-1)))[rows].float()
               for name, values in of_tokens.items()},
        )  # fmt: skip


def learned(policy: Policy) -> Value:
    """`value` after 12 batches of 8 prompts, which differ in nothing."""
    value, chances = Value(), policy.probabilities(policy.weights)
    for _ in range(12):
        drawn = torch.multinomial(chances, 32, replacement=True, generator=policy.rng)
        batch = policy.completions(drawn, 4)
        value.update(batch, value(batch), lambda values: values)
    return value


def divisors(policy: Policy, chances: torch.Tensor, cut: torch.Tensor) -> dict[str, torch.Tensor]:
    """By the loss, `(Y,)`: 1 / Z of each completion, in the mean over the others of its batch."""
    lengths, mean = policy.lengths, chances @ policy.lengths.double()
    of_length = torch.zeros(LONGEST + 1, dtype=torch.float64).index_add_(0, lengths, chances)
    rest = torch.ones(1, dtype=torch.float64)  # of the sum of the others' lengths
    for _ in range(BATCH - 1):
        rest = torch.nn.functional.conv1d(rest.view(1, 1, -1), of_length.flip(0).view(1, 1, -1), padding=LONGEST)[0, 0]
    sums = lengths.unsqueeze(1) + torch.arange(len(rest))
    return {
        "dr_grpo": torch.ones_like(chances),
        "dapo": BATCH * mean * (rest / sums).sum(dim=1),
        "grpo": mean / lengths,
        "sequence_mask": 1.0 - cut.double(),
    }


def biases(seed: int) -> dict[str, dict[str, float]]:
    """By the loss and the part of a baseline."""
    policy = Policy(seed)
    chances, scores = policy.probabilities(policy.weights), policy.scores()
    assert abs(chances.sum().item() - 1) < 1e-12
    other = policy.weights + 0.3 * torch.randn(policy.weights.shape, generator=policy.rng, dtype=torch.float64)
    sampled = policy.probabilities(other)
    order = (chances / sampled).argsort(descending=True)
    cut = torch.zeros(len(order), dtype=torch.bool)
    cut[order[sampled[order].cumsum(0) <= CUT]] = True
    constant = torch.full((len(chances), 1), (chances @ policy.rewards).item())
    every, value = policy.completions(torch.arange(len(chances)), 1), learned(policy)
    whole, luck = value.adjust(every, constant), value.later_luck(every, constant)
    parts = [constant.expand_as(whole), whole, whole - luck - constant, luck]
    gradient = torch.einsum("y,y,ytk->k", chances, policy.rewards, scores)
    return {
        loss: {
            name: (torch.einsum("y,yt,ytk->k", chances * over, part.double(), scores).norm() / gradient.norm()).item()
            for name, part in zip(PARTS, parts, strict=True)
        }
        for loss, over in divisors(policy, chances, cut).items()
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bias", description=__doc__.splitlines()[1])
    parser.add_argument("--policies", type=int, default=10)
    parser.add_argument("--publish", action="store_true", help="put the numbers into the results and the pages")
    args = parser.parse_args(argv)
    found = [{"seed": seed} | biases(seed) for seed in range(args.policies)]
    print(render.of_bias(found))
    if args.publish:
        command = "python -m recipes.studies.bias"
        render.save("bias", {"command": command, "release": trl_otb.__version__, "policies": found})
        render.render()


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1:])
