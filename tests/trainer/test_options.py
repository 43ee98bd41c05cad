"""Options that OTB honours."""

import math
from statistics import stdev

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.helpers import tiny
from tests.helpers.oracles import energies_by_softmax, generated, logps_by_softmax, mask_of
from tests.helpers.pages import steps_of
from tests.helpers.recording import first_rollout
from tests.helpers.settings import SETTINGS, SOURCES, assert_same_weights, in_turn, logged, scripted_rollout, weights
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer
from trl_otb.baselines import BASELINES, compute_advantages, register_baseline
from trl_otb.config import LOSS_TYPES
from trl_otb.run.baseline import RunBaseline
from trl_otb.run.scale import RunningScale


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_types_train_on_token_advantages(train, loss_type):
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
    logps = logps_by_softmax(model, batch).gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)
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


ONE_GENERATION = {"num_generations": 1, "baseline": "value"}
ONE = {**ONE_GENERATION, "train_dataset": tiny.prompts(21)}
KINDS = {
    "otb": {},
    "value": {"baseline": "value", "max_steps": 4, "rollout_func": scripted_rollout},
    "one completion": {**ONE, "max_steps": 4},
}


@pytest.mark.parametrize(("setting", "kind"), in_turn(SETTINGS, KINDS))
def test_it_trains_under_every_setting(train, kind, setting):
    options = {**KINDS[kind], **SETTINGS[setting]}
    if "scale" in setting and kind == "otb":
        options["baseline"] = "ogb"
    elif "scale" in setting:
        with pytest.raises(ValueError, match="Set `scale_rewards` to 'none'"):
            train(**options)
        return
    trainer = train(**options)
    assert all(p.isfinite().all() for p in weights(trainer).values())
    # A rollout that is used twice is measured once; one in which all completions are masked is not
    rollouts = [batch["completion_mask"].any() for batch in trainer.batches]
    assert len(logged(trainer, "otb/energy/token_mean")) == sum(rollouts)
    assert any(rollouts) != (kind == "value" and setting == "mask_truncated")
    assert all(math.isfinite(v) for v in logged(trainer, "otb/energy/token_mean"))
    if kind != "otb":
        assert len(logged(trainer, "otb/value/weight")) == len(rollouts)
        assert (trainer.baseline.entry.estimator.tokens > 0) == any(rollouts)


