"""`value` in the trainer: never an extra forward, the same advantages in every layout, and a memory that is kept."""

import importlib
import math
import pickle
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from tests.helpers import tiny
from tests.helpers.oracles import energies_by_softmax
from tests.helpers.settings import LORA, SETTINGS, logged, predicted, scripted_rollout
from trl_otb import register_baseline
from trl_otb.baselines import squeeze
from trl_otb.baselines.completions import NEEDS
from trl_otb.rollout import prompt_keys


VALUE = {"baseline": "value", "rollout_func": scripted_rollout}
LAYOUTS = {
    "groups in a micro-batch": {},
    "split groups": SETTINGS["split groups"],
    "a row in a micro-batch": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    "TRL's own forward": {"num_iterations": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "several buffers": {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 4},
    "lora": {"peft_config": LORA},
}


def even_at_the_end(completion_ids, **kwargs):
    """Which the prefix tells in part: whether most of the later half's ids are even."""
    return [float(sum(i % 2 == 0 for i in ids) > len(ids) / 2) for ids in completion_ids]


def state_of(trainer):
    return trainer.baseline.state_dict()["state"]


@pytest.fixture
def train_value(train):
    def run(**options):
        return train(**{**VALUE, "max_steps": 6, "reward_funcs": even_at_the_end, **options})

    return run


@pytest.fixture
def memory(train_value):
    trainer = train_value(learning_rate=0.0, per_device_train_batch_size=32, rollout_func=None)
    assert state_of(trainer)["weight"] > 0
    return state_of(trainer)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_advantages(train_value, memory, layout):
    def one_step(**options):
        trainer = train_value(train=False, **{"max_steps": 1, "learning_rate": 0.0, **options})
        trainer.baseline.entry.estimator.load_state_dict(memory)
        trainer.train()
        return trainer

    expected, found = one_step(), one_step(**LAYOUTS[layout])
    rollout, other = expected.rollouts["train"], found.rollouts["train"]
    assert torch.equal(rollout.completion_ids, other.completion_ids)
    assert predicted(rollout).abs().max() > 0.01
    torch.testing.assert_close(other.advantages, rollout.advantages, atol=1e-5, rtol=0)
    for name in ("_value_sums", "_sums"):
        sums, others = state_of(expected)[name], state_of(found)[name]
        assert not torch.equal(sums, memory[name])
        assert (sums - others).abs().max() <= 1e-4 * sums.abs().max(), name


def test_mixed_precision_ends_at_the_forward(train_value):
    """States are projected, and baselines formed, in float32."""
    trainer = train_value(train=False, max_steps=2, bf16=True)
    seen = []
    estimator = trainer.baseline.entry.estimator
    update = estimator.update
    estimator.update = lambda own, *args: (seen.append(own.states), update(own, *args))[1]
    trainer.train()
    rollout = trainer.rollouts["train"]
    assert {x.dtype for x in (*seen, rollout.baselines, rollout.advantages)} == {torch.float32}
    assert (seen[0] - seen[0].bfloat16().float()).abs().max() > 0


def test_states_come_from_two_thirds_depth(train_value, model_path):
    trainer = train_value(train=False, max_steps=1, learning_rate=0.0)
    seen = []
    trainer.baseline.entry.estimator.update = lambda local, b0, gather: seen.append(local)
    trainer.train()
    rollout, (own,), kept = trainer.rollouts["train"], seen, []
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    # The layer's own output: `hidden_states` of the last one has gone through the norm
    model.model.layers[1].register_forward_hook(lambda module, args, output: kept.append(output))
    energies_by_softmax(model, vars(rollout))
    full = (kept[0][0] if isinstance(kept[0], tuple) else kept[0])[:, rollout.prompt_ids.size(1) - 1 : -1]
    size = full.size(-1)
    projection = torch.randn(size, 32, generator=torch.Generator().manual_seed(0)) / math.sqrt(size)
    torch.testing.assert_close(own.states[own.mask.bool()], (full @ projection)[rollout.mask.bool()], atol=1e-4, rtol=0)


def test_checkpoint_without_state_warns(train_value, train, tmp_path, caplog):
    run = {"output_dir": str(tmp_path / "run"), "max_steps": 2}
    train_value(save_strategy="steps", save_steps=1, **run)
    (tmp_path / "run" / "checkpoint-1" / "baseline.pt").unlink()
    train_value(train=False, **run).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert "The checkpoint holds nothing for `baseline='value'`" in caplog.text
    # Also where the trainer has learned before
    trainer = train_value(**run, learning_rate=0.0)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert state_of(trainer)["_prompts"] == 2  # of one batch
    # Nothing is asked of a baseline that does not remember, and nothing is written for it
    train(save_strategy="steps", save_steps=1, max_steps=1, output_dir=str(tmp_path / "otb"))
    assert not (tmp_path / "otb" / "checkpoint-1" / "baseline.pt").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"baseline.pt is damaged, or no file of trl_otb's trainers \(EOFError\). Remove it"),
        (pickle.dumps({"baseline": "value"}), "baseline.pt is damaged, or no file of trl_otb's trainers"),
        ([1, 2], "baseline.pt is damaged, or no file of trl_otb's trainers"),
        ({"baseline": "value", "state": {"theta": None}}, "'value' is damaged, or of a release before .*'theta'"),
    ],
    ids=["empty", "pickle", "foreign", "other state"],
)
def test_a_damaged_memory_is_named(train_value, tmp_path, content, message):
    run = {"output_dir": str(tmp_path), "max_steps": 2}
    train_value(save_strategy="steps", save_steps=1, **run)
    file = tmp_path / "checkpoint-1" / "baseline.pt"
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    with pytest.raises(ValueError, match=message) as caught:
        train_value(train=False, **run).train(resume_from_checkpoint=str(file.parent))
    assert "weights_only" not in str(caught.value)


