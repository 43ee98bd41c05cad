"""Flags, YAML files and defaults."""

from pathlib import Path

import pytest
import yaml

from recipes import gradient_noise, tool_math
from recipes import math as recipe
from recipes.common import launching
from recipes.common.arguments import FREQUENT, RecipeArguments, RecipeParser, parse
from recipes.common.errors import InputError
from trl_otb.baselines import BASELINES


RECIPES = Path(recipe.__file__).parent
CONFIGS = sorted(RECIPES.glob("*.yaml"))


def parsed(*argv):
    return parse("math.py", RecipeArguments, recipe.CONFIG, list(argv))


def test_the_default_needs_no_flag(capsys):
    _, args, model_args = parsed()
    written = yaml.safe_load((RECIPES / recipe.CONFIG).read_text())
    assert (args.max_steps, args.learning_rate) == (written["max_steps"], written["learning_rate"])
    assert model_args.model_name_or_path == "recipes.toy:sums"
    assert args.output_dir == "runs/math/otb-seed42"
    assert capsys.readouterr().out.startswith("math.py: defaults from ") and recipe.CONFIG == "math_cpu.yaml"


@pytest.mark.parametrize("flags", [["--learning_rate", "0.5"], ["--learning_rate=0.5"], ["--learning-rate", "0.5"]])
def test_a_flag_changes_one_value_and_keeps_every_other(flags, capsys):
    """Also with another model and other data, which used to drop the recipe's defaults."""
    _, default, _ = parsed()
    _, args, model_args = parsed("--model_name_or_path", "FOLDER", "--dataset_name", "FILE.csv", *flags)
    assert args.learning_rate == 0.5 and model_args.model_name_or_path == "FOLDER"
    kept = ("max_completion_length", "per_device_eval_batch_size", "max_steps", "num_generations_eval", "warmup_steps")
    assert all(getattr(args, name) == getattr(default, name) for name in kept)
    assert "math_cpu.yaml, 3 flags on top" in capsys.readouterr().out


def test_options_of_the_data_go_with_the_data(capsys):
    settings, _, _ = parsed("--dataset_name", "problems.csv")
    assert settings.dataset_options is None
    assert "Note: `dataset_options` in the YAML file belongs to the file's own dataset" in capsys.readouterr().out
    assert parsed("--dataset_name", "reasoning_gym:chain_sum")[0].dataset_options is not None
    both = parsed("--dataset_name", "reasoning_gym:countdown", "--dataset_options", '{"min_numbers": 3}')
    assert both[0].dataset_options == '{"min_numbers": 3}'


def test_only_config_replaces_the_default(tmp_path):
    (tmp_path / "mine.yaml").write_text("max_steps: 7\nlearning_rate: 1e-5\ngradient_checkpointing: false\n")
    _, args, model_args = parsed("--config", "mine.yaml", "--max_steps", "9")
    assert (args.max_steps, args.learning_rate, args.max_completion_length) == (9, 1e-5, 512)
    assert model_args.model_name_or_path is None and args.activation_checkpointing is False


