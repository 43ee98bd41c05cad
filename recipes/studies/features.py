"""
Which features tell `value` most? Every choice learns beside the others from the same batches.

    OMP_NUM_THREADS=1 python -m recipes.studies.features --task copy --batches 40   # 25 minutes on one core

The policy, SmolLM2 or a toy's, is sampled, 16 prompts × 4 completions per batch, and not trained. What is told is the
share of the noise that is left, Σ w (G − B)² / Σ w (G − B0)², on batches not learnt from yet; B0 is pooled RLOO.
What is saved is not repeated; `--publish` puts the second half of the batches into the results and the pages.
"""

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pandas
import torch

import trl_otb
from recipes.studies import language, render, tasks
from recipes.studies.value import FLAGS
from trl_otb.baselines import Value
from trl_otb.seam.states import StateRecorder


DEPTHS = {"1/3": 1 / 3, "1/2": 1 / 2, "2/3": 2 / 3, "5/6": 5 / 6, "1": 1.0}  # of the layers that are heard
FOLDER = Path("runs/studies/features")
TOYS = ("scratchpad_30", "scratchpad_100", "sums", "lake_6", "lake_6_turns")
SUMS, WIDTH = 9, 128  # numbers per token: those that need no states, and of every layer


class Layers(StateRecorder):
    """The outputs of several layers, projected, one beside the other."""

    def __init__(self, policy) -> None:
        super().__init__(policy)
        self.remove()
        size = policy.config.hidden_size
        self._projection = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(0)) / math.sqrt(size)
        layers = policy.get_decoder().layers
        for depth in DEPTHS.values():
            layers[math.ceil(depth * len(layers)) - 1].register_forward_hook(self._record)

    def _record(self, module, args, output) -> None:
        super()._record(module, args, output)
        chunks = self._chunks or []
        if len(chunks) > 1 and chunks[-2].size(-1) < len(DEPTHS) * WIDTH:
            chunks[-2:] = [torch.cat(chunks[-2:], dim=-1)]


class Choice(Value):
    """`value` that looks at some of the features."""

    def __init__(self, columns: list[int], decay: float = Value.decay) -> None:
        super().__init__()
        self.columns, self.decay = columns, decay

    def _features(self, *given):
        return super()._features(*given)[..., self.columns]


def choices() -> dict[str, Choice]:
    """By layer, whether states, their means over the prefix or both are looked at, and numbers of the projection."""
    found = {"no states": Choice([*range(SUMS)])}
    for i, depth in enumerate(DEPTHS):
        for numbers in (8, 16, 32, 64, WIDTH) if depth == "2/3" else (32,):
            state = range(SUMS + i * WIDTH, SUMS + i * WIDTH + numbers)
            mean = range(state.start + len(DEPTHS) * WIDTH, state.stop + len(DEPTHS) * WIDTH)
            for kind, columns in {"state": [*state], "mean": [*mean], "both": [*state, *mean]}.items():
                found[f"{depth}, {kind}, {numbers}"] = Choice([*range(SUMS), *columns])
    kept = ("no states", "2/3, both, 8", "2/3, both, 32", f"2/3, both, {WIDTH}")
    return found | {f"{name}, no decay": Choice(found[name].columns, decay=1.0) for name in kept}


@trl_otb.register_baseline("value_choices", **FLAGS)
class Choices(Value):
    """Per token: pooled RLOO, beside which every choice learns."""

    def __init__(self) -> None:
        self.choices = choices()

    def __call__(self, tokens):
        return tokens.base

    def update(self, tokens):
        return {name: choice.update(tokens)["explained"] for name, choice in self.choices.items()}

    def state_dict(self):
        return {}  # nothing is saved


def publish(task: str, left: pandas.Series, batches: int) -> None:
    """Replace the task's column in the published table, or add it, and render all pages."""
    results, kind, column = render.load("features"), "toys" if task in TOYS else "language", f"{task} ({batches})"
    head, *rows = results["tables"][kind]
    table = pandas.DataFrame(rows, columns=head).set_index("features")
    table = table.rename(columns=lambda title: column if title.startswith(f"{task} (") else title)
    table[column] = left.map("{:.3f}".format)
    results["tables"][kind] = [["features", *table], *table.reset_index().values.tolist()]
    render.save("features", results)
    render.render()


def sampled(task: str, batches: int) -> dict[str, list[float]]:
    """What every choice explained of every batch."""
    size = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4, "keep_groups_together": True}
    of_task = replace((tasks if task in TOYS else language).task_of(task), peft_config=None)  # untrained adapters
    size |= {} if task in TOYS else tasks.BFLOAT16
    trainer = tasks.trainer_of(of_task, baseline="value_choices", max_steps=batches, logging_steps=1, seed=0, **size)
    trainer._state_recorder = Layers(trainer.policy)  # in the place of one layer's
    trainer.accelerator.backward = lambda loss, **options: None  # nothing is trained
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {name: [float(entry[f"otb/value_choices/{name}"]) for entry in log] for name in choices()}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="features", description=__doc__.splitlines()[1])
    parser.add_argument("--task", choices=[*language.TASKS, *language.REASONING, *TOYS], default="copy")
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--publish", action="store_true", help="put the task into the results and the pages")
    args = parser.parse_args(argv)
    path = FOLDER / f"{args.task}-{args.batches}.json"
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text(json.dumps(sampled(args.task, args.batches)))
    found = pandas.DataFrame(json.loads(path.read_text()))
    left = (1 - found).groupby(lambda batch: int(batch >= args.batches // 2)).mean().T
    print(left.rename(columns={0: "first half of the batches", 1: "second"}).round(3).to_string())
    if args.publish:
        publish(args.task, left[1], args.batches)


if __name__ == "__main__":
    main(sys.argv[1:])