def test_evaluation_does_not_change_value(train_value, memory):
    trainer = train_value(train=False, rollout_func=None, eval_dataset=tiny.prompts(), num_generations_eval=2)
    trainer.baseline.entry.estimator.load_state_dict(memory)
    before = state_of(trainer)["_sums"].clone()
    trainer.evaluate()
    rollout = trainer.rollouts["eval"]
    assert predicted(rollout).abs().max() > 0.01
    assert torch.equal(before, state_of(trainer)["_sums"])
    assert not [key for entry in trainer.state.log_history for key in entry if "value/" in key]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_iterations": 2}])
def test_a_compiled_model(train_value, memory, tmp_path, options):
    torch.compiler.reset()
    model = tiny.save_model(tmp_path / "model", model_config=tiny.config(num_hidden_layers=1))  # each layer is traced

    def one_step(**more):
        trainer = train_value(train=False, model=model, max_steps=1, learning_rate=0.0, **options, **more)
        trainer.baseline.entry.estimator.load_state_dict(memory)
        trainer.train()
        return trainer.rollouts["train"]

    expected, found = one_step(), one_step(torch_compile=True, torch_compile_backend="eager")
    torch.testing.assert_close(found.advantages, expected.advantages, atol=1e-5, rtol=0)
    torch.compiler.reset()


@pytest.fixture
def prompt_tracker(registry, monkeypatch):
    """The recipe's class, registered as by a first import, and gone after the test."""
    monkeypatch.delitem(sys.modules, "recipes.prompt_tracker", raising=False)
    return importlib.import_module("recipes.prompt_tracker").PromptTracker


class Counting:
    """Per completion: nothing, and notes what it is told."""

    def __init__(self):
        self.calls, self.updates = 0, []

    def __call__(self, x):
        self.calls += 1
        return 0.0

    def update(self, local, b0, gather):
        self.updates.append(tuple(local.mask.shape))
        return {"updates": float(len(self.updates))}

    def state_dict(self):
        return {"updates": self.updates}

    def load_state_dict(self, state):
        self.updates = [tuple(shape) for shape in state["updates"]]


@pytest.mark.parametrize(
    ("flags", "options"),
    [({"per_token": False, "needs": ()}, {}), ({}, LAYOUTS["split groups"]), ({}, {"num_iterations": 2})],
)
@pytest.mark.usefixtures("registry")
def test_own_class_gets_batches_once(train, flags, options):
    register_baseline("counting", **flags)(Counting)
    trainer = train(baseline="counting", max_steps=4, save_strategy="steps", save_steps=2, **options)
    mine = trainer.baseline.entry.estimator
    rollouts = 4 // trainer.num_iterations
    assert mine.calls == len(mine.updates) == rollouts
    rows, length = trainer.rollouts["train"].mask.shape
    assert mine.updates[-1] == (rows, length if flags.get("per_token", True) else 1)
    assert logged(trainer, "otb/counting/updates")[-1] == rollouts
    again = train(baseline="counting", max_steps=4, train=False, **options)
    assert again.baseline.entry.estimator is not mine  # one for each trainer
    again.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-2")
    assert again.baseline.entry.estimator.updates == mine.updates


