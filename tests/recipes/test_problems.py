"""Where problems come from, how they are split, and which files are refused."""

import json
import os
from pathlib import Path

import pytest
from datasets import Dataset

from recipes.common.arguments import RecipeArguments
from recipes.common.checks import check_enough_problems
from recipes.common.errors import InputError
from recipes.common.grading import grade_mathematics
from recipes.common.models import with_prompts
from recipes.common.problems import Problems, load_problems
from tests.helpers import tiny
from tests.recipes.conftest import question_and_answer


def loaded_from(name, *, seed=0, **settings):
    return load_problems(RecipeArguments(dataset_name=str(name), **settings), seed)


def test_reasoning_gym_problems_are_held_out_the_same_for_every_seed():
    first, second = (loaded_from("reasoning_gym:chain_sum", num_train_problems=300, seed=s) for s in (0, 1))
    assert first.held_out["question"] == second.held_out["question"]
    assert first.train["question"] != second.train["question"]
    assert not set(first.train["question"]) & set(first.held_out["question"])
    row = first.held_out[0]
    assert first.grade(row["answer"], row["answer"], row["entry"]) == 1.0
    assert first.grade(row["answer"] + "1", row["answer"], row["entry"]) == 0.0


def test_a_task_that_grades_by_more_than_the_answer():
    """Any countdown expression that uses the numbers and reaches the target is right."""
    countdown = loaded_from("reasoning_gym:countdown", num_train_problems=2, num_held_out_problems=2)
    row = countdown.held_out[0]
    assert countdown.grade(row["answer"], row["answer"], row["entry"]) == 1.0
    assert countdown.grade("1", row["answer"], row["entry"]) == 0.0


def test_tasks_that_grade_by_structured_data_and_tasks_that_trip():
    arc = loaded_from("reasoning_gym:rearc", num_train_problems=2, num_held_out_problems=2)
    row = arc.held_out[0]
    assert arc.grade(row["answer"], row["answer"], row["entry"]) == 1.0  # its boards are tuples, unknown to JSON
    primes = loaded_from("reasoning_gym:prime_factorization", num_train_problems=2, num_held_out_problems=2)
    row = primes.held_out[0]
    assert primes.grade(row["answer"], row["answer"], row["entry"]) == 1.0
    assert primes.grade("no idea", row["answer"], row["entry"]) == 0.0  # the task itself raises


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".csv"])
def test_local_files(data_file, suffix):
    loaded = loaded_from(data_file(question_and_answer(), suffix))
    assert (len(loaded.train), len(loaded.held_out)) == (8, 2)
    assert sorted([*loaded.train["answer"], *loaded.held_out["answer"]], key=int) == [str(2 * i) for i in range(10)]
    assert loaded.grade is grade_mathematics


def test_so_many_problems_of_a_file_are_trained_on(data_file):
    path = data_file(question_and_answer())
    loaded = loaded_from(path, num_train_problems=3)
    assert (len(loaded.train), len(loaded.held_out)) == (3, 2)
    assert loaded.held_out["question"][:] == loaded_from(path).held_out["question"][:]


def test_columns_by_name_and_further_columns_for_a_reward(data_file):
    path = data_file([{"a": "1+1", "b": 2, "level": "easy"}, {"a": "2+2", "b": 4.5, "level": "hard"}])
    loaded = loaded_from(path, prompt_column="a", answer_column="b")
    assert {*loaded.train["answer"], *loaded.held_out["answer"]} == {"2.0", "4.5"}
    assert {*loaded.train["level"], *loaded.held_out["level"]} == {"easy", "hard"}


def test_a_question_asked_twice_stands_on_one_side(data_file):
    rows = question_and_answer(50)
    again = [{**row, "question": f"  {row['question']} "} for row in rows[:30]]
    loaded = loaded_from(data_file(rows + again))
    questions = [q.strip() for q in [*loaded.train["question"], *loaded.held_out["question"]]]
    assert len(set(questions)) == len(questions) == 50 and loaded.duplicates == 30
    assert "30 duplicates dropped" in str(loaded)


def test_conversations_keep_what_stands_before_the_question(data_file):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    other = [{"role": "user", "content": "2+2?"}]
    loaded = loaded_from(data_file([{"prompt": turns, "answer": "2"}, {"prompt": other, "answer": "4"}]))
    rows = {row["question"]: row for row in [*loaded.train, *loaded.held_out]}
    assert rows["1+1?"]["before"] == turns[:1]
    data = Dataset.from_list([rows["1+1?"]])
    assert with_prompts(data, tiny.tokenizer(), "Box it.")[0]["prompt"] == [
        turns[0],
        {"role": "user", "content": "1+1?\nBox it."},
    ]
    assert with_prompts(data, tiny.tokenizer(None), "Box it.")[0]["prompt"] == "Be brief.\n1+1?\nBox it.\n"
    with pytest.raises(InputError, match=r"row 0 .*must end with a user's message"):
        loaded_from(data_file([{"prompt": turns[:1], "answer": "2"}] * 2))


