"""The first blocks of a language model: its tokens and weights are kept, and a run that was stopped goes on."""

import json
import random
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from recipes import toy
from recipes.studies import blocks, learning_curves, tasks
from recipes.studies.learning_curves import Run, Schedule
from tests.helpers import tiny


def test_columns_are_added_with_carries():
    assert blocks.columns(75, 48, None) == "5+8+0=13\n7+4+1=12\n0+0+1=1\n0+0+0=0\n0+0+0=0\n0+0+0=0"
    question, answer, _ = blocks.columns_problem(random.Random(1))
    a, b = map(int, question.removesuffix(":").split("+"))
    digits = [line.rpartition("=")[2][-1] for line in answer.split("\n")]
    assert int("".join(reversed(digits))) == (a + b) % 10**blocks.DIGITS
    assert blocks.all_right([answer + "\n", answer[:-1], ""], [answer] * 3) == [1.0, 0.0, 0.0]


def test_counting_goes_on_from_what_stands_there():
    answer = blocks.counting(9990, 4, None)
    assert answer.split("\n")[:4] == ["9990+4=9994", "9994+4=9998", "9998+4=0002", "0002+4=0006"]
    assert len(answer.split("\n")) == blocks.LINES
    slipped = answer.replace("9998+4=0002", "9998+4=0001")
    assert blocks.lines_right([answer + "\n", slipped, ""], [answer] * 3) == [1.0, 1 - 1 / blocks.LINES, 0.0]


def test_sorting_takes_ten_rounds_and_rewards_the_last_line():
    answer = blocks.sorting([9, 8, 7, 6, 5, 4, 3, 2, 1, 0], None)
    assert answer.startswith("8967452301\n8694725031\n") and answer.endswith("\n0123456789")
    assert len(answer.split("\n")) == blocks.PLACES
    assert blocks.last_right([answer + "\n", answer[:-1], "", "0123456789"], [answer] * 4) == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("kind", blocks.KINDS)
def test_the_pupil_is_right_in_four_to_six_of_ten(kind):
    rows = blocks.problems(kind, 2000, seed=0)
    attempts, answers = ([row[name] for row in rows] for name in ("attempt", "answer"))
    assert 0.35 < sum(blocks.KINDS[kind].reward(attempts, answers)) / 2000 < 0.6
    assert len({row["prompt"] for row in rows}) == 2000


@pytest.fixture
def whole(tmp_path, monkeypatch):
    """A tiny model in the place of SmolLM2, whose tokenizer merges some digits."""
    folder = tmp_path / "model"
    tiny.save_model(folder)
    data = json.loads(Tokenizer.from_file(str(folder / "tokenizer.json")).to_str())
    vocabulary, merges = data["model"]["vocab"], [["1", "2"], ["12", "4"], ["a", "b"]]
    del vocabulary["!"], vocabulary["?"], vocabulary["~"]  # whose rows they take
    free = sorted({*range(256)} - {*vocabulary.values()})
    vocabulary |= {"".join(pair): i for pair, i in zip(merges, free, strict=True)}
    data["model"]["merges"] = merges
    Tokenizer.from_str(json.dumps(data)).save(str(folder / "tokenizer.json"))
    monkeypatch.setattr(toy, "smollm2", lambda: folder)
    monkeypatch.setitem(blocks.SIZES, "blocks", replace(blocks.SIZES["blocks"], blocks=1, steps=5))
    return folder


def test_cut_model_reads_its_texts_as_the_whole_one(whole):
    texts = ["124+12=24", "1=2\n"]
    model, tokenizer = blocks.cut(texts, 1)
    before = AutoTokenizer.from_pretrained(whole)
    assert [tokenizer.tokenize(text) for text in texts] == [before.tokenize(text) for text in texts]
    assert "124" in tokenizer.get_vocab() and not {"ab", "3"} & {*tokenizer.get_vocab()} and len(tokenizer) < 20
    entire = AutoModelForCausalLM.from_pretrained(whole)
    entire.model.layers = entire.model.layers[:1]
    ids = torch.tensor([tokenizer(texts[0])["input_ids"]]), torch.tensor([before(texts[0])["input_ids"]])
    states = [of.model(some).last_hidden_state for of, some in zip((model, entire), ids, strict=True)]
    torch.testing.assert_close(*states)
    assert tokenizer.decode(ids[0][0]) == texts[0] and model.config.eos_token_id == tokenizer.eos_token_id


class StopsAt(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_stopped_run_goes_on(whole, tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_OTB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(blocks.KINDS, "columns", replace(blocks.KINDS["columns"], tokens=4))
    schedule = Schedule({4: 3}, (1e-3,), held_out_samples=1, completions=8, parts=2)
    monkeypatch.setattr(learning_curves, "TASKS", {"blocks_columns": schedule})
    run, make = Run("blocks_columns", "value", 4, 1e-3, 1), tasks.trainer_of
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(tasks, "trainer_of", lambda *args, **of: make(*args, **of, callbacks=[StopsAt()]))
        learning_curves.perform([run], tmp_path)
    assert (tmp_path / run.name / "checkpoint-2").is_dir() and not (tmp_path / f"{run.name}.json").exists()
    learning_curves.perform([run], tmp_path)
    found = json.loads((tmp_path / f"{run.name}.json").read_text())
    assert len(found["reward"]) == len(found["tokens"]) == len(found["explained"]) == 3
    assert 0 < found["tokens"][0] < found["tokens"][1] < found["tokens"][2] <= 96 and not (tmp_path / run.name).exists()
    (row,) = learning_curves.saved(tmp_path, "blocks_columns")
    assert row["release"] and {*row["steps"]} >= {"reward", "tokens", "grad_norm"}
    # What another run has learned of the policy, which it does not change, is there from the first step on
    learned, begun = replace(run, baseline="value_learned"), []
    monkeypatch.setattr(tasks, "trainer_of", lambda *args, **of: begun.append(make(*args, **of)) or begun[-1])
    learning_curves.perform([learned], tmp_path)
    teacher, pupil = begun
    assert teacher.args.learning_rate == 0 and pupil.args.learning_rate == 1e-3
    state = torch.load(tmp_path / "blocks_columns-n4.pt")
    assert state["baseline"] == "value" and pupil.baseline.state_dict()["state"].keys() == state["state"].keys()


def test_processes_share_the_runs(tmp_path, monkeypatch):
    started, performed = [], []

    class Process:
        def __init__(self, command):
            started.append(command)

        def wait(self):
            return 0

    monkeypatch.setitem(sys.modules, "recipes.studies.value", ModuleType("unused"))  # which registers baselines
    monkeypatch.setattr(learning_curves.subprocess, "Popen", Process)
    monkeypatch.setattr(learning_curves, "perform", lambda runs, folder: performed.extend(runs))
    flags = ["--task", "lake_6", "--seeds", "1", "--processes", "3", "--publish", "--output_dir", str(tmp_path)]
    with pytest.raises(SystemExit):  # since nothing was saved
        learning_curves.main(flags)
    assert len(started) == 2 and len(performed) == 3
    assert started[0][-2:] == ["--processes", "1"] and "--publish" not in started[0]
