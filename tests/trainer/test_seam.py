"""The seam to TRL: what moved is named, and nothing fails silently."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from trl import GRPOTrainer

from tests.helpers import tiny
from tests.helpers.settings import SOURCES
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer
from trl_otb.seam import contract


ROOT = Path(__file__).resolve().parents[2]
READ = json.loads(contract.READ.read_text())
as_read = pytest.mark.skipif(contract.versions() != READ["versions"], reason="another TRL: make drift")


def test_sources_in_trl_are_unchanged():
    """When this fails: read each of the named sources again, mend what builds on them, and run `make hashes`."""
    assert contract.drift() is None and contract.versions() == READ["versions"]


def test_changed_trl_gives_one_line(monkeypatch):
    deviation = contract.trl_utils.nanstd
    monkeypatch.setattr(contract.trl_utils, "nanstd", lambda tensor, dim=None: deviation(tensor, dim))
    monkeypatch.setattr(contract, "versions", lambda: {"trl": "1.17.0", "transformers": "5.99"})
    said = contract.drift()
    assert "trl 1.17.0 and transformers 5.99 is installed" in said and READ["versions"]["trl"] in said
    assert "trl.trainer.utils.nanstd" in said and " is another" in said and "\n" not in said


def test_later_trl_minors_are_allowed():
    (requirement,) = [
        Requirement(text)
        for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        if text.startswith("trl")
    ]
    taken = requirement.specifier.filter(["1.15", "1.16.0", "1.17.0", "1.99", "2.0"])
    assert list(taken) == ["1.16.0", "1.17.0", "1.99"]


@as_read
def test_module_prints_drift():
    command = [sys.executable, "-W", "ignore", "-m", "trl_otb.seam"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("sources: those that were read\n")


OWNERS = {name: owner for owner, parts in contract.PARTS.items() for name in parts}


@pytest.mark.parametrize("name", OWNERS)
@pytest.mark.parametrize("how", ["gone", "other parameters"])
def test_moved_part_of_trl_is_named(name, how, monkeypatch, model_path, tmp_path):
    owner = OWNERS[name]
    if how == "gone":
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, lambda nothing: None)
    args = OTBGRPOConfig(**tiny.SETTINGS, output_dir=str(tmp_path))
    with pytest.raises(ImportError) as caught:
        OTBGRPOTrainer(model_path, tiny.even_bytes, args=args, train_dataset=tiny.prompts())
    assert name in str(caught.value) and f"pip install 'trl=={READ['versions']['trl']}'" in str(caught.value)


@pytest.mark.parametrize("name", contract.ATTRIBUTES)
def test_an_attribute_that_moved_is_named(name):
    attributes = dict.fromkeys(set(contract.ATTRIBUTES) - {name})
    with pytest.raises(ImportError, match=f"`GRPOTrainer.{name}` is gone"):
        contract.check_trl(type("Trainer", (), attributes)())


def test_a_replaced_lm_head_is_noticed(train):
    from trl.trainer.utils import add_fused_lm_head

    for source in list(SOURCES)[1:]:
        trainer = train(train=False, **SOURCES[source])
        add_fused_lm_head(trainer.model, outputs=("log_probs", "entropy"))
        with pytest.raises(RuntimeError, match="replaced the fused LM head"):
            trainer.train()


# A TRL that goes another way must not train on as plain GRPO


@pytest.mark.parametrize("factor", [1.0, 1.001])
@pytest.mark.parametrize("scale", ["none", "group"])
def test_differing_advantages_stop_first_rollout(train, monkeypatch, scale, factor):
    generate = GRPOTrainer._generate_and_score_completions

    def otherwise(self, inputs):
        batch = generate(self, inputs)
        return batch | {"advantages": batch["advantages"] * factor}

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", otherwise)
    trainer = train(OTBGRPOTrainer, train=False, baseline="ogb", scale_rewards=scale)
    if factor == 1.0:
        trainer.train()
        return
    with pytest.raises(ImportError, match="how GRPOTrainer forms its advantages: for completion"):
        trainer.train()


def test_rewards_past_the_seam_are_errors(train, monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", lambda self, inputs: {})
    with pytest.raises(ImportError, match="rewards no longer come from"):
        train(OTBGRPOTrainer)
