"""Resuming, and training again after an error."""

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from tests.helpers.settings import LORA, SETTINGS, assert_same_weights, in_turn, logged
from trl_otb import OTBGRPOTrainer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale_rewards": "running", "baseline": "value"},
        *[{"baseline": "value", **options} for options in (SETTINGS["split groups"], {"peft_config": LORA})],
    ],
)
def test_resume_is_bit_exact(train, tmp_path, options, monkeypatch):
    options = {"max_steps": 6, "output_dir": str(tmp_path / "run"), **options}
    whole = train(save_strategy="steps", save_steps=3, **options)
    # Another version of torch may draw other random numbers
    monkeypatch.setattr("trl_otb.seam.forwards.projection", lambda size: torch.zeros(size, 32))
    resumed = train(train=False, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert_same_weights(whole, resumed)
    for key in ("otb/grad_power", "otb/value/explained"):
        assert logged(whole, key) == logged(resumed, key)
    if options.get("baseline") == "value":
        of_both = [trainer.baseline.entry.estimator.state_dict()["_value_sums"] for trainer in (whole, resumed)]
        assert torch.equal(*of_both) and of_both[0].abs().max() > 0
        assert torch.equal(whole._trl_otb.recorder.projection, resumed._trl_otb.recorder.projection)


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


ERRORS = {"group_mean": RuntimeError("out of memory"), "value": KeyboardInterrupt()}


@pytest.mark.parametrize(("place", "baseline"), in_turn([*PLACES, "a reward", "backward"], ERRORS))
def test_failed_step_leaves_training_as_grpo(train, monkeypatch, place, baseline):
    """To the bit under the group mean; the others at a learning rate of 0, where all have the same completions."""
    error, options = ERRORS[baseline], {"num_iterations": 2, "max_steps": 4, "train": False}
    options |= {} if baseline == "group_mean" else {"learning_rate": 0.0}
    grpo = train(GRPOTrainer, GRPOConfig, scale_rewards="none", **options)
    train_with_an_error(grpo, place, error, monkeypatch)
    ours = train(OTBGRPOTrainer, baseline=baseline, **options)
    train_with_an_error(ours, place, error, monkeypatch)
    assert_same_weights(ours, grpo)
    assert logged(ours, "reward") == logged(grpo, "reward")
    assert len(logged(ours, "otb/grad_power")) == len(logged(grpo, "reward")) > 0


@pytest.mark.parametrize("lost", ["optimizer.pt", "scheduler.pt"])
def test_a_checkpoint_without_optimizer_is_named(train, tmp_path, caplog, lost):
    run = {"output_dir": str(tmp_path / "run"), "max_steps": 2}
    train(save_strategy="steps", save_steps=1, **run)
    (tmp_path / "run" / "checkpoint-1" / lost).unlink()
    train(train=False, **run).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    reset = "the state of the optimizer and of the learning rate is reset"
    assert f"checkpoint-1 has no {lost}, as with `save_only_model`: {reset}" in caplog.text


def test_a_checkpoint_of_another_baseline_or_scale_is_named(train, tmp_path, caplog):
    run = {"output_dir": str(tmp_path / "run"), "max_steps": 2}
    train(baseline="value", scale_rewards="running", save_strategy="steps", save_steps=1, **run)
    checkpoint = str(tmp_path / "run" / "checkpoint-1")
    train(baseline="value", scale_rewards="running", train=False, **run).train(resume_from_checkpoint=checkpoint)
    assert "The checkpoint holds" not in caplog.text and "learning rate is reset" not in caplog.text
    train(baseline="otb", scale_rewards="none", train=False, **run).train(resume_from_checkpoint=checkpoint)
    assert "The checkpoint holds the state of 'value', which `baseline='otb'` does not use" in caplog.text
    assert "The checkpoint holds a running scale of advantages, and the run has no running scale" in caplog.text
    assert "Set `scale_rewards` as it was" in caplog.text
    (path,) = (tmp_path / "run" / "checkpoint-1").glob("baseline.pt")
    path.unlink()
    caplog.clear()
    train(baseline="value", scale_rewards="running", train=False, **run).train(resume_from_checkpoint=checkpoint)
    assert f"{path.name} is missing, as by `save_only_model`" in caplog.text and "as it was" not in caplog.text
