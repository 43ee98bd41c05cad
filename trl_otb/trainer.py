import textwrap
from dataclasses import dataclass, fields
from typing import Any

import torch
from accelerate.logging import get_logger
from trl import GRPOConfig

from .baselines import ENERGY_BASELINES, compute_baselines, lone_tail, returns_for
from .callbacks import InexactResumeNotice
from .config import OTBGRPOConfig
from .metrics import STATISTICS, completion_statistics, summarize
from .trl_seam import EnergyGRPOTrainer, Rollout, config_model_id


logger = get_logger(__name__)


@dataclass
class _Credit:
    """
    What generated tokens are credited with, and what their metrics need beside energies: each `(B, T)`, or `(B, 1)` where
    one number serves the completion. Until energies are known it travels with the rows of a batch, as `credit_*`.
    """

    advantages: torch.Tensor
    group_mean_advantages: torch.Tensor
    baselines: torch.Tensor
    lone_tail_tokens: torch.Tensor
    scorable: torch.Tensor

    def to_batch(self) -> dict[str, torch.Tensor]:
        return {f"credit_{f.name}": getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_batch(cls, batch: dict[str, Any]) -> "_Credit":
        return cls(**{f.name: batch[f"credit_{f.name}"] for f in fields(cls)})


class _RolloutStatistics:
    """A row of statistics for each completion of a rollout, in whichever micro-batch it is measured."""

    def __init__(self, rows: int, device: torch.device):
        self.table = torch.zeros(rows, len(STATISTICS), device=device)
        self.missing = rows

    def fill(self, rows: torch.Tensor, statistics: torch.Tensor) -> None:
        self.table[rows] = statistics
        self.missing -= len(rows)


class OTBGRPOTrainer(EnergyGRPOTrainer):
    """
    [`~trl.GRPOTrainer`] with the Optimal Token Baseline: every token gets the baseline that minimises the variance of the
    gradient, estimated from the forward probabilities of the group it was sampled in. The method was introduced in the
    paper [The Optimal Token Baseline: Variance Reduction for Long-Horizon
    LLM-RL](https://huggingface.co/papers/2602.07078).

    It takes the arguments of [`~trl.GRPOTrainer`] and behaves like it wherever the baseline says nothing.

    With returns G, realized energies W (see [`~trl_otb.energy.realized_energy`]) and the N completions i of a prompt,

        A_{t,i} = G_{t,i} − B_t,   B_t = Σ_i W_{t,i} G_{t,i} / Σ_i W_{t,i}.

    Energies cost no logits: Σπ² comes out of TRL's fused LM head. Which forward yields it depends on the run and is said
    once in the log: the no-gradient forward that TRL runs itself (reused batches, vLLM's importance-sampling
    correction); else the training forward, where a micro-batch holds whole groups (`per_device_train_batch_size` is a
    multiple of `num_generations`); else one extra forward without gradient. All give the same advantages.

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
            Configuration. A plain [`~trl.GRPOConfig`] gets the default baseline options and keeps everything else it
            says, its default `scale_rewards="group"` included.

    Raises:
        ImportError: A part of TRL that this trainer relies on has moved.
        TypeError: `args` is not a [`~trl.GRPOConfig`].
        ValueError: An option that the baseline cannot honour, or whatever [`~trl.GRPOTrainer`] rejects.
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

    def __init__(self, model, reward_funcs=None, args: GRPOConfig | None = None, *other_args, **kwargs):
        if args is None:
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
                    f"OTBGRPOTrainer got a GRPOConfig and keeps its `scale_rewards={args.scale_rewards!r}`. The paper of "
                    "the Optimal Token Baseline does not scale: use OTBGRPOConfig, or set `scale_rewards='none'`."
                )
        self._statistics: dict[str, _RolloutStatistics] = {}  # by mode, while rows are missing
        self.energy_source: str | None = None  # the forward that yields energies in training, once known
        super().__init__(model, reward_funcs, args, *other_args, **kwargs)
        self.add_callback(InexactResumeNotice)

    def score_rollout(self, batch: dict[str, Any], rollout: Rollout) -> None:
        mask = self.generated_mask(batch)
        rows, n = len(mask), self.generations
        needs_energy = self.args.baseline in ENERGY_BASELINES
        energy, source = rollout.energy, "the no-gradient forward that GRPOTrainer runs anyway"
        if energy is None and needs_energy and not rollout.micro_batch_holds_groups:
            energy, source = self.energy_by_extra_forward(batch), "one extra no-gradient forward"
        elif energy is None:
            source = "the training forward"
        self._say_once_where_energies_come_from(source)
        energy = self._weighted(energy, batch)

        own_rows = self.own_rows(rows)
        batch["row_of_rollout"] = torch.arange(rows, device=mask.device)
        self._statistics[self.mode] = _RolloutStatistics(rows, mask.device)

        rewards = rollout.returns[own_rows] if rollout.token_rewards is None else rollout.token_rewards
        if energy is None and needs_energy:
            batch["rewards"], batch["advantage_scale"] = rewards, rollout.scale[own_rows]
            batch["groups_whole"] = torch.tensor(True)
            return
        if rows % n == 0:
            credit = self._credit(rewards, rollout.scale[own_rows], energy, mask, n)
        else:  # a group straddles processes
            rewards = rollout.returns if rollout.token_rewards is None else self._gather_padded(rewards, 0.0)
            credit = self._credit(rewards, rollout.scale, *self._gather_energy(energy, mask), n)
            credit = _Credit(*(getattr(credit, f.name)[own_rows, : mask.size(1)] for f in fields(credit)))
        self._hand_out(batch, credit)
        if energy is not None:
            self._measure(batch, energy, credit)
        else:
            batch |= credit.to_batch()

    def wants_energy(self, inputs: dict[str, Any]) -> bool:
        return "rewards" in inputs or ("credit_advantages" in inputs and self.mode in self._statistics)

    def score_micro_batch(self, inputs: dict[str, Any], energy: torch.Tensor) -> None:
        if "rewards" in inputs:
            energy, mask = self._weighted(energy, inputs), self.generated_mask(inputs)
            credit = self._credit(inputs["rewards"], inputs["advantage_scale"], energy, mask, self.generations)
            self._hand_out(inputs, credit)
            self._measure(inputs, energy, credit)
        else:
            self._measure(inputs, self._weighted(energy, inputs), _Credit.from_batch(inputs))

    @staticmethod
    def _weighted(energy: torch.Tensor | None, batch: dict[str, Any]) -> torch.Tensor | None:
        """ρ_t² w_t, where the sampler was not the policy."""
        if energy is None or "importance_sampling_ratio" not in batch:
            return energy
        return energy * batch["importance_sampling_ratio"].square()

    def _credit(self, rewards, scale, energy, mask, num_generations) -> _Credit:
        """
        Credit the tokens of whole groups, with `rewards` of completions, `(B,)`, or of tokens, `(B, T)`; `energy` may be
        `None` for a baseline that does not look at it.
        """
        if energy is None:
            energy = torch.zeros_like(mask, dtype=torch.float32)

        def baselines_of(baseline, **options):
            return compute_baselines(rewards, energy, mask, num_generations, baseline=baseline, **options)

        def advantages_over(baselines, baseline):
            # NaN marks an unscorable completion, or a group too small for a standard deviation: no signal, as in TRL.
            return ((returns_for(rewards, baseline) - baselines) / scale.unsqueeze(1)).nan_to_num(nan=0.0)

        baselines = baselines_of(
            self.args.baseline,
            alignment=self.args.alignment,
            zero_tail=self.args.zero_tail,
            leave_one_out=self.args.leave_one_out,
        )
        advantages = advantages_over(baselines, self.args.baseline)
        if advantages.size(1) > 1:
            advantages = advantages.masked_fill(mask == 0, 0.0)
        scorable = ~returns_for(rewards, "group_mean").isnan()
        tail = lone_tail(mask.bool() & scorable, num_generations, self.args.alignment)
        return _Credit(
            advantages=advantages,
            group_mean_advantages=advantages_over(baselines_of("group_mean"), "group_mean"),
            baselines=baselines,
            lone_tail_tokens=tail.sum(dim=1, keepdim=True),
            scorable=scorable,
        )

    @staticmethod
    def _hand_out(batch: dict[str, Any], credit: _Credit) -> None:
        # One number a completion goes out as GRPOTrainer's own `(B,)`, so that nothing downstream can tell the difference.
        advantages = credit.advantages
        batch["advantages"] = advantages.squeeze(1) if advantages.size(1) == 1 else advantages

    def _gather_padded(self, tokens: torch.Tensor, padding: float) -> torch.Tensor:
        """Rows of all processes, padded to the longest; 4 B·T bytes leave each process."""
        return self.accelerator.gather(self.accelerator.pad_across_processes(tokens, dim=1, pad_index=padding))

    def _gather_energy(self, energy: torch.Tensor | None, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.zeros_like(mask, dtype=torch.float32) if energy is None else energy
        # No energy is negative, so one tensor carries both
        tokens = self._gather_padded(tokens.masked_fill(mask == 0, -1.0), -1.0)
        return tokens, tokens >= 0

    def _measure(self, batch: dict[str, Any], energy: torch.Tensor, credit: _Credit) -> None:
        """Take down the statistics of these rows and, when they were the last ones of the rollout, log them."""
        statistics = self._statistics.get(self.mode)
        if statistics is None:  # a later pass over a rollout that was measured in its first
            return
        statistics.fill(
            batch["row_of_rollout"],
            completion_statistics(
                energy,
                self.generated_mask(batch) * credit.scorable,
                credit.advantages,
                credit.group_mean_advantages,
                credit.baselines,
                credit.lone_tail_tokens,
            ),
        )
        if statistics.missing > 0:
            return
        del self._statistics[self.mode]
        table = self.accelerator.gather(statistics.table)
        metrics = summarize(table, self.generations)
        self.add_metrics({f"otb/{name}": value for name, value in metrics.items()})
        columns = dict(zip(STATISTICS, table.unbind(dim=1), strict=True))
        self.replace_logged_advantages((columns["advantage"] / columns["tokens"].clamp(min=1)).tolist())

    def _say_once_where_energies_come_from(self, source: str) -> None:
        if self.energy_source is None and self.model.training:
            self.energy_source = source
            use = "" if self.args.baseline in ENERGY_BASELINES else f", for metrics only under {self.args.baseline!r}"
            logger.info(f"Energies come from {source}{use}.")
