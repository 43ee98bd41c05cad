"""A user's subclass of GRPOTrainer becomes one of OTBGRPOTrainer by another base class."""

import functools
import types
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from tests.helpers import tiny
from tests.helpers.settings import SGD, SOURCES, assert_same_weights, in_turn, logged
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer, TokenRewards
from trl_otb.seam.forwards import extra_forward
from trl_otb.trainer import collect


class Shaped:
    """Rewards and the loss of the base class, changed."""

    takes_token_advantages = True

    def _calculate_rewards(self, *args, **kwargs):
        return 2 * super()._calculate_rewards(*args, **kwargs) + 1

    def compute_loss(self, *args, **kwargs):
        return 0.5 * super().compute_loss(*args, **kwargs)


class Named:
    """Rewards by the functions' names, and with the functions at hand."""

    def _calculate_rewards(self, *args, **kwargs):
        assert tiny.even_bytes in self.reward_funcs
        names = [function.__name__ for function in self.reward_funcs]
        return super()._calculate_rewards(*args, **kwargs) * torch.tensor([3.0 if "even" in n else 1.0 for n in names])


class Replaced:
    """Rewards that no reward function has seen."""

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        lengths = [[float(sum(ids) % 7)] for ids in completion_ids_list]
        return self.accelerator.gather(torch.tensor(lengths))


@pytest.mark.parametrize("order", ["a mixin", "a trainer behind ours", "a trainer before ours"])
@pytest.mark.parametrize(("change", "source"), in_turn([Shaped, Named, Replaced], SOURCES))
def test_group_mean_equals_subclassed_grpo_trainer(train, change, source, order):
    options = SOURCES[source]
    theirs = type("OfGRPO", (change, GRPOTrainer), {})
    grpo = train(theirs, GRPOConfig, scale_rewards="none", **options)
    bases = {"a mixin": (change, OTBGRPOTrainer), "a trainer behind ours": (OTBGRPOTrainer, theirs)}
    cls = type("OfOTB", bases.get(order, (theirs, OTBGRPOTrainer)), {})
    assert_same_weights(grpo, train(cls, OTBGRPOConfig, baseline="group_mean", **options))


def test_added_rewards_go_to_last_token(train):
    def brevity(completion_ids, **kwargs):
        return [TokenRewards([-0.1] * len(ids)) for ids in completion_ids]

    trainer = train(type("OfOTB", (Shaped, OTBGRPOTrainer), {}), reward_funcs=brevity, max_steps=1)
    rollout = trainer.rollouts["train"]
    lengths = rollout.mask.sum(dim=1)
    last = torch.nn.functional.one_hot(lengths - 1, rollout.mask.size(1))
    # -0.2 a token and 1 in all, of which -0.1 a token was earned where the function says
    expected = -0.1 * rollout.mask + last * (1 - 0.1 * lengths).unsqueeze(1)
    torch.testing.assert_close(rollout.rewards, expected)


def test_patched_method_stays(train):
    trainer = train(OTBGRPOTrainer, train=False, max_steps=1)
    given = trainer._calculate_rewards = lambda inputs, *args: torch.arange(float(len(inputs))).unsqueeze(1)
    trainer.train()
    assert trainer._calculate_rewards is given and trainer.state.log_history[0]["reward"] == 3.5


def test_two_trainers_in_one_process(train):
    """One is made and trained in a reward function of the other, as in a search in threads."""
    inner = []

    def nested(completion_ids, **kwargs):
        if not inner:
            inner.append(train(OTBGRPOTrainer, max_steps=1, reward_funcs=tiny.even_bytes))
        return tiny.even_bytes(completion_ids)

    method = GRPOTrainer._calculate_rewards
    trainer = train(OTBGRPOTrainer, reward_funcs=nested)
    assert GRPOTrainer._calculate_rewards is method and trainer.state.global_step == 2
    assert inner[0].state.global_step == 1 and inner[0].rollouts["train"].rewards.std() > 0


