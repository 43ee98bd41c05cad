"""What a run leaves behind: table, card, logs."""

from pathlib import Path

import pandas as pd
import pytest
import torch

from tests.helpers import tiny
from tests.helpers.oracles import energies_by_softmax, generated, mask_of
from tests.helpers.recording import first_rollout
from tests.helpers.settings import SOURCES
from trl_otb.baselines import compute_advantages


@pytest.mark.parametrize("source", SOURCES)
def test_completions_table_holds_our_advantages(train, tmp_path, source):
    options = {"log_completions": True, "num_completions_to_print": 0, "max_steps": 1, **SOURCES[source]}
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
    base = Path(card.split("Trained from `")[1].split("`")[0])
    assert base.is_dir() and "`baseline='otb'`, `num_generations=4`, `scale_rewards='none'`" in card


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
