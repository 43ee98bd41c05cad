"""Held-out accuracy: its arithmetic, which samples count, and that measuring changes nothing."""

import json
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from recipes.common import held_out
from recipes.common.held_out import HeldOut, accuracy, transcript
from tests.recipes.conftest import log_of, result_of


def test_accuracy_by_hand():
    result = accuracy({0: [1.0, 1.0], 1: [0.0, 1.0], 2: [0.0, 0.0]})
    # means 1, 1/2, 0: their mean is 1/2, their standard deviation 1/2, over √3 problems
    assert (result.mean, result.problems, result.samples) == (0.5, 3, 2)
    assert result.standard_error == pytest.approx(0.5 / 3**0.5)
    assert str(result) == "50.0 % ± 28.9 (avg@2, 3 problems)"


def test_one_held_out_problem_has_no_error(run):
    assert str(accuracy({0: [1.0, 0.0]})) == "50.0 % (avg@2, 1 problem)"
    folder = run("--num_held_out_problems", "1", "--max_steps", "1")
    written = (folder / "result.json").read_text()
    result = json.loads(written, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert result["after"]["standard_error"] is None and result["after"]["problems"] == 1


def measure_with(rows=3):
    measure = HeldOut()
    measure.numbered(Dataset.from_list([{"question": f"q{i}", "answer": str(i)} for i in range(rows)]))
    return measure


ARGS = SimpleNamespace(num_generations=8, num_generations_eval=2)
STATE = SimpleNamespace(global_step=0)


def test_repeats_of_several_processes_do_not_count(monkeypatch):
    """Three problems by 2 on two processes of 4 rows: the second is filled up with the first problem again."""
    processes = []
    for problems, scores in (([0, 0, 1, 1], [1, 0, 1, 1]), ([2, 2, 0, 0], [0, 0, 1, 1])):
        measure = measure_with()
        reward = measure.counted(lambda completions, scores=scores, **kwargs: scores)
        reward(completions=list("abcd"), completion_ids=[[1]] * 4, held_out=problems)
        processes.append(measure._samples)
    monkeypatch.setattr(held_out, "gather_object", lambda samples: processes[0] + processes[1])
    measure.on_evaluate(ARGS, STATE, None)
    (evaluation,) = measure.evaluations
    assert evaluation.mean == pytest.approx((0.5 + 1 + 0) / 3)
    assert (evaluation.problems, evaluation.samples) == (3, 2)
    assert [answer["said"] for answer in measure.answers["before"]] == ["a", "c", "a"]


def test_training_counts_tokens_and_no_scores():
    measure = measure_with()
    reward = measure.counted(lambda completions, **kwargs: [1.0] * len(completions))
    assert reward(completions=["a", "b"], completion_ids=[[1, 2], [3]]) == [1.0, 1.0]
    assert measure.tokens_generated == 3 and measure._samples == []
    assert reward.__name__ == "<lambda>"


def test_rewards_of_turns_and_none_are_numbers_too():
    assert [held_out._number(score) for score in (1, None, [0.5, 0.25], torch.tensor(2.0))] == [1.0, 0.0, 0.75, 2.0]


def test_answers_before_and_after():
    measure = measure_with()
    for said in ("early", "middle", "late"):
        measure.counted(lambda completions, **kwargs: [1.0] * 6)(
            completions=[f"{said}{i}" for i in range(6)], completion_ids=[[1]] * 6, held_out=[0, 0, 1, 1, 2, 2]
        )
        measure.on_evaluate(ARGS, STATE, None)
    first = measure.examples()[0]
    assert first["question"] == "q0" and first["before"]["said"] == "early0" and first["after"]["said"] == "late0"


def test_a_conversation_is_written_as_one_reads_it():
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "1+1"}}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "=2"},
    ]
    assert transcript(messages) == "calculator(1+1) → 2 =2" and transcript("5") == "5"


@pytest.mark.slow
def test_evaluating_more_often_does_not_change_a_run(run):
    rare = run(output="rare")
    often = run("--eval_strategy", "steps", "--eval_steps", "1", output="often")
    weights, same = (load_file(folder / "model.safetensors") for folder in (rare, often))
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert [e["step"] for e in result_of(rare)["evaluations"]] == [0, 4]
    assert [e["step"] for e in result_of(often)["evaluations"]] == [0, 1, 2, 3, 4]
    assert result_of(rare)["after"] == result_of(often)["after"]


def test_each_problem_is_counted_as_often_as_asked_for(run):
    folder = run("--num_generations_eval", "5", "--per_device_eval_batch_size", "15", "--max_steps", "1")
    result = result_of(folder)
    assert result["after"]["samples"] == 5 and result["after"]["problems"] == result["before"]["problems"]
    evaluations = [h["eval_rewards/accuracy/mean"] for h in log_of(folder) if "eval_rewards/accuracy/mean" in h]
    assert len(evaluations) == 2
