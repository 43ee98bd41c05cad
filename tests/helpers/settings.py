"""Settings of the trainer that several tests go through."""

import itertools

import torch
from packaging.version import Version
from peft import LoraConfig
from trl import GRPOTrainer

from tests.helpers.tiny import TRL
from trl_otb.baselines import compute_advantages
from trl_otb.config import LOSS_TYPES


LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")

SETTINGS = {
    "plain": {},
    "accumulation": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "split groups": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "num_iterations": {"num_iterations": 2, "max_steps": 4},
    "steps_per_generation": {"steps_per_generation": 2, "max_steps": 4},
    "beta": {"beta": 0.1},
    "scale by group": {"scale_rewards": "group"},
    "scale by batch": {"scale_rewards": "batch"},
    "mask_truncated": {"mask_truncated_completions": True},
    "entropy bonus": {"entropy_coef": 0.01},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_target": 1.0},
    "high-entropy tokens": {"top_entropy_quantile": 0.5},
    "sequence ratios": {"importance_sampling_level": "sequence", "num_iterations": 2, "loss_type": "grpo"},
    "off-policy mask": {"off_policy_mask_threshold": 1e-3, "num_iterations": 2, "max_steps": 4},
    "two-sided clipping": {"delta": 1.5, "num_iterations": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "temperature": {"temperature": 0.7},
    "fp32 head": {"cast_lm_head_to_fp32": True},
    "bf16": {"bf16": True},
    "lora": {"peft_config": LORA},
    "lora and beta": {"peft_config": LORA, "beta": 0.1},
    **{f"loss {name}": {"loss_type": name, "num_iterations": 2} for name in LOSS_TYPES},
}


def sampled_elsewhere(prompts, trainer):
    """What GRPOTrainer itself would generate, where OTBGRPOTrainer does not listen."""
    n = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
    ids, images, fields = trainer._tokenize_prompts(prompts)
    more = (n,) if TRL >= Version("1.14") else ()
    found, logprobs = GRPOTrainer._generate_single_turn(trainer, ids, images, fields, *more)
    return {"prompt_ids": ids, "completion_ids": found, "logprobs": logprobs}


# By the forward that energies come from
SOURCES = {
    "the forwards that sampled": {},
    "one extra no-gradient forward": {"rollout_func": sampled_elsewhere},
    "the no-gradient forward that GRPOTrainer runs anyway": {"num_iterations": 2},
}


# Adam divides a gradient by its size, so where it is all but zero a step is rounding, and another CPU's another
SGD = {"optim": "sgd", "learning_rate": 0.3}


def in_turn(many, few):
    """Every one of `many` beside one of `few`: where their effects are apart, all pairs would show nothing more."""
    assert len(many) >= len(few)
    return list(zip(many, itertools.cycle(few), strict=False))


def weights(trainer):
    return {name: p.detach() for name, p in trainer.model.named_parameters()}


def assert_same_weights(a, b, **tolerance):
    if tolerance:
        assert {a.args.optim, b.args.optim} == {"sgd"}, "see SGD"
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys()
    for name in a:
        if tolerance:
            torch.testing.assert_close(a[name], b[name], msg=name, **tolerance)
        else:
            assert torch.equal(a[name], b[name]), name


def predicted(rollout):
    """`value`'s B − B0 of every generated token, from the rollout of one process."""
    inputs = rollout.rewards, rollout.mask.float(), rollout.mask, rollout.num_generations
    of_base = compute_advantages(*inputs, baseline="rloo_pooled")
    return (of_base - rollout.advantages)[rollout.mask.bool()]


def logged(trainer, key):
    return [h[key] for h in trainer.state.log_history if key in h]


def scripted_rollout(prompts, trainer):
    """Random bytes with a stretch of environment output in the middle of every other completion."""
    g = torch.Generator().manual_seed(0)
    n = trainer.num_generations
    ids, masks = [], []
    for i in range(len(prompts)):
        length = int(torch.randint(4, 9, (1,), generator=g))
        ids.append(torch.randint(0, 256, (length,), generator=g).tolist())
        masks.append([0 if i % 2 and 1 <= t < 3 else 1 for t in range(length)])
    assert len(prompts) % n == 0
    encoded = [trainer.processing_class(p)["input_ids"] for p in prompts]
    return {"prompt_ids": encoded, "completion_ids": ids, "logprobs": None, "env_mask": masks}
