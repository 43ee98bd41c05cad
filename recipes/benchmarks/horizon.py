"""
Long horizons: how time and memory of a step grow with a completion of many turns, and OTB's own share of them.

    OMP_NUM_THREADS=1 python -m recipes.benchmarks.horizon     # half an hour on one core; writes runs/bench_horizon/
    python -m recipes.benchmarks.horizon --longest 32768       # on a GPU

For each length, GRPOTrainer and OTBGRPOTrainer train in turn on the same scripted completions of 32 turns, a quarter
of their tokens tool output, with a small model. OTB's own share is everything between the forward and the loss:
energies, baselines, advantages and metrics.

Seen on one x86-64 core on 2026-11-21, `--longest 4096`, 8 minutes: OTB's own share is 3.9 ms per step at 512 tokens
and 5.2 ms at 4,096, of whole steps of 0.6 and 14.6 s, whose attention is quadratic. Whole steps took 1.00 to 1.05 of
GRPOTrainer's, with another job on the machine; peak memory was 0.98 to 1.00 of its.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import matplotlib
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from recipes.benchmarks import print_row
from recipes.benchmarks.step import build, measure, synchronize
from recipes.toy import sums
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer


matplotlib.use("Agg")
import matplotlib.pyplot as plt


SHORTEST = 512
TURNS = 32


class TimedTrainer(OTBGRPOTrainer):
    """Takes the time of what OTB adds to a step."""

    def __init__(self, *args, **kwargs):
        self.own_seconds = []
        super().__init__(*args, **kwargs)

    def _timed(self, method, *args):
        synchronize()
        began = time.perf_counter()
        method(*args)
        synchronize()
        self.own_seconds.append(time.perf_counter() - began)

    def score_rollout(self, *args):
        self._timed(super().score_rollout, *args)

    def score_rows(self, *args):
        self._timed(super().score_rows, *args)


def figures_of(length: int, rounds: int) -> dict:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=16,
            vocab_size=1024,
            max_position_embeddings=2 * length,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )
    tokenizer = AutoTokenizer.from_pretrained(sums())
    args = argparse.Namespace(length=length, prompt_length=32, steps=2, gradient_checkpointing=False, lora=False)
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    arms = {"grpo": (GRPOTrainer, GRPOConfig), "otb": (TimedTrainer, OTBGRPOConfig)}
    seen = {arm: [] for arm in arms}
    own = []
    for _ in range(rounds):
        for arm, (cls, config) in arms.items():
            with tempfile.TemporaryDirectory() as folder:
                fresh = Qwen3ForCausalLM(model.config)
                fresh.load_state_dict(model.state_dict())
                trainer = build(cls, config, "training forward", args, fresh, tokenizer, folder, turns=TURNS)
                seen[arm].append(measure(trainer))
                if arm == "otb":
                    steps = trainer.state.global_step
                    own.append(sum(trainer.own_seconds) / steps)
    return {
        "length": length,
        **{f"{arm}_seconds": statistics.median(x["seconds"] for x in seen[arm]) for arm in arms},
        **{f"{arm}_mib": statistics.median(x["peak"] for x in seen[arm]) for arm in arms},
        "own_seconds": statistics.median(own),
    }


def plot(figures: list[dict], path: Path, device: str) -> None:
    lengths = [f["length"] for f in figures]
    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(lengths, [f["grpo_seconds"] for f in figures], "o-", color="tab:gray", label="GRPOTrainer, whole step")
    left.plot(
        lengths, [f["otb_seconds"] for f in figures], "s--", color="tab:blue", label="OTBGRPOTrainer, whole step"
    )
    left.plot(lengths, [f["own_seconds"] for f in figures], "^-", color="tab:red", label="of which OTB's own")
    first = figures[0]
    left.plot(
        lengths,
        [first["own_seconds"] * n / lengths[0] for n in lengths],
        ":",
        color="tab:red",
        label="in proportion to length",
    )
    left.set(
        xscale="log",
        yscale="log",
        xlabel="longest completion (tokens, 32 turns)",
        ylabel="seconds per step of 16 completions",
    )
    right.plot(lengths, [f["grpo_mib"] for f in figures], "o-", color="tab:gray", label="GRPOTrainer")
    right.plot(lengths, [f["otb_mib"] for f in figures], "s--", color="tab:blue", label="OTBGRPOTrainer")
    right.set(xscale="log", xlabel="longest completion (tokens, 32 turns)", ylabel="peak memory (MiB)", ylim=(0, None))
    for axis in (left, right):
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    fig.suptitle(f"Cost of a step over the horizon, 2-layer model on {device}", fontsize=11)
    fig.savefig(path, dpi=120)
    plt.close(fig)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output_dir", default="runs/bench_horizon")
    args = parser.parse_args(argv)
    if args.longest < SHORTEST or args.rounds < 1:
        parser.error(f"--longest must be at least {SHORTEST} and --rounds at least 1")
    warnings.filterwarnings("ignore")
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU thread(s)"
    print(f"{device}, torch {torch.__version__}, {args.rounds} rounds; 16 completions of {TURNS} turns per step")
    columns = ("GRPO s/step", "OTB s/step", "own s/step", "own µs/token", "GRPO MiB", "OTB MiB")
    print_row("longest", *columns, first=10)
    figures, length = [], SHORTEST
    while length <= args.longest:
        f = figures_of(length, args.rounds)
        figures.append(f)
        per_token = 1e6 * f["own_seconds"] / (16 * 0.75 * length)  # lengths are uniform between half of it and it
        print_row(
            length,
            *(f"{f[key]:.4f}" for key in ("grpo_seconds", "otb_seconds", "own_seconds")),
            f"{per_token:.3f}",
            *(f"{f[key]:.0f}" for key in ("grpo_mib", "otb_mib")),
            first=10,
        )
        length *= 2
    (folder / "horizon.json").write_text(json.dumps({"device": device, "figures": figures}, indent=2))
    plot(figures, folder / "horizon.png", device)
    print(f"{folder}: horizon.json and horizon.png.")


if __name__ == "__main__":
    main(sys.argv[1:])
