"""The trainer on a tiny model, against GRPOTrainer and against independent computations of what it should do."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from tests import tiny
from tests.recording import Recording, energies_by_softmax, first_rollout, logged, mask_of
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer, trl_seam
from trl_otb.baselines import BASELINES, TOKEN_BASELINES, compute_advantages
from trl_otb.config import LOSS_TYPES
from trl_otb.metrics import STATISTICS, completion_statistics, summarize


LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def weights(trainer):
    return {name: p.detach() for name, p in trainer.model.named_parameters()}


def assert_same_weights(a, b, **tolerance):
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys()
    for name in a:
        if tolerance:
            torch.testing.assert_close(a[name], b[name], msg=name, **tolerance)
        else:
            assert torch.equal(a[name], b[name]), name


# The group mean is GRPOTrainer, to the bit

SETTINGS = {
    "plain": {},
    "accumulation": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "split groups": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "num_iterations": {"num_iterations": 2, "max_steps": 4},
    "steps_per_generation": {"steps_per_generation": 2, "max_steps": 4},
    "beta": {"beta": 0.1},
    "scale by group": {"scale_rewards": "group"},
    "scale by batch": {"scale_rewards": "batch"},
    "mask_truncated": {"mask_truncated_completions": True},
    "entropy bonus": {"entropy_coef": 0.01},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_target": 1.0},
    "high-entropy tokens": {"top_entropy_quantile": 0.5},
    "sequence ratios": {"importance_sampling_level": "sequence", "num_iterations": 2, "loss_type": "grpo"},
    "off-policy mask": {"off_policy_mask_threshold": 1e-3, "num_iterations": 2, "max_steps": 4},
    "two-sided clipping": {"delta": 1.5, "num_iterations": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "temperature": {"temperature": 0.7},
    "fp32 head": {"cast_lm_head_to_fp32": True},
    "bf16": {"bf16": True},
    "lora": {"peft_config": LORA},
    "lora and beta": {"peft_config": LORA, "beta": 0.1},
    **{f"loss {name}": {"loss_type": name, "num_iterations": 2} for name in LOSS_TYPES},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_group_mean_gives_the_weights_and_logs_of_grpo_trainer(train, setting):
    options = {"scale_rewards": "none", **SETTINGS[setting]}
    grpo = train(GRPOTrainer, GRPOConfig, **options)
    otb = train(OTBGRPOTrainer, OTBGRPOConfig, baseline="group_mean", **options)
    assert_same_weights(grpo, otb)
    timings = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")
    for of_grpo, of_otb in zip(grpo.state.log_history, otb.state.log_history, strict=True):
        shared = {k: v for k, v in of_otb.items() if not k.startswith("otb/") and k not in timings}
        assert shared == {k: v for k, v in of_grpo.items() if k not in timings}
    untrained = weights(train(train=False, baseline="group_mean", **options))
    assert any(not torch.equal(p, untrained[name]) for name, p in weights(otb).items()), "nothing was trained"


def test_group_mean_normalises_several_rewards_first_as_grpo_trainer_does(train):
    options = {
        "reward_funcs": [tiny.even_bytes, lambda completion_ids, **kwargs: [-len(ids) / 8 for ids in completion_ids]],
        "reward_weights": [1.0, 0.3],
        "multi_objective_aggregation": "normalize_then_sum",
    }
    grpo = train(GRPOTrainer, GRPOConfig, **options)
    # GRPOTrainer subtracts the batch's mean there, which equals every group's: 0 up to rounding
    assert_same_weights(grpo, train(baseline="group_mean", **options), atol=1e-5, rtol=0)


def test_a_group_with_one_scorable_completion_carries_no_signal_as_in_grpo_trainer(train):
    def reward(completion_ids, **kwargs):
        return [r if i in (0, 5, 6, 7) else None for i, r in enumerate(tiny.even_bytes(completion_ids))]

    for scale in ("none", "group"):
        grpo = train(GRPOTrainer, GRPOConfig, scale_rewards=scale, reward_funcs=reward)
        assert_same_weights(grpo, train(baseline="group_mean", scale_rewards=scale, reward_funcs=reward))


# Energies and advantages are what the definitions say

SOURCES = {
    "the training forward": {},
    "one extra no-gradient forward": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "the no-gradient forward that GRPOTrainer runs anyway": {"num_iterations": 2},
}


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("source", SOURCES)
def test_advantages_are_those_of_a_float64_softmax(train, model_path, source, baseline):
    trainer = train(baseline=baseline, temperature=0.7, learning_rate=0.0, max_steps=1, **SOURCES[source])
    batch = first_rollout(trainer)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    energy = energies_by_softmax(model, batch, temperature=0.7)
    rewards = torch.tensor(
        tiny.even_bytes([i[m].tolist() for i, m in zip(batch["completion_ids"], mask_of(batch).bool(), strict=True)])
    )
    expected = compute_advantages(rewards, energy, mask_of(batch), 4, baseline=baseline)
    actual = batch["advantages"]
    if baseline not in TOKEN_BASELINES:
        actual = actual.unsqueeze(1) * mask_of(batch)
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=0)
    assert expected.abs().max() > 0.01


def test_all_sources_give_the_same_advantages_and_weights(train):
    """One generation batch of the same completions, dealt to one micro-batch, to four, and used twice."""
    trainers = {name: train(max_steps=1, **options) for name, options in SOURCES.items()}
    assert [t.energy_source for t in trainers.values()] == list(SOURCES)
    reference, *others = trainers.values()
    for other in others:
        torch.testing.assert_close(
            first_rollout(other)["advantages"], first_rollout(reference)["advantages"], atol=1e-6, rtol=0
        )
        assert_same_weights(other, reference, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("source", "baseline", "forwards"),
    [
        ("the training forward", "otb", {"grad": 2, "no_grad": 0}),
        ("the training forward", "group_mean", {"grad": 2, "no_grad": 0}),
        ("one extra no-gradient forward", "otb", {"grad": 8, "no_grad": 2}),
        ("one extra no-gradient forward", "rloo", {"grad": 8, "no_grad": 0}),
        ("the no-gradient forward that GRPOTrainer runs anyway", "otb", {"grad": 2, "no_grad": 1}),
    ],
)
def test_forwards_are_counted(train, source, baseline, forwards):
    assert train(baseline=baseline, **SOURCES[source]).forwards == forwards


@pytest.mark.parametrize(
    ("source", "baseline", "computed"),
    [
        ("the training forward", "otb", 2),
        ("the training forward", "group_mean", 2),
        ("one extra no-gradient forward", "otb", 2),
        ("the no-gradient forward that GRPOTrainer runs anyway", "otb", 1),
        ("the no-gradient forward that GRPOTrainer runs anyway", "group_mean", 1),
    ],
)
def test_energies_are_computed_once_a_rollout(train, monkeypatch, source, baseline, computed):
    """Of the forwards above, those that need no Σπ² do not compute it."""
    yielded = []
    original = trl_seam._RecordingModel.__call__

    def watched(self, *args, **kwargs):
        outputs = original(self, *args, **kwargs)
        yielded.append((outputs.log_sum_sq_probs is not None, len(outputs.log_probs)))
        return outputs

    monkeypatch.setattr(trl_seam._RecordingModel, "__call__", watched)
    train(baseline=baseline, **SOURCES[source])
    assert sum(rows for with_energy, rows in yielded if with_energy) == 8 * computed
    assert sum(rows for _, rows in yielded) > 8 * computed or source == "the training forward"


@pytest.mark.parametrize("source", SOURCES)
def test_logits_are_never_materialised(train, monkeypatch, source):
    """Whatever scores completions never calls the LM head, which alone would make (B, T, V) logits."""
    scored = 0
    original = Recording._get_per_token_logps_and_entropies

    def watched(self, *args, **kwargs):
        nonlocal scored
        scored += 1
        head = self.model.get_output_embeddings()
        handle = head.register_forward_hook(lambda *_: pytest.fail("the LM head was called for logits"))
        try:
            return original(self, *args, **kwargs)
        finally:
            handle.remove()

    monkeypatch.setattr(Recording, "_get_per_token_logps_and_entropies", watched)
    trainer = train(**SOURCES[source])
    assert scored == sum(trainer.forwards.values()) > 0


def test_whole_groups_are_shuffled(train):
    trainer = train(per_device_train_batch_size=4, gradient_accumulation_steps=4, max_steps=8, learning_rate=0.0)
    rows = [b["row_of_rollout"].tolist() for b in trainer.micro_batches]
    assert all(r == list(range(r[0], r[0] + 4)) and r[0] % 4 == 0 for r in rows)
    assert {r[0] for r in rows[:4]} == {0, 4, 8, 12}
    assert len({tuple(r[0] for r in rows[i : i + 4]) for i in range(0, 32, 4)}) > 1


@pytest.mark.parametrize("peft", [{}, {"peft_config": LORA}], ids=["full", "lora"])
def test_the_reference_pass_is_not_taken_for_the_policy(train, peft):
    """Once the policy has left the reference, energies must be the policy's."""
    trainer = train(beta=0.1, num_iterations=2, max_steps=3, learning_rate=0.1, **peft)
    energies = []
    original = trainer._energy_of_forward
    trainer._energy_of_forward = lambda logps: energies.append(original(logps)) or energies[-1]
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": "1+1=", "answer": "2"}] * 8)
    assert (batch["old_per_token_logps"] - batch["ref_per_token_logps"]).abs().max() > 0.01  # a mistake would show
    expected = energies_by_softmax(trainer.model.eval(), batch)
    torch.testing.assert_close(energies[0].double() * mask_of(batch), expected, atol=1e-5, rtol=0)


