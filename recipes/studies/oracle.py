"""
How far is `value` from the best that a baseline can be? V and Q by continuations, at positions drawn by energy.

    OMP_NUM_THREADS=1 python -m recipes.studies.oracle --task scratchpad_30 --prompts 64      # two minutes on one core
    OMP_NUM_THREADS=1 python -m recipes.studies.oracle --task words --progress --prompts 12   # hours; it says so first
    python -m recipes.studies.oracle --publish runs/progress/oracle/*.json                    # into progress.md

In shares of Σ w (G − B)² under `rloo` at N = 4, with intervals by bootstrap over prompts. Of some completions of a
prompt's pool, tokens are drawn with probability in proportion to energy, and weighted by its inverse. From each, K
completions go on after the token that was sampled (their mean is Q), and K after another token, drawn from the policy
without the first (O): V = π(y) Q + (1 − π(y)) O. Squares are products of halves of the K, so that their noise has mean
0. The best baseline of a state is b* = E[w Q] / E[w] over the token to come. On 64 prompts of the scratchpad of 30
tokens it found b* 0.412 (0.383 to 0.443) and Q − b* 0.024 (0.001 to 0.046), where a table of all states has 0.415 and
0.028 (recipes/studies/limit.py of commit 84f22db).

`oracle(trainer, ...)` takes any OTBGRPOTrainer whose completions have one turn. It trains nothing.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn import functional
from transformers import DynamicCache

import trl_otb
from recipes.studies import language, render, tasks
from recipes.studies.value import TASKS as TITLES
from trl_otb import OTBGRPOTrainer
from trl_otb.baselines import Completions, batch_of_groups, find_baseline
from trl_otb.comparison.efficiency import Estimate, bootstrap
from trl_otb.comparison.pools import at_rest, sample, training_examples
from trl_otb.run.baseline import RunBaseline
from trl_otb.seam.forwards import policy_of


N, POOL = 4, 16  # of a group, and of the completions of a prompt that are sampled
LEARN_BATCHES, PROMPTS_PER_BATCH = 8, 16  # that `value` learns from
ROWS = 1024 if tasks.ON_GPU else 64  # that are continued at once
NEEDS = frozenset({"energy", "logps", "states", "progress"})


@dataclass(frozen=True)
class Reading:
    """
    A prompt with its completion, read once: the probabilities `(T, V)` before each token of the completion, and each
    layer's keys and values `(1, H, P + T, D)`, with which it is continued from any of its tokens.
    """

    prompt: list[int]
    completion: list[int]
    probabilities: torch.Tensor
    layers: list[tuple[torch.Tensor, torch.Tensor]]


class Continuations:
    """The trainer's policy and rewards, for completions that begin as given."""

    def __init__(self, trainer: OTBGRPOTrainer, seed: int) -> None:
        self.trainer, self.policy = trainer, policy_of(trainer.model)
        self.generator = torch.Generator().manual_seed(seed)
        self.longest = trainer.max_completion_length

    @torch.no_grad()
    def read(self, row: dict) -> Reading:
        """The completion of one of TRL's rows."""
        prompt = row["prompt_ids"][row["prompt_mask"].bool()].tolist()
        completion = row["completion_ids"][row["completion_mask"].bool()].tolist()
        ids, cache = torch.tensor([prompt + completion], device=self.policy.device), DynamicCache()
        logits = self.policy(input_ids=ids, past_key_values=cache).logits[0, len(prompt) - 1 : -1]
        probabilities = (logits.float() / self.trainer.temperature).softmax(-1).cpu()
        return Reading(prompt, completion, probabilities, [(layer.keys, layer.values) for layer in cache.layers])

    @torch.no_grad()
    def finished(self, begun: list[tuple[Reading, int, int]]) -> list[list[int]]:
        """
        Completions that begin with the first `t` tokens of one that was read and go on with token `v`, for each
        `(reading, t, v)`: continued by the policy to their end, or to the longest that is allowed.
        """
        ends = {*self.trainer.eos_token_ids}
        result = [[*of.completion[:t], v] for of, t, v in begun]
        open_ = [i for i, ids in enumerate(result) if len(ids) < self.longest and ids[-1] not in ends]
        open_.sort(key=lambda i: len(result[i]))
        for first in range(0, len(open_), ROWS):
            rows = open_[first : first + ROWS]
            readings = [begun[i][0] for i in rows]
            lengths = [len(of.prompt) + len(result[i]) - 1 for i, of in zip(rows, readings, strict=True)]
            cache, mask = cache_of(readings, lengths)
            while rows:
                mask = functional.pad(mask, (0, 1), value=1)
                logits = self.policy(
                    input_ids=torch.tensor([result[i][-1:] for i in rows], device=mask.device),
                    attention_mask=mask,
                    position_ids=mask.sum(1, keepdim=True) - 1,
                    past_key_values=cache,
                ).logits[:, -1]
                # By inverting the distribution function: torch.multinomial takes a third of the time on a CPU
                below = (logits.float() / self.trainer.temperature).softmax(-1).double().cumsum(-1)
                points = torch.rand(len(rows), 1, generator=self.generator, dtype=torch.float64).to(mask.device)
                tokens = torch.searchsorted(below, points * below[:, -1:], right=True)[:, 0].tolist()
                for i, v in zip(rows, tokens, strict=True):
                    result[i].append(v)
                goes_on = [v not in ends and len(result[i]) < self.longest for i, v in zip(rows, tokens, strict=True)]
                if not all(goes_on):
                    kept = torch.tensor(goes_on, device=mask.device).nonzero()[:, 0]
                    cache.batch_select_indices(kept)
                    rows, mask = [i for i, on in zip(rows, goes_on, strict=True) if on], mask[kept]
        return result

    def rewards(self, example: dict, completions: list[list[int]]) -> torch.Tensor:
        """The weighted rewards of completions of one example."""
        texts = self.trainer.processing_class.batch_decode(completions, skip_special_tokens=True)
        chat = not isinstance(example["prompt"], str)
        written = [[{"role": "assistant", "content": text}] if chat else text for text in texts]
        inputs = [dict(example) for _ in texts]
        prompts = [example["prompt"]] * len(texts)
        found = OTBGRPOTrainer._calculate_rewards(self.trainer, inputs, prompts, written, completions)
        return (found.cpu() * self.trainer.reward_weights.cpu()).nansum(dim=1)


