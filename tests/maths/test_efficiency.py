"""Efficiencies of gradient estimators: figures by hand, the group mean's law, and what a report says of them."""

import json
import math
import sys

import pytest
import torch

from trl_otb import register_baseline
from trl_otb.comparison.efficiency import (
    LARGEST,
    Comparison,
    Estimate,
    Moments,
    bootstrap,
    compare,
    fit_group_mean,
    group_mean_worth,
)
from trl_otb.comparison.estimators import Estimator, estimators
from trl_otb.comparison.report import BaselineReport


NAMED = {name: Estimator(name, name) for name in ("group_mean", "x", "y")}


def report_of(rows: list[Comparison], prompts: int = 40) -> BaselineReport:
    return BaselineReport(rows, 4, [4], prompts, 64, 16, 16, prompts, 0.5, 20.0, "a model")


def row(name, value, low, high, unbiased=True, baseline=None) -> Comparison:
    gain = Estimate(value, low, high)
    return Comparison(name, baseline or name, "left" in name, 4, unbiased, gain, *[Estimate(1.0, 0.9, 1.1)] * 6)


CONTROL_ROW = row("group_mean", 0.0, 0.0, 0.0)


def test_figures_by_hand():
    """
    Three prompts; E‖ĝ‖² = 3, 10 and 5, ‖Eĝ‖² = 1, 4 and 2; ⟨Eĝ_1, Eĝ_2⟩ = 1, the others 0; the truth is twice the
    signal.
    """
    signal = torch.tensor([[1.0, 1.0, 0.0], [1.0, 4.0, 0.0], [0.0, 0.0, 2.0]], dtype=torch.float64)
    moments = Moments(torch.tensor([3.0, 10.0, 5.0], dtype=torch.float64), signal, 2 * signal, 4 * signal)
    figures = moments.of_batch(torch.tensor([[1.0, 1.0, 1.0], [2.0, 1.0, 0.0]]))
    # Batch: signal 1 + 4 + 2 + 2·1 = 9, noise 2 + 6 + 3 = 11. The first drawn twice and the second once: the squares 1
    # + 1 + 4, six ordered pairs, all of those that differ with product 1: signal 6 + 6 = 12, noise 2 + 2 + 6 = 10.
    assert figures["noise_to_signal"].tolist() == pytest.approx([11 / 9, 10 / 12])
    assert figures["efficiency"].tolist() == pytest.approx([9 / 20, 12 / 22])
    assert figures["cosine"].tolist() == pytest.approx([1.0, 1.0])
    # The signal is of length 3, the truth of 6: scaled to it, noise counts four times. No bias adds to it
    for name in ("noise", "missed"):
        assert figures[name].tolist() == pytest.approx([44, 40])
    # Six such prompts: squares 14, 30 ordered pairs of mean product 1/3, so signal 24; noise 22
    six = moments.of_batch(torch.ones(1, 3), 6)
    assert (six["noise_to_signal"].item(), six["cosine"].item()) == pytest.approx((22 / 24, 1.0))
    lost = Moments(moments.square, -signal, signal, signal).of_batch(torch.ones(1, 3))
    assert lost.pop("signal") == 9 and all(value.isnan() for value in lost.values())


def test_figures_of_a_known_scale_by_hand():
    """The same prompts, and Eĝ = g / 2: squares count four times, and what was seen of Eĝ does not matter."""
    truth = torch.tensor([[1.0, 1.0, 0.0], [1.0, 4.0, 0.0], [0.0, 0.0, 2.0]], dtype=torch.float64)
    unknown = torch.full_like(truth, torch.nan)
    moments = Moments(torch.tensor([3.0, 10.0, 5.0], dtype=torch.float64), unknown, unknown, truth, scale=0.5)
    figures = moments.of_batch(torch.ones(1, 3))
    # Noise 12 + 40 + 20 − 7 = 65, signal 9
    assert (figures["noise"].item(), figures["signal"].item()) == pytest.approx((65, 9))
    assert figures["efficiency"].item() == pytest.approx(9 / 74)
    six = moments.of_batch(torch.ones(1, 3), 6)  # noise twice as large, signal 24
    assert (six["noise"].item(), six["efficiency"].item()) == pytest.approx((130, 24 / 154))
    lost = Moments(moments.square, unknown, unknown, -truth, scale=0.5).of_batch(torch.ones(1, 3))
    assert (lost["noise"].item(), lost["signal"].item()) == pytest.approx((79, 0)) and lost["efficiency"].isnan()


