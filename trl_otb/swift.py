"""
Baselines for ms-swift's GRPO: a file of yours, which its command line loads by `--external_plugins`, holds

    import trl_otb.swift

    trl_otb.swift.use("value", running_scale=True)

It needs no other TRL than the one that ms-swift pins, of which nothing is imported here.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import swift
import torch
from swift.rlhf_trainers import grpo_trainer
from swift.rlhf_trainers.grpo_trainer import GRPOTrainer, gather
from swift.trainers.trainer_factory import TrainerFactory
from swift.utils import get_logger
from torch import Tensor

from .baselines import Baseline, find_baseline, put_back, squeeze
from .baselines.prefix import projection, state_layer
from .energy import TokenValues, check_energies, log_sum_sq_probs, token_energy
from .run.baseline import STATE_FILE, RunBaseline, reference_of
from .run.gain import Gain
from .run.metrics import summarize
from .run.sampler import changed_distribution, dropout_of, warning_of_dropout


logger = get_logger()

TRIED = "4.6.0"


class Options(NamedTuple):
    """What a run is trained with, beside ms-swift's own options."""

    baseline: Baseline
    running_scale: bool


def use(baseline: Any, *, running_scale: bool = False) -> None:
    """
    Let `--rlhf_type grpo` train with a baseline.

    Args:
        baseline (`str` or `Callable`): As in [`~trl_otb.baselines.find_baseline`].
        running_scale (`bool`, *optional*): Whether to divide advantages by the deviation of returns within groups of
            earlier batches. With `--scale_rewards none` alone.

    Raises:
        ValueError: There is no such baseline.
    """
    OTBTrainer.options = Options(find_baseline(baseline), running_scale)
    TrainerFactory.TRAINER_MAPPING["grpo"] = f"{__name__}.{OTBTrainer.__name__}"


