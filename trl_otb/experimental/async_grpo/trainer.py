"""Baselines per token in TRL's AsyncGRPOTrainer, from the training forward alone."""

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate.logging import get_logger
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...baselines import Completions, squeeze
from ...energy import token_energy
from ...run.baseline import RunBaseline
from ...run.gain import Gain
from ...run.metrics import STATISTICS, summarize
from ...run.sampler import changed_distribution, dropout_of, warning_of_dropout
from ...seam.forwards import PolicyRecorder, policy_of
from ...seam.loss import check_product
from ...seam.namespace import Namespace, check_names
from ...seam.subclasses import users_loss
from ...state import KeepsBaseline, check_unchanged, gain_of
from .config import AsyncOTBGRPOConfig, check_async_options, warn_of_scale
from .parts import ASYNC_GRPO, LOSS
from .worker import AfterStep, AsyncGRPOConfig, AsyncGRPOTrainer, carried_with, stamp_groups


logger = get_logger(__name__)
METRICS = ("baseline/mean", "advantage/abs_mean", "grad_power_ratio")  # as OTBGRPOTrainer's


class Sample(NamedTuple):
    """A trained row: numbers of its completion, and a tensor per token."""

    returns: Tensor
    b0: Tensor
    group: Tensor
    energy: Tensor  # w, of the policy that is trained
    loss_energy: Tensor  # ρ² w, ρ = π / μ: to learn from, never to predict with
    logps: Tensor
    states: Tensor
    draw_ratio: Tensor  # ρ, since the loss weights each token by itself; 0 if μ is cut


def completions_of(samples: list[Sample]) -> tuple[Completions, Tensor]:
    """[`Completions`] of one per group, and B0, `(B, 1)`; those without a return or B0 are unscored."""
    returns, b0, group, *tensors = zip(*samples, strict=True)
    named = zip(Sample._fields[3:], tensors, strict=True)
    of_tokens: dict[str, Any] = {name: pad_sequence([*values], batch_first=True) for name, values in named}
    mask = pad_sequence([torch.ones_like(sample.energy) for sample in samples], batch_first=True)
    total, known = torch.stack(returns).float(), torch.stack(b0).float()
    x = squeeze(total.where(known.isfinite(), torch.nan), mask, num_generations=1, **of_tokens)
    return replace(x, prompt=torch.stack(group).long()), known.nan_to_num(nan=0.0).unsqueeze(1)


