"""compare_baselines: gradients by brute force, moments by the definitions, and a trainer that is left as it was."""

import math
import random
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from packaging.version import Version
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import trl_otb
from tests.helpers import tiny, tiny_vision
from tests.helpers.agents import AGENT
from tests.helpers.coefficients import give_coefficients
from tests.helpers.scripted import TURNS, add, script_turns
from tests.helpers.settings import LORA, TRL, assert_same_weights, in_turn
from trl_otb import OTBGRPOTrainer, compare_baselines, register_baseline
from trl_otb import comparison as comparison_module
from trl_otb.baselines import BASELINES, Baseline, compute_advantages, squeeze
from trl_otb.comparison import gradients as gradients_module
from trl_otb.comparison import moments as moments_module
from trl_otb.comparison.efficiency import moments_of
from trl_otb.comparison.gradients import CompletionGradients, Projection
from trl_otb.comparison.moments import prompt_moments
from trl_otb.comparison.pools import at_rest, sample
from trl_otb.comparison.progress import WITH_PROGRESS
from trl_otb.comparison.report import setting
from trl_otb.rollout import generated_mask


SMALL = {"num_prompts": 3, "completions_per_prompt": 16, "group_sizes": [4], "baselines": ["otb", "ogb_pooled"]}
ENERGY = frozenset({"energy"})


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """One split into groups for baselines that compare prompts, whose batches take long."""
    monkeypatch.setattr(moments_module, "BATCH_PARTITIONS", 1)


@pytest.mark.parametrize(("dimension", "largest", "mean"), [(2000, 4 * (2 / 2000) ** 0.5, 0.02), (10**5, 1e-6, 1e-6)])
def test_a_projection_keeps_inner_products(dimension, largest, mean):
    g = torch.Generator().manual_seed(0)
    a, b = both = torch.randn(2, 20_000, generator=g)
    b += 0.5 * a
    errors = []
    for seed in range(20):
        project = Projection([15_000, 5_000], dimension, seed)
        pa, pb = project([both[:, :15_000].view(2, 100, 150), both[:, 15_000:]])
        errors.append(((pa @ pb - a @ b) / (a.norm() * b.norm())).item())
    assert max(map(abs, errors)) < largest and abs(sum(errors)) / 20 < mean


def exact_gradients(trainer, parameters):
    return CompletionGradients(trainer, parameters, Projection([p.numel() for p in parameters], 10**9))


@pytest.mark.parametrize("studied", ["all", "without the head", "the head"])
@pytest.mark.parametrize("tied", [False, True], ids=["head of its own", "tied head"])
@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
def test_weighted_gradients_sum_over_tokens(studied, tied, together, tmp_path, train, monkeypatch):
    """One backward pass per token through the model's own logits, against one for all through the fused head."""
    monkeypatch.setattr(gradients_module, "SMALL_MODEL", 10**9 if together else 0)
    path = tiny.save_model(tmp_path / "m", model_config=tiny.config(tie_word_embeddings=tied))
    trainer = train(train=False, model=path, temperature=20.0)  # a tied head is very sure
    head = {id(p) for p in trainer.model.get_output_embeddings().parameters()}
    kept = {"all": (True, False), "without the head": (False,), "the head": (True,)}[studied]
    named = {name: p for name, p in trainer.model.named_parameters() if (id(p) in head) in kept}
    with at_rest(trainer, ENERGY):
        ((pool, rows),) = sample(trainer, [trainer.train_dataset[0]], 8, seed=0)
        row = int(pool.lengths.argmax())
        weights = torch.randn(3, pool.mask.size(1), generator=torch.Generator().manual_seed(0)) * pool.mask[row]
        found = exact_gradients(trainer, [*named.values()])(rows[row], weights)
    prompt, completion = (rows[row][f"{name}_ids"][rows[row][f"{name}_mask"] > 0] for name in ("prompt", "completion"))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    own = [dict(model.named_parameters())[name] for name in named]
    logits = model(input_ids=torch.cat([prompt, completion]).unsqueeze(0)).logits[0]
    logps = (logits[len(prompt) - 1 : -1] / 20.0).log_softmax(-1)
    expected = 0.0
    for t, token in enumerate(completion):
        scores = torch.autograd.grad(logps[t, token], own, retain_graph=True, materialize_grads=True)
        expected = expected + weights[:, t, None] * torch.cat([score.flatten() for score in scores])
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(found, expected.float(), atol=2e-4, rtol=2e-3)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """32 completions of one prompt with their trainer; log-probs and states are noise."""
    folder, g = tmp_path_factory.mktemp("pool"), torch.Generator().manual_seed(1)
    ends = {"exponential_decay_length_penalty": (1, 1.25)}  # at unequal lengths
    options = {"generation_kwargs": ends, "temperature": 0.7, "output_dir": str(folder / "run")}
    args = trl_otb.OTBGRPOConfig(**tiny.SETTINGS | options)
    path = tiny.save_model(folder / "model")
    trainer = OTBGRPOTrainer(path, tiny.even_bytes, args=args, train_dataset=tiny.prompts())
    with at_rest(trainer, ENERGY):
        ((pool, rows),) = sample(trainer, [trainer.train_dataset[0]], 32, seed=0)  # in parts of 8
    logps = -torch.rand(pool.mask.shape, generator=g) * pool.mask
    states = torch.randn(*pool.mask.shape, 3, generator=g) * pool.mask.unsqueeze(-1)
    assert len(pool) == len(rows) == pool.num_generations == 32 and pool.lengths.unique().numel() > 2
    return trainer, replace(pool, logps=logps, states=states), rows


