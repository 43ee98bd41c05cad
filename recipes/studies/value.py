"""
What is `value` worth, and each of its parts? The noise of the gradient beside the pooled baselines and the paper's.

    OMP_NUM_THREADS=1 python -m recipes.studies.value --tasks sums    # minutes on one core; all: half an hour
    python -m recipes.studies.value --plot_only --publish                        # the columns of value.md

Each task is measured by trl_otb.compare_baselines, with pools of 64 completions; θ has seen 8 batches of 16 other
prompts, four completions each.
"""

import argparse
import sys
from pathlib import Path

import torch

import trl_otb
from recipes.common.launching import tidy_output
from recipes.studies import render
from recipes.studies.tasks import cells_of, compared, noise_flags, task_of, trainer_of
from trl_otb.baselines import BASELINES, Value


TASKS = {"scratchpad_30": "T = 30", "scratchpad_100": "T = 100", "sums": "sums", "calculator": "calculator"}
BESIDE = ("otb", "rloo", "rloo_pooled", "ogb_pooled", "ogb_pooled_damped", "value")
_flags = {name: getattr(BASELINES["value"], name) for name in ("leaves_one_out", "unbiased", "reads", "on_top_of")}


@trl_otb.register_baseline("value_weights_one", **_flags)
class WeightsOne(Value):
    """Per token: `value`, an ordinary value function: every token counts alike."""

    weights = "one"


@trl_otb.register_baseline("value_no_states", **_flags)
class NoStates(Value):
    """Per token: `value`, without hidden states."""

    def _features(self, tokens):
        return super()._features(tokens)[..., :9]


@trl_otb.register_baseline("value_no_sums", **_flags)
class NoSums(Value):
    """Per token: `value`, without sums over the prefix."""

    def _features(self, tokens):
        features = super()._features(tokens)
        return torch.cat([features[..., :3], features[..., 9:]], dim=-1)


@trl_otb.register_baseline("value_whole", **_flags)
class Whole(Value):
    """Per token: `value`, c = 1 from the first batch on."""

    def _fit(self):
        super()._fit()
        self.weight = 1.0


ABLATIONS = ("value_weights_one", "value_no_states", "value_no_sums", "value_whole")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="value", description=__doc__.splitlines()[1])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="by default all")
    noise_flags(parser, seed=0, num_prompts=24)
    args = parser.parse_args(argv)
    folder, columns = args.output_dir or Path("runs/studies/value"), {}
    try:
        for task in args.tasks:
            report = compared(
                folder / task,
                lambda task=task: trainer_of(task_of(task, args.seed), seed=args.seed, disable_tqdm=False),
                args,
                baselines=[*BESIDE, *ABLATIONS],
                completions_per_prompt=64,
                group_sizes=[4, 16],
            )
            columns[TASKS[task]] = cells_of(report)
        render.report(columns, folder)
        if args.publish:
            render.publish("value", columns)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    tidy_output()
    main(sys.argv[1:])
