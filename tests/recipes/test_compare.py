"""recipes/compare.py: its runs, its table and its picture."""

import json
import signal
import statistics
import sys
from pathlib import Path

import filelock
import pytest

from recipes import compare
from recipes import math as recipe
from recipes.common.errors import InputError, Stopped
from recipes.common.held_out import Accuracy


def run_with(baseline, seed, before, after):
    evaluations = [vars(Accuracy(mean, 0.02, 100, 4, step)) for mean, step in ((before, 0), (after, 40))]
    result = {
        "before": evaluations[0], "after": evaluations[1], "evaluations": evaluations,
        "tokens_generated": 1000 * seed, "training_seconds": 2.0, "steps": 40,
    }  # fmt: skip
    trainer = {"baseline": baseline, "seed": seed, "learning_rate": 1e-3, "output_dir": f"{baseline}-{seed}"}
    configuration = {"recipe": {}, "trainer": trainer, "model": {}, "processes": 1, "data_sha256": "a"}
    log = [{"step": step, "reward": before + step * (after - before) / 40} for step in range(5, 41, 5)]
    return compare.Run(baseline, seed, result, log, configuration)


RUNS = [
    run_with("otb", 1, 0.4, 0.6),
    run_with("otb", 2, 0.4, 0.7),
    run_with("group_mean", 1, 0.4, 0.5),
    run_with("group_mean", 2, 0.4, 0.6),
]


def test_an_interval_by_hand():
    # mean 2, standard deviation 1, three values: 4.303 · 1 / √3
    assert compare.interval([1.0, 2.0, 3.0]) == "2.0 ± 2.5"
    assert compare.interval([5.0]) == "5.0"
    many = [float(i) for i in range(40)]
    half = float(compare.interval(many).split("± ")[1])
    assert half == pytest.approx(2.023 * statistics.stdev(many) / 40**0.5, abs=0.06)


def test_the_table_says_n_and_pairs_differences_by_seed():
    written = compare.table(RUNS)
    rows = {
        line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:-1]] for line in written.splitlines()[2:4]
    }
    assert rows["otb"][:5] == ["2", "40.0 ± 0.0", "65.0 ± 63.5", "25.0 ± 63.5", ""]
    assert rows["group_mean"][4] == "-10.0 ± 0.0"  # ten points behind under either seed
    assert rows["otb"][5] == "1,500" and "n = 2 seeds: 95 % intervals" in written
    assert "one seed gives no interval" in compare.table(RUNS[::2])


def test_the_picture(tmp_path):
    compare.picture(RUNS, tmp_path / "several.png", "math")
    compare.picture(RUNS[:1], tmp_path / "single.png", "math")
    assert min((tmp_path / name).stat().st_size for name in ("several.png", "single.png")) > 10_000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--seeds 1", "required: --baselines"),
        ("--baselines otb", "required: --seeds"),
        ("--baselines mean --seeds 1", "`baselines` names 'mean': choose from"),
        ("--baselines otb otb --seeds 1", "`baselines` has duplicates"),
        ("--baselines otb --seeds 1 1", "`seeds` has duplicates"),
        ("--baselines otb --seeds one", "invalid int value"),
        ("--baselines otb --seeds 1 --seed 3", "--seed is set by compare.py"),
        ("--baselines otb --seeds 1 --output_dir x", "--output_dir is set by compare.py"),
        ("--baselines otb --seeds 1 --output-dir=x", "--output_dir is set by compare.py"),
        ("--baselines otb --seeds 1 --recipe chess", "invalid choice: 'chess'"),
    ],
)
def test_wrong_flags(flags, message):
    with pytest.raises(InputError, match=message):
        compare.parse(flags.split())


def test_help_is_a_good_end(capsys):
    compare.launch("compare.py", compare.main, ["--help"])
    said = capsys.readouterr()
    assert "--baselines NAME" in said.out and said.err == ""


