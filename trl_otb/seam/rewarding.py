"""The rewards of a generation batch as GRPOTrainer uses them, and checks that they are the batch's."""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from trl import GRPOTrainer

from ..display.shown import ShownRollout
from ..rollout import Rollout, Shown, generated_mask
from .contract import trl_utils
from .forwards import scores_anyway
from .older_trl import is_async_callable
from .subclasses import contract_broken
from .token_rewards import RewardRecorder
from .unsloth import REPLACED


class Returns(NamedTuple):
    """The weighted rewards of all processes' completions, in order of process."""

    returns: Tensor  # (B_all,) weighted sums of (normalized) rewards; NaN if no function scored the completion
    # (B_all,) the divisor of advantages under `scale_rewards`; 1 for "none". Infinite where all returns that determine
    # it are equal, so that A = 0 without rounding errors
    scale: Tensor
    factors: Tensor  # (B_all, F) of each function's rewards
    group_mean_advantages: Tensor  # (B_all,) those that GRPOTrainer forms


def weigh_rewards(
    rewards_per_func: Tensor, weights: Tensor, num_generations: int, scale_rewards: str, aggregation: str
) -> Returns:
    """
    From `(B_all, F)` rewards of `GRPOTrainer._calculate_rewards`, `reward_weights`, and options of [`~trl.GRPOConfig`].
    A `ValueError` if finite rewards have a sum or standard deviation that is not finite.
    """
    weights = weights.to(rewards_per_func.device)
    factors = weights.expand_as(rewards_per_func)
    unscored = rewards_per_func.isnan().all(dim=1)
    normalize_first = aggregation == "normalize_then_sum"
    if normalize_first:
        grouped = rewards_per_func.view(-1, num_generations, rewards_per_func.size(1))
        std = _nanstd(grouped, dim=1)
        grouped = (grouped - grouped.nanmean(dim=1, keepdim=True)) / (std.unsqueeze(1) + 1e-4)
        # 0 where a function scored one completion of a group, as in GRPOTrainer
        factors = (factors / (std + 1e-4).repeat_interleave(num_generations, dim=0)).nan_to_num(nan=0.0)
        rewards_per_func = grouped.view_as(rewards_per_func)
    returns = (rewards_per_func * weights).nansum(dim=1)
    returns[unscored] = torch.nan
    sets = returns.view(-1, num_generations)  # whose deviation is the scale
    mean = sets.nanmean(dim=1).repeat_interleave(num_generations)
    if normalize_first or scale_rewards == "batch":
        sets, mean = returns.view(1, -1), returns.nanmean() if normalize_first else mean
    scale = _nanstd(sets, dim=1).repeat_interleave(sets.size(1)) + 1e-4
    highest, lowest = sets.nan_to_num(nan=-torch.inf).amax(dim=1), sets.nan_to_num(nan=torch.inf).amin(dim=1)
    if scale_rewards == "none" and not normalize_first:
        scale, lowest = torch.ones_like(returns), lowest - torch.inf
    if (broken := returns.isinf() | scale.isinf()).any():
        row = int(broken.nonzero()[0])
        what = "weighted sum of rewards" if returns[row].isinf() else "standard deviation of returns"
        raise ValueError(
            f"Completion {row} of all processes has a {what} that is not finite in float32, which holds up to 3.4e+38 "
            "and squares of up to 1.8e+19. Scale the rewards, or `reward_weights`, down."
        )
    advantages = ((returns - mean) / scale).nan_to_num(nan=0.0)
    scale = scale.masked_fill((highest <= lowest).repeat_interleave(sets.size(1)), torch.inf)
    return Returns(returns, scale.nan_to_num(nan=torch.inf, posinf=torch.inf), factors, advantages)


def _nanstd(x: Tensor, dim: int) -> Tensor:
    """Standard deviation ignoring NaN; 0 for a single value, as in GRPOTrainer."""
    return trl_utils.nanstd(x, dim=dim) if x.size(dim) > 1 else torch.zeros_like(x.select(dim, 0))


class _Summing:
    """
    GRPOTrainer's own `_calculate_rewards`, to which all others lead, for the trainers in `recorders`: it gets functions
    that return sums, as it cannot handle rewards per turn or token, while all others read what the user gave. It is in
    the place of TRL's as long as any trainer, in any thread, is in a context of [`recorded_rewards`].
    """

    lock = threading.Lock()
    recorders: ClassVar[dict[int, list[RewardRecorder]]] = {}  # by id of the trainer
    of_trl: Any = None

    @classmethod
    @contextmanager
    def of(cls, trainer: GRPOTrainer, recorders: list[RewardRecorder]) -> Iterator[None]:
        with cls.lock:
            if not cls.recorders:
                cls.of_trl = of_trl = GRPOTrainer._calculate_rewards
                method = functools.wraps(of_trl)(lambda self, *args, **kwargs: cls.call(of_trl, self, *args, **kwargs))
                GRPOTrainer._calculate_rewards = method
            before = cls.recorders.get(id(trainer))
            cls.recorders[id(trainer)] = recorders
        try:
            yield
        finally:
            with cls.lock:
                del cls.recorders[id(trainer)]
                cls.recorders |= {} if before is None else {id(trainer): before}
                if not cls.recorders:
                    GRPOTrainer._calculate_rewards = cls.of_trl

    @classmethod
    def call(cls, of_trl: Any, trainer: GRPOTrainer, *args: Any, **kwargs: Any) -> Any:
        if not (recorders := cls.recorders.get(id(trainer))):
            return of_trl(trainer, *args, **kwargs)
        summing = [
            of if isinstance(of, torch.nn.Module) else recorders[-1].wrap(i, name, of, is_async_callable(of))
            for i, (of, name) in enumerate(zip(trainer.reward_funcs, trainer.reward_func_names, strict=True))
        ]
        with patch.object(trainer, "reward_funcs", summing):
            return of_trl(trainer, *args, **kwargs)


