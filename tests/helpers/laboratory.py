"""
Exact gradient variance: pools of completions, the Gram matrix of all their token scores, and what follows from it.

For a fixed policy and prompt, the score of a token is the gradient of its log-prob with respect to the trainable
parameters. Tokens with the same history have the same score, so it is taken once for each node of the tree that the
completions form. With the Gram matrix K of the nodes, the squared norm of any estimator's gradient is a quadratic
form, whatever its advantages.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from peft import PeftModel

from tests.helpers import tiny
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer
from trl_otb.baselines import compute_advantages
from trl_otb.rollout import Rollout


# Kernels of attention have no batched backward
SCORABLE = {"attn_implementation": "eager", "dtype": "float32"}


@dataclass
class Pool:
    """
    M completions of one prompt, U the number of different histories that end in a generated token.

    Args:
        rewards (`torch.Tensor` of shape `(M,)`):
            Terminal rewards.
        energy (`torch.Tensor` of shape `(M, T)`):
            w_t by the logit-gradient proxy, generated tokens side by side from the left.
        node (`torch.Tensor` of shape `(M, T)`):
            The token's row in `gram`, -1 after the completion's end.
        gram (`torch.Tensor` of shape `(U, U)`):
            Inner products of token scores, float32.
        head_norms (`torch.Tensor` of shape `(U, 2)`):
            Squared norms of the score with respect to the LM head's input, and of the proxy, for comparison.
        completions (`list[list[int]]`):
            Their ids, tool output included.
    """

    rewards: torch.Tensor
    energy: torch.Tensor
    node: torch.Tensor
    gram: torch.Tensor
    head_norms: torch.Tensor
    completions: list[list[int]]

    @property
    def mask(self) -> torch.Tensor:
        return self.node >= 0

    @property
    def exact_energy(self) -> torch.Tensor:
        """`(M, T)` squared norms of the exact scores."""
        return self.gram.diagonal()[self.node.clamp(min=0)] * self.mask

    def save(self, path: Path) -> None:
        unfinished = path.with_suffix(".unfinished")
        torch.save(vars(self), unfinished)
        unfinished.rename(path)

    @classmethod
    def load(cls, path: Path) -> "Pool":
        return cls(**torch.load(path, weights_only=True))


class PoolTrainer(OTBGRPOTrainer):
    """Trains nothing: turns each rollout, M completions of one prompt, into a [`Pool`]."""

    def __init__(self, *args, trainable: Callable[[str], bool], keep: Callable[[Pool], None], **kwargs):
        self._trainable, self._keep = trainable, keep
        super().__init__(*args, **kwargs)

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.model.eval()
        self._keep(pool_of(self.model, self.rollouts["train"], self._trainable))
        self.model.train()
        return 0.0 * super().compute_loss(model, inputs, *args, **kwargs)


def sample_pools(
    model: str | PeftModel,
    tokenizer,
    reward: Callable,
    dataset: Dataset,
    pool_size: int,
    keep: Callable[[Pool], None],
    *,
    trainable: Callable[[str], bool] = lambda name: True,
    max_completion_length: int = 72,
) -> None:
    """Sample `pool_size` completions of each prompt of `dataset`, in order, and hand their [`Pool`]s to `keep`."""
    settings = tiny.SETTINGS | {
        "output_dir": "runs/laboratory",
        "num_generations": pool_size,
        "per_device_train_batch_size": pool_size,
        "max_completion_length": max_completion_length,
        "max_steps": len(dataset),
        "shuffle_dataset": False,
        "learning_rate": 0.0,
        "model_init_kwargs": SCORABLE if isinstance(model, str) else None,
    }
    PoolTrainer(
        model,
        reward,
        args=OTBGRPOConfig(**settings),
        train_dataset=dataset,
        processing_class=tokenizer,
        trainable=trainable,
        keep=keep,
    ).train()


def pool_of(model, rollout: Rollout, trainable) -> Pool:
    mask = rollout.mask
    parameters = [p for name, p in model.named_parameters() if p.requires_grad and trainable(name)]
    rows = len(mask)
    longest = int(mask.sum(1).max())
    node = torch.full((rows, longest), -1)
    nodes: dict[tuple[int, ...], int] = {}
    scores, head_norms = [], []
    for row in range(rows):
        prompt = rollout.prompt_ids[row][rollout.prompt_mask[row].bool()]
        completion = rollout.completion_ids[row][rollout.completion_mask[row].bool()]
        history, generated = completion.tolist(), mask[row].nonzero().squeeze(1).tolist()
        new = [t for t in generated if tuple(history[: t + 1]) not in nodes]
        if new:
            exact, of_head = token_scores(model, parameters, prompt, completion, new)
            scores.append(exact)
            head_norms.append(of_head)
            for t in new:
                nodes[tuple(history[: t + 1])] = len(nodes)
        node[row, : len(generated)] = torch.tensor([nodes[tuple(history[: t + 1])] for t in generated])
    scores, head_norms = torch.cat(scores), torch.cat(head_norms)
    return Pool(
        rewards=rollout.rewards,
        energy=head_norms[node.clamp(min=0), 1] * (node >= 0),
        node=node,
        gram=scores @ scores.T,
        head_norms=head_norms,
        completions=[
            ids[m.bool()].tolist() for ids, m in zip(rollout.completion_ids, rollout.completion_mask, strict=True)
        ],
    )


def token_scores(model, parameters, prompt, completion, positions) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Scores of the completion's tokens at `positions`: `(len(positions), parameters)`; and, `(len(positions), 2)`, the
    squared norms of the score with respect to the LM head's input and to the logits.
    """
    ids = torch.cat([prompt, completion]).unsqueeze(0)
    at = torch.tensor(positions) + len(prompt) - 1
    hidden = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), logits_to_keep=at).logits[0].float()
    handle.remove()
    logps = logits.log_softmax(-1)
    tokens = completion[torch.tensor(positions)]
    chosen = logps.gather(1, tokens.unsqueeze(1)).squeeze(1)
    eye = torch.eye(len(positions))
    of_hidden, *gradients = torch.autograd.grad(chosen, [hidden[0], *parameters], eye, is_grads_batched=True)
    with torch.no_grad():
        head = of_hidden[:, 0].square().sum((1, 2))
        of_logits = torch.nn.functional.one_hot(tokens, logps.size(1)) - logps.exp()
        return torch.cat([g.flatten(1) for g in gradients], 1), torch.stack([head, of_logits.square().sum(1)], 1)


