"""
What `trl_otb.GradientNoiseCallback()` costs: the time of a step with it over one without.

    OMP_NUM_THREADS=1 python -m recipes.benchmarks.meter           # a small model: about 4 minutes on one core
    python -m recipes.benchmarks.meter --shape qwen2.5-1.5b --length 2048 --gradient_checkpointing

One OTBGRPOTrainer runs, energies from its training forward, micro-batches of whole groups, no generation. Its meter
measures every other step. Two steps on the same completions are a pair, now the one first and now the other, and the
first pair warms up. Printed are quartiles over pairs: of wall time, and of the process's own time on the CPU, which
other jobs on the machine disturb less. Where pairs differ by more than the meter costs, look at the share of a step
that its hooks take: on a CPU all of the cost and more, since they bring gradients into the cache that are read next
anyway; on a GPU the time to launch their kernels.
"""

import statistics
import sys
import tempfile
import time
from functools import wraps

from recipes.benchmarks import Table
from recipes.benchmarks.step import Clock, build, describe, model_parser, read_model_flags
from trl_otb import GradientNoiseCallback, OTBGRPOConfig, OTBGRPOTrainer
from trl_otb.callbacks import gradient_noise


class EveryOtherStep(GradientNoiseCallback):
    """Measures one step of each pair: the second, the first, the second, …"""

    @staticmethod
    def is_measured(step: int) -> bool:
        pair, second = divmod(step, 2)
        return second != pair % 2

    def on_train_begin(self, args, state, control, **kwargs):
        pass

    def on_step_begin(self, args, state, control, **kwargs):
        super().on_train_end(args, state, control, **kwargs)
        self._step = None
        if self.is_measured(state.global_step):
            super().on_train_begin(args, state, control, **kwargs)


def timed(method, spent: list[float]):
    @wraps(method)
    def call(*args):
        began = time.perf_counter()
        method(*args)
        spent.append(time.perf_counter() - began)

    return call


def main(argv):
    parser = model_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    args = read_model_flags(parser, argv)
    if args.pairs < 2:
        parser.error("--pairs must be at least 2")
    args.steps = args.pairs + 1

    note = f"{describe(args)}, {args.pairs} pairs of steps"
    print(note)
    clock, spent = Clock(), []
    for hook in ("add_micro_batch", "add_accumulated"):
        setattr(gradient_noise._StepGradients, hook, timed(getattr(gradient_noise._StepGradients, hook), spent))
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(OTBGRPOTrainer, OTBGRPOConfig, "training forward", args, folder, same=2)
        trainer.add_callback(EveryOtherStep())
        trainer.add_callback(clock)  # later, so that it leaves out the hooks' coming and going
        trainer.train()

    table, figures = Table("clock", "without s/step", "with", "ratio", "quartiles", "range", first=10), {}
    for name, seconds in (("wall", clock.seconds), ("CPU", clock.cpu_seconds)):
        starts = range(2, len(seconds), 2)
        pairs = [seconds[i : i + 2][:: 1 if EveryOtherStep.is_measured(i + 1) else -1] for i in starts]
        without, with_meter = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratios = sorted(b / a for a, b in pairs)
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        figures[name] = {"without": without, "with": with_meter, "ratios": ratios, "median": middle}
        quartiles, ends = f"{low:.3f}–{high:.3f}", f"{ratios[0]:.3f}–{ratios[-1]:.3f}"
        table.add(name, f"{without:.3f}", f"{with_meter:.3f}", f"{middle:.4f}", quartiles, ends)
    share = sum(spent) / (args.pairs + 1) / figures["wall"]["without"]
    note += f"; the hooks take {100 * share:.2f} % of a step"
    print(note.split("; ")[-1] + ".")
    if args.output:
        table.save(args.output, note, figures=figures, hooks=share)


if __name__ == "__main__":
    main(sys.argv[1:])
