"""Independent computations of what the library computes: slow, plain, and sharing no code with it."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from trl_otb.baselines import BASELINES, compute_advantages, find_baseline, otb, squeeze
from trl_otb.baselines.completions import ALIGNMENTS


# By name, what a test can give to `baseline`: those of this package, and one of them with its option
ESTIMATORS: dict[str, Any] = {name: name for name, entry in BASELINES.items() if entry.built_in}
ESTIMATORS["otb_no_zero_tail"] = partial(otb, zero_tail=False)
ALIGNED = [  # with every alignment that a baseline looks at
    (estimator, alignment)
    for estimator in ESTIMATORS
    for alignment in (ALIGNMENTS if find_baseline(ESTIMATORS[estimator]).per_token else ALIGNMENTS[:1])
]


class RandomBatch:
    """Random ragged rollouts: G groups of N, with tool output inside some completions."""

    def __init__(self, seed=0, groups=3, n=4, length=12, tools=True):
        g = torch.Generator().manual_seed(seed)
        rows = groups * n
        self.n = n
        self.rewards = torch.randn(rows, generator=g)
        self.energy = torch.rand(rows, length, generator=g) * 2
        ends = torch.randint(1, length + 1, (rows, 1), generator=g)
        self.mask = (torch.arange(length) < ends).long()
        if tools:
            self.mask *= (torch.rand(rows, length, generator=g) > 0.3).long()
        self.ratios = torch.rand(rows, length, generator=g) + 0.5

    def advantages(self, rewards=None, energy=None, mask=None, baseline="otb", **options):
        """`baseline` is one of `ESTIMATORS`, or anything that `compute_advantages` takes."""
        given = zip((rewards, energy, mask), (self.rewards, self.energy, self.mask), strict=True)
        estimator = ESTIMATORS.get(baseline, baseline) if isinstance(baseline, str) else baseline
        inputs = (own if values is None else values for values, own in given)
        return compute_advantages(*inputs, self.n, baseline=estimator, **options)

    def completions(self, **more):
        return squeeze(self.rewards, self.mask, self.n, energy=self.energy, **more)


class Completion:
    """One row in Python floats: `energy[t]` of the t-th token, and where that token stands."""

    def __init__(self, rewards, energy, mask, ratios, alignment):
        self.rewards = rewards if isinstance(rewards, list) else None
        self.total_reward = sum(rewards) if self.rewards else rewards
        self.position, self.energy = {}, {}
        for p in range(len(mask)):
            if mask[p]:
                t = len(self.position) if alignment == "generated" else p
                self.position[t] = p
                self.energy[t] = energy[p] * (ratios[p] ** 2 if ratios else 1.0)
        self.alignment = alignment

    @property
    def last(self) -> int:
        return max(self.position, default=-1)

    def realized_energy(self, t=math.inf) -> float:
        return sum(w for u, w in self.energy.items() if u <= t)

    def reward_to_go(self, t) -> float:
        """G_t; after the last token, that token's."""
        if self.rewards is None:
            return self.total_reward
        if self.alignment == "position" and t <= self.last:
            return sum(self.rewards[t:])
        before = [u for u in self.position if u <= t]
        return sum(self.rewards[self.position[max(before)] :]) if before else self.total_reward


class Definition(NamedTuple):
    """ω of a completion at token t, None where it takes no part; and what else a baseline is."""

    weight: Callable[[Completion, int], float | None]
    per_token: bool = False
    leave_one_out: bool = False
    pooled: bool = False
    zero_tail: bool = False  # B is 0 where no other completion has such a token


def realized(c: Completion, t: int) -> float:
    return c.realized_energy()


def realized_so_far(c: Completion, t: int) -> float | None:
    return c.realized_energy(t) if t in c.position else None


def equal(c: Completion, t: int) -> float:
    return 1.0


DEFINITIONS = {
    "otb": Definition(realized_so_far, per_token=True, zero_tail=True),
    "otb_no_zero_tail": Definition(realized_so_far, per_token=True),
    "otb_loo": Definition(realized_so_far, per_token=True, leave_one_out=True),
    "ogb": Definition(realized),
    "ogb_loo": Definition(realized, leave_one_out=True),
    "rloo": Definition(equal, leave_one_out=True),
    "group_mean": Definition(equal),
    "none": Definition(lambda c, t: None),
    "ogb_pooled": Definition(realized, pooled=True),
    "rloo_pooled": Definition(equal, pooled=True),
    "value": Definition(equal, per_token=True, pooled=True),  # B0, all that a new one has
}