def test_sequence_decisions_follow_the_completion():
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
    for batch in trainer.batches:
        energy = energies_by_softmax(trainer.model.eval(), batch).float()
        for group in torch.arange(8).view(-1, 4):
            kept = group[mask_of(batch)[group].sum(1) > 0]
            if 1 < len(kept) < 4:
                rewards = torch.tensor(by_row([None] * 8))[kept]
                expected = compute_advantages(rewards, energy[kept], mask_of(batch)[kept], len(kept))
                torch.testing.assert_close(batch["advantages"][kept], expected, atol=2e-6, rtol=0)
                compared += int((expected != 0).any())
    assert compared > 0


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_scale_rewards_divides_by_deviation(train, scale):
    options = {"max_steps": 1, "learning_rate": 0.0, "baseline": "ogb"}
    plain, scaled = (first_rollout(train(scale_rewards=s, **options)) for s in ("none", scale))
    rewards = torch.tensor(tiny.even_bytes(generated(plain))).view(-1, 4 if scale == "group" else 8)
    std = rewards.std(dim=1).repeat_interleave(rewards.size(1))
    torch.testing.assert_close(scaled["advantages"], plain["advantages"] / (std + 1e-4), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_equal_returns_have_zero_advantages(train, registry, scale):
    """Rounding errors would be divided by a deviation of 0."""

    def same(completion_ids, **kwargs):
        return [0.7] * len(completion_ids)

    @register_baseline("rounded", needs=(), per_token=False, scalable=True)
    def rounded(x):
        return x.completion_mean(x.scored) - 1e-6

    options = {"reward_funcs": same, "max_steps": 1, "baseline": "rounded"}
    assert (train(scale_rewards=scale, **options).rollouts["train"].advantages == 0).all()
    assert (train(scale_rewards="none", **options).rollouts["train"].advantages > 0).all()


@pytest.mark.parametrize(("baseline", "iterations"), [("otb", 1), ("otb", 2), ("group_mean", 2)])
def test_nonfinite_energy_is_named(train, baseline, iterations):
    trainer = train(train=False)
    torch.nn.init.constant_(trainer.model.get_output_embeddings().weight, math.nan)
    with pytest.raises(ValueError, match="The energy of completion ., token 0, is nan: its log-probs"):
        of_model = {"model": trainer.model, "processing_class": trainer.processing_class}
        train(**of_model, baseline=baseline, rollout_func=scripted_rollout, num_iterations=iterations)


def test_moe_auxiliary_loss(train, tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = tiny.config(Qwen3MoeConfig, **experts, output_router_logits=True, router_aux_loss_coef=0.1)
    path = tiny.save_model(tmp_path / "moe", Qwen3MoeForCausalLM, config)
    grpo = train(GRPOTrainer, GRPOConfig, model=path, scale_rewards="none")
    assert_same_weights(grpo, train(model=path, baseline="group_mean"))
    trainer = train(model=path, max_steps=1, learning_rate=0.0)
    assert logged(trainer, "aux_loss") and logged(trainer, "otb/energy/token_mean")
    batch = first_rollout(trainer)
    energy = energies_by_softmax(trainer.model.eval(), batch)
    expected = (energy.sum() / mask_of(batch).sum()).item()
    assert logged(trainer, "otb/energy/token_mean")[0] == pytest.approx(expected, abs=1e-5)


# Advantages divided by the deviation of returns within the groups of earlier batches


def test_batch_is_scaled_by_earlier_ones():
    scale = RunningScale()
    first = torch.tensor([0.0, 2.0, 5.0, 5.0, 1.0, torch.nan])  # of groups of two only one varies
    assert scale.of(first, 2, learn=False) == scale.of(first, 2, learn=True) == pytest.approx(math.sqrt(2))
    second = torch.tensor([0.0, 20.0, 3.0, 9.0])
    assert scale.of(second, 2, learn=True) == pytest.approx(math.sqrt(2))
    of_both = (0.9 * 2 + 200 + 18) / (0.9 + 2)
    assert scale.of(first, 2, learn=False) == pytest.approx(math.sqrt(of_both))
    # Where nothing varies nothing is scaled; of one completion per prompt it is the batch's deviation
    assert RunningScale().of(torch.ones(4), 2, learn=True) == RunningScale().of(torch.ones(1), 1, learn=True) == 1.0
    assert RunningScale().of(torch.tensor([0.0, 1.0, 5.0]), 1, learn=True) == pytest.approx(stdev([0, 1, 5]))


@pytest.mark.parametrize(("before", "scale"), [((0.3, 0.30000004), 1.0), ((1e-3, 0.0), 7e-4), ((0.01, 0.0), 7e-3)])
def test_sudden_variance_does_not_explode(before, scale):
    """After rounding, which is no variance, and after a small penalty or shaping."""
    running = RunningScale()
    for _ in range(20):
        assert running.of(torch.tensor(before * 2), 2, learn=True) == pytest.approx(scale, rel=0.02)
    assert running.of(torch.tensor([0.0, 1.0, 1.0, 0.0]), 2, learn=True) >= stdev([0, 1]) / 10 - 1e-6


def test_rewards_that_shrink_are_followed_after_20_batches():
    """Advantages are not all but 0 for long, where a hundredth of the deviation would take 74 batches."""
    running, g = RunningScale(), torch.Generator().manual_seed(0)
    found = []
    for step in range(60):
        returns = (29 if step < 30 else 0.29) * torch.randn(16, 4, generator=g)
        found.append(running.of(returns.flatten(), 4, learn=True) / returns.std(dim=1).square().mean().sqrt().item())
    assert max(found[30:50]) <= 10 + 1e-6 and max(found[50:]) < 1.5 and min(found[1:]) > 0.6
    # A deviation that is just below half of the scale, in 20 batches in a row
    less = RunningScale()
    for batch in range(21):
        less.of(torch.tensor([0.0, 1.0 if batch == 0 else 0.0566]), 2, learn=True)
    assert less.sums[0] / less.sums[1] == pytest.approx(0.0566**2 / 2)
    # Rare successes beside a small reward: batches without one, half of all, are no change
    other, scales = RunningScale(), []
    for _ in range(1000):
        returns = 0.02 * torch.randn(32, generator=g) + (torch.rand(32, generator=g) < 0.02)
        other.of(returns, 8, learn=True)
        scales.append((other.sums[0] / other.sums[1]) ** 0.5)
    assert sorted(scales[50:])[len(scales) // 20] > 0.08
    assert RunBaseline(BASELINES["rloo"], running_scale=True).load_state_dict({"scale": (1.0, 2.0)})  # of 0.9.5


@pytest.mark.parametrize("baseline", ["group_mean", "value"])
def test_advantages_are_those_without_scale_divided(train, baseline):
    """In a second step of the same completions, whatever their rewards, by the deviation of the first one's."""
    given = [
        torch.tensor([0.0, 4.0, 1.0, 1.0, 2.0, 0.0, 3.0, 3.0]),
        torch.tensor([9.0, 1.0, 0.0, 5.0, 2.0, 2.0, 7.0, 8.0]),
    ]

    def rewards():
        batches = iter(given)
        return lambda completions, **kwargs: next(batches).tolist()

    options = {"baseline": baseline, "learning_rate": 0.0, "max_steps": 2, "num_generations": 2}
    plain, running = (
        train(reward_funcs=rewards(), scale_rewards=scale, per_device_train_batch_size=8, **options)
        for scale in ("none", "running")
    )
    spread = math.sqrt((8 + 2) / 2)  # of the two groups of the first batch that vary
    found, expected = running.rollouts["train"].advantages, plain.rollouts["train"].advantages
    torch.testing.assert_close(found, expected / spread)
    assert expected.abs().max() > 1


# Ratios per sequence


@pytest.mark.parametrize("loss_type", ["grpo", "luspo", "sapo", "cispo"])
def test_sequence_ratios_give_gspo(train, registry, loss_type):
    """GSPO-token's equality to GSPO: the group mean, once as a baseline per token, once as GRPOTrainer has it."""
    register_baseline("mean_per_token", needs=())(lambda x: x.completion_mean(x.scored))
    # A small clip range and large steps, so that ratios leave 1 and some are clipped
    options = {"num_iterations": 3, "max_steps": 6, "learning_rate": 0.03, "epsilon": 0.05, "optim": "sgd"}
    options |= {"importance_sampling_level": "sequence", "loss_type": loss_type}
    options["epsilon_high"] = 5.0 if loss_type == "cispo" else 0.05  # CISPO's is the largest ratio itself
    gspo = train(GRPOTrainer, GRPOConfig, scale_rewards="none", **options)
    assert_same_weights(train(baseline="mean_per_token", **options), gspo, atol=1e-6, rtol=1e-4)
    if loss_type not in ("sapo", "cispo"):
        assert max(logged(gspo, "clip_ratio/region_mean")) > 0
    plain = train(baseline="mean_per_token", **{**options, "importance_sampling_level": "token"})
    a, b = weights(plain), weights(gspo)
    assert any((a[name] - b[name]).abs().max() > 1e-6 for name in a)  # another ratio would show


# One completion per prompt, compared with those of the other prompts


@pytest.mark.parametrize(("baseline", "source"), in_turn(["value", "rloo_pooled", "ogb_pooled"], SOURCES))
def test_completion_is_compared_across_batch(train, baseline, source):
    trainer = train(**ONE | SOURCES[source] | {"baseline": baseline, "per_device_train_batch_size": 7, "max_steps": 2})
    batch, rollout = first_rollout(trainer), trainer.rollouts["train"]
    ids = [i[m].tolist() for i, m in zip(batch["completion_ids"], batch["completion_mask"].bool(), strict=True)]
    rewards = torch.tensor(tiny.even_bytes(ids)).unsqueeze(1)
    expected = rewards - (rewards.sum() - rewards) / 6
    found = batch["advantages"] if baseline == "value" else batch["advantages"].unsqueeze(1)
    torch.testing.assert_close(found, expected.expand(found.shape) * (found != 0), atol=1e-6, rtol=0)
    # What TRL says of a group is left out; power is compared with that of the others' mean
    first = next(entry for entry in trainer.state.log_history if "reward" in entry)
    assert first["reward_std"] == pytest.approx(rewards.std().item()) and "frac_reward_zero_std" not in first
    if "otb/grad_power_ratio" in first and baseline != "value":
        assert first["otb/grad_power_ratio"] == pytest.approx(1.0)
    assert rollout.group_mean_advantages is None and len(rollout) == 7


def test_evaluation_may_use_larger_n(train, tmp_path):
    trainer = train(**ONE, eval_dataset=tiny.prompts(4), num_generations_eval=4, per_device_eval_batch_size=4)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    assert "eval_frac_reward_zero_std" in metrics and trainer.rollouts["eval"].group_mean_advantages is not None
    trainer.rollouts["train"].show()
    trainer.rollouts["train"].page(tmp_path / "one.html")
    (step,) = steps_of(tmp_path / "one.html")
    assert all("grpo" not in completion for prompt in step["prompts"] for completion in prompt["completions"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[
            ({"baseline": name}, f"is 1, and `baseline` is '{name}'.*Choose 'value'")
            for name in ("otb", "rloo", "group_mean")
        ],
        ({"per_device_train_batch_size": 1}, "is 1, and a generation batch is a single completion.*Raise"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "is 1, and `multi_objective.*Set 'sum_then_normalize'"),
    ],
)
def test_what_cannot_be_compared_is_named(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        OTBGRPOConfig(**tiny.SETTINGS | ONE_GENERATION | options, output_dir=str(tmp_path))


def test_nothing_subtracted_needs_nothing_to_compare(train):
    trainer = train(**ONE | {"baseline": "none", "per_device_train_batch_size": 1})
    assert type(trainer.args.num_generations) is int
    assert len(logged(trainer, "otb/baseline/mean")) == 2 and not math.isnan(logged(trainer, "loss")[0])