def gradient_of(sampled):
    trainer, _, rows = sampled
    gradients = exact_gradients(trainer, [*trainer.model.parameters()])

    def of(row, weights):
        with at_rest(trainer, ENERGY):
            return gradients(rows[row], weights)

    return of


def moments(sampled, *baselines, companions=()):
    _, pool, rows = sampled
    entries, masks = {entry.name: entry for entry in baselines}, [generated_mask(row)[0] for row in rows]
    return prompt_moments(pool, masks, gradient_of(sampled), entries, [4], {4: list(companions)})


@pytest.fixture
def one_partition(monkeypatch):
    """The rows of its groups, by half."""
    monkeypatch.setattr(moments_module, "PARTITIONS", 1)
    rng = torch.Generator().manual_seed(0)
    return [half[torch.randperm(16, generator=rng)] for half in torch.arange(32).chunk(2)]


def assert_moments(found, sampled, advantages_of_half, one_partition):
    """Against each completion's own gradient under its advantages, the mean over groups of four."""
    gradient, squares = gradient_of(sampled), []
    for rows, mean in zip(one_partition, found["mean"], strict=True):
        pairs = zip(rows, advantages_of_half(rows).unsqueeze(1), strict=True)
        each = torch.cat([gradient(row, a) for row, a in pairs])
        groups = each.view(4, 4, -1).mean(1)
        torch.testing.assert_close(mean, groups.mean(0), atol=1e-5, rtol=1e-3)
        squares.append(groups.square().sum(1).mean().item())
    assert found["square"] == pytest.approx(sum(squares) / 2, rel=1e-4)


def rewarded(seed, per_token=False):
    """Four completions with rewards, `(4,)` or `(4, 8)`, as arguments of `compute_advantages` by name."""
    g = torch.Generator().manual_seed(seed)
    mask = (torch.arange(8) < torch.randint(2, 9, (4, 1), generator=g)).float()
    rewards, energy, logps = torch.rand(3, 4, 8, generator=g) * mask
    states = torch.randn(4, 8, 3, generator=g) * mask.unsqueeze(-1)
    rewards = rewards if per_token else rewards[:, 0]
    return {"rewards": rewards, "energy": 2 * energy, "mask": mask, "logps": -logps, "states": states}


def companion(mask, **values):
    """No wider than its longest completion."""
    longest = int(mask.sum(1).max())
    cut = {k: x if x.dim() == 1 else x[:, :longest] for k, x in values.items()}
    return squeeze(mask=mask[:, :longest], num_generations=4, **cut)