def weighted_mean(terms):
    total = sum(w for w, _ in terms)
    if total > 0:
        return sum(w * g for w, g in terms) / total
    return sum(g for _, g in terms) / len(terms) if terms else 0.0


def pooled_baseline(groups, prompt, own, weight, reward):
    """The baseline of completion `own` of group number `prompt`, all groups given as lists of scored completions."""
    groups = [[c for c in group if c.position] for group in groups]  # what is masked says nothing

    def without(group, left_out):
        return weighted_mean([(weight(c, 0), reward(c)) for c in group if c is not left_out])

    others = [group for q, group in enumerate(groups) if q != prompt and group]
    means = [[without(group, c) for c in group] if len(group) > 1 else [reward(group[0])] for group in others]
    centres = [sum(of_group) / len(of_group) for of_group in means]
    k, target = len(centres), sum(centres) / max(len(centres), 1)
    if len(groups[prompt]) == 1:
        return target
    b = without(groups[prompt], own)
    if k < 2:
        return b
    squares = [(len(of), sum((m - c) ** 2 for m in of)) for of, c in zip(means, centres, strict=True) if len(of) > 1]
    noise = sum(square for _, square in squares) / max(len(squares), 1)
    of_one = sum(square * (n - 1) for n, square in squares) / max(len(squares), 1)  # the variance of one return
    of_centres = (sum(square * (n - 1) / n for n, square in squares) + (k - len(squares)) * of_one) / k
    between = max(0.0, sum((c - target) ** 2 for c in centres) / (k - 1) - of_centres)
    with_own = [*centres, b]
    mean = sum(with_own) / (k + 1)
    uncertain = 2 * sum((c - mean) ** 2 for c in with_own) / k
    share = noise / (noise + between + (between + of_centres + uncertain) / k) if noise > 0 else 0.0
    return (1 - share) * b + share * target


def double_loop(rewards, energy, mask, n, *, baseline="otb", alignment="generated", ratios=None):
    """The definitions of the docstrings, one row and one token at a time; of a baseline that learns, a new one."""
    of = DEFINITIONS[baseline]
    completions = [
        Completion(rewards[i], energy[i], mask[i], ratios[i] if ratios else None, alignment) for i in range(len(mask))
    ]
    advantages = [[0.0] * len(mask[0]) for _ in mask]
    groups = [completions[first : first + n] for first in range(0, len(completions), n)]
    groups = [[c for c in group if not math.isnan(c.total_reward)] for group in groups]
    for i, own in enumerate(completions):
        group = groups[i // n]
        others = [c for c in group if c is not own]
        for t, p in own.position.items() if own in group else ():

            def reward(c, t=t):
                return c.reward_to_go(t) if of.per_token else c.total_reward

            if of.pooled:
                b = pooled_baseline(groups, i // n, own, of.weight, reward)
            elif n == 1 or (of.zero_tail and t > max((c.last for c in others), default=-1)):
                b = 0.0
            else:
                members = others if of.leave_one_out else group
                b = weighted_mean([(of.weight(c, t), reward(c)) for c in members if of.weight(c, t) is not None])
            advantages[i][p] = reward(own) - b
    return torch.tensor(advantages)


def mask_of(batch):
    return batch["completion_mask"] * batch.get("tool_mask", 1)


def generated(batch):
    """The ids of each completion that the policy generated."""
    return [ids[m].tolist() for ids, m in zip(batch["completion_ids"], mask_of(batch).bool(), strict=True)]


def logps_by_softmax(model, batch, temperature=1.0):
    """`(B, T, V)` float64 log-probs of the model's own, materialised logits."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    logits = model(input_ids=ids, attention_mask=attention).logits.double() / temperature
    length = batch["completion_ids"].size(1)
    return logits[:, -length - 1 : -1].log_softmax(-1)


def energies_by_softmax(model, batch, temperature=1.0):
    """w_t from a float64 softmax of the model's own, materialised logits."""
    with torch.no_grad():
        probs = logps_by_softmax(model, batch, temperature).exp()
    one_hot = torch.nn.functional.one_hot(batch["completion_ids"], probs.size(-1))
    return (one_hot - probs).square().sum(-1) * mask_of(batch)
