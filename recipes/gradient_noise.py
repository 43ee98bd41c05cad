"""
Which baseline for my run? Measures the gradient noise under each one, on your own model, data and reward.

    python -m recipes.gradient_noise                                                      # the toy policy of math.py
    python -m recipes.gradient_noise --config recipes/tool_math_cpu.yaml --calculator true
    python -m recipes.gradient_noise --model_name_or_path FOLDER --dataset_name problems.jsonl

A command for `trl_otb.compare_baselines`; nothing is trained. Options are those of math.py.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from trl import get_peft_config, get_quantization_config

import trl_otb
from trl_otb.scripts.problems import ProblemOptions, calculator_tool, load_problems, option
from trl_otb.scripts.run import load_object, model_of, parse


ARGUMENTS = "num_prompts completions_per_prompt baselines group_sizes parameters prompts_per_batch".split()


@dataclass
class Options(ProblemOptions):
    num_prompts: int = option(16, "Prompts to measure, from the training data.")
    completions_per_prompt: int = option(128, "Completions per prompt; more give narrower intervals.")
    baselines: list[str] | None = option(None, "Names, or module:function; by default all.")
    group_sizes: list[int] | None = option(
        None, "Completions per group; by default the trainer's, half and double, and 1."
    )
    prompts_per_batch: int = option(16, "Prompts per step that the figures are for.")
    parameters: str = option(".*", "Only trainable parameters whose name matches this regular expression.")
    calculator: bool = option(False, "Whether the policy may call the calculator of tool_math.py.")
    max_operations: int = option(50, "Most operations in one call of the calculator.")


def main(argv: list[str]) -> None:
    options, args, model_args, _ = parse(argv, Options, __file__, "math_cpu.yaml")
    args.eval_strategy, args.eval_on_start, args.report_to, args.scale_rewards = "no", False, [], "none"
    train, _, accuracy = load_problems(options, args.seed)
    trainer = trl_otb.OTBGRPOTrainer(
        model=model_of(model_args.model_name_or_path),
        reward_funcs=[accuracy, *map(load_object, options.reward_funcs or [])],
        args=args,
        train_dataset=train,
        tools=[calculator_tool(options.max_operations)] if options.calculator else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    folder, chosen = Path(args.output_dir), {name: getattr(options, name) for name in ARGUMENTS}
    report = trl_otb.compare_baselines(trainer, **chosen, seed=args.seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report.to_json(), indent=2) + "\n")
    report.plot(folder / "noise.png")
    print(f"{report}\n\n{folder}: report.json with all figures, and noise.png.")


if __name__ == "__main__":
    main(sys.argv[1:])
