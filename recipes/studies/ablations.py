"""
What is each part of `value` for? Its parts are left out or changed, one by one; the policy stands still.

    OMP_NUM_THREADS=1 python -m recipes.studies.ablations --tasks sums      # minutes on one core; all: half an hour
    OMP_NUM_THREADS=1 python -m recipes.studies.ablations --publish         # results/ablations.json and ablations.md
    OMP_NUM_THREADS=1 python -m recipes.studies.ablations --pools runs/progress/pools/*.pt   # on SmolLM2

Each task has 48 generation batches of 16 prompts × 4 completions, sampled once. `value` learns from each after it was
used, as in a run. Numbers are the power Σ w A² that is left, over that of the whole `value`, in the first batches (from
the second to the 8th, or with two prompts per batch to the 24th) and in all later ones. A `jump` is of rewards: after
twelve batches they are divided by 100; then twelve more.
"""

import argparse
import json
import logging
import math
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

from recipes.studies import render
from recipes.studies.tasks import task_of, trainer_of
from trl_otb.baselines import BASELINES, Completions, Value, batch_of_groups, bound, least_squares, prefix, value
from trl_otb.baselines.prefix import later
from trl_otb.comparison.pools import at_rest, training_examples
from trl_otb.run.baseline import RunBaseline
from trl_otb.trainer import collect


TASKS = ("sums", "scratchpad_30", "scratchpad_100", "calculator", "lucky_unequal", "lucky_even")
RESULTS, PAGE = Path(__file__).parent / "results" / "ablations.json", Path(__file__).with_name("ablations.md")
N, PROMPTS, BATCHES = 4, 16, 48
# And the end of the first batches
KINDS = {"16 prompts": 8, "2 prompts": 24, "N = 1": 8, "jump": 12, "jump, 2 prompts": 24}


def unlimited_v(self, of, b0, eta):
    predicted = b0 + (of.with_b0(b0) @ eta.to(of.numbers).unsqueeze(-1)).squeeze(-1)
    return predicted - sum(self._returns_seen) / 2


def unlimited_b(state: bool, luck: bool):
    """B whose state, or luck per draw, is not limited; without progress."""

    def baseline(self, of, b0):
        if self.eta is None or self.theta is None:
            return (b0.expand_as(of.sure),) * 2
        phi, psi = value.columns_of(of, b0, self._centred_v(of, b0, self._eta_of(of.names)))
        least, most = self._returns_seen
        of_state, per_draw = b0 + self.weight * (phi @ self.theta.to(phi)), psi @ self.gamma.to(psi)
        of_state = of_state if state else of_state.clamp(b0.clamp(max=least), b0.clamp(min=most))
        per_draw = per_draw if luck else per_draw.clamp(least - most, most - least)
        return of_state, of_state + later(self.luck_weight * of.luck * per_draw)

    return of_value("_baseline", baseline)


def fit_without_cross_validation(self, fit=Value._fit):
    with patch.object(value, "confidences", lambda sums, ridge, sizes: torch.ones(len(sizes))):
        fit(self)


def free_slope(sums, ridge):
    squares, of_target = sums.values[..., :-1, :-1], sums.values[..., :-1, -1]
    diagonal, constant = squares.diagonal(dim1=-2, dim2=-1), squares[..., 0]
    varies = (diagonal - constant.square() / constant[..., :1].clamp(min=1e-30)).clamp(min=0)
    penalty = (ridge * varies + 1e-9 * diagonal).where(diagonal > 0, 1.0)
    return torch.linalg.solve_ex(squares + torch.diag_embed(penalty), of_target)[0]


def with_ridge(of_v: float = 1, of_b: float = 1, of_states: float = 1):
    """Times V's ridge, that of its hidden states alone, in batches without progress, and the other ridge."""

    def changed(sums, ridge, solution=least_squares.solution):
        if {*value.PSI} <= {*sums.names}:
            return solution(sums, ridge * of_b)
        ridge = ridge * of_v
        ridge[len(prefix.NUMBERS) :] *= of_states
        return solution(sums, ridge)

    return solving(changed)


def solving(solution):
    return [patch.object(module, "solution", solution) for module in (value, least_squares)]


def of_value(name: str, new):
    return [patch.object(Value, name, new)]


