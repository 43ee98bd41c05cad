"""A user's subclass of GRPOTrainer becomes one of OTBGRPOTrainer by another base class."""

from dataclasses import dataclass

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from tests.helpers import tiny
from tests.helpers.settings import SGD, SOURCES, assert_same_weights, in_turn, logged
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer, TokenRewards


class Shaped:
    """Rewards and the loss of the base class, changed."""

    def _calculate_rewards(self, *args, **kwargs):
        return 2 * super()._calculate_rewards(*args, **kwargs) + 1

    def compute_loss(self, *args, **kwargs):
        return 0.5 * super().compute_loss(*args, **kwargs)


class Named:
    """Rewards by the names of the functions."""

    def _calculate_rewards(self, *args, **kwargs):
        names = [function.__name__ for function in self.reward_funcs]
        return super()._calculate_rewards(*args, **kwargs) * torch.tensor([3.0 if "even" in n else 1.0 for n in names])


class Replaced:
    """Rewards that no reward function has seen."""

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        lengths = [[float(sum(ids) % 7)] for ids in completion_ids_list]
        return self.accelerator.gather(torch.tensor(lengths))


@pytest.mark.parametrize("order", ["a mixin", "a trainer behind ours", "a trainer before ours"])
@pytest.mark.parametrize(("change", "source"), in_turn([Shaped, Named, Replaced], SOURCES))
def test_group_mean_gives_the_weights_of_the_same_subclass_of_grpo_trainer(train, change, source, order):
    options = SOURCES[source]
    theirs = type("OfGRPO", (change, GRPOTrainer), {})
    grpo = train(theirs, GRPOConfig, scale_rewards="none", **options)
    bases = {"a mixin": (change, OTBGRPOTrainer), "a trainer behind ours": (OTBGRPOTrainer, theirs)}
    cls = type("OfOTB", bases.get(order, (theirs, OTBGRPOTrainer)), {})
    assert_same_weights(grpo, train(cls, OTBGRPOConfig, baseline="group_mean", **options))


@pytest.mark.parametrize("source", SOURCES)
def test_advantages_are_formed_from_the_rewards_that_a_subclass_returns(train, source):
    plain = train(OTBGRPOTrainer, max_steps=1, **SOURCES[source])
    shaped = train(type("OfOTB", (Shaped, OTBGRPOTrainer), {}), max_steps=1, **SOURCES[source])
    assert shaped.energy_source == source
    plain, shaped = plain.rollouts["train"], shaped.rollouts["train"]
    torch.testing.assert_close(shaped.rewards, 2 * plain.rewards + 1)
    torch.testing.assert_close(shaped.advantages, 2 * plain.advantages, atol=1e-6, rtol=0)
    assert plain.advantages.abs().max() > 0.01


def test_what_a_subclass_adds_to_rewards_of_tokens_is_earned_at_the_last_one(train):
    def brevity(completion_ids, **kwargs):
        return [TokenRewards([-0.1] * len(ids)) for ids in completion_ids]

    trainer = train(type("OfOTB", (Shaped, OTBGRPOTrainer), {}), reward_funcs=brevity, max_steps=1)
    rollout = trainer.rollouts["train"]
    lengths = rollout.mask.sum(dim=1)
    last = torch.nn.functional.one_hot(lengths - 1, rollout.mask.size(1))
    # -0.2 a token and 1 in all, of which -0.1 a token was earned where the function says
    expected = -0.1 * rollout.mask + last * (1 - 0.1 * lengths).unsqueeze(1)
    torch.testing.assert_close(rollout.rewards, expected)


@pytest.mark.parametrize("cls", [GRPOTrainer, OTBGRPOTrainer])
def test_a_method_that_one_trainer_was_given_stays(train, cls):
    trainer = train(cls, GRPOConfig if cls is GRPOTrainer else OTBGRPOConfig, train=False, max_steps=1)
    given = trainer._calculate_rewards = lambda inputs, *args: torch.arange(float(len(inputs))).unsqueeze(1)
    trainer.train()
    assert trainer._calculate_rewards is given
    assert trainer.state.log_history[0]["reward"] == 3.5


# Losses, rollouts and orders of a user's own


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


@dataclass
class OTBGMPOConfig(OTBGRPOConfig, GMPOConfig):
    pass


class OTBGMPO(OTBGRPOTrainer, GMPOTrainer):
    pass


class OTBTakesBoth(OTBGRPOTrainer, TakesBoth):
    pass


