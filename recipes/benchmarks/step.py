"""
What OTB costs beside GRPOTrainer: step time, peak memory and forwards, for each of the three sources of energies.

    python -m recipes.benchmarks.step                     # a small model: about 5 minutes on two cores
    python -m recipes.benchmarks.step --model Qwen/Qwen2.5-1.5B-Instruct --dtype bfloat16 --length 1024

The two trainers take turns in one process, round by round and in changing order, on the same scripted completions:
without generation a step is shortest and a cost most visible. Times are per step, medians over a round's rollouts; a
ratio is taken per round, and its median and range over the rounds are printed. Memory is the round's peak, of the
GPU's allocator or of the process. The README has what was seen on two CPU cores.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from recipes.benchmarks.table import print_row
from recipes.toy import sums
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer


N = 4
# Micro-batches a step, their rows in groups, and passes over a rollout
REGIMES = {
    "TRL's no-grad forward": {"gradient_accumulation_steps": 1, "groups": 4, "num_iterations": 2},
    "training forward": {"gradient_accumulation_steps": 4, "groups": 1, "num_iterations": 1},
    "one extra forward": {"gradient_accumulation_steps": 8, "groups": 0.5, "num_iterations": 1},
}


class Meter(TrainerCallback):
    def __init__(self):
        self.seconds = []

    def on_step_begin(self, args, state, control, **kwargs):
        _synchronize()
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        _synchronize()
        self.seconds.append(time.perf_counter() - self.began)


def _synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _reset_peak():
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the high-water mark of resident memory


def _peak() -> float:
    """MiB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 2**10


def build(cls, config, regime, args, model, tokenizer, folder, turns=1):
    vocabulary = model.config.get_text_config().vocab_size

    def rollout(prompts, trainer):
        g = torch.Generator().manual_seed(trainer.state.global_step)
        lengths = torch.randint(args.length // 2, args.length + 1, (len(prompts),), generator=g).tolist()
        prompt = torch.randint(2, vocabulary, (args.prompt_length,), generator=g).tolist()
        ids = [torch.randint(2, vocabulary, (length,), generator=g).tolist() for length in lengths]
        rollouts = {"prompt_ids": [prompt] * len(prompts), "completion_ids": ids, "logprobs": None}
        if turns > 1:  # each ends with a quarter of tool output, but for the last
            rollouts["env_mask"] = [
                [int(t * 4 * turns // n % 4 < 3 or t * turns // n == turns - 1) for t in range(n)] for n in lengths
            ]
        return rollouts

    def reward(completion_ids, **kwargs):
        return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]

    settings = dict(REGIMES[regime])
    rows = int(settings.pop("groups") * N)
    on_gpu = torch.cuda.is_available()
    trainer = cls(
        model,
        reward,
        args=config(
            output_dir=folder,
            per_device_train_batch_size=rows,
            num_generations=N,
            max_completion_length=args.length,
            scale_rewards="none",
            learning_rate=1e-6,
            max_steps=2 * args.steps,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not on_gpu,
            bf16=on_gpu,
            gradient_checkpointing=args.gradient_checkpointing,
            seed=0,
            **settings,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["p"] * 64}),
        processing_class=tokenizer,
        rollout_func=rollout,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def measure(trainer) -> dict[str, float]:
    meter, forwards = Meter(), 0

    def count(*_):
        nonlocal forwards
        forwards += 1

    trainer.add_callback(meter)
    # The backbone: gradient checkpointing repeats its layers, not itself
    handle = trainer.model.base_model.register_forward_pre_hook(count)
    _reset_peak()
    trainer.train()
    handle.remove()
    trainer.remove_callback(meter)
    passes = trainer.num_iterations
    # A rollout's first step pays for scoring it, so whole rollouts are compared; the first one warms up
    rollouts = [sum(meter.seconds[i : i + passes]) for i in range(passes, len(meter.seconds), passes)]
    return {
        "seconds": statistics.median(rollouts) / passes,
        "peak": _peak(),
        "forwards": forwards / len(meter.seconds),
    }


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--model", help="hub id or folder; by default a small Qwen3 of random weights")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--length", type=int, default=128, help="longest completion; the shortest is half of it")
    parser.add_argument("--prompt_length", type=int, default=32)
    parser.add_argument("--steps", type=int, default=4, help="half the optimizer steps of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--output", help="write the figures to this JSON file")
    args = parser.parse_args(argv)
    if args.rounds < 1 or args.steps < 2 or args.length < 2:
        parser.error("--rounds must be at least 1, --steps and --length at least 2")
    warnings.filterwarnings("ignore")
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
        tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    else:
        torch.manual_seed(0)
        size = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 8192}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
        model = Qwen3ForCausalLM(Qwen3Config(**size, **heads, pad_token_id=0, eos_token_id=1, bos_token_id=None))
        tokenizer = AutoTokenizer.from_pretrained(sums())
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{args.model or 'small Qwen3'}: {parameters:,} parameters on {device}, torch {torch.__version__}; "
        f"{args.rounds} rounds of {2 * args.steps} steps, 16 completions of {args.length // 2} to {args.length} "
        "tokens per step"
    )
    columns = ("GRPO s/step", "OTB s/step", "time ratio", "range", "memory ratio", "GRPO forwards", "OTB forwards")
    print_row("energies from", *columns)
    figures = []
    for regime in REGIMES:
        rounds = {"grpo": [], "otb": []}
        for turn in range(args.rounds):
            arms = [("grpo", GRPOTrainer, GRPOConfig), ("otb", OTBGRPOTrainer, OTBGRPOConfig)]
            for arm, cls, config in arms if turn % 2 == 0 else reversed(arms):
                with tempfile.TemporaryDirectory() as folder:
                    fresh = type(model)(model.config).to(model.dtype)
                    fresh.load_state_dict(model.state_dict())
                    trainer = build(cls, config, regime, args, fresh, tokenizer, folder)
                    rounds[arm].append(measure(trainer))
                    del trainer, fresh
        ratios = [o["seconds"] / g["seconds"] for g, o in zip(rounds["grpo"], rounds["otb"], strict=True)]
        figure = {
            "energies_from": regime,
            **{f"{arm}_seconds": statistics.median(r["seconds"] for r in rounds[arm]) for arm in rounds},
            "time_ratio": statistics.median(ratios),
            "time_ratio_range": [min(ratios), max(ratios)],
            "memory_ratio": statistics.median(r["peak"] for r in rounds["otb"])
            / statistics.median(r["peak"] for r in rounds["grpo"]),
            **{f"{arm}_forwards": rounds[arm][0]["forwards"] for arm in rounds},
        }
        figures.append(figure)
        print_row(
            regime,
            *(f"{figure[key]:.3f}" for key in ("grpo_seconds", "otb_seconds", "time_ratio")),
            "{:.3f}–{:.3f}".format(*figure["time_ratio_range"]),
            *(f"{figure[key]:.3f}" for key in ("memory_ratio", "grpo_forwards", "otb_forwards")),
        )
    if args.output:
        Path(args.output).write_text(
            json.dumps({"device": device, "parameters": parameters, "figures": figures}, indent=2)
        )


if __name__ == "__main__":
    main(sys.argv[1:])
