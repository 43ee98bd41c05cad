"""
trl-otb grpo --config run.yaml: as `trl grpo`, with `OTBGRPOTrainer` and the options of `OTBGRPOConfig`.
trl-otb compare --config run.yaml: which baseline suits this run, by `compare_baselines`; nothing is trained.

trl-otb grpo --help lists the options, trl-otb --version the versions. YAML files are trusted: rewards and
`baseline: module:function` are imported.
"""

import difflib
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import yaml

import trl_otb


COMMANDS = ("grpo", "compare")


@dataclass
class CompareOptions:
    """Arguments of [`~trl_otb.compare_baselines`], and where to save the report."""

    baselines: list[str] | None = field(default=None, metadata={"help": "Which to compare; by default all."})
    num_prompts: int = field(default=16, metadata={"help": "Number of prompts."})
    completions_per_prompt: int = field(default=64, metadata={"help": "Completions sampled for each."})
    group_sizes: list[int] | None = field(default=None, metadata={"help": "Values of N; by default around the run's."})
    parameters: str | None = field(default=None, metadata={"help": "Regular expression: the parameters studied."})
    prompts_per_batch: int | None = field(default=None, metadata={"help": "Per step; by default the run's."})
    progress: bool = field(default=True, metadata={"help": "Whether `value` is also tried with `progress_funcs`."})
    report: str | None = field(default=None, metadata={"help": "Folder for report.json and report.html."})


def make_parser(command: str) -> Any:
    """TRL's parser of `trl grpo`, with the options of [`OTBGRPOConfig`]; its help begins with what is not TRL's."""
    import trl
    from trl.scripts.grpo import GRPOScriptArguments

    from trl_otb import OTBGRPOConfig

    kinds = [GRPOScriptArguments, OTBGRPOConfig, trl.ModelConfig, trl.DatasetMixtureConfig]
    kinds += [CompareOptions] * (command == "compare")
    usage = f"trl-otb {command} --config run.yaml [--option value ...]"
    parser = trl.TrlParser(kinds, prog=f"trl-otb {command}", usage=usage, description=__doc__.partition("\n\n")[0])
    of_trl = {*trl.GRPOConfig.__dataclass_fields__} - {"scale_rewards"}
    ours = {*OTBGRPOConfig.__dataclass_fields__, *(CompareOptions.__dataclass_fields__ if len(kinds) > 4 else ())}
    first = parser.add_argument_group("options of trl_otb")
    for group in parser._action_groups[:-1]:
        first._group_actions += [action for action in group._group_actions if action.dest in ours - of_trl]
        group._group_actions = [action for action in group._group_actions if action not in first._group_actions]
    parser._action_groups.insert(0, parser._action_groups.pop())
    return parser


def check(command: str, args: Any, others: list[Any]) -> None:
    """
    Raise a `ValueError` for what would fail after minutes, or be ignored; `"latest"` becomes the checkpoint's folder.
    `others` are the other parsed options, [`CompareOptions`] among them.
    """
    from trl_otb.baselines import find_baseline
    from trl_otb.stopping import latest_checkpoint

    asked = args.resume_from_checkpoint
    if str(asked).lower() == "false":
        asked = args.resume_from_checkpoint = None
    if latest := str(asked).lower() in ("latest", "true"):
        args.resume_from_checkpoint = latest_checkpoint(args.output_dir)
    checkpoint = args.resume_from_checkpoint
    if asked is not None and not (latest and command == "grpo") and not (checkpoint and Path(checkpoint).is_dir()):
        where = args.output_dir if checkpoint is None else checkpoint
        raise ValueError(f"--resume_from_checkpoint is {asked}, and there is no checkpoint in {where}.")
    for compared in [of for of in others if isinstance(of, CompareOptions)]:
        for name in compared.baselines or ():
            find_baseline(name)
        if compared.report is not None:
            Path(compared.report).mkdir(parents=True, exist_ok=True)  # an OSError if it cannot be written