def test_a_messages_content_may_come_in_parts(data_file):
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]
    rows = [{"prompt": [{"role": "user", "content": parts}], "answer": "2"}]
    rows += [{"prompt": [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}], "answer": "4"}]
    loaded = loaded_from(data_file(rows))
    assert {*loaded.train["question"], *loaded.held_out["question"]} == {"1+1?", "2+2?"}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user", "content": None}], "row 0 .*no role, or content that is not text"),
        ([{"content": "1+1?"}], "row 0 .*no role, or content that is not text"),
        ([{"role": "system", "content": None}, {"role": "user", "content": "1?"}], "content that is not text"),
        ([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], "content that is not text"),
        ([{"role": "user", "content": ["1+1?"]}], "content that is not text"),
        ([{"role": "user", "content": " "}], "must end with a user's message"),
    ],
)
def test_messages_that_cannot_be_used(tmp_path, messages, message):
    rows = [{"prompt": messages, "answer": str(i)} for i in range(2)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match=message):
        loaded_from(tmp_path / "a.jsonl")


def written(tmp_path, name, text, encoding="utf-8"):
    (tmp_path / name).write_bytes(text.encode(encoding))
    return tmp_path / name


def answers_of(path, **settings):
    loaded = loaded_from(path, **settings)
    rows = [*loaded.train, *loaded.held_out]
    return {row["question"]: row["answer"] for row in rows}


def test_numbers_stay_what_they_are(tmp_path):
    csv = written(
        tmp_path, "a.csv", "question,answer,level\n01,0.00001,1\n2,007,2\n3,123456789012345678901234567890,3\n"
    )
    assert answers_of(csv) == {"01": "0.00001", "2": "007", "3": "123456789012345678901234567890"}
    assert loaded_from(csv).train.features["level"].dtype == "int64"
    renamed = written(tmp_path, "b.csv", "q,a\n1e3,1e-5\n2,1\n")
    assert answers_of(renamed, prompt_column="q", answer_column="a") == {"1e3": "1e-5", "2": "1"}
    jsonl = written(tmp_path, "a.jsonl", '{"question": "1", "answer": 0.00001}\n{"question": "2", "answer": 1e3}\n')
    assert answers_of(jsonl) == {"1": "0.00001", "2": "1000.0"}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "question,answer\nWhat is 1, 2?,3\nWhat is 2, 3?,4\n", "Quote fields that hold a comma"),
        ("a.csv", "question,answer\nWhat is 1, 2?,3\nWhat is 2?,4\n", "Quote fields that hold a comma"),
        ("a.csv", "question,answer\nWhat is 1?,3\nWhat is 2, 3?,4\n", "Expected 2 fields in line 3, saw 3"),
        ("a.csv", "question,answer\nWhat is 1?\nWhat is 2?,4\n", "row 0 .*'answer' holds nothing"),
        (
            "a.jsonl",
            '{"question": "1", "answer": 12345678901234567890123}\n' * 2,
            "row 0 .*too large.*write it as text",
        ),
        ("a.jsonl", '{"question": "1", "answer": 9007199254740993}\n{"question": "1", "answer": 0.5}', "too large"),
        ("a.jsonl", '{"question": "1", "answer": "so 5 ####"}\n' * 2, "row 0 .*'answer' holds nothing"),
    ],
)
def test_values_that_would_be_lost(tmp_path, name, text, message):
    with pytest.raises(InputError, match=message):
        loaded_from(written(tmp_path, name, text))


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.json"])
def test_latin_1_is_named(tmp_path, name):
    text = "question,answer\ngroß?,1\n" if name == "a.csv" else '{"question": "groß?", "answer": "1"}\n'
    with pytest.raises(InputError, match=f"{name} cannot be read: UnicodeDecodeError: .*Save it as UTF-8"):
        loaded_from(written(tmp_path, name, text, "latin-1"))


def test_a_files_name_is_no_pattern(tmp_path):
    written(tmp_path, "a1.csv", "question,answer\nwrong,1\nfile,2\n")
    assert set(answers_of(written(tmp_path, "a[1].csv", "question,answer\n1,1\n2,2\n"))) == {"1", "2"}