def any_arguments(method):
    def wrapped(self, *args, **kwargs):
        return method(self, *args, **kwargs)

    return wrapped


@pytest.mark.parametrize("name", ["_calculate_rewards", "_generate_single_turn"])
def test_a_wrapped_method_of_trl_is_called(train, monkeypatch, name):
    usual = train(OTBGRPOTrainer)
    monkeypatch.setattr(GRPOTrainer, name, any_arguments(getattr(GRPOTrainer, name)))
    assert_same_weights(usual, train(OTBGRPOTrainer))


class ByKeyword(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        of_trl = self._calculate_rewards
        names = ("inputs", "prompts", "completions", "completion_ids_list")
        self._calculate_rewards = lambda *args: of_trl(**dict(zip(names, args, strict=True)))
        try:
            return super()._generate_and_score_completions(inputs)
        finally:
            self._calculate_rewards = of_trl


def test_rewards_may_be_asked_for_by_keyword(train):
    assert_same_weights(train(OTBGRPOTrainer), train(type("OfOTB", (OTBGRPOTrainer, ByKeyword), {})))


class TakesBoth(GRPOTrainer):
    """A loss without ratios, of advantages of either shape."""

    takes_token_advantages = True

    def _compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        logps, *_ = self._get_per_token_logps_and_entropies(
            model, ids, mask, inputs["completion_ids"].size(1), compute_entropy=True
        )
        advantages = inputs["advantages"]
        self.seen = [*getattr(self, "seen", []), advantages]
        advantages = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)
        self._metrics["train"]["entropy"].append(0.0)
        return -(logps * advantages * inputs["completion_mask"]).sum() / inputs["completion_mask"].sum()


class Undeclared(TakesBoth):
    takes_token_advantages = False


class Adds(GRPOTrainer):
    """Only adds to the loss of its base."""

    def _compute_loss(self, model, inputs):
        return 0.5 * super()._compute_loss(model, inputs)


class Transforms(GRPOTrainer):
    """By a method that TRL may get, whose result a baseline would replace."""

    def _transform_advantages(self, advantages):
        return 2 * advantages


@dataclass
class OTBGMPOConfig(OTBGRPOConfig, GMPOConfig):
    pass


class OTBGMPO(OTBGRPOTrainer, GMPOTrainer):
    pass


class OTBTakesBoth(OTBGRPOTrainer, TakesBoth):
    pass


@pytest.mark.parametrize(("baseline", "source"), in_turn(["ogb", "group_mean", "rloo"], SOURCES))
def test_gmpo_has_completion_advantages(train, baseline, source):
    options = {"epsilon": 0.01, **SGD, **SOURCES[source]}
    trainer = train(OTBGMPO, OTBGMPOConfig, baseline=baseline, **options)
    assert trainer.energy_source == source or baseline != "ogb"
    assert trainer.rollouts["train"].advantages.abs().max() > 0.01
    if baseline == "group_mean":
        assert_same_weights(train(GMPOTrainer, GMPOConfig, scale_rewards="none", **options), trainer)


@pytest.mark.parametrize(
    ("cls", "baseline", "message"),
    [
        (GMPOTrainer, "otb", "`baseline` is 'otb'.* `GMPOTrainer._compute_loss` is not known to take"),
        (Undeclared, "value", "`baseline` is 'value'.* `TakesBoth._compute_loss` is not known to take"),
        (Adds, "otb", "`Adds._compute_loss` is not known to take"),
        (Transforms, "value", "`Transforms._transform_advantages` would .* `baseline='value'`"),
        (Transforms, "group_mean", "`Transforms._transform_advantages` would .* `baseline='group_mean'`"),
    ],
)
def test_what_cannot_take_token_advantages_is_refused(train, cls, baseline, message):
    """Shapes that do not fit would be multiplied without a word where completions and tokens are as many."""
    config = OTBGMPOConfig if cls is GMPOTrainer else OTBGRPOConfig
    with pytest.raises(TypeError, match=message):
        train(type("Own", (OTBGRPOTrainer, cls), {}), config, baseline=baseline, train=False)


