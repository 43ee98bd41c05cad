"""The overrides of GRPOTrainer."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate.utils import is_peft_model
from datasets.fingerprint import Hasher

from ..baselines.advantages import assign_credit_by_totals
from ..credit import advantages_of, own_rows, set_energies
from ..rewards import RewardRecorder
from ..rollout import EVERY_ROW, Rollout, Rollouts, Rows, generated_mask
from .contract import FORWARD_KWARGS, check_trl, incompatible_trl, say_drift, trl_models, trl_utils
from .gspo_token import ratios_per_token, spread_sequence_ratio
from .head import EnergyHead, Forward
from .overrides import check_loss, check_order, method_at_fault, overriders
from .recorded_rewards import recorded_rewards
from .returns import Returns, weigh_rewards
from .shuffling import groups_kept_together
from .states import StateRecorder
from .tool_loop import CollectiveToolLoop


ROWS, ROLLOUT = "rows_of_rollout", "number_of_rollout"  # our keys in micro-batches
STATE_FILE = "baseline.pt"  # in a checkpoint
_MAKING = ("_generate_and_score_completions", "_calculate_rewards")  # the methods that make a rollout


class EnergyGRPOTrainer(CollectiveToolLoop):
    """
    A [`~trl.GRPOTrainer`] whose policy forwards yield energies and whose subclass computes advantages.

    A class between this one and GRPOTrainer may have its own loss. It sets `takes_token_advantages = True` if the loss
    supports advantages of shape `(B, T)` as well as `(B,)`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_order(cls, EnergyGRPOTrainer)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_trl()
        self.rollouts: dict[str, Rollout] = Rollouts()  # the latest one of each mode, "train" and "eval"
        self._losses = 0  # the number of losses that our `_compute_loss` has returned
        super().__init__(*args, **kwargs)
        check_trl(self)
        say_drift()
        if self.credits_tokens:
            check_loss(type(self), EnergyGRPOTrainer, self.args.baseline)
        self._energy_head = EnergyHead(self.policy, self.temperature, self.args.cast_lm_head_to_fp32)
        self._state_recorder = StateRecorder(self.policy) if "states" in self.reads else None

    # Hooks for a subclass

    def score_rollout(self, rollout: Rollout, batch: dict[str, Any]) -> None:
        """Called with each new rollout and TRL's batch: set its advantages, or leave them to [`score_rows`], which
        needs groups that are kept together, unless it supports any rows."""
        raise NotImplementedError

    def score_rows(self, rollout: Rollout, rows: Rows) -> None:
        """Called in the loss, between the policy's forward and the first use of the advantages, with the rows of a
        micro-batch that have just received energies, until all rows of the rollout are measured."""
        raise NotImplementedError

    @property
    def credits_tokens(self) -> bool:
        """Whether advantages differ between the tokens of a completion."""
        raise NotImplementedError

    @property
    def keeps_groups_together(self) -> bool:
        """Whether a generation batch is shuffled group by group."""
        return False

    @property
    def credits_rows_alone(self) -> bool:
        """Whether [`score_rows`] supports any rows, not only whole groups."""
        return False

    @property
    def reads(self) -> tuple[str, ...]:
        """What rollouts should contain in addition to energies: some of `READS`."""
        return ()

    @property
    def keeps_state(self) -> bool:
        """Whether checkpoints hold state of the subclass."""
        return False

    def state_to_save(self) -> dict[str, Any]:
        """The subclass's state for a checkpoint, to be read by `torch.load(weights_only=True)`."""
        raise NotImplementedError

    def load_saved_state(self, state: dict[str, Any] | None) -> None:
        """Called when training resumes, with the state from the checkpoint, or `None`."""
        raise NotImplementedError

    # For use by a subclass

    @property
    def policy(self) -> Any:
        """The model without the PEFT wrapper."""
        return self.model.get_base_model() if is_peft_model(self.model) else self.model

    @property
    def mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def generations(self) -> int:
        """N in the current mode."""
        return self.num_generations if self.model.training else self.num_generations_eval

    def micro_batch_holds_groups(self, rollout: Rollout) -> bool:
        """Whether rows can be split into micro-batches of whole groups."""
        micro_batches = self.args.steps_per_generation if self.model.training else 1
        return len(rollout) // micro_batches % self.generations == 0

    @torch.no_grad()
    def extra_forward(self, batch: dict[str, Any]) -> Forward:
        """A no-grad forward over `batch` under the current policy."""
        forwards: list[Forward] = []
        recording = self._energy_head.recording_forwards(forwards.append)
        checkpointing = self.args.gradient_checkpointing_kwargs
        with recording, trl_models.disable_gradient_checkpointing(self.model, checkpointing):
            self._get_per_token_logps_and_entropies(
                self.model,
                input_ids=torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
                attention_mask=torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
                logits_to_keep=batch["completion_ids"].size(1),
                batch_size=self.args.per_device_train_batch_size
                if self.model.training
                else self.args.per_device_eval_batch_size,
                **{key: batch[key] for key in FORWARD_KWARGS if key in batch},
            )
        if not forwards:
            self._fail("the forward that yields energies is not taken", "_get_per_token_logps_and_entropies")
        return forwards[0]

    def set_energies_of(self, rollout: Rollout, forward: Forward, rows: Rows = EVERY_ROW) -> None:
        """Store the results of `forward` for `rows`."""
        set_energies(rollout, forward.energy(), forward.logps, rows, forward.states())

    def add_metrics(self, metrics: dict[str, float]) -> None:
        """Add values to the current mode's metrics, which TRL averages until the next log."""
        for name, value in metrics.items():
            self._metrics[self.mode][name].append(value)

    def replace_logged_advantages(self, advantages: list[float]) -> None:
        """Put one number per completion of the latest rollout, from all processes, into the completions table."""
        logged = self._logs["advantages"]
        for _ in range(min(len(advantages), len(logged))):
            logged.pop()
        logged.extend(advantages)

    # Overrides

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        on_forward = self._energy_head.on_forward
        if on_forward is None:
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        states: AbstractContextManager[list[torch.Tensor]] = nullcontext([])
        if self._state_recorder is not None:
            states = self._state_recorder.recording()
        with self._energy_head.energies_of_calls(model) as log_sum_sq_probs, states as state_chunks:
            result = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        on_forward(Forward(result[0], log_sum_sq_probs, state_chunks, self._state_recorder))
        return result

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        before = self.rollouts.get(self.mode)
        if self.mode == "train" and before is not None and before.unmeasured > 0:
            rows = (~before.measured).nonzero().flatten().tolist()
            self._fail(
                f"{len(rows)} of {len(before)} rows of the last rollout, row {rows[0]} the first, have not reached "
                "the loss, so that they have no energies",
                "_prepare_inputs",
                "_compute_loss",
                "compute_loss",
            )
        rollout, batch = self.collect(inputs)
        if before is not None:
            rollout.number = before.number + 1
        self.rollouts[self.mode] = rollout
        self.score_rollout(rollout, batch)
        batch[ROWS] = torch.arange(len(rollout), device=rollout.mask.device)
        batch[ROLLOUT] = torch.full_like(batch[ROWS], rollout.number)
        if rollout.advantages is None:
            del batch["advantages"]  # TRL's own: if nothing replaces them, the loss must not use them
        else:
            batch["advantages"] = advantages_of(rollout)
        return batch

    def collect(self, inputs: list[dict[str, Any]]) -> tuple[Rollout, dict[str, Any]]:
        """
        Completions of `inputs`, one per row, with their rewards and, if TRL ran a no-grad forward, their energies; and
        TRL's batch.
        """
        forwards: list[Forward] = []
        keys = prompt_keys(inputs) if "prompt_key" in self.reads else None
        with self._energy_head.recording_forwards(forwards.append), recorded_rewards(self) as recorders:
            batch = super()._generate_and_score_completions(inputs)
        rewards_per_func = recorders[-1].rewards_per_func if recorders else None
        if rewards_per_func is None:
            self._fail("rewards no longer come from `GRPOTrainer._calculate_rewards`", *_MAKING)
        self._check_rows(batch, recorders[-1])
        returns = weigh_rewards(
            rewards_per_func,
            self.reward_weights,
            self.generations,
            self.scale_rewards,
            self.multi_objective_aggregation,
        )
        _check_finite(returns)
        self._check_group_mean(batch["advantages"], returns)
        rollout = self._rollout_of(batch, returns, recorders[-1])
        if keys is not None:
            rollout.prompt_key = keys.to(rollout.mask.device)
        if (forward := self._forward_of(batch, forwards)) is not None:
            ratio = batch.get("importance_sampling_ratio")
            set_energies(rollout, forward.energy(), forward.logps, states=forward.states(), importance_weights=ratio)
        return rollout, batch

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        together = self.model.training and self.keeps_groups_together
        with groups_kept_together(self.num_generations) if together else nullcontext():
            return super()._prepare_inputs(generation_batch)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        before = self._losses
        with self._advantages_in_time():
            loss = super().training_step(*args, **kwargs)
        if self._losses == before:
            what = "OTBGRPOTrainer's loss is passed by, and with it the baseline"
            self._fail(what, "compute_loss", "_compute_loss", adding=True)  # perhaps not at every step
        return loss

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._advantages_in_time():
            return super().prediction_step(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.keeps_state and self.args.should_save:
            torch.save(self.state_to_save(), Path(output_dir) / STATE_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.keeps_state:
            self.load_saved_state(_read_state(Path(checkpoint) / STATE_FILE))

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        spread = self.importance_sampling_level == "sequence" and self.credits_tokens
        fresh = self._fresh_rows(inputs)
        if "advantages" not in inputs and not fresh.any():
            inputs["advantages"] = advantages_of(self.rollouts[self.mode], inputs[ROWS])
        if not spread and not fresh.any():
            loss = super()._compute_loss(model, inputs)
            self._losses += 1
            return loss
        of_loss = dict(inputs) if spread else inputs  # a copy: the micro-batch is used again

        def on_forward(forward: Forward) -> None:
            if fresh.any():
                self._score_micro_batch(inputs, forward, fresh)
                of_loss["advantages"] = inputs["advantages"]
            if spread:
                spread_sequence_ratio(of_loss, forward.logps)

        with self._energy_head.recording_forwards(on_forward), ratios_per_token(self) if spread else nullcontext():
            loss = super()._compute_loss(model, of_loss)
        if self._fresh_rows(inputs).any():
            self._fail("the loss no longer runs the policy's forward, so that it has no energies", "_compute_loss")
        self._losses += 1
        return loss

    def _fresh_rows(self, inputs: dict[str, Any]) -> torch.Tensor:
        """`(b,)` bool, on the CPU: which rows of a micro-batch belong to the latest rollout and lack statistics."""
        rollout = self.rollouts[self.mode]
        if ROWS not in inputs or ROLLOUT not in inputs:
            self._fail(f"a micro-batch comes without `{ROWS}` and `{ROLLOUT}`", "_prepare_inputs", *_MAKING)
        if rollout.unmeasured == 0 and "advantages" in inputs:
            return torch.zeros(len(inputs[ROWS]), dtype=torch.bool)
        rows = inputs[ROWS].cpu()
        own = inputs[ROLLOUT].cpu() == rollout.number
        if "advantages" not in inputs and not own.all():
            self._fail(
                f"a micro-batch holds rows of {int((~own).sum())} completions of earlier rollouts, whose advantages "
                "waited for the training forward. Set `keep_groups_together=False`, under which a baseline like 'otb' "
                "forms advantages when completions are sampled; nothing like it is there for 'value'",
                "_prepare_inputs",
                *_MAKING,
            )
        ids, named = inputs["completion_ids"][own.to(inputs[ROWS].device)], rows[own].to(rollout.mask.device)
        if not torch.equal(ids, rollout.completion_ids[named]):
            self._fail(
                "a micro-batch holds other completions than its rows of the rollout", "_prepare_inputs", *_MAKING
            )
        return own & ~rollout.measured[rows.clamp(max=len(rollout) - 1)]

    def _score_micro_batch(self, inputs: dict[str, Any], forward: Forward, fresh: torch.Tensor) -> None:
        rollout, chosen = self.rollouts[self.mode], fresh.to(inputs[ROWS].device)
        rows, waiting = inputs[ROWS][chosen], "advantages" not in inputs
        if waiting and not self.credits_rows_alone:
            n, numbers = self.generations, rows.tolist()
            if len(rows) % n != 0 or any(row != numbers[i - i % n] + i % n for i, row in enumerate(numbers)):
                self._fail("a micro-batch holds parts of groups, which were to be kept together", "_prepare_inputs")
        set_energies(rollout, forward.energy()[chosen], forward.logps[chosen], rows, _chosen(forward.states(), chosen))
        with torch.no_grad(), torch.autocast(rollout.mask.device.type, enabled=False):
            self.score_rows(rollout, rows)
        if waiting:
            inputs["advantages"] = advantages_of(rollout, inputs[ROWS])

    # Both use the sign of a completion's advantage, so they get one advantage per completion.

    @classmethod
    def get_off_policy_mask(
        cls, advantages: torch.Tensor, per_token_logps: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        mask = kwargs["mask"] if "mask" in kwargs else args[1]
        return super().get_off_policy_mask(_completion_advantage(advantages, mask), per_token_logps, *args, **kwargs)

    @classmethod
    def get_gamma_weights(
        cls, advantages: torch.Tensor, log_ratio_per_token: torch.Tensor, mask: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        advantages = _completion_advantage(advantages, mask)
        return super().get_gamma_weights(advantages, log_ratio_per_token, mask, *args, **kwargs)

    # Internals

    @contextmanager
    def _advantages_in_time(self) -> Iterator[None]:
        """Within this context reading advantages that wait for the training forward is an error that says so."""
        try:
            yield
        except KeyError as error:
            if error.args != ("advantages",):
                raise
            what = "reads the advantages before the policy's forward has run"
            if (method := method_at_fault(self, error)) is None:
                raise incompatible_trl(f"the loss {what}") from error
            raise TypeError(
                f"`{method}` {what}, which yields the energies that they are formed from. They are in `inputs` once "
                "`super()`'s loss has run. Or set `keep_groups_together=False`, under which a baseline like 'otb' "
                "forms advantages when completions are sampled; nothing like it is there for 'value'."
            ) from error

    def _fail(self, what: str, *methods: str, **which: bool) -> NoReturn:
        """
        Raises:
            TypeError: A user's class overrides one of `methods`, which probably causes `what`.
            ImportError: None does, so TRL has changed.
        """
        theirs = overriders(self, EnergyGRPOTrainer, *methods, **which)
        if not theirs:
            raise incompatible_trl(what)
        raise TypeError(
            f"{what[:1].upper()}{what[1:]}. In `{type(self).__name__}`, look at {', '.join(theirs)}; "
            "recipes/reference.md says what OTBGRPOTrainer asks of such a class."
        )

    def _rollout_of(self, batch: dict[str, Any], returns: Returns, recorder: RewardRecorder) -> Rollout:
        mask = generated_mask(batch)
        own = own_rows(self.accelerator, len(mask))
        rewards = returns.returns[own]
        credited = torch.tensor([bool(recorder)], device=rewards.device)
        if self.accelerator.gather(credited).any():
            rewards = recorder.token_rewards(mask, rewards, returns.factors[own])
        ids = {key: batch[key] for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}
        return Rollout(
            **ids,
            mask=mask,
            num_generations=self.generations,
            rewards=rewards,
            scale=returns.scale[own],
            level=returns.level[own],
            first_row=own.start,
            processing_class=self.processing_class,
        )

    def _check_group_mean(self, advantages: torch.Tensor, returns: Returns) -> None:
        """Compare TRL's own `advantages` of this process with those of the group mean from the recorded rewards."""
        nothing = torch.zeros_like(returns.returns)
        ours = assign_credit_by_totals(returns.returns, nothing, nothing, self.generations).advantages
        ours = ours if self.generations > 1 else torch.zeros_like(ours)  # GRPOTrainer subtracts it from itself
        own = own_rows(self.accelerator, len(advantages))
        expected = (ours.squeeze(1) / returns.scale)[own].nan_to_num(nan=0.0)
        difference = (expected - advantages) * returns.scale[own]
        rounding = 1e-5 * (1 + returns.returns.abs().nan_to_num(nan=0.0).max())
        if (difference.abs() > rounding).any():
            row = int(difference.abs().argmax())
            self._fail(
                f"how GRPOTrainer forms its advantages: for completion {row} of a rollout it has "
                f"{advantages[row].item():.6g}, and the rewards, weights and scale that trl_otb relies on give "
                f"{expected[row].item():.6g}",
                *_MAKING,
            )

    def _check_rows(self, batch: dict[str, Any], recorder: RewardRecorder) -> None:
        """Check that the rows of the batch are those that were rewarded."""
        ids, rewarded = batch["completion_ids"].cpu(), recorder.completion_ids
        if len(ids) != len(rewarded):
            self._fail(f"{len(rewarded)} completions were rewarded and {len(ids)} are to be trained on", *_MAKING)
        for row, of_row in enumerate(rewarded):
            if not torch.equal(ids[row, : len(of_row)], torch.as_tensor(of_row)):
                self._fail(f"completion {row} of a rollout is not the one that was rewarded in its place", *_MAKING)

    def _forward_of(self, batch: dict[str, Any], forwards: list[Forward]) -> Forward | None:
        """The forward that returned the batch's log-probs, by identity, so never that of a reference model."""
        logps = batch.get("old_per_token_logps")
        if logps is None:
            return None
        for forward in forwards:
            if forward.logps is logps:
                return forward
        self._fail(
            "the old log-probs of the rollout are not those that any forward of the policy returned",
            "_get_per_token_logps_and_entropies",
            *_MAKING,
        )


def config_model_id(config: Any) -> str:
    """The hub id or folder that a model was loaded from."""
    return trl_utils.get_config_model_id(config)


def prompt_keys(inputs: list[dict[str, Any]]) -> torch.Tensor:
    """`(B,)` int64 hash of each example's prompt and images, the same in every run."""
    known: dict[tuple[int, ...], int] = {}  # by identity, since the completions of a prompt often share it
    keys = []
    for example in inputs:
        columns = [example.get(name) for name in ("prompt", "image", "images")]
        same = tuple(map(id, columns))
        if same not in known:
            known[same] = int(Hasher.hash(columns)[:15], 16)
        keys.append(known[same])
    return torch.tensor(keys)


def _check_finite(returns: Returns) -> None:
    """Raise a `ValueError` if finite rewards have a sum or standard deviation that is not finite."""
    broken = returns.returns.isinf() | returns.scale.isinf()
    if broken.any():
        row = int(broken.nonzero()[0])
        what = "weighted sum of rewards" if returns.returns[row].isinf() else "standard deviation of returns"
        raise ValueError(
            f"Completion {row} of all processes has a {what} that is not finite in float32, which holds up to 3.4e+38 "
            "and squares of up to 1.8e+19. Scale the rewards, or `reward_weights`, down."
        )


def _read_state(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        return dict(torch.load(path, weights_only=True, map_location="cpu"))
    except Exception as error:  # of pickle, of all kinds
        raise ValueError(
            f"{path} is damaged, or no file of OTBGRPOTrainer ({type(error).__name__}). Remove it, and the baseline "
            "starts anew."
        ) from None


def _chosen(values: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
    return None if values is None else values[rows]


def _completion_advantage(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(B, 1) mean advantage of a completion's generated tokens."""
    return (advantages * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
