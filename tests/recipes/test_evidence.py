"""The studies on gradient_noise: scratchpad, lake, the language model's tasks, candidates, shrinkage, reports."""

import math
import random
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from recipes.gradient_noise.__main__ import check_plot_only
from recipes.gradient_noise.measure import Estimate

from recipes import toy
from recipes.common.errors import InputError
from recipes.studies import horizon, language, pages, shrinkage, variance
from recipes.toy import lake, scratchpad
from tests.recipes.conftest import shortly_trained
from trl_otb import OTBGRPOConfig
from trl_otb.baselines import compute_advantages


# The scratchpad


@pytest.mark.parametrize("tokens", scratchpad.STEPS)
def test_demonstrations_are_as_long_and_as_right_as_is_said(tokens):
    shown = scratchpad.demonstrations(800, tokens)
    answers = {problem["question"]: problem["answer"] for problem in scratchpad.problems(scratchpad.STEPS[tokens])}
    said = [said.removesuffix("<eos>") for (_, _), (said, _) in shown]
    assert sum(map(len, said)) / len(said) == pytest.approx(tokens, rel=0.1)
    right = scratchpad.last_digit(said, [answers[question.removesuffix("=")] for (question, _), _ in shown])
    # Slips cancel now and then; three standard errors are 5 points
    assert sum(right) / len(right) == pytest.approx(scratchpad.RIGHT + 0.02, abs=0.06)
    assert set("".join(said)) <= set(scratchpad.ALPHABET)


def test_the_scratchpads_answer_is_the_digit_after_the_counters_end():
    said = ["a017b000", "a017b000!0", "a017b001", "a017", "", [{"role": "assistant", "content": "c000"}]]
    assert scratchpad.last_digit(said, ["0"] * 6) == [1, 1, 0, 0, 0, 1]
    (problem,) = [p for p in scratchpad.problems(2) if p["question"] == "4+3*02"]
    assert problem["answer"] == "0"


# The lake


LAKE = ["SFH", "HFF", "FFG"]


def game_of(moves, lake_rows=LAKE):
    """The messages of a game, and the question it answers."""
    game = lake.Lake()
    game.reset(lake=" ".join(lake_rows))
    messages = []
    for move in moves:
        messages.append({"role": "assistant", "tool_calls": [{"function": {"name": "move"}}]})
        messages.append({"role": "tool", "content": game.move(move)})
    return [*messages, {"role": "assistant", "content": "="}], f"lake 1: {lake.seen(lake_rows, 0, 0)}"


def test_what_is_seen_on_the_lake():
    assert lake.seen(LAKE, 0, 0) == "0202XO.X"  # left the shore, below a hole, right ice, above the shore
    assert lake.seen(LAKE, 1, 1) == "0101O..."
    assert (lake.seen(LAKE, 2, 2), lake.seen(LAKE, 0, 2)) == ("*", "O")


def test_games_and_their_rewards():
    won, asked = game_of("RDRD")
    told = [message["content"] for message in won if message["role"] == "tool"]
    assert told == ["0102..OX", "0101O...", "0001..XO", "*"]
    games = [won, game_of("RR")[0], game_of("RDUL")[0]]
    assert lake.won(games) == [1, 0, 0]
    of_turns = [[0.25, 0.25, 0.25, 0.25, 0], [0.25, -1, 0], [0.25, 0.25, -0.25, -0.25, 0]]
    assert lake.progress(games, [asked] * 3) == of_turns


def test_a_move_that_cannot_be_made_is_an_error():
    game = lake.Lake()
    game.reset(lake=" ".join(LAKE))
    with pytest.raises(ValueError, match="'X', none of L, D, R and U"):
        game.move("X")
    game.move("D")
    with pytest.raises(ValueError, match="the game is over"):
        game.move("R")
    with pytest.raises(ValueError, match="the game is over"):
        lake.Lake().move("R")


@pytest.mark.parametrize("turns", lake.SIDES)
def test_demonstrated_games_are_the_games_of_the_lake(turns):
    """What the pupil is shown is what gymnasium's lake does, and it wins as often, in as many turns, as is said."""
    levels, shown = {}, lake.demonstrations(300, turns)
    for side, seed in ((lake.SIDES[turns], seed) for seed in range(20)):
        rows = levels[seed] = lake.level(side, seed)
        assert rows[0][0] == "S" and rows[-1][-1] == "G" and len(rows) == side
    rng = random.Random(1)
    for rows in levels.values():
        segments = lake._demonstration(rows, 0.1, 2 * turns, rng)
        moves = [said[1] for said, by_policy in segments if by_policy and said[0] == "["]
        messages, _ = game_of(moves, rows)
        told = [m["content"] for m in messages if m["role"] == "tool"]
        written = [text[1:-2] for text, by_policy in segments[1:] if not by_policy]
        assert told[: len(written)] == written
    games = ["".join(text for text, _ in segments) for segments in shown]
    won = [text for text in games if "{*}" in text]
    assert len(won) / len(games) == pytest.approx(lake.RIGHT, abs=0.09)
    assert sum(text.count("[") for text in won) / len(won) == pytest.approx(turns, rel=0.2)
    assert set("".join(games).replace("<eos>", "")) <= set(lake.ALPHABET)