@pytest.mark.parametrize(("source", "baseline"), in_turn(SOURCES, ["otb", "value", "ogb"]))
def test_loss_for_both_shapes_gets_rollouts(train, source, baseline):
    trainer = train(OTBTakesBoth, baseline=baseline, max_steps=1, **SOURCES[source])
    rollout, seen = trainer.rollouts["train"], torch.cat(trainer.seen)
    assert seen.dim() == (1 if baseline == "ogb" else 2)
    own = rollout.advantages.squeeze(1) if baseline == "ogb" else rollout.advantages
    assert own.abs().max() > 0.01
    torch.testing.assert_close(seen.abs().sum(), own.abs().sum())  # in another order


def of_completions(self, model, inputs, **kwargs):
    """A loss that broadcasts advantages per token without a word, where completions and tokens are as many."""
    mask = inputs["completion_mask"]
    return -(inputs["advantages"].unsqueeze(1) * mask).sum() / mask.sum()


@pytest.mark.parametrize("baseline", ["value", "rloo"])
@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("in a class", "compute_loss"),
        ("on the trainer", "_compute_loss"),
        ("in GRPOTrainer", "_compute_loss"),
        *(("around it", name) for name in ("compute_loss", "_compute_loss")),  # `wraps` lends it the source of TRL's
        ("in OTBGRPOTrainer", "compute_loss"),
    ],
)
def test_loss_of_completions_is_refused_wherever_it_is(train, monkeypatch, where, name, baseline):
    own = type("Own", (OTBGRPOTrainer,), {name: of_completions} if where == "in a class" else {})
    refused = pytest.raises((TypeError, ImportError), match=f"{name}` (is not known to take|does not weight)")
    with refused if baseline == "value" else nullcontext():
        trainer = train(own, baseline=baseline, train=False)
        if where == "on the trainer":
            monkeypatch.setattr(trainer, name, types.MethodType(of_completions, trainer))
        elif where != "in a class":
            owner = OTBGRPOTrainer if where == "in OTBGRPOTrainer" else GRPOTrainer
            wrap = functools.wraps(getattr(GRPOTrainer, name)) if where == "around it" else lambda function: function
            monkeypatch.setattr(owner, name, wrap(of_completions), raising=False)
        with nullcontext() if baseline == "value" else pytest.raises(RuntimeError, match="does not require grad"):
            trainer.train()


@pytest.mark.parametrize("change", ["unsqueeze", "squeeze"])
def test_reshaped_advantages_are_named(train, change):
    class Reshapes(OTBGRPOTrainer):
        def _prepare_inputs(self, inputs):
            inputs = super()._prepare_inputs(inputs)
            return inputs | {"advantages": inputs["advantages"].unsqueeze(-1)}

    baseline = {"unsqueeze": "value", "squeeze": "rloo"}[change]
    with pytest.raises(TypeError, match=r"has shape \(8, .*1\), .* method of Reshapes, reshaped it. The loss takes"):
        train(Reshapes, baseline=baseline)


def test_adding_loss_may_declare_itself(train):
    options = {**SGD, "max_grad_norm": 0.0}
    declared = type("Own", (OTBGRPOTrainer, Adds), {"takes_token_advantages": True})
    whole = train(OTBGRPOTrainer, **{**options, "learning_rate": 0.15})
    assert_same_weights(train(declared, **options), whole, atol=1e-6, rtol=1e-5)


def own_rollout(self, inputs):
    return GRPOTrainer._generate_and_score_completions(self, inputs)


@pytest.mark.parametrize("how", ["in a class", "set on the trainer"])
def test_bypassing_rollout_is_noticed_at_once(train, how):
    method = {"_generate_and_score_completions": own_rollout}
    trainer = train(type("Mine", (OTBGRPOTrainer,), method if how == "in a class" else {}), train=False)
    if how == "set on the trainer":
        trainer._generate_and_score_completions = own_rollout.__get__(trainer)
    with pytest.raises(TypeError, match="is bypassed.*look at .*_generate_and_score_completions"):
        trainer.train()