class DeferredAdvantages:
    """Stands for `inputs["advantages"]`, which TRL's loss indexes before the forward and multiplies after it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.values = torch.full((size,), torch.nan, device=device)

    def __getitem__(self, selected: Tensor) -> Tensor:
        return self.values


@dataclass
class AsyncNamespace(Namespace):
    """The state of an asynchronous trainer."""

    b0: str = "rloo"
    scale_rewards: str = "none"
    luck_is_known: bool = True  # whether tokens are drawn from the policy's own distribution
    to_learn: list[Sample] = field(default_factory=list)
    to_come: dict[int, int] = field(default_factory=dict)  # of the groups of this step, the samples still to come
    # Of this step
    sums: dict[str, Tensor] = field(default_factory=lambda: defaultdict(lambda: torch.zeros((), dtype=torch.float64)))


class AsyncOTBGRPOTrainer(KeepsBaseline, AsyncGRPOTrainer):
    """
    TRL's [`~trl.experimental.async_grpo.AsyncGRPOTrainer`] with a baseline of one's choice, by default `value`, one per
    token. It takes the same arguments; rollout worker and loss are TRL's.

    `value` starts from the mean return of the group's other completions; if there is none, from the mean return of
    earlier steps. It learns with weights ρ² w, where ρ is the ratio of the trained policy to the one that sampled. Its
    predictions do not depend on ρ. It learns from a group when all samples of the group have been trained on, or
    dropped as stale: until then θ must not hold their returns. So a worker must give the samples of a group one after
    another, as TRL's does. Advantages are unbiased up to TRL's clipping, as leave-one-out means are.

    Args:
        model, reward_funcs, train_dataset, ...: As for TRL's trainer.
        args ([`AsyncOTBGRPOConfig`] or TRL's `AsyncGRPOConfig`, *optional*): A plain one has `value`, unscaled.
    """

    _trl_otb: AsyncNamespace
    _tag_names = ["trl", "async-grpo", "otb"]  # noqa: RUF012
    _name = "AsyncOTB"

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: AsyncGRPOConfig | None = None, *other: Any, **kwargs: Any
    ) -> None:
        ASYNC_GRPO.check()
        check_names(self, AsyncGRPOTrainer)
        if "progress_funcs" in kwargs:
            raise TypeError(
                "`progress_funcs` is not read in asynchronous training, whose trainer gets tokens without their texts "
                "and columns. Leave it out, or use OTBGRPOTrainer."
            )
        if args is None:
            args = AsyncOTBGRPOConfig(f"{model.rstrip('/').split('/')[-1]}-AsyncOTB")
        if not isinstance(args, AsyncGRPOConfig):
            raise TypeError(f"`args` is a {type(args).__name__}: AsyncOTBGRPOTrainer takes an AsyncOTBGRPOConfig.")
        if not hasattr(args, "scale_rewards"):
            warn_of_scale()
        entry = check_async_options(args)
        self._trl_otb = AsyncNamespace(
            RunBaseline(entry),
            entry.needs,
            getattr(args, "baseline", None),
            # Decayed sums of earlier returns, and of 1
            extra_state={"earlier": torch.zeros(2, dtype=torch.float64)},
            scale_rewards=getattr(args, "scale_rewards", "none"),
        )
        super().__init__(model, reward_funcs, args, *other, **kwargs)
        ASYNC_GRPO.check_attributes("AsyncGRPOTrainer", self)
        # That is known to multiply each token by its own advantage, which is known after the forward
        self._trl_otb.known_loss = None if ASYNC_GRPO.warn_if_changed() else AsyncGRPOTrainer.compute_loss
        check_users_loss(self)
        self._trl_otb.recorder = PolicyRecorder(self.model, self.temperature, False)
        changed, dropout = changed_distribution(args), dropout_of(policy_of(self.model))
        self._trl_otb.luck_is_known = changed is None
        if self.baseline.entry.name == "value" and changed is not None:
            logger.warning_once(f"Later luck is not subtracted: {changed}.")
        if self.baseline.entry.name == "value" and dropout is not None:
            logger.warning_once(warning_of_dropout(dropout))
        stamp_groups(self.rollout_worker)
        if not uses_trl_advantages(self):
            self.add_callback(AfterStep(partial(after_step, self)))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's `train`."""
        name, config = self.baseline.entry.name, type(self.args).__name__
        named = f"set in {config}" if hasattr(self.args, "baseline") else f"the default: {config} names none"
        self.accelerator.print(
            f"Training with baseline {name!r} ({named}) and scale_rewards {self._trl_otb.scale_rewards!r}."
        )
        self._trl_otb.gain = Gain()
        result = super().train(*args, **kwargs)
        if line := self._trl_otb.gain.line(*gain_of(self)):
            self.accelerator.print(line)
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        check_unchanged(self)  # which a callback may have done
        check_users_loss(self)  # methods may be set on a trainer, too
        return super().training_step(*args, **kwargs)

    def get_train_dataloader(self) -> Any:
        self._trl_otb.to_learn, self._trl_otb.to_come = [], {}  # of a training that was interrupted
        self._trl_otb.sums.clear()
        loader: Any = super().get_train_dataloader()
        ASYNC_GRPO.check_attributes("DataLoaderDispatcher", loader)
        of = loader.base_dataloader
        of.collate_fn = carried_with(
            of.collate_fn, self.args.num_generations, None if uses_trl_advantages(self) else self._trl_otb.scale_rewards
        )
        return loader

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        ASYNC_GRPO.check_attributes("AsyncGRPOTrainer's batch", inputs)
        inputs = dict(inputs)
        carried, groups = inputs.pop("otb_samples")[0].view(torch.float64), inputs.pop("otb_groups")[0]
        if uses_trl_advantages(self):
            return super().compute_loss(model, inputs, *args, **kwargs)
        selected = inputs["token_index"] >= 0
        index, sample_of = inputs["token_index"][selected], inputs["segment_id"][selected]
        unchanged = ((carried[:, 0] - carried[:, 2]) / (carried[:, 1] + 1e-8)).nan_to_num(0.0)  # (G − mean) / deviation
        given = inputs["advantages"][selected].double()
        if not torch.allclose(given, unchanged[sample_of], rtol=1e-2, atol=1e-4):  # also in bfloat16
            logger.warning_once(
                "Advantages that the worker or a method of yours changed are replaced by those of "
                f"`baseline={self.baseline.entry.name!r}`: change rewards instead."
            )
        if self._trl_otb.known_loss is not AsyncGRPOTrainer.compute_loss and check_loss(self, model, inputs, index):
            self._trl_otb.known_loss = AsyncGRPOTrainer.compute_loss
        self._trl_otb.to_come.update(groups.tolist())
        old_logps, advantages = inputs["old_log_probs"][selected], DeferredAdvantages(len(index), carried.device)

        def forward(**packed: Any) -> Any:
            with_states = "states" in self.baseline.entry.needs
            with self._trl_otb.recorder.reading(with_states) as states:
                outputs = model(**packed)
            with torch.no_grad(), torch.autocast(carried.device.type, enabled=False):
                logps = outputs.log_probs.detach().float().flatten()[index]
                energy = token_energy(logps, outputs.log_sum_sq_probs.flatten()[index])
                ratio = torch.exp(logps - old_logps)
                read = self._trl_otb.recorder.checked(states, 1)[0][0][index] if with_states else energy[:, None]
                of_tokens = energy, ratio.square() * energy, logps, read, ratio * self._trl_otb.luck_is_known
                advantages.values.copy_(advantages_of(self, carried, sample_of, of_tokens))
                add_up(self, terms=torch.ones_like(ratio), ratio=ratio, square=ratio.square())
            return outputs

        return super().compute_loss(forward, inputs | {"advantages": advantages}, *args, **kwargs)


def uses_trl_advantages(trainer: AsyncOTBGRPOTrainer) -> bool:
    """Whether advantages are those that TRL's worker has stamped."""
    return trainer.baseline.entry.name == "group_mean" and trainer._trl_otb.scale_rewards == "group"


def check_users_loss(trainer: AsyncOTBGRPOTrainer) -> None:
    """A `TypeError` if a user's loss could read advantages before the forward, which yields them."""
    if uses_trl_advantages(trainer) or getattr(trainer, "takes_token_advantages", False):
        return
    if loss := users_loss(trainer, tried="compute_loss", of_trl=AsyncGRPOTrainer):
        raise TypeError(
            f"`baseline` is {trainer.baseline.entry.name!r}, whose advantages are known after the forward, and "
            f"`{loss}` may read them before. If it only adds to the loss of `super()`, set "
            "`takes_token_advantages = True` in the class; else set `baseline='group_mean'` and "
            "`scale_rewards='group'`, whose advantages the worker computes."
        )


def check_loss(trainer: AsyncOTBGRPOTrainer, model: Any, inputs: dict[str, Any], index: Tensor) -> bool:
    """[`check_product`] of TRL's loss, with advantages that are known after the forward."""

    def forward(**packed: Any) -> tuple[Any, Tensor]:
        outputs = model(**packed)
        outputs.log_probs = outputs.log_probs.detach().requires_grad_()
        return outputs, outputs.log_probs

    def loss(probe: Any, forward: Any, advantages: Tensor) -> Tensor:
        deferred = DeferredAdvantages(len(index), index.device)

        def known_afterwards(**packed: Any) -> Any:
            outputs = forward(**packed)
            deferred.values.copy_(advantages)
            return outputs

        return AsyncGRPOTrainer.compute_loss(probe, known_afterwards, inputs | {"advantages": deferred})

    return check_product(LOSS, trainer, forward, loss, index, lambda gradient: gradient.flatten()[index])


def advantages_of(
    trainer: AsyncOTBGRPOTrainer, carried: Tensor, sample_of: Tensor, of_tokens: tuple[Tensor, ...]
) -> Tensor:
    """`(M,)`: one per term of the loss, whose terms of one sample are adjacent; 0 without a return or B0."""
    total, std, mean, leave_one_out_mean, group = carried.unbind(dim=1)
    sizes = torch.bincount(sample_of, minlength=len(carried)).tolist()
    b0 = {"group_mean": mean, "none": torch.zeros_like(mean)}.get(trainer.baseline.entry.name, leave_one_out_mean)
    if trainer.baseline.entry.adjusts:
        total_of_earlier, number = trainer._trl_otb.extra_state["earlier"]
        b0 = b0.where(b0.isfinite(), (total_of_earlier / number).to(b0))  # NaN before anything is known
    by_sample = [values.split(sizes) for values in of_tokens]
    samples = [Sample(*row) for row in zip(total, b0, group, *by_sample, strict=True) if len(row[3])]
    local, known = completions_of(samples)
    scale, kept = torch.ones_like(known), torch.tensor(sizes, device=std.device) > 0
    if trainer._trl_otb.scale_rewards == "group":
        scale = (std[kept].float() + 1e-8).unsqueeze(1).nan_to_num(nan=1.0)
    found = trainer.baseline.advantages_of(local, scale, b0=known)
    trainer._trl_otb.to_learn += samples
    add_up(trainer, **dict(zip(STATISTICS, found.statistics.unbind(dim=1), strict=True)))
    rows = zip(found.advantages.expand_as(local.mask), samples, strict=True)
    return torch.cat([row[: len(sample.logps)] for row, sample in rows])


def add_up(trainer: AsyncOTBGRPOTrainer, **values: Tensor) -> None:
    for name, of in values.items():
        trainer._trl_otb.sums[name] = trainer._trl_otb.sums[name].to(of.device) + of.double().sum()


def after_step(trainer: AsyncOTBGRPOTrainer) -> None:
    sums = trainer.accelerator.gather(torch.stack([*trainer._trl_otb.sums.values()]).unsqueeze(0)).sum(dim=0)
    of = dict(zip(trainer._trl_otb.sums, sums.tolist(), strict=True))
    trainer._trl_otb.sums.clear()
    of_step = summarize(torch.tensor([[of[name] for name in STATISTICS]]), 1)
    learned = learn(trainer)
    trainer._trl_otb.gain.add(of, learned)
    metrics = {name: of_step[name] for name in METRICS} | learned
    metrics["effective_sample_share"] = of["ratio"] ** 2 / max(of["terms"] * of["square"], 1e-300)
    for name, value in metrics.items():
        if not math.isnan(value):
            trainer._metrics["train"][f"otb/{name}"].append(value)


def learn(trainer: AsyncOTBGRPOTrainer) -> dict[str, float]:
    """From groups that are complete, since B0 holds the returns of all their samples."""
    of = trainer._trl_otb
    ready = [sample for sample in of.to_learn if of.to_come.get(int(sample.group), 0) <= 0]
    of.to_learn = [sample for sample in of.to_learn if of.to_come.get(int(sample.group), 0) > 0]
    of.to_come, ready = {}, ready or [nothing(trainer)]
    metrics = trainer.baseline.learn(*completions_of(ready), trainer.accelerator.gather)
    returns = torch.stack([sample.returns for sample in ready]).double()
    known = torch.stack([returns.nansum(), returns.isfinite().sum().double()])
    known = trainer.accelerator.gather(known.unsqueeze(0)).sum(dim=0).cpu()
    of.extra_state["earlier"] = 0.9 * of.extra_state["earlier"] + known
    return metrics


def nothing(trainer: AsyncOTBGRPOTrainer) -> Sample:
    """An unscored token, as all processes learn together."""
    projection, device = trainer._trl_otb.recorder.projection, trainer.accelerator.device
    width = 1 if projection is None else projection.size(1)
    nan, zero = torch.tensor(torch.nan, device=device), torch.zeros(1, device=device)
    return Sample(nan, nan, zero[0], zero, zero, zero, torch.zeros(1, width, device=device), zero)
