"""Resuming, exact or announced as not."""

import pytest
import torch
from transformers import TrainerCallback

from tests.helpers.settings import LORA, assert_same_weights, logged


@pytest.mark.parametrize(
    "options", [{}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, {"peft_config": LORA}]
)
def test_resume_is_bit_exact(train, tmp_path, options):
    whole = train(max_steps=4, save_strategy="steps", save_steps=2, output_dir=str(tmp_path / "run"), **options)
    resumed = train(max_steps=4, output_dir=str(tmp_path / "run"), train=False, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert_same_weights(whole, resumed)
    assert logged(whole, "otb/grad_power") == logged(resumed, "otb/grad_power")


BUFFERED = {"num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 1}  # 4 steps a buffer


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "trl_otb.callbacks.inexact_resume"]


def test_checkpoints_inside_a_generation_buffer_are_announced_once(train, tmp_path, caplog):
    train(max_steps=5, save_strategy="steps", save_steps=2, output_dir=str(tmp_path), **BUFFERED)
    (said,) = warnings_of(caplog)
    assert "`save_steps` is 2" in said and "multiples of 4 steps" in said

    caplog.clear()
    resumed = train(train=False, max_steps=5, output_dir=str(tmp_path), **BUFFERED)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    (said,) = warnings_of(caplog)
    assert "Resuming at step 2, inside a generation buffer" in said


def test_resuming_past_the_first_epoch_is_announced_and_does_differ(train, tmp_path, caplog):
    """Two prompts a step, of eight; a run without shuffling resumes exactly there."""
    for shuffle in (True, False):
        run = {"output_dir": str(tmp_path / str(shuffle)), "shuffle_dataset": shuffle, "max_steps": 6}
        whole = train(save_strategy="steps", save_steps=5, **run)
        caplog.clear()
        resumed = train(train=False, **run)
        resumed.train(resume_from_checkpoint=f"{run['output_dir']}/checkpoint-5")
        said, ids = warnings_of(caplog), [t.rollouts["train"].prompt_ids for t in (whole, resumed)]
        assert torch.equal(*ids) != shuffle
        assert ["step 5, in epoch 2" in text for text in said] == [True] * shuffle


@pytest.mark.parametrize(
    "options", [{"save_strategy": "steps", "save_steps": 4, **BUFFERED}, {"save_strategy": "steps", "save_steps": 1}]
)
def test_checkpoints_that_resume_exactly_go_unmentioned(train, tmp_path, caplog, options):
    train(max_steps=5, output_dir=str(tmp_path), **options)
    assert (tmp_path / "checkpoint-4").is_dir() and not warnings_of(caplog)


def test_a_checkpoint_asked_for_inside_a_generation_buffer_is_announced(train, tmp_path, caplog):
    class SaveNow(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = state.global_step == 3

    train(max_steps=5, output_dir=str(tmp_path), callbacks=[SaveNow()], **BUFFERED)
    (said,) = warnings_of(caplog)
    assert "The checkpoint of step 3 lies inside a generation buffer" in said