class Positional(GRPOTrainer):
    """Takes what TRL's caller gives, by other places."""

    def _get_per_token_logps_and_entropies(self, model, *, input_ids, attention_mask, logits_to_keep, **kwargs):
        return super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep, **kwargs)


def test_forward_is_called_by_argument_names(train):
    trainer = train(type("Own", (OTBGRPOTrainer, Positional), {}), train=False)
    trainer.model.train()
    rollout, _, batch = collect(trainer, [{"prompt": "1+1=", "answer": "2"}] * 4)
    assert extra_forward(trainer, batch, False).energy.shape == rollout.mask.shape


def each_but(batch, name):
    return {key: value for key, value in batch.items() if key != name}


def each_of(batch, change):
    return {key: change(value) if getattr(value, "dim", int)() else value for key, value in batch.items()}


@pytest.mark.parametrize(
    ("baseline", "message", "changed"),
    [
        ("otb", "How GRPOTrainer forms its advantages", lambda batch: batch | {"advantages": batch["advantages"] + 1}),
        ("group_mean", "Completion 0 of a rollout is not the one", lambda batch: each_of(batch, lambda x: x.flip(0))),
        ("otb", "8 completions were rewarded and 4 are to be", lambda batch: each_of(batch, lambda x: x[:4])),
        ("group_mean", "A generation batch has no 'completion_m", lambda batch: each_but(batch, "completion_mask")),
    ],
)
def test_rollouts_match_their_rewards(train, changed, message, baseline):
    class Changes(GRPOTrainer):
        """A rollout that is changed after it was rewarded, from the second one on."""

        rollouts_made = 0

        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            self.rollouts_made += 1
            return batch if self.rollouts_made == 1 else changed(batch)

    cls = type("Own", (OTBGRPOTrainer, Changes), {})
    train(cls, baseline=baseline, max_steps=1)
    with pytest.raises(TypeError, match=f"{message}.*In `Own`, look at Changes._generate_and_score_completions"):
        train(cls, baseline=baseline, max_steps=2)


def test_arguments_of_a_class_with_its_own_config(model_path, tmp_path):
    with pytest.raises(ValueError, match="`args` is missing, and GMPOTrainer may have its own config"):
        OTBGMPO(model_path, lambda **kwargs: [], train_dataset=None)
    args = OTBGMPOConfig(**tiny.SETTINGS, output_dir=str(tmp_path), baseline="ogb")
    trainer = OTBGMPO(model_path, tiny.even_bytes, args, tiny.prompts())  # GMPOTrainer takes the last by name only
    assert len(trainer.train_dataset) == 8


class OwnType(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        self.args.loss_type = self.loss_type = "grpo"
        return super()._compute_loss(model, inputs)


def test_a_loss_of_ones_own_has_a_type_of_its_own(train):
    cls = type("OfOTB", (OwnType, OTBGRPOTrainer), {})
    assert train(cls, baseline="rloo", loss_type="mine").state.global_step == 2
    with pytest.raises(TypeError, match="`OwnType._compute_loss` is not known to take advantages"):
        train(cls, baseline="value", loss_type="mine")
    with pytest.raises(ValueError, match="`loss_type` is 'mine'"):
        train(OTBGRPOTrainer, baseline="rloo", loss_type="mine")


class Half(OTBGRPOTrainer):
    takes_token_advantages = True

    def __init__(self, *args, **kwargs):
        self.calls = []
        super().__init__(*args, **kwargs)

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.calls.append(tuple(inputs["advantages"].shape))
        return 0.5 * super().compute_loss(model, inputs, *args, **kwargs)


class OfMean(OTBGRPOTrainer):
    """Declared to take advantages per token, of which it takes the mean."""

    takes_token_advantages = True

    def _compute_loss(self, model, inputs):
        advantages = inputs["advantages"]
        if advantages.dim() == 2:
            advantages = advantages.mean(dim=1, keepdim=True).expand_as(advantages)
        return super()._compute_loss(model, inputs | {"advantages": advantages})


class OfNone(OTBGRPOTrainer):
    takes_token_advantages = True

    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs | {"advantages": torch.ones_like(inputs["advantages"])})


