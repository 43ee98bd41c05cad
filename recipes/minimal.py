"""
GRPO with a baseline per token in one file: copy it out of recipes/ and change it.

    pip install .; cp recipes/minimal.py ~; cd ~    # in a checkout of trl_otb
    python minimal.py                               # a tiny untrained model: no hub, no GPU
    python minimal.py Qwen/Qwen2.5-0.5B-Instruct    # a pretrained model, on a GPU

The tiny model learns to write even and odd numbers when asked: on one busy x86-64 core, 2026-11-26, in 40 s, 1 % of its
answers were right before and 94 % after. The pretrained model has not been run.
"""

import random
import sys

from datasets import Dataset
from transformers import AutoModelForCausalLM, ByT5Tokenizer, LlamaConfig, pipeline, set_seed

from trl_otb import OTBGRPOConfig, OTBGRPOTrainer


# Data: prompts, and the columns that the rewards need
def problems(number: int, seed: int) -> Dataset:
    rng = random.Random(seed)
    kinds = [rng.choice(["even", "odd"]) for _ in range(number)]
    prompts = [[{"role": "user", "content": f"A number, {kind}:"}] for kind in kinds]
    return Dataset.from_dict({"prompt": prompts, "kind": kinds})


# Rewards: a number per completion; the policy learns from their sum
def is_number(completions, **kwargs) -> list[float]:
    return [float(completion[0]["content"].strip().isdecimal()) for completion in completions]


def is_right(completions, kind, **kwargs) -> list[float]:
    ends = {"even": "02468", "odd": "13579"}
    texts = [completion[0]["content"].strip() for completion in completions]
    return [float(text.isdecimal() and text[-1] in ends[of]) for text, of in zip(texts, kind, strict=True)]


# Model: the one named on the command line, or a tiny one with random weights that reads and writes bytes
if len(sys.argv) > 1:
    model, tokenizer = sys.argv[1], None  # the trainer loads both
    settings = {"learning_rate": 2e-6, "max_steps": 200}
else:
    set_seed(0)
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=len(tokenizer), **shape))
    settings = {"learning_rate": 3e-3, "max_steps": 150, "use_cpu": True, "bf16": False}

# Trainer: the arguments are GRPOTrainer's; baseline="group_mean" is GRPO itself
args = OTBGRPOConfig(
    output_dir="minimal",
    baseline="value",
    per_device_train_batch_size=32,  # completions, so 4 prompts per step
    num_generations=8,
    max_completion_length=4,
    scale_rewards="running",  # keeps the scale of GRPOConfig's default, "group", without its bias
    logging_steps=50,
    report_to="none",
    **settings,
)
trainer = OTBGRPOTrainer(
    model,
    reward_funcs=[is_number, is_right],
    args=args,
    train_dataset=problems(10_000, seed=1),
    eval_dataset=problems(64, seed=2),
    processing_class=tokenizer,
)

# Training, with an evaluation before and after, and some answers
before = trainer.evaluate()
trainer.train()
after = trainer.evaluate()
trainer.save_model()
for name in ("eval_rewards/is_number/mean", "eval_rewards/is_right/mean"):
    print(f"{name}: {before[name]:.2f} before, {after[name]:.2f} after")
answer = pipeline("text-generation", model=trainer.model, tokenizer=trainer.processing_class)
for conversation in answer(problems(3, seed=3)["prompt"][:], max_new_tokens=4):
    print([message["content"] for message in conversation[0]["generated_text"]])
