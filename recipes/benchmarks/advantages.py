"""
How fast advantages are computed, how that scales with length, and how far it is from what memory allows.

    OMP_NUM_THREADS=1 python recipes/bench_advantages.py         # about a minute on one core
    python recipes/bench_advantages.py --device cuda

Each size is timed for completions with a stretch of tool output in the middle, against a loop over groups that does the same
sums, and against one read and one write of the inputs. Medians of several runs, after one that warms up.

Seen on one x86-64 core on 2026-11-21, two runs: 11 and 12 ms for 1024 × 2048, 5.0 and 5.3 times the loop's speed; 243 ms for
1024 × 32768, 1.3 times. The time grows linearly, 5 to 8 ns a token; the loop gains on it as its rows get longer and its Python
weighs less. One read and one write of the inputs took between 2 and 16 ms at 1024 × 2048, so that column says little here.
No GPU yet.
"""

import os
import sys


_RECIPES = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(_RECIPES)] + [p for p in sys.path if os.path.abspath(p or os.curdir) != _RECIPES]

import argparse
import statistics
import time

import torch

from trl_otb.baselines import compute_advantages


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


def read_and_write(rewards, energy, mask):
    """One pass over the inputs and one over an output of their shape."""
    return torch.add(energy, mask)


def seconds(function, *inputs, repeats):
    times = []
    for _ in range(repeats + 1):
        if inputs[0].is_cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        function(*inputs)
        if inputs[0].is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--longest", type=int, default=32768)
    args = parser.parse_args(argv)

    def ours(rewards, energy, mask):
        return compute_advantages(rewards, energy, mask, N)

    print(f"{args.device}, {torch.get_num_threads()} threads, torch {torch.__version__}, N = {N}")
    print(f"{'B × T':>14}{'ours':>12}{'ns a token':>12}{'loop':>12}{'loop / ours':>13}{'ours / read+write':>19}")
    for rows, length in SIZES:
        if length > args.longest:
            continue
        inputs = rollouts(rows, length, args.device)
        torch.testing.assert_close(ours(*inputs), loop_over_groups(*inputs), atol=1e-4, rtol=1e-4)
        a = seconds(ours, *inputs, repeats=args.repeats)
        b = seconds(loop_over_groups, *inputs, repeats=min(args.repeats, 3))
        floor = seconds(read_and_write, *inputs, repeats=args.repeats)
        print(f"{f'{rows} × {length}':>14}{1e3 * a:>9.1f} ms{1e9 * a / rows / length:>12.2f}{1e3 * b:>9.1f} ms{b / a:>13.1f}{a / floor:>19.1f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
