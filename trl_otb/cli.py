"""
trl-otb grpo --config run.yaml: as `trl grpo`, with `OTBGRPOTrainer` and the options of `OTBGRPOConfig`.
trl-otb compare --config run.yaml: which baseline suits this run, by `compare_baselines`; nothing is trained.
"""

import sys
from typing import Any
from unittest.mock import patch


COMMANDS = ("grpo", "compare")


def make_parser(command: str) -> Any:
    """TRL's parser of `trl grpo`, with the options of [`OTBGRPOConfig`]."""
    import trl
    from trl.scripts.grpo import GRPOScriptArguments

    from trl_otb import OTBGRPOConfig

    kinds = (GRPOScriptArguments, OTBGRPOConfig, trl.ModelConfig, trl.DatasetMixtureConfig)
    return trl.TrlParser(kinds, prog=f"trl-otb {command}")


def run(argv: list[str]) -> None:
    """In each process: TRL's script, with this package's trainer."""
    import trl
    from trl.scripts import grpo

    from trl_otb import OTBGRPOTrainer, compare_baselines

    class Comparing(OTBGRPOTrainer):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            self.accelerator.print(compare_baselines(self))
            self.accelerator.end_training()
            sys.exit()

    command, *flags = argv
    with patch.object(trl, "GRPOTrainer", Comparing if command == "compare" else OTBGRPOTrainer):
        grpo.main(*make_parser(command).parse_args_and_config(flags, fail_with_unknown_args=False))


def main(argv: list[str] | None = None) -> None:
    """Start [`run`] through `accelerate launch`, whose options may be among the others, as for `trl grpo`."""
    command, *flags = argv or sys.argv[1:] or [""]
    if command not in COMMANDS:
        sys.exit(__doc__ if command in ("", "-h", "--help") else f"trl-otb: {command!r} is none of {COMMANDS}.")
    from accelerate.commands.launch import launch_command, launch_command_parser
    from trl.cli.accelerate_config import resolve_accelerate_config_argument
    from trl.cli.commands.training import _subtract_subsequence

    remaining = {"return_remaining_strings": True, "separate_remaining_strings": True}
    *_, of_file, of_line = make_parser(command).parse_args_and_config(flags, **remaining)
    launch = resolve_accelerate_config_argument(of_file + of_line)
    launch_command(
        launch_command_parser().parse_args([*launch, __file__, command, *_subtract_subsequence(flags, of_line)])
    )


if __name__ == "__main__":
    sys.path.pop(0)  # this folder
    run(sys.argv[1:])
