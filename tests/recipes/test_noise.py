"""The two measurements of gradient noise, of a run and of the comparison, beside each other."""

import json
from dataclasses import replace

import pytest

from recipes.toy import worked_sums
from tests.helpers import tiny
from trl_otb import GradientNoiseCallback, OTBGRPOConfig, OTBGRPOTrainer
from trl_otb.baselines import BASELINES
from trl_otb.comparison.efficiency import moments_of
from trl_otb.comparison.gradients import CompletionGradients, Projection
from trl_otb.comparison.moments import prompt_moments
from trl_otb.scripts.problems import ProblemOptions, load_problems
from trl_otb.seam.pools import at_rest, sample


def moments_of_prompt(trainer, example, completions, seed):
    """Of a pool of completions, in groups of 4 under `ogb`, by the gradients of all parameters."""
    parameters = list(trainer.model.parameters())
    of = CompletionGradients(trainer, parameters, Projection([p.numel() for p in parameters], 10**9))
    ((pool, rows),) = sample(trainer, [example], completions, seed)
    masks = [row["completion_mask"][0] for row in rows]
    return prompt_moments(pool, masks, lambda i, a: of(rows[i], a), {"ogb": BASELINES["ogb"]}, [4], {})


@pytest.mark.slow
def test_the_callback_agrees_with_compare_baselines(short_policy, tmp_path):
    """
    The same eight prompts, without learning, and a reward for few tokens, whose gradient the prompts share. The
    callback's signal is ⟨g_p, g_q⟩ for prompts that differ, its noise the rest of E‖ĝ_p‖²: of completions and prompts.
    """
    options = ProblemOptions(dataset_options=json.dumps(worked_sums.CHAIN_SUM), num_train_problems=8, instruction="")
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
        of_prompts = [moments_of_prompt(trainer, prompts[i], 96, seed=i) for i in range(8)]
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
