"""Energies, advantages and what is logged of them follow the definitions, whichever forward energies come from."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers import tiny
from tests.helpers.oracles import energies_by_softmax, generated, mask_of
from tests.helpers.recording import Recording, first_rollout
from tests.helpers.settings import LORA, SOURCES, in_turn
from trl_otb.baselines import BASELINES, compute_advantages
from trl_otb.seam.older_trl import LACKING


# Every baseline with one of the sources; the paper's and `value` with all of them, in the quick run, too
CASES = [pytest.param(name, source, marks=pytest.mark.quick) for source in SOURCES for name in ("otb", "value")]
CASES += [case for case in in_turn(BASELINES, SOURCES) if case[0] not in ("otb", "value")]


@pytest.mark.parametrize(("baseline", "source"), CASES)
def test_advantages_match_float64_softmax(train, model_path, source, baseline):
    trainer = train(baseline=baseline, temperature=0.7, learning_rate=0.0, max_steps=1, **SOURCES[source])
    batch = first_rollout(trainer)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    energy = energies_by_softmax(model, batch, temperature=0.7)
    rewards = torch.tensor(tiny.even_bytes(generated(batch)))
    expected = compute_advantages(rewards, energy, mask_of(batch), 4, baseline=baseline)
    actual = batch["advantages"]
    if not BASELINES[baseline].per_token:
        actual = actual.unsqueeze(1) * mask_of(batch)
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=0)
    assert expected.abs().max() > 0.01


@pytest.mark.parametrize("baseline", ["ogb_pooled", "rloo_pooled", "value"])
def test_whole_generation_batch_is_pooled(train, model_path, baseline, caplog):
    """Four prompts in micro-batches of two; with two prompts nothing is pooled, which is said."""
    trainer = train(baseline=baseline, learning_rate=0.0, max_steps=1, gradient_accumulation_steps=2)
    rollout = trainer.rollouts["train"]
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    inputs = rollout.rewards, energies_by_softmax(model, vars(rollout)), rollout.mask, 4
    expected = compute_advantages(*inputs, baseline=baseline)
    torch.testing.assert_close(rollout.advantages * rollout.mask, expected, atol=2e-6, rtol=0)
    apart = torch.cat([compute_advantages(*(x[i : i + 8] for x in inputs[:3]), 4, baseline=baseline) for i in (0, 8)])
    assert len(rollout) == 16 and (expected - apart).abs().max() > 0.01
    assert "nothing is pooled" not in caplog.text
    train(baseline=baseline, max_steps=1)
    assert f"`baseline` is '{baseline}', which pools prompts, and a generation batch has 2" in caplog.text


@pytest.mark.skipif("add_fused_lm_head" in LACKING, reason="before trl 1.15 all forwards return logits")
@pytest.mark.parametrize(
    ("source", "baseline", "without_gradient", "computed"),
    [
        ("the forwards that sampled", "otb", 0, 0),
        ("the forwards that sampled", "value", 0, 0),
        ("the forwards that sampled", "group_mean", 0, 0),
        ("one extra no-gradient forward", "otb", 2, 2),
        ("one extra no-gradient forward", "rloo_pooled", 0, 0),
        ("the no-gradient forward that GRPOTrainer runs anyway", "otb", 1, 1),
        ("the no-gradient forward that GRPOTrainer runs anyway", "group_mean", 1, 1),
    ],
)
def test_energies_are_computed_once_a_rollout(train, monkeypatch, source, baseline, without_gradient, computed):
    """
    No forward is run more than is needed, and those that need no Σπ² do not compute it. None calls the LM head, which
    alone would make (B, T, V) logits.
    """
    forwards = []
    original = Recording._get_per_token_logps_and_entropies

    def watched(self, model, *args, **kwargs):
        def outputs_of(module, args, outputs):
            forwards.append((outputs.log_sum_sq_probs is not None, len(outputs.log_probs)))

        head = self.model.get_output_embeddings()
        hooks = [head.register_forward_hook(lambda *_: pytest.fail("the LM head was called for logits"))]
        hooks.append(model.register_forward_hook(outputs_of))
        try:
            return original(self, model, *args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()

    monkeypatch.setattr(Recording, "_get_per_token_logps_and_entropies", watched)
    trainer = train(baseline=baseline, **SOURCES[source])
    assert trainer.forwards == {"grad": 2, "no_grad": without_gradient}
    assert sum(rows for with_energy, rows in forwards if with_energy) == 8 * computed
    assert sum(rows for _, rows in forwards) > 8 * computed


@pytest.mark.parametrize("peft", [{}, {"peft_config": LORA}], ids=["full", "lora"])
def test_reference_pass_is_not_policys(train, peft):
    """Once the policy has left the reference, energies must be the policy's."""
    trainer = train(beta=0.1, num_iterations=2, max_steps=3, learning_rate=0.1, **peft)
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": "1+1=", "answer": "2"}] * 8)
    assert (batch["old_per_token_logps"] - batch["ref_per_token_logps"]).abs().max() > 0.01  # a mistake would show
    expected = energies_by_softmax(trainer.model.eval(), batch)
    actual = trainer.rollouts["train"].energy.double() * mask_of(batch)
    assert trainer.energy_source == "the no-gradient forward that GRPOTrainer runs anyway"
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_completions_table_holds_our_advantages(train, tmp_path):
    options = {"log_completions": True, "num_completions_to_print": 0, "max_steps": 1}
    trainer = train(output_dir=str(tmp_path / "run"), **options)
    table = pd.read_parquet(next((tmp_path / "run" / "completions").glob("*.parquet")))
    batch = first_rollout(trainer)
    mask = mask_of(batch)
    expected = (batch["advantages"] * mask).sum(1) / mask.sum(1)
    torch.testing.assert_close(torch.tensor(table["advantage"].to_numpy(), dtype=torch.float32), expected)


