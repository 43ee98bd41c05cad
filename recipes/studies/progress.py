"""
What is gained if `value` reads what the text so far is worth? Replayed on pools of completions, without sampling again.

    OMP_NUM_THREADS=1 python -m recipes.studies.progress_pools --task words --prompts 48      # first, once
    OMP_NUM_THREADS=1 python -m recipes.studies.progress --pools runs/progress/pools/*.pt     # minutes

`value` learns from three of four folds of the prompts, in batches of 16 prompts and groups of four, and is measured on
the fourth: power is Σ w A², noise the same with the tokens' gradients in the last block. Ratios are paired over the
`value` that reads no progress, on the same completions, with intervals by bootstrap over prompts.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import AutoTokenizer

from recipes.studies import language, render
from recipes.studies.value import TASKS as TITLES
from trl_otb.baselines import Value, batch_of_groups, value
from trl_otb.baselines.prefix import read_in_blocks
from trl_otb.baselines.registry import imported
from trl_otb.baselines.value import r_squared
from trl_otb.comparison.efficiency import Estimate, bootstrap


N, PROMPTS, FOLDS = 4, 16, 4


class Pools:
    """Completions of a task by prompt, with what was written and how its text is rewarded."""

    def __init__(self, path: Path, function: Callable[..., list[float]] | None = None) -> None:
        stored = torch.load(path, weights_only=False)
        self.name, self.pools = stored["task"], stored["pools"]
        self.reward, self.tokenizer, self.text = function or reward_of(self.name), tokenizer_of(self.name), {}
        self.calls = self.seconds = 0.0

    def rewards(self, row: dict, texts: list[str]) -> list[float]:
        """The rewards of texts as completions of a prompt, each computed once."""
        chat = not isinstance(row["prompt"], str)
        key = row["prompt"] if not chat else json.dumps(row["prompt"])
        missing = [text for text in dict.fromkeys(texts) if (key, text) not in self.text]
        begin = time.perf_counter()
        if missing:
            completions = [[{"role": "assistant", "content": text}] if chat else text for text in missing]
            columns = {name: [value] * len(missing) for name, value in row["columns"].items()}
            found = self.reward(completions=completions, prompts=[row["prompt"]] * len(missing), **columns)
            self.text.update({(key, text): float(value) for text, value in zip(missing, found, strict=True)})
        self.seconds, self.calls = self.seconds + time.perf_counter() - begin, self.calls + len(missing)
        return [self.text[key, text] for text in texts]


def reward_of(name: str):
    return language.any_task(name).reward


def tokenizer_of(name: str):
    return AutoTokenizer.from_pretrained(language.any_task(name).policy, padding_side="left")


def so_far(pools: Pools, stride: int = 1) -> list[torch.Tensor]:
    """The reward of the text before each token, by prompt `(C, T, 1)`; of every so many tokens' text."""
    found = []
    for prompt in pools.pools:
        numbers = torch.zeros(*prompt["pool"].mask.shape, 1)
        for i, row in enumerate(prompt["rows"]):
            ids = row["ids"].tolist()
            texts = pools.tokenizer.batch_decode(
                [ids[: t - t % stride] for t in range(len(ids))], skip_special_tokens=True
            )
            numbers[i, : len(ids), 0] = torch.tensor(pools.rewards(prompt, texts))
        found.append(numbers)
    return found


def draws_of(pools: Pools, likeliest: int = 8) -> list[torch.Tensor]:
    """D_t = f(y_t) − Σ_v π(v) f(v) of the likeliest tokens, f(v) = S with v − S, by prompt `(C, T, 1)`."""
    found = []
    for prompt in pools.pools:
        result = torch.zeros(*prompt["pool"].mask.shape, 1)
        for i, row in enumerate(prompt["rows"]):
            ids, top, p = row["ids"].tolist(), row["top_ids"][:, :likeliest].tolist(), row["top_p"][:, :likeliest]
            wanted = [[*ids[:t], v] for t in range(len(ids)) for v in top[t]]
            before = pools.tokenizer.batch_decode([ids[:t] for t in range(len(ids))], skip_special_tokens=True)
            s = torch.tensor(pools.rewards(prompt, before))
            texts = pools.tokenizer.batch_decode(wanted, skip_special_tokens=True)
            gain = torch.tensor(pools.rewards(prompt, texts)).view(len(ids), -1) - s.unsqueeze(1)
            own = torch.tensor([[float(v == y) for v in of] for y, of in zip(ids, top, strict=True)])
            result[i, : len(ids), 0] = ((own - p) * gain).sum(1)
        found.append(result)
    return found


# The replay


