"""
The gradient noise tool: its figures by hand, its gradients by brute force and the laboratory, and as a user runs it.
"""

import copy
import json
import math
import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.common.errors import InputError
from recipes.common.problems import Problems
from recipes.gradient_noise import __main__ as tool
from recipes.gradient_noise import pools
from recipes.gradient_noise.across import with_pooled
from recipes.gradient_noise.measure import (
    Comparison,
    Estimate,
    Moments,
    bootstrap,
    compare,
    fit_group_mean,
    group_mean_worth,
    verdict,
)
from recipes.gradient_noise.pools import (
    Estimator,
    KeepPools,
    Projection,
    WeightedScores,
    estimators,
    prompt_moments,
    scale_of,
)
from recipes.gradient_noise.storage import moments_of
from recipes.studies.laboratory import moments as laboratory_moments
from recipes.studies.laboratory import pool_of, task_of
from tests.helpers import tiny
from tests.recipes.conftest import shortly_trained
from trl_otb import GradientNoiseCallback, OTBGRPOConfig, OTBGRPOTrainer, register_baseline
from trl_otb.baselines import assign_credit, compute_advantages


# Figures


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
    rows = compare(found)
    of = {row.name: row for row in rows if row.n == 4}
    assert of["x"].over_group_mean.value == pytest.approx(2, rel=1e-3) and of["x"].worth.value > 4
    assert math.isnan(of["y"].over_group_mean.value) and math.isnan(of["x"].efficiency.value)
    said = verdict(rows, 4, 30)
    assert "`x` at N = 4 is worth" in said and "of the other 1 nothing can be said" in said


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("none", 1), ("group_mean", 0.75), ("rloo", 1), ("ogb", None), ("ogb, one left out", 1),
        ("otb, one left out", 1), ("mine, one left out", None), ("ogb_pooled", 1), ("ogb_pooled_damped", None),
    ],
)  # fmt: skip
def test_which_scales_are_known(name, scale):
    assert scale_of(name, 4) == scale
    if name.startswith("otb"):
        assert scale_of(name, 4, zero_tail=False) is None


def test_the_bootstrap_draws_as_many_prompts_as_there_are():
    counts = bootstrap(5, draws=100)
    assert counts.shape == (101, 5) and (counts.sum(1) == 5).all() and (counts[0] == 1).all()


def test_the_group_means_law_is_found_and_inverted():
    law = {n: torch.tensor((10.0 + 30.0 / (n - 1)) / n, dtype=torch.float64) for n in (2, 4, 8)}
    a, b = fit_group_mean(law)
    assert (a.item(), b.item()) == pytest.approx((10, 30))
    noise = torch.tensor((10 + 30 / (9 - 1)) / 9, dtype=torch.float64)
    assert group_mean_worth(noise, a, b).item() == pytest.approx(9, rel=1e-4)
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
    return compare(found)


def test_the_verdict_names_what_is_better_and_what_is_not_told_apart():
    clear, unclear = synthetic(3.0), synthetic(1.02, prompts=6, spread=0.3)
    said = verdict(clear, 4, 40)
    worth = re.fullmatch(
        r"On these 40 prompts `x` at N = 4 is worth the group_mean at N = (.+) \((.+)–(.+)\): .*", said
    )
    assert worth and float(worth[2]) <= float(worth[1]) <= float(worth[3])
    # Noise to signal of 5 / 3 is the control's at N: (10 + 30 / (N − 1)) / N = 5 / 3 at N = 8.1
    assert float(worth[1]) == pytest.approx(8.1, rel=0.1)
    said = verdict(unclear, 4, 6)
    assert "no baseline at N = 4 is shown to beat the group_mean: `x` has" in said
    assert re.search(r"(\d+ more prompts may do|more prompts are needed|they differ by \d+ % at most)\.$", said)


def test_the_verdict_says_how_close_the_best_may_be():
    row = Comparison("x", 4, *[Estimate(0.999, 0.95, 1.06)] * 5, options="baseline: x")
    assert verdict([row], 4, 20).endswith("option chooses; by these intervals they differ by 6 % at most.")


