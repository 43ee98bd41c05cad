"""The seam to TRL: what moved is named, and nothing fails silently."""

import ast
import inspect
import json
import re
import tomllib
import types
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
import trl
from packaging.requirements import Requirement
from packaging.version import Version
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer

import trl_otb
from tests.helpers import tiny
from tests.helpers.settings import SETTINGS, SGD, SOURCES, assert_same_weights
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer
from trl_otb.config import LOSS_TYPES
from trl_otb.experimental.async_grpo.parts import ASYNC_GRPO
from trl_otb.seam import contract
from trl_otb.seam.contract import from_library
from trl_otb.seam.older_trl import LACKING
from trl_otb.seam.parts import CLI, GRPO


CONTRACTS = (GRPO, ASYNC_GRPO, CLI)

ROOT = Path(__file__).resolve().parents[2]
TESTED = json.loads(contract.PINNED.read_text())


@pytest.mark.tested_trl
def test_sources_in_trl_are_unchanged():
    """When this fails: read each of the named sources again, mend what builds on them, and run `make hashes`."""
    assert not [name for of in CONTRACTS for name in of.changed()] and contract.versions() == TESTED["versions"]


def test_every_version_from_the_oldest_on_is_taken(monkeypatch):
    (requirement,) = [
        Requirement(text)
        for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        if text.startswith("trl")
    ]
    newest, oldest = Version(TESTED["versions"]["trl"]), Version(contract.OLDEST)
    tested, older = [f"{oldest}.0", f"{oldest.major}.{oldest.minor + 1}.2", str(newest)], f"{oldest.major}.8.9"
    newer = [f"{newest.major}.{newest.minor}.{newest.micro + 1}", f"{newest.major}.{newest.minor + 1}.0", "9.0.0"]
    assert list(requirement.specifier.filter([older, *tested, *newer])) == tested + newer
    for version in tested + newer:
        monkeypatch.setattr(contract, "versions", lambda version=version: {"trl": version})
        contract.check_version()
        assert contract.is_newer() == (version in newer)
    monkeypatch.setattr(contract, "versions", lambda: {"trl": older})
    with pytest.raises(ImportError, match=rf"trl {older} is installed, and trl_otb needs {oldest} or newer"):
        contract.check_version()


def private_names(tree):
    """Private names that code defines, reads, or quotes."""
    kinds = {ast.FunctionDef: "name", ast.Attribute: "attr", ast.Constant: "value", ast.alias: "name"}
    found = (getattr(node, kinds[type(node)]) for node in ast.walk(tree) if type(node) in kinds)
    return {name for name in found if isinstance(name, str) and re.fullmatch(r"_[a-z]\w+", name)}


@pytest.mark.tested_trl
def test_every_private_part_of_trl_is_in_a_contract():
    """Also methods that are overridden. By name: it finds those of trainers, whose own files have them."""
    theirs = [Path(inspect.getfile(of)) for of in (GRPOTrainer, GRPOConfig, *GRPOTrainer.__mro__[1:3])]
    theirs += (Path(trl.__file__).parent / "experimental" / "async_grpo").glob("*.py")
    of_trl = set(re.findall(r"\b_[a-z]\w+", " ".join(path.read_text() for path in theirs)))
    package, contracts = Path(trl_otb.__file__).parent, ("seam/parts.py", "experimental/async_grpo/parts.py")
    own = {path: private_names(ast.parse(path.read_text())) for path in package.rglob("*.py")}
    listed = re.findall(r"\b_[a-z]\w+", " ".join((package / path).read_text() for path in contracts))
    used = {name for path, names in own.items() if str(path.relative_to(package)) not in contracts for name in names}
    assert len(used & of_trl) > 15
    assert not (used & of_trl) - set(listed)


OWNERS = {name: resolve_name(owner) for owner, parts in GRPO.parts.items() for name in parts if name not in LACKING}


@pytest.mark.parametrize("name", OWNERS)
@pytest.mark.parametrize("how", ["gone", "other parameters"])
def test_moved_part_of_trl_is_named(name, how, monkeypatch, model_path, tmp_path):
    owner = OWNERS[name]
    if how == "gone":
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, lambda nothing: None)
    args = OTBGRPOConfig(**tiny.SETTINGS, output_dir=str(tmp_path))
    if getattr(owner, name, None) is not None and how == "gone":  # its base has one
        assert any(part.endswith(f".{name}") for part in GRPO.changed())
        return
    moved = ImportError, f"{name}.*pip install 'trl=={TESTED['versions']['trl']}'"
    error, message = moved if how == "gone" else (TypeError, rf"{name}` was replaced by `tests\..*does not take")
    with pytest.raises(error, match=message):
        OTBGRPOTrainer(model_path, tiny.even_bytes, args=args, train_dataset=tiny.prompts())


def test_only_files_of_libraries_are_theirs():
    path = Path(trl.__file__).parent
    codes = [compile("def f(): pass", f"{folder}/of.py", "exec") for folder in (path, f"{path}_of_a_user")]
    assert [from_library(types.FunctionType(code, {})) for code in codes] == [True, False]


ATTRIBUTES = [(of, owner, name) for of in CONTRACTS for owner, names in of.attributes.items() for name in names.split()]


