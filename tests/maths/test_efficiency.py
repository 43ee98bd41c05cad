"""Efficiencies of gradient estimators: figures by hand, and what a report says of them."""

import json
import math
import re
from statistics import NormalDist
from xml.etree import ElementTree

import pytest
import torch

from trl_otb.comparison.efficiency import Comparison, Estimate, Moments, bootstrap, compare, interval_tail, moments_of
from trl_otb.comparison.report import BaselineReport


SQUARE = torch.tensor([3.0, 10.0, 5.0], dtype=torch.float64)
SIGNAL = torch.tensor([[1.0, 1.0, 0.0], [1.0, 4.0, 0.0], [0.0, 0.0, 2.0]], dtype=torch.float64)
BATCH = torch.ones(1, 3)


def efficiency(figures):
    return (figures["signal"] / (figures["signal"] + figures["missed"])).tolist()


def report_of(rows: list[Comparison], prompts: int = 40, **fields) -> BaselineReport:
    return BaselineReport(rows, 4, [4], prompts, 64, 16, prompts, 0.5, 20.0, "a model", **fields)


def row(name, worth, low, high, /, unbiased=True, **more_than) -> Comparison:
    """`more_than` has the lower ends of what it is worth beside others."""
    beside = {other: Estimate(low + 0.1, low, low + 0.2) for other, low in more_than.items()}
    return Comparison(name, 4, unbiased, Estimate(worth, low, high), *[Estimate(1.0, 0.9, 1.1)] * 4, beside)


CONTROL_ROW, LOST = row("group_mean", 0.0, 0.0, 0.0), row("lost", math.nan, -math.inf, math.inf)


def test_figures_by_hand():
    """
    Three prompts; E‖ĝ‖² = 3, 10 and 5, ‖Eĝ‖² = 1, 4 and 2; ⟨Eĝ_1, Eĝ_2⟩ = 1, the others 0; the truth is twice the
    signal.
    """
    moments = Moments(SQUARE, SIGNAL, 2 * SIGNAL, 4 * SIGNAL)
    figures = moments.of_batch(torch.tensor([[1.0, 1.0, 1.0], [2.0, 1.0, 0.0]]))
    # Batch: signal 1 + 4 + 2 + 2·1 = 9, noise 2 + 6 + 3 = 11. The first drawn twice and the second once: the squares 1
    # + 1 + 4, six ordered pairs, all of those that differ with product 1: signal 6 + 6 = 12, noise 2 + 2 + 6 = 10.
    assert efficiency(figures) == pytest.approx([9 / 20, 12 / 22])
    assert figures["cosine"].tolist() == pytest.approx([1.0, 1.0])
    # The signal is of length 3, the truth of 6: scaled to it, noise counts four times. No bias adds to it
    for name in ("noise", "missed"):
        assert figures[name].tolist() == pytest.approx([44, 40])
    # Six such prompts: squares 14, 30 ordered pairs of mean product 1/3, so signal 24; noise 22
    six = moments.of_batch(BATCH, 6)
    assert (*efficiency(six), six["cosine"].item()) == pytest.approx((24 / 46, 1.0))
    # E‖ĝ‖² is 6 on average, two prompts' mean product 1/3; ĝ is half of the truth, so squares count four times
    assert figures["step"][0].item() == pytest.approx(4 * (6 - 1 / 3))
    assert six["step"].item() == pytest.approx(4 * (6 - 1 / 3)) and figures["variance"].isnan().all()
    lost = Moments(SQUARE, -SIGNAL, SIGNAL, SIGNAL).of_batch(BATCH)
    assert lost.pop("signal") == 9 and all(value.isnan() for value in lost.values())


def test_figures_match_hand_calculation():
    """The same prompts, and Eĝ = g / 2: squares count four times, and what was seen of Eĝ does not matter."""
    unknown = torch.full_like(SIGNAL, torch.nan)
    moments = Moments(SQUARE, unknown, unknown, SIGNAL, scale=0.5)
    figures = moments.of_batch(BATCH)
    # Noise 12 + 40 + 20 − 7 = 65, signal 9
    assert (figures["noise"].item(), figures["signal"].item()) == pytest.approx((65, 9))
    # One prompt's ĝ in a step whose prompts are drawn: 4 · 6 less the mean product, at any number of prompts
    assert figures["step"].item() == figures["variance"].item() == pytest.approx(24 - 1 / 3)
    assert efficiency(figures) == pytest.approx([9 / 74])
    six = moments.of_batch(BATCH, 6)  # noise twice as large, signal 24
    assert six["step"].item() == pytest.approx(24 - 1 / 3)
    assert (six["noise"].item(), *efficiency(six)) == pytest.approx((130, 24 / 154))
    lost = Moments(SQUARE, unknown, unknown, -SIGNAL, scale=0.5).of_batch(BATCH)
    assert (lost["noise"].item(), lost["signal"].item()) == pytest.approx((79, 0))


