"""A rollout for the eye: its repr and its text. Its page is in test_page.py."""

import io
import math
import re
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.helpers import tiny, tiny_vision
from tests.helpers.agents import AGENT
from tests.helpers.scripted import TOOLS, script_turns
from trl_otb import OTBGRPOTrainer
from trl_otb.baselines import find_baseline
from trl_otb.display.shown import ShownRollout
from trl_otb.display.text import token_texts, visible
from trl_otb.energy import TokenValues
from trl_otb.rollout import Shown
from trl_otb.run.baseline import RunBaseline


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Two prompts with two completions each; [ ] is tool output
TEXTS = ["ab[cd]e", "fg", "<b>&", "hi[j]kl[m]n"]
REWARDS = [1.0, 0.0, math.nan, 0.5]
TWO = ["ab[cd]e", "fg"], [1.0, 0.0]


def rollout_of(texts=TEXTS, rewards=REWARDS, n=2, device="cpu", **fields) -> ShownRollout:
    """Rewards as given, no energies yet; every byte of `texts` is a token."""
    tokenizer = tiny.tokenizer()
    spoken = [re.sub(r"[\[\]]", "", text) for text in texts]
    parts = [re.split(r"[\[\]]", text) for text in texts]
    said = [[i % 2 == 0 for i, part in enumerate(of) for _ in part.encode()] for of in parts]
    ids = [tokenizer(text)["input_ids"] for text in spoken]
    length = max(map(len, ids)) + 1  # a column of padding
    padded = torch.full((len(texts), length), tokenizer.pad_token_id)
    completion_mask, mask = torch.zeros(2, len(texts), length, dtype=torch.long)
    for row, (of_row, generated) in enumerate(zip(ids, said, strict=True)):
        padded[row, : len(of_row)] = torch.tensor(of_row)
        completion_mask[row, : len(of_row)] = 1
        mask[row, : len(of_row)] = torch.tensor(generated).long()
    prompts = torch.tensor(tokenizer(["1+1=", "2+2="])["input_ids"]).repeat_interleave(n, dim=0)
    prompts = torch.nn.functional.pad(prompts[: len(texts)], (1, 0), value=tokenizer.pad_token_id)
    tensors = {"prompt_ids": prompts, "prompt_mask": (prompts != tokenizer.pad_token_id).long(), "mask": mask}
    tensors |= {"completion_ids": padded, "completion_mask": completion_mask}
    tensors |= {"rewards": torch.tensor(rewards), "scale": torch.ones(len(texts), 1)}
    rollout = ShownRollout(**{key: value.to(device) for key, value in tensors.items()}, num_generations=n)
    return changed(rollout, **{"processing_class": tokenizer} | fields)


def changed(rollout, **fields):
    """A rollout with other fields, of its own or of what is shown."""
    of_shown = {name: fields.pop(name) for name in list(fields) if name in Shown.__dataclass_fields__}
    return replace(rollout, shown=replace(rollout.shown, **of_shown), **fields)


def energies(rollout):
    """0, 0.1, 0.2, … in reading order, at most 0.9; the first row's fifth token, if it has one, is improbable."""
    values = torch.arange(rollout.mask.numel()).view(rollout.mask.shape) / 10
    values = values.clamp(max=0.9)
    values[0, 4:5] = 1.6
    return values.to(rollout.mask.device)


def credited(*texts_and_rewards, baseline="otb", **options):
    rollout, run = rollout_of(*texts_and_rewards, **options), RunBaseline(find_baseline(baseline))
    rollout = rollout.with_values(TokenValues(energies(rollout), -energies(rollout), None), None)
    return rollout.with_advantages(run.advantages_of(rollout.completions(), rollout.scale))


def text_of(capsys, rollout, **options):
    rollout.show(**options)
    return capsys.readouterr().out


def test_terminal_of_another_encoding_is_written_to(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="cp1252", write_through=True))
    credited(["a\nb", "é"], [1.0, 0.0]).show()
    assert b"\\u21b5" in written.getvalue() and "é".encode("cp1252") in written.getvalue()


def test_no_rollout_is_a_key_error(train):
    rollouts = train(train=False).rollouts
    with pytest.raises(KeyError, match=r"'train': there is no such rollout yet\. Call trainer\.train\(\)"):
        rollouts["train"]
    assert "train" not in rollouts


@pytest.mark.parametrize("device", DEVICES)
def test_repr_has_the_sizes(device):
    expected = "Rollout of 2 prompts, N = 2: 4 completions, 14 generated tokens, mean reward 0.5\n"
    expected += "see show(prompt=0), page(path)"
    assert repr(rollout_of(device=device)) == repr(credited(device=device)) == expected
    of_tokens = repr(rollout_of(["ab"], [[0.5, 0.25, 0.0]], n=1))
    assert "1 completions, 2 generated tokens, mean reward 0.75\n" in of_tokens


