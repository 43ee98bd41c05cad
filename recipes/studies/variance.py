"""
How noisy is the gradient under each baseline? Scores are exact, on small policies, over groups of 2 to 128.

    OMP_NUM_THREADS=1 python -m recipes.studies.variance     # two hours on one core; can be stopped and run again
    python -m recipes.studies.variance --only sums           # one task
    python -m recipes.studies.variance --plot_only           # tables and pictures from what is saved
    python -m recipes.studies.variance --redraw              # recipes/studies/variance.png from the published table

For each task and stage of training: pools of completions of fixed prompts, exact per-token scores (laboratory.py), and
from their Gram matrix the noise-to-signal ratio tr Var(ĝ) / ‖Eĝ‖² of the gradient of a group and the cosine of Eĝ to
the true one. Everything lands in runs/studies/variance; the results are in recipes/studies/README.md.
"""

import argparse
import json
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path

import torch
from matplotlib.figure import Figure
from peft import AutoPeftModelForCausalLM
from tqdm import tqdm
from transformers import AutoTokenizer

from recipes import math as math_recipe
from recipes import tool_math
from recipes.common.errors import InputError
from recipes.studies.laboratory import SCORABLE, Moments, Pool, moments, sample_pools, smollm2_recipe, task_of
from recipes.toy import calculator, smollm2, sums
from trl_otb.baselines import BASELINES, compute_advantages


CONFIGS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Setting:
    """A task at a stage of training: `steps` of its recipe with group_mean, seed 0."""

    task: str
    steps: int
    prompts: int
    pool: int

    @property
    def name(self) -> str:
        return f"{self.task}-{self.steps}"


SETTINGS = [
    Setting("sums", 0, 24, 512),
    Setting("sums", 200, 24, 512),
    Setting("calculator", 0, 12, 384),
    Setting("calculator", 12, 12, 384),
    Setting("smollm2", 20, 30, 256),
]
TITLES = {
    "sums": "sums, one turn",
    "calculator": "sums with a calculator, several turns",
    "smollm2": "SmolLM2-135M, LoRA, sums of two",
}
GROUPS = [2, 4, 8, 16, 32, 128]
SHOWN = 4  # in the picture


def estimators() -> dict[str, dict | None]:
    """Every baseline of one prompt, with and without the completion's own return, and none at all."""
    found = {"none": None}
    for name, entry in reversed(BASELINES.items()):
        if entry.across_prompts:
            continue
        found[name] = {"baseline": name}
        if entry.zero_tail:
            found[f"{name}, no zero tail"] = {"baseline": name, "zero_tail": False}
        if entry.uses_energy:
            found[f"{name}, one left out"] = {"baseline": name, "leave_one_out": True}
    return found


ESTIMATORS = estimators()
# What is dealt again and again for each pool; larger groups come fewer to a deal
DEALS = {2: 10, 4: 20, 8: 20, 16: 30, 32: 40, 128: 100}


def advantages(options):
    if options is None:
        return lambda rewards, energy, mask, n: rewards.unsqueeze(1) * mask
    return lambda rewards, energy, mask, n: compute_advantages(rewards, energy, mask, n, **options)


def policy(setting: Setting, folder: Path) -> Path:
    if setting.steps == 0:
        return {"sums": sums, "calculator": calculator}[setting.task]()
    output = folder / "policy"
    checkpoint = output / f"checkpoint-{setting.steps}"
    if not (output / "result.json").exists():
        recipe = tool_math if setting.task == "calculator" else math_recipe
        steps = str(setting.steps)
        flags = ["--baseline", "group_mean", "--max_steps", steps, "--save_steps", steps, "--seed", "0", "--overwrite"]
        if setting.task == "smollm2":
            flags += ["--config", str(CONFIGS / "math_smollm2.yaml"), "--num_held_out_problems", "4"]
        recipe.main([*flags, "--output_dir", str(output), "--disable_tqdm", "true"])
    return checkpoint


