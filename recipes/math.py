"""
Train a policy on problems with verifiable answers, with a baseline for every token.

    accelerate launch recipes/math.py                                       # no hub, no GPU: recipes/math_cpu.yaml
    accelerate launch recipes/math.py --baseline group_mean                 # the same run with GRPO's own baseline
    accelerate launch recipes/math.py --config recipes/math_smollm2.yaml    # a real pretrained model, with LoRA
    accelerate launch recipes/math.py --model_name_or_path FOLDER --dataset_name problems.jsonl
    accelerate launch recipes/math.py --resume_from_checkpoint latest

Two x86-64 cores, 2026-11-25, seed 1: 1 min 23 s, plus 40 s of warm start on first use; held-out accuracy
37.6 % ± 2.5 before and 72.9 % ± 2.7 after (avg@4, 176 problems). More runs: recipes/README.md.

The file needs nothing else of this folder: copy it anywhere and change what you like.
"""

import os
import sys


if __name__ == "__main__":  # while this folder comes first, `import math` finds this file
    sys.path += [os.path.dirname(os.path.abspath(sys.path.pop(0))), os.getcwd()]

import functools
import json
import logging
import re
import signal
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from importlib import import_module
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import math_verify
import torch
from accelerate.utils import gather_object
from datasets import Dataset, load_dataset
from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainerState
from transformers.trainer_utils import get_last_checkpoint
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from trl_otb import OTBGRPOConfig, OTBGRPOTrainer


CONFIG = "math_cpu.yaml"  # beside this file: the defaults, if it is there; `--config FILE` replaces it


def option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class Options:
    """This script's own options; the others are those of OTBGRPOConfig and of TRL's ModelConfig."""

    dataset_name: str = option(
        "reasoning_gym:chain_sum", "`reasoning_gym:TASK`, a .jsonl, .json, .csv or .parquet file, or a hub dataset."
    )
    dataset_options: str = option("{}", "Options of the reasoning-gym task, as JSON.")
    dataset_config: str | None = option(None, "Configuration of the hub dataset.")
    dataset_split: str = option("train", "Split of the hub dataset.")
    prompt_column: str | None = option(None, "Column of the problem; by default prompt, question or problem.")
    answer_column: str | None = option(None, "Column of the answer; by default answer, solution or target.")
    num_train_problems: int | None = option(None, "Training problems; by default 20,000 of a task, all of a dataset.")
    num_held_out_problems: int = option(200, "Held-out problems; of a dataset at most a fifth.")
    instruction: str = option(r"Put your final answer within \boxed{}.", "Appended to every problem.")
    reward_funcs: list[str] | None = option(None, "More rewards, as `module:function`, after the recipe's own.")


# Data and reward


