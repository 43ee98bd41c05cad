"""The plugin for ms-swift, on a small trainer in the place of its own. tests/hosts/run_swift.py runs the real one."""

import importlib
import logging
import sys
from collections import defaultdict
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import Qwen3ForCausalLM

from tests.helpers import tiny
from trl_otb.baselines import compute_advantages


N, PROMPT, LENGTHS = 2, 5, (6, 4)  # of the completions of two micro-batches


def entropy_from_logits(logits):
    raise AssertionError("only the loss takes entropies")


class SwiftsTrainer:
    """What of ms-swift's GRPOTrainer the plugin relies on, by the names and in the order of 4.6.0."""

    def __init__(self, **options):
        settings = {"temperature": 0.7, "beta": 0.0, "scale_rewards": "none", "advantage_estimator": "grpo"}
        settings |= {"kl_in_reward": False, "importance_sampling_level": "token", "loss_type": "grpo"}
        settings |= {"use_liger_loss": False, "dynamic_num_samples": False, "overlong_filter": False}
        settings |= {"num_generations": N, "num_generations_eval": N, "padding_free": False, "teacher": None}
        settings |= {"sequence_parallel_size": 1, "use_vllm": False, "top_k": -1}
        vars(self).update(settings | options)
        self.args = SimpleNamespace(use_vllm=self.use_vllm, top_k=self.top_k, should_save=True, resume_only_model=False)
        self.template = SimpleNamespace(
            padding_free=self.padding_free, sequence_parallel_size=self.sequence_parallel_size
        )
        self.accelerator = SimpleNamespace(process_index=0, num_processes=1)
        self.model, self.reference = policy(0), policy(1)
        self.reward_weights = torch.ones(1)
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}

    def train(self):
        self.batches = self._prepare_batch_inputs(self.samples)
        self._postprocess_batch(self.samples, self.batches)

    def _prepare_batch_inputs(self, samples):
        batches = []
        for length, ids in zip(LENGTHS, samples, strict=True):
            mask = torch.arange(length) < torch.tensor([[length], [length - 2]])
            of = SimpleNamespace(completion_mask=mask, truncated_mask=torch.tensor([True, False]), length=length)
            of.teacher_per_token_logps = self.teacher
            score = self._get_per_token_logps_and_entropies
            with torch.no_grad():
                of.old_per_token_logps = score(self.model, {"input_ids": ids}, of)[0]
                of.ref_per_token_logps = score(self.reference, {"input_ids": ids}, of)[0] if self.beta else None
            batches.append({"model_inputs": {"input_ids": ids}, "grpo_batch": of})
        return batches

    def _get_per_token_logps_and_entropies(self, model, model_inputs, grpo_batch, compute_entropy=False):
        ids, length = model_inputs["input_ids"], grpo_batch.length
        logits = model(ids).logits[:, -length - 1 : -1] / self.temperature
        logps = logits.log_softmax(-1).gather(-1, ids[:, -length:, None])[..., 0]
        grpo_trainer = sys.modules["swift.rlhf_trainers.grpo_trainer"]
        return logps, grpo_trainer.entropy_from_logits(logits) if compute_entropy else None

    def _postprocess_batch(self, samples, batch_encoded_inputs):
        for of in batch_encoded_inputs:
            of["grpo_batch"].advantages = torch.full(of["grpo_batch"].completion_mask.shape, torch.nan)

    def _save_optimizer_and_scheduler(self, output_dir):
        pass

    def _load_optimizer_and_scheduler(self, checkpoint):
        pass


def policy(seed):
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(tiny.config()).float()
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    return model


@pytest.fixture
def plugin(monkeypatch):
    names = ("swift", "swift.rlhf_trainers", "swift.rlhf_trainers.grpo_trainer", "swift.trainers")
    names += ("swift.trainers.trainer_factory", "swift.utils")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["swift"].__version__ = "4.6.0"
    trainers = sys.modules["swift.rlhf_trainers.grpo_trainer"]
    trainers.GRPOTrainer, trainers.gather, trainers.entropy_from_logits = SwiftsTrainer, None, entropy_from_logits
    sys.modules["swift.rlhf_trainers"].grpo_trainer = trainers
    sys.modules["swift.trainers.trainer_factory"].TrainerFactory = SimpleNamespace(TRAINER_MAPPING={})
    logger = logging.getLogger("swift")
    logger.warning_once = logger.warning
    sys.modules["swift.utils"].get_logger = lambda: logger
    monkeypatch.delitem(sys.modules, "trl_otb.swift", raising=False)
    yield importlib.import_module("trl_otb.swift")
    sys.modules.pop("trl_otb.swift", None)


