"""A run's folder: whose it is, what the run began with, and how it goes on."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipes import math as recipe
from recipes.common.errors import InputError, Stopped
from recipes.common.held_out import HeldOut
from recipes.common.run_folder import differences
from tests.recipes.conftest import log_of, result_of


def contents(folder):
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished(short_policy, tmp_path_factory):
    """A whole run of four steps with a checkpoint after two."""
    from tests.recipes.conftest import SMALL

    folder = tmp_path_factory.mktemp("finished") / "run"
    recipe.main(["--model_name_or_path", str(short_policy), *SMALL, "--save_steps", "2", "--output_dir", str(folder)])
    return folder


@pytest.fixture
def copy(finished, tmp_path):
    """The finished run, and where the fixture `run` looks for it."""
    return shutil.copytree(finished, tmp_path / "run")


def test_a_folder_that_holds_a_run_is_left_alone(run, copy):
    before = contents(copy)
    with pytest.raises(
        InputError, match=r"holds the result of a run. Use --resume_from_checkpoint latest.*--overwrite"
    ):
        run()
    (copy / "result.json").unlink()
    with pytest.raises(InputError, match="holds checkpoints"):
        run()
    for checkpoint in copy.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    with pytest.raises(InputError, match="holds a model"):
        run()
    after = contents(copy)
    assert after.items() <= before.items() and len(after) > 5


def test_overwrite_replaces_a_run(run, copy):
    run("--overwrite", "--max_steps", "1", "--baseline", "rloo")
    assert result_of(copy)["baseline"] == "rloo" and result_of(copy)["steps"] == 1
    assert [path.name for path in copy.glob("checkpoint-*")] == ["checkpoint-1"]


def test_an_error_costs_nothing_even_with_overwrite(run, copy):
    before = contents(copy)
    with pytest.raises(InputError):
        run("--overwrite", "--reward_funcs", "nowhere:reward")
    assert contents(copy) == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--resume_from_checkpoint", "latest"], "Nothing left to do: .* holds the result of the whole run"),
        (["--resume_from_checkpoint", "CHECKPOINT"], "Nothing left to do"),
        (["--max_steps", "0"], "Nothing left to do: `max_steps` is 0"),
        (["--resume_from_checkpoint", "latest", "--max_steps", "2"], "Nothing left to do"),
        (["--resume_from_checkpoint", "latest", "--save_steps", "3", "--logging_steps", "2"], "Nothing left to do"),
    ],
)
def test_nothing_left_to_do_leaves_everything_as_it_is(run, copy, flags, message, capsys, monkeypatch):
    monkeypatch.setattr(recipe, "OTBGRPOTrainer", lambda **kwargs: pytest.fail("a trainer was constructed"))
    before = contents(copy)
    run(*[str(copy / "checkpoint-4") if flag == "CHECKPOINT" else flag for flag in flags])
    assert contents(copy) == before
    assert re.search(message, capsys.readouterr().out)


@pytest.mark.parametrize("killed", ["before the model was saved", "in the last evaluation"])
def test_a_run_without_its_last_evaluation_gets_it(run, copy, killed, capsys):
    """The same evaluation, to the bit, and the same weights. Training's own files are not needed for it."""
    (copy / "checkpoint-4" / "optimizer.pt").unlink()
    before, weights = result_of(copy), (copy / "model.safetensors").read_bytes()
    (copy / "result.json").unlink()
    if killed == "before the model was saved":
        (copy / "trainer_state.json").unlink()
        (copy / "model.safetensors").write_bytes(b"of an earlier, shorter run")
    run("--resume_from_checkpoint", "latest")
    assert "Nothing left to train" in capsys.readouterr().out
    after = result_of(copy)
    assert after.pop("training_seconds") < before.pop("training_seconds") and after == before
    assert (copy / "model.safetensors").read_bytes() == weights and log_of(copy)[-1]["step"] == 4


def test_a_run_without_checkpoints_gets_its_last_evaluation(run, monkeypatch, tmp_path):
    def stop(trainer):
        raise Stopped("Training was complete; its last evaluation was not.")

    first = recipe.OTBGRPOTrainer.evaluate
    when = lambda trainer, **_: stop(trainer) if trainer.state.global_step else first(trainer)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(recipe.OTBGRPOTrainer, "evaluate", when)
        with pytest.raises(Stopped, match="its last evaluation was not"):
            run("--save_strategy", "no")
    run("--resume_from_checkpoint", "latest")
    result = result_of(tmp_path / "run")
    assert [e["step"] for e in result["evaluations"]] == [0, 4] and result["tokens_generated"] > 0
    with pytest.raises(InputError, match="holds the model of 4 steps and no checkpoint to resume from"):
        run("--resume_from_checkpoint", "latest", "--max_steps", "5")