@pytest.mark.parametrize("per_token", [False, True], ids=["one reward", "rewards of tokens"])
@pytest.mark.parametrize("baseline", ["ogb_pooled", "rloo_pooled", "value", "otb", "ogb", "group_mean"])
def test_group_gradient_is_completions_mean(sampled, one_partition, baseline, per_token):
    """With the groups of other prompts, the whole batch put together and credited by hand; companions come in turn."""
    trainer, pool, rows = sampled
    entry = BASELINES[baseline].instance()
    if baseline == "value":  # that has learned something
        value, g = entry.estimator, torch.Generator().manual_seed(0)
        give_coefficients(value, pool, lambda size: 0.1 * torch.randn(size, generator=g))
        value.weight, value.luck_weight, value.returns_seen = 0.7, 0.9, (-3.0, 3.0)
    pool = replace(pool, draw_ratio=None)
    others = [[rewarded(10 * batch + prompt, per_token) for prompt in range(3)] for batch in range(2)]
    rewards = pool.returns[:, 0]
    if per_token:
        rewards = torch.randn(pool.mask.shape, generator=torch.Generator().manual_seed(3)) * pool.mask
        made = squeeze(rewards, pool.mask, 32)
        pool = replace(pool, returns=made.returns, whole_returns=made.whole_returns)
    own = {"rewards": rewards, **{name: getattr(pool, name) for name in ("energy", "mask", "logps", "states")}}

    def advantages(rows):
        found = []
        for number, group in enumerate(rows.split(4)):
            parts = [{name: values[group] for name, values in own.items()}, *others[number % 2]]
            whole = {name: torch.cat([part[name] for part in parts]) for name in own}
            found.append(compute_advantages(**whole, num_generations=4, baseline=entry)[:4])
        return torch.cat(found)

    companions = [[companion(**x) for x in batch] for batch in others]
    found = moments((trainer, pool, rows), entry, companions=companions)
    assert_moments(found[baseline, 4], sampled, advantages, one_partition)
    first, second = found[baseline, 4]["mean"].double()  # of halves: products share no completion
    assert moments_of([found], set())[baseline, 4].signal.item() == pytest.approx((first @ second).item(), rel=1e-6)


@pytest.mark.parametrize("same_as", ["ogb", "rloo_pooled"])
def test_one_partition_stands_for_all(sampled, monkeypatch, same_as):
    """A baseline per token that is one per completion has its moments over all partitions, from a single one."""
    if same_as == "ogb":
        same = Baseline("same", lambda x: x.completion_mean(x.total_energy), frozenset({"energy"}), per_token=True)
    else:
        same = replace(BASELINES["value"].instance(), name="same")  # has not learned anything
    companions = [[companion(**rewarded(seed)) for seed in range(3)]]
    monkeypatch.setattr(moments_module, "BATCH_PARTITIONS", 5)
    many = moments(sampled, BASELINES[same_as], same, companions=companions)
    monkeypatch.setattr(moments_module, "PARTITIONS", 1)
    one = moments(sampled, BASELINES[same_as], same, companions=companions)
    assert abs(one[same_as, 4]["square"] / many[same_as, 4]["square"] - 1) > 0.01
    for found in (one, many):
        assert found["same", 4]["square"] == pytest.approx(found[same_as, 4]["square"], rel=1e-4)
        torch.testing.assert_close(found["same", 4]["mean"], found[same_as, 4]["mean"], atol=1e-5, rtol=1e-4)


def test_a_masked_completion_has_no_gradient(sampled):
    trainer, pool, rows = sampled
    masked = dict(rows[3], completion_ids=rows[3]["completion_ids"][:, :0])
    ones = torch.ones_like(pool.mask[:1])
    assert gradient_of(sampled)(3, ones).abs().max() > 0
    assert gradient_of((trainer, pool, [masked]))(0, ones).eq(0).all()


@pytest.fixture
def calls_of_prompt_moments(monkeypatch):
    calls = []

    def watched(pool, masks, gradient_of, entries, sizes, companions, seed):
        calls.append((pool, entries, companions))
        return prompt_moments(pool, masks, gradient_of, entries, sizes, companions, seed)

    monkeypatch.setattr(comparison_module, "prompt_moments", watched)
    return calls