def test_a_verdict_is_reached_though_many_draws_have_no_value():
    """Few prompts and much noise: the bootstrap's draws are often undefined, and the best ratio is above 1."""
    for prompts in (3, 4):
        rows = synthetic(4.0, prompts=prompts, spread=2.5)
        for n in (4, 8):
            assert verdict(rows, n, prompts).startswith(f"On these {prompts} prompts")
    values = torch.cat([torch.tensor([2.0]), torch.full((95,), 2.0), torch.full((5,), torch.nan)])
    estimate = Estimate.of(values)
    assert (estimate.low, estimate.high) == (-torch.inf, torch.inf) and estimate.text() == "2.00 (?–?)"


# Gradients


@pytest.mark.parametrize("dimension", [2000, 100_000])
def test_a_projection_keeps_inner_products(dimension):
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(20_000, generator=g) for _ in range(2))
    b += 0.5 * a
    errors = []
    for seed in range(20):
        project = Projection([15_000, 5_000], dimension, seed)
        pa, pb = project([torch.stack([x[:15_000].view(100, 150) for x in (a, b)]), torch.stack([a, b])[:, 15_000:]])
        errors.append(((pa @ pb - a @ b) / (a.norm() * b.norm())).item())
    errors = torch.tensor(errors)
    if dimension > 20_000:
        assert project.exact and errors.abs().max() < 1e-6
    else:
        assert errors.abs().max() < 4 * (2 / dimension) ** 0.5 and abs(errors.mean()) < 0.02


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """A tiny model's pool of 32 completions of one prompt, with its trainer."""
    folder = tmp_path_factory.mktemp("noise")
    path, data, kept = tiny.save_model(folder / "model"), Dataset.from_dict({"prompt": ["1+2="]}), []
    keep = KeepPools(kept.append)
    settings = {**tiny.SETTINGS, "num_generations_eval": 32, "per_device_eval_batch_size": 32, "temperature": 0.7}
    args = OTBGRPOConfig(**settings, output_dir=str(folder / "run"))
    trainer = OTBGRPOTrainer(path, tiny.even_bytes, args=args, train_dataset=data, eval_dataset=data, callbacks=[keep])
    keep.trainer = trainer
    trainer.evaluate()
    (rollout,) = kept
    return trainer, rollout


def whole_scores(trainer, temperature=0.7):
    parameters = list(trainer.model.parameters())
    return WeightedScores(trainer.model, temperature, parameters, Projection([p.numel() for p in parameters], 10**9))


@pytest.mark.parametrize("shared", [False, True], ids=["prompt apart", "shared prompt"])
@pytest.mark.parametrize("studied", ["all", "without the head"])
@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
def test_weighted_scores_are_the_sum_over_tokens(pool, together, studied, shared, monkeypatch):
    """
    One backward pass per token. The head's own is taken once where the head is not studied, and the forward of a long
    prompt once for its completions; a small model's backward passes are taken together.
    """
    monkeypatch.setattr(pools, "SHORT_PROMPT", 1 if shared else 100)
    monkeypatch.setattr(pools, "SMALL", 10**9 if together else 0)
    trainer, rollout = pool
    # In float64: a prompt that is read by itself is rounded otherwise
    model = AutoModelForCausalLM.from_pretrained(trainer.model.name_or_path, dtype=torch.float64)
    head = {id(p) for p in model.get_output_embeddings().parameters()}
    parameters = [p for p in model.parameters() if studied == "all" or id(p) not in head]
    of = WeightedScores(model, 0.7, parameters, Projection([p.numel() for p in parameters], 10**9))
    assert (of.head is None) == (studied == "all")
    row = int((rollout.mask.sum(1) > 2).nonzero()[0])
    weights = torch.randn(3, rollout.mask.size(1), generator=torch.Generator().manual_seed(0))
    prompt = rollout.prompt_ids[row][rollout.prompt_mask[row].bool()]
    completion = rollout.completion_ids[row][rollout.completion_mask[row].bool()]
    logits = model(input_ids=torch.cat([prompt, completion]).unsqueeze(0)).logits[0]
    logps = (logits[len(prompt) - 1 : -1] / 0.7).log_softmax(-1)
    expected = 0.0
    for t, token in enumerate(completion):
        scores = torch.autograd.grad(logps[t, token], parameters, retain_graph=True, allow_unused=True)
        scores = [torch.zeros_like(p) if s is None else s for s, p in zip(scores, parameters, strict=True)]
        expected = expected + weights[:, t, None] * torch.cat([score.flatten() for score in scores])
    of(rollout, (row + 1) % len(rollout), weights)
    torch.testing.assert_close(of(rollout, row, weights), expected.float(), atol=1e-5, rtol=1e-4)
    assert (of._prefix is not None) == shared