@pytest.mark.parametrize(("baseline", "source"), in_turn(["ogb", "group_mean", "rloo"], SOURCES))
def test_gmpo_has_the_advantages_of_a_baseline_per_completion(train, baseline, source):
    options = {"epsilon": 0.01, **SGD, **SOURCES[source]}
    trainer = train(OTBGMPO, OTBGMPOConfig, baseline=baseline, **options)
    assert trainer.rollouts["train"].unmeasured == 0 and trainer.rollouts["train"].advantages.abs().max() > 0.01
    if baseline == "group_mean":
        assert_same_weights(train(GMPOTrainer, GMPOConfig, scale_rewards="none", **options), trainer)
    else:
        assert train(OTBGMPO, OTBGMPOConfig, baseline="group_mean", **options).args.epsilon == 0.01


# Also where completions and tokens are as many, so that shapes that do not fit would be multiplied without a word
@pytest.mark.parametrize("baseline", ["otb", "value"])
@pytest.mark.parametrize("cls", [OTBGMPO, type("Own", (OTBGRPOTrainer, Undeclared), {})])
def test_a_loss_that_does_not_say_that_it_takes_advantages_per_token_is_named(train, cls, baseline):
    name = "GMPOTrainer" if cls is OTBGMPO else "TakesBoth"
    with pytest.raises(TypeError, match=f"`baseline` is '{baseline}'.* `{name}._compute_loss` is not known to take"):
        train(cls, OTBGMPOConfig, baseline=baseline, train=False)


@pytest.mark.parametrize(("source", "baseline"), in_turn(SOURCES, ["otb", "value", "ogb"]))
def test_a_loss_that_takes_both_shapes_gets_the_rollouts_advantages(train, source, baseline):
    trainer = train(OTBTakesBoth, baseline=baseline, max_steps=1, **SOURCES[source])
    rollout, seen = trainer.rollouts["train"], torch.cat(trainer.seen)
    assert rollout.unmeasured == 0 and seen.dim() == (1 if baseline == "ogb" else 2)
    own = rollout.advantages.squeeze(1) if baseline == "ogb" else rollout.advantages
    assert own.abs().max() > 0.01
    torch.testing.assert_close(seen.abs().sum(), own.abs().sum())  # in another order


def test_a_loss_that_only_adds_needs_no_declaration(train):
    options = {**SGD, "max_grad_norm": 0.0}
    halved = train(type("Own", (OTBGRPOTrainer, Adds), {}), **options)
    whole = train(OTBGRPOTrainer, **{**options, "learning_rate": 0.15})
    assert_same_weights(halved, whole, atol=1e-6, rtol=1e-5)


def loss_without_ours(self, model, inputs):
    return inputs["advantages"].sum()


def prepare_without_ours(self, generation_batch):
    return generation_batch


OWN_LOSS = type("OwnLoss", (GRPOTrainer,), {"_compute_loss": loss_without_ours})
MIXIN = type("Mixin", (), {"_prepare_inputs": prepare_without_ours})


@pytest.mark.parametrize(
    ("bases", "own", "message"),
    [
        (
            (GMPOTrainer, OTBGRPOTrainer),
            {},
            r"GMPOTrainer._compute_loss` comes before.*class New\(OTBGRPOTrainer, GMPOTr",
        ),
        ((OWN_LOSS, OTBGRPOTrainer), {}, "`OwnLoss._compute_loss` comes before OTBGRPOTrainer's"),
        ((MIXIN, OTBGRPOTrainer), {}, "`Mixin._prepare_inputs` comes before"),
        ((OTBGRPOTrainer, MIXIN), {}, r"`Mixin._prepare_inputs` comes after GRPOTrainer's.*New\(Mixin, OTB"),
        (
            (OTBGRPOTrainer,),
            {"_compute_loss": loss_without_ours},
            r"`New._compute_loss` comes before.*Call `super\(\)._compute_loss`, or put the method into a subclass of",
        ),
        ((OTBTakesBoth,), {"training_step": lambda self, *args: None}, "`New.training_step` comes before"),
    ],
)
def test_an_order_in_which_no_baseline_would_reach_the_loss_is_no_class(bases, own, message):
    with pytest.raises(TypeError, match=message):
        type("New", bases, own)


def decorated(method):
    def around(self, *args):
        return method(self, *args)

    return around


class ByHelper(OTBGRPOTrainer):
    def _compute_loss(self, model, inputs):
        return self.helper(model, inputs)

    def helper(self, model, inputs):
        return super()._compute_loss(model, inputs)


class ByText(OTBGRPOTrainer):
    def _compute_loss(self, model, inputs):
        return getattr(super(), "_compute_loss")(model, inputs)  # noqa: B009


class Decorated(OTBGRPOTrainer):
    @decorated
    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs)


@pytest.mark.parametrize("cls", [ByHelper, ByText, Decorated])
def test_a_base_may_be_called_in_any_way(train, cls):
    assert_same_weights(train(cls, max_steps=1), train(OTBGRPOTrainer, max_steps=1))


