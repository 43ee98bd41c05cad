"""
Axolotl's own command line, with and without the plugin, on a tiny model. In an environment with Axolotl:

    PYTHONPATH=. python -m tests.hosts.run_axolotl

Prints the gradient norms of each run. Checked: under `group_mean` they are Axolotl's own, on one process and on two;
and a run that was stopped and resumed has those of one that was not.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from tests.hosts.run_swift import save_model, save_rows


REPOSITORY = Path(__file__).parents[2]
OURS, ON_CPU = "trl_otb.axolotl.Plugin", "axolotl_parts.OnCPU"
VALUE = {"baseline": "value", "scale_rewards": "running"}
LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True, "lora_dropout": 0.0}
SAVED = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "output_dir": "saved"}
TWO = {"micro_batch_size": 4, "ddp_backend": "gloo"}
RUNS = {  # by name: what stands under `otb`, which is None for Axolotl alone; plugins; other options
    "alone": (None, [], {}),
    "group_mean": ({"baseline": "group_mean", "scale_rewards": "none"}, [OURS], {}),
    "value": (VALUE, [OURS], SAVED),
    "value, resumed": (VALUE, [OURS], SAVED | {"resume_from_checkpoint": "saved/checkpoint-2"}),
    "value, LoRA": (VALUE, [OURS], LORA),
    "value, progress": (VALUE | {"progress_funcs": "rewards"}, [OURS], {}),
    "alone, two processes": (None, [ON_CPU], TWO),
    "group_mean, two processes": ({"baseline": "group_mean", "scale_rewards": "none"}, [ON_CPU, OURS], TWO),
    "value, two processes": (VALUE, [OURS, ON_CPU], TWO),
}
OPTIONS = {"micro_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 3, "learning_rate": 1e-2, "seed": 1}
OPTIONS |= {"lr_scheduler": "constant", "bf16": False, "fp16": False, "gradient_checkpointing": False}
OPTIONS |= {"sequence_len": 128, "output_dir": "out", "save_strategy": "no", "base_model": "model"}


def run(folder: Path, otb: dict | None, plugins: list[str], more: dict) -> list[str]:
    """The norms of a run of recipes/axolotl/run.yaml with these options in the place of its own."""
    options = yaml.safe_load((REPOSITORY / "recipes/axolotl/run.yaml").read_text())
    kept = {name: of for name, of in options.items() if not name.startswith(("adapter", "lora", "otb", "plugins"))}
    trl = {"num_generations": 4, "max_completion_length": 8, "reward_funcs": ["axolotl_parts.even"]}
    rows = {"path": "data.jsonl", "ds_type": "json", "split": "train", "type": "axolotl_parts.problems"}
    kept |= OPTIONS | {"datasets": [rows], "trl": trl if otb else trl | {"scale_rewards": False}} | more
    kept |= ({"plugins": plugins} if plugins else {}) | ({"otb": otb} if otb else {})
    (folder / "run.yaml").write_text(yaml.safe_dump(kept))
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--local-ranks-filter=0"]
        if ON_CPU in plugins
        else []
    )
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "AXOLOTL_DO_NOT_TRACK": "1"}
    command = [sys.executable, "-W", "ignore", *launcher, "-m", "axolotl.cli.train", "run.yaml"]
    env = os.environ | quiet | {"PYTHONPATH": f"{REPOSITORY}:{Path(__file__).parent}"}
    done = subprocess.run(command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    norms = re.findall(r"'grad_norm': '?([\d.e-]+)", done.stdout)
    if done.returncode != 0 or not norms or bool(otb) != ("Training with baseline" in done.stdout):
        sys.exit(f"{done.stdout[-6000:]}\n{otb}, {plugins}, {more}: rc {done.returncode}")
    return norms


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name) / "model")
        save_rows(Path(name) / "data.jsonl", [{"question": f"{i}+{i}=", "answer": str(2 * i)} for i in range(64)])
        norms = {}
        for run_name, settings in RUNS.items():
            norms[run_name] = run(Path(name), *settings)
            print(f"{run_name}: {' '.join(norms[run_name])}", flush=True)
    assert norms["group_mean"] == norms["alone"] and len(norms["alone"]) == 3
    assert norms["group_mean, two processes"] == norms["alone, two processes"]
    assert norms["value, resumed"] == norms["value"][2:]


if __name__ == "__main__":
    main()