class OfPositive(OTBGRPOTrainer):
    """Weights advantages below 0 by `leak`."""

    takes_token_advantages, leak = True, 0.0

    def _compute_loss(self, model, inputs):
        advantages = inputs["advantages"]
        return super()._compute_loss(
            model, inputs | {"advantages": advantages.where(advantages > 0, self.leak * advantages)}
        )


class OTBGMPODeclared(OTBGMPO):
    takes_token_advantages = True


class OwnForward(OTBGRPOTrainer):
    """A loss with log-probs of its own."""

    takes_token_advantages = True

    def _compute_loss(self, model, inputs):
        logps = own_logps(model, torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1), inputs)
        self._metrics["train"]["entropy"].append(0.0)
        return -(logps * inputs["advantages"] * inputs["completion_mask"]).mean()


def own_logps(model, ids, inputs):
    kept = inputs["completion_ids"].size(1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -kept - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[:, -kept:, None]).squeeze(-1)


@pytest.mark.parametrize(
    ("cls", "config", "name"),
    [
        (OTBGMPODeclared, OTBGMPOConfig, "GMPOTrainer._compute_loss"),
        (OfMean, OTBGRPOConfig, "OfMean._compute_loss"),
        (OfNone, OTBGRPOConfig, "OfNone._compute_loss"),
        (OfPositive, OTBGRPOConfig, "OfPositive._compute_loss"),
    ],
)
def test_a_declared_loss_is_tried_before_the_first_step(train, cls, config, name):
    before = train(cls, config, baseline="value", train=False)
    kept = {key: p.detach().clone() for key, p in before.model.named_parameters()}
    with pytest.raises(TypeError, match=f"`takes_token_advantages` is set, and `{name}` does not weight each token"):
        before.train()
    assert before.state.global_step == 0
    assert all(torch.equal(kept[key], p) for key, p in before.model.named_parameters())
    assert train(cls, config, baseline="rloo").state.global_step == 2  # one number per completion is not tried


def test_a_declared_loss_may_weight_negative_advantages_otherwise(train):
    class Leaky(OfPositive):
        leak = 0.5

    assert train(Leaky, baseline="value").state.global_step == 2


def test_a_trial_leaves_no_trace(train):
    """What the loss keeps, what is logged, and the weights."""
    options = {**SGD, "max_grad_norm": 0.0}
    trainer = train(Half, baseline="value", **options)
    assert trainer.calls == [(8, 8)] * 2 and len(logged(trainer, "entropy")) == 2
    plain = train(OTBGRPOTrainer, baseline="value", **{**options, "learning_rate": SGD["learning_rate"] / 2})
    assert_same_weights(trainer, plain, atol=1e-6, rtol=1e-5)
    assert logged(trainer, "loss")[0] == pytest.approx(logged(plain, "loss")[0] / 2, abs=1e-6)


def test_a_loss_with_log_probs_of_its_own_is_not_tried_and_that_is_said(train, caplog):
    assert train(OwnForward, baseline="value").state.global_step == 2
    assert "`OwnForward._compute_loss` does not take log-probs from `_get_per_token_logps" in caplog.text


class OwnLogps(GRPOTrainer):
    """Computes log-probs by itself."""

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
        logps = logits.log_softmax(-1).gather(-1, input_ids[:, -logits_to_keep:, None]).squeeze(-1)
        return logps, torch.zeros_like(logps), None