class Learner:
    """Keeps the prompts that it has learned from, and predicts nothing."""

    def __init__(self):
        self.seen = []

    def __call__(self, x):
        return torch.zeros_like(x.scored)

    def update(self, local, b0, gather):
        self.seen.append(local.prompt_key.flatten().tolist())

    state_dict = load_state_dict = lambda self, *state: {}


@pytest.mark.usefixtures("registry")
def test_baselines_learn_from_other_prompts(train, calls_of_prompt_moments):
    register_baseline("learner", needs={"prompt_key"}, per_token=False, scope="batch")(Learner)
    compare_baselines(train(train=False), **SMALL | {"baselines": ["learner"]})  # 2 prompts a batch
    measured = {int(pool.prompt_key[0]) for pool, _, _ in calls_of_prompt_moments}
    for _, entries, beside in calls_of_prompt_moments:
        seen = entries["learner"].estimator.seen
        assert [len(keys) for keys in seen] == [2 * 4] * 8 and measured.isdisjoint(chain(*seen))
        assert len({key for keys in seen for key in keys}) == 5  # of 8 there are
        assert len(measured) == 3 and [len(batch) for batch in beside[4]] == [1] * 3
    calls_of_prompt_moments.clear()
    # All prompts are measured, so that these are companions, too
    compare_baselines(train(train=False), **SMALL | {"num_prompts": 8, "baselines": ["learner"]}, prompts_per_batch=3)
    for pool, _, beside in calls_of_prompt_moments:
        keys = [[int(x.prompt_key[0]) for x in batch] for batch in beside[4]]
        assert all(len({*of}) == 2 and int(pool.prompt_key[0]) not in of for of in keys)


def test_value_is_measured_as_trained(train, calls_of_prompt_moments):
    own = train(baseline="value", max_steps=3)
    state = own.baseline.entry.estimator.theta.clone()
    as_trained = compare_baselines(own, **SMALL | {"baselines": ["value"]})
    trained = calls_of_prompt_moments[-1][1]["value"].estimator
    assert trained is not own.baseline.entry.estimator
    assert all(torch.equal(entry.theta, state) for entry in (trained, own.baseline.entry.estimator))
    report = compare_baselines(train(train=False), **SMALL | {"baselines": ["value"]})
    assert not torch.equal(calls_of_prompt_moments[-1][1]["value"].estimator.theta, state)
    assert all(math.isfinite(row.noise_over_group_mean.value) for row in report.comparisons)
    # While it learned in the comparison
    assert as_trained.learned == {} and "explained" not in repr(as_trained)
    assert report.learned["value/explained"] < 1 and 0 < report.learned["value/weight"] <= 1
    assert f"`otb/value/explained` was {report.learned['value/explained']:.2f}." in repr(report)


@pytest.mark.parametrize("every", [2, 3], ids=["in some parts of a pool", "in some prompts"])
def test_some_completions_may_have_turns(train, every):
    """A part with rewards of turns beside one without: each return is earned at the last generated token."""
    calls = []

    def reward(completion_ids, **kwargs):
        calls.append(tiny.even_bytes(completion_ids))
        return [[share] for share in calls[-1]] if len(calls) % every else calls[-1]

    mixed = compare_baselines(train(train=False, reward_funcs=reward), **SMALL)
    assert len(calls) > 6 and mixed.to_json() == compare_baselines(train(train=False), **SMALL).to_json()


@pytest.mark.parametrize("own", [1, 4])
def test_one_completion_keeps_batch_size(train, calls_of_prompt_moments, own):
    """With N = 4 and 2 prompts per step, N = 1 has up to 8, one of which is measured."""
    options = {"train_dataset": tiny.prompts(40), "num_generations": own, "baseline": "value"}
    small = SMALL | {"baselines": ["value", "otb"], "group_sizes": None if own == 4 else [1, 2]}
    report = compare_baselines(train(train=False, **options), **small)
    assert {row.name for row in report.at(1)} == {"none", "rloo_pooled", "value"} and report.group_size == own
    _, _, beside = calls_of_prompt_moments[0]
    assert [len(batch) for batch in beside[1]] == [7] * 3
    assert all(math.isfinite(row.more_completions.value) for row in report.comparisons if row.unbiased)
    control = next(row for row in report.at(own) if row.name == ("group_mean" if own == 4 else "rloo_pooled"))
    assert control.more_completions.value == control.more_prompts.value == 0
    assert ("8 completions per step  more that group_mean with N = 4 needs" in repr(report)) == (own == 4)