def test_without_bias_noise_is_compared_though_the_signal_is_lost():
    """The second estimator has half of the noise, the third is biased: nothing is said of it."""
    g = torch.Generator().manual_seed(0)
    noise = torch.exp(0.1 * torch.randn(30, generator=g, dtype=torch.float64))
    lost = -torch.eye(30, dtype=torch.float64) * 1e-3
    found = {}
    for n in (4, 8):
        law = (10 + 30 / (n - 1)) / n * noise
        found["group_mean", n] = Moments(law * ((n - 1) / n) ** 2, lost, lost, lost, scale=(n - 1) / n)
        found["x", n] = Moments(law / 2, lost, lost, lost, scale=1.0)
        found["y", n] = Moments(law / 3, lost, lost, lost)
    rows = compare(found, NAMED, prompts_per_batch=30)
    of = {row.name: row for row in rows if row.n == 4}
    assert of["x"].over_group_mean.value == pytest.approx(2, rel=1e-3) and of["x"].worth.value > 4
    assert math.isnan(of["y"].over_group_mean.value) and math.isnan(of["x"].efficiency.value)
    assert of["x"].more_prompts.value == pytest.approx(1, rel=1e-3)
    said = report_of(rows, 30).verdict
    assert (
        said.startswith("Set baseline='x': worth 100 % more prompts (")
        and "1 of 2 baselines cannot be compared" in said
    )


def test_the_bootstrap_draws_as_many_prompts_as_there_are():
    counts = bootstrap(5, draws=100)
    assert counts.shape == (101, 5) and (counts.sum(1) == 5).all() and (counts[0] == 1).all()


def test_the_group_means_law_is_found_and_inverted():
    law = {n: torch.tensor((10.0 + 30.0 / (n - 1)) / n, dtype=torch.float64) for n in (2, 4, 8)}
    a, b = fit_group_mean(law)
    assert (a.item(), b.item()) == pytest.approx((10, 30))
    noise = torch.tensor((10 + 30 / (9 - 1)) / 9, dtype=torch.float64)
    assert group_mean_worth(noise, a, b).item() == pytest.approx(9, rel=1e-9)
    ends = [group_mean_worth(torch.tensor(noise), a, b).item() for noise in (1e-9, 1e9)]
    assert ends == pytest.approx([LARGEST, 1])
    assert group_mean_worth(torch.tensor(torch.nan), a, b).isnan()
    assert law[4] / law[8] > 2  # it does not fall as 1/N


def synthetic(better: float, prompts: int = 40, spread: float = 0.1):
    """
    Moments of a control and of an estimator with `better` times less noise, over prompts that differ by `spread`.
    """
    g = torch.Generator().manual_seed(0)
    signal = torch.eye(prompts, dtype=torch.float64) + 0.01
    noise = torch.exp(spread * torch.randn(prompts, generator=g, dtype=torch.float64))
    found = {}
    for n in (4, 8):
        of_control = (10 + 30 / (n - 1)) / n * noise
        of_other = of_control / better * torch.exp(spread * torch.randn(prompts, generator=g, dtype=torch.float64))
        for name, extra in (("group_mean", of_control), ("x", of_other)):
            found[name, n] = Moments(signal.diagonal() + extra, signal, signal, signal)
    return compare(found, NAMED, prompts_per_batch=prompts)