@pytest.mark.parametrize("device", DEVICES)
def test_text_shows_tokens_and_values(capsys, device):
    rollout = changed(credited(*TWO, device=device), step=3, baseline_name="otb")
    # "a": W = 0 and 0.6, so B = 0; "b": W = 0.1 and 1.3, so B = 0.1/1.4; "e": the lone tail, B = 0
    expected = (
        "Prompt 0 of 1, step 3, baseline otb, N = 2\n"
        "1+1=\n"
        "‹ ›: the policy was fairly sure of another token; [ ]: of tools\n\n"
        "completion 0, reward 1, advantage 0.93 to 1.00, baseline 0.00 to 0.07, 5 tokens\n"
        "ab[cd]‹e›\n\n"
        "completion 1, reward 0, advantage -0.07 to 0.00, baseline 0.00 to 0.07, 2 tokens\n"
        "fg\n"
    )
    assert text_of(capsys, rollout) == expected
    assert rollout.advantages[0].tolist() == pytest.approx([1, 1 - 0.1 / 1.4, 0, 0, 1, 0])


def test_colours_in_a_terminal(capsys, monkeypatch):
    """The largest push, √1.6 here, is darkest; red of blue tokens is least."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    text = text_of(capsys, credited(*TWO))
    assert "blue: more of this" in text and "\x1b[30;48;2;102;161;216m‹e›" in text  # 255 − .6 (255 − (0, 98, 190))
    shades = [tuple(map(int, of)) for of in re.findall(r"48;2;(\d+);(\d+);(\d+)m", text)]
    assert shades[0] == (255, 255, 255) and any(red > blue for red, _, blue in shades)  # no energy; the failed attempt


def test_missing_values_are_not_shown(capsys):
    text = text_of(capsys, rollout_of(), prompt=1)
    assert "completion 0, no reward, 4 tokens\n<b>&\n" in text and "hi[j]kl[m]n" in text and "energy 0" not in text
    text = text_of(capsys, rollout_of(["ab[cd]e", "fg"], [1.0, 0.0]), max_tokens=3)
    assert "\nab … 2 tokens are not shown … e\n" in text and text.endswith("\nfg\n")


@pytest.mark.parametrize("layout", tiny_vision.LAYOUTS)
def test_processor_works_as_tokenizer(capsys, layout):
    assert "hi[j]kl[m]n" in text_of(capsys, rollout_of(processing_class=tiny_vision.processor(layout)), prompt=1)


def test_group_begins_on_another_process(capsys):
    """Rows 2 to 5 of groups of four: the rest of one, then two of the next."""
    rollout = rollout_of(n=4, first_row=2)
    assert "Rollout of 2 prompts, N = 4" in repr(rollout)
    first, second = text_of(capsys, rollout), text_of(capsys, rollout, prompt=1)
    assert "ab[cd]e" in first and "fg" in first and "completion 2" not in first
    assert "<b>&" in second and "hi[j]kl[m]n" in second


def test_what_a_trainer_with_tools_leaves(train, monkeypatch, capsys):
    script_turns(monkeypatch)
    trainer = train(OTBGRPOTrainer, reward_funcs=tiny.even_bytes, tools=TOOLS, **AGENT)
    text = re.sub("[‹›]", "", text_of(capsys, trainer.rollouts["train"]))  # the tokenizer is known
    assert "@1 = 5, said at once<|im_end|>" in text and "@7 <tool_call>↵" in text
    assert "\n[<tool_response>↵]\n[16↵]\n[</tool_response>" in text and "]\n= 16<|im_end|>\n" in text
    assert trainer.rollouts["train"].shown.processing_class is trainer.processing_class


def test_partial_characters_are_shown():
    tokenizer = tiny.tokenizer()
    text = "é=漢!"
    texts = token_texts(tokenizer(text)["input_ids"], tokenizer)
    assert texts == ["", "é", "=", "", "", "漢", "!"]
    cut = token_texts(tokenizer(text)["input_ids"][:4], tokenizer)
    assert cut[:3] == ["", "é", "="] and "".join(cut) == "é=�"


def test_a_cut_character_spoils_no_other_completion():
    tokenizer, known = tiny.tokenizer(), {}
    whole = tokenizer("b漢c")["input_ids"]
    assert token_texts(whole[:2], tokenizer, known) == ["b", "�"]
    assert token_texts(whole, tokenizer, known) == ["b", "", "", "漢", "c"]
    assert len(token_texts([whole[1]] * 5000, tokenizer)) == 5000  # bytes that never form one, in linear time


def test_leading_space_belongs_to_token():
    """A decoder that drops it where a text begins, as SentencePiece's."""
    backend = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "c": 2, "<unk>": 3}, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer.decode([1]) == "b"
    assert token_texts([0, 1, 2, 1], tokenizer) == ["a", " b", "c", " b"]


def test_a_completion_cannot_steer_the_terminal(capsys):
    assert visible("a\n\tb\x1b[31m\u202e") == "a↵⇥b\\x1b[31m\\u202e" and visible("") == "·"
    text = text_of(capsys, rollout_of(["a\x1bc", "d"], [1.0, 0.0]))
    assert "\x1b" not in text and "a\\x1bc" in text


@pytest.mark.parametrize("prompt", [2, -1])
def test_a_prompt_that_is_not_there(prompt):
    with pytest.raises(IndexError, match=rf"`prompt` is {prompt}: this rollout has prompts 0 to 1\."):
        credited().show(prompt)