def test_pools_of_one_completion_say_nothing(train):
    """That they do not vary, for one."""
    small = {"num_prompts": 3, "completions_per_prompt": 8, "group_sizes": 1, "baselines": "value"}
    report = compare_baselines(train(train=False, num_generations=1, baseline="value"), **small)
    assert report.prompts_varying > 0 and {row.n for row in report.comparisons} == {1}


KINDS = {
    "group mean": {"baseline": "group_mean"},
    "reused batches, beta": {"num_iterations": 2, "beta": 0.1},
    "lora, checkpointing": {"peft_config": LORA, "gradient_checkpointing": True},
    "bf16": {"bf16": True},
    "scaled rewards": {"scale_rewards": "group", "baseline": "ogb"},
    "completions logged": {"log_completions": True},
    "value": {"baseline": "value"},
}


def log_of(trainer):
    """Without timings."""
    timed, log = ("runtime", "per_second", "step_time"), trainer.state.log_history
    return [{k: v for k, v in entry.items() if not any(word in k for word in timed)} for entry in log]


@pytest.mark.parametrize(("kind", "when"), [*in_turn(KINDS, ["before", "amid"]), ("value", "amid")])
def test_comparison_leaves_training_unchanged(train, kind, when):
    """Weights and log to the bit, also after a reward that fails; rewards draw random numbers, too."""

    def noisy(completion_ids, **kwargs):
        if failing:
            raise failing[0]
        return [share + 0.1 * random.random() + 0.1 * np.random.rand() for share in tiny.even_bytes(completion_ids)]

    class Comparing(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1 and when == "amid":
                compare_baselines(trainer, **SMALL)

    options, failing = {"max_steps": 3, "reward_funcs": noisy, **KINDS[kind]}, []
    without = train(**options)
    trainer = train(train=False, callbacks=[Comparing()], **options)
    if when == "before":
        failing.append(RuntimeError("out of order"))
        with pytest.raises(RuntimeError, match="out of order"):
            compare_baselines(trainer, **SMALL)
        failing.clear()
        report = compare_baselines(trainer, **SMALL)
        assert not trainer.rollouts and not trainer.state.log_history and report.num_prompts == 3
    trainer.train()
    assert_same_weights(trainer, without)
    assert log_of(trainer) == log_of(without) and len(log_of(trainer)) > 2
    assert trainer.model.training == without.model.training and trainer._trl_otb.needs == without._trl_otb.needs


@pytest.mark.skipif(TRL < Version("1.11"), reason="trl 1.11 is the first that cuts batches with several pictures")
@pytest.mark.parametrize("layout", tiny_vision.LAYOUTS)
def test_pictures(train, tmp_path, layout):
    """Each completion's gradient sees its own prompt's pictures: with others it is another one."""
    folder = tiny_vision.save_model(tmp_path / "vision", layout)
    trainer = train(train=False, **tiny_vision.given(layout, folder, tiny_vision.prompts_with_several()))
    assert len(compare_baselines(trainer, **SMALL).comparisons) == 4
    with at_rest(trainer, ENERGY):
        ((_, rows),) = sample(trainer, [trainer.train_dataset[0]], 4, seed=0)
        of, ones = exact_gradients(trainer, [*trainer.model.parameters()]), torch.ones_like(rows[0]["completion_ids"])
        seen = of(rows[0], ones)
        other = dict(rows[0], pixel_values=rows[0]["pixel_values"] + 1)
        assert (of(other, ones) - seen).abs().max() > 1e-3 * seen.abs().max()


def rewarded_per_turn(completions, **kwargs):
    return [[0.1 * len(m["content"]) for m in turns if m["role"] == "assistant"] for turns in completions]


@pytest.mark.slow
def test_tools(train, monkeypatch, calls_of_prompt_moments):
    script_turns(monkeypatch, [TURNS[row] for row in (1, 6, 7)])
    trainer = train(train=False, reward_funcs=rewarded_per_turn, tools=[add], **AGENT)
    report = compare_baselines(trainer, **SMALL | {"baselines": ["otb", "ogb_pooled", "value"]})
    assert report.group_size == 4 and report.mean_length > 5  # the trainer's own, 8, was not asked for
    of = {row.name: row.noise_over_group_mean.value for row in report.at()}
    assert math.isfinite(of["value"]) and of["value"] != of["ogb_pooled"]
    pool, _, beside = calls_of_prompt_moments[0]
    assert all(x.returns.size(1) > 1 for x in (pool, *beside[4][0]))


@pytest.mark.slow
def test_iterable_dataset_with_defaults(train):
    sizes = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 64, "max_completion_length": 4}
    trainer = train(train=False, train_dataset=tiny.prompts().to_iterable_dataset(), **sizes)
    report = compare_baselines(trainer, num_prompts=np.int64(3))
    assert (report.group_size, report.group_sizes) == (4, [1, 2, 4, 8]) and report.completions_per_prompt == 64
    assert {row.name for row in report.comparisons} == {*BASELINES, WITH_PROGRESS} and report.prompts_per_batch == 1
    assert all(math.isfinite(row.noise_over_group_mean.value) for row in report.comparisons)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_prompts": 2}, "`num_prompts` is 2: measure at least 3"),
        ({"group_sizes": [8]}, "`completions_per_prompt` is 16 and the largest group has 8.*32 or more"),
        ({"baselines": "absent"}, "'absent': it must be one of"),
        ({"baselines": [len]}, "`baselines` holds <built-in function len>: give names"),
        ({"baselines": "otb", "group_sizes": 1}, r"`baselines` holds 'otb', .* and `group_sizes` is \[1\]: add 2"),
        ({"parameters": "absent"}, "`parameters` is 'absent', which none of .* trainable parameters holds"),
    ],
)
def test_wrong_arguments_are_named_first(train, change, message):
    trainer = train(train=False, reward_funcs=lambda **_: pytest.fail("sampled"))
    with pytest.raises(ValueError, match=message):
        compare_baselines(trainer, **SMALL | change)


