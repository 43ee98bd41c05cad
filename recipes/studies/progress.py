"""
What is gained if `value` reads what the text so far is worth? Replayed on pools of completions, without sampling again.

    OMP_NUM_THREADS=1 python -m recipes.studies.progress_pools --task words --prompts 24      # first, once
    OMP_NUM_THREADS=1 python -m recipes.studies.progress --pools runs/progress/pools/*.pt     # minutes

Numbers of the text so far are those of a trainer: [`~trl_otb.progress.Progress`] is called on batches of 16 prompts.
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

import torch
from transformers import AutoTokenizer

import trl_otb
from recipes.studies import language, render
from recipes.studies.value import TASKS as TITLES
from trl_otb.baselines import Value, batch_of_groups
from trl_otb.baselines.prefix import read_in_blocks
from trl_otb.baselines.registry import imported
from trl_otb.baselines.value_metrics import r_squared
from trl_otb.comparison.efficiency import Estimate, bootstrap
from trl_otb.progress import PROGRESS_PLACES, Progress, Sampled


N, PROMPTS, FOLDS = 4, 16, 4
LENGTHS = (175, 1024, 4096)  # of completions, in tokens, whose calls are timed


class Pools:
    """Completions of a task by prompt, with what was written."""

    def __init__(self, path: Path) -> None:
        stored = torch.load(path, weights_only=False)
        self.name, self.pools = stored["task"], stored["pools"]
        self.tokenizer = AutoTokenizer.from_pretrained(language.any_task(self.name).policy, padding_side="left")

    def sampled(self, prompts: list[dict]) -> Sampled:
        """All completions of some prompts, as one batch."""
        rows = [(of, row["ids"].tolist()) for of in prompts for row in of["rows"]]
        chat = not isinstance(prompts[0]["prompt"], str)
        columns = {name: [of["columns"][name] for of, _ in rows] for name in prompts[0]["columns"]}

        def messages(ids: list[list[int]]) -> list:
            texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
            return [{"role": "assistant", "content": text} for text in texts] if chat else texts

        ids = [of for _, of in rows]
        whole = [[of] if chat else of for of in messages(ids)]
        generated = [[*range(len(of))] for of in ids]
        written = lambda turns: messages([ids[row][start:end] for row, start, end in turns])  # noqa: E731
        return Sampled([of["prompt"] for of, _ in rows], columns, whole, ids, generated, written)


def so_far(pools: Pools, function: Callable | None = None, places: int = PROGRESS_PLACES) -> list[torch.Tensor]:
    """By prompt, `(C, T, 1)`: the numbers of a function, by default the reward, of the text before each token."""
    function = function or language.any_task(pools.name).reward
    limit = max(prompt["pool"].mask.size(1) for prompt in pools.pools)
    progress, found = Progress({"f": function}, {}, places, limit), []
    for first in range(0, len(pools.pools), PROMPTS):
        some = pools.pools[first : first + PROMPTS]
        sampled = pools.sampled(some)
        numbers = progress.measure(sampled).split([len(of["rows"]) for of in some])
        progress.saw([*map(len, sampled.generated)])
        for of, prompt in zip(numbers, some, strict=True):
            length = prompt["pool"].mask.size(1)
            found.append(torch.nn.functional.pad(of, (0, 0, 0, length - min(of.size(1), length)))[:, :length])
    return found


def replay(pools: Pools, make, progress=None, seed: int = 0) -> dict[str, torch.Tensor]:
    """
    `power` and `noise` of each prompt under a `value` that `make()` returns, the power of its B0, and R² at the last
    token. `progress` is by prompt.
    """
    given = progress or [None] * len(pools.pools)
    wholes = [replace(prompt["pool"], progress=of) for prompt, of in zip(pools.pools, given, strict=True)]
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
            middle = sum(run.returns_seen) / 2
            v = torch.cat([run.centred_v(of, b0[rows], run.eta) + middle for _, of, rows in read_in_blocks(whole)])
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


def measured(path: Path, seed: int, functions: list[str]) -> dict:
    pools = Pools(path)
    completions = sum(len(prompt["rows"]) for prompt in pools.pools)
    print(f"{pools.name}: {len(pools.pools)} prompts, {completions} completions", flush=True)
    control = replay(pools, Value, seed=seed)
    given = {"progress": so_far(pools), "half as many places": so_far(pools, places=PROGRESS_PLACES // 2)}
    for name in functions:
        of = so_far(pools, imported(name, f"--functions holds {name!r}"))
        both = [torch.cat(two, dim=-1) for two in zip(given["progress"], of, strict=True)]
        given |= {name.rpartition(":")[2]: of, f"reward and {name.rpartition(':')[2]}": both}
    cells = [told("value", control, control)]
    cells += [told(name, replay(pools, Value, of, seed), control) for name, of in given.items()]
    return {"task": pools.name, "prompts": len(pools.pools), "completions": completions, "cells": cells}


def costs(pools: Pools, tokens: int, functions: int) -> float:
    """Milliseconds per completion of so many tokens, with decoding, of functions that do nothing; 64 completions."""
    written = torch.cat([row["ids"] for prompt in pools.pools for row in prompt["rows"]])
    ids = [written.roll(-97 * i).repeat(1 + tokens // len(written))[:tokens] for i in range(64)]
    prompt = pools.pools[0] | {"rows": [{"ids": of} for of in ids]}
    progress = Progress({str(i): _nothing for i in range(functions)}, {}, PROGRESS_PLACES)
    progress.saw([tokens])
    sampled = pools.sampled([prompt])
    progress.measure(sampled)  # warms up
    begin = time.perf_counter()
    progress.measure(sampled)
    return 1000 * (time.perf_counter() - begin) / len(ids)


def _nothing(completions: list, **kwargs: object) -> list[float]:
    return [0.0] * len(completions)


def publish(found: list[dict]) -> None:
    """Power and noise of each task over those of `value` without progress, into results/progress.json and the page."""
    tables: render.Tables = {}
    for of in found:
        for what in ("power", "noise"):
            tables[f"{TITLES[of['task']]}, {what}"] = [
                {"prompts": of["prompts"], "n": N, "estimator": cell["name"], "noise": cell[what], "r2": cell["r2"]}
                for cell in of["cells"]
            ]
    published = render.load("progress")
    render.save("progress", published | {"release": trl_otb.__version__})
    render.publish("progress", tables)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="progress", description=__doc__.splitlines()[1])
    parser.add_argument("--pools", nargs="+", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--functions", nargs="*", default=[], metavar="MODULE:FUNCTION", help="beside the reward")
    parser.add_argument("--cost", action="store_true", help="only time the calls of the first pools' text")
    parser.add_argument("--publish", action="store_true", help="put the tables into the results and the page")
    parser.add_argument("--output", type=Path, default=Path("runs/progress/replays.jsonl"))
    args = parser.parse_args(argv)
    if args.cost:
        pools = Pools(args.pools[0])
        for tokens in LENGTHS:
            one, three = (costs(pools, tokens, functions) for functions in (1, 3))
            print(f"{tokens} tokens: {one:.1f} ms per completion with one function, {three:.1f} with three", flush=True)
        return
    found = []
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for path in args.pools:
        found.append(measured(path, args.seed, args.functions))
        with args.output.open("a") as file:
            file.write(json.dumps(found[-1]) + "\n")
    if args.publish:
        publish(found)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1:])