def test_a_run_that_was_killed_while_it_saved_its_first_checkpoint_begins_anew(run, copy):
    for name in ("result.json", "model.safetensors", "checkpoint-2/held_out_counts.json"):
        (copy / name).unlink()
    shutil.rmtree(copy / "checkpoint-4")
    run("--max_steps", "2", "--save_steps", "2")
    assert result_of(copy)["steps"] == 2


def test_a_shorter_runs_result_does_not_stand_for_a_longer_one(run, copy):
    """More steps were trained, and their evaluation was missed: the result is still that of fewer."""
    result = result_of(copy)
    (copy / "result.json").write_text(json.dumps({**result, "steps": 2}))
    run("--resume_from_checkpoint", "latest")
    assert result_of(copy)["steps"] == 4


def test_more_steps_go_on(run, copy):
    run("--resume_from_checkpoint", "latest", "--max_steps", "5")
    assert result_of(copy)["steps"] == 5 and (copy / "checkpoint-5").is_dir()
    assert len([h for h in log_of(copy) if "loss" in h]) == 5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--baseline rloo", "`baseline` was 'otb' and is 'rloo'"),
        ("--seed 9", "`seed` was 42 and is 9"),
        ("--num_generations 4", "`num_generations` was 8 and is 4"),
        ("--learning_rate 1e-3", "`learning_rate` was 0.0004 and is 0.001"),
        ("--model_name_or_path elsewhere", "`model_name_or_path` was .* and is 'elsewhere'"),
        ("--num_train_problems 300", "`num_train_problems` was 200 and is 300"),
        ("--dataset_name reasoning_gym:countdown", "`dataset_name` was 'reasoning_gym:chain_sum'"),
        ("--leave_one_out --temperature 0.5", "`leave_one_out` was False and is True; `temperature` was 1.0"),
    ],
)
def test_another_experiment_does_not_resume_this_one(run, copy, flags, message):
    before = contents(copy)
    with pytest.raises(InputError, match=f"started with other options: .*{message}.*--allow_changes"):
        run("--resume_from_checkpoint", "latest", "--max_steps", "5", *flags.split())
    assert contents(copy) == before


def test_changes_can_be_allowed(run, copy, capsys):
    run("--resume_from_checkpoint", "latest", "--max_steps", "5", "--baseline", "rloo", "--allow_changes")
    assert "Note: `baseline` was 'otb' and is 'rloo'" in capsys.readouterr().out
    assert result_of(copy)["baseline"] == "rloo"


def test_processes_data_and_versions_are_compared():
    now = {"recipe": {}, "trainer": {"max_steps": 3}, "model": {}, "processes": 2, "data_sha256": "b"}
    then = {**now, "processes": 1, "data_sha256": "a", "trainer": {"max_steps": 2, "output_dir": "x"}}
    assert differences(then, now) == ["there were 1 processes and now are 2", "the data file has changed"]
    assert differences(now, now) == []


def test_the_whole_configuration_is_saved(finished):
    saved = json.loads((finished / "configuration.json").read_text())
    assert saved["trainer"]["baseline"] == "otb" and saved["trainer"]["num_generations"] == 8
    assert saved["recipe"]["num_held_out_problems"] == 20 and saved["processes"] == 1
    assert saved["versions"]["torch"] == torch.__version__ and saved["model"]["use_peft"] is False


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("trainer_state.json", lambda path: path.write_text(path.read_text()[:100])),
        ("trainer_state.json", lambda path: path.write_text("{}")),
        ("optimizer.pt", lambda path: path.write_bytes(path.read_bytes()[:1000])),
        ("model.safetensors", lambda path: path.write_bytes(path.read_bytes()[:1000])),
        ("held_out_counts.json", lambda path: path.write_text("{")),
    ],
)
def test_a_damaged_checkpoint_is_one_line(run, copy, file, damage):
    damage(copy / "checkpoint-4" / file)
    with pytest.raises(InputError, match=f"checkpoint-4/{file} is damaged: .*Resume from an earlier checkpoint"):
        run("--resume_from_checkpoint", "latest", "--max_steps", "5")


def test_latest_is_the_newest_complete_checkpoint(run, copy, capsys):
    (copy / "checkpoint-4" / "held_out_counts.json").unlink()  # killed while it was saved
    (copy / "result.json").unlink()
    run("--resume_from_checkpoint", "latest")
    assert len([h for h in log_of(copy) if "loss" in h]) == 4


