"""What both trainers keep of their baseline: in memory, in checkpoints, and in the model card."""

from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import Trainer

from .baselines import find_baseline
from .run.baseline import STATE_FILE, reference_of
from .seam.contract import trl_utils
from .seam.forwards import policy_of
from .seam.namespace import Namespace, Public
from .version import __version__


logger = get_logger(__name__)


class KeepsBaseline(Trainer):
    """A [`~transformers.Trainer`] whose checkpoints hold the state of its baseline."""

    _trl_otb: Namespace
    baseline = Public()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled  # whose files have other names
        missing = [name for name in ("optimizer.pt", "scheduler.pt") if not (Path(checkpoint) / name).exists()]
        if missing and not sharded:
            logger.warning(
                f"{checkpoint} has no {' and no '.join(missing)}, as with `save_only_model`: the state of the "
                "optimizer and of the learning rate is reset, so the run differs from one that was not stopped."
            )
        _load_baseline(self, Path(checkpoint))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save and (state := self.baseline.state_dict()):
            if self.baseline.entry.learns:
                projection = self._trl_otb.recorder.projection
                state["projection"] = None if projection is None else projection.cpu()
            progress = self._trl_otb.progress if "progress" in self._trl_otb.needs else None
            of_progress = {"progress": []} if progress is None else progress.state_dict()
            torch.save(state | self._trl_otb.extra_state | of_progress, Path(output_dir) / STATE_FILE)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        super().create_model_card(*args, **kwargs)
        card = Path(self.args.output_dir) / "README.md"
        if self.is_world_process_zero() and card.is_file():
            policy = policy_of(self.model)
            name = trl_utils.get_config_model_id(policy.config) or type(policy).__name__
            with card.open("a", encoding="utf-8") as file:
                file.write(
                    f"\n## Baseline\n\nTrained from `{name}` with trl_otb {__version__}: "
                    f"`baseline={self.baseline.entry.name!r}`, `num_generations={self.args.num_generations}`, "
                    f"`scale_rewards={getattr(self.args, 'scale_rewards', 'none')!r}`. Token energies are those of the "
                    "Optimal Token Baseline (https://arxiv.org/abs/2602.07078).\n"
                )
                if line := self._trl_otb.gain.line(*gain_of(self)):
                    file.write(f"\nBy the end of training {line}\n")


def gain_of(trainer: KeepsBaseline) -> tuple[str, str | None, str | None, bool, bool]:
    """What [`~trl_otb.run.gain.Gain.line`] needs to know of a trainer: its baseline, and what it is compared with."""
    entry, n = trainer.baseline.entry, trainer.args.num_generations
    if trainer._trl_otb.b0 != "rloo_pooled":  # asynchronous: no batch is compared with another baseline
        return entry.name, trainer._trl_otb.b0 if n > 1 else None, None, False, False
    reference = reference_of(entry, n)
    reads, has = "progress" in trainer._trl_otb.needs, trainer._trl_otb.progress is not None
    compared = None if entry.name == reference else reference
    return entry.name, "rloo_pooled", compared, reads and not has, reads and has and n > 1


def load_checkpoint(trainer: KeepsBaseline, folder: str | Path) -> None:
    """
    Restore weights, and what the baseline has learned, to measure or sample with them;
    `train(resume_from_checkpoint=…)` restores a run. A `ValueError` if `folder` holds no checkpoint, or if it is
    one of DeepSpeed or FSDP.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"There is no checkpoint in {folder}: it is no folder.")
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ValueError(
            f"{folder} cannot be loaded here: with DeepSpeed or FSDP weights are restored by "
            "`train(resume_from_checkpoint=…)` alone. Save the model, and load it from its folder."
        )
    trainer._load_from_checkpoint(str(folder))
    _load_baseline(trainer, Path(folder))


def check_unchanged(trainer: KeepsBaseline) -> None:
    """Raise a `ValueError` if the config names another baseline than it did when the trainer was made."""
    now, kept = getattr(trainer.args, "baseline", None), trainer.baseline.entry.name
    if now not in (None, trainer._trl_otb.option) and find_baseline(now).name != kept:
        raise ValueError(
            f"`args.baseline` was set to {now!r} after the trainer was made with {kept!r}, which it keeps. Make a "
            "new trainer."
        )


def _load_baseline(trainer: KeepsBaseline, checkpoint: Path) -> None:
    path, name, learns = checkpoint / STATE_FILE, trainer.baseline.entry.name, trainer.baseline.entry.learns
    try:
        state = dict(torch.load(path, weights_only=True, map_location="cpu")) if path.exists() else {}
    except Exception as error:  # of pickle, of all kinds
        if not (learns or trainer.baseline.running_scale):
            return  # nothing of it is used
        raise ValueError(
            f"{path} is damaged, or no file of trl_otb's trainers ({type(error).__name__}). Remove it, and the "
            "baseline starts with empty state."
        ) from None
    if "baseline" in state and not learns:
        logger.warning(
            f"The checkpoint holds the state of {state['baseline']!r}, which `baseline={name!r}` does not use: the "
            "run goes on with another baseline, and that state is lost with the next checkpoint."
        )
    if ("scale" in state) != (trainer.baseline.running_scale is not None):
        had, has = ("a", "no") if "scale" in state else ("no", "a")
        logger.warning(
            f"The checkpoint holds {had} running scale of advantages, and the run has {has} running scale: "
            "advantages are now of another size. "
            + (
                "Set `scale_rewards` as it was."
                if path.exists()
                else f"{path.name} is missing, as by `save_only_model`."
            )
        )
    if "_sums" in state.get("state", {}) and "_names" not in state["state"]:  # before 0.13 columns had no names
        state["state"] = {"progress": state.get("progress", []), **state["state"]}
    if not trainer.baseline.load_state_dict(state):
        content = f"the state of {state['baseline']!r}" if "baseline" in state else "nothing"
        logger.warning(
            f"The checkpoint holds {content} for `baseline={name!r}`, which learns from earlier batches: it now "
            "starts with empty state."
        )
    elif learns:
        trainer._trl_otb.recorder.projection = state.get("projection")
        # A file lacks what only the other trainer, or a newer release, stores
        extra = trainer._trl_otb.extra_state
        extra.update({key: state[key] for key in extra.keys() & state.keys()})
        _load_progress(trainer, state)


def _load_progress(trainer: KeepsBaseline, state: dict[str, Any]) -> None:
    """The usual length of completions; and a warning if the run has other progress functions."""
    progress, before = trainer._trl_otb.progress, state.get("progress", [])
    if progress is not None:
        progress.load_state_dict(state)
    now = [] if progress is None or "progress" not in trainer._trl_otb.needs else progress.names
    if {*before} == {*now}:
        return
    logger.warning(
        f"The checkpoint's baseline was fitted with {_functions(before)}, and the run has {_functions(now)}: what it "
        "learned about functions that are gone is dropped, and it has learned nothing about new ones yet."
    )


def _functions(names: list[str]) -> str:
    return f"the progress functions {', '.join(map(repr, names))}" if names else "no progress functions"
