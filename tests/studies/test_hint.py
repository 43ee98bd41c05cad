"""What is read of a forward with the right answer in its prompt."""

import importlib

import pytest
import torch
from transformers import AutoTokenizer


@pytest.fixture
def hint(registry):
    """Imported in a test, since it registers baselines."""
    return importlib.import_module("recipes.studies.hint")


def test_draws_of_a_hint_have_mean_0_and_its_numbers_are_known_before_the_token(hint):
    g = torch.Generator().manual_seed(0)
    logp, with_hint = (
        (3 * torch.randn(4, 6, generator=g)).log_softmax(-1),
        torch.randn(4, 6, generator=g).log_softmax(-1),
    )
    found = [hint.hinted(logp, with_hint, torch.full((4,), y)) for y in range(6)]
    draws = torch.stack([draws for _, draws in found], dim=1)  # (T, V, 4)
    assert draws.shape == (4, 6, 4) and draws.std(dim=1).min() > 0.01
    torch.testing.assert_close((logp.exp().unsqueeze(-1) * draws).sum(1), torch.zeros(4, 4), atol=1e-6, rtol=0)
    for last in range(6):
        numbers = hint.hinted(logp, with_hint, torch.tensor([1, 2, 0, last]))[0]
        assert numbers.shape == (4, 3) and torch.equal(
            numbers, hint.hinted(logp, with_hint, torch.tensor([1, 2, 0, 5]))[0]
        )
    assert torch.equal(numbers[0, 1:], torch.zeros(2)) and (numbers[1:, 2] < 0).all()
    kl = torch.nn.functional.kl_div(with_hint, logp, log_target=True, reduction="none").sum(1)
    torch.testing.assert_close(numbers[:, 0], kl)


def test_the_hint_stands_in_the_last_message(hint, model_path):
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    plain = hint.prompt_ids(tokenizer, "Say it.")
    assert plain == tokenizer("Say it.")["input_ids"]
    assert tokenizer.decode(hint.prompt_ids(tokenizer, "Say it.", "it")).endswith("Say it.\n\nThe right answer is:\nit")
    chat = [{"role": "system", "content": "Obey."}, {"role": "user", "content": "Say it."}]
    without, with_answer = (tokenizer.decode(hint.prompt_ids(tokenizer, chat, answer)) for answer in (None, "it"))
    assert with_answer.replace("\n\nThe right answer is:\nit", "") == without and "Obey." in without
