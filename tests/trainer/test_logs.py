"""What a run leaves behind: table, card, logs."""

from pathlib import Path

import pandas as pd
import pytest
import torch

from tests.helpers import tiny
from tests.helpers.oracles import energies_by_softmax, mask_of
from tests.helpers.recording import first_rollout
from tests.helpers.settings import SOURCES, logged
from trl_otb.baselines import compute_advantages


def test_completions_table_holds_our_advantages(train, tmp_path):
    for source, options in SOURCES.items():
        trainer = train(
            log_completions=True,
            max_steps=1,
            output_dir=str(tmp_path / source[:7]),
            num_completions_to_print=0,
            **options,
        )
        table = pd.read_parquet(next((tmp_path / source[:7] / "completions").glob("*.parquet")))
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
    assert base.is_dir() and "`baseline='otb'`, `leave_one_out=False`, `num_generations=4`" in card


def test_metrics_are_what_the_readme_says(train):
    """Recomputed from the batch by the definitions, with the arithmetic spelled out."""
    trainer = train(max_steps=1, learning_rate=0.0)
    batch = first_rollout(trainer)
    mask = mask_of(batch)
    energy = energies_by_softmax(trainer.model.eval(), batch).float()
    ids = [i[m].tolist() for i, m in zip(batch["completion_ids"], mask.bool(), strict=True)]
    rewards = torch.tensor(tiny.even_bytes(ids))
    group_mean = compute_advantages(rewards, energy, mask, 4, baseline="group_mean")
    advantages = batch["advantages"]
    expected = {
        "energy/token_mean": energy.sum() / mask.sum(),
        "energy/completion_mean": energy.sum(1).mean(),
        "energy/group_std": energy.sum(1).view(2, 4).std(1).mean(),
        "advantage/abs_mean": advantages.abs().sum() / mask.sum(),
        "baseline/mean": ((rewards[:, None] - advantages) * mask).sum() / mask.sum(),
        "grad_power": (energy * advantages**2).sum(1).mean(),
        "grad_power_group_mean": (energy * group_mean**2).sum(1).mean(),
        "grad_power_ratio": (energy * advantages**2).sum() / (energy * group_mean**2).sum(),
    }
    for name, value in expected.items():
        assert logged(trainer, f"otb/{name}")[0] == pytest.approx(value.item(), rel=1e-4, abs=1e-6), name
