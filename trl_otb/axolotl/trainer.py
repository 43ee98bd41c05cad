"""Axolotl's GRPO trainer with a baseline of this package."""

from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer

from ..trainer import OTBGRPOTrainer


class OTBTrainer(OTBGRPOTrainer, AxolotlGRPOTrainer):
    """
    [`~trl_otb.OTBGRPOTrainer`] with Axolotl's optimizers, schedulers and distributed set-up. For a class of your own,
    derive from it, and name it as `trainer_cls` in the YAML file.
    """

    _tag_names = [*OTBGRPOTrainer._tag_names, "axolotl"]  # noqa: RUF012
