"""The studies from end to end, small; and what their tables are made of."""

import json

import pytest
import torch

from recipes.studies import learning_curves, picture, render, runs, tasks
from recipes.studies.learning_curves import Run, Schedule
from recipes.studies.runs import summary
from tests.recipes.conftest import shortly_trained
from trl_otb.baselines import luck, prefix, squeeze


RATES = learning_curves.TASKS["blocks_columns"].learning_rates


def result(run, rewards, held_out=0.5, policy="aa"):
    """What a run leaves behind; one reward per step."""
    tokens = [100.0 * (i + 1) / len(rewards) for i in range(len(rewards))]
    of = {"reward": rewards, "tokens": tokens, "held_out": held_out, "policy": policy, "release": "1"}
    return {**vars(run), **of}


def save(folder, run, rewards, **others):
    (folder / f"{run.name}.json").write_text(json.dumps(result(run, rewards, **others)))


def test_run_summary_has_curve_and_collapse():
    run = Run("sums", "otb", 4, 1e-3, 1)
    row = summary(result(run, [0.0] * 10 + [1.0] * 10))
    assert row["curve"] == [0.0] * 5 + [1.0] * 5 and runs.score(row) == 0.5
    assert row["tokens"] == 100 and not runs.collapsed(row)
    assert runs.collapsed(summary(result(run, [0.2] * 10 + [0.9] * 10 + [0.0] * 10)))
    assert not runs.collapsed(summary(result(run, [0.2] * 10 + [0.9] * 10 + [0.7] * 10)))


def test_a_part_that_weighs_tokens_alike_keeps_later_luck(registry):
    """Its weights of 1 beside energies are not taken for ratios of the loss, by which luck would not have mean 0."""
    from recipes.studies import value  # which registers baselines

    mask, draws = torch.ones(6, 5), torch.rand(6, 5, generator=torch.Generator().manual_seed(0))
    of_tokens = {"energy": 1 - draws, "logps": draws.log(), "states": torch.zeros(6, 5, 1)}
    batch = squeeze(torch.ones(6), mask, 2, **of_tokens)
    seen = type("Alike", (value.Part,), value.PARTS["value_weights_one"])()._seen(batch)
    assert (seen.loss_energy == 1).all()
    usual, alike = (luck.measured(x.once(prefix.read), x) for x in (batch, seen))
    torch.testing.assert_close(alike, usual)


def test_rates_are_tuned_on_own_seeds(tmp_path, monkeypatch):
    rewards = dict(zip(RATES, (0.1, 0.8, 0.9, 0.2), strict=True))
    tried = []

    def perform(some, folder):
        for run in some:
            tried.append((run.learning_rate, run.seed))
            # The best of the first round was lucky
            save(folder, run, [rewards[run.learning_rate] - 0.3 * (run.seed > 102 and run.learning_rate == RATES[2])])

    monkeypatch.setattr(learning_curves, "perform", perform)
    assert learning_curves.tune("blocks_columns", [(4, "otb")], tmp_path) == {(4, "otb"): RATES[1]}
    assert {seed for rate, seed in tried if rate in (RATES[0], RATES[3])} == {101, 102}
    assert {seed for rate, seed in tried if rate in RATES[1:3]} == {101, 102, 103, 104, 105}
    # With two seeds and no more, luck decides
    assert learning_curves.tune("blocks_columns", [(8, "otb")], tmp_path, by=2) == {(8, "otb"): RATES[2]}


def rows_of(scores, seeds=(101, 102, 103, 104, 105, 1, 2, 3, 4), rate=1e-3, **others):
    """Summaries of runs of each baseline; `scores` by seed."""
    made = [(Run("sums", name, 4, rate, seed), [of(seed)] * 10) for name, of in scores.items() for seed in seeds]
    return [summary(result(run, rewards, **others)) for run, rewards in made]


def test_arms_are_compared_by_seed_pairs():
    scores = {"otb": lambda seed: 0.1 * (seed % 10) + 0.02, "group_mean": lambda seed: 0.1 * (seed % 10)}
    mean, otb = runs.arms(rows_of(scores))
    assert (mean["baseline"], otb["baseline"], otb["seeds"], otb["won"]) == ("group_mean", "otb", 4, "4 of 4")
    assert otb["minus_group_mean"] == pytest.approx([0.02] * 3) and otb["over_the_run"][0] == pytest.approx(0.27)
    assert mean["minus_group_mean"] == pytest.approx([0.1] * 3) and mean["won"] == "2 of 2"  # 2 over 1, 4 over 3
    assert otb["rates"]["0.001"]["seeds"] == 5 and otb["held_out"] == [50.0] * 3 and otb["collapsed"] == 0