REWARDS = torch.tensor([[1.0], [0.0], [0.5], [0.75]])


@pytest.fixture
def trained(plugin):
    """A trainer that has made one batch; its rewards and samples are the same each time."""

    def make(baseline, running_scale=False, train=True, **options):
        plugin.use(baseline, running_scale=running_scale)
        where, name = plugin.TrainerFactory.TRAINER_MAPPING["grpo"].rsplit(".", 1)
        trainer = getattr(importlib.import_module(where), name)(**options)
        generator = torch.Generator().manual_seed(0)
        trainer.samples = [torch.randint(0, 256, (N, PROMPT + length), generator=generator) for length in LENGTHS]
        trainer._rewards_per_func = REWARDS.clone()
        if train:
            trainer.train()
        return trainer

    return make


def padded(of, length=LENGTHS[0]):
    return torch.nn.functional.pad(of, (0, length - of.size(1)))


def advantages(trainer):
    return torch.cat([padded(of["grpo_batch"].advantages) for of in trainer.batches])


def mask_of(trainer):
    return torch.cat([padded(of["grpo_batch"].completion_mask) for of in trainer.batches])


def energies(trainer):
    """By a softmax over all logits."""
    of_batches = []
    for ids, length in zip(trainer.samples, LENGTHS, strict=True):
        with torch.no_grad():
            probs = (trainer.model(ids).logits[:, -length - 1 : -1] / trainer.temperature).softmax(-1)
        of_batches.append((torch.nn.functional.one_hot(ids[:, -length:], probs.size(-1)) - probs).square().sum(-1))
    return torch.cat([padded(of) for of in of_batches])


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("name", ["otb", "otb_loo", "ogb", "rloo", "group_mean", "ogb_pooled", "none"])
def test_advantages_are_those_of_the_batchs_energies(trained, name, beta):
    trainer = trained(name, beta=beta)
    expected = compute_advantages(REWARDS[:, 0], energies(trainer), mask_of(trainer), N, baseline=name)
    torch.testing.assert_close(advantages(trainer), expected, rtol=0, atol=1e-5)


def test_group_mean_gives_ms_swifts_advantages_under_its_scales(trained):
    for scale in ("none", "group", "batch"):
        groups = REWARDS.view(-1, N)
        deviation = {"none": 1.0, "group": groups.std(dim=1, keepdim=True) + 1e-4, "batch": REWARDS.std() + 1e-4}[scale]
        expected = ((groups - groups.mean(dim=1, keepdim=True)) / deviation).view(-1, 1)
        trainer = trained("group_mean", scale_rewards=scale)
        torch.testing.assert_close(advantages(trainer), expected * mask_of(trainer), rtol=1e-6, atol=1e-7)


def test_value_reads_the_states_that_predict_the_tokens(trained, plugin):
    trainer = trained("value")
    assert trainer._otb.has_learned
    for ids, length, values in zip(trainer.samples, LENGTHS, trainer._otb_values, strict=True):
        of_layer = []
        hook = trainer.model.model.layers[1].register_forward_hook(lambda *call, to=of_layer: to.append(call[-1]))
        with torch.no_grad():
            trainer.model(ids)
        hook.remove()
        expected = of_layer[0][:, -length - 1 : -1] @ plugin.projection(of_layer[0].size(-1))
        torch.testing.assert_close(values.states, expected)


def test_values_of_a_reference_model_are_not_taken(trained):
    plain, with_reference = trained("otb"), trained("otb", beta=0.1)
    assert len(with_reference._otb_values) == 2 * len(plain._otb_values)
    torch.testing.assert_close(advantages(plain), advantages(with_reference))


def test_completions_that_are_left_out_of_the_loss_have_no_energies(trained):
    whole, filtered = trained("otb"), trained("otb", overlong_filter=True)
    assert advantages(whole)[0].any() and not advantages(filtered)[0].any()


def test_metrics_and_the_line_at_the_end(trained, caplog):
    with caplog.at_level("INFO", "swift"):
        trainer = trained("otb")
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "Training with baseline 'otb' and scale_rewards 'none'."
    assert "of the gradient's power under group_mean (the last batch)" in said[-1]
    mean = (energies(trainer) * mask_of(trainer)).sum() / mask_of(trainer).sum()
    assert trainer._metrics["train"]["otb/energy/token_mean"] == [pytest.approx(mean.item(), rel=1e-4)]


