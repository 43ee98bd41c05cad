"""
trl-otb grpo --config run.yaml: as `trl grpo`, with `OTBGRPOTrainer` and the options of `OTBGRPOConfig`.
trl-otb compare --config run.yaml: which baseline suits this run, by `compare_baselines`; nothing is trained.

trl-otb grpo --help lists the options, trl-otb --version the versions. YAML files are trusted: rewards and
`baseline: module:function` are imported.
"""

import difflib
import sys
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any
from unittest.mock import patch


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


def run(argv: list[str]) -> None:
    """In each process: TRL's script, with this package's trainer."""
    import trl
    from trl.scripts import grpo

    from trl_otb import OTBGRPOTrainer, compare_baselines
    from trl_otb.stopping import StopAfterStep, latest_checkpoint

    command, *flags = argv
    options, args, *others = make_parser(command).parse_args_and_config(flags, fail_with_unknown_args=False)
    if str(args.resume_from_checkpoint).lower() in ("latest", "true"):
        args.resume_from_checkpoint = latest_checkpoint(args.output_dir)

    class Trainer(OTBGRPOTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.add_callback(StopAfterStep())

        def train(self, *args: Any, **kwargs: Any) -> Any:
            if command == "grpo":
                return super().train(*args, **kwargs)
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


def main(argv: list[str] | None = None) -> None:
    """Start [`run`] through `accelerate launch`, whose options may be among the others, as for `trl grpo`."""
    command, *flags = argv or sys.argv[1:] or [""]
    if command in ("", "-h", "--help"):
        return print(__doc__.strip())
    if command == "--version":
        return print(*(f"{name} {version(name)}" for name in ("trl-otb", "trl", "transformers", "torch")), sep="\n")
    if command not in COMMANDS:
        sys.exit(f"trl-otb: {command!r} is none of {COMMANDS}.")
    from accelerate.commands.launch import launch_command, launch_command_parser
    from trl.cli.accelerate_config import resolve_accelerate_config_argument
    from trl.cli.commands.training import _subtract_subsequence

    remaining = {"return_remaining_strings": True, "separate_remaining_strings": True}
    parser, launcher = make_parser(command), launch_command_parser()
    try:
        *_, of_file, of_line = parser.parse_args_and_config(flags, **remaining)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    known = {*launcher._option_string_actions, "--accelerate_config"}
    for name in (text.partition("=")[0] for text in of_file + of_line if text.startswith("--")):
        if name not in known:
            near = difflib.get_close_matches(name, {*parser._option_string_actions, *known}, n=1)
            hint = f" Did you mean {near[0]}?" if near else " `--help` lists the options."
            parser.error(f"{name} is no option of trl grpo, of trl_otb or of accelerate launch.{hint}")
    launch = resolve_accelerate_config_argument(of_file + of_line)
    launch_command(launcher.parse_args([*launch, __file__, command, *_subtract_subsequence(flags, of_line)]))


if __name__ == "__main__":
    sys.path.pop(0)  # this folder
    run(sys.argv[1:])
