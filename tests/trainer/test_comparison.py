"""compare_baselines: gradients by brute force, moments by the definitions, and a trainer that is left as it was."""

import itertools
import json
import math
import random
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import trl_otb
from tests.helpers import tiny, tiny_vision
from tests.helpers.agents import CHAT, by_length
from tests.helpers.recording import Recording
from tests.helpers.scripted import TOOLS, script_turns
from tests.helpers.settings import LORA, assert_same_weights
from trl_otb import OTBGRPOTrainer, compare_baselines, register_baseline
from trl_otb.baselines import BASELINES, Value, assign_credit
from trl_otb.comparison import gradients as gradients_module
from trl_otb.comparison.efficiency import moments_of
from trl_otb.comparison.estimators import Estimator, Pool, estimators
from trl_otb.comparison.gradients import CompletionGradients, Projection
from trl_otb.comparison.history import BATCHES, advantages_among, prediction, with_history
from trl_otb.comparison.moments import prompt_moments, with_estimators_across_prompts
from trl_otb.seam.sampling import left_as_it_was, recording_states, rows_at_once, sample_pool, single_rows


SMALL = {"num_prompts": 3, "completions_per_prompt": 16, "group_sizes": [4], "baselines": ["otb", "ogb_pooled"]}


# Gradients


@pytest.mark.parametrize("dimension", [2000, 100_000])
def test_a_projection_keeps_inner_products(dimension):
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(20_000, generator=g) for _ in range(2))
    b += 0.5 * a
    errors = []
    for seed in range(20):
        project = Projection([15_000, 5_000], dimension, seed)
        pa, pb = project([torch.stack([x[:15_000].view(100, 150) for x in (a, b)]), torch.stack([a, b])[:, 15_000:]])
        errors.append(((pa @ pb - a @ b) / (a.norm() * b.norm())).item())
    errors = torch.tensor(errors)
    if dimension > 20_000:
        assert project.exact and errors.abs().max() < 1e-6
    else:
        assert errors.abs().max() < 4 * (2 / dimension) ** 0.5 and abs(errors.mean()) < 0.02


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """A tiny model's pool of 32 completions of one prompt in four parts, with its trainer."""
    folder = tmp_path_factory.mktemp("pool")
    settings = {**tiny.SETTINGS, "temperature": 0.7, "output_dir": str(folder / "run")}
    args = trl_otb.OTBGRPOConfig(**settings)
    trainer = OTBGRPOTrainer(
        tiny.save_model(folder / "model"), tiny.even_bytes, args=args, train_dataset=tiny.prompts()
    )
    with left_as_it_was(trainer):
        parts = sample_pool(trainer, trainer.train_dataset[0], 32, at_once=8, seed=0)
    assert [len(rollout) for rollout, _ in parts] == [8] * 4
    length = max(rollout.mask.size(1) for rollout, _ in parts)

    def padded(name):
        values = [torch.nn.functional.pad(getattr(r, name), (0, length - r.mask.size(1))) for r, _ in parts]
        return torch.cat(values)

    pool = Pool(torch.cat([rollout.rewards for rollout, _ in parts]), padded("energy"), padded("mask"))
    return trainer, pool, [row for _, batch in parts for row in single_rows(batch)]


def gradient_of(sampled, **changes):
    trainer, _, rows = sampled
    parameters = list(trainer.model.parameters())
    found = CompletionGradients(trainer, parameters, Projection([p.numel() for p in parameters], 10**9))
    for name, value in changes.items():
        setattr(found, name, value)

    def of(row, weights):
        with left_as_it_was(trainer):
            return found(rows[row], weights)

    return of


