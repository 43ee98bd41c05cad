"""From which distribution tokens were drawn: later luck counts only where its mean is 0."""

from types import SimpleNamespace

import accelerate.logging
import pytest
import torch
from peft import LoraConfig
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3ForCausalLM, TrainerCallback
from trl.trainer import grpo_trainer

from tests.helpers import tiny
from tests.helpers.recording import Sampler
from tests.helpers.settings import logged, sampled_elsewhere, scripted_rollout
from trl_otb.comparison.pools import at_rest, sample
from trl_otb.energy import TokenValues
from trl_otb.seam import draws
from trl_otb.seam.sampled import SampledTurn, SampledTurns


DROPPING = LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.5)
REGEX = "vllm_structured_outputs_regex"
VLLM = {"use_vllm": True, "vllm_mode": "colocate"}
UNWEIGHTED = {"vllm_importance_sampling_correction": False}
SERVER = {"use_vllm": True, "vllm_mode": "server", **UNWEIGHTED}


def with_logprobs(prompts, trainer):
    rollout = scripted_rollout(prompts, trainer)
    return rollout | {"logprobs": [[-2.0] * len(ids) for ids in rollout["completion_ids"]]}


CASES = {  # options, the ratio (None: 1), and what is said
    "recorded while sampling": ({}, None, None),
    "with dropout": ({"peft_config": DROPPING}, None, None),
    "TRL's own forward": ({"num_iterations": 2}, None, None),
    "dropout in TRL's own forward": (
        {"num_iterations": 2, "peft_config": DROPPING},
        0,
        "tokens were sampled with another dropout mask",
    ),
    "top-p": ({"top_p": 0.9}, 0, "`top_p` is 0.9"),
    "top-k": ({"top_k": 5}, 0, "`top_k` is 5"),
    "min-p": ({"min_p": 0.1}, 0, "`min_p` is 0.1"),
    "repetition": ({"repetition_penalty": 1.2}, 0, "`repetition_penalty` is 1.2"),
    "generation_kwargs": ({"generation_kwargs": {"typical_p": 0.5}}, 0, "`generation_kwargs` is {'typical_p': 0.5}"),
    "neutral": ({"top_p": 1.0, "top_k": 0, "min_p": 0.0, "generation_kwargs": {}}, None, None),
    "neutral for vLLM": ({**VLLM, **UNWEIGHTED, "top_k": -1}, "π / μ", None),
    "cut by vLLM": ({**VLLM, "top_p": 0.9}, 0, "`top_p` is 0.9"),
    "grammar of vLLM": ({**VLLM, REGEX: "[ab]+"}, 0, f"`{REGEX}` is [ab]+"),
    "weighted by completion": ({**VLLM, "vllm_importance_sampling_mode": "sequence_mask"}, None, None),
    "weighted by token": ({**VLLM, "vllm_importance_sampling_mode": "token_mask"}, "π / μ", None),
    "not weighted": ({**VLLM, **UNWEIGHTED, "temperature": 0.7}, "π / μ", None),
    "server": ({**SERVER, "temperature": 1.0}, "π / μ", None),
    "server, perhaps raw": ({**SERVER, "temperature": 0.7}, 0, "log-probs of a vLLM server may be of temperature 1"),
    "rollout_func": ({"rollout_func": with_logprobs}, "π / μ", None),
    "rollout_func without log-probs": ({"rollout_func": scripted_rollout}, 0, "`rollout_func` returns no log-probs"),
}


@pytest.mark.parametrize("case", CASES)
def test_ratio_is_that_of_the_sampler(case, train, monkeypatch, caplog):
    options, expected, said = CASES[case]
    found = []

    def watched(trainer, batch, source, logps, processor):
        result = draw_ratio(trainer, batch, source, logps, processor)
        found.append((result, logps, batch))
        return result

    draw_ratio = draws.draw_ratio
    monkeypatch.setattr("trl_otb.trainer.draw_ratio", watched)
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", Sampler)
    accelerate.logging.MultiProcessAdapter.warning_once.cache_clear()
    trainer = train(baseline="value", max_steps=1, **options)
    assert len(found) == 1
    assert f"Later luck is not subtracted: {said}" in caplog.text if said else "Later luck" not in caplog.text
    for ratio, logps, batch in found:
        if expected is None:
            assert ratio is None
        elif expected == 0:
            assert torch.equal(ratio, torch.zeros_like(logps))
        else:
            wanted = (logps - batch["sampling_per_token_logps"]).exp()
            torch.testing.assert_close(ratio, wanted, equal_nan=True)
    assert trainer.baseline.entry.estimator.gamma.isfinite().all()


