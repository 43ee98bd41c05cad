"""The trainer: what it overrides of GRPOTrainer's set-up, training and generation batch."""

import inspect
import math
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.logging import get_logger
from trl import GRPOConfig, GRPOTrainer

from .baselines import Completions
from .config import OTBGRPOConfig, check_options, named_baseline, warn_of_unset
from .display.page import RolloutPages
from .rollout import Rollout, data_columns, prompt_keys
from .run.baseline import BatchAdvantages, RunBaseline
from .run.gain import Gain
from .run.metrics import STATISTICS, summarize
from .run.sampler import dropout_of, warning_of_dropout
from .seam.contract import trl_utils
from .seam.draws import draw_ratio
from .seam.forwards import no_energies, policy_of
from .seam.hosts import check_hosts
from .seam.loss import TokenLoss, trial_of_loss
from .seam.namespace import Namespace, Public, check_names
from .seam.older_trl import check_head, check_liger
from .seam.parts import GRPO
from .seam.progress import given_functions, progress_of, set_up_progress
from .seam.rewarding import recorded_rewards, rollout_of
from .seam.sampled import SampledTurns
from .seam.subclasses import check_config, check_subclass, checked_weights, contract_broken, users_methods
from .seam.tool_turns import CollectiveToolLoop
from .seam.unsloth import recorder_of
from .seam.untried import check_forward
from .state import KeepsBaseline, check_unchanged, gain_of


logger = get_logger(__name__)