def test_arms_have_one_policy_and_rate():
    scores = {"group_mean": lambda seed: 0.5, "otb": lambda seed: 0.6}
    rows = rows_of(scores) + rows_of({"otb": lambda seed: 0.1}, rate=2e-3)
    (_, otb) = runs.arms(rows)
    assert otb["learning_rate"] == 1e-3 and otb["seeds"] == 4 and otb["over_the_run"][0] == pytest.approx(0.6)
    assert set(otb["rates"]) == {"0.001", "0.002"}
    strangers = rows_of({"group_mean": scores["group_mean"]}) + rows_of({"otb": scores["otb"]}, policy="bb")
    assert runs.arms(strangers)[1]["won"] is None
    equal_once = rows_of(scores | {"otb": lambda seed: 0.5 if seed == 2 else 0.6})
    assert runs.arms(equal_once)[1]["won"] == "3 of 3"


def test_runs_are_published_beside_earlier_ones(tmp_path, monkeypatch, registry):
    """In the place of the same runs; the page and the picture follow."""
    for name, value in {"PAGES": ("value",), "PICTURED": ("calculator",)}.items():
        monkeypatch.setattr(render, name, value)
    monkeypatch.setattr(render, "HERE", tmp_path)
    (tmp_path / "results").mkdir()
    other = summary(result(Run("sums", "otb", 4, 1e-3, 1), [0.5] * 10))
    before = summary(result(Run("calculator", "otb", 4, 1e-3, 1), [0.9] * 10))
    render.save("runs", {"runs": [other, before]})
    (tmp_path / "value.md").write_text("Before.\n\n<!-- runs: calculator -->\n\nAfter.\n")
    for name, reward in (("group_mean", 0.5), ("otb", 0.6)):
        for seed in (101, 102, 103, 104, 105, 1, 2):
            save(tmp_path, Run("calculator", name, 4, 1e-3, seed), [reward] * 10)
    flags = ["--task", "calculator", "--plot_only", "--output_dir", str(tmp_path)]
    learning_curves.main([*flags, "--publish"])
    page = (tmp_path / "value.md").read_text()
    assert page.startswith("Before.\n") and page.endswith("After.\n")
    (row,) = [line for line in page.splitlines() if line.startswith("| toy calculator | 4 | otb |")]
    assert "0.100 (0.100–0.100)" in row and "2 of 2" in row and "0.9" not in row
    published = render.load("runs")["runs"]
    assert other in published and before not in published and len(published) == 1 + 14
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("learning", "default"))


def test_tokens_saved_are_of_pairs(monkeypatch):
    """Of each arm beside the group mean with N = 4."""
    slow, fast = [i / 40 for i in range(40)], [min(i / 20, 1.0) for i in range(40)]
    arms = [("group_mean", 4, slow), ("value", 4, fast), ("value", 1, slow)]
    of = [(Run("sums", name, n, 1e-3, seed), rewards) for name, n, rewards in arms for seed in (1, 2, 101)]
    rows = [summary(result(run, rewards)) for run, rewards in of] + rows_of({"value": lambda seed: 0.9}, policy="bb")
    single, grouped = runs.tokens_saved(rows)
    assert (single["n"], grouped["n"], grouped["pairs"]) == (1, 4, 2)
    assert single["sooner"] == [0, 0, 0] and grouped["sooner"] == [2, 2, 2]
    assert [of[0] for of in single["changes"]] == pytest.approx([0.0] * 3)
    assert all(-0.6 < of[0] < -0.3 for of in grouped["changes"])  # twice as fast, in moving means
    monkeypatch.setattr(render, "runs_of", lambda task: rows)
    first, second = render.of_saved("lake_6").splitlines()[2:]
    assert first.startswith("| game of 6 turns | value, N = 1 | 0.04 → 0.94 | +0 (+0 to +0) |")
    assert "| value | 0.04" in second


