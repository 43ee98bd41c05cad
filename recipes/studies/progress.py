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
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from transformers import AutoTokenizer

from recipes.studies import language
from trl_otb.baselines import Value, joined
from trl_otb.baselines.completions import numbered
from trl_otb.baselines.value import r_squared
from trl_otb.baselines.value_parts import OF_LUCK, blocks, features, later, products, read, solution
from trl_otb.comparison.efficiency import Estimate, bootstrap


N, PROMPTS, FOLDS = 4, 16, 4


class Pools:
    """Completions of a task by prompt, with what was written and how its text is rewarded."""

    def __init__(self, path: Path) -> None:
        stored = torch.load(path, weights_only=False)
        self.name, self.pools = stored["task"], stored["pools"]
        self.reward, self.tokenizer, self.text = reward_of(self.name), tokenizer_of(self.name), {}
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
    return language.task_of(name).reward


def tokenizer_of(name: str):
    return AutoTokenizer.from_pretrained(language.task_of(name).policy, padding_side="left")


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


def replay(pools: Pools, make, progress=None, states=None, change=None, seed: int = 0) -> dict[str, torch.Tensor]:
    """
    Of each prompt, under a `value` that `make()` returns: `power`, `noise`, and what R² at the last token is made of.
    `progress` and `states` are by prompt, in place of those of the pools.
    """
    wholes = []
    for i, prompt in enumerate(pools.pools):
        x = prompt["pool"]
        x = replace(x, progress=None if progress is None else progress[i])
        x = x if states is None else replace(x, states=states[i])
        wholes.append(x if change is None else change(x))
    order = torch.randperm(len(wholes), generator=torch.Generator().manual_seed(seed)).tolist()
    found = {name: torch.zeros(len(wholes)) for name in ("power", "noise", "b0", "left")}
    ends: list[tuple[float, float]] = []
    groups = wholes[0].num_generations // N
    for fold in range(FOLDS):
        value = make()
        taught = [i for at, i in enumerate(order) if at % FOLDS != fold]
        measured = [i for at, i in enumerate(order) if at % FOLDS == fold]
        parts = [(i, g) for g in range(groups) for i in taught]
        for first in range(0, len(parts), PROMPTS):
            some = parts[first : first + PROMPTS]
            if len(some) < 4:
                continue
            whole = together([wholes[i].rows(slice(N * g, N * g + N), N) for i, g in some])
            value.update(whole, value(whole), lambda values: values)
        for g in range(groups):
            whole = together([wholes[i].rows(slice(N * g, N * g + N), N) for i in measured])
            b0 = value(whole)
            left = (whole.returns - value.adjust(whole, b0)) * whole.mask
            power = (whole.energy * left.square()).sum(1).view(-1, N).sum(1)
            of_b0 = (whole.energy * ((whole.returns - b0) * whole.mask).square()).sum(1).view(-1, N).sum(1)
            v = torch.cat(
                [
                    value._centred_v(reading(value, x, b), b, value.eta) + sum(value._returns_seen) / 2
                    for x, b, _ in blocks(whole, b0)
                ]
            )
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


def reading(value: Value, x, b0):
    return value._read(x, b0)[0] if isinstance(value, WithDraws) else read(x, b0)


def together(groups):
    return replace(joined(groups), prompt=torch.arange(len(groups)).repeat_interleave(N))


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