# Shrinkage


def test_means_of_the_others_by_weights():
    returns, weights = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[1.0, 3.0, 1.0]])
    expected = torch.tensor([[10 / 4, 5 / 2, 7 / 4]])
    torch.testing.assert_close(shrinkage.left_one_out(returns, weights), expected)


@pytest.mark.slow
def test_the_shrinkage_study(tmp_path, monkeypatch, capsys):
    """Left out or shrunk, every estimator keeps the expectation; and the study goes on where it was."""
    folder = shortly_trained("scratchpad_10", 60, tmp_path / "policy")
    monkeypatch.setattr(toy, "scratchpad_10", lambda: folder)
    monkeypatch.setattr(horizon, "PROMPTS", 4)
    monkeypatch.setitem(horizon.TASKS, "10", (64, []))
    shrinkage.main(["--tasks", "10", "--output_dir", str(tmp_path / "study")])
    table = (tmp_path / "study" / "tables.md").read_text()
    without_bias, *with_factors = table.split("With a factor")
    assert without_bias.count("| `otb, pooled` |") == 3 and "?" not in without_bias and "nan" not in table
    assert len(with_factors) == 3 and "| `ogb, pooled × T^−½` |" in with_factors[0]
    pools = [torch.load(path, weights_only=True) for path in sorted((tmp_path / "study" / "10").glob("prompt-*.pt"))]
    found = shrinkage.moments(pools, 4, prompts_per_batch=4)
    for prompt in found:
        plain, unscaled = prompt["mean, one left out", 4], prompt["group_mean", 4]
        torch.testing.assert_close(plain["mean"], unscaled["mean"] * 4 / 3, atol=1e-4, rtol=1e-3)
        assert plain["square"] == pytest.approx(unscaled["square"] * 16 / 9, rel=1e-3)
    before = capsys.readouterr()
    shrinkage.main(["--tasks", "10", "--output_dir", str(tmp_path / "study")])
    assert "all 4 prompts are there" in capsys.readouterr().out and before


# Tasks of the language model


def test_rewards_of_the_language_model():
    said = ["A Silver fish.", [{"role": "assistant", "content": "nothing"}]]
    assert language.has_word(said, ["silver", "silver"]) == [1, 0]
    # Of three and four words two are shared in order: 2 · 2 / 7
    assert language.likeness(["one two three", "a b"], ["one two four five", "a b"]) == [pytest.approx(4 / 7), 1]


@pytest.mark.parametrize("flags", [["--num_prompts", "8"], ["--plot_only"]], ids=["measure", "redraw"])
def test_the_study_of_the_language_model_runs_the_tool(flags, tmp_path, monkeypatch):
    """With the task's data, and to redraw with the folder alone, which is all that the tool takes then."""
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(
        subprocess, "run", lambda command, **kw: asked.append(command) or SimpleNamespace(returncode=0)
    )
    with pytest.raises(SystemExit, match="0"):
        language.main(["copy", *flags])
    (command,) = asked
    assert command[1:3] == ["-m", "recipes.gradient_noise"]
    if "--plot_only" in flags:
        assert command[3:] == ["--output_dir", "runs/studies/language/copy-start", "--plot_only"]
        check_plot_only(command[3:])
    else:
        assert command[-2:] == flags and "recipes.studies.language:likeness" in command
        data = Path(command[command.index("--dataset_name") + 1])
        assert len(data.read_text().splitlines()) == 500


@pytest.mark.parametrize("task", language.TASKS)
def test_problems_of_the_language_model_differ(task):
    found = language.problems(task, 200, seed=1)
    assert len({problem["question"] for problem in found}) == 200
    assert all(problem["answer"] in problem["question"] for problem in found)
    assert found == language.problems(task, 200, seed=1) != language.problems(task, 200, seed=2)


# Candidates