def test_latest_without_a_checkpoint(run):
    with pytest.raises(InputError, match=r"'latest', and .*run holds no complete checkpoint"):
        run("--resume_from_checkpoint", "latest")
    with pytest.raises(InputError, match="'nowhere/checkpoint-4', and nowhere/checkpoint-4 holds no complete"):
        run("--resume_from_checkpoint", "nowhere/checkpoint-4")


@pytest.mark.parametrize("kind", ["file", "below a file"])
def test_a_folder_that_cannot_be_written_to(run, tmp_path, kind):
    (tmp_path / "taken").write_text("")
    with pytest.raises(InputError, match=r"`output_dir` is .*taken.*(which is a file|Choose a folder to write to)"):
        run(output="taken" if kind == "file" else "taken/run")


# Ctrl-C


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_leaves_a_checkpoint_that_resumes_exactly(run, monkeypatch, signum, heard):
    original = recipe.accuracy_reward
    whole = run("--save_steps", "2", output="whole")
    counted = {"steps": 0}

    def interrupting(problems):
        inner = original(problems)

        def accuracy(completions, **kwargs):
            counted["steps"] += len(completions) == 16  # an evaluation has other sizes
            if counted["steps"] == 2:
                os.kill(os.getpid(), signum)
            return inner(completions=completions, **kwargs)

        return accuracy

    previous = signal.getsignal(signum)
    with monkeypatch.context() as patch:
        patch.setattr(recipe, "accuracy_reward", interrupting)
        with pytest.raises(Stopped, match="Stopped after step 2;(?s:.)*--resume_from_checkpoint latest"):
            run("--save_only_model", output="interrupted")
    folder = whole.with_name("interrupted")
    assert (folder / "checkpoint-2" / "optimizer.pt").is_file() and not (folder / "result.json").exists()
    assert signal.getsignal(signum) is previous
    run("--resume_from_checkpoint", "latest", output="interrupted")
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
    first, second = (result_of(f) for f in (whole, folder))
    for key in ("before", "after", "tokens_generated"):
        assert first[key] == second[key], key


def test_a_resumed_runs_seconds_are_those_of_all_its_legs(run, copy):
    counts = copy / "checkpoint-4" / "held_out_counts.json"
    saved = json.loads(counts.read_text())
    assert 0 < saved["seconds"] <= result_of(copy)["training_seconds"]
    counts.write_text(json.dumps({**saved, "seconds": 1000.0}))
    run("--resume_from_checkpoint", "latest", "--max_steps", "5")
    assert result_of(copy)["training_seconds"] > 1000


# Resuming less than was promised


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("optimizer.pt", "state of the optimizer"),
        ("scheduler.pt", "state of the schedule"),
        ("rng_state.pth", "random numbers"),
    ],
)
def test_a_checkpoint_that_lacks_a_part_is_resumed_only_if_that_is_allowed(run, copy, file, what, capsys):
    (copy / "checkpoint-4" / file).unlink()
    more = ["--resume_from_checkpoint", "latest", "--max_steps", "5"]
    with pytest.raises(InputError, match=f"checkpoint-4 has no {what}.*with --allow_changes"):
        run(*more)
    if file == "optimizer.pt":
        run(*more, "--allow_changes")
        assert f"Note: {copy / 'checkpoint-4'} has no {what}" in capsys.readouterr().out
        assert result_of(copy)["steps"] == 5


def test_a_result_without_checkpoints_is_not_gone_on_with(run, copy):
    for checkpoint in copy.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    with pytest.raises(InputError, match="holds the model of 4 steps and no checkpoint to resume from"):
        run("--resume_from_checkpoint", "latest", "--max_steps", "5")