class WithDraws(Value):
    """
    `value` whose later luck knows which token was drawn, too: B_t + c₃ Σ_{t'>t} D_t'·(w₀ + w₁ V(x_t')), where D_t' is
    the draw of the reward of the text so far, the last column of `progress`.
    """

    ridge_of_draws = 10.0  # over that of the other features

    def __init__(self) -> None:
        super().__init__()
        self.w = None
        self.draw_weight = 0.0

    def _read(self, x, b):
        progress = x.progress[..., :-1]
        of = read(replace(x, progress=progress if progress.size(-1) else None), b)
        return of, x.progress[..., -1:] * (x.mask * of.known).unsqueeze(-1)

    def _columns(self, d, v):
        return torch.cat([d, d * v.unsqueeze(-1)], dim=-1)

    def _both(self, of, d, b0):
        state, whole = self._baseline(of, b0)
        if self.w is None or self.eta is None:
            return state, whole
        v = self._centred_v(of, b0, self.eta)
        width = self._returns_seen[1] - self._returns_seen[0]
        # Known before the draw, so that it may be bounded
        of_each = (self.w[:1].to(v) + v.unsqueeze(-1) * self.w[1:].to(v)).clamp(-width, width)
        return state, whole + self.draw_weight * later((d * of_each).sum(-1))

    def adjust(self, local, b0):
        if self.theta is None:
            return b0
        return torch.cat([self._both(*self._read(x, b), b)[1] for x, b, _ in blocks(local, b0)])

    def update(self, local, b0, gather):
        prompt, prompts = numbered(local, gather)
        fold = (prompt + self._prompts) % self.prompt_folds
        sums, tokens = 0.0, 0.0
        for x, b, rows in blocks(local, b0):
            (of, _), target = self._read(x, b), (x.returns - b).expand_as(x.mask)
            columns = torch.cat([of.numbers, target.unsqueeze(-1)], dim=-1)
            sums = sums + products(columns, x.mask * of.known, fold[rows], self.prompt_folds)
            tokens += (x.mask * of.known).sum().item()
        returns = local.returns.expand_as(local.mask)[local.mask > 0]
        least, most = returns.min().item(), returns.max().item()
        self._returns_seen = min(self._returns_seen[0], least), max(self._returns_seen[1], most)
        self._prompts += prompts
        whole = sums.sum(0) + (0 if self._value_sums is None else self.decay_per_batch * self._value_sums)
        ridge = 0.02 + 4 / self._prompts
        etas = solution(whole - sums, ridge)
        new = 0.0
        for x, b, rows in blocks(local, b0):
            (of, d), target, weights = self._read(x, b), (x.returns - b).expand_as(x.mask), x.need("loss_energy")
            v = self._centred_v(of, b, etas[fold[rows]])
            phi, psi = features(of, v)
            luck = torch.cat([of.luck.unsqueeze(-1) * psi, self._columns(d, v)], dim=-1)
            columns = torch.cat([phi, later(luck), target.unsqueeze(-1)], dim=-1)
            new = new + products(columns, weights * of.known, fold[rows], self.prompt_folds)
        self.eta, self._value_sums = solution(whole, ridge), whole
        self._sums = new if self._sums is None else self.decay_per_batch * self._sums + new
        self._tokens = self.decay_per_batch * self._tokens + tokens
        self._fit()
        return {}

    def _fit(self) -> None:
        sums, k = self._sums, self._sums.size(-1) - 1
        whole, tokens_per_feature = sums.sum(0), self._tokens / sums.size(-1)
        ridge = max(0.5 / self._prompts, 1 / tokens_per_feature)
        ends = [0, k - OF_LUCK - 2, k - 2, k]
        scale = sums.new_ones(k + 1)
        scale[-3:-1] = self.ridge_of_draws**-0.5

        def solved(of):
            """With more of the ridge for draws, which is added to their squares before."""
            squares = of[..., :-1, :-1].diagonal(dim1=-2, dim2=-1)
            more = torch.nn.functional.pad(ridge * (scale[:-1] ** -2 - 1) * squares, (0, 1))
            return solution(of + torch.diag_embed(more), ridge)

        both = solved(whole)
        self.theta, self.gamma, self.w = (both[a:b] for a, b in pairwise(ends))
        without = solved(whole - sums)
        each = without.new_zeros(len(without), 3, k)
        for i, (a, b) in enumerate(pairwise(ends)):
            each[:, i, a:b] = without[:, a:b]
        agreement = torch.einsum("fpk,fk->p", each, sums[:, :-1, -1])
        squares = torch.einsum("fpk,fkl,fql->pq", each, sums[:, :-1, :-1], each)
        c = torch.ones_like(agreement)
        for part in (0, 1, 2) * 3:  # each, given the others
            left = agreement[part] - c @ squares[part] + c[part] * squares[part, part]
            c[part] = (left / squares[part, part].clamp(min=1e-30)).clamp(0, 1)
        most = min(1.0, self._prompts / self.prompts_enough, tokens_per_feature / self.tokens_enough)
        self.weight, self.luck_weight, self.draw_weight = c.nan_to_num().clamp(max=most).tolist()


def with_products(pools: Pools, numbers: list[torch.Tensor]) -> list[torch.Tensor]:
    """S with S² and S σ."""
    result = []
    for prompt, s in zip(pools.pools, numbers, strict=True):
        x = prompt["pool"]
        sure = ((x.energy - 1 + 2 * x.logps.exp() * x.mask) * x.mask).clamp(0, 1).unsqueeze(-1)
        result.append(torch.cat([s, s.square(), s * sure], dim=-1))
    return result


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


def projected(pools: Pools, project) -> list[torch.Tensor]:
    found = []
    for prompt in pools.pools:
        states = [project(row["states"]) for row in prompt["rows"]]
        padded = torch.zeros(*prompt["pool"].mask.shape, states[0].size(-1))
        for i, of in enumerate(states):
            padded[i, : len(of)] = of
        found.append(padded)
    return found


def joint(*numbers: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.cat(of, dim=-1) for of in zip(*numbers, strict=True)]


def measured(path: Path, seed: int, quick: bool) -> dict:
    pools = Pools(path)
    completions = sum(len(prompt["rows"]) for prompt in pools.pools)
    print(f"{pools.name}: {len(pools.pools)} prompts, {completions} completions", flush=True)
    control = replay(pools, Value, seed=seed)
    cells = [told("value", control, control)]

    def add(name: str, make, **options) -> None:
        cells.append(told(name, replay(pools, make, seed=seed, **options), control))

    s = so_far(pools)
    cost = {"calls": pools.calls / completions, "ms": 1000 * pools.seconds / completions}
    add("S", Value, progress=s)
    if not quick:
        for stride in (4, 8):
            add(f"S, every {stride} tokens", Value, progress=so_far(pools, stride))
        add("S, S², S σ", Value, progress=with_products(pools, s))
        calls, seconds = pools.calls, pools.seconds
        for likeliest in (4, 8):
            add(f"S and its draw, {likeliest}", WithDraws, progress=joint(s, draws_of(pools, likeliest)))
            if likeliest == 4:
                cost["draw_calls"] = (pools.calls - calls) / completions
                cost["draw_ms"] = 1000 * (pools.seconds - seconds) / completions
        add("S and draws of 0", WithDraws, progress=joint(s, [torch.zeros_like(of) for of in s]))
        add("principal directions", Value, states=principal(pools))
        for other in (1, 2, 3):
            add(f"random directions, seed {other}", Value, states=random_directions(pools, other))
        add("S, principal directions", Value, progress=s, states=principal(pools))
    return {"task": pools.name, "prompts": len(pools.pools), "completions": completions, "cost": cost, "cells": cells}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="progress", description=__doc__.splitlines()[1])
    parser.add_argument("--pools", nargs="+", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="S alone")
    parser.add_argument("--output", type=Path, default=Path("runs/progress/replays.jsonl"))
    args = parser.parse_args(argv)
    for path in args.pools:
        found = measured(path, args.seed, args.quick)
        with args.output.open("a") as file:
            file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1:])
