"""A rollout for the eye: its repr, its table, its tokens in colours, its picture."""

import html.parser
import io
import math
import re
import sys

import pytest
import torch
from IPython.core.formatters import DisplayFormatter
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.helpers import tiny, tiny_vision
from tests.helpers.agents import AGENT
from tests.helpers.scripted import TOOLS, TURNS, script_turns
from trl_otb import OTBGRPOTrainer
from trl_otb.credit import credit, set_energies
from trl_otb.display import colours
from trl_otb.display.group import token_texts, visible
from trl_otb.rollout import Rollout


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Two prompts with two completions each; [ ] is tool output
TEXTS = ["ab[cd]e", "fg", "<b>&", "hi[j]kl[m]n"]
REWARDS = [1.0, 0.0, math.nan, 0.5]


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
    tensors = {
        "prompt_ids": prompts,
        "prompt_mask": (prompts != tokenizer.pad_token_id).long(),
        "completion_ids": padded,
        "completion_mask": completion_mask,
        "mask": mask,
        "rewards": torch.tensor(rewards),
        "scale": torch.ones(len(texts)),
    }
    fields = {"processing_class": tokenizer} | fields
    return Rollout(**{key: value.to(device) for key, value in tensors.items()}, num_generations=n, **fields)


def energies(rollout):
    """0, 0.1, 0.2, … in reading order, at most 0.9; the first row's fifth token, if it has one, is improbable."""
    values = torch.arange(rollout.mask.numel()).view(rollout.mask.shape) / 10
    values = values.clamp(max=0.9)
    values[0, 4:5] = 1.5
    return values.to(rollout.mask.device)


def credited(rollout=None, baseline="otb", rows=None):
    rollout = rollout_of() if rollout is None else rollout
    energy = energies(rollout)
    options = {"baseline": baseline, "alignment": "generated", "zero_tail": True, "leave_one_out": False}
    rows = slice(None) if rows is None else rows
    set_energies(rollout, energy[rows], rows=rows)
    credit(rollout, rows, **options)
    return rollout


# The mapping and the repr


def test_before_the_first_rollout_a_key_error_says_so(train):
    trainer = train(train=False)
    with pytest.raises(KeyError, match=r"'train'.*no such rollout yet\. Call trainer\.train\(\) first"):
        trainer.rollouts["train"]
    with pytest.raises(KeyError, match=r"'eval'.*Call trainer\.evaluate\(\) first"):
        trainer.rollouts["eval"]
    with pytest.raises(KeyError, match=r"'test'.*kept for 'train' and 'eval'"):
        trainer.rollouts["test"]
    assert "train" not in trainer.rollouts


@pytest.mark.parametrize("device", DEVICES)
def test_the_repr_says_how_much_there_is_and_what_has_come(device):
    rollout = rollout_of(device=device)
    first = "Rollout of 2 prompts, N = 2: 4 completions, 14 tokens, and 4 of tools\n"
    rewards = "rewards: mean 0.5, one per completion; 1 completion without\n"
    last = "\nsee show(prompt=0), plot(path), to_pandas()"
    assert repr(rollout) == f"{first}{rewards}energies: not yet\nadvantages: not yet{last}"
    credited(rollout, rows=slice(0, 2))
    waiting = "of 2 of 4 completions so far"
    assert repr(rollout) == f"{first}{rewards}energies: {waiting}\nadvantages: per token, {waiting}{last}"
    for baseline, kind in (("otb", "per token"), ("rloo", "per completion")):
        rollout = credited(rollout_of(device=device), baseline)
        every = "of all completions"
        assert repr(rollout) == f"{first}{rewards}energies: {every}\nadvantages: {kind}, {every}{last}"
    rollout = rollout_of(["ab"], [[0.5, 0.25, 0.0]], n=1)
    assert repr(rollout).startswith(
        "Rollout of 1 prompt, N = 1: 1 completions, 2 tokens\nrewards: mean 0.75, one per token\n"
    )


# The table


