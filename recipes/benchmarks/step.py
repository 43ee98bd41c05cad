"""
The cost of OTBGRPOTrainer over GRPOTrainer: a training step's time and peak memory, by baseline and source of energies.

    OMP_NUM_THREADS=1 python -m recipes.benchmarks.step               # a small model: twenty minutes on one core
    OMP_NUM_THREADS=1 python -m recipes.benchmarks.step --steps 1 --rounds 1 --length 16              # three minutes
    python -m recipes.benchmarks.step --model Qwen/Qwen2.5-1.5B-Instruct --dtype bfloat16 --length 1024        # a GPU
    python -m recipes.benchmarks.step --shape qwen2.5-1.5b --lora --length 4096 --gradient_checkpointing       # no hub

A round trains every arm once, from the same weights and seed, in one process: the arms take their steps in turns, in
another order each time, so that what the machine does meanwhile happens to all. Steps are with generation by
`generate`, or without: then a `rollout_func` returns stored completions of half to full length, which shows the cost at
its largest. Ratios are to GRPOTrainer's: of a round the median over its batches; of all rounds the median, lowest and
highest. The models of all arms are in memory at once; `--baselines value` has two.

On a CPU each round is a forked process and time is its CPU time. Memory is the peak of torch's allocations in a
training alone, of model and optimizer too: on a CPU of two batches under the profiler. recipes/README.md has results.
"""

import argparse
import ctypes
import gc
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy
import pandas
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from recipes.benchmarks import allocated
from recipes.toy import QUIET
from recipes.toy.warm_start import WARM_STARTS, character_tokenizer
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer


N, PROMPT_LENGTH, CONTROL = 4, 32, "GRPOTrainer"
TITLES = ["batch", "energies", "baseline", "GRPO s/step", "time ratio", "lowest", "highest", "memory ratio"]
# 16 completions per generation batch; and whether it is trained on twice, for which GRPOTrainer scores it
TWICE = {"per_device_train_batch_size": 16, "num_iterations": 2}
ONCE = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
REGIMES = {
    "generated": (True, ONCE),
    "generated-twice": (True, TWICE),
    "stored": (False, ONCE),
    "stored-twice": (False, TWICE),
}
# Models with random weights: type, sizes and dtype
SIZES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
SHAPES = {
    "small": ("qwen3", (8192, 256, 768, 4, 4, 2, 64), "float32"),
    "qwen2.5-1.5b": ("qwen2", (151936, 1536, 8960, 28, 12, 2, 128), "bfloat16"),
}
# Options of glibc's mallopt, with values that turn each off
M_TRIM_THRESHOLD, M_MMAP_MAX = (-1, -1), (-4, 0)


class Turns(TrainerCallback):
    """A trainer takes a step when it is told to, and leaves behind how long each took, in seconds."""

    def __init__(self, now: Callable[[], float]):
        self.now, self.begin, self.seconds = now, 0.0, []
        self.goes, self.waits = threading.Semaphore(0), threading.Semaphore(0)
        self.error: BaseException | None = None

    def on_step_begin(self, args, state, control, **kwargs):
        self.waits.release()
        self.goes.acquire()
        self.begin = self.time()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(self.time() - self.begin)

    def time(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self.now()

    def step(self) -> None:
        """Let it take one, and wait until it has."""
        self.goes.release()
        self.wait()

    def wait(self) -> None:
        self.waits.acquire()
        if self.error:
            raise self.error

    def train(self, trainer: GRPOTrainer) -> None:
        """In a thread of its own."""
        try:
            trainer.train()
        except BaseException as error:
            self.error = error
        self.waits.release()


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1], allow_abbrev=False)
    parser.add_argument("--model", help="hub id or folder")
    parser.add_argument("--shape", choices=SHAPES, default="small", help="a model with random weights")
    parser.add_argument("--dtype", help="of the weights; by default the shape's, or float32 with --model")
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 16 on all linear layers")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--length", type=int, default=64, help="longest completion, in tokens")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--steps", type=int, default=3, help="generation batches per training, after the first")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--baselines", nargs="+", default=["group_mean", "otb", "value"])
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=[*REGIMES])
    args = parser.parse_args(argv)
    args.dtype = args.dtype or ("float32" if args.model else SHAPES[args.shape][-1])
    return args


def model_config(args):
    if args.model:
        return AutoConfig.from_pretrained(args.model)
    kind, sizes, _ = SHAPES[args.shape]
    shape = dict(zip(SIZES.split(), sizes, strict=True), tie_word_embeddings=kind == "qwen2")
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return AutoConfig.for_model(kind, **shape, **ids, max_position_embeddings=2**17)


def make_model(args):
    """A model, with the same weights every time."""
    dtype = getattr(torch, args.dtype)
    if args.model:
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    torch.manual_seed(args.seed)
    with torch.device(args.device):
        return AutoModelForCausalLM.from_config(model_config(args), dtype=dtype)


def describe(args) -> str:
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(model_config(args)).num_parameters()
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    return (
        f"{args.model or args.shape}: {parameters:,} parameters, {'LoRA' if args.lora else 'full'}, {args.dtype}, on "
        f"{device}, torch {torch.__version__}; generation batches of 16 completions of up to {args.length} tokens; "
        f"{args.rounds} rounds of {args.steps} batches, seed {args.seed}"
    )


