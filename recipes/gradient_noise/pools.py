"""Pools of completions of fixed prompts, and the gradients of their groups under every estimator."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import DynamicCache, TrainerCallback
from transformers.cache_utils import DynamicLayer

from trl_otb.baselines import BASELINES, assign_credit, find_baseline
from trl_otb.rollout import Rollout


SHORT_PROMPT = 32  # tokens; completions share the forward of longer ones
SMALL = 2**22  # parameters; backward passes of a smaller model are taken together, as they wait for the calls
GRADIENTS = 2**26  # numbers of gradients that are projected together, a quarter of a GiB


def returns_of(rollout: Rollout) -> torch.Tensor:
    """`(B,)` the return of every completion: its reward, or the sum of its turns'; 0 if it cannot be scored."""
    rewards = rollout.rewards.float()
    return (rewards if rewards.dim() == 1 else rewards.sum(dim=1)).nan_to_num(nan=0.0)


@dataclass(frozen=True)
class Estimator:
    """A baseline with its options, or none at all."""

    name: str
    baseline: str | None = None
    leave_one_out: bool = False
    alignment: str = "generated"
    zero_tail: bool = True

    @property
    def per_token(self) -> bool:
        return self.baseline is not None and find_baseline(self.baseline).per_token

    @property
    def across_prompts(self) -> bool:
        return self.baseline is not None and find_baseline(self.baseline).across_prompts

    @property
    def options(self) -> str | None:
        """What a config says for it; `None` where it cannot."""
        if self.baseline is None:
            return None
        return f"baseline: {self.baseline}" + (", leave_one_out: true" if self.leave_one_out else "")

    def advantages(self, rollout: Rollout, rows: torch.Tensor, n: int) -> torch.Tensor:
        """`(b, T)`, or `(b, 1)` for one number per completion, of whole groups of `n`."""
        if self.baseline is None:
            return returns_of(rollout)[rows].unsqueeze(1)
        inputs = rollout.rewards[rows], rollout.energy[rows], rollout.mask[rows]
        options = {"alignment": self.alignment, "zero_tail": self.zero_tail, "leave_one_out": self.leave_one_out}
        return assign_credit(*inputs, n, baseline=self.baseline, **options).advantages


def estimators(baselines: list[str], alignment: str = "generated", zero_tail: bool = True) -> list[Estimator]:
    """
    None at all, and every baseline, those that read energies also with one left out; the group mean always.

    `alignment` and `zero_tail` are given to the baselines that look at them.
    """
    found = [Estimator("none"), Estimator("group_mean", "group_mean")]
    for name in baselines:
        entry = find_baseline(name)
        options = {"alignment": alignment} if entry.per_token else {}
        options |= {"zero_tail": zero_tail} if entry.zero_tail else {}
        if name != "group_mean":
            found.append(Estimator(name, name, **options))
        if entry.uses_energy and not entry.leaves_one_out:
            found.append(Estimator(f"{name}, one left out", name, leave_one_out=True, **options))
    return found


def scale_of(name: str, n: int, zero_tail: bool = True) -> float | None:
    """
    c where the estimator that [`estimators`] calls `name` is known to have Eĝ = c g, else `None`. Completions must
    come from the policy itself, nothing cut off: then its scores have mean 0.
    """
    if name == "group_mean":
        return (n - 1) / n
    baseline, _, left_out = name.partition(", ")
    entry = BASELINES.get(baseline)
    if name in ("none", "rloo", "rloo_pooled", "ogb_pooled"):
        return 1.0
    # With one left out but no zero tail, tokens that nobody is compared with are skipped
    unbiased = left_out and entry is not None and entry.built_in and (zero_tail or not entry.zero_tail)
    return 1.0 if unbiased else None


class KeepPools(TrainerCallback):
    """In an evaluation with one prompt per batch, hands every rollout to `keep`."""

    def __init__(self, keep: Callable[[Rollout], None]):
        self.keep = keep
        self.trainer = None

    def on_prediction_step(self, args, state, control, **kwargs):
        self.keep(self.trainer.rollouts["eval"])