@pytest.mark.usefixtures("registry")
def test_what_a_baseline_may_read(train):
    seen = []

    @register_baseline("reading", needs=NEEDS)
    def reading(x):
        seen.append(x)
        return x.mean(x.mask)

    trainer = train(baseline="reading", max_steps=1, rollout_func=scripted_rollout, num_iterations=2)
    rollout, x = trainer.rollouts["train"], seen[0]
    present, mask = x.mask.bool(), rollout.mask.bool()
    assert torch.equal(x.logps[present], rollout.logps[mask])
    assert torch.equal(x.energy[present], rollout.energy[mask])
    assert x.states.shape == (*present.shape, 32) and x.states[present].abs().sum(-1).min() > 0
    keys, known = x.prompt_key.flatten().tolist(), prompt_keys(list(tiny.prompts())).flatten().tolist()
    assert len(set(keys)) == 2 and len(set(known)) == len(known) and set(keys) <= set(known)


@pytest.mark.usefixtures("registry")
def test_a_state_that_cannot_be_saved_is_named_at_once(train):
    register_baseline("mine")(type("Mine", (Counting,), {"state_dict": lambda self: {"sums": np.ones(3)}}))
    with pytest.raises(ValueError, match="'mine' returned a dict from `state_dict`"):
        train(baseline="mine", max_steps=1)


class NoDecoder(Qwen3ForCausalLM):
    get_decoder = lambda self: None  # noqa: E731


class OtherDecoder(Qwen3ForCausalLM):
    get_decoder = lambda self: torch.nn.Identity()  # noqa: E731


class Loops(Qwen3ForCausalLM):
    """Runs its body twice."""

    def __init__(self, config):
        super().__init__(config)
        self.model.register_forward_pre_hook(self.first, with_kwargs=True)

    def first(self, model, args, kwargs):
        model.forward(*args, **kwargs | {"use_cache": False})


class Stacked(Qwen3ForCausalLM):
    """Its layers hand on four streams at once, as Gemma3n's do."""

    def __init__(self, config):
        super().__init__(tiny.config(num_hidden_layers=3))
        *first, last = self.model.layers
        for layer in first:
            layer.register_forward_hook(lambda module, args, output: torch.stack([output] * 4))
        for layer in (*first[1:], last):
            layer.register_forward_pre_hook(lambda module, args: (args[0][0], *args[1:]))


@pytest.mark.parametrize(
    ("model_class", "heard"),
    [
        (Stacked, r"Qwen3DecoderLayer of Qwen3Model .* of shape \(4, 8, \d+\)"),
        (OtherDecoder, "Identity of Identity .* saw 0 calls in 1 forwards"),
        (Loops, "Qwen3Model .* saw 2 calls in 1 forwards"),
        (NoDecoder, None),  # its body is heard instead
    ],
)
def test_unsupported_model_is_named(train_value, model_class, heard):
    message = f"{heard}.*Choose a baseline that needs no states, such as 'rloo_pooled'"
    with pytest.raises(ValueError, match=message) if heard else nullcontext():
        train_value(model=model_class(tiny.config()), processing_class=tiny.tokenizer(), max_steps=1)


def test_prompt_tracking_recipe_works(prompt_tracker):
    tracker, keys = prompt_tracker(), torch.tensor([[7], [7], [9], [9]])

    def group(*returns, lengths=(1, 1, 1, 1)):
        return squeeze(torch.tensor(returns), torch.tensor(lengths).unsqueeze(1), 2, prompt_key=keys)

    def learn(x):
        tracker.update(x, None, lambda values: values)

    first = group(1.0, 0.0, 1.0, 1.0)
    assert tracker(first).flatten().tolist() == [0.0, 0.5, 0.5, 0.5]  # the other's, and 0 as long as nothing is known
    learn(first)
    expected = [(0.0 + 1.0 + 0.75) / 4, (0.0 + 1.0 + 0.75) / 4, (0.0 + 2.0 + 0.75) / 4, (0.0 + 2.0 + 0.75) / 4]
    assert tracker(group(0.0, 0.0, 0.0, 0.0)).flatten().tolist() == pytest.approx(expected)
    learn(group(0.0, 0.0, math.nan, 1.0))
    assert tracker.seen == {7: (0.5, 3.0), 9: (2.0, 2.0)}
    # A truncated completion, which is masked, is no evidence: for its group, and for later
    masked = group(1.0, 1.0, 1.0, 0.0, lengths=(1, 1, 1, 0))
    assert tracker(masked)[2, 0].item() == pytest.approx((2.0 + tracker.all[0] / tracker.all[1]) / (2.0 + 1))
    learn(masked)
    assert tracker.seen[9] == (2.0, 2.0)
    again = prompt_tracker()
    again.load_state_dict(tracker.state_dict())
    assert (again.seen, again.all) == (tracker.seen, tracker.all)
