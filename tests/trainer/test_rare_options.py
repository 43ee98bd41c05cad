"""Options of GRPOTrainer that few runs set: the group mean is GRPOTrainer under them too, and energies are right."""

import math

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.helpers import tiny
from tests.helpers.energies import energies, trainer_of
from tests.helpers.oracles import energies_by_softmax, generated
from tests.helpers.settings import LORA, SOURCES, assert_same_weights, logged
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer
from trl_otb.baselines import compute_advantages


pytestmark = pytest.mark.slow
# A cache of 16 blocks instead of one that fills half of the memory
CONTINUOUS_BATCHING = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"num_blocks": 16, "max_batch_tokens": 64},
}
# After each step the reference is halfway between what it was and the policy
SYNC_REF_MODEL = {"sync_ref_model": True, "beta": 0.1, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
SYNC_REF_MODEL["max_steps"] = 4
# "eager" traces as every backend does and compiles nothing
COMPILE = {"torch_compile": True, "torch_compile_backend": "eager"}


class Snapshots(TrainerCallback):
    """The weights that each rollout was generated with."""

    def __init__(self):
        self.weights = []

    def on_step_begin(self, args, state, control, model, **kwargs):
        self.weights.append({name: p.detach().clone() for name, p in model.named_parameters()})


@pytest.fixture(scope="module")
def of_one_layer(tmp_path_factory):
    """Each layer is traced anew, which takes seconds."""
    return tiny.save_model(tmp_path_factory.mktemp("layer"), model_config=tiny.config(num_hidden_layers=1))


@pytest.fixture
def fresh_compiler():
    """Compiled code is kept by function, whatever the trainer, and given up after eight kinds of input."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    "options",
    [CONTINUOUS_BATCHING, SYNC_REF_MODEL, {**COMPILE, "peft_config": LORA, "gradient_checkpointing": True}],
    ids=["continuous batching", "a moving reference", "compiled lora"],
)
def test_the_group_mean_is_grpo_trainer(train, of_one_layer, fresh_compiler, options):
    options = options | {"model": of_one_layer}
    grpo = train(GRPOTrainer, GRPOConfig, scale_rewards="none", **options)
    otb = train(OTBGRPOTrainer, OTBGRPOConfig, baseline="group_mean", **options)
    assert_same_weights(grpo, otb)
    assert min(logged(otb, "grad_norm")) > 0
    assert all(math.isfinite(value) for value in logged(otb, "otb/energy/token_mean"))


@pytest.mark.parametrize(
    ("options", "source"),
    [  # continuous batching's forwards are of tokens of several completions at once
        *[(CONTINUOUS_BATCHING, source) for source in list(SOURCES)[1:]],
        *[(COMPILE, source) for source in SOURCES],
    ],
)
def test_energies_are_those_of_the_second_rollout(train, of_one_layer, fresh_compiler, options, source):
    """
    Not lost in a compiled forward, which was traced with and without them; and what the first rollout compiled or
    cached is not found in the second.
    """
    snapshots, several = Snapshots(), SOURCES[source].get("num_iterations", 1)
    model = {"model": of_one_layer, "callbacks": [snapshots]}
    trainer = train(max_steps=2 * several, **model, **options, **SOURCES[source])
    snapshots.weights = snapshots.weights[::several]  # of two steps each the first has the weights of the rollout
    assert trainer.energy_source == source and len(snapshots.weights) == 2
    assert options is not COMPILE or isinstance(trainer.model_wrapped, torch._dynamo.OptimizedModule)
    model = AutoModelForCausalLM.from_pretrained(of_one_layer, dtype=torch.float32)
    model.load_state_dict(snapshots.weights[-1])
    rollout = trainer.rollouts["train"]
    energy = energies_by_softmax(model, vars(rollout))
    torch.testing.assert_close(rollout.energy.double(), energy, atol=1e-5, rtol=0)
    rewards = torch.tensor(tiny.even_bytes(generated(vars(rollout))))
    expected = compute_advantages(rewards, energy, rollout.mask, 4)
    torch.testing.assert_close(rollout.advantages, expected, atol=1e-5, rtol=0)
    model.load_state_dict(snapshots.weights[0])
    assert (energies_by_softmax(model, vars(rollout)) - energy).abs().max() > 0.01, "the weights have hardly changed"


QUANTIZED = {
    "4 bits": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
    "8 bits": {"load_in_8bit": True},
}


@pytest.mark.parametrize("baseline", ["otb", "value"])
@pytest.mark.parametrize("bits", QUANTIZED)
def test_quantized_models_train_adapters(bits, baseline, model_path, tmp_path):
    adapter, quantized = LoraConfig(target_modules=["q_proj", "v_proj"]), BitsAndBytesConfig(**QUANTIZED[bits])
    trainer = trainer_of(model_path, tmp_path, adapter, quantized, baseline=baseline)
    assert {p.dtype for p in trainer.model.parameters()} & {torch.uint8, torch.int8}
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0
    trainer.model.train()
    actual, expected, mask = energies(trainer)
    torch.testing.assert_close(actual.double() * mask, expected * mask, atol=2e-6, rtol=0)


@pytest.mark.parametrize("bits", QUANTIZED)
def test_a_quantized_head_is_refused(bits, model_path, tmp_path):
    everything = BitsAndBytesConfig(**QUANTIZED[bits], llm_int8_skip_modules=["nothing"])
    with pytest.raises(ValueError, match=r"LM head .* is quantized .* llm_int8_skip_modules=\['lm_head'\]"):
        trainer_of(model_path, tmp_path, LoraConfig(target_modules=["q_proj"]), everything)