def test_a_loss_that_only_seems_to_call_its_base_is_named_in_its_first_step(train):
    class Seems(OTBGRPOTrainer):
        def _compute_loss(self, model, inputs):
            if not self.model.training:
                return super()._compute_loss(model, inputs)
            return sum(p.sum() for p in model.parameters())

    with pytest.raises(TypeError, match="OTBGRPOTrainer's loss is passed by.*look at Seems._compute_loss"):
        train(Seems)


def test_a_base_may_be_called_by_its_name(train):
    def by_name(self, model, inputs):
        return OTBGRPOTrainer._compute_loss(self, model, inputs)

    assert_same_weights(train(type("New", (OTBGRPOTrainer,), {"_compute_loss": by_name})), train(OTBGRPOTrainer))


def test_a_loss_set_on_the_trainer_is_noticed_in_its_first_step(train):
    trainer = train(OTBGRPOTrainer, baseline="group_mean", train=False)
    trainer._compute_loss = lambda model, inputs: sum(p.sum() for p in model.parameters())
    with pytest.raises(TypeError, match="OTBGRPOTrainer's loss is passed by.*look at _compute_loss, set on the"):
        trainer.train()


class ReadsFirst:
    """Scales the loss by the advantages, which it reads before the loss of its base has run."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        size = mean_size(inputs)
        return size * super().compute_loss(model, inputs, *args, **kwargs)


class ReadsLast:
    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, inputs, *args, **kwargs) * mean_size(inputs)


def mean_size(inputs):
    return inputs["advantages"].abs().mean()


EARLY = r"`ReadsFirst.compute_loss` reads the advantages before .* once `super\(\)`'s loss has run"


@pytest.mark.parametrize("baseline", ["otb", "value"])
def test_a_mixin_that_reads_advantages_too_early_is_told_when_they_are_there(train, baseline):
    trainer = train(type("Own", (ReadsFirst, OTBGRPOTrainer), {}), baseline=baseline, train=False)
    with pytest.raises(TypeError, match=EARLY):
        trainer.train()
    with pytest.raises(TypeError, match=EARLY):
        trainer.evaluate(tiny.prompts())


@pytest.mark.parametrize(
    "options", [{"keep_groups_together": False}, {"baseline": "group_mean"}, {"num_iterations": 2}]
)
def test_advantages_that_are_formed_with_the_rollout_may_be_read_at_any_time(train, options):
    first, last = (train(type("Own", (cls, OTBGRPOTrainer), {}), **options) for cls in (ReadsFirst, ReadsLast))
    assert_same_weights(first, last)


def test_a_key_of_the_users_own_that_is_missing_is_their_error(train):
    class Own(OTBGRPOTrainer):
        def compute_loss(self, model, inputs, **kwargs):
            return inputs["weight_of_mine"]

    with pytest.raises(KeyError, match="^'weight_of_mine'$"):
        train(Own)


@pytest.mark.parametrize("source", SOURCES)
def test_advantages_are_in_the_micro_batch_after_the_loss_under_ratios_of_sequences_too(train, source):
    options = {"importance_sampling_level": "sequence", "loss_type": "grpo", "max_steps": 1, **SOURCES[source]}
    trainer = train(type("Own", (ReadsLast, OTBGRPOTrainer), {}), **options)
    assert trainer.rollouts["train"].unmeasured == 0


class Counts(GRPOTrainer):
    def _prepare_inputs(self, generation_batch):
        self.prepared = getattr(self, "prepared", 0) + 1
        return super()._prepare_inputs(generation_batch)


class Positional(GRPOTrainer):
    """Takes what TRL's caller gives, by other places."""

    def _get_per_token_logps_and_entropies(self, model, *, input_ids, attention_mask, logits_to_keep, **kwargs):
        return super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep, **kwargs)


def test_a_siblings_preparation_of_inputs_is_not_skipped(train):
    trainer = train(type("Own", (OTBGRPOTrainer, Counts), {}), max_steps=3)
    assert trainer.prepared == 3


def test_a_forward_is_asked_for_by_the_names_of_its_arguments(train):
    trainer = train(type("Own", (OTBGRPOTrainer, Positional), {}), train=False)
    trainer.model.train()
    rollout, batch = trainer.collect([{"prompt": "1+1=", "answer": "2"}] * 4)
    assert trainer.extra_forward(batch).energy().shape == rollout.mask.shape


class Changes(GRPOTrainer):
    """A rollout that is changed after it was rewarded, from the second one on."""

    rollouts_made = 0

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        self.rollouts_made += 1
        return batch if self.rollouts_made == 1 else self.changed(batch)