@pytest.mark.parametrize("baseline", ["otb", "ogb", "group_mean"])
def test_a_groups_gradient_is_the_mean_over_its_completions(pool, baseline):
    """One deal of the pool into groups of 4, each group's gradient from its advantages."""
    trainer, rollout = pool
    scores, estimator = whole_scores(trainer), Estimator("x", baseline)
    found = prompt_moments(rollout, scores, {4: [estimator]}, deals=1)["x", 4]
    rng = torch.Generator().manual_seed(0)
    for half, mean in zip(rollout.rows.chunk(2), found["mean"], strict=True):
        rows = half[torch.randperm(16, generator=rng)]
        advantages = estimator.advantages(rollout, rows, 4).expand(-1, rollout.mask.size(1))
        gradients = torch.stack(
            [scores(rollout, row, a.unsqueeze(0))[0] for row, a in zip(rows, advantages, strict=True)]
        )
        groups = gradients.view(4, 4, -1).mean(1)
        torch.testing.assert_close(groups.mean(0), mean, atol=1e-5, rtol=1e-4)
        found["square"] -= groups.square().sum(1).mean().item() / 2
    assert abs(found["square"]) < 1e-5 * groups.square().sum(1).mean().item()


def test_one_deal_per_token_stands_for_all(pool, registry):
    """A baseline per token that is ogb's has ogb's moments over all deals, though its own come for one."""
    trainer, rollout = pool
    register_baseline("same")(lambda group: group.mean(group.energy.sum(-1, keepdim=True)))
    studied = {4: [Estimator("ogb", "ogb"), Estimator("same", "same")]}
    one, many = (prompt_moments(rollout, whole_scores(trainer), studied, deals=deals) for deals in (1, 10))
    assert abs(one["ogb", 4]["square"] / many["ogb", 4]["square"] - 1) > 0.01
    for found in (one, many):
        assert found["same", 4]["square"] == pytest.approx(found["ogb", 4]["square"], rel=1e-4)
        torch.testing.assert_close(found["same", 4]["mean"], found["ogb", 4]["mean"], atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_moments_agree_with_the_laboratory(pool):
    """Means over many deals of the same pool, by the Gram matrix of all its tokens and by gradients of groups."""
    trainer, rollout = pool
    studied = [e for e in estimators(["ogb", "otb"]) if e.name != "none"]
    found = prompt_moments(rollout, whole_scores(trainer), {4: studied}, deals=400)

    def advantages(estimator):
        options = {"baseline": estimator.baseline, "leave_one_out": estimator.leave_one_out}
        return lambda r, w, m, n: compute_advantages(r, w, m, n, **options)

    with torch.enable_grad():
        laboratory = pool_of(trainer.model, rollout, lambda name: True)
    # The laboratory's scores are at temperature 1: energies are the trainer's, gradients 1 / 0.7 as long
    of_laboratory = laboratory_moments(laboratory, {e.name: advantages(e) for e in studied}, 4, deals=400)
    for name in (estimator.name for estimator in studied):
        ours = found[name, 4]["square"] / found["group_mean", 4]["square"]
        theirs = of_laboratory[name].square / of_laboratory["group_mean"].square
        assert ours == pytest.approx(theirs, rel=0.1), name


def test_a_masked_completion_has_no_gradient(pool):
    trainer, rollout = pool
    masked = copy.copy(rollout)
    masked.completion_mask = rollout.completion_mask.clone()
    masked.completion_mask[3] = 0
    scores = whole_scores(trainer)
    assert scores(rollout, 3, torch.ones(1, rollout.mask.size(1))).abs().max() > 0
    assert scores(masked, 3, torch.ones(1, rollout.mask.size(1))).eq(0).all()


def test_products_come_from_completions_that_are_not_shared(pool):
    trainer, rollout = pool
    found = prompt_moments(rollout, whole_scores(trainer), {4: estimators([])}, deals=5)
    (moments,) = (moments_of([found])["group_mean", 4],)
    first, second = found["group_mean", 4]["mean"].double()
    assert moments.signal.item() == pytest.approx((first @ second).item(), rel=1e-6)
    assert moments.square.item() > moments.signal.item()


# Baselines that compare prompts


def prompts_of(pool, number=4, size=8):
    """Rows of one pool as if they were several prompts' completions."""
    trainer, rollout = pool
    scores = whole_scores(trainer)
    own = torch.stack([scores(rollout, row, torch.ones(1, rollout.mask.size(1)))[0] for row in range(number * size)])
    rows = torch.arange(number * size).view(number, size)
    kept = [{name: getattr(rollout, name)[r] for name in ("rewards", "energy", "mask")} for r in rows]
    kept[0] = {n: v if v.dim() == 1 else v[:, : int(kept[0]["mask"].sum(1).max())] for n, v in kept[0].items()}
    return [{"pool": {**of_prompt, "own": own[r]}} for of_prompt, r in zip(kept, rows, strict=True)], rows, own


@pytest.mark.parametrize("baseline", ["ogb_pooled", "rloo_pooled", "ogb_pooled_damped"])
def test_gradients_of_baselines_that_compare_prompts(pool, baseline):
    """Halves of one group each, so that all prompts' groups meet; one prompt's tensors are narrower."""
    prompts, rows, own = prompts_of(pool)
    found = with_pooled(prompts, [baseline], [4], prompts_per_batch=4, deals=3)
    _, rollout = pool
    for half, at in enumerate((rows[:, :4].flatten(), rows[:, 4:].flatten())):
        inputs = rollout.rewards[at], rollout.energy[at], rollout.mask[at]
        advantages = assign_credit(*inputs, 4, baseline=baseline).advantages
        expected = (advantages * own[at]).view(4, 4, -1).mean(1)
        for prompt, of_prompt in zip(found, expected, strict=True):
            torch.testing.assert_close(prompt[baseline, 4]["mean"][half], of_prompt, atol=1e-5, rtol=1e-4)
    squares = torch.tensor([prompt[baseline, 4]["square"] for prompt in found])
    norms = torch.stack([prompt[baseline, 4]["mean"].square().sum(1).mean() for prompt in found])
    torch.testing.assert_close(squares, norms, rtol=1e-4, atol=1e-8)  # nothing varies but which deal it is


def test_so_many_prompts_meet_in_a_batch(pool):
    """In batches of two nothing is pooled; more halves and deals only average."""
    prompts, rows, own = prompts_of(pool)
    found = with_pooled(prompts, ["ogb_pooled"], [2], prompts_per_batch=2, deals=40)
    _, rollout = pool
    for prompt, of_prompt in zip(found, rows, strict=True):
        pairs = torch.stack([torch.tensor([a, b]) for half in of_prompt.chunk(2) for a in half for b in half if a < b])
        at = pairs.flatten()
        inputs = rollout.rewards[at], rollout.energy[at], rollout.mask[at]
        advantages = assign_credit(*inputs, 2, baseline="ogb", leave_one_out=True).advantages
        expected = (advantages * own[at]).view(len(pairs), 2, -1).mean(1)
        assert prompt["ogb_pooled", 2]["square"] == pytest.approx(expected.square().sum(1).mean().item(), rel=0.15)


@pytest.mark.slow
def test_pooled_baselines_are_measured_beside_the_others(measure, capsys):
    folder = measure("--num_prompts", "4", "--baselines", "otb", "ogb_pooled", "ogb_pooled_damped")
    kept = torch.load(folder / "prompt-00000.pt", weights_only=True)["pool"]
    for values in kept.values():  # without the gradients under other weights, which they stood beside
        assert values.untyped_storage().nbytes() == values.nbytes
    said = capsys.readouterr().out
    assert "| 4 | `ogb_pooled` |" in said and "| 4 | `ogb_pooled_damped` |" in said
    tool.main(["--plot_only", "--output_dir", str(folder)])
    assert capsys.readouterr().out.endswith(said[said.index("\n# ") :])
    tool.main(["--plot_only", "--output_dir", str(folder), "--prompts_per_batch", "3"])
    said = capsys.readouterr().out
    assert "| 4 | `ogb_pooled` |" in said and "a step on 3 such prompts" in said
    assert "Baselines that pool prompts saw 4 of them together." in said


@pytest.mark.usefixtures("registered")
def test_a_baseline_that_compares_prompts_token_by_token_is_refused(measure):
    register_baseline("all_tokens", across_prompts=True)(lambda group: group.mean(group.energy).mean())
    with pytest.raises(InputError, match="'all_tokens', which compares prompts token by token"):
        measure("--baselines", "all_tokens")


# As a user runs it


@pytest.fixture
def measure(short_policy, tmp_path):
    def run(*flags):
        small = "--num_prompts 3 --completions_per_prompt 16 --group_sizes 4 --baselines otb --num_train_problems 20"
        folder = tmp_path / "noise"
        tool.main(
            [
                "--model_name_or_path",
                str(short_policy),
                "--output_dir",
                str(folder),
                *small.split(),
                "--disable_tqdm",
                "1",
                *flags,
            ]
        )
        return folder

    return run


def test_a_run_ends_in_a_table_a_picture_and_a_verdict_and_goes_on(measure, capsys):
    folder = measure()
    said = capsys.readouterr().out
    assert "| 4 | `otb, one left out` |" in said and "On these 3 prompts" in said and "n = 3" in said
    assert (folder / "noise.png").stat().st_size > 10_000 and (folder / "table.md").is_file()
    files = sorted(folder.glob("prompt-*.pt"))
    before = [file.stat().st_mtime_ns for file in files]
    measure("--num_prompts", "4")
    assert [file.stat().st_mtime_ns for file in files] == before and len(list(folder.glob("prompt-*.pt"))) == 4
    assert "On these 4 prompts" in capsys.readouterr().out
    (folder / "noise.png").unlink()
    tool.main(["--plot_only", "--output_dir", str(folder)])
    assert (folder / "noise.png").is_file() and "On these 4 prompts" in capsys.readouterr().out
    with pytest.raises(InputError, match="plot_only` draws what is saved, and --group_sizes would change nothing"):
        tool.main(["--plot_only", "--output_dir", str(folder), "--group_sizes", "8"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seed", "1"], "`seed` was 42 and is 1.*--overwrite"),
        (["--top_p", "0.5"], "`top_p` was 1.0 and is 0.5"),
        (["--reward_weights", "2"], "`reward_weights` was None and is \\[2.0\\]"),
        (["--use_peft"], "`use_peft` was False and is True"),
    ],
)
def test_a_folder_that_was_measured_otherwise_is_refused(measure, flags, message):
    folder = measure()
    files = {file: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(InputError, match=message):
        measure(*flags)
    assert {file: file.read_bytes() for file in folder.iterdir()} == files


@pytest.mark.slow
def test_a_start_that_fails_leaves_nothing_and_takes_nothing(measure):
    with pytest.raises(InputError, match="nothing-has-this"):
        measure("--parameters", "nothing-has-this")
    folder = measure()  # which the failed start does not stand in the way of
    files = {file: file.read_bytes() for file in folder.glob("prompt-*")}
    with pytest.raises(InputError, match="nothing-has-this"):
        measure("--parameters", "nothing-has-this", "--overwrite")
    assert {file: file.read_bytes() for file in folder.glob("prompt-*")} == files
    measure("--completions_per_prompt", "20", "--overwrite")
    assert len(list(folder.glob("prompt-*"))) == 3


def row(name, value, low, high, unbiased=False):
    estimate = Estimate(value, low, high)
    return Comparison(name, 4, estimate, estimate, estimate, estimate, estimate, f"baseline: {name}", unbiased)


def test_the_verdict_prefers_what_is_shown_to_what_is_guessed():
    said = verdict([row("a", 1.5, 0.9, 2.5), row("b", 1.3, 1.2, 1.4)], 4, 40)
    assert "`baseline: b` at N = 4 is worth" in said
    worse = verdict([row("a", 0.6, 0.5, 0.7)], 4, 40)
    assert "no baseline at N = 4 is shown to beat" in worse and worse.endswith("that an option chooses.")


def test_the_verdict_calls_nothing_unbiased_that_is_not():
    lost = row("c", 2.0, -math.inf, math.inf)
    assert "have no bias" not in verdict([row("a", 1.5, 1.2, 2.5), lost], 4, 40)
    assert "have no bias; the signal is lost" in verdict([row("a", 1.5, 1.2, 2.5, unbiased=True), lost], 4, 40)


@pytest.mark.parametrize("weight", [0, 1])
def test_a_grading_of_no_weight_is_not_asked(measure, tmp_path, monkeypatch, weight):
    (tmp_path / "in_turn.py").write_text("def in_turn(completions, **_): return [0, 1] * (len(completions) // 2)")
    problems = Dataset.from_list([{"question": f"{i}+1", "answer": "1"} for i in range(4)])
    graded = []
    monkeypatch.setattr(
        tool, "load_data", lambda *_: Problems(problems, problems[:0], lambda *answer: graded.append(answer) or 1.0)
    )
    folder = measure("--reward_funcs", "in_turn:in_turn", "--reward_weights", str(weight), "1")
    rewards = [torch.load(path, weights_only=True)["reward"] for path in folder.glob("prompt-*.pt")]
    assert rewards == [weight + 0.5] * 3 and len(graded) == weight * 48


def test_a_questions_duplicates_are_measured_once(measure, data_file):
    rows = [{"question": f"{i % 4}+{i % 4}", "answer": str(2 * (i % 4))} for i in range(12)]
    flags = ["--dataset_name", data_file(rows), "--num_held_out_problems", "1"]
    with pytest.raises(InputError, match="`num_prompts` is 4 and the data has 3 different problems"):
        measure(*flags, "--num_prompts", "4")
    folder = measure(*flags)
    assert len(list(folder.glob("prompt-*.pt"))) == 3


@pytest.mark.slow
def test_the_first_different_problems_are_measured(measure, data_file):
    """Not those that are asked least often."""
    rows = [{"question": f"{i % 5}+{i % 5}", "answer": str(2 * (i % 5))} for i in range(20)]
    rows += [{"question": f"{i}-1", "answer": str(i - 1)} for i in range(1, 6)]
    problems = Problems(Dataset.from_list(rows), Dataset.from_list(rows[:1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tool, "load_data", lambda settings, seed: problems)
        folder = measure("--num_prompts", "5")
    asked = {torch.load(path, weights_only=True)["asked"] for path in folder.glob("prompt-*.pt")}
    assert asked == {json.dumps([f"{i}+{i}", None]) for i in range(5)}


@pytest.mark.slow
@pytest.mark.parametrize("option", [["--top_p", "0.9"], ["--top_k", "5"], ["--mask_truncated_completions", "true"]])
def test_where_scores_have_another_mean_no_scale_is_known(measure, option, capsys):
    folder = measure(*option)
    assert json.loads((folder / "settings.json").read_text())["scores_have_mean_zero"] is False


@pytest.mark.slow
def test_a_run_with_lora_goes_on_in_the_same_adapter(measure, run, tmp_path, monkeypatch):
    """Its random matrix decides the coordinates of gradients. The folder of a LoRA run can be measured too."""
    adapters = []

    class Recording(WeightedScores):
        def __init__(self, model, *args):
            adapters.append({n: p.detach().clone() for n, p in model.named_parameters() if "lora_A" in n})
            super().__init__(model, *args)

    monkeypatch.setattr(tool, "WeightedScores", Recording)
    lora = ["--use_peft", "--lora_target_modules", "all-linear"]
    measure(*lora)
    folder = measure(*lora, "--num_prompts", "4")
    first, second = adapters
    assert first and all(torch.equal(first[name], second[name]) for name in first)
    adapter = run(*lora, "--max_steps", "1", output="adapter")
    measure("--model_name_or_path", str(adapter), "--overwrite")
    assert len(list(folder.glob("prompt-*.pt"))) == 3


@pytest.mark.slow
def test_every_prompt_is_measured_once_though_the_run_was_stopped(measure, monkeypatch, capsys):
    """The trainer takes the prompts in an order of its own, which depends on how many are left."""
    keep, stopped = tool.KeepPools, []

    class Stopping(keep):
        def on_prediction_step(self, *args, **kwargs):
            super().on_prediction_step(*args, **kwargs)
            if len(stopped) == 1:
                raise KeyboardInterrupt
            stopped.append(True)

    monkeypatch.setattr(tool, "KeepPools", Stopping)
    with pytest.raises(KeyboardInterrupt, match="2 of 5 prompts are kept in .*; the same command goes on"):
        measure("--num_prompts", "5")
    monkeypatch.setattr(tool, "KeepPools", keep)
    folder = measure("--num_prompts", "5")
    prompts = [torch.load(path, weights_only=True) for path in sorted(folder.glob("prompt-*.pt"))]
    assert len({prompt["asked"] for prompt in prompts}) == len(prompts) == 5
    truths = torch.stack([prompt["truth"].flatten() for prompt in prompts])
    assert len(truths.unique(dim=0)) == 5


def test_draws_in_which_no_reward_varies_say_nothing():
    """Two of five prompts have noise; a draw of the other three alone has none to compare."""
    square = torch.tensor([0.0, 0.0, 0.0, 4.0, 5.0], dtype=torch.float64)
    truth = torch.diag(torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64))
    found = {(name, n): Moments(square * factor / n, truth, truth, truth, 1.0)
             for name, factor in (("group_mean", 2), ("x", 1)) for n in (4, 8)}  # fmt: skip
    rows = {row.name: row for row in compare(found) if row.n == 4}
    assert rows["group_mean"].over_group_mean.text() == "1.00 (1.00–1.00)"
    assert 1 < rows["x"].over_group_mean.low <= rows["x"].over_group_mean.high < 100


def test_an_end_without_bound_is_a_question_mark():
    values = torch.cat([torch.full((90,), 2.0), torch.full((10,), torch.inf)])
    assert Estimate.of(values).text() == "2.00 (2.00–?)"


ENVIRONMENT = """
class Desk:
    def reset(self, **kwargs):
        self.turns = []

    def calculator(self, expression: str) -> str:
        \"\"\"Works out an expression.

        Args:
            expression: A sum.
        \"\"\"
        self.turns.append(len(expression) % 3 / 3)
        return str(len(expression))

    def get_reward(self):
        return sum(self.turns) / 10


def of_turns(completions, **kwargs):
    return [[0.1 + len(m["content"]) % 3 for m in turns if m["role"] == "assistant"] for turns in completions]
"""


@pytest.mark.slow
def test_an_environment_and_rewards_of_turns(tmp_path, capsys):
    (tmp_path / "desks.py").write_text(ENVIRONMENT)
    config = Path(tool.__file__).parents[1] / "tool_math_cpu.yaml"
    flags = (
        f"--config {config} --num_prompts 3 --completions_per_prompt 16 --group_sizes 4 --baselines otb "
        "--num_train_problems 20 --environment_factory desks:Desk --reward_funcs desks:of_turns --output_dir noise "
        "--disable_tqdm 1"
    )
    tool.main([*flags.split(), "--model_name_or_path", str(shortly_trained("calculator", 60, tmp_path / "policy"))])
    assert "| 4 | `otb, one left out` |" in capsys.readouterr().out
    (prompt, *_) = [torch.load(path, weights_only=True) for path in sorted((tmp_path / "noise").glob("prompt-*.pt"))]
    assert prompt["reward"] > 0.1 and prompt["varies"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--group_sizes", "1"], r"`group_sizes` is \[1\]: give sizes of 2 or more"),
        (["--group_sizes", "8"], "`completions_per_prompt` is 16 and the largest group has 8.*32 or more"),
        (["--group_sizes", "2", "--completions_per_prompt", "8"], "`completions_per_prompt` is 8.*16 or more"),
        (["--num_prompts", "2"], "`num_prompts` is 2"),
        (["--leave_one_out", "true"], "`leave_one_out` is set and has no effect here"),
        (["--num_prompts", "1000"], "`num_prompts` is 1000 and the data has"),
        (["--baselines", "absent"], "'absent': it must be one of"),
        (["--prompts_per_batch", "2"], "`prompts_per_batch` is 2: give 3 or more"),
        (["--projection", "3"], "`projection` is 3"),
        (["--parameters", "nothing-has-this"], "`parameters` is 'nothing-has-this', which none of"),
        (["--tools", "nowhere:f"], "`tools` is 'nowhere:f'"),
        (["--environment_factory", "nowhere:f"], "`environment_factory` is 'nowhere:f'"),
        (["--basline", "otb"], "there is no flag --basline"),
    ],
)
def test_wrong_flags_are_named(measure, flags, message):
    with pytest.raises(InputError, match=message):
        measure(*flags)


@pytest.mark.slow
def test_the_meter_of_a_run_agrees_with_the_tool(short_policy, tmp_path):
    """
    The same eight prompts, without learning, and a reward for few tokens, whose gradient the prompts share. The
    meter's signal is ⟨g_p, g_q⟩ for prompts that differ, its noise the rest of E‖ĝ_p‖²: of completions and of prompts.
    """
    tokenizer = AutoTokenizer.from_pretrained(short_policy, padding_side="left")
    task = task_of("sums", tokenizer, 8, num_held_out=1, seed=5)
    settings = {**tiny.SETTINGS, "max_completion_length": 24, "learning_rate": 0.0, "output_dir": str(tmp_path)}
    kept = []
    keep, meter = KeepPools(kept.append), GradientNoiseCallback(decay=0.999)

    def trainer_of(callback, **more):
        return OTBGRPOTrainer(
            str(short_policy),
            lambda completion_ids, **kwargs: [-len(ids) / 8 for ids in completion_ids],
            args=OTBGRPOConfig(**(settings | more)),
            train_dataset=task.train,
            eval_dataset=task.train,
            processing_class=tokenizer,
            callbacks=[callback],
        )

    keep.trainer = trainer_of(keep, num_generations_eval=96, per_device_eval_batch_size=96)
    keep.trainer.evaluate()
    scores = whole_scores(keep.trainer, temperature=1.0)
    moments = moments_of([prompt_moments(r, scores, {4: [Estimator("ogb", "ogb")]}) for r in kept])["ogb", 4]
    signal = (moments.signal.sum() - moments.signal.diagonal().sum()) / (8 * 7)
    expected = ((moments.square.mean() - signal) / signal).item()

    # One prompt per micro-batch, all eight per step; this loss divides all tokens by one number
    of_run = {"baseline": "ogb", "loss_type": "dr_grpo", "per_device_train_batch_size": 4}
    trainer_of(meter, **of_run, gradient_accumulation_steps=8, max_steps=150).train()
    assert meter.scale == pytest.approx(expected, rel=0.3)
    assert expected > 3  # noise is what is measured
