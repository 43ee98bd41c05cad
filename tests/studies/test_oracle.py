"""Completions are continued as the policy would from their beginning, though their beginnings are read once."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3ForCausalLM

from tests.helpers import tiny


LONGEST, GREEDY = 12, 1e-4
PROMPTS = ([5, 6, 7, 8, 9], [40, 41])
COMPLETION = [11, 12, 13, 14, 15, 16, 17, 18]
STARTS = [(0, 1, 60), (1, 0, 61), (0, 7, 62), (1, 4, 63), (0, 3, 64), (1, 7, 65)]  # prompt, t and the token there


@pytest.fixture
def oracle(registry):
    """Imported in a test, since it registers baselines."""
    return importlib.import_module("recipes.studies.oracle")


@pytest.fixture(params=["qwen3", "gemma3"])
def go(oracle, request, tmp_path):
    """Continuations by a model that attends to all, or whose layers' windows are shorter than its completions."""
    if request.param == "qwen3":
        folder, model = tiny.save_model(tmp_path), Qwen3ForCausalLM
    else:
        window = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
        model = Gemma3ForCausalLM
        folder = tiny.save_model(tmp_path, model, tiny.config(Gemma3TextConfig, **window))
    policy = model.from_pretrained(folder).eval()
    ends = SimpleNamespace(model=policy, eos_token_ids=[policy.config.eos_token_id], temperature=1.0)
    return oracle.Continuations(SimpleNamespace(**vars(ends), max_completion_length=LONGEST), seed=0)


def read(go, prompt):
    """As one of TRL's rows, padded on both sides."""
    ids, completion = torch.tensor([[3, *prompt]]), torch.tensor([[*COMPLETION, 3]])
    masks = {"prompt_mask": ids != 3, "completion_mask": completion != 3}
    return go.read({"prompt_ids": ids, "completion_ids": completion, **masks})


def test_continuations_are_those_of_generate(oracle, go, monkeypatch):
    monkeypatch.setattr(oracle, "ROWS", 4)  # rows of two batches, in each of which beginnings differ in length
    go.trainer.temperature = GREEDY
    readings = [read(go, prompt) for prompt in PROMPTS]
    end = go.trainer.eos_token_ids[0]
    ended = (readings[0], 2, end)
    found = go.finished([ended, *((readings[i], t, v) for i, t, v in STARTS)])
    assert found[0] == [*COMPLETION[:2], end]
    for (i, t, v), ids in zip(STARTS, found[1:], strict=True):
        begun = [*PROMPTS[i], *COMPLETION[:t], v]
        left = LONGEST - t - 1
        alone = go.policy.generate(torch.tensor([begun]), max_new_tokens=left, do_sample=False)[0].tolist()
        assert PROMPTS[i] + ids == alone and len(ids) > t + 1


def test_continuations_are_drawn_from_the_policy(go):
    reading, draws = read(go, PROMPTS[0]), 4000
    go.longest = 4
    found = go.finished([(reading, 2, COMPLETION[2])] * draws)
    shares = torch.tensor([ids[3] for ids in found]).bincount(minlength=reading.probabilities.size(1)) / draws
    likely = reading.probabilities[3] > 0.01  # the others as one, since counts of a few are not normal
    p, shares = (torch.cat([x[likely], x[~likely].sum(0, keepdim=True)]) for x in (reading.probabilities[3], shares))
    assert likely.sum() >= 4
    assert ((shares - p).abs() <= 4.5 * (p * (1 - p) / draws).sqrt()).all()