@contextmanager
def recorded_rewards(trainer: GRPOTrainer) -> Iterator[list[RewardRecorder]]:
    """
    Context in which a recorder is appended to the yielded list for each call of the trainer's `_calculate_rewards`,
    even a subclass's.
    """
    recorders: list[RewardRecorder] = []
    with _Summing.of(trainer, recorders):
        calculate = trainer._calculate_rewards

        def outermost(*args: Any, **kwargs: Any) -> Any:
            completion_ids = args[3] if len(args) > 3 else kwargs["completion_ids_list"]
            # Copies, as a function may change the lists that it gets
            ids = [torch.tensor(of_row, dtype=torch.long) for of_row in completion_ids]
            recorders.append(RewardRecorder(ids, trainer.reward_weights.tolist()))
            recorders[-1].rewards_per_func = rewards = calculate(*args, **kwargs)
            return rewards

        with patch.object(trainer, "_calculate_rewards", outermost):
            yield recorders


def rollout_of(
    trainer: GRPOTrainer,
    batch: dict[str, Any],
    recorders: list[RewardRecorder],
    num_generations: int,
    columns: tuple[dict[str, Any], ...],
) -> Rollout:
    """The rollout of TRL's `batch`, after a check that it holds what was rewarded, with TRL's advantages."""

    def broken(what: str) -> Exception:
        return contract_broken(trainer, what, "_generate_and_score_completions", "_calculate_rewards")

    rewards_per_func = recorders[-1].rewards_per_func if recorders else None
    if rewards_per_func is None:
        raise broken("rewards no longer come from `GRPOTrainer._calculate_rewards`")
    if missing := missing_keys(trainer, batch):
        raise broken(f"a generation batch has no {', '.join(map(repr, missing))}")
    recorder, options = recorders[-1], (trainer.scale_rewards, trainer.multi_objective_aggregation)
    weighed = weigh_rewards(rewards_per_func, trainer.reward_weights, num_generations, *options)
    ids, rewarded = batch["completion_ids"].cpu(), recorder.completion_ids
    first = trainer.accelerator.process_index * len(ids)
    local = slice(first, first + len(ids))
    if len(ids) != len(rewarded):
        raise broken(f"{len(rewarded)} completions were rewarded and {len(ids)} are to be trained on")
    for row, of_row in enumerate(rewarded):
        if not torch.equal(ids[row, : len(of_row)], of_row):
            raise broken(f"completion {row} of a rollout is not the one that was rewarded in its place")
    expected, actual, scale = weighed.group_mean_advantages[local], batch["advantages"], weighed.scale[local]
    if actual.shape != expected.shape:
        raise broken(
            f"GRPOTrainer's advantages have the shape {(*expected.shape,)}, one per completion, and those of a rollout "
            f"{(*actual.shape,)}, which the baseline would replace"
        )
    difference = ((expected - actual) * scale.nan_to_num(posinf=1.0)).abs()
    if (difference > 1e-5 * (1 + weighed.returns.abs().nan_to_num(nan=0.0).max())).any():
        row = int(difference.argmax())
        raise broken(
            f"how GRPOTrainer forms its advantages: for completion {row} of a rollout it has {actual[row].item():.6g}, "
            f"and the rewards, weights and scale that trl_otb relies on give {expected[row].item():.6g}"
        )
    if trainer.baseline.running_scale is not None:  # alone, also where TRL divides by the batch's deviation
        scale = torch.ones_like(scale)
    rewards, mask = weighed.returns[local], generated_mask(batch)
    along_the_way = torch.tensor([bool(recorder)], device=rewards.device)
    if trainer.accelerator.gather(along_the_way).any():
        of_tokens = recorder.token_rewards(mask, rewards, weighed.factors[local])
        rewards = rewards if getattr(trainer.args, "credit_whole_return", False) else of_tokens
    return ShownRollout(
        **{key: batch[key] for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")},
        mask=mask,
        num_generations=num_generations,
        rewards=rewards,
        scale=scale.unsqueeze(1),
        returns_of_all=weighed.returns,
        first_row=first,
        shown=Shown(
            processing_class=trainer.processing_class,
            step=trainer.state.global_step + trainer.model.training,
            baseline_name=trainer.baseline.entry.name,
            rewards_per_func=rewards_per_func[local],
            reward_names=tuple(trainer.reward_func_names),
            columns=columns,
        ),
    )


def missing_keys(trainer: GRPOTrainer, batch: dict[str, Any]) -> list[str]:
    """The keys of a generation batch that the trainer's options promise, and that are not there."""
    promised = dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"), True)
    promised["old_per_token_logps"] = scores_anyway(trainer)
    corrected = trainer.use_vllm and trainer.args.vllm_importance_sampling_correction
    promised["sampling_per_token_logps"] = corrected
    promised["importance_sampling_ratio"] = corrected and not REPLACED  # Unsloth's loss forms it by itself
    promised["tool_mask"] = bool(trainer.tools)
    return [key for key, expected in promised.items() if expected and key not in batch]
