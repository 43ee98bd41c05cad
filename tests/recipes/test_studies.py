"""The studies and benchmarks from end to end, small; and what their tables are made of."""

import json
import random
import runpy
import sys

import pytest

from recipes.common.errors import InputError
from recipes.studies import learning_curves, picture, render
from recipes.studies.learning_curves import Run, Schedule, best_rates, collapsed, estimate, tokens_to


def result(run, reward, held_out=0.5):
    steps = len(reward)
    values = {"reward": reward, **dict.fromkeys(("grad_norm", "grad_power", "entropy"), [1.0] * steps)}
    return {
        **vars(run),
        **values,
        "tokens": [100.0 * (i + 1) for i in range(steps)],
        "noise_scale": [None] * steps,
        "held_out": held_out,
        "seconds": 1.0,
    }


def test_tokens_to_a_threshold_and_collapse():
    run = Run("sums", "otb", 4, 1e-3, 1)
    assert tokens_to(result(run, [0.0] * 4 + [1.0] * 6), 0.6) == 700  # three of five steps are 1 at the seventh
    assert tokens_to(result(run, [0.0] * 10), 0.6) is None
    assert tokens_to(result(run, [1.0] + [0.0] * 9), 0.6) is None  # one lucky step is no mean over five
    assert collapsed(result(run, [0.2] * 10 + [0.9] * 10 + [0.0] * 10))
    assert not collapsed(result(run, [0.2] * 10 + [0.9] * 20))


def test_learning_rates_are_halved_on_seeds_of_their_own(tmp_path):
    rates = learning_curves.TASKS["sums"].learning_rates
    first, both = learning_curves.TUNING_SEEDS
    arm = tmp_path, "sums", 4, "otb"

    def save(rate, seed, reward):
        run = Run("sums", "otb", 4, rate, seed)
        (tmp_path / f"{run.name}.json").write_text(json.dumps(result(run, [reward] * 10)))

    for rate, reward in zip(rates, (0.1, 0.8, 0.9, 0.2), strict=True):
        for seed in first:
            assert best_rates(*arm, rounds=1) is None  # not before all are there
            save(rate, seed, reward)
    assert sorted(best_rates(*arm, rounds=1)) == sorted(rates[1:3])
    for rate, reward in zip(rates[1:3], (0.8, 0.7), strict=True):  # the first round's best was lucky
        for seed in set(both) - set(first):
            assert best_rates(*arm) is None
            save(rate, seed, reward)
    assert best_rates(*arm) == [rates[1]]


def test_the_seeds_that_tune_are_not_those_that_are_compared(capsys):
    with pytest.raises(SystemExit):
        learning_curves.main(["--seeds", str(min(learning_curves.TUNING_SEEDS[0]))])
    assert "--seeds is 101: give 1 to 100" in capsys.readouterr().err


def save_runs(folder, scores, seeds=8):
    """Runs on sums at 1e-3, those that tune and the others, whose rewards are these scores and a little more."""
    for name, score in scores.items():
        for seed in (*learning_curves.TUNING_SEEDS[-1], *range(1, seeds + 1)):
            run = Run("sums", name, 4, 1e-3, seed)
            rewards = [score + 0.002 * (seed % 4)] * 10
            (folder / f"{run.name}.json").write_text(json.dumps(result(run, rewards)))


