"""Vision-language models: GRPOTrainer to the bit, and energies that saw each completion's own pictures."""

import re

import accelerate.logging
import pytest
import torch
from packaging.version import Version
from trl import GRPOConfig, GRPOTrainer

from tests.helpers import tiny, tiny_vision
from tests.helpers.oracles import generated
from tests.helpers.settings import SETTINGS, SOURCES, TRL, assert_same_weights, in_turn, logged
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer
from trl_otb.baselines import compute_advantages
from trl_otb.seam.forwards import extra_forward
from trl_otb.trainer import collect


# By what the dataset holds: the layout of `pixel_values`, and the dataset
PICTURES = {
    "patches, one picture each": ("patches", tiny_vision.prompts),
    "patches, one picture or two": ("patches", tiny_vision.prompts_with_several),
    "rows, one picture each": ("rows", tiny_vision.prompts),
    "rows, one picture or two": ("rows", tiny_vision.prompts_with_several),
}
PARITY = ["plain", "accumulation", "split groups", "num_iterations", "lora and beta", "checkpointing"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    return {layout: tiny_vision.save_model(folder / layout, layout) for layout in tiny_vision.LAYOUTS}


@pytest.fixture
def train_on(train, folders):
    """As `train`, on `pictures`."""

    def run(pictures, *args, **kwargs):
        layout, dataset = PICTURES[pictures]
        if pictures == "rows, one picture or two" and TRL < Version("1.11"):
            pytest.skip("before trl 1.11 batches of rows with several pictures cannot be cut")
        return train(*args, **tiny_vision.given(layout, folders[layout], dataset()), **kwargs)

    return run


# Rollouts of four groups of four, in two micro-batches, so that shuffled rows need their own pictures
FOUR_GROUPS = {"max_steps": 1, "gradient_accumulation_steps": 2}


def energies_by_row(layout, dataset, rollout, shift=0):
    """w_t from a float64 softmax of each row's own logits, with the pictures that the dataset has for its prompt."""
    processor, model = tiny_vision.processor(layout), tiny_vision.model(layout).eval()
    energies = torch.zeros(rollout.mask.shape, dtype=torch.float64)
    for row in range(len(rollout)):
        prompt = rollout.prompt_ids[row][rollout.prompt_mask[row].bool()]
        completion = rollout.completion_ids[row][rollout.completion_mask[row].bool()]
        number = int(re.search(r"(\d)\?", processor.tokenizer.decode(prompt)).group(1))
        example = dataset[(number + shift) % len(dataset)]
        pictures = example["images"] if "images" in example else [example["image"]]
        seen = processor.image_processor(images=pictures, return_tensors="pt")
        ids = torch.cat([prompt, completion]).unsqueeze(0)
        if layout == "patches":
            seen["mm_token_type_ids"] = (ids == processor.image_token_id).long()
        with torch.no_grad():
            logits = model(input_ids=ids, **seen).logits[0, len(prompt) - 1 : -1].double()
        probs = logits.softmax(-1)
        one_hot = torch.nn.functional.one_hot(completion, probs.size(-1))
        energies[row, : len(completion)] = (one_hot - probs).square().sum(-1)
    return energies


@pytest.mark.parametrize(
    ("setting", "pictures"), in_turn(PARITY, ["patches, one picture or two", "rows, one picture each"])
)
def test_group_mean_equals_grpo_trainer(train_on, pictures, setting):
    options = {"scale_rewards": "none", **SETTINGS[setting]}
    grpo = train_on(pictures, GRPOTrainer, GRPOConfig, **options)
    otb = train_on(pictures, OTBGRPOTrainer, OTBGRPOConfig, baseline="group_mean", **options)
    assert_same_weights(grpo, otb)
    assert min(logged(otb, "grad_norm")) > 0


@pytest.mark.parametrize(("pictures", "source"), in_turn(PICTURES, SOURCES))
def test_energies_and_advantages_saw_the_pictures(train_on, pictures, source):
    """Each completion's energies are those of a forward of its own, with its prompt's pictures and no padding."""
    layout, dataset = PICTURES[pictures]
    trainer = train_on(pictures, learning_rate=0.0, **FOUR_GROUPS, **SOURCES[source])
    assert trainer.energy_source == source
    rollout = trainer.rollouts["train"]
    assert len(rollout) == 16
    energy = energies_by_row(layout, dataset(), rollout)
    torch.testing.assert_close(rollout.energy.double(), energy, atol=1e-5, rtol=0)
    rewards = torch.tensor(tiny.even_bytes(generated(vars(rollout))))
    expected = compute_advantages(rewards, energy, rollout.mask, 4)
    torch.testing.assert_close(rollout.advantages, expected, atol=1e-5, rtol=0)
    assert torch.equal(trainer.batches[0]["advantages"], rollout.advantages) and expected.abs().max() > 0.05
    if "each" in pictures:  # the test is not blind: with the next picture of a like size, from six on, they are others
        wrong = energies_by_row(layout, dataset(12), rollout, shift=6)
        assert ((wrong - rollout.energy).abs() * rollout.mask).amax(dim=1).min() > 1e-3


@pytest.mark.parametrize("pictures", [*PICTURES][1:3])
def test_sampled_forwards_equal_an_extra_one(train_on, pictures, monkeypatch):
    trainer = train_on(pictures, train=False, baseline="value")
    differences = []

    def compared(trainer, inputs):
        rollout, x, batch = collect(trainer, inputs)
        other = extra_forward(trainer, batch, True)
        for name in ("energy", "logps", "states"):
            found, expected = getattr(x, name), getattr(other, name)
            mask = rollout.mask if found.dim() == 2 else rollout.mask.unsqueeze(-1)
            differences.append(((found - expected) * mask).abs().max().item())
        return rollout, x, batch

    monkeypatch.setattr("trl_otb.trainer.collect", compared)
    trainer.train()
    assert trainer.energy_source == "the forwards that sampled"
    assert len(differences) == 6 and max(differences) < 1e-4


def test_why_vision_models_have_no_later_luck(train_on, caplog):
    """TRL lets `generate` sample no image token, so that tokens are not drawn from the softmax."""
    accelerate.logging.MultiProcessAdapter.warning_once.cache_clear()
    trainer = train_on("rows, one picture each", baseline="value", max_steps=1, train=False)
    image, trainer.args.generation_kwargs = trainer.model.config.image_token_id, None  # none of the test's own
    trainer.generation_config.suppress_tokens = [image]  # as TRL itself sets it
    trainer.train()
    said = f"SuppressTokensLogitsProcessor: TRL lets a vision model sample no image token (id {image})."
    assert f"Later luck is not subtracted: tokens were sampled with {said}" in caplog.text