@pytest.mark.parametrize("device", DEVICES)
def test_the_table_has_a_row_for_each_generated_token(device):
    rollout = credited(rollout_of(device=device))
    table = rollout.to_pandas()
    assert "".join(table.text) == "abefg<b>&hikln"
    assert table.prompt.tolist() == [0] * 5 + [1] * 9
    assert table.completion.tolist() == [0, 0, 0, 1, 1] + [0] * 4 + [1] * 5
    assert table.turn.tolist() == [0, 0, 1, 0, 0] + [0] * 4 + [0, 0, 1, 1, 2]
    assert table.position.tolist() == [0, 1, 4, 0, 1, 0, 1, 2, 3, 0, 1, 3, 4, 6]
    assert table.token_id.tolist() == tiny.tokenizer()("abefg<b>&hikln")["input_ids"]
    assert table.reward.iloc[:5].tolist() == [1, 1, 1, 0, 0] and table.reward.iloc[5:9].isna().all()
    row = 2 * table.prompt + table.completion
    for name, values in {
        "energy": rollout.energy,
        "baseline": rollout.baselines,
        "advantage": rollout.advantages,
        "group_mean_advantage": rollout.group_mean_advantages.expand(rollout.mask.shape),
    }.items():
        assert table[name].tolist() == [values[r, p].item() for r, p in zip(row, table.position, strict=True)], name
    assert table.advantage.nunique() > 4  # differs between tokens


def test_the_table_under_a_baseline_per_completion():
    table = credited(rollout_of(rewards=[1.0, 0.0, 0.25, 0.75]), "group_mean").to_pandas()
    assert table.baseline.tolist() == [0.5] * 14
    assert table.advantage.tolist() == [0.5] * 3 + [-0.5] * 2 + [-0.25] * 4 + [0.25] * 5
    assert table.advantage.equals(table.group_mean_advantage)


def test_the_table_with_rewards_per_token():
    rewards = torch.zeros(4, 8)
    rewards[0, 1], rewards[0, 4], rewards[1, 0] = 0.5, 0.25, -1.0
    table = credited(rollout_of(rewards=rewards.tolist())).to_pandas()
    assert table.reward.tolist() == [0.75] * 3 + [-1.0] * 2 + [0.0] * 9  # the completion's, on each of its tokens
    assert (table.advantage + table.baseline).tolist()[:5] == pytest.approx([0.75, 0.75, 0.25, -1.0, 0.0])  # to go


def test_the_table_before_energies_and_while_some_are_missing():
    values = ["energy", "baseline", "advantage", "group_mean_advantage"]
    assert rollout_of().to_pandas()[values].isna().all().all()
    table = credited(rows=slice(0, 2)).to_pandas()
    assert table[values].iloc[:5].notna().all().all() and table[values].iloc[5:].isna().all().all()


def test_the_table_without_a_tokenizer_and_with_another():
    rollout = rollout_of(processing_class=None)
    assert rollout.to_pandas().text.isna().all() and len(rollout.to_pandas()) == 14
    assert "".join(rollout.to_pandas(tiny.tokenizer()).text) == "abefg<b>&hikln"
    for layout in tiny_vision.LAYOUTS:  # processors
        assert "".join(rollout.to_pandas(tiny_vision.processor(layout)).text) == "abefg<b>&hikln"


def test_the_table_of_one_prompt():
    rollout = credited()
    whole, second = rollout.to_pandas(), rollout.to_pandas(prompt=1)
    assert second.equals(whole[whole.prompt == 1].reset_index(drop=True))


def test_energies_in_bfloat16_can_be_read():
    rollout = rollout_of()
    set_energies(rollout, energies(rollout).bfloat16())
    assert rollout.to_pandas().energy.iloc[2] == 1.5


def test_a_group_that_begins_on_another_process():
    """Rows 2 to 5 of groups of four: the rest of one, then two of the next."""
    rollout = rollout_of(n=4, first_row=2)
    table = rollout.to_pandas().groupby(["prompt", "completion"]).size()
    assert table.to_dict() == {(0, 2): 3, (0, 3): 2, (1, 0): 4, (1, 1): 5}
    assert "Rollout of 2 prompts, N = 4" in repr(rollout)


def test_what_a_trainer_with_tools_leaves(train, monkeypatch, capsys):
    script_turns(monkeypatch)
    trainer = train(OTBGRPOTrainer, reward_funcs=tiny.even_bytes, tools=TOOLS, **AGENT)
    rollout = trainer.rollouts["train"]
    table = rollout.to_pandas()
    assert len(table) == rollout.mask.sum()
    said = {0: TURNS[0], 1: TURNS[1], 7: TURNS[7]}
    for row, turns in said.items():
        of_row = table[table.completion == row]
        assert of_row.turn.max() == len(turns) - 1
        of_turns = [f"{turn}<|im_end|>" for turn in turns]
        of_turns[0] = f"@{row} {of_turns[0]}"
        assert of_row.groupby("turn").text.apply("".join).tolist() == of_turns
    assert table.notna().all().all() and table.prompt.eq(0).all()
    trainer.rollouts["train"].show()  # the tokenizer is known
    assert "@1 = 5, said at once" in re.sub("[‹›]", "", capsys.readouterr().out)
    assert rollout.processing_class is trainer.processing_class


