"""From which distribution tokens were drawn: later luck counts only where its mean is 0."""

import accelerate.logging
import pytest
import torch
from peft import LoraConfig
from trl.trainer import grpo_trainer

from tests.helpers.recording import Sampler
from tests.helpers.settings import scripted_rollout
from trl_otb.comparison.pools import at_rest, sample
from trl_otb.energy import TokenValues
from trl_otb.seam import draws
from trl_otb.seam.sampled import SampledTurns


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
    "dropout in TRL's own forward": ({"num_iterations": 2, "peft_config": DROPPING}, 0, "dropout was another one"),
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
        found.append((result[0], logps, batch))
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


def test_a_comparison_leaves_out_what_training_does(train, monkeypatch):
    """It samples in eval mode, where no dropout acts."""
    found = []
    draw_ratio = draws.draw_ratio
    monkeypatch.setattr("trl_otb.trainer.draw_ratio", lambda *of: found.append(draw_ratio(*of)) or found[-1])
    trainer = train(baseline="value", train=False, num_iterations=2, peft_config=DROPPING)
    with at_rest(trainer, frozenset()):
        sample(trainer, [trainer.train_dataset[0]], 2, seed=0)
    assert [said for _, said in found] == ["dropout was another one when tokens were sampled"]


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