@pytest.mark.parametrize("studied", ["all", "without the head", "the head"])
@pytest.mark.parametrize("tied", [False, True], ids=["head of its own", "tied head"])
@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
def test_weighted_gradients_are_the_sum_over_tokens(studied, tied, together, tmp_path, train, monkeypatch):
    """One backward pass per token through the model's own logits, against one for all through the fused head."""
    monkeypatch.setattr(gradients_module, "SMALL", 10**9 if together else 0)
    path = tiny.save_model(tmp_path / "m", model_config=tiny.config(tie_word_embeddings=tied))
    trainer = train(train=False, model=path, temperature=20.0)  # a tied head is very sure
    head = {id(p) for p in trainer.model.get_output_embeddings().parameters()}
    kept = {"all": (True, False), "without the head": (False,), "the head": (True,)}[studied]
    named = {name: p for name, p in trainer.model.named_parameters() if (id(p) in head) in kept}
    parameters = list(named.values())
    of = CompletionGradients(trainer, parameters, Projection([p.numel() for p in parameters], 10**9))
    with left_as_it_was(trainer):
        ((rollout, batch),) = sample_pool(trainer, trainer.train_dataset[0], 8, at_once=8, seed=0)
        row = int(rollout.mask.sum(1).argmax())
        weights = torch.randn(3, rollout.mask.size(1), generator=torch.Generator().manual_seed(0)) * rollout.mask[row]
        found = of(single_rows(batch)[row], weights)
    prompt = rollout.prompt_ids[row][rollout.prompt_mask[row].bool()]
    completion = rollout.completion_ids[row][rollout.completion_mask[row].bool()]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    own = [dict(model.named_parameters())[name] for name in named]
    logits = model(input_ids=torch.cat([prompt, completion]).unsqueeze(0)).logits[0]
    logps = (logits[len(prompt) - 1 : -1] / 20.0).log_softmax(-1)
    expected = 0.0
    for t, token in enumerate(completion):
        scores = torch.autograd.grad(logps[t, token], own, retain_graph=True, allow_unused=True)
        scores = [torch.zeros_like(p) if s is None else s for s, p in zip(scores, own, strict=True)]
        expected = expected + weights[:, t, None] * torch.cat([score.flatten() for score in scores])
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(found, expected.float(), atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("baseline", ["otb", "ogb", "group_mean"])
def test_a_groups_gradient_is_the_mean_over_its_completions(sampled, baseline):
    """One partition of the pool into groups of 4, each group's gradient from its advantages."""
    _, pool, _ = sampled
    gradient, estimator = gradient_of(sampled), Estimator("x", baseline)
    found = prompt_moments(pool, gradient, {4: [estimator]}, partitions=1)["x", 4]
    rng = torch.Generator().manual_seed(0)
    for half, mean in zip(torch.arange(32).chunk(2), found["mean"], strict=True):
        rows = half[torch.randperm(16, generator=rng)]
        advantages = estimator.advantages(pool, rows, 4).expand(-1, pool.mask.size(1)) * pool.mask[rows]
        each = torch.stack([gradient(row, a.unsqueeze(0))[0] for row, a in zip(rows, advantages, strict=True)])
        groups = each.view(4, 4, -1).mean(1)
        torch.testing.assert_close(groups.mean(0), mean, atol=1e-5, rtol=1e-4)
        found["square"] -= groups.square().sum(1).mean().item() / 2
    assert abs(found["square"]) < 1e-5 * groups.square().sum(1).mean().item()


@pytest.mark.usefixtures("registry")
def test_one_partition_per_token_stands_for_all(sampled):
    """A baseline per token that is ogb's has ogb's moments over all partitions, though its own come for one."""
    _, pool, _ = sampled
    register_baseline("same")(lambda group: group.mean(group.total_energy))
    studied = {4: [Estimator("ogb", "ogb"), Estimator("same", "same")]}
    one, many = (prompt_moments(pool, gradient_of(sampled), studied, partitions=n) for n in (1, 10))
    assert abs(one["ogb", 4]["square"] / many["ogb", 4]["square"] - 1) > 0.01
    for found in (one, many):
        assert found["same", 4]["square"] == pytest.approx(found["ogb", 4]["square"], rel=1e-4)
        torch.testing.assert_close(found["same", 4]["mean"], found["ogb", 4]["mean"], atol=1e-5, rtol=1e-4)


def test_a_masked_completion_has_no_gradient(sampled):
    trainer, pool, rows = sampled
    masked = dict(rows[3], completion_ids=rows[3]["completion_ids"][:, :0])
    ones = torch.ones(1, pool.mask.size(1))
    assert gradient_of(sampled)(3, ones).abs().max() > 0
    assert gradient_of((trainer, pool, [masked]))(0, ones).eq(0).all()


def test_products_come_from_completions_that_are_not_shared(sampled):
    _, pool, _ = sampled
    every = estimators([])
    found = prompt_moments(pool, gradient_of(sampled), {4: every}, partitions=5)
    moments = moments_of([found], {e.name: e for e in every})["group_mean", 4]
    first, second = found["group_mean", 4]["mean"].double()
    assert moments.signal.item() == pytest.approx((first @ second).item(), rel=1e-6)
    assert moments.square.item() > moments.signal.item()


# Baselines that compare prompts


def prompts_of(sampled, number=4, size=8):
    """Rows of one pool as if they were several prompts' completions; the first prompt's tensors are narrower."""
    _, pool, _ = sampled
    gradient = gradient_of(sampled)
    own = torch.stack([gradient(row, pool.mask[row : row + 1].float())[0] for row in range(number * size)])
    rows = torch.arange(number * size).view(number, size)
    kept = [{name: values[r] for name, values in vars(pool).items()} for r in rows]
    kept[0] = {n: v if v.dim() == 1 else v[:, : int(kept[0]["mask"].sum(1).max())] for n, v in kept[0].items()}
    return [{"pool": {**of_prompt, "own": own[r]}} for of_prompt, r in zip(kept, rows, strict=True)], rows, own


@pytest.mark.parametrize("baseline", ["ogb_pooled", "rloo_pooled", "ogb_pooled_damped"])
def test_gradients_of_baselines_that_compare_prompts(sampled, baseline):
    """Halves of one group each, so that all prompts' groups meet."""
    _, pool, _ = sampled
    prompts, rows, own = prompts_of(sampled)
    across = [Estimator(baseline, baseline)]
    found = with_estimators_across_prompts(prompts, across, [4], prompts_per_batch=4, partitions=3)
    for half, at in enumerate((rows[:, :4].flatten(), rows[:, 4:].flatten())):
        advantages = assign_credit(pool.rewards[at], pool.energy[at], pool.mask[at], 4, baseline=baseline).advantages
        expected = (advantages * own[at]).view(4, 4, -1).mean(1)
        for prompt, of_prompt in zip(found, expected, strict=True):
            torch.testing.assert_close(prompt[baseline, 4]["mean"][half], of_prompt, atol=1e-5, rtol=1e-4)
    squares = torch.tensor([prompt[baseline, 4]["square"] for prompt in found])
    norms = torch.stack([prompt[baseline, 4]["mean"].square().sum(1).mean() for prompt in found])
    torch.testing.assert_close(squares, norms, rtol=1e-4, atol=1e-8)  # nothing varies but which partition it is


@pytest.fixture
def predicting():
    """`value` that has learnt something, and what it reads of the pool's completions."""
    value = Value()
    value.theta, value.weight = torch.randn(9 + 2 * 3, generator=torch.Generator().manual_seed(0)), 0.7
    value.bounded = False
    return replace(BASELINES["value"], function=value)


def test_gradients_of_a_baseline_on_top_of_another(sampled, predicting):
    """As above; the tokens' own advantages against what is put together from three numbers per completion."""
    _, pool, _ = sampled
    g = torch.Generator().manual_seed(1)
    shape = pool.mask.shape
    beside = {"logps": -torch.rand(shape, generator=g), "states": torch.randn(*shape, 3, generator=g)}
    slope, predicted = prediction(predicting, pool, beside)
    gradient = gradient_of(sampled)
    prompts, rows, _ = prompts_of(sampled)
    of_predictions = torch.stack([gradient(i, (predicted * pool.mask)[i : i + 1])[0] for i in rows.flatten().tolist()])
    for prompt, at in zip(prompts, rows, strict=True):
        prompt["predicted"] = {"value": (slope, of_predictions[at])}
    found = with_estimators_across_prompts(prompts, [Estimator("value", "value")], [4], 4, partitions=2)
    for half, at in enumerate((rows[:, :4].flatten(), rows[:, 4:].flatten())):
        inputs = (pool.rewards[at], pool.energy[at], pool.mask[at])
        of_half = {name: values[at] for name, values in beside.items()}
        advantages = assign_credit(*inputs, 4, baseline=predicting, beside=of_half).advantages
        own = torch.stack([gradient(row, a.unsqueeze(0))[0] for row, a in zip(at.tolist(), advantages, strict=True)])
        for prompt, expected in zip(found, own.view(4, 4, -1).mean(1), strict=True):
            torch.testing.assert_close(prompt["value", 4]["mean"][half], expected, atol=1e-5, rtol=1e-3)
    assert predicted.abs().max() > 0.1


def test_bounds_of_a_baseline_hold_in_the_measurement(sampled, predicting):
    """About the mean return of the pool's other half, so that no completion's own return is in its baseline."""
    _, pool, _ = sampled
    shape = pool.mask.shape
    beside = {
        "logps": -torch.rand(shape),
        "states": torch.randn(*shape, 3, generator=torch.Generator().manual_seed(1)),
    }
    slope, free = prediction(predicting, pool, beside)
    half = len(pool) // 2
    expected = torch.empty(len(pool), 1)
    expected[:half], expected[half:] = pool.rewards[half:].mean(), pool.rewards[:half].mean()
    least, most = expected.min().item() - 0.1, expected.max().item() + 0.1
    predicting.function.bounded, predicting.function._returns_seen = True, (least, most)
    same, bounded = prediction(predicting, pool, beside)
    assert same == slope and predicting.function.bounded
    at = (slope * expected + free).clamp(least, most)
    torch.testing.assert_close(bounded, (at - slope * expected) * pool.mask, atol=1e-5, rtol=1e-4)
    assert (bounded - free).abs().max() > 0.1


def test_only_what_is_linear_in_the_baseline_below_can_be_put_together(sampled, predicting):
    _, pool, _ = sampled
    beside = {"logps": torch.zeros(pool.mask.shape), "states": torch.zeros(*pool.mask.shape, 3)}
    bent = replace(predicting, function=lambda tokens: tokens.base.square())
    with pytest.raises(ValueError, match="is not a constant times the baseline below plus a prediction"):
        prediction(bent, pool, beside)


@pytest.mark.parametrize("n", [2, 4])
def test_advantages_of_groups_among_batches_of_rewards_per_token(sampled, predicting, n):
    """The batch put together by hand: the group is in the place of the last prompt, or of its own."""
    _, pool, _ = sampled
    g = torch.Generator().manual_seed(1)
    shape = pool.mask.shape
    beside = {"logps": -torch.rand(shape, generator=g), "states": torch.randn(*shape, 3, generator=g)}
    whole = Pool(torch.randn(shape, generator=g) * pool.mask, pool.energy, pool.mask)
    prompts = [whole.rows(torch.arange(first, first + 4)) for first in (16, 20, 24, 28)]
    narrow = Pool(*(values[:, : int(prompts[0].mask.sum(1).max())] for values in vars(prompts[0]).values()))
    batches = [
        {"a": narrow, "b": prompts[1], "c": prompts[2]},
        {"d": prompts[3], "own": prompts[0], "b": prompts[1]},
    ]
    rows = torch.tensor([5, 2, 7, 0, 11, 3, 1, 9])
    found = advantages_among(predicting, whole, beside, "own", batches, "generated")(rows, n)
    zeros = {name: torch.zeros(2 * n, *values.shape[1:]) for name, values in beside.items()}
    for group, at in enumerate(rows.split(n)):
        others = [(16, 20), (28, 20)][group % 2]
        batch = torch.cat([at, *(torch.arange(first, first + n) for first in others)])
        of_batch = {name: torch.cat([values[at], zeros[name]]) for name, values in beside.items()}
        inputs = whole.rewards[batch], whole.energy[batch], whole.mask[batch]
        expected = assign_credit(*inputs, n, baseline=predicting, beside=of_batch).advantages[:n]
        torch.testing.assert_close(found[group * n : group * n + n], expected, atol=1e-6, rtol=1e-5)


def rewarded_per_turn(completions, **kwargs):
    return [[0.1 * len(m["content"]) for m in turns if m["role"] == "assistant"] for turns in completions]


def test_other_prompts_of_rewards_per_turn_are_kept_by_batch(train, monkeypatch):
    script_turns(monkeypatch)
    trainer = train(train=False, reward_funcs=rewarded_per_turn, tools=TOOLS, train_dataset=CHAT)
    examples = [(f"example {i}", dict(CHAT[i])) for i in range(4)]
    at_once = rows_at_once(trainer)
    assert 4 < at_once < 18
    with left_as_it_was(trainer), recording_states(trainer):
        rules, batches = with_history(trainer, ["value"], examples, 3, 18, seed=0)
        few = with_history(trainer, ["value"], examples, 5, 2, seed=0)[1]
        again = with_history(trainer, ["value"], examples, 3, 4, seed=0)[1]
    assert rules["value"].function.theta is not None
    names = [name for name, _ in examples]
    assert [[*batch] for batch in batches[:2]] == [names[:3], [names[3], *names[:2]]] and len(batches) == BATCHES
    assert all(len(pool) == 18 and pool.rewards.shape == pool.mask.shape for of in batches for pool in of.values())
    # No prompt twice, and the trainer's N
    assert [{name: len(pool) for name, pool in of.items()} for of in few] == [dict.fromkeys(names, 4)] * BATCHES
    for prompt, same in zip(batches[0].values(), again[0].values(), strict=True):
        length = min(prompt.mask.size(1), same.mask.size(1))
        assert torch.equal(prompt.rewards[:4, :length], same.rewards[:, :length])


def test_rewards_per_turn_in_some_prompts_only_are_refused(train):
    """The batches that `value` learns from have none, the measured prompts do."""
    calls = []

    def reward(completion_ids, **kwargs):
        calls.append(tiny.even_bytes(completion_ids))
        return [[share] for share in calls[-1]] if len(completion_ids) == 16 else calls[-1]

    trainer = train(train=False, reward_funcs=reward, per_device_eval_batch_size=16)
    with pytest.raises(ValueError, match="those sampled before, from which 'value' has learned, have none"):
        compare_baselines(trainer, **SMALL | {"baselines": ["value"]}, prompts_per_batch=3)


def test_prompts_may_differ_in_whether_turns_are_rewarded(train):
    """Of baselines that compare prompts; what is summed over turns is as good as one reward at the end."""
    calls = []

    def reward(completion_ids, **kwargs):
        calls.append(tiny.even_bytes(completion_ids))
        return [[share] for share in calls[-1]] if len(calls) in (1, 2) else calls[-1]

    mixed = compare_baselines(train(train=False, reward_funcs=reward), **SMALL)
    assert len(calls) == 6 and mixed == compare_baselines(train(train=False), **SMALL)


def test_value_is_measured_after_batches_or_as_it_was_trained(train):
    trainer = train(train=False, max_steps=3)
    report = compare_baselines(trainer, **SMALL | {"baselines": ["value"]})
    assert {"value", "group_mean", "none"} == {row.name for row in report.comparisons}
    assert all(math.isfinite(row.noise_over_group_mean.value) for row in report.comparisons)
    assert trainer._state_recorder is None  # what hears the states is gone
    own = train(baseline="value", max_steps=3)
    state = own._baseline.function.theta.clone()
    compare_baselines(own, **SMALL | {"baselines": ["value"]})
    assert torch.equal(own._baseline.function.theta, state) and own._baseline.function.bounded


@pytest.mark.usefixtures("registry")
def test_a_baseline_that_only_remembers_is_refused_and_left_out(train, monkeypatch):
    monkeypatch.delitem(sys.modules, "recipes.prompt_tracker", raising=False)  # so that it registers itself
    trainer = train(train=False)
    with pytest.raises(ValueError, match="which remembers earlier batches. Of those, only ones on top of another"):
        compare_baselines(trainer, **SMALL | {"baselines": ["recipes.prompt_tracker:PromptTracker"]})
    report = compare_baselines(trainer, **SMALL | {"baselines": None})
    assert "value" in {row.name for row in report.comparisons} and "prompt_tracker" in BASELINES
    assert "prompt_tracker" not in {row.name for row in report.comparisons}


def test_so_many_prompts_meet_in_a_batch(sampled):
    """In batches of two nothing is pooled; more halves and partitions only average."""
    _, pool, _ = sampled
    prompts, rows, own = prompts_of(sampled)
    across = [Estimator("ogb_pooled", "ogb_pooled")]
    found = with_estimators_across_prompts(prompts, across, [2], prompts_per_batch=2, partitions=40)
    for prompt, of_prompt in zip(found, rows, strict=True):
        pairs = [torch.stack([a, b]) for half in of_prompt.chunk(2) for a, b in itertools.combinations(half, 2)]
        at = torch.stack(pairs).flatten()
        inputs = pool.rewards[at], pool.energy[at], pool.mask[at]
        advantages = assign_credit(*inputs, 2, baseline="ogb", leave_one_out=True).advantages
        expected = (advantages * own[at]).view(len(pairs), 2, -1).mean(1)
        assert prompt["ogb_pooled", 2]["square"] == pytest.approx(expected.square().sum(1).mean().item(), rel=0.15)


# The trainer is left as it was


class Comparing(TrainerCallback):
    """Compares amid training."""

    trainer = None

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            compare_baselines(self.trainer, **SMALL)


KINDS = {
    "plain": {},
    "group mean": {"baseline": "group_mean"},
    "half a group per micro-batch": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "reused batches, beta": {"num_iterations": 2, "beta": 0.1},
    "lora, checkpointing": {"peft_config": LORA, "gradient_checkpointing": True},
    "bf16": {"bf16": True},
    "scaled rewards": {"scale_rewards": "group"},
    "completions logged": {"log_completions": True},
    "value": {"baseline": "value"},
}


def log_of(trainer):
    timed = ("runtime", "per_second", "step_time")
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in timed)}
        for entry in trainer.state.log_history
    ]


