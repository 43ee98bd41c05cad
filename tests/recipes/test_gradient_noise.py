"""The gradient noise command line, as a user runs it, and its figures beside two other ways to measure them."""

import json
from pathlib import Path

import filelock
import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from recipes import gradient_noise as tool
from recipes.common.arguments import RecipeArguments
from recipes.common.errors import InputError
from recipes.common.models import with_prompts
from recipes.common.problems import Problems, load_problems
from recipes.toy import worked_sums
from tests.helpers import tiny
from tests.helpers.laboratory import moments as laboratory_moments
from tests.helpers.laboratory import pool_of
from tests.recipes.conftest import shortly_trained
from trl_otb import GradientNoiseCallback, OTBGRPOConfig, OTBGRPOTrainer, comparison
from trl_otb.baselines import compute_advantages
from trl_otb.comparison.efficiency import moments_of
from trl_otb.comparison.estimators import Estimator, Pool, estimators
from trl_otb.comparison.gradients import CompletionGradients, Projection
from trl_otb.comparison.moments import prompt_moments
from trl_otb.seam.sampling import left_as_it_was, sample_pool, single_rows


@pytest.fixture
def measure(short_policy, tmp_path):
    small = "--num_prompts 3 --completions_per_prompt 16 --group_sizes 4 --baselines otb --num_train_problems 20"

    def run(*flags):
        folder = tmp_path / "noise"
        basic = ["--model_name_or_path", str(short_policy), "--output_dir", str(folder), "--disable_tqdm", "1"]
        tool.main([*basic, *small.split(), *flags])
        return folder

    return run


def kept_in(folder):
    return [torch.load(path, weights_only=True) for path in sorted(folder.glob("prompt-*.pt"))]