def test_draws_in_which_no_reward_varies_say_nothing():
    """Two of five prompts have noise; a draw of the other three alone has none to compare."""
    square = torch.tensor([0.0, 0.0, 0.0, 4.0, 5.0], dtype=torch.float64)
    truth = torch.diag(torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64))
    found = {(name, n): Moments(square * factor / n, truth, truth, truth, 1.0)
             for name, factor in (("group_mean", 2), ("x", 1)) for n in (4, 8)}  # fmt: skip
    rows = {row.name: row for row in compare(found, NAMED, 5) if row.n == 4}
    assert rows["group_mean"].over_group_mean.text() == "1.00 (1.00–1.00)"
    assert 1 < rows["x"].over_group_mean.low <= rows["x"].over_group_mean.high < 100


def test_an_end_without_bound_is_a_question_mark():
    values = torch.cat([torch.full((90,), 2.0), torch.full((10,), torch.inf)])
    assert Estimate.of(values).text() == "2.00 (2.00–?)"


# What an estimator says of itself


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("none", 1), ("group_mean", 0.75), ("rloo", 1), ("ogb", None), ("ogb, one left out", 1),
        ("otb, one left out", 1), ("ogb_pooled", 1), ("ogb_pooled_damped", None), ("mine", 1), ("ours", None),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("registry")
def test_which_scales_are_known(name, scale):
    """By what each baseline says of itself, a user's own too."""
    register_baseline("mine", per_token=False, uses_energy=False, unbiased=True)(lambda group: 0.5)
    register_baseline("ours", per_token=False, uses_energy=False)(lambda group: 0.5)
    found = {e.name: e for e in estimators(["rloo", "ogb", "otb", "ogb_pooled", "ogb_pooled_damped", "mine", "ours"])}
    assert found[name].scale(4) == scale
    if name.startswith("otb"):
        (without,) = (e for e in estimators(["otb"], zero_tail=False) if e.name == name)
        assert without.scale(4) is None


# What the report says


def test_the_verdict_instructs_where_a_gain_is_sure():
    report = report_of([CONTROL_ROW, row("ogb, one left out", 0.134, 0.08, 0.19, baseline="ogb")])
    instruction, unknown = report.verdict.split("\n")
    assert instruction == ("Set baseline='ogb', leave_one_out=True: worth 13 % more prompts (95 %: 8–19).")
    assert "measure again" in unknown and "too narrow" not in unknown
    assert "with 10 prompts, intervals are too narrow" in report_of(report.comparisons, 10).verdict


def test_the_verdict_keeps_the_group_mean_where_nothing_is_sure():
    report = report_of([CONTROL_ROW, row("a", 0.5, -0.1, 1.5), row("b", 0.1, -0.3, 0.5)], 20)
    instruction, unknown = report.verdict.split("\n")
    assert instruction == "Keep group_mean."
    # The interval reaches 0.6 below 0.5: (0.6 / 0.5)² of 20 prompts are 29
    assert unknown == (
        "No baseline is significantly better: baseline='a' is worth 50 % (-10 to 150) more prompts. Measuring 10 more "
        "prompts may decide it."
    )
    close = report_of([CONTROL_ROW, row("a", 0.02, -0.03, 0.07)])
    assert close.verdict.startswith("Keep group_mean.\n") and "is unlikely to change that" in close.verdict
    lost = report_of([CONTROL_ROW, row("a", math.nan, -math.inf, math.inf)])
    assert "the signal is lost in noise" in lost.verdict and lost.verdict.startswith("Keep group_mean.\n")


