"""
The cost of OTB over GRPOTrainer: step time, peak memory and forwards, for each of the three sources of energies.

    python -m recipes.benchmarks.step                     # a small model: about 5 minutes on two cores
    python -m recipes.benchmarks.step --model Qwen/Qwen2.5-1.5B-Instruct --dtype bfloat16 --length 1024
    python -m recipes.benchmarks.step --shape qwen2.5-1.5b --lora --length 4096 --gradient_checkpointing  # no hub
    python -m recipes.benchmarks.step --meter             # GradientNoiseCallback over OTB without it

The two arms alternate in one process on the same scripted completions: without generation the cost is most visible.
Times are per step, medians over the rollouts of a round; time ratios are per round, with their median and range.
Memory is the peak of a round, of the GPU's allocator or the process. recipes/README.md has results.
"""

import argparse
import gc
import os
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import numpy
import pandas
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from recipes.toy import QUIET, sums
from trl_otb import GradientNoiseCallback, OTBGRPOConfig, OTBGRPOTrainer


N, PROMPT_LENGTH = 4, 32
# Of 16 completions per step, in whole groups per micro-batch or not; and passes over a rollout
REGIMES = {
    "TRL's no-grad forward": {"per_device_train_batch_size": 16, "num_iterations": 2},
    "training forward": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    "one extra forward": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
}
# Models with random weights: type, sizes and dtype
SIZES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
SHAPES = {
    "small": ("qwen3", (8192, 256, 768, 4, 4, 2, 64), "float32"),
    "qwen2.5-1.5b": ("qwen2", (151936, 1536, 8960, 28, 12, 2, 128), "bfloat16"),
}


class Clock(TrainerCallback):
    """The times at which each step begins and ends, in seconds."""

    def __init__(self):
        self.times = []

    def on_step_begin(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    on_step_end = on_step_begin


def reset_peak(on_gpu: bool):
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: reset the peak of resident memory


def peak(on_gpu: bool) -> float:
    """Peak memory in MiB."""
    if on_gpu:
        return torch.cuda.max_memory_allocated() / 2**20
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 2**10


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1], allow_abbrev=False)
    parser.add_argument("--model", help="hub id or folder")
    parser.add_argument("--shape", choices=SHAPES, default="small", help="a model with random weights")
    parser.add_argument("--dtype", help="of the weights; by default the shape's, or float32 with --model")
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 16 on all linear layers")
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    parser.add_argument("--device", choices=devices, default=devices[0])
    parser.add_argument("--length", type=int, default=128, help="longest completion; the shortest is half of it")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--steps", type=int, default=4, help="half the optimizer steps of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--baseline", default="otb", help="baseline of the OTB arm")
    parser.add_argument("--meter", action="store_true", help="compare OTB with and without the gradient noise meter")
    args = parser.parse_args(argv)
    if args.rounds < 1 or args.steps < 2 or args.length < 2:
        parser.error("--rounds must be at least 1, --steps and --length at least 2")
    args.dtype = args.dtype or ("float32" if args.model else SHAPES[args.shape][-1])
    warnings.filterwarnings("ignore")
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
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
    torch.manual_seed(0)
    with torch.device(args.device):
        return AutoModelForCausalLM.from_config(model_config(args), dtype=dtype)


def describe(args) -> str:
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(model_config(args)).num_parameters()
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    return (
        f"{args.model or args.shape}: {parameters:,} parameters, {'LoRA' if args.lora else 'full'}, {args.dtype}, on "
        f"{device}, torch {torch.__version__}; 16 completions of {args.length // 2} to {args.length} tokens per step"
    )