def test_a_run_ends_in_a_verdict_a_table_and_a_picture_and_goes_on(measure, capsys):
    folder = measure()
    said = capsys.readouterr().out
    assert "otb, one left out" in said and "3 prompts, 16 completions each" in said and "more prompts, %" in said
    assert (folder / "noise.png").stat().st_size > 10_000 and "| `otb` |" in (folder / "table.md").read_text()
    assert len(json.loads((folder / "report.json").read_text())["comparisons"]) > 3
    files = sorted(folder.glob("prompt-*.pt"))
    before = [file.stat().st_mtime_ns for file in files]
    measure("--num_prompts", "4")
    assert [file.stat().st_mtime_ns for file in files] == before and len(kept_in(folder)) == 4
    said = capsys.readouterr().out
    assert "4 prompts, 16 completions each" in said
    (folder / "noise.png").unlink()
    tool.main(["--plot_only", "--output_dir", str(folder)])
    assert (folder / "noise.png").is_file() and capsys.readouterr().out.endswith(said[said.index("N = 4") :])
    tool.main(["--plot_only", "--output_dir", str(folder), "--prompts_per_batch", "3"])
    assert "Steps of 3 prompts" in capsys.readouterr().out
    with pytest.raises(InputError, match="plot_only` draws saved results, and --group_sizes would change nothing"):
        tool.main(["--plot_only", "--output_dir", str(folder), "--group_sizes", "8"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seed", "1"], "`seed` was 42 and is 1"),
        (["--top_p", "0.5"], "`top_p` was 1.0 and is 0.5"),
        (["--reward_weights", "2"], "`reward_weights` was null and is \\[2.0\\]"),
        (["--use_peft"], "`weights` was"),
    ],
)
def test_a_folder_that_was_measured_otherwise_is_refused(measure, flags, message):
    folder = measure()
    files = {file: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(InputError, match=message):
        measure(*flags)
    assert {file: file.read_bytes() for file in folder.iterdir()} == files


@pytest.mark.slow
def test_a_start_that_fails_takes_nothing(measure):
    with pytest.raises(InputError, match="nothing-has-this"):
        measure("--parameters", "nothing-has-this")
    folder = measure()  # which the failed start does not stand in the way of
    files = {file: file.read_bytes() for file in folder.glob("prompt-*")}
    with pytest.raises(InputError, match="nothing-has-this"):
        measure("--parameters", "nothing-has-this", "--overwrite")
    assert {file: file.read_bytes() for file in folder.glob("prompt-*")} == files
    measure("--completions_per_prompt", "20", "--overwrite")
    assert len(kept_in(folder)) == 3


@pytest.mark.parametrize("weight", [0, 1])
def test_a_grading_of_no_weight_is_not_asked(measure, tmp_path, monkeypatch, weight):
    (tmp_path / "in_turn.py").write_text("def in_turn(completions, **_): return [0, 1] * (len(completions) // 2)")
    problems = Dataset.from_list([{"question": f"{i}+1", "answer": "1"} for i in range(4)])
    graded = []
    data = Problems(problems, problems, grade=lambda *answer: graded.append(answer) or 1.0)
    monkeypatch.setattr(tool, "load_data", lambda *_: data)
    folder = measure("--reward_funcs", "in_turn:in_turn", "--reward_weights", str(weight), "1")
    assert [prompt["reward"] for prompt in kept_in(folder)] == [weight + 0.5] * 3 and len(graded) == weight * 48


def test_a_questions_duplicates_are_measured_once(measure, data_file):
    rows = [{"question": f"{i % 4}+{i % 4}", "answer": str(2 * (i % 4))} for i in range(12)]
    flags = ["--dataset_name", data_file(rows), "--num_held_out_problems", "1"]
    with pytest.raises(InputError, match="`num_prompts` is 4 and the training data has 3 different examples"):
        measure(*flags, "--num_prompts", "4")
    assert len(kept_in(measure(*flags))) == 3


@pytest.mark.slow
def test_a_run_with_lora_goes_on_in_the_same_adapter(measure, run):
    """Its random matrix decides the coordinates of gradients. The folder of a LoRA run can be measured too."""
    lora = ["--use_peft", "--lora_target_modules", "all-linear"]
    measure(*lora)
    folder = measure(*lora, "--num_prompts", "4")  # refused if a weight differed
    assert len(kept_in(folder)) == 4
    adapter = run(*lora, "--max_steps", "1", output="adapter")
    measure("--model_name_or_path", str(adapter), "--overwrite")
    assert len(kept_in(folder)) == 3


@pytest.mark.slow
def test_every_prompt_is_measured_once_though_the_run_was_stopped(measure, monkeypatch):
    original, calls = comparison.sample_pool, []

    def stopping(*args, **kwargs):
        calls.append(True)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(comparison, "sample_pool", stopping)
    with pytest.raises(KeyboardInterrupt, match="2 of 5 prompts are kept in .*; the same command continues"):
        measure("--num_prompts", "5")
    folder = measure("--num_prompts", "5")
    prompts = kept_in(folder)
    assert len({prompt["example"] for prompt in prompts}) == len(prompts) == 5 and len(calls) == 3 + 3
    truths = torch.stack([prompt["truth"].flatten() for prompt in prompts])
    assert len(truths.unique(dim=0)) == 5


def test_a_reward_that_fails_amid_a_measurement_says_what_is_kept(measure, tmp_path, caplog):
    (tmp_path / "failing.py").write_text(
        "calls = []\ndef failing(completions, **_):\n    calls.append(1)\n"
        "    if len(calls) == 2: raise ValueError('no answer from the judge')\n"
        "    return [len(calls) + i % 2 for i in range(len(completions))]\n"
    )
    with pytest.raises(InputError, match="no answer from the judge"):
        measure("--reward_funcs", "failing:failing")
    assert f"1 of 3 prompts are kept in {tmp_path / 'noise'}; the same command continues." in caplog.text
    assert len(kept_in(measure("--reward_funcs", "failing:failing"))) == 3


def test_one_process_measures_into_a_folder(measure, tmp_path, monkeypatch):
    """The second is refused before it loads a model."""
    monkeypatch.setattr(tool, "trainer_of", lambda *_: pytest.fail("a model was loaded"))
    (tmp_path / "noise").mkdir()
    with filelock.FileLock(tmp_path / "noise" / ".lock"):
        with pytest.raises(InputError, match="Another process measures into .*noise right now"):
            measure()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("settings.json", b"[]", "settings.json cannot be read"),
        ("settings.json", b"{}", "settings.json cannot be read"),
        ("settings.json", b"\xff{}", "settings.json cannot be read"),
        ("prompt-00001.pt", b"", "prompt-00001.pt is damaged or not a measurement.*Remove it"),
        ("prompt-00001.pt", b"other pickle", "prompt-00001.pt is damaged or not a measurement.*Remove it"),
        ("prompt-00007.pt", {"weights": torch.zeros(2)}, "prompt-00007.pt is damaged or not a measurement.*Remove it"),
        ("prompt-00007.pt", torch.zeros(2), "prompt-00007.pt is damaged or not a measurement.*Remove it"),
    ],
)
def test_a_corrupt_or_foreign_file_in_the_folder_is_one_line(tmp_path, name, content, message):
    (tmp_path / "settings.json").write_text('{"measured": {"seed": 1}}')
    torch.save({"example": "a", "reward": 1.0, "varies": True}, tmp_path / "prompt-00000.pt")
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        torch.save(content, tmp_path / name)
    with pytest.raises(InputError, match=message) as error:
        tool.main(["--plot_only", "--output_dir", str(tmp_path)])
    assert "weights_only" not in str(error.value)


