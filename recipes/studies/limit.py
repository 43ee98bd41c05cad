"""
How little can a baseline leave on the scratchpads? What is left if the state is read from the text, by a table.

    OMP_NUM_THREADS=1 python -m recipes.studies.limit --publish   # an hour on one core

In shares of Σ w (G − B)² under `rloo`, at N = 4. The best baseline of a state s is b*(s) = E[w R | s] / E[w | s]. With
later luck taken out, too, what a token earns is the value of the state that it leads to, less b*. Both are estimated
by a table over the completions of half of the prompts, for those of the other half, and the reverse. `value` has
learned from 8 batches of any of the prompts.
"""

import argparse
import sys
import warnings
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import torch

from recipes.studies import render
from recipes.studies.tasks import PROMPTS_PER_BATCH, task_of, trainer_of
from recipes.studies.value import TASKS as TITLES  # and its parts of `value` are registered
from recipes.toy import scratchpad
from trl_otb.baselines import Completions, batch_of_groups, find_baseline
from trl_otb.comparison import LEARN_BATCHES
from trl_otb.comparison.efficiency import Estimate, bootstrap
from trl_otb.comparison.pools import at_rest, sample, training_examples
from trl_otb.run.baseline import RunBaseline


TASKS = ("scratchpad_30", "scratchpad_100", "scratchpad_300", "scratchpad_mixed")
N, GROUPS = 4, 16  # per prompt
MEASURED = ("rloo_pooled", "value_no_luck", "value")


def states_of(question: str, written: str) -> list[tuple]:
    """
    The state before each character of an answer, and after the last: all steps, those done, the place within the step,
    how far the digit is off, and whether a counter or a check is not what it should be.
    """
    digit, by, steps = int(question[0]), int(question[2]), int(question[4:])
    right, done, place, broken, counter, states = digit, 0, 0, False, "", []
    for letter in [*written, None]:
        states.append((steps, done, place, (digit - right) % 10, broken))
        if letter is None:
            break
        if letter not in scratchpad.ALPHABET:
            place = 9  # it has ended
        elif place in (0, 5) and letter in scratchpad.LETTERS:
            place, counter = 1, ""
        elif place in (1, 2) and letter.isdigit():
            place, counter = place + 1, counter + letter
        elif place == 3 and letter.isdigit():
            done, place, right, digit = done + 1, 5, (right + by) % 10, int(letter)
            broken = broken or int(counter) != steps - done
        elif place == 5 and letter == "!":
            place = 4
        elif place == 4 and letter.isdigit():
            place, broken = 0, broken or int(letter) != digit
        else:
            place, broken = 8, True
    return states


def sampled(task, trainer, count: int, groups: int, seed: int) -> list[tuple[Completions, list[list[tuple]]]]:
    """For `count` prompts, so many groups of N completions and the states of each."""
    examples = list(training_examples(trainer))
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed)).tolist()[:count]
    asked = [examples[i] for i in order]
    questions = {str(row["prompt"]): row["question"] for row in task.train}
    found = []
    for example, (pool, rows) in zip(asked, sample(trainer, asked, N * groups, seed), strict=True):
        texts = [trainer.processing_class.convert_ids_to_tokens(row["completion_ids"][0].tolist()) for row in rows]
        states = [states_of(questions[str(example["prompt"])], text) for text in texts]
        found.append((replace(pool, num_generations=N), states))
    return found


def table(pools: list[tuple[Completions, list[list[tuple]]]]) -> tuple[dict, dict]:
    """b*(s) and V(s), the mean return of completions that are in the state s."""
    sums = defaultdict(lambda: torch.zeros(4))
    for pool, states in pools:
        for energy, reward, of_row in zip(pool.energy, pool.whole_returns[:, 0].tolist(), states, strict=True):
            for t, state in enumerate(of_row):
                w = energy[t].item() if t < len(of_row) - 1 else 0.0
                sums[state] += torch.tensor([w * reward, w, reward, 1.0])
    best = {s: (a / b).item() if b > 0 else 0.0 for s, (a, b, _, _) in sums.items()}
    return best, {s: (c / d).item() for s, (_, _, c, d) in sums.items()}


def powers(pools, tables) -> torch.Tensor:
    """Σ w A² of each prompt under b*, and with later luck taken out; under B0 for states that are not in the tables."""
    best, value = tables
    found = []
    for pool, states in pools:
        b0 = find_baseline("rloo").estimator(pool)
        left = [pool.whole_returns - b0.expand_as(pool.mask) for _ in range(2)]
        for row, of_row in enumerate(states):
            for t, (here, after) in enumerate(pairwise(of_row)):
                if here in best and after in value:
                    left[0][row, t] = pool.whole_returns[row] - best[here]
                    left[1][row, t] = value[after] - best[here]
        found.append(torch.stack([(pool.energy * of.square() * pool.mask).sum() for of in left]))
    return torch.stack(found)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="limit", description=__doc__.splitlines()[1])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--num_prompts", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--publish", action="store_true", help="put the columns into the results and the pages")
    args = parser.parse_args(argv)
    if args.num_prompts < 1 or args.num_prompts % PROMPTS_PER_BATCH:
        parser.error(f"--num_prompts is {args.num_prompts}: give a multiple of {PROMPTS_PER_BATCH}")
    tables: render.Tables = {}
    for name in args.tasks:
        task = task_of(name, args.seed)
        trainer = trainer_of(task, seed=args.seed)
        runs = {of: RunBaseline(find_baseline(of)) for of in MEASURED}
        with at_rest(trainer, frozenset({"energy", "logps", "states"})):
            for batch in range(LEARN_BATCHES):
                whole = batch_of_groups(
                    [pool for pool, _ in sampled(task, trainer, PROMPTS_PER_BATCH, 1, 1000 + batch)]
                )
                for run in runs.values():
                    run.advantages_of(whole, learn=True)
            pools = sampled(task, trainer, args.num_prompts, GROUPS, args.seed)
        half = len(pools) // 2
        limits = torch.cat([powers(pools[:half], table(pools[half:])), powers(pools[half:], table(pools[:half]))])
        shares = {"best_of_state": limits[:, 0], "less_later_luck": limits[:, 1]}
        for of, run in {"rloo": RunBaseline(find_baseline("rloo")), **runs}.items():
            shares[of] = measured(pools, run)
        counts, cells = bootstrap(len(pools)), []
        for of, power in shares.items():
            share = Estimate.of((counts @ power) / (counts @ shares["rloo"]))
            noise = [share.value, share.low, share.high]
            cells.append({"prompts": args.num_prompts, "n": N, "estimator": of, "noise": noise})
            print(f"{name} {of:22} {render.interval(noise, '.3f')}", flush=True)
        tables[TITLES[name]] = cells
    if args.publish:
        render.publish("limit", tables)


def measured(pools, run: RunBaseline) -> torch.Tensor:
    """Σ w A² of each prompt, whose groups are credited in steps of 16 prompts."""
    found = torch.zeros(len(pools))
    for start in range(0, len(pools), PROMPTS_PER_BATCH):
        some = range(start, start + PROMPTS_PER_BATCH)
        for group in range(GROUPS):
            whole = batch_of_groups([pools[i][0].rows(slice(N * group, N * group + N), N) for i in some])
            advantages = run.advantages_of(whole).advantages
            power = (whole.energy * advantages.square() * whole.mask).sum(dim=1).view(-1, N).sum(dim=1)
            found[start : start + PROMPTS_PER_BATCH] += power
    return found


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1:])