@pytest.mark.parametrize("order", ["before", "after"])
def test_own_log_probs_are_an_error_where_energies_are_needed_alone(train, order):
    own = type("Own", (OwnLogps, OTBGRPOTrainer) if order == "before" else (OTBGRPOTrainer, OwnLogps), {})
    for baseline in ("group_mean", "rloo_pooled"):
        assert train(own, baseline=baseline, num_iterations=2).state.global_step == 2
    with pytest.raises(TypeError, match="look at OwnLogps._get_per_token_logps_and_entropies"):
        train(own, baseline="value", num_iterations=2)


@pytest.mark.parametrize("baseline", ["value", "group_mean"])
def test_advantages_per_token_of_another_class_are_named(train, baseline):
    class PerToken(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            return batch | {"advantages": batch["advantages"].unsqueeze(1).expand_as(batch["completion_ids"])}

    with pytest.raises(TypeError, match=r"have the shape \(8,\).*look at PerToken._generate_and_score_completions"):
        train(type("Own", (OTBGRPOTrainer, PerToken), {}), baseline=baseline)


FREE = ("policy", "recorder", "needs", "collect", "prompts_per_batch", "recorded_rewards", "known_loss", "pages")


@pytest.mark.parametrize("baseline", ["value", "group_mean"])
def test_names_of_ones_own_are_free(train, baseline):
    class Own(OTBGRPOTrainer):
        def __init__(self, *args, **kwargs):
            vars(self).update(dict.fromkeys(FREE, 0))
            super().__init__(*args, **kwargs)
            vars(self).update(dict.fromkeys(FREE, 0))

    methods = {name: lambda self: pytest.fail("called") for name in (*FREE, "_log_step", "_learn", "_add")}
    plain = train(baseline=baseline)
    assert_same_weights(plain, train(Own, baseline=baseline))
    assert_same_weights(plain, train(type("Methods", (OTBGRPOTrainer,), methods), baseline=baseline))


@pytest.mark.parametrize("name", ["rollouts", "baseline", "energy_source"])
def test_public_names_are_checked(train, name):
    class Sets(OTBGRPOTrainer):
        def __init__(self, *args, **kwargs):
            setattr(self, name, [])
            super().__init__(*args, **kwargs)

    message = f"{name}`, which is an attribute of trl_otb's trainers: choose another name"
    with pytest.raises(TypeError, match=f"`Sets` sets `self.{message}"):
        train(Sets, train=False)
    behind = type("Behind", (GRPOTrainer,), {name: lambda self: None})
    for cls in (type("Own", (OTBGRPOTrainer,), {name: None}), type("Own", (OTBGRPOTrainer, behind), {})):
        with pytest.raises(TypeError, match=f"has a `{name}` of its own, which is an attribute of trl_otb's"):
            train(cls, train=False)


class Weighing(GRPOTrainer):
    """As a mixin that was written for one advantage per completion."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        weights = torch.linspace(0.5, 1.5, len(batch["completion_ids"]))
        weights = weights.unsqueeze(1) if self.right else weights
        return batch | {"advantages": batch["advantages"] * weights}


def one_length(length):
    def rollout(prompts, trainer):
        ids = [[65 + i + t for t in range(length)] for i in range(len(prompts))]
        asked = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        return {"prompt_ids": asked, "completion_ids": ids, "logprobs": None}

    return rollout


@pytest.mark.parametrize("length", [5, 8])  # of 8 completions: PyTorch multiplies (8, 8) by (8,), too
def test_weights_of_completions_times_advantages_of_tokens_are_named(train, length):
    """And train where they are `(B, 1)`, or advantages `(B,)`."""
    kinds = [type("Own", (Weighing, OTBGRPOTrainer), {"right": right}) for right in (False, True)]
    options = {
        "rollout_func": one_length(length),
        "reward_funcs": lambda completion_ids, **kw: [ids[0] % 3 for ids in completion_ids],
    }
    with pytest.raises(TypeError, match=r"by weights of shape \(B,\): it needs.*look at Weighing._generate_and_score"):
        train(kinds[0], baseline="otb", **options)
    assert train(kinds[1], baseline="otb", **options).state.global_step == 2
    assert train(kinds[0], baseline="rloo", **options).state.global_step == 2