class OTBGRPOTrainer(KeepsBaseline, CollectiveToolLoop, TokenLoss):
    """
    [`~trl.GRPOTrainer`] with a baseline of one's choice, for every token if it has one: by default the Optimal Token
    Baseline (https://huggingface.co/papers/2602.07078). It takes the arguments of [`~trl.GRPOTrainer`] and, apart from
    the baseline, behaves like it.

    Advantages are formed when completions have been sampled and rewarded; `inputs["advantages"]` holds them from then
    on, `(B,)` under a baseline per completion, `(B, T)` under one per token. `energy_source` names where energies come
    from: the no-gradient forward that TRL runs anyway (reused batches, vLLM's importance-sampling correction); else the
    forwards of `generate`; else, or if the ids differ there, one more no-gradient forward.

    Args:
        model, reward_funcs, train_dataset, ...: As for [`~trl.GRPOTrainer`].
        args ([`OTBGRPOConfig`] or [`~trl.GRPOConfig`], *optional*): If it has no `baseline`, or none is set, the one
            that the class names as `default_baseline`, or else `"otb"`, is used.
        progress_funcs (`Callable`, `str` or a list of them, *optional*): Functions of the text so far, which `value`
            reads, see [`~trl_otb.progress`]: called like reward functions, on unfinished completions. `"rewards"`
            stands for the reward functions. It may stand in the config instead.

    To combine it with your own subclass of [`~trl.GRPOTrainer`]: `class Mine(OTBGRPOTrainer, Theirs)`. A loss of your
    own sets `takes_token_advantages = True` in its class if it supports advantages of shape `(B, T)`; it is tried
    before the first step, see [`~trl_otb.seam.loss.tried_first`]. `baseline`, `rollouts` and `energy_source` are
    read-only, and all else that is kept stands in `_trl_otb`: other names are yours. A
    `_generate_and_score_completions` of your own returns the rewarded completions in order, with GRPOTrainer's
    advantages; change rewards in `_calculate_rewards`.

    Raises an `ImportError` if a part of TRL has moved, a `TypeError` if a subclass's loss is not known to take
    advantages per token, and a `ValueError` if an option conflicts with the baseline.
    """

    _tag_names = ["trl", "grpo", "otb"]  # noqa: RUF012
    _name = "OTB"
    _paper = {  # noqa: RUF012
        "title": "The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL",
        "id": "2602.07078",
        "citation": "@inproceedings{li2026optimal,\n    title = {{The Optimal Token Baseline: Variance Reduction for "
        "Long-Horizon LLM-RL}},\n    author = {Li, Yingru and others},\n    booktitle = {Proceedings of the 43rd "
        "International Conference on Machine Learning},\n    series = {PMLR},\n    volume = 306,\n    pages = "
        "{71553--71575},\n    year = 2026,\n    eprint = {arXiv:2602.07078},\n}",
    }

    _trl_otb: Namespace
    rollouts = Public()
    energy_source = Public()
    scale_rewards: Any
    default_baseline: str | None = None

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *other_args: Any,
        progress_funcs: Any = None,
        **kwargs: Any,
    ) -> None:
        check_hosts(type(self))
        GRPO.check()
        check_names(self)
        if args is None:
            check_config(type(self))
            name = model if isinstance(model, str) else trl_utils.get_config_model_id(model.config)
            args = OTBGRPOConfig(f"{name.rstrip('/').split('/')[-1]}-OTB")
        if not isinstance(args, GRPOConfig):
            raise TypeError(f"`args` is a {type(args).__name__}: OTBGRPOTrainer takes an OTBGRPOConfig.")
        progress_funcs = given_functions(progress_funcs, args)
        own_loss = bool(users_methods(self, ("_compute_loss", "compute_loss")))
        entry = check_options(args, own_loss, type(self))
        warn_of_unset(getattr(args, "unset", []), type(self))
        check_liger(args.use_liger_kernel, entry.per_token, entry.name)
        baseline = RunBaseline(entry, running_scale=args.scale_rewards == "running")
        self._trl_otb = Namespace(baseline, entry.needs, getattr(args, "baseline", None))
        # By name, as a user's class may take them so only
        names = list(inspect.signature(GRPOTrainer.__init__).parameters)[4:]
        super().__init__(model, reward_funcs, args=args, **dict(zip(names, other_args, strict=False)), **kwargs)
        GRPO.check_attributes("GRPOTrainer", self)
        check_head(self.accelerator.device)
        known = self._trl_otb.known_forward = not GRPO.warn_if_changed()
        self._trl_otb.known_loss = GRPOTrainer._compute_loss if known else None
        self._trl_otb.pages = RolloutPages(self.rollouts) if getattr(args, "save_rollouts_steps", None) else None
        if self._trl_otb.pages is not None:
            self.add_callback(self._trl_otb.pages)
        if self.scale_rewards == "running":
            self.scale_rewards = "none"  # of GRPOTrainer's own advantages
        entry = self.baseline.entry
        check_subclass(self, entry)
        self._trl_otb.recorder = recorder_of(self)
        if entry.name not in ("otb", "otb_loo", "ogb", "ogb_loo"):  # the paper's; the model card says what was used
            self._name, self._paper = GRPOTrainer._name, GRPOTrainer._paper
        set_up_progress(self, progress_funcs)
        if entry.scope == "batch" and self.num_generations > 1 and prompts_at_once(self) < 3:
            logger.warning(
                f"`baseline` is {entry.name!r}, which pools prompts, and a generation batch has "
                f"{prompts_at_once(self)} prompts: with fewer than 3 nothing is pooled. Use more prompts, or choose "
                "'rloo' or 'ogb_loo'."
            )

    # Training and its state

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """[`~trl.GRPOTrainer`]'s `train`; raises a `ValueError` if the dataset is too small for a single step."""
        check_options(self.args, trainer=type(self))
        check_unchanged(self)
        name, (_, named) = self.baseline.entry.name, named_baseline(self.args, type(self))
        if name == "value" and (dropout := dropout_of(policy_of(self.model))):
            logger.warning_once(warning_of_dropout(dropout))
        self.accelerator.print(
            f"Training with baseline {name!r} ({named}) and scale_rewards {self.args.scale_rewards!r}."
        )
        before, self._trl_otb.gain = self.rollouts.get("train"), Gain()
        result = super().train(*args, **kwargs)
        # Where data ran out transformers stops training, too, but before the first rollout
        stopped = self.control.should_training_stop and self.rollouts.get("train") is not before
        if self.state.global_step > 0 or self.state.max_steps == 0 or stopped:
            if line := self._trl_otb.gain.line(*gain_of(self)):
                self.accelerator.print(line)
            return result
        raise ValueError(
            f"`train_dataset` has too few prompts: a generation batch takes {prompts_at_once(self)} "
            f"({self.args.generation_batch_size} completions, {self.num_generations} per prompt), so no step can be "
            "trained. Add prompts, or lower `per_device_train_batch_size`, "
            "`gradient_accumulation_steps` or `steps_per_generation`."
        )

    # A generation batch: sampled, rewarded, with advantages

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        check_unchanged(self)  # which a callback may have done
        mode = "train" if self.model.training else "eval"  # which a reward function may change
        rollout, completions, batch = collect(self, inputs)
        pages = self._trl_otb.pages
        gather = self.accelerator.gather if self.accelerator.num_processes > 1 else None
        found = self.baseline.advantages_of(
            completions,
            rollout.scale,
            gather=gather,
            first_row=rollout.first_row,
            returns=rollout.returns_of_all,
            learn=mode == "train",
            parts=pages is not None and pages.records(self.args, self.state, mode),
        )
        if mode == "train" and self.state.global_step == 0 and not self.baseline.entry.built_in:
            self.baseline.state_dict()  # raises early if the state cannot be saved
        uses_trl_advantages = self.baseline.entry.name == "group_mean" and self.baseline.running_scale is None
        self.rollouts[mode] = rollout.with_advantages(found, batch["advantages"] if uses_trl_advantages else None)
        _log_rollout(self, mode, found, rollout.num_generations)
        if mode == "train":
            self._trl_otb.gain.add_statistics(found.statistics, found.learned)
        advantages = self.rollouts[mode].advantages
        assert advantages is not None  # after `with_advantages`
        return batch | {"advantages": advantages if found.per_token else advantages[:, 0]}

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        with self._trl_otb.recorder.sampling() as keep:
            ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            keep(prompt_ids, ids)
        return ids, logprobs

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        forward = super()._get_per_token_logps_and_entropies
        with self._trl_otb.recorder.scoring(model) as keep:
            result = forward(model, *args, **kwargs)
            if not keep(result[0]):
                raise no_energies(self, forward.__func__)
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        check_subclass(self, self.baseline.entry)  # methods may be set on a trainer, too
        overridden = type(self)._generate_and_score_completions is not OTBGRPOTrainer._generate_and_score_completions
        unknown = overridden and self.baseline.entry.per_token and not self._trl_otb.weights_fit
        with checked_weights(self) if unknown else nullcontext(), trial_of_loss(self):
            result = super().training_step(*args, **kwargs)
        if "train" not in self.rollouts:
            what = "`_generate_and_score_completions` is bypassed, so the baseline is never applied"
            methods = ("_generate_and_score_completions", "_prepare_inputs", "training_step")
            raise contract_broken(self, what, *methods)
        return result