class OtherAdvantages(Changes):
    def changed(self, batch):
        return batch | {"advantages": batch["advantages"] + 1}


class OtherOrder(Changes):
    def changed(self, batch):
        return {key: value.flip(0) if getattr(value, "dim", int)() else value for key, value in batch.items()}


class FewerRows(Changes):
    def changed(self, batch):
        return {key: value[:4] if getattr(value, "dim", int)() else value for key, value in batch.items()}


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (OtherAdvantages, "How GRPOTrainer forms its advantages"),
        (OtherOrder, "Completion 0 of a rollout is not the one that was rewarded"),
        (FewerRows, "8 completions were rewarded and 4 are to be trained on"),
    ],
)
@pytest.mark.parametrize("baseline", ["otb", "group_mean"])
def test_every_rollout_is_matched_with_what_was_rewarded(train, theirs, message, baseline):
    cls = type("Own", (OTBGRPOTrainer, theirs), {})
    train(cls, baseline=baseline, max_steps=1)
    with pytest.raises(TypeError, match=f"{message}.*In `Own`, look at Changes._generate_and_score_completions"):
        train(cls, baseline=baseline, max_steps=2)


class OtherRows(OTBGRPOTrainer):
    """The rows of a micro-batch in another order than their numbers."""

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        return inputs | {key: inputs[key].flip(0) for key in ("completion_ids", "completion_mask")}


class Shorter(OTBGRPOTrainer):
    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        return inputs | {key: inputs[key][:, :4] for key in ("completion_ids", "completion_mask")}


@pytest.mark.parametrize("baseline", ["otb", "value", "group_mean"])
@pytest.mark.parametrize("cls", [OtherRows, Shorter])
def test_a_micro_batch_holds_the_completions_that_its_rows_stand_for(train, cls, baseline):
    with pytest.raises(TypeError, match=f"A micro-batch holds other completions.*look at {cls.__name__}._prepare_inp"):
        train(cls, baseline=baseline)


class Replays(OTBGRPOTrainer):
    """Trains on the first rollout in the place of the second."""

    first = None

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        self.first = self.first or batch
        return dict(self.first)


@pytest.mark.parametrize("source", SOURCES)
def test_a_replay_of_old_rows_keeps_their_advantages_or_says_why_not(train, source):
    seen = []

    class Seen(Replays):
        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            seen.append(inputs["advantages"])
            return loss

    options = {**SOURCES[source], "learning_rate": 0.0, "max_steps": 2 * (2 if "Trainer" in source else 1)}
    if source == "the training forward":
        with pytest.raises(TypeError, match=r"rows of 8 completions of earlier roll.*`keep_groups_together=False`"):
            train(Seen, **options)
        seen.clear()
        options["keep_groups_together"] = False
    train(Seen, **options)
    half = len(seen) // 2
    first, second = (torch.cat(part).abs().sum(1).sort().values for part in (seen[:half], seen[half:]))
    torch.testing.assert_close(first, second)


class Drops(OTBGRPOTrainer):
    """Trains on half of the rows twice."""

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        return {key: torch.cat([v[:4], v[:4]]) if getattr(v, "dim", int)() else v for key, v in inputs.items()}


def test_rows_are_measured_once_and_those_that_never_come_are_named(train):
    trainer = train(Drops, max_steps=1)
    rollout = trainer.rollouts["train"]
    assert rollout.unmeasured == 4 and rollout.statistics[rollout.measured].isfinite().all()
    with pytest.raises(TypeError, match="4 of 8 rows of the last rollout.*In `Drops`, look at Drops._prepare_inputs"):
        train(Drops, max_steps=2)


def test_two_losses_of_one_micro_batch_measure_it_once(train):
    class Twice(OTBGRPOTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs) + super().compute_loss(*args, **kwargs)

    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "learning_rate": 0.0}
    for baseline in ("otb", "value"):
        once, twice = (train(cls, baseline=baseline, **options) for cls in (OTBGRPOTrainer, Twice))
        for key in ("otb/grad_power", "otb/energy/token_mean"):
            assert logged(twice, key) == pytest.approx(logged(once, key))


def test_a_class_with_a_config_of_its_own_asks_for_one(model_path):
    with pytest.raises(ValueError, match="`args` is missing, and GMPOTrainer may have its own config"):
        OTBGMPO(model_path, lambda **kwargs: [], train_dataset=None)


def test_arguments_by_place_arrive_by_name(train, model_path, tmp_path):
    args = OTBGMPOConfig(**tiny.SETTINGS, output_dir=str(tmp_path), baseline="ogb")
    trainer = OTBGMPO(model_path, tiny.even_bytes, args, tiny.prompts())  # GMPOTrainer takes the last by name only
    assert len(trainer.train_dataset) == 8
