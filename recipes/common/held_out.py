"""Held-out accuracy as avg@k with its standard error, measured by the trainer's own evaluation."""

import json
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from accelerate.utils import gather_object
from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .problems import Problems, find_answer


@dataclass
class Accuracy:
    """`mean` over problems of the share of its k samples that are right, and the standard error of that mean."""

    mean: float
    standard_error: float
    problems: int
    samples: int

    def __str__(self):
        return (
            f"{100 * self.mean:.1f} % ± {100 * self.standard_error:.1f} (avg@{self.samples}, {self.problems} problems)"
        )


def accuracy(scores: dict[int, list[float]]) -> Accuracy:
    """Of the scores of each problem's samples. Problems are the unit: samples of one problem are not independent."""
    means = [statistics.fmean(s) for s in scores.values()]
    error = statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else float("nan")
    return Accuracy(statistics.fmean(means), error, len(means), round(statistics.fmean(map(len, scores.values()))))


class AccuracyReward(TrainerCallback):
    """
    The reward function, 1 for a right answer and 0 for a wrong one, which also keeps count: of the tokens generated in
    training, and of every held-out problem's scores, turned into an [`Accuracy`] after each evaluation. Checkpoints keep
    the counts.
    """

    __name__ = "accuracy"  # under which TRL logs it
    FILE = "held_out_accuracy.json"

    def __init__(self, problems: Problems):
        self.grade = problems.grade
        self.tokens_generated = 0  # by this process
        self.evaluations: list[Accuracy] = []
        self._scores: list[tuple[int, float]] = []

    def resume(self, checkpoint: str, is_main_process: bool) -> None:
        """Take up the counts that were saved with a checkpoint."""
        saved = json.loads((Path(checkpoint) / self.FILE).read_text())
        self.evaluations = [Accuracy(**evaluation) for evaluation in saved["evaluations"]]
        self.tokens_generated = saved["tokens_generated"] if is_main_process else 0

    def on_save(self, args, state, control, **kwargs):
        saved = {"evaluations": [vars(e) for e in self.evaluations], "tokens_generated": self.all_tokens_generated()}
        if state.is_world_process_zero:
            path = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / self.FILE
            path.write_text(json.dumps(saved))

    def all_tokens_generated(self) -> int:
        """By all processes, all of which must ask."""
        return sum(gather_object([self.tokens_generated]))

    @staticmethod
    def mark(held_out: Dataset) -> Dataset:
        """Number the held-out problems, so that the reward function can tell them from training."""
        return held_out.add_column("held_out", list(range(len(held_out))))

    def __call__(
        self, completions, completion_ids, answer, entry, held_out=None, log_metric=None, **kwargs
    ) -> list[float]:
        texts = [c if isinstance(c, str) else c[-1].get("content") or "" for c in completions]
        if log_metric is not None and not isinstance(completions[0], str):
            turns = sum(message["role"] == "assistant" for c in completions for message in c)
            log_metric("turns", turns / len(completions))
        scores = [self.grade(find_answer(t), a, e) for t, a, e in zip(texts, answer, entry, strict=True)]
        if held_out is None:
            self.tokens_generated += sum(map(len, completion_ids))
        else:
            self._scores += zip(held_out, scores, strict=True)
        return scores

    def on_evaluate(self, args, state, control, **kwargs):
        scores = defaultdict(list)
        for problem, score in gather_object(self._scores):
            scores[problem].append(score)
        self._scores = []
        self.evaluations.append(accuracy(scores))
