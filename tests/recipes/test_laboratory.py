"""The variance laboratory: scores and moments against independent computations."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from recipes.math import Options, load_problems
from recipes.toy import worked_sums
from tests.helpers import tiny
from tests.helpers.laboratory import Pool, moments, pool_of, sample_pools
from trl_otb import GradientNoiseCallback, OTBGRPOConfig, OTBGRPOTrainer
from trl_otb.baselines import BASELINES, compute_advantages
from trl_otb.comparison import moments as package
from trl_otb.comparison.efficiency import moments_of
from trl_otb.comparison.gradients import CompletionGradients, Projection
from trl_otb.seam.pools import at_rest, single_rows


@pytest.fixture(scope="module")
def pools(tmp_path_factory):
    path = tiny.save_model(tmp_path_factory.mktemp("model"))
    data = Dataset.from_dict({"prompt": ["1+2=", "3+4="]})
    kept = []
    sample_pools(path, tiny.tokenizer(), tiny.even_bytes, data, 12, kept.append, max_completion_length=6)
    return path, kept


def test_scores_are_gradients_of_log_probs(pools):
    """Every entry of the Gram matrix, by one backward a token."""
    path, (pool, _) = pools
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = tiny.tokenizer()
    gradients, nodes = [], []
    for row in (0, 5):
        prompt = tokenizer("1+2=")["input_ids"]
        completion = pool.completions[row]
        assert len(completion) == pool.mask[row].sum()
        ids = torch.tensor([prompt + completion])
        for t, token in enumerate(completion):
            logits = model(input_ids=ids).logits[0, len(prompt) + t - 1]
            model.zero_grad()
            logits.log_softmax(-1)[token].backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
            nodes.append(int(pool.node[row, t]))
            proxy = (torch.nn.functional.one_hot(torch.tensor(token), len(logits)) - logits.softmax(-1)).square().sum()
            torch.testing.assert_close(pool.energy[row, t], proxy, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(pool.head_norms[pool.node[row, t], 1], proxy, atol=1e-5, rtol=1e-5)
    gradients = torch.stack(gradients)
    torch.testing.assert_close(pool.gram[nodes][:, nodes], gradients @ gradients.T, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(pool.exact_energy[0, 0], gradients[0].square().sum(), atol=1e-4, rtol=1e-4)


def otb(r, w, m, n):
    return compute_advantages(r, w, m, n)


def small_pool(size=6):
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(2 * size, 3, generator=g)
    node = torch.arange(2 * size).view(size, 2)
    node[0, 1] = -1
    rewards = torch.randn(size, generator=g)
    return Pool(
        rewards, torch.rand(size, 2, generator=g), node, scores @ scores.T, torch.zeros(2 * size, 2), []
    ), scores


@pytest.mark.slow
def test_moments_are_those_of_all_deals():
    """
    With groups of 2 from 6, every way to deal them can be listed: the average over deals tends to the average over
    them.
    """
    pool, scores = small_pool()

    def gradient(rows, **options):
        rows = list(rows)
        a = compute_advantages(pool.rewards[rows], pool.energy[rows], pool.mask[rows], len(rows), **options)
        return sum(
            a[i, t] * scores[pool.node[r, t]] for i, r in enumerate(rows) for t in range(2) if pool.mask[r, t]
        ) / len(rows)

    def truth(rows):
        return gradient(rows, baseline="ogb_loo")

    seen = []
    for first in itertools.combinations(range(6), 2):  # one half is a group, the other two
        others = [r for r in range(6) if r not in first]
        for partner in others[1:]:
            second = (others[0], partner)
            third = [r for r in others if r not in second]
            a, b, c = (gradient(rows) for rows in (first, second, third))
            seen.append(
                torch.stack(
                    [
                        (a @ a + b @ b + c @ c) / 3,
                        (a @ b + a @ c + b @ c) / 3,
                        (a @ truth(others) + (b + c) / 2 @ truth(first)) / 2,
                        truth(first) @ truth(others),
                    ]
                )
            )
    expected = torch.stack(seen).mean(0)
    actual = moments(pool, {"otb": otb}, 2, deals=4000)["otb"]
    torch.testing.assert_close(torch.tensor(list(vars(actual).values())), expected, rtol=0.05, atol=0.02)


# The package's own measurements beside it


def measured(trainer, example, completions, names, seed=0):
    """A pool of completions, and its moments in groups of 4, by the gradients of all parameters."""
    parameters = list(trainer.model.parameters())
    of = CompletionGradients(trainer, parameters, Projection([p.numel() for p in parameters], 10**9))
    trainer.num_generations_eval = completions
    torch.manual_seed(seed)
    rollout, pool, batch = trainer.collect([dict(example) for _ in range(completions)])
    rows, rules = single_rows(batch), {name: BASELINES[name] for name in names}
    masks = [row["completion_mask"][0] for row in rows]
    found = package.prompt_moments(pool, masks, lambda i, weights: of(rows[i], weights), rules, [4], {})
    return rollout, found


@pytest.mark.slow
def test_compare_baselines_agrees_with_the_laboratory(tmp_path, monkeypatch):
    """Means over many partitions of one pool, by the Gram matrix of all its tokens and by gradients of groups."""
    args = OTBGRPOConfig(**tiny.SETTINGS, temperature=0.7, output_dir=str(tmp_path / "run"))
    path = tiny.save_model(tmp_path / "model")
    trainer = OTBGRPOTrainer(path, tiny.even_bytes, args=args, train_dataset=tiny.prompts())
    names = ("group_mean", "ogb", "ogb_loo", "otb", "otb_loo")
    monkeypatch.setattr(package, "PARTITIONS", 400)
    with at_rest(trainer, frozenset({"energy"})):
        rollout, found = measured(trainer, trainer.train_dataset[0], 32, names)
        with torch.enable_grad():
            laboratory = pool_of(trainer.model, rollout, lambda name: True)
    # The laboratory's scores are at temperature 1: energies are the trainer's, gradients 1 / 0.7 as long
    rules = {name: lambda r, w, m, n, name=name: compute_advantages(r, w, m, n, baseline=name) for name in names}
    of_laboratory = moments(laboratory, rules, 4, deals=400)
    for name in names:
        ours = found[name, 4]["square"] / found["group_mean", 4]["square"]
        theirs = of_laboratory[name].square / of_laboratory["group_mean"].square
        assert ours == pytest.approx(theirs, rel=0.1), name


@pytest.mark.slow
def test_the_callback_agrees_with_compare_baselines(short_policy, tmp_path):
    """
    The same eight prompts, without learning, and a reward for few tokens, whose gradient the prompts share. The
    callback's signal is ⟨g_p, g_q⟩ for prompts that differ, its noise the rest of E‖ĝ_p‖²: of completions and prompts.
    """
    options = Options(dataset_options=json.dumps(worked_sums.CHAIN_SUM), num_train_problems=8, instruction="")
    prompts, *_ = load_problems(replace(options, num_held_out_problems=1), seed=5)
    settings = {**tiny.SETTINGS, "max_completion_length": 24, "learning_rate": 0.0, "output_dir": str(tmp_path)}

    def trainer_of(callbacks=(), **more):
        return OTBGRPOTrainer(
            str(short_policy),
            lambda completion_ids, **kwargs: [-len(ids) / 8 for ids in completion_ids],
            args=OTBGRPOConfig(**(settings | more)),
            train_dataset=prompts,
            callbacks=list(callbacks),
        )

    trainer = trainer_of()
    with at_rest(trainer, frozenset({"energy"})):
        of_prompts = [measured(trainer, prompts[i], 96, ("ogb",), seed=i)[1] for i in range(8)]
    found = moments_of(of_prompts, set())["ogb", 4]
    signal = (found.signal.sum() - found.signal.diagonal().sum()) / (8 * 7)
    expected = ((found.square.mean() - signal) / signal).item()

    # One prompt per micro-batch, all eight per step; this loss divides all tokens by one number
    of_run = {"baseline": "ogb", "loss_type": "dr_grpo", "per_device_train_batch_size": 4, "keep_groups_together": True}
    callback = GradientNoiseCallback(decay=0.999)
    trainer_of([callback], **of_run, gradient_accumulation_steps=8, max_steps=150).train()
    assert callback.scale == pytest.approx(expected, rel=0.3)
    assert expected > 3  # noise is what is measured