def test_further_flags_go_to_the_recipe(tmp_path, monkeypatch):
    """Finished and begun runs are resumed, new ones are not; a run that fails stops the comparison."""
    commands = []

    def perform(command):
        commands.append(command)
        folder = tmp_path / "all" / f"{command[command.index('--baseline') + 1]}-seed1"
        folder.mkdir(parents=True, exist_ok=True)
        made = run_with("otb", 1, 0.4, 0.5)
        (folder / "result.json").write_text(json.dumps(made.result))
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": made.log}))
        (folder / "configuration.json").write_text(json.dumps(made.configuration))
        return 0

    monkeypatch.setattr(compare, "run_stoppably", perform)
    flags = ["--baselines", "otb", "mine:f", "--seeds", "1", "--folder", str(tmp_path / "all"), "--max_steps", "5"]
    with pytest.raises(InputError, match="mine:f, seed 1 ended without a result"):
        compare.main([*flags, "--launcher", "accelerate launch"])  # mine.f-seed1 is made under another name here
    assert commands[0][:2] == ["accelerate", "launch"] and commands[0][3:5] == ["--max_steps", "5"]
    assert "--resume_from_checkpoint" not in commands[0]
    compare.main(["--baselines", "otb", *flags[3:]])
    assert commands[-1][-2:] == ["--resume_from_checkpoint", "latest"]
    assert (tmp_path / "all" / "compare.md").is_file() and (tmp_path / "all" / "compare.png").is_file()
    with pytest.raises(InputError, match="started with the flags '--max_steps 5', and these are '--max_steps 6'"):
        compare.main(["--baselines", "otb", *flags[3:-1], "6"])
    with filelock.FileLock(tmp_path / "all" / ".lock"), pytest.raises(InputError, match="Another process writes"):
        compare.main(["--baselines", "otb", *flags[3:]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: run.configuration["trainer"].update(learning_rate=1.0), "`learning_rate` was 0.001 and is 1.0"),
        (lambda run: run.configuration.update(processes=2), "there were 1 processes and now are 2"),
        (lambda run: run.configuration.update(data_sha256="b"), "the data file has changed"),
        (lambda run: run.result.update(steps=4), "there were 40 steps and now are 4"),
    ],
)
def test_only_runs_that_are_alike_are_compared(change, message):
    first, last = run_with("otb", 1, 0.4, 0.6), run_with("rloo", 2, 0.4, 0.6)
    compare.check_alike([first])
    compare.check_alike([first, last])
    change(last)
    with pytest.raises(InputError, match=f"otb with seed 1 and rloo with seed 2 cannot be compared: {message}"):
        compare.check_alike([first, last])


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_handed_on_once_and_waited_for(tmp_path, monkeypatch, signum):
    """A recipe that takes its time to save a checkpoint. Whatever its exit code, nothing else is started."""
    program = (
        "import os, signal, sys, time\n"
        "def save(signum, frame):\n"
        "    time.sleep(1); open('saved', 'a').write('once '); sys.exit(0)\n"
        f"signal.signal({int(signum)}, save)\n"
        f"os.kill(os.getppid(), {int(signum)})\n"
        "time.sleep(60)\n"
    )
    previous = signal.getsignal(signum)
    assert compare.run_stoppably([sys.executable, "-c", program]) == 130
    assert (tmp_path / "saved").read_text() == "once "
    assert signal.signal(signum, previous) is signal.default_int_handler
    monkeypatch.setattr(compare, "run_stoppably", lambda command: 130)
    with pytest.raises(Stopped, match="Finished runs and checkpoints are kept in all; repeat the command to resume"):
        compare.main(["--baselines", "otb", "--seeds", "1", "--folder", "all"])


@pytest.mark.slow
def test_two_baselines_for_real(tmp_path, short_policy, monkeypatch, capsys):
    """The first run is launched, the second starts in this process; asked for again, a finished run is left alone."""
    flags = "--max_steps 2 --num_held_out_problems 10 --per_device_eval_batch_size 40 --num_train_problems 100"
    flags = ["--seeds", "1", *flags.split(), "--model_name_or_path", str(short_policy)]
    compare.main(["--baselines", "otb", *flags])
    assert len(rows_of(tmp_path)) == 1

    def in_process(command):
        recipe.main(command[command.index(str(Path(recipe.__file__))) + 1 :])
        return 0

    monkeypatch.setattr(compare, "run_stoppably", in_process)
    capsys.readouterr()
    compare.main(["--baselines", "otb", "group_mean", *flags])
    assert capsys.readouterr().out.count("Nothing left to do") == 1
    first, second = rows_of(tmp_path)
    assert first.startswith("| otb | 1 |") and second.startswith("| group_mean | 1 |")


def rows_of(folder):
    table = (folder / "runs" / "compare" / "math" / "compare.md").read_text().splitlines()
    return [line for line in table[2:] if line.startswith("| ")]
