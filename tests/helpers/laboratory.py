"""
Exact gradient variance: pools of completions, the Gram matrix of all their token scores, and what follows from it.

For a fixed policy and prompt, the score of a token is the gradient of its log-prob with respect to the trainable
parameters. Tokens with the same history have the same score, so it is taken once for each node of the tree that the
completions form. With the Gram matrix K of the nodes, the squared norm of any estimator's gradient is a quadratic
form, whatever its advantages.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from trl_otb.rollout import Rollout


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
    """

    rewards: torch.Tensor
    energy: torch.Tensor
    node: torch.Tensor
    gram: torch.Tensor

    @property
    def mask(self) -> torch.Tensor:
        return self.node >= 0


def pool_of(model, rollout: Rollout) -> Pool:
    mask = rollout.mask
    node = torch.full((len(mask), int(mask.sum(1).max())), -1)
    nodes: dict[tuple[int, ...], int] = {}
    scores, energies = [], []
    for row in range(len(mask)):
        prompt = rollout.prompt_ids[row][rollout.prompt_mask[row].bool()]
        completion = rollout.completion_ids[row][rollout.completion_mask[row].bool()]
        history, generated = completion.tolist(), mask[row].nonzero().squeeze(1).tolist()
        new = [t for t in generated if tuple(history[: t + 1]) not in nodes]
        if new:
            exact, energy = token_scores(model, prompt, completion, new)
            scores.append(exact)
            energies.append(energy)
            for t in new:
                nodes[tuple(history[: t + 1])] = len(nodes)
        node[row, : len(generated)] = torch.tensor([nodes[tuple(history[: t + 1])] for t in generated])
    scores, energies = torch.cat(scores), torch.cat(energies)
    return Pool(rollout.rewards, energies[node.clamp(min=0)] * (node >= 0), node, scores @ scores.T)


def token_scores(model, prompt, completion, positions) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Scores of the completion's tokens at `positions`: `(len(positions), parameters)`; and the squared norms of the
    scores with respect to the logits: `(len(positions),)`.
    """
    ids = torch.cat([prompt, completion]).unsqueeze(0)
    at = torch.tensor(positions) + len(prompt) - 1
    logps = model(input_ids=ids, logits_to_keep=at).logits[0].float().log_softmax(-1)
    tokens = completion[torch.tensor(positions)]
    chosen = logps.gather(1, tokens.unsqueeze(1)).squeeze(1)
    gradients = [torch.autograd.grad(one, list(model.parameters()), retain_graph=True) for one in chosen]
    of_logits = torch.nn.functional.one_hot(tokens, logps.size(1)) - logps.detach().exp()
    return torch.stack([torch.cat([g.flatten() for g in of]) for of in gradients]), of_logits.square().sum(1)


def mean_square(pool: Pool, estimator: Callable, n: int, deals: int) -> float:
    """
    E‖ĝ‖² of the gradient ĝ = 1/N Σ_i Σ_t A_{t,i} s_{t,i} of a group of `n`, averaged over `deals` ways to deal the pool
    into groups; `estimator` is a function (rewards, energy, mask, n) -> advantages `(M, T)`.
    """
    rng = torch.Generator().manual_seed(0)
    size = len(pool.rewards) // n * n
    node, gram, total = pool.node.clamp(min=0), pool.gram.double(), 0.0
    for _ in range(deals):
        order = torch.randperm(len(pool.rewards), generator=rng)[:size]
        mask = pool.mask[order]
        advantages = estimator(pool.rewards[order], pool.energy[order], mask, n).double() * mask / n
        # Each group's gradient as a combination of the nodes' scores: (groups, U)
        c = torch.zeros(size // n, len(gram), dtype=torch.float64)
        c.scatter_add_(1, node[order].view(size // n, -1), advantages.view(size // n, -1))
        total += ((c @ gram) * c).sum().item() / (size // n) / deals
    return total