def test_another_n_matches_hand_calculation():
    """
    A prompt's ĝ varies by E‖ĝ‖² / c² less the mean product of two prompts, 1/3: by 6 − 1/3 for N = 4, and twice that
    for N = 1, of which there are four times as many.
    """
    ones = {"signal": SIGNAL, "with_truth": SIGNAL, "truth": SIGNAL}
    found = {
        ("group_mean", 4): Moments(SQUARE * (3 / 4) ** 2, **ones, scale=3 / 4),
        ("rloo_pooled", 1): Moments(2 * SQUARE - 1 / 3, **ones, scale=1.0),
        ("otb", 4): Moments(SQUARE, **ones),
    }
    of = {(row.name, row.n): row.more_completions.value for row in compare(found, 3, 4)}
    assert of["group_mean", 4] == 0 and math.isnan(of["otb", 4])
    assert of["rloo_pooled", 1] == pytest.approx(4 / 2 - 1)


def test_report_says_how_to_spend_completions():
    def at(n, *estimate):
        found = row("rloo_pooled", 0.3, 0.2, 0.4)
        found.n, found.more_completions = n, Estimate(*estimate)
        return found

    report = report_of([CONTROL_ROW, at(4, 0.3, 0.2, 0.4), at(1, 1.0, 0.7, 1.3), at(3, 2, 2, 2), at(8, 2, 2, 2)])
    head, one, four, advice = report.spending.splitlines()
    assert head.startswith("rloo_pooled, 64 completions per step") and "64 prompts  100 (70 to 130)" in one
    assert "16 prompts  30 (20 to 40)" in four and report.spending in repr(report)
    assert advice == "Spend them on more prompts: baseline='rloo_pooled', num_generations=1."
    first, second, *_ = report.verdict.splitlines()
    said = "Set baseline='rloo_pooled' and num_generations=1, with 4 times as many prompts per step: group_mean, "
    assert first.startswith(said)
    assert first.endswith("GRPO's, with N = 4 needs 100 % more completions (95 %: 70 to 130) for as little variance.")
    assert second == "With N = 4 group_mean, GRPO's, needs 30 % more prompts per step (95 %: 20 to 40)."
    report.baseline = "rloo_pooled"
    assert report.verdict.startswith("Keep baseline='rloo_pooled', and set num_generations=1, with")
    report.comparisons[2].more_completions.low = 0.35  # below what the own N may be worth
    assert len(report.spending.splitlines()) == 3
    worse = report_of([CONTROL_ROW, at(4, -0.3, -0.4, -0.2), at(1, -0.1, -0.15, -0.05)])
    assert len(worse.spending.splitlines()) == 3  # the control is better
    report.prompts_per_batch = 1
    assert report.spending == ""