def test_a_comparison_leaves_out_what_training_does(train, caplog):
    """It samples in eval mode, where no dropout acts."""
    accelerate.logging.MultiProcessAdapter.warning_once.cache_clear()
    trainer = train(baseline="value", train=False, num_iterations=2, peft_config=DROPPING)
    with at_rest(trainer, frozenset()):
        sample(trainer, [trainer.train_dataset[0]], 2, seed=0)
    assert "Later luck is not subtracted: tokens were sampled with another dropout mask" in caplog.text


@pytest.mark.parametrize(
    ("change", "said", "iterations"),
    [
        ({"top_k": 5}, "TopKLogitsWarper", 1),
        ({"suppress_tokens": [5]}, "SuppressTokensLogitsProcessor", 2),
        ({"temperature": 0.5}, "a temperature that is not 1.0", 2),
        ({"do_sample": False}, "do_sample=False", 1),
    ],
)
def test_other_generation_configs_are_noticed(train, caplog, change, said, iterations):
    """Which a user or a model's folder has, and TRL's arguments do not show."""
    accelerate.logging.MultiProcessAdapter.warning_once.cache_clear()
    trainer = train(baseline="value", train=False, max_steps=1, num_iterations=iterations)
    for name, value in change.items():
        setattr(trainer.generation_config, name, value)
    trainer.train()
    assert f"Later luck is not subtracted: tokens were sampled with {said}" in caplog.text


def test_each_row_has_the_values_of_its_own_draw():
    """Two rows of the same ids, sampled under dropout; and a batch of which every token is masked."""
    turns, ids, drawn = SampledTurns(), [5, 6], [torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.4])]
    turns.add([TokenValues(energy, -energy, None) for energy in drawn], [[1]] * 2, [ids] * 2)
    batch = {"prompt_ids": torch.ones(2, 1), "prompt_mask": torch.ones(2, 1), "completion_ids": torch.tensor([ids] * 2)}
    for _ in range(2):
        assert torch.equal(turns.of_batch(batch, torch.ones(2, 2)).energy, torch.stack(drawn))
    assert torch.equal(turns.of_batch(batch, torch.zeros(2, 2)).energy, torch.zeros(2, 2))


@pytest.mark.parametrize(
    ("prompts", "completions", "known"),
    [
        ([[1, 2, 3], [1, 2, 3]], [[4, 5], [4, 6]], [True, True]),
        ([[1, 2, 3], [1, 2, 0]], [[4, 5], [4, 5]], [True, False]),
        ([[1, 2, 3], [1, 2, 3]], [[4, 5], [7, 5]], [True, False]),
    ],
)
def test_values_are_of_the_ids_that_the_forwards_read(prompts, completions, known):
    turn = SampledTurn(1.0)
    for read in (torch.tensor([[1, 2, 3], [1, 2, 3]]), torch.tensor([[4], [4]])):
        turn.on_forward(None, (), {"input_ids": read}, SimpleNamespace(logits=torch.zeros(*read.shape, 8)))
    found = turn.rows(prompts, completions, None)
    assert [of is not None for of in found] == known
    assert found[0].energy.tolist() == pytest.approx([1 - 2 / 8 + 8 / 64] * 2)


def test_completions_of_a_prompt_are_found_in_any_order():
    turns, drawn = SampledTurns(), [torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.4])]
    turns.add([TokenValues(energy, -energy, None) for energy in drawn], [[1]] * 2, [[5, 6], [5, 7]])
    ids = torch.tensor([[5, 7], [5, 6]])
    batch = {"prompt_ids": torch.ones(2, 1), "prompt_mask": torch.ones(2, 1), "completion_ids": ids}
    assert torch.equal(turns.of_batch(batch, torch.ones(2, 2)).energy, torch.stack(drawn[::-1]))


class Changed(torch.nn.Module):
    """An MLP whose output is changed in train mode, under a name that no list has."""

    def __init__(self, layer, change):
        super().__init__()
        self.layer, self.change = layer, change

    def forward(self, x):
        return self.change(self.layer(x)) if self.training else self.layer(x)


def skip(layer, args, output):
    """LayerDrop."""
    return args[0] if layer.training and torch.rand(()) < 0.4 else None