def load_problems(options: Options, seed: int) -> tuple[Dataset, Dataset, Callable[..., list[float]]]:
    """
    Problems to train on, held-out problems, and the reward: 1 for a right answer, 0 for a wrong one.

    Both datasets have the columns `prompt` (messages), `question` and `answer`, and the dataset's other columns, which
    rewards receive. The held-out problems are the same for every `seed`, and no question is in both. Replace this
    function to use your own data and reward.
    """
    if options.dataset_name.startswith("reasoning_gym:"):
        return generate_problems(options, seed)
    formats = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
    if file := formats.get(Path(options.dataset_name).suffix):
        data = load_dataset(file, data_files=options.dataset_name, split="train")
    else:
        data = load_dataset(options.dataset_name, options.dataset_config, split=options.dataset_split)
    asked = find_column(data, options.prompt_column, "prompt", "question", "problem")
    wanted = find_column(data, options.answer_column, "answer", "solution", "target")
    rows: dict[str, dict[str, Any]] = {}
    for i, row in enumerate(data):
        if row[asked] in (None, "", []) or row[wanted] in (None, ""):
            raise ValueError(f"row {i} of {options.dataset_name} has no {asked!r} or no {wanted!r}: remove it.")
        question, answer = row[asked], str(row[wanted]).split("####")[-1].strip()  # as GSM8K marks the final answer
        new = {"prompt": messages(question, options.instruction), "question": str(question), "answer": answer}
        rows.setdefault(" ".join(str(question).split()), {**row, **new})  # the first of those that ask the same
    if len(rows) < 2:
        raise ValueError(f"{options.dataset_name} has {len(rows)} different problem: training needs at least 2.")
    held_out = max(1, min(options.num_held_out_problems, len(rows) // 5))
    train = min(options.num_train_problems or len(rows), len(rows) - held_out)
    data = Dataset.from_list([*rows.values()]).train_test_split(train_size=train, test_size=held_out, seed=0)

    def accuracy(completions, answer, **kwargs) -> list[float]:
        return [float(is_right(final_answer(c), a)) for c, a in zip(completions, answer, strict=True)]

    return data["train"], data["test"], accuracy


def generate_problems(options: Options, seed: int) -> tuple[Dataset, Dataset, Callable[..., list[float]]]:
    """Problems of reasoning-gym, which also grades the answers: some tasks have several right ones."""
    import reasoning_gym

    sizes = {10**9: options.num_held_out_problems, 10**6 * (seed + 1): options.num_train_problems or 20_000}
    task, chosen = options.dataset_name.partition(":")[2], json.loads(options.dataset_options)
    held_out, train = (reasoning_gym.create_dataset(task, size=n, seed=s, **chosen) for s, n in sizes.items())
    entries, rows = [*held_out, *train], []
    for i, (question, answer) in enumerate((entry["question"], str(entry["answer"])) for entry in entries):
        prompt = messages(question, options.instruction)
        rows.append({"prompt": prompt, "question": question, "answer": answer, "entry": i})
    asked = {row["question"]: row for row in rows[: len(held_out)]}
    others = [row for row in rows[len(held_out) :] if row["question"] not in asked]

    def accuracy(completions, entry, **kwargs) -> list[float]:
        return [is_solved(final_answer(c), entries[i]) for c, i in zip(completions, entry, strict=True)]

    def is_solved(answer: str, entry: dict) -> float:
        try:
            return float(train.score_answer(answer, entry) > 1 - 1e-6)  # some tasks give partial scores
        except Exception:  # some tasks fail on answers of an unexpected form
            return 0.0

    return Dataset.from_list(others), Dataset.from_list([*asked.values()]), accuracy


def find_column(data: Dataset, chosen: str | None, *usual: str) -> str:
    for name in [chosen] if chosen else usual:
        if name in data.column_names:
            return name
    wanted = repr(chosen) if chosen else ", ".join(usual)
    raise ValueError(
        f"the dataset has the columns {', '.join(data.column_names)}, and none of {wanted}: "
        "name yours with --prompt_column and --answer_column."
    )


def messages(question: str | list[dict[str, str]], instruction: str) -> list[dict[str, str]]:
    """The question as a conversation that ends with the instruction."""
    *before, last = question if isinstance(question, list) else [{"role": "user", "content": str(question)}]
    return [*before, {**last, "content": f"{last['content']}\n{instruction}" if instruction else last["content"]}]


def final_answer(completion: str | list[dict]) -> str:
    r"""The last `<answer>…</answer>`, else the last `\boxed{…}`, else the text after the last `=`, else all of it."""
    text = completion if isinstance(completion, str) else completion[-1].get("content") or ""
    if tagged := re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL):
        return tagged[-1].strip()
    depth, boxed = 1, text.rpartition(r"\boxed{")
    for end, character in enumerate(boxed[2] if boxed[1] else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return boxed[2][:end].strip()
    return text.rpartition("=")[2].strip()


def is_right(answer: str, gold: str) -> bool:
    """Whether both are the same words, the same number, or equal as mathematics."""
    answer, gold = (re.sub(r"\\text\{(.*?)\}", r"\1", text).strip().rstrip(".") for text in (answer, gold))
    if answer.casefold().split() == gold.casefold().split() or not answer:
        return bool(answer)
    if re.fullmatch(r"[^\W\d_]{2,}([\s.,;:!?'’-]+[^\W\d_]+)*", gold):
        return False  # words: as mathematics, letters are factors, and anagrams are equal
    try:
        return Decimal(answer) == Decimal(gold)
    except InvalidOperation:
        return math_verify.verify(math_verify.parse(f"${gold}$"), math_verify.parse(f"${answer}$"))


# Evaluation


class HeldOut(TrainerCallback):
    """
    The accuracy on held-out problems with its standard error, from the trainer's own evaluations.

    `reward` is the given reward, which also collects the scores of held-out rows. These have the column `held_out`,
    the number of the problem. Results are printed and added to the trainer's log, the last one after the last step.
    """

    def __init__(self, reward: Callable[..., list[float]]):
        self.scores: list[tuple[int, float]] = []

        @functools.wraps(reward)
        def collecting(held_out=None, **kwargs):
            scores = reward(**kwargs)
            if held_out is not None:
                self.scores += zip(held_out, (sum(s) if isinstance(s, list) else s for s in scores), strict=True)
            return scores

        self.reward = collecting

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == state.max_steps:  # before the last checkpoint is saved
            control.should_evaluate = True

    def on_evaluate(self, args, state, control, **kwargs):
        scores = defaultdict(list)
        for problem, score in gather_object(self.scores):
            scores[problem].append(score)
        self.scores = []
        k = args.num_generations_eval or args.num_generations
        means = [fmean(of[:k]) for of in scores.values()]  # several processes fill the last batch with repetitions
        error = stdev(means) / len(means) ** 0.5 if len(means) > 1 else float("nan")
        entry = {"step": state.global_step, "held_out/accuracy": fmean(means), "held_out/standard_error": error}
        state.log_history.append(entry)
        if state.is_world_process_zero:
            tqdm.write(f"Held-out accuracy at step {state.global_step}: {self.text(entry)}")

    @staticmethod
    def found(state: TrainerState) -> list[dict[str, float]]:
        """The entries of the log, also of the part before a run was resumed."""
        return [entry for entry in state.log_history if "held_out/accuracy" in entry]

    @staticmethod
    def text(entry: dict[str, float]) -> str:
        return f"{100 * entry['held_out/accuracy']:.1f} % ± {100 * entry['held_out/standard_error']:.1f}"


# Training


class StopAfterStep(TrainerCallback):
    """Ctrl-C and SIGTERM finish the step, save a checkpoint and stop. A second Ctrl-C stops at once."""

    stopped_at = None

    def on_step_begin(self, args, state, control, **kwargs):
        for signum in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
                signal.signal(signum, self.stop)

    def stop(self, signum, frame):
        if self.stopped_at is None:
            self.stopped_at = time.monotonic()
            if os.environ.get("RANK", "0") == "0":
                tqdm.write("Finishing this step and saving a checkpoint. Ctrl-C again stops at once.")
        elif time.monotonic() > self.stopped_at + 1:  # launchers pass on what the terminal has sent already
            raise KeyboardInterrupt

    def on_step_end(self, args, state, control, **kwargs):
        stopped = any(gather_object([self.stopped_at is not None]))  # all processes stop after the same step
        if stopped and state.global_step < state.max_steps:
            self.stopped_at = self.stopped_at or time.monotonic()
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_train_end(self, args, state, control, **kwargs):
        for signum, usual in {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}.items():
            if signal.getsignal(signum) == self.stop:
                signal.signal(signum, usual)

    def leave_if_stopped(self, trainer: Trainer) -> None:
        """End a run that was stopped before its last step, with the exit code of Ctrl-C, and say how to go on."""
        if not self.stopped_at or trainer.state.global_step >= trainer.state.max_steps:
            return
        trainer.accelerator.wait_for_everyone()
        if trainer.is_world_process_zero():
            print(f"Stopped after step {trainer.state.global_step}; its checkpoint is in {trainer.args.output_dir}.")
            print("To go on, repeat the command with --resume_from_checkpoint latest.", flush=True)
        sys.exit(130)


class ShortProgress(ProgressCallback):
    """The progress bar with two numbers beside it; the log in trainer_state.json has all."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        shown = {name: f"{float(logs[name]):.3g}" for name in ("reward", "grad_norm") if name in (logs or {})}
        if self.training_bar is not None and shown:
            self.training_bar.set_postfix(shown)


def find_checkpoint(args: OTBGRPOConfig) -> str | None:
    """The checkpoint to resume from. A folder with a run is an error unless the run is to be resumed."""
    folder, asked = Path(args.output_dir), args.resume_from_checkpoint
    last = get_last_checkpoint(folder) if folder.is_dir() else None
    if asked is None:
        if last or (folder / "trainer_state.json").is_file():
            raise ValueError(
                f"{folder} holds a run already: continue it with --resume_from_checkpoint latest, or choose another "
                "--output_dir."
            )
        return None
    checkpoint = last if asked.lower() in ("latest", "true") else asked
    if checkpoint is None or not Path(checkpoint).is_dir():
        raise ValueError(f"--resume_from_checkpoint is {asked}: there is no checkpoint in {checkpoint or folder}.")
    if 0 < args.max_steps <= int(checkpoint.rpartition("-")[2]):
        raise ValueError(f"{checkpoint} is the end of a run of {args.max_steps} steps: raise --max_steps to go on.")
    return checkpoint


def load_object(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def parse(argv: list[str], kind: type = Options, file: str = __file__, config: str = CONFIG) -> tuple:
    """The options, the trainer's arguments, the model's, and the checkpoint to resume from. Wrong ones end the run."""
    name, usage = Path(file).name, "%(prog)s [--config FILE.yaml] [--option value ...]"
    parser = TrlParser((kind, OTBGRPOConfig, ModelConfig), prog=name, usage=usage, allow_abbrev=False)
    if not torch.accelerator.is_available():
        parser.set_defaults(use_cpu=True, bf16=False)
    defaults = Path(file).with_name(config)
    if "--config" not in argv and defaults.is_file():
        argv = ["--config", str(defaults), *argv]
    try:
        options, args, model_args = parser.parse_args_and_config(argv)
        if args.output_dir == "trainer_output":  # not given
            run = f"{args.baseline.replace(':', '.')}-seed{args.seed}"
            args.output_dir = str(Path("runs", Path(file).stem, run))
        if model_args.model_name_or_path is None:
            raise ValueError("--model_name_or_path is missing: give a hub id or a folder.")
        checkpoint = find_checkpoint(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    loading = {"revision": model_args.model_revision, "attn_implementation": model_args.attn_implementation}
    args.model_init_kwargs = {**loading, "dtype": model_args.dtype, **(args.model_init_kwargs or {})}
    args.eval_on_start = checkpoint is None
    return options, args, model_args, checkpoint


def main(argv: list[str]) -> OTBGRPOTrainer:
    options, args, model_args, checkpoint = parse(argv)
    train, held_out, accuracy = load_problems(options, args.seed)
    if len(train) * args.num_generations < args.generation_batch_size:
        needed = args.generation_batch_size // args.num_generations
        raise ValueError(f"A generation batch takes {needed} problems, and there are {len(train)} to train on.")
    measure, stop = HeldOut(accuracy), StopAfterStep()
    model = model_args.model_name_or_path
    trainer = OTBGRPOTrainer(
        model=str(load_object(model)()) if ":" in model else model,
        reward_funcs=[measure.reward, *map(load_object, options.reward_funcs or [])],
        args=args,
        train_dataset=train,
        eval_dataset=held_out.add_column("held_out", [*range(len(held_out))]),
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.remove_callback(PrinterCallback)
    if trainer.pop_callback(ProgressCallback):
        trainer.add_callback(ShortProgress())
    trainer.add_callback(measure)
    trainer.add_callback(stop)
    if trainer.is_world_process_zero():
        print(f"{len(train):,} problems to train on, {len(held_out)} held out. Baseline {args.baseline}.", flush=True)

    trainer.train(resume_from_checkpoint=checkpoint)

    stop.leave_if_stopped(trainer)
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        samples = f"avg@{args.num_generations_eval or args.num_generations}, {len(held_out)} problems"
        before, *_, after = map(measure.text, measure.found(trainer.state))
        print(f"Held-out accuracy before: {before} ({samples})\nHeld-out accuracy after:  {after}")
        print(f"{args.output_dir}: the model, checkpoints, and the log, trainer_state.json.", flush=True)
    trainer.accelerator.end_training()
    return trainer


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning)  # of libraries, to each other
    logging.basicConfig(format="%(message)s")
    logging.getLogger("trl_otb").setLevel(logging.INFO)
    main(sys.argv[1:])
