"""
The README's picture: one group of completions of many turns, token by token, coloured by energy and by advantage.

    python -m recipes.group_picture                      # writes recipes/group.png; a minute, once, for the policy
    python -m recipes.group_picture --problem 4+15-38 --baseline group_mean --output group.png
"""

import argparse
import sys
import tempfile
import warnings

from datasets import Dataset
from transformers import AutoTokenizer

from recipes.common.calculator import evaluate
from recipes.common.pictures import plot_group
from recipes.tool_math import calculator_tool
from recipes.toy import calculator
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer
from trl_otb.baselines import BASELINES


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1], allow_abbrev=False)
    parser.add_argument("--problem", default="12+71-35")
    parser.add_argument("--baseline", default="otb", choices=BASELINES)
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--output", default="recipes/group.png")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    answer = str(evaluate(args.problem))

    def right(completions, **kwargs):
        return [float(completion[-1].get("content") == f"={answer}") for completion in completions]

    path = str(calculator())
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": args.problem}]]})
    with tempfile.TemporaryDirectory() as folder:
        trainer = OTBGRPOTrainer(
            model=path,
            reward_funcs=right,
            args=OTBGRPOConfig(
                output_dir=folder,
                baseline=args.baseline,
                num_generations=args.completions,
                per_device_train_batch_size=args.completions,
                per_device_eval_batch_size=args.completions,
                max_completion_length=72,
                max_tool_calling_iterations=6,
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                bf16=False,
                seed=args.seed,
            ),
            train_dataset=data,
            eval_dataset=data,
            processing_class=tokenizer,
            tools=[calculator_tool(max_operations=1)],
        )
        trainer.evaluate()
    rollout = trainer.rollouts["eval"]
    lengths = rollout.completion_mask.sum(dim=1).tolist()
    tokens = [
        [token.replace("<eos>", "⏎") for token in tokenizer.convert_ids_to_tokens(ids[:n])]
        for ids, n in zip(rollout.completion_ids.tolist(), lengths, strict=True)
    ]
    by_policy = [row[:n].bool().tolist() for row, n in zip(rollout.mask, lengths, strict=True)]
    panels = {
        "Energy $w_t$: high where the policy was unsure, or wrong against its own odds": rollout.energy.tolist(),
        f"Advantage $A_t$ under `{args.baseline}` (blue: more of this, red: less)": rollout.advantages.expand(
            rollout.mask.shape
        ).tolist(),
    }
    labels = [f"reward {reward:.0f}" for reward in rollout.rewards.tolist()]
    plot_group(tokens, by_policy, panels, labels).savefig(args.output, dpi=110)
    print(args.output)


if __name__ == "__main__":
    main(sys.argv[1:])
