"""The studies on gradient_noise: the scratchpad, the language model's tasks, the candidates, and the report."""

import random
import re

import pytest
import torch

from recipes import toy
from recipes.common.errors import InputError
from recipes.studies import candidates, horizon, language, variance
from recipes.toy import scratchpad
from tests.recipes.conftest import shortly_trained
from trl_otb import OTBGRPOConfig
from trl_otb.baselines import BASELINES, compute_advantages


@pytest.fixture
def registered():
    before = dict(BASELINES)
    yield candidates.register()
    BASELINES.clear()
    BASELINES.update(before)


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


# Tasks of the language model


def test_rewards_of_the_language_model():
    said = ["A Silver fish.", [{"role": "assistant", "content": "nothing"}]]
    assert language.has_word(said, ["silver", "silver"]) == [1, 0]
    # Of three and four words two are shared in order: 2 · 2 / 7
    assert language.likeness(["one two three", "a b"], ["one two four five", "a b"]) == [pytest.approx(4 / 7), 1]


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
    for name, value in {
        "PROMPTS": 3,
        "TASKS": {"10": (32, [])},
        "GROUPS": (4, 8),
        "BASELINES": ("ogb", "otb"),
    }.items():
        monkeypatch.setattr(horizon, name, value)
    panels = {"all": ("none", "ogb", "ogb, one left out", "otb", "inverse_energy")}
    monkeypatch.setattr(horizon, "PANELS", panels)
    horizon.main(["--output_dir", str(tmp_path / "study")])
    table = (tmp_path / "study" / "tables.md").read_text()
    assert "N = 8:" in table and table.count("| `token_damped` |") == 2 and "T = 10" in table
    assert not re.search("inverse_energy, one left out", table)
    (tmp_path / "study" / "horizon.png").unlink()
    horizon.main(["--output_dir", str(tmp_path / "study"), "--plot_only"])
    assert (tmp_path / "study" / "horizon.png").stat().st_size > 10_000


def test_nothing_to_plot_is_said(tmp_path, capsys):
    with pytest.raises(SystemExit):
        horizon.main(["--plot_only", "--output_dir", str(tmp_path)])
    assert "nothing is saved" in capsys.readouterr().err


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