def test_the_verdict_prefers_what_is_shown_to_what_is_guessed_and_no_bias_to_a_bias():
    shown = row("b", 0.3, 0.2, 0.4)
    assert report_of([CONTROL_ROW, row("a", 0.5, -0.1, 1.5), shown]).verdict.startswith("Set baseline='b':")
    biased = row("c", 0.9, 0.5, 1.5, unbiased=False)
    said = report_of([CONTROL_ROW, biased, shown]).verdict
    assert said.startswith("Set baseline='b':") and "baseline='c' measures 90 %, but is biased" in said
    alone = report_of([CONTROL_ROW, biased]).verdict
    assert alone.startswith("Set baseline='c':") and "Caveats: it is biased" in alone
    nothing = row("none", 2.0, 1.0, 3.0)
    said = report_of([CONTROL_ROW, nothing, shown]).verdict
    assert said.startswith("Set baseline='b':") and "baseline='none' measures 200 %, but gets worse" in said
    assert report_of([CONTROL_ROW, nothing]).verdict.startswith("Keep group_mean.")


@pytest.mark.parametrize("prompts", [3, 4])
def test_a_verdict_is_reached_though_many_draws_have_no_value(prompts):
    """Few prompts and much noise: the bootstrap's draws are often undefined, and the best ratio is above 1."""
    report = report_of(synthetic(4.0, prompts=prompts, spread=2.5), prompts)
    assert report.verdict.startswith(("Keep group_mean.\n", "Set baseline='x': "))
    values = torch.cat([torch.tensor([2.0]), torch.full((95,), 2.0), torch.full((5,), torch.nan)])
    estimate = Estimate.of(values)
    assert (estimate.low, estimate.high) == (-torch.inf, torch.inf) and estimate.text() == "2.00 (?–?)"


def test_a_clear_gain_has_its_worth_in_group_sizes():
    of = {r.name: r for r in synthetic(3.0) if r.n == 4}
    worth = of["x"].worth
    assert worth.low <= worth.value <= worth.high
    # Noise to signal of 5 / 3 is the control's at N: (10 + 30 / (N − 1)) / N = 5 / 3 at N = 8.1
    assert worth.value == pytest.approx(8.1, rel=0.1)
    assert of["x"].more_prompts.value == pytest.approx(2, rel=0.1)


def test_a_report_reads_well_and_holds_everything():
    lost = row("lost", math.nan, -math.inf, math.inf)
    report = report_of([row("a", -0.2, -0.3, -0.1), CONTROL_ROW, lost, row("<b>", 0.3, 0.2, 0.4)])
    said = repr(report).splitlines()
    assert said[0].startswith("Set baseline='<b>'") and len(said) < 14
    assert [line.split("  ")[0] for line in said[4:7]] == ["<b>", "group_mean", "a"]
    assert said[7] == "lost in noise: lost"
    page = report._repr_html_()
    assert "&lt;b&gt;" in page and "<b>'" not in page and page.index("<details>") < page.index("<code>lost</code>")
    table = report.to_pandas()
    assert table["baseline"].tolist() == ["<b>", "group_mean", "a"] and table["more_prompts_high"].tolist() == [
        0.4, 0.0, -0.1,
    ]  # fmt: skip
    assert len(report.to_pandas(lost=True)) == 4
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["comparisons"][2]["more_prompts"]["value"] is None
    assert "| `lost` | ? (?–?) |" in report.to_markdown()


@pytest.mark.parametrize(("module", "make"), [("pandas", "to_pandas"), ("matplotlib.figure", "plot")])
def test_a_package_that_is_missing_is_named_with_the_line_that_installs_it(module, make, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    package = module.partition(".")[0]
    with pytest.raises(ImportError, match=f"needs {package}, which is not installed: pip install {package}"):
        getattr(report_of([CONTROL_ROW]), make)()


def test_the_picture_has_a_panel_per_size_and_a_row_per_baseline(tmp_path):
    lost = row("lost", math.nan, -math.inf, math.inf)
    report = report_of([CONTROL_ROW, row("x", 0.3, 0.2, math.inf), lost])
    figure = report.plot(tmp_path / "noise.png")
    (axis,) = figure.axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["lost", "group_mean", "x"]
    assert "lost in noise" in [text.get_text() for text in axis.texts]
    assert (tmp_path / "noise.png").stat().st_size > 5000
