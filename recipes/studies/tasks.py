"""What the studies sample: a policy, problems and a reward; and the trainer for them."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, PrinterCallback

from recipes import toy
from recipes.common import ProblemOptions
from recipes.math import load_problems
from recipes.tool_math import calculator_tool
from recipes.toy import dialogues, lake, scratchpad, worked_sums
from recipes.toy.local_rollouts import LocalWorker
from trl_otb import AsyncOTBGRPOConfig, AsyncOTBGRPOTrainer, OTBGRPOConfig, OTBGRPOTrainer
from trl_otb.seam.forwards import policy_of


# Of a language model; where a CPU lacks bfloat16, PyTorch emulates it, eight times slower than float32
ON_GPU = torch.cuda.is_available()
HAS_BFLOAT16 = ON_GPU or torch.ops.mkldnn._is_mkldnn_bf16_supported()
MACHINE = {
    "use_cpu": not ON_GPU,
    "model_init_kwargs": {"dtype": "bfloat16" if HAS_BFLOAT16 else "float32"},
    "bf16": HAS_BFLOAT16,
}
PROMPTS_PER_BATCH = 16  # of a step whose efficiency is published
# Numbers of the sums, tokens of a completion, calls of the calculator
CHAIN_SUMS = {"sums": (worked_sums.CHAIN_SUM, 24, None), "calculator": (dialogues.CHAIN_SUM, 72, 6)}
MIXED = [10, 30, 100]  # tokens
LUCKY = [1, 1, 1, 4, 7, 7, 7]  # in eighths, the chances of a prompt's completions


@dataclass(frozen=True)
class Task:
    """A policy's folder; prompts, with what the reward reads; what the policy may call, and in how many turns."""

    policy: Path
    train: Dataset
    held_out: Dataset
    reward: Callable[..., list[float] | list[list[float]]]
    max_completion_length: int
    tools: list[Callable] | None = None
    environment: Callable | None = None
    max_calls: int | None = None
    peft_config: LoraConfig | None = None


def task_of(name: str, seed: int = 0) -> Task:
    """
    One of `CHAIN_SUMS`, whose problems to train on `seed` chooses; "scratchpad_100" and the like, "scratchpad_mixed"
    with prompts of three lengths, "lucky" whose rewards no state tells, "lake_6" and the like with one reward at the
    end, or "lake_6_turns" with a reward per turn.
    """
    policy = getattr(toy, "scratchpad_30" if name == "lucky" else name.removesuffix("_turns"))()
    if name in CHAIN_SUMS:
        dial, tokens, calls = CHAIN_SUMS[name]
        options = ProblemOptions(dataset_options=json.dumps(dial), instruction="")
        train, held_out, accuracy = load_problems(options, seed)
        tools = [calculator_tool(max_operations=1)] if calls else None
        return Task(policy, train, held_out, accuracy, tokens, tools, max_calls=calls)
    kind, _, dial = name.removesuffix("_turns").partition("_")
    if kind == "lake":
        rows = lake.problems(lake.SIDES[int(dial)])
    elif kind == "lucky":
        rows = scratchpad.lucky_letters(LUCKY)
    else:
        lengths = MIXED if dial == "mixed" else [int(dial)]
        rows = [row for length in lengths for row in scratchpad.problems(scratchpad.STEPS[length])]
    random.Random(0).shuffle(rows)
    fifth = len(rows) // 5
    train, held_out = (with_prompts(Dataset.from_list(some)) for some in (rows[fifth:], rows[:fifth]))
    if kind == "lucky":
        return Task(policy, train, held_out, scratchpad.first_letter, 60)
    if kind == "scratchpad":
        return Task(policy, train, held_out, scratchpad.last_digit, 2 * max(lengths))
    reward = lake.progress if name.endswith("_turns") else lake.won
    return Task(policy, train, held_out, reward, 32 * int(dial), environment=lake.Lake, max_calls=2 * int(dial))


def with_prompts(problems: Dataset) -> Dataset:
    """With each `question` as a conversation's first message, the column `prompt`."""
    return problems.map(lambda row: {"prompt": [{"role": "user", "content": row["question"]}]})


def trainer_of(
    task: Task,
    *,
    cls=OTBGRPOTrainer,
    callbacks=(),
    eval_dataset: Dataset | None = None,
    adapter: bool = True,
    **options,
) -> OTBGRPOTrainer:
    """
    It samples and rewards `task`, by default in groups of 4 and with 16 prompts per batch, and saves nothing. Without a
    new `adapter`, which changes no sample, sampling takes a third less time.
    """
    sizes = {"num_generations": 4, "per_device_train_batch_size": 4 * PROMPTS_PER_BATCH}
    lengths = {"max_completion_length": task.max_completion_length, "max_tool_calling_iterations": task.max_calls}
    settings = {"output_dir": "runs/studies/work", **sizes, **lengths}
    if task.peft_config:
        settings |= MACHINE
    trainer = cls(
        str(task.policy),
        task.reward,
        args=OTBGRPOConfig(**(toy.QUIET | settings | options)),
        train_dataset=task.train,
        eval_dataset=eval_dataset,
        processing_class=AutoTokenizer.from_pretrained(task.policy, padding_side="left"),
        callbacks=list(callbacks),
        tools=task.tools,
        environment_factory=task.environment,
        peft_config=task.peft_config if adapter else None,
    )
    trainer.remove_callback(PrinterCallback)
    # Generation multiplies a slice of the states with the head; PyTorch copies the head for each row, if it is not
    # contiguous, which takes 47 of 63 seconds with a vocabulary of 262,144
    head = policy_of(trainer.model).get_output_embeddings()
    head.register_forward_pre_hook(lambda module, states: states[0].contiguous())
    return trainer


def asynchronous_trainer_of(task: Task, staleness: int, **options) -> AsyncOTBGRPOTrainer:
    """It takes samples of [`LocalWorker`] that are `staleness` steps old. Use it within `on_cpu()`."""
    settings = {"output_dir": "runs/studies/work", "token_budget": 0, "max_staleness": staleness}
    settings |= {"max_completion_length": task.max_completion_length, "max_tool_calling_iterations": task.max_calls}
    args = AsyncOTBGRPOConfig(**(toy.QUIET | settings | options))
    tokenizer = AutoTokenizer.from_pretrained(task.policy, padding_side="left")
    policy, data = str(task.policy), task.train.shuffle(args.seed)
    worker = LocalWorker(policy, args, data, [task.reward], tokenizer, tools=task.tools, steps_ahead=staleness)
    trainer = AsyncOTBGRPOTrainer(
        policy, args=args, train_dataset=data, processing_class=tokenizer, rollout_worker=worker, weight_transfer=worker
    )
    trainer.remove_callback(PrinterCallback)
    return trainer