def test_runs_are_named_after_recipe_baseline_and_seed():
    assert parsed("--baseline", "rloo", "--seed", "3")[1].output_dir == "runs/math/rloo-seed3"
    assert parsed("--output_dir", "here")[1].output_dir == "here"
    resumed = parsed("--resume_from_checkpoint", "runs/math/opo-seed5/checkpoint-40")
    assert resumed[1].output_dir == "runs/math/opo-seed5"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_yaml_is_understood(config):
    of = tool_math if config.stem.startswith("tool_") else recipe
    arguments = tool_math.ToolMathArguments if of is tool_math else RecipeArguments
    on_cpu = ["--use_cpu", "--bf16", "false"]
    settings, args, model_args = parse(config.name, arguments, of.CONFIG, ["--config", str(config), *on_cpu])
    written = yaml.safe_load(config.read_text())
    assert "output_dir" not in written
    seen = {**vars(settings), **vars(model_args), **vars(args)}
    for key in set(written) - {"use_cpu", "bf16", "report_to"}:
        assert seen[key] == written[key], key
    assert args.baseline == "otb"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--baselin otb", "there is no flag --baselin. Did you mean --baseline"),
        ("--max_step 3", "there is no flag --max_step. Did you mean --max_steps"),
        ("--wholly_unknown 3", "there is no flag --wholly_unknown. See --help-all"),
        ("otb", "unexpected argument 'otb'"),
        ("--num_generations 4x", "argument --num_generations/--num-generations: invalid .* value: '4x'"),
        ("--config", "argument --config: expected one argument"),
        ("--config absent.yaml", "`--config` is 'absent.yaml': it cannot be read"),
        ("--baseline mean", "`baseline` is 'mean'"),
        ("--lr_scheduler_type constnt", "constnt"),
    ],
)
def test_wrong_flags(flags, message):
    with pytest.raises(InputError, match=message):
        parsed(*flags.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_step: 3", "unknown option 'max_step'. Did you mean max_steps"),
        ("max_steps: ten", "`max_steps` is 'ten'"),
        ("max_steps: [1, 2]", r"`max_steps` is \[1, 2\]: it takes one value"),
        ("bf16: flase", "`bf16` is 'flase'"),
        ("config: other.yaml", "unknown option 'config'"),
        ("- a\n- b", "one `option: value` per line"),
        ("a: [1", "cannot be read"),
    ],
)
def test_wrong_yaml(tmp_path, text, message):
    (tmp_path / "wrong.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        parsed("--config", "wrong.yaml")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--temperature 0", "`temperature` is 0.0: it must be a finite number above 0"),
        ("--temperature nan", "`temperature` is nan"),
        ("--learning_rate nan", "`learning_rate` is nan"),
        ("--learning_rate inf", "`learning_rate` is inf"),
        ("--learning_rate -1e-4", "`learning_rate` is -0.0001: it must be a finite number, 0 or more"),
        ("--num_generations 0", "`num_generations` is 0: it must be at least 2"),
        ("--num_generations 1", "`num_generations` is 1: it must be at least 2"),
        (
            "--num_generations 7",
            r"`num_generations` is 7.*128 completions.*--num_generations 4.*_train_batch_size 133",
        ),
        ("--num_generations 100000000", "`num_generations` is 100000000.* use --num_generations 128"),
        ("--num_generations 100000000 --per_device_train_batch_size 100000000", "would hold 100,000,000 completions"),
        ("--num_generations_eval 3", "`per_device_eval_batch_size` is 400.* Use --per_device_eval_batch_size 402"),
        ("--per_device_train_batch_size 0", "`per_device_train_batch_size` is 0: it must be at least 1"),
        ("--per_device_eval_batch_size 0", "`per_device_eval_batch_size` is 0"),
        ("--max_completion_length 0", "`max_completion_length` is 0: it must be at least 1"),
        ("--seed -1", "`seed` is -1: it must lie between 0 and"),
        ("--max_steps -5", "`max_steps` is -5"),
        ("--num_held_out_problems 0", "`num_held_out_problems` is 0: it must be at least 1"),
        ("--num_train_problems -1", "`num_train_problems` is -1"),
        ("--report_to nowhere", "`report_to` is 'nowhere': choose from none"),
        ("--report_to clearml", "`report_to` is 'clearml', which is not installed: pip install clearml"),
        ("--reward_weights 1 2", "`reward_weights` has 2 numbers for 1 rewards"),
        ("--reward_weights nan", "`reward_weights` is nan: it must be a finite number"),
        ("--reward_weights inf", "`reward_weights` is inf: it must be a finite number"),
        ("--epsilon nan", "`epsilon` is nan, which is not a number"),
        ("--repetition_penalty nan", "`repetition_penalty` is nan, which is not a number"),
    ],
)
def test_values_that_make_no_sense(flags, message):
    with pytest.raises(InputError, match=message):
        parsed(*flags.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--eval_only --resume_from_checkpoint run/checkpoint-4", "it is for training, and `eval_only` is True"),
        ("--eval-only --overwrite", "`overwrite` is set and has no effect here: it is for training"),
        ("--eval_only --allow_changes", "`allow_changes` is set and has no effect here: it is for training"),
        ("--resume_from_checkpoint latest --overwrite", "`overwrite` .* it is for a new run"),
        ("--allow_changes", "`allow_changes` .* it is for a resumed run"),
        (
            "--num_train_epochs 2 --max_steps 3",
            "`num_train_epochs` .* and `max_steps` is 3",
        ),
        ("--dataset_name a.csv --dataset_split test", "`dataset_split` .* hub datasets.*'a.csv'"),
        ("--dataset_config main", "`dataset_config` .* `dataset_name` is 'reasoning_gym:chain_sum'"),
        ("--prompt_column question", "`prompt_column` .* files and hub datasets"),
        ("--eval_strategy no --eval_steps 5", "`eval_steps` .* the strategy `steps`, and `eval_strategy` is"),
        ("--save_strategy no --save-steps 5", "`save_steps` .* `save_strategy` is"),
        ("--logging_strategy epoch --logging_steps 5", "`logging_steps` .* `logging_strategy` is"),
        ("--lora_r 8", "`lora_r` .* it is for LoRA, and `use_peft` is False"),
        ("--use_rslora", "`use_rslora` .* it is for LoRA"),
        ("--bnb_4bit_quant_type fp4", "`bnb_4bit_quant_type` .* `load_in_4bit` is False"),
        ("--vllm_mode colocate", "`vllm_mode` .* it is for vLLM"),
        ("--hub_model_id me/mine", "`hub_model_id` .* it is for uploads"),
        ("--ref_model_sync_steps 5", "`ref_model_sync_steps` .* `sync_ref_model` is False"),
        ("--do_eval", "`do_eval` is set and has no effect here: this recipe does not read it"),
        ("--label_smoothing_factor 0.1", "`label_smoothing_factor` .* does not read it"),
    ],
)
def test_a_flag_has_an_effect_or_is_an_error(flags, message):
    with pytest.raises(InputError, match=message):
        parsed(*flags.split())