def test_unmeasurable_trainers_are_errors(train, monkeypatch):
    with pytest.raises(TypeError, match="`trainer` is a GRPOTrainer: compare_baselines takes an OTBGRPOTrainer. Make"):
        compare_baselines(train(GRPOTrainer, config=GRPOConfig, train=False))
    trainer = train(train=False, reward_funcs=lambda completion_ids, **_: [0.25] * len(completion_ids))
    for change in ({}, {"baselines": "otb"}, {"baselines": "value"}):
        if change.get("baselines") == "value":  # which sees 64 completions before the 48 that are measured
            monkeypatch.setattr(comparison_module, "prompt_moments", lambda *args: pytest.fail("measured"))
        with pytest.raises(ValueError, match="No prompt's reward varied: it is 0.25 for every completion"):
            compare_baselines(trainer, **SMALL | change)
    trainer.train_dataset = trainer.train_dataset.select([])
    with pytest.raises(ValueError, match="The training data has no example"):
        compare_baselines(trainer, **SMALL)


def test_rare_rewards_are_measured(train):
    """Few completions of other prompts do not say that none varies."""
    calls = []

    def late(completion_ids, **_):
        calls.append(1)
        return [float(len(calls) > 9 and i % 3 == 0) for i in range(len(completion_ids))]

    trainer = train(train=False, reward_funcs=late, per_device_train_batch_size=4, num_generations=4)
    report = compare_baselines(trainer, **SMALL | {"completions_per_prompt": 64, "baselines": "rloo_pooled"})
    assert report.prompts_varying > 0