def model_with(change):
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(tiny.config(num_hidden_layers=3))
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.5)
    for layer in model.model.layers:
        if change is skip:
            layer.register_forward_hook(change)
        elif change is not None:
            layer.mlp = Changed(layer.mlp, change)
    return model


def zeros(prompts, trainer):
    """What a `rollout_func` may give, as GRPOTrainer never reads it."""
    rollout = sampled_elsewhere(prompts, trainer)
    return rollout | {"logprobs": [[0.0] * len(ids) for ids in rollout["completion_ids"]]}


def at_temperature_1(prompts, trainer):
    """Log-probs before the temperature that tokens were sampled at."""
    rollout, logprobs = sampled_elsewhere(prompts, trainer), []
    pairs = [*zip(rollout["prompt_ids"], rollout["completion_ids"], strict=True)]
    rows = pad_sequence([torch.tensor(prompt + ids) for prompt, ids in pairs], batch_first=True)  # to their right
    with torch.no_grad():
        logps = trainer.model(input_ids=rows).logits.float().log_softmax(-1)
    for (prompt, ids), of_row in zip(pairs, logps, strict=True):
        own = of_row[len(prompt) - 1 :][: len(ids)]
        logprobs.append(own.gather(1, torch.tensor(ids).unsqueeze(1)).flatten().tolist())
    return rollout | {"logprobs": logprobs}


def resampled(prompts, trainer):
    """Each completion is the more probable of two."""
    one, other = (at_temperature_1(prompts, trainer) for _ in range(2))
    rows = [of if sum(of[1]) > sum(or_else[1]) else or_else for of, or_else in zip(
        *(zip(of["completion_ids"], of["logprobs"], strict=True) for of in (one, other)), strict=True
    )]  # fmt: skip
    return one | {"completion_ids": [ids for ids, _ in rows], "logprobs": [logprobs for _, logprobs in rows]}


UNLISTED = {
    "router noise": {"model": lambda x: x + 0.5 * torch.randn_like(x), "num_iterations": 2},
    "dropout of another name": {"model": lambda x: 4 * x * (torch.rand_like(x) < 0.25), "num_iterations": 2},
    "LayerDrop": {"model": skip, "num_iterations": 2},
    "neftune": {"model": None, "num_iterations": 2, "neftune_noise_alpha": 5},
    "zeros as log-probs": {"model": None, "rollout_func": zeros},
    "a sampler that resamples": {"model": None, "rollout_func": resampled},
    "log-probs of another temperature": {"model": None, "rollout_func": at_temperature_1, "temperature": 0.7},
}


@pytest.mark.parametrize("case", UNLISTED)
def test_a_cause_that_no_list_has_is_measured(case, train, caplog):
    """Its luck is left out soon, and stays so; the same without the cause is not."""
    options = {"max_steps": 40, "learning_rate": 0.0, "per_device_train_batch_size": 32, **UNLISTED[case]}
    options |= {"model": model_with(options["model"]), "processing_class": tiny.tokenizer(), "baseline": "value"}
    trainer = train(**options)
    left_out = logged(trainer, "otb/value/luck_left_out")
    first = left_out.index(1.0)
    assert first < 15 and all(left_out[first:]) and trainer.baseline.entry.estimator.luck_weight == 0
    assert caplog.text.count("Later luck is not subtracted") == 1


@pytest.mark.parametrize("options", [{}, {"num_iterations": 2}, {"rollout_func": at_temperature_1}])
def test_honest_draws_are_not_suspected(options, train, caplog):
    options = options | {"model": model_with(None), "processing_class": tiny.tokenizer()}
    trainer = train(baseline="value", max_steps=40, learning_rate=0.0, per_device_train_batch_size=32, **options)
    assert not any(logged(trainer, "otb/value/luck_left_out")) and "Later luck" not in caplog.text
    assert max(map(abs, logged(trainer, "otb/value/luck_mean")[5:])) < 0.02


class Warmer(TrainerCallback):
    """Samples at another temperature than the trainer's, from the fourth step on."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3:
            self.trainer.generation_config.temperature = 0.7


def test_the_metric_says_so_too_where_a_batch_has_no_luck(train, caplog):
    trainer = train(baseline="value", max_steps=6, train=False)
    trainer.add_callback(Warmer(trainer))
    trainer.train()
    assert "Later luck is not subtracted: tokens were sampled with a temperature that is not 1.0" in caplog.text
    assert logged(trainer, "otb/value/luck_left_out") == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