ENVIRONMENT = """
class Desk:
    def reset(self, **kwargs):
        self.turns = []

    def calculator(self, expression: str) -> str:
        \"\"\"Works out an expression.

        Args:
            expression: A sum.
        \"\"\"
        self.turns.append(len(expression) % 3 / 3)
        return str(len(expression))

    def get_reward(self):
        return sum(self.turns) / 10


def of_turns(completions, **kwargs):
    return [[0.1 + len(m["content"]) % 3 for m in turns if m["role"] == "assistant"] for turns in completions]
"""


@pytest.mark.slow
def test_an_environment_and_rewards_of_turns(tmp_path, capsys):
    (tmp_path / "desks.py").write_text(ENVIRONMENT)
    config = Path(tool.__file__).parent / "tool_math_cpu.yaml"
    flags = (
        f"--config {config} --num_prompts 3 --completions_per_prompt 16 --group_sizes 4 --baselines otb "
        "--num_train_problems 20 --environment_factory desks:Desk --reward_funcs desks:of_turns --output_dir noise "
        "--disable_tqdm 1"
    )
    tool.main([*flags.split(), "--model_name_or_path", str(shortly_trained("calculator", 60, tmp_path / "policy"))])
    assert "otb, one left out" in capsys.readouterr().out
    (prompt, *_) = kept_in(tmp_path / "noise")
    assert prompt["reward"] > 0.1 and prompt["varies"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--group_sizes", "1"], r"`group_sizes` is \[1\]: give sizes of 2 or more"),
        (["--group_sizes", "8"], "`completions_per_prompt` is 16 and the largest group has 8.*32 or more"),
        (["--num_prompts", "2"], "`num_prompts` is 2"),
        (["--leave_one_out", "true"], "`leave_one_out` is set and has no effect here"),
        *(
            (flags.split(), f"`{flags.split()[0][2:]}` is set and has no effect here: this recipe does not read it")
            for flags in (
                "--learning_rate 1e-3",
                "--max_steps 3",
                "--beta 0.1",
                "--num_iterations 2",
                "--warmup_steps 3",
                "--save_strategy no",
                "--weight_decay 0.1",
                "--epsilon 0.1",
                "--loss_type dapo",
                "--optim sgd",
                "--num_train_epochs 2",
                "--eval_only",
                "--baseline rloo",
                "--scale_rewards group",
                "--gradient_accumulation_steps 2",
                "--resume_from_checkpoint latest",
            )
        ),
        (["--num_prompts", "1000"], "`num_prompts` is 1000 and the training data has"),
        (["--baselines", "absent"], "'absent': it must be one of"),
        (["--prompts_per_batch", "2"], "`prompts_per_batch` is 2: give 3 or more"),
        (["--projection", "3"], "`projection` is 3"),
        (["--parameters", "nothing-has-this"], "`parameters` is 'nothing-has-this', which none of"),
        (["--tools", "nowhere:f"], "`tools` is 'nowhere:f'"),
        (["--environment_factory", "nowhere:f"], "`environment_factory` is 'nowhere:f'"),
        (["--basline", "otb"], "there is no flag --basline"),
        (["--plot_only", "--num-prompts", "4"], "`plot_only` draws saved results"),
    ],
)
def test_wrong_flags_are_named(measure, flags, message):
    with pytest.raises(InputError, match=message):
        measure(*flags)


# Beside two other ways to measure the same