def test_what_value_learned_is_in_checkpoints(trained, tmp_path, caplog):
    first = trained("value", running_scale=True)
    first._save_optimizer_and_scheduler(str(tmp_path))
    resumed = trained("value", running_scale=True, train=False)
    resumed._load_optimizer_and_scheduler(str(tmp_path))
    first.train(), resumed.train()
    torch.testing.assert_close(advantages(resumed), advantages(first), rtol=0, atol=0)
    assert not torch.equal(advantages(trained("value", running_scale=True)), advantages(first))
    resumed._load_optimizer_and_scheduler(str(tmp_path / "other"))
    assert "holds no state of baseline 'value'" in caplog.text


@pytest.mark.parametrize(
    ("options", "reason"), [({"use_vllm": True}, "tokens come from vLLM"), ({"top_k": 20}, "`top_k` is 20"), ({}, None)]
)
def test_luck_is_left_out_where_the_sampler_is_another(trained, caplog, options, reason):
    trained("value", **options)
    assert (f"Later luck is not subtracted: {reason}" in caplog.text) == (reason is not None)
    assert ("Later luck" in caplog.text) == (reason is not None)


@pytest.mark.parametrize(
    ("baseline", "options", "message"),
    [
        ("valeu", {}, "`baseline` is 'valeu'.*Did you mean 'value'"),
        ("otb", {"scale_rewards": "group"}, "`--scale_rewards` is 'group'.*Set `--scale_rewards none`"),
        ("rloo", {"scale_rewards": "gdpo"}, "`--scale_rewards` is 'gdpo'"),
        ("rloo", {"scale_rewards": "group", "running_scale": True}, "'rloo' with `running_scale` does not allow"),
        ("otb", {"advantage_estimator": "rloo"}, "`--advantage_estimator` is 'rloo'"),
        ("otb", {"kl_in_reward": True, "beta": 0.1}, "`--kl_in_reward` is true"),
        ("otb", {"sequence_parallel_size": 2}, "`--sequence_parallel_size` is 2, which cuts completions"),
        ("value", {"padding_free": True}, "`--padding_free` is true.*such as 'otb'"),
        ("otb", {"importance_sampling_level": "sequence"}, "is 'sequence'.*Set 'sequence_token'"),
        ("otb", {"loss_type": "real"}, "`--loss_type` is 'real'"),
        ("otb", {"use_liger_loss": True}, "`--use_liger_kernel` is true.*such as 'rloo'"),
        ("otb", {"num_generations": 1}, "`--num_generations` is 1.*Choose 'value'"),
        ("otb", {"dynamic_num_samples": True}, "another number of samples than of requests"),
        ("otb", {"teacher": torch.zeros(2, 6)}, "A teacher .* adds to advantages"),
    ],
)
def test_what_a_baseline_would_not_reach_is_refused(trained, baseline, options, message):
    with pytest.raises(ValueError, match=message):
        trained(baseline, **options)


def test_a_baseline_per_completion_goes_with_losses_per_completion(trained):
    options = {"importance_sampling_level": "sequence", "loss_type": "real", "use_liger_loss": True}
    trainer = trained("rloo", padding_free=True, **options)
    assert advantages(trainer).isfinite().all()


def test_another_ms_swift_is_named(trained, plugin, monkeypatch):
    monkeypatch.delattr(plugin.grpo_trainer, "entropy_from_logits")
    with pytest.raises(ValueError, match="ms-swift 4.6.0 has no `grpo_trainer.entropy_from_logits`"):
        trained("otb")


def test_a_layer_that_is_called_otherwise_is_an_error(trained):
    trainer = trained("value", train=False)
    forward = trainer.model.model.forward
    trainer.model.model.forward = lambda *args, **kwargs: forward(*args, **kwargs) and forward(*args, **kwargs)
    with pytest.raises(ValueError, match="expected hidden states for \\(2, 6\\) rows and tokens.*gave \\(4, 6\\)"):
        trainer.train()


def test_evaluation_teaches_nothing(trained):
    trainer = trained("value", train=False)
    trainer.model.eval()
    trainer.train()
    assert not trainer._otb.has_learned and trainer._metrics["eval"] and not trainer._metrics["train"]