def replay(pools: Pools, make, progress=None, draws=None, states=None, seed: int = 0) -> dict[str, torch.Tensor]:
    """
    `power` and `noise` of each prompt under a `value` that `make()` returns, the power of its B0, and R² at the last
    token. `progress`, `draws` and `states` are by prompt, in place of those of the pools.
    """
    wholes = []
    for i, prompt in enumerate(pools.pools):
        x = prompt["pool"]
        given = {"progress": progress, "progress_draws": draws, "states": states}
        wholes.append(replace(x, **{"progress": None} | {name: of[i] for name, of in given.items() if of is not None}))
    order = torch.randperm(len(wholes), generator=torch.Generator().manual_seed(seed)).tolist()
    found = {name: torch.zeros(len(wholes)) for name in ("power", "noise", "b0")}
    ends: list[tuple[float, float]] = []
    groups = wholes[0].num_generations // N
    for fold in range(FOLDS):
        run = make()
        taught = [i for at, i in enumerate(order) if at % FOLDS != fold]
        measured = [i for at, i in enumerate(order) if at % FOLDS == fold]
        parts = [(i, g) for g in range(groups) for i in taught]
        for first in range(0, len(parts), PROMPTS):
            some = parts[first : first + PROMPTS]
            if len(some) < 4:
                continue
            whole = batch_of_groups([wholes[i].rows(slice(N * g, N * g + N), N) for i, g in some])
            run.update(whole, run(whole), lambda values: values)
        for g in range(groups):
            whole = batch_of_groups([wholes[i].rows(slice(N * g, N * g + N), N) for i in measured])
            b0 = run(whole)
            left = (whole.returns - run.adjust(whole, b0)) * whole.mask
            power = (whole.energy * left.square()).sum(1).view(-1, N).sum(1)
            of_b0 = (whole.energy * ((whole.returns - b0) * whole.mask).square()).sum(1).view(-1, N).sum(1)
            middle = sum(run._returns_seen) / 2
            v = torch.cat([run._centred_v(of, b0[rows], run.eta) + middle for _, of, rows in read_in_blocks(whole)])
            for k, i in enumerate(measured):
                found["power"][i] += power[k]
                found["b0"][i] += of_b0[k]
                for j in range(N):
                    row = pools.pools[i]["rows"][N * g + j]
                    length = len(row["ids"])
                    a = left[N * k + j, :length]
                    found["noise"][i] += a @ row["gram"].float() @ a
                    ends.append((whole.returns[N * k + j, 0].item(), v[N * k + j, length - 1].item()))
    returns, predicted = torch.tensor(ends).T
    found["r2"] = torch.tensor(
        r_squared(
            len(ends), returns.sum().item(), returns.square().sum().item(), (returns - predicted).square().sum().item()
        )
    )
    return found


def ratio(found: dict, control: dict, what: str = "power") -> Estimate:
    counts = bootstrap(len(found[what]))
    return Estimate.of((counts @ found[what]) / (counts @ control[what]))


def told(name: str, found: dict, control: dict) -> dict:
    """Power and noise over the control's, and without the prompts that make more than a tenth of its power."""
    usual = control["power"] <= 0.1 * control["power"].sum()
    rest = {what: of[usual] if of.dim() else of for what, of in found.items()}
    of_rest = {what: of[usual] if of.dim() else of for what, of in control.items()}
    estimates = {what: ratio(found, control, what) for what in ("power", "noise")}
    estimates |= {f"{what}_trimmed": ratio(rest, of_rest, what) for what in ("power", "noise")}
    text = ", ".join(f"{what} {x.value:.3f} ({x.low:.2f}-{x.high:.2f})" for what, x in estimates.items())
    explained = 1 - found["power"].sum() / found["b0"].sum()
    print(f"  {name:28} {text}, {int((~usual).sum())} out; r2 {found['r2']:.2f} explained {explained:.2f}", flush=True)
    rows = {what: [x.value, x.low, x.high] for what, x in estimates.items()}
    return {"name": name, "r2": found["r2"].item(), "explained": explained.item(), **rows}


def principal(pools: Pools, numbers: int = 32, tokens: int = 256) -> list[torch.Tensor]:
    """States on the principal directions of standardized states of the first tokens, in place of random ones."""
    early = torch.cat([row["states"].float() for prompt in pools.pools[:4] for row in prompt["rows"]])[:tokens]
    mean, deviation = early.mean(0), early.std(0).clamp(min=1e-6)
    z = (early - mean) / deviation
    directions = torch.linalg.eigh(z.T @ z / len(z)).eigenvectors.flip(1)[:, :numbers]
    return projected(pools, lambda states: ((states.float() - mean) / deviation) @ directions / states.size(-1) ** 0.5)