def v_of_energy():
    """V fitted as θ and Γ are, where each token weighs as much as its energy."""
    seen, all_of, read_all = [], value.products, value.read_in_blocks

    def remembered(x):
        for block in read_all(x):
            seen[:] = [block[0].need("loss_energy")]
            yield block

    def weighed(columns, weights, fold, folds):
        of_v = columns.size(-1) != len(value.PHI) + len(value.PSI) + 1
        return all_of(columns, weights * seen[0] if of_v else weights, fold, folds)

    return [patch.object(value, "read_in_blocks", remembered), patch.object(value, "products", weighed)]


def without(*parts: str):
    kind = type("Without", (Value,), {"__init__": lambda self: Value.__init__(self, parts)})
    return [patch.dict(BASELINES, {"value": replace(BASELINES["value"], estimator=kind)})]


PARTS = {
    "the whole": [],
    "no reset": [patch.object(value, "RESET_RATIO", math.inf)],
    "no bound on other prompts": of_value(
        "keeps_b0", lambda self, x, *rest: (torch.zeros(len(x), dtype=torch.bool), 0.0)
    ),
    "the reset at 1.5": [patch.object(value, "RESET_RATIO", 1.5)],
    "the reset at 4": [patch.object(value, "RESET_RATIO", 4.0)],
    "the reset after 2 prompts": [patch.object(value, "RESET_PROMPTS", 2)],
    "the reset after 16 prompts": [patch.object(value, "RESET_PROMPTS", 16)],
    "V is not limited": of_value("_centred_v", unlimited_v),
    "B's state is not limited": unlimited_b(state=True, luck=False),
    "luck per draw is not limited": unlimited_b(state=False, luck=True),
    "c = 1 without cross-validation": of_value("_fit", fit_without_cross_validation),
    "c = 1 at once": of_value("prompts_enough", 1e-9),
    "c = 1 for 8 prompts": of_value("prompts_enough", 8),
    "c = 1 for 64 prompts": of_value("prompts_enough", 64),
    "V's ridge is 0.02": of_value("ridge_of_v", property(lambda self: 0.02)),
    "the other ridge without prompts": of_value("ridge", property(lambda self: len(self._sums.names) / self._tokens)),
    "the other ridge without tokens": of_value("ridge", property(lambda self: 0.5 / self._prompts)),
    "the bound at 1.2": [patch.object(bound, "WORSE_RATIO", 1.2)],
    "the bound at 2": [patch.object(bound, "WORSE_RATIO", 2.0)],
    "any slope of B0": solving(free_slope),
    "2 folds": of_value("prompt_folds", 2),
    "8 folds": of_value("prompt_folds", 8),
    "batches forgotten by 0.8": of_value("decay_per_batch", 0.8),
    "batches forgotten by 0.95": of_value("decay_per_batch", 0.95),
    "a quarter of V's ridge": with_ridge(of_v=0.25),
    "four times V's ridge": with_ridge(of_v=4),
    "four times the ridge of V's states": with_ridge(of_states=4),
    "a quarter of the other ridge": with_ridge(of_b=0.25),
    "four times the other ridge": with_ridge(of_b=4),
    "no √n": without("√n"),
    "no V": without("V"),
    "no V²": without("V²"),
    "no m": without("m"),
    "no V m": without("V m"),
    "no V √n": without("V √n"),
    "no V², V m": without("V²", "V m"),
    "no m, no V m": without("m", "V m"),
    "no σ² in φ": without("σ²"),
    "no σ in ψ": without("σ in ψ"),
    "nothing of V in φ and ψ": without("V", "V²", "V m", "V √n"),
    "n in the place of √n": [patch.dict(value.PARTS, {"√n": lambda of, v: of.root_count.square()})],
    "V as it is, not less the middle": of_value(
        "_centred_v", lambda self, *of, centred=Value._centred_v: centred(self, *of) + sum(self._returns_seen) / 2
    ),
    "V fitted by energy": v_of_energy(),
    "V without hidden states": without("states"),
    "V without sums of energy and surprisal": without("energy", "surprisal", "root_energy", "root_surprisal"),
    "V without roots": without("root_energy", "root_surprisal", "root_count"),
    "V without sums, roots alone": without("energy", "surprisal", "count"),
    "V without m and σ": without("worst", "sure"),
}


