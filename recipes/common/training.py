"""What math.py and tool_math.py share: from the command line to the picture."""

import argparse
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml
from transformers import AutoTokenizer, PrinterCallback, ProgressCallback
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from trl_otb import OTBGRPOConfig, OTBGRPOTrainer

from .callbacks import CheckpointOnInterrupt, CompactProgress
from .errors import InputError
from .held_out import AccuracyReward
from .pictures import plot_training
from .policies import check_model_folder, embedded_policy, smollm2_policy
from .problems import load_problems, with_prompts


CONFIGS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Recipe:
    """
    Args:
        name (`str`):
            Of its script.
        embedded (`str`):
            Which of the embedded policies is its default, see `WARM_STARTS`.
        configs (`dict[str, str]`):
            By model, the YAML file that decides whatever flags do not.
        arguments (`type`):
            Its options, a [`RecipeArguments`].
        tools (`Callable`, *optional*):
            From its options to the tools that the policy may call.
    """

    name: str
    embedded: str
    configs: dict[str, str]
    arguments: type
    tools: Callable | None = None


@dataclass
class RecipeArguments:
    """Options of a recipe, beside those of OTBGRPOConfig and of TRL's ModelConfig."""

    dataset_name: str = field(
        default="reasoning_gym:chain_sum",
        metadata={
            "help": "`reasoning_gym:TASK`, a local .jsonl, .json, .parquet or .csv file, or a dataset id on the hub."
        },
    )
    dataset_options: str | None = field(
        default=None,
        metadata={"help": "Options of the reasoning-gym task, as JSON: `'{\"max_terms\": 6}'`."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a hub dataset."})
    dataset_split: str = field(default="train", metadata={"help": "Split of a hub dataset."})
    prompt_column: str | None = field(
        default=None, metadata={"help": "Column that holds the problem; by default prompt, question or problem."}
    )
    answer_column: str | None = field(
        default=None, metadata={"help": "Column that holds the answer; by default answer, solution or target."}
    )
    num_train_problems: int = field(default=20_000, metadata={"help": "Problems that reasoning-gym generates."})
    num_held_out_problems: int = field(
        default=200, metadata={"help": "Held-out problems; of a file or hub dataset at most a fifth is held out."}
    )
    instruction: str = field(
        default=r"Put your final answer within \boxed{}.",
        metadata={"help": "Added to every problem; the embedded policy gets the bare expression."},
    )


def parse(recipe: Recipe, argv: list[str]) -> tuple[RecipeArguments, OTBGRPOConfig, ModelConfig]:
    parser = TrlParser((recipe.arguments, OTBGRPOConfig, ModelConfig), prog=recipe.name)
    if not torch.accelerator.is_available():
        parser.set_defaults(use_cpu=True, bf16=False)
    # `--flag=value` as two words: TrlParser looks for --config as a word of its own
    argv = [word for given in argv for word in (given.split("=", 1) if given.startswith("--") else [given])]
    if "--config" not in argv and not {"-h", "--help"} & set(argv):
        model_flag = argparse.ArgumentParser(add_help=False)
        model_flag.add_argument("--model_name_or_path", default="embedded")
        default = recipe.configs.get(model_flag.parse_known_args(argv)[0].model_name_or_path)
        argv = ["--config", str(CONFIGS / default), *argv] if default else argv
    if argv[-1:] == ["--config"]:
        raise InputError("`--config` needs the path of a YAML file.")
    try:
        recipe_args, args, model_args = parser.parse_args_and_config(argv)
    except (ValueError, TypeError, yaml.YAMLError) as error:  # what a configuration says of its own values
        raise InputError(str(error)) from error
    if recipe_args.num_held_out_problems < 1 or recipe_args.num_train_problems < 1:
        raise InputError("`num_train_problems` and `num_held_out_problems` must be at least 1.")
    args.model_init_kwargs = {
        **(args.model_init_kwargs or {}),
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    return recipe_args, args, model_args


def dataset_options(text: str | None) -> dict:
    try:
        options = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise InputError(f"`dataset_options` is {text!r}: it is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise InputError(f"`dataset_options` is {text!r}: it must be a JSON object.")
    return options


def model_path(name: str, embedded: str) -> str:
    if name == "embedded":
        return str(embedded_policy(embedded))
    if name == "smollm2":
        return str(smollm2_policy())
    if os.path.isdir(name):
        check_model_folder(Path(name))
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InputError(f"the model folder {name} does not exist.")
    return name


def resume_checkpoint(args: OTBGRPOConfig) -> str | None:
    checkpoint = args.resume_from_checkpoint
    if checkpoint is not None and not os.path.isfile(os.path.join(checkpoint, AccuracyReward.FILE)):
        raise InputError(f"`resume_from_checkpoint` is {checkpoint!r}: no checkpoint of this recipe lies there.")
    return checkpoint


def run(recipe: Recipe, argv: list[str]) -> None:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("trl_otb").setLevel(logging.INFO)

    recipe_args, args, model_args = parse(recipe, argv)
    checkpoint = resume_checkpoint(args)
    problems = load_problems(
        recipe_args.dataset_name,
        options=dataset_options(recipe_args.dataset_options),
        config=recipe_args.dataset_config,
        split=recipe_args.dataset_split,
        prompt_column=recipe_args.prompt_column,
        answer_column=recipe_args.answer_column,
        num_train=recipe_args.num_train_problems,
        num_held_out=recipe_args.num_held_out_problems,
        seed=args.seed,
    )
    model_name = model_args.model_name_or_path or "embedded"
    path = model_path(model_name, recipe.embedded)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path,
            revision=model_args.model_revision,
            trust_remote_code=args.trust_remote_code,
            padding_side="left",
            truncation_side="left",
        )
    except OSError as error:
        raise InputError(f"`model_name_or_path` is {model_name!r}: {error}") from error
    embedded = model_name == "embedded"
    train = with_prompts(problems.train, tokenizer, recipe_args.instruction, embedded)
    held_out = with_prompts(problems.held_out, tokenizer, recipe_args.instruction, embedded)

    args.eval_on_start = checkpoint is None  # a resumed run has its first evaluation in the checkpoint
    reward, interrupt = AccuracyReward(problems), CheckpointOnInterrupt()
    trainer = OTBGRPOTrainer(
        model=path,
        reward_funcs=reward,
        args=args,
        train_dataset=train,
        eval_dataset=AccuracyReward.mark(held_out),
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
        callbacks=[reward, interrupt],
        tools=recipe.tools(recipe_args) if recipe.tools else None,
    )
    trainer.remove_callback(PrinterCallback)
    if not args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(CompactProgress())
    say = trainer.accelerator.print
    say(
        f"{recipe_args.dataset_name}: {len(train)} problems to train on, {len(held_out)} held out. "
        f"{model_name}: {sum(p.numel() for p in trainer.model.parameters()):,} parameters. "
        f"Baseline {args.baseline}, {args.num_generations} completions a problem, "
        f"{args.generation_batch_size} a generation batch."
    )

    if checkpoint is not None:
        reward.resume(checkpoint, trainer.accelerator.is_main_process)
    began = time.perf_counter()
    with interrupt:
        trainer.train(resume_from_checkpoint=checkpoint)
    seconds = time.perf_counter() - began
    folder = Path(args.output_dir)
    if interrupt.interrupted:
        last = folder / f"checkpoint-{trainer.state.global_step}"
        again = shlex.join([*argv, "--resume_from_checkpoint", str(last)])
        say(f"Stopped after step {trainer.state.global_step}. Go on with the same command and, at its end, the checkpoint:\n  {sys.argv[0]} {again}")  # fmt: skip
        return
    trainer.evaluate()
    before, after = reward.evaluations[0], reward.evaluations[-1]
    tokens = reward.all_tokens_generated()
    trainer.save_model()
    trainer.save_state()
    if trainer.accelerator.is_main_process:
        plot_training(
            trainer.state.log_history,
            folder / "training.png",
            f"{model_name} on {recipe_args.dataset_name}, baseline {args.baseline}, N = {args.num_generations}: "
            f"held-out accuracy {100 * before.mean:.0f} % → {100 * after.mean:.0f} %",
        )
        result = {
            "baseline": args.baseline,
            "seed": args.seed,
            "before": vars(before),
            "after": vars(after),
            "tokens_generated": tokens,
            "training_seconds": seconds,
        }
        (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    say(f"Held-out accuracy before: {before}")
    say(f"Held-out accuracy after:  {after}")
    if trainer.tools:
        first, *_, last = [entry for entry in trainer.state.log_history if "eval_turns" in entry]
        say("Held-out calls a completion, failed calls, turns:")
        for when, entry in (("before", first), ("after", last)):
            say(
                f"  {when + ':':8}{entry['eval_tools/call_frequency']:.2f}  "
                f"{100 * entry['eval_tools/failure_frequency']:.1f} %  {entry['eval_turns']:.2f}"
            )
    say(
        f"{tokens:,} tokens {'generated or shown by tools' if trainer.tools else 'generated'} in "
        f"{trainer.state.global_step} steps; {seconds:.0f} s "
        + ("with the first evaluation." if checkpoint is None else "since the checkpoint.")
    )
    say(f"{folder}: the model, checkpoints, trainer_state.json (the log), training.png and result.json.")


def leave() -> None:
    """Leave together: a process that is gone early takes the others with it."""
    if not torch.distributed.is_initialized():
        return
    torch.distributed.barrier()
    if torch.distributed.get_backend() == "gloo":  # its threads can abort the interpreter's teardown after a good run
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    torch.distributed.destroy_process_group()


def launch(recipe: Recipe, argv: list[str]) -> None:
    """Run as a script does: with errors in a line, and all processes leaving together."""
    try:
        run(recipe, argv)
        leave()
    except (InputError, FileNotFoundError) as error:
        sys.exit(f"{recipe.name}: error: {error}")
