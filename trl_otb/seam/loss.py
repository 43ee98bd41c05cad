"""The loss for advantages per token, and a check that TRL's loss takes them."""

import copy
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import torch
from accelerate.logging import get_logger
from torch import Tensor
from trl import GRPOTrainer

from ..rollout import generated_mask
from . import unsloth
from .contract import from_library, incompatible_trl
from .subclasses import contract_broken, users_loss
from .untried import check_rows, unequal_advantages


logger = get_logger(__name__)

WITHOUT_TOKENS = (
    "GRPOTrainer's loss takes one advantage per completion. Each token gets its own by the gradients of this loss for "
    "advantages of 1, -1 and 0; the logged loss and clip ratios are those of the completions' mean advantages."
)


class TokenLoss(GRPOTrainer):
    """
    A [`~trl.GRPOTrainer`] whose loss takes one advantage per token, `(B, T)`, with all of its options.

    GSPO (`importance_sampling_level="sequence"`) weights a completion by s = exp(mean_t log π(y_t)/π_old(y_t)), one
    ratio for all tokens, so every token gets the completion's advantage. GSPO-token (https://arxiv.org/abs/2507.18071,
    section 4.3) uses sg[s] · π(y_t) / sg[π(y_t)], where sg stops the gradient: its value is s, its gradient the
    token's own. With one advantage per completion the two have the same gradient. TRL's loss with ratios per token
    computes this if the old log-probs are sg[log π(y_t)] − log s.
    """

    _trl_otb: Any  # the Namespace, which is made of what is above the loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        shape, rows = tuple(inputs["advantages"].shape), tuple(inputs["completion_mask"].shape)
        if shape not in (rows[:1], rows):
            raise TypeError(
                f"`inputs['advantages']` has shape {shape}, and the completions {rows}: something between rollout and "
                f"loss, such as a method of {type(self).__name__}, reshaped it. The loss takes {rows[:1]} or {rows}."
            )
        per_token, of = len(shape) > 1, self._trl_otb
        unknown = of.known_loss is not GRPOTrainer._compute_loss
        if unknown and (per_token or from_library(GRPOTrainer._compute_loss)):  # a user's own of (B,) is not tried
            check_rows(self, inputs, of.rollouts.get("train" if self.model.training else "eval"))
            self._try_loss(inputs)
        if per_token and of.by_sign:
            return self._loss_by_sign(model, inputs)
        if self.importance_sampling_level != "sequence" or not per_token:
            return super()._compute_loss(model, inputs)
        inputs = dict(inputs)  # the micro-batch is used again
        score = self._get_per_token_logps_and_entropies

        def spreading(*args: Any, **kwargs: Any) -> Any:
            logps, *others = score(*args, **kwargs)
            _spread_sequence_ratio(inputs, logps)
            return logps, *others

        with (
            patch.object(self, "_get_per_token_logps_and_entropies", spreading),
            patch.object(self, "importance_sampling_level", "token"),
        ):
            return super()._compute_loss(model, inputs)

    def _try_loss(self, inputs: dict[str, Any]) -> None:
        """Find out whether GRPOTrainer's loss takes these advantages, or else one per completion."""
        of = self._trl_otb
        try:
            known, of.by_sign = check_trl_loss(self, inputs), False
        except ImportError as refused:
            if inputs["advantages"].dim() == 1:
                raise
            known, of.by_sign = check_trl_loss(self, inputs | {"advantages": inputs["advantages"][:, 0]}), True
            logger.warning_once(f"{WITHOUT_TOKENS} ({str(refused).partition(': ')[2].partition('. Install')[0]})")
        if known:
            of.known_loss = GRPOTrainer._compute_loss

    def _loss_by_sign(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """
        The loss with one advantage per token where GRPOTrainer's takes one per completion. Its gradients at the
        log-probs for advantages of 0, 1 and -1 give that of each token by the sign of its own advantage, times its
        size, also where TRL decides by the sign of a completion's. Value and metrics are those of the completions' mean
        advantages.
        """
        advantages, score, outputs = inputs["advantages"], self._get_per_token_logps_and_entropies, list[Any]()

        def once(*args: Any, **kwargs: Any) -> Any:
            outputs[:] = outputs or score(*args, **kwargs)
            return tuple(outputs)

        mean = _completion_advantage(advantages, generated_mask(inputs))[:, 0]
        with patch.object(self, "_get_per_token_logps_and_entropies", once):
            loss = super()._compute_loss(model, inputs | {"advantages": mean})
        logps, *others = (of.detach() if isinstance(of, Tensor) else of for of in outputs)
        logps.requires_grad_()

        def gradient(of_completions: Tensor) -> Tensor:
            probe = _copied(self)
            probe._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logps, *others)
            value = GRPOTrainer._compute_loss(probe, model, inputs | {"advantages": of_completions})
            return torch.autograd.grad(value, logps)[0]

        ones = torch.ones_like(mean)
        with torch.enable_grad():
            at_zero, at_one, at_minus_one, at_mean = map(gradient, (0 * ones, ones, -ones, mean))
        slope = torch.where(advantages > 0, at_one - at_zero, at_zero - at_minus_one)
        difference = ((at_zero + advantages * slope - at_mean) * outputs[0]).sum()
        return loss + difference - difference.detach()

    # Both use the sign of a completion's advantage, so they get one advantage per completion

    @classmethod
    def get_off_policy_mask(
        cls,
        advantages: Tensor,
        per_token_logps: Any,
        sampling_per_token_logps: Any,
        mask: Tensor,
        *args: Any,
        **of: Any,
    ) -> Tensor:
        advantages = _completion_advantage(advantages, mask)
        return super().get_off_policy_mask(advantages, per_token_logps, sampling_per_token_logps, mask, *args, **of)

    @classmethod
    def get_gamma_weights(
        cls, advantages: Tensor, log_ratio_per_token: Tensor, mask: Tensor, *args: Any, **of: Any
    ) -> Tensor:
        return super().get_gamma_weights(
            _completion_advantage(advantages, mask), log_ratio_per_token, mask, *args, **of
        )