def test_arms_are_compared_on_their_scores_and_the_group_mean_with_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(learning_curves, "TASKS", {"sums": Schedule({4: 10}, (1e-3,), 0.5)})
    monkeypatch.setattr(learning_curves, "DRAWS", 200)
    save_runs(tmp_path, {"group_mean": 0.5, "otb": 0.6, "opo": 0.4})
    learning_curves.report(tmp_path)
    table = (tmp_path / "tables.md").read_text()
    rows = {line.split(" | ")[1]: line.split(" | ") for line in table.splitlines() if line.startswith("| 4")}
    compared = [line for line in table.splitlines() if line.startswith("| 4 | otb | 8 | 0.6")]
    assert len(compared) == 1 and "0.100" in compared[0] and compared[0].endswith("1.00 (1.00–1.00) |")
    (itself,) = [line for name, line in rows.items() if "beside the earlier" in name]
    assert itself[2] == "4" and itself[6].startswith("0.50 (")
    learning_curves.report(tmp_path, 1e-3)
    at_rate = (tmp_path / "tables-lr0.001.md").read_text()
    assert at_rate.replace(" at 0.001:", ":") == table.split("\ntuning")[0]
    learning_curves.report(tmp_path, 2e-3)  # which nobody ran at
    assert (tmp_path / "tables-lr0.002.md").read_text() == ""
    assert any(line.startswith("| 4 | opo | 8 | 0.4") and "0.00 (0.00–0.00) |" in line for line in table.splitlines())


def test_tables_of_arms_are_published_where_nothing_is_lost(tmp_path, monkeypatch, capsys):
    """In the place of the same tables; the page follows."""
    monkeypatch.setattr(learning_curves, "TASKS", {"sums": Schedule({4: 10}, (1e-3,), 0.5)})
    monkeypatch.setattr(learning_curves, "DRAWS", 200)
    monkeypatch.setattr(render, "HERE", tmp_path)
    monkeypatch.setattr(render, "PAGES", ("learning_curves",))
    monkeypatch.setattr(render, "PICTURES", {})
    arms = [{"n": 4, "baseline": "group_mean", "seeds": 1}, {"n": 4, "baseline": "otb", "seeds": 1}]
    titles = ("outcomes, sums", "scores, sums", "tuning, sums", "outcomes, calculator")
    later = {"n": 4, "baseline": "group_mean, later half of the seeds beside the earlier"}
    (tmp_path / "results").mkdir()
    render.save("learning_curves", {"tables": {t: [later] if "scores" in t else arms for t in titles}})
    lines = [f"<!-- learning_curves.json: {title} -->\n\n" for title in titles]
    (tmp_path / "learning_curves.md").write_text("Before.\n\n" + "\n".join(lines) + "\nAfter.\n")
    save_runs(tmp_path, {"group_mean": 0.5, "otb": 0.6})
    flags = ["--task", "sums", "--plot_only", "--publish", "--sizes", "4", "--output_dir", str(tmp_path)]
    learning_curves.main(flags)
    page = (tmp_path / "learning_curves.md").read_text()
    assert page.startswith("Before.\n") and page.endswith("After.\n")
    assert "| 4 | otb | 0.001 | 8 |" in page and "| 4 | otb | 8 | 0.603" in page and "| 4 | otb | 0.603 (5) |" in page
    assert render.load("learning_curves")["tables"]["outcomes, calculator"] == arms
    for run in tmp_path.glob("sums-otb*"):
        run.unlink()
    with pytest.raises(SystemExit):
        learning_curves.main(flags)
    assert "has otb for outcomes, sums, which was not measured now" in capsys.readouterr().err
    with pytest.raises(InputError, match="no column outcomes, lakes, only outcomes, sums, scores"):
        render.publish("learning_curves", {"outcomes, lakes": []})


def test_tasks_and_sizes_stand_side_by_side(tmp_path, monkeypatch):
    task = Schedule({4: 10, 8: 10}, (1e-3,), 0.5)
    monkeypatch.setattr(learning_curves, "TASKS", {"sums": task, "calculator": task})
    sizes = []
    for name, n in (("sums", 4), ("calculator", 4), ("calculator", 8)):
        run = Run(name, "otb", n, 1e-3, 1)
        (tmp_path / f"{run.name}.json").write_text(json.dumps(result(run, [0.5] * 10)))
        learning_curves.report(tmp_path, 1e-3)
        (picture,) = tmp_path.glob("*.png")
        assert picture.name == "learning_curves-lr0.001.png"
        sizes.append(picture.stat().st_size)
    assert 10_000 < sizes[0] < sizes[1] < sizes[2]