class OTBTrainer(GRPOTrainer):
    """ms-swift's GRPO trainer with a baseline. Energies and states are of the forward that scores batches anyway."""

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        entry, running = self.options
        for problem in conflicts(self, entry, running):
            raise ValueError(problem)
        self._otb, self._otb_gain = RunBaseline(entry, running), Gain()
        self._otb_values: list[TokenValues] = []  # of the forwards that score a batch, of a reference model, too

    def train(self, *args: Any, **kwargs: Any) -> Any:
        entry, running = self._otb.entry, self._otb.running_scale is not None
        scale = "running" if running else self.scale_rewards
        logger.info(f"Training with baseline {entry.name!r} and scale_rewards {scale!r}.")
        if entry.name == "value" and (dropout := dropout_of(self.model)):
            logger.warning(warning_of_dropout(dropout, "ms-swift"))
        result, reference = super().train(*args, **kwargs), reference_of(entry, self.num_generations)
        line = self._otb_gain.line(entry.name, "rloo_pooled", None if entry.name == reference else reference)
        if line:
            logger.info(line.partition(" `trl_otb.compare_baselines")[0])  # which takes a trainer of TRL's
        return result

    def _get_per_token_logps_and_entropies(
        self, model: Any, model_inputs: Any, grpo_batch: Any, compute_entropy: bool = False, **kwargs: Any
    ) -> Any:
        of = super()._get_per_token_logps_and_entropies
        if torch.is_grad_enabled() or compute_entropy:
            return of(model, model_inputs, grpo_batch, compute_entropy=compute_entropy, **kwargs)
        # Where ms-swift computes entropies, it has the logits of each token, and brings the result into its place
        sums = patch.object(grpo_trainer, "entropy_from_logits", log_sum_sq_probs)
        with sums, states_of(self.model if "states" in self._otb.entry.needs else None) as states:
            logps, log_sums = of(model, model_inputs, grpo_batch, compute_entropy=True, **kwargs)
        self._otb_values.append(TokenValues(token_energy(logps, log_sums), logps, states_at(states, logps)))
        return logps, None

    def _prepare_batch_inputs(self, samples: Any) -> Any:
        self._otb_values.clear()
        return super()._prepare_batch_inputs(samples)

    def _postprocess_batch(self, samples: Any, batch_encoded_inputs: Any) -> None:
        super()._postprocess_batch(samples, batch_encoded_inputs)
        mode, entry = "train" if self.model.training else "eval", self._otb.entry
        n = self.num_generations if mode == "train" else self.num_generations_eval
        batches = [of["grpo_batch"] for of in batch_encoded_inputs]
        for problem in conflicts_of_batch(self, batches):
            raise ValueError(problem)
        longest = max(of.completion_mask.size(1) for of in batches)

        def joined(values: Any) -> Tensor:
            return torch.cat([padded(of, longest) for of in values])

        mask = joined(of.completion_mask for of in batches).bool()
        if self.overlong_filter:
            mask &= ~torch.cat([of.truncated_mask for of in batches]).unsqueeze(1)
        # By identity, so never those of a reference model
        known = {id(of.logps): of for of in self._otb_values}
        values = [known[id(of.old_per_token_logps)] for of in batches]
        energy, logps = joined(of.energy for of in values), joined(of.logps for of in values)
        check_energies(energy, mask)
        unknown = why_unknown(self)
        if "logps" in entry.needs and unknown:
            logger.warning_once(f"Later luck is not subtracted: {unknown}.")
        rewards = (self._rewards_per_func * self.reward_weights.unsqueeze(0)).nansum(dim=1)
        first = self.accelerator.process_index * len(mask)
        rows = slice(first, first + len(mask))
        local = squeeze(
            rewards[rows],
            mask,
            n,
            first_row=first,
            energy=energy,
            logps=logps,
            states=joined(of.states for of in values) if "states" in entry.needs else None,
            draw_ratio=torch.zeros_like(energy) if unknown else None,
        )
        found = self._otb.advantages_of(
            local,
            scale_of(rewards, n, self.scale_rewards)[rows],
            gather=gather if self.accelerator.num_processes > 1 else None,
            first_row=first,
            returns=rewards,
            learn=mode == "train",
        )
        advantages, sizes = put_back(found.advantages, mask), [len(of.completion_mask) for of in batches]
        for of, of_batch in zip(batches, advantages.split(sizes), strict=True):
            of.advantages = of_batch[:, : of.completion_mask.size(1)]
        for name, value in (summarize(found.statistics, n) | found.learned).items():
            if not math.isnan(value):  # what is undefined is left out
                self._metrics[mode][f"otb/{name}"].append(value)
        if mode == "train":
            self._otb_gain.add_statistics(found.statistics, found.learned)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save and (state := self._otb.state_dict()):
            torch.save(state, Path(output_dir) / STATE_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or self.args.resume_only_model:
            return
        path = Path(checkpoint) / STATE_FILE
        state = torch.load(path, weights_only=True, map_location="cpu") if path.exists() else {}
        if not self._otb.load_state_dict(state):
            logger.warning(
                f"{path} holds no state of baseline {self._otb.entry.name!r}, which starts with empty state."
            )


def conflicts(trainer: GRPOTrainer, entry: Baseline, running: bool) -> Iterator[str]:
    """What does not go with a baseline: option, value, reason and remedy."""
    name, scale, template = entry.name, trainer.scale_rewards, trainer.template
    if not hasattr(grpo_trainer, "entropy_from_logits"):
        yield (
            f"ms-swift {swift.__version__} has no `grpo_trainer.entropy_from_logits`, in whose place energies are "
            f"computed. Install ms-swift=={TRIED}, or a newer trl_otb."
        )
    if template.sequence_parallel_size > 1:
        yield (
            f"`--sequence_parallel_size` is {template.sequence_parallel_size}, which cuts completions, whose energies "
            "trl_otb adds up. Set it to 1, or leave trl_otb's plugin out."
        )
    if template.padding_free and "states" in entry.needs:
        yield (
            f"`--padding_free` is true, which joins completions to one row, and baseline {name!r} reads hidden states "
            "by row. Set it to false, or choose a baseline without states, such as 'otb' or 'rloo_pooled'."
        )
    if scale == "gdpo" or (scale != "none" and (running or not entry.scalable)):
        yield (
            f"`--scale_rewards` is {scale!r} (ms-swift's default is 'group'), which baseline {name!r}"
            f"{' with `running_scale`' if running else ''} does not allow: advantages are not 0 where returns are "
            "nearly equal, or are scaled already. Set `--scale_rewards none`."
        )
    if trainer.advantage_estimator != "grpo":
        yield (
            f"`--advantage_estimator` is {trainer.advantage_estimator!r}, in whose place baseline {name!r} stands. "
            "Leave it out, or choose `trl_otb.swift.use('rloo')`."
        )
    if trainer.kl_in_reward and trainer.beta != 0:
        yield "`--kl_in_reward` is true: the baseline sees rewards without it. Set it to false."
    if trainer.num_generations == 1 and entry.scope == "group" and name != "none":
        yield (
            f"`--num_generations` is 1, and baseline {name!r} compares the completions of a prompt. Choose 'value', "
            "'rloo_pooled' or 'ogb_pooled', which compare prompts, or 2 completions."
        )
    if missing := entry.needs & {"prompt_key"}:
        yield f"Baseline {name!r} reads {sorted(missing)}, which is not known in ms-swift. Choose another."
    if not entry.per_token:
        return
    if trainer.importance_sampling_level == "sequence":
        yield (
            f"`--importance_sampling_level` is 'sequence', of one ratio per completion, and baseline {name!r} gives "
            "each token its own advantage. Set 'sequence_token', whose ratio is the same."
        )
    if trainer.loss_type in ("real", "fipo"):
        yield (
            f"`--loss_type` is {trainer.loss_type!r}, which compares completions by one advantage each, and baseline "
            f"{name!r} gives each token its own. Choose another loss, or a baseline per completion, such as 'rloo'."
        )
    if trainer.use_liger_loss:
        yield (
            f"`--use_liger_kernel` is true, whose loss takes one advantage per completion, and baseline {name!r} gives "
            "each token its own. Set it to false, or choose a baseline per completion, such as 'rloo'."
        )


def conflicts_of_batch(trainer: GRPOTrainer, batches: list[Any]) -> Iterator[str]:
    """What does not go with a baseline, and is known of a rollout alone."""
    if trainer.dynamic_num_samples:
        yield (
            "The multi-turn scheduler returned another number of samples than of requests, so that groups have unequal "
            "sizes. Use a scheduler that returns one sample per request, or leave trl_otb's plugin out."
        )
    if any(of.teacher_per_token_logps is not None for of in batches):
        yield (
            "A teacher (`--teacher_model`, `--teacher_model_server` or a column `teacher_prompt`) adds to advantages "
            "that a baseline would replace. Leave the teacher or trl_otb's plugin out."
        )


def why_unknown(trainer: GRPOTrainer) -> str | None:
    """Why tokens may come from another distribution than that of the log-probs, or None."""
    if trainer.args.use_vllm:
        return "tokens come from vLLM, with other rounding or other weights"
    if dropout := dropout_of(trainer.model):
        return f"tokens were sampled with another dropout mask ({dropout})"
    return changed_distribution(trainer.args)


@contextmanager
def states_of(model: Any) -> Iterator[list[Tensor]]:
    """Context in which forwards of a model, if it is given, append projected hidden states to the yielded list."""
    states: list[Tensor] = []

    def record(module: Any, args: Any, output: Any) -> None:
        of_layer = (output if isinstance(output, Tensor) else output[0]).float()
        states.append(of_layer @ projection(of_layer.size(-1)).to(of_layer.device))

    policy = model.get_base_model() if hasattr(model, "get_base_model") else model
    hook = None if model is None else state_layer(policy.get_decoder()).register_forward_hook(record)
    try:
        yield states
    finally:
        if hook is not None:
            hook.remove()


def states_at(states: list[Tensor], logps: Tensor) -> Tensor | None:
    """`(b, T, k)` the states that predict the tokens; a `ValueError` if the layer was called in another way."""
    if not states:
        return None
    of_tokens = torch.cat(states)[:, -logps.size(1) - 1 : -1]
    if of_tokens.shape[:2] != logps.shape:
        raise ValueError(
            f"The baseline expected hidden states for {tuple(logps.shape)} rows and tokens, and the model's layer gave "
            f"{tuple(of_tokens.shape[:2])}: this model is not supported. Choose a baseline that needs no states, such "
            "as 'rloo_pooled'."
        )
    return of_tokens


def scale_of(rewards: Tensor, num_generations: int, scale: str) -> Tensor:
    """`(B_all, 1)` what ms-swift divides advantages by."""
    if scale == "none":
        return torch.ones_like(rewards).unsqueeze(1)
    groups = rewards.view(-1, num_generations if scale == "group" else len(rewards))
    return groups.std(dim=1).add(1e-4).repeat_interleave(groups.size(1)).unsqueeze(1)


def padded(values: Tensor, length: int) -> Tensor:
    """`(b, t, …)` with zeros up to `length` tokens."""
    return torch.cat([values, values.new_zeros(len(values), length - values.size(1), *values.shape[2:])], dim=1)