class Projection:
    """
    A random projection of gradients that keeps inner products: a count sketch, seeded, with nothing stored.

    ⟨Πa, Πb⟩ is unbiased for ⟨a, b⟩, with a standard error of at most ‖a‖ ‖b‖ √(2 / dimension); where there are no more
    parameters than that, Π is the identity.

    Args:
        sizes (`list[int]`):
            Numbers of elements of the parameters.
        dimension (`int`):
            Of the result.
    """

    def __init__(self, sizes: list[int], dimension: int, seed: int = 0):
        self.exact = sum(sizes) <= dimension
        self.dimension = sum(sizes) if self.exact else dimension
        self.seed = seed

    def __call__(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """`(E, dimension)` float32, on the CPU, of E gradients: one tensor `(E, …)` per parameter."""
        flat = [gradient.flatten(1).float() for gradient in gradients]
        if self.exact:
            return torch.cat(flat, dim=1).cpu()
        device = flat[0].device
        result = torch.zeros(len(flat[0]), self.dimension, device=device)
        for i, gradient in enumerate(flat):
            random = torch.Generator(device=device).manual_seed(self.seed * 1_000_003 + i)
            place = torch.randint(2 * self.dimension, gradient.shape[1:], generator=random, device=device)
            sign = 1 - 2 * (place % 2)  # its parity
            result.index_add_(1, place // 2, gradient * sign)
        return result.cpu()


class WeightedScores:
    """
    Σ_t A_t ∇ log π(y_t) of one completion, for several A at once, in the parameters that are studied.

    A token's log-prob depends on the body of the model through the input of the LM head at its own position alone.
    So the head's backward pass is taken once, unless the head is studied, and each A weights what it yields.

    Args:
        model (`torch.nn.Module`):
            The policy.
        temperature (`float`):
            It is sampled at.
        parameters (`list[torch.nn.Parameter]`):
            Those that are studied.
        projection ([`Projection`]):
            Applied to every gradient.
    """

    def __init__(self, model, temperature: float, parameters: list[torch.nn.Parameter], projection: Projection):
        self.model, self.temperature, self.parameters, self.projection = model, temperature, parameters, projection
        head = model.get_output_embeddings()
        studied = {id(parameter) for parameter in parameters}
        self.small = sum(p.numel() for p in model.parameters()) <= SMALL
        self.head = head if head is not None and not studied & {id(p) for p in head.parameters()} else None
        self._prompt, self._prefix = None, None

    def __call__(self, rollout: Rollout, row: int, weights: torch.Tensor) -> torch.Tensor:
        """`(E, dimension)` for `weights` of shape `(E, T)`; those outside the rollout's mask are ignored."""
        prompt = rollout.prompt_ids[row][rollout.prompt_mask[row].bool()]
        length = int(rollout.completion_mask[row].sum())
        if length == 0:  # masked, as `mask_truncated_completions` does
            return torch.zeros(len(weights), self.projection.dimension)
        ids = torch.cat([prompt, rollout.completion_ids[row, :length]]).unsqueeze(0)
        weights = (weights * rollout.mask[row])[:, :length].float()
        inputs = []
        with torch.enable_grad():
            prefix = self._prefix_of(prompt)
            read = 0 if prefix is None else len(prompt) - 1
            cache = None if prefix is None else DynamicCache(prefix)
            hook = self.head and self.head.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
            logits = self.model(input_ids=ids[:, read:], past_key_values=cache, logits_to_keep=length + 1).logits
            logits = logits[0, :-1]
            logps = (logits.float() / self.temperature).log_softmax(dim=-1)
            logps = logps.gather(1, ids[0, -length:].unsqueeze(1)).squeeze(1)
        if hook:
            hook.remove()
            (hidden,) = inputs
            (score,) = torch.autograd.grad(logps.sum(), hidden)  # the last position has none
            pulls = torch.nn.functional.pad(weights, (0, 1))[:, None, :, None] * score
        else:
            hidden, pulls = logps, weights
        at_once = max(1, GRADIENTS // sum(parameter.numel() for parameter in self.parameters))
        return torch.cat([self._projected(hidden, some) for some in pulls.split(at_once)])

    def _projected(self, output: torch.Tensor, pulls: torch.Tensor) -> torch.Tensor:
        how = {"retain_graph": True, "allow_unused": True}
        if self.small:
            found = torch.autograd.grad(output, self.parameters, pulls.to(output.dtype), is_grads_batched=True, **how)
        else:
            one_by_one = [torch.autograd.grad(output, self.parameters, pull.to(output.dtype), **how) for pull in pulls]
            found = [None if of[0] is None else torch.stack(of) for of in zip(*one_by_one, strict=True)]
        stacked = [
            parameter.new_zeros(len(pulls), *parameter.shape) if gradients is None else gradients
            for parameter, gradients in zip(self.parameters, found, strict=True)
        ]
        return self.projection(stacked)

    def _prefix_of(self, prompt: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """
        Keys and values, layer by layer, of a long prompt but its last token. They are formed once for all of its
        completions; every backward pass goes through them. `None` for a short prompt or another kind of cache.
        """
        if self._prompt is None or not torch.equal(prompt, self._prompt):
            self._prompt, self._prefix = prompt, None
            if len(prompt) > SHORT_PROMPT:
                cache = self.model(input_ids=prompt[None, :-1], use_cache=True, logits_to_keep=1).past_key_values
                if type(cache) is DynamicCache and all(type(layer) is DynamicLayer for layer in cache.layers):
                    self._prefix = [(layer.keys, layer.values) for layer in cache.layers]
        return self._prefix


def prompt_moments(
    rollout: Rollout,
    scores: WeightedScores,
    studied: dict[int, list[Estimator]],
    deals: int = 20,
    seed: int = 0,
) -> dict:
    """
    The moments of a prompt's gradient, from a pool of its completions, for the estimators studied at each group size.

    The pool's halves are never mixed in a group, so that what is multiplied later comes from completions that are not
    shared. Estimators with one number per completion are combinations of the completions' own scores, and so come for
    many deals into groups; those with one per token take a backward pass per completion, for one deal. What that deal
    is off by is estimated by `ogb`, whose moments come for it and for all, and taken away: a control variate, which
    leaves expectations as they are.

    Returns:
        `dict`: `truth`, `(2, k)`: the gradient by each half, taken as one group under `ogb` with one left out, which
        has no bias and little noise; and for each `(name, N)` its `square`, the mean of ‖ĝ‖², and `mean`, `(2, k)`,
        the mean of ĝ by half. For baselines that compare prompts, `pool`, by [`pool_of`].
    """
    compared = any(estimator.across_prompts for of_size in studied.values() for estimator in of_size)
    studied = {n: [e for e in of_size if not e.across_prompts] for n, of_size in studied.items()}
    rng = torch.Generator().manual_seed(seed)
    halves = rollout.rows.chunk(2)
    dealt = {n: [[deal(half, n, rng) for half in halves] for _ in range(deals)] for n in studied}
    per_token = [(n, estimator) for n, of_size in studied.items() for estimator in of_size if estimator.per_token]
    weights = torch.ones(len(rollout), 1 + len(per_token), rollout.mask.size(1), device=rollout.mask.device)
    for i, (n, estimator) in enumerate(per_token, start=1):
        for rows in dealt[n][0]:
            weights[rows, i] = estimator.advantages(rollout, rows, n)
    own, *weighted = torch.stack([scores(rollout, row, weights[row]) for row in range(len(rollout))], dim=1)  # (M, k)
    of_tokens = dict(zip(((e.name, n) for n, e in per_token), weighted, strict=True))
    products = own.double() @ own.double().T

    def of_half(estimator: Estimator, n: int, deals: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """E‖ĝ‖² and Eĝ over the groups of `n` that each deal holds one after the other."""
        if estimator.per_token:
            gradients = of_tokens[estimator.name, n][deals[0].cpu()].unflatten(0, (-1, n)).mean(dim=1)
            control = Estimator("control", "ogb", leave_one_out=estimator.leave_one_out)
            of_one, of_all = of_half(control, n, deals[:1]), of_half(control, n, deals)
            found = gradients.double().square().sum(dim=1).mean(), gradients.mean(dim=0)
            return tuple(value + every - one for value, every, one in zip(found, of_all, of_one, strict=True))
        rows = torch.cat(deals)
        # A group's gradient is Σ_i c_i s_i, so its square needs the products of the completions' scores alone
        c = estimator.advantages(rollout, rows, n)[:, 0].cpu().double().view(-1, n) / n
        at = rows.cpu().view(-1, n)
        squares = torch.einsum("gi,gij,gj->g", c, products[at.unsqueeze(2), at.unsqueeze(1)], c)
        total = torch.zeros(len(own), dtype=c.dtype).index_add_(0, at.flatten(), c.flatten())
        return squares.mean(), (total / len(at)).to(own) @ own

    truth = Estimator("truth", "ogb", leave_one_out=True)
    moments = {"truth": torch.stack([of_half(truth, len(half), [half])[1] for half in halves])}
    if compared:
        moments["pool"] = pool_of(rollout, own)
    for n, of_size in studied.items():
        for estimator in of_size:
            of_halves = [of_half(estimator, n, list(deals)) for deals in zip(*dealt[n], strict=True)]
            squares, means = (torch.stack(of) for of in zip(*of_halves, strict=True))
            moments[estimator.name, n] = {"square": squares.mean().item(), "mean": means}
    return moments


def pool_of(rollout: Rollout, own: torch.Tensor) -> dict[str, torch.Tensor]:
    """What baselines that compare prompts need of one: its completions, and the gradient of each, `own`, `(M, k)`."""
    kept = {"rewards": rollout.rewards, "energy": rollout.energy, "mask": rollout.mask, "own": own}
    # A view would be saved with all that it is a view of
    return {name: values.detach().cpu().clone() for name, values in kept.items()}


def deal(half: torch.Tensor, n: int, rng: torch.Generator) -> torch.Tensor:
    """Rows of a half in random order, whole groups only."""
    return half[torch.randperm(len(half), generator=rng)[: len(half) // n * n]]
