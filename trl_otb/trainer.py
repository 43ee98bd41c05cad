import inspect
import textwrap
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from trl import GRPOConfig, GRPOTrainer

from .baselines import Baseline, Completions, Tokens, find_baseline
from .baselines.advantages import compared_by
from .callbacks import GradientNoiseCallback, InexactResumeNotice
from .config import OTBGRPOConfig
from .credit import credit, credit_base, measure, tokens_of
from .metrics import completion_advantages, summarize
from .project import version
from .rollout import EVERY_ROW, Rollout, Rows
from .seam import EnergyGRPOTrainer, config_model_id


logger = get_logger(__name__)


class OTBGRPOTrainer(EnergyGRPOTrainer):
    """
    [`~trl.GRPOTrainer`] with the Optimal Token Baseline. Each token gets its own baseline instead of the group mean:
    the mean of the group's returns weighted by each completion's realized energy, which is estimated from forward
    probabilities. The method was introduced in the paper [The Optimal Token Baseline: Variance Reduction for
    Long-Horizon LLM-RL](https://huggingface.co/papers/2602.07078).

    It takes the arguments of [`~trl.GRPOTrainer`] and, apart from the baseline, behaves like it.

    With returns G, realized energies W (see [`~trl_otb.energy.realized_energy`]) and the N completions i of a prompt,

        A_{t,i} = G_{t,i} − B_t,   B_t = Σ_i W_{t,i} G_{t,i} / Σ_i W_{t,i}.

    This is `baseline="otb"`, the default. `trl_otb.baselines` has others, such as `"value"`, which predicts the return
    from what a completion has written so far.

    Energies need no logits: Σπ² comes from TRL's fused LM head. `energy_source`, logged once, names the forward that
    yields them: TRL's no-grad forward, if it runs one (reused batches, vLLM's importance-sampling correction); else
    the training forward, if a micro-batch holds whole groups (`per_device_train_batch_size` is a multiple of
    `num_generations`) and the baseline does not compare prompts, or for `"value"`; else one extra no-grad forward. All
    give the same advantages.

    `rollouts["train"]` and `rollouts["eval"]` are the latest generation batches, token by token: see
    [`~trl_otb.rollout.Rollout`].

    Example:

    ```python
    >>> from datasets import load_dataset
    >>> from trl.rewards import accuracy_reward
    >>> from trl_otb import OTBGRPOTrainer

    >>> trainer = OTBGRPOTrainer(
    ...     model="Qwen/Qwen2.5-0.5B-Instruct",
    ...     reward_funcs=accuracy_reward,
    ...     train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    ... )
    >>> trainer.train()
    ```

    Args:
        model, reward_funcs, train_dataset, ...:
            As for [`~trl.GRPOTrainer`].
        args ([`OTBGRPOConfig`] or [`~trl.GRPOConfig`], *optional*):
            Configuration. A plain [`~trl.GRPOConfig`] gets the default baseline options and keeps its own values,
            including the default `scale_rewards="group"`.

    To combine it with your own subclass of [`~trl.GRPOTrainer`]: `class Mine(OTBGRPOTrainer, Theirs)`.

    Raises:
        ImportError: A part of TRL that this trainer relies on has moved.
        TypeError: `args` is not a [`~trl.GRPOConfig`]; or a subclass hides the baselines from the loss, or its loss is
            not known to support advantages per token.
        ValueError: An option conflicts with the baseline, or [`~trl.GRPOTrainer`] rejects it.
    """

    _tag_names = ["trl", "grpo", "otb"]  # noqa: RUF012
    _name = "OTB"
    _paper = {  # noqa: RUF012
        "title": "The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL",
        "id": "2602.07078",
        "citation": textwrap.dedent("""\
            @article{li2026optimal,
                title        = {{The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL}},
                author       = {Li and others},
                year         = 2026,
                eprint       = {arXiv:2602.07078},
            }"""),
    }

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: GRPOConfig | None = None, *other_args: Any, **kwargs: Any
    ) -> None:
        if args is None:
            theirs = [base for base in type(self).__mro__ if base not in OTBGRPOTrainer.__mro__]
            for base in theirs:
                if issubclass(base, GRPOTrainer) and not issubclass(base, OTBGRPOTrainer) and "__init__" in vars(base):
                    raise ValueError(
                        f"`args` is missing, and {base.__name__} may have its own config, whose defaults would be "
                        "lost. Pass one: `class Config(OTBGRPOConfig, TheirConfig)`, decorated with `@dataclass`."
                    )
            name = model if isinstance(model, str) else config_model_id(model.config)
            args = OTBGRPOConfig(f"{name.rstrip('/').split('/')[-1]}-OTB")
        elif not isinstance(args, GRPOConfig):
            raise TypeError(
                f"`args` is a {type(args).__name__}: OTBGRPOTrainer takes an OTBGRPOConfig (or a GRPOConfig)."
            )
        elif not isinstance(args, OTBGRPOConfig):
            args = OTBGRPOConfig.from_grpo_config(args)
            if args.scale_rewards != "none":
                logger.warning(
                    f"OTBGRPOTrainer got a GRPOConfig and keeps its `scale_rewards={args.scale_rewards!r}`. The paper "
                    "does not scale rewards: use OTBGRPOConfig, or set `scale_rewards='none'`."
                )
        self.energy_source: str | None = None  # the forward that yields the energies in training, once known
        args._check_otb_options()  # options may have changed since the config was made
        self._baseline: Baseline = find_baseline(args.baseline).instance()
        names = list(inspect.signature(GRPOTrainer.__init__).parameters)[4:]
        super().__init__(model, reward_funcs, args=args, **dict(zip(names, other_args, strict=False)), **kwargs)
        if self._baseline.compares_prompts and not self._baseline.remembers and self.prompts_per_batch < 3:
            logger.warning(
                f"`baseline` is {args.baseline!r}, which pools prompts, and a generation batch has "
                f"{self.prompts_per_batch}: with fewer than 3 nothing is pooled. Use more prompts, or choose 'rloo', "
                "or 'ogb' with `leave_one_out`."
            )
        self.add_callback(InexactResumeNotice)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """[`~trl.GRPOTrainer`]'s `train`; raises a `ValueError` if the dataset is too small for a single step."""
        self.args._check_otb_options()
        if find_baseline(self.args.baseline).name != self._baseline.name:
            raise ValueError(
                f"`args.baseline` was set to {self.args.baseline!r} after the trainer was made with "
                f"{self._baseline.name!r}, which it keeps. Make a new trainer."
            )
        dataset = self.train_dataset
        if hasattr(dataset, "__len__") and len(dataset) < self.prompts_per_batch:
            raise self._too_few_prompts(f"{len(dataset)} prompts")
        before = self.rollouts.get("train")
        with ExitStack() as stack:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, GradientNoiseCallback):
                    stack.enter_context(callback.connected(self.add_metrics, self.keeps_groups_together))
            result = super().train(*args, **kwargs)
        # Where data ran out transformers stops training, too, but before the first rollout
        stopped = self.control.should_training_stop and self.rollouts.get("train") is not before
        if self.state.global_step == 0 < self.state.max_steps and not stopped:
            raise self._too_few_prompts("fewer prompts than a step needs")
        return result

    def _too_few_prompts(self, what: str) -> ValueError:
        return ValueError(
            f"`train_dataset` has {what} and a generation batch takes {self.prompts_per_batch} "
            f"({self.args.generation_batch_size} completions, {self.num_generations} per prompt): not a single "
            "step could be trained. Add prompts, or lower `per_device_train_batch_size`, "
            "`gradient_accumulation_steps` or `steps_per_generation`."
        )

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        super().create_model_card(*args, **kwargs)
        card = Path(self.args.output_dir) / "README.md"
        if not self.is_world_process_zero() or not card.is_file():
            return
        base_model = config_model_id(self.model.config) or type(self.model).__name__
        with card.open("a", encoding="utf-8") as file:
            file.write(
                f"\n## Baseline\n\nTrained from `{base_model}` with trl_otb {version()}: "
                f"`baseline={self.args.baseline!r}`, `leave_one_out={self.args.leave_one_out}`, `num_generations="
                f"{self.num_generations}`, `scale_rewards={self.args.scale_rewards!r}`.\n"
            )

    def score_rollout(self, rollout: Rollout, batch: dict[str, Any]) -> None:
        """Compute a rollout's energies, baselines, advantages and statistics."""
        rule = self._baseline
        if rollout.level is not None and rule.name != "group_mean":
            # If all returns are equal, there is nothing to learn under any baseline: GRPOTrainer has A = 0 there too,
            # up to rounding, which the group mean reproduces
            rollout.scale = rollout.scale.masked_fill(rollout.level, torch.nan)
        across_prompts = compared_by(rule, rollout.rewards).across_prompts
        compared_here = len(rollout) % rollout.num_generations == 0 and not across_prompts
        processes = None if self.accelerator.num_processes == 1 or compared_here else self.accelerator

        # Energies: TRL's own no-grad forward has stored them in the rollout, or the training forward will, or an extra
        # one is needed
        source = "the no-gradient forward that GRPOTrainer runs anyway"
        if rollout.energy is None:
            together = self.keeps_groups_together or self.mode == "eval"
            groups_fit = together and self.micro_batch_holds_groups(rollout) and not rule.across_prompts
            if groups_fit or self.credits_rows_alone or not rule.needs_forward:
                source = "the training forward"
            else:
                source = "one extra no-gradient forward"
                self.set_energies_of(rollout, self.extra_forward(batch))
        self._log_energy_source_once(source)

        # Baselines and advantages, if the energies are known: otherwise `score_rows` adds them per micro-batch
        if rule.on_top_of is not None:
            credit_base(rollout, processes, **self._credit_options)
        if rollout.energy is None and rule.needs_forward:
            return
        credit(rollout, accelerator=processes, **self._credit_options)

        # Statistics, which need energies for all baselines
        if rollout.energy is not None:
            self._measure(rollout)

    def score_rows(self, rollout: Rollout, rows: Rows) -> None:
        """The same for some rows, after the training forward has yielded their energies."""
        if self._baseline.needs_forward:
            credit(rollout, rows, **self._credit_options)
        self._measure(rollout, rows)

    @property
    def credits_tokens(self) -> bool:
        return self._baseline.per_token

    @property
    def keeps_groups_together(self) -> bool:
        together = self.args.keep_groups_together
        if together is None:
            together = self._baseline.name != "group_mean"
        return together and self.args.per_device_train_batch_size % self.num_generations == 0

    @property
    def credits_rows_alone(self) -> bool:
        return self._baseline.on_top_of is not None

    @property
    def reads(self) -> tuple[str, ...]:
        return self._baseline.reads

    @property
    def keeps_state(self) -> bool:
        return self._baseline.remembers

    def state_to_save(self) -> dict[str, Any]:
        return {"baseline": self.args.baseline, "state": self._baseline.state()}

    def load_saved_state(self, state: dict[str, Any] | None) -> None:
        if state is None or state.get("baseline") != self.args.baseline:
            found = "nothing" if state is None else f"the state of {state.get('baseline')!r}"
            logger.warning(
                f"The checkpoint holds {found} for `baseline={self.args.baseline!r}`, which remembers earlier "
                "batches: it starts from scratch."
            )
            self._baseline = replace(self._baseline, function=type(self._baseline.function)())
        else:
            self._baseline.function.load_state_dict(state["state"])

    @property
    def trained_baseline(self) -> Baseline | None:
        """The baseline, if it has learned from generation batches."""
        return self._baseline if self._baseline.remembers and self.state.global_step > 0 else None

    @property
    def prompts_per_batch(self) -> int:
        """Prompts per generation batch, over all processes."""
        return self.args.generation_batch_size // self.num_generations

    @property
    def _credit_options(self) -> dict[str, Any]:
        options = {name: getattr(self.args, name) for name in ("alignment", "zero_tail", "leave_one_out")}
        return {"baseline": self._baseline, **options}

    def _measure(self, rollout: Rollout, rows: Rows = EVERY_ROW) -> None:
        """Record these rows' statistics, and log them after the last rows of the rollout."""
        measure(rollout, rows)
        if rollout.unmeasured > 0:
            return
        statistics = self.accelerator.gather(rollout.statistics)
        metrics = summarize(statistics, rollout.num_generations) | self._learn(rollout)
        self.add_metrics({f"otb/{name}": value for name, value in metrics.items()})
        self.replace_logged_advantages(completion_advantages(statistics).tolist())
        rollout.states = None  # large, and not needed any more

    def _learn(self, rollout: Rollout) -> dict[str, float]:
        """Update a baseline with memory from a scored rollout, and return its metrics."""
        rule = self._baseline
        seen: Tokens | Completions | None = rollout.compared
        rollout.compared = None
        if not rule.remembers or self.mode != "train":
            return {}
        if rule.on_top_of is not None:
            seen = tokens_of(rollout, rule, gather=self.accelerator.gather)
        told = rule.learn(seen)
        if self.state.global_step == 0 and not rule.built_in:
            rule.state()  # what no checkpoint could keep is an error now
        return {f"{rule.name}/{name}": value for name, value in told.items()}

    def _log_energy_source_once(self, source: str) -> None:
        if self.energy_source is None and self.model.training:
            self.energy_source = source
            use = "" if self._baseline.uses_energy else f", only for metrics with {self.args.baseline!r}"
            logger.info(f"Energies come from {source}{use}.")
