"""
The cost of advantages and metrics once energies are known: time and memory by size of the generation batch.

    python -m recipes.benchmarks.advantages                     # on a CPU: a minute
    python -m recipes.benchmarks.advantages --device cuda --longest 32768

A run is all that a step does with known energies and, for `value`, hidden states: squeezing, advantages, those of the
group mean beside them, metrics, and the learning of `value`. Completions have tool output in the middle. Times are
means of several runs after two warm-up runs; memory is the peak beyond what the step keeps.
"""

import argparse
import sys
from functools import partial

import pandas
import torch
from torch.utils.benchmark import Timer

from recipes.benchmarks import allocated
from trl_otb.baselines import BASELINES
from trl_otb.baselines.prefix import PROJECTED_SIZE
from trl_otb.energy import TokenValues
from trl_otb.rollout import Rollout
from trl_otb.run.baseline import RunBaseline
from trl_otb.run.metrics import summarize


SIZES = [(64, 512), (64, 2048), (1024, 2048), (1024, 8192), (1024, 32768)]
N = 4


def inputs_of(rows: int, length: int, device: str, states: bool) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    ends = torch.randint(length // 2, length + 1, (rows, 1), generator=g)
    position = torch.arange(length)
    begin = torch.randint(1, length // 4, (rows, 1), generator=g)
    mask = (position < ends) & ~((position >= begin) & (position < begin + length // 8))
    energy = torch.rand(rows, length, generator=g)
    found = [torch.randn(rows, generator=g), energy, mask.long(), -energy]
    found += [torch.rand(rows, length, PROJECTED_SIZE, generator=g)] if states else []
    return [x.to(device) for x in found]


def training_step(baseline: RunBaseline, rewards, energy, mask, logps, states=None) -> Rollout:
    """Everything that a step does after the energies are known."""
    rollout = Rollout(mask, mask, mask, mask, mask, N, rewards, torch.ones_like(rewards)[:, None])
    rollout = rollout.with_values(TokenValues(energy, logps, states), None)
    found = baseline.advantages_of(rollout.completions(states), rollout.scale, learn=True)
    summarize(found.statistics, N)
    return rollout.with_advantages(found)


def peak_and_kept(function, *inputs) -> tuple[int, int]:
    """The peak number of bytes that `function` allocates, and the bytes left while its result is kept."""
    if any(values.is_cuda for values in inputs):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = function(*inputs)
        kept = torch.cuda.memory_allocated() - before
        del result
        return torch.cuda.max_memory_allocated() - before, kept
    live = allocated(function, *inputs)
    return live.max(), live[-1]


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1], allow_abbrev=False)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--baselines", nargs="+", default=["otb", "group_mean", "value"], choices=BASELINES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--longest", type=int, default=8192, help="longest completions, in tokens")
    args = parser.parse_args(argv)

    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device
    print(f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}, N = {N}")
    for rows, length in ((rows, length) for rows, length in SIZES if length <= args.longest):
        columns = ["ms", "ns per token", "B per token beyond kept"]
        table = pandas.DataFrame(columns=columns, dtype=float)
        for baseline in args.baselines:
            entry = BASELINES[baseline]
            inputs = inputs_of(rows, length, args.device, "states" in entry.needs)
            step = partial(training_step, RunBaseline(entry))
            timer = Timer("step(*inputs)", globals=locals(), num_threads=torch.get_num_threads())
            seconds, (peak, kept) = timer.timeit(args.repeats).mean, peak_and_kept(step, *inputs)
            table.loc[baseline] = [1e3 * seconds, *(x / (rows * length) for x in (1e9 * seconds, peak - kept))]
        print(f"\n{rows} × {length} tokens\n{table.round(1)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
