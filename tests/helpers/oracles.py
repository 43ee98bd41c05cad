"""Independent computations of what the library computes: slow, plain, and sharing no code with it."""

import math
from collections.abc import Callable

import torch

from trl_otb.baselines import ALIGNMENTS, BASELINES, compute_advantages


# Every combination of options that a built-in baseline looks at.
OPTIONS = [
    {"baseline": name, "alignment": alignment, "zero_tail": zero_tail, "leave_one_out": leave_one_out}
    for name, entry in BASELINES.items()
    for alignment in (ALIGNMENTS if entry.per_token else ("generated",))
    for zero_tail in ((True, False) if entry.zero_tail else (True,))
    for leave_one_out in ((False,) if entry.leaves_one_out else (False, True))
]


class Rollouts:
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

    def advantages(self, rewards=None, **options):
        options.setdefault("energy", self.energy)
        options.setdefault("mask", self.mask)
        return compute_advantages(
            self.rewards if rewards is None else rewards, options.pop("energy"), options.pop("mask"), self.n, **options
        )


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


# ω of a completion at token t, by baseline; None where it takes no part. One line for each.
WEIGHTS: dict[str, Callable[[Completion, int], float | None]] = {
    "otb": lambda c, t: c.realized_energy(t) if t in c.position else None,
    "otb_shrunk": lambda c, t: c.realized_energy() + 2.0 * c.energy.get(t, 0.0),
    "ogb": lambda c, t: c.realized_energy(),
    "opo": lambda c, t: len(c.position),
    "rloo": lambda c, t: 1.0,
    "group_mean": lambda c, t: 1.0,
    "none": lambda c, t: None,
    "ogb_pooled": lambda c, t: c.realized_energy(),
    "ogb_pooled_damped": lambda c, t: c.realized_energy(),
    "rloo_pooled": lambda c, t: 1.0,
    "value": lambda c, t: 1.0,  # what it stands on, all that a new one has
}


def weighted_mean(terms):
    total = sum(w for w, _ in terms)
    if total > 0:
        return sum(w * g for w, g in terms) / total
    return sum(g for _, g in terms) / len(terms) if terms else 0.0


def pooled_baseline(groups, prompt, own, weight, reward=lambda c: c.total_reward):
    """The baseline of completion `own` of group number `prompt`, all groups given as lists of scorable completions."""
    everybody = groups[prompt]
    groups = [[c for c in group if c.position] for group in groups]  # what is masked says nothing
    if not [c for c in groups[prompt] if c is not own]:
        groups[prompt] = everybody

    def without(group, left_out):
        return weighted_mean([(weight(c, 0), reward(c)) for c in group if c is not left_out])

    centres, noises, own_noises = [], [], []
    for q, group in enumerate(groups):
        if q != prompt and len(group) > 1:
            means = [without(group, c) for c in group]
            centres.append(sum(means) / len(means))
            noises.append(sum((b - centres[-1]) ** 2 for b in means))
            own_noises.append(noises[-1] * (len(means) - 1) / len(means))
    if len(centres) < 2:
        return without(groups[prompt], own)
    target = sum(centres) / len(centres)
    if len(groups[prompt]) == 1:
        return target
    b, k = without(groups[prompt], own), len(centres)
    noise, of_centres = sum(noises) / k, sum(own_noises) / k
    between = max(0.0, sum((c - target) ** 2 for c in centres) / (k - 1) - of_centres)
    with_own = [*centres, b]
    mean = sum(with_own) / (k + 1)
    uncertain = 2 * sum((c - mean) ** 2 for c in with_own) / k
    share = noise / (noise + between + (between + of_centres + uncertain) / k) if noise > 0 else 0.0
    return (1 - share) * b + share * target


def damping(own, others):
    """The square of the others' share of the energy, over what it is where all have the same."""
    if not others:
        return 0.0
    total = own.realized_energy() + sum(c.realized_energy() for c in others)
    share = own.realized_energy() / total if total > 0 else 1 / (len(others) + 1)
    return ((1 - share) * (len(others) + 1) / len(others)) ** 2


def double_loop(
    rewards,
    energy,
    mask,
    n,
    *,
    baseline="otb",
    alignment="generated",
    zero_tail=True,
    leave_one_out=False,
    ratios=None,
):
    """The definitions of the docstrings, one row and one token at a time; of a baseline that remembers, a new one."""
    entry, weight = BASELINES[baseline], WEIGHTS[baseline]
    completions = [
        Completion(rewards[i], energy[i], mask[i], ratios[i] if ratios else None, alignment) for i in range(len(mask))
    ]
    advantages = [[0.0] * len(mask[0]) for _ in mask]
    groups = [completions[first : first + n] for first in range(0, len(completions), n)]
    groups = [[c for c in group if not math.isnan(c.total_reward)] for group in groups]
    for i, own in enumerate(completions):
        if math.isnan(own.total_reward):
            continue
        first = i // n * n
        others = [
            c for j, c in enumerate(completions[first : first + n], first) if j != i and not math.isnan(c.total_reward)
        ]
        members = others if leave_one_out or baseline in ("rloo", "value") else [*others, own]
        for t, p in own.position.items():
            returns = {id(c): c.reward_to_go(t) if entry.per_token else c.total_reward for c in [*others, own]}
            terms = [(weight(c, t), returns[id(c)]) for c in members if weight(c, t) is not None]
            if n == 1:
                terms = []
            elif entry.zero_tail:
                on_lone_tail = t > max((c.last for c in others), default=-1)
                if on_lone_tail or not terms:
                    terms = [] if zero_tail else [(1.0, returns[id(own)])]
            if baseline == "value" and n > 1:
                b = pooled_baseline(groups, i // n, own, weight, reward=lambda c, t=t: c.reward_to_go(t))
            elif "_pooled" in baseline and n > 1:
                b = pooled_baseline(groups, i // n, own, weight)
            else:
                b = weighted_mean(terms)
            damped = baseline.endswith("_damped") and n > 1
            unmasked = [c for c in others if c.position]
            advantages[i][p] = (returns[id(own)] - b) * (damping(own, unmasked) if damped else 1)
    return torch.tensor(advantages)


def mask_of(batch):
    return batch["completion_mask"] * batch.get("tool_mask", 1)


def energies_by_softmax(model, batch, temperature=1.0):
    """w_t from a float64 softmax of the model's own, materialised logits."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=attention).logits.double() / temperature
    length = batch["completion_ids"].size(1)
    probs = logits[:, -length - 1 : -1].softmax(-1)
    one_hot = torch.nn.functional.one_hot(batch["completion_ids"], probs.size(-1))
    return (one_hot - probs).square().sum(-1) * mask_of(batch)