def by_hand(name, returns, energy, i):
    """The advantage of completion `i`, or its tokens', from lists."""
    n, total = len(returns), [sum(e) for e in energy]
    kept = 1 - total[i] / sum(total)
    others = [j for j in range(n) if j != i]
    mean = sum(returns[j] for j in others) / (n - 1)
    by_energy = sum(total[j] * returns[j] for j in others) / sum(total[j] for j in others)
    sizes = []
    for k in range(n):
        rest = [j for j in range(n) if j != k]
        prediction = sum(total[j] * returns[j] for j in rest) / sum(total[j] for j in rest)
        sizes.append(total[k] ** 0.5 * abs(returns[k] - prediction))
    return {
        "damped_mean": kept * (returns[i] - mean),
        "damped_return": kept * returns[i],
        "damped_twice": kept**2 * (returns[i] - by_energy),
        "inverse_energy": (returns[i] - by_energy) / (1 + total[i]),
        "inverse_energy_mean": (returns[i] - mean) / (1 + total[i]),
        "inverse_relative": (returns[i] - by_energy) / (1 + total[i] * n / sum(total)),
        "token_damped": [(1 - w / 2) ** 2 * (returns[i] - by_energy) for w in energy[i]],
        "clipped": (returns[i] - by_energy) * min(1, sorted(sizes)[(n - 1) // 2] / sizes[i]),
        "inverse_root_length": (returns[i] - mean) / len(energy[i]) ** 0.5,
    }[name]


def test_candidates_by_hand(registered):
    rng = random.Random(0)
    returns = [rng.random() for _ in range(4)]
    energy = [[rng.random() for _ in range(length)] for length in (3, 6, 2, 5)]
    mask = torch.tensor([[1] * len(e) + [0] * (6 - len(e)) for e in energy])
    padded = torch.tensor([e + [0.0] * (6 - len(e)) for e in energy])
    for name in registered:
        advantages = compute_advantages(torch.tensor(returns), padded, mask, 4, baseline=name)
        for i, tokens in enumerate(energy):
            expected = torch.tensor(by_hand(name, returns, energy, i)).expand(len(tokens))
            torch.testing.assert_close(advantages[i, : len(tokens)], expected, msg=name)


def test_a_candidate_takes_no_leave_one_out(registered):
    with pytest.raises(ValueError, match="'inverse_energy', which leaves one out by itself"):
        OTBGRPOConfig(baseline="inverse_energy", leave_one_out=True, use_cpu=True, bf16=False)
    assert OTBGRPOConfig(baseline="inverse_energy", use_cpu=True, bf16=False).baseline == "inverse_energy"


# Reports


@pytest.mark.slow
def test_the_horizon_study_can_be_stopped_and_redrawn(tmp_path, monkeypatch, registered, capsys):
    folder = shortly_trained("scratchpad_10", 40, tmp_path / "policy")
    monkeypatch.setattr(toy, "scratchpad_10", lambda: folder)
    family = replace(
        horizon.FAMILIES["tokens"], tasks=["10"], groups=(4, 8), baselines=("ogb", "otb", *registered),
        columns={"N = 4": (4, {10: "10"})}, page=str(tmp_path / "page.md"),
    )  # fmt: skip
    monkeypatch.setattr(horizon, "FAMILIES", {"tokens": family})
    monkeypatch.setattr(horizon, "PROMPTS", 3)
    monkeypatch.setitem(horizon.TASKS, "10", (32, []))
    panels = {"all": ("none", "ogb", "ogb, one left out", "otb", "inverse_energy")}
    monkeypatch.setattr(horizon, "PANELS", panels)
    horizon.main(["--output_dir", str(tmp_path / "study")])
    table = (tmp_path / "study" / "tables.md").read_text()
    assert "N = 8:" in table and table.count("| `token_damped` |") == 2 and "T = 10" in table
    assert not re.search("inverse_energy, one left out", table)
    (tmp_path / "study" / "horizon.png").unlink()
    horizon.main(["--output_dir", str(tmp_path / "study"), "--plot_only"])
    assert (tmp_path / "study" / "horizon.png").stat().st_size > 10_000
    horizon.main(["--output_dir", str(tmp_path / "study"), "--num_prompts", "4"])
    table = (tmp_path / "study" / "tables.md").read_text()
    assert "T = 10 (n = 4)" in table
    (tmp_path / "page.md").write_text(f"# A page\n\n{table.replace('(n = 4)', '(n = 3)')}")
    horizon.main(["--output_dir", str(tmp_path / "study"), "--plot_only", "--publish"])
    assert (tmp_path / "page.md").read_text() == f"# A page\n\n{table}"
    assert (tmp_path / "page.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_study_of_turns(tmp_path, monkeypatch, registered):
    folder = shortly_trained("lake_6", 150, tmp_path / "policy")
    monkeypatch.setattr(toy, "lake_6", lambda: folder)
    monkeypatch.setattr(horizon, "PROMPTS", 3)
    for task in ("lake_6", "lake_6_turns"):
        monkeypatch.setitem(horizon.TASKS, task, (32, []))
    flags = ["--family", "turns", "--tasks", "lake_6", "lake_6_turns", "--output_dir", str(tmp_path / "study")]
    horizon.main(flags)
    assert (tmp_path / "study" / "horizon.png").stat().st_size > 10_000
    of_turns = [torch.load(p, weights_only=True) for p in (tmp_path / "study" / "lake_6_turns").glob("prompt-*.pt")]
    assert all(prompt["varies"] for prompt in of_turns)


@pytest.mark.parametrize("study", [horizon, shrinkage], ids=["horizon", "shrinkage"])
def test_nothing_to_plot_is_said(study, tmp_path, capsys):
    with pytest.raises(SystemExit):
        study.main(["--plot_only", "--output_dir", str(tmp_path)])
    assert "nothing is saved" in capsys.readouterr().err


def test_a_task_of_another_family_is_refused(capsys):
    with pytest.raises(SystemExit):
        horizon.main(["--family", "turns", "--tasks", "10"])
    assert "10 is not in the family turns, which has lake_6" in capsys.readouterr().err


def test_another_seed_is_not_published(capsys):
    with pytest.raises(SystemExit):
        horizon.main(["--publish", "--seed", "1"])
    assert "--publish is for the seed of the page, 0" in capsys.readouterr().err


def test_a_column_that_is_measured_anew_takes_the_place_of_the_published_one(tmp_path):
    """The others stay as they are, to the digit, and what is lost in noise stays lost."""
    here = Path(horizon.__file__).parent
    for name in ("horizon.md", "turns.md"):
        (tmp_path / name).write_text((here / name).read_text())
        group_sizes = next(f.groups for f in horizon.FAMILIES.values() if f.page == name)
        pages.publish(tmp_path / name, {}, group_sizes)
        assert (tmp_path / name).read_text() == (here / name).read_text()
    page = tmp_path / "turns.md"
    before = pages.read_tables(page.read_text())
    assert before["lake_14"].cells["otb", 4].efficiency.value > 0
    lost = Estimate(math.nan, 0.5, math.inf)
    again = replace(before["lake_14"].cells["otb", 4], efficiency=lost, cosine=math.nan)
    cells = before["lake_14"].cells | {("otb", 4): again, ("newest", 4): again}
    columns = pages.publish(page, {"lake_14": pages.Column(65, cells)}, (4, 8))
    found = pages.read_tables(page.read_text())
    assert page.read_text().startswith((here / "turns.md").read_text().partition("N = 4")[0])
    assert found["lake_14"].prompts == 65 and found["lake_14"].cells.keys() == cells.keys()
    said = found["lake_14"].cells["otb", 4].text()
    assert said.startswith("? (0.50–?); ") and said.endswith("; ?")
    assert found["lake_30"] == before["lake_30"] == columns["lake_30"]
    with pytest.raises(InputError, match="no column lake_99, only lake_6, lake_14"):
        pages.publish(page, {"lake_99": before["lake_14"]}, (4, 8))
    with pytest.raises(InputError, match="has newest for lake_14, which was not measured now"):
        pages.publish(page, {"lake_14": before["lake_14"]}, (4, 8))


def test_the_published_table_is_read_and_drawn(tmp_path):
    none = "0.41 (0.17–0.66), 1.000 ± 0.001 | 1.65 (1.13–2.30), 1.021 ± 0.013"
    mean = "1, 0.999 ± 0.002 | 1, 0.998 ± 0.003"
    rows = ["| baseline | a-0 | b-1 |", "|---|---|---|", f"| `none` | {none} |", f"| `group_mean` | {mean} |"]
    text = "Before.\n\nN = 4:\n\n" + "\n".join(rows) + "\n\nN = 8:\n\nAfter.\n"
    settings, cells = variance.read_table(text, 4)
    assert settings == ["a-0", "b-1"] and len(cells) == 4
    assert vars(cells["b-1", "none"]) == {
        "value": 1.65, "low": 1.13, "high": 2.3, "cosine": 1.021, "cosine_error": 0.013
    }  # fmt: skip
    assert (cells["a-0", "group_mean"].value, cells["a-0", "group_mean"].cosine) == (1, 0.999)
    variance.plot(settings, cells, tmp_path / "redrawn.png")
    assert (tmp_path / "redrawn.png").stat().st_size > 10_000
    with pytest.raises(InputError, match="no table for N = 16"):
        variance.read_table(text, 16)