# Text


def test_tokens_that_are_part_of_a_character():
    tokenizer = tiny.tokenizer()
    text = "é=漢!"
    texts = token_texts(tokenizer(text)["input_ids"], tokenizer)
    assert texts == ["", "é", "=", "", "", "漢", "!"]
    cut = token_texts(tokenizer(text)["input_ids"][:4], tokenizer)
    assert cut[:3] == ["", "é", "="] and "".join(cut) == "é=�"


def test_the_space_before_a_word_belongs_to_its_token():
    """A decoder that drops it where a text begins, as SentencePiece's."""
    backend = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "c": 2, "<unk>": 3}, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer.decode([1]) == "b"
    assert token_texts([0, 1, 2, 1], tokenizer) == ["a", " b", "c", " b"]


def test_what_cannot_be_printed_is_escaped():
    assert visible("a\n\tb\x1b[31m\u202e") == "a↵⇥b\\x1b[31m\\u202e" and visible("") == "·"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(monkeypatch, rollout, out=None, **options):
    out = Terminal() if out is None else out
    monkeypatch.setattr(sys, "stdout", out)
    rollout.show(**options)
    return out.getvalue()


def test_in_a_terminal_tokens_are_coloured(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    rollout = credited(rollout_of(["ab[cd]e", "fg"], [1.0, 0.0]), "group_mean")
    text = shown(monkeypatch, rollout)
    blue, red, grey = "\x1b[48;5;33;38;5;16m{}\x1b[0m", "\x1b[48;5;196;38;5;16m{}\x1b[0m", "\x1b[38;5;245m{}\x1b[0m"
    first = "".join([blue.format("a"), blue.format("b"), grey.format("c"), grey.format("d")])
    improbable = "\x1b[48;5;33;38;5;16;4me\x1b[0m"
    assert (
        f"completion 0, reward 1, energy 1.60, advantage 0.50, the group mean's advantage 0.50\n{first}{improbable}\n"
        in text
    )
    assert red.format("f") + red.format("g") in text
    text = shown(monkeypatch, rollout, value="energy")
    assert "\na\x1b[48;5;230;38;5;16mb" not in text and "\nab" in text and "48;5;208;38;5;16;4me" in text
    assert "show(value='advantage' or 'group_mean_advantage')" in text


def test_no_colours_where_they_are_not_wanted(monkeypatch):
    rollout = credited()
    plain = shown(monkeypatch, rollout, io.StringIO())
    assert "\x1b" not in plain and "Prompt 0: 1+1=" in plain and "\nab[cd]‹e›\n" in plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(monkeypatch, rollout) == plain
    monkeypatch.setenv("NO_COLOR", "")  # empty counts as unset, no-color.org
    assert "\x1b" in shown(monkeypatch, rollout)


def test_a_completion_cannot_steer_the_terminal(monkeypatch):
    text = shown(monkeypatch, credited(rollout_of(["a\x1bc", "d"], [1.0, 0.0])), io.StringIO())
    assert "\x1b" not in text and "a\\x1bc" in text


def test_show_without_energies_or_rewards(monkeypatch):
    text = shown(monkeypatch, rollout_of(), prompt=1)
    assert "completion 0, no reward\n<b>&" in text and "hi\x1b[38;5;245mj\x1b[0mkl" in text
    assert "coloured by" not in text


def test_show_says_how_much_it_leaves_out(monkeypatch):
    text = shown(monkeypatch, rollout_of(), io.StringIO(), max_tokens=2)
    assert "\nab … 3 more tokens\n" in text and text.endswith("\nfg\n")


# HTML


class Page(html.parser.HTMLParser):
    """What a browser would make of it: tags that match, their attributes, and the text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag != "input":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1], data))

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(monkeypatch, rollout, **options):
    found = []
    monkeypatch.setattr(colours, "in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", lambda data, raw: found.append(data))
    rollout.show(**options)
    ((data),) = found
    assert "\x1b" not in data["text/plain"]
    return data["text/html"]


def test_the_page_has_a_switch_and_needs_nothing_else(monkeypatch):
    rollout = credited()
    text = page_of(monkeypatch, rollout)
    page = Page(text)
    assert {tag for tag, _ in page.tags} == {"div", "style", "p", "b", "input", "label", "span", "i"}
    assert "http" not in text and "url(" not in text and not any(a.startswith("on") for _, of in page.tags for a in of)
    ids = [of["id"] for of in page.all("input")]
    assert [i.split("-", 2)[2] for i in ids] == ["energy", "advantage", "group_mean_advantage"]
    assert [of["for"] for of in page.all("label")] == ids
    assert ["checked" in of for of in page.all("input")] == [False, True, False]
    (style,) = (data for tag, data in page.texts if tag == "style")
    for i in ids:  # each colours the tokens by its own values
        assert f"#{i}:checked~.c span{{background:var(--{i.split('-', 2)[2]})}}" in style
    assert {of["name"] for of in page.all("input")}.isdisjoint(
        of["name"] for of in Page(page_of(monkeypatch, rollout)).all("input")
    )  # or a second one would switch the first


def test_the_tokens_of_the_page(monkeypatch):
    rollout = credited(rollout_of(["ab[cd]e", "fg"], [1.0, 0.0]), "group_mean")
    page = Page(page_of(monkeypatch, rollout, value="energy"))
    assert "".join(data for tag, data in page.texts if tag == "i") == "cd"
    tokens = [of for of in page.all("span") if "title" in of]
    blue, red = "#2166acaa", "#c8202faa"
    assert [re.search(r"--advantage:(\S+?);", of["style"])[1] for of in tokens] == [blue] * 3 + [red] * 2
    assert tokens[2]["title"] == "energy 1.5, advantage 0.5, the group mean's advantage 0.5"
    assert "--energy:#e67e00aa" in tokens[2]["style"] and "--energy:#e67e0000" in tokens[0]["style"]
    assert [of.get("class") for of in tokens] == [None, None, "u", None, None]
    assert ["checked" in of for of in page.all("input")] == [True, False, False]


def test_text_of_the_page_is_escaped(monkeypatch):
    rollout = credited(rollout_of(["<b>&", "</div>\n<script>"], [1.0, 0.0]))
    page = Page(page_of(monkeypatch, rollout))
    assert page.all("script") == []
    tokens = "".join(data for tag, data in page.texts if tag == "span" and "\xa0" not in data)
    assert tokens == "<b>&</div>↵\n<script>"


def test_both_advantages_have_one_scale(monkeypatch):
    rollout = credited(rollout_of(["ab", "cd"], [1.0, 0.0]))
    rollout.group_mean_advantages = torch.tensor([[2.0], [-0.5]])
    text = page_of(monkeypatch, rollout)
    assert "--group_mean_advantage:#2166acaa" in text
    strongest = max(int(a, 16) for a in re.findall(r"--advantage:#\w{6}(\w\w)", text))
    assert strongest == round(170 * rollout.advantages.abs().max().item() / 2)


# The picture


def panels_of(figure):
    return [axis for axis in figure.axes if axis.get_title(loc="left")]


def faces(axis):
    """Colours of the tokens, without the frames."""
    return [patch.get_facecolor() for patch in axis.patches if patch.get_fill()]


def test_the_picture_has_three_panels(tmp_path):
    rollout = credited(rollout_of(["ab[cd]e", "fg"], [1.0, 0.0]), "group_mean")
    figure = rollout.plot(tmp_path / "group.png")
    assert (tmp_path / "group.png").read_bytes().startswith(b"\x89PNG")
    energy, advantage, group_mean = panels_of(figure)
    assert [axis.get_title(loc="left").split(":")[0].split(" (")[0] for axis in (energy, advantage, group_mean)] == [
        "Energy",
        "Advantage under the baseline of the run",
        "Advantage under the group mean, as GRPO has it",
    ]
    for axis in (energy, advantage, group_mean):
        assert [text.get_text() for text in axis.texts] == list("abcdefg")
        assert [text.get_text() for text in axis.get_yticklabels()] == ["reward 1", "reward 0"]
        grey = [place for place, face in enumerate(faces(axis)) if face[:3] == (0.88, 0.88, 0.88)]
        assert grey == [2, 3]
        (frame,) = (patch for patch in axis.patches if not patch.get_fill())
        assert frame.get_x() < axis.texts[4].get_position()[0] < frame.get_x() + frame.get_width()  # on "e"
    assert faces(advantage) == faces(group_mean) and faces(advantage) != faces(energy)
    red, _, blue, _ = faces(advantage)[0]
    assert blue > red
    red, _, blue, _ = faces(advantage)[5]
    assert red > blue
    assert len(figure.axes) == 3 + 2  # a bar of colours for energies, and one for both advantages


def test_a_notebook_shows_the_picture():
    """Though nobody has imported pyplot."""
    found, _ = DisplayFormatter().format(credited().plot())
    assert found["image/png"].startswith(b"\x89PNG")


def test_the_advantage_panels_share_their_scale():
    rollout = credited(rollout_of(["ab", "cd"], [1.0, 0.0]), "group_mean")
    rollout.group_mean_advantages = 2 * rollout.advantages
    _, advantage, group_mean = panels_of(rollout.plot())
    assert faces(advantage)[0] != faces(group_mean)[0]
    rollout.advantages = 2 * rollout.advantages
    _, advantage, group_mean = panels_of(rollout.plot())
    assert faces(advantage) == faces(group_mean)


def test_long_completions_go_on_in_the_next_line():
    rollout = credited(rollout_of(["x" * 130, "y"], [1.0, 0.0]))
    energy, *_ = panels_of(rollout.plot(max_tokens=130))
    lines = {}
    for text in energy.texts:
        lines.setdefault(round(text.get_position()[1], 3), []).append(text.get_text())
    assert ["".join(line) for line in lines.values()] == ["x" * 60, "x" * 60, "x" * 10, "y"]
    assert [label.get_text() for label in energy.get_yticklabels()] == ["reward 1", "reward 0"]
    assert max(text.get_position()[0] for text in energy.texts) <= energy.get_xlim()[1]


def test_the_picture_says_what_it_leaves_out():
    figure = credited(rollout_of(["x" * 130, "y", "z", "!"], [1.0, 0.0, 0.5, 0.0], n=4)).plot(max_completions=2)
    (note,) = (text.get_text() for text in figure.texts)
    assert "only the first 100 tokens" in note and "2 of 4 completions" in note
    assert len(panels_of(figure)[0].texts) == 101
    (note,) = (text.get_text() for text in credited().plot().texts)
    assert "first" not in note and "completions" not in note


def test_dollars_are_no_formula(tmp_path):
    rollout = credited(rollout_of([r"$\frac{$", "_^$"], [1.0, 0.0]))
    rollout.processing_class = OneWord()
    rollout.plot(tmp_path / "group.pdf")


class OneWord:
    """A tokenizer whose every token is what matplotlib would fail to read as a formula."""

    def decode(self, ids, **kwargs):
        return r"$\frac{$" * len(ids)


def test_the_picture_without_advantages_has_one_panel():
    rollout = rollout_of()
    set_energies(rollout, energies(rollout))
    (panel,) = panels_of(rollout.plot(prompt=1))
    assert panel.get_yticklabels()[0].get_text() == "no reward"
    with pytest.raises(ValueError, match="neither energies nor advantages yet"):
        rollout_of().plot()


@pytest.mark.gpu
def test_on_a_gpu(capsys):
    rollout = credited(rollout_of(device="cuda"), rows=slice(0, 2))
    rollout.show()
    assert "ab[cd]‹e›" in capsys.readouterr().out
    assert len(panels_of(rollout.plot())) == 3


# Errors


@pytest.mark.parametrize("prompt", [2, -1, "a"])
@pytest.mark.parametrize("method", ["show", "plot", "to_pandas"])
def test_a_prompt_that_is_not_there(method, prompt):
    with pytest.raises(IndexError, match=rf"`prompt` is {prompt!r}.* has 2 prompts: numbers 0 to 1\."):
        getattr(credited(), method)(prompt=prompt)


def test_the_only_prompt():
    with pytest.raises(IndexError, match=r"`prompt` is 1.* has 1 prompt: number 0 alone\."):
        rollout_of(["a", "b"], [0.0, 1.0]).show(prompt=1)


def test_values_that_are_not_there():
    with pytest.raises(ValueError, match="`value` is 'energies'.* by 'energy', 'advantage', 'group_mean_advantage'"):
        credited().show(value="energies")
    rollout = rollout_of()
    set_energies(rollout, energies(rollout))
    with pytest.raises(ValueError, match="`value` is 'advantage'.* not available yet: this group has 'energy'"):
        rollout.show(value="advantage")


@pytest.mark.parametrize(
    ("method", "limit"), [("show", "max_tokens"), ("plot", "max_tokens"), ("plot", "max_completions")]
)
def test_limits_below_one(method, limit):
    with pytest.raises(ValueError, match=f"`{limit}` is 0: give 1 or more"):
        getattr(credited(), method)(**{limit: 0})


@pytest.mark.parametrize(
    ("method", "module", "package"),
    [("to_pandas", "pandas", "pandas"), ("plot", "matplotlib.figure", "matplotlib")],
)
def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch, method, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"needs {package}, which is not installed: pip install {package}"):
        getattr(credited(), method)()