def cache_of(readings: list[Reading], lengths: list[int]) -> tuple[DynamicCache, torch.Tensor]:
    """What was read of the first `lengths` tokens, prompts included, padded on the left; and its attention mask."""
    longest = max(lengths)

    def rows(layer: int, which: int) -> torch.Tensor:
        begun = [of.layers[layer][which][:, :, :n] for of, n in zip(readings, lengths, strict=True)]
        return torch.cat([functional.pad(x, (0, 0, longest - x.size(2), 0)) for x in begun])

    cache = DynamicCache([(rows(layer, 0), rows(layer, 1)) for layer in range(len(readings[0].layers))])
    mask = torch.tensor([[0] * (longest - n) + [1] * n for n in lengths], device=cache.layers[0].keys.device)
    return cache, mask


def inclusion(energy: torch.Tensor, number: int) -> torch.Tensor:
    """Probabilities min(1, c w) that sum to `number`, or 1 for all if there are no more."""
    w = energy.double().clamp(min=1e-12)
    if number >= len(w):
        return torch.ones(len(w), dtype=torch.float64)
    sure = torch.zeros(len(w), dtype=torch.bool)
    while True:
        c = (number - int(sure.sum())) / w[~sure].sum()
        more = ~sure & (c * w >= 1)
        if not more.any():
            return torch.where(sure, 1.0, c * w)
        sure |= more


def drawn(probabilities: torch.Tensor, generator: torch.Generator) -> list[int]:
    """Positions, each with its probability, by systematic sampling."""
    ends = probabilities.cumsum(0)
    points = torch.rand(1, generator=generator, dtype=torch.float64) + torch.arange(int(ends[-1].round()) + 1)
    return torch.searchsorted(ends, points[points < ends[-1]], right=True).unique().tolist()


