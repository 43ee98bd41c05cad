"""A rollout for the eye: its repr, its text, its picture."""

import io
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.helpers import tiny, tiny_vision
from tests.helpers.agents import AGENT
from tests.helpers.scripted import TOOLS, script_turns
from trl_otb import OTBGRPOTrainer
from trl_otb.baselines import find_baseline
from trl_otb.energy import TokenValues
from trl_otb.rollout import Rollout
from trl_otb.rollout.text import token_texts, visible
from trl_otb.run_baseline import RunBaseline


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Two prompts with two completions each; [ ] is tool output
TEXTS = ["ab[cd]e", "fg", "<b>&", "hi[j]kl[m]n"]
REWARDS = [1.0, 0.0, math.nan, 0.5]
TWO = ["ab[cd]e", "fg"], [1.0, 0.0]


def rollout_of(texts=TEXTS, rewards=REWARDS, n=2, device="cpu", **fields) -> Rollout:
    """Rewards as given, no energies yet; every character of `texts` is a token."""
    tokenizer = tiny.tokenizer()
    spoken = [re.sub(r"[\[\]]", "", text) for text in texts]
    said = [[i % 2 == 0 for i, part in enumerate(re.split(r"[\[\]]", text)) for _ in part] for text in texts]
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
    fields = {"processing_class": tokenizer} | fields
    return Rollout(**{key: value.to(device) for key, value in tensors.items()}, num_generations=n, **fields)


def energies(rollout):
    """0, 0.1, 0.2, … in reading order, at most 0.9; the first row's fifth token, if it has one, is improbable."""
    values = torch.arange(rollout.mask.numel()).view(rollout.mask.shape) / 10
    values = values.clamp(max=0.9)
    values[0, 4:5] = 1.5
    return values.to(rollout.mask.device)


def credited(*texts_and_rewards, baseline="otb", **options):
    rollout, run = rollout_of(*texts_and_rewards, **options), RunBaseline(find_baseline(baseline))
    rollout = rollout.read(TokenValues(energies(rollout), -energies(rollout), None), None)
    return rollout.with_advantages(run.step(rollout.completions(), rollout.scale))


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
    first = "Rollout of 2 prompts, N = 2: 4 completions, 14 tokens, and 4 of tools\n"
    rewards = "rewards: mean 0.5, one per completion; 1 completions without\n"
    last = "\nsee show(prompt=0), plot(path)"
    of_all = "energies: of all tokens\nadvantages: per"
    assert repr(rollout_of(device=device)).startswith(f"{first}{rewards}energies: none\n")
    assert repr(credited(device=device)) == f"{first}{rewards}{of_all} token{last}"
    assert repr(credited(baseline="rloo", device=device)) == f"{first}{rewards}{of_all} completion{last}"
    of_tokens = repr(rollout_of(["ab"], [[0.5, 0.25, 0.0]], n=1))
    assert "1 completions, 2 tokens\nrewards: mean 0.75, one per token\n" in of_tokens


@pytest.mark.parametrize("device", DEVICES)
def test_text_shows_tokens_and_values(capsys, device):
    rollout = credited(*TWO, device=device)
    # "a": W = 0 and 0.6, so B = 0; "b": W = 0.1 and 1.3, so B = 0.1/1.4; "e": the lone tail, B = 0
    expected = (
        "Prompt 0: 1+1=\n"
        "‹ ›: energy above 1: another token was more than twice as likely; [ ]: tool output.\n\n"
        "completion 0, reward 1, energy 1.60, advantage 0.93 to 1.00, the group mean's advantage 0.50\n"
        "ab[cd]‹e›\n\n"
        "completion 1, reward 0, energy 1.30, advantage -0.07 to 0.00, the group mean's advantage -0.50\n"
        "fg\n"
    )
    assert text_of(capsys, rollout) == expected
    assert rollout.advantages[0].tolist() == pytest.approx([1, 1 - 0.1 / 1.4, 0, 0, 1, 0])


def test_missing_values_are_not_shown(capsys):
    text = text_of(capsys, rollout_of(), prompt=1)
    assert "completion 0, no reward\n<b>&\n" in text and "hi[j]kl[m]n" in text and "energy 0" not in text
    text = text_of(capsys, rollout_of(), max_tokens=2)
    assert "\nab … 3 more tokens\n" in text and text.endswith("\nfg\n")


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
    assert trainer.rollouts["train"].processing_class is trainer.processing_class