def test_rates_and_signal_of_runs(monkeypatch):
    """The mean of the seeds that chose a rate; with 16 prompts per step, medians of 16 over the noise scale."""
    tuned = [("value", 1e-3, 0.5), ("value", 2e-3, 0.25), ("dr_grpo", 1e-3, 0.5)]
    rows = [summary(result(Run("t", name, 4, rate, 101), [of] * 10)) for name, rate, of in tuned]
    compared = [result(Run("t", "value", 4, 1e-3, seed), [0.5] * 3) for seed in (1, 2)]
    rows += [summary(of | {"noise_scale": [32.0, None, 16.0 * of["seed"]]}) for of in compared]
    monkeypatch.setattr(render, "runs_of", lambda task: rows)
    monkeypatch.setattr(render, "PREDICTED", {"t": ("", 16, 3)})
    assert render.of_rates("t").splitlines()[0] == "| task | baseline | N | 0.001 | 0.002 |"
    assert render.of_rates("t").splitlines()[2:] == [
        "| t | value | 4 | 0.500 | 0.250 |",
        "| t | Dr. GRPO | 4 | 0.500 | – |",
    ]
    assert render.of_signal("t").splitlines()[2:] == ["| t | value | 0.50 | 0.00 | 0.75 |"]


@pytest.mark.slow
def test_learning_curves(tmp_path, monkeypatch, capsys, registry):
    schedule = Schedule({4: 4}, (4e-4,), prompts=8, problems="calculator")
    monkeypatch.setattr(learning_curves, "TASKS", {"calculator_8": schedule})
    trainers, make = [], tasks.trainer_of
    monkeypatch.setattr(tasks, "trainer_of", lambda *args, **of: trainers.append(make(*args, **of)) or trainers[-1])
    flags = ["--task", "calculator_8", "--baselines", "group_mean", "value", "--seeds", "1"]
    folder = tmp_path / "runs"
    learning_curves.main([*flags, "--output_dir", str(folder)])
    assert len(list(folder.glob("*.json"))) == 2  # of a single learning rate nothing is tuned
    for trainer in trainers:
        assert trainer.args.lr_scheduler_type == "constant_with_warmup" and trainer.tools
        assert trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps == 8 * 4
    table = (folder / "tables.md").read_text()
    assert "| 4 | group_mean | 0.0004 | 1 |" in table and "| 4 | value | 0.0004 | 1 |" in table
    assert (folder / "learning.png").stat().st_size > 10_000
    capsys.readouterr()
    learning_curves.main([*flags, "--output_dir", str(folder)])
    assert "held-out" not in capsys.readouterr().out.split("| N |")[0]  # nothing is trained again


def attempt(text, reward, advantages):
    return {
        "tokens": [*text],
        "reward": reward,
        "advantage": advantages,
        "push": advantages,
        "energy": [1.0] * len(text),
    }


def test_blame_is_of_the_first_wrong_digit(monkeypatch):
    right = attempt("a021b015", 1.0, [0.0] * 8)  # 7 + 4 = 11, 11 + 4 = 15
    assert picture.mistake("7+4*03=", right) is None
    wrong = attempt("a021!1b016c000", 0.0, [*[-0.2] * 9, -0.7, *[-0.1] * 4])
    assert picture.mistake("7+4*03=", wrong) == 9
    monkeypatch.setattr(picture, "sample", lambda *args, **sizes: range(picture.SIZE))
    monkeypatch.setattr(picture, "group_data", lambda *args: {"prompt": "7+4*03=", "completions": [right, wrong]})
    said = picture.blame("value")
    assert said == "1 of 1, baseline 0.70; failed attempts have 60% of the energy of answers"


def test_learning_study_counts_tokens_and_rewards(tmp_path, monkeypatch):
    policy = shortly_trained("sums", 5, tmp_path / "sums")
    monkeypatch.setattr(learning_curves.tasks.toy, "sums", lambda: policy)
    schedule = Schedule({4: 3}, (4e-4,), prompts=2, problems="sums", staleness=1)
    monkeypatch.setattr(learning_curves, "TASKS", {"asynchronous": schedule})
    found = learning_curves.train(Run("asynchronous", "value", 4, 4e-4, 1))
    assert len(found["reward"]) == 3 and 0 <= found["held_out"] <= 1
    assert 3 * 8 <= found["tokens"][-1] <= 3 * 8 * 24 and found["tokens"] == sorted(found["tokens"])