def _spread_sequence_ratio(inputs: dict[str, Any], logps: Tensor) -> None:
    """Set the micro-batch's old log-probs so that each token's ratio is its sequence's."""
    old_logps = inputs.get("old_per_token_logps")
    if old_logps is None:  # on-policy: all ratios are 1
        return
    mask, logps = generated_mask(inputs), logps.detach()
    log_ratio = ((logps - old_logps) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    inputs["old_per_token_logps"] = logps - log_ratio


def _completion_advantage(advantages: Tensor, mask: Tensor) -> Tensor:
    """(B, 1) mean advantage of a completion's generated tokens."""
    return (advantages * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def check_trl_loss(trainer: GRPOTrainer, inputs: dict[str, Any]) -> bool:
    """[`check_product`] of GRPOTrainer's loss of a micro-batch, without old log-probs, so that nothing is clipped."""
    inputs = _uncut({key: value for key, value in inputs.items() if key != "old_per_token_logps"})
    mask, shape = generated_mask(inputs), inputs["advantages"].shape

    def loss(probe: Any, forward: Callable, advantages: Tensor) -> Tensor:
        probe._get_per_token_logps_and_entropies, probe.importance_sampling_level = forward, "token"
        probe.off_policy_mask_threshold, probe.top_entropy_quantile = None, 1.0  # which leave out tokens
        advantages = advantages.view(len(mask), -1).expand(mask.shape)[:, : tokens.size(1)].reshape(shape)
        return GRPOTrainer._compute_loss(probe, trainer.model, inputs | {"advantages": advantages})

    def wrong(problem: str) -> Exception:
        return contract_broken(trainer, problem, "_get_per_token_logps_and_entropies")

    tokens = mask if len(shape) > 1 else mask[:, :1]
    name, as_it_is = "GRPOTrainer._compute_loss", lambda gradient: gradient
    scoring = _scoring(_copied(trainer))
    return check_product(name, trainer, scoring, loss, tokens, as_it_is, wrong, trained=mask)


def trial_of_loss(trainer: GRPOTrainer) -> AbstractContextManager[None]:
    """Context in which a loss that is not TRL's is tried, once, if advantages are per token."""
    if not trainer.baseline.entry.per_token or trainer._trl_otb.users_loss_was_tried:
        return nullcontext()
    if unsloth.REPLACED:
        return unsloth.loss_tried(trainer, unsloth.LOSS)
    loss = users_loss(trainer, tried="_compute_loss")
    return nullcontext() if loss is None else tried_first(trainer, loss)


@contextmanager
def tried_first(trainer: GRPOTrainer, name: str) -> Iterator[None]:
    """
    Context in which `compute_loss` of a trainer whose class sets `takes_token_advantages` is tried when it is called:
    its gradient must weight the log-prob of each token by its own advantage, see [`check_product`], or a `TypeError`
    that calls the loss `name` is raised. For the trial it is called on a copy of the trainer, three times, with
    advantages `(B, T)` and the log-probs of one `_get_per_token_logps_and_entropies`. If it has log-probs from
    elsewhere, a warning says that it was not tried.
    """
    compute_loss = trainer.compute_loss

    def wrong(problem: str) -> Exception:
        return TypeError(
            f"`takes_token_advantages` is set, and {problem}. Multiply the log-prob of each token by its own number of "
            "`inputs['advantages']`, (B, T); what depends on other advantages, such as a division by their deviation, "
            "belongs in `_generate_and_score_completions`. Or choose a baseline per completion, such as 'rloo'."
        )

    def tried(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        mask, uncut = generated_mask(inputs), _uncut(inputs)

        def loss(probe: Any, forward: Callable, advantages: Tensor) -> Tensor:
            probe._get_per_token_logps_and_entropies = counted = Mock(side_effect=forward)
            of_tokens = advantages.view(len(mask), -1) * mask
            value = _rebound(compute_loss, probe)(model, uncut | {"advantages": of_tokens}, *args, **kwargs)
            if not counted.called:
                raise NotTriedError
            return value

        try:
            found = check_product(
                name, trainer, _scoring(_copied(trainer)), loss, mask, partial(torch.mul, mask), wrong
            )
        except NotTriedError:
            found = True
            logger.warning_once(
                f"`{name}` does not take log-probs from `_get_per_token_logps_and_entropies`, so it could not be "
                "tried whether it weights each token by its own advantage."
            )
        trainer._trl_otb.users_loss_was_tried = found
        return compute_loss(model, inputs, *args, **kwargs)

    with patch.object(trainer, "compute_loss", tried):
        yield


def _uncut(inputs: dict[str, Any]) -> dict[str, Any]:
    """With importance ratios of 1, as where they are 0 advantages have no effect."""
    return {key: torch.ones_like(of) if key == "importance_sampling_ratio" else of for key, of in inputs.items()}


def _scoring(trainer: GRPOTrainer) -> Callable[..., tuple[Any, Tensor]]:
    """The trainer's scoring forward; the log-probs are a leaf, which is returned a second time."""

    def forward(*args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        logps, *others = score(*args, **kwargs)
        leaf = logps.detach().float().requires_grad_()
        return (leaf, *others), leaf

    score = trainer._get_per_token_logps_and_entropies
    return forward


def _copied(trainer: Any) -> Any:
    """A copy with collections of its own, whose metrics and controllers a call may change."""
    copied = copy.copy(trainer)
    for name, value in vars(trainer).items():
        vars(copied)[name] = copy.copy(value) if isinstance(value, list | dict | set) else _rebound(value, copied)
    copied._metrics = copy.deepcopy(trainer._metrics)
    return copied


def _rebound(value: Any, trainer: Any) -> Any:
    """A method of a trainer as one of its copy; all else as it is."""
    of_trainer = isinstance(value, types.MethodType) and isinstance(value.__self__, GRPOTrainer)
    return types.MethodType(value.__func__, trainer) if of_trainer else value


class NotTriedError(Exception):
    """A loss does not call the forward that a trial has for it."""


def _problem_of(slopes: tuple[Tensor, Tensor], errors: Tensor) -> str:
    """What is wrong with a gradient's slopes for positive and negative advantages, or its errors for mixed ones."""
    positive, negative = (of.abs().max().item() for of in slopes)
    size, error = max(positive, negative), errors.abs().max().item()
    if max(of.max().item() for of in slopes) > 1e-3 * size:
        return ": its gradient rises with the advantage, as with a flipped sign, where it should fall"
    if not error <= 1e-3 * size:  # or it is NaN
        return f": its gradient is off by {error:.3g} of {size:.3g}"
    if min(positive, negative) == 0 < size:
        return f": {'positive' if positive == 0 else 'negative'} advantages have no effect"
    return ""


def check_product(
    name: str,
    trainer: Any,
    forward: Callable[..., tuple[Any, Tensor]],
    loss: Callable[[Any, Callable, Tensor], Tensor],
    tokens: Tensor,
    of_tokens: Callable[[Tensor], Tensor],
    wrong: Callable[[str], Exception] = incompatible_trl,
    trained: Tensor | None = None,
) -> bool:
    """
    Raise an error, `wrong` of the problem, on all processes, unless the gradient of the `loss` called `name` with
    respect to log-probs is linear in each token's own advantage where it is positive, and where it is negative, and
    falls with it: from the gradients for advantages of 0, 1 and -1 that for the advantages `mixed` follows. Takes one
    `forward` without gradient, which returns its result and in it the log-probs as a leaf; trainer and random numbers
    stay as they are. `of_tokens` makes a gradient of the leaf look like `tokens`. If `trained` is given, 1 or 0 for
    each of them, advantages must have an effect on those that are 1, and on no others. Returns whether advantages have
    an effect on all processes.
    """
    zeros = torch.zeros(len(tokens), device=tokens.device)  # and ones, one for each row
    order = torch.arange(tokens.numel(), device=tokens.device).view_as(tokens)
    mixed = unequal_advantages(order)
    probe, computed = _copied(trainer), list[tuple[Any, Tensor]]()
    probe.off_policy_mask_threshold = None  # which drops completions of negative advantage

    def once(*args: Any, **kwargs: Any) -> Any:
        if not computed:
            with torch.no_grad(), torch.random.fork_rng([zeros.device] if zeros.is_cuda else []):
                computed.append(forward(*args, **kwargs))
        return computed[0][0]

    def gradient(advantages: Tensor) -> Tensor:
        value = loss(probe, once, advantages)
        return of_tokens(torch.autograd.grad(value, computed[0][1])[0])

    problem, effect = "", False
    try:
        with torch.enable_grad():
            at_zero, at_one, at_minus_one, at_mixed = map(gradient, (zeros, zeros + 1, zeros - 1, mixed))
        slopes = at_one - at_zero, at_zero - at_minus_one
        problem = _problem_of(slopes, at_mixed - at_zero - mixed * torch.where(mixed > 0, *slopes))
        effect = bool(slopes[0].any())
        if not (effect or problem) and at_zero.any():
            problem = ": they have no effect"
        if effect and not problem and trained is not None and not torch.equal(slopes[0] != 0, trained.bool()):
            problem = ": it leaves out generated tokens, or takes others in"
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:  # as of shapes
        problem = f": {type(error).__name__}: {error}"
    failed, found = trainer.accelerator.gather(torch.tensor([[problem != "", effect]], device=zeros.device).long()).T
    if failed.any():
        raise wrong(f"`{name}` does not weight each token by its own advantage{problem}")
    return bool(found.all())