def test_model_card_and_tags(train, tmp_path):
    train(max_steps=1, save_strategy="steps", save_steps=1, output_dir=str(tmp_path / "run"))
    card = (tmp_path / "run" / "README.md").read_text()
    assert "The Optimal Token Baseline" in card and "2602.07078" in card and "- otb" in card
    assert "DeepSeekMath" not in card
    train(max_steps=1, save_strategy="steps", save_steps=1, output_dir=str(tmp_path / "other"), baseline="value")
    other = (tmp_path / "other" / "README.md").read_text()
    assert "trained with OTB" not in other and "DeepSeekMath" in other and "`baseline='value'`" in other
    train(max_steps=1, save_strategy="steps", save_steps=1, output_dir=str(tmp_path / "lora"), peft_config=LORA)
    for text in (card, (tmp_path / "lora" / "README.md").read_text()):
        assert Path(text.split("Trained from `")[1].split("`")[0]).is_dir()
    assert "`baseline='otb'`, `num_generations=4`, `scale_rewards='none'`" in card


# What power is compared with: the group mean, or `rloo` if the baseline is unbiased
@pytest.mark.parametrize(("baseline", "reference"), [("otb", "group_mean"), ("otb_loo", "rloo"), ("ogb", "group_mean")])
def test_metrics_are_what_the_reference_says(train, baseline, reference):
    """Recomputed from the batch by the definitions, with the arithmetic spelled out."""
    trainer = train(max_steps=1, learning_rate=0.0, baseline=baseline)
    batch = first_rollout(trainer)
    mask = mask_of(batch)
    energy = energies_by_softmax(trainer.model.eval(), batch).float()
    rewards = torch.tensor(tiny.even_bytes(generated(batch)))
    compared = compute_advantages(rewards, energy, mask, 4, baseline=reference)
    advantages = compute_advantages(rewards, energy, mask, 4, baseline=baseline)
    expected = {
        "energy/token_mean": energy.sum() / mask.sum(),
        "advantage/abs_mean": advantages.abs().sum() / mask.sum(),
        "baseline/mean": ((rewards[:, None] - advantages) * mask).sum() / mask.sum(),
        "grad_power": (energy * advantages**2).sum(1).mean(),
        "grad_power_reference": (energy * compared**2).sum(1).mean(),
        "grad_power_ratio": (energy * advantages**2).sum() / (energy * compared**2).sum(),
    }
    found = {name: trainer.state.log_history[0][f"otb/{name}"] for name in expected}
    assert found == pytest.approx({name: value.item() for name, value in expected.items()}, rel=1e-4, abs=1e-6)