def test_unbiased_noise_needs_no_signal():
    """The second estimator has half of the noise, the third is biased: nothing is said of it."""
    noise = torch.exp(0.1 * torch.randn(30, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    lost = -torch.eye(30, dtype=torch.float64) * 1e-3
    found = {
        ("group_mean", 4): Moments(5 * noise * (3 / 4) ** 2, lost, lost, lost, scale=3 / 4),
        ("x", 4): Moments(5 * noise / 2, lost, lost, lost, scale=1.0),
        ("y", 4): Moments(5 * noise / 3, lost, lost, lost),
    }
    rows = compare(found, prompts_per_batch=30, group_size=4)
    of = {row.name: row for row in rows}
    assert of["x"].over_group_mean.value == pytest.approx(2, rel=1e-3)
    assert math.isnan(of["y"].over_group_mean.value)
    assert of["x"].more_prompts.value == pytest.approx(1, rel=1e-3)
    said = report_of(rows, 30).verdict
    assert said.startswith("Set baseline='x': group_mean, GRPO's, needs 100 % more prompts per step (95 %: ")
    assert "y cannot be compared, as the signal is lost in noise" in said


def measured_prompts(seed: int, prompts: int = 16, size: int = 40) -> dict[tuple[str, int], Moments]:
    """
    Prompts drawn from a population that is known: gradients g_p = ḡ + δ_p with ‖ḡ‖² = 0.5 and E‖δ‖² = 1; noise σ_p²
    under the control and 0.2 u_p σ_p² under `x`, log-normal with mean 1. So their variances are 2 and 1.2.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    own = normal(prompts, size) / size**0.5
    own[:, 0] += 0.5**0.5
    noise, wobble = (torch.exp(s * normal(prompts) - s**2 / 2) for s in (0.7, 0.3))
    halves = own.unsqueeze(1) + normal(prompts, 2, size) * (noise / 8 / size).sqrt().view(-1, 1, 1)  # of 8 groups each
    products = halves.mean(1) @ halves.mean(1).T
    products.diagonal().copy_((halves[:, 0] * halves[:, 1]).sum(1))
    squares = own.square().sum(1)
    return {
        ("group_mean", 4): Moments((squares + noise) * (3 / 4) ** 2, *[products] * 3, scale=3 / 4),
        ("x", 4): Moments(squares + 0.2 * wobble * noise, *[products] * 3, scale=1.0),
    }


def test_intervals_hold_what_is_true_of_all_prompts():
    """16 prompts of a known population, 100 times: what a step with drawn prompts gains, 2 / 1.2 − 1."""
    truth, reports = 2 / 1.2 - 1, [compare(measured_prompts(seed), 16, 4)[1] for seed in range(100)]
    found = [row.more_prompts for row in reports]
    assert 90 <= sum(of.low <= truth <= of.high for of in found) <= 99
    assert sum(of.low > truth for of in found) <= 5  # too much is promised
    assert sorted(of.value for of in found)[50] == pytest.approx(truth, rel=0.05)
    # On the same prompts it would be 1 / 0.2 − 1 = 4, which is another question
    assert all(of.high < 1 / row.noise_over_group_mean.high - 1 for of, row in zip(found, reports, strict=True))


def test_which_scales_are_known():
    mean = torch.randn(2, 3)
    prompts = [{"truth": mean, **{(name, 4): {"square": 9.0, "mean": mean} for name in ("group_mean", "x", "y")}}] * 3
    scales = {name: moments.scale for (name, _), moments in moments_of(prompts, {"x"}).items()}
    assert scales == {"group_mean": 0.75, "x": 1.0, "y": None}
    assert not any(moments.scale for moments in moments_of(prompts, {"x"}, mean_zero=False).values())


def test_bootstrap_draws_all_prompts():
    counts = bootstrap(5, draws=100)
    assert counts.shape == (101, 5) and (counts.sum(1) == 5).all() and (counts[0] == 1).all()


def test_constant_reward_draws_are_ignored():
    """Two of five prompts have noise; a draw of the other three alone has none to compare."""
    square = torch.tensor([0.0, 0.0, 0.0, 4.0, 5.0], dtype=torch.float64)
    truth = torch.diag(torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64))
    found = {(name, 4): Moments(square * factor / 4, truth, truth, truth, 1.0)
             for name, factor in (("group_mean", 2), ("x", 1))}  # fmt: skip
    rows = {row.name: row for row in compare(found, 5, 4)}
    assert str(rows["group_mean"].over_group_mean) == "100 (100 to 100)"
    assert 1 < rows["x"].over_group_mean.low <= rows["x"].over_group_mean.high < 100


def test_unbounded_end_is_a_question_mark():
    values = torch.cat([torch.full((90,), 2.0), torch.full((10,), torch.inf)])
    assert str(Estimate.of(values)) == "200 (200 to ?)" and not Estimate.of(values).lost
    values = torch.cat([torch.full((96,), 2.0), torch.full((5,), torch.nan)])
    assert str(Estimate.of(values)) == "200 (? to ?)" and Estimate.of(values).lost
    assert Estimate(1.27, -0.26, 2709.79).lost  # which says nothing


@pytest.mark.parametrize("prompts", [3, 4, 40])
def test_verdict_survives_undefined_draws(prompts):
    """Few prompts and much noise: the bootstrap's draws are often undefined, and the best ratio is above 1."""
    g, spread = torch.Generator().manual_seed(0), 0.1 if prompts == 40 else 2.5
    signal = torch.eye(prompts, dtype=torch.float64) + 0.01
    noise = [5 / better * torch.exp(spread * torch.randn(prompts, generator=g).double()) for better in (1, 4)]
    found = {(name, 4): Moments(signal.diagonal() + of, signal, signal, signal)
             for name, of in zip(("group_mean", "x"), noise, strict=True)}  # fmt: skip
    rows = compare(found, prompts, 4)
    said = report_of(rows, prompts).verdict
    assert said.startswith("Set baseline='x': " if prompts == 40 else ("Keep group_mean.\n", "Set baseline='x': "))
    # Differences between prompts are 1 under both: E‖ĝ‖² has 1.01 of the signal, and two prompts' product is 0.01
    of_control, of_x = (1 + of.mean().item() for of in noise)
    assert prompts < 40 or rows[1].more_prompts.value == pytest.approx(of_control / of_x - 1)


SURE, BIASED = row("b", 0.3, 0.2, 0.4), row("c", 0.9, 0.5, 1.5, unbiased=False, b=0.3, value=0.3)
LIKELY = [row("a", 0.5, -0.1, 1.5), row("b", 0.1, -0.3, 0.5)]
VALUE, BETTER = row("value", 0.4, 0.1, 0.9), row("d", 0.9, 0.5, 1.5, value=0.01, b=0.2)
# Beside the control, and the run's baseline: how the verdict begins, and what it says
VERDICTS = [
    ([row("d", 0.134, 0.08, 0.19)], "otb",
     "Set baseline='d': group_mean, GRPO's, needs 13 % more prompts per step (95 %: 8 to 19) for as little", "during"),
    (LIKELY, "otb", "Keep group_mean.\nNo unbiased baseline is surely", "'a', 50 (-10 to 150) % more prompts, so the"),
    (LIKELY, "otb", "Keep group_mean.\n", "more prompts may decide it."),
    ([row("a", 0.02, -0.03, 0.07)], "otb", "Keep group_mean.\n", "is unlikely to change that"),
    ([LOST], "otb", "Keep group_mean.\n", "the signal is lost in"),
    ([row("value", 0.02, -0.05, 0.1), row("otb", 0.4, 0.3, 0.5, unbiased=False)], "otb", "Keep group_mean.\n",
     "'value', 2 (-5 to 10) % more prompts, so the sign is not known. Measuring more prompts is unlikely to change "
     "that. otb would be"),
    ([BIASED, SURE], "otb", "Set baseline='b':", "c would be better here, but biased"),
    ([BIASED], "otb", "Set baseline='c':", "Note: it is biased"),
    ([row("d", 0.5, 0.4, 0.6, unbiased=None)], "otb", "Set baseline='d':", "(then set `credit_whole_return=True`)"),
    ([row("none", 2.0, 1.0, 3.0), SURE], "otb", "Set baseline='b':", "none, which subtracts nothing, has 200 (100 to"),
    ([row("none", 2.0, 1.0, 3.0)], "otb", "Keep group_mean.", "so it is not advised."),
    (LIKELY, "b", "Keep baseline='b': it cannot be told apart from group_mean.\n", "'a', 50 (-10 to 150) % more"),
    ([row("b", -0.4, -0.6, -0.1)], "b", "Set baseline='group_mean': 'b' is surely worse.\n", "is unlikely to change"),
    # Of what cannot be told apart, the run's own, else value
    ([SURE, VALUE], "otb", "Set baseline='value': group_mean, GRPO's, needs 40 % ",
     "On these prompts value and b cannot be told apart."),
    ([SURE, VALUE], "value", "Keep baseline='value': ", ""),
    ([SURE, VALUE], "b", "Keep baseline='b': ", "On these prompts b and value cannot be told apart."),
    ([SURE, VALUE, BETTER], "value", "Set baseline='d': ", "during training"),
    ([row("b", 0.3, 0.2, 0.4), row("value", 0.9, 0.5, 1.5, b=0.01), row("d", 0.95, 0.5, 1.5, b=0.01)], "b",
     "Set baseline='value': ", "value and d cannot be told apart"),
    # What is not surely better than the control is not advised, even if it is the run's own, and not surely worse
    ([SURE, row("value", 0.28, -0.06, 3.78)], "otb", "Set baseline='b': group_mean, GRPO's, needs 30 %", ""),
    ([SURE, row("value", 0.28, -0.06, 3.78)], "value", "Set baseline='b': group_mean, GRPO's, needs 30 % ",
     "'value', the run's own, may be as good: 28 (-6 to 378) is its estimate, which is not surely above 0."),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "own", "begins", "says"), VERDICTS)
def test_verdict_keeps_what_is_not_surely_worse(rows, own, begins, says):
    verdict = report_of([CONTROL_ROW, *rows], baseline=own).verdict
    assert verdict.startswith(begins) and says in verdict


@pytest.mark.parametrize(("rows", "own", "begins", "says"), VERDICTS)
def test_advice_never_holds_zero(rows, own, begins, says):
    """A number that someone is to act on has an interval above 0."""
    report = report_of([CONTROL_ROW, *rows], baseline=own)
    assert report.best is None or report.best.more_prompts.low > 0
    advised = [float(low) for low in re.findall(r"^(?:Set|Keep) .*95 %: (-?\d+) to", report.verdict)]
    assert len(advised) == (report.best is not None) and all(low > 0 for low in advised)


def test_none_is_spoken_of_where_it_is_first_alone():
    below = report_of([CONTROL_ROW, row("none", 0.2, 0.1, 0.3), SURE], baseline="b").verdict
    assert "subtracts nothing" not in below
    unsure = report_of([CONTROL_ROW, row("none", 2.0, -0.1, 5.0), SURE], baseline="b").verdict
    assert "subtracts nothing" not in unsure


def test_interval_of_few_prompts_is_wider():
    """As Student's t: 2.131 for 16 prompts, 1.96 for many."""
    tail = interval_tail(16, 0.05)
    assert tail == pytest.approx(NormalDist().cdf(-2.1314 * (16 / 15) ** 0.5), rel=1e-2)
    assert interval_tail(10**6, 0.05) == pytest.approx(0.025, rel=1e-3) and 0 <= interval_tail(3, 0.005) < tail


def test_pairs_are_compared_on_the_same_prompts():
    """Two baselines whose noise differs far more between prompts than between them."""
    noise = torch.exp(1.0 * torch.randn(16, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    ones = torch.eye(16, dtype=torch.float64)
    found = {(name, 4): Moments(ones.diagonal() + of * noise, ones, ones, ones, scale=1.0)
             for name, of in (("group_mean", 10.0), ("x", 5.0), ("y", 4.0))}  # fmt: skip
    rows = {row.name: row for row in compare(found, 16, 4)}
    of = rows["y"].more_than["x"]
    x, y = (1 + share * noise.mean().item() for share in (5, 4))
    assert of.value == pytest.approx(x / y - 1) and of.low > 0.17 and of.high < 0.25
    assert rows["x"].more_than["y"].high < 0 and set(rows["x"].more_than) == {"group_mean", "y"}


def test_saved_report(tmp_path):
    rows = [CONTROL_ROW, row("<b>", 0.3, 0.2, 0.4), row("worse", -0.2, -0.3, -0.1), row("x", 0.1, -0.1, 9.0), LOST]
    report_of(rows).save(tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text()
    assert (
        "&lt;b&gt;" in page and "<b>" not in page and "name=viewport" in page and "prefers-color-scheme: dark" in page
    )
    assert [page.count(f"r='4' fill='var(--{of})'") for of in ("better", "worse", "faint")] == [1, 1, 2]
    assert "<td>30 (20 to 40)<td>" in page and page.count("lost in noise") == 3  # table, picture, note
    assert json.loads((tmp_path / "report" / "report.json").read_text())["num_prompts"] == 40
    assert "set no limit" not in page
    report_of([*rows, row("far", 0.3, 0.2, math.inf)]).save(tmp_path / "report")
    assert "<p class=faint>?: these prompts set no limit" in (tmp_path / "report" / "report.html").read_text()


def test_report_holds_everything():
    report = report_of([row("a", -0.2, -0.3, -0.1), CONTROL_ROW, LOST, row("b", 0.3, 0.2, math.inf)])
    said = repr(report).splitlines()
    assert said[0].startswith("Set baseline='b'") and len(said) < 14
    assert re.split("  +", said[3]) == ["N = 4", "more prompts, % (95 %)", "noise on the same prompts, x group_mean's"]
    assert [line.split()[0] for line in said[4:8]] == ["b", "group_mean", "a", "lost"]
    assert "30 (20 to ?)" in said[4] and said[4].endswith("1.00 (0.90 to 1.10)") and "lost in noise" in said[7]
    assert said[8] == "?: these prompts set no limit, or it is beyond 1,000 %."
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["comparisons"][2]["more_prompts"]["value"] is None
    assert "?:" not in repr(report_of([CONTROL_ROW, SURE]))


def test_picture_stands_by_itself():
    report = report_of([CONTROL_ROW, row("x & y", 0.3, 0.2, math.inf), LOST])
    picture = ElementTree.fromstring(report._repr_svg_())
    texts = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"group_mean", "x & y", "lost", "lost in noise"} <= {*texts}
    assert {*re.findall(r"var\((--\w+)\)", report._repr_svg_())} <= {*re.findall(r"--\w+", picture.get("style"))}