def at_positions(
    go: Continuations, example: dict, pool: Completions, rows: list[dict], chosen: int, positions: int, k: int
) -> dict[str, float]:
    """
    Sums over the drawn positions of `chosen` completions of a prompt, weighted to those of all its completions: of
    Σ w A² for each row of the table.
    """
    returns = pool.whole_returns[:, 0].double()
    asked: list[dict] = []
    for i in range(chosen):
        reading = go.read(rows[i])
        ids, probs = reading.completion, reading.probabilities
        y = torch.tensor(ids).unsqueeze(1)
        p, sure = probs.gather(1, y)[:, 0].double(), probs.double().square().sum(1)
        w = 1 - 2 * p + sure
        included = inclusion(w, positions)
        for t in drawn(included, go.generator):
            others = probs[t].clone()
            others[ids[t]] = 0.0
            other = torch.multinomial(others, k, replacement=True, generator=go.generator).tolist()
            asked.append(
                {"i": i, "t": t, "p": p[t], "w": w[t], "w_mean": 1 - sure[t], "weight": w[t] / included[t]}
                | {"left": others.double().sum(), "w_other": 1 - 2 * probs[t, other].double() + sure[t]}
                | {"begun": [(reading, t, v) for v in [ids[t]] * k + other]}
            )
    begun = [start for of in asked for start in of["begun"]]
    reward = go.rewards(example, go.finished(begun)).double().view(len(asked), 2, k)
    names = ("rloo", "prompt_mean", "best_of_state", "v", "draw", "later_luck")
    sums = dict.fromkeys(names, 0.0)
    for of, (after, other) in zip(asked, reward, strict=True):
        rest = torch.cat([returns[: of["i"]], returns[of["i"] + 1 :]])
        mean, variance, luck = rest.mean(), rest.var(), after.var()
        halves = [slice(0, k // 2), slice(k // 2, k)]
        q, o = ([values[half].mean() for half in halves] for values in (after, other))
        weighted = [(of["w_other"][half] * (other[half] - mean)).mean() for half in halves]
        best = [
            mean + (of["p"] * of["w"] * (a - mean) + of["left"] * b) / of["w_mean"].clamp(min=1e-9)
            for a, b in zip(q, weighted, strict=True)
        ]
        of_prompt = (q[0] - mean) * (q[1] - mean) - variance / len(rest)
        of_draw = of["left"] ** 2 * (q[0] - o[0]) * (q[1] - o[1])
        of_best = (q[0] - best[0]) * (q[1] - best[1])
        terms = {
            "rloo": of_prompt + luck + variance / (N - 1),
            "prompt_mean": of_prompt + luck,
            "best_of_state": of_best + luck,
            "v": of_draw + luck,
            "draw": of_best,
            "later_luck": luck,
        }
        for name, term in terms.items():
            sums[name] += (of["weight"] * term).item() * len(rows) / chosen
    return sums


def oracle(
    trainer: OTBGRPOTrainer,
    prompts: int = 12,
    chosen: int = 4,
    positions: int = 8,
    k: int = 16,
    seed: int = 0,
    save: Callable[[int, dict[str, Estimate]], None] = lambda prompts, found: None,
) -> dict[str, Estimate]:
    """
    The shares of `rloo`'s power that are left by the prompt's mean, by the best baseline of the state, by V, by what
    nothing but the token's own draw decides (`draw`, Q − b*), and by `value` as it reads progress and as it does not,
    after 8 batches of other prompts.

    Args:
        prompts: Prompts of the training data that are measured.
        chosen, positions: Completions of each, and drawn tokens of each of these.
        k: Continuations after the token that was drawn, and after others.
        save: Called with what is known after each prompt, from the fourth on: it takes hours, and may be stopped.
    """
    examples = list(training_examples(trainer))
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed)).tolist()
    measured = [examples[i] for i in order[:prompts]]
    others = [examples[i] for i in order[prompts : prompts + LEARN_BATCHES * PROMPTS_PER_BATCH]] or measured
    of_all, pools, go = [], [], Continuations(trainer, seed)
    with at_rest(trainer, NEEDS), torch.no_grad():
        begin = time.perf_counter()
        runs = {name: RunBaseline(find_baseline("value")) for name in ("value", "value_without_progress")}
        learned, length = 0, 0.0
        for first in range(0, len(others), PROMPTS_PER_BATCH):
            found = sample(trainer, others[first : first + PROMPTS_PER_BATCH], N, seed + 1000 + first)
            whole = batch_of_groups([pool for pool, _ in found])
            learned, length = learned + len(whole), length + whole.lengths.sum().item()
            for name, run in runs.items():
                run.advantages_of(without(whole) if name != "value" else whole, learn=True)
        rate, mean = length / (time.perf_counter() - begin), length / learned
        expected = prompts * (POOL + chosen * positions * 2 * k * 0.6) * mean / rate
        print(
            f"{prompts} prompts, {chosen * positions} positions in each, {2 * k} continuations from each: about "
            f"{expected / 60:.0f} minutes, at {rate:.0f} tokens per second.",
            flush=True,
        )
        for number, example in enumerate(measured):
            ((pool, rows),) = sample(trainer, [example], POOL, seed + 1_000_003 * (number + 1))
            pools.append(pool)
            of_all.append(at_positions(go, example, pool, rows, chosen, positions, k))
            print(f"prompt {number + 1}: {time.perf_counter() - begin:.0f} s", flush=True)
            if number >= 3:
                save(number + 1, estimates(of_all, pools, runs))
    return estimates(of_all, pools, runs)