@pytest.mark.slow
def test_the_best_weights_are_those_that_are_measured_and_kept(run, monkeypatch):
    """The best of an accuracy that grows with the steps, and should not, are the first ones."""
    original, evaluated = recipe.accuracy_reward, []

    def growing(problems):
        inner = original(problems)

        def accuracy(completions, trainer_state, **kwargs):
            scores = inner(completions=completions, **kwargs)
            is_training = len(completions) == 16  # an evaluation has other sizes
            return scores if is_training else [trainer_state.global_step / 10] * len(completions)

        return accuracy

    def on_evaluate(self, args, state, control, model=None, **kwargs):
        evaluated.append({name: values.detach().clone() for name, values in model.state_dict().items()})
        return count(self, args, state, control, model=model, **kwargs)

    count = HeldOut.on_evaluate
    monkeypatch.setattr(HeldOut, "on_evaluate", on_evaluate)
    monkeypatch.setattr(recipe, "accuracy_reward", growing)
    best = "--load_best_model_at_end --metric_for_best_model eval_reward --greater_is_better false"
    folder = run(*f"{best} --eval_strategy steps --eval_steps 2 --save_steps 2 --learning_rate 0.01".split())
    state = json.loads((folder / "trainer_state.json").read_text())
    assert state["best_global_step"] == 2
    kept, of_best, last = (
        load_file(f / "model.safetensors") for f in (folder, *map(folder.joinpath, ("checkpoint-2", "checkpoint-4")))
    )
    assert all(
        torch.equal(kept[name], of_best[name]) and torch.equal(evaluated[-1][name], kept[name]) for name in kept
    )
    assert any(not torch.equal(kept[name], last[name]) for name in kept)
    assert [evaluation["step"] for evaluation in result_of(folder)["evaluations"]] == [0, 2, 4, 4]


# What else is in the folder


def test_one_process_writes_into_a_folder(run, copy):
    """As long as it lives, and not longer, however it ends."""
    program = "import filelock; held = filelock.FileLock('.lock'); held.acquire(); print(1, flush=True); input()"
    pipe = subprocess.PIPE
    other = subprocess.Popen([sys.executable, "-c", program], cwd=copy, stdin=pipe, stdout=pipe)
    other.stdout.readline()
    try:
        for flags in (["--overwrite"], ["--resume_from_checkpoint", "latest", "--max_steps", "5"], []):
            with pytest.raises(InputError, match="Another process writes into .*run right now"):
                run(*flags)
    finally:
        other.kill()
        other.wait()
    run("--overwrite", "--max_steps", "1")


def test_overwrite_removes_what_a_run_wrote_and_nothing_else(run, copy):
    mine = ["notes.txt", "embeddings.safetensors", "checkpoint-3-backup/model.safetensors"]
    for name in mine:
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text("mine")
    with pytest.raises(InputError, match="checkpoint-3-backup is not a checkpoint, and `save_total_limit`"):
        run("--overwrite")
    run("--overwrite", "--max_steps", "1", "--save_total_limit", "0")
    assert all((copy / name).read_text() == "mine" for name in mine)
    assert not (copy / "checkpoint-4").exists()


def test_a_checkpoints_backup_is_no_checkpoint(run, copy):
    shutil.copytree(copy / "checkpoint-4", copy / "checkpoint-9-backup")
    run("--resume_from_checkpoint", "latest", "--save_total_limit", "0", "--max_steps", "5")
    assert result_of(copy)["steps"] == 5 and (copy / "checkpoint-9-backup").is_dir()


def test_overwrite_leaves_a_model_that_no_run_wrote(run, copy):
    with pytest.raises(InputError, match="which --overwrite would remove: move it first"):
        run("--overwrite", "--model_name_or_path", str(copy / "checkpoint-4"))
    (copy / "configuration.json").unlink()
    before = contents(copy)
    with pytest.raises(InputError, match="holds the result of a run but no configuration.json, so no run wrote it"):
        run("--overwrite")
    assert contents(copy) == before


@pytest.mark.slow
def test_an_adapter_and_a_full_model_replace_each_other(run, capsys):
    lora = ["--use_peft", "--lora_target_modules", "all-linear"]
    for flags in (lora, [], lora):
        folder = run("--max_steps", "1", "--overwrite", *flags)
        assert (folder / "adapter_config.json").is_file() == bool(flags)
        assert (folder / "model.safetensors").is_file() == (not flags)
        run("--eval_only", "--model_name_or_path", str(folder))
        assert "Held-out accuracy: " in capsys.readouterr().out


def test_a_run_from_elsewhere_has_its_own_configuration(run, copy):
    folder = run("--resume_from_checkpoint", str(copy / "checkpoint-4"), "--max_steps", "5", output="other")
    assert json.loads((folder / "configuration.json").read_text())["trainer"]["max_steps"] == 5


def test_a_changed_model_folder_is_another_model(run, short_policy, tmp_path):
    model = ["--model_name_or_path", str(shutil.copytree(short_policy, tmp_path / "model"))]
    run("--max_steps", "1", *model)
    file = tmp_path / "model" / "model.safetensors"
    save_file({name: w + 1e-3 for name, w in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(InputError, match="started with other options: the model's weights have changed"):
        run("--resume_from_checkpoint", "latest", "--max_steps", "2", *model)