def random_directions(pools: Pools, seed: int, numbers: int = 32) -> list[torch.Tensor]:
    size = pools.pools[0]["rows"][0]["states"].size(-1)
    directions = torch.randn(size, numbers, generator=torch.Generator().manual_seed(seed)) / size**0.5
    return projected(pools, lambda states: states.float() @ directions)


def by_size(path: Path) -> render.Tables:
    """
    Without and with progress: the power with so many numbers per hidden state, of three random projections together,
    over that with 32.
    """
    pools, tables = Pools(path), {}
    for title, s in (("numbers of a state", None), ("numbers of a state, with progress", so_far(pools))):
        of_size = {}
        for numbers in (1, 8, 16, 32, 64, 128):
            each = [replay(pools, Value, s, states=random_directions(pools, seed, numbers)) for seed in range(3)]
            of_size[numbers] = {"power": sum(found["power"] for found in each)}
        tables[f"{TITLES[pools.name]}, {title}"] = rows_over(pools, of_size, 32)
    return tables


def by_ridge(path: Path) -> render.Tables:
    """With progress: what more ridge of hidden states leaves, over what equal ridge of all numbers of V leaves."""
    pools, found, tables = Pools(path), {}, {}
    s = so_far(pools)
    for times in (1, 4, 16, 64):
        with patch.object(value, "STATES_RIDGE_FACTOR", times):
            found[times] = replay(pools, Value, s)
    for what in ("power", "noise"):
        tables[f"{TITLES[pools.name]}, ridge of states, {what}"] = rows_over(pools, found, 1, what)
    return tables


def projected(pools: Pools, project) -> list[torch.Tensor]:
    return [padded(prompt, [project(row["states"]) for row in prompt["rows"]]) for prompt in pools.pools]


def padded(prompt: dict, rows: list[torch.Tensor]) -> torch.Tensor:
    """`(C, T, k)` numbers of the tokens of a prompt's completions, from `(T_i, k)` of each."""
    result = torch.zeros(*prompt["pool"].mask.shape, rows[0].size(-1))
    for i, of in enumerate(rows):
        result[i, : len(of)] = of
    return result


def together(first: list[torch.Tensor], second: list[torch.Tensor]) -> list[torch.Tensor]:
    """Both kinds of numbers of each token, by prompt."""
    return [torch.cat(of, dim=-1) for of in zip(first, second, strict=True)]


def rows_over(pools: Pools, found: dict[int, dict], control: int, what: str = "power") -> list[dict]:
    """What is published of replays that differ by a number, over the one of `control`."""
    ratios = {number: ratio(of, found[control], what) for number, of in found.items()}
    return rows_of_power(pools, [{"name": str(of), "power": [x.value, x.low, x.high]} for of, x in ratios.items()])


def rows_of_power(pools: Pools, cells: list[dict]) -> list[dict]:
    """What is published of [`told`]'s cells."""
    prompts = len(pools.pools)
    return [{"prompts": prompts, "n": N, "estimator": of["name"], "noise": of["power"]} for of in cells]


def measured(path: Path, seed: int, quick: bool, function: Callable[..., list[float]] | None = None) -> dict:
    pools = Pools(path)
    completions = sum(len(prompt["rows"]) for prompt in pools.pools)
    print(f"{pools.name}: {len(pools.pools)} prompts, {completions} completions", flush=True)
    control = replay(pools, Value, seed=seed)
    cells = [told("value", control, control)]

    def add(name: str, **options) -> None:
        cells.append(told(name, replay(pools, Value, seed=seed, **options), control))

    s = so_far(pools)
    cost = {"calls": pools.calls / completions, "ms": 1000 * pools.seconds / completions}
    add("progress", progress=s)
    if not quick:
        for stride in (4, 8):
            add(f"every {stride} tokens", progress=so_far(pools, stride))
        for likeliest in (4, 8):
            calls, seconds = pools.calls, pools.seconds
            add(f"and draws of {likeliest}", progress=s, draws=draws_of(pools, likeliest))
            cost[f"calls_{likeliest}"] = (pools.calls - calls) / completions
            cost[f"ms_{likeliest}"] = 1000 * (pools.seconds - seconds) / completions
        add("principal directions", states=principal(pools))
        for other in (1, 2, 3):
            add(f"random directions, seed {other}", states=random_directions(pools, other))
        add("progress, principal directions", progress=s, states=principal(pools))
    if function is not None:
        others, name = Pools(path, function), function.__name__
        f, draws = so_far(others), draws_of(others, 4)
        add(name, progress=f)
        add(f"{name} and draws of 4", progress=f, draws=draws)
        add(f"reward, {name}, draws of 4", progress=together(s, f), draws=draws)
    return {"task": pools.name, "prompts": len(pools.pools), "completions": completions, "cost": cost, "cells": cells}


