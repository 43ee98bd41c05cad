"""The trainer: what is overridden of GRPOTrainer, in the order in which TRL calls it."""

import inspect
import math
from typing import Any

import torch
from accelerate.logging import get_logger
from trl import GRPOConfig, GRPOTrainer

from .baselines import Baseline, Completions, Credit, credit, find_baseline
from .config import OTBGRPOConfig, check_options
from .metrics import STATISTICS, completion_statistics, summarize
from .rollout import Rollout, Rollouts, prompt_keys
from .seam.contract import check_config, check_loss, check_trl, incompatible_trl, overriders, trl_utils
from .seam.extensions import CollectiveToolLoop, TokenLoss
from .seam.forwards import PolicyRecorder, scores_anyway, values_of_batch
from .seam.rollouts import recorded_rewards, rollout_of
from .seam.sampled import SampledTurns
from .state import KeepsBaseline, RunningScale


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
        args ([`OTBGRPOConfig`] or [`~trl.GRPOConfig`], *optional*): A plain [`~trl.GRPOConfig`] has the default
            baseline.

    To combine it with your own subclass of [`~trl.GRPOTrainer`]: `class Mine(OTBGRPOTrainer, Theirs)`. A loss of your
    own sets `takes_token_advantages = True` in its class if it supports advantages of shape `(B, T)`.

    Raises an `ImportError` if a part of TRL has moved, a `TypeError` if a subclass's loss is not known to take
    advantages per token, and a `ValueError` if an option conflicts with the baseline.
    """

    _tag_names = ["trl", "grpo", "otb"]  # noqa: RUF012
    _name = "OTB"
    _paper = {  # noqa: RUF012
        "title": "The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL",
        "id": "2602.07078",
        "citation": "@article{li2026optimal,\n    title = {{The Optimal Token Baseline: Variance Reduction for "
        "Long-Horizon LLM-RL}},\n    author = {Li and others},\n    year = 2026,\n    eprint = {arXiv:2602.07078},\n}",
    }

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: GRPOConfig | None = None, *other_args: Any, **kwargs: Any
    ) -> None:
        check_trl()
        if args is None:
            check_config(type(self))
            name = model if isinstance(model, str) else trl_utils.get_config_model_id(model.config)
            args = OTBGRPOConfig(f"{name.rstrip('/').split('/')[-1]}-OTB")
        if not isinstance(args, GRPOConfig):
            raise TypeError(f"`args` is a {type(args).__name__}: OTBGRPOTrainer takes an OTBGRPOConfig.")
        self._baseline: Baseline = check_options(args).instance()
        self.rollouts: dict[str, Rollout] = Rollouts()  # the latest one of each mode, "train" and "eval"
        self.energy_source: str | None = None  # of the latest rollout in training
        self.needs = self._baseline.needs  # what rollouts are to hold; more during a comparison
        names = list(inspect.signature(GRPOTrainer.__init__).parameters)[4:]
        super().__init__(model, reward_funcs, args=args, **dict(zip(names, other_args, strict=False)), **kwargs)
        check_trl(self)
        if self.scale_rewards == "running":
            self.scale_rewards, self.running_scale = "none", RunningScale()  # GRPOTrainer's own are not scaled
        if self._baseline.per_token:
            check_loss(type(self), self._baseline.name)
        self.recorder = PolicyRecorder(self.policy, self.temperature, self.args.cast_lm_head_to_fp32)
        if self._baseline.scope == "batch" and self.num_generations > 1 and self.prompts_per_batch < 3:
            logger.warning(
                f"`baseline` is {self._baseline.name!r}, which pools prompts, and a generation batch has "
                f"{self.prompts_per_batch}: with fewer than 3 nothing is pooled. Use more prompts, or choose 'rloo' or "
                "'ogb_loo'."
            )

    @property
    def prompts_per_batch(self) -> int:
        """Prompts per generation batch, over all processes."""
        return self.args.generation_batch_size // self.num_generations

    # Training and its state

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """[`~trl.GRPOTrainer`]'s `train`; raises a `ValueError` if the dataset is too small for a single step."""
        if (now := check_options(self.args)).name != self._baseline.name:
            raise ValueError(
                f"`args.baseline` was set to {now.name!r} after the trainer was made with {self._baseline.name!r}, "
                "which it keeps. Make a new trainer."
            )
        before = self.rollouts.get("train")
        result = super().train(*args, **kwargs)
        # Where data ran out transformers stops training, too, but before the first rollout
        stopped = self.control.should_training_stop and self.rollouts.get("train") is not before
        if self.state.global_step > 0 or self.state.max_steps == 0 or stopped:
            return result
        raise ValueError(
            f"`train_dataset` has too few prompts: a generation batch takes {self.prompts_per_batch} "
            f"({self.args.generation_batch_size} completions, {self.num_generations} per prompt): not a single "
            "step could be trained. Add prompts, or lower `per_device_train_batch_size`, "
            "`gradient_accumulation_steps` or `steps_per_generation`."
        )

    # A generation batch: sampled, rewarded, credited

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        mode = "train" if self.model.training else "eval"  # which a reward function may change
        rollout, completions, batch = self.collect(inputs)
        rule, several = self._baseline, self.accelerator.num_processes > 1
        if self.running_scale is not None:
            rollout.scale *= self.running_scale.of(rollout.returns_of_all, rollout.num_generations, mode == "train")
        spanning = len(rollout) % rollout.num_generations > 0  # groups span processes

        def credited(by: Baseline) -> Credit:
            if several and (by.scope == "batch" or spanning):
                everyone = lambda own, tokens: own.gathered(self.accelerator.gather, tokens)  # noqa: E731
                own_rows = slice(rollout.first_row, rollout.first_row + len(rollout))
                return credit(by, completions, everyone, own_rows)
            return credit(by, completions)

        chosen, of_mean = credited(rule), credited(find_baseline("group_mean"))
        one = rollout.num_generations == 1
        of_others = credited(find_baseline("rloo_pooled" if one else "rloo")) if one or rule.unbiased else of_mean
        advantages = rollout.keep(rule, chosen, of_mean)
        if rule.name == "group_mean" and self.running_scale is None:  # GRPOTrainer's own advantages, to the bit
            rollout.advantages = batch["advantages"].unsqueeze(1)
        else:
            batch["advantages"] = advantages if rule.per_token else advantages.squeeze(1)
        statistics = self.accelerator.gather(completion_statistics(completions, chosen, of_others, rollout.scale))
        metrics = summarize(statistics, rollout.num_generations)
        if rule.learns and mode == "train":
            metrics |= rule.learn(completions, chosen.base, self.accelerator.gather)
            self._has_learned = True
            if self.state.global_step == 0 and not rule.built_in:
                rule.state()  # what no checkpoint could keep is an error now
        for name, value in metrics.items():
            if not math.isnan(value):  # what is undefined is left out
                self._metrics[mode][f"otb/{name}"].append(value)
        if self.num_generations == rollout.num_generations == 1:
            self._metrics[mode].pop("frac_reward_zero_std", None)  # of groups, of which there are none
        logged = self._logs["advantages"]  # the completions table, to which GRPOTrainer has added its own
        for _ in range(min(len(statistics), len(logged))):
            logged.pop()
        of_completion = dict(zip(STATISTICS, statistics.unbind(dim=1), strict=True))
        logged.extend((of_completion["advantage"] / of_completion["tokens"].clamp(min=1)).tolist())
        self.rollouts[mode] = rollout
        return batch

    def collect(self, inputs: list[dict[str, Any]]) -> tuple[Rollout, Completions, dict[str, Any]]:
        """Sampled and rewarded completions of `inputs`, one per row: to show, to credit, and as TRL's batch."""
        n = self.num_generations if self.model.training else self.num_generations_eval
        keys = prompt_keys(inputs) if "prompt_key" in self.needs else None
        turns = SampledTurns() if self.needs_forward and not scores_anyway(self) else None
        with self.recorder.recording(states="states" in self.needs, turns=turns) as recording:
            with recorded_rewards(self) as recorders:
                batch = super()._generate_and_score_completions(inputs)
        rollout = rollout_of(self, batch, recorders, n)
        values = values_of_batch(self, batch, rollout.mask, recording)
        return rollout, rollout.completions(values, batch.get("importance_sampling_ratio"), keys), batch

    @property
    def needs_forward(self) -> bool:
        """Whether rollouts are to hold what only a forward of the policy computes."""
        return not self.needs.isdisjoint({"energy", "logps", "states"})

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.sampling() as keep:
            ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            keep(prompt_ids, ids)
        return ids, logprobs

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.scoring(model) as keep:
            result = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
            keep(result[0])
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if "train" not in self.rollouts:
            what = "OTBGRPOTrainer's own `_generate_and_score_completions` is passed by, and with it the baseline"
            raise self.failure(what, "_generate_and_score_completions", "_prepare_inputs", "training_step")
        return loss

    def failure(self, what: str, *methods: str) -> Exception:
        """A `TypeError` if a user's class overrides one of `methods`; an `ImportError` if TRL has changed."""
        theirs = overriders(self, *methods)
        if not theirs:
            return incompatible_trl(what)
        return TypeError(
            f"{what[:1].upper()}{what[1:]}. In `{type(self).__name__}`, look at {', '.join(theirs)}; "
            "recipes/reference.md lists what OTBGRPOTrainer needs from such a class."
        )
