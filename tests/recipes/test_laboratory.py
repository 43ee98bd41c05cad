"""The variance laboratory: scores and moments against independent computations."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from recipes.math import Options, load_problems
from recipes.toy import worked_sums
from tests.helpers import tiny
from tests.helpers.laboratory import mean_square, pool_of
from trl_otb import GradientNoiseCallback, OTBGRPOConfig, OTBGRPOTrainer
from trl_otb.baselines import BASELINES, compute_advantages
from trl_otb.comparison import moments as package
from trl_otb.comparison.efficiency import moments_of
from trl_otb.comparison.gradients import CompletionGradients, Projection
from trl_otb.seam.pools import at_rest, single_rows


@pytest.fixture
def trainer(tmp_path):
    args = OTBGRPOConfig(**tiny.SETTINGS, temperature=0.7, output_dir=str(tmp_path / "run"))
    path = tiny.save_model(tmp_path / "model")
    return OTBGRPOTrainer(path, tiny.even_bytes, args=args, train_dataset=tiny.prompts())


def test_scores_are_gradients_of_log_probs(trainer):
    """Every entry of the Gram matrix, by one forward and one backward a token."""
    trainer.model.eval()
    rollout, *_ = trainer.collect([{"prompt": "1+2="}] * 8)
    pool, gradients, nodes = pool_of(trainer.model, rollout), [], []
    for row in (0, 5):
        prompt, length = rollout.prompt_ids[row].tolist(), int(pool.mask[row].sum())
        completion = rollout.completion_ids[row, :length].tolist()
        for t, token in enumerate(completion):
            logits = trainer.model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) + t - 1]
            trainer.model.zero_grad()
            logits.log_softmax(-1)[token].backward()
            gradients.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]))
            nodes.append(int(pool.node[row, t]))
            proxy = (torch.nn.functional.one_hot(torch.tensor(token), len(logits)) - logits.softmax(-1)).square().sum()
            torch.testing.assert_close(pool.energy[row, t], proxy, atol=1e-5, rtol=1e-5)
    gradients = torch.stack(gradients)
    torch.testing.assert_close(pool.gram[nodes][:, nodes], gradients @ gradients.T, atol=1e-4, rtol=1e-4)


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
def test_compare_baselines_agrees_with_the_laboratory(trainer, monkeypatch):
    """Means over many partitions of one pool, by the Gram matrix of all its tokens and by gradients of groups."""
    names = ("group_mean", "ogb", "ogb_loo", "otb", "otb_loo")
    monkeypatch.setattr(package, "PARTITIONS", 400)
    with at_rest(trainer, frozenset({"energy"})):
        rollout, found = measured(trainer, trainer.train_dataset[0], 32, names)
        with torch.enable_grad():
            laboratory = pool_of(trainer.model, rollout)
    # The laboratory's scores are at temperature 1: energies are the trainer's, gradients 1 / 0.7 as long
    squares = {name: mean_square(laboratory, partial(compute_advantages, baseline=name), 4, 400) for name in names}
    for name, square in squares.items():
        ours = found[name, 4]["square"] / found["group_mean", 4]["square"]
        assert ours == pytest.approx(square / squares["group_mean"], rel=0.1), name


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
    callback = GradientNoiseCallback()
    callback.decay = 0.999
    trainer_of([callback], **of_run, gradient_accumulation_steps=8, max_steps=150).train()
    assert callback.scale == pytest.approx(expected, rel=0.3)
    assert expected > 3  # noise is what is measured
