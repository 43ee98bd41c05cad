"""What both trainers keep of their baseline: in memory, in checkpoints, and in the model card."""

from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import Trainer

import trl_otb

from .seam.contract import trl_utils
from .seam.private import Private, Public


logger = get_logger(__name__)

STATE_FILE = "baseline.pt"  # in a checkpoint


class KeepsBaseline(Trainer):
    """A [`~transformers.Trainer`] whose checkpoints hold the state of its baseline."""

    _trl_otb: Private
    baseline = Public()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or not (self.baseline.entry.learns or self.baseline.running_scale):
            return
        path, name = Path(checkpoint) / STATE_FILE, self.baseline.entry.name
        try:
            state = dict(torch.load(path, weights_only=True, map_location="cpu")) if path.exists() else {}
        except Exception as error:  # of pickle, of all kinds
            raise ValueError(
                f"{path} is damaged, or no file of trl_otb's trainers ({type(error).__name__}). Remove it, and the "
                "baseline starts with empty state."
            ) from None
        if not self.baseline.load_state_dict(state):
            content = f"the state of {state['baseline']!r}" if "baseline" in state else "nothing"
            logger.warning(
                f"The checkpoint holds {content} for `baseline={name!r}`, which learns from earlier batches: it now "
                "starts with empty state."
            )
        elif self.baseline.entry.learns:
            self._trl_otb.recorder.projection = state.get("projection")
            # Less in a file of OTBGRPOTrainer
            extra = self._trl_otb.extra_state
            extra.update({key: state[key] for key in extra if key in state})

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save and (state := self.baseline.state_dict()):
            if self.baseline.entry.learns:
                projection = self._trl_otb.recorder.projection
                state["projection"] = None if projection is None else projection.cpu()
            torch.save(state | self._trl_otb.extra_state, Path(output_dir) / STATE_FILE)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        super().create_model_card(*args, **kwargs)
        card = Path(self.args.output_dir) / "README.md"
        if self.is_world_process_zero() and card.is_file():
            name = trl_utils.get_config_model_id(self.model.config) or type(self.model).__name__
            with card.open("a", encoding="utf-8") as file:
                file.write(
                    f"\n## Baseline\n\nTrained from `{name}` with trl_otb {trl_otb.__version__}: "
                    f"`baseline={self.baseline.entry.name!r}`, `num_generations={self.args.num_generations}`, "
                    f"`scale_rewards={getattr(self.args, 'scale_rewards', 'none')!r}`. Token energies are those of the "
                    "Optimal Token Baseline (https://arxiv.org/abs/2602.07078).\n"
                )