def collect(setting: Setting, folder: Path) -> None:
    """Pools of the setting's prompts; those that are there already are sampled no more."""
    pools = folder / "pools"
    pools.mkdir(parents=True, exist_ok=True)
    done = len(list(pools.glob("*.pt")))
    if done == setting.prompts:
        return
    path = str(policy(setting, folder))
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    task = task_of(setting.task, tokenizer, setting.prompts, num_held_out=1, seed=11)
    prompts = task.train.select(range(done, setting.prompts))
    bar = tqdm(total=setting.prompts, initial=done, desc=f"{setting.name}: pools")

    def keep(pool: Pool) -> None:
        pool.save(pools / f"{bar.n}.pt")
        bar.update()

    if setting.task == "smollm2":
        model = AutoPeftModelForCausalLM.from_pretrained(path, is_trainable=True, **SCORABLE)
        options = {
            "trainable": of_last_block(model),
            "max_completion_length": smollm2_recipe()[1].max_completion_length,
        }
    else:
        model, options = path, {}
    sample_pools(model, tokenizer, task.reward, prompts, setting.pool, keep, tools=task.tools, seed=done, **options)
    bar.close()


def of_last_block(model) -> Callable[[str], bool]:
    """The adapter's parameters there: with all thirty blocks, the scores of a pool would not fit."""
    return lambda name: f".layers.{model.config.num_hidden_layers - 1}." in name


def analyse(setting: Setting, folder: Path) -> None:
    """Moments of every pool under every estimator, and how good the proxy is, as JSON beside the pools."""
    for path in tqdm(sorted((folder / "pools").glob("*.pt")), desc=f"{setting.name}: moments"):
        target = folder / f"{path.stem}.json"
        if target.exists():
            continue
        pool = Pool.load(path)
        figures = {"reward": pool.rewards.mean().item(), "proxy": proxy_quality(pool), "moments": {}}
        energetic = {n: o for n, o in ESTIMATORS.items() if o and BASELINES[o["baseline"]].uses_energy}
        for n in GROUPS:
            seen = moments(pool, {name: advantages(o) for name, o in ESTIMATORS.items()}, n, DEALS[n])
            exact = moments(pool, {name: advantages(o) for name, o in energetic.items()}, n, DEALS[n], exact=True)
            seen |= {f"{name}, exact norms": m for name, m in exact.items()}
            figures["moments"][n] = {name: vars(m) for name, m in seen.items()}
        figures["power"] = forward_only_power(pool)
        unfinished = target.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(figures))
        unfinished.rename(target)


def proxy_quality(pool: Pool) -> dict[str, float]:
    """Correlations of the proxy with exact squared norms, over tokens and over completions."""
    mask, node = pool.mask, pool.node.clamp(min=0)
    exact = pool.exact_energy
    of_head = pool.head_norms[node, 0] * mask
    completion = torch.zeros(len(mask), len(pool.gram)).scatter_add_(1, node, mask.float())
    whole = ((completion @ pool.gram) * completion).sum(1)

    def correlation(a, b):
        return torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1].item()

    return {
        "token, LM head's input": correlation(pool.energy[mask], of_head[mask]),
        "token, all parameters": correlation(pool.energy[mask], exact[mask]),
        "completion W_T, sum of token norms": correlation(pool.energy.sum(1), exact.sum(1)),
        "completion W_T, norm of the whole score": correlation(pool.energy.sum(1), whole),
    }


def forward_only_power(pool: Pool, n: int = 8) -> dict[str, float]:
    """Σ w A² per completion, which the trainer logs as `otb/grad_power`, under each estimator."""
    size = len(pool.rewards) // n * n
    rewards, energy, mask = pool.rewards[:size], pool.energy[:size], pool.mask[:size]
    return {
        name: ((advantages(o)(rewards, energy, mask, n) ** 2) * energy).sum().item() / size
        for name, o in ESTIMATORS.items()
    }


@dataclass
class Ratio:
    """
    Noise to signal over that of group_mean, with a 95 % interval by bootstrap over prompts, and the cosine of the
    expected gradient to the true one, with its standard error by the same.
    """

    value: float
    low: float
    high: float
    cosine: float
    cosine_error: float

    def __str__(self):
        return f"{self.value:.2f} ({self.low:.2f}–{self.high:.2f}), {self.cosine:.3f} ± {self.cosine_error:.3f}"


