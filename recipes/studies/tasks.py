"""What the studies sample: a policy, problems and a reward; the trainer for them, and the noise of its gradient."""

import json
import random
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback

import trl_otb
from recipes import toy
from recipes.common.arguments import RecipeArguments
from recipes.common.problems import load_problems
from recipes.math import accuracy_reward
from recipes.tool_math import calculator_tool
from recipes.toy import dialogues, lake, scratchpad, worked_sums
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer


BASELINES = ("opo", "ogb", "otb", "otb_shrunk", "rloo_pooled", "ogb_pooled", "ogb_pooled_damped")
PROMPTS_PER_BATCH = 16  # of a step whose efficiency is published
# Numbers of the sums, tokens of a completion, calls of the calculator
CHAIN_SUMS = {
    "sums": (worked_sums.CHAIN_SUM, 24, None),
    "calculator": (dialogues.CHAIN_SUM, 72, 6),
    "long_calculator": (dialogues.LONG_CHAIN_SUM, 180, 14),
}


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


def task_of(name: str, seed: int = 0) -> Task:
    """
    One of `CHAIN_SUMS`, "scratchpad_100" and the like, "lake_6" and the like with one reward at the end, or
    "lake_6_turns" with a reward per turn. `seed` chooses the sums to train on.
    """
    policy = getattr(toy, name.removesuffix("_turns"))()
    if name in CHAIN_SUMS:
        options, tokens, calls = CHAIN_SUMS[name]
        problems = load_problems(RecipeArguments(dataset_options=json.dumps(options)), seed)
        tools = [calculator_tool(max_operations=1)] if calls else None
        train, held_out = with_prompts(problems.train), with_prompts(problems.held_out)
        return Task(policy, train, held_out, accuracy_reward(problems), tokens, tools, max_calls=calls)
    dial = int(name.split("_")[1])
    of_lake = name.startswith("lake")
    rows = lake.problems(lake.SIDES[dial]) if of_lake else scratchpad.problems(scratchpad.STEPS[dial])
    random.Random(0).shuffle(rows)
    fifth = len(rows) // 5
    train, held_out = (with_prompts(Dataset.from_list(some)) for some in (rows[fifth:], rows[:fifth]))
    if not of_lake:
        return Task(policy, train, held_out, scratchpad.last_digit, 2 * dial)
    reward = lake.progress if name.endswith("_turns") else lake.won
    return Task(policy, train, held_out, reward, 32 * dial, environment=lake.Lake, max_calls=2 * dial)


def with_prompts(problems: Dataset) -> Dataset:
    """With each `question` as a conversation's first message, the column `prompt`."""
    return problems.map(lambda row: {"prompt": [{"role": "user", "content": row["question"]}]})


def trainer_of(
    task: Task, *, callbacks: Sequence = (), eval_dataset: Dataset | None = None, peft_config=None, **options
) -> OTBGRPOTrainer:
    """It samples and rewards `task`, by default in groups of 4 and with 16 prompts per batch, and saves nothing."""
    settings = {
        "output_dir": "runs/studies/work",
        "num_generations": 4,
        "per_device_train_batch_size": 4 * PROMPTS_PER_BATCH,
        "max_completion_length": task.max_completion_length,
        "max_tool_calling_iterations": task.max_calls,
    }
    trainer = OTBGRPOTrainer(
        str(task.policy),
        task.reward,
        args=OTBGRPOConfig(**(toy.QUIET | settings | options)),
        train_dataset=task.train,
        eval_dataset=eval_dataset,
        processing_class=AutoTokenizer.from_pretrained(task.policy, padding_side="left"),
        callbacks=list(callbacks),
        tools=task.tools,
        environment_factory=task.environment,
        peft_config=peft_config,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def noise_flags(parser: ArgumentParser, seed: int, num_prompts: int) -> None:
    """Those of every study on [`compared`]."""
    parser.add_argument("--seed", type=int, default=seed)
    parser.add_argument("--num_prompts", type=int, default=num_prompts, help="more add to what is there")
    parser.add_argument("--plot_only", action="store_true", help="tables and picture from what is saved")
    parser.add_argument("--publish", action="store_true", help="put the columns into the results and the pages")
    parser.add_argument("--output_dir", type=Path, help="by default in runs/studies")


def compared(
    folder: Path, trainer: Callable[[], OTBGRPOTrainer], args: Namespace, **options
) -> "trl_otb.BaselineReport":
    """What [`~trl_otb.compare_baselines`] finds, kept in `folder`; with `--plot_only`, what is there."""
    if args.plot_only:
        return trl_otb.BaselineReport.load(folder, prompts_per_batch=PROMPTS_PER_BATCH)
    options |= {"num_prompts": args.num_prompts, "seed": args.seed, "prompts_per_batch": PROMPTS_PER_BATCH}
    return trl_otb.compare_baselines(trainer(), **{"baselines": list(BASELINES), "output_dir": folder, **options})


def cells_of(report: "trl_otb.BaselineReport") -> list[dict]:
    """What is published of a report: efficiency and noise to signal, both over the group mean's, and the cosine."""
    return [
        {
            "prompts": report.num_prompts,
            "n": row["n"],
            "estimator": row["name"],
            "efficiency": [row["over_group_mean"][end] for end in ("value", "low", "high")],
            "noise": [row["noise_over_group_mean"][end] for end in ("value", "low", "high")],
            "cosine": row["cosine"]["value"],
        }
        for row in report.to_json()["comparisons"]
        if row["n"] in report.group_sizes
    ]