@dataclass
class Moments:
    """
    Moments of an estimator ĝ from groups of N: E‖ĝ‖², ‖Eĝ‖², and with the true gradient g, ⟨Eĝ, g⟩ and ‖g‖², all
    estimated without bias from completions that they do not share, and averaged over ways to deal the pool into
    groups.
    """

    square: float
    signal: float
    with_truth: float
    truth: float

    @property
    def noise(self) -> float:
        """tr Var(ĝ)."""
        return self.square - self.signal

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def noise_to_signal(self) -> float:
        return self.noise / self.signal

    @property
    def cosine(self) -> float:
        """Cosine of Eĝ to the true gradient; NaN where noise leaves one of the squares negative."""
        squares = self.signal * self.truth
        return self.with_truth / squares**0.5 if squares > 0 else math.nan


def moments(
    pool: Pool, estimators: dict[str, Callable], n: int, deals: int, seed: int = 0, exact: bool = False
) -> dict[str, Moments]:
    """
    Moments of the gradient ĝ = 1/N Σ_i Σ_t A_{t,i} s_{t,i} of a group of `n`, for each of `estimators`, functions
    (rewards, energy, mask, n) -> advantages `(M, T)`.

    The true gradient is estimated, for the groups of one half of the pool, from the other half taken as one group,
    with the baseline "ogb_loo": it has no bias, and little noise.
    """
    rng = torch.Generator().manual_seed(seed)
    size = len(pool.rewards) // n * n
    groups = size // n
    if groups < 2:
        raise ValueError(f"A pool of {len(pool.rewards)} has fewer than two groups of {n}.")
    energy = pool.exact_energy if exact else pool.energy
    node, mask, gram = pool.node.clamp(min=0), pool.mask, pool.gram.double()
    of_group = torch.arange(size) // n
    halves = [slice(0, groups // 2 * n), slice(groups // 2 * n, size)]
    sums = {name: torch.zeros(4, dtype=torch.float64) for name in estimators}
    for _ in range(deals):
        order = torch.randperm(len(pool.rewards), generator=rng)[:size]
        rewards, w, m, nodes = pool.rewards[order], energy[order], mask[order], node[order]

        def of_nodes(advantages, group, m=m, nodes=nodes):
            """Each group's gradient as a combination of the nodes' scores: (groups, U)."""
            sizes = group.bincount()
            share = advantages.double() / sizes[group].unsqueeze(1)
            flat = torch.zeros(len(sizes) * len(gram), dtype=torch.float64)
            index = (group.unsqueeze(1) * len(gram) + nodes)[m]
            return flat.index_add_(0, index, share[m]).view(len(sizes), len(gram))

        truth = of_nodes(
            torch.cat(
                [compute_advantages(rewards[h], w[h], m[h], h.stop - h.start, baseline="ogb_loo") for h in halves]
            ),
            (torch.arange(size) >= halves[1].start).long(),
        )
        truth_k = truth @ gram
        for name, estimator in estimators.items():
            c = of_nodes(estimator(rewards, w, m, n), of_group)
            c_k = c @ gram
            own = (c_k * c).sum()
            signal = (c_k.sum(0) @ c.sum(0) - own) / (groups * (groups - 1))  # of unlike groups
            first, second = c[: groups // 2].mean(0), c[groups // 2 :].mean(0)
            with_truth = (first @ truth_k[1] + second @ truth_k[0]) / 2
            sums[name] += torch.stack([own / groups, signal, with_truth, truth_k[0] @ truth[1]]) / deals
    return {name: Moments(*row.tolist()) for name, row in sums.items()}