@pytest.mark.parametrize(("of", "owner", "name"), ATTRIBUTES)
def test_an_attribute_that_moved_is_named(of, owner, name):
    attributes = dict.fromkeys({*of.attributes[owner].split()} - {name})
    with pytest.raises(ImportError, match=f"`{owner}.{name}` is gone"):
        of.check_attributes(owner, type("Instance", (), attributes)())


@pytest.mark.skipif("add_fused_lm_head" in LACKING, reason="before trl 1.15 there is none")
def test_a_replaced_lm_head_is_noticed(train):
    from trl.trainer.utils import add_fused_lm_head

    for source in list(SOURCES)[1:]:
        trainer = train(train=False, **SOURCES[source])
        add_fused_lm_head(trainer.model, outputs=("log_probs", "entropy"))
        with pytest.raises(RuntimeError, match="replaced the fused LM head"):
            trainer.train()


# A TRL that goes another way must not train on as plain GRPO


@pytest.mark.parametrize("scale", ["none", "group"])
def test_differing_advantages_stop_first_rollout(train, monkeypatch, scale):
    generate = GRPOTrainer._generate_and_score_completions

    def otherwise(self, inputs):
        batch = generate(self, inputs)
        return batch | {"advantages": batch["advantages"] * 1.001}

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", otherwise)
    with pytest.raises(ImportError, match="how GRPOTrainer forms its advantages: for completion"):
        train(OTBGRPOTrainer, baseline="ogb", scale_rewards=scale)


WRONG = {
    "ignored": (torch.ones_like, "they have no effect"),
    "their signs": (torch.sign, "its gradient is off by"),
    "squared": (torch.square, "its gradient rises with the advantage"),
    "negative": (torch.neg, "its gradient rises with the advantage, as with a flipped sign"),
    "positive ones": (torch.relu, "negative advantages have no effect"),
    "negative ones": (lambda advantages: advantages.clamp(max=0), "positive advantages have no effect"),
    "of another row": (lambda advantages: advantages.roll(1, 0), "its gradient is off by"),
    "of another token": (lambda advantages: advantages.roll(1, -1), "its gradient is off by"),
    "their mean": (lambda advantages: advantages.mean(-1, keepdim=True).expand_as(advantages), "is off by"),
    "not a number": (lambda advantages: advantages / (advantages > 0), "its gradient is off by nan"),
}


@pytest.mark.parametrize("name", WRONG)
def test_loss_of_other_advantages_is_refused(train, monkeypatch, name):
    loss, (change, problem) = GRPOTrainer._compute_loss, WRONG[name]

    def changed(self, model, inputs):
        return loss(self, model, inputs | {"advantages": change(inputs["advantages"])})

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", changed)
    trainer = train(OTBGRPOTrainer, baseline="value", train=False)
    assert trainer._trl_otb.known_loss is None
    with pytest.raises(ImportError, match=f"`GRPOTrainer._compute_loss` does not weight .* advantage: .*{problem}"):
        trainer.train()


@pytest.mark.parametrize("setting", [*(f"loss {name}" for name in LOSS_TYPES), "sequence ratios", "lora and beta"])
def test_loss_of_one_advantage_per_completion_trains_the_same(train, setting):
    """With the gradients of TRL's loss for advantages of 1, -1 and 0, as where it takes no others."""
    options = {"baseline": "otb", "max_grad_norm": 0.0, **SGD, **SETTINGS[setting]}
    trainers = [train(OTBGRPOTrainer, train=False, **options) for _ in range(2)]
    trainers[1]._trl_otb.by_sign = True
    for trainer in trainers:
        set_seed(7)
        trainer.train()
    assert_same_weights(*trainers, atol=1e-6, rtol=1e-5)


def test_loss_of_one_advantage_per_completion_is_found(train, monkeypatch, caplog):
    plain, loss = train(OTBGRPOTrainer, baseline="value", **SGD), GRPOTrainer._compute_loss

    def refuses(self, model, inputs):
        if inputs["advantages"].dim() != 1:
            raise ValueError("one per completion")
        return loss(self, model, inputs)

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", refuses)
    type(contract.logger).warning_once.cache_clear()
    trainer = train(OTBGRPOTrainer, baseline="value", **SGD)
    assert trainer._trl_otb.by_sign
    assert_same_weights(plain, trainer, atol=1e-6, rtol=1e-5)
    assert "takes one advantage per completion. Each token gets its own by" in caplog.text
    assert "ValueError: one per completion" in caplog.text


def test_another_loss_of_the_same_advantages_is_taken(train, monkeypatch):
    plain, loss = train(OTBGRPOTrainer, baseline="value"), GRPOTrainer._compute_loss
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda self, model, inputs: loss(self, model, inputs))
    trainer = train(OTBGRPOTrainer, baseline="value", train=False)
    assert trainer._trl_otb.known_loss is None
    trainer.train()
    assert_same_weights(plain, trainer)
    assert trainer._trl_otb.known_loss is GRPOTrainer._compute_loss


def test_rewards_past_the_seam_are_errors(train, monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", lambda self, inputs: {})
    with pytest.raises(ImportError, match="rewards no longer come from"):
        train(OTBGRPOTrainer)