def test_shuffling_groups_moves_every_kind_of_value_alike():
    rows = torch.arange(12)
    batch = {
        "completion_ids": rows.unsqueeze(1), "pixel_values": [torch.tensor(i) for i in range(12)],
        "num_images": list(range(12)), "absent": None, "num_items_in_batch": torch.tensor(5.0),
    }  # fmt: skip
    torch.manual_seed(0)
    shuffled = trl_seam._shuffle_groups(batch, 3)
    order = shuffled["completion_ids"].flatten().tolist()
    assert order != rows.tolist() and sorted(order) == rows.tolist()
    assert all(order[i : i + 3] == list(range(order[i], order[i] + 3)) and order[i] % 3 == 0 for i in range(0, 12, 3))
    assert shuffled["num_images"] == order == [int(x) for x in shuffled["pixel_values"]]
    assert shuffled["absent"] is None and shuffled["num_items_in_batch"] == 5


# Options that OTB honours


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_trains_on_token_advantages(train, loss_type):
    """Compared with a loss computed by hand from the advantages, on-policy, where every ratio is 1."""
    trainer = train(loss_type=loss_type, max_steps=1, train=False, max_grad_norm=0.0)
    gradient = {}

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            gradient.update({n: p.grad.clone() for n, p in model.named_parameters()})

    trainer.add_callback(Keep())
    model = AutoModelForCausalLM.from_pretrained(trainer.model.config._name_or_path, dtype=torch.float32)
    trainer.train()
    (batch,) = trainer.micro_batches
    mask, advantages = mask_of(batch), batch["advantages"]
    assert advantages.shape == mask.shape
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    length = mask.size(1)
    logps = model(input_ids=ids, attention_mask=attention).logits[:, -length - 1 : -1].log_softmax(-1)
    logps = logps.gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)
    # d ratio / d logp = 1 at ratio 1 for every one of them; SAPO's soft gate has slope 1 there, VESPO's φ is 1
    weight = {
        "grpo": mask / mask.sum(1, keepdim=True) / len(mask),
        "sapo": mask / mask.sum(1, keepdim=True) / len(mask),
        "dr_grpo": mask / (len(mask) * trainer.max_completion_length),
        "luspo": mask / len(mask),
        "cispo": 0.2 * mask / mask.sum(),  # TRL clamps CISPO's ratio at `epsilon_high`, 0.2, itself
    }.get(loss_type, mask / mask.sum())
    (-(weight * advantages) * logps).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(gradient[name], p.grad, atol=1e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("setting", [k for k in SETTINGS if k != "sequence ratios"])
def test_otb_trains_under_every_setting(train, setting):
    trainer = train(**SETTINGS[setting])
    assert all(p.isfinite().all() for p in weights(trainer).values())
    # A rollout that is used twice is measured once
    rollouts = len([h for h in trainer.state.log_history if "reward" in h])
    assert len(logged(trainer, "otb/energy/token_mean")) == rollouts > 0
    if setting != "mask_truncated":  # there every completion of a rollout may be masked, and nothing measured
        assert all(math.isfinite(v) for v in logged(trainer, "otb/energy/token_mean"))


def test_sequence_decisions_follow_the_completion_not_the_token():
    """Off-policy masking and VESPO judge a whole completion: one decision a row, by its mean advantage."""
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    advantages = torch.tensor([[0.5, -0.1, 0.0], [0.1, 0.1, -0.9]])
    far = torch.full((2, 3), 1.0)
    keep = OTBGRPOTrainer.get_off_policy_mask(advantages, torch.zeros(2, 3), far, mask, 0.5)
    assert keep.tolist() == [[1], [0]]
    log_ratio = torch.full((2, 3), 0.3)
    phi = OTBGRPOTrainer.get_gamma_weights(advantages, log_ratio, mask, None)
    expected = GRPOTrainer.get_gamma_weights(torch.tensor([[1.0], [-1.0]]), log_ratio, mask, None)
    assert torch.equal(phi, expected)


def test_mask_truncated_completions_leave_the_baseline(train):
    """Advantages are those of the group without the truncated completions."""

    def by_row(completion_ids, **kwargs):
        return [float(i % 3) for i in range(len(completion_ids))]

    trainer = train(mask_truncated_completions=True, reward_funcs=by_row, max_steps=8, learning_rate=0.0)
    compared = 0
    for batch in trainer.micro_batches:
        rows = batch["row_of_rollout"]
        energy = energies_by_softmax(trainer.model.eval(), batch).float()
        for group in rows.view(-1, 4).tolist():
            here = torch.tensor([rows.tolist().index(row) for row in group])
            kept = here[mask_of(batch)[here].sum(1) > 0]
            if 1 < len(kept) < 4:
                rewards = torch.tensor(by_row([None] * 8))[rows[kept]]
                expected = compute_advantages(rewards, energy[kept], mask_of(batch)[kept], len(kept))
                torch.testing.assert_close(batch["advantages"][kept], expected, atol=2e-6, rtol=0)
                compared += int((expected != 0).any())
    assert compared > 0


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_scale_rewards_divides_by_the_standard_deviation(train, scale):
    options = {"max_steps": 1, "learning_rate": 0.0}
    plain, scaled = (first_rollout(train(scale_rewards=s, **options)) for s in ("none", scale))
    ids = [i[m].tolist() for i, m in zip(plain["completion_ids"], mask_of(plain).bool(), strict=True)]
    rewards = torch.tensor(tiny.even_bytes(ids)).view(-1, 4 if scale == "group" else 8)
    std = rewards.std(dim=1).repeat_interleave(rewards.size(1)).unsqueeze(1)
    torch.testing.assert_close(scaled["advantages"], plain["advantages"] / (std + 1e-4), atol=1e-5, rtol=1e-4)


def test_alignment_zero_tail_and_leave_one_out_reach_the_advantages(train):
    default, *others = (
        first_rollout(train(max_steps=1, gradient_accumulation_steps=2, rollout_func=scripted_rollout, **options))[
            "advantages"
        ]
        for options in ({}, {"alignment": "position"}, {"zero_tail": False}, {"leave_one_out": True})
    )
    assert all(not torch.allclose(default, other) for other in others)


def test_moe_auxiliary_loss(train, tmp_path):
    config = tiny.config(
        Qwen3MoeConfig,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
    )
    path = tiny.save_model(tmp_path / "moe", Qwen3MoeForCausalLM, config)
    grpo = train(GRPOTrainer, GRPOConfig, model=path, scale_rewards="none")
    assert_same_weights(grpo, train(model=path, baseline="group_mean"))
    trainer = train(model=path, max_steps=1, learning_rate=0.0)
    assert logged(trainer, "aux_loss") and logged(trainer, "otb/energy/token_mean")
    batch = first_rollout(trainer)
    energy = energies_by_softmax(trainer.model.eval(), batch)
    expected = (energy.sum() / mask_of(batch).sum()).item()
    assert logged(trainer, "otb/energy/token_mean")[0] == pytest.approx(expected, abs=1e-5)


# Migration: what works with GRPOTrainer works here


def test_conversational_dataset(train):
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{i}+{i}?"}] for i in range(8)]})
    assert logged(train(train_dataset=data), "otb/energy/token_mean")


def test_iterable_dataset(train):
    data = IterableDataset.from_generator(lambda: iter({"prompt": f"{i}+{i}="} for i in range(8)))
    assert logged(train(train_dataset=data), "otb/energy/token_mean")


def test_several_weighted_and_asynchronous_reward_functions_and_none(train):
    async def length(completion_ids, **kwargs):
        return [-float(len(ids)) for ids in completion_ids]

    def sometimes(completion_ids, **kwargs):
        return [None if i % 2 else 1.0 for i in range(len(completion_ids))]

    options = {"reward_funcs": [tiny.even_bytes, length, sometimes], "reward_weights": [1.0, 0.1, 0.5]}
    grpo = train(GRPOTrainer, GRPOConfig, scale_rewards="none", **options)
    assert_same_weights(grpo, train(baseline="group_mean", **options))
    assert not any(math.isnan(v) for v in logged(train(**options), "otb/baseline/mean"))


@pytest.mark.parametrize("zero_tail", [True, False])
def test_unscorable_completions_have_no_statistics(train, zero_tail):
    def reward(completion_ids, **kwargs):
        longest = max(range(4), key=lambda i: len(completion_ids[i]))
        return [None if i == longest else float(i) for i in range(len(completion_ids))]

    trainer = train(reward_funcs=reward, max_steps=1, zero_tail=zero_tail, rollout_func=scripted_rollout)
    for key in ("baseline/mean", "baseline/position_std", "advantage/abs_mean", "energy/token_mean"):
        assert math.isfinite(logged(trainer, f"otb/{key}")[0])
    batch = first_rollout(trainer)
    rewards = torch.tensor(
        [
            math.nan if r is None else r
            for r in reward(
                [
                    i[:n]
                    for i, n in zip(
                        batch["completion_ids"].tolist(), batch["completion_mask"].sum(1).tolist(), strict=True
                    )
                ]
            )
        ]
    )
    scorable = mask_of(batch)[~rewards.isnan()]
    expected = batch["advantages"].abs().sum() / scorable.sum()
    assert logged(trainer, "otb/advantage/abs_mean")[0] == pytest.approx(expected.item(), rel=1e-5)


def test_no_reward_varies(train):
    """The group mean leaves nothing; the lone tail of the default still has A = G. Their ratio says nothing."""
    trainer = train(
        reward_funcs=lambda completion_ids, **kwargs: [1.0] * len(completion_ids), rollout_func=scripted_rollout
    )
    assert logged(trainer, "otb/grad_power_group_mean") == [0.0, 0.0]
    assert logged(trainer, "otb/grad_power_ratio") == [None, None]
    assert logged(trainer, "otb/lone_tail_ratio")[0] > 0 and logged(trainer, "otb/grad_power")[0] > 0
    trainer = train(reward_funcs=lambda completion_ids, **kwargs: [1.0] * len(completion_ids), zero_tail=False)
    assert logged(trainer, "otb/grad_power")[0] == pytest.approx(0, abs=1e-9)


def test_reward_model(train, tmp_path):
    model = Qwen3ForSequenceClassification(tiny.config(num_labels=1))
    model.save_pretrained(tmp_path / "reward")
    tiny.tokenizer().save_pretrained(tmp_path / "reward")
    trainer = train(reward_funcs=str(tmp_path / "reward"))
    assert logged(trainer, "otb/grad_power")


def test_unscorable_completions_get_no_advantage(train):
    def reward(completion_ids, **kwargs):
        return [None if i == 1 else float(i) for i in range(len(completion_ids))]

    batch = first_rollout(train(reward_funcs=reward, max_steps=1))
    assert (batch["advantages"][1] == 0).all() and (batch["advantages"][[0, 2, 3], 0] != 0).all()


@pytest.mark.parametrize("generations", [1, 2, 4])
def test_evaluation(train, generations):
    trainer = train(
        eval_dataset=tiny.prompts(4), eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4,
        num_generations_eval=generations,
    )  # fmt: skip
    for key in ("eval_loss", "eval_otb/energy/token_mean", "eval_otb/baseline/mean"):
        values = logged(trainer, key)
        assert len(values) == 2 and all(math.isfinite(v) for v in values)
    assert len(logged(trainer, "otb/energy/token_mean")) == 2


@pytest.mark.parametrize("source", SOURCES)
def test_evaluation_in_between_leaves_training_as_it_was(train, source):
    options = {
        "rollout_func": scripted_rollout,
        "max_steps": 4,
        "optim": "sgd",
        "learning_rate": 0.1,
        **SOURCES[source],
    }
    evaluated = train(eval_dataset=tiny.prompts(4), eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4, **options)  # fmt: skip
    plain = train(**options)
    # Evaluation draws random numbers, so rows are shuffled otherwise and sums are rounded otherwise, and no more
    assert_same_weights(evaluated, plain, atol=1e-6, rtol=1e-5)
    assert logged(evaluated, "otb/grad_power") == pytest.approx(logged(plain, "otb/grad_power"), rel=1e-4)


def test_evaluation_with_groups_in_several_batches_is_measured_batch_by_batch(train):
    trainer = train(train=False, eval_dataset=tiny.prompts(4), per_device_eval_batch_size=8)
    metrics = trainer.evaluate()
    assert metrics["eval_otb/energy/token_mean"] > 0


def test_callbacks_see_the_metrics(train):
    seen = []

    class Watch(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(logs)

    train(callbacks=[Watch()])
    assert "otb/grad_power_ratio" in seen[0]


def test_model_instance_processing_class_and_lora(train, model_path):
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    trainer = train(model=model, processing_class=AutoTokenizer.from_pretrained(model_path), peft_config=LORA)
    assert isinstance(trainer.model, PeftModel) and logged(trainer, "otb/energy/token_mean")
    trained = get_peft_model(AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32), LORA)
    assert logged(train(model=trained, beta=0.1), "otb/energy/token_mean")


@pytest.mark.parametrize(
    "options", [{}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, {"peft_config": LORA}]
)
def test_resume_is_bit_exact(train, tmp_path, options):
    whole = train(max_steps=4, save_strategy="steps", save_steps=2, output_dir=str(tmp_path / "run"), **options)
    resumed = train(max_steps=4, output_dir=str(tmp_path / "run"), train=False, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert_same_weights(whole, resumed)
    assert logged(whole, "otb/grad_power") == logged(resumed, "otb/grad_power")


BUFFERED = {"num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 1}  # 4 steps a buffer


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "trl_otb.callbacks"]


def test_checkpoints_inside_a_generation_buffer_are_announced_once(train, tmp_path, caplog):
    train(max_steps=5, save_strategy="steps", save_steps=2, output_dir=str(tmp_path), **BUFFERED)
    (said,) = warnings_of(caplog)
    assert "`save_steps` is 2" in said and "multiples of 4 steps" in said

    caplog.clear()
    resumed = train(train=False, max_steps=5, output_dir=str(tmp_path), **BUFFERED)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    (said,) = warnings_of(caplog)
    assert "Resuming at step 2, inside a generation buffer" in said


@pytest.mark.parametrize(
    "options", [{"save_strategy": "steps", "save_steps": 4, **BUFFERED}, {"save_strategy": "steps", "save_steps": 1}]
)
def test_checkpoints_that_resume_exactly_go_unmentioned(train, tmp_path, caplog, options):
    train(max_steps=5, output_dir=str(tmp_path), **options)
    assert (tmp_path / "checkpoint-4").is_dir() and not warnings_of(caplog)


def test_a_checkpoint_asked_for_inside_a_generation_buffer_is_announced(train, tmp_path, caplog):
    class SaveNow(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = state.global_step == 3

    train(max_steps=5, output_dir=str(tmp_path), callbacks=[SaveNow()], **BUFFERED)
    (said,) = warnings_of(caplog)
    assert "The checkpoint of step 3 lies inside a generation buffer" in said


def scripted_rollout(prompts, trainer):
    """Random bytes with a stretch of environment output in the middle of every other completion."""
    g = torch.Generator().manual_seed(0)
    n = trainer.num_generations
    ids, masks = [], []
    for i in range(len(prompts)):
        length = int(torch.randint(4, 9, (1,), generator=g))
        ids.append(torch.randint(0, 256, (length,), generator=g).tolist())
        masks.append([0 if i % 2 and 1 <= t < 3 else 1 for t in range(length)])
    assert len(prompts) % n == 0
    encoded = [trainer.processing_class(p)["input_ids"] for p in prompts]
    return {"prompt_ids": encoded, "completion_ids": ids, "logprobs": None, "env_mask": masks}


@pytest.mark.parametrize("alignment", ["generated", "position"])
def test_environment_output_adds_no_energy_and_no_advantage(train, alignment):
    trainer = train(rollout_func=scripted_rollout, max_steps=1, alignment=alignment, learning_rate=0.0)
    batch = first_rollout(trainer)
    mask = mask_of(batch)
    assert (mask.sum(1) < batch["completion_mask"].sum(1)).any()
    energy = energies_by_softmax(trainer.model.eval(), batch)
    rewards = torch.tensor(
        tiny.even_bytes(
            [i[m.bool()].tolist() for i, m in zip(batch["completion_ids"], batch["completion_mask"], strict=True)]
        )
    )
    expected = compute_advantages(rewards, energy, mask, 4, alignment=alignment)
    torch.testing.assert_close(batch["advantages"], expected, atol=2e-6, rtol=0)


# Configuration


def test_plain_grpo_config_is_enough(train, caplog):
    args = GRPOConfig(**tiny.SETTINGS, output_dir="unused")
    trainer = train(OTBGRPOTrainer, GRPOConfig, max_steps=1)
    assert isinstance(trainer.args, OTBGRPOConfig) and trainer.args.baseline == "otb"
    assert trainer.args.scale_rewards == "group"
    assert "scale_rewards='group'" in caplog.text
    assert type(args) is GRPOConfig and not hasattr(args, "baseline")


@dataclass
class OnCPU(OTBGRPOConfig):
    use_cpu: bool = True
    bf16: bool | None = False


def test_without_args(model_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trl_otb.trainer.OTBGRPOConfig", OnCPU)  # TRL's own default, bf16, needs a GPU
    for model in (model_path, AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)):
        trainer = OTBGRPOTrainer(model, tiny.even_bytes, train_dataset=tiny.prompts())
        assert trainer.args.output_dir == f"{Path(model_path).name}-OTB"
        assert (trainer.args.baseline, trainer.args.scale_rewards) == ("otb", "none")


def test_wrong_kind_of_args(model_path):
    with pytest.raises(TypeError, match="`args` is a dict"):
        OTBGRPOTrainer(model_path, tiny.even_bytes, args={"output_dir": "x"}, train_dataset=tiny.prompts())


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"baseline": "mean"}, "`baseline` is 'mean'.*'otb', 'otb_shrunk', 'ogb', 'opo', 'rloo', 'group_mean'"),
        ({"alignment": "turn"}, "`alignment` is 'turn'.*'generated', 'position'"),
        ({"scale_rewards": "std"}, "`scale_rewards` is 'std'.*'none', 'group'"),
        ({"loss_type": "ppo"}, "`loss_type` is 'ppo'.*'dapo'"),
        (
            {"importance_sampling_level": "sequence"},
            "'sequence' and `baseline` is 'otb'.*Set `importance_sampling_level='token'`",
        ),
    ],
)
def test_what_cannot_be_honoured_is_rejected(option, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        OTBGRPOConfig(output_dir=str(tmp_path), **option)
    plain = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    for key, value in option.items():
        setattr(plain, key, value)
    with pytest.raises(ValueError, match=message):
        OTBGRPOConfig.from_grpo_config(plain)


def test_command_line_and_yaml(tmp_path):
    from trl import TrlParser

    (tmp_path / "config.yaml").write_text("baseline: ogb\nleave_one_out: true\nlearning_rate: 1.0e-5\n")
    parser = TrlParser(OTBGRPOConfig)
    common = ["--config", str(tmp_path / "config.yaml"), "--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false"]
    (args,) = parser.parse_args_and_config(common)
    assert (args.baseline, args.leave_one_out, args.zero_tail, args.scale_rewards) == ("ogb", True, True, "none")
    (args,) = parser.parse_args_and_config(
        [*common, "--baseline", "otb", "--zero_tail", "false", "--alignment", "position"]
    )
    assert (args.baseline, args.zero_tail, args.alignment) == ("otb", False, "position")
    assert json.loads(args.to_json_string())["baseline"] == "otb"


# What is left behind: table, card, logs


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


def test_metrics_by_hand():
    rows = completion_statistics(
        energy=torch.tensor([[1.0, 0.5, 9.0], [2.0, 1.0, 1.0]]),
        mask=torch.tensor([[1, 1, 0], [1, 1, 1]]),
        advantages=torch.tensor([[0.5, -1.0, 7.0], [1.0, 2.0, 0.0]]),
        group_mean_advantages=torch.tensor([[0.5], [-0.5]]),
        baselines=torch.tensor([[1.0, 3.0, 7.0], [2.0, 2.0, 5.0]]),
        lone_tail_tokens=torch.tensor([[0], [1]]),
    )
    assert dict(zip(STATISTICS, rows[0].tolist(), strict=True)) == {
        "tokens": 2, "energy": 1.5, "advantage": -0.5, "abs_advantage": 1.5, "baseline": 4.0,
        "baseline_std": 1.0, "lone_tail": 0, "power": 0.25 + 0.5, "power_group_mean": 0.25 * 1.5,
    }  # fmt: skip
    metrics = summarize(rows, 2)
    assert metrics["energy/token_mean"] == pytest.approx(5.5 / 5)
    assert metrics["energy/completion_mean"] == pytest.approx(5.5 / 2)
    assert metrics["energy/group_std"] == pytest.approx(2.5 / math.sqrt(2))  # of 1.5 and 4
    assert metrics["baseline/mean"] == pytest.approx((4 + 9) / 5)
    assert metrics["baseline/position_std"] == pytest.approx((1 + math.sqrt(2)) / 2)  # of 1, 3 and of 2, 2, 5
    assert metrics["advantage/abs_mean"] == pytest.approx(4.5 / 5)
    assert metrics["lone_tail_ratio"] == pytest.approx(1 / 5)
    assert metrics["grad_power"] == pytest.approx((0.75 + 2 + 4) / 2)
    assert metrics["grad_power_group_mean"] == pytest.approx(0.25 * 5.5 / 2)
    assert metrics["grad_power_ratio"] == pytest.approx(6.75 / (0.25 * 5.5))


def test_metrics_of_nothing_are_nan():
    rows = torch.zeros(4, len(STATISTICS))
    assert all(math.isnan(v) for v in summarize(rows, 2).values())


# The seam to TRL


def test_trl_1_16_is_what_the_seam_expects():
    trl_seam.check_trl()


@pytest.mark.parametrize("name", [*trl_seam._METHODS, *trl_seam._FUNCTIONS])
@pytest.mark.parametrize("how", ["gone", "other parameters"])
def test_a_part_of_trl_that_moved_is_named_at_construction(name, how, monkeypatch, model_path, tmp_path):
    owner = GRPOTrainer if name in trl_seam._METHODS else trl_seam.trl_utils
    if how == "gone":
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, lambda nothing: None)
    args = OTBGRPOConfig(**tiny.SETTINGS, output_dir=str(tmp_path))
    with pytest.raises(ImportError, match=rf"{name}.*pip install 'trl>=1.16,<1.17'"):
        OTBGRPOTrainer(model_path, tiny.even_bytes, args=args, train_dataset=tiny.prompts())


@pytest.mark.parametrize("name", trl_seam._ATTRIBUTES)
def test_an_attribute_that_moved_is_named(name):
    attributes = dict.fromkeys(set(trl_seam._ATTRIBUTES) - {name})
    with pytest.raises(ImportError, match=f"`GRPOTrainer.{name}` is gone"):
        trl_seam.check_trl(type("Trainer", (), attributes)())


def test_a_replaced_lm_head_is_noticed(train, model_path):
    from trl.trainer.utils import add_fused_lm_head

    for options in SOURCES.values():
        trainer = train(train=False, **options)
        add_fused_lm_head(trainer.model, outputs=("log_probs", "entropy"))
        with pytest.raises(RuntimeError, match="replaced the fused LM head"):
            trainer.train()
