"""What works with GRPOTrainer works here."""

import math

import pytest
import torch
from datasets import IterableDataset
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForSequenceClassification, TrainerCallback

from tests.helpers import tiny
from tests.helpers.settings import LORA, SGD, SOURCES, assert_same_weights, logged, scripted_rollout


def test_iterable_dataset(train):
    data = IterableDataset.from_generator(lambda: iter({"prompt": f"{i}+{i}="} for i in range(8)))
    assert logged(train(train_dataset=data), "otb/energy/token_mean")


def test_unscorable_completions_have_no_statistics(train):
    def reward(completion_ids, **kwargs):
        longest = max(range(4), key=lambda i: len(completion_ids[i]))
        return [None if i == longest else float(i) for i in range(len(completion_ids))]

    trainer = train(reward_funcs=reward, max_steps=1, rollout_func=scripted_rollout)
    for key in ("baseline/mean", "advantage/abs_mean", "energy/token_mean"):
        assert math.isfinite(logged(trainer, f"otb/{key}")[0])
    rollout = trainer.rollouts["train"]
    assert rollout.rewards.isnan().sum() == 1
    expected = rollout.advantages.abs().sum() / rollout.mask[~rollout.rewards.isnan()].sum()
    assert logged(trainer, "otb/advantage/abs_mean")[0] == pytest.approx(expected.item(), rel=1e-5)


def test_no_reward_varies(train):
    """The group mean leaves nothing; the lone tail of the default still has A = G. Their ratio says nothing."""
    trainer = train(
        reward_funcs=lambda completion_ids, **kwargs: [1.0] * len(completion_ids), rollout_func=scripted_rollout
    )
    assert logged(trainer, "otb/grad_power_reference") == [0.0, 0.0]
    assert logged(trainer, "otb/grad_power_ratio") == []
    assert logged(trainer, "otb/lone_tail_ratio")[0] > 0 and logged(trainer, "otb/grad_power")[0] > 0


def test_reward_model(train, tmp_path):
    model = Qwen3ForSequenceClassification(tiny.config(num_labels=1))
    model.save_pretrained(tmp_path / "reward")
    tiny.tokenizer().save_pretrained(tmp_path / "reward")
    trainer = train(reward_funcs=str(tmp_path / "reward"))
    assert logged(trainer, "otb/grad_power")


EVALUATED = {"eval_dataset": tiny.prompts(4), "eval_strategy": "steps", "eval_steps": 1}
EVALUATED["per_device_eval_batch_size"] = 4


@pytest.mark.parametrize("generations", [1, 4])
def test_evaluation(train, generations):
    trainer = train(**EVALUATED, num_generations_eval=generations)
    for key in ("eval_loss", "eval_otb/energy/token_mean", "eval_otb/baseline/mean"):
        values = logged(trainer, key)
        assert len(values) == 2 and all(math.isfinite(v) for v in values)
    assert len(logged(trainer, "otb/energy/token_mean")) == 2


@pytest.mark.parametrize("source", SOURCES)
def test_evaluation_leaves_training_unchanged(train, source):
    options = {"max_steps": 4, **SGD, **SOURCES[source], "rollout_func": scripted_rollout}
    evaluated, plain = train(**EVALUATED, **options), train(**options)
    # Evaluation draws random numbers, so rows are shuffled otherwise and sums are rounded otherwise, and no more
    assert_same_weights(evaluated, plain, atol=1e-6, rtol=1e-5)
    assert logged(evaluated, "otb/grad_power") == pytest.approx(logged(plain, "otb/grad_power"), rel=1e-4)


def test_model_instance_processing_class_and_lora(train, model_path):
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    trainer = train(model=model, processing_class=AutoTokenizer.from_pretrained(model_path), peft_config=LORA)
    assert isinstance(trainer.model, PeftModel) and logged(trainer, "otb/energy/token_mean")
    trained = get_peft_model(AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32), LORA)
    assert logged(train(model=trained, beta=0.1), "otb/energy/token_mean")


class Stops(TrainerCallback):
    """Stops training when it hears of an event."""

    def __init__(self, event):
        setattr(self, event, self.stop)

    def stop(self, args, state, control, **kwargs):
        control.should_training_stop = True


@pytest.mark.parametrize("event", ["on_train_begin", "on_step_begin", "on_substep_end"])
def test_callback_may_stop_first_step(train, event):
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    assert train(callbacks=[Stops(event)], **options).state.global_step == 0


ONE_PROMPT = IterableDataset.from_generator(lambda: iter([{"prompt": "1+1="}]))


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (tiny.prompts(1), {}),
        (ONE_PROMPT, {}),
        (ONE_PROMPT, {"eval_on_start": True}),
        (ONE_PROMPT, {"eval_on_start": True, "callbacks": [Stops("on_train_begin")]}),
    ],
)
def test_too_small_dataset_is_named(train, data, options):
    with pytest.raises(ValueError, match="`train_dataset` has too few prompts: a generation batch takes 2 .*Add"):
        train(train_dataset=data, eval_dataset=tiny.prompts(), **options)
    trainer = train(train_dataset=tiny.prompts(2), max_steps=1)
    trainer.train_dataset = tiny.prompts(1)
    with pytest.raises(ValueError, match="`train_dataset` has too few prompts"):
        trainer.train()