def build(arm, regime, args, folder):
    """The arm's trainer, with scripted completions."""
    cls, config, callbacks = arm
    model = make_model(args)
    vocabulary = model.config.get_text_config().vocab_size

    def rollout(prompts, trainer):
        g = torch.Generator().manual_seed(trainer.state.global_step)
        lengths = torch.randint(args.length // 2, args.length + 1, (len(prompts),), generator=g).tolist()
        prompt = torch.randint(2, vocabulary, (PROMPT_LENGTH,), generator=g).tolist()
        ids = [torch.randint(2, vocabulary, (length,), generator=g).tolist() for length in lengths]
        return {"prompt_ids": [prompt] * len(prompts), "completion_ids": ids, "logprobs": None}

    def reward(completion_ids, **kwargs):
        return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]

    on_gpu = args.device == "cuda"
    machine = {"use_cpu": not on_gpu, "bf16": on_gpu, "activation_checkpointing": args.gradient_checkpointing}
    run = {"learning_rate": 1e-6, "max_steps": 2 * args.steps, "logging_strategy": "no", "seed": 0}
    sizes = {"num_generations": N, "max_completion_length": args.length, "scale_rewards": "none"}
    trainer = cls(
        model,
        reward,
        args=config(output_dir=folder, **(QUIET | machine | REGIMES[regime] | run | sizes)),
        train_dataset=Dataset.from_dict({"prompt": ["p"] * 64}),
        processing_class=AutoTokenizer.from_pretrained(args.model or sums(), padding_side="left"),
        callbacks=[callback() for callback in callbacks],
        rollout_func=rollout,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if args.lora else None,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def measure(trainer) -> dict[str, float]:
    clock, forwards = Clock(), []
    on_gpu = trainer.accelerator.device.type == "cuda"
    trainer.add_callback(clock)
    # The backbone: gradient checkpointing repeats its layers, not itself
    policy = trainer.model.get_base_model() if isinstance(trainer.model, PeftModel) else trainer.model
    handle = policy.base_model.register_forward_pre_hook(lambda *_: forwards.append(1))
    reset_peak(on_gpu)
    trainer.train()
    handle.remove()
    trainer.remove_callback(clock)
    steps = numpy.diff(clock.times)[::2]
    # The first step of a rollout also scores it, so whole rollouts are compared; the first rollout is a warm-up
    rollouts = steps.reshape(-1, trainer.num_iterations).mean(axis=1)[1:]
    return {"seconds": numpy.median(rollouts), "mib": peak(on_gpu), "forwards": len(forwards) / len(steps)}


def in_turn(args, regime, arms: dict[str, tuple]) -> list[pandas.DataFrame]:
    """The results of [`measure`] for each arm, with a row per round; the arms alternate in starting a round."""
    rounds = {arm: [] for arm in arms}
    for turn in range(args.rounds):
        for arm in arms if turn % 2 == 0 else reversed(arms):
            with tempfile.TemporaryDirectory() as folder:
                trainer = build(arms[arm], regime, args, folder)
                rounds[arm].append(measure(trainer))
                del trainer
                gc.collect()  # one model and one optimizer at a time
    return [pandas.DataFrame(found) for found in rounds.values()]


def main(argv):
    args = parse(argv)
    config = partial(OTBGRPOConfig, baseline=args.baseline)
    # A trainer, its arguments and its callbacks
    regimes, arms = REGIMES, {"GRPO": (GRPOTrainer, GRPOConfig, ()), "OTB": (OTBGRPOTrainer, config, ())}
    if args.meter:  # it needs several micro-batches of whole groups
        regimes = ["training forward"]
        arms = {"OTB": arms["OTB"], "meter": (OTBGRPOTrainer, config, (GradientNoiseCallback,))}
    first, second = arms
    print(f"{describe(args)}, {args.rounds} rounds of {2 * args.steps} steps")
    columns = [f"{first} s/step", f"{second} s/step", "time ratio", "lowest", "highest", "memory ratio"]
    table = pandas.DataFrame(columns=[*columns, f"{first} forwards", f"{second} forwards"], dtype=float)
    for regime in regimes:
        a, b = in_turn(args, regime, arms)
        ratio = b.seconds / a.seconds
        numbers = [a.seconds.median(), b.seconds.median(), ratio.median(), ratio.min(), ratio.max()]
        numbers += [b.mib.median() / a.mib.median(), a.forwards.median(), b.forwards.median()]
        table.loc[regime] = numbers
        print(table.to_string(float_format="{:.3f}".format), flush=True)  # after every regime, in case it is stopped


if __name__ == "__main__":
    main(sys.argv[1:])
