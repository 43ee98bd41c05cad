"""
How long advantages take, how that scales with length, and how far it is from what memory allows.

    OMP_NUM_THREADS=1 python -m recipes.benchmarks.advantages         # about a minute on one core
    python -m recipes.benchmarks.advantages --device cuda

Timed is what a training step runs once energies are known, `credit` and `measure`: advantages under `otb`, those under
the group mean for the metrics, and the metrics' sums; the last column is the most memory that it takes beyond the
advantages and baselines that it leaves, in bytes per token. Beside it: `compute_advantages` alone, a loop
over groups that forms the same advantages, and one read and one write of the inputs. Completions have a stretch of
tool output in the middle. Medians of several runs, after one that warms up.
"""

import argparse
import statistics
import sys
import time

import torch

from recipes.benchmarks import Table, peak_and_kept, synchronize
from trl_otb.baselines import compute_advantages
from trl_otb.credit import credit, measure, set_energies
from trl_otb.rollout import Rollout


SIZES = [(64, 2048), (1024, 2048), (1024, 4096), (1024, 8192), (1024, 16384), (1024, 32768)]
N = 4


def rollouts(rows, length, device):
    g = torch.Generator().manual_seed(0)
    ends = torch.randint(length // 2, length + 1, (rows, 1), generator=g)
    position = torch.arange(length)
    begin = torch.randint(1, length // 4, (rows, 1), generator=g)
    mask = (position < ends) & ~((position >= begin) & (position < begin + length // 8))
    energy = torch.rand(rows, length, generator=g)
    return torch.randn(rows, generator=g).to(device), energy.to(device), mask.long().to(device)


def training_step(rewards, energy, mask):
    """Everything that a step adds once energies are known."""
    rollout = Rollout(mask, mask, mask, mask, mask, N, rewards, torch.ones_like(rewards))
    set_energies(rollout, energy)
    credit(rollout, baseline="otb", alignment="generated", zero_tail=True, leave_one_out=False)
    measure(rollout)
    return rollout


def loop_over_groups(rewards, energy, mask):
    """The straightforward way: group by group, row by row, the same advantages (generated alignment, zero tail)."""
    advantages = torch.zeros_like(energy)
    for first in range(0, len(rewards), N):
        rows = range(first, first + N)
        kept = [mask[i].bool().nonzero().squeeze(1) for i in rows]
        longest = max(len(k) for k in kept)
        weighted, total, count = (torch.zeros(longest, device=energy.device) for _ in range(3))
        for i, k in zip(rows, kept, strict=True):
            realized = energy[i, k].cumsum(0)
            weighted[: len(k)] += realized * rewards[i]
            total[: len(k)] += realized
            count[: len(k)] += 1
        baseline = torch.where(count > 1, weighted / total, 0.0)
        for i, k in zip(rows, kept, strict=True):
            advantages[i, k] = rewards[i] - baseline[: len(k)]
    return advantages


def seconds(function, *inputs, repeats):
    times = []
    for _ in range(repeats + 1):
        synchronize()
        began = time.perf_counter()
        function(*inputs)
        synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1], allow_abbrev=False)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--longest", type=int, default=32768, help="longest completions, in tokens")
    parser.add_argument("--output", help="write the table to this JSON file")
    args = parser.parse_args(argv)

    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device
    print(f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}, N = {N}; ms, ns per token")
    columns = ("step", "ns", "advantages", "ns", "loop", "loop / step", "read+write", "adv / r+w", "B beyond kept")
    table = Table("B × T", *columns, first=14)
    for rows, length in ((rows, length) for rows, length in SIZES if length <= args.longest):
        inputs = rollouts(rows, length, args.device)
        torch.testing.assert_close(training_step(*inputs).advantages, loop_over_groups(*inputs), atol=1e-4, rtol=1e-4)
        step = seconds(training_step, *inputs, repeats=args.repeats)
        alone = seconds(compute_advantages, *inputs, N, repeats=args.repeats)
        floor = seconds(torch.add, *inputs[1:], repeats=args.repeats)  # reads the inputs once, writes once
        loop = seconds(loop_over_groups, *inputs, repeats=min(args.repeats, 3))
        per_token = 1e9 / rows / length
        cells = [f"{1e3 * step:.2f}", f"{per_token * step:.2f}", f"{1e3 * alone:.2f}", f"{per_token * alone:.2f}"]
        cells += [f"{1e3 * loop:.1f}", f"{loop / step:.1f}", f"{1e3 * floor:.2f}", f"{alone / floor:.1f}"]
        peak, kept = peak_and_kept(training_step, *inputs)
        cells.append(f"{(peak - kept) / rows / length:.1f}")
        table.add(f"{rows} × {length}", *cells)
    if args.output:
        table.save(args.output, f"N = {N}, {name}; times in ms, ns per token")


if __name__ == "__main__":
    main(sys.argv[1:])