def test_partial_characters_are_shown():
    tokenizer = tiny.tokenizer()
    text = "é=漢!"
    texts = token_texts(tokenizer(text)["input_ids"], tokenizer)
    assert texts == ["", "é", "=", "", "", "漢", "!"]
    cut = token_texts(tokenizer(text)["input_ids"][:4], tokenizer)
    assert cut[:3] == ["", "é", "="] and "".join(cut) == "é=�"


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


def panels_of(figure):
    return [axis for axis in figure.axes if axis.get_title(loc="left")]


def faces(axis):
    """Colours of the tokens, without the frames."""
    return [patch.get_facecolor() for patch in axis.patches if patch.get_fill()]


@pytest.mark.parametrize("device", DEVICES)
def test_the_picture_has_three_panels(tmp_path, device):
    rollout = credited(*TWO, baseline="group_mean", device=device)
    figure = rollout.plot(tmp_path / "group.png")
    assert (tmp_path / "group.png").read_bytes()[:4] == figure._repr_png_()[:4] == b"\x89PNG"  # as a notebook shows it
    energy, advantage, group_mean = panels_of(figure)
    titles = [axis.get_title(loc="left") for axis in (energy, advantage, group_mean)]
    starts = ["Energy", "Advantage under the baseline of the run", "Advantage under the group mean, as GRPO has it"]
    assert all(title.startswith(start) for title, start in zip(titles, starts, strict=True))
    for axis in (energy, advantage, group_mean):
        assert [text.get_text() for text in axis.texts] == list("abcdefg")
        assert [text.get_text() for text in axis.get_yticklabels()] == ["reward 1", "reward 0"]
        grey = [place for place, face in enumerate(faces(axis)) if face[:3] == (0.88, 0.88, 0.88)]
        assert grey == [2, 3]
        (frame,) = (patch for patch in axis.patches if not patch.get_fill())
        assert frame.get_x() < axis.texts[4].get_position()[0] < frame.get_x() + frame.get_width()  # on "e"
    assert faces(advantage) == faces(group_mean) and faces(advantage) != faces(energy)
    (red, _, blue, _), (other_red, _, other_blue, _) = faces(advantage)[0], faces(advantage)[5]
    assert blue > red and other_red > other_blue
    assert len(figure.axes) == 3 + 2  # a bar of colours for energies, and one for both advantages
    _, advantage, group_mean = panels_of(replace(rollout, group_mean_advantages=2 * rollout.advantages).plot())
    assert faces(advantage)[0] != faces(group_mean)[0]  # by the same scale


def test_long_completions_wrap():
    energy, *_ = panels_of(credited(["x" * 130, "y"], [1.0, 0.0]).plot(max_tokens=130))
    lines = {}
    for text in energy.texts:
        lines.setdefault(round(text.get_position()[1], 3), []).append(text.get_text())
    assert ["".join(line) for line in lines.values()] == ["x" * 60, "x" * 60, "x" * 10, "y"]
    assert [label.get_text() for label in energy.get_yticklabels()] == ["reward 1", "reward 0"]
    assert max(text.get_position()[0] for text in energy.texts) <= energy.get_xlim()[1]


def test_picture_names_what_is_missing():
    figure = credited(["x" * 130, "y", "z", "!"], [1.0, 0.0, 0.5, 0.0], n=4).plot(max_completions=2)
    (note,), (other,) = ([text.get_text() for text in of.texts] for of in (figure, credited().plot()))
    assert "only the first 100 tokens" in note and "2 of 4 completions" in note
    assert len(panels_of(figure)[0].texts) == 101
    assert "first" not in other and "completions" not in other


def test_dollars_are_no_formula(tmp_path):
    """As matplotlib reads text between two."""
    tokenizer = SimpleNamespace(decode=lambda ids, **kwargs: r"$\frac{$" * len(ids))
    credited(processing_class=tokenizer).plot(tmp_path / "group.pdf")


def test_only_what_is_there_is_drawn():
    rollout = rollout_of()
    with pytest.raises(ValueError, match="neither energies nor advantages"):
        rollout.plot()
    rollout = replace(rollout, energy=energies(rollout).bfloat16())
    (panel,) = panels_of(rollout.plot(prompt=1))
    assert panel.get_yticklabels()[0].get_text() == "no reward"


@pytest.mark.parametrize("prompt", [2, -1])
def test_a_prompt_that_is_not_there(prompt):
    with pytest.raises(IndexError, match=rf"`prompt` is {prompt}: this rollout has prompts 0 to 1\."):
        credited().show(prompt)