def right_text(answer: list[int], row: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Where the tokens of the right text are known: `(T, 5)` the probability of its next token, whether no end of the text
    so far is in it, the length of the longest that is, hits and misses so far; and `(T, 1)` draws, 1 or 0 for whether a
    token is the next one, less the probability of that. The next one follows the longest end; draws are 0 where it is
    not among the likeliest tokens.
    """
    ids, numbers, draws, hits, misses = row["ids"].tolist(), [], [], 0, 0
    for t, y in enumerate(ids):
        length, place = 0, 0
        for k in range(1, len(answer)):
            n = 0
            while n < min(t, k) and answer[k - 1 - n] == ids[t - 1 - n]:
                n += 1
            if n > length or (n == length > 0 and abs(k - t) < abs(place - t)):
                length, place = n, k
        lost, likeliest = t > 0 and length == 0, row["top_ids"][t].tolist()
        known = not lost and answer[place] in likeliest
        p = row["top_p"][t][likeliest.index(answer[place])].item() if known else 0.0
        numbers.append([p, float(lost), min(length, 4), hits, misses])
        draws.append([float(known and y == answer[place]) - p])
        hits, misses = (hits + 1, misses) if not lost and y == answer[place] else (hits, misses + 1)
    return torch.tensor(numbers), torch.tensor(draws)


def with_right_text(path: Path) -> tuple[str, list[dict]]:
    """The cells of a task: power over that of `value` with progress."""
    pools, both = Pools(path), []
    for prompt in pools.pools:
        answer = pools.tokenizer(prompt["columns"]["answer"])["input_ids"] + [pools.tokenizer.eos_token_id]
        each = zip(*(right_text(answer, row) for row in prompt["rows"]), strict=True)
        both.append([padded(prompt, [*of]) for of in each])
    numbers, draws = zip(*both, strict=True)
    s, of_reward = so_far(pools), draws_of(pools, 8)
    s_and_numbers, all_draws = together(s, numbers), together(of_reward, draws)
    control, with_draws = replay(pools, Value, progress=s), replay(pools, Value, progress=s, draws=of_reward)
    cells = [
        told("draws of 8", with_draws, control),
        told("draw of the right text", replay(pools, Value, progress=s, draws=draws), control),
        told("numbers of the right text", replay(pools, Value, progress=s_and_numbers), control),
        told("both", replay(pools, Value, progress=s_and_numbers, draws=draws), control),
        told("both over draws of 8", replay(pools, Value, progress=s_and_numbers, draws=all_draws), with_draws),
    ]
    return pools.name, rows_of_power(pools, cells)


def publish_right_text(found: list[tuple[str, list[dict]]]) -> None:
    render.publish("progress", {f"{TITLES[name]}, over progress": cells for name, cells in found})


def publish(found: list[dict]) -> None:
    """Power and noise of each task over those of `value` without progress, into results/progress.json and the page."""
    tables: render.Tables = {}
    for of in found:
        for what in ("power", "noise"):
            tables[f"{TITLES[of['task']]}, {what}"] = [
                {"prompts": of["prompts"], "n": N, "estimator": cell["name"], "noise": cell[what], "r2": cell["r2"]}
                for cell in of["cells"]
            ]
    costs = {TITLES[of["task"]]: of["cost"] | {"completions": of["completions"]} for of in found}
    published = render.load("progress")
    render.save("progress", published | {"costs": published["costs"] | costs})
    render.publish("progress", tables)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="progress", description=__doc__.splitlines()[1])
    parser.add_argument("--pools", nargs="+", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="S alone")
    parser.add_argument(
        "--function", metavar="MODULE:FUNCTION", help="a progress function beside the reward, with draws"
    )
    parser.add_argument(
        "--right_text", action="store_true", help="publish what is gained by knowing the column `answer`"
    )
    states = parser.add_mutually_exclusive_group()
    states.add_argument("--sizes", action="store_true", help="publish what other numbers of a hidden state leave")
    states.add_argument("--ridges", action="store_true", help="publish what another ridge of hidden states leaves")
    parser.add_argument("--publish", action="store_true", help="put the tables into the results and the page")
    parser.add_argument("--output", type=Path, default=Path("runs/progress/replays.jsonl"))
    args = parser.parse_args(argv)
    if args.right_text:
        return publish_right_text([with_right_text(path) for path in args.pools])
    if args.sizes or args.ridges:
        tables: render.Tables = {}
        for path in args.pools:
            tables |= by_size(path) if args.sizes else by_ridge(path)
        return render.publish("progress", tables)
    function = None if args.function is None else imported(args.function, f"--function is {args.function!r}")
    found = []
    for path in args.pools:
        found.append(measured(path, args.seed, args.quick, function))
        with args.output.open("a") as file:
            file.write(json.dumps(found[-1]) + "\n")
    if args.publish:
        publish(found)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1:])