def batches_of(task: str, folder: Path) -> list[dict]:
    """The tensors of completions, kept in `folder`."""
    path = folder / f"{task}.pt"
    if not path.exists():
        trainer = trainer_of(task_of(task), baseline="value")
        rows, rng, found = [*training_examples(trainer)], random.Random(1), []
        with at_rest(trainer, frozenset({"energy", "logps", "states"})):
            trainer.num_generations_eval = N
            torch.manual_seed(1)
            for _ in range(BATCHES):
                prompts = rng.sample(rows, min(PROMPTS, len(rows)))
                found.append(collect(trainer, [dict(row) for row in prompts for _ in range(N)])[1].to("cpu").tensors())
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(found, path)
    return torch.load(path)


def batches_in(kind: str, found: list[dict]) -> Iterator[Completions]:
    n, jumps = 1 if kind == "N = 1" else N, kind.startswith("jump")
    for number, tensors in enumerate(found[:24] if jumps else found):
        x = Completions(**tensors, num_generations=n)
        if jumps and number >= 12:
            x = replace(x, returns=x.returns / 100, whole_returns=x.whole_returns / 100)
        for rows in [slice(0, 8), slice(8, 16)] if kind.endswith("2 prompts") else [slice(None)]:
            part = x.rows(rows)
            yield replace(part, prompt=torch.arange(len(part)) // n)


@contextmanager
def changed(part: str) -> Iterator[None]:
    with ExitStack() as stack:
        for patched in PARTS[part]:
            stack.enter_context(patched)
        yield


def powers_under(x: Completions, *baselines: torch.Tensor) -> torch.Tensor:
    """Σ w (G − B)² under each."""
    return torch.stack([(x.need("loss_energy") * x.mask * (x.returns - b).square()).sum() for b in baselines])


def power_left(part: str, kind: str, found: list[dict]) -> tuple[float, float]:
    """Over B0's: in the first batches, and in later ones."""
    powers = []
    with changed(part):
        run = RunBaseline(BASELINES["value"])
        for x in batches_in(kind, found):
            of = run.advantages_of(x, learn=True)
            powers.append(powers_under(x, of.baselines, of.b0))
    first, later = torch.stack(powers[1 : KINDS[kind]]).sum(0), torch.stack(powers[KINDS[kind] :]).sum(0)
    return (first[0] / first[1]).item(), (later[0] / later[1]).item()


def after_few(pools: list[Completions], prompts: int, batches: int, enough: float) -> float:
    """
    Of a language model's pools, one for each prompt: the power over B0's that is left in the other prompts, after some
    batches of few prompts. The sum over six orders of the prompts.
    """
    powers = torch.zeros(2)
    for seed in range(6):
        run = Value()
        run.prompts_enough = enough
        order = torch.randperm(len(pools), generator=torch.Generator().manual_seed(seed)).tolist()
        parts = [order[i * prompts : (i + 1) * prompts] for i in range(batches)] + [order[batches * prompts :]]
        for number, part in enumerate(parts):
            x = batch_of_groups([pools[i].rows(slice(0, N), N) for i in part])
            b0 = run(x)
            if number < batches:
                run.update(x, b0, lambda values: values)
        powers += powers_under(x, run.adjust(x, b0), b0)
    return (powers[0] / powers[1]).item()


def on_other_prompts(part: str, pools: list[Completions]) -> float:
    """
    Of a language model's pools, in four folds of prompts: the power over B0's that is left in each fold, after batches
    of 8 prompts of the others.
    """
    powers = torch.zeros(2)
    with changed(part):
        for fold in range(4):
            run = RunBaseline(BASELINES["value"])
            others = [i for i in range(len(pools)) if i % 4 != fold]
            parts = [others[i : i + 8] for i in range(0, len(others), 8)] + [[*range(fold, len(pools), 4)]]
            for first in range(0, len(pools[0]), N):
                for some in parts[:-1]:
                    x = batch_of_groups([pools[i].rows(slice(first, first + N), N) for i in some])
                    run.advantages_of(x, learn=True)
            for first in range(0, len(pools[0]), N):
                x = batch_of_groups([pools[i].rows(slice(first, first + N), N) for i in parts[-1]])
                of = run.advantages_of(x)
                powers += powers_under(x, of.baselines, of.b0)
    return (powers[0] / powers[1]).item()


def pools_of(paths: list[Path]) -> dict[tuple[str, str], list[Completions]]:
    """By task, and whether they hold the reward of the text so far."""
    from recipes.studies.progress import Pools, so_far

    result = {}
    for found in map(Pools, paths):
        plain = [replace(of["pool"], progress=None) for of in found.pools]
        result[found.name, "no"] = plain
        result[found.name, "yes"] = [replace(x, progress=s) for x, s in zip(plain, so_far(found), strict=True)]
    return result


def first_batches(found: dict[tuple[str, str], list[Completions]]) -> str:
    """A Markdown table of [`after_few`]."""
    enough = {"at once": 1e-9, "8": 8, "12": 12, "16": 16}
    rows = [["task", "progress", "batches", *enough]]
    for (task, told), pools in found.items():
        for prompts, batches in ((2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (4, 3), (8, 1)):
            powers = [after_few(pools, prompts, batches, of) for of in enough.values()]
            rows.append([task, told, f"{batches} of {prompts} prompts", *(f"{power:.2f}" for power in powers)])
            print(*rows[-1], sep=", ", file=sys.stderr, flush=True)
    return render.markdown(rows)


def on_language_models(found: dict[tuple[str, str], list[Completions]], parts: list[str]) -> str:
    """A Markdown table of [`on_other_prompts`] over that of the whole."""
    rows = [["part", *(task if told == "no" else "with progress" for task, told in found)]]
    whole = [on_other_prompts("the whole", pools) for pools in found.values()]
    for part in [of for of in parts if of != "the whole" and "reset" not in of]:  # no rewards jump here
        ratios = [on_other_prompts(part, pools) / of for pools, of in zip(found.values(), whole, strict=True)]
        rows.append([part, *(f"{ratio:.2f}" for ratio in ratios)])
        print(*rows[-1], sep=", ", file=sys.stderr, flush=True)
    return render.markdown(rows)


def table(results: dict[str, dict[str, list[float]]]) -> str:
    """By part and kind of batch: the range over tasks of the power over that of the whole, at first → later."""
    columns: dict[str, list[str]] = {}
    for key in results:
        task, kind = key.split(": ")
        columns.setdefault(kind, []).append(task)

    def cell(part: str, kind: str, when: int) -> str:
        ratios = [
            results[f"{task}: {kind}"][part][when] / results[f"{task}: {kind}"]["the whole"][when]
            for task in columns[kind]
        ]
        low, high = min(ratios), max(ratios)
        return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f}–{high:.2f}"

    cells = [(kind, when) for kind in columns for when in (0, 1)]
    rows = [["part", *(f"{kind}, {('first', 'later')[when]}" for kind, when in cells)]]
    parts = [part for part in next(iter(results.values())) if part != "the whole"]
    return render.markdown([*rows, *([part, *(cell(part, *of) for of in cells)] for part in parts)])


def main() -> None:
    parser = argparse.ArgumentParser(prog="ablations", description=__doc__.splitlines()[1])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="beside the whole")
    parser.add_argument("--publish", action="store_true", help="put the results into the page")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/studies/ablations"))
    parser.add_argument("--pools", nargs="+", type=Path, help="of progress_pools.py: on language models")
    args = parser.parse_args()
    parts = [*dict.fromkeys(["the whole", *args.parts])]
    if args.pools:
        found = pools_of(args.pools)
        if len(parts) == len(PARTS):
            print(first_batches(found))
        return print(on_language_models(found, parts))
    published: dict[str, dict[str, list[float]]] = json.loads(RESULTS.read_text())
    results: dict[str, dict[str, list[float]]] = {}
    for task in args.tasks:
        found = batches_of(task, args.output_dir)
        for kind in KINDS:
            of_kind = results[f"{task}: {kind}"] = {}
            for part in parts:
                of_kind[part] = [float(f"{power:.4g}") for power in power_left(part, kind, found)]
                print(f"{task}: {kind}: {part}: {of_kind[part]}", flush=True)
    if args.publish:
        for key, of_kind in results.items() if len(parts) < len(PARTS) else ():
            if of_kind["the whole"] != published[key]["the whole"]:
                parser.error(f"The whole `value` has changed on {key}: publish all parts together.")
            of_all = published[key] | of_kind
            results[key] = {part: of_all[part] for part in PARTS if part in of_all}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        head, mark, _ = PAGE.read_text().partition("<!-- ablations.json -->\n\n")
        PAGE.write_text(head + mark + table(results))
    print(table(results))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)  # each reset is said
    main()
