"""What both trainers keep of a baseline that learns: in memory, and in checkpoints."""

from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from transformers import Trainer

from .baselines import Baseline, find_baseline
from .seam.forwards import PolicyRecorder


logger = get_logger(__name__)

STATE_FILE = "baseline.pt"  # in a checkpoint


class KeepsBaseline(Trainer):
    """A [`~transformers.Trainer`] whose checkpoints hold the state of its baseline."""

    _baseline: Baseline
    recorder: PolicyRecorder
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
        if checkpoint is None or not self._baseline.learns:
            return
        path, name = Path(checkpoint) / STATE_FILE, self._baseline.name
        try:
            state = dict(torch.load(path, weights_only=True, map_location="cpu")) if path.exists() else {}
        except Exception as error:  # of pickle, of all kinds
            raise ValueError(
                f"{path} is damaged, or no file of trl_otb's trainers ({type(error).__name__}). Remove it, and the "
                "baseline starts with empty state."
            ) from None
        if state.get("baseline") == name:
            self._baseline.rule.load_state_dict(state["state"])
            self.recorder.projection, self._has_learned = state["projection"], True
            self.load_more(state)
            return
        found = f"the state of {state['baseline']!r}" if "baseline" in state else "nothing"
        logger.warning(
            f"The checkpoint holds {found} for `baseline={name!r}`, which learns from earlier batches: it now starts "
            "with empty state."
        )
        self._baseline, self._has_learned = find_baseline(type(self._baseline.rule)).instance(), False

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._baseline.learns and self.args.should_save:
            state: dict[str, Any] = {"baseline": self._baseline.name, "state": self._baseline.state()}
            state["projection"] = None if self.recorder.projection is None else self.recorder.projection.cpu()
            torch.save(state | self.more_state(), Path(output_dir) / STATE_FILE)

    def more_state(self) -> dict[str, Any]:
        """What else the file holds."""
        return {}

    def load_more(self, state: dict[str, Any]) -> None:
        """Take it from a file that was read."""