def run(argv: list[str]) -> None:
    """In each process: TRL's script, with this package's trainer."""
    import trl
    from trl.scripts import grpo

    from trl_otb import OTBGRPOTrainer, compare_baselines
    from trl_otb.seam.parts import CLI
    from trl_otb.state import load_checkpoint
    from trl_otb.stopping import StopAfterStep, end_quietly_on_interrupt

    CLI.check()
    end_quietly_on_interrupt()
    command, *flags = argv
    options, args, *others = make_parser(command).parse_args_and_config(flags, fail_with_unknown_args=False)
    if isinstance(options.reward_funcs, str):  # in a file without a list, whose letters TRL would import
        options.reward_funcs = [options.reward_funcs]
    latest = args.resume_from_checkpoint
    check(command, args, others)
    if latest is not None and args.resume_from_checkpoint is None:
        print(f"There is no checkpoint in {args.output_dir}: the run starts from the beginning.", file=sys.stderr)

    class Trainer(OTBGRPOTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.add_callback(StopAfterStep())

        def train(self, *args: Any, **kwargs: Any) -> Any:
            if command == "grpo":
                if not args:  # which TRL's script passes from 1.14.1 on
                    kwargs.setdefault("resume_from_checkpoint", self.args.resume_from_checkpoint)
                return super().train(*args, **kwargs)
            if checkpoint := self.args.resume_from_checkpoint:
                load_checkpoint(self, checkpoint)
            chosen = asdict(others.pop())
            folder = chosen.pop("report")
            report = compare_baselines(self, **chosen)
            self.accelerator.print(report)
            if folder is not None and self.is_world_process_zero():
                report.save(folder)
            self.accelerator.end_training()
            sys.exit()

    with patch.object(trl, "GRPOTrainer", Trainer):
        grpo.main(options, args, *others[:2])


def hint(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0].lstrip('-')}?" if near else " `--help` lists the options."


def main(argv: list[str] | None = None) -> None:
    """Start [`run`] through `accelerate launch`, whose options may be among the others, as for `trl grpo`."""
    command, *flags = argv or sys.argv[1:] or [""]
    if command in ("", "-h", "--help"):
        return print(__doc__.strip())
    if command == "--version":
        installed = [f"{name} {version(name)}" for name in ("trl", "transformers", "torch")]
        return print(f"trl-otb {trl_otb.__version__}", *installed, sep="\n")
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        sys.exit(f"trl-otb: {command!r} is none of {COMMANDS}.{f' Did you mean {near[0]}?' if near else ''}")
    from accelerate.commands.launch import launch_command, launch_command_parser
    from trl.cli.accelerate_config import resolve_accelerate_config_argument
    from trl.cli.commands.training import _subtract_subsequence

    from trl_otb.seam.parts import CLI

    CLI.check()
    remaining = {"return_remaining_strings": True, "separate_remaining_strings": True}
    parser, launcher = make_parser(command), launch_command_parser()
    known = {*parser._option_string_actions, *launcher._option_string_actions, "--config", "--accelerate_config"}
    try:
        config = flags[flags.index("--config") + 1] if "--config" in flags[:-1] else None
        with open(config or os.devnull, encoding="utf-8") as file:  # an open one is named in errors
            keys = yaml.safe_load(file) or {}
        given = {f"--{key}": f"{key!r} in {config}" for key in keys if key != "env"}
        written = [text.partition("=")[0] for text in flags if text.startswith("--")]
        # On the line they may be shortened
        given |= {flag: flag for flag in written if not any(name.startswith(flag) for name in known)}
        for name, shown in given.items():
            if name not in known:
                parser.error(f"{shown} is no option of trl grpo, trl_otb or accelerate.{hint(name, known)}")
        _, args, *others, of_file, of_line = parser.parse_args_and_config(flags, **remaining)
        check(command, args, others)
    except (ValueError, OSError, yaml.YAMLError) as error:
        parser.error(str(error))
    launch = resolve_accelerate_config_argument(of_file + of_line)
    # The child finishes its step; a launcher that ended before would leave it behind
    signal.signal(signal.SIGINT, lambda signum, frame: None)
    signal.signal(signal.SIGTERM, lambda signum, frame: [child.terminate() for child in psutil.Process().children()])
    try:
        launch_command(launcher.parse_args([*launch, __file__, command, *_subtract_subsequence(flags, of_line)]))
    except subprocess.CalledProcessError as error:  # the child has said why
        sys.exit(error.returncode)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder
    run(sys.argv[1:])