def test_an_option_of_a_file_counts_or_is_an_error(tmp_path):
    """Unless a flag turns off what it belongs to."""
    (tmp_path / "mine.yaml").write_text("lora_r: 8\n")
    with pytest.raises(InputError, match="`lora_r` .* it is for LoRA, and `use_peft` is False"):
        parsed("--config", "mine.yaml")
    assert parsed("--config", "mine.yaml", "--use_peft")[2].lora_r == 8
    assert parsed("--config", "mine.yaml", "--use_peft", "false")[2].use_peft is False
    (tmp_path / "mine.yaml").write_text("max_steps: 8\nnum_train_epochs: 2\n")
    with pytest.raises(InputError, match="`num_train_epochs` .* `max_steps` is 8"):
        parsed("--config", "mine.yaml")


def test_epochs_on_the_command_line_beat_the_steps_of_the_file():
    _, args, _ = parsed("--num_train_epochs", "2")
    assert (args.max_steps, args.num_train_epochs) == (-1, 2)
    assert parsed()[1].max_steps == 800


def test_one_value_in_a_file_is_a_list_of_one(tmp_path):
    text = "reward_funcs: my:f\nreward_weights: [1, 1e-1]\nlora_target_modules: all-linear\nuse_peft: true\n"
    (tmp_path / "mine.yaml").write_text(text)
    settings, args, model_args = parsed("--config", "mine.yaml")
    assert (settings.reward_funcs, args.reward_weights) == (["my:f"], [1.0, 0.1])
    assert model_args.lora_target_modules == "all-linear"
    (tmp_path / "mine.yaml").write_text("reward_weights: 1\ngroup_sizes: 4\n")
    settings, args, _ = parse("noise", gradient_noise.NoiseArguments, "mine.yaml", ["--config", "mine.yaml"])
    assert (args.reward_weights, settings.group_sizes) == ([1.0], [4])


