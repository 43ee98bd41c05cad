"""Parses the options of a run from the command line and a YAML file."""

import argparse
import dataclasses
import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import yaml
from transformers.hf_argparser import HfArg
from trl import GRPOConfig, ModelConfig, TrlParser

from trl_otb import OTBGRPOConfig
from trl_otb.baselines import BASELINES

from .checks import check_effects, check_values
from .errors import HelpShown, InputError, explained, input_errors
from .launching import flag_names, print_once, processes


RECIPES = Path(__file__).parents[1]
# Old names that transformers still accepts, with a warning, but ignores when the new ones are set.
RENAMED = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
DATA_OPTIONS = ("dataset_options dataset_config dataset_split prompt_column answer_column num_train_problems").split()
# Help texts that replace those of TRL and transformers.
HELP = {
    "baseline": f"`value` is advised; others: {', '.join(BASELINES)}; or your own as module:function.",
    "output_dir": "Folder of the run.",
    "model_name_or_path": "A model folder, a hub id, or module:function, a function that returns a model folder.",
    "resume_from_checkpoint": "`latest`, or a checkpoint folder.",
}
# The options of TRL and transformers that `--help` shows.
FREQUENT = (
    "model_name_or_path output_dir seed learning_rate max_steps per_device_train_batch_size "
    "gradient_accumulation_steps num_generations max_completion_length temperature beta loss_type eval_strategy "
    "eval_steps num_generations_eval per_device_eval_batch_size reward_weights save_steps logging_steps report_to "
    "resume_from_checkpoint use_peft lora_r load_in_4bit use_vllm vllm_mode activation_checkpointing bf16 use_cpu"
).split()


def option(default: Any, help: str) -> Any:
    """A dataclass field with a default and a help text."""
    given = {"default_factory": lambda: default} if isinstance(default, list) else {"default": default}
    return HfArg(**given, help=help)


@dataclass
class RecipeArguments:
    """
    A recipe's own options, in addition to those of OTBGRPOConfig and TRL's ModelConfig.

    A subclass may set `ABOUT`, the first lines of `--help`; `FOLDER`, the default `output_dir`; and `WITHOUT_EFFECT`,
    options that the recipe does not read: `--help` omits them, and setting one on the command line is an error.
    """

    ABOUT: ClassVar[str] = ""
    FOLDER: ClassVar[str] = "runs/{recipe}/{baseline}-seed{seed}"
    WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = tuple(
        "do_train do_eval do_predict eval_on_start enable_jit_checkpoint include_for_metrics batch_eval_metrics "
        "label_smoothing_factor train_sampling_strategy length_column_name".split()
    )

    dataset_name: str = option("reasoning_gym:chain_sum", "`reasoning_gym:TASK`, a data file, or a hub dataset's id.")
    dataset_options: str | None = option(None, "Options of the reasoning-gym task, as JSON: `'{\"max_terms\": 6}'`.")
    dataset_config: str | None = option(None, "Configuration of a hub dataset.")
    dataset_split: str = option("train", "Split of a hub dataset.")
    prompt_column: str | None = option(None, "Column of the problem; by default prompt, question or problem.")
    answer_column: str | None = option(None, "Column of the answer; by default answer, solution or target.")
    num_train_problems: int | None = option(None, "Training problems; by default 20,000 for a task, all for a file.")
    num_held_out_problems: int = option(200, "Held-out problems; at most a fifth of a file or hub dataset.")
    instruction: str = option(r"Put your final answer within \boxed{}.", "Appended to every problem.")
    reward_funcs: list[str] | None = option(None, "Your own rewards, as `module:function`, after the recipe's own.")
    eval_only: bool = option(False, "Measure the model's held-out accuracy and stop, without training.")
    overwrite: bool = option(False, "Replace the run in the output folder.")
    allow_changes: bool = option(False, "Resume even if options differ from those the run started with.")
    traceback: bool = option(False, "Print the traceback of an error.")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults other than None and False, and each flag in one spelling."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=34, width=110)

    def _get_help_string(self, action):
        return action.help if action.default in (None, False) else super()._get_help_string(action)

    def _format_action_invocation(self, action):
        spelt = [name for name in action.option_strings if "-" not in name[2:]] or action.option_strings
        return f"{', '.join(spelt)} {self._format_args(action, action.dest.upper())}".strip()