def ratio(of: list[Moments], group_mean: list[Moments], draws: int = 1000) -> Ratio:
    def values(rows):
        ours, theirs = (reduce(add, (m[i] for i in rows)) for m in (of, group_mean))
        return ours.noise_to_signal / theirs.noise_to_signal, ours.cosine

    rng = torch.Generator().manual_seed(0)
    drawn = torch.tensor([values(torch.randint(len(of), (len(of),), generator=rng).tolist()) for _ in range(draws)])
    low, high = drawn[:, 0].quantile(torch.tensor([0.025, 0.975])).tolist()
    value, cosine = values(range(len(of)))
    return Ratio(value, low, high, cosine, drawn[:, 1].std().item())


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's."""
    ranks = [torch.tensor(x).argsort().argsort().double() for x in (a, b)]
    return torch.corrcoef(torch.stack(ranks))[0, 1].item()


def load(folder: Path, parity: int | None) -> list[dict]:
    """The prompts on which rewards vary, among those with an even (0) or odd (1) number, or among all."""
    paths = sorted(folder.glob("*.json"), key=lambda p: int(p.stem))
    figures = [json.loads(p.read_text()) for p in paths if parity is None or int(p.stem) % 2 == parity]
    return [f for f in figures if 0.02 < f["reward"] < 0.98]


def report(settings: list[Setting], output: Path) -> None:
    """Tables as Markdown, and pictures, from what is saved."""
    lines, ratios = [], {}
    for setting in settings:
        # κ of otb_shrunk was chosen on even-numbered prompts of the toy policies
        figures = load(output / setting.name, parity=None if setting.task == "smollm2" else 1)
        if not figures:
            continue
        every = load(output / setting.name, parity=None)
        mean = sum(f["reward"] for f in every) / len(every)
        lines += [f"\n### {setting.name}: {len(figures)} prompts, mean reward {mean:.2f}\n"]
        lines += ["| | " + " | ".join(f"N = {n}" for n in GROUPS) + " |", "|---" * (len(GROUPS) + 1) + "|"]
        names = list(figures[0]["moments"][str(GROUPS[0])])
        of = {(n, name): [Moments(**f["moments"][str(n)][name]) for f in figures] for n in GROUPS for name in names}
        for name in names:
            cells = [ratio(of[n, name], of[n, "group_mean"]) for n in GROUPS]
            ratios[setting.name, name] = cells
            lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    lines += ["\n### The proxy: correlation with exact squared norms, mean over prompts\n"]
    shown = [s for s in settings if any((output / s.name).glob("*.json"))]
    lines += ["| | " + " | ".join(s.name for s in shown) + " |", "|---" * (len(shown) + 1) + "|"]
    every = {s.name: load(output / s.name, parity=None) for s in shown}
    for key in every[shown[0].name][0]["proxy"]:
        means = [sum(f["proxy"][key] for f in every[s.name]) / len(every[s.name]) for s in shown]
        lines.append(f"| {key} | " + " | ".join(f"{m:.2f}" for m in means) + " |")
    lines += [
        "\n### `otb/grad_power` (no forward but the policy's) against the exact E‖ĝ‖², both over group_mean's, N = 8\n"
    ]
    lines += ["| | " + " | ".join(s.name for s in shown) + " |", "|---" * (len(shown) + 1) + "|"]
    over_group_mean = {}
    for s in shown:
        power, exact = (
            {name: sum(value(f, name) for f in every[s.name]) for name in ESTIMATORS}
            for value in (lambda f, name: f["power"][name], lambda f, name: f["moments"]["8"][name]["square"])
        )
        over_group_mean[s.name] = {n: (power[n] / power["group_mean"], exact[n] / exact["group_mean"]) for n in power}
    for name in ESTIMATORS:
        lines.append(
            f"| {name} | " + " | ".join("{:.2f}, {:.2f}".format(*over_group_mean[s.name][name]) for s in shown) + " |"
        )
    ranks = [rank_correlation(*map(list, zip(*over_group_mean[s.name].values(), strict=True))) for s in shown]
    lines.append("| rank correlation of the two | " + " | ".join(f"{r:.2f}" for r in ranks) + " |")
    text = "\n".join(lines) + "\n"
    (output / "tables.md").write_text(text)
    print(text)
    at_shown = {key: cells[GROUPS.index(SHOWN)] for key, cells in ratios.items()}
    plot([s.name for s in shown], at_shown, output / "variance.png")
    print(f"{output}: tables.md and variance.png, beside the data.")