@pytest.mark.parametrize("when", ["before", "amid"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_after_it_equals_training_without_it(train, kind, when):
    """Weights and log to the bit; training draws its own random numbers, its rewards Python's and numpy's."""

    def noisy(completion_ids, **kwargs):
        evenness = tiny.even_bytes(completion_ids)
        return [share + 0.1 * random.random() + 0.1 * np.random.rand() for share in evenness]

    options = {"max_steps": 3, "reward_funcs": noisy, **KINDS[kind]}
    without = train(**options)
    comparing = Comparing()
    trainer = train(train=False, callbacks=[comparing] if when == "amid" else [], **options)
    comparing.trainer = trainer
    if when == "before":
        report = compare_baselines(trainer, **SMALL)
        assert not trainer.rollouts and not trainer.state.log_history and report.num_prompts == 3
    trainer.train()
    assert_same_weights(trainer, without)
    assert log_of(trainer) == log_of(without) and len(log_of(trainer)) > 2
    assert trainer.model.training == without.model.training


def test_it_is_left_as_it_was_though_a_reward_fails(train):
    failing = []

    def reward(completion_ids, **kwargs):
        if failing:
            raise RuntimeError("out of order")
        return tiny.even_bytes(completion_ids)

    without, trainer = train(reward_funcs=reward), train(train=False, reward_funcs=reward)
    failing.append(True)
    with pytest.raises(RuntimeError, match="out of order"):
        compare_baselines(trainer, **SMALL)
    failing.clear()
    trainer.train()
    assert_same_weights(trainer, without)


# Whatever the trainer holds


def test_logits_are_never_materialised(train):
    trainer = train(cls=Recording, train=False)
    scored = 0

    class NoLogits(torch.nn.Module):
        def __enter__(self):
            head, original = trainer.model.get_output_embeddings(), trainer._get_per_token_logps_and_entropies

            def watched(*args, **kwargs):
                nonlocal scored
                scored += 1
                handle = head.register_forward_hook(lambda *_: pytest.fail("the LM head was called for logits"))
                try:
                    return original(*args, **kwargs)
                finally:
                    handle.remove()

            trainer._get_per_token_logps_and_entropies = watched

        def __exit__(self, *exception):
            del trainer._get_per_token_logps_and_entropies

    with NoLogits():
        compare_baselines(trainer, **SMALL)
    assert scored > 3 * 16


@pytest.mark.parametrize("layout", tiny_vision.LAYOUTS)
def test_pictures(train, tmp_path, layout):
    """Each completion's gradient sees its own prompt's pictures: with others it is another one."""
    trainer = train(
        train=False,
        model=tiny_vision.save_model(tmp_path / "vision", layout),
        processing_class=tiny_vision.processor(layout),
        train_dataset=tiny_vision.prompts_with_several(),
        generation_kwargs={"suppress_tokens": tiny_vision.image_token_ids(layout)},
    )
    report = compare_baselines(trainer, **SMALL)
    assert {row.name for row in report.comparisons} >= {"otb", "ogb_pooled", "group_mean", "none"}
    with left_as_it_was(trainer):
        ((_, batch),) = sample_pool(trainer, trainer.train_dataset[0], 4, at_once=4, seed=0)
        rows = single_rows(batch)
        parameters = list(trainer.model.parameters())
        of = CompletionGradients(trainer, parameters, Projection([p.numel() for p in parameters], 4096))
        length = rows[0]["completion_ids"].size(1)
        seen = of(rows[0], torch.ones(1, length))
        other = dict(rows[0], pixel_values=rows[0]["pixel_values"] + 1)
        assert (of(other, torch.ones(1, length)) - seen).abs().max() > 1e-3 * seen.abs().max()


@pytest.mark.parametrize("rewards", [by_length, rewarded_per_turn], ids=["at the end", "per turn"])
def test_tools(train, monkeypatch, rewards):
    script_turns(monkeypatch)
    trainer = train(
        train=False,
        reward_funcs=rewards,
        tools=TOOLS,
        train_dataset=CHAT,
        num_generations=8,
        max_completion_length=400,
        generation_kwargs={"max_new_tokens": 2},
    )
    report = compare_baselines(trainer, **SMALL | {"baselines": ["otb", "ogb_pooled", "value"]})
    assert report.group_size == 4 and report.mean_length > 5
    assert "otb, one left out" in repr(report)
    of = {row.name: row.noise_over_group_mean.value for row in report.at()}
    assert math.isfinite(of["value"]) and of["value"] != of["ogb_pooled"]


@pytest.mark.usefixtures("registry")
def test_a_baseline_of_ones_own_is_treated_as_a_built_in_one(train):
    register_baseline(
        "mine", per_token=False, uses_energy=False, totals_only=True, leaves_one_out=True, unbiased=True
    )(lambda group: group.mean(torch.ones_like(group.returns), leave_one_out=True))
    report = compare_baselines(train(train=False), **SMALL | {"baselines": ["mine", "rloo"]})
    of = {row.name: row for row in report.at()}
    assert of["mine"].unbiased and of["mine"].noise_over_group_mean == of["rloo"].noise_over_group_mean


def test_an_iterable_dataset_and_the_defaults(train):
    trainer = train(train=False, train_dataset=tiny.prompts().to_iterable_dataset())
    report = compare_baselines(trainer, num_prompts=4)
    assert (report.group_size, report.group_sizes) == (4, [2, 4, 8]) and report.completions_per_prompt == 64
    assert {row.baseline for row in report.comparisons} == set(trl_otb.baselines.BASELINES)
    assert report.prompts_per_batch == 3  # the trainer has 2, of which no interval can be told


# Folders


def test_a_folder_is_gone_on_with_and_read_again(train, tmp_path):
    trainer, folder = train(train=False), tmp_path / "noise"
    options = {**SMALL, "output_dir": folder}
    whole = compare_baselines(trainer, **SMALL | {"num_prompts": 4})
    compare_baselines(trainer, **options)
    files = sorted(folder.glob("prompt-*.pt"))
    before = [file.stat().st_mtime_ns for file in files]
    report = compare_baselines(trainer, **options | {"num_prompts": 4})
    assert [file.stat().st_mtime_ns for file in files] == before and len(list(folder.glob("prompt-*.pt"))) == 4
    assert report == whole  # each prompt has random numbers of its own
    assert trl_otb.BaselineReport.load(folder) == report
    assert trl_otb.BaselineReport.load(folder, prompts_per_batch=50).prompts_per_batch == 50
    files[1].unlink()
    assert compare_baselines(trainer, **options | {"num_prompts": 4}).num_prompts == 4
    kept = torch.load(files[0], weights_only=True)["pool"]
    for values in kept.values():  # without the gradients under other weights, which they stood beside
        assert values.untyped_storage().nbytes() == values.nbytes


def test_what_was_measured_otherwise_is_refused(train, tmp_path):
    trainer, folder = train(train=False), tmp_path / "noise"
    options = {**SMALL, "output_dir": folder}
    compare_baselines(trainer, **options)
    files = {file: file.read_bytes() for file in folder.iterdir()}
    for change, message in (
        ({"seed": 1}, "`seed` was 7 and is 1"),
        ({"baselines": ["ogb"]}, "`baselines` was"),
        ({"completions_per_prompt": 20}, "`completions_per_prompt` was 16 and is 20"),
        ({"parameters": "proj"}, '`parameters` was null and is "proj"'),
    ):
        with pytest.raises(ValueError, match=f"measured differently: .*{message}"):
            compare_baselines(trainer, **options | change)
    trainer.args.top_p = 0.5
    with pytest.raises(ValueError, match=r"`top_p` was 1.0 and is 0.5"):
        compare_baselines(trainer, **options)
    trainer.args.top_p = 1.0
    with torch.no_grad():
        next(trainer.model.parameters())[0, 0] += 1e-3
    with pytest.raises(ValueError, match="`weights` was"):
        compare_baselines(trainer, **options)
    assert {file: file.read_bytes() for file in folder.iterdir()} == files
    compare_baselines(trainer, **options, overwrite=True)
    assert len(list(folder.glob("prompt-*.pt"))) == 3


def test_other_data_are_refused(train, tmp_path):
    options = {**SMALL, "output_dir": tmp_path / "noise"}
    compare_baselines(train(train=False), **options)
    other = tiny.prompts().map(lambda row: {"prompt": f"{row['prompt']}?"})
    with pytest.raises(ValueError, match="was measured on different data"):
        compare_baselines(train(train=False, train_dataset=other), **options)
    # Fewer prompts are the first of those that are there
    compare_baselines(train(train=False), **options | {"num_prompts": 5})
    assert compare_baselines(train(train=False), **options) == compare_baselines(train(train=False), **SMALL)


def test_turns_may_be_rewarded_in_some_completions_only(train):
    """A sampled part without rewards of turns beside one with them: each return at the last generated token."""
    calls = []

    def reward(completion_ids, **kwargs):
        calls.append(tiny.even_bytes(completion_ids))
        return [[share] for share in calls[-1]] if len(calls) % 2 else calls[-1]

    mixed = compare_baselines(train(train=False, reward_funcs=reward), **SMALL)
    assert len(calls) == 6 and mixed == compare_baselines(train(train=False), **SMALL)


def test_a_foreign_or_damaged_file_is_named(train, tmp_path):
    trainer, folder = train(train=False), tmp_path / "noise"
    compare_baselines(trainer, **SMALL, output_dir=folder)
    (folder / "prompt-00001.pt").write_bytes(b"no pickle")
    with pytest.raises(ValueError, match=r"prompt-00001\.pt is damaged or not a measurement"):
        compare_baselines(trainer, **SMALL, output_dir=folder)
    (folder / "settings.json").write_text("{")
    with pytest.raises(ValueError, match=r"settings\.json cannot be read"):
        trl_otb.BaselineReport.load(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="which is a file: name a folder"):
        compare_baselines(trainer, **SMALL, output_dir=tmp_path / "file")
    with pytest.raises(ValueError, match="Nothing is saved under"):
        trl_otb.BaselineReport.load(tmp_path)


def test_one_process_at_a_time(train, tmp_path):
    """A second one is refused while the first is at it, and not after the first has failed."""
    trainer, refused = train(train=False), []

    def reward(completion_ids, **kwargs):
        if not refused:
            with pytest.raises(ValueError, match="Another process measures into") as error:
                compare_baselines(train(train=False), **SMALL, output_dir=tmp_path / "noise")
            refused.append(error)
            raise RuntimeError("stopped")
        return tiny.even_bytes(completion_ids)

    trainer = train(train=False, reward_funcs=reward)
    with pytest.raises(RuntimeError, match="stopped"):
        compare_baselines(trainer, **SMALL, output_dir=tmp_path / "noise")
    assert compare_baselines(trainer, **SMALL, output_dir=tmp_path / "noise").num_prompts == 3


# Wrong input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_sizes": [1]}, r"`group_sizes` is \[1\]: give sizes of 2 or more"),
        ({"group_sizes": 1}, r"`group_sizes` is \[1\]: give sizes of 2 or more"),
        ({"group_sizes": [4.0]}, "`group_sizes` is 4.0: give a whole number"),
        ({"group_sizes": "4"}, "`group_sizes` is '4': give a whole number"),
        ({"num_prompts": True}, "`num_prompts` is True: give a whole number"),
        ({"prompts_per_batch": 3.5}, "`prompts_per_batch` is 3.5: give a whole number"),
        ({"seed": "1"}, "`seed` is '1': give a whole number"),
        ({"baselines": [len]}, "`baselines` holds <built-in function len>: give names"),
        ({"baselines": b"otb"}, "`baselines` holds b'otb': give names"),
        ({"overwrite": "no"}, "`overwrite` is 'no': it must be True or False"),
        ({"parameters": 3}, "`parameters` is 3: give a regular expression"),
        ({"num_prompts": 4.0}, "`num_prompts` is 4.0: give a whole number"),
        ({"completions_per_prompt": "16"}, "`completions_per_prompt` is '16': give a whole number"),
        ({"baselines": "absent"}, "'absent': it must be one of"),
        ({"group_sizes": []}, r"`group_sizes` is \[\]: give sizes of 2 or more"),
        ({"group_sizes": [8]}, "`completions_per_prompt` is 16 and the largest group has 8.*32 or more"),
        ({"group_sizes": [2], "completions_per_prompt": 8}, "`completions_per_prompt` is 8.*16 or more"),
        ({"num_prompts": 2}, "`num_prompts` is 2"),
        ({"num_prompts": 1000}, "`num_prompts` is 1000 and the training data has 8 different examples"),
        ({"baselines": ["absent"]}, "'absent': it must be one of"),
        ({"prompts_per_batch": 2}, "`prompts_per_batch` is 2: give 3 or more"),
        ({"projection": 3}, "`projection` is 3"),
        ({"parameters": "nothing-has-this"}, "`parameters` is 'nothing-has-this', which none of"),
        ({"parameters": "("}, r"`parameters` is '\(', which is not a regular expression"),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_sampled(train, change, message):
    trainer = train(train=False, reward_funcs=lambda **_: pytest.fail("sampled"))
    with pytest.raises(ValueError, match=message):
        compare_baselines(trainer, **SMALL | change)


def test_numbers_and_lists_may_be_of_any_kind(train):
    trainer = train(train=False)
    kinds = {"num_prompts": np.int64(3), "group_sizes": np.array([4]), "baselines": iter(SMALL["baselines"])}
    assert compare_baselines(trainer, **SMALL | kinds).to_json() == compare_baselines(trainer, **SMALL).to_json()


def test_a_model_that_trains_nothing_has_no_noise(train):
    trainer = train(train=False)
    trainer.model.requires_grad_(False)
    with pytest.raises(ValueError, match="The model has no trainable parameter"):
        compare_baselines(trainer, **SMALL)


@pytest.mark.usefixtures("registry")
def test_a_baseline_that_compares_prompts_token_by_token_is_refused(train):
    register_baseline("all_tokens", across_prompts=True)(lambda group: group.mean(group.energy).mean())
    with pytest.raises(ValueError, match="'all_tokens', which compares prompts token by token"):
        compare_baselines(train(train=False), **SMALL | {"baselines": ["all_tokens"]})


def test_another_trainer_is_refused(train):
    with pytest.raises(TypeError, match="`trainer` is a GRPOTrainer: compare_baselines takes an OTBGRPOTrainer"):
        compare_baselines(train(GRPOTrainer, config=GRPOConfig, train=False))


def test_a_reward_that_never_varies_is_named(train):
    trainer = train(train=False, reward_funcs=lambda completion_ids, **_: [0.25] * len(completion_ids))
    with pytest.raises(ValueError, match="No prompt's reward varied: it is 0.25 for every completion"):
        compare_baselines(trainer, **SMALL)


@pytest.mark.parametrize("option", [{"top_p": 0.9}, {"top_k": 5}, {"mask_truncated_completions": True}])
def test_where_scores_have_another_mean_no_estimator_is_called_unbiased(train, option, tmp_path):
    report = compare_baselines(train(train=False, **option), **SMALL, output_dir=tmp_path / "noise")
    assert json.loads((tmp_path / "noise" / "settings.json").read_text())["scores_have_mean_zero"] is False
    assert not any(row.unbiased for row in report.comparisons)