def pool_and_gradients(trainer, example, completions, seed=0):
    """A pool of one part, the rollout that it is, and its completions' gradients in all parameters."""
    parameters = list(trainer.model.parameters())
    of = CompletionGradients(trainer, parameters, Projection([p.numel() for p in parameters], 10**9))
    ((rollout, batch),) = sample_pool(trainer, example, completions, at_once=completions, seed=seed)
    rows = single_rows(batch)
    return Pool(rollout.rewards, rollout.energy, rollout.mask), rollout, lambda row, weights: of(rows[row], weights)


@pytest.mark.slow
def test_moments_agree_with_the_laboratory(tmp_path):
    """Means over many partitions of one pool, by the Gram matrix of all its tokens and by gradients of groups."""
    args = OTBGRPOConfig(**tiny.SETTINGS, temperature=0.7, output_dir=str(tmp_path / "run"))
    path = tiny.save_model(tmp_path / "model")
    trainer = OTBGRPOTrainer(path, tiny.even_bytes, args=args, train_dataset=tiny.prompts())
    studied = [e for e in estimators(["ogb", "otb"]) if e.name != "none"]
    with left_as_it_was(trainer):
        pool, rollout, gradient_of = pool_and_gradients(trainer, trainer.train_dataset[0], 32)
        found = prompt_moments(pool, gradient_of, {4: studied}, partitions=400)

        def advantages(estimator):
            options = {"baseline": estimator.baseline, "leave_one_out": estimator.leave_one_out}
            return lambda r, w, m, n: compute_advantages(r, w, m, n, **options)

        with torch.enable_grad():
            laboratory = pool_of(trainer.model, rollout, lambda name: True)
    # The laboratory's scores are at temperature 1: energies are the trainer's, gradients 1 / 0.7 as long
    of_laboratory = laboratory_moments(laboratory, {e.name: advantages(e) for e in studied}, 4, deals=400)
    for name in (estimator.name for estimator in studied):
        ours = found[name, 4]["square"] / found["group_mean", 4]["square"]
        theirs = of_laboratory[name].square / of_laboratory["group_mean"].square
        assert ours == pytest.approx(theirs, rel=0.1), name


@pytest.mark.slow
def test_the_callback_of_a_run_agrees_with_the_tool(short_policy, tmp_path):
    """
    The same eight prompts, without learning, and a reward for few tokens, whose gradient the prompts share. The
    callback's signal is ⟨g_p, g_q⟩ for prompts that differ, its noise the rest of E‖ĝ_p‖²: of completions and prompts.
    """
    tokenizer = AutoTokenizer.from_pretrained(short_policy, padding_side="left")
    options = json.dumps(worked_sums.CHAIN_SUM)
    eight_sums = RecipeArguments(dataset_options=options, num_train_problems=8, num_held_out_problems=1)
    problems = load_problems(eight_sums, seed=5)
    prompts = with_prompts(problems.train, tokenizer, "")
    settings = {**tiny.SETTINGS, "max_completion_length": 24, "learning_rate": 0.0, "output_dir": str(tmp_path)}

    def trainer_of(callbacks=(), **more):
        return OTBGRPOTrainer(
            str(short_policy),
            lambda completion_ids, **kwargs: [-len(ids) / 8 for ids in completion_ids],
            args=OTBGRPOConfig(**(settings | more)),
            train_dataset=prompts,
            processing_class=tokenizer,
            callbacks=list(callbacks),
        )

    trainer, ogb = trainer_of(), Estimator("ogb", "ogb")
    with left_as_it_was(trainer):
        measured = []
        for i in range(8):
            pool, _, gradient_of = pool_and_gradients(trainer, prompts[i], 96, seed=i)
            measured.append(prompt_moments(pool, gradient_of, {4: [ogb]}))
    moments = moments_of(measured, {"ogb": ogb})["ogb", 4]
    signal = (moments.signal.sum() - moments.signal.diagonal().sum()) / (8 * 7)
    expected = ((moments.square.mean() - signal) / signal).item()

    # One prompt per micro-batch, all eight per step; this loss divides all tokens by one number
    of_run = {"baseline": "ogb", "loss_type": "dr_grpo", "per_device_train_batch_size": 4}
    callback = GradientNoiseCallback(decay=0.999)
    trainer_of([callback], **of_run, gradient_accumulation_steps=8, max_steps=150).train()
    assert callback.scale == pytest.approx(expected, rel=0.3)
    assert expected > 3  # noise is what is measured
