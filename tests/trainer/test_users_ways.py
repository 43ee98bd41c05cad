"""What users do that no page shows: copies, modes, objects as rewards, odd rewards, errors, and training again."""

import ast
import copy
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from tests.helpers import tiny
from tests.helpers.settings import assert_same_weights, logged
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer, TokenRewards


ROOT = Path(__file__).parents[2]


def both(train, change=lambda trainer: None, **options):
    """GRPOTrainer, and ours under the group mean, after the same change, trained: equal to the bit."""
    trainers = []
    for cls, config in ((GRPOTrainer, GRPOConfig), (OTBGRPOTrainer, OTBGRPOConfig)):
        more = {"baseline": "group_mean"} if config is OTBGRPOConfig else {}
        trainers.append(train(cls, config, train=False, scale_rewards="none", **more, **options))
        change(trainers[-1])
        trainers[-1].train()
    assert_same_weights(*trainers)
    assert logged(trainers[0], "reward") == logged(trainers[1], "reward")
    return trainers


def test_copied_policy_uses_own_forward(train):
    def freeze(trainer):
        trainer.ref_model = copy.deepcopy(trainer.model).requires_grad_(False)

    grpo, ours = both(train, freeze, beta=0.1, max_steps=3)
    assert logged(ours, "kl") == logged(grpo, "kl") and logged(ours, "kl")[-1] > 0


class Eval:
    """A reward that leaves the policy in eval mode."""

    __name__ = "eval"

    def __call__(self, completion_ids, **kwargs):
        self.trainer.model.eval()
        return tiny.even_bytes(completion_ids)


@pytest.mark.parametrize("options", [{}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}])
def test_rollout_keeps_its_initial_mode(train, options):
    def know(trainer):
        trainer.reward_funcs[0].trainer = trainer

    both(train, know, reward_funcs=Eval(), **options)
    trainer = train(OTBGRPOTrainer, baseline="value", reward_funcs=Eval(), train=False, **options)
    know(trainer)
    trainer.train()
    assert [*trainer.rollouts] == ["train"] and trainer.baseline.entry.estimator._batches > 1


def test_two_trainers_of_one_model_alive(train, model_path):
    def of_one_model(cls, config, **options):
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        options |= {"model": model, "processing_class": tiny.tokenizer(), "num_iterations": 2, "train": False}
        first, second = (train(cls, config, scale_rewards="none", **options) for _ in range(2))
        second.train()
        first.train()
        return first

    ours = of_one_model(OTBGRPOTrainer, OTBGRPOConfig, baseline="group_mean")
    assert_same_weights(of_one_model(GRPOTrainer, GRPOConfig), ours)


def test_whole_return_credits_every_token(train):
    def judged(completion_ids, **kwargs):
        of_rows = zip(tiny.even_bytes(completion_ids), completion_ids, strict=True)
        return [TokenRewards([r] + [0.0] * (len(ids) - 1)) for r, ids in of_rows]

    whole = train(OTBGRPOTrainer, reward_funcs=judged, credit_whole_return=True)
    assert_same_weights(whole, train(OTBGRPOTrainer))
    assert whole.rollouts["train"].rewards.dim() == 1
    with pytest.raises(ValueError, match="returned 2 rewards for completion 0, which has 1 turns"):
        train(OTBGRPOTrainer, reward_funcs=lambda prompts, **_: [[1.0, 2.0]] * len(prompts), credit_whole_return=True)


def test_what_the_package_imports_is_declared():
    imported = set()
    for file in (ROOT / "trl_otb").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            imported |= {name.partition(".")[0] for name in names}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[^\w-]", name)[0].replace("-", "_") for name in project["dependencies"]}
    assert imported - {*sys.stdlib_module_names, "trl_otb", "matplotlib"} == declared