@pytest.mark.parametrize(("rows", "measured", "repeated"), [(2, 3, 2), (5, 5, 0)])
def test_few_examples_are_enough(train, rows, measured, repeated):
    """One or two are repeated, as where an environment makes the tasks; of more, each is measured once."""
    trainer = train(train=False, train_dataset=tiny.prompts(rows))
    report = compare_baselines(trainer, **SMALL | {"num_prompts": measured if repeated else 9})
    assert (report.num_prompts, report.repeated) == (measured, repeated)
    assert all(math.isfinite(row.noise_over_group_mean.value) for row in report.comparisons)
    assert (f"only {rows} different" in report.verdict) == (repeated > 0 and report.best is not None)


def per_turn(**batch):
    return [[share] for share in tiny.even_bytes(**batch)]


NAMES = ["otb_loo", "otb", "ogb_loo", "group_mean", "none"]
SHIFTED = [{"top_p": 0.9}, {"mask_truncated_completions": True}]


@pytest.mark.parametrize(
    ("options", "biased", "unknown"),
    [
        ({}, {"otb"}, set()),
        *[(options, {"otb", "group_mean"}, {"otb_loo", "ogb_loo", "none"}) for options in SHIFTED],
        ({"reward_funcs": per_turn}, {"otb"}, {"otb_loo"}),
        ({"reward_funcs": per_turn, "credit_whole_return": True}, {"otb"}, set()),
    ],
)
def test_which_baselines_are_said_to_be_biased(train, options, biased, unknown):
    """None is unbiased where scores are shifted; rewards of turns may be told with hindsight, but not their sum."""
    report = compare_baselines(train(train=False, **options), **SMALL | {"baselines": NAMES[:3]})
    of = {row.name: row.unbiased for row in report.comparisons}
    assert of == {name: None if name in unknown else name not in biased for name in NAMES}


class Counting:
    """A reward with a counter, which calls on unfinished text would change."""

    def __init__(self):
        self.__name__, self.calls = "counting", 0

    def __call__(self, completion_ids, **kwargs):
        self.calls += 1
        return tiny.even_bytes(completion_ids)


def test_value_is_also_measured_with_the_rewards_as_progress(train, monkeypatch):
    """If all baselines are, and the run has no progress functions; then the advice says what to set."""
    monkeypatch.setattr(moments_module, "BATCH_PARTITIONS", 1)
    monkeypatch.setattr(moments_module, "PARTITIONS", 1)
    small = {"num_prompts": 4, "completions_per_prompt": 16, "group_sizes": 4}
    trainer = train(baseline="value", per_device_train_batch_size=16, train=False)
    report = compare_baselines(trainer, **small)
    rows = {row.name: row for row in report.at()}
    assert rows[WITH_PROGRESS].noise_over_group_mean.value < rows["value"].noise_over_group_mean.value
    assert report.learned["value with progress/r2_at_end"] > report.learned["value/r2_at_end"]
    assert trainer._trl_otb.progress is None and not trainer.baseline.has_learned
    report.comparisons = [row for row in report.comparisons if row.name in (WITH_PROGRESS, "group_mean")]
    if report.best is not None:
        assert "Set baseline='value', progress_funcs='rewards': group_mean" in report.verdict
    assert WITH_PROGRESS not in {row.name for row in compare_baselines(trainer, progress=False, **small).at()}
    told = train(baseline="value", per_device_train_batch_size=16, train=False, progress_funcs="rewards")
    assert WITH_PROGRESS not in {row.name for row in compare_baselines(told, ["value"], **small).at()}
    assert [*told._trl_otb.progress.lengths] == []
    stateful = train(baseline="value", per_device_train_batch_size=16, train=False, reward_funcs=Counting())
    report = compare_baselines(stateful, **small)
    assert WITH_PROGRESS not in {row.name for row in report.at()}
    assert "changed what the reward function 'counting' keeps" in report.progress_error


def test_what_to_set_is_said_of_a_row():
    assert setting("ogb_pooled") == "baseline='ogb_pooled'"
    assert setting(WITH_PROGRESS) == "baseline='value', progress_funcs='rewards'"