class RecipeParser(TrlParser):
    """TRL's parser with exact flag names, one-line errors and readable help."""

    def __init__(self, name: str, arguments: type):
        super().__init__(
            (arguments, OTBGRPOConfig, ModelConfig),
            prog=name,
            usage=f"{name} [--config FILE.yaml] [--flag value ...]",
            allow_abbrev=False,
            add_help=False,
            description=arguments.ABOUT,
        )
        self._negative_number_matcher = re.compile(r"-(\d+|\d*\.\d+)([eE][-+]?\d+)?$")  # -1e-4 is a number
        self.add_argument("--config", metavar="FILE.yaml", help="Defaults that replace the recipe's own YAML file.")
        self.add_argument("-h", "--help", action="store_true", help="Show the most common options and exit.")
        self.add_argument("--help-all", action="store_true", help="Show all options, including TRL's, and exit.")
        self.actions = {action.dest: action for action in reversed(self._actions)}  # --x rather than --no_x
        for name, text in HELP.items():
            self.actions[name].help = text
        self.actions["baseline"].metavar = "NAME"
        own, otb, grpo = ({f.name for f in dataclasses.fields(c)} for c in (arguments, OTBGRPOConfig, GRPOConfig))
        self._shown = own | (otb - grpo) | {"config", "help", "help_all", "scale_rewards", *FREQUENT}
        self._shown -= {*arguments.WITHOUT_EFFECT}

    def error(self, message: str) -> None:
        raise InputError(f"{message}. See --help.")

    def format_short_help(self) -> str:
        """The most common options; those of TRL and transformers with the first sentence of their help."""
        for action in self._actions:
            if action.dest not in self._shown or action is not self.actions[action.dest]:
                action.help = argparse.SUPPRESS
            elif action.dest in FREQUENT:
                action.help = action.help.split(". ")[0].rstrip(".") + "."
            action.metavar = action.metavar or ("VALUE" if action.nargs != "?" else "true|false")
        self.formatter_class = _Help
        return self.format_help()

    def closest(self, name: str, prefix: str = "") -> str:
        close = difflib.get_close_matches(name, [*self.actions], n=1)
        return f" Did you mean {prefix}{close[0]}?" if close else " See --help-all for all options."

    def read_yaml(self, path: Path) -> set[str]:
        """Read defaults from a YAML file, check names and values as for flags, and return the names."""
        with explained(f"`--config` is {str(path)!r}: it cannot be read:"):
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise InputError(f"`--config` is {str(path)!r}: it must hold one `option: value` per line.")
        os.environ.update({key: str(value) for key, value in (values.pop("env", None) or {}).items()})
        values = {RENAMED.get(key, key): value for key, value in values.items()}
        for key, value in values.items():
            action = self.actions.get(key)
            if action is None or key in ("config", "help", "help_all"):
                raise InputError(f"{path} has an unknown option {key!r}.{self.closest(str(key))}")
            if isinstance(value, list) and action.nargs != "+":
                raise InputError(f"{path}: `{key}` is {value!r}: it takes one value.")
            if value is None or isinstance(value, dict):
                continue
            read = []
            for single in value if isinstance(value, list) else [value]:
                try:
                    read.append(self._get_value(action, str(single)))
                    self._check_value(action, read[-1])
                except argparse.ArgumentError as error:
                    raise InputError(f"{path}: `{key}` is {single!r}: {error.message}.") from error
            values[key] = read if action.nargs == "+" else value
        self.set_defaults_with_config(**values)
        return set(values)


def parse(
    file: str, arguments: type, default_config: str, argv: list[str]
) -> tuple[RecipeArguments, OTBGRPOConfig, ModelConfig]:
    """
    Parse the options of a recipe: flags first, then a YAML file for everything the flags leave open.

    `file` is the recipe's `__file__` or name; messages and the run folder are named after it. `arguments` is
    `RecipeArguments` or a subclass. `default_config` is the recipe's YAML file, next to it or in recipes/; `--config`
    replaces it. `argv` is the command line without the program's name. Raises an `InputError` for wrong options.
    """
    name = Path(file).name
    parser = RecipeParser(name, arguments)
    if not torch.accelerator.is_available():
        parser.set_defaults(use_cpu=True, bf16=False)
    parser.set_defaults(output_dir=arguments.FOLDER)
    argv = [_renamed(word) for word in argv]
    given, unknown = parser.parse_known_args(argv)
    beside = Path(file).with_name(default_config)
    config = Path(given.config or (beside if beside.is_file() else RECIPES / default_config))
    in_file = parser.read_yaml(config)
    if given.help or given.help_all:
        print(parser.format_help() if given.help_all else parser.format_short_help())
        raise HelpShown(0)
    if unknown:
        word = unknown[0].split("=")[0]
        if not word.startswith("-"):
            raise InputError(f"unexpected argument {word!r}: no flag precedes it.")
        raise InputError(f"there is no flag {word}.{parser.closest(word.lstrip('-'), '--')}")
    flags = {name if name in parser.actions else name.removeprefix("no_") for name in flag_names(argv)}
    if "num_train_epochs" in flags and "max_steps" not in flags:
        parser.set_defaults(max_steps=-1)  # otherwise the file's max_steps would win
    if "dataset_name" in flags and given.dataset_name != parser.actions["dataset_name"].default:
        for left_out in in_file.intersection(DATA_OPTIONS) - flags:
            print_once(f"Note: `{left_out}` in the YAML file belongs to the file's own dataset and is ignored.")
            parser.set_defaults(**{left_out: getattr(arguments, left_out)})
    values = parser.parse_args(argv)
    check_effects(values, flags, in_file, arguments.WITHOUT_EFFECT)
    check_values(values, processes())
    with input_errors(ValueError, TypeError, ImportError, RuntimeError, AssertionError):
        settings, args, model_args, _ = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
    if args.output_dir == arguments.FOLDER:
        args.output_dir = str(default_folder(arguments.FOLDER, name, args))
    by_flags = {"revision": model_args.model_revision, "attn_implementation": model_args.attn_implementation}
    args.model_init_kwargs = {**by_flags, "dtype": model_args.dtype, **(args.model_init_kwargs or {})}
    on_top = f", {len(flags)} flag{'s' * (len(flags) > 1)} on top" if flags else ""
    print_once(f"{name}: defaults from {min(os.path.relpath(config), str(config), key=len)}{on_top}.")
    return settings, args, model_args


def _renamed(word: str) -> str:
    name, *value = word.removeprefix("--").split("=", 1)
    return "=".join([f"--{RENAMED[name]}", *value]) if word.startswith("--") and name in RENAMED else word


def default_folder(pattern: str, name: str, args: OTBGRPOConfig) -> Path:
    """A folder such as `runs/math/otb-seed42`, or the one that holds the checkpoint to resume."""
    checkpoint = args.resume_from_checkpoint
    if checkpoint and checkpoint != "latest":
        return Path(checkpoint).parent
    return Path(pattern.format(recipe=Path(name).stem, baseline=args.baseline.replace(":", "."), seed=args.seed))