def trainer_of(arm: str, regime: str, args: argparse.Namespace, folder: str) -> GRPOTrainer:
    """A trainer under a baseline, or TRL's own."""
    generate, sizes = REGIMES[regime]
    model = make_model(args)
    vocabulary = model.config.get_text_config().vocab_size
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left") if args.model else None

    def stored(prompts, trainer):
        g = torch.Generator().manual_seed(trainer.state.global_step)
        lengths = torch.randint(args.length // 2, args.length + 1, (len(prompts),), generator=g).tolist()
        prompt = torch.randint(2, vocabulary, (PROMPT_LENGTH,), generator=g).tolist()
        ids = [torch.randint(2, vocabulary, (length,), generator=g).tolist() for length in lengths]
        return {"prompt_ids": [prompt] * len(prompts), "completion_ids": ids, "logprobs": None}

    def reward(completion_ids, **kwargs):
        return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]

    cls = GRPOTrainer if arm == CONTROL else OTBGRPOTrainer
    config = GRPOConfig if arm == CONTROL else partial(OTBGRPOConfig, baseline=arm)
    on_gpu = args.device == "cuda"
    machine = {"use_cpu": not on_gpu, "bf16": on_gpu, "gradient_checkpointing": args.gradient_checkpointing}
    steps = (1 + args.steps) * sizes.get("num_iterations", 1)
    run = {"learning_rate": 1e-6, "max_steps": steps, "logging_strategy": "no", "seed": args.seed}
    group = {"num_generations": N, "max_completion_length": args.length, "scale_rewards": "none"}
    trainer = cls(
        model,
        reward,
        args=config(output_dir=folder, **(QUIET | machine | sizes | run | group)),
        train_dataset=Dataset.from_dict({"prompt": ["1+2" * (PROMPT_LENGTH // 3)] * 64}),
        processing_class=tokenizer or character_tokenizer(WARM_STARTS["sums"]),
        rollout_func=None if generate else stored,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if args.lora else None,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def timed(arms: list[str], regime: str, args: argparse.Namespace) -> dict[str, tuple[numpy.ndarray, str]]:
    """By arm, seconds per step for each generation batch after the first, and where its energies came from."""
    now = time.perf_counter if args.device == "cuda" else time.process_time
    gc.collect()  # models of the round before, on a GPU
    with tempfile.TemporaryDirectory() as folder:
        trainers = {arm: trainer_of(arm, regime, args, folder) for arm in arms}
        turns = {arm: Turns(now) for arm in arms}
        for arm, trainer in trainers.items():
            trainer.add_callback(turns[arm])
            threading.Thread(target=turns[arm].train, args=[trainer], daemon=True).start()
            turns[arm].wait()
        for step in range(trainers[CONTROL].args.max_steps):
            for arm in random.Random(step).sample(arms, len(arms)):
                torch.manual_seed(args.seed + step)  # all sample the same
                turns[arm].step()
    # The first step on a batch also samples it, so whole batches are compared; the first batch is a warm-up
    seconds = {arm: numpy.reshape(of.seconds, (-1, trainers[arm].num_iterations)) for arm, of in turns.items()}
    sources = {arm: getattr(trainer, "energy_source", None) or "none" for arm, trainer in trainers.items()}
    return {arm: (seconds[arm].mean(axis=1)[1:], sources[arm]) for arm in arms}


def peak_memory(arm: str, regime: str, args: argparse.Namespace) -> float:
    """MiB that torch has allocated at most in a training of two batches."""
    args = argparse.Namespace(**(vars(args) | {"steps": 1}))

    def train() -> None:
        with tempfile.TemporaryDirectory() as folder:
            trainer_of(arm, regime, args, folder).train()

    if args.device == "cuda":
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        train()
        return torch.cuda.max_memory_allocated() / 2**20
    return float(allocated(train).max()) / 2**20


def apart(function: Callable, *args):
    """
    The result of a call in a forked process, so that each begins with the same memory. It keeps freed memory, so that
    returning it to the system and fetching it again is no part of the time.
    """
    context, libc = multiprocessing.get_context("fork"), ctypes.CDLL(None)
    results = context.SimpleQueue()

    def run() -> None:
        for option in (M_TRIM_THRESHOLD, M_MMAP_MAX) if hasattr(libc, "mallopt") else ():
            libc.mallopt(*option)
        results.put(function(*args))

    (process := context.Process(target=run)).start()
    process.join()
    return results.get() if process.exitcode == 0 else sys.exit(f"A training ended with code {process.exitcode}.")


def main(argv: list[str]) -> None:
    args = parse(argv)
    os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
    call = (lambda function, *of: function(*of)) if args.device == "cuda" else apart
    arms, rows = [CONTROL, *args.baselines], []
    print(describe(args), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer_of(CONTROL, args.regimes[0], args, folder)  # imports what forked processes need
    for regime in args.regimes:
        rounds = [call(timed, arms, regime, args) for _ in range(args.rounds)]
        mib = {arm: call(peak_memory, arm, regime, args) for arm in arms}
        control = numpy.median([of[CONTROL][0] for of in rounds])
        for arm in args.baselines:
            ratios = [numpy.median(of[arm][0] / of[CONTROL][0]) for of in rounds]
            numbers = [control, numpy.median(ratios), min(ratios), max(ratios), mib[arm] / mib[CONTROL]]
            rows.append([regime, rounds[0][arm][1], arm, *numbers])
        table = pandas.DataFrame(rows, columns=TITLES)
        print(table.to_string(index=False, float_format="{:.3f}".format), flush=True)  # in case it is stopped


if __name__ == "__main__":
    main(sys.argv[1:])
