"""Held-out accuracy as avg@k with its standard error, measured in the trainer's own evaluation."""

import functools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .run_folder import COUNTS


KEPT = 20  # number of held-out problems whose answers are saved


@dataclass
class Accuracy:
    """The share of a problem's k samples that are right: `mean` over problems, and the standard error of the mean."""

    mean: float
    standard_error: float | None  # None for a single problem
    problems: int
    samples: int
    step: int = 0

    def __str__(self):
        error = "" if self.standard_error is None else f" ± {100 * self.standard_error:.1f}"
        problems = f"{self.problems} problem{'s' * (self.problems > 1)}"
        return f"{100 * self.mean:.1f} %{error} (avg@{self.samples}, {problems})"


def accuracy(scores: dict[int, list[float]], step: int = 0) -> Accuracy:
    """From each problem's scores. The error is over problems, since samples of one problem are not independent."""
    means = [statistics.fmean(s) for s in scores.values()]
    error = statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else None
    return Accuracy(statistics.fmean(means), error, len(means), min(map(len, scores.values())), step)


class HeldOut(TrainerCallback):
    """
    Wraps a reward function to count generated tokens in training and, in an evaluation, to collect every held-out
    problem's scores as an [`Accuracy`]. Checkpoints keep the counts. An evaluation during training leaves the random
    state of training unchanged, so evaluating more often does not change a run.
    """

    def __init__(self):
        self.dataset: Dataset | None = None  # the held-out problems, set by `numbered`
        self.tokens_generated = 0  # by this process
        self.seconds = 0.0  # of training and its evaluations, over all parts of a resumed run
        self._began = 0.0
        self.evaluations: list[Accuracy] = []
        self.answers: dict[str, list[dict]] = {}  # "before" and "after": each problem's first sample
        self._samples: list[tuple[int, float, str]] = []
        self._random_state = None

    def numbered(self, problems: Dataset) -> Dataset:
        """The held-out problems with a column of numbers, which marks the reward's calls in an evaluation."""
        self.dataset = problems.add_column("held_out", list(range(len(problems))))
        return self.dataset

    def counted(self, reward: Callable[..., list[float]]) -> Callable[..., list[float]]:
        """`reward`, wrapped so that its calls are counted."""

        @functools.wraps(reward)
        def count(completions, completion_ids, held_out=None, log_metric=None, **kwargs):
            if log_metric is not None and not isinstance(completions[0], str):
                turns = sum(message["role"] == "assistant" for c in completions for message in c)
                log_metric("turns", turns / len(completions))
            scores = reward(completions=completions, completion_ids=completion_ids, log_metric=log_metric, **kwargs)
            if held_out is None:
                self.tokens_generated += sum(map(len, completion_ids))
            else:
                samples = zip(held_out, scores, completions, strict=True)
                self._samples += [(problem, _number(score), transcript(c)) for problem, score, c in samples]
            return scores

        return count

    def resume(self, checkpoint: str, is_main_process: bool) -> None:
        """Load the counts saved with a checkpoint."""
        saved = json.loads((Path(checkpoint) / COUNTS).read_text())
        self.evaluations, self.answers = [Accuracy(**e) for e in saved["evaluations"]], saved["answers"]
        self.tokens_generated = saved["tokens_generated"] if is_main_process else 0
        self.seconds = saved.get("seconds", 0.0)

    def on_train_begin(self, args, state, control, **kwargs):
        self._began = time.perf_counter() - self.seconds

    def on_train_end(self, args, state, control, **kwargs):
        self.seconds = time.perf_counter() - self._began

    def on_save(self, args, state, control, **kwargs):
        self.on_train_end(args, state, control)
        self.save(Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}", state.is_world_process_zero)

    def save(self, folder: Path, is_main_process: bool) -> None:
        """Save the counts next to a model. All processes must call it."""
        saved = {
            "seconds": self.seconds,
            "evaluations": [vars(e) for e in self.evaluations],
            "answers": self.answers,
            "tokens_generated": self.all_tokens_generated(),
        }
        if is_main_process:
            (folder / COUNTS).write_text(json.dumps(saved))

    def all_tokens_generated(self) -> int:
        """The total over processes. All of them must call it."""
        return sum(gather_object([self.tokens_generated]))

    def on_step_end(self, args, state, control, **kwargs):
        if control.should_evaluate:
            self._random_state = torch.get_rng_state(), torch.cuda.is_available() and torch.cuda.get_rng_state()

    def on_evaluate(self, args, state, control, **kwargs):
        if self._random_state is not None:
            cpu, gpu = self._random_state
            torch.set_rng_state(cpu)
            if torch.cuda.is_available():
                torch.cuda.set_rng_state(gpu)
            self._random_state = None
        k = args.num_generations_eval or args.num_generations
        scores, first = defaultdict(list), {}
        for problem, score, text in gather_object(self._samples):
            # Several processes pad the last batch with repeated problems: only the first k samples count
            if len(scores[problem]) < k:
                scores[problem].append(score)
                first.setdefault(problem, {"said": text, "score": score})
        self._samples = []
        self.evaluations.append(accuracy(scores, state.global_step))
        self.answers["after" if self.answers else "before"] = [first[p] for p in sorted(first)[:KEPT]]

    def examples(self) -> list[dict]:
        """The first few held-out problems: question, answer, and the policy's answers before and after training."""
        rows = self.dataset.select(range(min(KEPT, len(self.dataset))))
        return [
            {"question": row["question"], "answer": row["answer"]}
            | {when: said[i] for when, said in self.answers.items() if i < len(said)}
            for i, row in enumerate(rows)
        ]


def transcript(completion: str | list[dict]) -> str:
    """A completion as readable text: calls as `name(arguments)`, results after an arrow."""
    if isinstance(completion, str):
        return completion
    words = []
    for message in completion:
        for function in (call.get("function", call) for call in message.get("tool_calls") or []):
            arguments = function.get("arguments")
            shown = ", ".join(map(str, arguments.values())) if isinstance(arguments, dict) else arguments
            words.append(f"{function.get('name')}({shown})")
        if message["role"] == "tool" or message.get("content"):
            words.append(f"{'→ ' * (message['role'] == 'tool')}{message.get('content')}")
    return " ".join(words)


def _number(score) -> float:
    """A reward as one number: `None` counts as 0, and rewards per turn are added up."""
    if score is None:
        return 0.0
    return float(sum(score) if isinstance(score, Sequence) else score)