def plot(settings: list[str], ratios: dict[tuple[str, str], Ratio], path: Path) -> None:
    """One line per estimator, one column per setting: noise over the group mean's above, cosine below; N = `SHOWN`."""
    names = list(dict.fromkeys(name for _, name in ratios))[::-1]
    figure = Figure(figsize=(3.4 * len(settings) + 1.5, 7.5), layout="constrained")
    axes = figure.subplots(2, len(settings), squeeze=False, sharey=True, sharex="row")
    for column, setting in enumerate(settings):
        top, bottom = axes[:, column]
        for place, name in enumerate(names):
            cell = ratios[setting, name]
            color = "tab:gray" if name == "group_mean" else "tab:blue" if cell.high < 1 else "0.55"
            color = "tab:red" if cell.low > 1 else color
            top.plot([cell.low, cell.high], [place, place], color=color, alpha=0.5, linewidth=2)
            top.plot(cell.value, place, "o", color=color)
            top.annotate(
                f"{cell.value:.2f}", (cell.value, place), (0, 5), textcoords="offset points", ha="center", fontsize=7
            )
            bottom.errorbar(cell.cosine, place, xerr=1.96 * cell.cosine_error, fmt="o", color="0.3", elinewidth=1.5)
        top.set_title(setting, fontsize=10)
        top.set(xlim=(0, 2.4), xlabel="noise to signal over the group mean's")
        bottom.set(xlim=(0.94, 1.05), xlabel="cosine to the true gradient")
        for axis in (top, bottom):
            axis.axvline(1, color="0.4", linewidth=0.8, linestyle=":")
            axis.set_yticks(range(len(names)), names, fontsize=8)
            axis.set_ylim(-0.6, len(names) - 0.2)
            axis.grid(axis="x", alpha=0.3)
    figure.suptitle(
        f"Noise and bias of the gradient at N = {SHOWN} (blue: less than the group mean, red: more; lines: 95 %)\n"
        "A cosine above 1 is noise of the estimate.",
        fontsize=11,
    )
    figure.savefig(path, dpi=110)


def read_table(text: str, n: int) -> tuple[list[str], dict[tuple[str, str], Ratio]]:
    """The settings and cells of the table for groups of `n` in recipes/studies/variance.md."""
    rows = text.partition(f"N = {n}:\n\n")[2].partition("\n\n")[0].splitlines()
    if not rows:
        raise InputError(f"there is no table for N = {n}.")
    header, _, *rows = ([cell.strip() for cell in row.replace("`", "").strip("|").split("|")] for row in rows)
    ratios = {}
    for name, *cells in rows:
        for setting, cell in zip(header[1:], cells, strict=True):
            value, *rest = (float(number) for number in re.findall(r"[\d.]+", cell))
            # The group mean's own cell is 1, without an interval
            ratios[setting, name] = Ratio(value, *(rest if len(rest) == 4 else [value, value, *rest]))
    return header[1:], ratios


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--only", choices=list(TITLES), help="one task")
    parser.add_argument("--plot_only", action="store_true", help="make tables and pictures from what is saved")
    parser.add_argument("--redraw", action="store_true", help="make the picture from the table of variance.md")
    parser.add_argument("--output_dir", default="runs/studies/variance")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    if args.redraw:
        here = Path(__file__).parent
        return plot(*read_table((here / "variance.md").read_text(), SHOWN), here / "variance.png")
    output = Path(args.output_dir)
    settings = [s for s in SETTINGS if args.only in (None, s.task)]
    if not args.plot_only:
        if any(setting.task == "smollm2" for setting in settings):
            try:
                smollm2()
            except InputError as error:
                parser.error(f"{error}; or leave it out with --only sums and --only calculator")
        for setting in settings:
            collect(setting, output / setting.name)
            analyse(setting, output / setting.name)
    elif not any(output.glob("*/*.json")):
        parser.error(f"nothing is saved under {output} yet: run without --plot_only first")
    report(settings, output)


if __name__ == "__main__":
    main(sys.argv[1:])