def collect(trainer: OTBGRPOTrainer, inputs: list[dict[str, Any]]) -> tuple[Rollout, Completions, dict[str, Any]]:
    """Sampled and rewarded completions of `inputs`, one per row: to show, for baselines, and as TRL's batch."""
    of, n = trainer._trl_otb, trainer.num_generations if trainer.model.training else trainer.num_generations_eval
    keys = prompt_keys(inputs) if "prompt_key" in of.needs else None
    needed = not of.needs.isdisjoint({"energy", "logps", "states"})  # what only a forward computes
    turns = SampledTurns() if needed and of.recorder.reads_sampling(trainer) else None
    recording, progress = of.recorder.recording(needed, "states" in of.needs, turns), progress_of(trainer, inputs)
    with recording as recorded, recorded_rewards(trainer) as recorders, progress as of_text:
        batch = super(OTBGRPOTrainer, trainer)._generate_and_score_completions(inputs)
    rollout = rollout_of(trainer, batch, recorders, n, data_columns(inputs))
    values, source = of.recorder.values_of_batch(trainer, batch, rollout.mask, recorded)
    if values is not None and of.energy_source != source:
        of.energy_source = source
        logger.info(f"Energies come from {source}.")
    if not of.known_forward:
        check_forward(trainer, batch, values, rollout.mask)
        of.known_forward = True
    if values is None:
        return rollout, rollout.completions(prompt_key=keys), batch
    rollout = rollout.with_values(values, batch.get("importance_sampling_ratio"))
    draws = draw_ratio(trainer, batch, source, values.logps, recorded.processor) if "logps" in of.needs else None
    return rollout, rollout.completions(values.states, keys, draws, **of_text), batch


def prompts_at_once(trainer: GRPOTrainer) -> int:
    """Prompts per generation batch, over all processes."""
    return trainer.args.generation_batch_size // trainer.num_generations


def _log_rollout(trainer: OTBGRPOTrainer, mode: str, found: BatchAdvantages, num_generations: int) -> None:
    for name, value in (summarize(found.statistics, num_generations) | found.learned).items():
        if not math.isnan(value):  # what is undefined is left out
            trainer._metrics[mode][f"otb/{name}"].append(value)
    if trainer.num_generations == num_generations == 1:
        trainer._metrics[mode].pop("frac_reward_zero_std", None)  # of groups, of which there are none
    logged = trainer._logs["advantages"]  # the completions table, to which GRPOTrainer has added its own
    for _ in range(min(len(found.statistics), len(logged))):
        logged.pop()
    of_completion = dict(zip(STATISTICS, found.statistics.unbind(dim=1), strict=True))
    logged.extend((of_completion["advantage"] / of_completion["tokens"].clamp(min=1)).tolist())