def test_statistics_over_seeds_by_hand(monkeypatch):
    monkeypatch.setattr(learning_curves, "DRAWS", 200)
    ours, theirs = [1.0, 2.0, 3.0, 100.0], [0.0, 2.0, 2.0, 4.0]
    assert estimate(learning_curves.interquartile_mean, ours)[0] == 2.5
    # 1, 2, 3 and 100 against 0, 2, 2, 4 win 1, 1 + 2/2, 3 and 4 of 16
    value, low, high = estimate(learning_curves.probability_of_improvement, ours, theirs)
    assert value == (1 + 2 + 3 + 4) / 16 and low <= value <= high
    assert estimate(learning_curves.difference, [1.0] * 5, [0.25] * 5) == [0.75, 0.75, 0.75]
    assert estimate(learning_curves.difference, [1.0], [0.25] * 5) == [0.75, None, None]


def test_an_interval_covers_as_often_as_it_says(monkeypatch):
    monkeypatch.setattr(learning_curves, "DRAWS", 200)
    rng = random.Random(0)
    covered = 0
    for _ in range(60):
        scores = [rng.gauss(1, 1) for _ in range(20)]
        low, high = estimate(learning_curves.interquartile_mean, scores)[1:]
        covered += low <= 1 <= high
    assert covered >= 50


@pytest.mark.slow
def test_learning_curves(tmp_path, monkeypatch, capsys):
    task = Schedule({4: 4, 8: 4, 32: 4}, (4e-4,), 0.1)
    monkeypatch.setattr(learning_curves, "TASKS", {"calculator": task})
    monkeypatch.setattr(learning_curves, "TUNING_SEEDS", ((101,), (101, 102)))
    runs, flags = tmp_path / "runs", ["--sizes", "4", "--baselines", "group_mean", "otb", "none", "--seeds", "1"]
    learning_curves.main([*flags, "--output_dir", str(runs)])
    assert len(list(runs.glob("*.json"))) == 9
    table = (runs / "tables.md").read_text()
    assert "| 4 | otb | 0.0004 | 1 |" in table and "| 4 | none | 0.0004 | 1 |" in table
    assert (runs / "learning_curves.png").stat().st_size > 10_000
    capsys.readouterr()
    learning_curves.main([*flags, "--output_dir", str(runs)])
    assert "held-out" not in capsys.readouterr().out.split("outcomes")[0]  # nothing is trained again


@pytest.mark.slow
def test_the_picture_of_the_readme(tmp_path, monkeypatch):
    """On a shorter task: what is drawn is under `value`, which has learnt from other problems than the one drawn."""
    for name, value in {"TASK": "scratchpad_10", "PROBLEM": "7+4*02", "BATCHES": 3}.items():
        monkeypatch.setattr(picture, name, value)
    rollout = picture.sample(4)
    assert len(rollout) == 4 and rollout.mask.sum() > 20
    assert (rollout.baselines - rollout.base)[rollout.mask.bool()].abs().max() > 0
    rollout.plot(tmp_path / "group.png")
    assert (tmp_path / "group.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "flags", "said"),
    [
        ("step", "--rounds 1 --steps 2 --length 8 --lora", "16.000"),  # forwards are counted under an adapter too
        ("step", "--meter --rounds 1 --steps 2 --length 8", "meter forwards"),
        ("advantages", "--repeats 1 --longest 2048", "1024 × 2048"),
    ],
)
def test_benchmarks_run(script, flags, said, monkeypatch, capsys):
    """In this process, which has imported what takes longest."""
    monkeypatch.setattr(sys, "argv", [script, *flags.split()])
    runpy.run_module(f"recipes.benchmarks.{script}", run_name="__main__")
    assert said in capsys.readouterr().out
