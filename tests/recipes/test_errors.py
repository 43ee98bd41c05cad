"""The boundary between a recipe and its user, and what is refused before a trainer is built."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel, T5Config, T5ForConditionalGeneration

from recipes import math as recipe
from recipes import tool_math
from recipes.common import checks, errors
from recipes.common.errors import InputError, Stopped, constructing, launch, resuming
from tests.helpers import tiny
from tests.recipes.conftest import question_and_answer
from trl_otb.imports import import_object


ROOT = Path(__file__).parents[2]

# The boundary


def ends(error, capsys, *flags):
    def main(argv):
        raise error

    with pytest.raises(SystemExit) as stop:
        launch("math.py", main, list(flags))
    return stop.value.code, capsys.readouterr().err


def test_an_input_error_is_one_line(capsys):
    assert ends(InputError("this is wrong:\n  mend it"), capsys) == (2, "math.py: error: this is wrong: mend it\n")


def test_a_bug_can_be_found(capsys):
    code, said = ends(KeyError("bug"), capsys)
    assert code == 1 and said.startswith("math.py: error: KeyError: 'bug' (traceback: ") and said.count("\n") == 1
    kept = Path(said.split("traceback: ")[1].split(",")[0])
    assert "raise error" in kept.read_text()
    kept.unlink()


def test_traceback_prints_it(capsys):
    _, said = ends(InputError("wrong"), capsys, "--traceback")
    assert said.startswith("Traceback") and said.endswith("math.py: error: wrong\n")


def test_a_full_disk(capsys):
    error = OSError(errno.ENOSPC, "No space left on device", "/runs/model.safetensors")
    code, said = ends(error, capsys)
    assert code == 1 and "No space left on device (/runs/model.safetensors): free some space" in said


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"),  # of torch.save
        ValueError("Error while serializing: I/O error: No space left on device (os error 28)"),  # of safetensors
    ],
)
def test_a_full_disk_as_others_say_it(error, capsys):
    code, said = ends(error, capsys)
    assert code == 1 and "No space left on device: free some, then resume with --resume_from_checkpoint" in said


def test_nobody_else_ends_a_run_as_if_it_were_good(capsys):
    code, said = ends(SystemExit(0), capsys)
    assert code == 1 and said.startswith("math.py: error: SystemExit: 0 (traceback: ")


def test_help_is_a_good_end():
    def main(argv):
        raise errors.HelpShown(0)

    launch("math.py", main, [])


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.usefixtures("heard")
def test_every_stop_ends_as_ctrl_c_does(signum, capsys):
    with pytest.raises(SystemExit) as stop:
        launch("math.py", lambda argv: os.kill(os.getpid(), signum), [])
    assert stop.value.code == 130 and "math.py: stopped." in capsys.readouterr().err


def test_nohup_stays(monkeypatch):
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    launch("math.py", lambda argv: os.kill(os.getpid(), signal.SIGHUP), [])
    assert signal.signal(signal.SIGHUP, previous) is signal.SIG_IGN


@pytest.mark.slow
def test_a_terminal_that_knows_no_umlauts(tmp_path):
    program = "from recipes.common.errors import launch; launch('math.py', lambda argv: print('50 % ± 3 größer'), [])"
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = subprocess.run([sys.executable, "-c", program], env=ascii_only, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "50 % ? 3 gr??er\n")


@pytest.mark.parametrize(
    ("stop", "message"),
    [(KeyboardInterrupt(), "stopped. Nothing was trained."), (Stopped("It was late."), "stopped. It was late.")],
)
def test_ctrl_c_is_one_line(stop, message, capsys):
    code, said = ends(stop, capsys)
    assert code == 130 and said.strip() == f"math.py: {message}"


def test_only_one_process_speaks(capsys, monkeypatch):
    """The others wait until the launcher ends them, and speak only if it does not."""
    waited = []
    monkeypatch.setattr(errors.time, "sleep", waited.append)
    monkeypatch.setenv("RANK", "1")
    ends(InputError("wrong"), capsys)
    assert waited == [5]
    assert ends(KeyboardInterrupt(), capsys) == (130, "")


def test_errors_of_a_trainers_construction():
    def from_pretrained():
        raise RuntimeError("size mismatch")

    with pytest.raises(InputError, match="'M': the model cannot be loaded: RuntimeError: size mismatch"):
        with constructing("M"):
            from_pretrained()
    with pytest.raises(InputError, match=r"^no such loss$"):
        with constructing("M"):
            raise ValueError("no such loss")
    with pytest.raises(ZeroDivisionError):
        with constructing("M"):
            1 / 0  # noqa: B018


def test_errors_of_a_resumed_training():
    def _load_optimizer_and_scheduler():
        raise RuntimeError("unexpected EOF")

    with pytest.raises(
        InputError, match="C is damaged; resume from an earlier checkpoint: RuntimeError: unexpected EOF"
    ):
        with resuming("C"):
            _load_optimizer_and_scheduler()
    with pytest.raises(RuntimeError, match="a reward"):
        with resuming("C"):
            raise RuntimeError("a reward")


# What is refused before a trainer is built


@pytest.fixture
def no_trainer(monkeypatch):
    for module in (recipe, tool_math):
        monkeypatch.setattr(module, "OTBGRPOTrainer", lambda **kwargs: pytest.fail("a trainer was constructed"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset_name", "absent.csv"], "absent.csv does not exist"),
        (["--dataset_options", "{terms}"], "`dataset_options` is '{terms}': it is not JSON"),
        (["--dataset_name", "reasoning_gym:gsm_symbolic"], "reads only the characters 0123456789"),
        (["--instruction", "Please."], 'reads only the characters .*holds "P".*leave --instruction empty'),
        (["--model_name_or_path", "./absent"], "'./absent': there is no such folder"),
        (["--model_name_or_path", "absent"], "`model_name_or_path` is 'absent': its tokenizer cannot be loaded"),
        (["--model_name_or_path", "recipes.toy:products"], "module 'recipes.toy' has no attribute 'products'"),
        (
            ["--model_name_or_path", "nowhere:model"],
            "cannot be imported: ModuleNotFoundError: No module",
        ),
        (["--model_name_or_path", "os:getpid"], "it returned .*, which is not a folder"),
        (["--model_name_or_path", "os:getenv"], "it fails with TypeError"),
        (["--reward_funcs", "reward"], "`reward_funcs` is 'reward': it must read module:function"),
        (["--reward_funcs", "math:pi"], "which is a float: it must be a function"),
        (["--max_completion_length", "300"], "longest prompt has .* tokens .*more than the model's 256 positions"),
        (["--num_train_problems", "5", "--per_device_train_batch_size", "64"], "5 problems to train on.* needs 8"),
    ],
)
def test_wrong_input_is_named_before_a_model_is_loaded(run, no_trainer, flags, message):
    with pytest.raises(InputError, match=message):
        run(*flags)


def test_few_problems_leave_an_earlier_model_alone(run, no_trainer, data_file, tmp_path):
    """They used to train nothing, replace the model and end in a crash of the picture."""
    rows = [{"question": f"{i} + {i} =", "answer": str(2 * i)} for i in range(3)]
    with pytest.raises(InputError, match="there are 2 problems to train on, and a generation batch of 32"):
        run("--dataset_name", data_file(rows), "--per_device_train_batch_size", "32")
    assert [file.name for file in (tmp_path / "run").iterdir()] == [".lock"]


@pytest.mark.parametrize("missing", ["tokenizer", "config.json", "weights"])
def test_incomplete_model_folder(run, no_trainer, tmp_path, missing):
    folder = tmp_path / "model"
    tiny.save_model(folder)
    for file in folder.iterdir():
        if file.name.startswith(missing) or (missing == "weights" and file.suffix == ".safetensors"):
            file.unlink()
    with pytest.raises(InputError, match=f"has no {missing}"):
        run("--model_name_or_path", str(folder))


def truncate(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])


def rename_model_type(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "qwen99"}))


def shrink_vocabulary(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))


def save_bert(folder):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertModel(BertConfig(vocab_size=300, **sizes)).save_pretrained(folder)


def save_t5(folder):
    config = T5Config(vocab_size=300, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=1)
    T5ForConditionalGeneration(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (truncate, "model.safetensors is damaged"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "its tokenizer cannot be loaded"),
        (rename_model_type, "cannot be loaded: .*qwen99"),
        (shrink_vocabulary, "tokenizer has token ids up to .* and the model only 100 embeddings"),
        (save_bert, "its architecture is BertModel, and GRPO needs a decoder"),
        (save_t5, "its architecture is T5ForConditionalGeneration, and GRPO needs a decoder"),
    ],
    ids=["truncated", "tokenizer", "model type", "vocabulary", "encoder", "encoder-decoder"],
)
def test_models_that_cannot_be_used(run, no_trainer, tmp_path, spoil, message):
    folder = tmp_path / "model"
    tiny.save_model(folder)
    spoil(folder)
    with pytest.raises(InputError, match=message):
        run("--model_name_or_path", str(folder))


def test_weights_that_do_not_fit_are_found_when_they_are_loaded(run, tmp_path):
    folder = tmp_path / "model"
    tiny.save_model(folder)
    torch.save({"model.embed_tokens.weight": torch.zeros(3)}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="the model cannot be loaded"):
        run("--model_name_or_path", str(folder))


def test_a_chat_template_without_tools(run, no_trainer, short_policy):
    with pytest.raises(InputError, match="its chat template does not support tools"):
        run("--max_operations", "1", main=tool_math.main)


def test_a_tracker_that_is_not_installed(run, no_trainer, monkeypatch):
    with pytest.raises(InputError, match="`report_to` is 'comet_ml', which is not installed: pip install comet_ml"):
        run("--report_to", "comet_ml")
    assert checks._check_trackers("none") is None


# As a program


@pytest.mark.slow
def test_a_wrong_flag_ends_without_a_traceback_from_any_folder(tmp_path):
    command = [sys.executable, tool_math.__file__, "--baselin", "otb"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "tool_math.py: error: there is no flag --baselin. Did you mean --baseline?\n"


def test_a_question_of_a_file_that_the_toy_cannot_read(run, no_trainer, data_file):
    with pytest.raises(InputError, match=r"holds .*Choose a model with --model_name_or_path"):
        run("--dataset_name", data_file(question_and_answer(40)))


def test_a_module_that_ends_the_program_is_named(tmp_path, monkeypatch):
    (tmp_path / "leaves_at_once.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="`reward_funcs` is 'leaves_at_once:reward', .* SystemExit: 0"):
        import_object("leaves_at_once:reward", "reward_funcs")
