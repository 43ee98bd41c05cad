"""
Which baseline for my run? Measures the gradient noise under each one, on your own model, data and reward.

    python -m recipes.gradient_noise                                                      # the toy policy of math.py
    python -m recipes.gradient_noise --config recipes/tool_math_cpu.yaml --tools calculator
    python -m recipes.gradient_noise --model_name_or_path FOLDER --dataset_name problems.jsonl
    python -m recipes.gradient_noise --plot_only --output_dir FOLDER

A command line for `trl_otb.compare_baselines`: it samples a pool of completions per prompt, takes the exact gradient
of its groups under every baseline, and ends in a verdict, a table and a picture. Nothing is trained. Repeat the
command to resume a stopped run.
"""

from recipes.common.launching import tidy_output


tidy_output()

import json
import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import trl_otb
from recipes.common.arguments import option, parse
from recipes.common.errors import InputError, constructing, input_errors, launch, rank
from recipes.common.launching import flag_names, print_once
from recipes.common.models import load_object, own_rewards, trainer_arguments
from recipes.math import accuracy_reward, load_data
from recipes.tool_math import ToolMathArguments, calculator_tool
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer
from trl_otb.baselines import find_baseline
from trl_otb.comparison.storage import only_writer


CONFIG = "math_cpu.yaml"
# Options of the trainer that matter without training
READ = (
    "output_dir|seed|disable_tqdm|log_level.*|num_generations|per_device_.*|alignment|zero_tail|reward_weights|"
    "multi_objective_aggregation|temperature|top_[pk]|min_p|repetition_penalty|max_.*_length|max_tool_.*|"
    "mask_truncated_completions|generation_kwargs|chat_template_kwargs|cache_implementation|use_cache|use_vllm|vllm_.*|"
    "use_transformers_.*|transformers_.*|pad_to_multiple_of|ds3_.*|bf16|fp16|tf32|use_cpu|cast_lm_head_to_fp32|"
    "activation_.*|gradient_checkpointing.*|torch_compile.*|disable_dropout|full_determinism|trust_remote_code|"
    "model_init_kwargs|remove_unused_columns|ddp_.*|deepspeed|fsdp.*|accelerator_config|parallelism_config"
)
UNREAD = [field.name for field in fields(OTBGRPOConfig) if not re.fullmatch(READ, field.name)]
BASELINES = ["ogb", "otb", "otb_shrunk", "ogb_pooled", "ogb_pooled_damped", "value"]
PLOT_ONLY = "plot_only output_dir seed prompts_per_batch traceback"  # options that apply to saved results
# Arguments of `compare_baselines`
OWN = "baselines num_prompts completions_per_prompt group_sizes parameters prompts_per_batch projection overwrite"


@dataclass
class NoiseArguments(ToolMathArguments):
    ABOUT: ClassVar[str] = " ".join(__doc__.split("\n\n")[::2])  # without the commands
    FOLDER: ClassVar[str] = "runs/gradient_noise/seed{seed}"
    WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = ("eval_only", "allow_changes", *UNREAD)

    num_prompts: int = option(16, "Prompts to measure, from the training data.")
    completions_per_prompt: int = option(128, "Completions in a prompt's pool; more give narrower intervals.")
    baselines: list[str] = option(BASELINES, "Baselines in addition to `none` and `group_mean`.")
    group_sizes: list[int] = option([4, 8], "Completions per group, N.")
    prompts_per_batch: int = option(16, "Prompts per step that the figures are for; they are pooled together.")
    parameters: str = option(".*", "Only trainable parameters whose name matches this regular expression.")
    projection: int = option(16_384, "Numbers kept per gradient; inner products are off by √(2 / this) of the norms.")
    tools: list[str] | None = option(None, "`calculator`, or your own tools as module:function.")
    environment_factory: str | None = option(None, "module:class, whose reward is added to the recipe's grading.")
    plot_only: bool = option(False, "Make the table, picture and verdict from saved results.")


def trainer_of(settings: NoiseArguments, args, model_args) -> OTBGRPOTrainer:
    """The trainer of a run with these options."""
    problems = load_data(settings, args.seed)
    tools = [
        calculator_tool(settings.max_operations) if name == "calculator" else load_object(name, "tools")
        for name in settings.tools or []
    ]
    environment = settings.environment_factory and load_object(settings.environment_factory, "environment_factory")
    arguments, (prompts,) = trainer_arguments(settings, args, model_args, [problems.train], tools)
    graded = accuracy_reward(problems)
    # Grading with weight 0 could take longer than everything else
    counts = args.reward_weights is None or args.reward_weights[0] != 0

    def accuracy(completions, **columns) -> list[float]:
        return graded(completions, **columns) if counts else [0.0] * len(completions)

    args.eval_strategy, args.report_to, args.scale_rewards = "no", [], "none"
    with constructing(model_args.model_name_or_path):
        return OTBGRPOTrainer(
            **arguments,
            reward_funcs=[accuracy, *own_rewards(settings)],
            args=args,
            train_dataset=prompts,
            tools=tools or None,
            environment_factory=environment,
        )


def measured(settings: NoiseArguments, args, model_args, argv: list[str]) -> trl_otb.BaselineReport:
    """The report of a new measurement, or of a saved one."""
    if settings.plot_only:
        if unread := set(flag_names(argv)) - set(PLOT_ONLY.split()):
            flags = ", ".join(f"--{name}" for name in sorted(unread))
            raise InputError(f"`plot_only` draws saved results, and {flags} would change nothing: drop it.")
        return trl_otb.BaselineReport.load(args.output_dir, settings.prompts_per_batch)
    for name in settings.baselines:
        find_baseline(name)
    if rank() == 0:
        with only_writer(Path(args.output_dir)):
            pass  # fail before the model is loaded; `compare_baselines` takes the lock itself
    return trl_otb.compare_baselines(
        trainer_of(settings, args, model_args),
        output_dir=args.output_dir,
        **{name: getattr(settings, name) for name in OWN.split()},
    )


def main(argv: list[str]) -> None:
    settings, args, model_args = parse("gradient_noise", NoiseArguments, CONFIG, argv)
    folder = Path(args.output_dir)
    with input_errors(ValueError):
        report = measured(settings, args, model_args, argv)
    (folder / "table.md").write_text(report.to_markdown(), encoding="utf-8")
    (folder / "report.json").write_text(json.dumps(report.to_json(), indent=2) + "\n")
    report.plot(folder / "noise.png")
    print_once(f"{report}\n\n{folder}: table.md with all figures, report.json, noise.png, and one file per prompt.")


if __name__ == "__main__":
    launch("gradient_noise", main, sys.argv[1:])
