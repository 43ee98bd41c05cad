"""
ms-swift's own command line, with and without the plugin, on a tiny model. In an environment with ms-swift and msgspec:

    PYTHONPATH=. python -m tests.hosts.run_swift

Each run prints its gradient norms. What is checked in a run, in `Checked`, fails it: energies are those of a softmax of
the policy's own logits, and under `group_mean` advantages are ms-swift's. Its norms are those without the plugin.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path


BASELINE = "TRL_OTB_BASELINE"
EVALUATED = "--split_dataset_ratio 0.2 --eval_strategy steps --eval_steps 2 --per_device_eval_batch_size 8"
RUNS = {  # by name: the baseline, processes, more options
    "alone": (None, 1, ""),
    "group_mean": ("group_mean", 1, ""),
    "group_mean, --scale_rewards group": ("group_mean", 1, "--scale_rewards group"),
    "otb": ("otb", 1, ""),
    "otb, reference model": ("otb", 1, "--beta 0.1 --temperature 0.7"),
    "ogb_pooled": ("ogb_pooled", 1, ""),
    "value": ("value", 1, ""),
    "value, LoRA, two iterations": ("value", 1, "--tuner_type lora --lora_dropout 0 --num_iterations 2"),
    "alone, two processes": (None, 2, "--per_device_train_batch_size 4"),
    "group_mean, two processes": ("group_mean", 2, "--per_device_train_batch_size 4"),
    "value, two processes": ("value", 2, "--per_device_train_batch_size 4"),
    "otb, a group on two processes": ("otb", 2, "--per_device_train_batch_size 2 --gradient_accumulation_steps 1"),
    **{f"{baseline or 'alone'}, evaluated": (baseline, 1, EVALUATED) for baseline in (None, "group_mean", "value")},
}
OPTIONS = """
    --rlhf_type grpo --model model --model_type qwen3 --template qwen3 --torch_dtype float32 --tuner_type full
    --dataset data.jsonl --reward_funcs even --num_generations 4 --max_completion_length 8 --max_steps 3
    --per_device_train_batch_size 8 --gradient_accumulation_steps 2 --learning_rate 1e-2 --lr_scheduler_type constant
    --warmup_ratio 0 --logging_steps 1 --save_strategy no --output_dir out --use_vllm false --report_to none
    --use_cpu true --bf16 false --fp16 false --gradient_checkpointing false --split_dataset_ratio 0
    --dataloader_num_workers 0 --dataset_num_proc 1 --scale_rewards none --attn_impl sdpa
""".split()


def save_model(folder: Path) -> None:
    """A model that samples no empty completion, at which ms-swift itself fails."""
    import torch
    from transformers import Qwen3ForCausalLM

    from tests.helpers import tiny

    torch.manual_seed(0)
    tokenizer, model = tiny.tokenizer(None), Qwen3ForCausalLM(tiny.config())
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_rows(path: Path, rows: list) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def shares_of_even(texts: list[str]) -> list[float]:
    """The reward: the share of a text's characters whose code is even."""
    return [sum(ord(c) % 2 == 0 for c in text) / max(1, len(text)) for text in texts]


def run(folder: Path, baseline: str | None, processes: int, more: str) -> str:
    """The norms of a run, as text; its log is printed if it fails."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"] if processes == 2 else []
    command = [sys.executable, *launcher, "-m", "swift.cli.rlhf", *OPTIONS, "--external_plugins", __file__]
    env = os.environ | {"USE_HF": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"PYTHONPATH": str(Path(__file__).parents[2]), BASELINE: baseline or ""}
    done = subprocess.run([*command, *more.split()], cwd=folder, env=env, text=True, capture_output=True)
    log = done.stdout + done.stderr
    norms = re.findall(r"'grad_norm': '?([\d.e-]+)", log)
    if done.returncode != 0 or len(norms) != 3:
        sys.exit(f"{log[-6000:]}\nbaseline {baseline}, {processes} processes, {more}: rc {done.returncode}")
    return " ".join(norms)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name) / "model")
        rows = [{"messages": [{"role": "user", "content": f"{i}+{i}="}]} for i in range(64)]
        save_rows(Path(name) / "data.jsonl", rows)
        norms = {}
        for run_name, settings in RUNS.items():
            norms[run_name] = run(Path(name), *settings)
            print(f"{run_name}: {norms[run_name]}", flush=True)
    assert norms["group_mean"] == norms["alone"]
    assert norms["group_mean, two processes"] == norms["alone, two processes"]
    assert norms["group_mean, evaluated"] == norms["alone, evaluated"]


def plug_in() -> None:
    """What `--external_plugins` loads: a reward and, if one is named, a baseline whose batches are checked."""
    import torch
    from swift.rewards import ORM, orms

    class Even(ORM):
        def __call__(self, completions, **kwargs):
            return shares_of_even(completions)

    orms["even"] = Even
    if not os.environ[BASELINE]:
        return
    import trl_otb.swift

    class Checked(trl_otb.swift.OTBTrainer):
        def _postprocess_batch(self, samples, batch_encoded_inputs):
            super()._postprocess_batch(samples, batch_encoded_inputs)
            known = {id(of.logps): of for of in self._otb_values}
            swifts = torch.stack([sample.advantages for sample in samples])
            for batch in batch_encoded_inputs:
                of = batch["grpo_batch"]
                mask = of.completion_mask.bool()
                keys = {"input_ids", "attention_mask", "position_ids"}
                inputs = {key: value for key, value in batch["model_inputs"].items() if key in keys}
                with torch.no_grad():
                    logits = self.model(**inputs).logits[:, -mask.size(1) - 1 : -1].double()
                probs = (logits / self.temperature).softmax(-1)
                chosen = torch.nn.functional.one_hot(inputs["input_ids"][:, -mask.size(1) :], probs.size(-1))
                energy = known[id(of.old_per_token_logps)].energy
                assert ((chosen - probs).square().sum(-1) - energy)[mask].abs().max() < 1e-5
                theirs, swifts = swifts[: len(mask)], swifts[len(mask) :]
                if self.options.baseline.name == "group_mean":
                    assert torch.equal(of.advantages[mask], theirs.unsqueeze(1).expand_as(of.advantages)[mask])

    trl_otb.swift.OTBTrainer = trl_otb.swift.Checked = Checked
    trl_otb.swift.use(os.environ[BASELINE])


if __name__ == "__main__":
    main()
elif __name__.startswith("_swift_external_"):
    plug_in()