def estimates(
    of_all: list[dict[str, float]], pools: list[Completions], runs: dict[str, RunBaseline]
) -> dict[str, Estimate]:
    """Shares of `rloo`'s power, from the sums of each prompt."""
    counts = bootstrap(len(of_all))
    columns = {name: torch.tensor([sums[name] for sums in of_all]) for name in of_all[0]} | measured_powers(pools, runs)
    result = {}
    for name, of in columns.items():
        reference = columns["rloo_measured" if name.startswith("value") else "rloo"]
        result[name] = Estimate.of((counts @ of) / (counts @ reference))
    return result


def without(x: Completions) -> Completions:
    return replace(x, progress=None)


def measured_powers(pools: list[Completions], runs: dict[str, RunBaseline]) -> dict[str, torch.Tensor]:
    """Σ w A² of each prompt, whose groups of N are credited in steps of all prompts."""
    found = {}
    for name, run in (runs | {"rloo_measured": RunBaseline(find_baseline("rloo"))}).items():
        found[name] = torch.zeros(len(pools))
        for first in range(0, POOL, N):
            whole = batch_of_groups([pool.rows(slice(first, first + N), N) for pool in pools])
            whole = without(whole) if name == "value_without_progress" else whole
            power = (whole.energy * run.advantages_of(whole).advantages.square() * whole.mask).sum(dim=1)
            found[name] += power.view(-1, N).sum(dim=1)
    return found


def publish(paths: list[Path]) -> None:
    """The shares of each task into results/oracle.json and the page."""
    tables: render.Tables = {}
    titles = {"value": render.PROGRESS, "value_without_progress": "value"}
    for path in paths:
        of = json.loads(path.read_text())
        tables[TITLES[of["task"]]] = [
            {"prompts": of["prompts"], "release": of["release"], "estimator": titles.get(name, name), "noise": shares}
            for name, shares in of["shares"].items()
            if name not in ("rloo", "rloo_measured")
        ]
    render.publish("oracle", tables)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="oracle", description=__doc__.splitlines()[1])
    parser.add_argument("--publish", nargs="+", type=Path, metavar="FILE", help="put saved shares into the page")
    parser.add_argument("--task", default="scratchpad_30")
    parser.add_argument("--progress", action="store_true", help="`value` reads the reward of the text so far")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--chosen", type=int, default=4)
    parser.add_argument("--positions", type=int, default=8)
    parser.add_argument("--continuations", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/progress/oracle"))
    args = parser.parse_args(argv)
    if args.publish:
        return publish(args.publish)
    task = language.any_task(args.task, args.seed)
    options = {"progress_funcs": ["rewards"]} if args.progress else {}
    trainer = tasks.trainer_of(task, adapter=False, seed=args.seed, baseline="value", **options)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    path = args.output_dir / f"{args.task}-seed{args.seed}{'-progress' if args.progress else ''}.json"

    def save(prompts: int, found: dict[str, Estimate]) -> None:
        shares = {name: [of.value, of.low, of.high] for name, of in found.items()}
        to = path if prompts == args.prompts else path.with_suffix(".unfinished")
        result = {"task": args.task, "prompts": prompts, "release": trl_otb.__version__, "shares": shares}
        to.write_text(json.dumps(result, indent=1))

    sizes = args.prompts, args.chosen, args.positions, args.continuations
    found = oracle(trainer, *sizes, seed=args.seed, save=save)
    save(args.prompts, found)
    for name, of in found.items():
        print(f"{args.task} {name:24} {of.value:.3f} ({of.low:.3f} to {of.high:.3f})", flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1:])
