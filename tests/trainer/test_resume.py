"""Resuming, and training again after an error."""

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from tests.helpers.settings import LORA, assert_same_weights, logged
from trl_otb import OTBGRPOTrainer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        {"peft_config": LORA},
        {"scale_rewards": "running", "baseline": "rloo"},
        {"scale_rewards": "running", "baseline": "value"},
    ],
)
def test_resume_is_bit_exact(train, tmp_path, options):
    whole = train(max_steps=4, save_strategy="steps", save_steps=2, output_dir=str(tmp_path / "run"), **options)
    resumed = train(max_steps=4, output_dir=str(tmp_path / "run"), train=False, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert_same_weights(whole, resumed)
    assert logged(whole, "otb/grad_power") == logged(resumed, "otb/grad_power")


PLACES = {  # of a forward, by the number of tokens read and whether there is a gradient
    "generation": lambda length, grad: length == 1,
    "a scoring forward": lambda length, grad: length > 4 and not grad,
    "the loss": lambda length, grad: grad,
}


def train_with_an_error(trainer, place, error, monkeypatch):
    """The error comes once, the first time that training gets to this place; then it trains again."""

    def fails(*args, **kwargs):
        raise error

    def in_forward(module, args, kwargs):
        if PLACES[place](kwargs["input_ids"].size(1), torch.is_grad_enabled()):
            raise error

    with monkeypatch.context() as patch:
        if place == "a reward":
            patch.setattr(trainer, "reward_funcs", [fails])
        if place == "backward":
            patch.setattr(trainer.accelerator, "backward", fails)
        hook = trainer.model.register_forward_pre_hook(
            in_forward if place in PLACES else lambda *args: None, with_kwargs=place in PLACES
        )
        with pytest.raises(type(error)):
            trainer.train()
        hook.remove()
    trainer.train()
    return trainer


@pytest.mark.parametrize("place", [*PLACES, "a reward", "backward"])
@pytest.mark.parametrize(
    ("baseline", "error"),
    [("group_mean", RuntimeError("out of memory")), ("otb", RuntimeError("no")), ("value", KeyboardInterrupt())],
)
def test_failed_step_leaves_training_as_grpo(train, monkeypatch, place, baseline, error):
    """To the bit under the group mean; the others at a learning rate of 0, where all have the same completions."""
    options = {"num_iterations": 2, "max_steps": 4, "train": False}
    options |= {} if baseline == "group_mean" else {"learning_rate": 0.0}
    grpo = train(GRPOTrainer, GRPOConfig, scale_rewards="none", **options)
    train_with_an_error(grpo, place, error, monkeypatch)
    ours = train(OTBGRPOTrainer, baseline=baseline, **options)
    train_with_an_error(ours, place, error, monkeypatch)
    assert_same_weights(ours, grpo)
    assert logged(ours, "reward") == logged(grpo, "reward")
    assert len(logged(ours, "otb/grad_power")) == len(logged(grpo, "reward")) > 0