def test_a_file_is_read_as_utf_8_and_another_one_is_refused(tmp_path):
    (tmp_path / "mine.yaml").write_bytes("instruction: Schätze größer\n".encode())
    assert parsed("--config", "mine.yaml")[0].instruction == "Schätze größer"
    (tmp_path / "mine.yaml").write_bytes("instruction: größer\n".encode("latin-1"))
    with pytest.raises(InputError, match="`--config` is 'mine.yaml': it cannot be read: UnicodeDecodeError"):
        parsed("--config", "mine.yaml")


def test_tool_math_checks_its_own_option():
    with pytest.raises(InputError, match="`max_operations` is 0: it must be at least 1"):
        parse("tool_math.py", tool_math.ToolMathArguments, tool_math.CONFIG, ["--max_operations", "0"])


def test_help_is_short_and_help_all_is_complete(capsys):
    with pytest.raises(SystemExit) as stop:
        parsed("--help")
    assert stop.value.code == 0
    short = capsys.readouterr().out
    assert len(short.splitlines()) < 150
    assert all(f"--{name}" in short for name in ("dataset_name", "baseline", "zero_tail", "eval_only", "config"))
    assert all(name in short for name in BASELINES) and "module:function" in short
    assert "default: 0.0004" in short  # the recipe's own, from its YAML file
    with pytest.raises(SystemExit):
        parsed("--help-all")
    assert len(capsys.readouterr().out.splitlines()) > 1000
    assert set(FREQUENT) <= set(RecipeParser("math.py", RecipeArguments).actions)


# The command that can be pasted


def test_the_command_under_make(monkeypatch):
    monkeypatch.setenv("TRL_OTB_MAKE_RUN", "1")
    assert launching.command([]) == "make run"
    again = launching.command(["--dataset_options", '{"a": 1}', "--seed", "3"])
    assert again == """make run ARGS='--dataset_options '"'"'{"a": 1}'"'"' --seed 3'"""


@pytest.mark.parametrize(
    ("parent", "script", "expected"),
    [
        (
            "python3 /venv/bin/accelerate launch --num_processes 2 --multi_gpu recipes/math.py --seed 3",
            "/home/me/recipes/math.py",
            "accelerate launch --num_processes 2 --multi_gpu recipes/math.py --max_steps 5",
        ),
        (
            "/venv/bin/torchrun --nproc_per_node 2 math.py",
            "math.py",
            "torchrun --nproc_per_node 2 math.py --max_steps 5",
        ),
        ("bash", "recipes/math.py", "python recipes/math.py --max_steps 5"),
    ],
)
def test_the_command_of_each_launcher(monkeypatch, parent, script, expected):
    monkeypatch.delenv("TRL_OTB_MAKE_RUN", raising=False)
    monkeypatch.setattr(launching.psutil.Process, "cmdline", lambda self: parent.split())
    monkeypatch.setattr(launching.sys, "argv", [script])
    monkeypatch.setattr(launching.sys, "orig_argv", ["python", script])
    monkeypatch.setattr(launching.sys, "executable", "/venv/bin/python")
    monkeypatch.setattr(launching.shutil, "which", lambda name: f"/venv/bin/{name}")
    assert launching.command(["--max_steps", "5"]) == expected
    monkeypatch.setattr(launching.shutil, "which", lambda name: None)  # the environment is not active
    assert launching.command(["--max_steps", "5"]) == f"/venv/bin/{expected}"


def test_flags_are_taken_out_with_their_values():
    argv = ["--seed", "1", "--resume-from-checkpoint", "x", "--reward_funcs", "a:b", "c:d", "--overwrite"]
    assert launching.without_flags(argv, "resume_from_checkpoint", "overwrite") == argv[:2] + argv[4:7]


def test_processes_that_were_asked_for_and_not_started_are_missed(monkeypatch, capsys):
    parent = "python accelerate launch --cpu --num_processes 2 math.py"
    monkeypatch.setattr(launching.psutil.Process, "cmdline", lambda self: parent.split())
    monkeypatch.setattr(launching.sys, "argv", ["math.py"])
    launching.warn_of_missing_processes()
    assert "--num_processes 2 was asked for, and accelerate started 1" in capsys.readouterr().out
    monkeypatch.setenv("WORLD_SIZE", "2")
    launching.warn_of_missing_processes()
    assert capsys.readouterr().out == ""