def test_new_data_with_an_old_time_is_new_data(tmp_path):
    path = written(tmp_path, "a.csv", "question,answer\n1,1\n2,2\n")
    then = path.stat().st_mtime_ns
    assert answers_of(path) == {"1": "1", "2": "2"}
    written(tmp_path, "a.csv", "question,answer\n3,3\n4,4\n")
    os.utime(path, ns=(then, then))
    assert answers_of(path) == {"3": "3", "4": "4"}


def test_columns_that_mean_something_to_trl_are_left_out_and_named(data_file, capsys):
    rows = [{"question": str(i), "answer": "1", "prompts": "x", "completion_ids": [1], "level": i} for i in range(3)]
    loaded = loaded_from(data_file(rows))
    assert "prompts" not in loaded.train.column_names and "level" in loaded.train.column_names
    assert "Note: rewards do not get the columns prompts, completion_ids" in capsys.readouterr().out


def test_an_answer_that_is_missing_in_data_of_ones_own():
    rows = Dataset.from_list([{"question": "1", "answer": "1"}, {"question": "2", "answer": None}])
    with pytest.raises(InputError, match="row 1 of mine: 'answer' holds nothing"):
        Problems(rows, rows, name="mine")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "reasoning_gym:chain_sums"}, "no task 'chain_sums'. Close to it: chain_sum"),
        ({"name": "reasoning_gym:chain_sum", "dataset_options": '{"terms": 3}'}, "does not take .*'terms'"),
        ({"name": "reasoning_gym:chain_sum", "dataset_options": '{"min_terms": 9}'}, "max_terms must be >= min_terms"),
        ({"name": "reasoning_gym:chain_sum", "dataset_options": "{terms}"}, "is '{terms}': it is not JSON"),
        ({"name": "reasoning_gym:chain_sum", "dataset_options": "[1]"}, "must be a JSON object"),
        ({"name": "absent.jsonl"}, "absent.jsonl does not exist"),
        ({"name": str(Path.cwd())}, "must be a file that ends in .jsonl"),
        ({"name": "nobody/has-this-dataset"}, "nobody/has-this-dataset cannot be read"),
        ({"name": "absent.jsonl", "dataset_options": '{"x": 1}'}, "`dataset_options` is for reasoning-gym tasks"),
    ],
)
def test_problems_that_cannot_be_had(arguments, message):
    with pytest.raises(InputError, match=message):
        loaded_from(**arguments)


@pytest.mark.parametrize(
    ("rows", "arguments", "message"),
    [
        (
            [{"question": "?", "reply": "!"}] * 2,
            {},
            "none of the columns answer, solution, target but question, reply",
        ),
        ([{"text": "?", "answer": "!"}] * 2, {}, "none of the columns prompt, question, problem but text, answer"),
        (question_and_answer(), {"answer_column": "solution"}, "`answer_column` is 'solution': the dataset has"),
        ([{"question": "?", "answer": "1"}, {"question": "?", "answer": None}], {}, "row 1 .*holds nothing"),
        ([{"question": "?", "answer": " "}], {}, "row 0 .*'answer' holds nothing"),
        ([{"question": "?", "answer": {"value": "12", "unit": None}}], {}, "row 0 .*holds a dict.*text or a number"),
        ([{"question": "?", "answer": ["12"]}], {}, "row 0 .*'answer' holds a list.*--answer_column"),
        ([{"question": "?", "answer": True}], {}, "row 0 .*'answer' holds a bool"),
        ([{"question": ["?"], "answer": "1"}], {}, "row 0 .*'question' holds a list.*--prompt_column"),
        ([{"question": "?", "answer": "1"}] * 9, {}, "has 9 rows, but only 1 different problem"),
    ],
)
def test_files_that_cannot_be_used(data_file, rows, arguments, message):
    with pytest.raises(InputError, match=message):
        loaded_from(data_file(rows), **arguments)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", ""),
        ("a.jsonl", "{not json\n"),
        ("a.json", "[]\n"),
        ("a.csv", "question,answer\n"),
        ("a.parquet", "x"),
    ],
)
def test_unreadable_and_empty_files(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=r"is empty|cannot be read|no rows"):
        loaded_from(str(tmp_path / name))


def test_an_empty_parquet_file(data_file, tmp_path):
    Dataset.from_dict({"question": [], "answer": []}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"no rows|cannot be read"):
        loaded_from(str(tmp_path / "a.parquet"))


def test_too_few_problems_for_a_batch():
    check_enough_problems(16, 128, 8)
    with pytest.raises(InputError, match=r"15 problems to train on.*needs 16.*at most 120 completions"):
        check_enough_problems(15, 128, 8)
