"""What both trainers keep of a baseline that learns: in memory, and in checkpoints."""

from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from transformers import Trainer

import trl_otb

from .baselines import Baseline, find_baseline
from .seam.contract import trl_utils
from .seam.forwards import PolicyRecorder


logger = get_logger(__name__)

STATE_FILE = "baseline.pt"  # in a checkpoint


class RunningScale:
    """The standard deviation of returns within groups, over earlier batches; a batch ago weighs 0.9 of the present."""

    def __init__(self) -> None:
        self.sums = (0.0, 0.0)  # of the variances of groups, and of their number; groups of equal returns left out

    def of(self, returns: torch.Tensor, num_generations: int, learn: bool) -> float:
        """
        The scale of a batch with these returns, `(B_all,)`: by earlier batches, and by its own if there are none. 1 if
        nothing varied. N = 1: the whole batch is one group.
        """
        groups = returns.view(-1, num_generations if num_generations > 1 else len(returns)).double()
        variances = trl_utils.nanstd(groups, dim=1).square() if groups.size(1) > 1 else groups.new_zeros(1)
        variances = variances[variances > 0]  # NaN is not
        new = (0.9 * self.sums[0] + variances.sum().item(), 0.9 * self.sums[1] + len(variances))
        total, number = self.sums if self.sums[1] > 0 else new
        if learn:
            self.sums = new
        return (total / number) ** 0.5 if number > 0 else 1.0


class KeepsBaseline(Trainer):
    """A [`~transformers.Trainer`] whose checkpoints hold the state of its baseline."""

    _baseline: Baseline
    recorder: PolicyRecorder
    scale_rewards: Any
    running_scale: RunningScale | None = None  # under `scale_rewards="running"`
    _has_learned = False

    @property
    def policy(self) -> Any:
        """The model without the PEFT wrapper."""
        return self.model.get_base_model() if is_peft_model(self.model) else self.model

    @property
    def trained_baseline(self) -> Baseline | None:
        """The baseline, if it has learned from generation batches."""
        return self._baseline if self._has_learned else None

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or not self._keeps_state:
            return
        path, name = Path(checkpoint) / STATE_FILE, self._baseline.name
        try:
            state = dict(torch.load(path, weights_only=True, map_location="cpu")) if path.exists() else {}
        except Exception as error:  # of pickle, of all kinds
            raise ValueError(
                f"{path} is damaged, or no file of trl_otb's trainers ({type(error).__name__}). Remove it, and the "
                "baseline starts with empty state."
            ) from None
        if self.running_scale is not None:
            self.running_scale.sums = tuple(state.get("scale", (0.0, 0.0)))
        if not self._baseline.learns:
            return
        if state.get("baseline") == name:
            self._baseline.rule.load_state_dict(state["state"])
            self.recorder.projection, self._has_learned = state["projection"], True
            self.load_more(state)
            return
        content = f"the state of {state['baseline']!r}" if "baseline" in state else "nothing"
        logger.warning(
            f"The checkpoint holds {content} for `baseline={name!r}`, which learns from earlier batches: it now starts "
            "with empty state."
        )
        self._baseline, self._has_learned = find_baseline(type(self._baseline.rule)).instance(), False

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._keeps_state and self.args.should_save:
            state: dict[str, Any] = {} if self.running_scale is None else {"scale": self.running_scale.sums}
            if self._baseline.learns:
                state |= {"baseline": self._baseline.name, "state": self._baseline.state()}
                state["projection"] = None if self.recorder.projection is None else self.recorder.projection.cpu()
            torch.save(state | self.more_state(), Path(output_dir) / STATE_FILE)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        super().create_model_card(*args, **kwargs)
        card = Path(self.args.output_dir) / "README.md"
        if self.is_world_process_zero() and card.is_file():
            name = trl_utils.get_config_model_id(self.model.config) or type(self.model).__name__
            with card.open("a", encoding="utf-8") as file:
                file.write(
                    f"\n## Baseline\n\nTrained from `{name}` with trl_otb {trl_otb.__version__}: "
                    f"`baseline={self._baseline.name!r}`, `num_generations={self.args.num_generations}`, "
                    f"`scale_rewards={getattr(self.args, 'scale_rewards', 'none')!r}`.\n"
                )

    @property
    def _keeps_state(self) -> bool:
        return self._baseline.learns or self.running_scale is not None

    def more_state(self) -> dict[str, Any]:
        """What else the file holds."""
        return {}

    def load_more(self, state: dict[str, Any]) -> None:
        """Take it from a file that was read."""
