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
import statistics
import sys
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure

from recipes.benchmarks import Table
from recipes.benchmarks.step import in_turn, measure, medians, read_model_flags, synchronize
from trl_otb import OTBGRPOTrainer


SHORTEST = 512
TURNS = 32


class TimedTrainer(OTBGRPOTrainer):
    """Takes the time of what OTB adds to a step."""

    own_seconds = 0.0

    def _timed(self, method, *args):
        synchronize()
        began = time.perf_counter()
        method(*args)
        synchronize()
        self.own_seconds += time.perf_counter() - began

    def score_rollout(self, *args):
        self._timed(super().score_rollout, *args)

    def score_rows(self, *args):
        self._timed(super().score_rows, *args)


def measure_own(trainer) -> dict[str, float]:
    measured = measure(trainer)
    return {**measured, "own": getattr(trainer, "own_seconds", 0.0) / trainer.state.global_step}


def plot(figures: list[dict], path: Path, device: str) -> None:
    lengths = [f["length"] for f in figures]
    figure = Figure(figsize=(10, 4), layout="constrained")
    seconds, memory = figure.subplots(1, 2)
    for axis, unit in ((seconds, "seconds"), (memory, "mib")):
        for arm, style, name in (("grpo", "o-C7", "GRPOTrainer"), ("otb", "s--C0", "OTBGRPOTrainer")):
            axis.plot(lengths, [f[f"{arm}_{unit}"] for f in figures], style, label=name)
    own = [f["own_seconds"] for f in figures]
    seconds.plot(lengths, own, "^-C3", label="of which OTB's own")
    seconds.plot(lengths, [own[0] * n / lengths[0] for n in lengths], ":C3", label="in proportion to length")
    seconds.set(xscale="log", yscale="log", ylabel="seconds per step of 16 completions")
    memory.set(xscale="log", ylabel="peak memory (MiB)", ylim=(0, None))
    for axis in (seconds, memory):
        axis.set_xlabel(f"longest completion (tokens, {TURNS} turns)")
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.suptitle(f"Cost of a step over the horizon, 2-layer model on {device}", fontsize=11)
    figure.savefig(path, dpi=120)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1], allow_abbrev=False)
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output_dir", default="runs/bench_horizon")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="by default the GPU where there is one")
    model = {"model": None, "shape": "tiny", "dtype": "float32", "lora": False, "gradient_checkpointing": False}
    parser.set_defaults(**model, prompt_length=32, length=SHORTEST, steps=2)
    args = read_model_flags(parser, argv)
    if args.longest < SHORTEST or args.rounds < 1:
        parser.error(f"--longest must be at least {SHORTEST} and --rounds at least 1")
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU thread(s)"
    print(f"{device}, torch {torch.__version__}, {args.rounds} rounds; 16 completions of {TURNS} turns per step")
    columns = ("GRPO s/step", "OTB s/step", "own s/step", "own µs/token", "GRPO MiB", "OTB MiB")
    table, figures = Table("longest", *columns, first=10), []
    while args.length <= args.longest:
        rounds = in_turn(args, "training forward", TimedTrainer, measure_own, turns=TURNS)
        own = statistics.median(r["own"] for r in rounds["otb"])
        f = {"length": args.length, **medians(rounds, seconds="seconds", mib="peak"), "own_seconds": own}
        figures.append(f)
        seconds = (f"{value:.4f}" for value in (f["grpo_seconds"], f["otb_seconds"], own))
        per_token = 1e6 * own / (16 * 0.75 * args.length)  # lengths are uniform between half of it and it
        table.add(args.length, *seconds, f"{per_token:.3f}", f"{f['grpo_mib']:.0f}", f"{f['otb_mib']:.0f}")
        args.length *= 2
    (folder / "horizon.json").write_text(json.dumps({"device": device, "figures": figures}, indent=2))
    plot(figures, folder / "horizon.png", device)
    print(f"{folder}: horizon.json and horizon.png.")


if __name__ == "__main__":
    main(sys.argv[1:])
